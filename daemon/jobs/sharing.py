"""Jobs of the sharing worker: which passages' embeddings a peer gets for its queries.

It reads what peers sent and nothing that people typed, so it is a process of its own:
what happens to it happens to no question and no training. Torch is not needed here.

At the levels `noisy` and `bucket` everything comes from a table of the passages'
embeddings that is noised as a whole: searched in, sorted into buckets, and sent. So
whatever a peer asks, and however often, it learns what that table says and no more. The
noise of a passage follows from a secret of this site, the model version, the deviation
and what is embedded: another try, another process or another peer gets the same, and
with another deviation the same noise is not scaled, which would tell what it hides.
"""

from __future__ import annotations

import functools
import hashlib
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from crypto.arrays import Float32, Int64, UInt8
from crypto.disclosure import PrefixTable, Projections, chance_from, noisy
from daemon.library.dense.folder import load_index
from daemon.library.store import Library
from daemon.process.workers import reads

_QUERIES_AT_ONCE = 32
_SPLIT = "train"  # what may be learned from


@dataclass(frozen=True)
class Shelf:
    """What a site may answer from: an open version's passages, of some collections.

    ``noise``: deviation a coordinate of what is not exact. ``bits``: of a bucket, at most.
    ``secret``: 32 bytes of this site's own, from which the noise is drawn.
    """

    library: Path
    index: Path
    model_digest: bytes
    collections: tuple[str, ...]
    noise: float
    bits: int
    secret: bytes = field(repr=False)


@reads("the queries of {sender}")
def near(shelf: Shelf, sender: str, queries: Float32, top_n: int, *, exact: bool) -> list[Float32]:
    """For each of ``queries`` [q, d] its ``top_n`` nearest passages: unit vectors [n, d].

    Nearest first if ``exact``; otherwise of the noised table, in no order. Raises
    IndexDamaged, LibraryError.
    """
    del sender
    table = _plain(shelf) if exact else _noised(shelf)
    hits = []
    for start in range(0, len(queries), _QUERIES_AT_ONCE):
        cosines = queries[start : start + _QUERIES_AT_ONCE] @ table.T  # [<= 32, m]
        for row in cosines:
            places = _largest(row, top_n)
            hits.append(table[places if exact else _shuffled(places)])
    return hits


@reads("the buckets of {sender}")
def in_buckets(shelf: Shelf, sender: str, names: UInt8, bits: int, top_n: int) -> list[Float32]:
    """For each bucket of ``names`` [q, width] ``top_n`` of its noised passages, at random.

    Of the nearest bucket that is not empty; ``bits`` are at most the shelf's. Raises as
    `near`.
    """
    del sender
    table = _noised(shelf)
    if not len(table):
        return [table for _ in names]
    buckets, chance = _buckets(shelf).of(bits), chance_from()
    return [table[buckets.draw(name, top_n, chance)] for name in names]


def _largest(values: Float32, count: int) -> Int64:
    """Where the ``count`` largest are, the largest first."""
    count = min(count, len(values))
    places = np.argpartition(-values, count - 1)[:count] if count else np.zeros(0, np.int64)
    return places[np.argsort(-values[places], kind="stable")]


def _shuffled(places: Int64) -> Int64:
    return chance_from().permutation(places)


@functools.lru_cache(maxsize=1)
def _plain(shelf: Shelf) -> Float32:
    """[m, d] what may be learned from, in the order of labels."""
    return _read(shelf)[1]


@functools.lru_cache(maxsize=1)
def _noised(shelf: Shelf) -> Float32:
    """[m, d] the same, under the noise that belongs to each passage in this version."""
    contents, vectors = _read(shelf)
    result = np.zeros_like(vectors)
    for row, content in enumerate(contents):
        chance = chance_from(_secret_bytes(shelf, content))
        result[row] = noisy(vectors[row : row + 1], shelf.noise, chance)[0]
    return result


def _secret_bytes(shelf: Shelf, content: bytes) -> Callable[[int], bytes]:
    """Bytes that nobody can predict who has not the secret; the same each time.

    Of two releases a v + s n and b v + t n under one n, v is a sum: so whatever changes
    v or s changes n. A label may come to stand for another passage; its content can't.
    """

    def draw(count: int) -> bytes:
        name = shelf.model_digest + struct.pack("<d", shelf.noise) + content
        key = hashlib.blake2b(name, key=shelf.secret, person=b"hanse-negatives", digest_size=64)
        return key.digest()[:count]

    return draw


@functools.lru_cache(maxsize=1)
def _buckets(shelf: Shelf) -> PrefixTable:
    """Of as many bits as anybody may ask for: a peer that asks for fewer makes no other table."""
    table = _noised(shelf)
    return PrefixTable(Projections(shelf.model_digest, table.shape[1], shelf.bits).buckets(table))


def _read(shelf: Shelf) -> tuple[list[bytes], Float32]:
    """Contents and vectors of those passages that are in the index and may be shared now.

    In the order of labels.
    """
    with Library.open(shelf.library, read_only=True) as library:
        allowed = library.labels(_SPLIT, shelf.collections)
    index = load_index(shelf.index, shelf.model_digest)
    labels = np.intersect1d(np.fromiter(allowed, np.int64, len(allowed)), index.labels())
    return [allowed[label] for label in labels.tolist()], index.vectors(labels)
