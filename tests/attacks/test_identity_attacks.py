"""Revoked, expired and impersonating sites against a real daemon, over real TLS.

Every attack is made twice: the daemon as it is refuses it, and a daemon from which only
that defence was removed lets it through. So it is this defence that holds, and the test
would notice if it were gone.
"""

from __future__ import annotations

import peers.link.tls13  # noqa: F401  before anything imports grpc

# isort: split
import asyncio
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Literal

import grpc
import grpc.aio
import pytest
from cryptography import x509

from crypto.identity.authority import create_authority
from peers.wire.histories import pack_manifests
from peers.wire.manifest import signed
from proto import control_pb2 as control
from proto import federation_pb2 as pb
from tests.support.authority import Federation
from tests.support.federation import LiveFederation, LiveSite, Surroundings
from tests.support.loopback import QUICK, running
from tests.support.small_models import small_encoder
from tests.support.strangers import Caller, calling

pytestmark = [
    pytest.mark.attacks,
    pytest.mark.federation,
    pytest.mark.timeout(300),
]

DEFENDED = pytest.mark.parametrize("defended", [True, False], ids=["defended", "undefended"])
UNDEFENDED = "tests.attacks.programs.undefended_fedd"


@asynccontextmanager
async def victim(
    root: Path, monkeypatch: pytest.MonkeyPatch, removed: str
) -> AsyncIterator[tuple[LiveFederation, LiveSite]]:
    """Alpha's real daemon, without one defence if ``removed`` names one; beta and gamma attack."""
    monkeypatch.setenv("HANSE_UNDEFENDED", removed)
    federation = Federation.found(root, "alpha", "beta", "gamma")
    encoder = small_encoder(root / "encoder", words=["lock", "weir"])
    live = LiveFederation(federation, encoder, "head", Surroundings(program=UNDEFENDED))
    live.settings = {"rounds": {"heartbeat_s": 0.5}}
    async with live._stack:
        site = await live.launch("alpha")
        await ready(site)
        yield live, site


async def ready(site: LiveSite, within_s: float = 200.0) -> control.StatusReply:
    async with asyncio.timeout(within_s):
        while True:
            assert site.process.returncode is None, site.log
            try:
                return await site.status()
            except grpc.aio.AioRpcError:
                await asyncio.sleep(0.1)


async def says_hello(caller: Caller, sender: str) -> str:
    """ "" when alpha takes the greeting, else why it does not."""
    try:
        await caller.hello(sender)
    except grpc.aio.AioRpcError as error:
        return f"{error.code().name}: {error.details()}"
    return ""


def names_of(site: str) -> list[x509.GeneralName]:
    return [
        x509.UniformResourceIdentifier(f"hanse://med/site/{site}"),
        x509.DNSName(f"{site}.med.hanse.internal"),
    ]


@DEFENDED
async def test_a_revoked_site_is_shut_out_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, defended: bool
) -> None:
    """It is connected and has greeted; its certificate is good for another year."""
    async with victim(tmp_path, monkeypatch, "" if defended else "revocation") as (live, alpha):
        federation = live.federation
        async with calling(federation, federation.identity("beta")) as beta:
            assert await says_hello(beta, "beta") == ""
            expelled = federation.manifest(version=2, disabled={"beta"})
            (alpha.folder / "manifest.json").write_bytes(signed(expelled, federation.authority))
            broken = asyncio.create_task(disconnected(beta))
            alpha.process.send_signal(signal.SIGHUP)
            async with asyncio.timeout(30):
                while (await alpha.status()).manifest_version != 2:
                    await asyncio.sleep(0.02)
            await asyncio.wait([broken], timeout=1.0)
            why = await says_hello(beta, "beta")
            if defended:
                assert broken.done(), "its connection was closed"
                assert why.startswith("PERMISSION_DENIED: site 'beta' is disabled in manifest")
                assert "connections closed" in alpha.log
            else:
                assert not broken.done()
                assert why == ""
            broken.cancel()


async def disconnected(caller: Caller) -> None:
    """Returns when the connection that is up now is no more."""
    state = caller.channel.get_state()
    assert state is grpc.ChannelConnectivity.READY
    await caller.channel.wait_for_state_change(state)


@DEFENDED
async def test_a_certificate_that_expires_on_an_open_connection_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, defended: bool
) -> None:
    """TLS looked at it once, when it was good; every call is judged anew."""
    async with victim(tmp_path, monkeypatch, "" if defended else "expiry") as (live, _):
        end = time.monotonic() + 8
        short = live.federation.forge(names_of("beta"), seconds=8)
        async with calling(live.federation, short) as beta:
            assert await says_hello(beta, "beta") == ""
            await asyncio.sleep(end - time.monotonic() + 1.5)
            why = await says_hello(beta, "beta")
            if defended:
                assert why.startswith("UNAUTHENTICATED: the certificate expired on")
            else:
                assert why == ""


