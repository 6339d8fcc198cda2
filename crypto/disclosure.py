"""How much of an embedding leaves a site: exactly, under noise, or as signs of projections.

An embedding tells much of the text that it was made of: what a level protects is
measured, not hoped for (docs/decisions/0016-fed-negatives.md). The unit that is
protected is one vector: one query of the asking site, one passage of the answering
site. Numpy only, plain arguments, no clock and no chance of its own.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from typing import Final

import numpy as np

from crypto.arrays import Float32, Int64, Rows, UInt8
from crypto.privacy import gaussian_deviation
from crypto.quantize import CryptoError

# Two unit vectors are at most this far apart: one in place of another moves it so far.
SENSITIVITY: Final = 2.0

MAX_BITS: Final = 256
MAX_DIMENSION: Final = 16_384
_STEPS: Final = 2.0**24  # of a coordinate: as fine as float32 is at 1


def chance_from(draw: Callable[[int], bytes] = os.urandom) -> np.random.Generator:
    """A generator seeded with 256 bits that nobody can predict; the kernel's by default."""
    return np.random.Generator(np.random.SFC64(int.from_bytes(draw(32), "little")))


def noisy(vectors: Float32, sigma: float, chance: np.random.Generator) -> Float32:
    """Unit vectors [n, d] under Gaussian noise of deviation ``sigma`` a coordinate; unit again.

    ``chance`` must be seeded by `chance_from`, afresh for every call whose result
    leaves the site: whoever can guess the seed takes the noise off again.

    The result has unit rows. What is done to a noised vector afterwards costs no
    privacy, its norm (sqrt(1 + d sigma^2), nearly) tells nothing but sigma, every use
    is a cosine, and a receiver can check that it got unit vectors and no more.
    ``sigma`` = 0 leaves the directions as they are. Raises CryptoError for what is not
    finite or a sigma that is negative or not finite.
    """
    if not (np.isfinite(sigma) and sigma >= 0):
        raise CryptoError(f"noise of deviation {sigma} makes no sense: 0 or more is needed")
    _finite(vectors)
    disturbed = vectors + chance.normal(0.0, sigma, vectors.shape)  # in float64
    norms = np.linalg.norm(disturbed, axis=1, keepdims=True)
    result: Float32 = (disturbed / np.maximum(norms, 1e-12)).astype(np.float32)
    return result


def noise_for(epsilon: float, delta: float) -> float:
    """Deviation of the noise on a coordinate with which one vector is (epsilon, delta)-private.

    The analytic Gaussian mechanism (Balle, Wang, "Improving the Gaussian Mechanism for
    Differential Privacy", ICML 2018, Theorem 8) at the sensitivity of unit vectors.
    One query or one passage embedding is protected, and this once: what is sent n
    times is known as if sent with noise smaller by sqrt(n).
    """
    return SENSITIVITY * gaussian_deviation(epsilon, delta)


