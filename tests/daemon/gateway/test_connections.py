"""Connections that say little, or too many, at uvicorn with our clock and at uvicorn without."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from daemon.gateway import connections
from daemon.gateway.connections import HEADER_BYTES, Arrivals, Server
from tests.daemon.gateway.test_starts import self_signed as certificate

pytestmark = pytest.mark.slow

WHOLE = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"


async def _hello(scope: Any, receive: Any, send: Any) -> None:
    if scope["path"] == "/wait":
        while (await receive())["type"] != "http.disconnect":
            pass
        return
    length = int(scope["path"].strip("/") or 2)
    headers = [(b"content-length", str(length).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": b"x" * length})


@asynccontextmanager
async def serving(
    protocol: type[H11Protocol] | None = None,
    tls: ssl.SSLContext | None = None,
    application: Any = None,
) -> AsyncIterator[int]:
    """The port of a server whose connections are of that kind; None: ours.

    ``application``: what it serves; None: one that says hello.
    """
    config = uvicorn.Config(
        application or _hello,
        http=protocol or Arrivals(tls),  # type: ignore[arg-type]
        h11_max_incomplete_event_size=HEADER_BYTES,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
    )
    server = Server(config)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        task = asyncio.create_task(server.serve(sockets=[listening]))
        try:
            yield listening.getsockname()[1]
        finally:
            server.should_exit = True
            server.force_exit = True
            await task


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "HEADERS_S", 0.4)


async def trickle(port: int, first: bytes = b"") -> bool:
    """A header, byte by byte, for ever; whether the other side hung up within 3 s."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(first or b"GET / HTTP/1.1\r\nX-Slow: ")

    async def drip() -> None:
        with suppress(OSError):
            while True:
                writer.write(b"x")
                await writer.drain()
                await asyncio.sleep(0.05)

    dripping = asyncio.create_task(drip())
    try:
        async with asyncio.timeout(3):
            with suppress(OSError):
                while await reader.read(4096):
                    pass
    except TimeoutError:
        return False
    else:
        return True
    finally:
        dripping.cancel()
        writer.close()


@pytest.fixture(scope="module")
def self_signed(tmp_path_factory: pytest.TempPathFactory) -> ssl.SSLContext:
    """A server's, with a certificate of its own."""
    folder = tmp_path_factory.mktemp("tls")
    certificate(folder)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "gateway.crt", folder / "gateway.key")
    return context


async def answered(port: int, *, tls: bool = False) -> bytes:
    believing = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    believing.check_hostname, believing.verify_mode = False, ssl.CERT_NONE
    reader, writer = await asyncio.open_connection(
        "127.0.0.1", port, ssl=believing if tls else None
    )
    writer.write(WHOLE)
    try:
        return await asyncio.wait_for(reader.readuntil(b"xx"), 60)
    finally:
        writer.close()


async def test_who_never_ends_a_header_is_hung_up_on() -> None:
    async with serving() as port:
        assert await trickle(port)


async def test_without_the_clock_such_a_connection_stays() -> None:
    async with serving(H11Protocol) as port:
        assert not await trickle(port)


async def test_nor_may_a_second_request_trickle() -> None:
    async with serving() as port:
        assert await trickle(port, WHOLE + b"GET / HTTP/1.1\r\nX-Slow: ")


async def test_who_says_nothing_is_hung_up_on() -> None:
    async with serving() as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        with suppress(OSError):
            assert await asyncio.wait_for(reader.read(), 10) == b""
        writer.close()


async def test_an_honest_one_is_answered_beside_slow_ones() -> None:
    async with serving() as port, asyncio.TaskGroup() as group:
        for _ in range(20):
            group.create_task(trickle(port))
        group.create_task(answered(port))


