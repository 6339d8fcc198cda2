"""A site's collection beside other work of its workers: real ones, a small encoder."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio

from daemon.jobs import learning
from daemon.learning.options import EmbeddingProgress
from daemon.learning.retriever import training_data
from daemon.learning.retriever.spec import RetrieverSpec
from daemon.library.catalogue.originals import folder_of
from daemon.library.readers.documents import Document
from daemon.library.schema import LibraryError
from daemon.process.workers import Worker, import_once
from daemon.services import collection as collection_module
from daemon.services.collection import Collection, CollectionSettings, Listeners
from daemon.services.indexes import StandIn
from daemon.services.rights import of_all
from daemon.state.folder import StateFolder
from tests.support.small_models import small_encoder

pytestmark = pytest.mark.slow  # its workers load torch

SUBJECTS = ["pump", "lamp", "rope", "sail", "gate", "bell", "well", "kiln"]
DOCUMENTS = [Document(f"yard/{one}", one, f"Somebody keeps the {one} dry.") for one in SUBJECTS]
WORDS = sorted({word for one in DOCUMENTS for word in re.findall(r"\w+", one.text.lower())})
QUESTION = "Who keeps the pump dry?"


@dataclass
class Workers:
    learning: Worker
    answering: Worker


@pytest_asyncio.fixture
async def workers() -> AsyncIterator[Workers]:
    import_once(["daemon.learning.retriever.retriever"], threads=1)  # as others in this process
    both = Workers(*(Worker(name, threads=1, forked=True) for name in ("learning", "answering")))
    try:
        yield both
    finally:
        await both.learning.stop()
        await both.answering.stop()


@pytest.fixture
def spec(tmp_path: Path) -> RetrieverSpec:
    small_encoder(tmp_path / "encoder", WORDS)
    return RetrieverSpec(encoder=str(tmp_path / "encoder"), max_tokens=48, device="cpu")


def collection_of(
    workers: Workers, spec: RetrieverSpec, folder: Path, stand_in: StandIn | None = None
) -> Collection:
    return Collection(
        spec=spec,
        state=StateFolder(folder),
        settings=CollectionSettings(40, 3, True, 4),
        learning=workers.learning,
        answering=workers.answering,
        listeners=Listeners(lambda: None, lambda: None, lambda: None),
        stand_in=stand_in,
    )


def _until_there(path: Path) -> None:
    """A job that takes as long as somebody else wants it to."""
    while not path.exists():
        time.sleep(0.01)


async def test_after_a_restart_the_index_of_before_answers_at_once(
    workers: Workers, spec: RetrieverSpec, tmp_path: Path
) -> None:
    """Documents came, and were not embedded when it was killed: that takes hours, with many."""
    site = collection_of(workers, spec, tmp_path / "state")
    await site.prepare()
    version = await workers.learning.run(learning.write_initial_version, spec, site.versions)
    await site.ingest(DOCUMENTS[:4], [])
    running = asyncio.create_task(site.run())
    site.adopt(version)
    await site.until_served(version)
    running.cancel()
    await site.ingest(DOCUMENTS[4:], [])
    await workers.answering.stop()

    again = collection_of(workers, spec, tmp_path / "state", StandIn(spec, version))
    busy = asyncio.create_task(workers.learning.run(_until_there, tmp_path / "go on"))
    running = asyncio.create_task(again.run())
    again.adopt(version)
    async with asyncio.timeout(60):
        while again.served_index is None:
            await asyncio.sleep(0.01)
    assert not busy.done()
    answer = await again.ask(QUESTION, 3, rights=of_all)
    assert answer.citations[0].document_id == "yard/pump"
    assert again.opened.passages == 4, "those that came since are found by words"
    (tmp_path / "go on").touch()
    await busy
    await again.until_served(version)
    async with asyncio.timeout(60):
        while again.opened.passages < len(DOCUMENTS):
            await asyncio.sleep(0.01)
    running.cancel()


async def test_without_the_library_that_was_here_no_site_starts(
    workers: Workers, spec: RetrieverSpec, tmp_path: Path
) -> None:
    """Nor is an ingest taken by one that runs: it would be all that is there afterwards."""
    site = collection_of(workers, spec, tmp_path / "state")
    await site.prepare()
    version = await workers.learning.run(learning.write_initial_version, spec, site.versions)
    running = asyncio.create_task(site.run())
    site.adopt(version)
    await site.until_served(version)
    running.cancel()
    kept = tmp_path / "kept"
    site.library_path.rename(kept)
    with pytest.raises(LibraryError, match="gone, and there was one, of which this is left: "):
        await site.ingest(DOCUMENTS, [])
    with pytest.raises(LibraryError, match="gone, and there was one"):
        await collection_of(workers, spec, tmp_path / "state").prepare()
    kept.rename(site.library_path)
    await collection_of(workers, spec, tmp_path / "state").prepare()


async def test_what_a_kill_left_of_removed_files_is_gone_after_the_start(
    workers: Workers, spec: RetrieverSpec, tmp_path: Path
) -> None:
    site = collection_of(workers, spec, tmp_path / "state")
    await site.prepare()
    version = await workers.learning.run(learning.write_initial_version, spec, site.versions)
    await site.ingest(DOCUMENTS, [])
    left = folder_of(site.library_path) / ("0" * 64)
    left.parent.mkdir(exist_ok=True)
    left.write_bytes(b"What is removed.")
    running = asyncio.create_task(site.run())
    site.adopt(version)
    await site.until_served(version)
    assert not left.exists()
    running.cancel()


async def test_an_ingest_comes_between_two_slices_of_embedding(
    workers: Workers, spec: RetrieverSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So do rounds and removals: embedding a large library takes hours."""
    monkeypatch.setattr(collection_module, "_SLICE_S", 0.0)
    site = collection_of(workers, spec, tmp_path / "state")
    await site.prepare()
    version = await workers.learning.run(learning.write_initial_version, spec, site.versions)
    many = 2 * training_data._SLICE + 1
    said = [Document(f"hall/{one}", "", f"Hall {one} is kept dry.") for one in range(many)]
    await site.ingest(said, [])
    order: list[str] = []

    def told(step: object) -> None:
        if isinstance(step, EmbeddingProgress):
            assert step.total == many
            assert site.embedded_of(many) == step.done
            rest = many - step.done
            assert site.embedded_of(rest + 1) == min(step.done, 1), "all are embedded anew"
            assert site.embedded_of(many + 9) == step.done, "some came meanwhile"
            order.append(f"{step.done} embedded")
            if len(order) == 1:
                coming.set()

    coming = asyncio.Event()

    async def ingest() -> None:
        await coming.wait()
        await site.ingest(DOCUMENTS, [])
        order.append("an ingest")

    between = asyncio.create_task(ingest())
    running = asyncio.create_task(site.run())
    site._wanted_digest = version
    async with asyncio.timeout(120):
        await site.index(told)
    await between
    running.cancel()
    assert site.embedded_of(many) == 0, "what is indexed waits no longer"
    assert order.index("an ingest") < len(order) - 1
    assert order[0] == f"{training_data._SLICE} embedded"
