"""Peers that keep us waiting: every call has an end, and so has every silence.

What a call may cost is the caller's patience, whoever is at the other end; no
task is left behind.
"""

from __future__ import annotations

import peers.link.tls13  # noqa: F401  before anything imports grpc

# isort: split
import asyncio
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from peers.link.client import GO_AHEAD, CallTimeouts, Keepalive
from peers.link.transport import KeepInTouch, Transport
from peers.wire.errors import PeerError, PeerUnreachable, RemoteProtocolError
from peers.wire.messages import MIB
from proto import federation_pb2 as pb
from tests.support.authority import Federation
from tests.support.lines import Line, mute, relocated, until
from tests.support.loopback import QUICK, UPDATE, VERSION, Site, hint, running
from tests.support.strangers import Answers, answering, framed

IMPATIENT = replace(
    QUICK,
    timeouts=CallTimeouts(hello_s=0.5, call_s=0.25, frame_s=0.25, pauses_s=()),
    limits=replace(QUICK.limits, handshake_s=0.5),
)
# Greeting (hello_s), then the call (call_s, or frame_s for what is written and what is read).
ENOUGH_S = 4 * 0.5

REQUEST = pb.NegativesRequest(
    federation_id="med",
    sender="alpha",
    model_digest=bytes(32),
    level=pb.BUCKET,
    dimension=4,
    top_n=1,
    bits=8,
    buckets=b"\x01",
)

CALLS: dict[str, Callable[[Transport, Path], Awaitable[object]]] = {
    "Hello": lambda transport, _: transport.hello("beta"),
    "Deliver": lambda transport, _: transport.send("beta", hint("alpha")),
    "Push": lambda transport, _: transport.push("beta", UPDATE, bytes(20 * MIB)),
    "Pull": lambda transport, folder: transport.pull("beta", VERSION, folder / "version"),
    "Negatives": lambda transport, _: transport.negatives("beta", REQUEST, 0.25),
}


@pytest.fixture
def federation(tmp_path: Path) -> Federation:
    return Federation.found(tmp_path, "alpha", "beta")


def tasks() -> set[asyncio.Task[Any]]:
    """All that run, but the ones in which grpc's servers wait for the next call."""
    return {task for task in asyncio.all_tasks() if "AioServer._request_call" not in repr(task)}


async def gives_up(alpha: Site, method: str) -> str:
    """What the call says that was made in vain; it ends in time and leaves no task behind."""
    before, started = tasks(), time.monotonic()
    with pytest.raises(PeerError) as error:
        await CALLS[method](alpha.transport, alpha.spool)
    assert time.monotonic() - started < ENOUGH_S
    await until(lambda: tasks() <= before, within=1)
    return str(error.value)


# ---- every call ----------------------------------------------------------------


def test_every_call_is_tried_here() -> None:
    assert set(CALLS) == {m.name for m in pb.DESCRIPTOR.services_by_name["Federation"].methods}


class Watchful(Answers):
    """Answers well and notes how long each caller is ready to wait."""

    def __init__(self, pieces: list[pb.Frame]) -> None:
        super().__init__(pieces)
        self.waits: dict[str, float | None] = {}

    async def hello(self, raw: bytes, context: Any) -> bytes:
        self.waits["Hello"] = context.time_remaining()
        return await super().hello(raw, context)

    async def deliver(self, raw: bytes, context: Any) -> bytes:
        self.waits["Deliver"] = context.time_remaining()
        return await super().deliver(raw, context)

    async def push(self, incoming: AsyncIterator[bytes], context: Any) -> bytes:
        self.waits["Push"] = context.time_remaining()
        await anext(incoming)
        await context.send_initial_metadata(((GO_AHEAD, str(MIB)),))
        async for _ in incoming:
            pass
        return b""

    async def pull(self, raw: bytes, context: Any) -> AsyncIterator[bytes]:
        self.waits["Pull"] = context.time_remaining()
        async for frame in super().pull(raw, context):
            yield frame

    async def negatives(self, raw: bytes, context: Any) -> bytes:
        self.waits["Negatives"] = context.time_remaining()
        return await super().negatives(raw, context)


