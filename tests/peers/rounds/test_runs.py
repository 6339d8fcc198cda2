"""Which of two runs stands: every site must say the same, and no wish may be lost."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peers.attempts import effects as do
from peers.plans.policy import Policy
from peers.rounds import runs
from peers.wire.manifest import FederationManifest, ManifestSite
from proto import federation_pb2 as pb

PLAN = pb.TrainingPlan(local_epochs=1, min_participants=3)
WEAK = pb.TrainingPlan(local_epochs=1, min_participants=2)
SITES = ("alder", "beech", "cedar", "doom")
MANIFEST = FederationManifest("woods", 1, tuple(ManifestSite(s, f"{s}:1") for s in SITES), 1)


def asked(
    known: pb.Run | None,
    run_id: str,
    target: int,
    *,
    by: str = "alder",
    plan: pb.TrainingPlan = PLAN,
) -> pb.Run:
    return runs.following(known, by, "woods", run_id, target, plan)


def signed(run: pb.Run) -> pb.Signed:
    return pb.Signed(body=run.SerializeToString(deterministic=True), site=run.requested_by)


def stands(run: pb.Run, known: pb.Run | None, head_round: int = 0) -> bool:
    return runs.stands_over(run, known, head_round, MANIFEST)


def test_the_newest_stands_and_a_stop_ends_what_it_saw() -> None:
    first = asked(None, "zz", 20)
    stop = asked(first, "aa", 7)
    assert stands(first, None)
    assert stands(stop, first)
    assert not stands(first, stop)
    assert not stands(first, first)


def test_a_site_that_missed_a_run_and_caught_up_is_heard() -> None:
    """Both follow the same run; the one that was missed is over when the other is asked for."""
    known = asked(None, "old", 3)
    missed = asked(known, "zz", 5)
    after = asked(known, "aa", 5 + 1)
    assert missed.generation == after.generation
    assert stands(after, missed)
    assert not stands(missed, after)


def test_of_two_runs_asked_for_at_once_one_stands_whichever_came_first() -> None:
    wished = [asked(None, run_id, target) for run_id in ("aa", "bb") for target in (4, 9)]
    for one, other in itertools.combinations(wished, 2):
        assert stands(one, other) != stands(other, one)


# ---- attacks -------------------------------------------------------------------------------


def test_a_run_that_weakens_anothers_unfinished_one_has_no_order_to_stand() -> None:
    strong = asked(None, "a", 9)
    weak = asked(strong, "z", 9, by="doom", plan=WEAK)
    assert "min_participants from 3 to 2" in runs.weakens(weak, strong, 3, MANIFEST)
    assert not stands(weak, strong, 3)
    assert stands(strong, weak, 3), "and where the weak one came first, it goes"


def test_anybody_may_ask_for_less_once_a_run_is_over_and_not_before() -> None:
    """Nor its own site: in two steps, an equal one of its own first, a liar could."""
    strong = asked(None, "a", 9)
    own = asked(strong, "z", 9, plan=WEAK)
    others = asked(strong, "z", 19, by="doom", plan=WEAK)
    assert not stands(own, strong, 3)
    assert stands(others, strong, 9), "its rounds are committed"
    gone = FederationManifest("woods", 2, tuple(s for s in MANIFEST.sites if s.id != "alder"), 1)
    assert runs.stands_over(others, strong, 3, gone), "who asked for it was expelled"


def test_the_run_of_a_site_that_was_expelled_stands_in_nobodys_way() -> None:
    """Who knows of it would hold to it, and who does not could not be told: nobody reads it."""
    theirs = asked(None, "z", 9, by="gone")
    ours = asked(None, "a", 9)
    assert stands(ours, theirs)
    assert not stands(theirs, ours)


def test_anybody_may_stop_a_run_however_strong_it_is() -> None:
    strong = asked(None, "a", 9)
    head = do.Durable(3, bytes(32), signed_run=signed(strong))
    stop = runs.stopped("stop", head, "doom", MANIFEST)
    assert stop.requested_by == "doom"
    assert stands(stop, strong, 3)
    assert not stands(strong, stop, 3)


def test_of_two_runs_that_are_over_the_later_counts_and_no_expelled_sites() -> None:
    first = asked(None, "a", 2)
    later = asked(first, "z", 1, by="doom")
    one, other = (signed(run) for run in (first, later))
    gone = FederationManifest("woods", 2, tuple(s for s in MANIFEST.sites if s.id != "doom"), 1)
    for known, over in ((one, other), (other, one)):
        head = do.Durable(3, bytes(32), state=pb.RoundState(over=[over]), signed_run=known)
        assert runs.last_over(head, MANIFEST) == other
        assert runs.last_over(head, gone) == one


def test_what_a_person_asks_for_is_numbered_above_what_is_over() -> None:
    """That of a site which was expelled and is back counts again: it would be put aside, unsaid."""
    known, later = asked(None, "a", 9), asked(None, "z", 1, by="doom")
    later.generation = 10
    kept = pb.RoundState(over=[signed(later)])
    head = do.Durable(3, bytes(32), state=kept, signed_run=signed(known))
    with pytest.raises(runs.RunRefused, match="no run is under way"):
        runs.stopped("stop", head, "alder", MANIFEST)
    over = replace(head, head_round=9)
    wish = do.RunRequested("run", 2, PLAN)
    run = runs.requested(wish, over, "alder", Policy(2, 9), MANIFEST)
    assert run.generation == 11
    assert runs.stands_over(run, over.run, 9, MANIFEST, over=later)


@pytest.mark.parametrize("generation", [runs.FARTHEST + 1, 2**62])
def test_a_number_that_nobody_could_follow_is_no_run(generation: int) -> None:
    """A run of the last number there is could never be stopped, nor followed."""
    forged = pb.Run(generation=generation, requested_by="doom", target_round=2**62, plan=PLAN)
    assert runs.is_far(forged, 0)
    assert not runs.is_far(forged, generation), "a site that was away has missed so many"


plans = st.builds(
    pb.TrainingPlan,
    min_participants=st.integers(2, 3),
    mode=st.sampled_from((pb.CKKS, pb.MASKING)),
    max_num_examples=st.integers(1, 2),
    robust=st.sampled_from((pb.ROBUST_NONE, pb.ROBUST_NORM)),
)
wishes = st.builds(
    pb.Run,
    generation=st.integers(1, 2),
    target_round=st.integers(0, 3),
    run_id=st.sampled_from(("a", "b")),
    requested_by=st.sampled_from((*SITES[:2], "expelled")),
    plan=plans,
    federation_id=st.just("woods"),
)


def test_a_run_for_which_nothing_could_be_trained_takes_nobodys_place() -> None:
    known = asked(None, "ours", 3)
    run = asked(known, "theirs", 1 << 40, by="doom", plan=pb.TrainingPlan(min_participants=256))
    assert not stands(run, known, 0)
    assert not stands(run, None, 0)
    assert stands(known, run, 0)
    run.target_round = 0  # it stops one
    assert stands(run, known, 0)
    gone = replace(
        MANIFEST, sites=tuple(replace(s, enabled=s.id != "doom") for s in MANIFEST.sites)
    )
    hampered = asked(None, "ours", 3, plan=pb.TrainingPlan(min_participants=4))
    expelled = asked(hampered, "theirs", 3, by="doom")
    assert not runs.stands_over(expelled, hampered, 0, gone)
    assert runs.stands_over(hampered, expelled, 0, gone)


@pytest.mark.slow
@given(seen=st.lists(st.one_of(wishes, st.none()), max_size=12))
def test_a_site_never_goes_back_to_a_run_that_it_has_left(seen: list[pb.Run | None]) -> None:
    """In whichever order, and however often, it hears of whatever; None: a round is committed."""
    head = do.Durable(0, bytes(32))
    left: list[bytes] = []
    for run in seen:
        if run is None:
            head = replace(head, head_round=head.head_round + 1, state=runs.kept(head.state))
            continue
        over = runs.last_over(head, MANIFEST)
        last = pb.Run.FromString(over.body) if over is not None else None
        aside = [pb.Run.FromString(one.body) for one in head.state.put_aside]
        at = head.head_round
        if runs.stands_over(run, head.run, at, MANIFEST, over=last, put_aside=aside):
            one = signed(run)
            over_by_now = run.target_round <= at  # taken as a stop: nothing begins by it
            assert over_by_now or one.body not in left
            left.append(one.body)
            state = runs.left_behind(head, MANIFEST, one)
            head = replace(head, signed_run=one, state=state)


@given(one=wishes, other=wishes, head_round=st.integers(0, 2))
def test_two_sites_that_see_two_runs_in_either_order_go_by_the_same_one(
    one: pb.Run, other: pb.Run, head_round: int
) -> None:
    def after(*seen: pb.Run) -> pb.Run:
        known = seen[0]
        for run in seen[1:]:
            known = run if stands(run, known, head_round) else known
        return known

    def weakens(run: pb.Run, known: pb.Run) -> bool:
        return bool(runs.weakens(run, known, head_round, MANIFEST))

    def able(run: pb.Run) -> bool:
        return runs.can_go_on(run, head_round, MANIFEST)

    assert after(one, other, one) == after(one, other), "nor does saying it again bring it back"
    if weakens(one, other) and weakens(other, one) and able(one) == able(other):
        assert (after(one, other), after(other, one)) == (one, other), "a person has to stop one"
    else:
        assert after(one, other) == after(other, one)
