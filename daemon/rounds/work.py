"""What a site does in one attempt: key, training, encryption, the sum, the new version.

In the order of a round. Each piece of work is begun by an effect of the protocol
(daemon/rounds/driver.py) and comes back as an event; what it needs lives in the attempt's
own folder and, keys and sums, in the crypto worker's memory. Nothing of it
outlives the attempt but the new version and, until the round is over, this site's
integers: a sum that may have been opened is made again of the very same ones.
"""

from __future__ import annotations

import asyncio
import hashlib
import shutil
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import structlog

from crypto.ckks.sum_proof import Check, Claim
from crypto.identity.site import Identity, IdentityError, Trust
from crypto.quantize import CryptoError
from daemon.jobs import ckks, masking
from daemon.jobs import learning as learning_jobs
from daemon.jobs.ckks import sealing_context
from daemon.learning.options import TrainingOptions
from daemon.learning.retriever.spec import RetrieverSpec
from daemon.process.workers import Worker, WorkerCrashed
from daemon.rounds.catch_up import Folders
from daemon.rounds.masking_work import MaskingWork
from daemon.rounds.progress import ProgressBoard
from daemon.state.privacy_ledger import PrivacyBudget
from daemon.state.versions import ShapeManifest
from peers.attempts import effects as do
from peers.attempts.privacy import terms_of
from peers.attempts.roles import is_masked, key_holders
from peers.attempts.selection import is_robust
from peers.attempts.sum_proof import check_of
from peers.wire.errors import RemoteProtocolError
from peers.wire.frames import Received
from peers.wire.messages import one_line
from proto import federation_pb2 as pb

log = structlog.get_logger()

Feed = Callable[[do.Event], Awaitable[None]]
Send = Callable[[str, do.Body], None]
Push = Callable[[str, pb.BlobName, Path | bytes], Coroutine[Any, Any, None]]


@dataclass
class Held:
    """What is held for one attempt."""

    round: int
    attempt: int
    folder: Path
    plan: pb.Plan | None = None
    sum_digest: bytes = b""
    updates: set[str] = field(default_factory=set)  # whose have arrived
    products_digest: bytes = b""
    products_here: asyncio.Event = field(default_factory=asyncio.Event)


