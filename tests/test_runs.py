"""Which of two runs stands: every site must say the same, and no wish may be lost."""

from __future__ import annotations

import itertools

from peers import runs
from proto import federation_pb2 as pb

PLAN = pb.TrainingPlan(local_epochs=1)


def asked(known: pb.Run | None, run_id: str, target: int) -> pb.Run:
    return runs.following(known, "alder", run_id, target, PLAN)


def test_the_newest_stands_and_a_stop_ends_what_it_saw() -> None:
    first = asked(None, "zz", 20)
    stop = asked(first, "aa", 7)
    assert runs.supersedes(first, None)
    assert runs.supersedes(stop, first)
    assert not runs.supersedes(first, stop)
    assert not runs.supersedes(first, first)


def test_a_site_that_missed_a_run_and_caught_up_is_heard() -> None:
    """Both follow the same run; the one that was missed is over when the other is asked for."""
    known = asked(None, "old", 3)
    missed = asked(known, "zz", 5)
    after = asked(known, "aa", 5 + 1)
    assert missed.generation == after.generation
    assert runs.supersedes(after, missed)
    assert not runs.supersedes(missed, after)


def test_of_two_runs_asked_for_at_once_one_stands_whichever_came_first() -> None:
    wished = [asked(None, run_id, target) for run_id in ("aa", "bb") for target in (4, 9)]
    for one, other in itertools.combinations(wished, 2):
        assert runs.supersedes(one, other) != runs.supersedes(other, one)
