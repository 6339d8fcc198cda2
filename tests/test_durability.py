"""What is said is on disk, and what is on disk is whole: real daemons, killed and starved.

The sites of one federation are killed (SIGKILL, from inside, at a fault point)
at every boundary between two effects, while a run goes on. Whoever is dead is
looked at, then started again with the next fault.
"""

from __future__ import annotations

import asyncio
import shutil
import signal
import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import grpc.aio
import pytest

from daemon.store import Store
from daemon.versions import read_version
from proto import control_pb2 as control
from tests.federation import LiveFederation, LiveSite

pytestmark = [pytest.mark.federation, pytest.mark.slow, pytest.mark.timeout(420)]

SITES = ["elm", "fir", "oak"]
# A growing deadline is for sites that are slow; here they die, and the next attempt need not wait.
QUICK = {
    "phase_deadline_s": 4.0,
    "train_deadline_s": 10.0,
    "heartbeat_s": 0.3,
    "attempt_growth": 1.0,
}

# What every round passes, somewhere. Behind most effects stands the next one's "before";
# an "after" stands here where something is on disk or said that was not. What only losers
# of a race send (nack, behind, ahead) is the simulation's.
BEFORE = (
    *("persist", "beginattempt", "dealkey", "train", "encryptupdate", "addupdate", "finishsum"),
    *("sendsum", "applysum", "signvote", "fetchversion", "adopt", "fetchcertificates"),
    *("send.prepare", "send.promise", "send.plan", "send.plananswer", "send.trained"),
    *("send.scale", "send.apply", "send.vote", "send.commit"),
)
AFTER = ("persist", "applysum", "sendsum", "adopt", "send.promise", "send.vote", "send.commit")
BOUNDARIES = (
    *(f"{effect}:before" for effect in BEFORE),
    *(f"{effect}:after" for effect in AFTER),
    "version:write",
    "version:rename",
    "version:renamed",
    "version:synced",
)
# Later than the first time, where the first says little.
LATER = {"persist:before": 4, "persist:after": 5, "send.promise:after": 2}


@dataclass
class History:
    """Every committed round that anybody ever showed us; none may change or vanish."""

    models: dict[int, bytes] = field(default_factory=dict)
    heads: dict[str, int] = field(default_factory=dict)

    def see(self, site: str, rounds: dict[int, bytes]) -> None:
        for round_, model in rounds.items():
            assert self.models.setdefault(round_, model) == model, f"{site} forked at {round_}"
        head = max(rounds, default=0)
        assert sorted(rounds) == list(range(1, head + 1)), f"{site} has a gap"
        assert head >= self.heads.get(site, 0), f"{site} went back"
        self.heads[site] = head


def look_at_the_dead(site: LiveSite, scratch: Path, history: History) -> None:
    """A dead site's disk: whole versions only, all that it promised and voted for."""
    state = site.folder / "state"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    for file in state.glob("state.sqlite3*"):
        shutil.copy(file, scratch)
    store = Store(scratch / "state.sqlite3")
    try:
        (shape,) = store._db.execute("SELECT shape_digest FROM protocol").fetchone()
        durable = store.load("med", shape, b"")
        commits = store.rounds(1, 0)
    finally:
        store.close()
    history.see(
        site.id, {c.certificate.body.round: c.certificate.body.model_digest for c in commits}
    )
    versions = state / "versions"
    read_version(versions, durable.head_digest, shape)
    if durable.accepted is not None:  # a vote means: this version is on my disk
        read_version(versions, durable.accepted.value.model_digest, shape)
    for path in versions.glob("*.safetensors"):
        read_version(versions, bytes.fromhex(path.stem), shape)


async def started_run(site: LiveSite, rounds: int = 10_000) -> None:
    await site.stub.Train(control.TrainRequest(rounds=rounds), timeout=30)


async def ask(site: LiveSite) -> control.AskReply:
    question = control.AskRequest(question=f"who looks after the anchor winch of {site.id}?")
    return await site.stub.Ask(question, timeout=30)


async def until(what: str, true: object, within_s: float = 60.0) -> None:
    assert callable(true)
    try:
        async with asyncio.timeout(within_s):
            while not await true():
                await asyncio.sleep(0.1)
    except TimeoutError:
        raise AssertionError(f"waited {within_s:g} s in vain until {what}") from None


async def head_of(site: LiveSite) -> int:
    try:
        return (await site.status()).head_round
    except grpc.aio.AioRpcError:
        return -1


@asynccontextmanager
async def federation(root: Path) -> AsyncIterator[LiveFederation]:
    async with LiveFederation.start(
        root, SITES, rounds=QUICK, min_participants=2, local_epochs=1
    ) as live:
        await live.ingest_all()
        yield live


async def settle(live: LiveFederation, history: History) -> int:
    """Stop the run; all sites end at one head, with one history."""
    site = live.sites[SITES[0]]
    await site.stub.StopTraining(control.StopTrainingRequest(), timeout=30)

    async def equal() -> bool:
        states = [await site.status() for site in live.sites.values()]
        return len({(s.head_round, s.model_digest) for s in states}) == 1 and all(
            s.phase in ("idle", "committed") for s in states
        )

    await until("all sites have one head", equal, 90)
    for site in live.sites.values():
        rounds = await site.rounds()
        history.see(
            site.id,
            {r.certificate.body.round: r.certificate.body.model_digest for r in rounds},
        )
    return history.heads[SITES[0]]


async def test_sites_are_killed_at_every_effect_boundary_and_nothing_is_lost(
    tmp_path: Path,
) -> None:
    history = History()
    async with federation(tmp_path) as live:
        waiting, tripped = deque(BOUNDARIES), set[str]()
        armed: dict[str, str] = {}
        since: dict[str, float] = {}
        await started_run(live.sites["elm"])
        for site in live.sites.values():  # the first death comes at a moment nobody chose
            site.process.send_signal(signal.SIGKILL)
        while waiting or armed:
            for name, site in list(live.sites.items()):
                overdue = name in armed and time.monotonic() - since[name] > 60
                if overdue:
                    waiting.append(armed.pop(name))  # another site will come by there
                    site.process.send_signal(signal.SIGKILL)
                    await site.process.wait()
                if site.process.returncode is None:
                    continue
                assert site.process.returncode == -signal.SIGKILL, site.log[-2000:]
                look_at_the_dead(site, tmp_path / "scratch", history)
                if name in armed:
                    tripped.add(armed.pop(name))
                fault = ""
                if waiting:
                    armed[name] = waiting.popleft()
                    since[name] = time.monotonic()
                    fault = f"{armed[name]}=kill@{LATER.get(armed[name], 1)}"
                await live.launch(name, fault=fault)
            await asyncio.sleep(0.05)
        assert tripped == set(BOUNDARIES)
        before = max(history.heads.values())

        async def goes_on() -> bool:
            return min([await head_of(site) for site in live.sites.values()]) >= before + 2

        await until("the federation commits on", goes_on, 90)
        await settle(live, history)
        for site in live.sites.values():
            assert (await ask(site)).citations
