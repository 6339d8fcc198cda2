"""Encrypted vectors as files: what a site uploads, and the sum that comes back.

An encrypted vector (one site's update, or the sum) is a file:

    header   "HNSV", version u16, parameters 8 bytes, values u64, blocks u32
    block    length u32, then that many bytes        (as often as the header says)
    trailer  as many bytes as both sides know to be there: an update's tags
             (docs/decisions/0014); nothing behind a sum

all little-endian. Reading is bounded by what the round agreed on, never by what
the file claims: the header must be exactly the expected one, each length one of
the two that a block can have, and nothing may follow the trailer. Nothing is
decrypted or computed here, so the daemon's main process may ask how large a
vector can be.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import BinaryIO

from crypto.ckks.parameters import CkksParameters
from crypto.durable import whole
from crypto.quantize import CryptoError

_HEADER = struct.Struct("<4sH8sQI")
_LENGTH = struct.Struct("<I")
_MAGIC = b"HNSV"
_VERSION = 1


@dataclass(frozen=True)
class BlobInfo:
    """Name (SHA-256, 32 bytes) and size in bytes of a file that was written."""

    digest: bytes
    size: int


def write_encrypted(
    path: Path,
    parameters: CkksParameters,
    values: int,
    blocks: Iterable[bytes],
    trailer: bytes = b"",
) -> BlobInfo:
    """Write an encrypted vector; the file appears under its name only when it is whole."""
    digest = hashlib.sha256()
    size = 0
    with whole(path, lasting=False) as unfinished, unfinished.open("wb") as file:
        for piece in chain(_pieces(parameters, values, blocks), (trailer,)):
            digest.update(piece)
            size += file.write(piece)
    return BlobInfo(digest.digest(), size)


def read_encrypted(
    path: Path, parameters: CkksParameters, values: int, *, trailer: int = 0
) -> Iterator[bytes]:
    """The blocks of an encrypted vector of ``values`` integers, one at a time.

    ``trailer``: how many bytes follow them. The whole frame is checked before the
    first block comes. Raises CryptoError when it is not exactly as expected.
    """
    with open_vector(path) as file:
        yield from blocks_of(file, parameters, values, trailer)


def blocks_of(
    file: BinaryIO, parameters: CkksParameters, values: int, trailer: int = 0
) -> Iterator[bytes]:
    """As `read_encrypted`, of a file that is open: from its beginning, however often."""
    file.seek(0)
    _check_frame(file, parameters, values, trailer)
    for _ in range(parameters.packing.blocks(values)):
        yield file.read(_LENGTH.unpack(file.read(_LENGTH.size))[0])


def read_trailer(path: Path, size: int) -> bytes:
    """The last ``size`` bytes of a file, fewer of a shorter one; `read_encrypted` checks that."""
    with open_vector(path) as file:
        file.seek(max(0, file.seek(0, 2) - size))
        return file.read(size)


def largest_size(parameters: CkksParameters, values: int, *, trailer: int = 0) -> int:
    """Upper bound on an encrypted vector's size in bytes: what a receiver need accept."""
    block = _LENGTH.size + parameters.full_block
    return _HEADER.size + parameters.packing.blocks(values) * block + trailer


def _pieces(parameters: CkksParameters, values: int, blocks: Iterable[bytes]) -> Iterator[bytes]:
    yield _header(parameters, values)
    for block in blocks:
        yield _LENGTH.pack(len(block))
        yield block


def _header(parameters: CkksParameters, values: int) -> bytes:
    blocks = parameters.packing.blocks(values)
    return _HEADER.pack(_MAGIC, _VERSION, parameters.identity, values, blocks)


def open_vector(path: Path) -> BinaryIO:
    """Raises CryptoError where there is none."""
    try:
        return path.open("rb")
    except OSError as error:
        raise CryptoError(f"cannot read the encrypted vector {path.name}: {error}") from error


def _check_frame(file: BinaryIO, parameters: CkksParameters, values: int, trailer: int) -> None:
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
    if position + trailer != end:
        raise CryptoError(f"{end - position} bytes follow the last block, not {trailer}")
    file.seek(len(header))
