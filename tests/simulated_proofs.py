"""The proofs of sums in a simulated federation: the rules, without arithmetic.

What the real crypto workers hold by inner products is held here by digests: an answer
is right for one challenge and one sum, and a site applies none without the right one.
"""

from __future__ import annotations

import hashlib
import random
from collections import defaultdict

from peers import effects as do
from proto import federation_pb2 as pb
from tests.scenarios.invariants import claim

_At = tuple[str, int, int]


class SimulatedProofs:
    """All sites' workers, as far as they add, claim, challenge and answer."""

    def __init__(self, plans: dict[tuple[int, int], pb.Plan], chance: random.Random) -> None:
        self._plans = plans
        self._random = chance
        self._added: dict[_At, set[str]] = defaultdict(set)
        self._sums: dict[_At, bytes] = {}
        self._claims: dict[_At, do.Challenge] = {}

    def add(self, site: str, effect: do.AddUpdate) -> do.UpdateAdded:
        """The coordinator has an update in its sum."""
        self._added[site, effect.round, effect.attempt].add(effect.site)
        return do.UpdateAdded(effect.round, effect.attempt, effect.site)

    def finish(self, site: str, effect: do.FinishSum) -> do.SumFinished:
        """The coordinator's sum is written; in masking mode nothing proves it."""
        at = (effect.round, effect.attempt)
        digest = self._random.randbytes(32)
        if self._is_masked(*at):
            return do.SumFinished(*at, digest)
        nonces = tuple(
            (one, b"" if one == site else hashlib.sha256(f"{one} {at}".encode()).digest()[:16])
            for one in sorted(self._added[site, *at])
        )
        self._sums[site, *at] = _sum(digest, nonces)
        return do.SumFinished(*at, digest, nonces)

    def challenge(self, site: str, effect: do.Challenge) -> do.Challenging:
        """A key holder binds itself to a claim."""
        at = (effect.round, effect.attempt)
        known = self._claims.setdefault((site, *at), effect)
        claim(known == effect, f"{site}: takes a second claim in {at}")
        return do.Challenging(*at, _challenge(site, *at))

    def answer(self, site: str, effect: do.AnswerChallenge) -> do.ChallengeAnswered:
        """The coordinator answers for the sum that it has made, whatever it claimed."""
        at = (effect.round, effect.attempt)
        answer = _answer(effect.challenge, self._sums[site, *at])
        return do.ChallengeAnswered(*at, effect.holder, answer)

    def applies(self, site: str, effect: do.ApplySum) -> None:
        """Before a sum is decrypted: it is proven, and the proof is of this very claim."""
        at = (effect.round, effect.attempt)
        if self._is_masked(*at):
            claim(not effect.answer, f"{site}: a masked sum with a proof")
            return
        known = self._claims.get((site, *at))
        if known is None:
            claim(False, f"{site}: applies a sum that it took no claim of")
            return
        right = _answer(_challenge(site, *at), _sum(known.sum_digest, known.nonces))
        claim(effect.answer == right, f"{site}: applies a sum without the proof of its claim")
        same = (known.sum_digest, len(known.nonces))
        claim((effect.sum_digest, effect.contributors) == same, f"{site}: applies another sum")

    def _is_masked(self, round_: int, attempt: int) -> bool:
        return self._plans[round_, attempt].training.mode == pb.MASKING


def _sum(digest: bytes, nonces: tuple[tuple[str, bytes], ...]) -> bytes:
    return hashlib.sha256(digest + repr(nonces).encode()).digest()


def _challenge(site: str, round_: int, attempt: int) -> bytes:
    return hashlib.sha256(f"challenge {site} {round_}.{attempt}".encode()).digest()


def _answer(challenge: bytes, total: bytes) -> bytes:
    return hashlib.sha256(challenge + total).digest()[:8]