@DEFENDED
async def test_a_site_does_not_speak_for_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, defended: bool
) -> None:
    """Gamma, a site in good standing, sends a message as beta."""
    async with (
        victim(tmp_path, monkeypatch, "" if defended else "sender") as (live, _),
        calling(live.federation, live.federation.identity("gamma")) as gamma,
    ):
        why = await says_hello(gamma, "beta")
        if defended:
            assert why.startswith("PERMISSION_DENIED: the message names 'beta' as its sender")
        else:
            assert why == ""


async def test_an_authority_of_the_same_name_gets_nobody_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TLS itself refuses it: with the real authority's certificate the same call gets through."""
    async with victim(tmp_path, monkeypatch, "") as (live, _):
        impostors = Federation.found(tmp_path / "impostor", "beta")
        assert impostors.federation_id == live.federation.federation_id
        real = (live.federation.authority / "ca.crt").read_bytes()
        async with calling(live.federation, impostors.identity("beta"), real) as impostor:
            assert (await says_hello(impostor, "beta")).startswith("UNAVAILABLE")
        async with calling(live.federation, live.federation.identity("beta"), real) as beta:
            assert await says_hello(beta, "beta") == ""


@DEFENDED
async def test_a_manifest_that_the_authority_did_not_sign_is_not_adopted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, defended: bool
) -> None:
    """Beta serves a newer manifest, signed by an authority of its own, that expels gamma."""
    async with victim(tmp_path, monkeypatch, "" if defended else "signature") as (live, alpha):
        federation = live.federation
        create_authority(tmp_path / "own", federation.federation_id)
        coup = federation.manifest(version=7, disabled={"gamma"})
        forged = signed(coup, tmp_path / "own")
        async with running(federation, "beta", manifest=coup, options=QUICK) as beta:
            beta.inbox.shelf[pb.MANIFESTS] = pack_manifests([forged])
            await beta.transport.hello("alpha")
            async with asyncio.timeout(30):
                while "newer manifest is not in force" not in alpha.log and (
                    "manifest adopted" not in alpha.log
                ):
                    await asyncio.sleep(0.05)
            version = (await alpha.status()).manifest_version
            assert version == (1 if defended else 7)
            if defended:
                assert "not signed by this federation's authority" in alpha.log


@DEFENDED
async def test_a_key_that_others_may_read_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, defended: bool
) -> None:
    """A key that lay open must be taken for known: the daemon does not start with it."""
    monkeypatch.setenv("HANSE_UNDEFENDED", "" if defended else "key mode")
    federation = Federation.found(tmp_path, "alpha", "beta")
    (tmp_path / "alpha" / "site.key").chmod(0o644)
    encoder = small_encoder(tmp_path / "encoder", words=["lock", "weir"])
    live = LiveFederation(federation, encoder, "head", Surroundings(program=UNDEFENDED))
    async with live._stack:
        site = await live.launch("alpha")
        if defended:
            assert await asyncio.wait_for(site.process.wait(), 120) == 78
            assert "others may read the private key" in site.log
        else:
            assert (await ready(site)).site == "alpha"


class Gate(asyncio.Event):
    """Where an object waits before it is taken in; tells when one is there."""

    def __init__(self) -> None:
        super().__init__()
        self.reached = asyncio.Event()

    async def wait(self) -> Literal[True]:
        self.reached.set()
        return await super().wait()


@DEFENDED
async def test_an_upload_of_a_site_that_is_revoked_meanwhile_does_not_arrive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, defended: bool
) -> None:
    """Its call was let in while it was a member; it has sent every byte and waits for thanks."""
    federation = Federation.found(tmp_path, "alpha", "beta")
    if not defended:
        monkeypatch.setattr("peers.link.open_connections.OpenCalls.end", lambda *_: [])
        monkeypatch.setattr("peers.link.servicer.Servicer.forget_disabled", lambda _: None)
    async with running(federation, "alpha") as alpha, running(federation, "beta") as beta:
        alpha.inbox.gate = gate = Gate()
        name = pb.BlobName(kind=pb.ENCRYPTED_UPDATE, round=1)
        pushing = asyncio.create_task(beta.transport.push("alpha", name, bytes(3 << 20)))
        await asyncio.wait_for(gate.reached.wait(), 60)
        expelled = federation.manifest(version=2, disabled={"beta"})
        alpha.transport.reload(alpha.identity, expelled)
        await asyncio.sleep(0.5)
        gate.set()
        results = await asyncio.gather(pushing, return_exceptions=True)
        assert len(alpha.inbox.blobs) == (0 if defended else 1)
        assert isinstance(results[0], Exception) is defended
