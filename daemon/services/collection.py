"""The site's documents as the daemon sees them: ingest, index, ask, evaluate.

The arithmetic runs in two workers. The *learning* worker cuts, embeds and
indexes; the *answering* worker holds one whole version (encoder, index, library)
and answers with it. A new version, or new documents, are indexed in the
background and swapped in at once: until then the old one answers. Behind a change of
encoder that is a version of the encoder before, over restarts, too (`StandIn`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import SystemRandom
from typing import Any, TypeVar

import structlog

from crypto.arrays import Float32
from daemon.answering.answering import Answered
from daemon.answering.generator import AS_SET, Asking
from daemon.answering.options import AS_USUAL, AnsweringOptions
from daemon.jobs import answering as answering_jobs
from daemon.jobs import learning as learning_jobs
from daemon.jobs import originals as original_jobs
from daemon.jobs import pairs as pair_jobs
from daemon.learning.options import EmbeddingProgress, EvaluationProgress, LearningError
from daemon.learning.retriever.spec import RetrieverSpec
from daemon.library.catalogue.filters import Filters
from daemon.library.contents import IngestCounts, LibraryCounts, RemovedCounts, StoredDocument
from daemon.library.dense.engines import LEAST_RECALL
from daemon.library.dense.folder import IndexDamaged
from daemon.library.dense.options import EngineUnavailable
from daemon.library.file_notes import FilesGone, FilesRead
from daemon.library.readers.documents import Document, Pair, Waiting
from daemon.library.schema import LibraryError
from daemon.library.store import Library
from daemon.personal.layers import layer_of
from daemon.process.workers import Worker, WorkerCrashed
from daemon.services.indexes import (
    MISSES,
    StandIn,
    index_at,
    indexes_of,
    remove_others,
    warnings_of,
)
from daemon.services.library_changes import LibraryChanges
from daemon.services.rights import Rights, Told, run_for
from daemon.services.work_ahead import WorkAhead
from daemon.state.folder import StateFolder
from daemon.state.versions import VersionError
from peers.attempts import effects as do
from peers.link.pacing import Backoff

log = structlog.get_logger()
T = TypeVar("T")


_RETRY_S = 5.0
_LONGEST_RETRY_S = 300.0
_QUIET_S = 60.0  # without anything to index, after which work is done ahead
_SLICE_S = 5.0  # of embedding at a time: training, ingests and removals wait no longer
_RANKING_S = 2.0  # likewise by the cross-encoder: a question that a person asks waits no longer
# What indexing may fail with; the old version goes on answering.
_FAILURES = (
    *(LearningError, LibraryError, VersionError, IndexDamaged, EngineUnavailable),
    *(WorkerCrashed, OSError),
)


class NotIndexedYet(Exception):
    """Nothing can be answered yet; the text says what is being waited for."""


@dataclass(frozen=True)
class CollectionSettings:
    """What the operator chose that concerns documents, answers and willingness to train."""

    passage_tokens: int
    top_k: int
    willing: bool
    min_pairs: int
    tell_complexity: bool = False
    answering: AnsweringOptions = AS_USUAL


@dataclass(frozen=True)
class Listeners:
    """Who is told: a version can't be read, one answers from now on, documents or pairs change."""

    suspect: Callable[[], None]
    answers: Callable[[], None]
    changed: Callable[[], None]


