"""Changes to the library, one at a time."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import pytest

from daemon.services.library_changes import ChangeUnderWay, LibraryChanges


async def test_a_second_persons_change_is_refused_and_the_daemons_own_waits() -> None:
    changes, done = LibraryChanges(), list[str]()

    async def by_itself() -> None:
        async with changes.by_itself():
            done.append("by itself")

    async with changes.asked_for("an ingest"):
        own = asyncio.create_task(by_itself())
        with pytest.raises(ChangeUnderWay, match="an ingest that began 0 s ago is under way"):
            async with changes.asked_for("an ingest"):
                pass
        done.append("asked for")
    await own
    assert done == ["asked for", "by itself"]
    async with changes.asked_for("an ingest"):
        pass


async def test_a_person_waits_for_the_daemons_own_change_and_is_not_refused() -> None:
    changes = LibraryChanges()

    async def asked_for() -> None:
        async with changes.asked_for("an ingest"):
            pass

    async with AsyncExitStack() as own:
        await own.enter_async_context(changes.by_itself())
        person = asyncio.create_task(asked_for())
        for _ in range(5):
            await asyncio.sleep(0)
        assert not person.done()
        with pytest.raises(ChangeUnderWay):
            await asked_for()
    await person
