"""The daemon behind the gateway, asked over its Unix socket with the token that came.

The gateway has no token of its own, keeps none, and lets fedd say what each may do.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import os
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import grpc
import grpc.aio

from config import control_socket
from daemon.gateway.refusals import Refusal
from proto import bounds
from proto import control_pb2 as control
from proto import questions_pb2 as questions
from proto.questions_pb2_grpc import QuestionsStub

if TYPE_CHECKING:
    from proto.questions_pb2_grpc import QuestionsAsyncStub

T = TypeVar("T")

_ANSWER_WITHIN_S: Final = 300.0  # behind other people's questions; a language model takes a while
_DRAW_WITHIN_S: Final = 60.0  # behind other people's pages
_SEND_WITHIN_S: Final = 3600.0  # a file, to whoever reads it slowly
_EMBED_WITHIN_S: Final = 120.0
_TOKENS: Final = 1000  # as many as a site has
_TELL_WITHIN_S: Final = 15.0
_PIECE: Final = int(bounds.of("UploadPart", "content").most)
_END: Final = grpc.aio.EOF  # type: ignore[attr-defined]  # missing in its stubs
_AWAY: Final = (
    "this site's daemon (fedd) is not there: it may be starting, or gateway.enabled is false; "
    "try again in a moment"
)
_STATUS: Final = {
    grpc.StatusCode.UNAUTHENTICATED: 401,
    grpc.StatusCode.PERMISSION_DENIED: 403,
    grpc.StatusCode.INVALID_ARGUMENT: 400,
    grpc.StatusCode.NOT_FOUND: 404,
    grpc.StatusCode.FAILED_PRECONDITION: 503,
}


class Credential(str):
    """The value of an Authorization header, and beside it for whom that asks; "": for itself.

    As a text, and so in counts, it is the header alone: a program that asks for many people has
    the share of one token.
    """

    asks_for = ""

    @classmethod
    def of(cls, authorization: str, asks_for: str) -> Credential:
        """Both as they came."""
        both = cls(authorization)
        both.asks_for = asks_for
        return both


@dataclass(frozen=True)
class Sent:
    """A file that fedd gives out: its bytes in all, and its pieces; to stop reading ends it."""

    size: int
    pieces: AsyncIterator[bytes]


class Fedd:
    """The questions that its socket answers; each raises Refusal with fedd's own words.

    ``token``: the value of an Authorization header, as it came, or a Credential.
    """

    def __init__(self, socket: Path) -> None:
        # No TLS on purpose: the socket's mode and group are the guard, and it is on no network.
        self._channel = grpc.aio.insecure_channel(
            f"unix:{socket}",
            options=[
                ("grpc.max_receive_message_length", control_socket.MESSAGE_BYTES),
                # Without it grpc asks a configured http_proxy for the way to a local socket.
                ("grpc.enable_http_proxy", 0),
                ("grpc.default_authority", "localhost"),
                # fedd comes back some seconds after a restart; people should not wait longer.
                ("grpc.initial_reconnect_backoff_ms", 200),
                ("grpc.min_reconnect_backoff_ms", 200),
                ("grpc.max_reconnect_backoff_ms", 1000),
            ],
        )
        self._stub: QuestionsAsyncStub = QuestionsStub(self._channel)
        # Whose share it is, of tokens that were let in: known again, and not to be read.
        self._key, self._shares = os.urandom(32), dict[bytes, str]()

    async def close(self) -> None:
        """Hang up."""
        await self._channel.close(grace=None)

    async def ask(self, question: str, token: str) -> control.AskReply:
        """An answer with citations."""
        request = control.AskRequest(question=question)
        call = self._stub.Ask(request, timeout=_ANSWER_WITHIN_S, metadata=_carrying(token))
        return await _said(call)

    async def stream(self, question: str, token: str) -> AsyncGenerator[questions.AnswerPart, None]:
        """The answer in parts, as it is written; the last is all of it."""
        request = control.AskRequest(question=question)
        call = self._stub.StreamAnswer(request, timeout=_ANSWER_WITHIN_S, metadata=_carrying(token))
        try:
            async for part in call:
                yield part
        except grpc.aio.AioRpcError as error:
            raise _refusal(error) from error
        finally:
            call.cancel()  # where nobody reads on; of one that is over nothing is left

    async def search(self, request: control.SearchRequest, token: str) -> control.SearchReply:
        """Passages for a question."""
        call = self._stub.Search(request, timeout=_ANSWER_WITHIN_S, metadata=_carrying(token))
        return await _said(call)

    async def passage(self, passage_id: str, token: str) -> questions.PassageReply:
        """A passage, by the id that a search told."""
        request = questions.PassageRequest(passage_id=passage_id)
        call = self._stub.Passage(request, timeout=_TELL_WITHIN_S, metadata=_carrying(token))
        return await _said(call)

    async def source(self, document_id: str, passage_id: str, token: str) -> questions.SourceReply:
        """Where a passage stands."""
        request = questions.SourceRequest(document_id=document_id, passage_id=passage_id)
        call = self._stub.Source(request, timeout=_TELL_WITHIN_S, metadata=_carrying(token))
        return await _said(call)

    async def page_image(self, document_id: str, page: int, dpi: int, token: str) -> Sent:
        """A page of a document's file, as a PNG."""
        request = control.PageImageRequest(id=document_id, page=page, dpi=dpi)
        call = self._stub.PageImage(request, timeout=_DRAW_WITHIN_S, metadata=_carrying(token))
        return await _sent(call)

    async def original(self, document_id: str, token: str) -> Sent:
        """A document's file."""
        request = control.OriginalRequest(id=document_id)
        call = self._stub.Original(request, timeout=_SEND_WITHIN_S, metadata=_carrying(token))
        return await _sent(call)

    async def propose(self, request: questions.ProposeRequest, token: str) -> None:
        """Say that a document answers a question, or does not."""
        await _said(self._stub.Propose(request, timeout=_TELL_WITHIN_S, metadata=_carrying(token)))

    async def uploads(self, token: str) -> questions.UploadsReply:
        """What may be brought with a token, and what became of what was."""
        request = questions.UploadsRequest()
        call = self._stub.Uploads(request, timeout=_TELL_WITHIN_S, metadata=_carrying(token))
        return await _said(call)

    async def upload(
        self, file: questions.UploadedFile, pieces: AsyncIterator[bytes], token: str
    ) -> questions.Upload:
        """Bring a file; how far fedd is with it, which reads small ones at once."""
        stub: Any = self._stub  # written part by part, which its stubs don't know
        call = stub.Upload(timeout=_SEND_WITHIN_S, metadata=_carrying(token))

        async def write(part: questions.UploadPart) -> None:
            # It takes no more of what it has refused; what it said of that is read below.
            with suppress(asyncio.InvalidStateError):
                await _said(call.write(part))

        try:
            await write(questions.UploadPart(file=file))
            if await _said(call.read()) is _END:
                raise Refusal(503, "this site's daemon hung up: try again later")
            async for piece in pieces:
                for begin in range(0, len(piece), _PIECE):
                    await write(questions.UploadPart(content=piece[begin : begin + _PIECE]))
                if call.done():
                    break
            await write(questions.UploadPart(last=True))
            reply = await _said(call.read())
        finally:
            call.cancel()
        if reply is _END:
            raise Refusal(503, "this site's daemon hung up: try again later")
        told: questions.Upload = reply.upload
        return told

    async def embed(self, texts: list[str], token: str) -> questions.EmbedReply:
        """Texts as vectors."""
        request = questions.EmbedRequest(texts=texts)
        call = self._stub.Embed(request, timeout=_EMBED_WITHIN_S, metadata=_carrying(token))
        return await _said(call)

    async def whoami(self, token: str) -> questions.WhoamiReply:
        """What a token is for."""
        request = questions.WhoamiRequest()
        call = self._stub.Whoami(request, timeout=_TELL_WITHIN_S, metadata=_carrying(token))
        who = await _said(call)
        if len(self._shares) >= _TOKENS:
            self._shares.clear()
        # As fedd has it: a program's, whoever it asks for; a person's, however often they have
        # signed in.
        kind, *rest = who.name.split(":")
        self._shares[self._digest(token)] = rest[0] if kind == "token" and rest else who.name
        return who

    def share_of(self, token: str) -> str | None:
        """By whose name questions with it count; None: it has not been let in lately."""
        return self._shares.get(self._digest(token))

    def _digest(self, token: str) -> bytes:
        return hashlib.blake2b(token.encode(), key=self._key).digest()

    async def view(self, rounds: int, token: str) -> questions.ViewReply:
        """How the site and its federation are; of so many of the newest rounds."""
        request = questions.ViewRequest(rounds=rounds)
        call = self._stub.View(request, timeout=_TELL_WITHIN_S, metadata=_carrying(token))
        return await _said(call)

    async def answers(self) -> bool:
        """Whether questions can be answered now."""
        call = self._stub.Health(questions.HealthRequest(), timeout=_TELL_WITHIN_S)
        return (await _said(call)).answers

    async def figures(self, token: str) -> Mapping[str, float]:
        """Metrics by name; ``token`` may be empty."""
        metadata = _carrying(token) if token else None
        request = control.StatusRequest()
        call = self._stub.Status(request, timeout=_TELL_WITHIN_S, metadata=metadata)
        return (await _said(call)).figures


