"""What a site exports, another takes in: the same documents, texts, metadata and pairs."""

from __future__ import annotations

import peers.link.tls13  # noqa: F401  before anything imports grpc

# isort: split
import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import grpc
import pytest

from daemon.control.library import LibraryCalls
from daemon.control.originals import OriginalCalls
from daemon.fedctl.transfer.export import Exported, receive
from daemon.fedctl.transfer.sending import Ingested, Naming, send
from daemon.library.readers.documents import Block, Document, Pair, Reference, joined
from daemon.library.store import Library
from daemon.rounds.driver import Driver
from daemon.services.originals import KeptOriginals
from daemon.state.audit import AuditLog
from proto import control_pb2 as control
from tests.daemon.control.test_bounds import served
from tests.daemon.rounds.test_driver import around_of, collection_of, started

if TYPE_CHECKING:
    from proto.control_pb2_grpc import ControlAsyncStub

pytestmark = [pytest.mark.slow]

TEXT, SPANS = joined(
    [
        Block("heading", "Of doors"),
        Block("text", 'The door is green, "said" a\\b.\nIt opens outwards.'),
        Block("table", "Part\tTons\nSill\t2\t", 3, (0.125, 0.25, 0.5, 0.75)),
        Block("figure", "Ein grünes Tor \N{DOOR}", 4),
    ]
)
DOCUMENTS = [
    Document("house/door.pdf", "Doors", TEXT, "train", SPANS, "", "Ada Lock", "2024-02-29", "en",
             ("Very wet", "old")),
    Document("house/bare.txt", "", "  Nothing is known of it.\n\n", tags=()),
    Document("house_2/lamp.txt", "Lamps", "The lamp is lit at dusk." * 10, "test", tags=()),
]  # fmt: skip
PAIRS = [
    Pair("Which door?", ("house/door.pdf", "elsewhere/door"), "train"),
    Pair("Welche Lampe?", ("house_2/lamp.txt",), "test", Reference(('Die "rote".', "d\\"))),
    Pair(
        "Which of both?",
        ("house_2/lamp.txt", "house/door.pdf"),
        "valid",
        Reference((), "choice", "Two things are compared"),
    ),
    Pair("Which is still to come?", ("elsewhere/door",), "train"),
]


class Site:
    """A site's library behind the real control service."""

    def __init__(self, driver: Driver, audit: Path, stub: ControlAsyncStub) -> None:
        self.driver, self.audit, self.stub = driver, audit, stub

    @property
    def documents(self) -> list[Document]:
        with Library.open(collection_of(self.driver).library_path, read_only=True) as library:
            ids = [one.id for one in library.documents("", "", 1000)]
            return library.whole_documents(ids, 1 << 30)[0]

    @property
    def passages(self) -> list[tuple[str, str, str, str, int, Any]]:
        with Library.open(collection_of(self.driver).library_path, read_only=True) as library:
            found = [
                (p.id, p.title, p.text, p.context, p.page, p.place) for p in library.passages()
            ]
        return sorted(found)

    @property
    def pairs(self) -> list[Pair]:
        with Library.open(collection_of(self.driver).library_path, read_only=True) as library:
            return [pair for _, pair in library.pairs_naming("", None, 0, 1000)]

    async def export(self, file: Path, **asked: Any) -> Exported:
        with file.open("wb") as out:
            request = control.ExportDocumentsRequest(**asked)
            return await receive(self.stub, request, out.write, lambda _: None)

    async def ingest(self, file: Path, naming: Naming | None = None) -> Ingested:
        return await send(self.stub, [file], lambda _: None, naming)


class SomeCalls(OriginalCalls, LibraryCalls):
    """What is asked of documents and their files."""


@asynccontextmanager
async def site(folder: Path, *, keeping: bool = False) -> AsyncIterator[Site]:
    await asyncio.to_thread(folder.mkdir)
    async with AsyncExitStack() as stack:
        driver = await started(folder, stack)
        indexing = asyncio.create_task(collection_of(driver).run())
        stack.callback(indexing.cancel)
        collection_of(driver).adopt(driver.protocol.durable.head_digest)
        audit = AuditLog(folder / "asked")
        stack.callback(audit.close)
        collection = collection_of(driver)
        kept = KeptOriginals(collection, collection._learning, keeping)
        services = SimpleNamespace(originals=kept, folders=SimpleNamespace(states=[]))
        around = around_of(driver, audit, services)
        # mypy misses the other topics' methods, which are not asked.
        calls = SomeCalls(around, "uid:0")  # type: ignore[abstract]
        stub = await stack.enter_async_context(served(calls, folder))
        yield Site(driver, folder / "asked", cast(Any, stub))


