"""Two sites talk over real connections on loopback: messages, large objects, reload."""

from __future__ import annotations

import peers.link.tls13  # noqa: F401  before anything imports grpc

# isort: split
import asyncio
import hashlib
import os
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from crypto.identity.keys import IdentityError
from daemon.control.status import shut_out
from peers.link.port import ListenError
from peers.link.transport import KeepInTouch
from peers.wire.errors import (
    BlobUnknown,
    LocalProtocolError,
    PeerRefused,
    PeerUnreachable,
    RemoteProtocolError,
)
from peers.wire.frames import PartialFile, ReceivedObject, frames
from peers.wire.messages import FRAME_BYTES, MIB
from proto import federation_pb2 as pb
from tests.support.authority import Federation
from tests.support.lines import until
from tests.support.loopback import (
    CONTEXT,
    HASTY,
    QUICK,
    UPDATE,
    VERSION,
    Site,
    hint,
    running,
    spooled,
    talking,
)

SIZES = [0, 1, FRAME_BYTES - 1, FRAME_BYTES, FRAME_BYTES + 1, 3 * FRAME_BYTES + 17]


@pytest.fixture
def federation(tmp_path: Path) -> Federation:
    return Federation.found(tmp_path, "alpha", "beta")


@pytest.fixture
async def sites(federation: Federation) -> AsyncIterator[dict[str, Site]]:
    async with talking(federation) as sites:
        yield sites


@pytest.fixture
def alpha(sites: dict[str, Site]) -> Site:
    return sites["alpha"]


@pytest.fixture
def beta(sites: dict[str, Site]) -> Site:
    return sites["beta"]


def versions(folder: Path) -> list[Path]:
    return list(folder.glob("version*"))


# ---- messages ------------------------------------------------------------------


async def test_a_message_arrives_with_its_sender(alpha: Site, beta: Site) -> None:
    await alpha.transport.send("beta", hint("alpha", 3))
    await beta.transport.send("alpha", hint("beta", 4))
    assert beta.inbox.messages == [("alpha", hint("alpha", 3))]
    assert alpha.inbox.messages == [("beta", hint("beta", 4))]


async def test_many_messages_at_once_all_arrive(alpha: Site, beta: Site) -> None:
    async with asyncio.TaskGroup() as group:
        for attempt in range(100):
            group.create_task(alpha.transport.send("beta", hint("alpha", attempt)))
    attempts = sorted(envelope.behind.attempt for _, envelope in beta.inbox.messages)
    assert attempts == list(range(100))


async def test_our_own_nonsense_is_not_sent_and_blamed_on_us(alpha: Site, beta: Site) -> None:
    message = hint("alpha")
    message.behind.round = 0
    with pytest.raises(LocalProtocolError, match=r"behind.round is 0; expected 1"):
        await alpha.transport.send("beta", message)
    assert beta.inbox.messages == []


async def test_a_refusal_of_the_inbox_reaches_the_sender(alpha: Site, beta: Site) -> None:
    beta.inbox.failure = RemoteProtocolError("a vote for a round that never was")
    with pytest.raises(PeerRefused, match="'beta' refused: a vote for a round that never was"):
        await alpha.transport.send("beta", hint("alpha"))


@pytest.mark.slow
async def test_trouble_with_a_third_site_is_not_blamed_on_the_sender(
    alpha: Site, beta: Site
) -> None:
    beta.inbox.failure = PeerUnreachable("site 'gamma' does not answer")
    with pytest.raises(PeerRefused, match="site 'beta' failed; its log has the cause"):
        await alpha.transport.send("beta", hint("alpha"))


@pytest.mark.slow
async def test_an_error_of_our_own_is_told_without_its_details(alpha: Site, beta: Site) -> None:
    beta.inbox.failure = ValueError("the patient's name is on line 3")
    with pytest.raises(PeerRefused, match="site 'beta' failed; its log has the cause") as refusal:
        await alpha.transport.send("beta", hint("alpha"))
    assert "patient" not in str(refusal.value)
    beta.inbox.failure = None
    await alpha.transport.send("beta", hint("alpha"))


