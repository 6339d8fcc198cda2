"""Bad lines: a loopback port that leads to a site, and that a test can cut, stall or starve.

Example::

    async with Line.to(federation.ports["beta"]) as line:
        seen_by_alpha = relocated(federation, beta=line.port)
        ...
        line.cut()
"""

from __future__ import annotations

import peers.tls_floor  # noqa: F401  before anything imports grpc

# isort: split
import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace

from peers.manifest import FederationManifest
from tests.authority import Federation

_PIECE = 16 * 1024


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
    _writers: set[asyncio.StreamWriter] = field(default_factory=set)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    @classmethod
    @asynccontextmanager
    async def to(cls, target: int) -> AsyncIterator[Line]:
        line = cls(target)
        line.open_to_traffic.set()
        listening = socket.create_server(("127.0.0.1", 0))
        # Little is under way inside the kernel: what has not arrived, the sender still holds.
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 18)
        server = await asyncio.start_server(line._accept, sock=listening)
        line.port = server.sockets[0].getsockname()[1]
        try:
            yield line
        finally:
            line.open_to_traffic.set()
            server.close()
            line.cut()
            await asyncio.gather(*line._tasks)

    def cut(self) -> None:
        """Reset every connection; new ones are let through."""
        for writer in self._writers:
            writer.transport.abort()

    def stall(self) -> None:
        """Take nothing and bring nothing, as a line whose other end has vanished."""
        self.open_to_traffic.clear()

    async def _accept(self, here: asyncio.StreamReader, back: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            there, forth = await asyncio.open_connection("127.0.0.1", self.target)
        except ConnectionError:  # nobody listens there just now
            back.transport.abort()
            return
        self._writers |= {back, forth}
        for reader, writer, counted in ((here, forth, True), (there, back, False)):
            task = asyncio.create_task(self._carry(reader, writer, counted))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _carry(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, counted: bool
    ) -> None:
        with suppress(ConnectionError):
            while piece := await reader.read(_PIECE):
                await self.open_to_traffic.wait()
                await asyncio.sleep(self.delay_s)
                if self.a_byte_every_s and not counted:
                    await self._drip(piece, writer)
                    continue
                writer.write(piece)
                await writer.drain()
                if counted:
                    self.forwarded += len(piece)
                    if self.cut_after is not None and self.forwarded >= self.cut_after:
                        self.cut_after = None
                        self.cut()
        writer.transport.abort()
        self._writers.discard(writer)

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
