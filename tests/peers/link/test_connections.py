"""Sites over bad lines: cut, stalled, slow, silent, moved.

Nothing arrives twice or mixed, nothing waits for ever, and nothing grows.
"""

from __future__ import annotations

import peers.link.tls13  # noqa: F401  before anything imports grpc

# isort: split
import asyncio
import os
import random
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import grpc
import pytest
from structlog.testing import capture_logs

from peers.link.pacing import Backoff, Repeats
from peers.link.partials import Bounds
from peers.link.transport import KeepInTouch, LinkOptions
from peers.wire.errors import PeerRefused, PeerUnreachable, RemoteProtocolError
from peers.wire.messages import MIB
from proto import federation_pb2 as pb
from tests.support.authority import Federation, free_port
from tests.support.lines import Line, mute, relocated, until
from tests.support.loopback import (
    CONTEXT,
    QUICK,
    UPDATE,
    VERSION,
    Site,
    begun,
    hint,
    running,
    spooled,
)

# Calls are made once: the test itself decides when they are made again.
ONCE = replace(QUICK, timeouts=replace(QUICK.timeouts, pauses_s=()))


@pytest.fixture
def federation(tmp_path: Path) -> Federation:
    return Federation.found(tmp_path, "alpha", "beta")


@dataclass
class Ends:
    """Alpha, which calls beta over a line."""

    alpha: Site
    line: Line
    beta: Site

    async def cut_after(self, size: int, content: bytes, name: pb.BlobName = UPDATE) -> None:
        """Push, and lose the connection when about ``size`` bytes are through."""
        self.line.cut_after = self.line.forwarded + size
        with pytest.raises(PeerUnreachable):
            await self.alpha.transport.push("beta", name, content)
        busy = self.beta.transport._servicer._busy
        await until(lambda: busy["pushes", "alpha"] == 0)  # beta has noticed, too
        # So has alpha's channel: a stream may fail a moment before it, and the next call
        # would be written into the line that is gone.
        channel = self.alpha.transport._links["beta"]._channel
        await until(lambda: channel.get_state() is not grpc.ChannelConnectivity.READY)

    async def pushed(self, content: bytes, name: pb.BlobName = UPDATE) -> int:
        """Push to the end; bytes that it took of the line."""
        before = self.line.forwarded
        await self.alpha.transport.push("beta", name, content)
        return self.line.forwarded - before


@asynccontextmanager
async def over_a_line(federation: Federation, options: LinkOptions = ONCE) -> AsyncIterator[Ends]:
    async with (
        running(federation, "beta", options=options) as beta,
        Line.to(federation.ports["beta"]) as line,
        running(
            federation, "alpha", manifest=relocated(federation, beta=line.port), options=options
        ) as alpha,
    ):
        yield Ends(alpha, line, beta)


def arrived(site: Site) -> list[bytes]:
    """The contents of the objects that arrived; nothing else may lie in the spool."""
    paths = [blob.path for _, _, blob in site.inbox.blobs if blob.path is not None]
    assert spooled(site) == sorted(paths)
    return [path.read_bytes() for path in paths]


def sizes(site: Site) -> list[int]:
    return [path.stat().st_size for path in begun(site)]


# ---- an upload that is cut ---------------------------------------------------


@pytest.mark.slow
async def test_an_upload_that_was_cut_goes_on_at_the_last_whole_frame(
    federation: Federation,
) -> None:
    content = os.urandom(16 * MIB + 5)
    async with over_a_line(federation) as ends:
        await ends.cut_after(12 * MIB, content)
        [held] = sizes(ends.beta)
        assert held % MIB == 0
        assert 6 * MIB < held <= 12 * MIB  # what was in the line's buffers is lost
        sent = await ends.pushed(content)
        assert arrived(ends.beta) == [content]
        assert sizes(ends.beta) == []
        # The first frame again, and what had not arrived.
        assert len(content) - held + MIB <= sent < len(content) - held + MIB + MIB // 2


