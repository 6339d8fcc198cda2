"""A job that nobody waits for any more hears of it, and its worker goes on with the next one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from daemon.process.workers import Worker
from tests.daemon.process.jobs import asking_a_model, is_given_up, noting, until_given_up
from tests.daemon.process.model_server import writing
from tests.support.lines import until


@pytest.fixture
async def worker() -> AsyncIterator[Worker]:
    worker = Worker("arithmetic", threads=1)
    yield worker
    await worker.stop()


async def cancelled(call: asyncio.Task[object]) -> None:
    call.cancel()
    await asyncio.wait([call])
    assert call.cancelled()


async def test_a_job_under_way_hears_and_its_process_stays(worker: Worker, tmp_path: Path) -> None:
    _, before = await worker.run(is_given_up)
    begun, told = asyncio.Event(), tmp_path / "told"
    call = asyncio.create_task(
        worker.run_reporting(lambda _: begun.set(), until_given_up, told),
    )
    await begun.wait()
    await cancelled(call)
    async with asyncio.timeout(60):
        assert await worker.run(is_given_up) == (False, before), "what was loaded is there still"
    assert told.read_text() == "called"


async def test_what_waits_and_is_cancelled_is_never_begun(worker: Worker, tmp_path: Path) -> None:
    begun, told, never = asyncio.Event(), tmp_path / "told", tmp_path / "never"
    first = asyncio.create_task(
        worker.run_reporting(lambda _: begun.set(), until_given_up, told),
    )
    await begun.wait()
    waiting = asyncio.create_task(worker.run(noting, never))
    await asyncio.sleep(0)  # it waits for its turn
    await cancelled(waiting)
    await cancelled(first)
    await worker.run(noting, tmp_path / "next")
    assert not never.exists()


async def test_one_that_is_given_up_takes_no_other_along(worker: Worker, tmp_path: Path) -> None:
    for number in range(20):
        begun, told = asyncio.Event(), tmp_path / f"told-{number}"
        call = asyncio.create_task(
            worker.run_reporting(lambda _, begun=begun: begun.set(), until_given_up, told),  # type: ignore[misc]
        )
        await begun.wait()
        await cancelled(call)
        assert not (await worker.run(is_given_up))[0]


async def test_a_model_s_server_is_left_at_once(worker: Worker, tmp_path: Path) -> None:
    """It is silent, and may be for minutes: it hears that nobody waits, and need not go on."""
    with writing(lambda _: ["Oil burns."]) as server:
        server.hold()
        told = tmp_path / "told"
        call = asyncio.create_task(worker.run(asking_a_model, server.url, told))
        await asyncio.to_thread(server.begun.acquire)
        await cancelled(call)
        async with asyncio.timeout(60):
            assert not (await worker.run(is_given_up))[0]
        await asyncio.to_thread(server.hung_up.acquire)
        await until(told.exists)
    assert told.read_text() == "given up"


async def test_a_model_s_reply_comes_piece_by_piece(worker: Worker, tmp_path: Path) -> None:
    with writing(lambda _: ["Oil ", "burns", "."]) as server:
        server.hold()
        heard: list[object] = []
        told = tmp_path / "told"
        call = asyncio.create_task(
            worker.run_reporting(heard.append, asking_a_model, server.url, told)
        )
        server.let(2)
        await until(lambda: len(heard) == 2, within=60)
        assert not call.done()
        server.let()
        assert await call == "Oil burns."
    assert heard == ["Oil ", "Oil burns", "Oil burns."]
