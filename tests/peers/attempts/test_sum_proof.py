"""The proof of a sum in the rounds: the order of things, and what is lost or lied about."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import pytest

from crypto.ckks.sum_proof import NONCE_BYTES
from peers.attempts import effects as do
from peers.attempts.ckks import (
    AnswerChallenge,
    Challenge,
    Challenging,
    KeyCoordinator,
    KeyParticipant,
    check_of,
)
from peers.attempts.lead import Lead, SharedModel
from peers.attempts.participation import Opening, Participation
from peers.attempts.statement import EncodedStatement
from peers.attempts.summation import Summation
from peers.wire.errors import RemoteProtocolError
from proto import federation_pb2 as pb
from tests.simulation.network import TIMING, World, coordinator, plan
from tests.simulation.scenarios.faults import Faults
from tests.support.signed_rounds import EXPONENTS, Stage

AT = {"round": 1, "attempt": 0}
SUM = hashlib.sha256(b"sum").digest()
NONCES = [b"n" * NONCE_BYTES, b"", b"n" * NONCE_BYTES]  # b coordinates


def staged(mode: pb.Mode.ValueType = pb.CKKS, sites: str = "abc") -> Stage:
    return Stage(sites, training=plan(3, mode))


def part(stage: Stage, site: str = "a") -> Participation:
    """A site that holds its key, or everyone's shares."""
    held = b"s" * 32 if stage.plan().key_dealer else hashlib.sha256(b"roster").digest()
    made = Participation(site, stage.ground(), stage.plan(), stage.keys[site])
    made.worked(do.ContextHeld(1, 0, held))
    return made


def applies(effects: list[do.Effect]) -> list[do.ApplySum]:
    return [effect for effect in effects if isinstance(effect, do.ApplySum)]


ARRIVED, CHALLENGING = do.SumArrived(1, 0), Challenging(1, 0, bytes(32))
PROOF = pb.Proof(**AT, answer=b"8 bytes!")


def test_a_sum_is_applied_when_it_its_certificate_and_its_proof_are_here() -> None:
    stage = staged()
    for sum_first in (True, False):
        holder, known = part(stage), stage.statement()
        effects = holder.worked(ARRIVED) if sum_first else []
        effects += holder.certified(known)
        (asked,) = (effect for effect in effects if isinstance(effect, Challenge))
        assert asked.nonces == tuple(zip("abc", NONCES, strict=True))
        (said,) = holder.worked(CHALLENGING)
        assert said == do.Send("b", pb.Challenge(**AT, challenge=bytes(32)))
        assert not applies(effects)
        effects = holder.ordered(PROOF)
        if not sum_first:
            assert not applies(effects)
            effects = holder.worked(ARRIVED)
        (apply,) = applies(effects)
        assert (apply.opening, apply.sum_digest) == (PROOF.answer, SUM)
        assert (apply.root_digest, apply.scale_exponents) == (known.digest, EXPONENTS)
        assert (apply.contributors, apply.total_weight) == (("a", "b", "c"), 3.0)
        assert holder.ordered(PROOF) == holder.worked(ARRIVED) == holder.certified(known) == []
        assert holder.worked(CHALLENGING) == [], "a challenge is told once"


def test_nothing_is_opened_or_challenged_before_a_quorum_has_signed_it() -> None:
    """Whatever the coordinator sends: without the certificate a holder says nothing of it."""
    holder = part(staged())
    assert holder.worked(ARRIVED) == []
    assert holder.worked(CHALLENGING) == []
    with pytest.raises(RemoteProtocolError, match="before it was challenged"):
        holder.ordered(PROOF)
    masked = part(staged(pb.MASKING))
    assert masked.worked(ARRIVED) == masked.ordered(pb.Openings(round=1, attempt=0)) == []


