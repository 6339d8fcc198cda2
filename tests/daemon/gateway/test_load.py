"""Many people ask at once while rounds train: no answer is lost, and who is refused is told when.

It measures nothing: how long answers take depends on what else the machine does.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from pathlib import Path

import openai
import pytest

from tests.daemon.gateway.gates import gateway, listening
from tests.daemon.gateway.test_gateway import WINCH, asking, client
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
