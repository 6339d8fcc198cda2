"""What is this site's own is fitted: when, and how that meets the rest.

What that is, its layer says (`daemon.personal.layers`). It is fitted after the last round
of a run, and whenever somebody types `fedctl personalise`: for the version that answers,
and kept for that one only. Cut short it leaves nothing behind and is begun anew; a round
that begins goes first, for the federation waits for it.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import structlog

from config.settings import Settings
from daemon.jobs import personal
from daemon.learning.from_settings import options_from
from daemon.learning.options import LearningError, Personalised, TrainingOptions
from daemon.learning.retriever.peer_negatives import AskingTerms
from daemon.learning.retriever.spec import RetrieverSpec
from daemon.library.schema import LibraryError
from daemon.personal.layers import LAYERS, layer_of
from daemon.personal.store import PersonalStore
from daemon.process.tasks import logged
from daemon.process.workers import Worker, WorkerCrashed
from daemon.services.collection import Collection, NotIndexedYet
from daemon.services.negatives import Asking, AskOptions
from daemon.state.audit import DAEMON, AuditLog
from daemon.state.audit_format import AuditError
from daemon.state.versions import VersionError
from peers.link.transport import PeerTransport
from peers.rounds.protocol import Protocol

Outcome = TypeVar("Outcome")

log = structlog.get_logger()

_LOOK_EVERY_S = 0.5  # whether a round began

_FAILURES = (LearningError, LibraryError, VersionError, WorkerCrashed, NotIndexedYet, OSError)


@dataclass(frozen=True)
class Fitting:
    """What was learned, and what was exchanged for it."""

    learned: Personalised
    asked: Asking


@dataclass(frozen=True)
class Personal:
    """What the operator chose that concerns what is fitted here, and whom that may ask."""

    spec: RetrieverSpec
    shape_digest: bytes
    options: TrainingOptions
    how: AskingTerms
    whom: AskOptions

    @classmethod
    def of(
        cls, settings: Settings, spec: RetrieverSpec, shape_digest: bytes, site: str
    ) -> Personal:
        """As the settings say of training, on this site alone."""
        chosen = settings.negatives
        seed = hashlib.sha256(site.encode()).digest()
        options = options_from(settings.training, settings.learning)
        return cls(
            spec=spec,
            shape_digest=shape_digest,
            options=replace(options, seed=int.from_bytes(seed[:8], "little")),
            how=AskingTerms(chosen.level, chosen.noise, chosen.bits, chosen.top_n),
            whom=AskOptions(chosen.select, chosen.sites, chosen.deadline_s, chosen.ask),
        )


class Personaliser:
    """Fits what is this site's own, one time at a time."""

    def __init__(
        self,
        chosen: Personal,
        *,
        learning: Worker,
        collection: Collection,
        protocol: Protocol,
        transport: PeerTransport,
        audit: AuditLog,
        federation_id: str,
    ) -> None:
        self._chosen = chosen
        self._learning = learning
        self._collection = collection
        self._protocol = protocol
        self._transport = transport
        self._audit = audit
        self._federation_id = federation_id
        self._turn = asyncio.Lock()
        self._wanted = asyncio.Event()

    @property
    def spec(self) -> RetrieverSpec:
        """The retriever that is fitted, with its layer."""
        return self._chosen.spec

    @property
    def fitting(self) -> bool:
        """Whether it is being fitted now."""
        return self._turn.locked()

    @property
    def _on(self) -> bool:
        return layer_of(self._chosen.spec).fitted

    # ---- unasked ---------------------------------------------------------------

    def run_ended(self) -> None:
        """The last round of a run is committed, or the run was stopped: `run` does its work."""
        self._wanted.set()

    async def run(self) -> None:
        """After each run, and after a start for a run whose end this site has missed."""
        run, head = self._protocol.run, self._protocol.head_round
        if run is not None and 0 < run.target_round <= head:
            self._wanted.set()
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            if self._on:
                await logged(self._unasked())

    async def _unasked(self) -> None:
        try:
            await self._after_a_run(self._collection.wanted)
        except _FAILURES as error:
            log.warning("nothing of this site's own was made", cause=str(error))
        except AuditError as error:
            log.error("nothing of this site's own without a record", cause=str(error))  # noqa: TRY400

    async def _after_a_run(self, digest: bytes) -> None:
        await self._collection.until_served(digest)
        store = PersonalStore(Path(self._chosen.spec.personal_folder), self._chosen.shape_digest)
        serving = await asyncio.to_thread(store.serving, digest)
        finished = serving is not None and layer_of(self._chosen.spec).is_finished(serving)
        if self.fitting or finished:
            return
        await self._audit.record(DAEMON, "personalise", "begun", digest=digest.hex())
        run = self._protocol.run
        options = self._chosen.options
        if run is not None:  # as the version was trained that it is mixed with, or begins at
            options = replace(TrainingOptions.of(run.plan), seed=options.seed)
        outcome = await self._fitted(lambda _: None, options)
        await self._audit.record_or_owe(DAEMON, "personalise", "done", **told(outcome))

    # ---- asked for -------------------------------------------------------------

    async def personalise(
        self, listener: Callable[[object], None], *, local_epochs: int = 0
    ) -> Fitting:
        """Fit what is this site's own, as the settings say of training, and answer with it.

        ``listener`` gets `EpochProgress`. ``local_epochs``: passes over the pairs, in
        each round of what is learned alone; 0: as in the settings. Raises LearningError with
        cause and remedy, and as training does. Cancelled, it changes nothing.
        """
        options = self._chosen.options
        if local_epochs:
            options = replace(options, local_epochs=local_epochs)
        return await self._fitted(listener, options)

    async def _fitted(
        self, listener: Callable[[object], None], options: TrainingOptions
    ) -> Fitting:
        if not self._on:
            fitted = sorted(repr(layer.name) for layer in LAYERS.values() if layer.fitted)
            raise LearningError(
                "this site fits nothing of its own: set retriever.personal = "
                f"{' or '.join(fitted)} and start fedd again"
            )
        if self.fitting:
            raise LearningError("this site is being fitted already: wait for it")
        async with self._turn:
            return await self._personalise(listener, options)

    async def _personalise(
        self, listener: Callable[[object], None], options: TrainingOptions
    ) -> Fitting:
        chosen, collection = self._chosen, self._collection
        digest = collection.readable_digest
        if not digest:
            raise NotIndexedYet("the index is still being made; try again in a moment")
        asking = Asking(
            self._transport,
            self._federation_id,
            self._protocol.site,
            digest,
            chosen.how.top_n,
            chosen.whom,
        )

        work = self._learning.run_asking(
            listener,
            asking,
            personal.personalise,
            chosen.spec,
            collection.library_path,
            collection.versions,
            digest,
            options,
            chosen.how,
        )
        learned = await giving_way(work, self._learning, [self._protocol])
        if collection.served_digest == digest:
            await collection.renew()
        log.info(
            "what is this site's own is fitted",
            model=digest.hex()[:12],
            changed=learned.changed,
            steps=asking.steps,
            steps_unanswered=asking.unanswered,
        )
        return Fitting(learned, asking)