@pytest.mark.slow
async def test_an_upload_that_is_cut_is_finished_by_the_same_call(federation: Federation) -> None:
    content = os.urandom(16 * MIB + 5)
    async with over_a_line(federation, QUICK) as ends:
        ends.line.cut_after = 12 * MIB
        sent = await ends.pushed(content)
        assert arrived(ends.beta) == [content]
        assert ends.line.connections == 2
        assert sent < len(content) + 10 * MIB  # from the start again it were 12


@pytest.mark.slow
async def test_an_upload_that_is_cut_many_times_makes_its_way(federation: Federation) -> None:
    content = os.urandom(12 * MIB)
    async with over_a_line(federation) as ends:
        held = [0]
        for _ in range(4):
            await ends.cut_after(3 * MIB + MIB // 2, content)
            held += sizes(ends.beta)
        assert held == sorted(held)
        assert held[-1] > 3 * MIB + MIB // 2  # more than one try brings
        await ends.pushed(content)
        assert arrived(ends.beta) == [content]


@pytest.mark.slow
@pytest.mark.parametrize("alike", [0, MIB, 2 * MIB])
async def test_two_objects_of_one_name_are_never_mixed(federation: Federation, alike: int) -> None:
    """An update that was encrypted anew; or, unlikely, one that begins with the same bytes."""
    one = os.urandom(6 * MIB)
    other = one[:alike] + os.urandom(6 * MIB - alike)
    async with over_a_line(federation) as ends:
        await ends.cut_after(4 * MIB, one)
        try:
            await ends.pushed(other)
        except PeerUnreachable:  # beta's reason met a write and was lost
            await ends.pushed(other)
        assert arrived(ends.beta) == [other]
        assert sizes(ends.beta) == []


@pytest.mark.slow
async def test_an_object_of_another_length_starts_anew(federation: Federation) -> None:
    one = os.urandom(6 * MIB)
    async with over_a_line(federation) as ends:
        await ends.cut_after(4 * MIB, one)
        await ends.pushed(one[: 5 * MIB])
        assert arrived(ends.beta) == [one[: 5 * MIB]]
        assert sizes(ends.beta) == []


@pytest.mark.slow
async def test_objects_of_two_attempts_are_kept_apart(federation: Federation) -> None:
    content = os.urandom(6 * MIB)
    later = pb.BlobName(kind=pb.ENCRYPTED_UPDATE, round=1, attempt=1)
    async with over_a_line(federation) as ends:
        await ends.cut_after(4 * MIB, content)
        assert await ends.pushed(content, later) > 6 * MIB
        assert len(sizes(ends.beta)) == 1
        assert await ends.pushed(content) < 6 * MIB


@pytest.mark.slow
async def test_a_push_takes_over_from_one_whose_line_is_dead(federation: Federation) -> None:
    """The sender knows sooner than the receiver that the line is gone."""
    content = os.urandom(12 * MIB)
    patient = replace(ONCE, limits=replace(ONCE.limits, frame_s=60))
    async with over_a_line(federation, patient) as ends:
        stuck = asyncio.create_task(ends.alpha.transport.push("beta", UPDATE, content))
        await until(lambda: ends.line.forwarded > 6 * MIB)
        ends.line.stall()
        await asyncio.sleep(0.2)
        stuck.cancel()
        await asyncio.wait([stuck])
        async with Line.to(federation.ports["beta"]) as new:
            ends.alpha.transport.reload(
                ends.alpha.identity, relocated(federation, 2, beta=new.port)
            )
            async with asyncio.timeout(5):
                await ends.alpha.transport.push("beta", UPDATE, content)
            assert new.forwarded < 10 * MIB
        assert arrived(ends.beta) == [content]


@pytest.mark.slow
async def test_a_key_that_was_cut_is_not_kept(federation: Federation) -> None:
    content = os.urandom(4 * MIB)
    async with over_a_line(federation) as ends:
        await ends.cut_after(2 * MIB, content, CONTEXT)
        assert sizes(ends.beta) == []
        assert await ends.pushed(content, CONTEXT) > 4 * MIB
        assert ends.beta.inbox.blobs[0][2].data == content


@pytest.mark.slow
async def test_what_nobody_wants_any_more_is_forgotten(federation: Federation) -> None:
    tidy = replace(ONCE, tidy_s=0.05)
    async with over_a_line(federation, tidy) as ends:
        await ends.cut_after(4 * MIB, os.urandom(6 * MIB))
        assert len(sizes(ends.beta)) == 1
        ends.beta.inbox.why_not = "that attempt is over"
        await until(lambda: sizes(ends.beta) == [])


@pytest.mark.slow
async def test_what_nobody_goes_on_with_is_forgotten(federation: Federation) -> None:
    brief = Bounds(of_a_peer=2, bytes_in_all=1 << 30, kept_s=0.2)
    tidy = replace(ONCE, tidy_s=0.05, limits=replace(ONCE.limits, partials=brief))
    async with over_a_line(federation, tidy) as ends:
        await ends.cut_after(4 * MIB, os.urandom(6 * MIB))
        await until(lambda: sizes(ends.beta) == [])


@pytest.mark.slow
async def test_what_is_kept_is_bounded_in_bytes(federation: Federation) -> None:
    small = Bounds(of_a_peer=10, bytes_in_all=4 * MIB, kept_s=60)
    bounded = replace(ONCE, limits=replace(ONCE.limits, partials=small))
    async with over_a_line(federation, bounded) as ends:
        for attempt in range(3):
            name = pb.BlobName(kind=pb.ENCRYPTED_UPDATE, round=1, attempt=attempt)
            await ends.cut_after(3 * MIB + MIB // 2, os.urandom(6 * MIB), name)
            assert sum(sizes(ends.beta)) <= 4 * MIB
        assert "update-1-2." in begun(ends.beta)[-1].name  # the oldest go first


@pytest.mark.slow
async def test_what_was_damaged_on_the_disk_is_not_gone_on_with(federation: Federation) -> None:
    content = os.urandom(6 * MIB)
    async with over_a_line(federation) as ends:
        await ends.cut_after(4 * MIB, content)
        with begun(ends.beta)[0].open("r+b") as file:
            file.truncate(MIB)
        assert await ends.pushed(content) > 6 * MIB
        assert arrived(ends.beta) == [content]
        assert sizes(ends.beta) == []


async def test_a_message_survives_a_cut_line(federation: Federation) -> None:
    async with over_a_line(federation, QUICK) as ends:
        await ends.alpha.transport.send("beta", hint("alpha", 1))
        ends.line.cut()
        await ends.alpha.transport.send("beta", hint("alpha", 2))
        assert [envelope.behind.attempt for _, envelope in ends.beta.inbox.messages] == [1, 2]


# ---- a peer that is slow ----------------------------------------------------------


def resident_mib() -> float:
    status = Path("/proc/self/status").read_text(encoding="ascii")
    [line] = [line for line in status.splitlines() if line.startswith("VmRSS:")]
    return int(line.split()[1]) / 1024


def large_file(folder: Path) -> Path:
    path = folder / "large"
    with path.open("wb") as file:
        file.truncate(200 * MIB)
    return path


@pytest.mark.slow
async def test_a_slow_reader_does_not_grow_the_memory_of_who_pushes(
    federation: Federation, tmp_path: Path
) -> None:
    patient = replace(ONCE, timeouts=replace(ONCE.timeouts, frame_s=60))
    async with over_a_line(federation, patient) as ends:
        large = large_file(tmp_path)
        push = asyncio.create_task(ends.alpha.transport.push("beta", UPDATE, large))
        await until(lambda: ends.line.forwarded > 20 * MIB)
        ends.line.stall()
        before = resident_mib()
        await asyncio.sleep(1)
        sent = ends.alpha.transport.statistics()["beta"].bytes_sent
        assert sent - ends.line.forwarded < 8 * MIB  # a few frames, most of them in the kernel
        assert resident_mib() - before < 16
        push.cancel()
        await asyncio.wait([push])


@pytest.mark.slow
async def test_a_slow_reader_does_not_grow_the_memory_of_who_is_pulled_from(
    federation: Federation, tmp_path: Path
) -> None:
    patient = replace(ONCE, limits=replace(ONCE.limits, frame_s=60))
    async with over_a_line(federation, patient) as ends:
        ends.beta.inbox.shelf[pb.MODEL_VERSION] = large_file(tmp_path)
        pull = asyncio.create_task(ends.alpha.transport.pull("beta", VERSION, tmp_path / "here"))
        await until(lambda: traffic(ends.alpha, "beta") > 20 * MIB)
        ends.line.stall()
        before = resident_mib()
        await asyncio.sleep(1)
        sent = ends.beta.transport.statistics()["alpha"].bytes_sent
        assert sent - traffic(ends.alpha, "beta") < 16 * MIB
        assert resident_mib() - before < 16
        pull.cancel()
        await asyncio.wait([pull])


def traffic(site: Site, peer: str) -> int:
    return site.transport.statistics()[peer].bytes_received


# ---- finding each other again --------------------------------------------------------


def test_pauses_double_up_to_a_bound_and_are_drawn_from_its_upper_half() -> None:
    backoff = Backoff(0.5, 5.0, random.Random(7))
    bounds = [0.5, 1.0, 2.0, 4.0, 5.0, 5.0]
    pauses = [backoff.pause() for _ in bounds]
    for bound, pause in zip(bounds, pauses, strict=True):
        assert bound / 2 <= pause <= bound
    again = Backoff(0.5, 5.0, random.Random(7))
    assert [again.pause() for _ in bounds] == pauses
    backoff.reset()
    assert backoff.pause() <= 0.5


def test_a_bound_below_the_first_pause_is_the_first_pause() -> None:
    backoff = Backoff(0.5, 0.1, random.Random(7))
    assert all(0.25 <= backoff.pause() <= 0.5 for _ in range(5))


def test_sites_that_lost_each_other_together_drift_apart() -> None:
    """A hundred sites: no twentieth of a second sees more than a tenth of them try."""
    sites = [Backoff(0.5, 5.0, random.Random(seed)) for seed in range(100)]
    elapsed = [0.0] * len(sites)
    for tries in range(6):
        elapsed = [past + site.pause() for past, site in zip(elapsed, sites, strict=True)]
        if tries >= 2:
            slots = Counter(int(moment * 20) for moment in elapsed)
            assert max(slots.values()) <= len(sites) / 10


@pytest.mark.slow
async def test_sites_that_start_together_do_not_greet_together(tmp_path: Path) -> None:
    names = [f"site{number}" for number in range(6)]
    federation = Federation.found(tmp_path, "alpha", *names)
    options = replace(QUICK, keep_in_touch=KeepInTouch(60, 60, start_s=1.0))
    started: dict[str, float] = {}
    greeted_after: dict[str, float] = {}

    def tap(way: str, site: str, _raw: bytes) -> None:
        if way == "received":
            greeted_after.setdefault(site, time.monotonic() - started[site])

    async with AsyncExitStack() as stack:
        await stack.enter_async_context(running(federation, "alpha", options=QUICK, tap=tap))
        for seed, name in enumerate(names):
            started[name] = time.monotonic()
            await stack.enter_async_context(
                running(federation, name, options=options, chance=random.Random(seed))
            )
        await until(lambda: set(names) <= set(greeted_after))
    assert max(greeted_after.values()) - min(greeted_after.values()) > 0.3


@pytest.mark.slow
async def test_a_peer_that_moved_is_found_at_its_new_address(federation: Federation) -> None:
    moved = replace(federation, ports=federation.ports | {"beta": free_port()})
    async with running(federation, "alpha") as alpha:
        async with running(federation, "beta"):
            await alpha.transport.send("beta", hint("alpha", 1))
        async with running(moved, "beta") as beta:
            with pytest.raises(PeerUnreachable):
                await alpha.transport.send("beta", hint("alpha", 2))
            alpha.transport.reload(alpha.identity, moved.manifest(version=2))
            await alpha.transport.send("beta", hint("alpha", 3))
            assert beta.inbox.messages == [("alpha", hint("alpha", 3))]


async def test_a_message_on_its_way_follows_a_peer_that_moves(federation: Federation) -> None:
    moved = replace(federation, ports=federation.ports | {"beta": free_port()})
    async with running(federation, "alpha") as alpha, running(moved, "beta") as beta:
        sending = asyncio.create_task(alpha.transport.send("beta", hint("alpha")))
        await until(lambda: alpha.transport.statistics()["beta"].last_error != "")
        alpha.transport.reload(alpha.identity, moved.manifest(version=2))
        await sending
        assert beta.inbox.messages == [("alpha", hint("alpha"))]


@pytest.mark.slow
async def test_an_upload_follows_a_peer_that_moves(federation: Federation) -> None:
    """Behind another port it is the same process: what it holds of the object still counts."""
    content = os.urandom(12 * MIB)
    async with over_a_line(federation, QUICK) as ends, Line.to(ends.line.target) as other:
        push = asyncio.create_task(ends.pushed(content))
        # What beta has written: what was forwarded may still be in a buffer, and is lost then.
        await until(lambda: sum(sizes(ends.beta)) >= 5 * MIB)
        ends.alpha.transport.reload(ends.alpha.identity, relocated(federation, 2, beta=other.port))
        await push
        assert arrived(ends.beta) == [content]
        # The first frame again, and what had not arrived.
        assert 0 < other.forwarded < 8 * MIB + MIB // 2


async def test_an_upload_not_yet_begun_follows_a_peer_that_moves(
    federation: Federation,
) -> None:
    patient = replace(QUICK.timeouts, frame_s=60.0)
    unasked = replace(QUICK, timeouts=patient, keep_in_touch=KeepInTouch(60, 60, start_s=1e6))
    moved = replace(federation, ports=federation.ports | {"beta": free_port()})
    async with (
        mute() as port,
        running(
            federation, "alpha", manifest=relocated(federation, beta=port), options=unasked
        ) as alpha,
        running(moved, "beta") as beta,
    ):
        link = alpha.transport._links["beta"]
        link._greeted = True  # by the beta that was there before
        push = asyncio.create_task(alpha.transport.push("beta", UPDATE, b"update"))
        connecting = grpc.ChannelConnectivity.CONNECTING
        await until(lambda: link._channel.get_state() is connecting)
        alpha.transport.reload(alpha.identity, moved.manifest(version=2))
        async with asyncio.timeout(20):
            await push
        assert arrived(beta) == [b"update"]


async def test_a_peer_that_moved_is_greeted_there_unasked(federation: Federation) -> None:
    eager = replace(QUICK, keep_in_touch=KeepInTouch(0.1, 0.05, 0.05))
    moved = replace(federation, ports=federation.ports | {"beta": free_port()})
    async with (
        running(federation, "alpha", options=eager) as alpha,
        running(moved, "beta") as beta,
    ):
        await until(lambda: alpha.transport.statistics()["beta"].last_error != "")
        beta.inbox.head_round = 5
        alpha.transport.reload(alpha.identity, moved.manifest(version=2))
        await until(lambda: alpha.transport.statistics()["beta"].head_round == 5)


@pytest.mark.slow
async def test_a_peer_that_is_back_is_greeted_as_soon_as_it_greets_us(
    federation: Federation,
) -> None:
    """Not when our own pause is over, which is a minute here."""
    async with running(federation, "alpha") as alpha:
        await until(lambda: alpha.transport.statistics()["beta"].last_error != "")
        eager = replace(QUICK, keep_in_touch=KeepInTouch(0.5, 0.5, 0.0))
        async with running(federation, "beta", options=eager):
            await until(lambda: alpha.transport.statistics()["beta"].connected)


# ---- what people see ------------------------------------------------------------------


@pytest.mark.slow
async def test_the_lag_of_a_peer_is_that_of_its_line(federation: Federation) -> None:
    # Beta does not find alpha: who is called greets anew, over a connection that stands.
    nowhere = relocated(federation, alpha=free_port())
    async with (
        running(federation, "beta", manifest=nowhere),
        Line.to(federation.ports["beta"]) as line,
        running(
            federation, "alpha", manifest=relocated(federation, beta=line.port), options=ONCE
        ) as alpha,
    ):
        await until(lambda: alpha.transport.statistics()["beta"].connected)
        assert alpha.transport.statistics()["beta"].round_trip_ms is None  # TLS was in it
        await alpha.transport.hello("beta")
        near = alpha.transport.statistics()["beta"].round_trip_ms
        line.delay_s = 0.1
        await alpha.transport.hello("beta")
        far = alpha.transport.statistics()["beta"].round_trip_ms
    assert near is not None
    assert far is not None
    assert near > 0
    assert far >= 200


async def test_it_is_known_until_when_a_peers_certificate_is_valid(federation: Federation) -> None:
    async with running(federation, "alpha") as alpha:
        assert alpha.transport.statistics()["beta"].certificate_not_after is None
        async with running(federation, "beta") as beta:
            await beta.transport.hello("alpha")
            known = alpha.transport.statistics()["beta"].certificate_not_after
            assert known == beta.identity.not_after
            renewed = federation.renew("beta", days=300)
            assert renewed.not_after != known
            beta.transport.reload(renewed, federation.manifest(version=2))
            await beta.transport.hello("alpha")
            assert alpha.transport.statistics()["beta"].certificate_not_after == renewed.not_after


@pytest.mark.slow
async def test_a_refusal_that_repeats_is_told_once_and_then_counted(
    federation: Federation,
) -> None:
    options = replace(QUICK, tidy_s=0.05, tell_again_s=1.0)
    with capture_logs() as logged:
        async with (
            running(federation, "alpha") as alpha,
            running(federation, "beta", options=options) as beta,
        ):
            beta.inbox.why_not = "no attempt is under way"
            for attempt in range(20):
                name = pb.BlobName(kind=pb.ENCRYPTED_UPDATE, round=1, attempt=attempt)
                with pytest.raises(PeerRefused):
                    await alpha.transport.push("beta", name, b"update")
            beta.inbox.failure = RemoteProtocolError("another reason")
            with pytest.raises(PeerRefused):
                await alpha.transport.send("beta", hint("alpha"))
            refused = [line for line in logged if "peer refused" in line["event"]]
            assert [line["call"] for line in refused] == ["Push", "Deliver"]
            await until(lambda: any(line["event"] == "peer refused again" for line in logged))
            assert beta.transport.statistics()["alpha"].refused == 21
    [again] = [line for line in logged if line["event"] == "peer refused again"]
    assert (again["call"], again["peer"], again["times"]) == ("Push", "alpha", 19)
    assert "encrypted_update-1-19 declined" in again["cause"]


def test_repeats_are_counted_for_each_kind_and_interval() -> None:
    repeats = Repeats[str](60.0)
    assert repeats.is_new("a", "first", 0.0)
    assert not repeats.is_new("a", "second", 1.0)
    assert not repeats.is_new("a", "third", 59.0)
    assert repeats.is_new("b", "other", 59.0)
    assert repeats.overdue(59.9) == []
    assert repeats.overdue(60.0) == [("third", 2)]
    assert not repeats.is_new("a", "fourth", 61.0)
    assert repeats.overdue(121.0) == [("fourth", 1)]
    # After a quiet interval it is news again, and nothing of it is remembered.
    assert repeats.overdue(181.0) == []
    assert repeats.is_new("a", "fifth", 182.0)
