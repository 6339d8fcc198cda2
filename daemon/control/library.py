"""The part of control.proto that is about documents and questions."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any, Final

import structlog

from daemon.answering.answering import Answered
from daemon.answering.prompts.kinds import AUTO, FOR, guessed, kind_of
from daemon.control.context import Caller, Calls, Context, ServiceContext, refuse
from daemon.control.library_messages import (
    answer_fields,
    exported_documents,
    filters_of,
    folder_message,
    found_messages,
    pair_message,
    parsed,
    passage_messages,
    prompts_message,
    stored_message,
    tried_message,
    waiting_message,
    waiting_of,
)
from daemon.control.originals import taken
from daemon.jobs.prompts import try_prompt
from daemon.learning.options import EmbeddingProgress, IndexingProgress
from daemon.library.readers.documents import (
    Pair,
)
from daemon.library.readers.pdf import engines
from daemon.process import metrics
from daemon.process.streams import Listener, watched
from daemon.services.library_changes import SilentError
from daemon.services.originals import Upload
from daemon.services.rights import Rights, of_all
from proto import control_pb2 as control

log = structlog.get_logger()

_ERRORS_TOLD: Final = 1000  # of one batch; an answer has its bound, too
_UNKNOWN_TOLD: Final = 20  # documents that pairs name and that aren't here
_ALIKE_TOLD: Final = 1000  # documents that stay where others go
_SILENT_S: Final = 60.0  # fedctl says every ten that it is still there
_NOTHING_S: Final = 2 * 3600.0  # and has read more of its files in less: one takes half an hour
_PAGE: Final = 1000  # documents or pairs that are looked for at once
_EXPORTED_AT_ONCE: Final = 1 << 20  # characters of their texts
_PAIRS_TOLD: Final = 1 << 20  # kept in mind of one ingest; any beyond that counts as new
_IDS_SOUGHT: Final = 1 << 18  # of documents that may come later in it


class LibraryCalls(Calls):
    """Documents in and out, answers out."""

    async def Ingest(
        self, requests: AsyncIterator[control.IngestRequest], context: Context
    ) -> AsyncIterator[control.IngestProgress]:
        """Documents and pairs in batches; then they are embedded and indexed."""
        # Read before anything may refuse: whoever still sends would take a refusal for a
        # broken line, and not learn the reason.
        first = await anext(requests, control.IngestRequest())
        begin = partial(self._ingest, _behind(first, requests), context)
        async with watched(begin, control.IngestProgress) as (steps, work):
            async for step in steps:
                yield step
            await self._answered(context, work)

    async def _ingest(
        self,
        requests: AsyncIterator[control.IngestRequest],
        context: Context,
        tell: Listener,
    ) -> None:
        """Who asked is waited for where it is to send, and nowhere longer than `_SILENT_S`."""
        with self._around.collection.changes.asked_for("an ingest"):
            async with self._audited(context, "ingest") as recorded:
                originals = self._around.services.originals
                state = control.IngestProgress(keeps_originals=originals.keeping)
                upload = originals.upload()
                try:
                    heard = _heard(requests, tell)
                    await self._ingested(heard, state, recorded, upload, tell)
                finally:
                    await upload.drop()
                    # Who broke off has stored what was read by then: it must not stay unfound.
                    if not state.done:
                        if state.documents_new + state.documents_changed:
                            self._around.collection.refresh()
                        await self._around.refresh()

    async def _ingested(
        self,
        requests: AsyncIterator[control.IngestRequest],
        state: control.IngestProgress,
        recorded: dict[str, Any],
        upload: Upload,
        tell: Listener,
    ) -> None:
        """Each batch stored, then all indexed; ``state`` and ``recorded`` say how far it came."""
        collection, lost, told = self._around.collection, _Lost(), set[int]()
        watched_folders = [one.folder for one in self._around.services.folders.states]
        async for request in requests:
            recorded["bytes"] = recorded.get("bytes", 0) + request.ByteSize()
            files = request.offered or request.pieces
            if files and not (request.documents or request.pairs or request.waiting):
                tell(_with_errors(state, await taken(upload, request, state)))
                continue
            documents, pairs, errors = await asyncio.to_thread(parsed, request, watched_folders)
            if files:
                errors.append("files come behind their documents: send them in another request")
            waiting, faults = waiting_of(request, watched_folders)
            async with collection.changes.turn():  # nobody has it while the next is waited for
                counts = await collection.ingest(
                    documents, pairs, replace=request.replace, waiting=waiting
                )
            errors += [*faults, *counts.refused]
            state.documents_new += counts.new
            state.documents_changed += counts.changed
            state.documents_unchanged += counts.unchanged
            new = _first_time(pairs, told)
            state.pairs += len(new)
            state.pairs_repeated += len(pairs) - len(new)
            lost.add(await collection.unusable(new))
            if state.keeps_originals:
                may = {one.id for one in documents if one.source} - {*counts.elsewhere}
                state.originals_kept += await upload.begin(may)
            recorded |= _counted(state)
            tell(_with_errors(state, errors))
        async with collection.changes.turn():
            state.originals_kept += await upload.keep()
            recorded |= _counted(state)
            tell(_with_errors(state, await self._count_usable(state, lost)))
            await collection.index(partial(_tell_indexing, state, tell))
        await self._around.refresh()
        state.done = True
        tell(_with_errors(state, []))

    async def _count_usable(self, state: control.IngestProgress, lost: _Lost) -> list[str]:
        """How many pairs have a document here; of the others, what the first may mean."""
        collection = self._around.collection
        unusable = await collection.unusable(lost.sought)
        state.pairs_usable = state.pairs - len(unusable) - lost.given_up
        names = list(dict.fromkeys(pair.positives[0] for pair in unusable))
        meant = [await collection.similar(name) for name in names[:_UNKNOWN_TOLD]]
        if names:
            state.unknown_document, state.known_document = names[0], meant[0]
        told = [
            f"pairs name {name!r}, and no document here is called so"
            + (f": is it {other!r}?" if other else ": they wait for it")
            for name, other in zip(names, meant, strict=False)
        ]
        return told + [f"and {len(names) - len(meant)} more"] * (len(names) > len(meant))

    async def ListDocuments(
        self, request: control.ListDocumentsRequest, context: Context
    ) -> control.ListDocumentsReply:
        """A page of the library's documents."""
        async with self._audited(context, "show-documents") as recorded:
            found = await self._answered(
                context,
                self._around.collection.documents(request.begins, request.after, request.limit),
            )
            recorded["documents"] = len(found)
        return control.ListDocumentsReply(documents=[stored_message(one) for one in found])

    async def ListWaiting(
        self, request: control.ListWaitingRequest, context: Context
    ) -> control.ListWaitingReply:
        """A page of what waits for OCR."""
        collection = self._around.collection
        async with self._audited(context, "show-documents") as recorded:
            found = await self._answered(
                context,
                collection.read(
                    lambda library: library.waiting(request.begins, request.after, request.limit)
                ),
            )
            recorded["documents"] = len(found)
        return control.ListWaitingReply(
            documents=[waiting_message(one) for one in found],
            engine_here=await asyncio.to_thread(engines.installed),
        )

    async def ShowDocument(
        self, request: control.ShowDocumentRequest, context: Context
    ) -> control.ShowDocumentReply:
        """One document, passage by passage."""
        collection = self._around.collection
        async with self._audited(context, "show-documents") as recorded:
            found = await self._answered(context, collection.documents(request.id, "", 1))
            waiting = await self._answered(
                context, collection.read(lambda library: library.waiting(request.id, "", 1))
            )
            pages = waiting[0].pages if waiting and waiting[0].document_id == request.id else ""
            if not found or found[0].id != request.id:
                if pages:
                    cause = f"nothing of {request.id!r} could be read: its pages wait for OCR"
                    await refuse(context, f"{cause} ({pages})", "`fedctl documents list --waiting`")
                meant = await self._answered(context, collection.similar(request.id))
                remedy = f"Is it {meant!r}?" if meant else "`fedctl documents list` shows them"
                await refuse(context, f"no document {request.id!r} here", remedy, senseless=True)
            shown = await self._answered(
                context, collection.read(partial(passage_messages, request))
            )
            kept = await self._answered(context, self._around.services.originals.of(request.id))
            recorded["documents"] = 1
        return control.ShowDocumentReply(
            document=stored_message(found[0]),
            passages=shown,
            waiting=pages,
            original_bytes=kept[0].size if kept else 0,
        )

    async def Folders(
        self, _request: control.FoldersRequest, context: Context
    ) -> control.FoldersReply:
        """The watched folders, and what of them was not read; paths say what is in them."""
        folders = self._around.services.folders
        async with self._audited(context, "show-documents"):
            found = [
                (state, *await self._answered(context, folders.refused(state.folder.name)))
                for state in folders.states
            ]
        return control.FoldersReply(
            folders=[folder_message(*one) for one in found],
            vanished=folders.vanished,
            scan_s=folders.scan_s,
        )

    async def ExportDocuments(
        self, request: control.ExportDocumentsRequest, context: Context
    ) -> AsyncIterator[control.ExportDocumentsPart]:
        """Documents, some at a time, then the pairs that name them; nothing waits for it."""
        collection, begins = self._around.collection, request.begins
        ids = list(dict.fromkeys(request.ids))
        async with self._audited(context, "export") as recorded:
            recorded |= {"documents": 0, "pairs": 0}
            known = await self._answered(context, collection.known(ids))
            counts = await self._answered(context, collection.counts())
            yield control.ExportDocumentsPart(
                unknown=[one for one in ids if one not in known],
                total=len(known) if ids else 0 if begins else counts.documents,
            )
            async for some in self._pages(ids, begins, context):
                while some:
                    texts = collection.whole_documents(some, _EXPORTED_AT_ONCE)
                    documents, taken = await self._answered(context, texts)
                    some = some[taken:]
                    recorded["documents"] += len(documents)
                    yield await asyncio.to_thread(exported_documents, documents)
            after, pairs = 0, [(0, Pair("", ()))]
            while pairs:
                work = collection.pairs_naming(begins, ids or None, after, _PAGE)
                pairs = await self._answered(context, work)
                recorded["pairs"] += len(pairs)
                after = pairs[-1][0] if pairs else 0
                yield control.ExportDocumentsPart(pairs=[pair_message(pair) for _, pair in pairs])

    async def _pages(
        self, ids: list[str], begins: str, context: Context
    ) -> AsyncIterator[list[str]]:
        """Those ids, or those of the documents here that begin so, some at a time."""
        for first in range(0, len(ids), _PAGE):
            yield ids[first : first + _PAGE]
        after = ""
        while not ids:
            work = self._around.collection.documents(begins, after, _PAGE)
            if not (found := await self._answered(context, work)):
                return
            after = found[-1].id
            yield [one.id for one in found]

    async def RemoveDocuments(
        self, request: control.RemoveDocumentsRequest, context: Context
    ) -> AsyncIterator[control.RemoveDocumentsProgress]:
        """Documents out, with what was made of them; then the index is made without them."""
        begin = partial(self._remove, request.ids, context)
        async with watched(begin, control.RemoveDocumentsProgress) as (steps, work):
            async for step in steps:
                yield step
            await self._answered(context, work)

    async def _remove(self, ids: Sequence[str], context: Context, tell: Listener) -> None:
        """As an ingest, it holds up nobody where who asked has stopped."""
        collection, pairs = self._around.collection, self._around.services.pairs
        with collection.changes.asked_for("a removal"):
            async with collection.changes.turn(), self._audited(context, "remove") as recorded:
                known = await collection.known(ids)
                waited = await collection.read(lambda library: library.waiting_of(ids))
                unknown = sorted({*ids} - known - waited)
                alike = await collection.read(
                    lambda library: library.near.documents_like(ids, _ALIKE_TOLD)
                )
                state = control.RemoveDocumentsProgress(unknown=unknown, alike=alike)
                try:
                    removed = await pairs.remove(ids)
                    recorded |= asdict(removed)
                    state.MergeFrom(control.RemoveDocumentsProgress(**asdict(removed)))
                    tell(_copy(state))
                    await collection.index(partial(_tell_embedding, state, tell))
                    state.done = True
                finally:
                    if not state.done:  # who hung up does not keep the old index
                        collection.refresh()
                    await self._around.refresh()
                tell(state)

    async def Ask(self, request: control.AskRequest, context: Context) -> control.AskReply:
        """Answer a question from this site's documents."""
        return await Answers(self._around, self._caller).ask(request, context, of_all)

    async def Search(self, request: control.SearchRequest, context: Context) -> control.SearchReply:
        """Passages for a question, without an answer."""
        return await Answers(self._around, self._caller).search(request, context, of_all)

    async def ListPrompts(
        self, _request: control.ListPromptsRequest, _context: Context
    ) -> control.ListPromptsReply:
        """What a language model is asked by."""
        retrieval = self._around.settings.retrieval
        return await asyncio.to_thread(prompts_message, retrieval.prompt, retrieval.generator)

    async def TestPrompt(
        self, request: control.TestPromptRequest, context: Context
    ) -> control.TestPromptReply:
        """What it would be sent for a question; texts of documents, and so audited."""
        if request.name not in (*FOR, AUTO):
            known = ", ".join((*FOR, AUTO))
            cause = f"there is no prompt {request.name!r}"
            await refuse(context, cause, f"Use one of: {known}", senseless=True)
        kind = kind_of(request.name, request.question)
        top_k = request.top_k or self._around.settings.retrieval.top_k
        outcome, citations = "refused or failed", 0
        try:
            asked = (kind, request.question, list(request.documents), top_k, request.run)
            work = self._around.collection.with_open_version(try_prompt, *asked)
            tried = await self._answered(context, work)
            outcome = "answered"
            citations = len(tried.answer.citations) if tried.answer is not None else 0
        finally:
            await self._audit.record_or_owe(self._actor, "ask", outcome, citations=citations)
        reply = tried_message(tried)
        reply.name = kind
        reply.guessed_by = guessed(request.question)[1] if request.name == AUTO else ""
        return reply


