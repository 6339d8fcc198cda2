"""The crypto workers of a simulated federation in masking mode: the rules, without arithmetic.

What the real ones hold by their secrets is held here by claims: a site opens one
outcome an attempt, of as many as the threshold, and never both secrets of a site.
"""

from __future__ import annotations

import hashlib

from peers.attempts import effects as do
from peers.attempts.masking import Mask, Masked, OpenShares, threshold_of
from proto import federation_pb2 as pb
from tests.simulation.scenarios.invariants import claim

_At = tuple[str, int, int]


class SimulatedMasking:
    """All sites' workers; a crash of a site forgets what its worker held."""

    def __init__(self) -> None:
        self._outcomes: dict[_At, tuple[tuple[str, ...], tuple[str, ...]]] = {}
        self._needed: dict[tuple[int, int], int] = {}

    def coordinated(self, plan: pb.Plan) -> None:
        """A liar's attempt may have several plans: each site holds it to its own of them."""
        at, needed = (plan.round, plan.attempt), threshold_of(plan)
        self._needed[at] = min(needed, self._needed.get(at, needed))

    def roster(self, at: tuple[int, int]) -> bytes:
        """The digest of everyone's keys."""
        return hashlib.sha256(f"roster {at}".encode()).digest()

    def step(self, site: str, effect: Mask | OpenShares) -> Masked | do.ContextHeld:
        """What the worker of ``site`` makes of an order."""
        at = (effect.round, effect.attempt)
        if isinstance(effect, OpenShares):
            return self._open(site, at, effect)
        order = effect.order
        if order is None:
            return Masked(*at, self._answer(at, pb.KEYS, {site: bytes(97)}))
        others = [item.site for item in order.items if item.site != site]
        if order.step == pb.KEYS:
            return Masked(*at, self._answer(at, pb.SHARES, dict.fromkeys(others, bytes(82))))
        return do.ContextHeld(*at, self.roster(at))

    def _open(self, site: str, at: tuple[int, int], effect: OpenShares) -> Masked:
        outcome = effect.survivors, effect.dropouts
        claim(site in outcome[0], f"{site}: opens a sum that it is not in")
        claim(not set(outcome[0]) & set(outcome[1]), f"{site}: both secrets are asked for")
        known = self._outcomes.setdefault((site, *at), outcome)
        claim(known == outcome, f"{site}: two outcomes in {at}")
        claim(len(outcome[0]) >= self._needed[at], f"{site}: opens a sum of {len(outcome[0])}")
        shares = dict.fromkeys([*outcome[0], *outcome[1]], bytes(33))
        return Masked(*at, self._answer(at, pb.OPENING, shares))

    def _answer(
        self, at: tuple[int, int], step: pb.MaskingStep.ValueType, contents: dict[str, bytes]
    ) -> pb.MaskingAnswer:
        items = [pb.MaskingItem(site=s, content=contents[s]) for s in sorted(contents)]
        return pb.MaskingAnswer(round=at[0], attempt=at[1], step=step, items=items)
