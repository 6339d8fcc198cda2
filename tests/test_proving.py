"""The proof of a sum in the rounds: the order of things, and what is lost or lied about."""

from __future__ import annotations

from dataclasses import replace

import pytest

from crypto.checksum import NONCE_BYTES
from peers import effects as do
from peers.errors import RemoteProtocolError
from peers.participation import Participation
from peers.proving import Challenges, Opening, check_of
from proto import federation_pb2 as pb
from tests.scenarios.faults import Faults
from tests.simulation import TIMING, World, coordinator, plan

AT = {"round": 1, "attempt": 0}
NONCES = [b"\1" * NONCE_BYTES, b"", b"\3" * NONCE_BYTES]  # b coordinates
DIGEST = b"s" * 32


def made(mode: pb.Mode.ValueType = pb.CKKS, sites: str = "abc") -> pb.Plan:
    return pb.Plan(
        participants=[pb.Participant(site=site, num_examples=10) for site in sites],
        training=plan(mode=mode),
        round=1,
    )


def claim(**changed: object) -> pb.Apply:
    fields: dict[str, object] = {
        "contributors": list("abc"),
        "sum_digest": DIGEST,
        "scale_exponents": [1, 2],
        "nonces": NONCES,
    }
    return pb.Apply(**AT, **{**fields, **changed})  # type: ignore[arg-type]


def part(site: str = "a", mode: pb.Mode.ValueType = pb.CKKS) -> Participation:
    return Participation(site, "b", "f", made(mode))


def applies(effects: list[do.Effect]) -> list[do.ApplySum]:
    return [effect for effect in effects if isinstance(effect, do.ApplySum)]


ARRIVED, CHALLENGING = do.SumArrived(1, 0, DIGEST), do.Challenging(1, 0, bytes(32))
PROOF = pb.Proof(**AT, answer=b"8 bytes!")


def test_a_sum_is_applied_when_claim_sum_and_proof_are_here_whatever_comes_first() -> None:
    for sum_first in (True, False):
        holder = part()
        effects = holder.worked(ARRIVED) if sum_first else []
        effects += holder.ordered(claim())
        (asked,) = (effect for effect in effects if isinstance(effect, do.Challenge))
        assert asked.nonces == tuple(zip("abc", NONCES, strict=True))
        (said,) = holder.worked(CHALLENGING)
        assert said == do.Send("b", pb.Challenge(**AT, challenge=bytes(32)))
        assert not applies(effects)
        effects = holder.ordered(PROOF)
        if not sum_first:
            assert not applies(effects)
            effects = holder.worked(ARRIVED)
        (apply,) = applies(effects)
        assert (apply.answer, apply.sum_digest) == (PROOF.answer, DIGEST)
        assert (apply.contributors, apply.total_weight) == (3, 3.0)
        assert holder.ordered(PROOF) == holder.worked(ARRIVED) == holder.ordered(claim()) == []
        assert holder.worked(CHALLENGING) == [], "a challenge is told once"


def test_a_second_claim_is_refused_and_the_first_one_stands() -> None:
    holder = part()
    holder.ordered(claim())
    for other in (
        claim(sum_digest=b"t" * 32),
        claim(nonces=[bytes(16), b"", bytes(16)]),
        claim(scale_exponents=[2, 2]),
    ):
        with pytest.raises(RemoteProtocolError, match="b claims a second sum"):
            holder.ordered(other)
    holder.worked(CHALLENGING)
    holder.ordered(PROOF)
    (apply,) = applies(holder.worked(ARRIVED))
    assert (apply.sum_digest, apply.scale_exponents) == (DIGEST, (1, 2))


@pytest.mark.parametrize(
    "nonces",
    [[], [b"", *NONCES[1:]], [*NONCES[:2], b""], [bytes(16)] * 3, NONCES[:2]],
)
def test_a_claim_without_every_nonce_is_refused(nonces: list[bytes]) -> None:
    with pytest.raises(RemoteProtocolError, match="its nonces could not prove"):
        part().ordered(claim(nonces=nonces))


def test_a_proof_that_nobody_asked_for_is_refused() -> None:
    holder = part()
    with pytest.raises(RemoteProtocolError, match="before it was challenged"):
        holder.ordered(PROOF)
    holder.ordered(claim())
    with pytest.raises(RemoteProtocolError, match="before it was challenged"):
        holder.ordered(PROOF)


def test_one_encrypted_sum_is_taken_an_attempt() -> None:
    holder = part()
    assert holder.expects("b", pb.ENCRYPTED_SUM)
    holder.worked(ARRIVED)
    assert not holder.expects("b", pb.ENCRYPTED_SUM)


