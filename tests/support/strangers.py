"""Those whom a site must withstand: callers and answerers with bytes of their own making.

Example::

    async with beta_calling(federation) as beta:
        with refused(grpc.StatusCode.INVALID_ARGUMENT, "truncated"):
            await beta.push(pushed(truncate(await framed(bytes(3 * MIB)))))
"""

from __future__ import annotations

import peers.link.tls13  # noqa: F401  before anything imports grpc

# isort: split
import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf.message import Message

from crypto.identity.site import Identity
from peers.wire.frames import frames
from peers.wire.messages import FRAME_BYTES, PROTOCOL_VERSION
from proto import federation_pb2 as pb
from tests.support.authority import Federation
from tests.support.loopback import UPDATE

SERVICE = "hanse.federation.v1.Federation"
ALPHA = "alpha.med.hanse.internal"


class Caller:
    """Someone who calls alpha with bytes of their own making."""

    def __init__(self, federation: Federation, identity: Identity | None, ca: bytes = b"") -> None:
        self.credentials = grpc.ssl_channel_credentials(
            root_certificates=ca or (federation.authority / "ca.crt").read_bytes(),
            private_key=identity.key_pem if identity else None,
            certificate_chain=identity.certificate_pem if identity else None,
        )
        self.options: list[tuple[str, Any]] = [
            ("grpc.ssl_target_name_override", ALPHA),
            ("grpc.use_local_subchannel_pool", 1),
        ]
        self.address = f"127.0.0.1:{federation.ports['alpha']}"
        self.channel: Any = grpc.aio.secure_channel(
            self.address, self.credentials, options=self.options
        )

    async def call(self, method: str, message: Message | bytes) -> bytes:
        raw = message if isinstance(message, bytes) else message.SerializeToString()
        answer = await self.channel.unary_unary(f"/{SERVICE}/{method}")(raw, timeout=5)
        assert isinstance(answer, bytes)
        return answer

    async def push(self, pieces: Iterable[Message | bytes]) -> None:
        """All pieces at once, whatever the site says meanwhile.

        By grpc's threads: its asyncio side may lose the reason of a refusal
        that meets a write (https://github.com/grpc/grpc/issues/36066).
        """
        raws = [p if isinstance(p, bytes) else p.SerializeToString() for p in pieces]
        with grpc.secure_channel(self.address, self.credentials, options=self.options) as channel:
            method: Any = channel.stream_unary(f"/{SERVICE}/Push", None, None)
            await asyncio.to_thread(method, iter(raws), timeout=5)

    async def hello(self, sender: str = "beta", version: int = PROTOCOL_VERSION) -> bytes:
        return await self.call("Hello", greeting(sender, version))


@asynccontextmanager
async def calling(
    federation: Federation, identity: Identity | None, ca: bytes = b""
) -> AsyncIterator[Caller]:
    caller = Caller(federation, identity, ca)
    try:
        yield caller
    finally:
        await caller.channel.close()


@asynccontextmanager
async def beta_calling(federation: Federation) -> AsyncIterator[Caller]:
    """Someone with beta's good certificate who has said Hello, and now misbehaves."""
    async with calling(federation, federation.identity("beta")) as caller:
        await caller.hello()
        yield caller


@contextmanager
def refused(code: grpc.StatusCode, *told: str) -> Iterator[None]:
    with pytest.raises(grpc.RpcError) as error:
        yield
    failure: Any = error.value  # of grpc.aio or of its threads
    details = failure.details() or ""
    assert (failure.code(), details) == (code, details)
    for words in told:
        assert words in details


def greeting(sender: str, version: int = PROTOCOL_VERSION) -> pb.HelloRequest:
    return pb.HelloRequest(
        protocol_version=version, software_version="9.9", federation_id="med", sender=sender
    )


def pushed(pieces: list[pb.Frame], name: pb.BlobName = UPDATE, total: int = -1) -> list[Message]:
    """Frames as a push of beta's; ``total``: what it declares (-1: the truth)."""
    length = sum(len(frame.data) for frame in pieces)
    pushes = [pb.PushFrame(frame=frame) for frame in pieces]
    first = pb.PushFrame(
        federation_id="med", sender="beta", name=name, total_bytes=length if total < 0 else total
    )
    pushes[0].MergeFrom(first)
    return list(pushes)