def test_a_second_certified_sum_changes_nothing_of_the_first() -> None:
    """There is no second one in an attempt; were there one, it would not be opened."""
    stage = staged()
    holder, known = part(stage), stage.statement()
    holder.certified(known)
    other = EncodedStatement.of(stage.statement_of(sum_digest=b"t" * 32))
    assert holder.certified(other) == []
    holder.worked(CHALLENGING)
    holder.ordered(PROOF)
    (apply,) = applies(holder.worked(ARRIVED))
    assert (apply.sum_digest, apply.root_digest) == (SUM, known.digest)


def test_who_has_no_key_opens_nothing() -> None:
    stage = staged()
    lead = part(stage, "b")
    assert lead.certified(stage.statement()) == []
    late = Participation("a", stage.ground(), stage.plan(), stage.keys["a"])
    assert late.certified(stage.statement()) == [], "its key has not come"


def test_a_proof_that_nobody_asked_for_is_refused() -> None:
    stage = staged()
    holder = part(stage)
    with pytest.raises(RemoteProtocolError, match="b proves a sum before it was challenged"):
        holder.ordered(PROOF)
    holder.certified(stage.statement())
    with pytest.raises(RemoteProtocolError, match="before it was challenged"):
        holder.ordered(PROOF)


def test_one_encrypted_sum_is_taken_an_attempt_behind_its_certificate() -> None:
    stage = staged()
    holder = part(stage)
    assert not holder.expects("b", pb.ENCRYPTED_SUM), "of a sum that nobody has certified"
    holder.certified(stage.statement())
    assert holder.expects("b", pb.ENCRYPTED_SUM)
    assert not holder.expects("c", pb.ENCRYPTED_SUM)
    holder.worked(ARRIVED)
    assert not holder.expects("b", pb.ENCRYPTED_SUM)


def test_a_masked_sum_waits_for_shares_and_for_no_proof() -> None:
    stage = staged(pb.MASKING)
    site, known = part(stage), stage.statement()
    effects = site.certified(known)
    assert not any(isinstance(effect, Challenge) for effect in effects)
    assert not applies(effects + site.worked(ARRIVED))
    item = pb.MaskingItem(site="c", content=b"share")
    opened = pb.Openings(**AT, opened=[pb.Opened(site="a", items=[item])])
    (apply,) = applies(site.ordered(opened))
    assert apply.opening == {"a": {"c": b"share"}}
    lead = part(stage, "b")
    lead.certified(known)
    assert len(applies(lead.ordered(opened))) == 1, "what it has summed is with it already"


def test_a_version_is_said_of_the_sum_that_was_certified_alone() -> None:
    stage = staged()
    holder, known = part(stage), stage.statement()
    opened = do.SumOpened(1, 0, known.digest, b"v" * 32, 0.5)
    assert holder.opened(opened) is None, "nothing is certified yet"
    holder.certified(known)
    assert holder.opened(replace(opened, root_digest=bytes(32))) is None
    applied = holder.opened(opened)
    assert applied is not None
    assert (applied.root_digest, applied.model_digest) == (known.digest, b"v" * 32)


def masked_sum() -> Summation:
    """At its coordinator: there is no key, and nothing is proven."""
    stage = staged(pb.MASKING)
    lead = Lead("b", stage.ground(), stage.keys["b"], SharedModel(bytes(32), 2), TIMING)
    plan = stage.plan()
    return Summation(lead, stage.bundle(), plan)


def test_a_key_holder_is_answered_once_and_nobody_else() -> None:
    stage = staged()
    lead = KeyCoordinator(stage.plan(), stage.keys["b"], stage.ground().manifest)
    message = pb.Challenge(**AT, challenge=bytes(32))
    assert lead.asked("a", message) == [AnswerChallenge(1, 0, "a", bytes(32))]
    assert lead.asked("a", message) == []
    assert lead.asked("a", pb.Challenge(**AT, challenge=b"x" * 32)) == []
    for stranger in "bx":
        with pytest.raises(RemoteProtocolError, match=f"{stranger} asks for the proof"):
            lead.asked(stranger, message)
    with pytest.raises(RemoteProtocolError, match="a answers in the words of another mode"):
        masked_sum().answered("a", message, 0.0)


