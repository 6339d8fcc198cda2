"""Two model versions; as a program, written into a folder by a process that a fault may kill."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from crypto.arrays import Float32
from daemon.state.versions import ShapeManifest, write_version

SHAPE = ShapeManifest("test", (("w", (300,)), ("b", (7,))))


def vector(seed: int) -> Float32:
    return np.random.default_rng(seed).standard_normal(SHAPE.total, dtype=np.float32)


def write_both(folder: Path) -> None:
    for seed in (1, 2):
        digest, _ = write_version(folder, SHAPE.digest, vector(seed))
        print(digest.hex(), flush=True)


if __name__ == "__main__":
    write_both(Path(sys.argv[1]))