async def framed(content: bytes) -> list[pb.Frame]:
    return [frame async for frame in frames(content)]


# ---- spoilt objects --------------------------------------------------------

Spoil = Callable[[list[pb.Frame]], list[pb.Frame]]


def change_a_byte(pieces: list[pb.Frame]) -> list[pb.Frame]:
    pieces[1].data = bytes([pieces[1].data[0] ^ 1]) + pieces[1].data[1:]
    return pieces


def change_the_last_digest(pieces: list[pb.Frame]) -> list[pb.Frame]:
    pieces[-1].running_sha256 = bytes(32)
    return pieces


def truncate(pieces: list[pb.Frame]) -> list[pb.Frame]:
    return pieces[:-1]


def leave_a_gap(pieces: list[pb.Frame]) -> list[pb.Frame]:
    return [pieces[0], pieces[2]]


def repeat(pieces: list[pb.Frame]) -> list[pb.Frame]:
    return [pieces[0], pieces[1], pieces[1], pieces[2]]


def begin_in_the_middle(pieces: list[pb.Frame]) -> list[pb.Frame]:
    return pieces[1:]


def go_on_after_the_last(pieces: list[pb.Frame]) -> list[pb.Frame]:
    return [*pieces, pieces[-1]]


def oversize_a_frame(pieces: list[pb.Frame]) -> list[pb.Frame]:
    data = bytes(FRAME_BYTES + 1)
    digest = hashlib.sha256(data).digest()
    return [pb.Frame(data=data, running_sha256=digest, last=True)]


SPOILT: list[tuple[Spoil, str]] = [
    (change_a_byte, "the running SHA-256 of the frame at offset 1048576 does not match"),
    (change_the_last_digest, "the running SHA-256 of the frame at offset 2097152 does not"),
    (truncate, "ended after 2097152 bytes without its last frame: truncated"),
    (leave_a_gap, "a frame at offset 2097152; expected 1048576"),
    (repeat, "a frame at offset 1048576; expected 2097152"),
    (go_on_after_the_last, "a frame after the last one"),
    (oversize_a_frame, "data is 1048577 bytes; expected 0 .. 1048576 bytes"),
]


# ---- whoever answers -------------------------------------------------------


class Answers:
    """A program at beta's address that answers what it likes."""

    def __init__(self, pieces: list[pb.Frame], reply: pb.HelloReply | None = None) -> None:
        self.pieces = pieces
        self.reply = reply or pb.HelloReply(protocol_version=PROTOCOL_VERSION, sender="beta")

    async def hello(self, _raw: bytes, _context: Any) -> bytes:
        return self.reply.SerializeToString()

    async def deliver(self, _raw: bytes, _context: Any) -> bytes:
        return b""

    async def push(self, _incoming: AsyncIterator[bytes], _context: Any) -> bytes:
        return b""  # at once: not a byte was read

    async def pull(self, _raw: bytes, _context: Any) -> AsyncIterator[bytes]:
        for piece in self.pieces:
            yield piece.SerializeToString()

    async def negatives(self, _raw: bytes, _context: Any) -> bytes:
        return pb.NegativesReply(counts=[0]).SerializeToString()


@asynccontextmanager
async def answering(
    federation: Federation, answers: Answers, identity: Identity | None = None
) -> AsyncIterator[None]:
    """``answers`` at beta's address, with beta's certificate or another."""
    identity = identity or federation.identity("beta")
    server = grpc.aio.server()
    handlers = {
        "Hello": grpc.unary_unary_rpc_method_handler(answers.hello),
        "Deliver": grpc.unary_unary_rpc_method_handler(answers.deliver),
        "Push": grpc.stream_unary_rpc_method_handler(answers.push),
        "Pull": grpc.unary_stream_rpc_method_handler(answers.pull),
        "Negatives": grpc.unary_unary_rpc_method_handler(answers.negatives),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    credentials = grpc.ssl_server_credentials(
        [(identity.key_pem, identity.certificate_pem)], identity.authority_pem, True
    )
    server.add_secure_port(f"127.0.0.1:{federation.ports['beta']}", credentials)
    await server.start()
    try:
        yield
    finally:
        await server.stop(0)
