"""Sums under CKKS in one attempt: the round's key, and the proof of the sum. PURE.

    plan -> the dealer makes the key -> its public part at the coordinator, secret ones at
    the key holders, all held to the dealer's signed commitment

    a certified statement -> challenge -> proof -> the sum is decrypted and applied

The key holders are the participants other than the coordinator (docs/decisions/0001). The
order is what makes it a proof (docs/decisions/0014): a coordinator that is told a challenge
has been held, by the signatures of a quorum, to one sum before.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import ClassVar

from crypto.ckks.dot_products import question_size
from crypto.ckks.parameters import CkksParameters, parameters_of
from crypto.ckks.sum_proof import NONCE_BYTES, Check, size_of_tags
from peers.attempts import effects as do
from peers.attempts.secure_sum import CoordinatorSteps, Mode, ParticipantSteps
from peers.plans.robust import is_robust
from peers.wire.errors import RemoteProtocolError
from peers.wire.manifest import FederationManifest
from peers.wire.signing import Keys, Kind, digest_of, must_be, read, sign
from peers.wire.vectors import largest_size
from proto import federation_pb2 as pb

# ---- the events and effects of this mode alone ------------------------------------


@dataclass(frozen=True)
class KeyDealt(do.WorkDone):
    """This key dealer has made the round's key: SHA-256 of its public and its secret part."""

    public_digest: bytes
    secret_digest: bytes


@dataclass(frozen=True)
class Challenging(do.WorkDone):
    """What this key holder asks about the certified sum; from now on it takes no other."""

    challenge: bytes


@dataclass(frozen=True)
class ChallengeAnswered(do.WorkDone):
    """The coordinator's answer to one key holder is computed."""

    holder: str
    answer: bytes


@dataclass(frozen=True)
class DealKey(do.WorkOfPlan):
    """Make the round key; public part to the coordinator, secret part sealed to each holder.

    Answer with `KeyDealt` before either is sent.
    """

    phase: ClassVar = "key"
    coordinator: str


@dataclass(frozen=True)
class Challenge(do.OfAttempt, do.Work):
    """Bind this key holder to what was certified, and only then make its challenge.

    ``nonces``: the contributors, sorted, each with the nonce of its tags.
    Answer with `Challenging`.
    """

    phase: ClassVar = "open"
    coordinator: str
    sum_digest: bytes
    nonces: tuple[tuple[str, bytes], ...]


@dataclass(frozen=True)
class AnswerChallenge(do.OfAttempt, do.Work):
    """Prove the sum to one key holder; ends with `ChallengeAnswered` or `OpeningRefused`."""

    phase: ClassVar = "prove"
    holder: str
    challenge: bytes


# ---- what follows from the plan ----------------------------------------------------

_LABEL = b"hanse-sum-check-plan-v2\0"


def check_of(plan: pb.Plan, federation_id: str, site: str) -> Check:
    """What all sites of the plan's attempt must agree on, as ``site`` sees it."""
    agreed = hashlib.sha256(_LABEL)
    agreed.update(hashlib.sha256(federation_id.encode()).digest())
    agreed.update(plan.SerializeToString(deterministic=True))
    holders = tuple(sorted(holders_of(plan)))
    return Check(site, plan.coordinator, holders, agreed.digest())


def next_after(site: str, candidates: Sequence[str]) -> str:
    """The first candidate after ``site`` in rotation, never ``site`` itself."""
    others = sorted(c for c in candidates if c != site)
    return next((c for c in others if c > site), others[0])


def holders_of(plan: pb.Plan) -> list[str]:
    """Who holds the round's key, and may open the sum: participants but the coordinator."""
    return [p.site for p in plan.participants if p.site != plan.coordinator]


def parameters_of_plan(plan: pb.Plan) -> CkksParameters:
    """The encryption parameters of the plan's round."""
    return parameters_of(
        len(plan.participants), plan.training.bits, measurable=is_robust(plan.training)
    )


# ---- the steps --------------------------------------------------------------------


