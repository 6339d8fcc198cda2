"""Real daemons, one of which has its way with runs: weaker ones, older ones, some that are over.

Row 12 of the lies; each is told twice, to daemons with the defence and to daemons without it.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from proto import control_pb2 as control
from proto import federation_pb2 as pb
from tests.attacks.test_lying_decisions import (
    FOUR,
    THREE,
    UNDEFENDED,
    agreed,
    ask,
    federation,
    heads,
    logged,
    recant,
    tell,
)

pytestmark = [
    pytest.mark.attacks,
    pytest.mark.federation,
    pytest.mark.slow,
    pytest.mark.timeout(900),
]


@pytest.mark.parametrize(
    "without", ["", pytest.param("weakening", marks=UNDEFENDED)], ids=["defended", "undefended"]
)
async def test_a_run_that_asks_for_less_privacy_does_not_supersede_another_sites(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, without: str
) -> None:
    async with federation(tmp_path, monkeypatch, THREE, without=without) as live:
        tell(live, "cedar", "weakening")
        privacy = pb.PrivacyPlan(clip_norm=1.0, noise_multiplier=1.0)
        await ask(live.sites["alder"], 2, privacy)
        await heads(live, THREE, 2)
        last = await agreed(live, THREE)
        run = (await live.sites["birch"].status()).run
        if without:
            assert (last.report.noise_multiplier, run.requested_by) == (0.0, "cedar")
            return
        assert (last.report.noise_multiplier, run.requested_by) == (1.0, "alder")
        # birch may hear of it before it hears of alder's, which then takes its place.
        await logged(live, ["alder"], "the run of cedar is not taken")


@pytest.mark.parametrize(
    "without", ["", pytest.param("what is over", marks=UNDEFENDED)], ids=["defended", "undefended"]
)
async def test_a_run_that_a_person_has_stopped_is_not_said_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, without: str
) -> None:
    """It protects more than the one asked for since, and would take its place."""
    async with federation(tmp_path, monkeypatch, FOUR, without=without) as live:
        alder, birch = live.sites["alder"], live.sites["birch"]
        tell(live, "dogwood", "said again")
        privacy = pb.PrivacyPlan(clip_norm=1.0, noise_multiplier=1.0)
        await ask(live.sites["cedar"], 100, privacy)
        await heads(live, FOUR, 1)
        await alder.stub.StopTraining(control.StopTrainingRequest(), timeout=60)
        async with asyncio.timeout(200):
            while (await birch.status()).run.requested_by != "alder":
                await asyncio.sleep(0.1)
        target = await ask(alder, 20)
        if without:
            async with asyncio.timeout(200):
                while (await birch.status()).run.requested_by != "cedar":
                    await asyncio.sleep(0.1)
            return
        await heads(live, THREE, target)
        last = await agreed(live, THREE)
        run = (await birch.status()).run
        assert (last.report.noise_multiplier, run.requested_by) == (0.0, "alder")


@pytest.mark.parametrize(
    "without",
    ["", pytest.param("the run in force", marks=UNDEFENDED)],
    ids=["defended", "undefended"],
)
async def test_what_was_promised_for_a_run_is_not_begun_when_it_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, without: str
) -> None:
    """Dogwood leads an attempt, and shows what all have promised when a person has stopped it."""
    async with federation(tmp_path, monkeypatch, FOUR, without=without) as live:
        alder, liar = live.sites["alder"], live.sites["dogwood"]
        tell(live, "dogwood", "holds back")
        await ask(alder, 30)
        async with asyncio.timeout(200):
            holding = liar.folder / "holding"
            while not (holding.exists() and int(holding.read_text() or 0) >= len(THREE)):
                await asyncio.sleep(0.1)
        await alder.stub.StopTraining(control.StopTrainingRequest(), timeout=60)
        async with asyncio.timeout(200):
            for name in THREE:
                while (await live.sites[name].status()).phase != "idle":
                    await asyncio.sleep(0.1)
        head = (await alder.status()).head_round
        before = {name: len(live.sites[name].log) for name in THREE}
        tell(live, "dogwood", "shows")
        if without:
            await heads(live, THREE, head + 1)
            return
        async with asyncio.timeout(200):
            for name in THREE:
                words = "or the one of this attempt was stopped"
                while words not in live.sites[name].log[before[name] :]:
                    await asyncio.sleep(0.1)
        recant(live, "dogwood")
        for name in THREE:
            status = await live.sites[name].status()
            assert (status.head_round, status.phase) == (head, "idle")
        assert await ask(alder) == head + 1
        await heads(live, THREE, head + 1)