class Answers:
    """Questions answered to whoever calls, from the documents that they may ask of.

    Each method takes these rights: nobody is answered by whom they were forgotten.
    """

    def __init__(self, around: ServiceContext, caller: Caller) -> None:
        self._collection = around.collection
        self._audit = around.audit
        self._caller = caller

    async def ask(
        self,
        request: control.AskRequest,
        context: Context,
        rights: Rights,
        told: Callable[[object], None] | None = None,
    ) -> control.AskReply:
        """An answer with citations; ``told`` as of `Collection.ask`."""
        started = time.monotonic()
        outcome, citations = "refused or failed", 0
        try:
            answered = await self._caller.answered(
                context,
                self._collection.ask(request.question, request.top_k, told=told, rights=rights),
            )
            citations = len(answered.citations)
            outcome = "answered" if citations else "not answered"
        finally:
            # Owed, if need be: people get their answers from a site whose disk is full, too.
            await self._audit.record_or_owe(self._caller.actor, "ask", outcome, citations=citations)
        seconds = _took(started)
        metrics.count(_outcome(answered))
        return control.AskReply(
            **answer_fields(answered, control.AskReply.DESCRIPTOR), seconds=seconds
        )

    async def search(
        self, request: control.SearchRequest, context: Context, rights: Rights
    ) -> control.SearchReply:
        """Passages for a question, without an answer."""
        started = time.monotonic()
        outcome, passages = "refused or failed", 0
        collection = self._collection
        try:
            searched = await self._caller.answered(
                context,
                collection.search(
                    request.question,
                    request.top_k,
                    request.explain,
                    filters_of(request),
                    rights,
                ),
            )
            outcome, passages = "answered", len(searched.passages)
        finally:
            await self._audit.record_or_owe(
                self._caller.actor, "search", outcome, passages=passages
            )
        seconds = _took(started)
        return control.SearchReply(
            passages=found_messages(searched, request.explain),
            model_digest=searched.model_digest,
            seconds=seconds,
            words_weight=searched.weights.words,
            title_weight=searched.weights.title,
            weighed_by=searched.weighed_by,
        )