async def test_an_answer_that_is_read_slowly_is_read_to_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And one of which nothing is read is given up."""
    monkeypatch.setattr(connections, "HEADERS_S", 1.5)
    length = 8 << 20
    asked = f"GET /{length} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode()
    async with serving() as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 16)
        writer.write(asked)
        read = 0
        while piece := await reader.read(1 << 19):
            read += len(piece)
            await asyncio.sleep(0.06)
        assert read > length
        writer.close()
        with socket.create_connection(("127.0.0.1", port)) as deaf:
            deaf.sendall(asked)
            await asyncio.sleep(5)  # two looks, on a busy machine
            deaf.setblocking(False)
            read = 0
            with suppress(OSError):  # aborted: reset, or what the kernel had
                while piece := deaf.recv(1 << 20):
                    read += len(piece)
            assert read < length


async def test_no_exchange_lasts_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """A body that never comes, at somebody who waits for it without a clock of their own."""
    monkeypatch.setattr(connections, "EXCHANGE_S", 0.4)
    async with serving() as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST /wait HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n")
        with suppress(OSError):
            assert await asyncio.wait_for(reader.read(), 10) == b""
        writer.close()


# ---- too many ----------------------------------------------------------------------


async def hung_up_on(reader: asyncio.StreamReader, within_s: float) -> bool:
    """Whether the other side ends within so many seconds."""
    try:
        async with asyncio.timeout(within_s):
            with suppress(OSError):
                while await reader.read(4096):
                    pass
    except TimeoutError:
        return False
    return True


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "_MOST", 4)
    monkeypatch.setattr(connections, "HEADERS_S", 60)


@pytest.mark.usefixtures("few")
async def test_who_waits_longest_goes_for_one_more(self_signed: ssl.SSLContext) -> None:
    """Whoever keeps all connections loses the oldest, and keeps nobody out. TLS counts, too."""
    for tls in (None, self_signed):
        async with serving(tls=tls) as port:
            opened = [await asyncio.open_connection("127.0.0.1", port) for _ in range(4)]
            for _ in range(3):
                assert await answered(port, tls=tls is not None)
            assert await hung_up_on(opened[0][0], 10)
            assert not await hung_up_on(opened[-1][0], 0.2)
            for _, writer in opened:
                writer.close()


@pytest.mark.usefixtures("few")
async def test_who_is_answered_stays_and_a_body_goes_behind_headers() -> None:
    async with serving() as port:
        waiting = await asyncio.open_connection("127.0.0.1", port)
        waiting[1].write(b"GET /wait HTTP/1.1\r\nHost: x\r\n\r\n")
        body = await asyncio.open_connection("127.0.0.1", port)
        body[1].write(b"POST /wait HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\nx")
        assert await answered(port)  # what was sent before is read by now
        idle = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
        assert await answered(port)
        assert await hung_up_on(idle[0][0], 10)
        more = [await asyncio.open_connection("127.0.0.1", port) for _ in range(4)]
        assert await hung_up_on(idle[1][0], 10)
        assert not await hung_up_on(body[0], 0.2), "there were others with less"
        assert not await hung_up_on(waiting[0], 0.2)
        for _, writer in (waiting, body, *idle, *more):
            writer.close()


@pytest.mark.usefixtures("few")
async def test_where_all_are_answered_the_newest_waits_and_not_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connections, "_ROOM_S", 3.0)
    async with serving() as port:
        asked = [await asyncio.open_connection("127.0.0.1", port) for _ in range(4)]
        for _, writer in asked:
            writer.write(b"GET /wait HTTP/1.1\r\nHost: x\r\n\r\n")
        await asyncio.sleep(0.5)
        reader, one_more = await asyncio.open_connection("127.0.0.1", port)
        assert not await hung_up_on(reader, 0.3)
        assert await hung_up_on(reader, 30)
        next_one = asyncio.create_task(answered(port))
        asked.pop()[1].close()
        assert b" 200 " in await next_one, "a place is free again"
        for reader, _ in asked:
            assert not await hung_up_on(reader, 0.1)
        for _, writer in (*asked, ("", one_more)):
            writer.close()


@pytest.mark.usefixtures("few")
async def test_who_always_asks_the_next_gives_up_their_place_to_who_waits() -> None:
    async def endless(port: int) -> None:
        while True:
            with suppress(OSError):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                try:
                    writer.write(WHOLE * 20)
                    while await reader.read(4096):
                        writer.write(WHOLE)
                finally:
                    writer.close()

    async with serving() as port:
        many = [asyncio.create_task(endless(port)) for _ in range(12)]
        await asyncio.sleep(0.5)
        for _ in range(5):
            assert b" 200 " in await answered(port)
        for one in many:
            one.cancel()
        await asyncio.wait(many)


class Caller(asyncio.Transport):
    """A connection that somebody else opened: only its address, and whether it is over."""

    def __init__(self, address: str) -> None:
        super().__init__({"peername": (address, 1234)})
        self.over = self.begun = False

    def abort(self) -> None:
        self.over = True

    def begin(self) -> None:
        self.begun = True


def calls(places: connections.Places, address: str) -> Caller:
    caller = Caller(address)
    places.arrive(connections.Place(places, caller, caller.begin))
    return caller


@pytest.mark.usefixtures("few")
async def test_who_has_most_loses_first_by_address() -> None:
    for honest, own in (("10.0.0.1", "10.0.0.{}"), ("2001:db8:1::1", "2001:db8:2::{}")):
        places = connections.Places()
        first = calls(places, honest)
        # Of IPv4 all from one; of IPv6 each from another of the same network.
        others = [calls(places, own.format(2 if "." in own else n + 1)) for n in range(20)]
        assert (first.begun, first.over) == (True, False)
        assert [one.begun for one in others] == [True] * 3 + [False] * 17
        second = calls(places, honest)
        assert second.begun, "it waits behind none of those that wait"
        assert [one.over for one in others[:3]].count(True) == 1
        third = calls(places, honest)
        assert not third.begun, "they have as many by now, and have only just come"


@pytest.mark.usefixtures("few")
async def test_who_has_only_just_come_is_not_hung_up_on_for_the_next() -> None:
    places = connections.Places()
    first = [calls(places, "10.0.0.1") for _ in range(4)]
    later = [calls(places, "10.0.0.1") for _ in range(4)]
    for _ in range(connections._GRACE - 1):
        places._look()
    assert not any(one.over for one in first)
    assert not any(one.begun for one in later)
    places._look()
    assert all(one.over for one in first)
    assert all(one.begun and not one.over for one in later)


@pytest.mark.usefixtures("few")
async def test_the_room_is_bounded_and_who_fills_it_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "_ROOM", 10)
    places = connections.Places()
    crowd = [calls(places, "10.0.0.1") for _ in range(4)]
    honest = calls(places, "10.0.0.2")
    assert honest.begun, "one of the others went"
    waiting = [calls(places, "10.0.0.1") for _ in range(30)]
    assert [one.over for one in waiting] == [False] * 10 + [True] * 20
    assert not honest.over
    assert [one.over for one in crowd].count(True) == 1


@pytest.mark.parametrize("sent", [b"", b"\x16\x03\x01", b"GET / HTTP/1.1\r\n\r\n", b"\x00" * 999])
async def test_half_a_handshake_is_hung_up_on(sent: bytes, self_signed: ssl.SSLContext) -> None:
    async with serving(tls=self_signed) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(sent)
        assert await hung_up_on(reader, 10)
        writer.close()
        assert await answered(port, tls=True)


THOUSAND = 1000


async def nuisance(port: int, number: int) -> None:
    """One of those who keep connections for nothing, and come back when they are hung up on."""
    said = (
        b"",
        b"GET / HTTP/1.1\r\nX-Slow: ",
        b"POST /wait HTTP/1.1\r\nHost: x\r\nContent-Length: 999\r\n\r\nx",
        f"GET /{1 << 22} HTTP/1.1\r\nHost: x\r\n\r\n".encode(),
        b"\x16\x03\x01\x02\x00\x01",
        b"\xff" * 4000,
    )[number % 6]
    while True:
        with suppress(OSError):
            # Nothing is read of what comes back beyond what the kernel takes.
            reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1)
            writer.write(said)
            try:
                while not reader.at_eof() and not writer.is_closing():
                    await asyncio.sleep(0.5)
                    writer.write(b"x" if number % 6 in (1, 2) else b"")
            finally:
                writer.close()
        await asyncio.sleep(3)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("secured", [False, True], ids=["clear", "tls"])
async def test_a_thousand_at_once_keep_nobody_out(
    secured: bool, self_signed: ssl.SSLContext
) -> None:
    """Slow headers, slow bodies, unread answers, half handshakes, garbage; all of one address."""
    async with serving(tls=self_signed if secured else None) as port:
        many = [asyncio.create_task(nuisance(port, n)) for n in range(THOUSAND)]
        try:
            await asyncio.sleep(2)
            for _ in range(10):
                assert b" 200 " in await answered(port, tls=secured)
        finally:
            for one in many:
                one.cancel()
            await asyncio.wait(many)


@pytest.mark.parametrize(
    "sent",
    [
        b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\nContent-Length: 4\r\n\r\nabcd",
        b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nHost: y\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nX-Split : y\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nX-Nul: \x00\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    ],
)
async def test_what_is_no_request_is_refused(sent: bytes) -> None:
    async with serving() as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(sent)
        with suppress(ConnectionError):
            told = await asyncio.wait_for(reader.read(), 10)
            assert told.startswith(b"HTTP/1.1 400 ")
        writer.close()
