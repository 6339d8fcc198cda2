"""Rounds in masking mode on a simulated network: who may leave, when, and what it costs."""

from __future__ import annotations

import pytest

from peers import effects as do
from peers.errors import RemoteProtocolError
from peers.manifest import FederationManifest, ManifestSite
from peers.masking_steps import MaskingSteps
from peers.participation import Participation
from peers.policy import Policy
from peers.roles import key_holders, threshold_of
from proto import federation_pb2 as pb
from tests.scenarios.faults import Faults
from tests.simulation import World, coordinator, plan


def masked_world(sites: int, *, seed: int = 1, faults: Faults | None = None) -> World:
    return World(sites=sites, seed=seed, faults=faults, mode=pb.MASKING, min_participants=2)


def kill(world: World, victims: str, step: int | None) -> None:
    """These sites die when they are about to do that step (None: to make their keys)."""
    real = world.masking.step

    def dying(site: str, effect: do.Mask) -> do.Masked | do.ContextHeld:
        done = real(site, effect)
        if site in victims and (effect.order.step if effect.order else None) == step:
            world.crash(site)
        return done

    world.masking.step = dying  # type: ignore[method-assign]


def contributors(world: World, round_: int = 1) -> str:
    return "".join(world.certificate(round_).body.contributors)


@pytest.mark.parametrize("sites", [2, 3, 4, 5, 7])
def test_a_round_without_a_key_dealer(sites: int) -> None:
    world = masked_world(sites)
    world.train("a", rounds=2)
    world.run_until_committed(2)
    names = "abcdefg"[:sites]
    assert contributors(world) == contributors(world, 2) == names
    commits = world.disks["a"].commits
    assert [commits[r].report.key_dealer for r in (1, 2)] == ["", ""]
    assert [commits[r].certificate.attempt for r in (1, 2)] == [0, 0]
    assert [p.phase for p in commits[1].report.phases if p.phase == "unmask"] == ["unmask"]
    assert {tuple(one.dropouts) for one in world.masking.unmasked} == {()}
    lead = coordinator(world, 1)
    assert lead in key_holders(world.masking.plans[1, 0], lead), "it reads the sum like all others"


@pytest.mark.parametrize(
    ("step", "in_the_sum", "dropped"),
    [
        (None, "abce", ()),
        (pb.KEYS, "abce", ()),
        (pb.SHARES, "abce", ("d",)),  # its secrets are shared, its input never comes
        (pb.OUTCOME, "abcde", ()),  # its input is in, and opens without it
        (pb.OPENING, "abcde", ()),
    ],
)
def test_a_site_dies_at_each_step_and_the_attempt_goes_on(
    step: int | None, in_the_sum: str, dropped: tuple[str, ...]
) -> None:
    world = masked_world(5)
    kill(world, "d", step)
    world.train("a", rounds=1)
    world.run_until_committed(1)
    assert world.certificate(1).attempt == 0
    assert contributors(world) == in_the_sum
    (unmask,) = world.masking.unmasked
    assert (unmask.survivors, unmask.dropouts) == (tuple(in_the_sum), dropped)


@pytest.mark.parametrize("step", [None, pb.KEYS, pb.SHARES, pb.OUTCOME, pb.OPENING])
def test_one_more_than_may_leave_costs_the_attempt_and_no_more(step: int | None) -> None:
    """Five sites, t = 4: two die, the attempt says why it ends, the next one is whole again."""
    world = masked_world(5)
    kill(world, "de", step)
    world.train("a", rounds=1)
    while len(world.machines) > 3:
        world.step()
    world.run_for(1)
    assert not world.masking.unmasked or step == pb.OPENING
    del world.masking.step
    for name in "de":
        world.start(name)
    world.run_until_committed(1)
    assert world.certificate(1).attempt > 0
    assert "must" in world.text() or "the plan needs 4" in world.text()


def test_a_site_that_trains_no_more_after_it_has_shared_is_left_out() -> None:
    world = masked_world(5)
    world.failing = {("d", "train")}
    world.train("a", rounds=1)
    world.run_until_committed(1)
    assert contributors(world) == "abce"
    assert world.masking.unmasked[0].dropouts == ("d",)


def test_an_unwilling_coordinator_adds_what_it_does_not_contribute_to() -> None:
    world = masked_world(5)
    lead = coordinator(world, 1)
    world.set_willing(lead, False)
    world.train("a", rounds=1)
    world.run_until_committed(1)
    assert contributors(world) == "abcde".replace(lead, "")


@pytest.mark.parametrize("seed", range(12))
def test_faults_cost_attempts_and_never_open_both_secrets(seed: int) -> None:
    """The claims are those of tests/simulated_masking.py and of the invariants."""
    faults = Faults(drop=0.05, duplicate=0.1, cut=0.05, fail=0.03)
    world = masked_world((3, 5, 7)[seed % 3], seed=seed, faults=faults)
    world.train("a", rounds=2)
    for number in range(3):
        name = "abcdefg"[(seed + 3 * number) % (3, 5, 7)[seed % 3]]
        world.at(2 + 7 * number + seed % 5, world.crash, name)
        world.at(9 + 7 * number + seed % 5, world.start, name)
    world.run_until_committed(2, within_s=20_000)


