"""HTTP connections that cannot be held open by saying little, and of which there are so many.

uvicorn waits for a request's headers for ever. Here each connection has `HEADERS_S` for them,
from its start or from the end of the answer before. While a request is answered its parts have
their time from who answers it (daemon/gateway/application.py), and all of it `EXCHANGE_S`.

Where one more comes than there may be, another goes: who has waited longest without having asked
anything, of the address that has most; who is being answered stays. So those who keep many open
lose their own, and nobody is kept out. A connection counts from the moment it is taken: TLS is
begun here, for asyncio tells nobody of a handshake that is under way.
"""

from __future__ import annotations

import asyncio
import enum
import ipaddress
import itertools
import socket
import ssl
from collections import Counter
from typing import Any, Final

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

HEADERS_S: Final = 10.0
EXCHANGE_S: Final = 420.0  # more than fedd is given for an answer
HEADER_BYTES: Final = 16 * 1024
_AT_ONCE: Final = 4096  # bytes that are parsed at a time
_MOST: Final = 256  # at once; each takes a descriptor, and at most a request's body of memory
_TAKEN_AT_ONCE: Final = 64  # before what the ones before say is read; fewer than `_MOST`
_WAITING: Final = 2048  # connections that the system keeps until they are taken
_NETWORK_BITS: Final = 64  # of an IPv6 address: what is behind them one household may choose freely


class Stage(enum.IntEnum):
    """How far a connection has come; who has come less far goes first."""

    ASKING = 0  # no request whose headers are whole
    SENDING = 1  # a body is under way
    UNREAD = 2  # an answer is, and is not taken
    ANSWERED = 3  # an answer is being made


class Place:
    """A connection among all: where it comes from, how far it is, since when."""

    def __init__(self, places: Places, transport: asyncio.BaseTransport) -> None:
        self.address = _network_of(transport)
        self.protocol: TimedProtocol | None = None  # None: TLS is not agreed on yet
        self.since = next(places.clock)
        self._places, self._transport = places, transport

    @property
    def stage(self) -> Stage:
        """As of now."""
        return Stage.ASKING if self.protocol is None else self.protocol.stage

    def moved(self) -> None:
        """It has come to another stage: from now on it waits in that."""
        self.since = next(self._places.clock)

    def end(self) -> None:
        """Hang up."""
        if isinstance(self._transport, asyncio.Transport):
            self._transport.abort()
        self.leave()

    def leave(self) -> None:
        """It is over."""
        self._places.leave(self)


class Places:
    """All connections of a server; `_MOST` of them."""

    def __init__(self) -> None:
        self.clock = itertools.count()  # which came before which, not when
        self._taken: set[Place] = set()
        self._of = Counter[str]()  # by address

    def take(self, transport: asyncio.BaseTransport) -> Place:
        """A place for a new connection; another's, if need be, or its own at once."""
        place = Place(self, transport)
        self._taken.add(place)
        self._of[place.address] += 1
        if len(self._taken) > _MOST:
            self._last(place).end()
        return place

    def leave(self, place: Place) -> None:
        """It is free again."""
        if place in self._taken:
            self._taken.remove(place)
            self._of[place.address] -= 1
            if not self._of[place.address]:
                del self._of[place.address]

    def _last(self, newest: Place) -> Place:
        """Which one goes: of others who are not being answered, if there are any."""
        staged = [(one, one.stage) for one in self._taken if one is not newest]
        idle = [pair for pair in staged if pair[1] is not Stage.ANSWERED]
        if not idle:
            return newest
        return min(idle, key=lambda pair: (-self._of[pair[0].address], pair[1], pair[0].since))[0]


def _network_of(transport: asyncio.BaseTransport) -> str:
    """Who calls, as far as one can choose no other; everybody behind a proxy is one."""
    peer = transport.get_extra_info("peername")
    try:
        address = ipaddress.ip_address(peer[0].partition("%")[0])
    except (TypeError, IndexError, ValueError):  # gone already
        return ""
    if address.version == 4:
        return str(address)
    return str(ipaddress.ip_network((address, _NETWORK_BITS), strict=False))