async def test_every_call_carries_a_deadline(federation: Federation) -> None:
    watchful = Watchful(await framed(b"version"))
    async with answering(federation, watchful), running(federation, "alpha") as alpha:
        for call in CALLS.values():
            await call(alpha.transport, alpha.spool)
    patience = QUICK.timeouts
    assert set(watchful.waits) == set(CALLS)
    for method, wait in watchful.waits.items():
        assert wait is not None, method
        # A large object may take so long for each of its frames.
        most = patience.call_s + patience.frame_s * {"Push": 21, "Pull": 16 * 1024 + 1}.get(
            method, 0
        )
        assert 0 < wait < most * 1.01 + 0.5, method  # grpc rounds long ones up


# ---- whoever does not answer ------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("method", CALLS)
async def test_a_peer_that_accepts_tcp_and_never_answers(
    federation: Federation, method: str
) -> None:
    async with mute() as port:
        manifest = relocated(federation, beta=port)
        async with running(federation, "alpha", manifest=manifest, options=IMPATIENT) as alpha:
            await greeted(alpha)
            assert "did not answer in time" in await gives_up(alpha, method)


@pytest.mark.slow
@pytest.mark.parametrize("method", CALLS)
async def test_a_peer_that_completes_tls_and_is_silent(federation: Federation, method: str) -> None:
    async with mute(tls_of(federation, "beta")) as port:
        manifest = relocated(federation, beta=port)
        async with running(federation, "alpha", manifest=manifest, options=IMPATIENT) as alpha:
            await greeted(alpha)
            assert "did not answer in time" in await gives_up(alpha, method)


@pytest.mark.slow
@pytest.mark.parametrize("method", CALLS)
async def test_a_peer_that_answers_a_byte_at_a_time(federation: Federation, method: str) -> None:
    async with (
        running(federation, "beta") as beta,
        Line.to(federation.ports["beta"]) as line,
        running(
            federation, "alpha", manifest=relocated(federation, beta=line.port), options=IMPATIENT
        ) as alpha,
    ):
        beta.inbox.shelf[pb.MODEL_VERSION] = bytes(3 * MIB)
        await alpha.transport.hello("beta")  # the connection is up
        line.a_byte_every_s = 0.05
        assert "site 'beta'" in await gives_up(alpha, method)


def tls_of(federation: Federation, site: str) -> ssl.SSLContext:
    folder = federation.root / site
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(folder / "ca.crt"))
    context.load_cert_chain(folder / "site.crt", folder / "site.key")
    context.verify_mode = ssl.CERT_REQUIRED
    context.set_alpn_protocols(["h2"])
    return context


async def greeted(alpha: Site) -> None:
    """Until the greeting that a site begins with is over, well or not."""
    await until(lambda: alpha.transport.statistics()["beta"].last_error != "")


# ---- whoever stops answering -----------------------------------------------------


class Stuck(Answers):
    """Greets well, then falls silent: at once, or ``after`` a piece of what was asked for."""

    def __init__(self, pieces: list[pb.Frame], *, after: bool) -> None:
        super().__init__(pieces)
        self.after = after

    async def deliver(self, _raw: bytes, _context: Any) -> bytes:
        await asyncio.sleep(3600)
        return b""

    async def push(self, incoming: AsyncIterator[bytes], context: Any) -> bytes:
        if self.after:
            await anext(incoming)
            await context.send_initial_metadata(((GO_AHEAD, str(MIB)),))
        await asyncio.sleep(3600)
        return b""

    async def pull(self, _raw: bytes, _context: Any) -> AsyncIterator[bytes]:
        if self.after:
            yield self.pieces[0].SerializeToString()
        await asyncio.sleep(3600)

    async def negatives(self, _raw: bytes, _context: Any) -> bytes:
        await asyncio.sleep(3600)
        return b""


@pytest.mark.slow
@pytest.mark.parametrize("after", [False, True], ids=["at once", "after a frame"])
@pytest.mark.parametrize("method", ["Deliver", "Push", "Pull", "Negatives"])
async def test_a_peer_that_greets_and_then_is_silent(
    federation: Federation, method: str, after: bool
) -> None:
    stuck = Stuck(await framed(bytes(3 * MIB)), after=after)
    async with (
        answering(federation, stuck),
        running(federation, "alpha", options=IMPATIENT) as alpha,
    ):
        await alpha.transport.hello("beta")
        complaint = await gives_up(alpha, method)
    assert "did not answer in time" in complaint or "moved no frame" in complaint