class KeyCoordinator(CoordinatorSteps):
    """What the coordinator has of the round's key, and who has asked for the proof of the sum."""

    def __init__(self, plan: pb.Plan, keys: Keys, manifest: FederationManifest) -> None:
        self.plan = plan
        self._keys = keys
        self._manifest = manifest
        self._public_digest = b""
        self._commitment: pb.Signed | None = None
        self._is_certified = False
        self._asked: set[str] = set()

    @property
    def ready(self) -> bool:
        """The key is here, and the dealer's word on it."""
        return self._commitment is not None and bool(self._public_digest)

    @property
    def objection(self) -> str:
        """Why the key that is here is not the one that was signed; empty when it is."""
        if self._commitment is None:
            return ""
        commitment = pb.KeyCommitment.FromString(self._commitment.body)
        if commitment.public_digest == self._public_digest:
            return ""
        return f"the key dealer {self.plan.key_dealer} sent another key than it signed"

    def expects_context(self, sender: str) -> bool:
        """Whether the key dealer's public context is still to come."""
        return not self._public_digest and sender == self.plan.key_dealer

    def answered(self, sender: str, message: do.AttemptMessage) -> list[do.Effect]:
        """The dealer commits itself, or a key holder asks for the proof."""
        match message:
            case pb.KeyCommitted():
                self._committed(sender, message)
            case pb.Challenge() if self._is_certified:
                return self.asked(sender, message)
        return []

    def _committed(self, sender: str, message: pb.KeyCommitted) -> None:
        """The dealer's word on the key, which everybody will hold it to; the first one counts."""
        if self._commitment is not None:
            return
        signed = message.commitment
        commitment = read(self._keys, Kind.KEY_COMMITMENT, pb.KeyCommitment, signed, self._manifest)
        dealer = signed.site == sender == self.plan.key_dealer
        must_be(dealer, sender, "commits itself to a key that it does not deal")
        same = commitment.plan_digest == digest_of(self.plan)
        must_be(same, sender, "deals a key for another plan")
        self._commitment = signed

    def asked(self, holder: str, message: pb.Challenge) -> list[do.Effect]:
        """A challenge; each holder is answered once. Raises RemoteProtocolError."""
        if holder not in holders_of(self.plan):
            raise RemoteProtocolError(f"{holder} asks for the proof of a sum and holds no key")
        if holder in self._asked:
            return []
        self._asked.add(holder)
        return [AnswerChallenge(message.round, message.attempt, holder, message.challenge)]

    def worked(self, event: do.WorkDone) -> list[do.Effect]:
        """The public context is here, or a proof is made."""
        match event:
            case do.ContextHeld():
                self._public_digest = self._public_digest or event.digest
            case ChallengeAnswered():
                proof = pb.Proof(round=event.round, attempt=event.attempt, answer=event.answer)
                return [do.Send(event.holder, proof)]
        return []

    def openers(self, contributors: Collection[str] | None) -> set[str]:
        """The key holders, whoever is in the sum."""
        del contributors
        return set(holders_of(self.plan))

    def describe(self, statement: pb.Statement) -> None:
        """Which key it is, in the dealer's own words."""
        if self._commitment is not None:
            statement.commitment.CopyFrom(self._commitment)

    def certified(self, contributors: tuple[str, ...]) -> None:
        """Key holders may ask for the proof from now on."""
        del contributors
        self._is_certified = True


