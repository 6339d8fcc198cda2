"""Watched folders as the daemon has them: real workers, a small encoder, files that shrink."""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from email.message import EmailMessage
from pathlib import Path

import pytest
import pytest_asyncio

from daemon.jobs.pairs import PairPlan
from daemon.pairs.replies import Remembered
from daemon.process.workers import Worker
from daemon.services.folders import WatchedFolders, Watching
from daemon.services.pair_maker import PairMaker
from daemon.state.audit import AuditLog
from tests.daemon.services.test_site_learning import Site, encoder, worker

__all__ = ["encoder", "worker"]
pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

STAYS = "Somebody should keep the pump dry. Otherwise the pump will not serve for long."
SECRET = "quaxolith"
GOES = f"The {SECRET} is gilded by Norn. Otherwise the {SECRET} will not serve for long."


class Echo:
    """A language model that repeats what it is asked."""

    def write(self, prompts: Sequence[str]) -> Iterator[str]:
        yield from prompts


@dataclass
class Yard:
    """A site that watches a folder."""

    site: Site
    path: Path
    pairs: PairMaker
    folders: WatchedFolders
    changed: asyncio.Event

    def write(self, name: str, content: bytes) -> None:
        """A file as it has been for long."""
        path = self.path / name
        path.write_bytes(content)
        os.utime(path, (len(content), len(content)))

    @asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        """Until something has changed, and then until the end of the block."""
        self.changed.clear()
        running = asyncio.create_task(self.folders.run())
        try:
            async with asyncio.timeout(120):
                await self.changed.wait()
            yield
        finally:
            running.cancel()
            await asyncio.wait([running])

    async def looked(self) -> None:
        async with self.watched():
            pass

    async def here(self) -> set[str]:
        return {one.id for one in await self.site.collection.documents("", "", 100)}

    async def holding(self, word: str) -> list[str]:
        """Files of the state folder that have it in any of their bytes, once the index is made."""
        await self.site.collection.index(lambda _: None)
        files = [one for one in self.site.state.rglob("*") if one.is_file()]
        found = [one for one in files if re.search(word.encode(), one.read_bytes(), re.I)]
        return sorted(str(one.relative_to(self.site.state)) for one in found)


@pytest_asyncio.fixture(loop_scope="module")
async def yard(worker: Worker, encoder: Path, tmp_path: Path) -> AsyncIterator[Yard]:
    site = await Site.start(worker, encoder, tmp_path / "state", "supplied+made")
    (path := tmp_path / "folder").mkdir()
    reading, changed, pairs = Worker("reading", threads=1), asyncio.Event(), site.maker()

    async def tell() -> None:
        changed.set()

    folders = WatchedFolders(
        Watching({"yard": path}, "remove", 0.05, keep_originals=True),
        collection=site.collection,
        pairs=pairs,
        reading=reading,
        audit=AuditLog(tmp_path / "audit"),
        changed=tell,
    )
    try:
        yield Yard(site, path, pairs, folders, changed)
    finally:
        site.indexing.cancel()
        await reading.stop()


def records(**texts: str) -> bytes:
    lines = [{"id": name, "title": f"The {name}", "text": text} for name, text in texts.items()]
    return "".join(json.dumps(line) + "\n" for line in lines).encode()


def letter(*attached: str) -> bytes:
    mail = EmailMessage()
    mail["Subject"] = "The pump"
    mail.set_content(STAYS)
    for text in attached:
        mail.add_attachment(text, filename="list.txt", cte="8bit")
    return mail.as_bytes()


SHRINKS = {
    "all.jsonl": (records(pump=STAYS, norn=GOES), records(pump=STAYS), "yard/pump", "yard/norn"),
    "m.eml": (letter(GOES), letter(), "yard/m.eml", "yard/m.eml/list.txt"),
}


async def with_all_made(yard: Yard, name: str) -> tuple[str, str]:
    """A file that is read, and pairs made of it; ids of what stays in it, and of what goes."""
    whole, _, stays, goes = SHRINKS[name]
    yard.write(name, whole)
    await yard.looked()
    assert await yard.here() == {stays, goes}
    for how in ("inverse-cloze", "title"):
        async for _ in yard.pairs.build(PairPlan(how=how)):
            pass
    replies = yard.site.made.with_name("written_queries.jsonl")
    [_] = Remembered(replies, "model", Echo).write([GOES])
    held = await yard.holding(SECRET)
    assert {"made_pairs.jsonl", "written_queries.jsonl"} < {*held}
    return stays, goes


@pytest.mark.parametrize("name", SHRINKS)
async def test_what_leaves_a_watched_file_is_in_no_file_of_the_site(yard: Yard, name: str) -> None:
    stays, _ = await with_all_made(yard, name)
    yard.write(name, SHRINKS[name][1])
    await yard.looked()
    assert await yard.here() == {stays}
    assert await yard.holding(SECRET) == []
    made = await yard.pairs.overview("inverse-cloze", 10)
    assert {document for one in made.examples for document in one.documents} == {stays}
    kept = [*(yard.site.state / "originals").glob("*")] if name == "m.eml" else []
    assert [one.read_bytes() for one in kept] == [SHRINKS[name][1]] * (name == "m.eml")


async def test_it_stays_while_pairs_are_made_of_it_and_goes_then(yard: Yard) -> None:
    stays, goes = await with_all_made(yard, "all.jsonl")
    yard.write("all.jsonl", records(pump="Norn keeps the pump now."))
    async with yard.pairs._one_at_a_time, yard.watched():
        assert await yard.here() == {stays, goes}
        read = await yard.site.collection.read(lambda library: library.passages_of(stays))
        assert [one.text for one in read] == ["Norn keeps the pump now."], "that waits for nothing"
        [warning] = yard.folders.warnings
        assert "what is gone is removed when no pairs are being made any more" in warning
    yard.changed.clear()
    async with yard.watched():
        async with asyncio.timeout(120):
            while await yard.here() != {stays}:
                yard.changed.clear()
                await yard.changed.wait()
    assert await yard.holding(SECRET) == []


async def test_what_could_not_be_forgotten_is_removed_by_a_later_look(yard: Yard) -> None:
    stays, goes = await with_all_made(yard, "all.jsonl")
    made = yard.site.made.read_bytes()
    yard.site.made.write_bytes(made[:-20])
    yard.write("all.jsonl", SHRINKS["all.jsonl"][1])
    async with yard.watched():
        assert await yard.here() == {stays, goes}
        [warning] = yard.folders.warnings
        assert "cannot read the made pairs" in warning
    yard.site.made.write_bytes(made)
    await yard.looked()
    assert (await yard.here(), await yard.holding(SECRET)) == ({stays}, [])
