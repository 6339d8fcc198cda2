"""A site's own integers, kept for a round: two attempts of it must sum the same ones.

What rounding and noise make of an update differs each time. Were one update made into
integers twice, and both sums opened, their difference would tell of the contributors
what neither sum tells. So integers are written down before anything is encrypted or
masked, and a later attempt sends them again, bit by bit.

A kept file belongs to what the integers were made under; under anything else it is
refused, for that would be another sum. It lies on the site's own disk, beside the
update that it was made of, and goes when the round is over:

    header      "HNSI", version u8, arrays u8, digest of the terms, digest of what follows
    integers    as numpy writes an array of int32 or int64
    residual    likewise, of float32, where rounding errors are fed back: what these
                integers leave for the next round, and no others do

Neither array can hold a pickle, and nothing is parsed before its digest is right.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from io import BufferedIOBase
from pathlib import Path

import numpy as np

from crypto.arrays import Float32, Int32, Int64
from crypto.durable import whole
from crypto.privacy import NoiseTerms
from crypto.quantize import FRACTION_INTEGERS, CryptoError

_HEADER = struct.Struct("<4sBB32s32s")
_MAGIC = b"HNSI"
_VERSION = 1
_LABEL = b"hanse-kept-integers-v1\0"


@dataclass(frozen=True)
class Making:
    """What a site's integers were made under. ``fed_back``: with the residual of rounding."""

    sizes: Sequence[int]
    exponents: Sequence[int]
    weight: float
    bits: int
    noise: NoiseTerms | None
    fed_back: bool

    @property
    def values(self) -> int:
        """How many integers these are."""
        return sum(self.sizes) + FRACTION_INTEGERS

    @property
    def digest(self) -> bytes:
        """32 bytes that name all of it; lists stand behind their lengths."""
        groups = len(self.sizes)
        parts = [
            _LABEL,
            struct.pack(f"<I{groups}Q", groups, *self.sizes),
            struct.pack(f"<I{len(self.exponents)}i", len(self.exponents), *self.exponents),
            struct.pack("<dI??", self.weight, self.bits, self.fed_back, self.noise is not None),
        ]
        if self.noise is not None:
            noise = self.noise
            numbers = (noise.clip_norm, noise.multiplier, noise.sharers, noise.counted)
            parts.append(struct.pack("<ddQ?", *numbers))
        return hashlib.sha256(b"".join(parts)).digest()


@dataclass(frozen=True)
class KeptIntegers:
    """Integers (shape [values]), and the residual that they leave (shape [values - 2])."""

    integers: Int32 | Int64
    residual: Float32 | None


def keep(path: Path, making: Making, integers: KeptIntegers) -> None:
    """Write them, so that the file is there whole and for good, or not at all.

    Raises OSError when the disk can't take it.
    """
    with whole(path) as unfinished, unfinished.open("w+b") as file:
        file.write(bytes(_HEADER.size))
        arrays = [one for one in (integers.integers, integers.residual) if one is not None]
        for array in arrays:
            np.save(file, array, allow_pickle=False)
        content = _digest_behind_header(file)
        file.seek(0)
        file.write(_HEADER.pack(_MAGIC, _VERSION, len(arrays), making.digest, content))


def recall(path: Path, making: Making) -> KeptIntegers | None:
    """What is kept there; None: nothing is.

    Raises CryptoError when it was made under anything else, or is damaged.
    """
    record = _read(path)
    if record is None:
        return None
    terms, integers = record
    if terms != making.digest:
        raise CryptoError(
            f"the integers of this site's update were kept under another scale, weight, bits or "
            f"noise ({path.name}): sent under these they would be another sum, whose difference "
            "from the first tells of the updates; this attempt must fail"
        )
    if integers.integers.shape != (making.values,) or making.fed_back != (
        integers.residual is not None
    ):
        raise _damaged(path)
    return integers


def kept_residual(path: Path) -> Float32 | None:
    """What the integers kept there leave for the next round; None: nothing, or none are kept.

    Raises CryptoError when the file is damaged; one that holds none is not read through.
    """
    record = _read(path, unless_without_residual=True)
    return None if record is None else record[1].residual


def _read(
    path: Path, *, unless_without_residual: bool = False
) -> tuple[bytes, KeptIntegers] | None:
    """Digest of the terms, and what was kept. Nothing is parsed that we did not write so."""
    try:
        with path.open("rb") as file:
            header = file.read(_HEADER.size)
            if len(header) != _HEADER.size:
                raise _damaged(path)
            magic, version, arrays, terms, content = _HEADER.unpack(header)
            if (magic, version) != (_MAGIC, _VERSION) or arrays not in (1, 2):
                raise _damaged(path)
            if unless_without_residual and arrays == 1:
                return None
            if content != _digest_behind_header(file):
                raise _damaged(path)
            file.seek(_HEADER.size)
            return terms, _arrays(file, path, fed_back=arrays == 2)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CryptoError(f"the kept integers {path.name} cannot be read: {error}") from error


def _arrays(file: BufferedIOBase, path: Path, *, fed_back: bool) -> KeptIntegers:
    try:
        integers = np.load(file, allow_pickle=False)
        residual = np.load(file, allow_pickle=False) if fed_back else None
    except (ValueError, EOFError) as error:
        raise _damaged(path) from error
    if integers.dtype not in (np.int32, np.int64) or integers.ndim != 1:
        raise _damaged(path)
    if residual is not None and (residual.dtype, residual.ndim) != (np.dtype(np.float32), 1):
        raise _damaged(path)
    return KeptIntegers(integers, residual)


def _digest_behind_header(file: BufferedIOBase) -> bytes:
    file.seek(_HEADER.size)
    return hashlib.file_digest(file, "sha256").digest()


def _damaged(path: Path) -> CryptoError:
    return CryptoError(
        f"the kept integers {path.name} are damaged or none: the sum that they were in cannot be "
        "made again; this site sits out until an attempt draws anew"
    )
