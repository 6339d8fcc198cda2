"""HTTP connections that cannot be held open by saying little, and of which there are so many.

uvicorn waits for a request's headers for ever. Here each connection has `HEADERS_S` for them,
from its start or from the end of the answer before. While a request is answered its parts have
their time from who answers it (daemon/gateway/application.py), and all of it `EXCHANGE_S`.
"""

from __future__ import annotations

import asyncio
from typing import Final

from uvicorn.protocols.http.h11_impl import H11Protocol

HEADERS_S: Final = 10.0
EXCHANGE_S: Final = 420.0  # more than fedd is given for an answer
HEADER_BYTES: Final = 16 * 1024
_AT_ONCE: Final = 4096  # bytes that are parsed at a time
_MOST: Final = 256  # at once; each takes a descriptor, and at most a request's body of memory


class TimedProtocol(H11Protocol):
    """uvicorn's connection, with a clock."""

    _clock: asyncio.TimerHandle | None = None
    _unsent = 0  # bytes of an answer, when that was last looked at

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A connection begins: it has its time from now."""
        super().connection_made(transport)
        if len(self.connections) > _MOST:
            transport.abort()
        self._give(HEADERS_S)

    def data_received(self, data: bytes) -> None:
        """Bytes of a request; once its headers are whole, it has its time.

        Read a little at a time: a body in chunks of one byte is tens of thousands of events in
        what the system hands over at once, and nobody else is served meanwhile. One that comes
        in chunks is read no further; it gets its refusal (`application.body_of`).
        """
        answering = self._is_answering()
        for start in range(0, len(data), _AT_ONCE):
            if self._is_chunked() or self.transport.is_closing():
                break
            super().data_received(data[start : start + _AT_ONCE])
        if self._is_answering() and not answering:
            self._give(EXCHANGE_S)

    def on_response_complete(self) -> None:
        """An answer is out; what comes behind it has its time from now."""
        self._give(HEADERS_S)
        super().on_response_complete()  # a request that has come already begins in here
        if self._is_answering():
            self._give(EXCHANGE_S)

    def connection_lost(self, exc: Exception | None) -> None:
        """It is over."""
        if self._clock is not None:
            self._clock.cancel()
        super().connection_lost(exc)

    def _is_chunked(self) -> bool:
        """Whether the request under way has a body of no told length."""
        headers = self.scope["headers"] if self._is_answering() else ()
        return any(name == b"transfer-encoding" for name, _ in headers)

    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _give(self, seconds: float) -> None:
        if self._clock is not None:
            self._clock.cancel()
        self._unsent = 0
        self._look_in(seconds)

    def _look_in(self, seconds: float) -> None:
        self._clock = asyncio.get_running_loop().call_later(seconds, self._end)

    def _end(self) -> None:
        """Time is up, unless who reads an answer slowly has read some of it meanwhile."""
        before, self._unsent = self._unsent, self.transport.get_write_buffer_size()
        if self._unsent and (not before or self._unsent < before):
            self._look_in(HEADERS_S)
        else:
            self.transport.abort()
