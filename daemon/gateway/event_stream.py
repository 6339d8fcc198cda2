"""Answers for somebody who may go away meanwhile: given up then, and sent while they are made."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import suppress
from typing import Any, Final, TypeVar

import structlog
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from daemon.gateway.refusals import Refusal, error_of

log = structlog.get_logger()
T = TypeVar("T")

_REFUSED_WITHIN_S: Final = 2.0  # what is refused later is refused within the stream
_SILENT_S: Final = 10.0  # proxies and clients hang up on who says nothing for a minute or so
_STILL_HERE: Final = b": still at it\n\n"
END: Final = "[DONE]"


def event(data: dict[str, Any] | str) -> bytes:
    """A server-sent event (WHATWG HTML) that OpenAI's clients read."""
    text = data if isinstance(data, str) else json.dumps(data)
    return f"data: {text}\n\n".encode()


async def while_there(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The outcome of ``work``, for who has sent all there is of a request.

    It is cancelled, and ClientDisconnect raised, when they hang up.
    """
    working = asyncio.create_task(work)
    going = asyncio.create_task(_gone(receive))
    try:
        await asyncio.wait({working, going}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientDisconnect
    finally:
        for task in (working, going):
            task.cancel()
        await asyncio.wait({working, going})
        if not working.cancelled():
            working.exception()  # nobody is left to hear of it


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


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

    async def __call__(self, _scope: Scope, receive: Receive, send: Send) -> None:
        """Send them; raises Refusal as long as nothing is sent."""
        await while_there(receive, self._send_all(send))

    async def _send_all(self, send: Send) -> None:
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
