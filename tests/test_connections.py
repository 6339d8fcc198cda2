"""Sites over bad lines: cut, stalled, slow, silent, moved.

Nothing arrives twice or mixed, nothing waits for ever, and nothing grows.
"""

from __future__ import annotations

import peers.tls_floor  # noqa: F401  before anything imports grpc

# isort: split
import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from peers.messages import MIB, PeerRefused, PeerUnreachable
from peers.partials import Bounds
from peers.transport import Terms
from proto import federation_pb2 as pb
from tests.authority import Federation
from tests.lines import Line, relocated, until
from tests.loopback import CONTEXT, QUICK, UPDATE, Site, begun, hint, running, spooled

# Calls are made once: the test itself decides when they are made again.
ONCE = replace(QUICK, patience=replace(QUICK.patience, pauses_s=()))


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
        # Beta notices, too, and settles what it holds.
        await asyncio.sleep(0.2)

    async def pushed(self, content: bytes, name: pb.BlobName = UPDATE) -> int:
        """Push to the end; bytes that it took of the line."""
        before = self.line.forwarded
        await self.alpha.transport.push("beta", name, content)
        return self.line.forwarded - before


@asynccontextmanager
async def over_a_line(federation: Federation, terms: Terms = ONCE) -> AsyncIterator[Ends]:
    async with (
        running(federation, "beta", terms=terms) as beta,
        Line.to(federation.ports["beta"]) as line,
        running(
            federation, "alpha", manifest=relocated(federation, beta=line.port), terms=terms
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


async def test_an_upload_that_was_cut_goes_on_at_the_last_whole_frame(
    federation: Federation,
) -> None:
    content = os.urandom(8 * MIB + 5)
    async with over_a_line(federation) as ends:
        await ends.cut_after(5 * MIB, content)
        [held] = sizes(ends.beta)
        assert held in (3 * MIB, 4 * MIB, 5 * MIB)
        sent = await ends.pushed(content)
        assert arrived(ends.beta) == [content]
        assert sizes(ends.beta) == []
        # The first frame again, and what had not arrived.
        assert len(content) - held + MIB <= sent < len(content) - held + MIB + MIB // 2


async def test_an_upload_that_is_cut_is_finished_by_the_same_call(federation: Federation) -> None:
    content = os.urandom(8 * MIB + 5)
    async with over_a_line(federation, QUICK) as ends:
        ends.line.cut_after = 5 * MIB
        sent = await ends.pushed(content)
        assert arrived(ends.beta) == [content]
        assert ends.line.connections == 2
        assert sent < len(content) + 3 * MIB


async def test_an_upload_that_is_cut_many_times_makes_its_way(federation: Federation) -> None:
    content = os.urandom(12 * MIB)
    async with over_a_line(federation) as ends:
        held = [0]
        for _ in range(4):
            await ends.cut_after(3 * MIB + MIB // 2, content)
            held += sizes(ends.beta)
        assert held == sorted(held)
        assert held[-1] > 6 * MIB  # more than one try brings
        await ends.pushed(content)
        assert arrived(ends.beta) == [content]


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


async def test_an_object_of_another_length_starts_anew(federation: Federation) -> None:
    one = os.urandom(6 * MIB)
    async with over_a_line(federation) as ends:
        await ends.cut_after(4 * MIB, one)
        await ends.pushed(one[: 5 * MIB])
        assert arrived(ends.beta) == [one[: 5 * MIB]]
        assert sizes(ends.beta) == []


async def test_objects_of_two_attempts_are_kept_apart(federation: Federation) -> None:
    content = os.urandom(6 * MIB)
    later = pb.BlobName(kind=pb.ENCRYPTED_UPDATE, round=1, attempt=1)
    async with over_a_line(federation) as ends:
        await ends.cut_after(4 * MIB, content)
        assert await ends.pushed(content, later) > 6 * MIB
        assert len(sizes(ends.beta)) == 1
        assert await ends.pushed(content) < 6 * MIB


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


async def test_a_key_that_was_cut_is_not_kept(federation: Federation) -> None:
    content = os.urandom(4 * MIB)
    async with over_a_line(federation) as ends:
        await ends.cut_after(2 * MIB, content, CONTEXT)
        assert sizes(ends.beta) == []
        assert await ends.pushed(content, CONTEXT) > 4 * MIB
        assert ends.beta.inbox.blobs[0][2].data == content


async def test_what_nobody_wants_any_more_is_forgotten(federation: Federation) -> None:
    tidy = replace(ONCE, tidy_s=0.05)
    async with over_a_line(federation, tidy) as ends:
        await ends.cut_after(4 * MIB, os.urandom(6 * MIB))
        assert len(sizes(ends.beta)) == 1
        ends.beta.inbox.why_not = "that attempt is over"
        await until(lambda: sizes(ends.beta) == [])


async def test_what_nobody_goes_on_with_is_forgotten(federation: Federation) -> None:
    brief = Bounds(of_a_peer=2, bytes_in_all=1 << 30, kept_s=0.5)
    tidy = replace(ONCE, tidy_s=0.05, limits=replace(ONCE.limits, partials=brief))
    async with over_a_line(federation, tidy) as ends:
        await ends.cut_after(4 * MIB, os.urandom(6 * MIB))
        await until(lambda: sizes(ends.beta) == [])


async def test_what_is_kept_is_bounded_in_bytes(federation: Federation) -> None:
    small = Bounds(of_a_peer=10, bytes_in_all=4 * MIB, kept_s=60)
    bounded = replace(ONCE, limits=replace(ONCE.limits, partials=small))
    async with over_a_line(federation, bounded) as ends:
        for attempt in range(3):
            name = pb.BlobName(kind=pb.ENCRYPTED_UPDATE, round=1, attempt=attempt)
            await ends.cut_after(3 * MIB + MIB // 2, os.urandom(6 * MIB), name)
            assert sum(sizes(ends.beta)) <= 4 * MIB
        assert "update-1-2." in begun(ends.beta)[-1].name  # the oldest go first


async def test_what_was_damaged_on_the_disk_is_not_gone_on_with(federation: Federation) -> None:
    content = os.urandom(6 * MIB)
    async with over_a_line(federation) as ends:
        await ends.cut_after(4 * MIB, content)
        with begun(ends.beta)[0].open("r+b") as file:
            file.truncate(MIB)
        with pytest.raises(PeerRefused, match="'beta' failed; its log has the cause"):
            await ends.pushed(content)
        assert sizes(ends.beta) == []
        await ends.pushed(content)
        assert arrived(ends.beta) == [content]


async def test_a_message_survives_a_cut_line(federation: Federation) -> None:
    async with over_a_line(federation, QUICK) as ends:
        await ends.alpha.transport.send("beta", hint("alpha", 1))
        ends.line.cut()
        await ends.alpha.transport.send("beta", hint("alpha", 2))
        assert [envelope.nack.attempt for _, envelope in ends.beta.inbox.messages] == [1, 2]
