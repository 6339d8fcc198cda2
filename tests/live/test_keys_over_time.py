"""Certificates and manifests over their life, at real daemons over real TLS."""

from __future__ import annotations

import peers.link.tls13  # noqa: F401  before anything imports grpc

# isort: split
import asyncio
import json
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path

import grpc.aio
import pytest
import pytest_asyncio

from crypto.identity.authority import sign_request
from crypto.identity.site import install, renew_site
from daemon.fedctl.main import main as fedctl
from proto import control_pb2 as control
from tests.support.federation import LiveFederation, LiveSite

pytestmark = [
    pytest.mark.federation,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(600),
]

SITES = ["alder", "birch", "dogwood"]
HEARTBEAT_S = 3.0  # long beside what a busy machine adds


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def live(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LiveFederation]:
    root = tmp_path_factory.mktemp("keys")
    rounds = {"heartbeat_s": HEARTBEAT_S, "phase_deadline_s": 30.0}
    async with LiveFederation.start(root, SITES, rounds=rounds, min_participants=2) as federation:
        await federation.ingest_all()
        yield federation


def renew(live: LiveFederation, site: LiveSite, *, new_key: bool) -> None:
    """What the site's and the authority's people do, and systemctl reload."""
    renew_site(site.folder, new_key=new_key)
    request = (site.folder / "site.csr").read_bytes()
    certificate = sign_request(live.federation.authority, request, expect_site=site.id, days=700)
    install(site.folder, certificate, (live.federation.authority / "ca.crt").read_bytes())
    site.process.send_signal(signal.SIGHUP)


async def start_run(site: LiveSite, rounds: int) -> int:
    reply = await site.stub.Train(control.TrainRequest(rounds=rounds), timeout=30)
    return int(reply.run.target_round)


async def test_every_site_renews_in_the_middle_of_a_run_and_no_attempt_is_lost(
    live: LiveFederation,
) -> None:
    """Certificates are exchanged while keys sealed for the old ones are on their way."""
    before = await live.sites["alder"].status()
    target = await start_run(live.sites["alder"], rounds=8)
    for number, site in enumerate(live.sites.values()):
        await live.until_head(before.head_round + 1 + number)
        renew(live, site, new_key=number % 2 == 0)
    await live.until_head(target)
    rounds = await live.sites["birch"].rounds()
    assert [r.certificate.attempt for r in rounds] == [0] * len(rounds)
    assert {tuple(r.certificate.body.contributors) for r in rounds} == {tuple(SITES)}
    for site in live.sites.values():
        status = await site.status()
        assert status.certificate_expires_unix_s > before.certificate_expires_unix_s + 300 * 86400
        assert status.peers_connected == len(SITES) - 1
        assert "reload refused" not in site.log
        assert not (site.folder / "site.key.next").exists()
    peers = await live.sites["birch"].stub.Peers(control.PeersRequest(), timeout=10)
    expiries = {peer.site: peer.certificate_expires_unix_s for peer in peers.peers}
    assert min(expiries.values()) > before.certificate_expires_unix_s + 300 * 86400


async def test_an_expulsion_at_one_site_reaches_all_within_a_heartbeat(
    live: LiveFederation, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Friday night: one operator installs it; the run goes on without the site, everywhere."""
    first, outcast = live.sites["alder"], live.sites["dogwood"]
    await start_run(live.sites["birch"], rounds=500)
    expel = ["site", "expel", "dogwood", "--ca", str(live.federation.authority)]
    files = ["--previous", str(first.folder / "manifest.json"), "--out", str(tmp_path / "m.json")]
    assert fedctl([*expel, *files, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["version"] == 2

    (first.folder / "manifest.json").write_bytes((tmp_path / "m.json").read_bytes())
    first.process.send_signal(signal.SIGHUP)
    began = time.monotonic()
    stay = [site for site in live.sites.values() if site is not outcast]
    for site in stay:
        while "manifest adopted" not in site.log and site is not first:
            await asyncio.sleep(0.02)
    seconds = time.monotonic() - began
    assert seconds < HEARTBEAT_S + 0.5, seconds
    target = max([(await site.status()).head_round for site in stay]) + 3
    async with asyncio.timeout(120):
        for site in stay:
            while (await site.status()).head_round < target:
                await asyncio.sleep(0.1)
    await first.stub.StopTraining(control.StopTrainingRequest(), timeout=30)
    for site in stay:
        last = (await site.rounds())[-1].certificate
        assert last.body.manifest_version == 2
        assert "dogwood" not in last.body.contributors
        assert "dogwood" not in {vote.site for vote in last.votes}
        assert (await site.status()).peers_total == len(SITES) - 2
    assert (await outcast.status()).head_round < target
    async with asyncio.timeout(60):  # it greets each of them once more, and is told
        while (await outcast.status()).peers_connected or not await told_everywhere(outcast):
            await asyncio.sleep(0.1)
    said = "this site is disabled in manifest 2 (said by alder, birch)"
    assert any(one.startswith(said) for one in (await outcast.status()).warnings)


async def told_everywhere(outcast: LiveSite) -> bool:
    """Whether every peer has said why it refuses."""
    reply = await outcast.stub.Peers(control.PeersRequest(), timeout=10)
    why = "'dogwood' is disabled in manifest version 2"
    return all(why in peer.last_error for peer in reply.peers)


async def test_a_manifest_that_came_from_a_peer_is_in_force_after_a_restart(
    live: LiveFederation,
) -> None:
    """Its operator's own file is still the old one, and a reload does not go back to it."""
    site = live.sites["birch"]
    assert await site.terminate() == 0
    site = await live.launch("birch")
    assert json.loads((site.folder / "manifest.json").read_bytes())["manifest"]["version"] == 1
    async with asyncio.timeout(150):
        while True:
            try:
                status = await site.status()
            except grpc.aio.AioRpcError:
                await asyncio.sleep(0.2)
                continue
            if status.peers_connected == len(SITES) - 2:
                break
            await asyncio.sleep(0.1)
    assert "the manifest file is older than the one in force" in site.log
    renew(live, site, new_key=False)
    async with asyncio.timeout(10):
        while '"reloaded"' not in site.log.rpartition("older than the one in force")[2]:
            await asyncio.sleep(0.1)
    status = await site.status()
    assert (status.manifest_version, status.peers_total) == (2, len(SITES) - 2)