class RunGoesFirstError(LearningError):
    """A run began while something else was at work for which training must not wait."""


async def until_idle(protocols: Iterable[Protocol]) -> None:
    """Wait until no run is under way."""
    watched = list(protocols)
    # A machine without IO tells nobody: it is asked.
    while any(one.busy for one in watched):  # noqa: ASYNC110
        await asyncio.sleep(_LOOK_EVERY_S)


async def giving_way(
    work: Coroutine[Any, Any, Outcome], learning: Worker, protocols: Iterable[Protocol]
) -> Outcome:
    """The result of a job of ``learning``, unless a run begins: that goes first, others wait.

    Raises RunGoesFirstError then; and what the work does.
    """
    watched = list(protocols)
    task = asyncio.create_task(work)
    try:
        while not task.done():
            await asyncio.wait([task], timeout=_LOOK_EVERY_S)
            if any(one.busy for one in watched) and not task.done():
                raise RunGoesFirstError(
                    "a run of rounds is under way, and goes first: this comes when it is over"
                )
        return await task
    finally:
        if not task.done():
            await learning.give_up(task)  # the round's training waits behind it


def told(outcome: Fitting) -> dict[str, Any]:
    """An outcome as entries of the audit log have it: what was exchanged with whom."""
    return {
        "digest": outcome.asked.model_digest.hex(),
        "changed": outcome.learned.changed,
        "share": None if math.isnan(outcome.learned.share) else outcome.learned.share,
        "peers": {
            site: {"asked": seen.asked, "answered": seen.answered, "embeddings": seen.embeddings}
            for site, seen in sorted(outcome.asked.peers.items())
        },
    }