class KeyParticipant(ParticipantSteps):
    """A participant: deals the key where that is its part, holds it, asks for the proof."""

    def __init__(self, site: str, plan: pb.Plan, keys: Keys, manifest: FederationManifest) -> None:
        super().__init__(site, plan, keys, manifest)
        self._is_certified = False
        self._told = False

    def begin(self) -> list[do.Effect]:
        """Deal the key, if that is our part."""
        if self.site != self.plan.key_dealer:
            return []
        return [DealKey(self.plan, self.plan.coordinator)]

    def expects_context(self, sender: str) -> bool:
        """Whether the dealer's secret context is still to come."""
        from_dealer = sender == self.plan.key_dealer and not self.context_digest
        return from_dealer and self.may_open

    def worked(self, event: do.WorkDone) -> list[do.Effect]:
        """The key is made here, or our challenge."""
        match event:
            case KeyDealt():
                return self._commit(event)
            case Challenging():
                return self.challenging(event)
        return []

    def _commit(self, event: KeyDealt) -> list[do.Effect]:
        """We have made the round's key: commit ourselves to it, for all to compare."""
        commitment = pb.KeyCommitment(
            plan_digest=digest_of(self.plan),
            public_digest=event.public_digest,
            secret_digest=event.secret_digest,
        )
        signed = sign(self.keys, Kind.KEY_COMMITMENT, commitment)
        message = pb.KeyCommitted(round=event.round, attempt=event.attempt, commitment=signed)
        return [do.Send(self.plan.coordinator, message)]

    def challenging(self, event: Challenging) -> list[do.Effect]:
        """Our challenge, made behind the statement: tell it, once."""
        if not self._is_certified or self._told:
            return []
        self._told = True
        message = pb.Challenge(round=event.round, attempt=event.attempt, challenge=event.challenge)
        return [do.Send(self.plan.coordinator, message)]

    def ordered(self, message: do.AttemptMessage) -> list[do.Effect]:
        """The coordinator's proof. Raises RemoteProtocolError when nothing was asked."""
        if not isinstance(message, pb.Proof):
            return []
        must_be(self._told, self.plan.coordinator, "proves a sum before it was challenged")
        self.opening = self.opening or message.answer or None
        return []

    def check_own(self, statement: pb.Statement) -> None:
        """The key that we hold is the one that the dealer has signed."""
        if not (self.may_open and self.context_digest):
            return
        commitment = statement.commitment
        committed = read(
            self.keys, Kind.KEY_COMMITMENT, pb.KeyCommitment, commitment, self.manifest
        )
        same = committed.secret_digest == self.context_digest
        must_be(same, self.plan.key_dealer, "dealt us another key than it signed")

    @property
    def may_open(self) -> bool:
        """Whether this site is a key holder."""
        return self.site in holders_of(self.plan)

    def opens(self, contributors: Collection[str]) -> bool:
        """Whether this site has its key."""
        del contributors
        return self.may_open and bool(self.context_digest)

    def certified(self, statement: pb.Statement) -> list[do.Effect]:
        """Bind ourselves to this sum, and ask for its proof."""
        self._is_certified = True
        nonces = tuple(
            (signed.site, pb.Contribution.FromString(signed.body).nonce)
            for signed in statement.contributions
        )
        at = (self.plan.round, self.plan.attempt)
        return [Challenge(*at, self.plan.coordinator, statement.sum_digest, nonces)]


class Ckks(Mode):
    """Updates are encrypted under a key of the attempt, which its coordinator never has."""

    orders: ClassVar = {pb.Proof: False}
    answers: ClassVar = (pb.KeyCommitted, pb.Challenge)

    def dealer(self, coordinator: str, participants: Sequence[str]) -> str:
        """The next participant behind the coordinator."""
        return next_after(coordinator, participants)

    def holders(self, plan: pb.Plan) -> list[str]:
        """Participants but the coordinator."""
        return holders_of(plan)

    def tag_bytes(self, plan: pb.Plan, site: str) -> int:
        """The coordinator makes no tags: it would prove its sum to itself."""
        return 0 if site == plan.coordinator else NONCE_BYTES

    def largest(self, kind: pb.BlobKind.ValueType, plan: pb.Plan, values: int) -> int:
        """By the plan's encryption parameters; an update has tags behind it."""
        contributors, parameters = len(plan.participants), parameters_of_plan(plan)
        if kind == pb.ENCRYPTED_PRODUCTS:
            return question_size(parameters, contributors)
        tags = size_of_tags(contributors) if kind == pb.ENCRYPTED_UPDATE else 0
        return largest_size(parameters, values, trailer=tags)

    def check_statement(
        self, statement: pb.Statement, keys: Keys, manifest: FederationManifest
    ) -> None:
        """The dealer has signed a key for this plan."""
        plan, commitment = statement.plan, statement.commitment
        committed = read(keys, Kind.KEY_COMMITMENT, pb.KeyCommitment, commitment, manifest)
        dealt = commitment.site == plan.key_dealer and committed.plan_digest == digest_of(plan)
        must_be(dealt, plan.coordinator, "states no key")

    def coordinator(
        self, plan: pb.Plan, keys: Keys, manifest: FederationManifest
    ) -> KeyCoordinator:
        """The key's public part, and the proofs."""
        return KeyCoordinator(plan, keys, manifest)

    def participant(
        self, site: str, plan: pb.Plan, keys: Keys, manifest: FederationManifest
    ) -> KeyParticipant:
        """The key's secret part, and the challenges."""
        return KeyParticipant(site, plan, keys, manifest)
