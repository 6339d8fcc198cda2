"""Slow, broken and hostile clients at a real `fedgate` over TLS, and somebody who only asks.

How long answers take beside a thousand of them: `python -m tests.benchmarks.answers.load`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import pytest_asyncio

from tests.benchmarks.answers.bad_clients import KINDS, Target, honest, misbehaving
from tests.daemon.gateway.gates import Gate, gateway, listening
from tests.daemon.gateway.test_starts import self_signed
from tests.support.federation import LiveFederation

pytestmark = [pytest.mark.federation, pytest.mark.timeout(600)]

MANY = 4 * len(KINDS)
QUESTIONS = 4


@pytest_asyncio.fixture
async def secured(tmp_path: Path) -> AsyncIterator[Gate]:
    """A gateway with a certificate, and the settings as they come."""
    self_signed(tmp_path)
    files = {f"tls_{name}": str(tmp_path / f"gateway.{end}") for name, end in _FILES.items()}
    async with LiveFederation.start(
        tmp_path, ["elm"], without=["fir", "oak"], tables=listening(**files)
    ) as live:
        await live.ingest_all()
        async with gateway(live.sites["elm"]) as gate:
            yield gate


_FILES = {"certificate": "crt", "key": "key"}


async def test_bad_clients_keep_no_honest_one_from_its_answer(
    secured: Gate, tmp_path: Path
) -> None:
    """Some of them have a token, too, and more of them ask at once than may."""
    gate = secured
    target = Target(gate.host, gate.port, tmp_path / "gateway.crt", await gate.token("ask"))
    mine = replace(target, token=await gate.token("ask"))
    process = psutil.Process(gate.process.pid)
    alone = await honest(mine, QUESTIONS)
    assert (len(alone.seconds), alone.unanswered) == (QUESTIONS, [])
    before = process.memory_info().rss
    async with misbehaving(target, MANY) as seen:
        beside = await honest(mine, QUESTIONS)
    assert (len(beside.seconds), beside.unanswered) == (QUESTIONS, [])
    assert set(seen.attempts) == set(KINDS)
    wrong = {told for told in seen.statuses if told.split()[1] in ("500", "502", "503", "504")}
    assert not wrong
    assert seen.statuses["flood 401"], "they were here"
    assert not {told for told in seen.statuses if told.startswith("flood ")} - {"flood 401"}
    assert process.memory_info().rss - before < 300 << 20
    assert (await honest(mine, 1)).unanswered == []
    assert "failed" not in gate.log
