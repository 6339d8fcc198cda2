"""The vectors of some passages of an index: compared with all of them, and with no others.

A graph of all passages would be walked over those that may not be found, and show by its ways and
by its time that they are there. These lie together, in an array of their own.
"""

from __future__ import annotations

import numpy as np

from crypto.arrays import Bools, Float32, Int64
from daemon.library.dense.engines import among, compare_with_all
from daemon.library.dense.index import DenseIndex


class AllowedVectors:
    """A `DenseIndex` of those of some labels that another index holds."""

    def __init__(self, index: DenseIndex, labels: Int64) -> None:
        """``labels`` ascend. The vectors are copied: a value of theirs takes 4 bytes."""
        self._labels = labels[index.holds(labels)]
        self._vectors = np.ascontiguousarray(index.vectors(self._labels))
        self._dimension = index.dimension

    @property
    def count(self) -> int:
        """How many passages there are."""
        return len(self._labels)

    @property
    def dimension(self) -> int:
        """Numbers of a vector."""
        return self._dimension

    def search(self, queries: Float32, k: int) -> tuple[Int64, Float32]:
        """As `DenseIndex`; exact."""
        return compare_with_all(queries, self._labels, self._vectors, max(0, k))

    def labels(self) -> Int64:
        """The labels of all passages [count], ascending."""
        return self._labels

    def holds(self, labels: Int64) -> Bools:
        """[n] which of these labels are in the index."""
        return among(labels, self._labels)

    def vectors(self, labels: Int64) -> Float32:
        """The unit vectors [n, d] of those labels, which must be in the index."""
        return self._vectors[np.searchsorted(self._labels, labels)]
