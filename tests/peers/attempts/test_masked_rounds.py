"""Rounds in masking mode on a simulated network: who may leave, when, and what it costs."""

from __future__ import annotations

import hashlib
from typing import cast

import pytest

from peers.attempts import effects as do
from peers.attempts.masking import Mask, Masked, MaskingSteps, OpenShares, threshold_of
from peers.attempts.modes import key_holders
from peers.attempts.participation import Participation
from peers.attempts.statement import EncodedStatement
from peers.plans.policy import Policy
from peers.wire.errors import RemoteProtocolError
from peers.wire.messages import check
from proto import federation_pb2 as pb
from tests.simulation.network import World, coordinator, plan
from tests.simulation.scenarios.faults import Faults
from tests.simulation.seeds import seeds
from tests.support.signed_rounds import Stage


def masked_world(sites: int, *, seed: int = 1, faults: Faults | None = None, f: int = 0) -> World:
    return World(
        sites=sites,
        seed=seed,
        faults=faults,
        mode=pb.MASKING,
        min_participants=2,
        faulty_sites=f,
    )


def kill(world: World, victims: str, step: int | None) -> None:
    """These sites die when they are about to do that step (None: to make their keys)."""
    real = world.masking.step

    def dying(site: str, effect: Mask | OpenShares) -> Masked | do.ContextHeld:
        done = real(site, effect)
        doing: pb.MaskingStep.ValueType | None = pb.OPENING
        if isinstance(effect, Mask):
            doing = effect.order.step if effect.order else None
        if site in victims and doing == step:
            world.crash(site)
        return done

    world.masking.step = dying  # type: ignore[method-assign]


def watched(world: World) -> dict[str, tuple[tuple[str, ...], tuple[str, ...]]]:
    """Of each site that opens shares: of which survivors, and of which dropouts."""
    outcomes: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {}
    real = world.masking.step

    def watching(site: str, effect: Mask | OpenShares) -> Masked | do.ContextHeld:
        if isinstance(effect, OpenShares):
            outcomes[site] = effect.survivors, effect.dropouts
        return real(site, effect)

    world.masking.step = watching  # type: ignore[method-assign]
    return outcomes


def contributors(world: World, round_: int = 1) -> str:
    return "".join(world.certificate(round_).body.contributors)


@pytest.mark.parametrize(("sites", "f"), [(2, 0), (3, 0), (3, 1), (4, 1), (5, 1), (7, 2)])
def test_a_round_without_a_key_dealer(sites: int, f: int) -> None:
    world = masked_world(sites, f=f)
    outcomes = watched(world)
    world.train("a", rounds=2)
    world.run_until_committed(2)
    names = "abcdefg"[:sites]
    assert contributors(world) == contributors(world, 2) == names
    commits = world.disks["a"].commits
    assert [commits[r].report.key_dealer for r in (1, 2)] == ["", ""]
    assert [commits[r].certificate.attempt for r in (1, 2)] == [0, 0]
    assert [p.phase for p in commits[1].report.phases][-3:] == ["state", "open", "vote"]
    assert set(outcomes.values()) == {(tuple(names), ())}
    lead = coordinator(world, 1)
    assert lead in key_holders(world.plans[1, 0]), "it opens the sum like all others"


@pytest.mark.parametrize(
    ("step", "in_the_sum", "dropped"),
    [
        (None, "abce", ()),
        (pb.KEYS, "abce", ()),
        (pb.SHARES, "abce", ("d",)),  # its secrets are shared, its input never comes
        (pb.OPENING, "abcde", ()),  # its input is in, and the others open without it
    ],
)
def test_a_site_dies_at_each_step_and_the_attempt_goes_on(
    step: int | None, in_the_sum: str, dropped: tuple[str, ...]
) -> None:
    world = masked_world(5)
    outcomes = watched(world)
    kill(world, "d", step)
    world.train("a", rounds=1)
    world.run_until_committed(1)
    assert world.certificate(1).attempt == 0
    assert contributors(world) == in_the_sum
    assert set(outcomes.values()) == {(tuple(in_the_sum), dropped)}


@pytest.mark.parametrize("step", [None, pb.KEYS, pb.SHARES, pb.OPENING])
def test_one_more_than_may_leave_costs_the_attempt_and_no_more(step: int | None) -> None:
    """Five sites, t = 4: two die, the attempt says why it ends, the next one is whole again."""
    world = masked_world(5)
    real = world.masking.step
    kill(world, "de", step)
    world.train("a", rounds=1)
    while len(world.machines) > 3:
        world.step()
    world.run_for(1)
    world.masking.step = real  # type: ignore[method-assign]
    for name in "de":
        world.start(name)
    world.run_until_committed(1)
    assert world.certificate(1).attempt > 0
    text = "\n".join(world.transcript)
    assert "4 must" in text or "the plan needs 4" in text or "was restarted" in text


