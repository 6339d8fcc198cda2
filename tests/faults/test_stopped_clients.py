"""A person's command that is stopped (Ctrl-Z) in the midst of its work holds up nobody for long."""

from __future__ import annotations

import peers.link.tls13  # noqa: F401  before anything imports grpc

# isort: split
import asyncio
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from daemon.control.library import _SILENT_S
from tests.live.test_operations import fedctl, started
from tests.support.federation import LiveFederation, LiveSite

pytestmark = [
    pytest.mark.faults,
    pytest.mark.slow,
    pytest.mark.federation,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(400),
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def site(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LiveSite]:
    root = tmp_path_factory.mktemp("stopped")
    async with LiveFederation.start(root, ["elm"], without=["fir", "oak"]) as live:
        yield live.sites["elm"]


async def test_an_ingest_that_is_stopped_makes_way_for_the_next(
    site: LiveSite, tmp_path: Path
) -> None:
    many, one = tmp_path / "many", tmp_path / "note.txt"
    many.mkdir()
    for number in range(3000):
        (many / f"{number}.txt").write_text(f"The rope {number} is coiled in the morning.")
    one.write_text("The winch is oiled in spring.")
    stopped = await started(site, "ingest", str(many))
    while not (await site.status()).library_change:
        await asyncio.sleep(0.1)
    stopped.send_signal(signal.SIGSTOP)
    try:
        code, _, err = await fedctl(site, "ingest", str(one))
        assert (code, "is under way" in err) == (1, True), err
        async with asyncio.timeout(4 * _SILENT_S):
            while (await fedctl(site, "ingest", str(one)))[0]:
                await asyncio.sleep(1)
    finally:
        stopped.send_signal(signal.SIGCONT)
    _, err_of_stopped = await stopped.communicate()
    assert stopped.returncode == 1
    assert "fedctl sent nothing, or took no answers, for 60 s" in err_of_stopped.decode()
    assert "Ingest the same paths again for the rest" in err_of_stopped.decode()
    assert "an ingest was ended: its fedctl is silent" in site.log
