"""Pairs that a site makes of its own documents: built, counted, dropped. They stay here.

And those that people propose, which are used once an operator has accepted them.

The arithmetic runs in workers. What a language model writes takes hours, and the
learning worker is also who trains: it writes for some seconds at a time, and a
round that begins meanwhile trains in between. Whoever asked for pairs and goes away
ends the writing at the next such pause; what was written is kept, and building
again goes on from there.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from daemon.jobs import pairs
from daemon.jobs.pairs import MadeOverview, PairCounts, PairPlan, PairProgress
from daemon.learning.options import LearningError
from daemon.learning.retriever.spec import RetrieverSpec
from daemon.library.contents import RemovedCounts
from daemon.library.file_notes import FilesGone
from daemon.library.readers.documents import Pair
from daemon.library.store import Library
from daemon.pairs.proposals import Proposal, ProposalRefused, Proposals
from daemon.process.streams import watched
from daemon.process.workers import Worker
from daemon.services.collection import Collection
from daemon.state.folder import StateFolder

_PAGE = 1000  # pairs that are looked through at once
_SLICE_S = 20.0  # of writing at a time: training waits no longer, beside a reply under way


@dataclass(frozen=True)
class Accepted:
    """What became of proposals, by id; ``known``: those that are validation pairs now."""

    known: list[str]
    unknown: list[str]
    refused: list[str]  # nobody says that the document answers, or a test pair has it


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
        self.proposals = Proposals(state.proposals)
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
            if plan.answers and plan.how != "llm":
                raise LearningError("only written questions are answered: choose --how written")
            if plan.how == "llm":
                if not plan.model:
                    raise LearningError(
                        "there is no language model to write questions: set pairs.writer, or "
                        "choose --how cloze, titles or keywords"
                    )
                replies = self._replies
                async for step in self._write(pairs.write_queries, plan=plan):
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
            if plan.answers:
                async for step in self._write(pairs.write_answers, self._path, plan=plan):
                    yield step
                where = (self._spec, self._collection.library_path, self._path, plan)
                answered, dropped = await self._learning.run(
                    pairs.keep_answers, *where, replies_path=replies
                )
                counts[0] = replace(counts[0], answered=answered, unsupported=dropped)
            await self._collection.recount()
            yield counts[0]

    async def _write(
        self, job: Callable[..., PairProgress], *where: Path, plan: PairPlan
    ) -> AsyncIterator[PairProgress]:
        so_far = PairProgress(0, 1)

        async def write(listener: Callable[[object], None]) -> None:
            nonlocal so_far
            so_far = await self._learning.run_reporting(
                listener,
                job,
                self._spec,
                self._collection.library_path,
                *where,
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

        All ways out lead through here: a person's command, a file that is gone or has lost some
        of what was in it, a file that is brought in the place of another. ``gone``: with the
        notes of these files. Raises LearningError while pairs are being made, and nothing has
        happened then; ProposalRefused where all is gone but what people said of them.
        """
        if self.busy:
            raise LearningError("pairs are being made: wait until that has ended, or end it")
        async with self._one_at_a_time:
            await self._answering.run(
                pairs.forget_documents,
                *(self._collection.library_path, self._path, self._replies, list(documents)),
            )
            # Before it, for whoever is killed in between, and behind it, for what was said
            # meanwhile. A store of proposals that is damaged keeps no document here.
            with suppress(ProposalRefused):
                await self.proposals.forget_documents(documents)
            removed = await self._collection.remove(documents, gone)
            try:
                await self.proposals.forget_documents(documents)
            except ProposalRefused as error:
                cause = "the documents are removed, but not what people said of them"
                raise ProposalRefused(f"{cause}: {error}; then remove them again") from error
            return removed

    # ---- what people propose -------------------------------------------------------

    async def propose(
        self, token: str, question: str, document_id: str, passage_id: str, *, answers: bool
    ) -> bool:
        """As `Proposals.vote`; whether the document is here still, or nothing is kept of it."""
        await self.proposals.vote(token, question, document_id, passage_id, answers=answers)
        return document_id in await self._present([document_id])

    async def proposed(self) -> list[Proposal]:
        """What waits for an operator, the oldest first, of documents that are here."""
        found = await self.proposals.waiting()
        here = await self._present([one.pair.positives[0] for one in found])
        return [one for one in found if one.pair.positives[0] in here]

    async def _present(self, documents: Sequence[str]) -> set[str]:
        """Those that are here; what was said of the others is forgotten, however they went."""
        here = await self._collection.known(documents)
        if gone := {*documents} - here:
            await self.proposals.forget_documents(gone)
        return here

    async def accept(self, ids: Sequence[str]) -> Accepted:
        """Have proposals become validation pairs, and wait no more.

        Killed in between, they wait still, and accepted again they are the same pairs.
        """
        waiting = {one.id: one for one in await self.proposed()}
        there = [waiting[name] for name in dict.fromkeys(ids) if name in waiting]
        refused, become = list[str](), dict[str, list[Pair]]()
        for one in there:
            known = await self._collection.read(partial(same_asked, one))
            if not any(vote.answers for vote in one.votes) or any(p.split == "test" for p in known):
                refused.append(one.id)
            else:
                become[one.id] = [replace(p, split="valid") for p in known] or [one.pair]
        if become:
            async with self._collection.changes.turn():
                await self._collection.ingest([], [p for them in become.values() for p in them])
            await self.proposals.forget(become)
            self._collection.refresh()
            await self._collection.recount()
        return Accepted([*become], [name for name in ids if name not in waiting], refused)


def same_asked(proposal: Proposal, library: Library) -> list[Pair]:
    """The pairs here that ask this of the document, case and white space aside.

    They move when it is accepted, as a pair does that is ingested with another split: nothing is
    both learned from and judged on.
    """
    (document,), asked = proposal.pair.positives, _key(proposal.pair.query)
    found, after = list[Pair](), 0
    while some := library.pairs_naming(document, [document], after, _PAGE):
        found += [pair for _, pair in some if _key(pair.query) == asked]
        after = some[-1][0]
    return found


def _key(question: str) -> str:
    return " ".join(question.split()).casefold()


async def _reported(
    work: Callable[[Callable[[object], None]], Coroutine[Any, Any, None]],
) -> AsyncIterator[PairProgress]:
    """The progress of a job while it runs; its refusal is raised here."""
    async with watched(work, PairProgress) as (steps, task):
        async for step in steps:
            yield step
        await task
