"""HTTP connections that cannot be held open by saying little, and of which there are so many.

uvicorn waits for a request's headers for ever. Here each connection has `HEADERS_S` for them,
from its start or from the end of the answer before. While a request is answered its parts have
their time from who answers it (daemon/gateway/application.py), and all of it `EXCHANGE_S`.

Where one more comes than there may be, it waits, and nothing of it is read. It begins when another
is over, or has had its time to ask and has not: of the address that has most, who has come less far
and waited longest. Who is being answered stays. So those who keep many open lose their own; a flood
of them is in nobody's way but in the queue before it, whose turns pass from address to address; and
nobody is hung up on in the midst of what they say. A connection counts from the moment it is taken:
TLS is begun here, for asyncio tells nobody of a handshake that is under way.
"""

from __future__ import annotations

import asyncio
import enum
import ipaddress
import itertools
import socket
import ssl
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

HEADERS_S: Final = 10.0
EXCHANGE_S: Final = 420.0  # more than fedd is given for an answer
HEADER_BYTES: Final = 16 * 1024
_AT_ONCE: Final = 4096  # bytes that are parsed at a time
_MOST: Final = 256  # at once; each has at most a request's body of memory
_ROOM: Final = 1024  # that wait to begin; each takes a descriptor
_ROOM_S: Final = 120.0  # for so long
_TICK_S: Final = 0.1  # between two looks at who has had their time, at the least
_GRACE: Final = 20  # looks; on a busy machine a look takes longer, and so does all that is read
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

    def __init__(
        self, places: Places, transport: asyncio.Transport, begin: Callable[[], None]
    ) -> None:
        """``begin``: what is done when it has its turn."""
        self.address = _network_of(transport)
        self.protocol: TimedProtocol | None = None  # None: TLS is not agreed on yet
        self.begin = begin
        self.came_s = asyncio.get_running_loop().time()
        self.order = next(places.clock)
        self.tick = 0  # at which it came to its stage
        self._places, self._transport = places, transport

    @property
    def stage(self) -> Stage:
        """As of now."""
        return Stage.ASKING if self.protocol is None else self.protocol.stage

    def moved(self) -> None:
        """It has come to another stage: from now on it waits in that."""
        self.order, self.tick = next(self._places.clock), self._places.tick

    def end(self) -> None:
        """Hang up."""
        self._transport.abort()
        self.leave()

    def leave(self) -> None:
        """It is over."""
        self._places.leave(self)

    @property
    def is_waited_for(self) -> bool:
        """Whether somebody has no place, of an address that has no more than this one's."""
        return self._places.is_waited_for(self.address)


class Places:
    """All connections of a server; `_MOST` of them are read, others wait."""

    def __init__(self) -> None:
        self.clock = itertools.count()  # which came before which, not when
        self.tick = 0
        self._taken: set[Place] = set()
        self._of = Counter[str]()  # of these, by address
        self._waiting: dict[str, dict[Place, None]] = {}  # by address, in the order they came
        self._stuck = set[str]()  # addresses for which nobody goes, as of the last look
        self._looking: asyncio.TimerHandle | None = None

    def arrive(self, place: Place) -> None:
        """One more waits; its ``begin`` is called when it is its turn, which may be at once."""
        of_it = self._waiting.setdefault(place.address, {})
        of_it[place] = None
        if sum(map(len, self._waiting.values())) > _ROOM:
            most = max(self._waiting.values(), key=len)
            next(reversed(most)).end()
        if place.address not in self._stuck:
            self._admit()

    def leave(self, place: Place) -> None:
        """It is free again."""
        if place in self._taken:
            self._taken.remove(place)
            self._of[place.address] -= 1
            if not self._of[place.address]:
                del self._of[place.address]
            self._stuck.clear()
            if self._waiting:
                asyncio.get_running_loop().call_soon(self._admit)
        elif of_it := self._waiting.get(place.address):
            of_it.pop(place, None)
            if not of_it:
                del self._waiting[place.address]

    def is_waited_for(self, address: str) -> bool:
        """Whether one of an address with no more places than this waits for one."""
        own = self._of[address]
        return any(self._of[one] <= own for one in self._waiting)

    def _admit(self) -> None:
        """Begin those that wait and find a place, of the address that has fewest first."""
        while waiting := {a: of_it for a, of_it in self._waiting.items() if a not in self._stuck}:
            address = min(waiting, key=lambda one: (self._of[one], next(iter(waiting[one])).order))
            if len(self._taken) >= _MOST:
                if (last := self._last(address)) is None:
                    self._stuck.add(address)
                    continue
                last.end()
            place = next(iter(waiting[address]))
            self.leave(place)  # the queue
            self._taken.add(place)
            self._of[address] += 1
            place.moved()
            place.begin()
        if len(self._taken) >= _MOST and self._looking is None:
            self._looking = asyncio.get_running_loop().call_later(_TICK_S, self._look)

    def _look(self) -> None:
        """Who has had their time, and who has waited too long, while there are too many."""
        self._looking = None
        self.tick += 1
        self._stuck.clear()
        before = asyncio.get_running_loop().time() - _ROOM_S
        for place in [next(iter(of_it)) for of_it in self._waiting.values()]:
            if place.came_s < before:  # others of its address, with the next looks
                place.end()
        self._admit()

    def _last(self, address: str) -> Place | None:
        """Which one goes for one of this address; None: nobody yet.

        Of those who aren't being answered, of the address that has most, who has come less far
        and waited longest. Never of an address that has fewer than this; of one that has as many
        only when it has had its time.
        """
        own = self._of[address]
        staged = [
            (-of, stage, one.order, one)
            for one in self._taken
            if (of := self._of[one.address]) >= own and (stage := one.stage) is not Stage.ANSWERED
        ]
        if not staged:
            return None
        of, _, _, last = min(staged)  # an order is of one place alone, so places aren't compared
        return last if -of > own or last.tick <= self.tick - _GRACE else None


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
        """Somebody is there, and waits for their turn."""
        if not isinstance(transport, asyncio.Transport):
            raise TypeError("a connection over which nothing can be sent")
        # Behind the loop's own first step, which would begin to read what was paused before it
        # (CPython before 3.11.4), and before anything is read.
        asyncio.get_running_loop().call_soon(self._arrive, transport)

    def _arrive(self, transport: asyncio.Transport) -> None:
        if transport.is_closing():
            return
        transport.pause_reading()
        self._place = Place(self._places, transport, partial(self._begin, transport))
        self._places.arrive(self._place)

    def _begin(self, transport: asyncio.Transport) -> None:
        if transport.is_closing():
            return
        transport.resume_reading()
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
            self._place.moved()  # TLS is agreed on: it has its time to ask from now
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
        if self.place is not None and self.place.is_waited_for:
            # Whoever always asks the next would never be without an answer under way.
            self.transport.close()
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