def _carrying(token: str) -> grpc.aio.Metadata:
    told = [("authorization", str(token))]
    if isinstance(token, Credential) and token.asks_for:
        told.append((control_socket.ASKS_FOR, token.asks_for))
    return grpc.aio.Metadata(*told)


async def _said(call: Awaitable[T]) -> T:
    """What fedd replies; what it refuses, as it said it."""
    try:
        return await call
    except grpc.aio.AioRpcError as error:
        raise _refusal(error) from error


async def _sent(call: Any) -> Sent:
    """A file whose first piece is there; what fedd refuses, as it said it."""
    first = await _said(call.read())

    async def pieces() -> AsyncIterator[bytes]:
        part = first
        try:
            while part is not _END:
                yield part.content
                part = await _said(call.read())
        finally:
            call.cancel()

    if first is _END:
        raise Refusal(503, "this site's daemon sent nothing: try again later")
    return Sent(first.size, pieces())


def _refusal(error: grpc.aio.AioRpcError) -> Refusal:
    code, said = error.code(), ": ".join((error.details() or "").splitlines())
    if status := _STATUS.get(code):
        return Refusal(status, said)
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return Refusal(504, "this site's daemon did not answer in time: try again later")
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        if (again_s := _retry_after_s(error)) is not None:
            return Refusal(429, said, retry_after_s=again_s)
        return Refusal(413, "that is more than this site's daemon takes at once: ask for less")
    if code is grpc.StatusCode.UNAVAILABLE:
        return Refusal(503, _AWAY, retry_after_s=2)
    if code is grpc.StatusCode.ABORTED:
        return Refusal(503, said, retry_after_s=1)
    cause = f"this site's daemon failed at this ({code.name}): its log says why"
    return Refusal(503, cause)


def _retry_after_s(error: grpc.aio.AioRpcError) -> int | None:
    """Whole seconds, as HTTP has them; None where something else is too much."""
    trailing: Any = error.trailing_metadata() or ()
    for key, value in trailing:
        if key == control_socket.RETRY_AFTER:
            return max(1, math.ceil(int(value) / 1000))
    return None
