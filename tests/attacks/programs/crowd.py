"""Who comes to the door with bad intentions.

    python -m tests.attacks.programs.crowd flood|slow FOLDER PORTS CONNECTIONS SECONDS
    python -m tests.attacks.programs.crowd bomb FOLDER PORTS MIB

run as processes of their own, so that what they cost is not counted as what they
do to others. What was answered is printed as JSON: how often which status.
"""

from __future__ import annotations

import peers.link.tls13  # noqa: F401  before anything imports grpc

# isort: split
import asyncio
import json
import socket
import ssl
import struct
import sys
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from proto import federation_pb2 as pb
from tests.support.authority import Federation
from tests.support.loopback import hint
from tests.support.strangers import ALPHA, SERVICE, Caller

_AT_ONCE = 32  # streams of one connection


# ---- processes ---------------------------------------------------------------


async def attack(kind: str, federation: Federation, *arguments: int) -> dict[str, int]:
    """Run one of the attacks with beta's certificate; how often which answer came."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.attacks.programs.crowd", kind, str(federation.root)),
        *(json.dumps(federation.ports), *map(str, arguments)),
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        out, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    answers: dict[str, int] = json.loads(out)
    return answers


def slow_to_check() -> bytes:
    """Some 2 MB, each of whose 45,568 parts is looked at: the last one is out of bounds."""
    sites = [f"s{number:03}" for number in range(256)]
    items = [pb.MaskingItem(site=site, content=bytes(33)) for site in sites]
    opened = [pb.Opened(site=site, items=items) for site in sites[:178]]
    opened[-1].items[-1].content = b""
    openings = pb.Openings(round=1, opened=opened)
    message = pb.Envelope(federation_id="med", sender="beta", manifest_version=1, openings=openings)
    return message.SerializeToString()


async def flood(
    federation: Federation, connections: int, seconds: int, raw: bytes = b""
) -> Counter[str]:
    """Messages as fast as they are answered, on all streams of so many connections."""
    answers: Counter[str] = Counter()
    raw = raw or hint("beta").SerializeToString()
    callers = [Caller(federation, federation.identity("beta")) for _ in range(connections)]

    async def insist(caller: Caller) -> None:
        while time.monotonic() < end:
            try:
                await caller.channel.unary_unary(f"/{SERVICE}/Deliver")(raw, timeout=5)
                answers["OK"] += 1
            except grpc.aio.AioRpcError as error:
                answers[error.code().name] += 1

    await _let_in(callers[0])
    end = time.monotonic() + seconds
    await asyncio.gather(*(insist(caller) for caller in callers for _ in range(_AT_ONCE)))
    for caller in callers:
        await caller.channel.close()
    return answers


async def _let_in(caller: Caller) -> None:
    """A crowd of strangers may hold every place for as long as a handshake may take."""
    while True:
        try:
            await caller.hello()
        except grpc.aio.AioRpcError:
            await asyncio.sleep(0.2)
        else:
            return


def bomb(federation: Federation, mib: int) -> Counter[str]:
    """Zeros, which compress a thousandfold, as a message and as a frame, in either algorithm."""
    answers: Counter[str] = Counter()
    caller = Caller(federation, federation.identity("beta"))
    options = [*caller.options, ("grpc.max_send_message_length", -1)]
    for algorithm, method in (
        (grpc.Compression.Gzip, "Deliver"),
        (grpc.Compression.Deflate, "Push"),
    ):
        with grpc.secure_channel(caller.address, caller.credentials, options, algorithm) as channel:
            call: Any = channel.stream_unary(f"/{SERVICE}/{method}", None, None)
            try:
                call(iter([bytes(mib << 20)]), timeout=60)
                answers["OK"] += 1
            except grpc.RpcError as error:
                status: Any = error
                answers[f"{status.code().name}: {status.details()}"] += 1
    return answers


# ---- in the test's process ------------------------------------------------------


class SlowLoris:
    """Opens calls on a real HTTP/2 connection and sends a byte of their message now and then.

    By hand, for no library sends half a message. RFC 9113 has the frames, RFC 7541
    the headers (literals without indexing), grpc's PROTOCOL-HTTP2.md the rest.
    """

    def __init__(self, federation: Federation) -> None:
        self._federation = federation
        self.opened = 0
        self.ended: set[int] = set()

    async def run(self, streams: int, seconds: float, method: str = "Hello") -> None:
        """Open the calls, and keep at it for so long or until all of them are ended."""
        folder = self._federation.root / "beta"
        context = ssl.create_default_context(cafile=str(folder / "ca.crt"))
        context.load_cert_chain(folder / "site.crt", folder / "site.key")
        context.set_alpn_protocols(["h2"])
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", self._federation.ports["alpha"], ssl=context, server_hostname=ALPHA
        )
        listening = asyncio.create_task(self._listen(reader, writer))
        try:
            writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _frame(4, 0, 0, b""))
            calls = [2 * number + 1 for number in range(streams)]
            for call in calls:
                writer.write(_frame(1, 4, call, _headers(method)))
                writer.write(_frame(0, 0, call, struct.pack(">BI", 0, 1 << 20)))  # 1 MiB to come
                self.opened += 1
            end = time.monotonic() + seconds
            while time.monotonic() < end and len(self.ended) < streams:
                await asyncio.sleep(0.2)
                for call in set(calls) - self.ended:
                    writer.write(_frame(0, 0, call, b"\0"))
                await writer.drain()
        finally:
            listening.cancel()
            writer.transport.abort()

    async def _listen(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await reader.readexactly(9)
                kind, flags = head[3], head[4]
                stream = int.from_bytes(head[5:]) & 0x7FFFFFFF
                payload = await reader.readexactly(int.from_bytes(head[:3]))
                if kind == 4 and not flags & 1:
                    writer.write(_frame(4, 1, 0, b""))
                elif kind == 6 and not flags & 1:
                    writer.write(_frame(6, 1, 0, payload))
                elif kind == 3 or (kind == 1 and flags & 1):  # RST_STREAM, or the trailers
                    self.ended.add(stream)


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes((kind, flags)) + stream.to_bytes(4) + payload


def _headers(method: str) -> bytes:
    path = f"/{SERVICE}/{method}".encode()
    literals = [
        (b":authority", ALPHA.encode()),
        (b"content-type", b"application/grpc"),
        (b"te", b"trailers"),
    ]
    block = b"\x83\x87\x04" + bytes((len(path),)) + path  # POST, https, :path
    return block + b"".join(
        b"\0" + bytes((len(name),)) + name + bytes((len(value),)) + value
        for name, value in literals
    )


def connect(port: int, wanted: int) -> list[socket.socket]:
    """Strangers who connect and say nothing: as many as get through."""
    strangers: list[socket.socket] = []
    for _ in range(wanted):
        stranger = socket.socket()
        stranger.setblocking(False)
        with suppress(BlockingIOError):
            stranger.connect(("127.0.0.1", port))
        strangers.append(stranger)
    return strangers


def still_let_in(strangers: list[socket.socket]) -> int:
    """How many of them have a connection that the other end has not closed."""
    alive = 0
    for stranger in strangers:
        try:
            alive += stranger.recv(1) != b""
        except BlockingIOError:
            alive += 1
        except OSError:
            pass
    return alive


if __name__ == "__main__":
    kind, folder, ports, *numbers = sys.argv[1:]
    target = Federation(Path(folder), "med", json.loads(ports))
    if kind in ("flood", "slow"):
        message = slow_to_check() if kind == "slow" else b""
        print(json.dumps(asyncio.run(flood(target, int(numbers[0]), int(numbers[1]), message))))
    else:
        print(json.dumps(bomb(target, int(numbers[0]))))
