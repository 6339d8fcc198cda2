"""Connections that say little, or too many, at uvicorn with our clock and at uvicorn without."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from daemon.gateway import connections
from daemon.gateway.connections import HEADER_BYTES, TimedProtocol

pytestmark = pytest.mark.slow

WHOLE = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"


async def _hello(scope: Any, receive: Any, send: Any) -> None:
    if scope["path"] == "/wait":
        await receive()
        return
    length = int(scope["path"].strip("/") or 2)
    headers = [(b"content-length", str(length).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": b"x" * length})


@asynccontextmanager
async def serving(protocol: type[H11Protocol] = TimedProtocol) -> AsyncIterator[int]:
    """The port of a server whose connections are of that kind."""
    config = uvicorn.Config(
        _hello,
        http=protocol,
        h11_max_incomplete_event_size=HEADER_BYTES,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
    )
    server = uvicorn.Server(config)
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


async def answered(port: int) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(WHOLE)
    try:
        return await asyncio.wait_for(reader.readuntil(b"xx"), 10)
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


async def test_there_are_only_so_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "_MOST", 3)
    monkeypatch.setattr(connections, "HEADERS_S", 60)
    async with serving() as port:
        open_ones = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
        await answered_or_refused(port, refused=True)
        open_ones[0][1].close()
        await open_ones[0][1].wait_closed()
        async with asyncio.timeout(10):
            while not await answered_or_refused(port):
                await asyncio.sleep(0.05)
        for _, writer in open_ones:
            writer.close()


async def answered_or_refused(port: int, *, refused: bool = False) -> bool:
    try:
        await answered(port)
    except (OSError, asyncio.IncompleteReadError):
        return False
    assert not refused
    return True


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
