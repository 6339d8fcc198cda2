"""The proofs of sums in a simulated federation: the rules, without arithmetic.

What the real crypto workers hold by inner products is held here by digests: an answer
is right for one challenge and one sum, and a site applies none without the right one.
"""

from __future__ import annotations

import hashlib
import random
from collections import defaultdict

from peers.attempts import effects as do
from peers.attempts.ckks import AnswerChallenge, Challenge, ChallengeAnswered, Challenging
from peers.attempts.masking import threshold_of
from proto import federation_pb2 as pb
from tests.simulation.scenarios.invariants import claim

_At = tuple[str, int, int]


class SimulatedProofs:
    """All sites' workers, as far as they add, claim, challenge and answer."""

    def __init__(self, plans: dict[tuple[int, int], pb.Plan], chance: random.Random) -> None:
        self._plans = plans
        self._random = chance
        self._added: dict[_At, set[str]] = defaultdict(set)
        self._sums: dict[_At, bytes] = {}
        self._claims: dict[_At, Challenge] = {}

    def add(self, site: str, effect: do.AddUpdate) -> do.UpdateAdded | do.UpdateRefused:
        """The coordinator has an update in its sum, unless its owner signed other tags."""
        at = (effect.round, effect.attempt)
        if effect.nonce and effect.nonce != _nonce(effect.site, at):
            return do.UpdateRefused(*at, effect.site, "other tags than were signed")
        self._added[site, effect.round, effect.attempt].add(effect.site)
        return do.UpdateAdded(effect.round, effect.attempt, effect.site)

    def finish(self, site: str, effect: do.FinishSum) -> do.SumFinished:
        """The coordinator's sum is written; in masking mode nothing proves it."""
        at = (effect.round, effect.attempt)
        digest = self._random.randbytes(32)
        if not self._is_masked(*at):
            nonces = tuple(
                (one, b"" if one == site else _nonce(one, at))
                for one in sorted(self._added[site, *at])
            )
            self._sums[site, *at] = _sum(digest, nonces)
        return do.SumFinished(*at, digest)

    def challenge(self, site: str, effect: Challenge) -> Challenging:
        """A key holder binds itself to a claim."""
        at = (effect.round, effect.attempt)
        known = self._claims.setdefault((site, *at), effect)
        claim(known == effect, f"{site}: takes a second claim in {at}")
        return Challenging(*at, _challenge(site, *at))

    def answer(self, site: str, effect: AnswerChallenge) -> ChallengeAnswered:
        """The coordinator answers for the sum that it has made, whatever it claimed."""
        at = (effect.round, effect.attempt)
        answer = _answer(effect.challenge, self._sums[site, *at])
        return ChallengeAnswered(*at, effect.holder, answer)

    def applies(self, site: str, effect: do.ApplySum) -> str:
        """Why a real worker refuses to open it; empty when the proof is of this very sum."""
        at = (effect.round, effect.attempt)
        if self._is_masked(*at):
            claim(not isinstance(effect.opening, bytes), f"{site}: a masked sum with a proof")
            needed = threshold_of(self._plans[at])
            fits = len(effect.opening) >= needed and set(effect.opening) <= set(effect.contributors)
            return "" if fits else f"{site}: opened by {sorted(effect.opening)}"
        known = self._claims.get((site, *at))
        if known is None:
            return f"{site}: applies a sum that it never challenged"
        named = tuple(one for one, _ in known.nonces)
        same = (effect.sum_digest, effect.contributors) == (known.sum_digest, named)
        claim(same, f"{site}: applies another sum")
        right = _answer(_challenge(site, *at), _sum(known.sum_digest, known.nonces))
        if effect.opening == right:
            return ""
        return f"{site}: applies a sum without the proof of its claim"

    def _is_masked(self, round_: int, attempt: int) -> bool:
        return self._plans[round_, attempt].training.mode == pb.MASKING


def _nonce(site: str, at: tuple[int, int]) -> bytes:
    return hashlib.sha256(f"{site} {at}".encode()).digest()[:16]


def _sum(digest: bytes, nonces: tuple[tuple[str, bytes], ...]) -> bytes:
    return hashlib.sha256(digest + repr(nonces).encode()).digest()


def _challenge(site: str, round_: int, attempt: int) -> bytes:
    return hashlib.sha256(f"challenge {site} {round_}.{attempt}".encode()).digest()


def _answer(challenge: bytes, total: bytes) -> bytes:
    return hashlib.sha256(challenge + total).digest()[:8]
