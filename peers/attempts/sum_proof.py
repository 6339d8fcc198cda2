"""The proof of a sum in one attempt: what is certified, asked and answered. PURE.

    a certified statement -> challenge -> proof -> the sum is decrypted and applied

The order is what makes it a proof (docs/decisions/0014): a coordinator that is told
a challenge has been held, by the signatures of a quorum, to one sum before. In masking
mode there is no key and nothing is proven: every contributor takes off the masks of the
certified sum by itself.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, field

from crypto.ckks.sum_proof import Check
from peers.attempts import effects as do
from peers.attempts.roles import is_masked, key_holders
from peers.attempts.statement import Known, weights_of
from peers.wire.errors import RemoteProtocolError
from proto import federation_pb2 as pb

_LABEL = b"hanse-sum-check-plan-v2\0"


def check_of(plan: pb.Plan, federation_id: str, site: str) -> Check:
    """What all sites of the plan's attempt must agree on, as ``site`` sees it."""
    agreed = hashlib.sha256(_LABEL)
    agreed.update(hashlib.sha256(federation_id.encode()).digest())
    agreed.update(plan.SerializeToString(deterministic=True))
    holders = tuple(sorted(key_holders(plan)))
    return Check(site, plan.coordinator, holders, agreed.digest())


@dataclass
class Challenges:
    """At the coordinator: which key holders have asked for the proof of the sum."""

    plan: pb.Plan
    _asked: set[str] = field(default_factory=set)

    def asked(self, holder: str, message: pb.Challenge) -> list[do.Effect]:
        """A challenge; each holder is answered once. Raises RemoteProtocolError."""
        if is_masked(self.plan) or holder not in key_holders(self.plan):
            raise RemoteProtocolError(f"{holder} asks for the proof of a sum and holds no key")
        if holder in self._asked:
            return []
        self._asked.add(holder)
        return [do.AnswerChallenge(message.round, message.attempt, holder, message.challenge)]


@dataclass
class Opening:
    """At a site that opens the sum: its statement, the sum and its proof, in any order."""

    plan: pb.Plan
    known: Known | None = None
    sum_here: bool = False
    _told: bool = False
    _answer: bytes = b""
    _opened: pb.Openings | None = None
    _begun: bool = False

    def certified(self, known: Known) -> list[do.Effect]:
        """The statement is certain: from now on its sum, and no other, is opened."""
        self.known = known
        if is_masked(self.plan):
            return []
        nonces = tuple(
            (signed.site, pb.Contribution.FromString(signed.body).nonce)
            for signed in known.message.contributions
        )
        at = (self.plan.round, self.plan.attempt)
        return [do.Challenge(*at, self.plan.coordinator, known.message.sum_digest, nonces)]

    def challenging(self, event: do.Challenging) -> list[do.Effect]:
        """Our challenge, made behind the statement: tell it, once."""
        if self.known is None or self._told:
            return []
        self._told = True
        message = pb.Challenge(round=event.round, attempt=event.attempt, challenge=event.challenge)
        return [do.Send(self.plan.coordinator, message)]

    def proven(self, message: pb.Proof) -> None:
        """The coordinator's answer. Raises RemoteProtocolError when nothing was asked."""
        if not self._told:
            raise RemoteProtocolError(
                f"{self.plan.coordinator} proves a sum before it was challenged"
            )
        self._answer = self._answer or message.answer

    def shares_opened(self, message: pb.Openings) -> None:
        """Everybody's shares; the first ones count."""
        self._opened = self._opened or message

    def begin(self) -> list[do.Effect]:
        """Open the sum, once, as soon as everything is here."""
        known, opened = self.known, self._opened
        ready = opened is not None if is_masked(self.plan) else bool(self._answer)
        if known is None or self._begun or not (self.sum_here and ready):
            return []
        self._begun = True
        weights = weights_of(known.message)
        return [
            do.ApplySum(
                self.plan.round,
                self.plan.attempt,
                root_digest=known.digest,
                scale_exponents=tuple(known.message.scale_exponents),
                total_weight=math.fsum(weights[site] for site in known.contributors),
                parent_digest=self.plan.parent_digest,
                sum_digest=known.message.sum_digest,
                contributors=known.contributors,
                dropouts=tuple(known.message.dropouts),
                answer=self._answer,
                opened={
                    one.site: {item.site: item.content for item in one.items}
                    for one in (opened.opened if opened is not None else ())
                },
            )
        ]
