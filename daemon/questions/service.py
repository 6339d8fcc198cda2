"""Answers questions.proto: what people's programs may ask of their site, and nothing else.

Questions are answered by what answers fedctl's (daemon/control/library.py), to somebody else: in
the audit log stands the token's name. Nothing that changes the site can be reached from here.
"""

from __future__ import annotations

import peers.link.tls13  # noqa: F401  before grpc, see there

# isort: split
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from functools import partial
from typing import Any, NoReturn

import grpc
import grpc.aio
import structlog

from config.control_socket import RETRY_AFTER
from daemon.control.context import (
    Caller,
    Context,
    ServiceContext,
    refuse,
    refuse_unknown,
)
from daemon.control.library import Answers
from daemon.control.originals import Originals
from daemon.control.service import ControlService
from daemon.control.socket import Offer
from daemon.jobs.answering import AnswerSoFar
from daemon.process import metrics
from daemon.process.metrics import METRICS
from daemon.process.streams import Listener, watched
from daemon.questions.credentials import (
    Bearer,
    Credentials,
    NotAllowed,
    end,
    without_paths,
)
from daemon.questions.sources import read_source, source_of
from daemon.questions.turns import TooManyError, Turns
from daemon.questions.uploads import FAILURES, NotTakenError, Uploads
from daemon.questions.view import seen_by_an_operator
from daemon.services.rights import Rights
from proto import control_pb2 as control
from proto import questions_pb2 as questions
from proto import questions_pb2_grpc as rpc
from proto.notes import NOTES

log = structlog.get_logger()

_MOST_BYTES = 4 << 20  # of a request: 64 texts to embed, of 8,192 characters
# Twice what the gateway lets through: of what it has given up some may not have ended here yet.
_OF_THE_GATEWAY = 2


