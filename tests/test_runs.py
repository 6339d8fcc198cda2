"""Which of two runs stands: every site must say the same, and no wish may be lost."""

from __future__ import annotations

import itertools

from peers import runs
from peers.manifest import FederationManifest, ManifestSite
from proto import federation_pb2 as pb

PLAN = pb.TrainingPlan(local_epochs=1)
MANIFEST = FederationManifest(
    "canned", 1, tuple(ManifestSite(name, f"{name}:1", True) for name in ("alder", "birch"))
)


def asked(known: pb.Run | None, run_id: str, target: int) -> pb.Run:
    return runs.following(known, "alder", "canned", run_id, target, PLAN)


def stands_over(run: pb.Run, known: pb.Run | None, head_round: int = 0) -> bool:
    return runs.stands_over(run, known, head_round, MANIFEST)


def test_the_newest_stands_and_a_stop_ends_what_it_saw() -> None:
    first = asked(None, "zz", 20)
    stop = asked(first, "aa", 7)
    assert stands_over(first, None)
    assert stands_over(stop, first)
    assert not stands_over(first, stop)
    assert not stands_over(first, first)


def test_a_site_that_missed_a_run_and_caught_up_is_heard() -> None:
    """Both follow the same run; the one that was missed is over when the other is asked for."""
    known = asked(None, "old", 3)
    missed = asked(known, "zz", 5)
    after = asked(known, "aa", 5 + 1)
    assert missed.generation == after.generation
    assert stands_over(after, missed)
    assert not stands_over(missed, after)


def test_of_two_runs_asked_for_at_once_one_stands_whichever_came_first() -> None:
    wished = [asked(None, run_id, target) for run_id in ("aa", "bb") for target in (4, 9)]
    for one, other in itertools.combinations(wished, 2):
        assert stands_over(one, other) != stands_over(other, one)


def test_a_run_that_weakens_stands_over_no_other_whatever_its_number() -> None:
    """Another mode weakens either way: a site could number its run so that it took over."""
    ours = asked(None, "ours", 9)
    theirs = pb.Run()
    theirs.CopyFrom(ours)
    theirs.run_id, theirs.requested_by, theirs.plan.mode = "theirs", "birch", pb.MASKING
    for target in (8, 10):
        theirs.target_round = target
        assert not stands_over(theirs, ours, 3)
        assert not stands_over(ours, theirs, 3)
        assert stands_over(theirs, ours, 9) == (target == 10)


def test_a_number_far_ahead_is_no_run_unless_an_honest_site_has_got_there() -> None:
    ours = asked(None, "ours", 9)
    far = pb.Run()
    far.CopyFrom(ours)
    far.generation = runs.FARTHEST * 3
    assert not stands_over(far, ours)
    assert runs.stands_over(far, ours, 0, MANIFEST, usual=runs.FARTHEST * 2)
