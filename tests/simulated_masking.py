"""The crypto workers of a simulated federation in masking mode: the rules, without arithmetic.

What the real ones hold by their secrets is held here by claims: a site opens one
outcome an attempt, signed by a threshold, and never both secrets of a site; the sum
is opened by a threshold of those who are in it.
"""

from __future__ import annotations

import hashlib

from peers import effects as do
from peers.roles import threshold_of
from proto import federation_pb2 as pb
from tests.scenarios.invariants import claim

_At = tuple[str, int, int]


class SimulatedMasking:
    """All sites' workers; a crash of a site forgets what its worker held."""

    def __init__(self) -> None:
        self._outcomes: dict[_At, tuple[tuple[str, ...], tuple[str, ...]]] = {}
        self.plans: dict[tuple[int, int], pb.Plan] = {}
        self.unmasked: list[do.Unmask] = []

    def step(self, site: str, effect: do.Mask) -> do.Masked | do.ContextHeld:
        """What the worker of ``site`` makes of an order."""
        order = effect.order
        at = (effect.round, effect.attempt)
        if order is None:
            return do.Masked(*at, self._answer(at, pb.KEYS, {site: bytes(97)}))
        others = [item.site for item in order.items if item.site != site]
        match order.step:
            case pb.KEYS:
                return do.Masked(*at, self._answer(at, pb.SHARES, dict.fromkeys(others, bytes(82))))
            case pb.SHARES:
                return do.ContextHeld(*at)
            case pb.OUTCOME:
                outcome = tuple(item.site for item in order.items), tuple(order.dropouts)
                claim(site in outcome[0], f"{site}: opens a sum that it is not in")
                claim(not set(outcome[0]) & set(outcome[1]), f"{site}: both secrets are asked for")
                known = self._outcomes.setdefault((site, *at), outcome)
                claim(known == outcome, f"{site}: two outcomes in {at}")
                return do.Masked(*at, self._answer(at, pb.OUTCOME, {site: bytes(70)}))
            case _:
                survivors, dropouts = self._outcomes[site, *at]
                signed = {item.site for item in order.items}
                claim(signed <= set(survivors), f"{site}: signed by who is not in the sum")
                needed = threshold_of(self.plans[at])
                claim(len(signed) >= needed, f"{site}: opens for {len(signed)} signatures")
                shares = dict.fromkeys([*survivors, *dropouts], bytes(33))
                return do.Masked(*at, self._answer(at, pb.OPENING, shares))

    def unmask(self, _site: str, effect: do.Unmask) -> do.Unmasked:
        """What the coordinator's worker makes of the shares."""
        at = (effect.round, effect.attempt)
        claim(len(effect.opened) >= threshold_of(self.plans[at]), f"{at}: opened by too few")
        claim(set(effect.opened) <= set(effect.survivors), f"{at}: opened by a dropout")
        self.unmasked.append(effect)
        return do.Unmasked(*at, hashlib.sha256(repr(effect.survivors).encode()).digest())

    def _answer(
        self, at: tuple[int, int], step: pb.MaskingStep.ValueType, contents: dict[str, bytes]
    ) -> pb.MaskingAnswer:
        items = [pb.MaskingItem(site=s, content=contents[s]) for s in sorted(contents)]
        return pb.MaskingAnswer(round=at[0], attempt=at[1], step=step, items=items)
