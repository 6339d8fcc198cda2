"""What a peer may take of us: the arithmetic by the clock, and the door that keeps to it."""

from __future__ import annotations

import peers.link.tls13  # noqa: F401  before anything imports grpc

# isort: split
import asyncio
import random
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from peers.link.quotas import QuotaLedger, Quotas, TokenBucket, TooMuch
from peers.link.transport import LinkOptions
from peers.wire.errors import PeerBusy
from peers.wire.messages import MIB
from proto import federation_pb2 as pb
from tests.support.authority import Federation
from tests.support.loopback import CONTEXT, QUICK, UPDATE, VERSION, running
from tests.support.strangers import beta_calling, calling, framed, pushed, refused

Code = grpc.StatusCode


# ---- the arithmetic -------------------------------------------------------------


@given(
    rate=st.floats(0.1, 1000),
    size=st.integers(1, 500),
    pauses=st.lists(st.floats(0, 10), max_size=200),
)
def test_never_more_than_the_burst_and_the_rate(
    rate: float, size: int, pauses: list[float]
) -> None:
    bucket, now, taken = TokenBucket(rate, size), 1000.0, 0
    for pause in pauses:
        now += pause
        taken += not bucket.take(now)
        assert taken <= size + rate * (now - 1000.0) + 1e-6


@given(rate=st.floats(0.1, 1000), size=st.integers(1, 50))
def test_who_waits_as_long_as_told_is_served(rate: float, size: int) -> None:
    bucket, now = TokenBucket(rate, size), 5.0
    for _ in range(size):
        assert bucket.take(now) == 0
    for _ in range(20):
        wait = bucket.take(now)
        assert wait > 0
        now += wait * (1 + 1e-9) + 1e-9
        assert bucket.take(now) == 0


def test_a_clock_that_goes_back_gives_nothing() -> None:
    bucket = TokenBucket(1, 1)
    assert bucket.take(100) == 0
    assert bucket.take(50) > 0
    assert bucket.take(50.5) > 0


def test_large_messages_cost_more() -> None:
    ledger = QuotaLedger(Quotas(requests_per_s=10, burst=100))
    for _ in range(3):
        ledger.request("beta", 1.0)
        ledger.message("beta", 2 * MIB)
    with pytest.raises(TooMuch) as error:
        for _ in range(3):
            ledger.request("beta", 1.0)
    assert error.value.retry_after_s > 0
    ledger.request("gamma", 1.0)  # pays for itself alone


def test_of_many_messages_at_once_those_that_are_paid_are_parsed() -> None:
    """Each call was counted before a byte of any message was here."""
    ledger = QuotaLedger(Quotas(requests_per_s=50, burst=200))
    for _ in range(32):
        ledger.request("beta", 1.0)
    parsed = 0
    for _ in range(32):
        with suppress(TooMuch):
            ledger.message("beta", 2 * MIB)
            parsed += 1
    assert parsed == 5


@given(size=st.integers(0, 2 * MIB), burst=st.integers(1, 300))
def test_any_message_is_taken_by_whoever_waits_as_long_as_told(size: int, burst: int) -> None:
    ledger = QuotaLedger(Quotas(requests_per_s=50, burst=burst))
    now = 1.0
    ledger.request("beta", now)
    ledger.message("beta", 2 * MIB)
    for _ in range(2):
        try:
            ledger.request("beta", now)
            ledger.message("beta", size)
            break
        except TooMuch as error:
            now += error.retry_after_s + 1e-6
    else:
        ledger.request("beta", now)
        ledger.message("beta", size)


def test_what_takes_long_to_parse_is_paid_for_like_many_calls() -> None:
    ledger = QuotaLedger(Quotas(requests_per_s=50, burst=200))
    ledger.request("beta", 1.0)
    ledger.parsed("beta", 0.25)
    with pytest.raises(TooMuch):
        for _ in range(75):
            ledger.request("beta", 1.0)
    ledger.request("gamma", 1.0)


def test_an_object_may_arrive_again_but_not_for_ever() -> None:
    ledger = QuotaLedger(Quotas(copies=3))
    for _ in range(3 * 10):
        ledger.frame("beta", "update", MIB, total=10 * MIB)
    with pytest.raises(TooMuch, match="has pushed this object 3 times over"):
        for _ in range(10):
            ledger.frame("beta", "update", MIB, total=10 * MIB)
    ledger.frame("beta", "key", MIB, total=MIB)


def test_of_a_peer_that_pushes_ever_more_only_the_last_are_counted() -> None:
    ledger = QuotaLedger(Quotas(copies=1))
    for number in range(1000):
        ledger.frame("beta", number, 3 * MIB, total=MIB)
    ledger.frame("beta", 0, 3 * MIB, total=MIB)  # forgotten since
    with pytest.raises(TooMuch):
        ledger.frame("beta", 999, 3 * MIB, total=MIB)


