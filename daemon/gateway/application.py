"""The gateway's routes: a request is bounded and read, fedd is asked, its answer is put in form.

What may be asked and by whom is fedd's to say (daemon/questions/). Here stands what protects the
gateway itself: of strangers' bytes, of slow ones, and of too many at once.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
import traceback
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager
from functools import partial
from types import ModuleType
from typing import Any, Final
from urllib.parse import urlsplit

import structlog
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from config.control_socket import ASKS_FOR
from daemon.gateway import figures, openai_api, site_api
from daemon.gateway.browser import Pages
from daemon.gateway.connections import HEADER_BYTES
from daemon.gateway.conversation import CHORES, is_chore, question_of
from daemon.gateway.event_stream import EventStream, while_there
from daemon.gateway.fedd import Credential, Fedd
from daemon.gateway.pages.file_forms import FORM_BYTES, FileForm
from daemon.gateway.pages.forms import FormError
from daemon.gateway.refusals import Refusal, answer_to, rpc_answer_to
from proto import control_pb2 as control
from proto import questions_pb2 as questions
from proto.control_pb2 import AskReply

log = structlog.get_logger()

_BODY_BYTES: Final = 1 << 20  # a long conversation; each connection may have one in memory
_DROPPED_BYTES: Final = 16 << 20
_FILE_BYTES: Final = 1 << 30  # whatever fedd says: a number that came with it
_BODY_S: Final = 15.0
_SEND_S: Final = 30.0  # until somebody who reads nothing is given up
_TOKEN: Final = re.compile(rb"(?i:bearer) [\x21-\x7e]{1,8192}")
_ASKS_FOR: Final = re.compile(rb"[\x21-\x7e]{1,4096}")
_ADDRESS: Final = re.compile(r"(localhost|[\d.]+|\[[\da-f:]+\])(:\d{1,5})?", re.ASCII)
_HEADERS: Final = (
    (b"x-content-type-options", b"nosniff"),
    (b"content-security-policy", b"default-src 'none'; frame-ancestors 'none'"),
    (b"referrer-policy", b"no-referrer"),
    (b"cache-control", b"no-store"),
)
_TLS_ONLY: Final = (b"strict-transport-security", b"max-age=31536000")


class Gateway:
    """Answers HTTP by asking fedd."""

    def __init__(self, fedd: Fedd, requests: int, url: str = "") -> None:
        """``requests``: so many may wait for fedd at once. ``url``: where people reach the page."""
        self._fedd = fedd
        self._url = url.rstrip("/")
        # Where people come from elsewhere a proxy may stand before it that doesn't say so.
        self._is_local = not url or _is_loopback(urlsplit(url).hostname or "")
        self._most = requests
        self._under_way = Counter[str]()  # of each share
        self._pages = Pages(fedd, self._in_turn, body_of, partial(bring, fedd))

    def application(self) -> ASGIApp:
        """What a server runs."""
        routes = [
            Route("/health", self.health, methods=["GET"]),
            Route("/metrics", self.metrics, methods=["GET"]),
            Route("/v1/models", self.models, methods=["GET"]),
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
            Route("/v1/embeddings", self.embeddings, methods=["POST"]),
            Route("/v1/search", self.search, methods=["POST"]),
            Route("/v1/feedback", self.feedback, methods=["POST"]),
            Route("/v1/documents", self.bring, methods=["POST"]),
            Route("/v1/documents", self.brought, methods=["GET"]),
            Route("/mcp", self.mcp, methods=["POST"]),
            *self._pages.routes(),
        ]
        handlers: dict[Any, Any] = {HTTPException: self.refused, Exception: self.refused}
        return Guarded(Starlette(routes=routes, exception_handlers=handlers))

    async def refused(self, request: Request, error: Exception) -> Response:
        """Why there is no answer: to a program as its makers know it, to a browser as a page."""
        return self._pages.refused(request, error) if Pages.is_for(request) else answer_to(error)

    async def health(self, _request: Request) -> Response:
        """For who watches: whether a question would be answered now."""
        if await self._fedd.answers():
            return JSONResponse({"status": "ok"})
        raise Refusal(503, "the index is still being made: try again in a moment", retry_after_s=5)

    async def metrics(self, request: Request) -> Response:
        """For monitoring on this machine; for any other with a token for it."""
        near = self._is_local and is_near(request) and not request.headers.getlist("authorization")
        token = "" if near else token_of(request)
        told = figures.exposition(await self._fedd.figures(token))
        return Response(told, media_type=figures.CONTENT_TYPE)

    async def models(self, request: Request) -> Response:
        """What may be asked with this token."""
        who = await self._fedd.whoami(token_of(request))
        return JSONResponse(openai_api.models(list(who.scopes), who.site))

    async def chat(self, request: Request) -> Response:
        """An answer from the site's documents, with citations."""
        token = token_of(request)
        asked = openai_api.parsed(openai_api.ChatRequest, await body_of(request), openai_api.CHAT)
        said = asked.said()
        if asked.stream:
            usage = asked.stream_options is not None and asked.stream_options.include_usage
            return EventStream(self._events(said, token, usage=usage))
        async with self._admitted(token):
            reply = await self._reply(said, token)
        return JSONResponse(openai_api.Completion(question_of(said), self._url).whole(reply))

    async def _reply(self, said: Sequence[str], token: str) -> AskReply:
        if is_chore(said):
            await self._fedd.whoami(token)
            return openai_api.fixed(CHORES)
        return await self._fedd.ask(question_of(said), token)

    async def _events(
        self, said: Sequence[str], token: str, *, usage: bool
    ) -> AsyncGenerator[bytes, None]:
        """The answer as it comes; its turn lasts until it is read, or somebody hangs up."""
        completion = openai_api.Completion(question_of(said), self._url)
        async with self._admitted(token):
            if is_chore(said):
                reply = await self._reply(said, token)
                yield b"".join([completion.begin(), *completion.rest(reply, usage=usage)])
                return
            async with aclosing(self._fedd.stream(question_of(said), token)) as parts:
                head = completion.begin()
                async for part in parts:
                    if part.HasField("whole"):
                        yield b"".join([head, *completion.rest(part.whole, usage=usage)])
                        return
                    yield head + completion.piece(part.text)
                    head = b""

    async def embeddings(self, request: Request) -> Response:
        """Texts as the site's version embeds questions."""
        token = token_of(request)
        body = await body_of(request)
        asked = openai_api.parsed(openai_api.EmbeddingsRequest, body, openai_api.EMBEDDING)
        async with self._admitted(token):
            reply = await self._fedd.embed(asked.texts(), token)
        return JSONResponse(openai_api.embeddings(asked, reply))

    async def search(self, request: Request) -> Response:
        """Passages for a question, for scripts."""
        token = token_of(request)
        asked = site_api.parsed(site_api.Search, await body_of(request))
        async with self._admitted(token):
            wanted = control.SearchRequest(**asked.model_dump())
            reply = await self._fedd.search(wanted, token)
        return JSONResponse(site_api.found_in(reply).model_dump(mode="json"))

    async def feedback(self, request: Request) -> Response:
        """That a document answers a question, or does not: for the operator to look at."""
        token = token_of(request)
        said = site_api.parsed(site_api.Feedback, await body_of(request))
        async with self._admitted(token):
            await self._fedd.propose(questions.ProposeRequest(**said.model_dump()), token)
        return Response(status_code=204)

    async def bring(self, request: Request) -> Response:
        """A file that becomes a document: 202 where it is not read yet."""
        upload = await bring(self._fedd, request, token_of(request))
        if upload.state == "refused":
            raise Refusal(422, upload.cause)
        told = site_api.brought(upload).model_dump(mode="json")
        return JSONResponse(told, 202 if upload.state in ("waiting", "reading") else 200)

    async def brought(self, request: Request) -> Response:
        """What became of files that this token has brought."""
        reply = await self._fedd.uploads(token_of(request))
        return JSONResponse(site_api.uploads_of(reply).model_dump(mode="json"))

    async def mcp(self, request: Request) -> Response:
        """Tools for agents, over the Model Context Protocol.

        The token is checked before anything that was sent is read.
        """
        try:
            token = token_of(request)
            refuse_pages(request)
            body = await body_of(request)
            scopes = frozenset((await self._fedd.whoami(token)).scopes)
            # 31 MiB and half a second, which a gateway without agents can do without.
            api = await asyncio.to_thread(_mcp_api)
        except Refusal as refusal:
            return rpc_answer_to(refusal)
        asker = api.Asker(self._fedd, token, scopes, partial(self._in_turn, token))
        answer: Response = await api.answered(request, body, asker)
        return answer

    @asynccontextmanager
    async def _admitted(self, token: str) -> AsyncIterator[None]:
        """As `_in_turn`, for a token of this site; with any other fedd refuses what is asked.

        That takes it a moment, and no turn: those who make tokens up would have them all.
        """
        if await self._is_of_this_site(token):
            with self._in_turn(token):
                yield
        else:
            yield

    async def _is_of_this_site(self, token: str) -> bool:
        if self._fedd.share_of(token) is None:
            try:
                await self._fedd.whoami(token)
            except Refusal as refusal:
                if refusal.status_code != 401:
                    raise
                return False
        return True

    @contextmanager
    def _in_turn(self, token: str) -> Iterator[None]:
        """One of those that wait for fedd; a request that is whole, so that no slow one counts.

        Of one token, or person, half of them at most, where there are several: the others are for
        others.
        """
        own, share = max(1, self._most // 2), self._fedd.share_of(token) or token
        if self._under_way.total() >= self._most or self._under_way[share] >= own:
            cause = "as many questions are being answered as may be: try again in a moment"
            raise Refusal(429, cause, retry_after_s=2)
        self._under_way[share] += 1
        try:
            yield
        finally:
            self._under_way[share] -= 1
            if not self._under_way[share]:
                del self._under_way[share]


def _mcp_api() -> ModuleType:
    from daemon.gateway import mcp_api

    return mcp_api


def token_of(request: Request) -> Credential:
    """The Authorization header, the only one there is, and for whom it asks, if that is said.

    What they are worth, fedd says.
    """
    headers = request.scope["headers"]
    told = [value for name, value in headers if name == b"authorization"]
    if len(told) != 1 or not _TOKEN.fullmatch(told[0]):
        cause = "no token: send the header `Authorization: Bearer TOKEN`, once"
        raise Refusal(401, cause, unread=request.method == "POST")
    people = [value for name, value in headers if name == ASKS_FOR.encode()]
    if len(people) > 1 or not all(_ASKS_FOR.fullmatch(one) for one in people):
        cause = f"{ASKS_FOR} has to be there once, of at most 4 KiB, or not at all"
        raise Refusal(401, cause, unread=request.method == "POST")
    # The scheme may be written in any case (RFC 9110): as one who asks, it is the same.
    authorization = f"Bearer {str(told[0], 'ascii').partition(' ')[2]}"
    return Credential.of(authorization, "".join(str(one, "ascii") for one in people))


def refuse_pages(request: Request) -> None:
    """Refusal for what a page in somebody's browser asks, unless the page is of this very address.

    Its own name may have been made to lead here (DNS rebinding); then Host and Origin agree. So
    they must name an address, or the certificate has been checked against the name.
    """
    origins = request.headers.getlist("origin")
    if not origins:
        return
    host = request.headers.get("host", "")
    sure = request.url.scheme == "https" or _ADDRESS.fullmatch(host) is not None
    if not sure or origins != [f"{request.url.scheme}://{host}"]:
        raise Refusal(
            403, "pages in browsers may not ask here: leave the header Origin out", unread=True
        )


def is_near(request: Request) -> bool:
    """Whether a program of this machine asks for itself, by an address and not by a name.

    Not for others, as a proxy does, also one that adds no header of its own: nginx, as it comes,
    speaks HTTP/1.0 to what is behind it. And not as a page in somebody's browser, whose own name
    was made to lead here.
    """
    passed_on = request.scope["http_version"] != "1.1" or any(
        name in request.headers for name in ("forwarded", "x-forwarded-for", "x-real-ip", "via")
    )
    caller = request.client.host if request.client is not None else ""
    by_address = _ADDRESS.fullmatch(request.headers.get("host", "")) is not None
    return not passed_on and _is_loopback(caller) and by_address


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


async def body_of(request: Request) -> bytes:
    """The whole body, which is short and comes soon; Refusal otherwise.

    Of one that is too long some is read and dropped: whoever is hung up on while they send
    takes that for a broken line, and learns no reason.
    """
    cause = f"more than {_BODY_BYTES >> 20} MiB: send less of the conversation"
    _length_of(request, "0", _DROPPED_BYTES, cause)
    body, size = bytearray(), 0
    try:
        async with asyncio.timeout(_BODY_S):
            async for piece in request.stream():
                size += len(piece)
                if size > _DROPPED_BYTES:
                    raise Refusal(413, cause, unread=True)
                if size > _BODY_BYTES:
                    body.clear()
                else:
                    body += piece
    except TimeoutError:
        raise Refusal(408, f"the body took more than {_BODY_S:g} s", unread=True) from None
    if size > _BODY_BYTES:
        raise Refusal(413, cause)
    return bytes(body)


async def bring(fedd: Fedd, request: Request, credential: str) -> questions.Upload:
    """Pass on the file that a request holds; how far fedd is with it.

    Refusal for a request that holds none, and as fedd has it. A body of who may bring something
    is read to its end all the same: whoever is hung up on while they send takes that for a broken
    line, and learns no reason.
    """
    most = _FILE_BYTES + FORM_BYTES
    size = _length_of(request, "", most, "more than a GiB: cut it into several files")
    try:
        may = await fedd.uploads(credential)
    except Refusal as refusal:
        if size <= _BODY_BYTES:  # so is a short one of who may not
            await body_of(request)
        else:
            refusal.headers = {**(refusal.headers or {}), "Connection": "close"}
        raise
    body = request.stream()
    try:
        if size > may.most_bytes + FORM_BYTES:
            raise _too_large(may)
        form = FileForm(request.headers.get("content-type", ""))
        pieces = form.read(body)
        # Behind it the fields are known that stand before the file.
        first = await anext(pieces, b"")
        request.state.collection = form.fields.get("collection", "").strip()
        file = questions.UploadedFile(
            collection=request.state.collection,
            name=form.file_name,
            replace=form.fields.get("replace") == "yes",
        )
        return await fedd.upload(file, _with(first, pieces), credential)
    except FormError as error:
        await _read_to_its_end(body)
        raise Refusal(400, str(error)) from None
    except Refusal:
        await _read_to_its_end(body)
        raise


def _length_of(request: Request, unsaid: str, most: int, cause: str) -> int:
    """What the body says of its length; ``unsaid``: where that is nothing, "" if it has to.

    Refusal for a body in chunks, and with ``cause`` for more than ``most``.
    """
    told = request.headers.get("content-length", unsaid)
    if "transfer-encoding" in request.headers or not told:
        first = "say how long the body is (Content-Length) instead of sending it in chunks"
        raise Refusal(411, first, unread=True)
    if not told.isascii() or not told.isdecimal():
        raise Refusal(400, "Content-Length is no number", unread=True)
    if len(told) > 12 or int(told) > most:
        raise Refusal(413, cause, unread=True)
    return int(told)


def _too_large(may: questions.UploadsReply) -> Refusal:
    if not may.most_bytes:
        return Refusal(403, "this site takes no files from people (gateway.upload_mib is 0)")
    most = f"a file has at most {may.most_bytes >> 20} MiB here"
    return Refusal(413, f"{most}: cut it into several")


async def _with(first: bytes, rest: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    yield first
    async for piece in rest:
        yield piece


async def _read_to_its_end(body: AsyncIterator[bytes]) -> None:
    async for _ in body:
        pass


class Guarded:
    """An application whose answers carry what browsers need to know, and wait for nobody long.

    Whoever hangs up ends what is done for them, whatever they have asked for: their turn, and all
    that fedd does.
    """

    def __init__(self, inner: ASGIApp) -> None:
        self._inner = inner

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        inner = self._inner
        if sum(len(name) + len(value) for name, value in scope["headers"]) > HEADER_BYTES:
            # What came in one piece with its end was parsed, however long it is.
            cause = f"the headers have more than {HEADER_BYTES >> 10} KiB: send fewer"
            inner = answer_to(Refusal(431, cause, unread=True))
        extra = [*_HEADERS, *([_TLS_ONLY] if scope.get("scheme") == "https" else [])]

        async def sent(message: Message) -> None:
            if message["type"] == "http.response.start":
                told = [(name.lower(), value) for name, value in message.get("headers", [])]
                names = {name for name, _ in told}  # a page says some of it itself
                message["headers"] = [*told, *(one for one in extra if one[0] not in names)]
            async with asyncio.timeout(_SEND_S):
                await send(message)

        try:
            await while_there(scope, receive, lambda received: inner(scope, received, sent))
        except (ClientDisconnect, TimeoutError):
            log.debug("somebody hung up, or took no answer")
        except Exception as error:
            # Without what the exception says: that may repeat what somebody asked. The answer,
            # which starlette has given by now, says that the log knows.
            where = "".join(traceback.format_tb(error.__traceback__))
            log.error("a request failed", kind=type(error).__name__, where=where)  # noqa: TRY400
