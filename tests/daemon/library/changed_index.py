"""An index and a change of it; as a program, saved by a process that a fault may kill.

python -m tests.daemon.library.changed_index FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from daemon.library.dense.folder import newest_index, save_index
from daemon.library.dense.index import Wanted, update_index

MODEL, BEFORE, AFTER = b"m" * 32, b"b" * 32, b"a" * 32
COUNT, MORE, DIMENSION = 1200, 20, 6


def vectors_of(
    labels: np.ndarray[tuple[int], np.dtype[np.int64]],
) -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
    """Each label's own, whenever it is asked for."""
    table = np.random.default_rng(7).normal(size=(COUNT + MORE, DIMENSION)).astype(np.float32)
    return table[labels]


def wanted(first: int, end: int) -> Wanted:
    """The passages from ``first`` to before ``end``."""
    labels = np.arange(first, end, dtype=np.int64)
    contents = np.zeros((len(labels), 32), np.uint8)
    contents[:, :8] = labels.view(np.uint8).reshape(-1, 8)
    return Wanted(labels, contents, vectors_of)


def save_both(root: Path) -> tuple[Path, Path]:
    """Save an index, then one that shares its base: ten passages fewer, and some more."""
    before = update_index(None, wanted(0, COUNT))
    first = save_index(before, root, MODEL, BEFORE)
    print("first", flush=True)
    changed = update_index(newest_index(root, MODEL), wanted(10, COUNT + MORE))
    second = save_index(changed, root, MODEL, AFTER)
    print("second", flush=True)
    return first, second


if __name__ == "__main__":
    save_both(Path(sys.argv[1]))