class QuestionsService(rpc.QuestionsServicer):
    """Every method asks first for whom it is; Health and Status tell no word of any document.

    What is answered by arithmetic takes a turn; there is an instance, and there are turns, for
    each user who opens the socket.
    """

    def __init__(self, around: ServiceContext) -> None:
        self._around = around
        self._credentials = Credentials(around.tokens, around.audit)
        self._turns = Turns(_OF_THE_GATEWAY * around.settings.gateway.requests)
        self._uploads = Uploads(around)

    async def Ask(self, request: control.AskRequest, context: Context) -> control.AskReply:
        """An answer with citations; the passages beside it are what `Search` is for."""
        bearer = await self._credentials.of(context, "ask", "ask")
        async with self._turn(context, bearer):
            reply = await self._answering(bearer).ask(request, context)
        _leave_out_what_is_the_sites(reply, bearer)
        return reply

    async def StreamAnswer(
        self, request: control.AskRequest, context: Context
    ) -> AsyncIterator[questions.AnswerPart]:
        """The same answer as it is written; who takes their time to read it keeps no turn."""
        bearer = await self._credentials.of(context, "ask", "ask")
        turn = partial(self._turn, context, bearer)
        async for part in self._answering(bearer).parts(request, context, turn):
            if part.HasField("whole"):
                _leave_out_what_is_the_sites(part.whole, bearer)
            yield part

    async def Search(self, request: control.SearchRequest, context: Context) -> control.SearchReply:
        """Passages for a question."""
        token = await self._credentials.of(context, "search", "search")
        async with self._turn(context, token):
            return await self._answering(token).search(request, context)

    async def Passage(
        self, request: questions.PassageRequest, context: Context
    ) -> questions.PassageReply:
        """A passage that `Search` found, and what stands beside it."""
        token = await self._credentials.of(context, "search", "passage")
        return await self._answering(token).passage(request, context)

    async def Source(
        self, request: questions.SourceRequest, context: Context
    ) -> questions.SourceReply:
        """Where a passage stands."""
        token = await self._credentials.of(context, "search", "show-documents")
        return await self._answering(token).source(request, context)

    async def PageImage(
        self, request: control.PageImageRequest, context: Context
    ) -> AsyncIterator[control.FilePart]:
        """A page of the file that a document was read from."""
        token = await self._credentials.of(context, "search", "page-image")
        async for part in self._answering(token).page_image(request, context):
            yield part

    async def Original(
        self, request: control.OriginalRequest, context: Context
    ) -> AsyncIterator[control.FilePart]:
        """That file."""
        token = await self._credentials.of(context, "originals", "original")
        async for part in self._answering(token).original(request, context):
            yield part

    async def Propose(
        self, request: questions.ProposeRequest, context: Context
    ) -> questions.ProposeReply:
        """What somebody says answers a question, for the operator to look at."""
        bearer = await self._credentials.of(context, "propose", "propose")
        return await self._answering(bearer).propose(request, bearer.name, context)

    async def Upload(
        self, parts: AsyncIterator[questions.UploadPart], context: Context
    ) -> AsyncIterator[questions.UploadReply]:
        """A file that becomes a document."""
        bearer = await self._credentials.of(context, "upload", "upload")
        try:
            first = await anext(parts, questions.UploadPart())
            async with aclosing(self._uploads.take(bearer, first.file, parts)) as replies:
                async for reply in replies:
                    yield reply
        except NotTakenError as refusal:
            if refusal.again_s:
                await _refuse_for_now(context, str(refusal), refusal.again_s)
            await refuse(context, str(refusal), senseless=refusal.senseless)
        except NotAllowed as refusal:
            metrics.count("hanse_token_refusals")
            await end(context, refusal)
        except FAILURES as error:
            log.warning("a file that is brought is not taken", cause=str(error))
            await refuse(context, without_paths(str(error)))

    async def Uploads(
        self, _request: questions.UploadsRequest, context: Context
    ) -> questions.UploadsReply:
        """What became of them."""
        bearer = await self._credentials.of(context, "upload", "upload")
        try:
            return self._uploads.told(bearer)
        except NotAllowed as refusal:  # revoked since it was looked at
            metrics.count("hanse_token_refusals")
            await end(context, refusal)

    async def Embed(
        self, request: questions.EmbedRequest, context: Context
    ) -> questions.EmbedReply:
        """Texts as vectors of the version that answers."""
        token = await self._credentials.of(context, "embed", "embed")
        async with self._turn(context, token):
            return await self._answering(token).embed(request, context)

    async def Whoami(
        self, _request: questions.WhoamiRequest, context: Context
    ) -> questions.WhoamiReply:
        """What the token is for."""
        token = await self._credentials.any(context)
        return questions.WhoamiReply(
            name=token.name,
            scopes=token.scopes,
            expires_unix_s=token.expires_s,
            site=self._around.driver.identity.site_id,
            collections=token.collections or (),
            all_documents=token.collections is None,
        )

    async def View(self, request: questions.ViewRequest, context: Context) -> questions.ViewReply:
        """How the site and its federation are."""
        bearer = await self._credentials.of(context, "view", "view")
        await self._check_sees_all(bearer, context)
        return await seen_by_an_operator(self._around, request, context)

    async def Health(
        self, _request: questions.HealthRequest, _context: Context
    ) -> questions.HealthReply:
        """Whether questions can be answered."""
        served = self._around.collection.served_index
        return questions.HealthReply(answers=served is not None)

    async def Status(
        self, request: control.StatusRequest, context: Context
    ) -> questions.FiguresReply:
        """The numbers of a status, without its words."""
        if self._credentials.told(context):
            bearer = await self._credentials.of(context, "metrics")
            await self._check_sees_all(bearer, context)
        status = await ControlService(self._around, "").Status(request, context)
        return questions.FiguresReply(figures={one.name: one.of(status) for one in METRICS})

    def _answering(self, bearer: Bearer) -> _AnsweringTo:
        caller = _TokenHolder(self._around, bearer.actor)
        return _AnsweringTo(self._around, caller, bearer.rights)

    @staticmethod
    async def _check_sees_all(bearer: Bearer, context: Context) -> None:
        """The call ends here for who may ask of some collections, whoever gave them the scope."""
        try:
            of_some = bearer.rights() is not None
        except NotAllowed as refusal:  # revoked since it was looked at
            metrics.count("hanse_token_refusals")
            await end(context, refusal)
        if of_some:
            cause = f"{bearer.name!r} is for some collections, and this is of the whole site"
            await end(context, NotAllowed(grpc.StatusCode.PERMISSION_DENIED, cause))

    @asynccontextmanager
    async def _turn(self, context: Context, bearer: Bearer) -> AsyncIterator[None]:
        """One of those that wait for an answer; the call ends here where these are too many."""
        try:
            async with self._turns.one(bearer.share):
                yield
        except TooManyError as error:
            await _refuse_for_now(context, str(error), error.retry_after_s)


