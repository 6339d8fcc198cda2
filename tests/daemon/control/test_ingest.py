"""What a site takes in over its control socket, and who learns of it."""

from __future__ import annotations

import peers.link.tls13  # noqa: F401  before anything imports grpc

# isort: split
import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from daemon.control import library
from daemon.control.library import LibraryCalls
from daemon.process.streams import Listener
from daemon.services.library_changes import SilentError
from daemon.services.originals import KeptOriginals
from daemon.state.audit import AuditLog
from peers.attempts import effects as do
from proto import control_pb2 as control
from tests.daemon.rounds.test_driver import around_of, collection_of, started

pytestmark = [pytest.mark.timeout(200), pytest.mark.slow]  # it imports torch for its workers


async def test_pairs_of_an_ingest_that_was_broken_off_are_promised(tmp_path: Path) -> None:
    """The protocol learns of them at once; it declined every round until the next ingest."""
    document = control.Document(id="door.md", text="The door is green.")
    pair = control.Pair(query="Which door?", positives=["door.md"], split="train")

    async def one_batch_and_no_end() -> AsyncIterator[control.IngestRequest]:
        yield control.IngestRequest(documents=[document], pairs=[pair])
        await asyncio.Event().wait()

    async with AsyncExitStack() as stack:
        driver = await started(tmp_path, stack)
        audit = AuditLog(tmp_path / "asked")
        stack.callback(audit.close)
        kept = KeptOriginals(collection_of(driver), collection_of(driver)._learning, False)
        services = SimpleNamespace(originals=kept, folders=SimpleNamespace(states=[]))
        around = around_of(driver, audit, services)
        # mypy misses the other topics' methods, which are not asked.
        calls = LibraryCalls(around, "uid:0")  # type: ignore[abstract]
        call = calls.Ingest(one_batch_and_no_end(), cast(Any, None))
        assert (await anext(call)).pairs == 1
        assert driver.protocol._here.situation.num_examples == 0
        await cast(Any, call).aclose()
        await driver.ask(do.Tick())
        assert driver.protocol._here.situation.num_examples == 1


async def test_who_only_says_that_it_is_there_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """It kept all ingests and removals waiting, for as long as it liked."""
    said = list[int]()

    async def there_for_ever() -> AsyncIterator[control.IngestRequest]:
        yield control.IngestRequest(documents=[control.Document(id="door.md")])
        for n in range(1000):
            said.append(n)
            yield control.IngestRequest(bytes_read=7)

    heard = library._heard(there_for_ever(), Listener(()))
    assert (await anext(heard)).documents[0].id == "door.md"
    monkeypatch.setattr(library, "_NOTHING_S", 0.0)
    with pytest.raises(SilentError, match=r"nor was more read.* what had come is stored"):
        await anext(heard)
    assert said == [0, 1], "the first told that it had read something"


async def test_who_reads_what_is_refused_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    async def reading() -> AsyncIterator[control.IngestRequest]:
        for n in range(1, 9):
            yield control.IngestRequest(bytes_read=n)
        yield control.IngestRequest(documents=[control.Document(id="door.md")])

    monkeypatch.setattr(library, "_NOTHING_S", 0.0)
    heard = library._heard(reading(), Listener(()))
    assert [one.documents[0].id async for one in heard] == ["door.md"]
