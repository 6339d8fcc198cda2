"""What trains unasked in the worker of the rounds gives way to a run; a real worker and machine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from daemon.learning.generator.spec import GeneratorSpec
from daemon.process.workers import Worker
from daemon.services.personaliser import RunGoesFirstError, giving_way, until_idle
from tests.daemon.jobs.test_generator import PAIRS, spec, version_of
from tests.daemon.process.jobs import hang, reporting
from tests.daemon.services.test_generator import of, trained_once
from tests.simulation.network import World
from tests.support.lines import until

__all__ = ["spec"]


@pytest.fixture
async def worker() -> AsyncIterator[Worker]:
    worker = Worker("learning", threads=1)
    yield worker
    await worker.stop()


async def test_a_run_that_begins_ends_the_job_under_way(worker: Worker, tmp_path: Path) -> None:
    world, begun = World(sites=3, seed=1, min_participants=2), tmp_path / "begun"
    machine = world.machines["a"]
    giving = asyncio.create_task(giving_way(worker.run(hang, begun), worker, [machine]))
    await until(begun.exists, within=60)
    assert not giving.done()
    world.train("a", rounds=1)
    with pytest.raises(RunGoesFirstError, match="a run of rounds is under way"):
        await giving
    async with asyncio.timeout(60):
        assert await worker.run(reporting, 1), "the round's training has the worker"


async def test_a_job_that_waits_behind_the_rounds_own_ends_nothing_of_it(
    worker: Worker, tmp_path: Path
) -> None:
    world, told = World(sites=3, seed=1, min_participants=2), tmp_path / "told"
    world.train("a", rounds=1)
    others = asyncio.create_task(worker.run(hang, told))
    await until(told.exists, within=60)
    with pytest.raises(RunGoesFirstError):
        await giving_way(worker.run(reporting, 1), worker, [world.machines["a"]])
    assert not others.done()
    await worker.give_up(others)


async def test_a_version_is_judged_when_the_run_is_over(
    worker: Worker, spec: GeneratorSpec, tmp_path: Path
) -> None:
    site, start, update = trained_once(spec, tmp_path)
    for word in ("say", "tell"):
        site.fill([], [replace(one, query=f"{word}: {one.query}", split="valid") for one in PAIRS])
    world = World(sites=3, seed=1, min_participants=2)
    machine = world.machines["a"]
    world.train("a", rounds=1)
    generator = of(site, worker)
    await generator.prepare(site.versions, None)
    assert generator.own is not None
    await generator.prepare(site.versions, generator.own.name)
    judging = asyncio.create_task(generator.run([machine]))
    try:
        trained = version_of(site, start + update)
        generator.adopt(trained)
        idle = asyncio.create_task(until_idle([machine]))
        await asyncio.wait([idle, judging], timeout=2)
        assert (idle.done(), generator.in_use.judged) == (False, "")
        world.run_until_committed(1)
        await idle
        await until(lambda: generator.in_use.judged == trained.hex(), within=120)
    finally:
        judging.cancel()
        await asyncio.wait([judging])
