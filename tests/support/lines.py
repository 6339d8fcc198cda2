"""Bad lines: a loopback port that leads to a site, and that a test can cut, stall or starve.

Example::

    async with Line.to(federation.ports["beta"]) as line:
        seen_by_alpha = relocated(federation, beta=line.port)
        ...
        line.cut()
"""

from __future__ import annotations

import peers.link.tls13  # noqa: F401  before anything imports grpc

# isort: split
import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace

from peers.wire.manifest import FederationManifest
from tests.support.authority import Federation

# Before a cut: who was called reads some of the 6 MiB that its kernel may hold and would drop.
_IN_FLIGHT_S = 0.1
_PIECE = 16 * 1024
# Little is under way inside the kernel: what has not arrived, the sender still holds.
_KERNEL_BYTES = 256 * 1024


async def until(condition: Callable[[], bool], within: float = 10) -> None:
    """Wait for something that another task will bring about."""
    async with asyncio.timeout(within):
        while not condition():
            await asyncio.sleep(0.01)


def relocated(federation: Federation, version: int = 1, **ports: int) -> FederationManifest:
    """The manifest with other ports for some sites."""
    return replace(federation, ports=federation.ports | ports).manifest(version=version)


@dataclass
class Line:
    """Forwards TCP connections to ``target``; see the module."""

    target: int
    port: int = 0
    connections: int = 0
    forwarded: int = 0  # bytes from who called to who was called
    delay_s: float = 0.0  # for every piece, in each direction
    a_byte_every_s: float = 0.0  # how slowly answers come, if not at once
    cut_after: int | None = None  # cut everything once so many bytes were forwarded
    open_to_traffic: asyncio.Event = field(default_factory=asyncio.Event)
    _pairs: list[tuple[asyncio.StreamWriter, asyncio.StreamWriter]] = field(default_factory=list)
    _ended: set[asyncio.StreamWriter] = field(default_factory=set)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    @classmethod
    @asynccontextmanager
    async def to(cls, target: int) -> AsyncIterator[Line]:
        line = cls(target)
        line.open_to_traffic.set()
        listening = socket.create_server(("127.0.0.1", 0))
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _KERNEL_BYTES)
        server = await asyncio.start_server(line._accept, sock=listening)
        line.port = server.sockets[0].getsockname()[1]
        try:
            yield line
        finally:
            line.open_to_traffic.set()
            server.close()
            for back, forth in line._pairs:
                back.transport.abort()
                forth.transport.abort()
            await asyncio.gather(*line._tasks, return_exceptions=True)

    def cut(self) -> None:
        """End every connection; new ones are let through.

        Who called sees a reset; who was called gets what was forwarded, then the
        end, so that a test knows what must have arrived.
        """
        for back, forth in self._pairs:
            back.transport.abort()
            self._end(forth)

    def _end(self, forth: asyncio.StreamWriter) -> None:
        if forth not in self._ended:
            self._ended.add(forth)
            with suppress(OSError):
                forth.write_eof()

    def stall(self) -> None:
        """Take nothing and bring nothing, as a line whose other end has vanished."""
        self.open_to_traffic.clear()

    async def _accept(self, here: asyncio.StreamReader, back: asyncio.StreamWriter) -> None:
        self.connections += 1
        towards = socket.socket()
        towards.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _KERNEL_BYTES)
        towards.setblocking(False)
        try:
            await asyncio.get_running_loop().sock_connect(towards, ("127.0.0.1", self.target))
        except ConnectionError:  # nobody listens there just now
            towards.close()
            back.transport.abort()
            return
        there, forth = await asyncio.open_connection(sock=towards)
        self._pairs.append((back, forth))
        for carrying in (self._carry_forth(here, forth), self._carry_back(there, back)):
            task = asyncio.create_task(carrying)
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _carry_forth(self, here: asyncio.StreamReader, forth: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            while piece := await here.read(_PIECE):
                await self.open_to_traffic.wait()
                await asyncio.sleep(self.delay_s)
                if forth in self._ended:
                    break
                forth.write(piece)
                await forth.drain()
                self.forwarded += len(piece)
                if self.cut_after is not None and self.forwarded >= self.cut_after:
                    self.cut_after = None
                    await asyncio.sleep(_IN_FLIGHT_S)
                    self.cut()
        self._end(forth)

    async def _carry_back(self, there: asyncio.StreamReader, back: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            while piece := await there.read(_PIECE):
                await self.open_to_traffic.wait()
                await asyncio.sleep(self.delay_s)
                if back.is_closing():
                    continue  # read on, so that who was called can end in peace
                if self.a_byte_every_s:
                    await self._drip(piece, back)
                else:
                    back.write(piece)
                    await back.drain()
        back.transport.abort()

    async def _drip(self, piece: bytes, writer: asyncio.StreamWriter) -> None:
        for byte in piece:
            await asyncio.sleep(self.a_byte_every_s)
            writer.write(bytes([byte]))
            await writer.drain()


@asynccontextmanager
async def mute(tls: ssl.SSLContext | None = None) -> AsyncIterator[int]:
    """The port of someone who accepts connections and says nothing; with ``tls``: after TLS."""
    writers: list[asyncio.StreamWriter] = []

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        with suppress(ConnectionError):
            while await reader.read(_PIECE):
                pass

    server = await asyncio.start_server(accept, "127.0.0.1", 0, ssl=tls)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for writer in writers:
            writer.transport.abort()
        await asyncio.sleep(0)
