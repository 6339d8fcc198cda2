"""What people are told of attempts does not stay open when nobody works on them any more."""

from __future__ import annotations

from pathlib import Path

from daemon.rounds.attempt_log import AttemptLog
from peers.attempts import effects as do
from proto import control_pb2 as control


def progress(round_: int, attempt: int, phase: str) -> do.Progress:
    return do.Progress(round_, attempt, phase, "north", (), (), "")


def opened(tmp_path: Path) -> AttemptLog:
    return AttemptLog(tmp_path / "attempts.db", lambda: (0, 0))


def of_round(log: AttemptLog, round_: int) -> list[control.Attempt]:
    return log.attempts(round_, round_)[round_]


def test_an_attempt_in_which_the_daemon_was_killed_is_over(tmp_path: Path) -> None:
    killed = opened(tmp_path)
    killed.note(progress(4, 0, "train"))
    assert [one.outcome for one in of_round(killed, 4)] == ["under way"]
    (seen,) = of_round(opened(tmp_path), 4)
    assert (seen.outcome, seen.phase) == ("abandoned", "train")
    assert seen.reason == "this daemon was stopped or killed in it"


def test_an_attempt_is_over_when_another_one_of_its_round_is_committed(
    tmp_path: Path,
) -> None:
    log = opened(tmp_path)
    log.note(progress(4, 0, "train"))
    log.note(progress(4, 1, "committed"))
    assert [one.outcome for one in of_round(log, 4)] == ["abandoned"]


def test_what_was_over_stays_as_it_was(tmp_path: Path) -> None:
    log = opened(tmp_path)
    log.note(progress(4, 0, "train"))
    log.note(progress(4, 0, "committed"))
    of_round(log, 4)
    (seen,) = of_round(opened(tmp_path), 4)
    assert (seen.outcome, seen.reason) == ("committed", "")