def test_a_masked_sum_waits_for_no_proof() -> None:
    holder = part(mode=pb.MASKING)
    with pytest.raises(RemoteProtocolError, match="its nonces"):
        holder.ordered(claim())
    assert not applies(holder.ordered(claim(nonces=[])))
    (apply,) = applies(holder.worked(ARRIVED))
    assert apply.answer == b""
    lead = part("b", pb.MASKING)
    assert lead.worked(do.Unmasked(1, 0, DIGEST)) == []
    assert len(applies(lead.ordered(claim(nonces=[])))) == 1


def test_a_key_holder_is_answered_once_and_nobody_else() -> None:
    lead = Challenges(made(), ["a", "c"])
    message = pb.Challenge(**AT, challenge=bytes(32))
    assert lead.silent == {"a", "c"}
    assert lead.asked("a", message) == [do.AnswerChallenge(1, 0, "a", bytes(32))]
    assert lead.asked("a", message) == []
    assert lead.asked("a", pb.Challenge(**AT, challenge=b"x" * 32)) == []
    assert lead.silent == {"c"}
    with pytest.raises(RemoteProtocolError, match="x asks for the proof"):
        lead.asked("x", message)
    with pytest.raises(RemoteProtocolError, match="a asks for the proof"):
        Challenges(made(pb.MASKING), ["a"]).asked("a", message)


def test_all_sites_of_a_plan_agree_and_no_two_plans_do() -> None:
    check = check_of(made(), "f", "b", "a")
    assert (check.holders, check.coordinator) == (("a", "c"), "b")
    assert check_of(made(), "f", "b", "c") == replace(check, site="c")
    other = made()
    other.participants[0].num_examples += 1
    digests = {check.agreed, check_of(other, "f", "b", "a").agreed}
    digests |= {
        check_of(made(), "g", "b", "a").agreed,
        check_of(made(sites="abd"), "f", "b", "a").agreed,
    }
    assert len(digests) == 4


def test_a_claim_is_no_claim_before_its_time() -> None:
    opening = Opening(made(), "b")
    assert opening.challenging(CHALLENGING) == []
    assert opening.begin() is None


# ---- whole rounds --------------------------------------------------------------------------------


def first_attempt(world: World) -> World:
    world.train("a", rounds=1)
    world.run_until_committed(1)
    assert world.certificate(1).attempt == 0
    return world


@pytest.mark.parametrize("kind", ["Apply", "Challenge", "Proof"])
def test_a_message_lost_on_the_way_to_a_proof_costs_that_holder_at_most(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of five sites, two lose it; without their votes there is a majority yet."""
    send = World._send

    def losing(self: World, sender: str, to: str, body: do.Body) -> None:
        if type(body).__name__ != kind or not {sender, to} & {"a", "e"}:
            send(self, sender, to, body)

    monkeypatch.setattr(World, "_send", losing)
    world = first_attempt(World(sites=5, seed=3, min_participants=3))
    assert coordinator(world, 1) == "b"
    assert world.now < TIMING.phase(0) + 10.0
    voters = {vote.site for vote in world.certificate(1).votes}
    assert len(voters - {"a", "e"}) >= 1
    fetched = [line for line in world.transcript if "b -> a: Accept" in line]
    assert bool(fetched) == (kind != "Proof"), "who has not asked is told to fetch the version"


def test_a_coordinator_that_can_answer_nobody_fails_the_attempt_at_once() -> None:
    world = World(sites=3, seed=4)
    world.failing.add((coordinator(world, 1), "prove"))
    world.train("a", rounds=1)
    world.run_until_committed(1)
    assert "failed no key holder could apply the sum; a: no; c: no" in world.text()
    assert world.certificate(1).attempt == 1
    assert world.now < 20.0


def test_a_holder_whose_challenge_is_refused_still_votes() -> None:
    world = World(sites=3, seed=4, faults=Faults())
    refused: list[str] = []
    answer = world.proofs.answer

    def refusing(site: str, effect: do.AnswerChallenge) -> do.Event:
        if not refused or effect.holder in refused:
            refused.append(effect.holder)
            return do.ChallengeRefused(effect.round, effect.attempt, effect.holder, "another one")
        return answer(site, effect)

    world.proofs.answer = refusing  # type: ignore[method-assign,assignment]
    first_attempt(world)
    assert len(refused) == 1
    world.run_for(10)
    assert f"b -> {refused[0]}: Accept" in world.text()


def test_who_misses_its_key_challenges_nobody() -> None:
    """The claim comes before the key does: the crypto worker says so, as a failed application."""
    world = World(sites=3, seed=4, min_participants=2)
    world.failing.add(("c", "apply"))
    first_attempt(world)
    sent = [line for line in world.transcript if "c -> b: Challenge" in line]
    assert not sent
