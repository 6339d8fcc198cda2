"""Large objects as frames: at most 1 MiB each, in order, with a running SHA-256.

The running digest in every frame covers all bytes of the object up to its end,
so damage is found at the frame where it happens, and a transfer that broke off
can go on from an offset: both sides first digest the bytes that are held
already.

Reading, writing and digesting happen in threads, one call a frame: the event
loop only passes frames on (`hashlib` and file IO release the interpreter lock).
Objects here belong to an attempt or can be fetched again, so nothing is
fsynced; who keeps an object for longer does that.
"""

from __future__ import annotations

import asyncio
import hashlib
import io
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from peers.wire.errors import LocalProtocolError, RemoteProtocolError
from peers.wire.messages import FRAME_BYTES, check_unshared
from proto import federation_pb2 as pb

Source = Path | bytes

_DIGEST_STEP = 64 * FRAME_BYTES  # one thread call when digesting what is held already


class DigestMismatch(RemoteProtocolError):
    """The bytes are not those that the sender digested."""


class OffsetBeyondEnd(RemoteProtocolError):
    """A peer asked for bytes after the end of an object."""


class Truncated(RemoteProtocolError):
    """The stream ended before the object did; what came of it was right."""


@dataclass(frozen=True)
class ReceivedObject:
    """A whole and verified object: in a file (``path``) or in memory (``data``).

    The file belongs to whoever is handed this: moving or deleting it is theirs.
    """

    size: int
    digest: bytes
    path: Path | None = None
    data: bytes | None = None


# ---- out -----------------------------------------------------------------------


async def size_of(source: Source) -> int:
    """Bytes of an object; raises OSError."""
    if isinstance(source, bytes):
        return len(source)
    return (await asyncio.to_thread(source.stat)).st_size


async def frames(source: Source, offset: int = 0) -> AsyncGenerator[pb.Frame, None]:
    """The frames of an object from byte ``offset`` on; close it to close the file.

    Raises OffsetBeyondEnd; LocalProtocolError when the file changes its length meanwhile.
    """
    with await _opened(source) as file:
        size = await size_of(source)
        if offset > size:
            raise OffsetBeyondEnd(f"bytes from {offset} of an object of {size}: start again from 0")
        digest = await _digest_of(file, offset)
        last = False
        while not last:
            frame = await asyncio.to_thread(_next_frame, file, offset, size, digest)
            offset += len(frame.data)
            last = frame.last
            yield frame


async def _opened(source: Source) -> BinaryIO:
    if isinstance(source, bytes):
        return io.BytesIO(source)
    return await asyncio.to_thread(source.open, "rb")


def _next_frame(file: BinaryIO, offset: int, size: int, digest: hashlib._Hash) -> pb.Frame:
    piece = file.read(FRAME_BYTES)
    end = offset + len(piece)
    if end > size or (end < size and len(piece) < FRAME_BYTES):
        raise LocalProtocolError(
            f"an object of {size} bytes changed its length while it was being sent"
        )
    digest.update(piece)
    return pb.Frame(offset=offset, data=piece, running_sha256=digest.digest(), last=end == size)


async def _digest_of(file: BinaryIO, length: int) -> hashlib._Hash:
    """The digest of the next ``length`` bytes, which it reads."""
    digest = hashlib.sha256()
    while length > 0:
        length -= await asyncio.to_thread(_digest_step, file, min(length, _DIGEST_STEP), digest)
    return digest


def _digest_step(file: BinaryIO, length: int, digest: hashlib._Hash) -> int:
    for start in range(0, length, FRAME_BYTES):
        piece = file.read(min(FRAME_BYTES, length - start))
        if not piece:
            raise LocalProtocolError("a file became shorter while it was being read")
        digest.update(piece)
    return length


# ---- in ------------------------------------------------------------------------


class _Intake:
    """Takes the frames of one object in order and refuses everything else."""

    def __init__(
        self, sink: BinaryIO, digest: hashlib._Hash, offset: int, limit: int, total: int | None
    ) -> None:
        self._sink = sink
        self._total = total
        self._limit = limit if total is None else min(limit, total)
        # These two move together, when a frame has been written.
        self.size, self.digest = offset, digest
        self.whole = False
        self.writing = False

    async def take_all(self, incoming: AsyncIterator[pb.Frame]) -> bytes:
        """The digest of the whole object; raises RemoteProtocolError."""
        async for frame in incoming:
            check_unshared(frame)
            self._admit(frame)
            await self._in_a_thread(frame)
            self.whole = frame.last
        if not self.whole:
            raise Truncated(
                f"the stream ended after {self.size} bytes without its last frame: truncated"
            )
        if self._total is not None and self.size != self._total:
            raise RemoteProtocolError(f"{self.size} bytes arrived of {self._total} declared")
        return self.digest.digest()

    def _admit(self, frame: pb.Frame) -> None:
        if self.whole:
            raise RemoteProtocolError("a frame after the last one")
        if frame.offset != self.size:
            raise RemoteProtocolError(
                f"a frame at offset {frame.offset}; expected {self.size}, without gap or repeat"
            )
        if self.size + len(frame.data) > self._limit:
            what = "declared" if self._limit == self._total else "allowed"
            raise RemoteProtocolError(f"the object is larger than the {self._limit} bytes {what}")

    async def _in_a_thread(self, frame: pb.Frame) -> None:
        """A thread cannot be cancelled: whoever cancels us must find it at rest."""
        self.writing = True
        writing = asyncio.ensure_future(asyncio.to_thread(self._write, frame))
        try:
            await asyncio.shield(writing)
        except asyncio.CancelledError:
            while not writing.done():  # whoever cancels may do so twice
                with suppress(asyncio.CancelledError):
                    await asyncio.wait([writing])
            raise

    def _write(self, frame: pb.Frame) -> None:
        digest = self.digest.copy()
        digest.update(frame.data)
        if digest.digest() != frame.running_sha256:
            raise DigestMismatch(
                f"the running SHA-256 of the frame at offset {frame.offset} does not match "
                "the bytes received so far"
            )
        # Only bytes whose digest was right are ever kept: a later transfer may go on from them.
        self._sink.write(frame.data)
        self.size, self.digest = self.size + len(frame.data), digest
        self.writing = False