class Projections:
    """``bits`` shared random projections of vectors of ``dimension``: what gives a bucket its name.

    The same at every site that knows ``seed`` (a public fact of the federation: the
    digest of the model version, say), to the last bit: the weights are whole numbers, a
    vector is rounded to whole steps, and no sum of products is beyond what a double
    holds exactly, in whatever order it is added up.

    A weight is the number of ones among 64 bits, less 32: a binomial, whose sums over a
    few dozen coordinates no test tells from a Gaussian's. Two vectors at an angle of
    theta differ in a bit with probability theta / pi (Charikar, STOC 2002, section 3).
    """

    def __init__(self, seed: bytes, dimension: int, bits: int) -> None:
        if not (1 <= dimension <= MAX_DIMENSION and 1 <= bits <= MAX_BITS):
            raise CryptoError(
                f"{bits} projections of {dimension} coordinates: "
                f"1 .. {MAX_BITS} and 1 .. {MAX_DIMENSION} are possible"
            )
        self.dimension, self.bits = dimension, bits
        name = b"hanse-projections-v1\0" + dimension.to_bytes(4, "little") + seed
        raw = np.frombuffer(hashlib.shake_256(name).digest(8 * dimension * bits), np.uint8)
        ones = np.unpackbits(raw.reshape(bits, dimension, 8), axis=2).sum(axis=2, dtype=np.int64)
        self._weights = (ones - 32).astype(np.float64)  # [bits, dimension], -32 .. 32

    @property
    def width(self) -> int:
        """Bytes of a bucket's name."""
        return -(-self.bits // 8)

    def buckets(self, vectors: Float32) -> UInt8:
        """The signs of the projections of unit vectors [n, d], packed: uint8 [n, ceil(bits / 8)].

        Bit i of a name is bit i % 8 of byte i // 8; the last byte is filled with zeros.
        """
        if vectors.ndim != 2 or vectors.shape[1] != self.dimension:
            raise CryptoError(f"vectors [n, {self.dimension}] needed, got {vectors.shape}")
        _finite(vectors)
        # Within +-2^24 * 32 * 2^14 = 2^43: exact in a double.
        steps = np.rint(np.clip(vectors.astype(np.float64), -1.0, 1.0) * _STEPS)
        return np.packbits(steps @ self._weights.T >= 0.0, axis=1, bitorder="little")


class Buckets:
    """Rows by bucket, of one number of bits."""

    def __init__(self, names: UInt8, rows: Rows, starts: Rows) -> None:
        """``names`` [m, width]: of the buckets whose ``rows`` begin at ``starts`` [m]."""
        self._names = names
        self._rows = rows
        self._ends = np.append(starts, len(rows))

    def __len__(self) -> int:
        """How many buckets are not empty."""
        return len(self._names)

    def rows(self, name: UInt8) -> Rows:
        """Rows of the bucket ``name`` [width]; of the nearest ones by Hamming distance if empty.

        Ascending, at least one. Buckets at equal distance count as one: which of them
        comes first must not depend on the corpus.
        """
        if name.shape != self._names.shape[1:]:
            raise CryptoError(f"a bucket's name has {self._names.shape[1]} bytes, got {name.shape}")
        distances = np.bitwise_count(self._names ^ name).sum(axis=1, dtype=np.int64)
        nearest = np.flatnonzero(distances == distances.min())
        runs = [self._rows[self._ends[place] : self._ends[place + 1]] for place in nearest]
        return np.sort(np.concatenate(runs))

    def draw(self, name: UInt8, count: int, chance: np.random.Generator) -> Rows:
        """``count`` rows of that bucket at random, each once; all of them if it has no more."""
        rows = self.rows(name)
        return rows if len(rows) <= count else chance.choice(rows, count, replace=False)


class BucketTable(Buckets):
    """A corpus' rows by bucket."""

    def __init__(self, names: UInt8) -> None:
        """``names`` [n, width]: the bucket of every row, by `Projections.buckets`."""
        if names.ndim != 2 or not len(names):
            raise CryptoError(f"a table of buckets needs rows, got {names.shape}")
        different, places = np.unique(names, axis=0, return_inverse=True)
        places = places.reshape(-1)
        ends = np.cumsum(np.bincount(places, minlength=len(different)))
        order = np.argsort(places, kind="stable").astype(np.int64)
        super().__init__(different, order, np.concatenate([[0], ends[:-1]]))


def _finite(vectors: Float32) -> None:
    if vectors.ndim != 2 or not np.isfinite(vectors).all():
        raise CryptoError(f"finite vectors [n, d] needed, got shape {vectors.shape}")


class PrefixTable:
    """A corpus' rows by bucket, for each number of bits up to that of their names.

    Projections of one seed are drawn one after the other from one stream, so the first b
    bits of a name are the name that b projections give (`Projections`). In the order of
    names, first bit first, the buckets of any b are runs. So who asks for another b each
    time has nothing projected or sorted anew: b costs a look along the table.
    """

    def __init__(self, names: UInt8) -> None:
        """``names`` [n, width]: the bucket of every row, by `Projections.buckets`."""
        if names.ndim != 2 or not len(names):
            raise CryptoError(f"a table of buckets needs rows, got {names.shape}")
        flags = np.unpackbits(names, axis=1, bitorder="little")  # [n, 8 width], first bit first
        order = np.lexsort(np.packbits(flags, axis=1).T[::-1])  # stable
        self._rows: Rows = order.astype(np.int64)
        self._names = names[order]
        differs = flags[order][1:] != flags[order][:-1]
        # Where a row's name first differs from that before it; 8 width where it does not.
        apart = np.where(differs.any(axis=1), differs.argmax(axis=1), flags.shape[1])
        self._apart: Int64 = np.concatenate([[-1], apart])

    def of(self, bits: int) -> Buckets:
        """Its buckets of ``bits`` bits. Raises CryptoError for more than the names have."""
        if not 1 <= bits <= 8 * self._names.shape[1]:
            raise CryptoError(f"{bits} bits of names that have {8 * self._names.shape[1]}")
        starts = np.flatnonzero(self._apart < bits)
        mask = np.packbits(np.arange(8 * (-(-bits // 8))) < bits, bitorder="little")
        return Buckets(self._names[starts, : len(mask)] & mask, self._rows, starts)
