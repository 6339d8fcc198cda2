"""Answers for somebody who may go away meanwhile: given up then, and sent while they are made."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import suppress
from typing import Any, Final

import structlog
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from daemon.gateway.refusals import Refusal, error_of

log = structlog.get_logger()

_REFUSED_WITHIN_S: Final = 2.0  # what is refused later is refused within the stream
_SILENT_S: Final = 10.0  # proxies and clients hang up on who says nothing for a minute or so
_STILL_HERE: Final = b": still at it\n\n"
END: Final = "[DONE]"


def event(data: dict[str, Any] | str) -> bytes:
    """A server-sent event (WHATWG HTML) that OpenAI's clients read."""
    text = data if isinstance(data, str) else json.dumps(data)
    return f"data: {text}\n\n".encode()


async def while_there(
    scope: Scope, receive: Receive, work: Callable[[Receive], Awaitable[None]]
) -> None:
    """All that is done for a request; ``work`` reads it by what it is given.

    It is cancelled, and ClientDisconnect raised, when they hang up. That comes behind the body,
    of which a message is read ahead: who sends a long one is heard to hang up when it is read.
    """
    expects = any(name == b"expect" for name, _ in scope["headers"])
    # To ask for a body tells who expects that (100 Continue) to send it: that is for ``work``.
    wanted = asyncio.Semaphore(0 if expects else 1)
    came = asyncio.Queue[Message]()

    async def going() -> None:
        more = True
        while more:
            await wanted.acquire()
            message = await receive()
            came.put_nowait(message)
            more = message.get("more_body", False)
        while message["type"] != "http.disconnect":
            message = await receive()

    async def received() -> Message:
        if came.empty():
            wanted.release()
        return await came.get()

    working, watching = asyncio.ensure_future(work(received)), asyncio.create_task(going())
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        working.result()
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.wait({working, watching})
        if not working.cancelled():
            working.exception()  # nobody is left to hear of it


def openai_error(error: Exception) -> bytes:
    """What ends a stream, as OpenAI's clients read it."""
    return event({"error": error_of(error)}) + event(END)


class EventStream(Response):
    """Events as they come, and signs of life between them; who hangs up ends what makes them.

    What is refused at once is refused with its status; later, with an event that says so.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        ended_by: Callable[[Exception], bytes] = openai_error,
    ) -> None:
        """``ended_by``: the last event of a stream that has begun and fails."""
        super().__init__(headers={"x-accel-buffering": "no"})  # nginx would wait for the end
        del self.headers["content-length"]
        self._events = events
        self._ended_by = ended_by
        self._begun = False

    async def __call__(self, _scope: Scope, _receive: Receive, send: Send) -> None:
        """Send them; raises Refusal as long as nothing is sent."""
        try:
            await self._send_events(send)
        except (TimeoutError, OSError):  # of sending: nobody reads
            raise
        except Exception as error:
            if not self._begun:
                raise
            if not isinstance(error, Refusal):  # without what it says, as in application.Guarded
                log.error("a stream failed", kind=type(error).__name__)  # noqa: TRY400
            await self._send(send, self._ended_by(error))
        await send({"type": "http.response.body", "body": b""})

    async def _send_events(self, send: Send) -> None:
        """Until the last, or what ends them."""
        pause = _REFUSED_WITHIN_S
        coming = asyncio.ensure_future(anext(self._events, None))
        try:
            while True:
                await asyncio.wait({coming}, timeout=pause)
                pause = _SILENT_S
                if not coming.done():
                    await self._send(send, _STILL_HERE)
                    continue
                if (piece := coming.result()) is None:
                    return
                await self._send(send, piece)
                coming = asyncio.ensure_future(anext(self._events, None))
        finally:
            coming.cancel()
            await asyncio.wait({coming})
            with suppress(Exception):  # told above, or nobody is there
                await self._events.aclose()

    async def _send(self, send: Send, piece: bytes) -> None:
        if not self._begun:
            self._begun = True
            head = {"status": self.status_code, "headers": self.raw_headers}
            await send({"type": "http.response.start", **head})
        await send({"type": "http.response.body", "body": piece, "more_body": True})
