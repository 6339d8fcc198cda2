"""Targets: large objects as they arrive, frame by frame, in one transfer or in several.

An input is a script: messages, each behind its length (two bytes), in the order
in which they come; a length of nought ends a transfer, and the next one begins.
Frames are of 64 bytes here and not of 1 MiB, or no input could hold two.
"""

from __future__ import annotations

import peers.link.tls13  # noqa: F401  before anything imports grpc

# isort: split
import asyncio
import hashlib
import shutil
import struct
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from functools import cache
from pathlib import Path
from random import Random
from typing import Any, TypeVar

from google.protobuf.message import DecodeError

from peers.link.contacts import Contacts
from peers.link.servicer import Admission, Caller, Refusal, Servicer
from peers.wire import messages
from peers.wire.errors import RemoteProtocolError
from peers.wire.frames import PartialFile, ReceivedObject
from peers.wire.messages import PROTOCOL_VERSION, decode
from proto import federation_pb2 as pb
from tests.fuzz.mutators import EDGES, mutate_bytes, mutate_message
from tests.fuzz.world import FEDERATION, world
from tests.support.loopback import KeepsAll

FRAME = 64
_LENGTH = struct.Struct(">H")
_MOST_MESSAGES = 64
_OBJECT = bytes(range(256))[: 3 * FRAME + 20]
_UPDATE = pb.BlobName(kind=pb.ENCRYPTED_UPDATE, round=1)
_CONTEXT = pb.BlobName(kind=pb.PUBLIC_CONTEXT, round=1)

M = TypeVar("M", pb.PushFrame, pb.Frame)
T = TypeVar("T")


def _in_small_frames(work: Coroutine[Any, Any, T]) -> T:
    usual, messages.FRAME_BYTES = messages.FRAME_BYTES, FRAME  # type: ignore[misc]
    try:
        return _loop().run_until_complete(work)
    finally:
        messages.FRAME_BYTES = usual  # type: ignore[misc]


@cache
def _loop() -> asyncio.AbstractEventLoop:
    return asyncio.new_event_loop()


def _script(data: bytes) -> list[list[bytes]]:
    """The messages of each transfer."""
    transfers: list[list[bytes]] = [[]]
    position = 0
    for _ in range(_MOST_MESSAGES):
        if position + _LENGTH.size > len(data):
            break
        (length,) = _LENGTH.unpack_from(data, position)
        position += _LENGTH.size
        if length:
            transfers[-1].append(data[position : position + length])
        else:
            transfers.append([])
        position += length
    return transfers


def _written(transfers: Sequence[Sequence[bytes]]) -> bytes:
    nothing = _LENGTH.pack(0)
    return nothing.join(
        b"".join(_LENGTH.pack(len(raw)) + raw for raw in transfer) for transfer in transfers
    )


async def _coming(transfer: Sequence[bytes]) -> AsyncIterator[bytes]:
    for raw in transfer:
        yield raw


# ---- pushes to us -------------------------------------------------------------------


def judge_push(data: bytes) -> bool:
    """Accepted: an object of the declared length, its file that of its digest; no litter else."""
    spool = world().folder("spool")
    try:
        taken = _in_small_frames(_pushes(_script(data), spool))
        for total, received in taken:
            content = received.data if received.path is None else received.path.read_bytes()
            assert content is not None
            assert len(content) == received.size == total
            assert hashlib.sha256(content).digest() == received.digest
        # What may wait for the rest of an object is bounded (peers/link/partials.py).
        assert len(list(spool.glob("*.incoming"))) <= 2
    finally:
        shutil.rmtree(spool)
    return bool(taken)


async def _pushes(transfers: list[list[bytes]], spool: Path) -> list[tuple[int, ReceivedObject]]:
    here, inbox, caller = world(), KeepsAll(), _beta()
    membership = Admission(here.identities["alpha"], here.trust, here.manifests[1])
    servicer = Servicer(membership, spool, {FEDERATION: inbox}, Contacts())
    await servicer.hello(caller, _coming([_greeting()]))
    taken = []
    for transfer in transfers:
        wanted: list[int] = []

        async def go_ahead(offset: int, wanted: list[int] = wanted) -> None:
            wanted.append(offset)

        before = len(inbox.blobs)
        try:
            await servicer.push(caller, _coming(transfer), go_ahead)
        except (RemoteProtocolError, Refusal):
            continue
        assert len(wanted) == 1 and len(inbox.blobs) == before + 1
        first = decode(pb.PushFrame, transfer[0])
        taken.append((first.total_bytes, inbox.blobs[-1][2]))
    return taken


@cache
def _beta() -> Caller:
    return Caller(world().identities["beta"].certificate_der, "192.0.2.1:1")


@cache
def _greeting() -> bytes:
    return pb.HelloRequest(
        protocol_version=PROTOCOL_VERSION, federation_id=FEDERATION, sender="beta"
    ).SerializeToString()


