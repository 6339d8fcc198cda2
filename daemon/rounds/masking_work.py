"""A site's steps of masking in one attempt, between the protocol and the crypto worker.

The worker computes (daemon/jobs/masking.py), the daemon signs: the identity's key
does not leave this process.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path

import structlog

from crypto.identity.site import Identity, Trust
from crypto.masking.roster import Terms
from crypto.quantize import FRACTION_INTEGERS
from daemon.jobs import masking
from daemon.jobs.ckks import Applied, Summed
from daemon.jobs.masking import Believed
from daemon.learning.options import ServerOptions
from daemon.process.workers import Worker
from daemon.state.versions import ShapeManifest
from peers.attempts import effects as do
from peers.attempts.roles import threshold_of
from peers.wire.signing import digest_of
from proto import federation_pb2 as pb

log = structlog.get_logger()


def masking_terms(plan: pb.Plan, federation_id: str, shapes: ShapeManifest) -> Terms:
    """The terms that a plan implies, at every site alike. Raises CryptoError."""
    return Terms(
        federation=federation_id,
        round=plan.round,
        attempt=plan.attempt,
        plan_digest=digest_of(plan),
        sites=tuple(participant.site for participant in plan.participants),
        threshold=threshold_of(plan),
        bits=plan.training.bits,
        values=shapes.total + FRACTION_INTEGERS,
    )


class MaskingWork:
    """Carries out the effects of masking; ``feed`` takes events to the protocol."""

    def __init__(
        self,
        *,
        identity: Identity,
        trust: Trust,
        crypto: Worker,
        shapes: ShapeManifest,
        feed: Callable[[do.Event], Awaitable[None]],
    ) -> None:
        self._identity = identity
        self._trust = trust
        self._crypto = crypto
        self._shapes = shapes
        self._feed = feed

    def renew(self, identity: Identity, trust: Trust) -> None:
        """The operator installed a new certificate."""
        self._identity, self._trust = identity, trust

    async def mask(self, effect: do.Mask, plan: pb.Plan) -> None:
        """One step as a participant; its answer goes to the coordinator."""
        at = (effect.round, effect.attempt)
        order = effect.order
        if order is None:
            contents = await self._keys(plan)
            await self._answer(at, pb.KEYS, contents)
            return
        given = {item.site: item.content for item in order.items}
        match order.step:
            case pb.KEYS:
                sealed = await self._crypto.run(masking.deal, *at, given)
                await self._answer(at, pb.SHARES, sealed)
            case pb.SHARES:
                await self._crypto.run(masking.hold_shares, *at, given)
                roster = await self._crypto.run(masking.roster_digest, *at)
                await self._feed(do.ContextHeld(*at, roster))

    async def open_shares(self, effect: do.OpenShares) -> None:
        """This site's shares for the certified outcome, and for no other."""
        at = (effect.round, effect.attempt)
        outcome = (effect.survivors, effect.dropouts)
        shares = await self._crypto.run(masking.open_shares, *at, *outcome)
        await self._answer(at, pb.OPENING, shares)

    async def _keys(self, plan: pb.Plan) -> dict[str, bytes]:
        here = self._identity
        terms = masking_terms(plan, here.federation_id, self._shapes)
        believed = self._believed(plan)
        payload, content = await self._crypto.run(masking.make_keys, terms, here.site_id, believed)
        return {here.site_id: content + here.sign(payload)}

    async def start_sum(self, effect: do.StartMaskedSum) -> None:
        """Begin the sum, at the coordinator."""
        terms = masking_terms(effect.plan, self._identity.federation_id, self._shapes)
        contents = {item.site: item.content for item in effect.keys.items}
        believed = self._believed(effect.plan)
        roster = await self._crypto.run(
            masking.start_sum, terms, contents, believed, effect.sharers
        )
        await self._feed(do.MaskedSumStarted(effect.plan.round, effect.plan.attempt, roster))

    async def apply_sum(
        self,
        effect: do.ApplySum,
        sum_path: Path,
        versions: Path,
        summed: Summed | None,
        server: ServerOptions,
    ) -> Applied:
        """Take the masks off the certified sum, and make the new version from it."""
        applied = await self._crypto.run(
            masking.apply_sum,
            effect.round,
            effect.attempt,
            effect.contributors,
            effect.dropouts,
            {site: dict(shares) for site, shares in effect.opened.items()},
            sum_path,
            effect.sum_digest,
            self._shapes.sizes,
            effect.scale_exponents,
            effect.total_weight,
            effect.parent_digest,
            self._shapes.digest,
            versions,
            summed,
            server,
        )
        for cause in applied.wrong_shares:
            log.warning("a share was wrong, and not needed", cause=cause)
        return applied

    def _believed(self, plan: pb.Plan) -> Believed:
        certificates = {one.site: one.certificate for one in plan.participants}
        return Believed(self._trust.authority_pem, certificates)

    async def _answer(
        self, at: tuple[int, int], step: pb.MaskingStep.ValueType, contents: dict[str, bytes]
    ) -> None:
        items = _items(contents.items())
        answer = pb.MaskingAnswer(round=at[0], attempt=at[1], step=step, items=items)
        await self._feed(do.Masked(*at, answer))


def _items(contents: Iterable[tuple[str, bytes]]) -> list[pb.MaskingItem]:
    return [pb.MaskingItem(site=site, content=content) for site, content in sorted(contents)]
