"""What a site does in one attempt: training, the hidden update, the sum, the new version.

In the order of a round. Each piece of work is begun by an effect of the protocol (driver.py)
and comes back as an event; `WORK` says what carries out which. How updates are hidden and
the sum is opened is the business of the plan's secure-sum mode: `JOBS`.
What work needs lives in the attempt's own folder and, keys and sums, in the crypto worker's
memory. What outlives the attempt: the new version, what rounding dropped and, until the round
is over, this site's integers: a sum that may have been opened is made again of the very same.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import structlog

from crypto.quantize import CryptoError
from daemon.jobs.sums import integers
from daemon.jobs.sums.ckks import CkksJobs
from daemon.jobs.sums.integers import Hiding, SumTerms
from daemon.jobs.sums.masking import MaskingJobs
from daemon.jobs.sums.sum_jobs import AttemptState, Credentials, JobContext, SumJobs
from daemon.learning.options import TrainingOptions, TrainingResult
from daemon.process.workers import Worker
from daemon.rounds.progress import ProgressBoard
from daemon.rounds.readiness import Readiness
from daemon.state.folder import StateFolder
from daemon.state.privacy_ledger import PrivacyBudget
from daemon.state.store import Store
from daemon.state.versions import is_sound, shape_of
from peers.attempts import effects as do
from peers.plans.policy import terms_of
from peers.wire.errors import RemoteProtocolError
from peers.wire.frames import ReceivedObject
from peers.wire.manifest import model_of
from proto import federation_pb2 as pb

log = structlog.get_logger()

# The secure-sum modes' jobs; what the protocol knows of a mode is in peers/attempts/modes.py.
JOBS: Final[Mapping[pb.Mode.ValueType, type[SumJobs]]] = {
    pb.CKKS: CkksJobs,
    pb.MASKING: MaskingJobs,
}


@dataclass(frozen=True)
class OfSite:
    """What the rounds of all models have in common at a site.

    ``evidence``: the store in which it is kept against sites that contradict themselves.
    """

    credentials: Credentials
    privacy: PrivacyBudget
    evidence: Store


@dataclass(frozen=True)
class Trainer:
    """What trains a model: the jobs of the learning worker, and what they are told of it.

    ``train`` as `daemon.jobs.learning.train`; ``write_first`` as its `write_initial_version`.
    """

    spec: Any
    train: Callable[..., TrainingResult]
    write_first: Callable[[Any, Path], bytes]


@dataclass(frozen=True)
class Computing:
    """The worker processes of a model's rounds, and what the learning one trains, on what."""

    learning: Worker
    crypto: Worker
    trainer: Trainer
    library: Path


