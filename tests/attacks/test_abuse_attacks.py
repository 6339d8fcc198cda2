"""Too much, too slow, too large: attacks on a site's time and memory, and on its audit log.

Each attack meets a door as it is, and the same door with one defence removed, where
it does its harm. At the end all of them at once meet a real daemon, which answers
its own people and an honest peer throughout.
"""

from __future__ import annotations

import peers.link.tls13  # noqa: F401  before anything imports grpc

# isort: split
import asyncio
import json
import resource
import socket
import statistics
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc.aio
import psutil
import pytest

from daemon.state import audit_format
from daemon.state.audit import AuditLog
from daemon.state.audit_format import Break, Chain, segments
from proto import control_pb2 as control
from tests.attacks.programs.crowd import SlowLoris, attack, connect, still_let_in
from tests.attacks.programs.door import Door, door
from tests.daemon.state.entries import entries
from tests.daemon.state.test_audit import FORGERIES, Forge
from tests.support.authority import Federation
from tests.support.federation import LiveFederation, Surroundings
from tests.support.small_models import small_encoder
from tests.support.strangers import calling

pytestmark = [pytest.mark.attacks, pytest.mark.slow]

_NO_LIMIT = 10**9


@pytest.fixture
def federation(tmp_path: Path) -> Federation:
    return Federation.found(tmp_path, "alpha", "beta", "gamma")


@dataclass
class Honest:
    """gamma, who greets alpha now and then on a connection that stays, and how long that takes."""

    federation: Federation
    seconds: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    async def greet(self, times: int, pause_s: float = 0.1) -> None:
        async with calling(self.federation, self.federation.identity("gamma")) as gamma:
            for _ in range(times):
                started = time.monotonic()
                try:
                    await gamma.hello("gamma")
                except grpc.aio.AioRpcError as error:
                    self.failures.append(str(error.details()))
                self.seconds.append(time.monotonic() - started)
                await asyncio.sleep(pause_s)


# ---- compression ---------------------------------------------------------------

_BOMB_MIB = 60


async def test_a_compressed_bomb_is_not_inflated(federation: Federation) -> None:
    async with door(federation) as alpha:
        before = (await alpha.state())["peak_mib"]
        answers = await attack("bomb", federation, _BOMB_MIB)
        grown = (await alpha.state())["peak_mib"] - before
    print(f"bomb of {_BOMB_MIB} MiB: {grown} MiB; {answers}")
    assert sum(answers.values()) == 2
    assert all("is disabled" in answer for answer in answers)
    assert grown < 20


async def test_a_compressed_bomb_goes_off_without_the_bounds(federation: Federation) -> None:
    async with door(federation, undefended="compression") as alpha:
        before = (await alpha.state())["peak_mib"]
        await attack("bomb", federation, _BOMB_MIB)
        grown = (await alpha.state())["peak_mib"] - before
    print(f"without the bounds: {grown} MiB")
    assert grown > _BOMB_MIB


# ---- slow loris -----------------------------------------------------------------


async def dripped_on(alpha: Door, method: str, within_s: float) -> SlowLoris:
    """The attacker, when all its calls are ended or its time is up."""
    loris = SlowLoris(alpha.federation)
    await loris.run(30, within_s, method)
    return loris


@pytest.mark.parametrize("method", ["Hello", "Push", "Pull"])
async def test_a_slow_loris_is_shown_out(federation: Federation, method: str) -> None:
    async with door(federation, message_s=1, frame_s=1) as alpha:
        loris = await dripped_on(alpha, method, within_s=60)
    assert (loris.opened, len(loris.ended)) == (30, 30)


async def test_a_slow_loris_stays_where_nobody_looks_at_the_clock(federation: Federation) -> None:
    async with door(federation, message_s=_NO_LIMIT, streams=_NO_LIMIT) as alpha:
        loris = await dripped_on(alpha, "Hello", within_s=4)
    assert (loris.opened, len(loris.ended)) == (30, 0)


# ---- connections ------------------------------------------------------------------