class AttemptWork:
    """The work of the attempt under way at this site.

    ``feed`` takes events to the protocol, ``send`` queues a message, ``push``
    sends a large object until the peer has it; ``spent`` is called when less is
    left of the privacy budget.
    """

    def __init__(
        self,
        *,
        identity: Identity,
        trust: Trust,
        learning: Worker,
        crypto: Worker,
        spec: RetrieverSpec,
        shapes: ShapeManifest,
        folders: Folders,
        library: Path,
        progress: ProgressBoard,
        privacy: PrivacyBudget,
        spent: Callable[[], Awaitable[None]],
        feed: Feed,
        send: Send,
        push: Push,
    ) -> None:
        self._identity = identity
        self._trust = trust
        self._learning = learning
        self._crypto = crypto
        self._spec = spec
        self._shapes = shapes
        self._folders = folders
        self._library_path = library
        self._progress = progress
        self._privacy = privacy
        self._spent = spent
        self._feed = feed
        self._send = send
        self._push = push
        self._held = Held(0, 0, folders.spool / "none")
        self._masking = MaskingWork(
            identity=identity, trust=trust, crypto=crypto, shapes=shapes, feed=feed
        )

    @property
    def plan(self) -> pb.Plan | None:
        """The plan of the attempt under way, once it is known."""
        return self._held.plan

    @plan.setter
    def plan(self, plan: pb.Plan) -> None:
        self._held.plan = plan

    def renew(self, identity: Identity, trust: Trust) -> None:
        """The operator installed a new certificate."""
        self._identity, self._trust = identity, trust
        self._masking.renew(identity, trust)

    async def begin(self, round_: int, attempt: int) -> Held | None:
        """Another attempt begins; returns what is held of the one before, for `forget`."""
        old = self._held
        self._held = Held(round_, attempt, self._folders.spool / f"{round_}-{attempt}")
        await asyncio.to_thread(self._held.folder.mkdir, parents=True, exist_ok=True)
        # A round's first attempt may be begun twice.
        return old if old.folder != self._held.folder else None

    async def forget(self, old: Held) -> None:
        """Wipe an attempt's keys from the crypto worker, its blobs from the disk."""
        if old.plan is not None:
            forget = masking.forget if is_masked(old.plan) else ckks.forget
            await self._crypto.run(forget, old.round, old.attempt)
        await asyncio.to_thread(shutil.rmtree, old.folder, True)

    async def arrived(self, sender: str, name: pb.BlobName, blob: Received) -> None:
        """A large object from a peer, whole and verified, of the attempt under way or late."""
        held = self._held
        if (name.round, name.attempt) != (held.round, held.attempt) or blob.path is None:
            return
        if name.kind == pb.ENCRYPTED_UPDATE:
            # The first one counts: it may be on its way into the sum at this moment.
            if sender in held.updates:
                await asyncio.to_thread(blob.path.unlink, missing_ok=True)
                return
            held.updates.add(sender)
            try:
                await asyncio.to_thread(blob.path.replace, held.folder / f"encrypted-{sender}.bin")
            except OSError:
                held.updates.discard(sender)  # it will be sent again
                raise
            await self._feed(do.UpdateArrived(name.round, name.attempt, sender, blob.digest))
        elif name.kind == pb.ENCRYPTED_PRODUCTS:
            if held.products_digest:  # the first ones count, as of the sum
                await asyncio.to_thread(blob.path.unlink, missing_ok=True)
                return
            held.products_digest = blob.digest
            await asyncio.to_thread(blob.path.replace, self._products_path)
            held.products_here.set()
        elif held.sum_digest:  # two at once: the first is the one, and is not changed any more
            await asyncio.to_thread(blob.path.unlink, missing_ok=True)
        else:
            held.sum_digest = blob.digest
            await asyncio.to_thread(blob.path.replace, self._sum_path)
            await self._feed(do.SumArrived(name.round, name.attempt))

    # ---- key ---------------------------------------------------------------------

    async def deal_key(self, effect: do.DealKey) -> None:
        """Make the key; secret to each holder, sealed for it; public to the coordinator.

        The protocol commits this site to both before either leaves it.
        """
        plan = effect.plan
        at = (plan.round, plan.attempt)
        count, bits, measurable = (
            len(plan.participants),
            plan.training.bits,
            is_robust(plan.training),
        )
        key = await self._crypto.run(ckks.deal_key, *at, count, bits, measurable=measurable)
        digests = [hashlib.sha256(part).digest() for part in (key.public, key.secret)]
        await self._feed(do.KeyDealt(*at, *digests))
        certificates = {p.site: p.certificate for p in plan.participants}
        async with asyncio.TaskGroup() as group:
            name = pb.BlobName(kind=pb.PUBLIC_CONTEXT, round=at[0], attempt=at[1])
            group.create_task(self._push(effect.coordinator, name, key.public))
            for holder in key_holders(plan):
                if holder != self._identity.site_id:
                    sealed = self._seal(holder, certificates[holder], key.secret, at)
                    sealed_name = pb.BlobName(kind=pb.SEALED_CONTEXT, round=at[0], attempt=at[1])
                    group.create_task(self._push(holder, sealed_name, sealed))
            group.create_task(self._hold(at, key.secret, plan, secret=True))

    def _seal(self, holder: str, certificate: bytes, secret: bytes, at: tuple[int, int]) -> bytes:
        site = self._trust.site_of(certificate, at=None)
        if site != holder:
            raise IdentityError(f"the plan gives the certificate of {site} for {holder}")
        here = self._identity
        context = sealing_context(here.federation_id, at, here.site_id, holder)
        return self._trust.seal_for(certificate, secret, context)

    async def take_context(self, sender: str, name: pb.BlobName, data: bytes) -> None:
        """The dealer's context: sealed for us as a key holder, or public as the coordinator."""
        at = (name.round, name.attempt)
        plan = self._held.plan
        if plan is None or at != (plan.round, plan.attempt):
            return
        secret = name.kind == pb.SEALED_CONTEXT
        if secret:
            context = sealing_context(
                self._identity.federation_id, at, sender, self._identity.site_id
            )
            data = self._identity.unseal(data, context)
        await self._hold(at, data, plan, secret=secret)

    async def _hold(
        self, at: tuple[int, int], context: bytes, plan: pb.Plan, *, secret: bool
    ) -> None:
        digest = await self._crypto.run(
            ckks.hold_context,
            *at,
            context,
            secret=secret,
            contributors=len(plan.participants),
            bits=plan.training.bits,
            measurable=is_robust(plan.training),
        )
        if not secret:
            check = self._check()
            await self._crypto.run(ckks.start_sum, *at, self._shapes.sizes, check)
        await self._feed(do.ContextHeld(*at, digest))

    # ---- masking -----------------------------------------------------------------

    async def mask(self, effect: do.Mask) -> None:
        """A participant's step of masking."""
        await self._masking.mask(effect, self._plan)

    async def start_masked_sum(self, effect: do.StartMaskedSum) -> None:
        """The coordinator begins a masked sum."""
        await self._masking.start_sum(effect)

    async def open_shares(self, effect: do.OpenShares) -> None:
        """Give this site's shares for the certified sum."""
        await self._masking.open_shares(effect)

    # ---- train -------------------------------------------------------------------

    async def train(self, effect: do.Train) -> None:
        """Train from the parent version; the end tells no more than the update's scale."""
        plan = effect.plan
        work = self._learning.run_reporting(
            self._progress.training,
            learning_jobs.train,
            self._spec,
            self._library_path,
            self._folders.versions,
            plan.parent_digest,
            _options(plan),
            plan.round,
            self._identity.site_id,
            self._update_path,
            draw=plan.draw,
        )
        training = asyncio.create_task(work)
        try:
            await asyncio.wait([training])
            training.result()
        finally:
            if not training.done():
                # The attempt was given up: don't let its training hold up the next one.
                await self._learning.give_up(training)
        terms = terms_of(plan)
        exponents = await self._crypto.run(
            ckks.measure_update,
            self._update_path,
            self._shapes.sizes,
            effect.weight,
            self._residual_path(plan.training.bits),
            (terms, plan.training.bits) if terms else None,
        )
        await self._feed(do.LocalTrained(plan.round, plan.attempt, tuple(exponents)))

    @property
    def _update_path(self) -> Path:
        return self._held.folder / "update.npy"

    def _residual_path(self, bits: int) -> Path | None:
        """Where what rounding dropped waits for the next update; 16 bits drop too little."""
        return self._folders.residual if bits < 16 else None

    # ---- encrypt, aggregate --------------------------------------------------------

    async def encrypt_update(self, effect: do.EncryptUpdate) -> None:
        """Quantise to the common scale, encrypt or mask, and bring it to the coordinator.

        What was drawn is kept, and booked before it is: from then on it counts as told,
        whatever becomes of it. Where it is kept already it is sent again, bit by bit, which
        tells nothing new. A crash between booking and keeping books an update too many.
        """
        plan = self._plan
        at, terms = (effect.round, effect.attempt), terms_of(plan)
        kept = self._folders.kept_integers(effect.round, effect.draw)
        drawn = await asyncio.to_thread(kept.exists)
        if plan.scale_exponents and not drawn:
            raise CryptoError(
                f"the sum of attempt {effect.draw} is to be made again, and this site does not "
                "have what it had sent for it: the next attempt draws anew"
            )
        if not drawn:
            await self._privacy.spend(*at, terms)
        own = self._held.folder / f"encrypted-{self._identity.site_id}.bin"
        common = (
            *at,
            self._update_path,
            self._shapes.sizes,
            effect.weight,
            list(effect.scale_exponents),
            own,
            self._residual_path(plan.training.bits),
        )
        nonce = b""
        if is_masked(plan):
            mask = masking.mask_update
            written = await self._crypto.run(mask, *common, noise=terms, kept_path=kept)
        else:
            encrypt, check = ckks.encrypt_update, self._check()
            written = uploaded = await self._crypto.run(
                encrypt, *common, check=check, noise=terms, kept_path=kept
            )
            nonce = uploaded.nonce
        if terms and not drawn:
            await self._spent()
        await self._feed(do.UpdateReady(*at, written.digest, nonce))
        if effect.coordinator == self._identity.site_id:
            await self._feed(do.UpdateArrived(*at, effect.coordinator, written.digest))
            return
        name = pb.BlobName(kind=pb.ENCRYPTED_UPDATE, round=effect.round, attempt=effect.attempt)
        await self._push(effect.coordinator, name, own)
        self._progress.uploaded()

    async def add_update(self, effect: do.AddUpdate) -> None:
        """Add an update that is here; a malformed one is refused and leaves the sum as it was."""
        at = (effect.round, effect.attempt)
        path = self._held.folder / f"encrypted-{effect.site}.bin"
        add = masking.add_update if is_masked(self._plan) else ckks.add_update
        try:
            await self._crypto.run(
                add, effect.round, effect.attempt, effect.site, path, effect.nonce
            )
        except CryptoError as error:
            log.warning("update refused", peer=effect.site, cause=str(error))
            await self._feed(do.UpdateRefused(*at, effect.site, str(error)))
        else:
            await self._feed(do.UpdateAdded(*at, effect.site))
        finally:
            await asyncio.to_thread(path.unlink, missing_ok=True)

    # ---- select --------------------------------------------------------------------

    async def compare_updates(self, effect: do.CompareUpdates) -> None:
        """Write the encrypted dot products of the updates that wait on the disk."""
        at = (effect.round, effect.attempt)
        updates = [
            (site, self._held.folder / f"encrypted-{site}.bin", nonce)
            for site, nonce in zip(effect.sites, effect.nonces, strict=True)
        ]
        asked = await self._crypto.run(
            ckks.compare_updates, *at, updates, self._shapes.total, self._products_path
        )
        for site, reason in asked.refused:
            log.warning("update refused", peer=site, cause=reason)
        await self._feed(do.QuestionReady(*at, asked.sites, asked.refused, asked.digest))

    async def send_products(self, effect: do.SendProducts) -> None:
        """The certified question to every key holder, and behind it the products."""
        await self._send_behind(
            effect.holders, effect.certified, pb.ENCRYPTED_PRODUCTS, self._products_path
        )

    async def _send_behind(
        self,
        holders: tuple[str, ...],
        certified: pb.Certified,
        kind: pb.BlobKind.ValueType,
        path: Path,
    ) -> None:
        name = pb.BlobName(kind=kind, round=certified.round, attempt=certified.attempt)
        async with asyncio.TaskGroup() as group:
            for holder in holders:
                self._send(holder, certified)
                group.create_task(self._push(holder, name, path))

    async def decrypt_products(self, effect: do.DecryptProducts) -> None:
        """Decrypt the products: these numbers, and nothing else of any update."""
        held = self._held
        await held.products_here.wait()  # the end of the attempt cancels us
        if held.products_digest != effect.products_digest:
            raise RemoteProtocolError("the dot products are not those that were certified")
        at = (effect.round, effect.attempt)
        products, imaginary = await self._crypto.run(
            ckks.decrypt_products, *at, self._products_path, effect.sites
        )
        await self._feed(do.ProductsDecrypted(*at, products, imaginary))

    @property
    def _products_path(self) -> Path:
        return self._held.folder / "products.bin"

    # ---- sum -----------------------------------------------------------------------

    async def finish_sum(self, effect: do.FinishSum) -> None:
        """Write the sum, encrypted or masked as it is: what is stated, and sent on."""
        held, at = self._held, (effect.round, effect.attempt)
        finish = masking.finish_sum if is_masked(self._plan) else ckks.finish_sum
        written = await self._crypto.run(finish, *at, self._sum_path)
        held.sum_digest = written.digest  # in masking mode we open it, too
        await self._feed(do.SumFinished(*at, written.digest))

    async def send_sum(self, effect: do.SendSum) -> None:
        """The certified statement to everybody who opens it, and behind it the sum."""
        await self._send_behind(effect.holders, effect.certified, pb.ENCRYPTED_SUM, self._sum_path)

    def _check(self) -> Check:
        here = self._identity
        return check_of(self._plan, here.federation_id, here.site_id)

    async def challenge(self, effect: do.Challenge) -> None:
        """Bind the crypto worker to what was certified; what it then asks is told."""
        at = (effect.round, effect.attempt)
        claim = Claim(effect.sum_digest, effect.nonces)
        check = self._check()
        asked = await self._crypto.run(ckks.challenge, *at, check, claim)
        await self._feed(do.Challenging(*at, asked))

    async def answer_challenge(self, effect: do.AnswerChallenge) -> None:
        """Prove the sum to one key holder; one that can't be answered costs only that holder."""
        at = (effect.round, effect.attempt)
        try:
            answer = await self._crypto.run(
                ckks.answer_challenge, *at, effect.holder, effect.challenge
            )
        except (CryptoError, WorkerCrashed) as error:
            log.warning("challenge refused", peer=effect.holder, cause=str(error))
            await self._feed(do.ChallengeRefused(*at, effect.holder, one_line(str(error))))
        else:
            await self._feed(do.ChallengeAnswered(*at, effect.holder, answer))

    @property
    def _sum_path(self) -> Path:
        return self._held.folder / "sum.bin"

    # ---- apply ---------------------------------------------------------------

    async def apply_sum(self, effect: do.ApplySum) -> None:
        """Open the certified sum and apply it: a new version on this disk."""
        if self._held.sum_digest != effect.sum_digest:
            raise RemoteProtocolError("the sum is not the one that was certified")
        plan, at, summed = self._plan, (effect.round, effect.attempt), self._summed(effect)
        server = TrainingOptions.of(plan.training).server
        versions = self._folders.versions
        if is_masked(plan):
            applied = await self._masking.apply_sum(
                effect, self._sum_path, versions, summed, server
            )
        else:
            applied = await self._crypto.run(
                ckks.apply_sum,
                *at,
                self._sum_path,
                self._shapes.sizes,
                list(effect.scale_exponents),
                effect.total_weight,
                effect.parent_digest,
                self._shapes.digest,
                versions,
                summed,
                server,
                answer=effect.answer,
            )
        opened = do.Opened(
            *at,
            effect.root_digest,
            applied.model_digest,
            applied.mean_loss,
            applied.next_clip_norm,
        )
        await self._feed(opened)

    def _summed(self, effect: do.ApplySum) -> ckks.Summed | None:
        terms = terms_of(self._plan)
        if terms is None:
            return None
        quantile = self._plan.training.privacy.clip_quantile
        return ckks.Summed(terms, quantile, len(effect.contributors))

    @property
    def _plan(self) -> pb.Plan:
        if self._held.plan is None:
            raise RuntimeError("work of an attempt without a plan")
        return self._held.plan


def _options(plan: pb.Plan) -> TrainingOptions:
    """What a plan asks of training; the tiers of personal layers want the sites' range."""
    options = TrainingOptions.of(plan.training)
    if not plan.most_complexity:
        return options
    known = (plan.least_complexity, plan.most_complexity)
    return replace(options, depth=replace(options.depth, complexity_range=known))
