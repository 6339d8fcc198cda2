"""Answers questions.proto: what people's programs may ask of their site, and nothing else.

Questions are answered by what answers fedctl's (daemon/control/library.py), to somebody else: in
the audit log stands the token's name. Nothing that changes the site can be reached from here.
"""

from __future__ import annotations

import peers.link.tls13  # noqa: F401  before grpc, see there

# isort: split
from collections.abc import AsyncIterator
from functools import partial
from typing import NoReturn

import grpc
import grpc.aio

from daemon.control.context import Context, ServiceContext
from daemon.control.service import ControlService
from daemon.control.socket import Offer
from daemon.process.metrics import METRICS
from daemon.questions.credentials import Credentials, actor_of
from daemon.questions.sources import read_source, source_of
from daemon.state.tokens import Token
from proto import control_pb2 as control
from proto import questions_pb2 as questions
from proto import questions_pb2_grpc as rpc

_MOST_BYTES = 4 << 20  # of a request: 64 texts to embed, of 8,192 characters


class QuestionsService(rpc.QuestionsServicer):
    """Every method asks first for whom it is; Health and Status tell no word of any document."""

    def __init__(self, around: ServiceContext) -> None:
        self._around = around
        self._credentials = Credentials(around.tokens, around.audit)

    async def Ask(self, request: control.AskRequest, context: Context) -> control.AskReply:
        """An answer with citations; the passages beside it are what `Search` is for."""
        token = await self._credentials.of(context, "ask", "ask")
        reply = await _AnsweringTo(self._around, token).Ask(request, context)
        if "search" not in token.scopes:
            del reply.passages[:]
        return reply

    async def Search(self, request: control.SearchRequest, context: Context) -> control.SearchReply:
        """Passages for a question."""
        token = await self._credentials.of(context, "search", "search")
        return await _AnsweringTo(self._around, token).Search(request, context)

    async def Source(
        self, request: questions.SourceRequest, context: Context
    ) -> questions.SourceReply:
        """Where a passage stands."""
        token = await self._credentials.of(context, "search", "show-documents")
        return await _AnsweringTo(self._around, token).source(request, context)

    async def PageImage(
        self, request: control.PageImageRequest, context: Context
    ) -> AsyncIterator[control.FilePart]:
        """A page of the file that a document was read from."""
        token = await self._credentials.of(context, "search", "page-image")
        answering = _AnsweringTo(self._around, token)
        await answering.check_sees(request.id, context)
        async for part in answering.PageImage(request, context):
            yield part

    async def Original(
        self, request: control.OriginalRequest, context: Context
    ) -> AsyncIterator[control.FilePart]:
        """That file."""
        token = await self._credentials.of(context, "originals", "original")
        answering = _AnsweringTo(self._around, token)
        await answering.check_sees(request.id, context)
        async for part in answering.Original(request, context):
            yield part

    async def Embed(
        self, request: questions.EmbedRequest, context: Context
    ) -> questions.EmbedReply:
        """Texts as vectors of the version that answers."""
        token = await self._credentials.of(context, "embed", "embed")
        return await _AnsweringTo(self._around, token).embed(request, context)

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
        )

    async def Health(
        self, _request: questions.HealthRequest, _context: Context
    ) -> questions.HealthReply:
        """Whether questions can be answered."""
        served = self._around.driver.collection.served_index
        return questions.HealthReply(answers=served is not None)

    async def Status(
        self, request: control.StatusRequest, context: Context
    ) -> questions.FiguresReply:
        """The numbers of a status, without its words."""
        if self._credentials.told(context):
            await self._credentials.of(context, "metrics")
        status = await ControlService(self._around, "").Status(request, context)
        return questions.FiguresReply(figures={one.name: one.of(status) for one in METRICS})


class _AnsweringTo(ControlService):
    """What answers fedctl, for who has this token; of its calls those above reach four."""

    def __init__(self, around: ServiceContext, token: Token) -> None:
        super().__init__(around, actor_of(token))

    async def check_sees(self, document_id: str, context: Context) -> None:
        """The call ends where there is no such document for this token, whatever there is else.

        In the same words for each: who asks learns of no document that they may not see, neither
        by a cause nor by what they may have meant.
        """
        if not await self._answered(context, self._driver.collection.known([document_id])):
            await _refuse_unknown(document_id, context)

    async def source(
        self, request: questions.SourceRequest, context: Context
    ) -> questions.SourceReply:
        """A document at one of its passages."""
        await self.check_sees(request.document_id, context)
        async with self._audited(context, "show-documents") as recorded:
            reading = self._driver.collection.read(partial(read_source, request))
            found = await self._answered(context, reading)
            if found is None:  # it went in between
                await _refuse_unknown(request.document_id, context)
            recorded["documents"] = 1
        return source_of(request, *found)

    async def embed(
        self, request: questions.EmbedRequest, context: Context
    ) -> questions.EmbedReply:
        """Vectors, in the order of the texts."""
        outcome = "refused or failed"
        try:
            vectors, digest = await self._answered(
                context, self._driver.collection.embed(list(request.texts))
            )
            outcome = "answered"
        finally:
            texts = len(request.texts)
            await self._audit.record_or_owe(self._actor, "embed", outcome, texts=texts)
        return questions.EmbedReply(
            vectors=vectors.astype("<f4").tobytes(), dimension=vectors.shape[1], model_digest=digest
        )


async def _refuse_unknown(document_id: str, context: Context) -> NoReturn:
    await context.abort(grpc.StatusCode.NOT_FOUND, f"no document {document_id!r} here")


def _add(around: ServiceContext, _user: str, server: grpc.aio.Server) -> None:
    rpc.add_QuestionsServicer_to_server(QuestionsService(around), server)


QUESTIONS = Offer(
    "questions' socket",
    "gateway",
    questions.DESCRIPTOR.services_by_name["Questions"],
    _add,
    _MOST_BYTES,
)
