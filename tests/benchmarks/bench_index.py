"""The index's life at 20,000 passages: built, searched, changed, on the disk.

Vectors of 384 numbers in drawn clusters, about as near to one another as an encoder's are.
The control of building and searching is hnswlib alone, in the same run, with the same settings
and queries in turn; that of a change, what every change cost before there was a delta: to build
and save it all.

    python -m tests.benchmarks.bench_index
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import hnswlib
import numpy as np
from numpy.typing import NDArray

from daemon.library.dense import graph
from daemon.library.dense.engines import USUAL_BREADTH
from daemon.library.dense.folder import load_index, newest_index, save_index
from daemon.library.dense.index import UpdatableIndex, Wanted, update_index
from daemon.library.dense.options import IndexOptions

PASSAGES, DIMENSION, CLUSTERS = 20_000, 384, 200
CHANGE = 100  # passages
QUERIES, WARM_UP, K = 400, 20, 50
SEED = 7
MODEL = b"m" * 32
BARE = "hnswlib alone, same settings"
WHOLE = "all built and saved anew"
FRACTION = 0.1  # of the base that may change before it is built anew

T = TypeVar("T")


def figures() -> list[dict[str, Any]]:
    """One row a figure; ratio > 1 means dearer than the control."""
    vectors = _clustered(PASSAGES + int(FRACTION * PASSAGES))
    with tempfile.TemporaryDirectory() as folder:
        return _figures(vectors, Path(folder))


def _figures(vectors: NDArray[np.float32], root: Path) -> list[dict[str, Any]]:
    bare = _bare(vectors[:PASSAGES])
    built, ours_s = _timed(lambda: update_index(None, _wanted(vectors, 0, PASSAGES)))
    bare_s = bare[1]
    first, saved_s = _timed(lambda: save_index(built, root, MODEL, b"0" * 32))
    before = _size(root)
    rows = [
        _row(f"index build, {PASSAGES} passages", ours_s, "s", BARE, bare_s),
        _row("recall@10 as measured at the build", built.base.accuracy.recall, ""),
        _row("bytes on disk a passage", before / PASSAGES, "bytes"),
    ]
    rows += _search_rows("no changes", load_index(first, MODEL), bare[0], vectors)
    more, changed_s = _timed(lambda: _changed(root, _wanted(vectors, 0, PASSAGES + CHANGE), b"1"))
    written = _size(root) - before
    most = int(FRACTION * PASSAGES)
    _changed(root, _wanted(vectors, 0, PASSAGES + most), b"2")
    full = newest_index(root, MODEL)
    if full is None or len(full.delta) != most or len(load_index(more, MODEL).delta) != CHANGE:
        raise RuntimeError("the changes are not in a delta: the benchmark measures nothing")
    rows += [
        _row(f"{CHANGE} passages more", changed_s, "s", WHOLE, ours_s + saved_s),
        _row(f"bytes written for {CHANGE} passages more", written, "bytes", WHOLE, before),
    ]
    rows += _search_rows(f"a delta of {most}", full, bare[0], vectors)
    if uri := os.environ.get("HANSE_MILVUS_URI"):
        rows += _at_a_server(IndexOptions("milvus", uri, "benchmark"), bare[0], vectors)
    removed = Wanted(*_table(1, PASSAGES), lambda labels: vectors[labels], removal="aa")
    _, removed_s = _timed(lambda: _changed(root, removed, b"3"))
    return [*rows, _row("a document removed (always built anew)", removed_s, "s")]


def _changed(root: Path, wanted: Wanted, name: bytes) -> Path:
    """As the learning worker does: what is there is read, changed, saved."""
    return save_index(update_index(newest_index(root, MODEL), wanted), root, MODEL, name * 32)


def _at_a_server(
    options: IndexOptions, bare: hnswlib.Index, vectors: NDArray[np.float32]
) -> list[dict[str, Any]]:
    """The same passages at a server, of which only the wall clock says what it takes."""
    started = time.perf_counter()
    built = update_index(None, _wanted(vectors, 0, PASSAGES), options=options)
    seconds = time.perf_counter() - started
    return [
        _row(f"index build at Milvus, {PASSAGES} passages", seconds, "s"),
        _row("recall@10 as measured at that build", built.base.accuracy.recall, ""),
        *_search_rows("at Milvus", built, bare, vectors),
    ]


def _search_rows(
    name: str, index: UpdatableIndex, bare: hnswlib.Index, vectors: NDArray[np.float32]
) -> list[dict[str, Any]]:
    """Milliseconds of one query, ours and the control's in turn: both meet the same neighbours."""
    chance = np.random.default_rng(SEED + 1)
    near = vectors[chance.integers(PASSAGES, size=QUERIES)]
    queries = near + 0.75 / DIMENSION**0.5 * chance.normal(size=near.shape).astype(np.float32)
    seconds: tuple[list[float], list[float]] = ([], [])

    def alone(queries: NDArray[np.float32], k: int) -> object:
        return bare.knn_query(queries, k=k, num_threads=1)

    for number in range(QUERIES):
        one = queries[number : number + 1]
        for search, taken in zip((index.search, alone), seconds, strict=True):
            started = time.perf_counter()
            search(one, K)
            if number >= WARM_UP:
                taken.append(time.perf_counter() - started)
    ours, control = (float(np.median(taken)) * 1000 for taken in seconds)
    return [_row(f"search p50, {K} of {index.count} passages, {name}", ours, "ms", BARE, control)]


def _bare(vectors: NDArray[np.float32]) -> tuple[hnswlib.Index, float]:
    index = hnswlib.Index(space="cosine", dim=DIMENSION)
    index.init_index(
        len(vectors), M=graph._M, ef_construction=graph._EF_CONSTRUCTION, random_seed=graph._SEED
    )
    _, seconds = _timed(lambda: index.add_items(vectors, np.arange(len(vectors)), num_threads=1))
    index.set_ef(USUAL_BREADTH)
    return index, seconds


def _timed(job: Callable[[], T]) -> tuple[T, float]:
    """Processor time: the figures are those of one core, whoever else uses the machine."""
    started = time.process_time()
    result = job()
    return result, time.process_time() - started


def _wanted(vectors: NDArray[np.float32], first: int, end: int) -> Wanted:
    return Wanted(*_table(first, end), lambda labels: vectors[labels])


def _table(first: int, end: int) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
    labels = np.arange(first, end, dtype=np.int64)
    contents = np.zeros((len(labels), 32), np.uint8)
    contents[:, :8] = labels.view(np.uint8).reshape(-1, 8)
    return labels, contents


def _clustered(count: int) -> NDArray[np.float32]:
    chance = np.random.default_rng(SEED)
    centres = chance.normal(size=(CLUSTERS, DIMENSION))
    drawn = centres[chance.integers(CLUSTERS, size=count)] + chance.normal(size=(count, DIMENSION))
    vectors = drawn.astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    return vectors


def _size(root: Path) -> int:
    """Bytes of all files, each once however many links there are."""
    found = {
        stat.st_ino: stat.st_size for p in root.rglob("*") if p.is_file() if (stat := p.stat())
    }
    return sum(found.values())


def _row(
    name: str, value: float, unit: str, control: str | None = None, beside: float | None = None
) -> dict[str, Any]:
    return {
        "name": name,
        "value": round(value, 4),
        "unit": unit,
        "control": control,
        "control_value": None if beside is None else round(beside, 4),
        "ratio": None if beside is None else round(value / beside, 4),
    }


if __name__ == "__main__":
    for row in figures():
        print(json.dumps(row))
