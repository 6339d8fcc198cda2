"""`fedd` with a trap: what no known bytes do to SEAL happens on purpose.

    python -m tests.faults.crashing_fedd --config site/fedd.toml     (HANSE_TAPE=folder)

As long as the folder holds a file ``trap`` that says "crash alder", "hang alder" or
"bomb alder", the crypto worker does that, once, when it takes in alder's update.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable
from pathlib import Path

from daemon import main as fedd
from daemon.jobs.sums.aggregation import CiphertextSum


def _crash() -> None:
    ctypes.string_at(0)


def _hang() -> None:
    while True:
        time.sleep(60)


def _bomb() -> None:
    bytearray(1 << 36)


_HAPPENINGS: dict[str, Callable[[], None]] = {"crash": _crash, "hang": _hang, "bomb": _bomb}


def _set_trap(folder: Path) -> None:
    add_file = CiphertextSum.add_file

    def trapped(self: CiphertextSum, path: Path, contributor: str, *, trailer: int = 0) -> None:
        trap = folder / "trap"
        what, _, whose = trap.read_text().partition(" ") if trap.exists() else ("", "", "")
        if whose == contributor:
            trap.unlink()
            _HAPPENINGS[what]()
        add_file(self, path, contributor, trailer=trailer)

    CiphertextSum.add_file = trapped  # type: ignore[method-assign]


# A worker imports its daemon's main module anew, under this name (multiprocessing.spawn).
if __name__ == "__mp_main__":
    _set_trap(Path(os.environ["HANSE_TAPE"]))

if __name__ == "__main__":
    fedd.main()
