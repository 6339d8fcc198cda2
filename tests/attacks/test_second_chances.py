"""Real daemons, one of which lies where a site's state went back, or a sum is made again.

Each is told twice: to daemons as they are, and to daemons from which that defence is gone.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest

from proto import control_pb2 as control
from proto import federation_pb2 as pb
from tests.attacks.test_lying_coordinator import shared, update, vector_of
from tests.attacks.test_lying_decisions import (
    agreed,
    copied_as_it_is,
    heads,
    phase,
    recant,
    restore,
    tell,
)
from tests.attacks.test_lying_rounds import cosine, step_of
from tests.support.federation import LiveFederation, LiveSite, Surroundings

pytestmark = [
    pytest.mark.attacks,
    pytest.mark.endurance,
    pytest.mark.federation,
    pytest.mark.slow,
    pytest.mark.timeout(1200),
]

SITES = ["alder", "birch", "cedar", "dogwood"]
LIAR = "birch"  # coordinates the first attempt of the first round


@asynccontextmanager
async def federation(
    root: Path, monkeypatch: pytest.MonkeyPatch, without: str, phase_s: float
) -> AsyncIterator[LiveFederation]:
    monkeypatch.setenv("HANSE_UNDEFENDED", without)
    async with LiveFederation.start(
        root,
        SITES,
        surroundings=Surroundings(program="tests.attacks.programs.second_chance_fedd"),
        connect_s=500,
        rounds={"phase_deadline_s": phase_s, "heartbeat_s": 1.0},
        faulty_sites=1,
    ) as live:
        await live.ingest_all()
        yield live


async def ask(site: LiveSite, **plan: int) -> None:
    """For one round."""
    training = pb.TrainingPlan(min_participants=3, **plan)  # type: ignore[arg-type]
    await site.stub.Train(control.TrainRequest(rounds=1, plan=training), timeout=60)


async def there(site: LiveSite, name: str, within_s: float = 300.0) -> Path:
    """A file that a daemon leaves behind, as soon as it is there."""
    async with asyncio.timeout(within_s):
        while not (site.folder / name).exists():
            await asyncio.sleep(0.1)
    return site.folder / name


def certificate(path: Path) -> pb.Certificate:
    return pb.Certificate.FromString(path.read_bytes())


async def killed(*sites: LiveSite) -> None:
    for site in sites:
        os.killpg(site.process.pid, signal.SIGKILL)
        await site.process.wait()


# ---- a version that was committed, and nobody shows it ------------------------------------


@pytest.mark.parametrize("without", ["", "recalled lock"], ids=["defended", "undefended"])
async def test_who_is_restored_is_told_the_lock_that_it_has_promised_by(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, without: str
) -> None:
    """Alder, birch and cedar have voted, and only birch, which lies, knows that it was enough.

    Cedar is gone. Alder's next promise has named what it voted for; dogwood has heard it.
    Then the states of alder and birch are put back to before the round.
    """
    async with federation(tmp_path, monkeypatch, without, phase_s=15) as live:
        alder, birch, dogwood = (live.sites[name] for name in ("alder", LIAR, "dogwood"))
        for site in (alder, birch):
            copied_as_it_is(site)
        tell(live, LIAR, "withholds")
        await ask(dogwood)
        withheld = certificate(await there(birch, "certificate"))
        assert {vote.site for vote in withheld.votes} == {"alder", LIAR, "cedar"}
        await killed(live.sites.pop("cedar"))
        await there(dogwood, "heard-alder")
        await killed(alder, birch)
        for site in (alder, birch):
            restore(site)
        recant(live, LIAR)
        for site in (alder, birch):
            await live.launch(site.id)
        await live.until_connected()
        names = sorted(live.sites)
        await heads(live, names, 1)
        last = (await agreed(live, names)).certificate
        digests = {withheld.body.model_digest.hex()[:12], last.body.model_digest.hex()[:12]}
        print(f"without {without or 'nothing'}: round 1 is certified as {' and '.join(digests)}")
        assert len(digests) == (2 if without else 1)
        if not without:
            assert "this site's state went back" in live.sites["alder"].log


# ---- two sums of one attempt ---------------------------------------------------------------


@pytest.mark.parametrize("without", ["", "this start"], ids=["defended", "undefended"])
async def test_who_is_restored_signs_nothing_in_the_attempt_under_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, without: str
) -> None:
    """Alder signs the sum of all, forgets it, and is shown the one without cedar's update."""
    async with federation(tmp_path, monkeypatch, without, phase_s=60) as live:
        alder, birch, victim = live.sites["alder"], live.sites[LIAR], live.sites["cedar"]
        tell(live, LIAR, f"two-sums {victim.id}")
        await ask(live.sites["dogwood"])
        await phase(alder, "train")
        copied_as_it_is(alder)
        await there(birch, "certified")
        await killed(alder)
        restore(alder)
        before = len(alder.log)
        alder = await live.launch("alder")
        told = birch.folder / "told-1-0.safetensors"
        if without:
            await there(birch, told.name)
            await heads(live, [LIAR], 1)
            body = (await agreed(live, [LIAR])).certificate.body
            parent = shared(birch, body.parent_digest)
            first = vector_of(victim.folder / "opened-1-0.safetensors")  # as it has told
            stolen = 4 * (first - parent)
            stolen -= 3 * (vector_of(told) - parent)
            learnt = cosine(stolen, update(victim, 1, 0))
            print(f"without {without}: cosine with {victim.id}'s update {learnt:.6f}")
            assert learnt > 0.999
            return
        await live.until_connected()
        await heads(live, SITES, 1)
        last = await agreed(live, SITES)
        assert last.certificate.attempt > 0
        assert not told.exists()
        assert "a site contradicts itself" not in alder.log[before:]
        step = await step_of(birch, 1)
        learnt = cosine(step, update(victim, 1, 0))
        print(f"one sum was opened; its cosine with {victim.id}'s update is {learnt:.6f}")


# ---- what is made again is another's -------------------------------------------------------


@pytest.mark.parametrize("without", ["", "comparing again"], ids=["defended", "undefended"])
async def test_what_a_robust_rule_has_compared_once_is_compared_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, without: str
) -> None:
    """Birch is as others when updates are compared; thirty times as large the second time."""
    async with federation(tmp_path, monkeypatch, without, phase_s=60) as live:
        tell(live, LIAR, "repeats")
        await ask(live.sites["alder"], robust=pb.ROBUST_NORM, byzantine_sites=1)
        await heads(live, SITES, 1)
        last = await agreed(live, SITES)
        rejected = list(last.certificate.body.rejected)
        step = await step_of(live.sites["alder"], 1)
        honest = float(np.linalg.norm(update(live.sites["alder"], 1, 0)))
        others = [update(live.sites[name], 1, 0) for name in SITES if name != LIAR]
        length = float(np.linalg.norm(4 * step - np.sum(others, axis=0))) if without else 0.0
        print(
            f"without {without or 'nothing'}: rejected {rejected}, step "
            f"{float(np.linalg.norm(step)):.3f}, an honest update {honest:.3f}, "
            f"the liar's part {length:.3f}"
        )
        assert last.certificate.attempt > 0
        assert rejected == ([] if without else [LIAR])
        assert (length > 2 * honest) == bool(without)
