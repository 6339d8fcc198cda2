"""Real faults on real daemons: five `fedd`, each in a network namespace of its own.

Whatever happens to sites and networks, the federation goes on committing rounds as
long as a quorum is up, nobody ends with another history than the others, who was
away catches up by itself, and questions are answered throughout. The network is cut
where packets travel, processes are stopped and killed by signals: nothing in the
daemons knows about it. `make test-faults` runs these and shows the figures.

All of it twice: where no site may lie three of the five decide, where one may lie four.
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager

import pytest
import pytest_asyncio

from tests.faults.namespaces import Network, NotPermitted
from tests.faults.ordeal import Ordeal

pytestmark = [
    pytest.mark.faults,
    pytest.mark.federation,
    pytest.mark.slow,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(400),
]

SITES = ["alder", "birch", "cedar", "dogwood", "elder"]
PHASES = ["prepare", "train", "aggregate", "state", "open", "vote"]
# On a machine that does more than this, five daemons need longer: FAULTS_SLOWNESS=3, say.
SLOWNESS = float(os.environ.get("FAULTS_SLOWNESS", "1"))
PHASE_S, TRAIN_S = 2.0 * SLOWNESS, 3.0 * SLOWNESS
DEADLINES = {"phase_deadline_s": PHASE_S, "train_deadline_s": TRAIN_S, "heartbeat_s": 0.5}

WITHIN_S = 90.0 * SLOWNESS  # for what takes some ten seconds

Tell = Callable[[str], None]


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    try:
        with Network.made(SITES) as network:
            yield network
    except NotPermitted as reason:
        pytest.skip(f"network namespaces are not permitted here: {reason}")


@pytest_asyncio.fixture(
    scope="module", loop_scope="module", params=[0, 1], ids=["no_liar", "one_liar"]
)
async def ordeal(
    request: pytest.FixtureRequest, network: Network, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Ordeal]:
    root = tmp_path_factory.mktemp("faults")
    async with Ordeal.begun(root, network, DEADLINES, faulty_sites=request.param) as ordeal:
        yield ordeal


@pytest.fixture
def tell(request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]) -> Tell:
    """Show a figure, also when the test passes."""

    def show(line: str) -> None:
        with capsys.disabled():
            print(f"\n  {request.node.name}: {line}", end="", flush=True)

    return show


@asynccontextmanager
async def survived(ordeal: Ordeal, tell: Tell) -> AsyncIterator[None]:
    """At the end of each fault: one head, one history, every question answered."""
    await ordeal.until_at_rest()
    before, began = ordeal.counts(), time.monotonic()
    try:
        yield
    finally:
        ordeal.network.heal()
    caught_up = await ordeal.until_agreed()
    answered = await ordeal.answered_throughout(before)
    tell(
        f"same head everywhere {caught_up:.1f} s after the fault ended; {answered}; "
        f"{time.monotonic() - began:.0f} s in all"
    )


def deadline(phase: str) -> str:
    """What the settings say about a phase, for people."""
    return f"deadline of {phase} {TRAIN_S if phase == 'train' else PHASE_S:g} s"


@pytest.mark.parametrize("phase", PHASES)
async def test_a_coordinator_cut_off_costs_one_attempt(
    ordeal: Ordeal, tell: Tell, phase: str
) -> None:
    async with survived(ordeal, tell):
        round_ = await ordeal.head() + 1
        coordinator = ordeal.coordinator(round_)
        others = ordeal.others(coordinator)
        async with ordeal.halted(coordinator, phase):
            ordeal.network.cut(coordinator)
        recovery = await ordeal.until_head(round_, others, WITHIN_S, of=ordeal.quorum)
        behind = await ordeal.until_head(round_, others, WITHIN_S)
        assert await ordeal.attempt_of(round_, others[0]) == 1, "one attempt, not the round"
        tell(
            f"committed by a quorum {recovery:.1f} s after the cut, by all {behind:.1f} s later; "
            f"{deadline(phase)}"
        )


async def test_a_coordinator_killed_in_each_phase_costs_one_attempt(
    ordeal: Ordeal, tell: Tell
) -> None:
    """A round for each phase; each coordinator is started again while its round goes on."""
    async with survived(ordeal, tell), asyncio.TaskGroup() as group:
        for phase in PHASES:
            await ordeal.until_all_are_up()
            await ordeal.until_agreed()
            round_ = await ordeal.head() + 1
            coordinator = ordeal.coordinator(round_)
            async with ordeal.halted(coordinator, phase):
                await ordeal.kill(coordinator)
            group.create_task(ordeal.revive(coordinator))
            recovery = await ordeal.until_head(round_, ordeal.names, WITHIN_S, of=ordeal.quorum)
            attempt = await ordeal.attempt_of(round_, ordeal.coordinator(round_, 1))
            assert attempt == 1, "one attempt, not the round"
            tell(f"committed {recovery:.1f} s after the kill in {phase}; {deadline(phase)}")


async def test_a_quorum_goes_on_and_a_minority_catches_up(ordeal: Ordeal, tell: Tell) -> None:
    """The round under way goes on with those that decide, and so do others.

    Where none may lie, two of five are cut off, and one of them costs an attempt; where
    one may lie, one is.
    """
    async with survived(ordeal, tell):
        round_ = await ordeal.head() + 1
        # Neither who coordinates this round nor who deals its key, the next one.
        minority = [ordeal.coordinator(round_ + n) for n in (2, 4)][: ordeal.may_be_down]
        quorum = ordeal.others(*minority)
        assert len(quorum) == ordeal.quorum
        async with ordeal.halted(ordeal.coordinator(round_), "train", rounds=3):
            ordeal.network.part(minority, quorum)
        took = await ordeal.until_head(round_ + 2, quorum, WITHIN_S)
        attempts = [await ordeal.attempt_of(round_ + n, quorum[0]) for n in range(3)]
        # Four of four have to be in time here: a busy machine may cost an attempt of its own.
        assert attempts[2] >= 1, "its coordinator was cut off"
        assert sum(attempts) <= 2
        for name in minority:
            status = await ordeal.live.sites[name].status()
            assert status.head_round == round_ - 1, "a minority has committed"
        tell(f"{len(quorum)} of 5 committed three rounds in {took:.1f} s")


async def test_where_no_side_is_a_quorum_all_stand_still(ordeal: Ordeal, tell: Tell) -> None:
    """Two, two and one where none may lie; three and two where one may.

    Of those three one may be a liar that tells the two something else.
    """
    async with survived(ordeal, tell):
        round_ = await ordeal.head() + 1
        most = ordeal.quorum - 1
        sides = [ordeal.names[n : n + most] for n in range(0, len(ordeal.names), most)]
        async with ordeal.halted(ordeal.coordinator(round_), "prepare"):
            ordeal.network.part(*sides)
        await ordeal.stands_still(round_, for_s=3 * (PHASE_S + TRAIN_S))
        ordeal.network.heal()
        took = await ordeal.until_head(round_, ordeal.names, WITHIN_S)
        sizes = " and ".join(str(len(side)) for side in sides)
        tell(f"{sizes} sites apart committed nothing; together again, they did in {took:.1f} s")


async def test_a_peer_that_accepts_and_never_answers_holds_up_nobody(
    ordeal: Ordeal, tell: Tell
) -> None:
    async with survived(ordeal, tell):
        before = await ordeal.head()
        silent = ordeal.coordinator(before + 2)  # it would coordinate the second of two rounds
        others = ordeal.others(silent)
        await ordeal.stop(silent)
        async with listening_silently(ordeal, silent):
            target = await ordeal.train(others[0], rounds=2)
            took = await ordeal.until_head(target, others, WITHIN_S)
            assert await ordeal.attempt_of(before + 1, others[0]) == 0
            assert await ordeal.attempt_of(before + 2, others[0]) == 1
        await ordeal.revive(silent)
        tell(f"two rounds in {took:.1f} s beside it")


@asynccontextmanager
async def listening_silently(ordeal: Ordeal, name: str) -> AsyncIterator[None]:
    """Somebody at a site's address who takes every connection and says nothing."""
    program = (
        "import socket, sys; door = socket.create_server((sys.argv[1], int(sys.argv[2])));"
        "print('open', flush=True); kept = []\n"
        "while True: kept.append(door.accept())"
    )
    host, port = ordeal.live.federation.address(name).split(":")
    process = await asyncio.create_subprocess_exec(
        *ordeal.network.command(name),
        *(sys.executable, "-c", program, host, port),
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        assert await process.stdout.readline() == b"open\n"
        yield
    finally:
        process.kill()
        await process.wait()


async def test_a_coordinator_frozen_past_its_deadline_changes_nothing_afterwards(
    ordeal: Ordeal, tell: Tell
) -> None:
    """It froze when the first vote was in; the others vote again before it wakes."""
    async with survived(ordeal, tell):
        round_ = await ordeal.head() + 1
        frozen = ordeal.coordinator(round_)
        others = ordeal.others(frozen)
        async with ordeal.halted(frozen, "vote"):
            processes = ordeal.freeze(frozen)
        try:
            took = await ordeal.until_head(round_, others, WITHIN_S)
        finally:
            ordeal.thaw(processes)
        assert took > PHASE_S
        assert await ordeal.attempt_of(round_, others[0]) == 1
        tell(f"committed {took:.1f} s after it froze; {deadline('vote')}")


async def test_twenty_rounds_while_sites_are_killed(ordeal: Ordeal, tell: Tell) -> None:
    """SIGKILL for a random site every few seconds; a quorum is always left running."""
    seed = int(os.environ.get("FAULTS_SEED") or random.randrange(1_000_000))
    tell(f"seed {seed} (FAULTS_SEED={seed} draws the same)")
    chance = random.Random(seed)
    slow = ordeal.network.slow_down(megabits=10)
    killed: list[str] = []

    async def strike(group: asyncio.TaskGroup) -> None:
        while True:
            await asyncio.sleep(chance.uniform(1, 4))
            drawn = chance.randrange(len(SITES))  # or, where that one is down, the next
            if len(ordeal.down) < ordeal.may_be_down:
                victim = next(s for s in SITES[drawn:] + SITES if s not in ordeal.down)
                await ordeal.kill(victim)
                killed.append(victim)
                group.create_task(ordeal.revive(victim))

    async with survived(ordeal, tell):
        target = await ordeal.train(chance.choice(ordeal.names), rounds=20)
        async with asyncio.TaskGroup() as group:
            striking = group.create_task(strike(group))
            took = await ordeal.until_head(target, ordeal.names, within_s=180, of=ordeal.quorum)
            striking.cancel()
        assert killed
        pace = "10 Mbit/s a site" if slow else "no limit on the network: tbf is missing here"
        tell(f"20 rounds in {took:.0f} s ({pace}), {len(killed)} kills: {', '.join(killed)}")
