"""One real site with its gateway, for all that asks it over HTTP."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest
import pytest_asyncio

from tests.daemon.gateway.gates import Gate, gateway, listening
from tests.support.federation import LiveFederation


@pytest_asyncio.fixture(scope="package", loop_scope="package")
async def gate(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Gate]:
    """With one question at a time, so that a second one is too many."""
    async with AsyncExitStack() as stack:
        live = await stack.enter_async_context(
            LiveFederation.start(
                tmp_path_factory.mktemp("gate"),
                ["elm"],
                without=["fir", "oak"],
                tables=listening(requests=1),
            )
        )
        await live.ingest_all()
        yield await stack.enter_async_context(gateway(live.sites["elm"]))
