"""fedctl eval --answers as a person and a script see it."""

from __future__ import annotations

import json
import math
import os
import pty
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from daemon.fedctl.commands.evaluation.saved import saved
from daemon.fedctl.terminal.output import CommandError, Exit
from proto import control_pb2 as control
from tests.daemon.fedctl.test_pairs import Said, daemon, lines, said
from tests.support.canned_daemon import CannedDaemon
from tests.support.canned_replies import judging_steps

__all__ = ["daemon", "said"]  # fixtures


def test_figures_on_answers_with_what_was_left_out(said: Said, daemon: CannedDaemon) -> None:
    code, out, err = said("eval", "--answers")
    assert (code, err) == (0, "")
    assert daemon.asked[0].split == "", "the daemon chooses: test, or else valid"
    shown = lines(out)
    assert shown[:4] == [
        "questions      30, of split test",
        "left out       12, whose pairs say no right answer",
        "no answer      7, which count as answered with nothing",
        "generator      extractive",
    ]
    rows = [line.split() for line in shown]
    assert ["answered", "0.750", "0.250–0.875"] in rows
    assert ["wer", "1.500", "1.250–2.000", "less", "is", "better"] in rows
    assert "rouge-1-f" not in out, "it is not among those that are shown unasked"
    assert ["qtype", "[b]cure", "9", "token-f1", "0.500", "0.250–0.875"] in rows
    assert "Without meteor: WordNet is not there." in out
    assert all(len(line) <= 80 for line in out.splitlines())
    assert "which is learned from" in " ".join(
        said("eval", "--answers", "--split", "train")[1].split()
    )


def test_a_script_gets_every_figure_on_answers_or_those_it_names(said: Said) -> None:
    plain = json.loads(said("eval", "--answers", "--json")[1])
    assert (plain["questions"], plain["without_answer"], plain["unanswered"]) == (30, 12, 7)
    names = ["answered", "token-f1", "rouge-1-f", "wer"]
    assert [one["metric"] for one in plain["figures"]] == names
    assert plain["figures"][3] == {
        "metric": "wer", "mean": 1.5, "low": 1.25, "high": 2.0, "lower_is_better": True,
        "questions": 0,
    }  # fmt: skip
    assert plain["missing"] == [{"metric": "meteor", "cause": "WordNet is not there"}]
    plain = json.loads(said("eval", "--answers", "--metric", "rouge-1-f", "--json")[1])
    kept = (plain["figures"], plain["by_label"][0]["figures"])
    assert [[one["metric"] for one in some] for some in kept] == [["rouge-1-f"]] * 2
    assert "rouge-1-f" in said("eval", "--answers", "--metric", "all")[1]


def test_what_answers_have_not_is_refused(said: Said, daemon: CannedDaemon) -> None:
    code, _, err = said("eval", "--answers", "--metric", "mrr@10")
    assert (code, "Use 'all' or some of: answered, token-f1" in err) == (Exit.USAGE, True)
    code, _, err = said("eval", "--answers", "--history")
    assert (code, "are two different questions" in err) == (Exit.USAGE, True)
    code, _, err = said("eval", "--save", "answers.jsonl")
    assert (code, "no answers to save" in err) == (Exit.USAGE, True)
    daemon.judged_answers = None
    code, out, err = said("eval", "--answers")
    assert (code, out) == (Exit.UNREACHABLE, "")


def judged(daemon: CannedDaemon) -> control.EvaluateAnswersReply:
    assert daemon.judged_answers is not None
    return daemon.judged_answers


def test_generators_are_compared_on_the_same_questions(said: Said, daemon: CannedDaemon) -> None:
    first = judged(daemon)
    first.generator = "base"
    copied = control.EvaluateAnswersReply.FromString(first.SerializeToString())
    first.compared.append(copied)
    (other,) = first.compared
    other.generator, other.generator_round = "federated", 4
    other.generator_digest = b"\xab" * 32
    other.over_first.add(metric="token-f1", mean=0.125, low=-0.25, high=0.5)
    other.over_first.add(metric="rouge-1-f", mean=0.5, low=0.25, high=0.75)
    for one in (first, other):
        one.figures.add(metric="ppl-reference", mean=8, low=4, high=16, lower_is_better=True)
    other.over_first.add(
        metric="ppl-reference", mean=0.5, low=0.25, high=0.75, lower_is_better=True
    )
    words = ("eval", "--answers", "--generator", "base", "--generator", "4")
    code, out, err = said(*words)
    assert (code, err) == (0, "")
    assert list(daemon.asked[-1].generators) == ["base", "4"]
    shown = lines(out)
    assert "generator      base model" in shown
    assert "generator      federated, version abababababab of round 4" in shown
    assert "To base model, paired by question:" in shown
    rows = [line.split() for line in shown]
    assert ["token-f1", "+0.125", "-0.250", "to", "+0.500"] in rows
    assert ["ppl-reference", "×0.500", "×0.250", "to", "×0.750", "less", "is", "better"] in rows
    assert all(len(line) <= 80 for line in out.splitlines())
    plain = json.loads(said(*words, "--metric", "rouge-1-f", "--json")[1])
    (one,) = plain["compared"]
    assert (one["generator"], one["generator_digest"]) == ("federated", "ab" * 32)
    assert [each["metric"] for each in one["over_first"]] == ["rouge-1-f"]
    other.partial = "it was given up"
    assert said(*words)[0] == Exit.PARTLY
    first.generator = "federated"
    shown = lines(said("eval", "--answers")[1])
    assert "generator      federated, the base model (no version does better here)" in shown


