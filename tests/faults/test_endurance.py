"""Hundreds of rounds: neither memory nor open files nor the disk grow with them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import psutil
import pytest

from tests.support.federation import LiveFederation, LiveSite

pytestmark = [
    pytest.mark.endurance,
    pytest.mark.federation,
    pytest.mark.slow,
    pytest.mark.timeout(900),
]

SITES = ["elm", "fir", "oak"]
KEPT = 3
MIB = 1 << 20


def processes(site: LiveSite) -> dict[str, psutil.Process]:
    """The daemon and its workers, by what they do."""
    daemon = psutil.Process(site.process.pid)
    workers = daemon.children(recursive=True)
    return {"fedd": daemon, **{f"worker {n}": worker for n, worker in enumerate(workers)}}


def measured(live: LiveFederation) -> dict[str, tuple[float, int]]:
    """MiB of memory and open files of every process."""
    return {
        f"{site.id} {name}": (process.memory_info().rss / MIB, process.num_fds())
        for site in live.sites.values()
        for name, process in processes(site).items()
    }


def on_disk(folder: Path) -> dict[str, int]:
    """Bytes below each entry of a site's state."""
    return {
        entry.name: sum(f.stat().st_size for f in [entry, *entry.rglob("*")] if f.is_file())
        for entry in sorted(folder.iterdir())
    }


async def test_two_hundred_rounds_cost_no_more_than_twenty(tmp_path: Path) -> None:
    rounds = {"keep_versions": KEPT, "heartbeat_s": 1.0}
    async with LiveFederation.start(tmp_path, SITES, rounds=rounds, local_epochs=1) as live:
        await live.ingest_all()
        await live.train("elm", rounds=20)
        early, early_disk = measured(live), on_disk(live.sites["oak"].folder / "state")
        await live.train("fir", rounds=40)
        late_disk = on_disk(live.sites["oak"].folder / "state")
        for site in live.sites.values():
            state = site.folder / "state"
            assert len(list((state / "versions").iterdir())) <= KEPT + 1  # and the one that answers
            assert len(list((state / "index").iterdir())) <= 2  # and the one being made
            assert len(list((state / "spool" / "attempts").iterdir())) <= 2
            assert list((state / "spool" / "arriving").iterdir()) == []
            async with asyncio.timeout(60):  # what broke off is swept from time to time
                while list((state / "spool" / "incoming").iterdir()):
                    await asyncio.sleep(0.1)
        grown = {name: late_disk[name] - size for name, size in early_disk.items()}
        assert sum(grown.values()) < 40 * 32_000 + 2 * MIB, grown  # certificates and reports stay
        await live.train("oak", rounds=140)
        late = measured(live)
    for name, (memory, files) in early.items():
        print(
            f"{name}: {memory:.0f} MiB, {files} files; later {late[name][0]:.0f}, {late[name][1]}"
        )
    print(f"bytes on disk after 20 and 60 rounds: {early_disk} {late_disk}")
    assert late.keys() == early.keys()
    for name, (memory, files) in late.items():
        assert files <= early[name][1] + 3, name
        assert memory <= early[name][0] * 1.1 + 10, name