def test_a_site_that_trains_no_more_after_it_has_shared_is_left_out() -> None:
    world = masked_world(5)
    outcomes = watched(world)
    world.failing = {("d", "train")}
    world.train("a", rounds=1)
    world.run_until_committed(1)
    assert contributors(world) == "abce"
    assert {dropouts for _, dropouts in outcomes.values()} == {("d",)}
    assert set(outcomes) == set("abce"), "who is not in it opens nothing"


def test_an_unwilling_coordinator_adds_what_it_does_not_contribute_to() -> None:
    world = masked_world(5)
    lead = coordinator(world, 1)
    world.set_willing(lead, False)
    world.train("a", rounds=1)
    world.run_until_committed(1)
    assert contributors(world) == "abcde".replace(lead, "")


@pytest.mark.parametrize("seed", seeds(range(6), range(6, 12)))
def test_faults_cost_attempts_and_never_open_both_secrets(seed: int) -> None:
    """The claims are those of tests/simulation/masking.py and of the invariants."""
    faults = Faults(drop=0.05, duplicate=0.1, cut=0.05, fail=0.03)
    world = masked_world((3, 5, 7)[seed % 3], seed=seed, faults=faults)
    world.train("a", rounds=2)
    for number in range(3):
        name = "abcdefg"[(seed + 3 * number) % (3, 5, 7)[seed % 3]]
        world.at(2 + 7 * number + seed % 5, world.crash, name)
        world.at(9 + 7 * number + seed % 5, world.start, name)
    world.run_until_committed(2, within_s=20_000)


# ---- what is refused -----------------------------------------------------------------


def staged(sites: str = "abcde", f: int = 1) -> Stage:
    return Stage(sites, faulty_sites=f, training=plan(3, pb.MASKING))


def masked_plan(sites: str = "abcde", f: int = 1) -> pb.Plan:
    """As every site derives it: b coordinates."""
    return staged(sites, f).plan()


def test_a_masked_plan_has_no_key_dealer_and_an_encrypted_one_has() -> None:
    made = masked_plan()
    assert made.key_dealer == ""
    check(made)
    encrypted = Stage("abcde", training=plan(3)).plan()
    assert encrypted.key_dealer == "c"
    for wrong, dealer in ((made, "c"), (encrypted, "")):
        wrong.key_dealer = dealer
        with pytest.raises(RemoteProtocolError, match="key_dealer is"):
            check(wrong)


def test_a_site_that_only_masks_declines_encryption() -> None:
    strict = Policy(min_participants=2, max_local_epochs=10, mode=pb.MASKING)
    assert "training.mode" in strict.objection(plan(3))
    assert strict.objection(plan(3, pb.MASKING)) == ""
    assert Policy(2, 10).objection(plan(3, pb.MASKING)) == ""


def participant(stage: Stage, site: str) -> Participation:
    """One that has everyone's shares, and whose last step is done."""
    part = Participation(site, stage.ground(), stage.plan(), stage.keys[site])
    part.worked(do.ContextHeld(1, 0, hashlib.sha256(b"roster").digest()))
    return part


def opened(effects: list[do.Effect]) -> list[OpenShares]:
    return [effect for effect in effects if isinstance(effect, OpenShares)]


def outcome(stage: Stage, survivors: str, dropouts: str = "") -> EncodedStatement:
    made = stage.statement_of(sites=survivors, dropouts=list(dropouts))
    return EncodedStatement.of(made)


def test_shares_are_opened_of_the_certified_sum_once_and_of_no_other() -> None:
    """Two outcomes of one attempt would open both secrets of whoever is in one of them only."""
    stage = staged()
    part = participant(stage, "a")
    (opening,) = opened(part.certified(outcome(stage, "abcd", "e")))
    assert (opening.survivors, opening.dropouts) == (tuple("abcd"), ("e",))
    assert opened(part.certified(outcome(stage, "abce", "d"))) == []
    assert opened(part.worked(Masked(1, 0, pb.MaskingAnswer(round=1, step=pb.OPENING)))) == []


def test_no_coordinator_orders_shares_to_be_opened() -> None:
    """Once it named survivors and dropouts; now only a certificate does."""
    order = pb.MaskingOrder(
        round=1, step=pb.OPENING, items=[pb.MaskingItem(site="b", content=bytes(33))]
    )
    with pytest.raises(RemoteProtocolError, match="step is 3; expected one of 1, 2"):
        check(order)