def test_all_sites_of_a_plan_agree_and_no_two_plans_do() -> None:
    made = staged().plan()
    check = check_of(made, "f", "a")
    assert (check.holders, check.coordinator) == (("a", "c"), "b")
    assert check_of(made, "f", "c") == replace(check, site="c")
    other = staged().plan()
    other.participants[0].num_examples += 1
    digests = {check.agreed, check_of(other, "f", "a").agreed}
    digests |= {
        check_of(made, "g", "a").agreed,
        check_of(staged(sites="abd").plan(), "f", "a").agreed,
    }
    assert len(digests) == 4


def test_a_challenge_is_none_before_its_time() -> None:
    stage = staged()
    steps = KeyParticipant("a", stage.plan(), stage.keys["a"], stage.ground().manifest)
    assert steps.challenging(CHALLENGING) == []
    assert Opening(stage.plan(), steps).begin() == []


# ---- whole rounds --------------------------------------------------------------------------------


def first_attempt(world: World) -> World:
    world.train("a", rounds=1)
    world.run_until_committed(1)
    assert world.certificate(1).attempt == 0
    return world


@pytest.mark.parametrize("kind", ["Certified", "Challenge", "Proof", "AppliedSum"])
def test_a_message_lost_on_the_way_to_a_proof_costs_that_holder_at_most(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of five sites, two lose it; what the others have made they fetch, and vote for."""
    send = World._send

    def losing(self: World, sender: str, to: str, body: do.Body) -> None:
        if type(body).__name__ != kind or not {sender, to} & {"a", "e"}:
            send(self, sender, to, body)

    monkeypatch.setattr(World, "_send", losing)
    world = first_attempt(World(sites=5, seed=3, min_participants=3, faulty_sites=1))
    assert coordinator(world, 1) == "b"
    assert world.now < TIMING.phase(0) + 10.0
    voters = {vote.site for vote in world.certificate(1).votes}
    assert len(voters) >= world.manifest.quorum
    assert voters & {"a", "e"}, "the quorum needs one of them, which opened nothing"


def test_a_coordinator_that_can_answer_nobody_fails_the_attempt_at_once() -> None:
    world = World(sites=3, seed=4, faulty_sites=1)
    world.failing.add((coordinator(world, 1), "prove"))
    world.train("a", rounds=1)
    world.run_until_committed(1)
    assert "failed 1 sites could open the sum, 2 prove it" in world.text()
    assert world.certificate(1).attempt == 1
    assert world.now < 20.0


def test_a_holder_whose_challenge_is_refused_still_votes() -> None:
    world = World(sites=5, seed=4, faults=Faults(), faulty_sites=1)
    refused: list[str] = []
    answer = world.proofs.answer

    def refusing(site: str, effect: AnswerChallenge) -> do.Event:
        if not refused or effect.holder in refused:
            refused.append(effect.holder)
            return do.OpeningRefused(effect.round, effect.attempt, effect.holder, "another one")
        return answer(site, effect)

    world.proofs.answer = refusing  # type: ignore[method-assign,assignment]
    first_attempt(world)
    assert len(refused) == 1
    world.run_for(10)
    assert f"{refused[0]} -> b: Vote 1.0" in world.text()
    assert f"{refused[0]} -> b: AppliedSum" not in world.text()


def test_who_cannot_challenge_fetches_the_version_and_votes() -> None:
    world = World(sites=5, seed=4, min_participants=2, faulty_sites=1)
    world.failing.add(("c", "apply"))
    world.crash("e")  # so that the quorum needs c
    world.train("a", rounds=1)
    world.run_until_committed(1)
    assert world.certificate(1).attempt == 0
    assert "c -> b: Challenge" not in world.text()
    assert "c -> b: Vote 1.0" in world.text()
