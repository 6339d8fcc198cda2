"""fedctl pairs and fedctl eval as a person and a script see them."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from daemon.fedctl.commands.evaluation.evaluate import sparkline
from daemon.fedctl.main import main
from daemon.fedctl.terminal.output import Exit
from proto import control_pb2 as control
from tests.support.canned_daemon import CannedDaemon, canned_daemon
from tests.support.canned_replies import DIGEST

Said = Callable[..., tuple[int, str, str]]


@pytest.fixture
def daemon(monkeypatch: pytest.MonkeyPatch) -> Iterator[CannedDaemon]:
    monkeypatch.setenv("COLUMNS", "80")
    with tempfile.TemporaryDirectory(prefix="hanse-") as folder:
        path = Path(folder) / "fedd.sock"
        monkeypatch.setenv("HANSE_SOCKET", str(path))
        with canned_daemon(path) as running:
            yield running


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str], daemon: CannedDaemon) -> Said:
    def run(*words: str) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main(list(words))
        return code, *capsys.readouterr()

    return run


def lines(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip()]


# ---- eval ---------------------------------------------------------------------------


def test_four_rankings_side_by_side_on_eighty_columns(said: Said, daemon: CannedDaemon) -> None:
    code, out, err = said("eval")
    assert (code, err) == (0, "")
    assert daemon.asked[0].split == "", "the daemon chooses: test, or else valid"
    shown = lines(out)
    assert shown[0] == "questions      30, of split test"
    assert "to vanilla" in shown[3]
    rows = [line.split() for line in shown[5:8]]
    assert rows == [
        ["mrr@10", "BM25", "0.625", "0.500–0.875"],
        ["vanilla", "0.688", "0.500–0.875"],
        ["this", "version", "0.750", "0.500–0.875", "+0.062", "-0.010", "to", "+0.130"],
    ]
    assert all(len(line) <= 80 for line in out.splitlines())


def test_what_a_question_meets_is_said_with_and_without_a_cross_encoder(
    said: Said, daemon: CannedDaemon
) -> None:
    assert "fused: what a question meets, where words" in " ".join(said("eval")[1].split())
    judged = daemon.judged
    assert judged is not None
    judged.figures.add(ranking="cross-encoder", metric="mrr@10", mean=0.875)
    out = " ".join(said("eval")[1].split())
    assert "fused: where words add up" in out
    assert "cross-encoder: what a question meets, its best passages ranked anew." in out
    assert "cross-encoder 0.875" in out
    assert "the cross-encoder left out" not in out
    judged.fell_back, judged.fell_back_because = 2, "8 of 20 passages took more than 10 s"
    out = " ".join(said("eval")[1].split())
    assert "the cross-encoder left out 2 of 30 questions, which count as fused has" in out
    assert out.endswith("them: 8 of 20 passages took more than 10 s")
    assert json.loads(said("eval", "--json")[1])["fell_back"] == 2


@pytest.mark.slow
def test_each_step_of_an_evaluation_is_on_the_screen(daemon: CannedDaemon) -> None:
    looked = threading.Event()

    def halfway() -> Iterator[control.EvaluateProgress]:
        yield control.EvaluateProgress(step="encoder", done=64, total=128)
        looked.wait(30)

    daemon.evaluating = halfway()
    mine, theirs = pty.openpty()
    command = [sys.executable, "-m", "daemon.fedctl", "eval"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=theirs) as process:
        seen = b""
        while b"64/128" not in seen:
            seen += os.read(mine, 4096)
        looked.set()
        out, _ = process.communicate(timeout=30)
    os.close(mine)
    os.close(theirs)
    assert b"passages embedded by the untrained encoder" in seen
    assert process.returncode == 0
    assert b"of split test" in out


@pytest.mark.slow
def test_ctrl_c_ends_an_evaluation_and_the_daemon_learns_of_it(daemon: CannedDaemon) -> None:
    begun = threading.Event()

    def forever() -> Iterator[control.EvaluateProgress]:
        yield control.EvaluateProgress(step="encoder", done=64, total=128)
        begun.set()
        daemon.left.wait(30)

    daemon.evaluating = forever()
    command = [sys.executable, "-m", "daemon.fedctl", "eval"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert begun.wait(60)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
    assert (process.returncode, out) == (Exit.INTERRUPTED, b"")
    assert b"given up; nothing was judged" in err
    assert b"Traceback" not in err
    assert daemon.left.wait(10)


def test_a_daemon_that_ends_amid_an_evaluation_is_no_result(
    said: Said, daemon: CannedDaemon
) -> None:
    daemon.judged = None
    code, out, err = said("eval")
    assert (code, out) == (Exit.UNREACHABLE, "")
    assert "stopped telling before it was done" in err


def test_the_metrics_shown_are_chosen(said: Said) -> None:
    _, out, _ = said("eval", "--metric", "map", "--metric", "mrr@10")
    assert out.index("map") < out.index("mrr@10")
    _, out, _ = said("eval", "--metric", "map", "--json")
    plain = json.loads(out)
    assert {f["metric"] for f in plain["figures"]} == {"map"}
    assert plain["over_vanilla"] == []
    assert plain["mrr_at_10"] == 0.75, "what scripts read before stays"
    assert {f["metric"] for f in json.loads(said("eval", "--json")[1])["figures"]} == {
        "map",
        "mrr@10",
    }
    code, _, err = said("eval", "--metric", "mrr")
    assert (code, "Use 'all' or some of: mrr@10, map" in err) == (Exit.USAGE, True)


def test_who_asks_what_was_learned_is_told_that(said: Said, daemon: CannedDaemon) -> None:
    _, out, _ = said("eval", "--split", "train")
    assert daemon.asked[0].split == "train"
    assert "which is learned from" in " ".join(lines(out))
    assert said("eval", "--split", "tset")[0] == Exit.USAGE


def test_the_history_is_a_table_and_a_line(said: Said) -> None:
    code, out, _ = said("eval", "--history", "--metric", "mrr@10")
    assert code == 0
    version = DIGEST.hex()[:12]
    rows = [line.split() for line in lines(out)[2:6]]
    assert rows == [
        ["0", version, "shared", "20", "0.000"],
        ["1", version, "shared", "20", "0.125"],
        ["2", version, "shared", "20", "0.250"],
        ["2", version, "mixture", "20", "0.500"],
    ]
    assert "mrr@10  shared         ▁▅█  0.000 to 0.250" in out
    assert "mrr@10  mixture          ▁  0.500 to 0.500" in out
    assert all(len(line) <= 80 for line in out.splitlines())
    assert "The newest version: the newest version has not been indexed yet." in out
    _, out, _ = said("eval", "--history", "--json")
    points = json.loads(out)["points"]
    assert [(p["round"], p["kind"]) for p in points if p["metric"] == "map"] == [
        (0, "shared"), (1, "shared"), (2, "shared"), (2, "mixture"),
    ]  # fmt: skip
    assert {p["own_digest"] for p in points} == {"", DIGEST.hex()}
    assert said("eval", "--history", "--split", "test")[0] == Exit.USAGE


def test_a_line_of_bars() -> None:
    assert sparkline([0.0, 0.5, 1.0]) == "▁▅█"
    assert sparkline([0.3, 0.3]) == "▁▁"
    assert sparkline([1.0, float("nan"), 0.0]) == "█ ▁"
    assert sparkline([]) == ""


# ---- pairs --------------------------------------------------------------------------


def test_pairs_are_built_and_what_training_makes_of_them_is_said(
    said: Said, daemon: CannedDaemon
) -> None:
    code, out, _ = said("pairs", "build", "--how", "written", "--per-passage", "3")
    assert code == 0
    assert (daemon.asked[0].kind, daemon.asked[0].a_passage) == ("written", 3)
    told = " ".join(lines(out))
    assert told.startswith("60 pairs (written) of 44 passages in 1.5 s. 26 queries did not find")
    assert "trains on 12 pairs (pairs.learn_from is supplied). Set it to" in told


def test_pairs_are_counted_and_shown_as_text_alone(said: Said, daemon: CannedDaemon) -> None:
    for words in (("pairs",), ("pairs", "list")):
        _, out, _ = said(*words)
        rows = [line.split() for line in lines(out)]
        assert ["cloze", "60", "58", "0"] in rows and ["written", "5", "4", "3"] in rows
        assert "This site trains on 70 pairs (pairs.learn_from is supplied+made)." in out
        told = " ".join(lines(out))
        assert "A generator would learn from 12 questions: the answers of 7 were supplied" in told
    _, out, _ = said("pairs", "show", "--how", "cloze", "--examples", "5")
    assert (daemon.asked[-1].kind, daemon.asked[-1].examples) == ("cloze", 5)
    assert "[cloze] Why [bold]leak?\N{REPLACEMENT CHARACTER}[31m" in out
    assert "d1: Locks leak." in out
    assert "d2: Lochs leak.\n    answer: Lochs\N{REPLACEMENT CHARACTER}[31m do.\n" in out
    assert out.count("answer:") == 1
    counts = json.loads(said("pairs", "--json")[1])["triples"]
    assert counts == {"supplied": 7, "made": 3, "to_distil": 2}


def test_what_became_of_written_answers_is_told(said: Said, daemon: CannedDaemon) -> None:
    assert said("pairs", "build", "--how", "written")[0] == 0
    last = list(daemon.building)[-1]
    last.answered, last.unsupported = 41, 19
    daemon.building = [last]
    _, out, _ = said("pairs", "build", "--how", "written", "--answers")
    assert [request.answers for request in daemon.asked] == [False, True]
    assert "41 of them have an answer; 19 answers that their passage" in " ".join(lines(out))


def test_nothing_is_forgotten_by_mistake(said: Said, daemon: CannedDaemon) -> None:
    for words in ((), ("--all", "--how", "cloze")):
        code, _, err = said("pairs", "drop", *words)
        assert (code, "Say --how KIND or --all" in err) == (Exit.USAGE, True)
    assert daemon.asked == []
    assert said("pairs", "drop", "--how", "titles")[0] == 0
    assert said("pairs", "drop", "--all")[0] == 0
    assert [request.kind for request in daemon.asked] == ["titles", ""]
    assert said("pairs", "build")[0] == Exit.USAGE
    assert said("pairs", "build", "--how", "magic")[0] == Exit.USAGE


@pytest.mark.slow
def test_ctrl_c_ends_a_build_and_the_daemon_learns_of_it(daemon: CannedDaemon) -> None:
    begun = threading.Event()

    def forever() -> Iterator[control.BuildPairsProgress]:
        yield control.BuildPairsProgress(done=1, total=9)
        begun.set()
        daemon.left.wait(30)

    daemon.building = forever()
    command = [sys.executable, "-m", "daemon.fedctl", "pairs", "build", "--how", "cloze", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert begun.wait(60)
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=30)
    assert process.returncode == Exit.INTERRUPTED
    assert json.loads(out)["error"] == "interrupted"
    assert daemon.left.wait(10)


# ---- what people propose --------------------------------------------------------------


def proposed(number: int, *answers: bool) -> control.Proposal:
    votes = [
        control.ProposalVote(
            token=f"t{n}",
            answers=one,
            unix_s=1_800_000_000 - number,
            passage_id="p" if one else "another",
        )
        for n, one in enumerate(answers)
    ]
    return control.Proposal(
        id=f"{number:016x}",
        question=f"Who [bold]tars\x1b[31m rope {number}?",
        document_id=f"rope-{number}.pdf",
        title="Rope",
        passage_id="p",
        passage="Hemp rope\nis tarred.",
        page=4,
        votes=votes,
    )


def test_what_waits_is_listed_oldest_first_over_pages(said: Said, daemon: CannedDaemon) -> None:
    assert said("pairs", "review")[1].startswith("Nothing waits: all that people said")
    daemon.proposals = [proposed(n, True, False) for n in range(230)]
    code, out, _ = said("pairs", "review", "--json")
    told = json.loads(out)["proposals"]
    assert (code, [one["id"] for one in told]) == (0, [f"{n:016x}" for n in range(229, -1, -1)])
    out = said("pairs", "review")[1]
    assert "Who [bold]tars\N{REPLACEMENT CHARACTER}[31m rope 229?" in out
    assert "document  rope-229.pdf (Rope), page 4" in out
    assert "passage   Hemp rope is tarred." in out
    assert "says      t0: it answers (2027-01-15 07:56 UTC)" in out
    assert "says      t1: another passage of it does not answer (" in out


def test_a_script_accepts_rejects_and_forgets(said: Said, daemon: CannedDaemon) -> None:
    daemon.proposals = [proposed(n, True) for n in range(4)]
    ids = [one.id for one in daemon.proposals]
    words = ("--accept", ids[0], "--accept", ids[1], "--reject", ids[2], "--reject", "nowhere")
    code, out, _ = said("pairs", "review", *words)
    assert (code, lines(out)) == (
        Exit.PARTLY,
        ["2 validation pairs added; 1 forgotten; 1 left.", "nothing waits under nowhere"],
    )
    code, out, _ = said("pairs", "review", "--forget", "ada", "--json")
    assert (code, json.loads(out)["forgotten"]) == (0, 2)
    assert daemon.asked[-1].forget_token == "ada"


def interrupt(process: subprocess.Popen[bytes]) -> None:
    """Ctrl-C, again if need be: one between a prompt and its read is noticed with the next key."""
    while process.poll() is None:
        process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(5)


def typed(daemon: CannedDaemon, *answers: tuple[bytes, bytes]) -> tuple[int, bytes]:
    """`fedctl pairs review` at a terminal: behind each word that is seen, something is typed."""
    mine, theirs = pty.openpty()
    command = [sys.executable, "-m", "daemon.fedctl", "pairs", "review"]
    seen = b""
    with subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True
    ) as process:
        os.close(theirs)
        for awaited, answer in answers:
            while awaited not in seen:
                seen += os.read(mine, 4096)
            seen = seen[seen.index(awaited) + len(awaited) :]
            if answer == b"\x03":
                interrupt(process)
            else:
                os.write(mine, answer + b"\n")
        try:
            while piece := os.read(mine, 4096):
                seen += piece
        except OSError:  # a terminal whose other side is closed
            pass
        code = process.wait(30)
    os.close(mine)
    return code, seen


@pytest.mark.slow
def test_an_operator_looks_at_one_after_the_other(daemon: CannedDaemon) -> None:
    daemon.proposals = [proposed(4, False), *(proposed(n, True) for n in (5, 6, 7))]
    code, seen = typed(
        daemon,
        (b"accept, reject, skip, quit?", b"perhaps"),
        (b"accept, reject, skip, quit?", b"a"),
        (b"accept, reject, skip, quit?", b"skip"),
        (b"accept, reject, skip, quit?", b"R"),
        (b"\nreject, skip, quit?", b"q"),
    )
    assert code == 0, seen
    decided = [one for one in daemon.asked if isinstance(one, control.DecideProposalsRequest)]
    assert [([*one.accept], [*one.reject]) for one in decided] == [
        ([f"{7:016x}"], []),
        ([], [f"{5:016x}"]),
    ]


@pytest.mark.slow
def test_ctrl_c_loses_nothing_that_was_decided(daemon: CannedDaemon) -> None:
    daemon.proposals = [proposed(n, True) for n in range(3)]
    code, _ = typed(daemon, (b"quit?", b"accept"), (b"2 of 3", b""), (b"quit?", b"\x03"))
    assert code == Exit.INTERRUPTED
    assert {one.id for one in daemon.proposals} == {f"{0:016x}", f"{1:016x}"}
