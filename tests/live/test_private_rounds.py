"""Differential privacy between real daemons: what is booked, refused, and never forgotten."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import grpc.aio
import pytest

from crypto.privacy import epsilon_of
from daemon.state.privacy_ledger import Booked, PrivacyLedger
from proto import control_pb2 as control
from proto import federation_pb2 as pb
from tests.support.federation import LiveFederation, LiveSite, Surroundings

pytestmark = pytest.mark.federation

SITES = ["alder", "birch", "cedar"]
DELTA = 1e-5


def noise(multiplier: float) -> pb.PrivacyPlan:
    return pb.PrivacyPlan(clip_norm=0.5, noise_multiplier=multiplier)


async def declined(live: LiveFederation, privacy: pb.PrivacyPlan | None, told: str) -> str:
    """Start a run at alder that a site declines; what alder's people read, once it is that."""
    alder = live.sites["alder"]
    request = control.TrainRequest(rounds=1, plan=pb.TrainingPlan(privacy=privacy))
    await alder.stub.Train(request, timeout=60)
    async with asyncio.timeout(60):
        while told not in (reason := (await alder.status()).last_error):
            await asyncio.sleep(0.05)
    await alder.stub.StopTraining(control.StopTrainingRequest(), timeout=30)
    return reason


async def again(live: LiveFederation, name: str, *, fault: str = "") -> LiveSite:
    """Start a site's daemon again, with the settings of now."""
    site = live.sites[name]
    if site.process.returncode is None:
        await site.terminate()
    site = await live.launch(name, fault=fault)
    await live.until_connected()
    return site


async def test_a_site_spends_books_and_refuses(tmp_path: Path) -> None:
    async with LiveFederation.start(tmp_path, SITES) as live:
        await live.ingest_all()
        await live.train("alder", 2, noise(3.0))
        two = epsilon_of([3.0] * 2, DELTA)
        for site in live.sites.values():
            account = await site.privacy(rounds=2)
            assert account.updates_noised == 2
            assert account.updates_bare == 0
            assert account.epsilon_spent == pytest.approx(two)
            assert account.further_multiplier == 3.0
            assert account.further_cost == pytest.approx(epsilon_of([3.0] * 4, DELTA) - two)
            rounds = await site.rounds()
            assert [r.report.noise_multiplier for r in rounds] == [3.0, 3.0]
            assert [r.report.clip_norm for r in rounds] == [0.5, 0.5]

        # From now on birch has a budget that a third such round exceeds.
        live.settings["privacy"] = {"epsilon": two * 1.1}
        birch = await again(live, "birch")
        live.settings["privacy"] = {}
        assert "birch" in await declined(live, None, "this site requires it (privacy.required")
        assert "birch" in await declined(live, noise(3.0), "exceed this site's privacy budget")
        account = await birch.privacy(noise_multiplier=3.0)
        assert account.updates_noised == 2
        assert account.updates_bare == 0
        assert not account.further_fits
        assert account.epsilon_left == pytest.approx(two * 0.1)
        with pytest.raises(grpc.aio.AioRpcError, match="requires it"):
            await birch.stub.Train(control.TrainRequest(rounds=1), timeout=60)

        # More noise fits, and what birch says is enough is enough.
        await live.train("alder", 1, noise(account.least_multiplier))
        account = await birch.privacy(noise_multiplier=1000)
        assert account.updates_noised == 3
        assert two < account.epsilon_spent <= two * 1.1
        assert not account.further_fits

        # Without a budget, a least noise is what privacy that is required means.
        live.settings["privacy"] = {"required": True, "least_noise": 2.0}
        birch = await again(live, "birch")
        live.settings["privacy"] = {}
        assert "birch" in await declined(live, noise(0.001), "0.001 is below 2 (privacy.least")
        assert (await birch.privacy(noise_multiplier=1.0)).least_multiplier == 2.0
        assert (await birch.privacy()).updates_noised == 3


