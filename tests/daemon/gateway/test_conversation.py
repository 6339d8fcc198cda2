"""A conversation becomes the question that is meant, and an answer what chat programs show."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from daemon.gateway.conversation import address_of, cited_at, is_chore, pieces, question_of
from daemon.gateway.openai_api import Completion
from proto.control_pb2 import AskReply, Citation
from proto.notes import notes_of
from tests.proto.test_notes import with_every_note

WINCH = "who greases the anchor winch of the harbour?"


# ---- what is asked -----------------------------------------------------------------


def test_a_question_that_stands_alone_is_asked_as_it_is() -> None:
    asked = "where does the harbour keep its spare hawsers?"
    assert question_of([WINCH, asked]) == asked
    assert question_of([f"  {asked}\n"]) == asked


@pytest.mark.parametrize(
    "goes_on",
    [
        "And in winter?",
        "it is worn, what now is to be done?",
        "Und wer bezahlt dafür am Ende?",
        "at night?",
        "why?",
    ],
)
def test_one_that_goes_on_has_the_one_before_in_front(goes_on: str) -> None:
    assert question_of(["about pumps", WINCH, goes_on]) == f"{WINCH} {goes_on}"


def test_what_is_too_long_for_fedd_is_asked_alone() -> None:
    assert question_of(["x" * 20_000, "and now?"]) == "and now?"


def test_a_word_that_only_begins_like_and_is_no_and() -> None:
    asked = "android phones are charged where?"
    assert question_of([WINCH, asked]) == asked


@given(st.lists(st.text(max_size=200), min_size=1, max_size=4))
def test_what_was_said_last_is_always_asked(said: list[str]) -> None:
    assert question_of(said).endswith(said[-1].strip())


def test_a_chat_program_s_own_errands_are_known() -> None:
    assert is_chore(["hello", "### Task:\nGenerate a concise, 3-5 word title …"])
    assert not is_chore(["### Task:\nGenerate 1-3 broad tags", WINCH])
    assert not is_chore(["what does ### Task: mean?"])


# ---- where it is cited -------------------------------------------------------------


def reply(answer: str, *texts: str) -> AskReply:
    cited = [
        Citation(number=n, document_id=f"d{n}", title=f"Of {n}", text=text, passage_id=f"p{n}")
        for n, text in enumerate(texts, 1)
    ]
    return AskReply(answer=answer, citations=cited)


def test_each_mark_says_where_it_stands_and_what_it_cites() -> None:
    answered = reply("Grease it. [1] Then rest. [2]", "Grease it.", "Then rest.")
    told = [one["url_citation"] for one in cited_at(answered)]
    marks = [answered.answer[one["start_index"] : one["end_index"]] for one in told]
    assert marks == ["[1]", "[2]"]
    assert [one["title"] for one in told] == ["Of 1", "Of 2"]


def test_offsets_count_characters_and_not_bytes() -> None:
    answered = reply("Ä 𝔘 ñ. [1]", "Ä 𝔘 ñ.")
    (told,) = cited_at(answered)
    assert told["url_citation"]["start_index"] == 7


def test_a_bracket_in_a_document_is_no_citation() -> None:
    """A document that says "[2]" would else seem to be vouched for by another one."""
    quoted = "As shown in [2], it leaks."
    answered = reply(f"{quoted} [1] It does. [2]", quoted, "It does.")
    starts = [one["url_citation"]["start_index"] for one in cited_at(answered)]
    assert starts == [27, 40]
    without = reply(answered.answer, "", "")  # nobody knows what is quoted
    assert len(cited_at(without)) == 3


def test_a_mark_without_a_citation_is_text() -> None:
    assert cited_at(reply("See [7].", "something")) == []


def test_the_address_of_a_document_takes_any_id() -> None:
    one = Citation(document_id="a b/ü?#%.pdf", page=4, passage_id="x y")
    assert address_of(one) == "hanse:/documents/a%20b/%C3%BC%3F%23%25.pdf?page=4&passage=x%20y"


@given(st.text(alphabet="ab []12\n.", max_size=60))
def test_pieces_of_a_stream_are_the_answer(answer: str) -> None:
    assert "".join(pieces(answer)) == answer
    assert pieces(answer)


def test_two_sentences_of_one_passage_are_two_sources() -> None:
    """Open WebUI counts what shares an address or a title once, and numbers what is left."""
    told = AskReply(
        answer="It floats. [1] It sinks. [2] It rusts. [3] Again. [2]",
        citations=[
            Citation(number=n, document_id="d", title="Of boats", text=text, passage_id=passage)
            for n, text, passage in (
                (1, "It floats.", "p"),
                (2, "It sinks.", "p"),
                (3, "It rusts.", "q"),
            )
        ],
    )
    cited = [one["url_citation"] for one in cited_at(told)]
    assert [one["title"] for one in cited] == [
        *("Of boats", "Of boats [2]", "Of boats [3]", "Of boats [2]"),
    ]
    assert [one["url"].partition("passage=")[2] for one in cited] == [
        *("p", "p&citation=2", "q", "p&citation=2"),
    ]


def test_where_people_reach_the_page_a_citation_opens_there() -> None:
    told = AskReply(
        answer="Hemp rots. [1] It floats. [2]",
        citations=[
            Citation(number=n, document_id="a b/ü.pdf", passage_id="x y", page=4, text=text)
            for n, text in ((1, "Hemp rots."), (2, "It floats."))
        ],
    )
    first, second = (one["url_citation"]["url"] for one in cited_at(told, "https://ask.example"))
    there = "https://ask.example/source?document=a+b%2F%C3%BC.pdf&passage=x+y"
    assert first == f"{there}#here"
    assert second == f"{there}&citation=2#here", "another one, for programs that count by address"


# ---- how it came about -------------------------------------------------------------


def streamed(reply: AskReply, already: str) -> str:
    """The text that a chat program has of a stream of which so much came piece by piece."""
    completion = Completion("why?")
    events = b"".join([completion.piece(already), *completion.rest(reply, usage=False)])
    told = [
        json.loads(one[6:]) for one in events.decode().split("\n\n") if one.startswith("data: {")
    ]
    return "".join(one["choices"][0]["delta"].get("content", "") for one in told)


def test_a_chat_program_shows_below_an_answer_how_it_came_about() -> None:
    told = reply("Grease it. [1]", "Grease it.")
    told.MergeFrom(with_every_note())
    whole = Completion("why?").whole(told)["choices"][0]["message"]
    first, *notes = whole["content"].split("\n\n")
    assert first == told.answer
    plain = [re.sub(r"\\(.)", r"\1", one) for one in notes]
    assert plain == [f"*{note}*" for note in notes_of(told)]
    assert streamed(told, "Grease it.") == whole["content"]
    (annotation,) = whole["annotations"]
    assert annotation["url_citation"]["end_index"] == len(told.answer)


def test_an_answer_as_one_would_think_has_nothing_below_it() -> None:
    told = reply("Grease it. [1]", "Grease it.")
    assert Completion("why?").whole(told)["choices"][0]["message"]["content"] == told.answer
    assert streamed(told, "Grease") == told.answer


def test_what_a_model_s_server_says_is_no_markdown() -> None:
    """An image would be fetched from whoever wrote it, with what its address carries."""
    told = AskReply(answer="It floats.", instead="![x](http://a/)\n\n# *Now* <img src=y> `z` [1]")
    content = Completion("why?").whole(told)["choices"][0]["message"]["content"]
    said = content.partition("did not answer: ")[2]
    assert said == r"!\[x\](http://a/) # \*Now\* \<img src=y\> \`z\` \[1\]*"
