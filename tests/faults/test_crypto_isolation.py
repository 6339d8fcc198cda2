"""Real daemons: an update that brings the coordinator's crypto worker down costs one attempt."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from proto import control_pb2 as control
from tests.support.federation import LiveFederation, Surroundings

pytestmark = [
    pytest.mark.faults,
    pytest.mark.federation,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(400),
]

SITES = ["alder", "birch", "cedar"]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def live(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LiveFederation]:
    root = tmp_path_factory.mktemp("isolation")
    around = Surroundings(program="tests.faults.crashing_fedd")
    rounds = {"phase_deadline_s": 10.0}
    async with LiveFederation.start(root, SITES, rounds=rounds, surroundings=around) as federation:
        await federation.ingest_all()
        # What a first round waits for (workers that start) may cost an attempt of its own.
        await federation.train(SITES[0], rounds=1)
        yield federation


async def attempts_of(live: LiveFederation, site: str, round_: int) -> list[control.Attempt]:
    """All attempts of a committed round, once the last one's end is noted as well."""
    async with asyncio.timeout(60):
        while True:
            rounds = await live.sites[site].rounds()
            attempts = list(next(r.attempts for r in rounds if r.certificate.body.round == round_))
            if attempts and attempts[-1].outcome != "under way":
                return attempts
            await asyncio.sleep(0.05)


def set_trap(folder: Path, says: str) -> Path:
    """See tests/faults/crashing_fedd.py."""
    trap = folder / "trap"
    trap.write_text(says)
    return trap


def has_sprung(trap: Path) -> bool:
    return not trap.exists()


@pytest.mark.parametrize(
    ("sender", "what", "told"),
    [
        ("alder", "crash", "the crypto worker died over the update of alder"),
        ("birch", "bomb", "the crypto worker ran out of its memory over the update of birch"),
        ("cedar", "hang", ""),  # found out by the attempt's deadline
    ],
)
async def test_the_daemon_goes_on_and_the_next_attempt_commits(
    live: LiveFederation, sender: str, what: str, told: str
) -> None:
    """Whoever coordinates; where the update comes too late for a sum, in the next round."""
    folders = {site: live.sites[site].folder for site in SITES if site != sender}
    traps = {site: set_trap(folder, f"{what} {sender}") for site, folder in folders.items()}
    for _ in range(4):
        await live.train(sender, rounds=1)
        if sprung := [site for site, trap in traps.items() if has_sprung(trap)]:
            break
    assert sprung
    for trap in traps.values():
        trap.unlink(missing_ok=True)
    assert all(site.process.returncode is None for site in live.sites.values())
    head = (await live.sites[sprung[0]].status()).head_round
    *failed, committed = await attempts_of(live, sprung[0], head)
    assert committed.outcome == "committed"
    assert any(told in attempt.reason for attempt in failed)