class Collection:
    """Documents, pairs and the index of one site."""

    def __init__(
        self,
        *,
        spec: RetrieverSpec,
        state: StateFolder,
        settings: CollectionSettings,
        learning: Worker,
        answering: Worker,
        listeners: Listeners,
        stand_in: StandIn | None = None,
    ) -> None:
        self.library_path = state.library
        self.changes = LibraryChanges()
        self.served_digest = b""
        self.served_index: Path | None = None  # its folder; None: none is open yet
        self.opened = answering_jobs.NONE_OPEN  # what that one holds
        self.renewed = 0  # times that what is this site's own of a version changed
        self.last_error = ""
        self._left_out = ""  # as `OpenVersion.search` says of the last question
        self._unwritten: tuple[str, ...] = ()  # `instead`, `cut_short`: it failed at the last
        self._listeners = listeners
        self._trainable = 0  # pairs, where those that were made here are learned from
        self._spec = self._served_spec = spec
        self._stand_in = stand_in
        self.embedded = asyncio.Event()  # by the encoder in use, or it is the only one
        if stand_in is None or stand_in.spec == spec:
            self.embedded.set()
        self.versions = state.versions
        self._index_root = state.index
        self._sentences = state.sentences
        self._ahead = WorkAhead(learning, state.library, state.sentences)
        self._unread = False  # there may be something to do ahead
        self._settings = settings
        self._learning = learning
        self._answering = answering
        self._wanted_digest = b""
        self._dirty = asyncio.Event()
        self._settled = asyncio.Event()
        self._watching: list[Callable[[object], None]] = []  # how an index is made
        self._embedding = EmbeddingProgress(0, 0)  # of the one that is being made

    async def prepare(self) -> None:
        """Make the library where there is none yet.

        EncoderError or LanguageModelError for models that can't answer.
        """
        options = self._settings.answering
        if options.cross_encoder or options.language_model:
            log.info(
                "loading what ranks and writes answers",
                cross_encoder=options.cross_encoder,
                language_model=options.language_model,
            )
            await self._answering.run(answering_jobs.check, options, self._spec.device)
        log.info("opening the library")
        await self.ingest([], [])
        await self.recount()

    # ---- documents in ------------------------------------------------------------

    async def ingest(
        self,
        documents: Sequence[Document],
        pairs: Sequence[Pair],
        *,
        replace: bool = False,
        waiting: Sequence[Waiting] = (),
    ) -> IngestCounts:
        """Store a batch; what is there already costs nothing. `index` makes it findable.

        ``replace``: also documents that were read from other files. ``waiting``: as in
        `Library.put_documents`.
        """
        return await self._learning.run(
            learning_jobs.ingest,
            *(self._spec, self.library_path, documents, pairs),
            *(self._settings.passage_tokens, replace, waiting),
        )

    async def put_files(self, read: FilesRead) -> tuple[IngestCounts, FilesGone]:
        """As `Library.put_files`, which says what is to be removed; `refresh` makes it findable."""
        return await self._learning.run(
            learning_jobs.put_files,
            self._spec,
            self.library_path,
            read,
            self._settings.passage_tokens,
        )

    async def remove(self, ids: Sequence[str], gone: FilesGone | None = None) -> RemovedCounts:
        """Take documents out, with their pairs. No answer cites them; `index` forgets them, too.

        ``gone``: with the notes of these files.
        """
        removed = await self._learning.run(learning_jobs.remove, self.library_path, list(ids), gone)
        # Killed before it, this is done when the version is opened again.
        await self._answering.run(answering_jobs.forget_removed, self.library_path, self._sentences)
        return removed

    async def index(self, listener: Callable[[object], None]) -> None:
        """Embed what is new, with progress, and wait until questions find it.

        Raises LearningError or LibraryError with the cause when that fails.
        """
        self.adopt(self._wanted_digest)
        self._watching.append(listener)
        try:
            await self._settled.wait()
        finally:
            self._watching.remove(listener)
        await self.recount()
        self._listeners.changed()
        if self.last_error:
            raise LearningError(self.last_error)

    def refresh(self) -> None:
        """What was stored is embedded in the background, and found then; returns at once."""
        self.adopt(self._wanted_digest)
        self._listeners.changed()

    async def recount(self) -> None:
        """Count the training pairs anew: documents, or pairs that were made here, have changed.

        By the answering worker, which training doesn't keep waiting.
        """
        if self._spec.learn_from == "supplied":
            return
        try:
            self._trainable = await self._answering.run(
                pair_jobs.trainable, self._spec, self.library_path
            )
        except LearningError as error:
            self._trainable = 0
            log.warning("made pairs are not learned from", cause=str(error))

    async def counts(self) -> LibraryCounts:
        """How much there is."""
        return await self.read(lambda library: library.counts())

    async def unusable(self, pairs: Sequence[Pair]) -> list[Pair]:
        """Those of the pairs none of whose documents is here: nothing is learned from them."""
        known = await self.known(list({name for pair in pairs for name in pair.positives}))
        return [pair for pair in pairs if known.isdisjoint(pair.positives)]

    async def known(self, ids: Sequence[str]) -> set[str]:
        """Those of the ids whose documents are here."""
        return await self.read(lambda library: library.known(ids))

    async def documents(self, begins: str, after: str, limit: int) -> list[StoredDocument]:
        """Documents whose id begins so, in the order of ids, of those behind ``after``."""
        return await self.read(lambda library: library.documents(begins, after, limit))

    async def whole_documents(self, ids: Sequence[str], most: int) -> tuple[list[Document], int]:
        """As `daemon.library.catalogue.catalogue.Catalogue.whole`."""
        return await self.read(lambda library: library.whole_documents(ids, most))

    async def pairs_naming(
        self, begins: str, ids: Sequence[str] | None, after: int, limit: int
    ) -> list[tuple[int, Pair]]:
        """As `Library.pairs_naming`."""
        return await self.read(lambda library: library.pairs_naming(begins, ids, after, limit))

    async def read(self, question: Callable[[Library], T]) -> T:
        """What the library says, asked in a thread."""

        def asked() -> T:
            with Library.open(self.library_path, read_only=True) as library:
                return question(library)

        return await asyncio.to_thread(asked)

    async def similar(self, wrong_id: str) -> str:
        """The id of a document here that a wrong one may mean; empty: none."""
        return await self.read(lambda library: library.similar(wrong_id))

    async def situation(self) -> do.Situation:
        """What this site can contribute to training, and why not if it can't."""
        learned = self._spec.learn_from
        pairs = (await self.counts()).pairs_train if learned == "supplied" else self._trainable
        if not self._settings.willing:
            return do.Situation(pairs, willing=False, reason="training.willing is off here")
        if not self.embedded.is_set():
            reason = "is embedding its passages with the new encoder"
            return do.Situation(pairs, willing=False, reason=reason)
        if pairs < self._settings.min_pairs:
            reason = (
                f"has {pairs} training pairs and needs {self._settings.min_pairs} "
                "(training.min_pairs): ingest pairs, or make some (fedctl pairs)"
            )
            return do.Situation(pairs, willing=False, reason=reason)
        if not self._settings.tell_complexity:
            return do.Situation(pairs, willing=True)
        complexity = await self._learning.run(learning_jobs.complexity, self.library_path)
        return do.Situation(pairs, willing=True, complexity=complexity)

    # ---- versions ------------------------------------------------------------------

    def adopt(self, model_digest: bytes) -> None:
        """Answer with this version as soon as it is indexed; returns at once."""
        self._wanted_digest = model_digest
        self._settled.clear()
        self._dirty.set()

    @property
    def readable_digest(self) -> bytes:
        """The version that answers, unless it stands in for one of the encoder in use."""
        return self.served_digest if self._served_spec == self._spec else b""

    @property
    def wanted(self) -> bytes:
        """The version that questions are, or are to be, answered with; empty: none yet."""
        return self._wanted_digest

    def wants(self, model_digest: bytes) -> bool:
        """Whether questions are, or are to be, answered with this version."""
        return self._wanted_digest == model_digest

    async def run(self) -> None:
        """Index whatever is wanted, the newest only, until cancelled."""
        pauses = Backoff(_RETRY_S, _LONGEST_RETRY_S, SystemRandom())
        await self._until_wanted()
        await self._let_stand_in()
        await self._collect_originals()
        while True:
            await self._until_wanted()
            self._dirty.clear()
            try:
                path = await self._index_and_open(self._spec, self._wanted_digest)
                await asyncio.to_thread(remove_others, self._index_root, path)
                if self._spec.index.uri:
                    await self._learning.run(
                        learning_jobs.forget_elsewhere, self._spec, self._index_root
                    )
            except _FAILURES as error:
                if self._dirty.is_set():
                    continue  # a newer version is wanted by now; this one may be forgotten
                self.last_error = f"the index could not be made: {error}"
                log.warning("index not made, the old version goes on answering", cause=str(error))
                if isinstance(error, VersionError):
                    self._listeners.suspect()
                await self._wait_to_retry(pauses.pause())
            else:
                self.last_error = ""
                self._unread = True
                self._embedding = EmbeddingProgress(0, 0)
                self.embedded.set()
                pauses.reset()
                self._listeners.answers()
            if not self._dirty.is_set():
                self._settled.set()

    async def _collect_originals(self) -> None:
        """What a kill left in the folder of originals, though its documents are removed."""
        try:
            await self._learning.run(original_jobs.collect, self.library_path)
        except _FAILURES as error:
            log.warning("files of removed documents may be left", cause=str(error))

    async def _let_stand_in(self) -> None:
        """Answer from an index of before, where the one that is wanted is to be made first."""
        one = self._stand_in
        if one is None:
            return
        path = await asyncio.to_thread(
            index_at, self._index_root, self.library_path, self._spec, self._wanted_digest
        )
        if await asyncio.to_thread(path.is_dir):
            return
        for before in await asyncio.to_thread(indexes_of, self._index_root, one):
            try:
                await self._open(one.spec, one.model_digest, before)
            except _FAILURES as error:
                log.warning("an index of before does not answer meanwhile", cause=str(error))
            else:
                log.info("an index of before answers", model=one.model_digest.hex()[:12])
                return

    async def _until_wanted(self) -> None:
        """Wait for what is to be indexed; when nothing is for a while, work ahead."""
        pause = _QUIET_S
        while self._unread:
            try:
                async with asyncio.timeout(pause):
                    await self._dirty.wait()
            except TimeoutError:
                pause = await self._ahead.some(self._spec)
                self._unread = pause > 0.0
            else:
                return
        await self._dirty.wait()

    async def _wait_to_retry(self, pause: float) -> None:
        """Less and less often: a disk that is full stays so for a while."""
        self._settled.set()  # who waits learns of the error now, not after retries
        try:
            async with asyncio.timeout(pause):
                await self._dirty.wait()
        except TimeoutError:
            self.adopt(self._wanted_digest)

    async def _index_and_open(self, spec: RetrieverSpec, digest: bytes) -> Path:
        log.info("opening the index", model=digest.hex()[:12])
        path = await asyncio.to_thread(index_at, self._index_root, self.library_path, spec, digest)
        if not await self._opened(spec, digest, path) or self.opened.engine != spec.index.engine:
            await self._embed(
                lambda done, whole: self._tell(EmbeddingProgress(done, whole)),
                *(learning_jobs.embed_passages, spec, self.library_path),
            )
            path = await self._learning.run_reporting(
                self._tell,
                learning_jobs.build_index,
                *(spec, self.library_path, self.versions, digest, self._index_root),
            )
            await self._open(spec, digest, path)
        log.info("new version answers", model=digest.hex()[:12])
        return path

    async def _embed(
        self, told: Callable[[int, int], None], job: Callable[..., Any], *arguments: Any
    ) -> None:
        """For some seconds at a time: rounds, ingests and removals come in between."""
        whole, left = 0, 1

        def heard(item: object) -> None:
            nonlocal whole
            if isinstance(item, EmbeddingProgress) and item.total:
                whole = max(whole, item.total)  # that of the first time, unless documents come
                told(whole - item.total + item.done, whole)

        while left:
            some = await self._learning.run_reporting(heard, job, *arguments, _SLICE_S)
            heard(some)
            left = some.total - some.done

    def embedded_of(self, waiting: int) -> int:
        """How many of the passages that no index has are embedded: at least, and by what is told.

        Equal texts are embedded once, and where the encoder is trained all are embedded anew.
        """
        done, total = self._embedding
        return min(done, max(0, waiting - (total - done)))

    def _tell(self, step: object) -> None:
        if isinstance(step, EmbeddingProgress):
            self._embedding = step
        for listener in self._watching:
            listener(step)

    async def _opened(self, spec: RetrieverSpec, digest: bytes, path: Path) -> bool:
        """Whether a sound index lies there: then nothing waits for the learning worker."""
        if not await asyncio.to_thread(path.is_dir):
            return False
        try:
            await self._open(spec, digest, path)
        except IndexDamaged as error:
            log.warning("an index on the disk is built again", cause=str(error))
            return False
        return True

    async def _open(self, spec: RetrieverSpec, digest: bytes, path: Path) -> None:
        opened = await self._answering.run(
            answering_jobs.open_version,
            *(spec, self.library_path, self.versions, digest, path),
            *(self._sentences, self._settings.answering),
        )
        accuracy = opened.accuracy
        if accuracy.usual_recall < LEAST_RECALL and path != self.served_index:
            log.warning(MISSES, usual_recall=accuracy.usual_recall, breadth=accuracy.breadth)
        self._served_spec, self.served_digest, self.served_index = spec, digest, path
        self.opened = opened
        self._left_out = opened.lacking
        for collections in opened.views:  # one at a time: people ask meanwhile
            await self._answering.run(answering_jobs.renew_view, collections)

    def indexed_by(self, embedded: bytes) -> bool:
        """Whether questions are answered from an index of that name (`embedded_by`)."""
        return self.served_index is not None and self.served_index.name.startswith(embedded.hex())

    # ---- questions -----------------------------------------------------------------

    @property
    def warnings(self) -> list[str]:
        """What people should look at: answers that are made worse than was wanted, and why."""
        return warnings_of(self._left_out, *self._unwritten)

    async def ask(
        self,
        question: str,
        top_k: int,
        how: Asking = AS_SET,
        *,
        warn: bool = True,
        told: Told | None = None,
        rights: Rights,
    ) -> Answered:
        """Answer a question; ``warn`` of how. ``told`` gets `AnswerSoFar`, anew after a crash."""
        job = answering_jobs.ask if told is None else answering_jobs.ask_telling
        asked = (question, top_k or self._settings.top_k, how)
        answered = await self.with_open_version(job, *asked, rights=rights, told=told)
        if warn:
            self._left_out = answered.left_out
            self._unwritten = (answered.instead, answered.cut_short) if answered.failed else ()
        return answered

    async def search(
        self, question: str, top_k: int, explain: bool, filters: Filters, rights: Rights
    ) -> answering_jobs.Searched:
        """Find passages for a question with the version that is open."""
        asked = (question, top_k or self._settings.top_k, explain, filters)
        searched = await self.with_open_version(answering_jobs.search, *asked, rights=rights)
        self._left_out = searched.left_out
        return searched

    async def embed(self, texts: list[str], rights: Rights) -> tuple[Float32, bytes]:
        """Texts as the version that is open embeds questions [n, d], and which that is."""
        return await self.with_open_version(answering_jobs.embed, texts, rights=rights)

    async def evaluate(
        self, split: str, listener: Callable[[object], None] = lambda _: None
    ) -> answering_jobs.Evaluation:
        """Judge retrieval on this site's pairs; waits for an index that is being made.

        ``listener`` gets `EvaluationProgress`. Cancelled, it leaves what was embedded.
        """
        listener(EvaluationProgress("index"))
        await self.until_settled()
        if self._spec.adapt != "head":  # its index is made without the encoder's own features
            listener(EvaluationProgress("encoder"))
            await self._embed(
                lambda done, whole: listener(EvaluationProgress("encoder", done, whole)),
                *(learning_jobs.embed_frozen, self._spec, self.library_path, split),
            )
        if self._settings.answering.cross_encoder:
            await self._rank_anew(split, listener)
        listener(EvaluationProgress("questions"))
        return await self.with_open_version(answering_jobs.evaluate, split)

    async def _rank_anew(self, split: str, listener: Callable[[object], None]) -> None:
        """For some seconds at a time: people's questions are answered in between."""
        while True:
            at = await self.with_open_version(answering_jobs.rank_anew, split, _RANKING_S)
            listener(at)
            if at.done == at.total:
                return

    async def until_settled(self) -> None:
        """Wait for an index that is being made; raises NotIndexedYet where it can't be."""
        await self._settled.wait()
        if self.last_error:
            raise NotIndexedYet(self.last_error)

    async def until_served(self, digest: bytes) -> None:
        """Wait until questions are answered with that version; raises NotIndexedYet."""
        if self.served_digest != digest:
            await self._settled.wait()
        if self.served_digest != digest:
            raise NotIndexedYet(self.last_error or "another version is wanted by now")

    async def renew(self) -> None:
        """What this site keeps for the version it serves is another: answer with that.

        Passages are embedded anew where they go through it. Raises LearningError with
        the cause when that fails; the old one goes on answering. Nothing happens where a
        newer version is on its way: to ask for this one again would call that off.
        """
        digest, index = self.served_digest, self.served_index
        if not self.wants(digest):
            return
        if index is not None and not layer_of(self._spec).traits.owns_passages:
            await self._open(self._spec, digest, index)
            self.renewed += 1
            self._listeners.answers()
            return
        self.adopt(digest)
        await self._settled.wait()
        if self.last_error:
            raise LearningError(self.last_error)

    async def with_open_version(
        self,
        job: Callable[..., T],
        *of: Any,
        rights: Rights | None = None,
        told: Told | None = None,
    ) -> T:
        """As `run_for`; once more with a fresh worker when the old one died under the job."""
        run = partial(run_for, rights, self._answering, told, job, *of)
        try:
            return await run()
        except (WorkerCrashed, answering_jobs.NotOpenError):
            if self.served_index is None:
                raise NotIndexedYet(
                    "the index is still being made; try again in a moment (`fedctl status`)"
                ) from None
            await self._open(self._served_spec, self.served_digest, self.served_index)
            return await run()
