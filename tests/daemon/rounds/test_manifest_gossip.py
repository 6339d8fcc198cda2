"""Newer manifests from peers: the authority's word counts, not theirs."""

from __future__ import annotations

import peers.link.tls13  # noqa: F401  before anything imports grpc

# isort: split
import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from config.loading import load
from crypto.identity.authority import create_authority
from daemon.rounds.manifest_gossip import ManifestGossip
from daemon.state.membership import Membership
from daemon.state.store import Store
from peers.wire.histories import pack_manifests
from peers.wire.manifest import FederationManifest, signed
from proto import federation_pb2 as pb
from tests.support.authority import Federation
from tests.support.lines import until
from tests.support.loopback import QUICK, Site, running

# Alpha greets of its own accord, as a daemon does; beta waits to be told what to do.
GREETS = replace(QUICK, keep_in_touch=replace(QUICK.keep_in_touch, answering_s=0.05))


@pytest.fixture
def federation(tmp_path: Path) -> Federation:
    return Federation.found(tmp_path, "alpha", "beta", "gamma")


@dataclass
class Alpha:
    """A site that adopts."""

    membership: Membership
    site: Site
    heard: list[str] = field(default_factory=list)  # who has told it something, each time
    applied: list[int] = field(default_factory=list)


@asynccontextmanager
async def alpha_beside(
    federation: Federation, served: list[bytes], says: int, *, adopting: bool = True
) -> AsyncIterator[Alpha]:
    """Alpha at manifest 1; beta says that it has version ``says`` and serves these."""
    folder = federation.root / "alpha"
    (folder / "manifest.json").write_bytes(signed(federation.manifest(), federation.authority))
    (folder / "fedd.toml").write_text('[identity]\ndirectory = "."\n')
    membership = Membership(load(folder / "fedd.toml"))
    membership.remember(Store(folder / "state.sqlite3"))
    newer, heard = federation.manifest(version=says), list[str]()

    def tap(way: str, peer: str, _raw: bytes) -> None:
        if way == "received":
            heard.append(peer)

    async with (
        running(federation, "beta", manifest=newer) as beta,
        running(federation, "alpha", options=GREETS, tap=tap) as site,
    ):
        beta.inbox.shelf[pb.MANIFESTS] = pack_manifests(served)
        alpha = Alpha(membership, site, heard)

        async def apply(_peer: str) -> None:
            alpha.applied.append(membership.manifest.version)
            site.transport.reload(membership.identity, membership.manifest)

        spreading = ManifestGossip(membership, site.transport, federation.root / "arriving", apply)
        task = asyncio.create_task(spreading.run(adopting=adopting))
        try:
            yield alpha
        finally:
            task.cancel()
            await asyncio.wait([task])


def expelled(version: int, federation: Federation) -> FederationManifest:
    return federation.manifest(version=version, disabled={"gamma"})


async def test_the_newest_of_a_peers_manifests_is_put_in_force(federation: Federation) -> None:
    versions = [federation.manifest(version=2), expelled(3, federation)]
    files = [signed(manifest, federation.authority) for manifest in versions]
    async with alpha_beside(federation, files, says=3) as alpha:
        await until(lambda: alpha.applied == [3])
        assert not alpha.membership.manifest.enabled("gamma")
        assert "gamma" not in alpha.site.transport.statistics()
    assert list((federation.root / "arriving").iterdir()) == []
    again = Membership(load(federation.root / "alpha" / "fedd.toml"))
    again.remember(Store(federation.root / "alpha" / "state.sqlite3"))
    assert again.manifest.version == 3, "also after a restart"
    again.reload()
    assert again.manifest.version == 3


@pytest.mark.parametrize("lie", ["unsigned", "another authority", "older", "garbage", "none"])
async def test_what_the_authority_did_not_sign_is_not_put_in_force(
    federation: Federation, lie: str
) -> None:
    newer = expelled(9, federation)
    create_authority(federation.root / "own", "med")
    good = signed(newer, federation.authority)
    served = {
        "unsigned": [good.replace(b'"version": 9', b'"version": 8')],
        "another authority": [signed(newer, federation.root / "own")],
        "older": [signed(federation.manifest(), federation.authority)],
        "garbage": [b"\0" * 100],
        "none": [],
    }[lie]
    with capture_logs() as logs:
        async with alpha_beside(federation, served, says=9) as alpha:
            await until(lambda: any("is not in force" in line["event"] for line in logs))
            greetings = len(alpha.heard)
            await until(lambda: len(alpha.heard) > greetings + 3)
            assert alpha.applied == []
            assert alpha.membership.manifest.version == 1
    told = [line for line in logs if "is not in force" in line["event"]]
    assert [line["peer"] for line in told] == ["beta"], "said once, not at every greeting"


async def test_an_operator_may_keep_the_moment(federation: Federation) -> None:
    files = [signed(expelled(2, federation), federation.authority)]
    with capture_logs() as logs:
        async with alpha_beside(federation, files, says=2, adopting=False) as alpha:
            await until(lambda: any("is not in force" in line["event"] for line in logs))
            assert alpha.applied == []
    told = next(line for line in logs if "is not in force" in line["event"])
    assert told["cause"] == "it has manifest 2; [identity] adopt_manifests is off here"