async def test_a_peer_that_is_down_is_unreachable_and_says_where(federation: Federation) -> None:
    async with running(federation, "alpha", options=HASTY) as alpha:
        with pytest.raises(PeerUnreachable, match=f"'beta' .*:{federation.ports['beta']}"):
            await alpha.transport.send("beta", hint("alpha"))
        assert not alpha.transport.statistics()["beta"].connected


async def test_a_restarted_peer_is_greeted_again_unasked(federation: Federation) -> None:
    async with running(federation, "alpha") as alpha:
        for _ in range(2):
            async with running(federation, "beta") as beta:
                await alpha.transport.send("beta", hint("alpha"))
                assert len(beta.inbox.messages) == 1


async def test_a_site_that_is_no_peer_is_refused_here(alpha: Site) -> None:
    for nobody in ("gamma", "alpha"):
        with pytest.raises(PeerUnreachable, match=f"{nobody!r} is no enabled peer in manifest"):
            await alpha.transport.send(nobody, hint("alpha"))


# ---- large objects ---------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES)
async def test_a_pushed_file_arrives_whole(alpha: Site, beta: Site, size: int) -> None:
    content = os.urandom(size)
    source = alpha.spool / "update"
    source.write_bytes(content)
    await alpha.transport.push("beta", UPDATE, source)
    [(sender, name, blob)] = beta.inbox.blobs
    assert (sender, name, blob.size) == ("alpha", UPDATE, size)
    assert blob.digest == hashlib.sha256(content).digest()
    assert blob.path is not None
    assert blob.path.read_bytes() == content
    assert spooled(beta) == [blob.path]


async def test_a_pushed_key_stays_in_memory(alpha: Site, beta: Site) -> None:
    content = os.urandom(2 * MIB + 5)
    await alpha.transport.push("beta", CONTEXT, content)
    [(_, _, blob)] = beta.inbox.blobs
    assert (blob.data, blob.path) == (content, None)
    assert spooled(beta) == []


@pytest.mark.parametrize("size", SIZES)
async def test_a_pulled_object_arrives_whole(
    alpha: Site, beta: Site, tmp_path: Path, size: int
) -> None:
    content = os.urandom(size)
    beta.inbox.shelf[pb.MODEL_VERSION] = content
    received = await alpha.transport.pull("beta", VERSION, tmp_path / "version")
    digest = hashlib.sha256(content).digest()
    assert received == ReceivedObject(size, digest, path=tmp_path / "version")
    assert (tmp_path / "version").read_bytes() == content
    assert not (tmp_path / "version.part").exists()


@pytest.mark.parametrize("held", [1, FRAME_BYTES, 2 * FRAME_BYTES + 3, 3 * FRAME_BYTES])
async def test_a_pull_goes_on_where_the_last_one_ended(
    alpha: Site, beta: Site, tmp_path: Path, held: int
) -> None:
    content = os.urandom(3 * FRAME_BYTES)
    beta.inbox.shelf[pb.MODEL_VERSION] = content
    (tmp_path / "version.part").write_bytes(content[:held])
    before = alpha.transport.statistics()["beta"].bytes_received
    received = await alpha.transport.pull("beta", VERSION, tmp_path / "version")
    assert received.digest == hashlib.sha256(content).digest()
    assert (tmp_path / "version").read_bytes() == content
    came = alpha.transport.statistics()["beta"].bytes_received - before
    assert len(content) - held <= came <= len(content) - held + 1000


@pytest.mark.parametrize("held", [5, 4 * FRAME_BYTES])
async def test_what_is_held_of_something_else_is_thrown_away(
    alpha: Site, beta: Site, tmp_path: Path, held: int
) -> None:
    content = os.urandom(2 * FRAME_BYTES)
    beta.inbox.shelf[pb.MODEL_VERSION] = content
    (tmp_path / "version.part").write_bytes(os.urandom(held))
    await alpha.transport.pull("beta", VERSION, tmp_path / "version")
    assert (tmp_path / "version").read_bytes() == content


