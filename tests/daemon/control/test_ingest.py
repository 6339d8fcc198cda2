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

from daemon.control.library import LibraryCalls
from daemon.services.originals import KeptOriginals
from daemon.state.audit import AuditLog
from peers.attempts import effects as do
from proto import control_pb2 as control
from tests.daemon.rounds.test_driver import started

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
        kept = KeptOriginals(driver.collection, driver.collection._learning, False)
        services = SimpleNamespace(originals=kept, folders=SimpleNamespace(states=[]))
        around = cast(Any, SimpleNamespace(driver=driver, audit=audit, services=services))
        # mypy misses the other topics' methods, which are not asked.
        calls = LibraryCalls(around, "uid:0")  # type: ignore[abstract]
        call = calls.Ingest(one_batch_and_no_end(), cast(Any, None))
        assert (await anext(call)).pairs == 1
        assert driver.protocol._here.situation.num_examples == 0
        await cast(Any, call).aclose()
        await driver.ask(do.Tick())
        assert driver.protocol._here.situation.num_examples == 1
