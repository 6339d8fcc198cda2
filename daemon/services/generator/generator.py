"""The generator that the sites train together, as this site uses it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import structlog

from daemon.jobs.generator import training
from daemon.jobs.generator.judging import choose, judge
from daemon.learning.generator.in_use import InUse, read_in_use, write_in_use
from daemon.learning.generator.spec import GeneratorSpec
from daemon.learning.options import EvaluationError, LearningError
from daemon.library.schema import LibraryError
from daemon.personal.generator import drop_owns, is_usable
from daemon.process.tasks import logged
from daemon.process.workers import Worker, WorkerCrashed
from daemon.services.generator.history import VersionHistory
from daemon.services.personaliser import RunGoesFirstError, giving_way, until_idle
from daemon.state.store import Store, StoreError
from daemon.state.versions import Shapes, UnreadShapes, VersionError
from peers.attempts import effects as do
from peers.rounds.protocol import Protocol
from peers.wire.manifest import GENERATOR, FederationManifest, NamedModel, log_id

log = structlog.get_logger()

_COMING = "it has not been judged yet: it is, in the background"
_FAILURES = (LearningError, LibraryError, VersionError, StoreError, WorkerCrashed, OSError)


@dataclass(frozen=True)
class OwnGenerator:
    """What this site can train: ``name`` as a manifest may name it."""

    shapes: Shapes
    name: NamedModel


class FederatedGenerator:
    """Its versions, and what this site can contribute to the next one."""

    def __init__(
        self,
        spec: GeneratorSpec,
        *,
        library: Path,
        learning: Worker,
        answering: Worker,
        willing: bool,
        min_triples: int,
        in_use: Path,
    ) -> None:
        self.served_digest = b""
        self.own: OwnGenerator | None = None  # None: there is no base model here
        self.spec = spec
        self.library = library
        self._learning = learning
        self._answering = answering
        self._willing = willing
        self._min_triples = min_triples
        self._named: NamedModel | None = None
        self._wanted_digest = b""
        self.in_use_file = in_use
        self.in_use = InUse()
        self.last = do.Situation(0, willing=False, reason="is still starting")  # as it was told
        self.history: VersionHistory | None = None  # None: no manifest names a generator
        self.missing = _COMING  # why the newest version is not judged
        self.versions = Path()
        self._come = asyncio.Event()  # another version has
        self._protocols: tuple[Protocol, ...] = ()  # whose runs go first

    async def prepare(
        self, versions: Path, named: NamedModel | None, store: Store | None = None
    ) -> None:
        """Look at the base model, if there is one; ``named``: by the manifest in force.

        ``store``: of its rounds. Raises LearningError for one that can't be trained.
        """
        self._named, self.versions = named, versions
        if named is not None and store is not None:
            self.history = VersionHistory(store, versions, named.first)
        self.use(await asyncio.to_thread(read_in_use, self.in_use_file))
        if not self.spec.base_model:
            return
        log.info("loading the generator's base model", base_model=self.spec.base_model)
        described = await self._learning.run(training.describe, self.spec)
        first = await self._learning.run(training.write_initial_version, self.spec, versions)
        shapes = described.shape_manifest
        self.own = OwnGenerator(shapes, NamedModel(shapes.digest, shapes.total, first))
        if self.served_digest and not await asyncio.to_thread(
            is_usable, self.in_use, self.spec, versions, shapes.digest
        ):  # of another base model, pruned, or not wanted: until one is judged that model answers
            await asyncio.to_thread(write_in_use, self.in_use_file, InUse())
            self.use(InUse())
        await asyncio.to_thread(drop_owns, self.spec, self.in_use.own)

    @property
    def shapes(self) -> Shapes:
        """Of the generator that the manifest names, which this site need not have."""
        if self._named is None:
            raise RuntimeError("no manifest names a generator")
        if self.own is not None and self.own.name == self._named:
            return self.own.shapes
        return UnreadShapes(self._named.digest, self._named.values)

    def why_no_rounds(self, manifest: FederationManifest) -> str:
        """Why this daemon runs none of its rounds, and what to do."""
        if manifest.generator is not None:
            return (
                f"manifest {manifest.version} names a generator since this daemon was started: "
                "restart fedd"
            )
        return manifest.of_log(log_id(manifest.federation_id, GENERATOR)).objection

    @property
    def lacking(self) -> str:
        """What this site lacks to train what the manifest names; empty if nothing."""
        if self.own is None:
            return "has no base model for the generator (generator.base_model)"
        if self._named is not None and self.own.name != self._named:
            return (
                "has another generator than the manifest names (generator.base_model, or how it "
                "is adapted)"
            )
        return ""

    # ---- `daemon.rounds.readiness.Served` ------------------------------------------------

    @property
    def wanted(self) -> bytes:
        """The newest version."""
        return self._wanted_digest

    def adopt(self, model_digest: bytes) -> None:
        """A version was committed, or is here again."""
        self._wanted_digest = model_digest
        self._come.set()

    async def run(self, protocols: Iterable[Protocol] = ()) -> None:
        """Judge each version that comes, until cancelled: the newest first, so that it answers.

        While a run of ``protocols`` is under way nothing is judged, for all that train do so in
        the same worker.
        """
        self._protocols = tuple(protocols)
        while True:
            await self._come.wait()
            await until_idle(self._protocols)
            self._come.clear()
            if self._to_judge:
                await logged(self._judge(self._wanted_digest))
            if self.history is not None and not self.lacking:
                await logged(self._judge_others(self.history))

    @property
    def _to_judge(self) -> bool:
        """Whether there is a version that is none of those that were: not the first, either."""
        known = ("", self.in_use.judged, self._named.first.hex() if self._named else "")
        return self._wanted_digest.hex() not in known and not self.lacking

    async def _judge(self, digest: bytes) -> None:
        known = (self.spec, self.library, self.versions, digest, self.in_use_file)
        try:
            work = self._learning.run(choose, *known)
            found = await giving_way(work, self._learning, self._protocols)
            self.use(found)
            if found.base is None or found.newest is None:
                return
            log.info("a generator's version was judged", judged=found.judged, used=found.version)
            if self.history is not None:
                for one, judged in ((self.history.first, found.base), (digest, found.newest)):
                    await asyncio.to_thread(self.history.file, one, judged, found.triples)
        except RunGoesFirstError:
            self._come.set()
        except _FAILURES as error:
            log.warning("a generator's version could not be judged", cause=str(error))

    async def _judge_others(self, history: VersionHistory) -> None:
        """What is here and was not judged: when it came there was too little to judge by, say."""
        self.missing = _COMING
        try:
            here = [one for one in await asyncio.to_thread(history.unjudged) if not one.pruned]
            for one in reversed(here):
                if self._come.is_set():  # a newer one may have
                    return
                digest = one.model_digest if one.round else b""
                work = self._learning.run(judge, self.spec, self.library, self.versions, digest)
                judged, triples = await giving_way(work, self._learning, self._protocols)
                await asyncio.to_thread(history.file, one.model_digest, judged, triples)
        except RunGoesFirstError:
            self._come.set()
        except EvaluationError as error:
            self.missing = str(error)
        except _FAILURES as error:
            self.missing = str(error)
            log.warning("a generator's version could not be judged", cause=str(error))

    def use(self, in_use: InUse) -> None:
        """What answers from now on, as a job of the worker has written it."""
        self.in_use = in_use
        self.served_digest = bytes.fromhex(in_use.version)

    async def situation(self) -> do.Situation:
        """What this site can contribute to its training, and why not if it can't.

        Where that may have changed there may be enough by now to judge a version by, too.
        """
        self._come.set()
        self.last = await self._situation()
        return self.last

    async def _situation(self) -> do.Situation:
        if self.lacking:
            return do.Situation(0, willing=False, reason=self.lacking)
        if not self._willing:
            return do.Situation(0, willing=False, reason="training.willing is off here")
        try:
            # By a worker that training doesn't keep waiting.
            triples = await self._answering.run(training.trainable, self.spec, self.library)
        except (LearningError, LibraryError, WorkerCrashed) as error:
            return do.Situation(0, willing=False, reason=f"can't read what it learns from: {error}")
        if triples < self._min_triples:
            reason = (
                f"has {triples} questions with passages and answers and needs "
                f"{self._min_triples} (generator.min_triples): ingest pairs with answers"
            )
            return do.Situation(triples, willing=False, reason=reason)
        return do.Situation(triples, willing=True)
