"""Changes to the library, one at a time."""

from __future__ import annotations

import asyncio

import pytest

from daemon.services.library_changes import ChangeUnderWay, LibraryChanges


async def test_a_second_persons_change_is_refused() -> None:
    changes = LibraryChanges()
    with changes.asked_for("an ingest"):
        assert changes.under_way == "an ingest that began 0 s ago"
        with (
            pytest.raises(ChangeUnderWay, match="an ingest that began 0 s ago is under way"),
            changes.asked_for("a removal"),
        ):
            pass
    assert changes.under_way == ""
    with changes.asked_for("a removal"):
        pass


async def test_what_changes_waits_for_its_turn_and_not_for_who_is_silent() -> None:
    changes, done = LibraryChanges(), list[str]()

    async def folder() -> None:
        async with changes.turn():
            done.append("folder")

    with changes.asked_for("an ingest"):
        async with changes.turn():
            waits = asyncio.create_task(folder())
            await asyncio.sleep(0)
            done.append("first batch")
        await waits  # while the next batch is waited for
        async with changes.turn():
            done.append("second batch")
    assert done == ["first batch", "folder", "second batch"]
