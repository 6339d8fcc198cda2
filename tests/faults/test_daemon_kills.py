"""A real daemon is killed at fifty drawn moments of an ingest, and at fifty of a removal.

Each story is one site's: `fedctl ingest` of a thousand documents is struck five times, begun
again after each as a person would, and brought to its end; then so is `fedctl documents remove`
of half of them. Every third blow takes fedctl too, every other one the daemon's workers. The
moments are spread over the whole of what an undisturbed site takes; half of an ingest's over
what follows its first write, for most of its time is reading. Inside the library's own work,
tests/faults/test_library_kills.py strikes more finely.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sqlite3
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

import docx
import numpy as np
import pytest
import pytest_asyncio

from daemon.library.dense import folder as index_folder
from tests.faults.test_library_kills import holding
from tests.live.test_operations import fedctl, started
from tests.support.federation import LiveFederation, LiveSite

pytestmark = [
    pytest.mark.slow,
    pytest.mark.endurance,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(3000),
]

SEED = 28
STORIES, BLOWS = 10, 5
THINGS = ("anchor", "beacon", "capstan", "dredge", "fender", "gangway", "hawser", "jetty")
GONE = b"quillon"  # in the text of every document that is removed, and of no other
# Every row of a table is of one document or none, but for its number in this very library.
COMPARED = {
    "document": "*",
    "document_text": "*",
    "facet": "*",
    "passage": "id, document_id, title, text, content, context, kind, page, place, begins, ends",
}
REMOVE = ("documents", "remove", "--below", "gone/", "--yes", "--json")


def write_documents(folder: Path) -> Path:
    """A thousand in six formats, half of them below gone/."""
    for half, word in (("gone", GONE.decode()), ("kept", "rudder")):
        below = folder / half
        below.mkdir(parents=True)
        lines = [json.dumps(_line(half, word, n)) for n in range(350)]
        (folder / f"{half}.jsonl").write_text("\n".join(lines) + "\n")
        for n in range(50):
            (below / f"{n}.md").write_text(f"# The {THINGS[n % 8]}\n\n{_told(word, n, 'md')}\n")
            (below / f"{n}.txt").write_text(_told(word, n, "txt"))
        for n in range(30):
            told = _told(word, n, "html")
            (below / f"{n}.html").write_text(
                f"<html><body><h1>H {n}</h1><p>{told}</p></body></html>"
            )
        for n in range(10):
            (below / f"{n}.csv").write_text(f"part,count\n{word} {n},{n}\n{THINGS[n % 8]},{n}\n")
            written = docx.Document()
            written.add_heading(f"Of {n}", 1)
            written.add_paragraph(_told(word, n, "docx"))
            written.save(str(below / f"{n}.docx"))
    return folder


def _line(half: str, word: str, number: int) -> dict[str, str]:
    return {"id": f"{half}/line{number}", "title": "A line", "text": _told(word, number, "line")}


def _told(word: str, number: int, kind: str) -> str:
    thing = THINGS[number % 8]
    return f"The {thing} of {kind} {number} has a {word}. Who takes the {thing} signs for it."


@dataclass
class Contents:
    """A library, but for the numbers of its rows."""

    rows: dict[str, list[tuple[object, ...]]]
    vectors: dict[tuple[bytes, bytes], bytes]

    @classmethod
    def of(cls, site: LiveSite) -> Contents:
        path = site.folder / "state" / "library.sqlite3"
        with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as db:
            assert db.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
            rows = {
                table: sorted(db.execute(f"SELECT {what} FROM {table}").fetchall(), key=repr)  # noqa: S608
                for table, what in COMPARED.items()
            }
            features = db.execute("SELECT encoder, content, vector FROM feature").fetchall()
        return cls(rows, {(encoder, content): vector for encoder, content, vector in features})

    def compare(self, wanted: Contents) -> int:
        """How many vectors differ in their last bits, as other neighbours in a batch make it."""
        for table, rows in wanted.rows.items():
            assert self.rows[table] == rows, table
        assert self.vectors.keys() == wanted.vectors.keys()
        differing = 0
        for key, vector in wanted.vectors.items():
            if self.vectors[key] != vector:
                differing += 1
                here, there = (np.frombuffer(one, "<f4") for one in (self.vectors[key], vector))
                assert np.abs(here - there).max() <= 1e-6
        return differing


def recall(site: LiveSite) -> float:
    """Of the ten nearest by brute force, the share that the newest index finds."""
    (path,) = [one.parent for one in (site.folder / "state" / "index").glob("[!.]*/index.json")]
    model = bytes.fromhex(json.loads((path / "index.json").read_text())["model_digest"])
    opened = index_folder.load_index(path, model)
    base, delta = opened.base.embedded, opened.delta
    here = ~np.isin(base.labels, opened.gone)
    labels = np.concatenate([base.labels[here], delta.labels])
    vectors = np.concatenate([base.vectors[here], delta.vectors])
    assert sorted(labels.tolist()) == _rowids(site)
    asked = vectors[:: max(1, len(vectors) // 100)]
    found, _ = opened.search(asked, 10)
    cosines = asked @ vectors.T
    least = np.sort(cosines, axis=1)[:, -10] - 1e-6  # equal vectors are as good
    place = {label: row for row, label in enumerate(labels.tolist())}
    return float(
        np.mean([
            cosines[row, place[label]] >= least[row]
            for row, some in enumerate(found.tolist())
            for label in some
        ])
    )  # fmt: skip


def _rowids(site: LiveSite) -> list[int]:
    path = site.folder / "state" / "library.sqlite3"
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as db:
        return [row for (row,) in db.execute("SELECT rowid FROM passage ORDER BY rowid")]


@dataclass
class Calm:
    """What an undisturbed site comes to, and the seconds that it takes."""

    documents: Path
    full: Contents
    half: Contents
    seconds: dict[str, float]  # by `MARKS`, from there to the command's end


async def done(site: LiveSite, *words: str) -> float:
    """The command to its good end, begun again while another's is under way; its seconds."""
    async with asyncio.timeout(240):
        while True:
            begun = time.monotonic()
            code, out, err = await fedctl(site, *words)
            if code == 0:
                return time.monotonic() - begun
            assert "under way" in out + err, out + err


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def live(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LiveFederation]:
    root = tmp_path_factory.mktemp("struck")
    async with LiveFederation.start(root, ["elm"], without=["fir", "oak"]) as federation:
        yield federation


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def calm(live: LiveFederation, tmp_path_factory: pytest.TempPathFactory) -> Calm:
    site = live.sites["elm"]
    documents = write_documents(tmp_path_factory.mktemp("documents"))
    seconds = {"begun": await timed(site, "begun", "ingest", str(documents), "--json")}
    full = Contents.of(site)
    assert len(full.rows["document"]) == 1000
    seconds["removal"] = await timed(site, "removal", *REMOVE)
    half = Contents.of(site)
    assert len(half.rows["document"]) == 500
    # Of half the documents, the others being here: twice that.
    seconds["written"] = await timed(site, "written", "ingest", str(documents), "--json") * 2
    print(f"seed {SEED}; undisturbed seconds: {seconds}")
    return Calm(documents, full, half, seconds)