async def test_a_broken_pull_keeps_what_came_and_loses_nothing(tmp_path: Path) -> None:
    content = os.urandom(3 * FRAME_BYTES)

    async def breaks_off() -> AsyncIterator[pb.Frame]:
        async for frame in frames(content):
            if frame.offset == 2 * FRAME_BYTES:
                raise ConnectionResetError
            yield frame

    partial = PartialFile(tmp_path / "version")
    with pytest.raises(ConnectionResetError):
        await partial.receive(breaks_off(), limit=len(content))
    held = await partial.held()
    assert held == 2 * FRAME_BYTES
    await partial.receive(frames(content, held), limit=len(content))
    assert (tmp_path / "version").read_bytes() == content


async def test_what_a_peer_does_not_have_is_unknown(alpha: Site, tmp_path: Path) -> None:
    with pytest.raises(BlobUnknown, match="'beta': nothing of that name here"):
        await alpha.transport.pull("beta", VERSION, tmp_path / "version")
    assert versions(tmp_path) == []


async def test_an_object_that_vanished_meanwhile_is_unknown(
    alpha: Site, beta: Site, tmp_path: Path
) -> None:
    beta.inbox.shelf[pb.MODEL_VERSION] = tmp_path / "gone"
    with pytest.raises(BlobUnknown, match="no longer here"):
        await alpha.transport.pull("beta", VERSION, tmp_path / "version")


async def test_a_pull_takes_no_more_than_it_was_allowed(
    alpha: Site, beta: Site, tmp_path: Path
) -> None:
    beta.inbox.shelf[pb.MODEL_VERSION] = bytes(2 * FRAME_BYTES)
    with pytest.raises(RemoteProtocolError, match="larger than the 1048576 bytes allowed"):
        await alpha.transport.pull("beta", VERSION, tmp_path / "version", at_most=FRAME_BYTES)
    assert versions(tmp_path) == []


@pytest.mark.slow
async def test_only_so_many_pushes_of_one_peer_at_once(alpha: Site, beta: Site) -> None:
    beta.inbox.gate = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        for _ in range(QUICK.limits.pushes):
            group.create_task(alpha.transport.push("beta", CONTEXT, b"key"))
        await until(lambda: beta.inbox.waiting == QUICK.limits.pushes)
        with pytest.raises(PeerRefused, match="2 pushes of site 'alpha' are under way already"):
            await alpha.transport.push("beta", CONTEXT, b"key")
        beta.inbox.gate.set()
    await alpha.transport.push("beta", CONTEXT, b"key")
    assert len(beta.inbox.blobs) == QUICK.limits.pushes + 1


@pytest.mark.slow
async def test_a_declined_push_says_why_every_time(alpha: Site, beta: Site) -> None:
    beta.inbox.why_not = "no attempt 0 of round 1 is under way here"
    for _ in range(30):
        with pytest.raises(PeerRefused, match="declined: no attempt 0 of round 1 is under way"):
            await alpha.transport.push("beta", UPDATE, bytes(5 * MIB))
    assert traffic(alpha, "beta")[0] < 31 * MIB  # one frame each, not five


@pytest.mark.slow
async def test_messages_get_through_during_a_large_push(alpha: Site, beta: Site) -> None:
    push = asyncio.create_task(alpha.transport.push("beta", UPDATE, os.urandom(40 * MIB)))
    await until(lambda: beta.transport.statistics()["alpha"].bytes_received > MIB)
    await alpha.transport.send("beta", hint("alpha"))
    await beta.transport.send("alpha", hint("beta"))
    assert not push.done()
    await push
    assert beta.inbox.blobs[0][2].size == 40 * MIB


# ---- keeping in touch ----------------------------------------------------------


