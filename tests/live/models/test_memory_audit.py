"""What a generator would remember, as an operator asks it of a real daemon."""

from __future__ import annotations

import asyncio
import json
import signal
from pathlib import Path

import psutil
import pytest

from tests.live.test_operations import fedctl, started
from tests.support.federation import Corpus, LiveFederation, LiveSite
from tests.support.small_models import small_generator

pytestmark = [pytest.mark.federation, pytest.mark.slow, pytest.mark.timeout(600)]

AUDIT = ("audit", "memory", "--canaries", "2", "--rounds", "1", "--noise", "1", "--json")


async def test_a_generator_is_audited_and_nothing_stays(tmp_path: Path) -> None:
    base = small_generator(tmp_path / "writer", "t5", Corpus.of("alder").texts())
    table = {"base_model": str(base), "learning_rate": 1e-2, "prompt_tokens": 4096}
    async with LiveFederation.start(
        tmp_path, ["alder", "elm"], without=["birch"], own={"alder": {"generator": table}}
    ) as live:
        alder, elm = live.sites["alder"], live.sites["elm"]
        await live.ingest_all()
        code, _, err = await fedctl(elm, *AUDIT)
        assert (code, "there is no base model here: set generator.base_model" in err) == (1, True)
        code, _, err = await fedctl(alder, *AUDIT, "--set", "local_epoch=2")
        assert (code, "'local_epoch=2' is no choice" in err) == (2, True), err

        code, out, err = await fedctl(alder, *AUDIT, "--set", "local_epochs=2")
        assert code == 0, err + alder.log
        found = json.loads(out)
        share = "its share of 3 sites"
        names = ["base model", "this site alone", share, f"{share}, noise 1"]
        assert [one["version"] for one in found["versions"]] == names
        assert (found["local_epochs"], found["learning_rate"], found["canaries"]) == (2, 1e-2, 2)
        assert found["model_digest"] == ""

        await is_ended_by_ctrl_c(alder)
        held = {path: path.read_bytes() for path in alder.folder.rglob("*") if path.is_file()}
        assert not [path for path, raw in held.items() if b"code of ward" in raw]
        state = str(alder.folder / "state")
        shown = (await fedctl(alder, "audit", "show", "--json", "--state-dir", state))[1]
        entries = [json.loads(line) for line in shown.splitlines()]
        outcomes = [one["outcome"] for one in entries if one["action"] == "audit-memory"]
        assert outcomes[:2] == ["begun", "done"]
        assert len(outcomes) == 4
        assert outcomes[-1] != "done"


async def is_ended_by_ctrl_c(site: LiveSite) -> None:
    """And its process with it: there is none that was not there before it began."""
    daemon = psutil.Process(site.process.pid)
    before = {one.pid for one in daemon.children(recursive=True)}
    asking = await started(site, *AUDIT[:-1], "--rounds", "100", "--set", "local_epochs=50")
    async with asyncio.timeout(120):
        while {one.pid for one in daemon.children(recursive=True)} <= before:
            await asyncio.sleep(0.05)
        asking.send_signal(signal.SIGINT)
        assert await asking.wait() == 130
        while not {one.pid for one in daemon.children(recursive=True)} <= before:
            await asyncio.sleep(0.05)
