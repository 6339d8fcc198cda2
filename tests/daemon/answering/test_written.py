"""Where the model is not there, fails, is late or lies, the extractive answer stands in."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from daemon.answering import citations, openai_server
from daemon.answering.abstention import NOT_ANSWERED
from daemon.answering.answering import QuestionRefusedError
from daemon.answering.generator import GeneratedAnswer
from daemon.answering.options import AnsweringOptions
from daemon.answering.written import WrittenGenerator
from daemon.jobs import answering
from daemon.jobs import prompts as prompt_jobs
from daemon.learning.language_model import LanguageModelError
from tests.daemon.answering.conftest import Site
from tests.daemon.answering.test_answering import ranked
from tests.daemon.answering.test_planted import by_words, generator
from tests.daemon.pairs.test_pair_writers import completion, serving
from tests.daemon.process.model_server import BREAK, writing

QUESTION = "Which oil burns in every lamp?"
TEXTS = ("Whale oil burns in every lamp.", "Hemp rope is tarred twice.")
Reply = Callable[[dict[str, object]], tuple[int, bytes]]


def asked(url: str, question: str = QUESTION, **options: Any) -> GeneratedAnswer:
    return generator(f"{url}#m", **options).generate(question, ranked(*TEXTS))


def extracted(given: GeneratedAnswer, cause: str) -> None:
    assert given.text == "Whale oil burns in every lamp. [1]"
    assert re.search(cause, given.instead)


@pytest.mark.parametrize(
    ("reply", "cause", "failed"),
    [
        ((500, b"out of memory"), "answered 500: see its own log", True),
        ((302, b""), "answered 302", True),
        ((200, b"not json"), "no chat completion", True),
        (completion("Kerosene burns in every lamp [1]."), "nothing of what .* is supported", False),
        (completion(""), "nothing of what the language model wrote", False),
        (completion(None), "nothing of what the language model wrote", False),
    ],
)
def test_what_the_model_can_not_answer_is_extracted_and_said(
    reply: tuple[int, bytes], cause: str, failed: bool
) -> None:
    with serving(lambda _: reply) as (url, _):
        given = asked(url)
    extracted(given, cause)
    assert given.failed is failed


def test_a_check_that_fails_at_what_was_written_costs_no_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise ValueError("a mark without a number")

    monkeypatch.setattr(citations, "statements", fails)
    with serving(lambda _: completion("Whale oil burns in every lamp [1].")) as (url, _):
        extracted(asked(url), "a mark without a number")


def test_a_model_that_says_that_the_passages_do_not_answer_is_believed() -> None:
    with serving(lambda _: completion("Not answered.")) as (url, _):
        given = asked(url)
    assert (given.text, given.citations, given.instead) == (NOT_ANSWERED, (), "")


def test_a_server_that_is_gone_or_late_costs_no_answer() -> None:
    released = threading.Event()

    def late(_: object) -> tuple[int, bytes]:
        released.wait(30)
        return completion("late")

    with serving(late) as (url, _):
        extracted(asked(url, answer_within_s=0.3), r"did not answer within 0\.\d+ s")
        released.set()
    extracted(asked(url), "did not answer .*: start it, or give its right port")


def test_without_passages_no_model_is_asked() -> None:
    with serving(lambda _: completion("x")) as (url, heard):
        given = generator(f"{url}#m").generate(QUESTION, [])
    assert (given.text, given.instead, heard) == (NOT_ANSWERED, "", [])


def test_the_same_question_is_asked_with_the_same_seed() -> None:
    with serving(lambda _: completion("Whale oil burns in every lamp [1].")) as (url, heard):
        answers = [asked(url, one) for one in (QUESTION, QUESTION, f"{QUESTION} Truly?")]
    seeds = [body["seed"] for body in heard]
    assert seeds[0] == seeds[1] != seeds[2]
    assert answers[0] == answers[1]
    assert (heard[0]["temperature"], heard[0]["top_p"], heard[0]["max_tokens"]) == (0.1, 0.9, 512)


def test_the_kind_of_question_chooses_the_prompt() -> None:
    with serving(lambda _: completion("Whale oil burns in every lamp [1].")) as (url, heard):
        asked(url, prompt="metric")
        asked(url, prompt="medical")
    first, second = (str(body["messages"]) for body in heard)
    assert "the figure that the question below asks for" in first
    assert "medical" in second


def test_a_small_budget_leaves_out_the_last_passages() -> None:
    with serving(lambda _: completion("Hemp rope is tarred twice [2].")) as (url, heard):
        whole = asked(url)
        message: str = heard[0]["messages"][0]["content"]  # type: ignore[index]
        part = asked(url, prompt_tokens=len(message) // 3 - 5)
    assert whole.citations[0].document_id == "d2"
    extracted(part, "nothing of what .* is supported")  # it cites what it was not given


def test_a_statement_that_is_kept_is_marked_in_text_and_citation() -> None:
    said = "Whale oil burns in every lamp [1]. Kerosene burns in lamps [2]."
    with serving(lambda _: completion(said)) as (url, _):
        given = asked(url, unsupported="mark")
    assert given.text == (
        "Whale oil burns in every lamp. [1] Kerosene burns in lamps. [2] (not supported)"
    )
    assert [one.unsupported for one in given.citations] == [False, True]
    assert given.dropped == 0


@pytest.mark.parametrize(
    ("said", "version"),
    [
        ("Whale oil burns in every lamp [1].", b"\x02"),
        ("Kerosene burns in every lamp [1].", b""),
        ("", b""),
    ],
    ids=["supported", "not supported", "nothing"],
)
def test_an_answer_names_the_version_that_wrote_it(said: str, version: bytes) -> None:
    """What stands in its place was written by none."""
    with serving(lambda _: completion(said)) as (url, _):
        options = AnsweringOptions(generator="openai", language_model=f"{url}#m")
        trained = WrittenGenerator(
            lambda: replace(openai_server.model(options), version=b"\x02"),
            by_words("extractive", options),
            options,
        )
        given = trained.generate(QUESTION, ranked(*TEXTS))
    assert (given.generator_digest, bool(given.instead)) == (version, not version)


# ---- piece by piece -------------------------------------------------------------------------

OIL, ROPE, LIE = (
    "Whale oil burns in every lamp [1]. ",
    "Hemp rope is tarred twice [2]. ",
    "Kerosene burns in every lamp [1]. ",
)


def told(*pieces: str, **options: Any) -> tuple[list[str], GeneratedAnswer]:
    """What is heard of an answer whose model writes these pieces, and the answer."""
    heard: list[str] = []
    with writing(lambda _: pieces) as server:
        model = generator(f"{server.url}#m", **options)
        return heard, model.generate(QUESTION, ranked(*TEXTS), told=heard.append)


def test_each_statement_is_heard_once_it_was_checked() -> None:
    heard, given = told("Whale oil burns ", "in every lamp [1]. ", LIE, "Hemp rope ", *ROPE[10:])
    first, second = "Whale oil burns in every lamp. [1]", "Hemp rope is tarred twice. [2]"
    assert heard == [first]
    assert (given.text, given.dropped, given.instead) == (f"{first} {second}", 1, "")
    heard, given = told(LIE, OIL, ROPE, "Whale oil burns.")
    assert heard == [first, f"{first} {second}"]
    assert given.text == f"{first} {second}"


def test_nothing_is_heard_of_a_model_for_which_another_answer_stands_in() -> None:
    for pieces in ((LIE, LIE, "x"), ("Not answered.",), (LIE, BREAK), (LIE, "<think>", OIL, ROPE)):
        heard, given = told(*pieces)
        assert heard == []
        assert given.text in (NOT_ANSWERED, "Whale oil burns in every lamp. [1]")
    heard, given = told(LIE, LIE, "x", unsupported="mark")
    assert (heard, "nothing of what" in given.instead) == ([], True)


def test_a_model_that_fails_behind_a_statement_leaves_what_was_heard() -> None:
    heard, given = told(OIL, ROPE, "It ", BREAK)
    assert heard[-1:] == [given.text] != []
    assert given.text == "Whale oil burns in every lamp. [1] Hemp rope is tarred twice. [2]"
    assert "broke off" in given.cut_short
    assert (given.instead, given.failed) == ("", True), "nothing stands in"


# ---- the answering worker's jobs ------------------------------------------------------------


def test_a_model_that_can_not_be_loaded_is_refused_at_the_start(tmp_path: Path) -> None:
    options = AnsweringOptions(generator="transformers", language_model=str(tmp_path))
    with pytest.raises(LanguageModelError, match=r"no \*\.safetensors.*retrieval\.language_model"):
        answering.check(options, "cpu")
    away = AnsweringOptions(generator="openai", language_model="http://10.0.0.1:80/v1#m")
    with pytest.raises(LanguageModelError, match="no server on this machine"):
        answering.check(away, "cpu")
    answering.check(AnsweringOptions(language_model=str(tmp_path)), "cpu")  # it is not asked


@pytest.mark.slow
def test_a_model_lost_after_the_start_leaves_answers_that_are_extracted(site: Site) -> None:
    site.open(generator="transformers", language_model=str(site.folder / "gone"))
    answered = answering.ask(QUESTION, 2)
    assert "Whale oil burns in every lamp. [1]" in answered.text
    assert answered.failed
    assert "gone holds no *.safetensors" in answered.instead


@pytest.mark.slow
def test_a_written_answer_comes_with_all_that_was_found(site: Site) -> None:
    def write(body: dict[str, object]) -> tuple[int, bytes]:
        (number,) = re.findall(r"<passage (\d)> Lamps", str(body["messages"]))
        return completion(f"Every lamp burns whale oil [{number}]. It smells [{number}].")

    with serving(write) as (url, _):
        site.open(generator="openai", language_model=f"{url}#m")
        answered = answering.ask(QUESTION, 3)
    assert answered.text == "Every lamp burns whale oil. [1]"
    assert (answered.instead, answered.dropped, len(answered.passages)) == ("", 1, 3)
    assert answered.citations[0].text == "Whale oil burns in every lamp."


@pytest.mark.slow
def test_a_prompt_is_shown_as_the_model_is_sent_it(site: Site) -> None:
    """With passages of this site alone, of the documents that are named, and with the answer."""

    def write(body: dict[str, object]) -> tuple[int, bytes]:
        (number,) = re.findall(r"<passage (\d)> Lamps", str(body["messages"]))
        return completion(f"Every lamp burns whale oil [{number}].")

    with serving(write) as (url, heard):
        site.open(generator="openai", language_model=f"{url}#m", prompt="auto")
        shown = prompt_jobs.try_prompt("novel", QUESTION, ["lamp"], 3, run=False)
        assert heard == [], "nothing is sent"
        assert shown.answer is None
        assert (shown.found, shown.filled.given) == (1, 1)
        assert "<passage 1> Lamps" in shown.filled.text and "Rope" not in shown.filled.text
        tried = prompt_jobs.try_prompt("novel", QUESTION, [], 3, run=True)
        sent = heard[0]["messages"]
        assert sent == [{"role": "user", "content": tried.filled.text}]
        assert tried.answer is not None
        assert tried.answer.text == "Every lamp burns whale oil. [1]"
        assert tried.answer.prompt == "novel"
        assert answering.ask(QUESTION, 3).prompt == "novel", "as the rule has it: which"
    with pytest.raises(QuestionRefusedError, match="no document here has an id"):
        prompt_jobs.try_prompt("novel", QUESTION, ["nowhere"], 3, run=False)
    with pytest.raises(QuestionRefusedError, match="blank"):
        prompt_jobs.try_prompt("novel", " ", [], 3, run=False)
    site.open()
    extracted = prompt_jobs.try_prompt("metric", QUESTION, [], 3, run=True)
    assert "the figure that the question below asks for" in extracted.filled.text
    assert extracted.answer is not None and not extracted.answer.prompt