async def receive_in_memory(
    incoming: AsyncIterator[pb.Frame], *, limit: int, total: int | None = None
) -> ReceivedObject:
    """A small object, at most ``limit`` bytes and exactly ``total`` if given.

    Raises RemoteProtocolError for anything but one whole, ordered, verified stream.
    """
    sink = io.BytesIO()
    intake = _Intake(sink, hashlib.sha256(), 0, limit, total)
    digest = await intake.take_all(incoming)
    return ReceivedObject(intake.size, digest, data=sink.getvalue())


class Beginning:
    """The first whole frames of an object of ``total`` bytes, in a file beside ``path``.

    A transfer may break off and another one go on, while this process lives: the
    digest of what is held stays in memory, so nothing is read again. The object
    appears at ``path`` only when it is whole and verified.
    """

    def __init__(self, path: Path, first: pb.Frame, total: int) -> None:
        self.total = total
        self.size = 0
        self.sound = True  # False: what is in the file is not known for sure
        self._path = path
        self._part = path.with_name(f"{path.name}.incoming")
        self._digest = hashlib.sha256()
        self._first = first.running_sha256

    def is_of(self, first: pb.Frame, total: int) -> bool:
        """Whether the object that starts with the frame ``first`` can be this one.

        One that is not, and has the same first frame, is found out by the
        running digest of the next. What is whole in one frame is begun anew: nothing
        would come behind it.
        """
        if first.last:
            return False
        alike = (total, first.running_sha256) == (self.total, self._first)
        return alike and self.sound and self._is_intact()

    async def receive(self, incoming: AsyncIterator[pb.Frame], *, limit: int) -> ReceivedObject:
        """Take the frames from offset `size` on; raises RemoteProtocolError, OSError."""
        file = await asyncio.to_thread(self._opened)
        intake = _Intake(file, self._digest.copy(), self.size, limit, self.total)
        try:
            with file:
                digest = await intake.take_all(incoming)
        finally:
            self.size, self._digest = intake.size, intake.digest
            self.sound = not intake.writing
        self._part.replace(self._path)  # here, not in a thread: nobody can cancel between
        return ReceivedObject(intake.size, digest, path=self._path)

    def discard(self) -> None:
        """Forget what is held."""
        self._part.unlink(missing_ok=True)

    def _is_intact(self) -> bool:
        try:
            return self._part.stat().st_size >= self.size
        except OSError:
            return False

    def _opened(self) -> BinaryIO:
        if not self.size:
            return self._part.open("xb")
        file = self._part.open("r+b")
        if file.seek(0, io.SEEK_END) < self.size:
            file.close()
            raise OSError(f"{self._part.name} became shorter while nobody wrote to it")
        file.truncate(self.size)
        file.seek(self.size)
        return file


class PartialFile:
    """A file that arrives in one or more transfers; ``<path>.part`` holds what is there.

    What it holds survives a broken connection and a restart of the daemon.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._part = path.with_name(f"{path.name}.part")

    async def held(self) -> int:
        """Bytes that need not be sent again."""
        try:
            return (await asyncio.to_thread(self._part.stat)).st_size
        except FileNotFoundError:
            return 0

    async def discard(self) -> None:
        """Forget what is held."""
        await asyncio.to_thread(self._part.unlink, missing_ok=True)

    async def receive(self, incoming: AsyncIterator[pb.Frame], *, limit: int) -> ReceivedObject:
        """Go on where the last transfer ended; ``incoming`` starts at offset `held()`."""
        file = await asyncio.to_thread(open, self._part, "a+b")
        with file:
            offset = await self.held()
            file.seek(0)
            digest = await _digest_of(file, offset)
            intake = _Intake(file, digest, offset, limit, None)
            whole = await intake.take_all(incoming)
        await asyncio.to_thread(self._part.replace, self._path)
        return ReceivedObject(intake.size, whole, path=self._path)
