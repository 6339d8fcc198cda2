"""Worker processes: one kind of arithmetic each, ended and started again as attempts go."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator

import psutil
import pytest

from daemon.workers import Worker, WorkerCrashed, report


@pytest.fixture
async def worker() -> AsyncIterator[Worker]:
    worker = Worker("arithmetic", threads=1)
    yield worker
    await worker.stop()


def reporting(item: int) -> int:
    report(item)
    return os.getpid()


def sleeping() -> None:
    import time

    time.sleep(60)


async def test_a_worker_that_is_started_while_the_old_one_ends_reports(worker: Worker) -> None:
    """An attempt is given up, and the next one trains at once."""
    seen: list[int] = []
    old = await worker.run_reporting(seen.append, reporting, 1)
    ending = asyncio.create_task(worker.stop())
    await asyncio.sleep(0)
    new = await worker.run_reporting(seen.append, reporting, 2)
    await ending
    assert await worker.run_reporting(seen.append, reporting, 3) == new != old
    while len(seen) < 3:
        await asyncio.sleep(0.01)
    assert seen == [1, 2, 3]


async def test_a_call_whose_worker_is_ended_fails_and_the_next_one_works(worker: Worker) -> None:
    old = await worker.run(reporting, 1)
    call = asyncio.create_task(worker.run(sleeping))
    await asyncio.sleep(0.2)
    await worker.stop()
    with pytest.raises(WorkerCrashed):
        await call
    assert not psutil.pid_exists(old)
    assert await worker.run(reporting, 2) != old