class AttemptWork:
    """The work of the attempt under way at this site."""

    def __init__(
        self,
        context: JobContext,
        computing: Computing,
        folders: StateFolder,
        privacy: PrivacyBudget,
        readiness: Readiness,
        progress: ProgressBoard,
    ) -> None:
        self._context = context
        self._computing = computing
        self._folders = folders
        self._privacy = privacy
        self._readiness = readiness
        self._model = model_of(context.log_id)
        self._progress = progress
        self._jobs = {mode: jobs(context) for mode, jobs in JOBS.items()}
        self._state = AttemptState(0, 0, folders.spool / "none")
        self._beginning = b""  # the encoder as it comes, as a version

    @property
    def plan(self) -> pb.Plan | None:
        """The plan of the attempt under way, once it is known."""
        return self._state.plan

    def take_plan(self, plan: pb.Plan) -> None:
        """From now on what belongs to this plan may come."""
        self._state.plan = plan

    async def carry_out(self, effect: do.Work) -> None:
        """Do what the effect asks for; its end is an event."""
        if (work := WORK.get(type(effect))) is not None:
            await work(self, effect)
        else:
            jobs = self._of_mode(self._state.planned)
            await jobs.work[type(effect)](jobs, self._state, effect)

    def _of_mode(self, plan: pb.Plan) -> SumJobs:
        return self._jobs[plan.training.mode]

    async def _feed(self, event: do.Event) -> None:
        await self._context.feed(event)

    # ---- the attempt ---------------------------------------------------------------

    async def begin(self, round_: int, attempt: int) -> AttemptState | None:
        """Another attempt begins; returns what is held of the one before, for `forget`."""
        old = self._state
        self._state = AttemptState(round_, attempt, self._folders.spool / f"{round_}-{attempt}")
        await asyncio.to_thread(self._state.folder.mkdir, parents=True, exist_ok=True)
        # A round's first attempt may be begun twice.
        return old if old.folder != self._state.folder else None

    async def forget(self, old: AttemptState) -> None:
        """Wipe an attempt's keys from the crypto worker, its blobs from the disk."""
        if old.plan is not None:
            await self._of_mode(old.plan).forget(old.round, old.attempt)
        await asyncio.to_thread(shutil.rmtree, old.folder, True)

    # ---- what peers send -------------------------------------------------------------

    async def take_context(self, sender: str, name: pb.BlobName, data: bytes) -> None:
        """A key dealer's context, of the attempt under way or late."""
        plan = self._state.plan
        if plan is not None and (name.round, name.attempt) == (plan.round, plan.attempt):
            await self._of_mode(plan).take_context(self._state, sender, name, data)

    async def arrived(self, sender: str, name: pb.BlobName, blob: ReceivedObject) -> None:
        """A large object from a peer, whole and verified, of the attempt under way or late."""
        state = self._state
        if blob.path is None:
            return
        if (name.round, name.attempt) != (state.round, state.attempt):
            await asyncio.to_thread(blob.path.unlink, missing_ok=True)
            return
        if name.kind == pb.ENCRYPTED_UPDATE:
            # The first one counts: it may be on its way into the sum at this moment.
            if sender in state.updates:
                await asyncio.to_thread(blob.path.unlink, missing_ok=True)
                return
            state.updates.add(sender)
            try:
                await asyncio.to_thread(blob.path.replace, state.hidden(sender))
            except OSError:
                state.updates.discard(sender)  # it will be sent again
                raise
            await self._feed(do.UpdateArrived(name.round, name.attempt, sender, blob.digest))
        elif name.kind == pb.ENCRYPTED_PRODUCTS:
            if state.products_digest:  # the first ones count, as of the sum
                await asyncio.to_thread(blob.path.unlink, missing_ok=True)
                return
            state.products_digest = blob.digest
            await asyncio.to_thread(blob.path.replace, state.products)
            state.products_here.set()
        elif state.sum_digest:  # two at once: the first is the one, and is not changed any more
            await asyncio.to_thread(blob.path.unlink, missing_ok=True)
        else:
            state.sum_digest = blob.digest
            await asyncio.to_thread(blob.path.replace, state.sum)
            await self._feed(do.SumArrived(name.round, name.attempt))

    # ---- train -----------------------------------------------------------------------

    async def train(self, effect: do.Train) -> None:
        """Train from the parent version; the end tells no more than the update's scale."""
        plan, computing, update = effect.plan, self._computing, self._state.update
        base = await self._base(plan.parent_digest)
        work = computing.learning.run_reporting(
            self._progress.training,
            computing.trainer.train,
            computing.trainer.spec,
            computing.library,
            self._folders.versions,
            base,
            _options(plan),
            plan.round,
            self._site,
            update,
            draw=plan.draw,
        )
        training = asyncio.create_task(work)
        try:
            await asyncio.wait([training])
            training.result()
        finally:
            if not training.done():
                # The attempt was given up: don't let its training hold up the next one.
                await computing.learning.give_up(training)
        terms = terms_of(plan)
        exponents = await self._context.crypto.run(
            integers.measure_update,
            update,
            self._context.shapes.sizes,
            effect.weight,
            self._residual(plan.training.bits),
            (terms, plan.training.bits) if terms else None,
        )
        await self._feed(do.LocalTrained(*effect.at, tuple(exponents)))

    async def _base(self, parent: bytes) -> bytes:
        """The version on this disk that training begins at: the parent, or the encoder as it comes.

        The latter where the parent is of the encoder that was in force before. A version's name
        covers its retriever and the beginning is the same bits everywhere, so all go alike.
        Raises VersionError when the parent is missing or damaged.
        """
        versions, ours = self._folders.versions, self._context.shapes.digest
        if await asyncio.to_thread(shape_of, versions, parent) == ours:
            return parent
        if not await asyncio.to_thread(is_sound, versions, self._beginning, ours):
            self._beginning = await self._computing.learning.run(
                self._computing.trainer.write_first, self._computing.trainer.spec, versions
            )
        return self._beginning

    @property
    def _site(self) -> str:
        return self._context.credentials.identity.site_id

    def _residual(self, bits: int) -> Path | None:
        """Where what rounding dropped waits for the next update; 16 bits drop too little."""
        return self._folders.residual if bits < 16 else None

    # ---- hide, aggregate ---------------------------------------------------------------

    async def hide_update(self, effect: do.HideUpdate) -> None:
        """Quantise to the common scale, hide, and bring it to the coordinator.

        What was drawn is kept, and booked before it is: from then on it counts as told,
        whatever becomes of it. Where it is kept already it is sent again, bit by bit, which
        tells nothing new. A crash between booking and keeping books an update too many.
        """
        state, plan = self._state, self._state.planned
        terms = terms_of(plan)
        path = self._folders.kept_integers(effect.round, effect.draw)
        drawn = await asyncio.to_thread(path.exists)
        if plan.scale_exponents and not drawn:
            raise CryptoError(
                f"the sum of attempt {effect.draw} is to be made again, and this site does not "
                "have what it had sent for it: the next attempt draws anew"
            )
        if not drawn:
            await self._privacy.spend(*effect.at, terms, self._model)
        residual = self._residual(plan.training.bits)
        hiding = Hiding(effect.weight, effect.scale_exponents, residual, terms, path)
        hidden = await self._of_mode(plan).hide(state, hiding)
        if terms and not drawn:
            await self._readiness.refresh()
            self._privacy.tell_others(self._model)
        await self._feed(do.UpdateReady(*effect.at, hidden.digest, hidden.nonce))
        if effect.coordinator == self._site:
            await self._feed(do.UpdateArrived(*effect.at, effect.coordinator, hidden.digest))
            return
        name = pb.BlobName(kind=pb.ENCRYPTED_UPDATE, round=effect.round, attempt=effect.attempt)
        await self._context.peers.push(effect.coordinator, name, state.hidden(self._site))
        self._progress.uploaded()

    async def add_update(self, effect: do.AddUpdate) -> None:
        """Add an update that is here; a malformed one is refused and leaves the sum as it was."""
        state, site = self._state, effect.site
        try:
            await self._of_mode(state.planned).add(state, site, effect.nonce)
        except CryptoError as error:
            log.warning("update refused", peer=site, cause=str(error))
            await self._feed(do.UpdateRefused(*effect.at, site, str(error)))
        else:
            await self._feed(do.UpdateAdded(*effect.at, site))
        finally:
            await asyncio.to_thread(state.hidden(site).unlink, missing_ok=True)

    async def send_products(self, effect: do.SendProducts) -> None:
        """The certified question to every key holder, and behind it the products."""
        peers, products = self._context.peers, self._state.products
        await peers.send_behind(effect, pb.ENCRYPTED_PRODUCTS, products)

    # ---- sum, apply --------------------------------------------------------------------

    async def finish_sum(self, effect: do.FinishSum) -> None:
        """Write the sum, hidden as it is: what is stated, and sent on."""
        state = self._state
        written = await self._of_mode(state.planned).finish(state)
        state.sum_digest = written.digest  # in masking mode we open it, too
        await self._feed(do.SumFinished(*effect.at, written.digest))

    async def send_sum(self, effect: do.SendSum) -> None:
        """The certified statement to everybody who opens it, and behind it the sum."""
        await self._context.peers.send_behind(effect, pb.ENCRYPTED_SUM, self._state.sum)

    async def apply_sum(self, effect: do.ApplySum) -> None:
        """Open the certified sum and apply it: a new version on this disk."""
        state, plan = self._state, self._state.planned
        if state.sum_digest != effect.sum_digest:
            raise RemoteProtocolError("the sum is not the one that was certified")
        shapes = self._context.shapes
        terms = SumTerms(
            shapes.sizes,
            effect.scale_exponents,
            effect.total_weight,
            await self._base(effect.parent_digest),
            shapes.digest,
            self._folders.versions,
            _summed(plan, len(effect.contributors)),
            TrainingOptions.of(plan.training).server,
        )
        applied = await self._of_mode(plan).apply(state, effect, terms)
        opened = do.SumOpened(
            *effect.at,
            effect.root_digest,
            applied.model_digest,
            applied.mean_loss,
            applied.next_clip_norm,
        )
        await self._feed(opened)


