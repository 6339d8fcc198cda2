"""Worker processes: one kind of arithmetic each, ended and started again as attempts go."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator

import psutil
import pytest

from daemon.workers import Worker, WorkerCrashed, import_once, report


@pytest.fixture(params=[False, True], ids=["spawned", "forked"])
async def worker(request: pytest.FixtureRequest) -> AsyncIterator[Worker]:
    import_once(["fractions"], threads=1)
    worker = Worker("arithmetic", threads=1, forked=request.param)
    yield worker
    await worker.stop()


def reporting(item: int) -> int:
    report(item)
    return os.getpid()


def sleeping() -> None:
    time.sleep(60)


def whereabouts() -> tuple[bool, str, int]:
    """Whether what was to be imported is here, the limit on threads, and the parent."""
    return "fractions" in sys.modules, os.environ["OMP_NUM_THREADS"], os.getppid()


async def test_a_worker_that_is_started_while_the_old_one_ends_reports(worker: Worker) -> None:
    """An attempt is given up, and the next one trains at once."""
    seen: list[int] = []

    async def heard(item: int) -> int:
        """Reports until one is heard: what arrives when its call is over is for nobody."""
        while True:
            process = await worker.run_reporting(seen.append, reporting, item)
            if item in seen:
                return process

    old = await heard(1)
    ending = asyncio.create_task(worker.stop())
    await asyncio.sleep(0)
    new = await heard(2)
    await ending
    assert await heard(3) == new != old


async def test_a_call_whose_worker_is_ended_fails_and_the_next_one_works(worker: Worker) -> None:
    old = await worker.run(reporting, 1)
    call = asyncio.create_task(worker.run(sleeping))
    await asyncio.sleep(0.2)
    await worker.stop()
    with pytest.raises(WorkerCrashed):
        await call
    assert not psutil.pid_exists(old)
    assert await worker.run(reporting, 2) != old


async def test_a_forked_worker_has_what_was_imported_once_for_all() -> None:
    import_once(["fractions"], threads=1)
    workers = [Worker(name, threads=1, forked=True) for name in ("one", "other")]
    try:
        one, other = [await worker.run(whereabouts) for worker in workers]
    finally:
        for worker in workers:
            await worker.stop()
    assert one == other
    imported, limit, parent = one
    assert imported
    assert limit == "1"
    assert psutil.Process(parent).ppid() == os.getpid()
    assert psutil.Process(parent).num_threads() == 1, "no thread is lost when it forks"