def test_steps_are_done_one_behind_the_other_and_each_once() -> None:
    stage = staged()
    part = Participation("a", stage.ground(), stage.plan(), stage.keys["a"])
    begun = [effect for effect in part.begin() if isinstance(effect, Mask)]
    assert [effect.order for effect in begun] == [None]
    keys = pb.MaskingOrder(round=1, step=pb.KEYS, items=[pb.MaskingItem(site="b")])
    assert part.ordered(keys) == [], "its own keys are not made yet"
    answer = pb.MaskingAnswer(round=1, step=pb.KEYS)
    said, mask = part.worked(Masked(1, 0, answer))
    assert said == do.Send("b", answer)
    assert mask == Mask(1, 0, keys)
    assert part.ordered(keys) == []
    part.worked(Masked(1, 0, answer))
    assert part.ordered(keys) == [], "a second roster would be other keys"


def test_a_site_that_is_not_in_the_sum_opens_nothing() -> None:
    stage = staged()
    late = participant(stage, "e")
    assert late.certified(outcome(stage, "abcd", "e")) == []
    bare = Participation("a", stage.ground(), stage.plan(), stage.keys["a"])
    assert bare.certified(outcome(stage, "abcd", "e")) == [], "it holds nobody's shares"


def test_a_site_whose_input_is_late_still_votes_for_the_sum() -> None:
    """It opens nothing; it fetches the version that the others have made."""
    world = masked_world(5, f=1)
    world.failing = {("d", "encrypt")}
    world.crash("e")  # so that the quorum needs d
    world.train("a", rounds=1)
    world.run_until_committed(1)
    assert world.certificate(1).attempt == 0
    assert contributors(world) == "abc"
    assert {vote.site for vote in world.certificate(1).votes} == set("abcd")
    assert "d -> b: AppliedSum" not in "\n".join(world.transcript)


def test_answers_that_speak_of_other_sites_are_refused() -> None:
    steps = MaskingSteps(masked_plan())

    def answer(step: pb.MaskingStep.ValueType, sites: str) -> pb.MaskingAnswer:
        return pb.MaskingAnswer(round=1, step=step, items=[pb.MaskingItem(site=s) for s in sites])

    with pytest.raises(RemoteProtocolError, match="masking answer of a"):
        steps.keep("a", answer(pb.KEYS, "b"))
    assert not steps.keep("a", answer(pb.SHARES, "bcde")), "not its turn"
    assert not steps.keep("x", answer(pb.KEYS, "x")), "no participant"
    for site in "abcde":
        assert not steps.complete
        assert steps.keep(site, answer(pb.KEYS, site))
        assert not steps.keep(site, answer(pb.KEYS, site)), "once"
    assert steps.complete
    steps.pass_on()
    with pytest.raises(RemoteProtocolError, match="masking answer of a"):
        steps.keep("a", answer(pb.SHARES, "abcde"))
    for site in "abcde":
        assert steps.keep(site, answer(pb.SHARES, "abcde".replace(site, "")))
    steps.pass_on()
    assert steps.dropouts("abcd") == ("e",)
    assert not steps.keep("a", answer(pb.OPENING, "abcde")), "nothing is certified"
    steps.certified(tuple("abcd"))
    with pytest.raises(RemoteProtocolError, match="masking answer of a"):
        steps.keep("a", answer(pb.OPENING, "abcd"))
    assert not steps.keep("e", answer(pb.OPENING, "abcde")), "it is not in the sum"
    for site in "abcd":
        assert steps.keep(site, answer(pb.OPENING, "abcde"))
    openings = [effect.body for effect in steps.pass_on() if isinstance(effect, do.Send)]
    assert len(openings) == 4
    assert all(isinstance(body, pb.Openings) for body in openings)
    opened = cast(pb.Openings, openings[0]).opened
    assert {one.site for one in opened} == set("abcd")


def test_more_than_half_of_sites_and_liars_must_open() -> None:
    """The coordinator, itself a site, counts as one that lies where the manifest says none."""
    for f in (0, 1):
        names = {n: threshold_of(masked_plan("abcdefg"[:n], f)) for n in (3, 4, 5, 7)}
        assert names == {3: 3, 4: 3, 5: 4, 7: 5}
    assert threshold_of(Stage("ab", faulty_sites=0, training=plan(2, pb.MASKING)).plan()) == 2
    assert {n: threshold_of(masked_plan("abcdefghi"[:n], 2)) for n in (5, 7, 9)} == {
        5: 4,
        7: 5,
        9: 6,
    }
