"""Encrypted updates as files, and their streamed sum at the coordinator.

An encrypted vector (one site's update, or the sum) is a file:

    header   "HNSV", version u16, parameters 8 bytes, values u64, blocks u32
    block    length u32, then that many bytes        (as often as the header says)

all little-endian. Reading is bounded by what the round agreed on, never by what
the file claims: the header must be exactly the expected one, each length one of
the two that a block can have, and nothing may follow the last block. Memory is
one block to read and one sum to add, whatever the number of contributors.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from crypto.ckks import CkksParameters, CryptoError, RunningSum

_HEADER = struct.Struct("<4sH8sQI")
_LENGTH = struct.Struct("<I")
_MAGIC = b"HNSV"
_VERSION = 1

# With one contributor the "sum" would be its update, readable to every key holder.
MIN_CONTRIBUTORS = 2


@dataclass(frozen=True)
class BlobInfo:
    """Name (SHA-256, 32 bytes) and size in bytes of a file that was written."""

    digest: bytes
    size: int


def write_encrypted(
    path: Path, parameters: CkksParameters, values: int, blocks: Iterable[bytes]
) -> BlobInfo:
    """Write an encrypted vector; the file appears under its name only when it is whole."""
    digest = hashlib.sha256()
    size = 0
    partial = path.with_name(path.name + ".partial")
    try:
        with partial.open("wb") as file:
            for piece in _pieces(parameters, values, blocks):
                digest.update(piece)
                size += file.write(piece)
        partial.rename(path)
    finally:
        partial.unlink(missing_ok=True)
    return BlobInfo(digest.digest(), size)


def read_encrypted(path: Path, parameters: CkksParameters, values: int) -> Iterator[bytes]:
    """The blocks of an encrypted vector of ``values`` integers, one at a time.

    The whole frame is checked before the first block comes. Raises CryptoError
    when it is not exactly as expected.
    """
    with _opened(path) as file:
        _check_frame(file, parameters, values)
        for _ in range(parameters.packing.blocks(values)):
            yield file.read(_LENGTH.unpack(file.read(_LENGTH.size))[0])


def largest_size(parameters: CkksParameters, values: int) -> int:
    """Upper bound on an encrypted vector's size in bytes: what a receiver need accept."""
    block = _LENGTH.size + parameters.full_block
    return _HEADER.size + parameters.packing.blocks(values) * block


class CiphertextSum:
    """The coordinator's running sum. It holds no key.

    An update is in the sum entirely or not at all: what was added of one that
    turns out malformed is subtracted again, which is exact in the ring.
    """

    def __init__(self, parameters: CkksParameters, values: int) -> None:
        if values < 1:
            raise CryptoError(f"a sum needs at least one value, got {values}")
        self._parameters = parameters
        self._values = values
        self._blocks = parameters.packing.blocks(values)
        self._total = RunningSum(parameters, self._blocks)
        self._contributors: set[str] = set()
        self._broken = False

    @property
    def contributors(self) -> frozenset[str]:
        """Sites whose updates are in the sum."""
        return frozenset(self._contributors)

    def add_file(self, path: Path, contributor: str) -> None:
        """Add one site's update.

        Raises CryptoError, and leaves the sum as it was, when the file is not a
        well-formed update of this round, when the contributor is in the sum
        already, or when the sum has all the contributors it was sized for.
        """
        self._check_usable()
        if contributor in self._contributors:
            raise CryptoError(f"{contributor} is in the sum already; its second update was refused")
        if len(self._contributors) >= self._parameters.packing.contributors:
            raise CryptoError(
                f"the sum has all {len(self._contributors)} contributors that the round's "
                f"parameters allow; the update of {contributor} was refused"
            )
        added = 0
        try:
            for block in read_encrypted(path, self._parameters, self._values):
                self._total.add(added, block)
                added += 1
        except (CryptoError, OSError) as error:
            self._take_back(path, added)
            raise CryptoError(f"the update of {contributor} was refused: {error}") from error
        self._contributors.add(contributor)

    def write(self, path: Path) -> BlobInfo:
        """Write the sum. Raises CryptoError when fewer than two updates are in it."""
        self._check_usable()
        if len(self._contributors) < MIN_CONTRIBUTORS:
            raise CryptoError(
                f"a sum of {len(self._contributors)} updates would show a site's own update to "
                f"the key holders; at least {MIN_CONTRIBUTORS} must contribute"
            )
        blocks = (self._total.block(index) for index in range(self._blocks))
        return write_encrypted(path, self._parameters, self._values, blocks)

    def _take_back(self, path: Path, added: int) -> None:
        if not self._contributors:  # nothing else is in it; and a zero sum is not a ciphertext
            self._total = RunningSum(self._parameters, self._blocks)
            return
        self._broken = True  # until every block is out again
        if added:
            blocks = read_encrypted(path, self._parameters, self._values)
            for index, block in zip(range(added), blocks, strict=False):
                self._total.subtract(index, block)
        self._broken = False

    def _check_usable(self) -> None:
        if self._broken:
            raise CryptoError(
                "the sum is unusable: a malformed update changed on disk while it was being "
                "taken back; the attempt must fail"
            )


def _pieces(parameters: CkksParameters, values: int, blocks: Iterable[bytes]) -> Iterator[bytes]:
    yield _header(parameters, values)
    for block in blocks:
        yield _LENGTH.pack(len(block))
        yield block


def _header(parameters: CkksParameters, values: int) -> bytes:
    blocks = parameters.packing.blocks(values)
    return _HEADER.pack(_MAGIC, _VERSION, parameters.identity, values, blocks)


def _opened(path: Path) -> BinaryIO:
    try:
        return path.open("rb")
    except OSError as error:
        raise CryptoError(f"cannot read the encrypted vector {path.name}: {error}") from error


def _check_frame(file: BinaryIO, parameters: CkksParameters, values: int) -> None:
    """Header, every length, and the end, without reading the blocks; then rewind to the first."""
    header = _header(parameters, values)
    if file.read(len(header)) != header:
        raise CryptoError(
            f"its header is not that of {values} values under this round's parameters: "
            "another length, another round's parameters, or no encrypted vector at all"
        )
    allowed = (parameters.full_block, parameters.seeded_block)
    end = file.seek(0, 2)
    position = file.seek(len(header))
    for index in range(parameters.packing.blocks(values)):
        prefix = file.read(_LENGTH.size)
        length = _LENGTH.unpack(prefix)[0] if len(prefix) == _LENGTH.size else 0
        position += _LENGTH.size + length
        if length not in allowed or position > end:
            raise CryptoError(f"block {index} is cut short or has a length no block can have")
        file.seek(position)
    if position != end:
        raise CryptoError(f"{end - position} bytes follow the last block")
    file.seek(len(header))
