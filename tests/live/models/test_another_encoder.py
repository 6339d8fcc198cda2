"""A federation goes over to another encoder: real daemons, one killed in its midst, one away.

Three sites of which any two decide. Whoever is up answers at every moment; what was promised,
spent and committed before is there afterwards.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import grpc.aio
import pytest

from proto import control_pb2 as control
from proto import federation_pb2 as pb
from tests.support.federation import LiveFederation, LiveSite, _words
from tests.support.small_models import small_encoder

pytestmark = [
    pytest.mark.federation,
    pytest.mark.slow,
    pytest.mark.timeout(600),
]
SITES = ["alder", "birch", "cedar"]
NOISE = pb.PrivacyPlan(clip_norm=0.5, noise_multiplier=1.0)


async def until_served(site: LiveSite, digest: bytes = b"") -> control.StatusReply:
    """Until questions are answered by that version, or by whatever is wanted."""
    async with asyncio.timeout(60):
        while True:
            status = await site.status()
            if status.index_digest == (digest or status.wanted_digest) != b"":
                return status
            await asyncio.sleep(0.05)


async def answered(site: LiveSite) -> bytes:
    """The version that answers a question of its own corpus, with a source."""
    question = control.AskRequest(question=site.corpus.pairs[0].query)
    reply = await site.stub.Ask(question, timeout=60)
    assert reply.citations, f"{site.id} answered from nothing"
    return reply.model_digest


@asynccontextmanager
async def asked_all_the_while(site: LiveSite) -> AsyncIterator[list[bytes]]:
    """From its first answer on ask again and again, and get one. The versions that gave them."""
    versions: list[bytes] = []
    async with asyncio.timeout(60):
        while not (await site.status()).index_digest:  # at a start, an index is being opened
            await asyncio.sleep(0.02)

    async def ask() -> None:
        while True:
            versions.append(await answered(site))
            await asyncio.sleep(0.02)

    asking = asyncio.create_task(ask())
    yield versions
    assert not asking.done(), asking.exception()
    asking.cancel()
    await asyncio.wait([asking])


async def again(live: LiveFederation, name: str, *, fault: str = "") -> LiveSite:
    """Its unit is restarted, cleanly if it is still there."""
    old = live.sites.get(name)
    if old is not None and old.process.returncode is None:
        await old.terminate()
    site = await live.launch(name, fault=fault)
    async with asyncio.timeout(90):
        while True:
            assert site.process.returncode is None, site.log
            with suppress(grpc.aio.AioRpcError):  # not ready yet
                await site.status()
                return site
            await asyncio.sleep(0.1)


async def history(site: LiveSite) -> list[bytes]:
    return [one.certificate.SerializeToString(deterministic=True) for one in await site.rounds()]


@dataclass(frozen=True)
class Before:
    """What alder had when the keeper signed: its status, its history, and the epsilon spent."""

    status: control.StatusReply
    past: list[bytes]
    spent: float


async def told_to_restart(site: LiveSite) -> None:
    async with asyncio.timeout(30):
        while "it is that of [next_retriever]: restart fedd" not in " ".join(
            (await site.status()).warnings
        ):
            await asyncio.sleep(0.05)


async def named_while_cedar_is_away(live: LiveFederation) -> Before:
    """Two rounds; then the keeper signs what `fedctl status` shows, and nothing stops."""
    await live.ingest_all()
    await live.train("alder", 2, NOISE)
    alder = live.sites["alder"]
    status = await until_served(alder)
    before = Before(status, await history(alder), (await alder.privacy()).epsilon_spent)
    assert (status.head_round, before.spent > 0, list(status.warnings)) == (2, True, [])
    assert status.next_retriever.split(":")[0] != status.retriever.split(":")[0]
    await live.sites.pop("cedar").terminate()
    live.retriever = status.next_retriever
    live.reload_manifest()
    await told_to_restart(alder)
    assert await answered(alder) == status.index_digest
    return before


async def alder_is_killed_in_the_midst(live: LiveFederation, before: Before) -> None:
    """Its first index by the new encoder hangs, and it answers; so do both behind the kill."""
    old = before.status.index_digest
    alder = await again(live, "alder", fault="index:write=hang")
    status = await until_served(alder, old)
    async with asked_all_the_while(alder) as versions, asyncio.timeout(30):
        while len(versions) < 10:
            await asyncio.sleep(0.05)
    assert set(versions) == {old}, "the one of before"
    assert (status.retriever, status.next_retriever) == (before.status.next_retriever, "")
    assert status.wanted_digest not in (old, b"")
    alder.process.send_signal(signal.SIGKILL)
    await alder.process.wait()
    alder, birch = await again(live, "alder"), await again(live, "birch")
    async with asked_all_the_while(alder) as versions:
        await asyncio.gather(until_served(alder), until_served(birch))
    assert set(versions) <= {old, status.wanted_digest}
    assert (await birch.status()).index_digest == status.wanted_digest, "the same bits"


async def cedar_is_back_and_reads_nothing_new(live: LiveFederation, before: Before) -> None:
    """With the manifest of before: it catches up, votes, and answers as it did."""
    new = live.version, live.retriever
    live.version, live.retriever = 1, ""
    cedar = await again(live, "cedar")
    live.version, live.retriever = new
    await live.until_head(4)
    await told_to_restart(cedar)
    await live.until_connected()
    await live.train("cedar", 1)
    assert "cedar" not in (await cedar.rounds())[-1].certificate.body.contributors
    assert await answered(cedar) == before.status.index_digest
    kept = await cedar.status()
    assert (kept.head_round, kept.wanted_digest) == (5, before.status.index_digest)
    assert "index not made" not in cedar.log, "it is not sent to read what it can't"


async def until_it_contributes(live: LiveFederation, name: str) -> None:
    """Any two make a round: on a busy machine one may be over before the third has trained."""
    site = live.sites[name]
    for _ in range(5):
        await live.train(name, 1)
        if name in (await site.rounds())[-1].certificate.body.contributors:
            return
    raise AssertionError(f"{name} took part in none of five rounds:\n{site.log}")


async def test_another_encoder_costs_no_promise_no_ledger_no_history(tmp_path: Path) -> None:
    other = small_encoder(tmp_path / "other", words=_words(), dimension=48, seed=7)
    following = {"next_retriever": {"encoder": str(other), "max_tokens": 64}}
    async with LiveFederation.start(
        tmp_path, SITES, tables=following, rounds={"keep_versions": 2}, min_participants=2
    ) as live:
        before = await named_while_cedar_is_away(live)
        await alder_is_killed_in_the_midst(live, before)
        alder = live.sites["alder"]
        assert await history(alder) == before.past
        assert (await alder.privacy()).epsilon_spent == before.spent
        await live.until_connected()
        await live.train("birch", 2, NOISE)
        third = (await alder.rounds())[2].certificate.body
        assert (third.parent_digest, third.manifest_version) == (before.status.model_digest, 2)
        assert (await alder.privacy()).epsilon_spent > before.spent

        await cedar_is_back_and_reads_nothing_new(live, before)
        cedar = await again(live, "cedar")
        async with asked_all_the_while(cedar):
            newest = await until_served(cedar)
        assert newest.index_digest == newest.model_digest
        await live.until_connected()
        await until_it_contributes(live, "cedar")
        whole = [await history(site) for site in live.sites.values()]
        assert whole[0] == whole[1] == whole[2]
        assert whole[0][:2] == before.past
        for site in live.sites.values():
            assert (await until_served(site)).index_digest == (await cedar.status()).model_digest
