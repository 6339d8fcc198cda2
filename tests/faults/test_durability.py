"""What is said is on disk, and what is on disk is whole: real daemons, killed and starved.

The sites of one federation are killed (SIGKILL, from inside, at a fault point)
at every boundary between two effects, while a run goes on. Whoever is dead is
looked at, then started again with the next fault.
"""

from __future__ import annotations

import asyncio
import shutil
import signal
import subprocess
import time
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import grpc.aio
import psutil
import pytest

from daemon.state.store import Store
from daemon.state.versions import read_version
from proto import control_pb2 as control
from tests.support.federation import LiveFederation, LiveSite

pytestmark = [
    pytest.mark.faults,
    pytest.mark.federation,
    pytest.mark.slow,
    pytest.mark.timeout(900),
]

SITES = ["elm", "fir", "oak"]
# A growing deadline is for sites that are slow; here they die, and the next attempt need not wait.
QUICK = {
    "phase_deadline_s": 1.5,
    "train_deadline_s": 2.5,
    "heartbeat_s": 0.3,
    "attempt_growth": 1.0,
}

# What every round or restart passes, somewhere. Behind most effects stands the next one's
# "before"; an "after" stands here where something is on disk or said that was not. What
# only losers of a race send (behind, ahead) is the simulation's.
BEFORE = (
    *("persist", "beginattempt", "dealkey", "train", "hideupdate", "addupdate", "finishsum"),
    *("sendsum", "challenge", "answerchallenge", "applysum", "fetchversion"),
    *("adopt", "fetchcertificates", "send.challenge", "send.proof"),
    *("send.prepare", "send.promised", "send.bundle", "send.plananswer", "send.keycommitted"),
    *("send.trained", "send.scale", "send.contributed", "send.state", "send.stated"),
    *("send.certified", "send.appliedsum", "send.proven", "send.vote", "send.commit"),
    *("send.attemptfailed", "send.runwish", "send.recall", "send.remembered"),
)
AFTER = (
    *("persist", "applysum", "sendsum", "adopt"),
    *("send.promised", "send.stated", "send.appliedsum", "send.vote", "send.commit"),
    "send.runwish",
)
BOUNDARIES = (
    *(f"{effect}:before" for effect in BEFORE),
    *(f"{effect}:after" for effect in AFTER),
    "version:write",
    "version:rename",
    "version:renamed",
    "version:synced",
)
# Only a site that missed a round passes this: it is started when the others have gone on.
WHEN_BEHIND = "fetchcertificates:before"
# Later than the first time, where the first says little.
LATER = {"persist:before": 4, "persist:after": 5, "send.promised:after": 2}
OVERDUE_S = 45.0  # then a site that did not come by is killed all the same, and another one armed


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
    if durable.state.HasField("vote"):  # a vote means: this version is on my disk
        read_version(versions, durable.state.vote.body.model_digest, shape)
    for applied in durable.state.applied:  # and what was applied, too
        read_version(versions, applied.model_digest, shape)
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


async def until_head(live: LiveFederation, names: list[str], head: int) -> None:
    async def there() -> bool:
        return min([await head_of(live.sites[name]) for name in names]) >= head

    await until(f"{names} are at round {head}", there, 90)


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
        parts = site.stub.Chain(control.ChainRequest(), timeout=60)  # a slow machine has many
        bodies = [one.body async for part in parts for one in part.certificates]
        history.see(site.id, {body.round: body.model_digest for body in bodies})
    return history.heads[SITES[0]]


async def others_went_on(live: LiveFederation, dead: str, history: History) -> bool:
    """Whether there is a round that a dead site must fetch when it is back."""
    heads = [await head_of(site) for name, site in live.sites.items() if name != dead]
    return max(heads) >= history.heads[dead] + 2