async def test_a_site_that_is_expelled_learns_from_its_peers_that_it_is(
    federation: Federation,
) -> None:
    """The manifest that does it can't reach it: nobody takes its calls."""
    eager = replace(QUICK, keep_in_touch=KeepInTouch(0.05, 0.05, 0.05))
    async with (
        running(federation, "alpha", options=eager) as alpha,
        running(federation, "beta", options=eager) as beta,
    ):
        await until(lambda: beta.transport.statistics()["alpha"].connected)
        assert beta.transport.statistics()["alpha"].shut_out == 0
        expelled = federation.manifest(version=2, disabled={"beta"})
        alpha.transport.reload(alpha.identity, expelled)
        await until(lambda: beta.transport.statistics()["alpha"].shut_out == 2)
        seen = beta.transport.statistics()
        told = "this site is disabled in manifest 2 (said by alpha)"
        assert shut_out("beta", federation.manifest(), seen)[0].startswith(told)
        assert shut_out("beta", federation.manifest(version=2), seen) == [], "ours is as new"
        assert shut_out("beta", expelled, seen) == [
            "this site is disabled in manifest 2, which is installed here"
        ]
        alpha.transport.reload(alpha.identity, federation.manifest(version=3))
        await until(lambda: beta.transport.statistics()["alpha"].shut_out == 0)


@pytest.mark.slow
async def test_sites_find_each_other_and_know_it(federation: Federation) -> None:
    eager = replace(QUICK, keep_in_touch=KeepInTouch(0.05, 0.05, 0.05))
    async with running(federation, "alpha", options=eager) as alpha:
        await until(lambda: "cannot be reached" in alpha.transport.statistics()["beta"].last_error)
        async with running(federation, "beta", options=eager) as beta:
            beta.inbox.head_round = 7
            await until(lambda: alpha.transport.statistics()["beta"].head_round == 7)
            seen = alpha.transport.statistics()["beta"]
            assert seen.connected
            assert seen.last_contact is not None
            assert (seen.manifest_version, seen.last_error) == (1, "")
            assert seen.clock_offset_ms == pytest.approx(0, abs=2000)
            assert seen.software_version != ""
        await until(lambda: not alpha.transport.statistics()["beta"].connected)


@pytest.mark.slow
async def test_bytes_are_counted_alike_at_both_ends(alpha: Site, beta: Site) -> None:
    await alpha.transport.send("beta", hint("alpha"))
    await beta.transport.send("alpha", hint("beta"))
    before = traffic(alpha, "beta"), traffic(beta, "alpha")
    await alpha.transport.push("beta", UPDATE, bytes(3 * MIB))
    await alpha.transport.send("beta", hint("alpha"))
    sent = traffic(alpha, "beta")[0] - before[0][0]
    received = traffic(beta, "alpha")[1] - before[1][1]
    assert sent == received > 3 * MIB


def traffic(site: Site, peer: str) -> tuple[int, int]:
    seen = site.transport.statistics()[peer]
    return seen.bytes_sent, seen.bytes_received


async def test_a_tap_sees_every_message_that_crosses(federation: Federation) -> None:
    crossed: list[tuple[str, str, bytes]] = []
    async with (
        running(federation, "alpha", tap=lambda *seen: crossed.append(seen)) as alpha,
        running(federation, "beta") as beta,
    ):
        await alpha.transport.send("beta", hint("alpha"))
        await beta.transport.push("alpha", CONTEXT, b"sealed")
        seen = alpha.transport.statistics()["beta"]
    assert ("sent", "beta", hint("alpha").SerializeToString()) in crossed
    assert any(raw for way, _, raw in crossed if way == "received" and b"sealed" in raw)
    assert sum(len(raw) for way, _, raw in crossed if way == "sent") == seen.bytes_sent


# ---- life ------------------------------------------------------------------------


async def test_a_removed_peer_is_refused_at_once(
    federation: Federation, alpha: Site, beta: Site
) -> None:
    await alpha.transport.send("beta", hint("alpha"))
    beta.transport.reload(beta.identity, federation.manifest(version=2, without={"alpha"}))
    with pytest.raises(PeerRefused, match="'alpha' is not in manifest version 2"):
        await alpha.transport.send("beta", hint("alpha"))
    assert len(beta.inbox.messages) == 1
    with pytest.raises(PeerUnreachable, match="'alpha' is no enabled peer"):
        await beta.transport.send("alpha", hint("beta"))
    assert beta.transport.statistics() == {}


