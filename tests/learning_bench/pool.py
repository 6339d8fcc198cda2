"""Cells side by side: each in a process of its own, which is told by number what to do.

Cells are independent of one another, so as many run at once as there are processors, each
with its share of threads. Those that share a run should stand apart in the plan: a run
that two cells need at the same moment is trained twice, and either result is kept.
"""

from __future__ import annotations

import multiprocessing
import os
import queue
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from daemon.learning.retriever.spec import RetrieverSpec
from tests.learning_bench import cells
from tests.learning_bench.cells import Cell, Work

Said = Callable[[Work, str], None]

_POLL_SECONDS = 0.5
# What a process was started with: (works, spec, cache, where it tells how far it is).
_given: tuple[Sequence[Work], RetrieverSpec, Path, Any] | None = None


def computed(
    works: Sequence[Work], spec: RetrieverSpec, folder: Path, jobs: int, said: Said
) -> Iterator[tuple[Work, Cell]]:
    """Each work with its cell, in the order in which they are finished.

    A cell that fails ends the rest with its exception; so does leaving the loop.
    """
    if jobs == 1:
        for work in works:
            yield work, cells.compute(work, spec, folder, lambda what, w=work: said(w, what))  # type: ignore[misc]
        return
    fresh = multiprocessing.get_context("spawn")  # torch's threads don't survive a fork
    told = fresh.Queue()
    given = (tuple(works), spec, folder, told)
    with ProcessPoolExecutor(jobs, fresh, _start, (given,)) as pool:
        waiting = {pool.submit(_one, row): works[row] for row in range(len(works))}
        try:
            while waiting:
                done, _ = wait(waiting, _POLL_SECONDS, FIRST_COMPLETED)
                for row, what in _said_so_far(told):
                    said(works[row], what)
                for future in done:
                    yield waiting.pop(future), future.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            for child in multiprocessing.active_children() if waiting else ():
                child.terminate()


def _said_so_far(told: Any) -> Iterator[tuple[int, str]]:
    while True:
        try:
            yield told.get_nowait()
        except queue.Empty:
            return


def _start(given: tuple[Sequence[Work], RetrieverSpec, Path, Any]) -> None:
    global _given
    _given = given
    # Ctrl-C is for the process that waits: it ends us, and scratch folders go with us.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _leave)
    torch.set_num_threads(given[1].threads)


def _leave(_number: int, _frame: FrameType | None) -> None:
    sys.exit(128 + signal.SIGTERM)


def _one(row: int) -> Cell:
    assert _given is not None
    works, spec, folder, told = _given
    try:
        return cells.compute(works[row], spec, folder, lambda what: told.put((row, what)))
    except SystemExit:
        # The pool would hand it on as a result, and give us the next cell. The scratch folder
        # is gone by now, and nothing else is ours to tidy.
        os._exit(128 + signal.SIGTERM)


def limit_threads(threads: int) -> None:
    """Of the libraries that processes started from here on load."""
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = str(threads)
