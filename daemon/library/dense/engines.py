"""Engines: what builds a base and searches it, and how much it misses.

An engine is approximate. How many of the nearest passages it finds is measured on each new
base (`measured`), and where these are too few it looks at more candidates, or is passed over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from crypto.arrays import Bools, Float32, Int64
from daemon.library.dense.graph import Hnsw
from daemon.library.dense.milvus import Milvus
from daemon.library.dense.options import IndexOptions

USUAL_BREADTH = 128  # candidates that an engine looks at for a question, at least
# More than this, and comparing with all is as quick.
_GREATEST_BREADTH = 2048
LEAST_RECALL = 0.95
_RECALL_AT = 10
_SAMPLE = 100  # passages that recall is measured with
_SAMPLE_COSINE = 0.8  # between such a passage and what is asked for
_SAMPLE_SEED = 21
_QUERIES_AT_ONCE = 256  # bounds the table of cosines to 256 x passages
_ROUNDING = 1e-6  # a length that float32 has made 1 is no further from it
_SAME = 1e-5  # cosines are no nearer to one another than float32 computes them


class Neighbours(Protocol):
    """What an engine has built or opened: passages that never change, searched by cosine."""

    def nearest(self, queries: Float32, k: int, breadth: int) -> tuple[Int64, Float32] | None:
        """Labels [q, k] and cosines [q, k], best first; None: it does not come to ``k``.

        ``breadth``: candidates looked at for a query; more find more, and take longer.
        """

    def hide(self, labels: Int64) -> None:
        """Never find these labels again; what `save` wrote before stays as it is."""

    def save(self, path: Path) -> None:
        """Write it to one file, which is the same for the same passages."""


class Engine(Protocol):
    """How a base is built and opened. It has one file, of a name of its own."""

    file: str

    def __init__(self, options: IndexOptions) -> None:
        """Nothing is connected to yet."""

    def build(
        self, labels: Int64, vectors: Float32, *, threads: int, told: Callable[[int, int], None]
    ) -> Neighbours:
        """Index unit vectors [n, d] under labels [n]; ``told``: passages done, and in all."""

    def load(self, path: Path, count: int, dimension: int) -> Neighbours:
        """Open a file whose bytes are those that were saved; ValueError where it can't be."""

    def forget(self, named: Iterable[Path]) -> None:
        """Drop what it keeps outside of these files of its own that none of them names."""


ENGINES: Mapping[str, type[Engine]] = {"hnswlib": Hnsw, "milvus": Milvus}
"""To add one: its file beside `daemon.library.dense.graph`, and its line here."""


class Unsearched:
    """The base of another engine: found by comparing with all, until it is built anew."""

    def nearest(self, queries: Float32, k: int, breadth: int) -> None:
        """Not by this."""

    def hide(self, labels: Int64) -> None:
        """Who compares with all leaves them out."""

    def save(self, path: Path) -> None:
        """Its files are linked to, never written."""
        raise ValueError(f"nothing to write to {path}")


def engine_of(options: IndexOptions) -> Engine:
    """The engine that was chosen."""
    return ENGINES[options.engine](options)


@dataclass(frozen=True)
class Accuracy:
    """How a base is searched, and how many of the ten nearest passages are found then.

    ``breadth`` 0: by comparing with all. ``usual_recall``: with `USUAL_BREADTH`.
    """

    breadth: int
    recall: float
    usual_recall: float


def measured(neighbours: Neighbours, labels: Int64, vectors: Float32) -> Accuracy:
    """How broadly this base is to be searched, found by asking for what is known.

    The sample: passages drawn evenly, so that where many lie, many are asked for; each is
    moved in a drawn direction, for a question is no passage: it is not in the graph, and lies
    beside the passages and not among them. At a cosine of 0.8 it is as near to its passage
    as questions are that a trained encoder places well. A find counts by its cosine, for
    among equal passages it is all the same which are found (as ann-benchmarks counts,
    Aumüller, Bernhardsson and Faithfull, 2020).
    """
    k = min(_RECALL_AT, len(vectors))
    if not k:
        return Accuracy(USUAL_BREADTH, 1.0, 1.0)
    chance = np.random.Generator(np.random.Philox(key=_SAMPLE_SEED))
    rows = np.sort(chance.permutation(len(vectors))[:_SAMPLE])
    aside = unit(chance.standard_normal((len(rows), vectors.shape[1])).astype("<f4"))
    asked = _SAMPLE_COSINE * vectors[rows] + (1.0 - _SAMPLE_COSINE**2) ** 0.5 * aside
    asked = np.ascontiguousarray(asked, dtype="<f4")
    _, exact = compare_with_all(asked, labels, vectors, k)

    def recall(breadth: int) -> float:
        found = neighbours.nearest(asked, k, breadth)
        if found is None:
            return 0.0
        return float((found[1] >= exact[:, -1:] - _SAME).mean())

    breadth, usual = USUAL_BREADTH, recall(USUAL_BREADTH)
    now = usual
    while now < LEAST_RECALL and breadth < min(_GREATEST_BREADTH, len(vectors)):
        breadth *= 2
        now = recall(breadth)
    return Accuracy(breadth, now, usual) if now >= LEAST_RECALL else Accuracy(0, 1.0, usual)


def compare_with_all(
    queries: Float32,
    labels: Int64,
    vectors: Float32,
    k: int,
    *,
    without: Sequence[int] | Int64 = (),
) -> tuple[Int64, Float32]:
    """The exact nearest of each query: labels [q, n] and cosines [q, n], best first.

    n is ``k`` or all there are ``without`` those labels. ``vectors`` [m, d] have length 1,
    ``queries`` [q, d] any. Where several are as near as the last one, which of them is the
    last is arbitrary.
    """
    left_out = np.isin(labels, without)
    n = min(k, len(labels) - int(left_out.sum()))
    found = np.zeros((len(queries), n), np.int64), np.zeros((len(queries), n), np.float32)
    for start in range(0, len(queries) if n else 0, _QUERIES_AT_ONCE):
        some = slice(start, start + _QUERIES_AT_ONCE)
        cosines = unit(queries[some]) @ vectors.T  # [<= 256, m]
        cosines[:, left_out] = -np.inf
        nearest = np.sort(np.argpartition(-cosines, n - 1, axis=1)[:, :n], axis=1)
        near = np.take_along_axis(cosines, nearest, 1)
        order = np.argsort(-near, axis=1, kind="stable")
        found[0][some] = labels[np.take_along_axis(nearest, order, 1)]
        found[1][some] = np.take_along_axis(near, order, 1)
    return found


def among(labels: Int64, ascending: Int64) -> Bools:
    """[n] which labels are among others, which ascend."""
    if not len(ascending):
        return np.zeros(len(labels), dtype=bool)
    places = np.searchsorted(ascending, labels)
    present: Bools = ascending.take(places, mode="clip") == labels
    return present


def unit(vectors: Float32) -> Float32:
    """Rows of length 1; those of zeros stay. Raises ValueError for what is no number.

    Those of length 1 stay to the last bit: else the vectors of a passage would tell how often
    others have come and gone, for the base is built anew then.
    """
    if not np.isfinite(vectors).all():
        raise ValueError("vectors must be finite; these have NaN or infinity")
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    stays = (lengths == 0.0) | (np.abs(lengths - 1.0) < _ROUNDING)
    return np.asarray(vectors / np.where(stays, 1.0, lengths), dtype="<f4")