async def test_a_peer_that_was_added_is_greeted(tmp_path: Path) -> None:
    federation = Federation.found(tmp_path, "alpha", "beta", "gamma")
    small = federation.manifest(without={"gamma"})
    async with (
        running(federation, "alpha", manifest=small) as alpha,
        running(federation, "gamma") as gamma,
    ):
        alpha.transport.reload(alpha.identity, federation.manifest(version=2))
        await until(lambda: alpha.transport.statistics()["gamma"].connected)
        await gamma.transport.send("alpha", hint("gamma"))


async def test_a_renewed_certificate_is_used_without_a_restart(
    federation: Federation, alpha: Site, beta: Site
) -> None:
    await alpha.transport.send("beta", hint("alpha"))
    renewed = federation.renew("beta")
    assert renewed.certificate_der != beta.identity.certificate_der
    beta.transport.reload(renewed, federation.manifest(version=2))
    await beta.transport.send("alpha", hint("beta"))
    assert await served_certificate(federation, "beta") == renewed.certificate_der
    await alpha.transport.send("beta", hint("alpha"))


async def test_a_push_under_way_survives_a_renewed_certificate(
    federation: Federation, alpha: Site, beta: Site
) -> None:
    beta.inbox.gate = asyncio.Event()
    push = asyncio.create_task(alpha.transport.push("beta", CONTEXT, b"sealed"))
    await until(lambda: beta.transport.statistics()["alpha"].bytes_received > 100)
    alpha.transport.reload(federation.renew("alpha"), federation.manifest(version=2))
    beta.inbox.gate.set()
    await push
    assert {blob.data for _, _, blob in beta.inbox.blobs} == {b"sealed"}


async def served_certificate(federation: Federation, site: str) -> bytes | None:
    folder = federation.root / "alpha"
    context = ssl.create_default_context(cafile=str(folder / "ca.crt"))
    context.load_cert_chain(folder / "site.crt", folder / "site.key")
    context.set_alpn_protocols(["h2"])
    _, writer = await asyncio.open_connection(
        "127.0.0.1",
        federation.ports[site],
        ssl=context,
        server_hostname=f"{site}.{federation.federation_id}.hanse.internal",
    )
    certificate = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.close()
    return certificate if isinstance(certificate, bytes) else None


async def test_the_identity_of_another_site_is_not_taken_on(
    federation: Federation, alpha: Site
) -> None:
    with pytest.raises(IdentityError, match="of site 'beta', this is 'alpha'"):
        alpha.transport.reload(federation.identity("beta"), federation.manifest(version=2))


async def test_a_port_in_use_is_an_error_with_a_remedy(federation: Federation) -> None:
    async with running(federation, "alpha"):
        with pytest.raises(ListenError, match="Address already in use; choose another `bind`"):
            await running(federation, "alpha").__aenter__()


async def test_a_crash_leaves_nothing_half_received(federation: Federation) -> None:
    spool = federation.root / "spool" / "alpha"
    spool.mkdir(parents=True)
    (spool / "beta.encrypted_update-1-0.0123.incoming").write_bytes(b"half")
    (spool / "beta.encrypted_update-1-1.4567").write_bytes(b"whole, and handed to nobody")
    async with running(federation, "alpha"):
        assert list(spool.iterdir()) == []


@pytest.mark.slow
async def test_stopping_leaves_no_task_behind(federation: Federation) -> None:
    before = asyncio.all_tasks()
    async with talking(federation) as sites:
        await sites["alpha"].transport.send("beta", hint("alpha"))
    await until(lambda: asyncio.all_tasks() == before)


@pytest.mark.slow
def test_grpc_loaded_before_the_floor_is_refused() -> None:
    """TLS 1.2 would be accepted then; nothing may fall back to that silently."""
    program = (
        "import grpc, peers.link.transport as t\n"
        "try: t.Transport(*[None] * 4)\n"
        "except t.LocalProtocolError as e: print(e)"
    )
    environment = {k: v for k, v in os.environ.items() if k != "GRPC_SSL_CIPHER_SUITES"}
    run = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )
    assert "TLS 1.2 would be accepted" in run.stdout