async def test_what_was_booked_survives_a_kill(tmp_path: Path) -> None:
    """SIGKILL between the booking and the encryption: nothing has left, and it counts as told."""
    async with LiveFederation.start(tmp_path, SITES, rounds={"phase_deadline_s": 20.0}) as live:
        await live.ingest_all()
        # Not the coordinator of the first attempt, birch, nor that of the second, cedar.
        alder = await again(live, "alder", fault="privacy:booked=kill")
        request = control.TrainRequest(rounds=1, plan=pb.TrainingPlan(privacy=noise(4.0)))
        await live.sites["birch"].stub.Train(request, timeout=60)
        assert await asyncio.wait_for(alder.process.wait(), 60) == -signal.SIGKILL
        ledger = PrivacyLedger(alder.folder / "state" / "privacy.sqlite3")
        assert ledger.booked() == Booked((4.0,), 0)
        ledger.close()
        alder = await again(live, "alder")
        await live.until_head(1, within_s=240)
        account = await alder.privacy()
        # The attempt that it died in counts, beside whichever came after it.
        assert account.updates_noised >= 2
        booked = [4.0] * account.updates_noised
        assert account.epsilon_spent == pytest.approx(epsilon_of(booked, DELTA))


async def test_noise_follows_loss_and_norm_follows_updates(tmp_path: Path) -> None:
    """What the next round's noise and norm depend on is in the certificate, at every site."""
    plan = pb.PrivacyPlan(
        clip_norm=0.001,
        noise_multiplier=0.2,
        noise_floor=0.02,
        noise_decay=0.5,
        loss_threshold=0.1,
        clip_quantile=0.5,
    )
    async with LiveFederation.start(tmp_path, SITES) as live:
        await live.ingest_all()
        await live.train("alder", 3, plan)
        rounds = await live.sites["birch"].rounds()
        multipliers = [r.report.noise_multiplier for r in rounds]
        norms = [r.report.clip_norm for r in rounds]
        assert multipliers[0] == pytest.approx(0.2)
        assert 0.02 <= multipliers[2] <= 0.05 < multipliers[0]
        assert multipliers[1] <= 0.1
        # 0.001 is far below what two epochs change: the norm grows, by exp(0.2 * 0.5) about.
        assert norms[0] == 0.001
        # The share that is within it is noised, at first by so much that it may shrink.
        assert 0.9 < norms[1] / norms[0] < 1.2
        assert norms[1] < norms[2] < 0.0015
        assert (await live.sites["birch"].privacy()).epsilon_spent == pytest.approx(
            epsilon_of(multipliers, DELTA)
        )


async def test_a_stop_ends_what_is_trained_and_nothing_of_it_is_sent_or_booked(
    tmp_path: Path,
) -> None:
    """Birch leads the round, stands still while all train, and hears of the stop when it is back.

    Had it only stood still, it might go on to the scale before the stop has reached it.
    """
    around = Surroundings(program="tests.faults.halting_fedd")
    async with LiveFederation.start(tmp_path, SITES, surroundings=around) as live:
        await live.ingest_all()
        birch, cedar = live.sites["birch"], live.sites["cedar"]
        (birch.folder / "halt-at").write_text("train")
        plan = pb.TrainingPlan(privacy=noise(3.0))
        await cedar.stub.Train(control.TrainRequest(rounds=5, plan=plan), timeout=60)
        async with asyncio.timeout(60):
            while not (birch.folder / "halted").exists():
                await asyncio.sleep(0.01)
        await cedar.stub.StopTraining(control.StopTrainingRequest(), timeout=30)
        async with asyncio.timeout(60):
            while (await live.sites["alder"].status()).phase != "idle":
                await asyncio.sleep(0.01)
        birch.process.kill()
        await birch.process.wait()
        (birch.folder / "halt-at").unlink()
        await again(live, "birch")
        async with asyncio.timeout(60):
            for site in live.sites.values():
                while (status := await site.status()).phase != "idle":
                    await asyncio.sleep(0.01)
                assert status.head_round == 0
        for site in live.sites.values():
            account = await site.privacy()
            assert account.updates_noised == account.updates_bare == 0
        await live.train("cedar", 1, noise(3.0))
        assert [round_.certificate.body.round for round_ in await cedar.rounds()] == [1]