async def test_a_peer_that_sends_an_object_a_byte_a_frame(federation: Federation) -> None:
    """Each frame would be in time; all of them would take for ever."""
    crumb = (await framed(b"x"))[0]
    crumb.last = False
    async with (
        answering(federation, Answers([crumb] * 1000)),
        running(federation, "alpha") as alpha,
    ):
        with pytest.raises(RemoteProtocolError, match="data is 1 bytes; expected 1048576 bytes"):
            await CALLS["Pull"](alpha.transport, alpha.spool)


@pytest.mark.slow
@pytest.mark.parametrize("tls", [False, True], ids=["tcp", "tls"])
async def test_a_stranger_that_connects_and_is_silent_goes_again(
    federation: Federation, tls: bool
) -> None:
    async with running(federation, "alpha", options=IMPATIENT):
        context = None
        if tls:
            context = ssl.create_default_context(cafile=str(federation.root / "beta" / "ca.crt"))
            context.load_cert_chain(
                federation.root / "beta" / "site.crt", federation.root / "beta" / "site.key"
            )
            context.set_alpn_protocols(["h2"])
        reader, writer = await asyncio.open_connection(
            "127.0.0.1",
            federation.ports["alpha"],
            ssl=context,
            server_hostname="alpha.med.hanse.internal" if tls else None,
        )
        async with asyncio.timeout(3):
            await reader.read()  # to the end of the connection
        writer.close()


# ---- lines that are silent, and lines that are dead --------------------------------

# A client's grpc sends no two pings within a second, whatever it is told.
PINGING = replace(QUICK, keepalive=Keepalive(ping_s=1, answer_s=0.5, tolerated_s=0.5))


@asynccontextmanager
async def idle_line(federation: Federation, called: Keepalive) -> AsyncIterator[tuple[Site, Line]]:
    """Alpha has sent beta one message over the line, and nothing more since."""
    async with (
        running(federation, "beta", options=replace(PINGING, keepalive=called)),
        Line.to(federation.ports["beta"]) as line,
        running(
            federation, "alpha", manifest=relocated(federation, beta=line.port), options=PINGING
        ) as alpha,
    ):
        await alpha.transport.send("beta", hint("alpha"))
        yield alpha, line


@pytest.mark.slow
async def test_a_silent_connection_is_kept_alive_and_not_ended_for_its_pings(
    federation: Federation,
) -> None:
    async with idle_line(federation, PINGING.keepalive) as (alpha, line):
        quiet_since = line.forwarded
        await asyncio.sleep(6)
        # A ping, and an answer to one, is 17 bytes of HTTP/2 and 22 of TLS.
        assert line.forwarded - quiet_since >= 4 * 39
        await alpha.transport.send("beta", hint("alpha"))
        assert line.connections == 1


@pytest.mark.slow
async def test_pings_sooner_than_tolerated_would_end_it(federation: Federation) -> None:
    """So the test above can fail, and the setting is the one that grpc listens to."""
    strict = Keepalive(ping_s=3600, answer_s=0.5, tolerated_s=300)
    async with idle_line(federation, strict) as (alpha, line):
        await asyncio.sleep(6)
        await alpha.transport.send("beta", hint("alpha"))
        assert line.connections > 1


@pytest.mark.slow
async def test_a_dead_line_is_found_by_its_silence(federation: Federation) -> None:
    """Long before the deadline of the call that waits for an answer on it."""
    patient = replace(PINGING, timeouts=replace(PINGING.timeouts, call_s=60, pauses_s=()))
    async with (
        running(federation, "beta"),
        Line.to(federation.ports["beta"]) as line,
        running(
            federation, "alpha", manifest=relocated(federation, beta=line.port), options=patient
        ) as alpha,
    ):
        await alpha.transport.send("beta", hint("alpha"))
        line.stall()
        async with asyncio.timeout(5):
            with pytest.raises(PeerUnreachable, match="cannot be reached"):
                await alpha.transport.send("beta", hint("alpha"))


def test_pings_come_before_anything_forgets_and_later_than_is_tolerated() -> None:
    keepalive = Keepalive()
    assert keepalive.ping_s < 30  # a VPN's UDP mapping, the shortest memory on the way
    assert keepalive.tolerated_s <= keepalive.ping_s / 2
    assert keepalive.ping_s + keepalive.answer_s <= 30
    assert KeepInTouch().answering_s < keepalive.ping_s