def test_only_so_many_refusals_are_held_back() -> None:
    ledger = QuotaLedger(Quotas(hold_s=0.5))
    held = [ledger.hold("beta") for _ in range(300)]
    assert (held.count(0.5), held.count(0.0)) == (256, 44)
    ledger.let_go("beta")
    assert ledger.hold("beta") == 0.5


# ---- at the door -------------------------------------------------------------------


@pytest.fixture
def federation(tmp_path: Path) -> Federation:
    return Federation.found(tmp_path, "alpha", "beta")


def terms_with(quotas: Quotas, busy_s: float = 30.0) -> LinkOptions:
    return replace(
        QUICK,
        limits=replace(QUICK.limits, quotas=quotas),
        timeouts=replace(QUICK.timeouts, busy_s=busy_s),
    )


@pytest.mark.slow
async def test_an_honest_peer_waits_as_long_as_it_is_told(
    federation: Federation, tmp_path: Path
) -> None:
    quotas = Quotas(pulls_per_minute=120, hold_s=0.01)  # two a second, 120 at once
    async with (
        running(federation, "alpha", options=terms_with(quotas)) as alpha,
        running(federation, "beta", options=QUICK, chance=random.Random(1)) as beta,
    ):
        alpha.inbox.shelf[pb.MODEL_VERSION] = b"version"
        pulled = 0
        while (seen := alpha.transport.statistics()["beta"]).over_quota == 0:
            await beta.transport.pull("alpha", VERSION, tmp_path / str(pulled))
            pulled += 1
        assert pulled > 120
        assert seen.refused == seen.over_quota


async def test_patience_with_a_busy_peer_ends(federation: Federation, tmp_path: Path) -> None:
    quotas = Quotas(pulls_per_minute=1, hold_s=0.01)
    async with (
        running(federation, "alpha", options=terms_with(quotas)) as alpha,
        running(federation, "beta", options=terms_with(Quotas(), busy_s=1.0)) as beta,
    ):
        alpha.inbox.shelf[pb.MODEL_VERSION] = b"version"
        await beta.transport.pull("alpha", VERSION, tmp_path / "one")
        with pytest.raises(PeerBusy, match=r"more than 1 pulls a minute of 'beta': ask again in"):
            await beta.transport.pull("alpha", VERSION, tmp_path / "two")


async def test_a_peer_that_is_not_in_the_manifest_pays_too(federation: Federation) -> None:
    quotas = Quotas(requests_per_s=1, burst=3, hold_s=0.01)
    async with running(federation, "alpha", options=terms_with(quotas)) as alpha:
        alpha.transport.reload(alpha.identity, federation.manifest(version=2, disabled={"beta"}))
        async with calling(federation, federation.identity("beta")) as beta:
            for _ in range(3):
                with refused(Code.PERMISSION_DENIED, "disabled"):
                    await beta.hello()
            with refused(Code.RESOURCE_EXHAUSTED, "more than 1 calls a second"):
                await beta.hello()


async def test_connections_do_not_multiply_streams(federation: Federation) -> None:
    quotas = Quotas(streams=2, hold_s=0.01)
    async with running(federation, "alpha", options=terms_with(quotas)) as alpha:
        alpha.inbox.gate = asyncio.Event()
        async with beta_calling(federation) as one, beta_calling(federation) as other:
            pieces = pushed(await framed(b"key"), CONTEXT)
            async with asyncio.TaskGroup() as group:
                group.create_task(one.push(pieces))
                group.create_task(other.push(pieces))
                async with asyncio.timeout(20):
                    while alpha.transport._servicer.ledger._accounts["beta"].streams < 2:
                        await asyncio.sleep(0.01)
                with refused(Code.RESOURCE_EXHAUSTED, "2 calls of site 'beta' are under way"):
                    await one.hello()
                alpha.inbox.gate.set()
            await one.hello()


async def test_the_same_update_again_and_again(federation: Federation) -> None:
    quotas = Quotas(copies=2, hold_s=0.01)
    async with running(federation, "alpha", options=terms_with(quotas)) as alpha:
        async with beta_calling(federation) as beta:
            update = pushed(await framed(bytes(3 * MIB)), UPDATE)
            with refused(Code.RESOURCE_EXHAUSTED, "has pushed this object 2 times over"):
                for _ in range(4):
                    await beta.push(update)
        assert 2 <= len(alpha.inbox.blobs) <= 3


async def test_the_time_that_a_pushs_first_frame_takes_is_paid_for(federation: Federation) -> None:
    """Also where nobody wants the object: it was read and parsed by then."""
    quotas = Quotas(requests_per_s=0.01, burst=30, hold_s=0.01)
    unknown = pb.PushFrame.FromString(b"\x7b\x7c" * (MIB // 2))
    async with (
        running(federation, "alpha", options=terms_with(quotas)) as alpha,
        beta_calling(federation) as beta,
    ):
        with refused(Code.INVALID_ARGUMENT, "PushFrame is larger than its fields"):
            await beta.push([unknown])
        account = alpha.transport._servicer.ledger._accounts["beta"]
        assert account.requests._tokens < 28, "Hello and Push took a token each"