def _pushed(content: bytes, name: pb.BlobName) -> list[pb.PushFrame]:
    pushes = [pb.PushFrame(frame=frame) for frame in _framed(content)]
    pushes[0].federation_id, pushes[0].sender = FEDERATION, "beta"
    pushes[0].name.CopyFrom(name)
    pushes[0].total_bytes = len(content)
    return pushes


def _framed(content: bytes) -> list[pb.Frame]:
    ends = [*range(FRAME, len(content), FRAME), len(content)]
    return [
        pb.Frame(
            offset=start,
            data=content[start:end],
            running_sha256=hashlib.sha256(content[:end]).digest(),
            last=end == len(content),
        )
        for start, end in zip([0, *ends], ends, strict=False)
    ]


def push_seeds() -> Iterator[bytes]:
    update = [item.SerializeToString() for item in _pushed(_OBJECT, _UPDATE)]
    context = [item.SerializeToString() for item in _pushed(_OBJECT[:100], _CONTEXT)]
    yield _written([update])
    yield _written([context])
    yield _written([update[:2], [update[0], *update[2:]]])  # the line broke after two frames
    yield _written([update[:1], [update[0], *update[1:]], context])
    yield _written([update[:3], [update[0], update[1]]])  # goes on from the wrong place
    yield _written([[item.SerializeToString() for item in _pushed(b"", _UPDATE)]])


def mutate_push(data: bytes, chance: Random) -> bytes:
    return _mutate_script(data, chance, pb.PushFrame)


# ---- pulls by us ----------------------------------------------------------------------


def judge_pull(data: bytes) -> bool:
    """Accepted: the file is that of the digest; refused: nothing appears under its name."""
    path = world().folder("arriving") / "object"
    try:
        received = _in_small_frames(_pulls(_script(data), path))
        assert (received is not None) == path.exists()
        if received is not None:
            assert hashlib.sha256(path.read_bytes()).digest() == received.digest
    finally:
        shutil.rmtree(path.parent)
    return received is not None


async def _pulls(transfers: list[list[bytes]], path: Path) -> ReceivedObject | None:
    partial = PartialFile(path)
    for transfer in transfers:
        try:
            return await partial.receive(_decoded(transfer), limit=1000)
        except RemoteProtocolError:
            continue
    return None


async def _decoded(transfer: Sequence[bytes]) -> AsyncIterator[pb.Frame]:
    for raw in transfer:
        yield decode(pb.Frame, raw)


def pull_seeds() -> Iterator[bytes]:
    whole = [item.SerializeToString() for item in _framed(_OBJECT)]
    yield _written([whole])
    yield _written([whole[:2], whole[2:]])
    yield _written([whole[:1], whole[1:2], whole[2:]])
    yield _written([whole[:2], whole])
    yield _written([[item.SerializeToString() for item in _framed(b"")]])


def mutate_pull(data: bytes, chance: Random) -> bytes:
    return _mutate_script(data, chance, pb.Frame)


# ---- mutation of both -------------------------------------------------------------------


def _mutate_script(data: bytes, chance: Random, kind: type[M]) -> bytes:
    """A message changed, a line cut, transfers put in another order; often digested anew."""
    transfers = _script(data)
    transfer = chance.choice(transfers)
    at = chance.randrange(len(transfer) + 1)
    match chance.randrange(6):
        case 0 if transfer:
            index = transfers.index(transfer)
            transfers[index : index + 1] = [transfer[:at], transfer[at:]]
        case 1:
            transfers.append(list(transfer))
        case 2 if transfer:
            transfer.insert(at, chance.choice(transfer))
        case 3 if len(transfer) > 1:
            del transfer[at - 1]
        case _ if transfer:
            transfer[at - 1] = _changed(transfer[at - 1], chance, kind)
    if chance.random() < 0.6:
        transfers = [_digested_anew(each, kind) for each in transfers]
    return _written(transfers)


def _changed(raw: bytes, chance: Random, kind: type[M]) -> bytes:
    try:
        message = kind.FromString(raw)
    except DecodeError:
        return mutate_bytes(raw, chance)
    frame = message.frame if isinstance(message, pb.PushFrame) else message
    match chance.randrange(4):
        case 0:
            frame.data = bytes(chance.choice((0, 1, FRAME - 1, FRAME, FRAME + 1)))
        case 1:
            frame.offset = chance.choice((*EDGES, FRAME, 2 * FRAME, 3 * FRAME))
        case _:
            mutate_message(message, chance)
    return message.SerializeToString()


def _digested_anew(transfer: list[bytes], kind: type[M]) -> list[bytes]:
    digest = hashlib.sha256()
    written = []
    for raw in transfer:
        try:
            message = kind.FromString(raw)
        except DecodeError:
            return transfer
        frame = message.frame if isinstance(message, pb.PushFrame) else message
        digest.update(frame.data)
        if frame.offset + len(frame.data) <= 4 * FRAME:
            frame.running_sha256 = digest.digest()
        written.append(message.SerializeToString())
    return written
