"""Who knocks at a socket of the daemon: the kernel says so (SO_PEERCRED, unix(7)).

grpc tells a service nothing about the other end of a Unix socket. So the socket that
people connect to is ours; each connection is asked for its user and then carried,
byte by byte, to a server that serves that user alone. These servers' own sockets lie
in a folder that only this daemon can enter.
"""

from __future__ import annotations

import asyncio
import math
import socket
import struct
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

import structlog

from daemon.process.temporary import TemporaryFolder

log = structlog.get_logger()

_UCRED: Final = struct.Struct("3i")  # pid, uid, gid
_PIECE: Final = 256 * 1024
_OPEN_AT_ONCE: Final = 100  # connections of one user; each takes descriptors of the daemon
_SAID_AGAIN_AFTER_S: Final = 60.0  # whoever may knock may not fill the log

Open = Callable[[int, Path], Awaitable[None]]
"""Serve the user with this uid at that Unix socket."""


class PeerCredentials:
    """Listens at one Unix socket and leads every user to a server of their own."""

    def __init__(self, open_server: Open) -> None:
        self._open_server = open_server
        self._folder: TemporaryFolder | None = None
        self._doors: dict[int, asyncio.Task[Path]] = {}
        self._server: asyncio.Server | None = None
        self._visits: dict[asyncio.Task[None], int] = {}  # and the user
        self._crowding: dict[int, float] = {}  # users, and when that was last said

    async def start(self, path: Path) -> None:
        """Listen at ``path``. Raises OSError."""
        self._folder = TemporaryFolder()
        self._server = await asyncio.start_unix_server(self._visit, path)

    async def stop(self) -> None:
        """Let nobody in any more, and end what is under way."""
        if self._server is not None:
            self._server.close()
        for visit in list(self._visits):
            visit.cancel()
        if self._visits:
            await asyncio.wait(self._visits)
        if self._folder is not None:
            self._folder.cleanup()

    async def _visit(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        inner: asyncio.StreamWriter | None = None
        try:
            uid = _uid_of(writer.get_extra_info("socket"))
            if task is not None:  # always: asyncio runs this as a task
                self._visits[task] = uid
                task.add_done_callback(self._visits.pop)
            answers, inner = await self._led(uid)
            async with asyncio.TaskGroup() as group:
                group.create_task(_carry(reader, inner))
                group.create_task(_carry(answers, writer))
        except (OSError, asyncio.CancelledError) as error:
            log.debug("a visit at a socket ended", cause=str(error))
        finally:
            writer.transport.abort()
            if inner is not None:
                inner.transport.abort()

    async def _led(self, uid: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A connection to this user's server."""
        door = await self._door(uid)
        try:
            return await asyncio.open_unix_connection(door)
        except FileNotFoundError:
            # Somebody has cleared the temporary folder: without this nobody would be let in
            # until the daemon is started again.
            if self._folder is not None and door.parent == self._folder.path:
                log.warning("a socket's own folder is gone: made anew", gone=str(door))
                self._folder.cleanup()
                self._folder, self._doors = TemporaryFolder(), {}
            return await asyncio.open_unix_connection(await self._door(uid))

    async def _door(self, uid: int) -> Path:
        """The socket of this user's server, which is started when the user first comes."""
        if self._folder is None:
            raise OSError("not listening")
        if [*self._visits.values()].count(uid) > _OPEN_AT_ONCE:
            self._say_crowded(uid)
            raise OSError(f"uid {uid} has {_OPEN_AT_ONCE} other connections")
        if uid not in self._doors:
            path = self._folder.path / str(uid)
            self._doors[uid] = asyncio.create_task(self._opened(uid, path))
        return await asyncio.shield(self._doors[uid])

    def _say_crowded(self, uid: int) -> None:
        now = asyncio.get_running_loop().time()
        if now >= self._crowding.get(uid, -math.inf) + _SAID_AGAIN_AFTER_S:
            self._crowding[uid] = now
            log.warning(
                "a user of a socket has as many connections open as one may have; more are refused",
                uid=uid,
                most=_OPEN_AT_ONCE,
            )

    async def _opened(self, uid: int, path: Path) -> Path:
        try:
            await self._open_server(uid, path)
        except Exception as error:
            # Tried again at the next visit: descriptors or disk may have been short.
            del self._doors[uid]
            log.warning("a user of a socket cannot be served now", uid=uid, cause=str(error))
            raise OSError(str(error)) from error
        return path


def _uid_of(connection: socket.socket) -> int:
    """The user of the process that connected, at the time when it did."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    return int(_UCRED.unpack(credentials)[1])


async def _carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Everything from one end to the other; the end of one is the end of the other."""
    with suppress(ConnectionError):
        while piece := await reader.read(_PIECE):
            writer.write(piece)
            await writer.drain()
    with suppress(OSError):
        writer.write_eof()
