"""Approximate nearest neighbours in a navigable graph (HNSW; hnswlib's only home).

What `daemon.library.dense.index` asks of an engine, and no more. hnswlib's loader trusts its
input (with a wrong dimension it reads beyond its memory), so nobody may hand it a file whose
digest has not been compared (`daemon.library.dense.folder`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from crypto.arrays import Float32, Int64
from daemon.library.dense.options import IndexOptions

if TYPE_CHECKING:
    import hnswlib

_M = 16  # links of a passage in each layer of the graph
_EF_CONSTRUCTION = 256  # candidates looked at while linking a passage
_SEED = 20
_SLICE = 1024  # passages linked between two reports


class Hnsw:
    """The engine `hnswlib`: Malkov and Yashunin, TPAMI 2020."""

    file = "index.hnsw"

    def __init__(self, options: IndexOptions) -> None:
        del options  # it has all it needs

    def build(
        self, labels: Int64, vectors: Float32, *, threads: int, told: Callable[[int, int], None]
    ) -> HnswGraph:
        """Link unit vectors [n, d]; with one thread the graph is the same each time."""
        count, dimension = vectors.shape
        graph = _new_graph(max(1, dimension))
        graph.init_index(
            max_elements=max(1, count), M=_M, ef_construction=_EF_CONSTRUCTION, random_seed=_SEED
        )
        for start in range(0, count, _SLICE):
            end = min(start + _SLICE, count)
            graph.add_items(vectors[start:end], labels[start:end], num_threads=threads)
            told(end, count)
        return HnswGraph(graph)

    def load(self, path: Path, count: int, dimension: int) -> HnswGraph:
        """Open a file that `HnswGraph.save` wrote; ValueError where it is another one."""
        graph = _new_graph(max(1, dimension))
        try:
            graph.load_index(str(path), max_elements=max(1, count))
        except RuntimeError as error:
            raise ValueError(f"hnswlib: {error}") from error
        if graph.get_current_count() != count:
            raise ValueError(f"it holds {graph.get_current_count()} passages and not {count}")
        return HnswGraph(graph)

    def forget(self, named: Iterable[Path]) -> None:
        """Nothing: all of it is in its file."""


class HnswGraph:
    """A graph in memory."""

    def __init__(self, graph: hnswlib.Index) -> None:
        self._graph = graph
        self._hidden = frozenset[int]()

    def nearest(self, queries: Float32, k: int, breadth: int) -> tuple[Int64, Float32] | None:
        """Labels [q, k] and cosines [q, k], best first; None where fewer than ``k`` are reached.

        That happens where many vectors are equal: their links lead to one another alone.
        """
        self._graph.set_ef(max(breadth, k))  # hnswlib refuses ef < k
        try:
            labels, distances = self._graph.knn_query(queries, k=k, num_threads=1)
        except RuntimeError:  # the one thing that it has to say of queries of the right shape
            return None
        return labels.astype(np.int64), (1.0 - distances).astype(np.float32)

    def hide(self, labels: Int64) -> None:
        """Never find these again. They stay as way-marks, and in the file as it was saved."""
        for label in set(labels.tolist()) - self._hidden:  # hnswlib refuses to do so twice
            self._graph.mark_deleted(label)
        self._hidden |= set(labels.tolist())

    def save(self, path: Path) -> None:
        """Write the graph to a file."""
        self._graph.save_index(str(path))


def _new_graph(dimension: int) -> hnswlib.Index:
    # Here, not at the top: the daemon's main process names what can go wrong and the
    # paths, and must not load native code that reads files.
    import hnswlib

    return hnswlib.Index(space="cosine", dim=dimension)
