"""Real daemons, one of which decides what is not its to decide, or disturbs those who would.

Every lie is told twice: to daemons as they are, which refuse it and go on beside the liar,
and to daemons from which only that defence was taken, where it has its way.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc.aio
import pytest

from proto import control_pb2 as control
from proto import federation_pb2 as pb
from tests.federation import LiveFederation, LiveSite, Surroundings

pytestmark = [
    pytest.mark.attacks,
    pytest.mark.federation,
    pytest.mark.slow,
    pytest.mark.timeout(900),
]

UNDEFENDED = pytest.mark.endurance  # of the attack: `make attacks`
THREE = ["alder", "birch", "cedar"]
FOUR = [*THREE, "dogwood"]
# Round r is led by the site at (r + attempt) mod n: round 1 by birch, cedar, dogwood, alder.
FARTHEST_ATTEMPT = 2**32 - 5  # the liar takes the last one of its own
CHEAP = 1e-6


@asynccontextmanager
async def federation(
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
    sites: list[str],
    *,
    without: str = "",
    faulty_sites: int = 1,
    phase_s: float = 60.0,
) -> AsyncIterator[LiveFederation]:
    """With corpora, one liar tolerated, and without one defence if ``without`` names one."""
    monkeypatch.setenv("HANSE_UNDEFENDED", without)
    async with LiveFederation.start(
        root,
        sites,
        surroundings=Surroundings(program="tests.attacks.deciding_fedd"),
        connect_s=500,
        rounds={"phase_deadline_s": phase_s, "heartbeat_s": 1.0},
        faulty_sites=faulty_sites,
    ) as live:
        await live.ingest_all()
        yield live


def tell(live: LiveFederation, site: str, lie: str) -> None:
    (live.sites[site].folder / "lie").write_text(lie)


def recant(live: LiveFederation, site: str) -> None:
    (live.sites[site].folder / "lie").unlink()


async def ask(site: LiveSite, rounds: int = 1, privacy: pb.PrivacyPlan | None = None) -> int:
    """A person at this site asks for rounds; up to which."""
    wish = control.TrainRequest(rounds=rounds, plan=pb.TrainingPlan(privacy=privacy))
    reply = await site.stub.Train(wish, timeout=60)
    return int(reply.run.target_round)


async def heads(live: LiveFederation, at: list[str], round_: int, within_s: float = 300) -> None:
    """Wait until these sites have committed that round."""
    async with asyncio.timeout(within_s):
        for name in at:
            while (await live.sites[name].status()).head_round < round_:
                assert live.sites[name].process.returncode is None, live.sites[name].log
                await asyncio.sleep(0.1)


async def logged(live: LiveFederation, at: list[str], words: str, within_s: float = 200) -> None:
    """Wait until all of these sites' logs say so."""
    async with asyncio.timeout(within_s):
        while not all(words in live.sites[name].log for name in at):
            await asyncio.sleep(0.1)


async def agreed(live: LiveFederation, at: list[str]) -> control.Round:
    """The last round, of which these sites know one and the same certificate body."""
    last = [(await live.sites[name].rounds())[-1] for name in at]
    assert len({one.certificate.body.SerializeToString(deterministic=True) for one in last}) == 1
    return last[0]


async def restarted(live: LiveFederation, names: list[str]) -> None:
    for name in names:
        assert await live.sites[name].terminate() == 0
    for name in names:
        await live.launch(name)
    await live.until_connected()


def promised_attempt(site: LiveSite) -> int:
    """The attempt of the last promise on a site's disk, as its store would read it."""
    from daemon.store import Store

    with Store.open(site.folder / "state" / "state.sqlite") as store:
        return int(store.durable().promised)


# ---- row 4: absurd numbers -----------------------------------------------------------


async def test_absurd_numbers_move_nobody_also_after_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with federation(tmp_path, monkeypatch, FOUR) as live:
        tell(live, "dogwood", "absurd")
        assert await ask(live.sites["alder"]) == 1
        await heads(live, THREE, 1)
        assert (live.sites["dogwood"].folder / "did-absurd-0").exists()
        assert (await agreed(live, THREE)).certificate.attempt == 0
        await restarted(live, THREE)
        for name in THREE:
            assert (await live.sites[name].status()).run.generation == 1
        assert await ask(live.sites["birch"]) == 2
        await heads(live, THREE, 2)
        assert (live.sites["dogwood"].folder / "did-absurd-1").exists()
        for name in THREE:
            assert live.sites[name].process.returncode is None
            assert "Traceback" not in live.sites[name].log
