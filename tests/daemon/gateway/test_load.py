"""Many at once: no answer is lost, who is refused is told when, and who only asks is answered.

Beside rounds that train, and beside slow, broken and hostile clients over TLS. It measures
nothing: how long answers take depends on what else the machine does, and
`python -m tests.benchmarks.answers.load` says it beside a thousand of such clients.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import openai
import psutil
import pytest
import pytest_asyncio

from tests.benchmarks.answers.bad_clients import KINDS, Target, honest, misbehaving
from tests.daemon.gateway.gates import Gate, gateway, listening
from tests.daemon.gateway.test_gateway import WINCH, asking, client
from tests.daemon.gateway.test_starts import self_signed
from tests.support.federation import LiveFederation

pytestmark = [pytest.mark.federation, pytest.mark.timeout(600)]

PEOPLE, SECONDS = 8, 20.0


async def test_who_asks_while_rounds_train_is_answered_or_told_when(tmp_path: Path) -> None:
    statuses = Counter[int]()

    async def person(asked: openai.AsyncOpenAI, until: float) -> None:
        while time.monotonic() < until:
            try:
                reply = await asked.chat.completions.create(model="hanse", messages=asking(WINCH))
            except openai.RateLimitError as refused:
                statuses[429] += 1
                await asyncio.sleep(int(refused.response.headers["retry-after"]))
            else:
                statuses[200] += 1
                assert "anchor winch" in (reply.choices[0].message.content or "")

    names = ["elm", "fir", "oak"]
    own = {"elm": listening(requests=4)}
    async with LiveFederation.start(tmp_path, names, own=own) as live:
        await live.ingest_all()
        async with gateway(live.sites["elm"]) as gate:
            people = [client(gate, await gate.token("ask")) for _ in range(PEOPLE)]
            until = time.monotonic() + SECONDS
            async with asyncio.TaskGroup() as group:
                training = group.create_task(live.train("fir", rounds=2))
                for one in people:
                    group.create_task(person(one, until))
            assert training.result()[-1].finished
            assert (await live.sites["elm"].status()).head_round == 2
    assert statuses[200] > PEOPLE


# ---- beside those who mean ill -----------------------------------------------------

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