async def test_an_export_makes_an_empty_site_the_same(tmp_path: Path) -> None:
    file, again = tmp_path / "all.jsonl", tmp_path / "again.jsonl"
    async with site(tmp_path / "a") as full, site(tmp_path / "b") as empty:
        await collection_of(full.driver).ingest(DOCUMENTS, PAIRS)
        exported = await full.export(file)
        assert (exported.documents, exported.pairs, exported.unknown) == (3, 3, [])
        taken = await empty.ingest(file)
        assert (taken.documents_new, taken.pairs, taken.problems) == (3, 3, [])
        assert empty.documents == full.documents
        by_id = sorted(DOCUMENTS, key=lambda one: one.id)
        assert empty.documents == [
            replace(one, language=one.language or found.language)
            for one, found in zip(by_id, empty.documents, strict=True)
        ]
        assert empty.passages == full.passages
        assert empty.pairs == full.pairs == PAIRS[:3]
        await empty.export(again)
        assert again.read_bytes() == file.read_bytes()
        unchanged = await full.ingest(file)
        assert (unchanged.documents_unchanged, unchanged.problems) == (3, [])
    entries = "".join(part.read_text() for part in (tmp_path / "a" / "asked").iterdir())
    assert '"action":"export"' in entries.replace(" ", "")
    assert "green" not in entries
    assert "house/door" not in entries


async def test_some_are_exported_with_the_pairs_that_name_them(tmp_path: Path) -> None:
    file = tmp_path / "some.jsonl"
    async with site(tmp_path / "a") as full:
        await collection_of(full.driver).ingest(DOCUMENTS, PAIRS)
        await full.export(file, begins="house/")
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        assert [one["id"] for one in lines[:2]] == ["house/bare.txt", "house/door.pdf"]
        assert [one["query"] for one in lines[2:]] == ["Which door?", "Which of both?"]
        assert lines[0] == {"id": "house/bare.txt", "text": "  Nothing is known of it.\n\n"}
        ids = ["house_2/lamp.txt", "gone", "house_2/lamp.txt"]
        exported = await full.export(file, ids=ids)
        assert (exported.documents, exported.total, exported.unknown) == (1, 1, ["gone"])
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        assert [one["positives"] for one in lines[1:]] == [
            ["house_2/lamp.txt"],
            ["house_2/lamp.txt", "house/door.pdf"],
        ]


async def test_what_comes_in_with_tags_keeps_those_it_said(tmp_path: Path) -> None:
    file = tmp_path / "docs.jsonl"
    file.write_text('{"id": "a", "text": "A door.", "tags": ["said"]}\n{"id": "b", "text": "B."}\n')

    async def tags(naming: Naming) -> list[tuple[str, ...] | None]:
        await here.ingest(file, naming)
        return [one.tags for one in here.documents]

    async with site(tmp_path / "a") as here:
        assert await tags(Naming(tags=("new",))) == [("new", "said"), ("new",)]
        assert await tags(Naming()) == [("said",), ("new",)], "of b nothing is said"
        assert await tags(Naming(tags=())) == [("said",), ()]


async def test_a_large_library_is_exported_part_by_part(tmp_path: Path) -> None:
    """A reader that waits is waited for: parts are made as they are taken."""
    many = [Document(f"d{number:03}", "", "x " * (300 << 10)) for number in range(24)]
    async with site(tmp_path / "a") as full:
        with Library.open(collection_of(full.driver).library_path) as library:
            library.put_documents(many, splitter=cast(Any, _Whole()))
        call = full.stub.ExportDocuments(control.ExportDocumentsRequest())
        parts = [part async for part in call]
        assert sum(len(part.documents) for part in parts) == 24
        assert max(part.ByteSize() for part in parts) < 2 << 20


class _Whole:
    """Leaves a document uncut: only its text is of interest."""

    name = "none"

    def __call__(self, _document: Document, /) -> list[Any]:
        return []


@pytest.mark.parametrize(
    "asked",
    [
        {"begins": "x" * 513},
        {"ids": ["x"] * 10_001},
        {"ids": [""]},
        {"ids": ["x" * 513]},
    ],
)
async def test_an_export_out_of_bounds_is_refused(tmp_path: Path, asked: dict[str, Any]) -> None:
    calls: Any = LibraryCalls
    around = SimpleNamespace(driver=None, audit=None)
    async with served(calls(around, "uid:0"), tmp_path) as stub:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            async for _ in stub.ExportDocuments(control.ExportDocumentsRequest(**asked)):
                pass
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