# Until when a command has got so far, by the files of the state folder that change then.
MARKS = {"begun": "", "written": "library.sqlite3*", "removal": "audit/*"}


async def reached(site: LiveSite, mark: str, command: asyncio.subprocess.Process) -> None:
    """The command has got as far as that, or is over."""
    before = _sizes(site, mark)
    while MARKS[mark] and command.returncode is None and _sizes(site, mark) == before:
        await asyncio.sleep(0.002)


def _sizes(site: LiveSite, mark: str) -> list[tuple[int, int]]:
    files = sorted((site.folder / "state").glob(MARKS[mark])) if MARKS[mark] else []
    kept = [file.stat() for file in files if not file.name.endswith("-shm")]
    return [(file.st_size, file.st_mtime_ns) for file in kept]


async def timed(site: LiveSite, mark: str, *words: str) -> float:
    """Seconds from the mark to the command's good end."""
    command = await started(site, *words)
    await reached(site, mark, command)
    since = time.monotonic()
    out, err = await command.communicate()
    assert command.returncode == 0, (out, err)
    return time.monotonic() - since


def moments(kind: str) -> Iterator[float]:
    """Fifty shares of the whole, one of each fiftieth, in a drawn order."""
    chance, count = random.Random(f"{SEED} {kind}"), STORIES * BLOWS
    shares = [(number + chance.random()) / count for number in range(count)]
    chance.shuffle(shares)
    return iter(shares)


def family(pid: int) -> list[int]:
    """A process and those that it has started, and they."""
    found = [pid]
    for one in found:
        for task in Path(f"/proc/{one}/task").glob("*/children"):
            found += [int(child) for child in task.read_text().split()]
    return found


async def struck(live: LiveFederation, mark: str, after: float, *words: str, number: int) -> int:
    """Kill the daemon in the midst of a command, start it again; the documents left by that.

    Every other time its workers too, as a machine's end does; they finish a step otherwise.
    """
    site = live.sites["elm"]
    command = await started(site, *words)
    await reached(site, mark, command)
    await asyncio.sleep(after)
    for pid in family(site.process.pid) if number % 2 else [site.process.pid]:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    if number % 3 == 2 and command.returncode is None:
        command.kill()
    await asyncio.gather(site.process.wait(), command.communicate())
    await live.launch("elm")
    await live.until_connected()
    return len(Contents.of(site).rows["document"])


@pytest.mark.parametrize("story", range(STORIES))
async def test_a_daemon_killed_in_its_work_ends_as_an_undisturbed_one(
    live: LiveFederation, calm: Calm, story: int
) -> None:
    begun, differing = time.monotonic(), 0
    left: dict[str, list[int]] = {"ingest": [], "removal": []}
    await done(live.sites["elm"], "documents", "remove", "--below", "kept/", "--yes")
    ingest = ("ingest", str(calm.documents), "--json")
    for kind, words, marks, wanted in (
        ("ingest", ingest, ("begun", "written"), calm.full),
        ("removal", REMOVE, ("removal", "removal"), calm.half),
    ):
        shares = [*moments(kind)][story * BLOWS : (story + 1) * BLOWS]
        for number, share in enumerate(shares, start=story):
            if left[kind][-1:] == [500] and words == REMOVE:  # it is over: another one
                await done(live.sites["elm"], *ingest)
            mark = marks[number // 2 % 2]
            after = share * calm.seconds[mark]
            left[kind].append(await struck(live, mark, after, *words, number=number))
        site = live.sites["elm"]
        code, out, err = await fedctl(site, *words)
        assert code == 0 or (words == REMOVE and left[kind][-1] == 500), out + err
        differing += Contents.of(site).compare(wanted)
        assert recall(site) >= 0.95
        code, out, err = await fedctl(site, "ask", "who takes the capstan of md 2?")
        assert code == 0, err
        assert "signs for it" in " ".join(out.split())
    assert holding(GONE, live.sites["elm"].folder / "state") == []
    print(
        f"story {story}: documents after each blow {left}, {differing} vectors of other last "
        f"bits, {time.monotonic() - begun:.0f} s"
    )