@pytest.fixture
def many_files() -> Iterator[int]:
    """As many descriptors as the system lets us have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    yield hard
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def close(strangers: list[socket.socket]) -> None:
    for stranger in strangers:
        stranger.close()


async def test_a_crowd_at_the_door_leaves_room_inside(
    federation: Federation, many_files: int
) -> None:
    crowd = min(3000, many_files - 500)
    honest = Honest(federation)
    async with door(federation, files=1024, connections=512, handshake_s=2) as alpha:
        greeting = asyncio.create_task(honest.greet(30))
        await asyncio.sleep(0.5)
        strangers = connect(federation.ports["alpha"], crowd)
        await asyncio.sleep(1)
        inside, crowded = still_let_in(strangers), await alpha.state()
        await greeting
        left = still_let_in(strangers)
        late = Honest(federation)
        await late.greet(1)
        close(strangers)
    print(f"{crowd} connections: {inside} let in, {crowded['files']} descriptors, {left} left")
    assert inside <= 512
    assert crowded["files"] < 600
    assert (honest.failures, late.failures) == ([], [])
    assert left == 0, "who says nothing goes again"


async def test_a_crowd_takes_every_descriptor_where_nobody_counts(
    federation: Federation, many_files: int
) -> None:
    async with door(federation, files=1024, connections=_NO_LIMIT, handshake_s=20) as alpha:
        assert (await alpha.state())["files"] < 100
        strangers = connect(federation.ports["alpha"], min(3000, many_files - 500))
        await asyncio.sleep(1)
        late = Honest(federation)
        await late.greet(1)
        try:
            files = (await alpha.state())["files"]
        except (json.JSONDecodeError, ConnectionError):
            files = _NO_LIMIT  # it could not even tell any more
        close(strangers)
    assert late.failures
    assert files > 1000


# ---- a member that floods ------------------------------------------------------------


# Small ones, so that a slow machine, too, can send far more than they allow.
_FEW: dict[str, Any] = {"requests_per_s": 5, "burst": 20}


@dataclass
class Flooded:
    """What became of a flood, and of an honest peer meanwhile."""

    state: dict[str, Any]
    answers: dict[str, int]
    honest: Honest
    allowed: float


async def flooded(alpha: Door) -> Flooded:
    """Three seconds of all that beta can send on four connections."""
    honest, started = Honest(alpha.federation), time.monotonic()
    flooding = asyncio.create_task(attack("flood", alpha.federation, 4, 3))
    await asyncio.sleep(1)
    await honest.greet(15)
    answers = await flooding
    allowed = _FEW["burst"] + _FEW["requests_per_s"] * (time.monotonic() - started)
    found = Flooded(await alpha.state(), answers, honest, allowed)
    median_ms = statistics.median(honest.seconds) * 1e3
    print(f"flood: {answers}; {found.state}; gamma {median_ms:.0f} ms")
    return found


async def test_a_members_flood_is_held_back(federation: Federation) -> None:
    async with door(federation, **_FEW) as alpha:
        found = await flooded(alpha)
    assert found.honest.failures == []
    assert found.state["messages"] <= found.allowed
    assert found.state["over_quota"] > 20, "counted, for people to see"
    assert found.answers["RESOURCE_EXHAUSTED"] > 20
    assert found.state["resident_mib"] < 200


async def test_a_members_flood_gets_through_without_quotas(federation: Federation) -> None:
    quotas: dict[str, Any] = dict.fromkeys(("requests_per_s", "burst", "streams"), _NO_LIMIT)
    async with door(federation, **quotas) as alpha:
        found = await flooded(alpha)
    assert found.state["messages"] > 2 * found.allowed
    assert found.state["over_quota"] == 0


# Of messages of 2 MB three by their bytes, which cost 30 calls each.
_TWO_PAID: dict[str, Any] = {"requests_per_s": 5, "burst": 120}


async def slowed(alpha: Door) -> tuple[int, dict[str, int]]:
    """How many messages that take long to check were checked in three seconds; the answers."""
    answers = await attack("slow", alpha.federation, 1, 3)
    print(f"slow to check: {answers}")
    return answers["INVALID_ARGUMENT"], answers


async def test_what_is_slow_to_check_is_paid_by_its_time(federation: Federation) -> None:
    """One of 2 MB stops the event loop for 0.07 s: as much again as its bytes cost its sender."""
    async with door(federation, **_TWO_PAID) as alpha:
        checked, answers = await slowed(alpha)
    assert checked <= 2
    assert answers["RESOURCE_EXHAUSTED"] > 1


async def test_what_is_slow_to_check_passes_where_bytes_alone_count(federation: Federation) -> None:
    async with door(federation, undefended="parsing", **_TWO_PAID) as alpha:
        checked, _ = await slowed(alpha)
    assert checked > 2


# ---- the audit log ----------------------------------------------------------------------


@pytest.mark.parametrize("forge", FORGERIES, ids=[forge.__name__ for forge in FORGERIES])
def test_a_forged_audit_log_passes_only_where_nothing_is_chained(
    tmp_path: Path, forge: Forge, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = AuditLog(tmp_path)
    for number in range(8):
        log.write("uid:1000", "ask", "answered", citations=number)
    [path] = segments(tmp_path)
    path.write_bytes(b"".join(forge(path.read_bytes().splitlines(keepends=True))))
    with pytest.raises(Break) as error:
        list(entries([path]))
    assert error.value.line == 4

    def read_only(line: bytes) -> dict[str, Any] | None:
        return json.loads(line) if line.startswith(b"{") else {"objects": {}, "action": ""}

    monkeypatch.setattr(audit_format, "parsed", read_only)
    monkeypatch.setattr(audit_format, "_follow", lambda *_: None)
    assert list(entries([path])), "an ordinary log tells nothing"


def test_a_log_that_lost_its_end_is_known_by_its_head_alone(tmp_path: Path) -> None:
    log = AuditLog(tmp_path)
    for number in range(8):
        log.write("uid:1000", "ask", "answered", citations=number)
    [path] = segments(tmp_path)
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:5]))
    chain = Chain()
    found = list(entries([path], chain))
    assert len(found) == 5, "without a head that was noted, nothing is amiss"
    assert log.head[1] not in [bytes.fromhex(entry["hash"]) for entry in found]


# ---- a real daemon, all at once ------------------------------------------------------------


async def timed(work: Callable[[], Awaitable[Any]], seconds: list[float]) -> None:
    started = time.monotonic()
    await work()
    seconds.append(time.monotonic() - started)


@pytest.mark.endurance
@pytest.mark.federation
async def test_a_real_daemon_answers_throughout(tmp_path: Path, many_files: int) -> None:
    """10,000 strangers, two slow lorises, a flooding member and bombs, for some seconds."""
    encoder = small_encoder(tmp_path / "encoder", words=["anchor", "winch", "warden"])
    federation = Federation.found(tmp_path, "alpha", "beta", "gamma")
    live = LiveFederation(federation, encoder, "head", Surroundings())
    async with live._stack:
        alpha = await live.launch("alpha")
        async with asyncio.timeout(200):
            while not await is_up(alpha.stub):
                await asyncio.sleep(0.2)
        await alpha.ingest()
        process = psutil.Process(alpha.process.pid)

        async def ask() -> None:
            question = control.AskRequest(question="who looks after the anchor winch?")
            assert (await alpha.stub.Ask(question, timeout=60)).citations

        quiet, asked, statuses = list[float](), list[float](), list[float]()
        for _ in range(5):
            await timed(ask, quiet)
        before = process.memory_info().rss
        honest = Honest(federation)
        greeting = asyncio.create_task(honest.greet(40))
        await asyncio.sleep(0.3)
        strangers = connect(federation.ports["alpha"], min(10_000, many_files - 1000))
        loris = [SlowLoris(federation), SlowLoris(federation)]
        under_way = asyncio.gather(
            *(one.run(streams=30, seconds=5) for one in loris),
            attack("flood", federation, 4, 4),
            attack("bomb", federation, 20),
            return_exceptions=True,
        )
        while not under_way.done():
            await timed(ask, asked)
            await timed(alpha.status, statuses)
        during = process.memory_info().rss
        inside = still_let_in(strangers)
        await greeting
        close(strangers)
        [beta] = [p for p in (await peers_of(alpha.stub)) if p.site == "beta"]
    print(
        f"{len(strangers)} strangers, {inside} inside at the end; memory +"
        f"{(during - before) / 2**20:.0f} MiB; ask {statistics.median(quiet) * 1e3:.0f} ms, under "
        f"attack {statistics.median(asked) * 1e3:.0f} (max {max(asked) * 1e3:.0f}); status "
        f"{statistics.median(statuses) * 1e3:.0f} (max {max(statuses) * 1e3:.0f}); gamma "
        f"{statistics.median(honest.seconds) * 1e3:.0f} (max {max(honest.seconds) * 1e3:.0f}); "
        f"beta refused {beta.refused}, over quota {beta.over_quota}"
    )
    assert honest.failures == []
    assert inside <= 1000
    assert beta.over_quota > 0
    assert during - before < 200 << 20
    assert max(statuses) < 20
    assert "Traceback" not in alpha.log
    found = list(entries(segments(alpha.folder / "state" / "audit")))
    assert sum(entry["action"] == "ask" for entry in found) == len(quiet) + len(asked)
    assert "anchor" not in json.dumps(found), "who asked, not what"


async def is_up(stub: Any) -> bool:
    try:
        await stub.Status(control.StatusRequest(), timeout=5)
    except grpc.aio.AioRpcError:
        return False
    return True


async def peers_of(stub: Any) -> list[control.Peer]:
    return list((await stub.Peers(control.PeersRequest(), timeout=30)).peers)
