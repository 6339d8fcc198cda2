"""Pairs that a site makes of its own documents: built, counted, dropped. They stay here.

The arithmetic runs in workers. What a language model writes takes hours, and the
learning worker is also who trains: it writes for some seconds at a time, and a
round that begins meanwhile trains in between. Whoever asked for pairs and goes away
ends the writing at the next such pause; what was written is kept, and building
again goes on from there.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from daemon.jobs import pairs
from daemon.jobs.pairs import MadeOverview, PairCounts, PairPlan, PairProgress
from daemon.learning.options import LearningError
from daemon.learning.retriever.spec import RetrieverSpec
from daemon.library.contents import RemovedCounts
from daemon.library.file_notes import FilesGone
from daemon.process.streams import watched
from daemon.process.workers import Worker
from daemon.services.collection import Collection
from daemon.state.folder import StateFolder

_SLICE_S = 20.0  # of writing at a time: training waits no longer, beside a reply under way


@dataclass(frozen=True)
class WriterSettings:
    """What writes, as the operator chose: see `PairPlan`; "" where there is no model."""

    model: str
    domain: str


class PairMaker:
    """The made pairs of one site: who makes them, and where they lie."""

    def __init__(
        self,
        *,
        spec: RetrieverSpec,
        state: StateFolder,
        collection: Collection,
        writer: WriterSettings,
        learning: Worker,
        answering: Worker,
    ) -> None:
        """``spec.made_pairs`` is where pairs are kept; ``answering`` counts them."""
        self.learn_from: Literal["supplied", "supplied+made", "made"] = spec.learn_from
        self._spec = spec
        self._path = Path(spec.made_pairs)
        self._replies = self._path.with_name("written_queries.jsonl")
        self._versions = state.versions
        self._collection = collection
        self._writer = writer
        self._learning = learning
        self._answering = answering
        self._one_at_a_time = asyncio.Lock()

    async def build(self, plan: PairPlan) -> AsyncGenerator[PairProgress | PairCounts]:
        """Make pairs of one kind, with progress; the last item says what came of it.

        Raises LearningError or LibraryError, and those made before stay as they are.
        """
        if self._one_at_a_time.locked():
            raise LearningError(
                "pairs are being made or dropped already: wait until that has ended"
            )
        async with self._one_at_a_time:
            plan = replace(plan, model=self._writer.model, domain=self._writer.domain)
            replies = None
            if plan.how == "llm":
                if not plan.model:
                    raise LearningError(
                        "there is no language model to write questions: set pairs.writer, or "
                        "choose --how cloze, titles or keywords"
                    )
                replies = self._replies
                async for step in self._write(plan):
                    yield step
            # What the version in use makes of texts decides whether a question finds its passage.
            digest = self._collection.readable_digest
            version = (self._versions, digest) if digest else None
            counts: list[PairCounts] = []

            async def build(listener: Callable[[object], None]) -> None:
                counts.append(
                    await self._learning.run_reporting(
                        listener,
                        pairs.build_pairs,
                        self._spec,
                        self._collection.library_path,
                        self._path,
                        plan,
                        version=version,
                        replies_path=replies,
                    )
                )

            async for step in _reported(build):
                yield step
            await self._collection.recount()
            yield counts[0]

    async def _write(self, plan: PairPlan) -> AsyncIterator[PairProgress]:
        so_far = PairProgress(0, 1)

        async def write(listener: Callable[[object], None]) -> None:
            nonlocal so_far
            so_far = await self._learning.run_reporting(
                listener,
                pairs.write_queries,
                self._spec,
                self._collection.library_path,
                self._replies,
                plan,
                _SLICE_S,
            )

        while so_far.done < so_far.total:
            async for step in _reported(write):
                yield step
        yield so_far

    async def overview(self, how: str = "", examples: int = 0) -> MadeOverview:
        """What was made, and what is trained on; raises LearningError, LibraryError."""
        return await self._answering.run(
            pairs.overview,
            self._spec,
            self._collection.library_path,
            self._path,
            how,
            examples,
        )

    async def drop(self, how: str = "") -> None:
        """Forget the pairs of a kind, or all; raises LearningError while some are being made."""
        if self._one_at_a_time.locked():
            raise LearningError("pairs are being made: wait until that has ended, or end it")
        async with self._one_at_a_time:
            await self._answering.run(pairs.drop_pairs, self._path, how)
            await self._collection.recount()

    @property
    def busy(self) -> bool:
        """Whether pairs are being made or dropped, and `remove` refuses."""
        return self._one_at_a_time.locked()

    async def remove(
        self, documents: Sequence[str], gone: FilesGone | None = None
    ) -> RemovedCounts:
        """Remove documents, and forget what was made of them, before anything is made again.

        ``gone``: with the notes of these files. Raises LearningError while pairs are being
        made, and nothing has happened then.
        """
        if self.busy:
            raise LearningError("pairs are being made: wait until that has ended, or end it")
        async with self._one_at_a_time:
            await self._answering.run(
                pairs.forget_documents, self._path, self._replies, list(documents)
            )
            return await self._collection.remove(documents, gone)


async def _reported(
    work: Callable[[Callable[[object], None]], Coroutine[Any, Any, None]],
) -> AsyncIterator[PairProgress]:
    """The progress of a job while it runs; its refusal is raised here."""
    async with watched(work, PairProgress) as (steps, task):
        async for step in steps:
            yield step
        await task