# ---- what is refused -----------------------------------------------------------------


def masked_plan(sites: str = "abcde") -> pb.Plan:
    return pb.Plan(
        round=1,
        participants=[pb.Participant(site=site, num_examples=1) for site in sites],
        training=plan(3, pb.MASKING),
        manifest_version=1,
    )


def test_a_masked_plan_has_no_key_dealer_and_an_encrypted_one_has() -> None:
    manifest = FederationManifest("f", 1, tuple(ManifestSite(s, f"{s}:1", True) for s in "abcde"))

    def objection(made: pb.Plan) -> str:
        return Participation("b", "a", "f", made).objection(b"", b"", manifest)

    made = masked_plan()
    assert objection(made) == ""
    made.key_dealer = "b"
    assert "key dealer" in objection(made)
    made.training.mode = pb.CKKS
    assert objection(made) == ""
    made.key_dealer = ""
    assert "key dealer" in objection(made)


def test_a_site_that_only_masks_declines_encryption() -> None:
    strict = Policy(min_participants=2, max_local_epochs=10, masking_only=True)
    assert "training.mode" in strict.objection(plan(3))
    assert strict.objection(plan(3, pb.MASKING)) == ""
    assert Policy(2, 10).objection(plan(3, pb.MASKING)) == ""


def order(step: pb.MaskingStep.ValueType, sites: str, dropouts: str = "") -> pb.MaskingOrder:
    items = [pb.MaskingItem(site=site) for site in sites]
    return pb.MaskingOrder(round=1, step=step, items=items, dropouts=list(dropouts))


def test_an_outcome_is_taken_once_and_only_of_enough_participants() -> None:
    part = Participation("b", "a", "f", masked_plan())
    for survivors, dropouts in (("abc", "de"), ("abcx", "de"), ("abcd", "x")):
        with pytest.raises(RemoteProtocolError, match="the plan needs at least 4"):
            part.ordered(order(pb.OUTCOME, survivors, dropouts))
    (mask,) = part.ordered(order(pb.OUTCOME, "abcd", "e"))
    assert isinstance(mask, do.Mask)
    assert part.ordered(order(pb.OPENING, "abcd")) == [], "the other step is not done"
    answer = pb.MaskingAnswer(round=1, step=pb.OUTCOME)
    said, opening = part.worked(do.Masked(1, 0, answer))
    assert said == do.Send("a", answer)
    assert isinstance(opening, do.Mask)
    assert part.ordered(order(pb.OUTCOME, "abce", "d")) == []
    with pytest.raises(RemoteProtocolError, match="another sum than was opened"):
        part.apply(pb.Apply(round=1, contributors=list("abce")))
    assert part.apply(pb.Apply(round=1, contributors=list("abcd")))


def test_a_site_that_is_not_in_the_sum_opens_nothing_and_applies_it() -> None:
    late = Participation("e", "a", "f", masked_plan())
    assert late.ordered(order(pb.OUTCOME, "abcd", "e")) == []
    assert late.ordered(order(pb.OPENING, "abcd")) == []
    with pytest.raises(RemoteProtocolError, match="another sum than was opened"):
        late.apply(pb.Apply(round=1, contributors=list("abce")))
    assert late.apply(pb.Apply(round=1, contributors=list("abcd")))


def test_a_site_whose_input_is_late_still_votes_for_the_sum() -> None:
    world = masked_world(5)
    world.failing = {("d", "encrypt")}
    world.train("a", rounds=1)
    world.run_until_committed(1)
    assert world.certificate(1).attempt == 0
    assert contributors(world) == "abce"
    assert "-> d: Apply 1.0" in "\n".join(world.transcript), "it may read the sum all the same"


def test_answers_that_speak_of_other_sites_are_refused() -> None:
    steps = MaskingSteps(masked_plan())

    def answer(step: pb.MaskingStep.ValueType, sites: str) -> pb.MaskingAnswer:
        return pb.MaskingAnswer(round=1, step=step, items=[pb.MaskingItem(site=s) for s in sites])

    with pytest.raises(RemoteProtocolError, match="masking answer of a"):
        steps.answered("a", answer(pb.KEYS, "b"))
    assert not steps.answered("a", answer(pb.SHARES, "bcde")), "not its turn"
    assert not steps.answered("x", answer(pb.KEYS, "x")), "no participant"
    for site in "abcde":
        assert not steps.complete
        assert steps.answered(site, answer(pb.KEYS, site))
        assert not steps.answered(site, answer(pb.KEYS, site)), "once"
    assert steps.complete
    steps.pass_on()
    with pytest.raises(RemoteProtocolError, match="masking answer of a"):
        steps.answered("a", answer(pb.SHARES, "abcde"))
    assert steps.answered("a", answer(pb.SHARES, "bcde"))


def test_more_than_half_of_sites_and_liars_must_open() -> None:
    names = {n: threshold_of(masked_plan("abcdefg"[:n])) for n in (2, 3, 4, 5, 7)}
    assert names == {2: 2, 3: 3, 4: 3, 5: 4, 7: 5}