async def _refuse_for_now(context: Context, cause: str, again_s: float) -> NoReturn:
    """End the call; in so many seconds it may be asked again."""
    hint = ((RETRY_AFTER, str(math.ceil(again_s * 1000))),)
    await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, cause, hint)


def _leave_out_what_is_the_sites(reply: control.AskReply, bearer: Bearer) -> None:
    """Passages of who may not search, and where on the site's disk its model lies."""
    if not bearer.sees_what_it_asks_of():
        del reply.passages[:]
    for name in NOTES:
        if isinstance(said := getattr(reply, name), str):
            setattr(reply, name, without_paths(said))


class _TokenHolder(Caller):
    """Who calls with a token, or signed in elsewhere."""

    def worded(self, refusal: Exception) -> str:
        """As who asks is told it: where the site's files lie is for who has its log."""
        return without_paths(str(refusal))

    async def answered(self, context: Context, work: Awaitable[Any]) -> Any:
        """As in `Caller`; who may not ask any more is told so, and gets nothing."""
        try:
            return await super().answered(context, work)
        except NotAllowed as refusal:
            metrics.count("hanse_token_refusals")
            await end(context, refusal)


class _AnsweringTo:
    """What answers somebody, of what they may ask of when they are answered: ``rights``.

    It is made of what takes these rights with each call, and has nothing of what administers the
    site.
    """

    def __init__(self, around: ServiceContext, caller: Caller, rights: Rights) -> None:
        self._answers = Answers(around, caller)
        self._originals = Originals(around, caller)
        self._collection = around.collection
        self._pairs = around.services.pairs
        self._audit = around.audit
        self._caller = caller
        self._rights = rights

    async def ask(self, request: control.AskRequest, context: Context) -> control.AskReply:
        """An answer with citations."""
        return await self._answers.ask(request, context, self._rights)

    async def search(self, request: control.SearchRequest, context: Context) -> control.SearchReply:
        """Passages for a question."""
        return await self._answers.search(request, context, self._rights)

    def original(
        self, request: control.OriginalRequest, context: Context
    ) -> AsyncIterator[control.FilePart]:
        """The file of a document of theirs."""
        return self._originals.original(request, context, self._rights)

    def page_image(
        self, request: control.PageImageRequest, context: Context
    ) -> AsyncIterator[control.FilePart]:
        """A page of it."""
        return self._originals.page_image(request, context, self._rights)

    async def parts(
        self,
        request: control.AskRequest,
        context: Context,
        turn: Callable[[], AbstractAsyncContextManager[None]],
    ) -> AsyncIterator[questions.AnswerPart]:
        """What is certain of the answer, piece by piece, then all of it.

        ``turn``: in which it is made.
        """

        async def begin(tell: Listener) -> control.AskReply:
            async with turn():
                return await self._answers.ask(request, context, self._rights, tell)

        sent = ""
        async with watched(begin, AnswerSoFar) as (steps, work):
            async for step in steps:
                if not step.text.startswith(sent):
                    break
                if piece := step.text[len(sent) :]:
                    sent = step.text
                    yield questions.AnswerPart(text=piece)
            else:
                reply = await work
                if reply.answer.startswith(sent):
                    yield questions.AnswerPart(whole=reply)
                    return
        # What answered died under it, and a fresh one answers otherwise.
        cause = "what answers this question was started anew behind its begin: ask again"
        await context.abort(grpc.StatusCode.ABORTED, cause)

    async def passage(
        self, request: questions.PassageRequest, context: Context
    ) -> questions.PassageReply:
        """The passage whole; who may not see it is told what is told of one that is not here."""
        outcome, passages = "refused or failed", 0
        wanted = request.passage_id
        try:
            one, before, after = await self._caller.answered(
                context, self._collection.read(lambda library: library.passage(wanted))
            )
            theirs = one is not None and await self._caller.may_see(
                one.document_id, context, self._rights
            )
            if not theirs:
                remedy = "Ids are those that a search tells; one whose text was changed has another"
                await refuse(context, "no passage of this id here", remedy, senseless=True)
            outcome, passages = "answered", 1
        finally:
            await self._audit.record_or_owe(
                self._caller.actor, "passage", outcome, passages=passages
            )
        return questions.PassageReply(
            passage_id=one.id,
            document_id=one.document_id,
            title=one.title,
            text=one.text,
            context=one.context,
            kind=one.kind,
            page=one.page,
            place=one.place or (),
            ocr=one.ocr,
            before=before,
            after=after,
        )

    async def source(
        self, request: questions.SourceRequest, context: Context
    ) -> questions.SourceReply:
        """A document at one of its passages."""
        await self._caller.check_sees(request.document_id, "show-documents", context, self._rights)
        async with self._caller.audited(context, "show-documents") as recorded:
            reading = self._collection.read(partial(read_source, request))
            found = await self._caller.answered(context, reading)
            if found is None:  # it went in between
                await refuse_unknown(request.document_id, context)
            recorded["documents"] = 1
        return source_of(request, *found)

    async def propose(
        self, request: questions.ProposeRequest, token: str, context: Context
    ) -> questions.ProposeReply:
        """Kept until the operator has looked, where the document is one of theirs."""
        document_id, wanted = request.document_id, request.passage_id
        await self._caller.check_sees(document_id, "propose", context, self._rights)
        async with self._caller.audited(context, "propose", answers=request.answers):
            if wanted:
                looking = self._collection.read(lambda library: library.passage(wanted))
                one, _, _ = await self._caller.answered(context, looking)
                if one is None or one.document_id != document_id:
                    cause = "the document has no passage of this id (any more): ask again"
                    await refuse(context, cause, senseless=True)
            kept = self._pairs.propose(
                token, request.question, document_id, wanted, answers=request.answers
            )
            if not await self._caller.answered(context, kept):  # it went in between
                await refuse_unknown(document_id, context)
            metrics.count("hanse_votes_for" if request.answers else "hanse_votes_against")
        return questions.ProposeReply()

    async def embed(
        self, request: questions.EmbedRequest, context: Context
    ) -> questions.EmbedReply:
        """Vectors, in the order of the texts."""
        outcome = "refused or failed"
        try:
            vectors, digest = await self._caller.answered(
                context, self._collection.embed(list(request.texts), self._rights)
            )
            outcome = "answered"
        finally:
            texts = len(request.texts)
            await self._audit.record_or_owe(self._caller.actor, "embed", outcome, texts=texts)
        return questions.EmbedReply(
            vectors=vectors.astype("<f4").tobytes(), dimension=vectors.shape[1], model_digest=digest
        )


def _add(around: ServiceContext, _user: str, server: grpc.aio.Server) -> None:
    rpc.add_QuestionsServicer_to_server(QuestionsService(around), server)


QUESTIONS = Offer(
    "questions' socket",
    "gateway",
    questions.DESCRIPTOR.services_by_name["Questions"],
    _add,
    _MOST_BYTES,
)
