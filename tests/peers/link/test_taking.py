"""What becomes of an object that is here whole while the line breaks, or its site is expelled."""

from __future__ import annotations

import peers.link.tls13  # noqa: F401  before anything imports grpc

# isort: split
import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from peers.link.client import GO_AHEAD
from peers.wire.frames import Beginning
from peers.wire.messages import FRAME_BYTES
from proto import federation_pb2 as pb
from tests.support.authority import Federation
from tests.support.lines import until
from tests.support.loopback import QUICK, Site, running
from tests.support.strangers import SERVICE, Caller, beta_calling, framed, pushed, refused

# No frame comes too late: the test itself decides when one comes.
PATIENT = replace(QUICK, limits=replace(QUICK.limits, frame_s=60))

FULL = (grpc.StatusCode.RESOURCE_EXHAUSTED, "2 pushes of site 'beta' are under way already")


@pytest.fixture
def federation(tmp_path: Path) -> Federation:
    return Federation.found(tmp_path, "alpha", "beta")


@pytest.fixture
async def alpha(federation: Federation) -> AsyncIterator[Site]:
    """It takes objects in only once a test lets it."""
    assert PATIENT.limits.pushes == 2
    async with running(federation, "alpha", options=PATIENT) as alpha:
        alpha.inbox.gate = asyncio.Event()
        yield alpha


class Push:
    """A push of beta's in two frames, which comes as far as a test lets it."""

    def __init__(self, call: Any, rest: bytes) -> None:
        self.call = call
        self._rest = rest

    @classmethod
    async def begun(cls, beta: Caller, attempt: int) -> Push:
        name = pb.BlobName(kind=pb.ENCRYPTED_UPDATE, round=1, attempt=attempt)
        first, rest = pushed(await framed(bytes(FRAME_BYTES + 1)), name)
        call = beta.channel.stream_unary(f"/{SERVICE}/Push")(timeout=30)
        await call.write(first.SerializeToString())
        if GO_AHEAD not in dict(await call.initial_metadata()):
            await call  # it says why
        return cls(call, rest.SerializeToString())

    async def send_the_rest(self) -> None:
        await self.call.write(self._rest)
        await self.call.done_writing()

    async def come_whole(self, alpha: Site) -> None:
        """It is here, and waits to be taken in."""
        before = alpha.inbox.waiting
        await self.send_the_rest()
        await until(lambda: alpha.inbox.waiting == before + 1)

    async def cut(self, alpha: Site) -> None:
        """Its line breaks, and alpha knows it."""
        self.call.cancel()
        await until(lambda: not alpha.transport._open._calls)


def taken(alpha: Site) -> list[int]:
    return [name.attempt for _, name, _ in alpha.inbox.blobs]


async def test_what_arrived_whole_is_taken_though_its_line_breaks(
    federation: Federation, alpha: Site
) -> None:
    """Half taken it would be lost: a second push is one of what is here already."""
    async with beta_calling(federation) as beta:
        for attempt in range(2):
            push = await Push.begun(beta, attempt)
            await push.come_whole(alpha)
            await push.cut(alpha)
        with refused(*FULL):
            await Push.begun(beta, 2)
        assert alpha.inbox.gate is not None
        alpha.inbox.gate.set()
        await until(lambda: taken(alpha) == [0, 1])
        await (await Push.begun(beta, 2)).come_whole(alpha)


async def test_a_push_that_begins_counts_beside_what_is_being_taken(
    federation: Federation, alpha: Site
) -> None:
    """Else whoever cuts its lines has twice as much in our hands as others."""
    async with beta_calling(federation) as beta:
        cut = await Push.begun(beta, 0)
        await cut.come_whole(alpha)
        await cut.cut(alpha)
        begun = await Push.begun(beta, 1)
        with refused(*FULL):
            await Push.begun(beta, 2)
        await begun.come_whole(alpha)
        assert alpha.inbox.gate is not None
        alpha.inbox.gate.set()
        await begun.call
        assert sorted(taken(alpha)) == [0, 1]
        await (await Push.begun(beta, 2)).come_whole(alpha)


async def test_an_expelled_site_has_nothing_taken_nor_left(
    federation: Federation, alpha: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when it is expelled between the whole object and the first step of taking it."""
    partials = alpha.transport._servicer.partials
    receiving = partials.receiving
    expelled = federation.manifest(version=2, disabled={"beta"})

    @asynccontextmanager
    async def and_then_expelled(site: str, first: pb.PushFrame) -> AsyncIterator[Beginning]:
        async with receiving(site, first) as beginning:
            yield beginning
        asyncio.get_running_loop().call_soon(alpha.transport.reload, alpha.identity, expelled)

    monkeypatch.setattr(partials, "receiving", and_then_expelled)
    async with beta_calling(federation) as beta:
        push = await Push.begun(beta, 0)
        await push.send_the_rest()
        with pytest.raises(grpc.RpcError):
            await push.call
    assert alpha.inbox.waiting == 0
    assert list(alpha.spool.iterdir()) == []


async def test_stopping_ends_what_is_still_being_taken(federation: Federation, alpha: Site) -> None:
    async with beta_calling(federation) as beta:
        cut = await Push.begun(beta, 0)
        await cut.come_whole(alpha)
        await cut.cut(alpha)
        [taking] = alpha.transport._servicer._taking
        await alpha.transport.stop(grace=0)
    assert taking.done()
    assert list(alpha.spool.iterdir()) == []


async def test_no_call_goes_on_once_the_transport_has_stopped(
    federation: Federation, alpha: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it brings would be taken after all; grpc returns before it has ended them."""
    server = alpha.transport._server
    assert server is not None
    async with beta_calling(federation) as beta:
        await Push.begun(beta, 0)
        with monkeypatch.context() as late:
            late.setattr(server, "stop", asyncio.sleep)
            await alpha.transport.stop(grace=0)
        try:
            await until(lambda: not alpha.transport._open._calls)
        finally:
            await server.stop(0)