@pytest.mark.parametrize(
    ("words", "cause"),
    [
        (["--generator", "base"], "there are no answers for --generator to write"),
        (
            ["--answers", "--save", "a.jsonl", "--generator", "base", "--generator", "2"],
            "a file keeps the answers of one generator",
        ),
        (["--answers", "--generator", "bose"], "'bose'; expected base, federated or a round"),
    ],
)
def test_a_generator_goes_with_answers_alone(said: Said, words: list[str], cause: str) -> None:
    code, out, err = said("eval", *words)
    assert (code, out, cause in err) == (Exit.USAGE, "", True)


def test_what_failed_is_told_with_its_cause_and_first_questions(
    said: Said, daemon: CannedDaemon
) -> None:
    reply = judged(daemon)
    reply.pairs, reply.questions = 33, 30
    reply.failed.add(cause="the disk is gone", questions=3, first=["How long [b]? (rope.md)"])
    code, out, _ = said("eval", "--answers")
    assert code == Exit.PARTLY
    text = " ".join(out.split())
    assert "questions 30 of the 33 of split test" in text
    assert "FAILED 3, which no figure is over" in text
    assert "Failed: 3, the disk is gone How long [b]? (rope.md)" in text
    assert "`fedctl eval --answers` asks the rest, until fedd is restarted." in text
    plain = json.loads(said("eval", "--answers", "--json")[1])
    assert plain["failed"] == [
        {"cause": "the disk is gone", "questions": 3, "first": ["How long [b]? (rope.md)"]}
    ]


def test_how_well_is_refused_stands_below_the_figures(said: Said, daemon: CannedDaemon) -> None:
    abstention = judged(daemon).abstention
    abstention.threshold, abstention.fitted_on, abstention.questions = 0.6125, 46, 174
    abstention.split = "test"
    abstention.figures.add(metric="auroc", mean=0.995, low=0.99, high=0.999)
    abstention.figures.add(metric="lost", mean=0.034, low=0, high=0.079, lower_is_better=True)
    code, out, _ = said("eval", "--answers")
    text = " ".join(out.split())
    assert code == 0
    assert "evidence below 0.613, found by 46 validation pairs." in text
    assert "auroc 0.995 0.990–0.999 lost 0.034 0.000–0.079 less is better" in text
    assert "Of 174 questions of split test that this was not found by" in text
    code, out, _ = said("eval", "--abstention")
    assert (code, daemon.asked[-1].only_abstention) == (0, True)
    assert ("auroc" in out, "token-f1" in out) == (True, False)
    abstention.missing, abstention.threshold = "all 30 pairs found it", math.nan
    code, out, err = said("eval", "--abstention")
    assert (code, "can't be judged what is refused: all 30 pairs found it" in err) == (1, True)
    text = " ".join(said("eval", "--answers")[1].split())
    assert "No question is refused" in text
    assert "How well, is not known: all 30 pairs found it." in text


def test_answers_are_saved_for_their_owner_alone(
    said: Said, daemon: CannedDaemon, tmp_path: Path
) -> None:
    told = control.JudgedAnswer(question="Who?", references=["Mags"], answer="Mags does. [1]")
    told.citations.add(number=1, document_id="rope.md", text="Mags does.")
    daemon.judging = [*judging_steps(), control.EvaluateAnswersProgress(answer=told)]
    path = tmp_path / "extractive.jsonl"
    words = ("eval", "--answers", "--save", str(path))
    assert said(*words)[0] == 0
    assert daemon.asked[-1].tell_answers
    assert path.stat().st_mode & 0o777 == 0o600
    kept = saved(path)
    assert kept.evaluation["generator"] == "extractive"
    assert kept.answers["Who?"]["answer"] == "Mags does. [1]"
    assert kept.answers["Who?"]["citations"][0]["document_id"] == "rope.md"
    code, _, err = said(*words)
    assert (code, "--force" in err) == (Exit.USAGE, True)
    assert said(*words, "--force")[0] == 0
    assert said("eval", "--answers")[0] == 0
    assert not daemon.asked[-1].tell_answers, "texts stay at fedd unless somebody wants them"


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"hanse_answers": 2}', "\0", '"x"', "[" * 9999])
def test_what_is_no_saved_evaluation_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "other.jsonl"
    path.write_text(text)
    with pytest.raises(CommandError, match="holds no answers of an evaluation"):
        saved(path)


@pytest.mark.slow
@pytest.mark.parametrize("some", [True, False])
def test_ctrl_c_ends_the_asking_and_shows_what_was_judged(
    daemon: CannedDaemon, *, some: bool
) -> None:
    begun = threading.Event()

    def forever() -> Iterator[control.EvaluateAnswersProgress]:
        yield control.EvaluateAnswersProgress(step="answers", done=3, total=30)
        begun.set()
        daemon.left.wait(30)

    daemon.judging = forever()
    judged(daemon).partial = "it was given up"
    daemon.judged_before = judged(daemon) if some else None
    command = [sys.executable, "-m", "daemon.fedctl", "eval", "--answers"]
    mine, theirs = pty.openpty()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=theirs) as process:
        assert begun.wait(60)
        seen = b""
        while b"3/30" not in seen:
            seen += os.read(mine, 4096)
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=60)
    os.write(theirs, b"\x04")  # so that the end is seen
    while not seen.endswith(b"\x04"):
        seen += os.read(mine, 4096)
    os.close(mine)
    os.close(theirs)
    assert b"questions answered and scored" in seen
    assert b"Traceback" not in seen
    if some:
        assert (process.returncode, b"token-f1" in out) == (Exit.PARTLY, True)
        assert b"it was given up: the rest was not asked" in out
    else:
        assert (process.returncode, out) == (Exit.INTERRUPTED, b"")
        assert b"given up; nothing was judged: no question was answered" in seen
    assert daemon.left.wait(10)
