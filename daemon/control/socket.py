"""The daemon's Unix sockets: mode 0660, a group, and a server for each user who comes.

Of the control socket these are the whole access control: whoever may write to it may
administer the site (daemon/control/context.py). That of questions (daemon/questions/) asks for
a token, too. Neither is ever on a network.
"""

from __future__ import annotations

import peers.link.tls13  # noqa: F401  before grpc, see there

# isort: split
import asyncio
import grp
import os
import shutil
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import grpc.aio
from google.protobuf.descriptor import ServiceDescriptor

from config import control_socket
from daemon.control.context import CONTROL, ServiceContext, WithinBounds
from daemon.control.peer_credentials import PeerCredentials
from daemon.control.service import ControlService
from proto import control_pb2_grpc as rpc

_KNOCKING_S = 5.0  # where as many wait as may, the next one would for ever


class SocketError(Exception):
    """A socket can't be served; the text says why and what to do."""


@dataclass(frozen=True)
class Offer:
    """What is answered at a socket. ``section``: of the settings, which names path and group.

    ``add``: puts the service for a user (``uid:N``) on a server; ``most_bytes``: of a request.
    """

    what: str
    section: str
    service: ServiceDescriptor
    add: Callable[[ServiceContext, str, grpc.aio.Server], None]
    most_bytes: int


def _add_control(around: ServiceContext, user: str, server: grpc.aio.Server) -> None:
    rpc.add_ControlServicer_to_server(ControlService(around, user), server)


ADMINISTRATION = Offer(
    "control socket", "control", CONTROL, _add_control, control_socket.MESSAGE_BYTES
)


class ServiceSocket:
    """A Unix socket, and a server for each user who comes."""

    def __init__(self, offer: Offer, path: Path, group: str | None) -> None:
        self._offer = offer
        self._path = path
        self._group = group
        self._around: ServiceContext | None = None
        self._credentials = PeerCredentials(self._serve)
        self._servers: list[grpc.aio.Server] = []

    async def check(self) -> None:
        """Whether it can be made, long before it is: nobody else serves there. SocketError."""
        with self._telling():
            await asyncio.to_thread(_clear, self._path)
            if self._group is not None:
                grp.getgrnam(self._group)

    async def start(self, around: ServiceContext) -> None:
        """Serve. Raises SocketError when the socket can't be made."""
        await self.check()
        self._around = around
        with self._telling():
            # The mask holds from the moment the file exists, so there is no instant at
            # which others may enter.
            old = os.umask(0o117)
            try:
                await self._credentials.start(self._path)
            finally:
                os.umask(old)
            if self._group is not None:
                shutil.chown(self._path, group=self._group)

    @contextmanager
    def _telling(self) -> Iterator[None]:
        try:
            yield
        except (OSError, LookupError) as error:
            raise SocketError(
                f"cannot serve the {self._offer.what} {self._path}: {error}; "
                f"check [{self._offer.section}] socket and group, and the rights of its folder"
            ) from error

    async def _serve(self, uid: int, path: Path) -> None:
        """A server for one user, behind what asks who calls. Raises OSError."""
        if self._around is None:
            raise OSError("not serving")
        offer = self._offer
        server = grpc.aio.server(
            interceptors=[WithinBounds(offer.service)],
            options=[
                ("grpc.max_receive_message_length", offer.most_bytes),
                ("grpc.max_send_message_length", control_socket.MESSAGE_BYTES),
                # Two signed tokens of 8 KiB; of more grpc says so, and nobody reads it.
                ("grpc.max_metadata_size", control_socket.METADATA_BYTES),
                ("grpc.absolute_max_metadata_size", control_socket.METADATA_BYTES),
            ],
        )
        offer.add(self._around, f"uid:{uid}", server)
        # No TLS on purpose: its folder lets nobody in but this daemon.
        try:
            server.add_insecure_port(f"unix:{path}")
        except RuntimeError as error:
            raise OSError(str(error)) from error
        await server.start()
        self._servers.append(server)

    async def stop(self) -> None:
        """End calls under way at once and remove the socket."""
        await asyncio.gather(*(server.stop(grace=0.2) for server in self._servers))
        self._servers = []
        if self._around is not None:
            await self._credentials.stop()
            self._around = None
            with suppress(FileNotFoundError):
                await asyncio.to_thread(self._path.unlink)


def _clear(path: Path) -> None:
    """Remove the socket of a daemon that is gone; refuse to take a living one's place."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.is_socket():
        if path.exists():
            raise OSError(f"{path} exists and is no socket")
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as knock:
        knock.settimeout(_KNOCKING_S)
        try:
            knock.connect(str(path))
        except ConnectionRefusedError:  # nobody has it open
            path.unlink()
            return
        except TimeoutError:
            pass
    raise OSError("another fedd has it open: stop it first")