class Arriving(asyncio.Protocol):
    """A connection before its first byte: it takes a place, agrees on TLS, and becomes HTTP."""

    def __init__(self, places: Places, tls: ssl.SSLContext | None, http: TimedProtocol) -> None:
        """``tls``: None: it is HTTP at once."""
        self._places, self._tls, self._http = places, tls, http
        self._place: Place | None = None
        self._early = bytearray()  # what came with the end of the handshake
        self._agreeing: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Somebody is there."""
        self._place = self._places.take(transport)
        if not isinstance(transport, asyncio.Transport) or transport.is_closing():
            return
        if self._tls is None:
            self._become_http(transport, transport)
        else:
            agreeing = self._agree(transport, self._tls)
            self._agreeing = asyncio.get_running_loop().create_task(agreeing)

    def data_received(self, data: bytes) -> None:
        """Read with the handshake's end, and not before: `start_tls` reads what comes till then."""
        self._early += data

    def connection_lost(self, _exc: Exception | None) -> None:
        """Before it was anything."""
        if self._place is not None:
            self._place.leave()

    async def _agree(self, transport: asyncio.Transport, tls: ssl.SSLContext) -> None:
        loop = asyncio.get_running_loop()
        try:
            secured = await loop.start_tls(
                *(transport, self, tls), server_side=True, ssl_handshake_timeout=HEADERS_S
            )
        except (OSError, TimeoutError) as error:  # ssl.SSLError is one, too; nobody's fault here
            transport.abort()
            self.connection_lost(error)
            return
        if secured is None or secured.is_closing():
            self.connection_lost(None)
            return
        self._become_http(secured, transport)

    def _become_http(self, transport: asyncio.Transport, raw: asyncio.Transport) -> None:
        transport.set_protocol(self._http)
        self._http.place = self._place
        self._http.raw = raw
        if self._place is not None:
            self._place.protocol = self._http
        self._http.connection_made(transport)
        if self._early:
            self._http.data_received(bytes(self._early))


class Arrivals:
    """Makes the connections of a server, for `uvicorn.Config`; ``tls``: None: in the clear."""

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        self._tls, self._places = tls, Places()

    def __call__(self, **given: Any) -> Arriving:
        """One; ``given``: what uvicorn gives its own."""
        return Arriving(self._places, self._tls, TimedProtocol(**given))


class Server(uvicorn.Server):
    """uvicorn's, which takes a few connections at a time: what these say is read in between.

    Of a flood it would take all that wait at once, and each would lose its place to the next
    before anybody has read what it asks.
    """

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen; as many as before may wait in the system's queue."""
        self.config.backlog = _TAKEN_AT_ONCE
        await super().startup(sockets)
        for one in sockets or ():
            one.listen(_WAITING)


class TimedProtocol(H11Protocol):
    """uvicorn's connection, with a clock and a place."""

    place: Place | None = None
    raw: asyncio.Transport | None = None  # below TLS
    _clock: asyncio.TimerHandle | None = None
    _unsent = 0  # bytes of an answer, when that was last looked at

    @property
    def stage(self) -> Stage:
        """How far its request has come."""
        if self._bytes_unsent():
            return Stage.UNREAD
        if not self._is_answering():
            return Stage.ASKING
        return Stage.SENDING if self.cycle.more_body else Stage.ANSWERED

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A connection begins: it has its time from now."""
        super().connection_made(transport)
        self._give(HEADERS_S)

    def data_received(self, data: bytes) -> None:
        """Bytes of a request; once its headers are whole, it has its time.

        Read a little at a time: a body in chunks of one byte is tens of thousands of events in
        what the system hands over at once, and nobody else is served meanwhile. One that comes
        in chunks is read no further; it gets its refusal (`application.body_of`).
        """
        before, answering = self.stage, self._is_answering()
        for start in range(0, len(data), _AT_ONCE):
            if self._is_chunked() or self.transport.is_closing():
                break
            super().data_received(data[start : start + _AT_ONCE])
        if self._is_answering() and not answering:
            self._give(EXCHANGE_S)
        if self.place is not None and self.stage is not before:
            self.place.moved()

    def on_response_complete(self) -> None:
        """An answer is out; what comes behind it has its time from now."""
        self._give(HEADERS_S)
        super().on_response_complete()  # a request that has come already begins in here
        if self._is_answering():
            self._give(EXCHANGE_S)
        if self.place is not None:
            self.place.moved()

    def connection_lost(self, exc: Exception | None) -> None:
        """It is over."""
        if self.place is not None:
            self.place.leave()
        if self._clock is not None:
            self._clock.cancel()
        super().connection_lost(exc)

    def _is_chunked(self) -> bool:
        """Whether the request under way has a body of no told length."""
        headers = self.scope["headers"] if self._is_answering() else ()
        return any(name == b"transfer-encoding" for name, _ in headers)

    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _bytes_unsent(self) -> int:
        """Of an answer, encrypted or not."""
        below = self.raw.get_write_buffer_size() if self.raw is not None else 0
        return max(below, self.transport.get_write_buffer_size())

    def _give(self, seconds: float) -> None:
        if self._clock is not None:
            self._clock.cancel()
        self._unsent = 0
        self._look_in(seconds)

    def _look_in(self, seconds: float) -> None:
        self._clock = asyncio.get_running_loop().call_later(seconds, self._end)

    def _end(self) -> None:
        """Time is up, unless who reads an answer slowly has read some of it meanwhile."""
        before, self._unsent = self._unsent, self._bytes_unsent()
        if self._unsent and (not before or self._unsent < before):
            self._look_in(HEADERS_S)
        else:
            self.transport.abort()