@pytest.mark.endurance
@pytest.mark.parametrize("part", [0, 1, 2])
async def test_sites_are_killed_at_every_effect_boundary_and_nothing_is_lost(
    tmp_path: Path, part: int
) -> None:
    boundaries = BOUNDARIES[part::3]
    history = History()
    async with federation(tmp_path) as live:
        waiting, tripped = deque(boundaries), set[str]()
        armed: dict[str, str] = {}
        since: dict[str, float] = {}
        held: set[str] = set()  # dead until the others have gone on
        await started_run(live.sites["elm"])
        for site in live.sites.values():  # the first death comes at a moment nobody chose
            site.process.send_signal(signal.SIGKILL)
        while waiting or armed:
            for name, site in list(live.sites.items()):
                overdue = name in armed and time.monotonic() - since[name] > OVERDUE_S
                if overdue and name not in held:  # others will come by there: in an attempt
                    for other in set(live.sites) - held:  # that all have lost their part in
                        waiting.extend(filter(None, [armed.pop(other, "")]))
                        if live.sites[other].process.returncode is None:
                            live.sites[other].process.send_signal(signal.SIGKILL)
                            await live.sites[other].process.wait()
                if site.process.returncode is None:
                    continue
                if name not in held:
                    assert site.process.returncode == -signal.SIGKILL, site.log[-2000:]
                    look_at_the_dead(site, tmp_path / "scratch", history)
                    if name in armed:
                        tripped.add(armed.pop(name))
                    if waiting:
                        armed[name] = waiting.popleft()
                    if armed.get(name) == WHEN_BEHIND:
                        held.add(name)
                if name in held and not await others_went_on(live, name, history):
                    continue
                held.discard(name)
                since[name] = time.monotonic()
                point = armed.get(name)
                fault = f"{point}=kill@{LATER.get(point, 1)}" if point else ""
                await live.launch(name, fault=fault)
            await asyncio.sleep(0.05)
        assert tripped == set(boundaries)
        before = max(history.heads.values())

        await until_head(live, SITES, before + 2)
        await settle(live, history)
        for site in live.sites.values():
            await until(f"{site.id} answers", lambda site=site: answers_with_its_head(site))
            assert (await ask(site)).citations


# ---- a disk that is full or read-only ---------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 64 MiB under oak's state."""
    folder = tmp_path / "oak" / "state"
    folder.mkdir(parents=True)
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(folder)],
        capture_output=True,
        check=False,
    )
    if mounted.returncode:
        pytest.skip(f"no file system may be mounted here: {mounted.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(disk: Path) -> Path:
    """Leave not one byte."""
    ballast = disk / "ballast"
    with ballast.open("wb", buffering=0) as file, suppress(OSError):
        while file.write(bytes(4096)):
            pass
    assert shutil.disk_usage(disk).free == 0
    return ballast


def voters(rounds: list[control.Round], after: int) -> set[str]:
    return {
        vote.site
        for r in rounds
        if r.certificate.body.round > after
        for vote in r.certificate.votes
    }


async def test_a_site_with_a_full_disk_votes_for_nothing_and_answers_questions(
    tmp_path: Path, small_disk: Path
) -> None:
    async with federation(tmp_path) as live:
        elm, oak = live.sites["elm"], live.sites["oak"]
        await live.train("elm", rounds=2)
        await until("oak answers with round 2", lambda: answers_with_its_head(oak))
        ballast = fill(small_disk)
        with pytest.raises(grpc.aio.AioRpcError, match=r"full|space|disk"):
            oak.corpus.documents[0].text *= 2000
            await oak.ingest()
        await started_run(elm)
        await until_head(live, ["elm", "fir"], 6)
        full = await oak.status()
        assert full.head_round == 2
        assert "disk" in full.last_error or "space" in full.last_error, full.last_error
        assert "oak" not in voters(await elm.rounds(), after=3), "no vote without a version on disk"
        busy = psutil.Process(oak.process.pid).cpu_times()
        assert (await ask(oak)).citations
        await asyncio.sleep(3)
        now = psutil.Process(oak.process.pid).cpu_times()
        assert now.user + now.system - busy.user - busy.system < 2, "it does not spin"
        assert (await ask(oak)).citations
        ballast.unlink()
        await until_head(live, ["oak"], 8)  # by itself
        await settle(live, History())
        assert "Traceback" not in oak.log


async def answers_with_its_head(site: LiveSite) -> bool:
    status = await site.status()
    return status.index_digest == status.model_digest


@pytest.mark.parametrize("fault", ["enospc", "erofs"])
async def test_a_site_that_cannot_write_its_state_stands_still_and_says_so(
    tmp_path: Path, fault: str
) -> None:
    async with federation(tmp_path) as live:
        fir = live.sites["fir"]
        fir.process.send_signal(signal.SIGKILL)
        await fir.process.wait()
        fir = await live.launch("fir", fault=f"persist:before={fault}@5x6")
        await live.until_connected()
        await until("fir answers", lambda: answers_with_its_head(fir))
        await started_run(live.sites["elm"])

        async def stands_still() -> bool:
            return "stands still" in (await fir.status()).last_error

        await until("fir stands still", stands_still)
        head = (await fir.status()).head_round
        assert (await ask(fir)).citations, "questions are answered"
        with pytest.raises(grpc.aio.AioRpcError, match="stands still, it cannot write its state"):
            await fir.stub.StopTraining(control.StopTrainingRequest(), timeout=5)
        await until_head(live, ["elm", "oak"], head + 2)
        assert await stands_still()
        assert (await fir.status()).head_round == head
        refusals = [site.log for site in (live.sites["elm"], live.sites["oak"])]
        assert any("stands still" in log for log in refusals), "the peers know why"
        await until_head(live, ["fir"], head + 4)  # by itself, once the disk takes it
        assert not await stands_still()
        await settle(live, History())
