"""The dense index: nearest passages by cosine, changed in small steps, rebuilt now and then.

An index has three parts, so that a change of the library costs what changed and not what
is there:

- the *base*: most passages, found by an engine (`engines.py`) that takes long to build;
- the *delta*: passages that came since, compared with one by one;
- *tombstones*: labels of the base that are gone, and are never found again.

When delta and tombstones are more than `_MOST_CHANGES` of the base, or all of it is quickly
built, the base is built anew, and what is gone takes no space any more. How all this lies
on the disk: `daemon.library.dense.folder`.

The base's vectors are kept as an array, too, for exact cosines of chosen passages: hnswlib
gives a vector back in some 20 microseconds, the array, of which only what is read comes into
memory, in one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from crypto.arrays import Bools, Float32, Int64, UInt8
from daemon.library.dense.engines import (
    Accuracy,
    Neighbours,
    among,
    compare_with_all,
    engine_of,
    measured,
    unit,
)
from daemon.library.dense.options import EMBEDDED, IndexOptions

CONTENT_BYTES = 32  # of the SHA-256 of what is embedded for a passage
# Beyond this share of the base it is built anew. Until then a search compares with at most
# as many vectors one by one, which takes a millisecond at 10,000 of 384 numbers.
_MOST_CHANGES = 0.1
_QUICKLY_BUILT = 1000  # passages: well below a second


class DenseIndex(Protocol):
    """Labels (passage rowids) and their unit vectors, searchable by cosine."""

    @property
    def count(self) -> int:
        """How many passages there are."""

    @property
    def dimension(self) -> int:
        """Numbers of a vector."""

    def search(self, queries: Float32, k: int) -> tuple[Int64, Float32]:
        """The nearest passages of each query: labels [q, n] and cosines [q, n], best first.

        ``queries`` is float32 [q, d]. n is ``k`` or, in a smaller index, all there are.
        """

    def labels(self) -> Int64:
        """The labels of all passages [count], ascending."""

    def holds(self, labels: Int64) -> Bools:
        """[n] which of these labels are in the index."""

    def vectors(self, labels: Int64) -> Float32:
        """The unit vectors [n, d] of those labels, which must be in the index."""


@dataclass(frozen=True)
class Embedded:
    """Passages as one model version embeds them; ``labels`` [n] ascend.

    ``contents`` [n, 32]: SHA-256 of what was embedded. ``vectors`` [n, d] of length 1.
    """

    labels: Int64
    contents: UInt8
    vectors: Float32

    def __len__(self) -> int:
        return len(self.labels)

    def at(self, rows: Int64) -> Embedded:
        """Those in these rows."""
        return Embedded(self.labels[rows], self.contents[rows], self.vectors[rows])


@dataclass(frozen=True)
class Stored:
    """Where a base lies on the disk, and the SHA-256 of each of its files, in hexadecimal."""

    folder: Path
    files: Mapping[str, str]


@dataclass(frozen=True)
class Base:
    """The part of an index that is built at once; ``removal`` as in `Erasure.last_removal`."""

    engine: str
    neighbours: Neighbours
    embedded: Embedded
    accuracy: Accuracy
    removal: str = ""
    stored: Stored | None = None  # None: nowhere yet


@dataclass(frozen=True)
class Wanted:
    """What an index is to hold: ``labels`` [n] ascending with ``contents`` [n, 32].

    ``embed``: unit vectors [m, d] of those labels. ``removal``: as in `Erasure.last_removal`.
    """

    labels: Int64
    contents: UInt8
    embed: Callable[[Int64], Float32]
    removal: str = ""


class UpdatableIndex:
    """A `DenseIndex` of base, delta and tombstones; changed by `update_index` into another."""

    def __init__(self, base: Base, delta: Embedded, gone: Int64) -> None:
        """``delta``: passages beside the base; ``gone``: labels of the base, ascending.

        A label in both base and delta must be gone from the base.
        """
        self.base, self.delta, self.gone = base, delta, gone
        base.neighbours.hide(gone)
        live = np.flatnonzero(~np.isin(base.embedded.labels, gone))
        beside = len(base.embedded) + np.arange(len(delta))
        labels = np.concatenate([base.embedded.labels[live], delta.labels])
        order = np.argsort(labels)
        self._labels = labels[order]
        self._rows = np.concatenate([live, beside])[order]  # of each: in the base, then the delta

    @property
    def count(self) -> int:
        """How many passages there are."""
        return len(self._labels)

    @property
    def dimension(self) -> int:
        """Numbers of a vector."""
        return int(self.base.embedded.vectors.shape[1])

    def search(self, queries: Float32, k: int) -> tuple[Int64, Float32]:
        """As `DenseIndex`; the best of base and delta, by their cosines."""
        if queries.ndim != 2 or (self.count and queries.shape[1] != self.dimension):
            raise ValueError(f"expected queries [q, {self.dimension}], got {queries.shape}")
        n = max(0, min(k, self.count))
        labels, cosines = self._in_base(queries, min(n, self.count - len(self.delta)))
        if not len(self.delta):
            return labels, cosines
        beside = compare_with_all(queries, self.delta.labels, self.delta.vectors, n)
        labels = np.concatenate([labels, beside[0]], axis=1)
        cosines = np.concatenate([cosines, beside[1]], axis=1)
        best = np.argsort(-cosines, axis=1, kind="stable")[:, :n]
        return np.take_along_axis(labels, best, 1), np.take_along_axis(cosines, best, 1)

    def _in_base(self, queries: Float32, n: int) -> tuple[Int64, Float32]:
        breadth = self.base.accuracy.breadth
        found = self.base.neighbours.nearest(queries, n, breadth) if breadth and n else None
        if found is not None:
            return found
        embedded = self.base.embedded
        return compare_with_all(queries, embedded.labels, embedded.vectors, n, without=self.gone)

    def labels(self) -> Int64:
        """The labels of all passages [count], ascending."""
        return self._labels

    def holds(self, labels: Int64) -> Bools:
        """[n] which of these labels are in the index."""
        return among(labels, self._labels)

    def vectors(self, labels: Int64) -> Float32:
        """The unit vectors [n, d] of those labels, which must be in the index."""
        rows = self._rows[np.searchsorted(self._labels, labels)]
        mine = self.base.embedded
        if not len(self.delta):
            return np.asarray(mine.vectors[rows])
        found = np.empty((len(rows), self.dimension), np.float32)
        beside = rows >= len(mine)
        found[~beside] = mine.vectors[rows[~beside]]
        found[beside] = self.delta.vectors[rows[beside] - len(mine)]
        return found

    def contents(self) -> UInt8:
        """[count, 32] what was embedded for each of `labels`."""
        both = np.concatenate([self.base.embedded.contents, self.delta.contents])
        return np.asarray(both[self._rows])


def build_index(
    labels: Int64,
    vectors: Float32,
    *,
    contents: UInt8 | None = None,
    removal: str = "",
    threads: int = 1,
    told: Callable[[int, int], None] = lambda _done, _all: None,
    options: IndexOptions = EMBEDDED,
) -> UpdatableIndex:
    """Index vectors [n, d] under ``labels`` [n] (passage rowids, unique), all in the base.

    No vectors make an index that finds nothing. Without ``contents`` [n, 32] nothing of it
    is taken over into a later one. ``told``: passages done, and in all. Raises ValueError and,
    where the engine has a server, EngineUnavailable.
    """
    if vectors.ndim != 2 or labels.shape != (len(vectors),):
        raise ValueError(f"expected labels [n] and vectors [n, d], got {vectors.shape}")
    if contents is None:
        contents = np.zeros((len(labels), CONTENT_BYTES), np.uint8)
    order = np.argsort(labels)
    embedded = Embedded(labels[order], contents[order], unit(vectors)[order])
    neighbours = engine_of(options).build(
        embedded.labels, embedded.vectors, threads=threads, told=told
    )
    accuracy = measured(neighbours, embedded.labels, embedded.vectors)
    base = Base(options.engine, neighbours, embedded, accuracy, removal)
    nothing = np.zeros(0, np.int64)
    return UpdatableIndex(base, embedded.at(nothing), nothing)


def update_index(
    previous: UpdatableIndex | None,
    wanted: Wanted,
    *,
    threads: int = 1,
    told: Callable[[int, int], None] = lambda _done, _all: None,
    options: IndexOptions = EMBEDDED,
) -> UpdatableIndex:
    """An index of what is wanted, from an earlier one of the same model version.

    Only what is new is embedded. A passage is the same where label *and* content are: a
    library that was restored, or began anew, gives labels a second time. The base is built
    anew where `_stays` says so. ``previous`` is used up: what is gone, it doesn't find, too.
    """
    known = np.zeros(len(wanted.labels), bool) if previous is None else _known(previous, wanted)
    kept, new = wanted.labels[known], wanted.labels[~known]
    if previous is None or not len(kept):
        vectors = wanted.embed(wanted.labels)
    else:
        fresh = wanted.embed(new) if len(new) else np.zeros((0, previous.dimension), "<f4")
        if fresh.shape != (len(new), previous.dimension):
            raise ValueError(
                f"expected vectors [{len(new)}, {previous.dimension}], got {fresh.shape}"
            )
        added = Embedded(new, wanted.contents[~known], unit(fresh))
        changed = _with_changes(previous, kept, added)
        if _stays(changed, wanted, options.engine):
            return changed
        vectors = np.empty((len(wanted.labels), previous.dimension), "<f4")
        vectors[known], vectors[~known] = previous.vectors(kept), added.vectors
    return build_index(
        wanted.labels,
        vectors,
        contents=wanted.contents,
        removal=wanted.removal,
        threads=threads,
        told=told,
        options=options,
    )


def _known(previous: UpdatableIndex, wanted: Wanted) -> NDArray[np.bool_]:
    """Which of the wanted passages [n] an index has, with the same content."""
    known = previous.holds(wanted.labels)
    places = np.searchsorted(previous.labels(), wanted.labels[known])
    known[known] = (previous.contents()[places] == wanted.contents[known]).all(axis=1)
    return known


def _with_changes(previous: UpdatableIndex, kept: Int64, added: Embedded) -> UpdatableIndex:
    mine, beside = previous.base.embedded.labels, previous.delta
    in_delta = np.isin(beside.labels, kept)
    stays = beside.at(np.flatnonzero(in_delta))
    # What is kept in the delta may have its label in the base, too, with a text that is gone.
    still = np.isin(mine, np.setdiff1d(kept, stays.labels))
    joined = Embedded(
        np.concatenate([stays.labels, added.labels]),
        np.concatenate([stays.contents, added.contents]),
        np.concatenate([stays.vectors, added.vectors]),
    )
    return UpdatableIndex(
        previous.base, joined.at(np.argsort(joined.labels)), np.asarray(mine[~still])
    )


def _stays(index: UpdatableIndex, wanted: Wanted, engine: str) -> bool:
    """Whether the base goes on. Not where a document was removed from the library since.

    Then its vectors are to be in no file; a tombstone would leave them in the base.
    """
    changes = len(index.delta) + len(index.gone)
    return (
        changes <= _MOST_CHANGES * len(index.base.embedded)
        and index.count >= _QUICKLY_BUILT
        and index.base.removal == wanted.removal
        and index.base.engine == engine
    )
