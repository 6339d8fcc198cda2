"""The proof of a sum in one attempt: what is claimed, asked and answered. PURE.

    apply (a claim) -> challenge -> proof -> the sum is decrypted and applied

The order is what makes it a proof (docs/decisions/0014): a coordinator that is told
a challenge has said before which sum it will be held to. So a key holder takes one
claim an attempt, tells its challenge behind it, and applies nothing unproven. In
masking mode the sum is opened by shares and proven by nothing: it waits for claim
and sum alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from crypto.checksum import NONCE_BYTES, Check
from peers import effects as do
from peers.errors import RemoteProtocolError
from peers.masking_steps import is_masked
from peers.roles import key_holders
from proto import federation_pb2 as pb

_LABEL = b"hanse-sum-check-plan-v1\0"


def check_of(plan: pb.Plan, federation_id: str, coordinator: str, site: str) -> Check:
    """What all sites of the plan's attempt must agree on, as ``site`` sees it."""
    agreed = hashlib.sha256(_LABEL)
    agreed.update(hashlib.sha256(federation_id.encode()).digest())
    agreed.update(plan.SerializeToString(deterministic=True))
    holders = tuple(sorted(key_holders(plan, coordinator)))
    return Check(site, coordinator, holders, agreed.digest())


@dataclass
class Challenges:
    """At the coordinator: which key holders have asked for the proof of the sum."""

    plan: pb.Plan
    holders: Sequence[str]
    _asked: set[str] = field(default_factory=set)

    @property
    def silent(self) -> set[str]:
        """Who has asked for nothing; in masking mode nobody has to."""
        return set() if is_masked(self.plan) else set(self.holders) - self._asked

    def asked(self, holder: str, message: pb.Challenge) -> list[do.Effect]:
        """A challenge; each holder is answered once. Raises RemoteProtocolError."""
        if holder not in self.holders or is_masked(self.plan):
            raise RemoteProtocolError(f"{holder} asks for the proof of a sum and holds no key")
        if holder in self._asked:
            return []
        self._asked.add(holder)
        return [do.AnswerChallenge(message.round, message.attempt, holder, message.challenge)]


@dataclass
class Opening:
    """At a key holder: the claim, the sum and its proof, whatever comes first.

    ``claim`` is set once; what is applied, and voted for, is what it says.
    """

    plan: pb.Plan
    coordinator: str
    claim: pb.Apply | None = None
    sum_here: bool = False
    _told: bool = False
    _answer: bytes = b""
    _begun: bool = False

    def check(self, message: pb.Apply) -> None:
        """Raises RemoteProtocolError unless it is the first claim, with a nonce for each site."""
        if self.claim is not None:
            raise RemoteProtocolError(f"{self.coordinator} claims a second sum in one attempt")
        expected = [0 if site == self.coordinator else NONCE_BYTES for site in message.contributors]
        if [len(nonce) for nonce in message.nonces] != ([] if is_masked(self.plan) else expected):
            raise RemoteProtocolError(
                f"{self.coordinator} claims a sum that its nonces could not prove"
            )

    def claimed(self, message: pb.Apply) -> list[do.Effect]:
        """The claim is fixed: ask for its proof."""
        self.claim = message
        if is_masked(self.plan):
            return []
        nonces = tuple(zip(message.contributors, message.nonces, strict=True))
        at = (message.round, message.attempt)
        return [do.Challenge(*at, self.coordinator, message.sum_digest, nonces)]

    def challenging(self, event: do.Challenging) -> list[do.Effect]:
        """Our challenge, made behind the claim: tell it, once."""
        if self.claim is None or self._told:
            return []
        self._told = True
        message = pb.Challenge(round=event.round, attempt=event.attempt, challenge=event.challenge)
        return [do.Send(self.coordinator, message)]

    def proven(self, message: pb.Proof) -> None:
        """The coordinator's answer. Raises RemoteProtocolError when nothing was asked."""
        if not self._told:
            raise RemoteProtocolError(f"{self.coordinator} proves a sum before it was challenged")
        self._answer = self._answer or message.answer

    def begin(self) -> pb.Apply | None:
        """What to apply, once, as soon as everything is here."""
        here = self.sum_here and (is_masked(self.plan) or self._answer)
        if self.claim is None or self._begun or not here:
            return None
        self._begun = True
        return self.claim

    @property
    def answer(self) -> bytes:
        """What the coordinator answered; empty in masking mode."""
        return self._answer