def _took(started: float) -> float:
    """Seconds of a question that was answered, which are counted."""
    seconds = time.monotonic() - started
    metrics.count("hanse_questions")
    metrics.count("hanse_question_seconds", seconds)
    return seconds


def _outcome(answered: Answered) -> str:
    """The metric that counts answers like this one; an extract in another's place is its own."""
    if not answered.citations:
        return "hanse_answers_abstained"
    if answered.cut_short:
        return "hanse_answers_cut_short"
    return "hanse_answers_instead" if answered.instead else "hanse_answers_given"


class _Lost:
    """Pairs without a document, which may come later in their call. Usually these are few."""

    def __init__(self) -> None:
        self.sought: list[Pair] = []  # without their queries
        self.given_up = 0
        self._ids = 0

    def add(self, pairs: list[Pair]) -> None:
        for pair in pairs:
            if self._ids + len(pair.positives) > _IDS_SOUGHT:
                self.given_up += 1
            else:
                self._ids += len(pair.positives)
                self.sought.append(Pair("", pair.positives))


async def _heard(
    requests: AsyncIterator[control.IngestRequest], tell: Listener
) -> AsyncIterator[control.IngestRequest]:
    """What is sent, without the requests that only say that somebody is still there.

    Raises SilentError where nobody is, or takes no answers, or reads no more.
    """
    loop = asyncio.get_running_loop()
    until, read = loop.time() + _NOTHING_S, 0
    while True:
        try:
            async with asyncio.timeout(_SILENT_S):
                await tell.has_all()
                request = await anext(requests, None)
        except TimeoutError:
            log.warning("an ingest was ended: its fedctl is silent", seconds=_SILENT_S)
            raise SilentError(
                f"fedctl sent nothing, or took no answers, for {_SILENT_S:g} s, so the ingest was "
                "ended, for others may want to change the library: what had come is stored"
            ) from None
        if request is None:
            return
        more, read = request.bytes_read > read, max(read, request.bytes_read)
        request.ClearField("bytes_read")
        if request.ByteSize():
            more = True
            yield request
        if more:
            until = loop.time() + _NOTHING_S
        elif loop.time() >= until:
            log.warning("an ingest was ended: its fedctl sends nothing", seconds=_NOTHING_S)
            raise SilentError(
                f"nothing came for {_NOTHING_S / 3600:g} hours, nor was more read, so the ingest "
                "was ended, for others may want to change the library: what had come is stored"
            )