# What carries out the effects that every mode has; a mode's own are in its `SumJobs.work`.
WORK: dict[type[do.Work], Callable[[AttemptWork, Any], Awaitable[None]]] = {
    do.Train: AttemptWork.train,
    do.HideUpdate: AttemptWork.hide_update,
    do.AddUpdate: AttemptWork.add_update,
    do.SendProducts: AttemptWork.send_products,
    do.FinishSum: AttemptWork.finish_sum,
    do.SendSum: AttemptWork.send_sum,
    do.ApplySum: AttemptWork.apply_sum,
}


def _summed(plan: pb.Plan, contributors: int) -> integers.Summed | None:
    terms = terms_of(plan)
    if terms is None:
        return None
    return integers.Summed(terms, plan.training.privacy.clip_quantile, contributors)


def _options(plan: pb.Plan) -> TrainingOptions:
    """What a plan asks of training; the tiers of personal layers want the sites' range."""
    options = TrainingOptions.of(plan.training)
    if not plan.most_complexity:
        return options
    known = (plan.least_complexity, plan.most_complexity)
    return replace(options, depth=replace(options.depth, complexity_range=known))


def keep_residual(
    folders: StateFolder,
    certificate: Callable[[int], pb.Certificate | None],
    round_: int,
    named: Sequence[tuple[bytes, pb.Statement]],
) -> None:
    """Keep what rounding dropped of the update that is in a committed round's sum, of no other.

    ``named``: the sums that the site's state names, with their digests.
    """
    committed = certificate(round_)
    stated = committed.body.statement_digest if committed is not None else b""
    draws = [one.plan.draw for digest, one in named if digest == stated]
    draws = draws or folders.kept_draws(round_)
    path = folders.kept_integers(round_, draws[0]) if len({*draws}) == 1 else None
    try:
        integers.keep_residual(folders.residual, path)
    except CryptoError as error:
        log.warning("what rounding dropped is not fed back", cause=str(error))