async def _behind(
    first: control.IngestRequest, others: AsyncIterator[control.IngestRequest]
) -> AsyncIterator[control.IngestRequest]:
    yield first
    async for request in others:
        yield request


def _first_time(pairs: list[Pair], told: set[int]) -> list[Pair]:
    """Those that didn't come before in this call; ``told`` holds hashes, texts may be many."""
    once = {hash((pair.query, pair.positives)): pair for pair in pairs}
    new = [pair for key, pair in once.items() if key not in told]
    if len(told) < _PAIRS_TOLD:
        told.update(once)
    return new


def _with_errors(state: control.IngestProgress, errors: list[str]) -> control.IngestProgress:
    step = control.IngestProgress()
    step.CopyFrom(state)
    step.errors.extend(errors[:_ERRORS_TOLD])
    if len(errors) > _ERRORS_TOLD:
        step.errors.append(f"and {len(errors) - _ERRORS_TOLD} more of this batch")
    return step


def _tell_indexing(state: control.IngestProgress, tell: Listener, step: object) -> None:
    if isinstance(step, EmbeddingProgress):
        state.passages_total, state.passages_embedded = step.total, step.done
    elif isinstance(step, IndexingProgress):
        state.index_total, state.index_built = step.total, step.done
    else:
        return
    if not tell.behind:  # who takes nothing is told the newest when it does
        tell(_with_errors(state, []))


def _tell_embedding(state: control.RemoveDocumentsProgress, tell: Listener, step: object) -> None:
    if isinstance(step, EmbeddingProgress):
        state.to_embed, state.embedded = step.total, step.done
        if not tell.behind:
            tell(_copy(state))


def _copy(state: control.RemoveDocumentsProgress) -> control.RemoveDocumentsProgress:
    step = control.RemoveDocumentsProgress()
    step.CopyFrom(state)
    return step


def _counted(state: control.IngestProgress) -> dict[str, int]:
    """What an ingest did, in numbers; ids of documents may say what they are about."""
    return {
        "documents_new": state.documents_new,
        "documents_changed": state.documents_changed,
        "documents_unchanged": state.documents_unchanged,
        "originals": state.originals_kept,
        "pairs": state.pairs,
    }
