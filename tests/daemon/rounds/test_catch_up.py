"""A site that was away catches up from any peer, whatever the others send it.

Real transports, real stores, real signatures; only the training is left out.
"""

from __future__ import annotations

import peers.link.tls13  # noqa: F401  before anything imports grpc

# isort: split
import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest

from config.loading import load
from daemon.control.status import unverified
from daemon.rounds import catch_up as exchange_module
from daemon.rounds.catch_up import CatchUp
from daemon.state.folder import StateFolder
from daemon.state.membership import Membership
from daemon.state.store import Store
from daemon.state.versions import ShapeManifest, is_sound, version_path, write_version
from peers.attempts import effects as do
from peers.link.contacts import PeerStatistics
from peers.link.transport import Transport
from peers.wire.certificates import plan_digest, sign_vote
from peers.wire.errors import BlobUnknown
from peers.wire.frames import Source
from peers.wire.histories import pack_certificates, pack_manifests
from peers.wire.manifest import RETRIEVER, ManifestError, signed
from peers.wire.messages import FRAME_BYTES
from proto import federation_pb2 as pb
from tests.support.authority import Federation, free_port, signer
from tests.support.federation import LiveFederation, LiveSite
from tests.support.loopback import KeepsAll, running

SHAPE = ShapeManifest("test", (("w", (1000,)),))
GENESIS = b"g" * 32


def history(
    federation: Federation, rounds: range, voters: list[str], *, manifest: int = 1
) -> list[pb.Commit]:
    """Rounds that these sites have really voted for, with models of no content."""
    identities = {site: federation.identity(site) for site in voters}
    commits = []
    for round_ in rounds:
        body = pb.VoteBody(
            federation_id=federation.federation_id,
            round=round_,
            parent_digest=(round_ - 1).to_bytes(32) if round_ > 1 else GENESIS,
            model_digest=round_.to_bytes(32),
            contributors=sorted(voters),
            manifest_version=manifest,
            plan_digest=plan_digest(pb.TrainingPlan(local_epochs=1)),
        )
        certificate = pb.Certificate(body=body)
        for identity in identities.values():
            vote = sign_vote(signer(identity), body, 0)
            vote.ClearField("body")
            certificate.votes.append(vote)
        commits.append(pb.Commit(certificate=certificate))
    return commits


@dataclass
class Inbox(KeepsAll):
    """Serves what an Exchange serves, or what a test has put on the shelf."""

    exchange: CatchUp | None = None
    asked: list[tuple[str, pb.BlobName]] = field(default_factory=list)

    async def source(self, sender: str, name: pb.BlobName) -> Source:
        self.asked.append((sender, name))
        if name.kind in self.shelf or self.exchange is None:
            return await super().source(sender, name)
        return await self.exchange.source(sender, name)


@dataclass
class Place:
    """One site's disk, its exchange, and what that fed to the protocol."""

    folders: StateFolder
    store: Store
    exchange: CatchUp
    membership: Membership
    inbox: Inbox
    transport: Transport
    events: list[do.Event]

    @property
    def kinds_asked(self) -> list[int]:
        return [name.kind for _, name in self.inbox.asked]


def membership_of(federation: Federation, site: str, manifest: bytes) -> Membership:
    folder = federation.root / site
    (folder / "manifest.json").write_bytes(manifest)
    settings = folder / "fedd.toml"
    settings.write_text('[site]\nstate_dir = "state"\n[identity]\ndirectory = "."\n')
    text = settings.read_text() + f'manifest = "{folder / "manifest.json"}"\n'
    settings.write_text(text)
    return Membership(load(settings))


@asynccontextmanager
async def at(
    federation: Federation, site: str, *, version: int = 1, commits: list[pb.Commit] | None = None
) -> AsyncIterator[Place]:
    """A site with these committed rounds, listening."""
    manifest = federation.manifest(version=version)
    membership = membership_of(federation, site, signed(manifest, federation.authority))
    folders = StateFolder(federation.root / site / "state")
    folders.versions.mkdir(parents=True, exist_ok=True)
    store = Store(folders.store)
    store.load("med", SHAPE.digest, GENESIS)
    membership.remember(store)
    if commits:
        head = commits[-1].certificate.body
        store.persist(do.Durable(head.round, head.model_digest), tuple(commits))
    events: list[do.Event] = []

    async def feed(event: do.Event) -> None:
        events.append(event)

    exchange = CatchUp(
        store=store,
        state=folders,
        shapes=SHAPE,
        history=membership.log(RETRIEVER),
        keep_versions=2,
        feed=feed,
    )
    async with running(federation, site, manifest=manifest) as listening:
        inbox = Inbox(exchange=exchange)
        listening.transport._servicer.inboxes = {"med": inbox}
        inbox.head_round = len(commits or ())
        yield Place(folders, store, exchange, membership, inbox, listening.transport, events)
    store.close()


def arrived(place: Place) -> list[int]:
    """Rounds of the certificates that the protocol was given."""
    event = place.events[-1]
    assert isinstance(event, do.CertificatesArrived)
    return [certificate.body.round for certificate in event.certificates]


class Listed:
    """A transport whose peers' heads are known already, as after a greeting."""

    def __init__(self, transport: Transport, heads: dict[str, int]) -> None:
        self._heads = heads
        self.pull = transport.pull

    def statistics(self) -> dict[str, PeerStatistics]:
        return {
            site: PeerStatistics(connected=True, head_round=head)
            for site, head in self._heads.items()
        }


async def catch_up(place: Place, first: str, after: int = 0, **heads: int) -> None:
    listed = Listed(place.transport, heads)
    await place.exchange.fetch_certificates(do.FetchCertificates(first, after), listed)  # type: ignore[arg-type]


@pytest.fixture
def federation(tmp_path: Path) -> Federation:
    return Federation.found(tmp_path, "alpha", "beta", "gamma")


# ---- certificates --------------------------------------------------------------------


def test_a_link_in_the_place_of_the_spool_hinders_no_start(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "letter").touch()
    folders = StateFolder(tmp_path / "state")
    folders.spool.parent.mkdir(parents=True)
    folders.spool.symlink_to(elsewhere)
    folders.empty_spool()
    assert folders.spool.is_dir() and not folders.spool.is_symlink()
    assert (elsewhere / "letter").exists()


@pytest.mark.slow
async def test_a_site_far_behind_catches_up_in_several_pulls(
    federation: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchange_module, "_CERTIFICATES_A_PULL", 100)
    commits = history(federation, range(1, 351), ["alpha", "beta"])
    async with (
        at(federation, "beta", commits=commits) as beta,
        at(federation, "alpha") as alpha,
    ):
        await catch_up(alpha, "beta")
        assert arrived(alpha) == list(range(1, 351))
        assert [name.round for _, name in beta.inbox.asked] == [1, 101, 201, 301, 351]


async def test_a_pull_is_bounded_in_bytes_too(
    federation: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    commits = history(federation, range(1, 41), ["alpha", "beta"])
    one = len(pack_certificates([commits[0].certificate]))
    monkeypatch.setattr(exchange_module, "_HISTORY_BYTES_A_PULL", 11 * one)
    async with (
        at(federation, "beta", commits=commits) as beta,
        at(federation, "alpha") as alpha,
    ):
        await catch_up(alpha, "beta")
        assert arrived(alpha) == list(range(1, 41))
        assert len(beta.inbox.asked) == 5


@pytest.mark.slow
async def test_ten_thousand_rounds_do_not_hold_up_the_event_loop(federation: Federation) -> None:
    commits = history(federation, range(1, 10_001), ["alpha", "beta"])
    lags = []

    async def measure() -> None:
        while True:
            before = time.monotonic()
            await asyncio.sleep(0.01)
            lags.append(time.monotonic() - before - 0.01)

    async with (
        at(federation, "beta", commits=commits) as beta,
        at(federation, "alpha") as alpha,
    ):
        measuring = asyncio.create_task(measure())
        began = time.monotonic()
        await catch_up(alpha, "beta")
        took = time.monotonic() - began
        measuring.cancel()
        assert len(arrived(alpha)) == 10_000
        assert len(beta.inbox.asked) == 11
        print(f"10000 rounds in {took:.1f} s, longest hold-up {max(lags):.2f} s")
        assert max(lags) < 1.0
        again = time.monotonic()
        for commit in commits:  # as the protocol does, in its one step
            alpha.membership.log(RETRIEVER).verify_certificate(commit.certificate)
        assert time.monotonic() - again < took / 4, "verified once, remembered after that"


@pytest.mark.slow
async def test_the_next_peer_goes_on_where_one_ended(federation: Federation) -> None:
    commits = history(federation, range(1, 31), ["alpha", "beta"])
    async with (
        at(federation, "beta", commits=commits[:12]) as beta,
        at(federation, "gamma", commits=commits) as gamma,
        at(federation, "alpha") as alpha,
    ):
        await catch_up(alpha, "beta", beta=12, gamma=30)
        assert arrived(alpha) == list(range(1, 31))
        assert [name.round for _, name in beta.inbox.asked] == [1, 13]
        assert [name.round for _, name in gamma.inbox.asked] == [13, 31]


async def test_a_peer_that_takes_its_time_holds_up_no_other(
    federation: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A site that lies could give a frame now and then, for half an hour."""
    commits = history(federation, range(1, 31), ["alpha", "gamma"])
    async with at(federation, "gamma", commits=commits), at(federation, "alpha") as alpha:
        begun, pull = asyncio.Event(), alpha.exchange._pull_history

        async def slowly(transport: Transport, site: str, name: pb.BlobName) -> bytes:
            if site == "beta":
                begun.set()
                await asyncio.Event().wait()
            return await pull(transport, site, name)

        monkeypatch.setattr(alpha.exchange, "_pull_history", slowly)
        stuck = asyncio.create_task(catch_up(alpha, "beta", beta=1 << 40))
        await begun.wait()
        await catch_up(alpha, "gamma", beta=1 << 40, gamma=30)
        assert arrived(alpha) == list(range(1, 31))
        stuck.cancel()


@pytest.mark.slow
@pytest.mark.parametrize("attack", ["forged", "gap", "garbage", "minority", "silent"])
async def test_a_peer_that_lies_is_passed_over(federation: Federation, attack: str) -> None:
    commits = history(federation, range(1, 9), ["alpha", "gamma"])
    certificates = [commit.certificate for commit in commits]
    lies: dict[str, bytes] = {
        "gap": pack_certificates(certificates[1:]),
        "garbage": b"\0\0\0\7garbage",
        "minority": pack_certificates(
            [c.certificate for c in history(federation, range(1, 9), ["beta"])]
        ),
    }
    forged = pb.Certificate()
    forged.CopyFrom(certificates[0])
    forged.body.model_digest = b"f" * 32
    lies["forged"] = pack_certificates([forged, *certificates[1:]])
    async with (
        at(federation, "beta") as beta,
        at(federation, "gamma", commits=commits),
        at(federation, "alpha") as alpha,
    ):
        if attack in lies:
            beta.inbox.shelf[pb.CERTIFICATES] = lies[attack]
        else:
            await beta.transport.stop(grace=0)
        await catch_up(alpha, "beta", beta=8)
        assert not alpha.events
        told = unverified(alpha.exchange.unverified, 0, {"beta": PeerStatistics(head_round=8)})
        assert bool(told) == (attack != "silent"), "who gives nothing may come back"
        assert all("the rounds of beta, which says that it is at 8, do not" in t for t in told)
        await catch_up(alpha, "beta", beta=8, gamma=8)
        assert arrived(alpha) == list(range(1, 9))
        assert not alpha.exchange.unverified, "it is not held against one that has come on"


# ---- manifests ------------------------------------------------------------------------


async def test_past_certificates_are_verified_with_the_manifest_of_their_time(
    federation: Federation,
) -> None:
    """Gamma comes with manifest 2 and has never seen 1, in which it was not listed."""
    first = signed(federation.manifest(version=1, without={"gamma"}), federation.authority)
    commits = [
        *history(federation, range(1, 6), ["alpha", "beta"], manifest=1),
        *history(federation, range(6, 9), ["alpha", "gamma"], manifest=2),
    ]
    async with (
        at(federation, "beta", version=2, commits=commits) as beta,
        at(federation, "gamma", version=2) as gamma,
    ):
        beta.membership.learn([first])
        assert not gamma.membership.knows(1)
        await catch_up(gamma, "beta")
        assert arrived(gamma) == list(range(1, 9))
        assert beta.kinds_asked == [pb.CERTIFICATES, pb.MANIFESTS, pb.CERTIFICATES]
        assert gamma.store.manifests()[0] == first, "and it can show it to the next one"
    again = membership_of(
        federation, "gamma", signed(federation.manifest(version=2), federation.authority)
    )
    store = Store(federation.root / "gamma" / "state" / "state.sqlite3")
    again.remember(store)
    assert again.knows(1), "after a restart, too"
    store.close()


async def test_a_site_with_an_old_manifest_follows_and_keeps_its_own_in_force(
    federation: Federation,
) -> None:
    commits = history(federation, range(1, 4), ["alpha", "beta"], manifest=5)
    async with (
        at(federation, "beta", version=5, commits=commits),
        at(federation, "alpha", version=2) as alpha,
    ):
        await catch_up(alpha, "beta")
        assert arrived(alpha) == [1, 2, 3]
        assert alpha.membership.manifest.version == 2


@pytest.mark.parametrize("lie", ["unsigned", "two of one version", "not the one"])
async def test_a_manifest_that_the_authority_did_not_sign_proves_nothing(
    federation: Federation, lie: str
) -> None:
    commits = history(federation, range(1, 4), ["beta"], manifest=1)
    true = federation.manifest(version=1, without={"alpha", "gamma"})
    text = signed(true, federation.authority)
    lies = {
        "unsigned": text.replace(b'"beta"', b'"gamma"'),
        "two of one version": signed(
            replace(federation.manifest(version=2), sites=true.sites), federation.authority
        ),
        "not the one": signed(federation.manifest(version=3), federation.authority),
    }
    async with (
        at(federation, "beta", version=2, commits=commits) as beta,
        at(federation, "alpha", version=2) as alpha,
    ):
        beta.inbox.shelf[pb.MANIFESTS] = pack_manifests([lies[lie]])
        await catch_up(alpha, "beta")
        assert alpha.events == []
        assert not alpha.membership.knows(1)
        with pytest.raises(ManifestError):
            alpha.membership.learn([lies["unsigned"]])


# ---- versions --------------------------------------------------------------------------


def a_version(folder: Path, seed: int = 1) -> bytes:
    values = np.random.default_rng(seed).standard_normal(SHAPE.total, dtype=np.float32)
    return write_version(folder, SHAPE.digest, values)[0]


def damage(path: Path) -> None:
    """One bit of the last value is another."""
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))


async def fetch(place: Place, digest: bytes, *sites: str) -> do.Event:
    await place.exchange.fetch_version(do.FetchVersion(digest, sites), place.transport)
    return place.events.pop()


async def test_a_version_comes_from_the_first_peer_that_has_it_whole(
    federation: Federation,
) -> None:
    async with (
        at(federation, "beta") as beta,
        at(federation, "gamma") as gamma,
        at(federation, "alpha") as alpha,
    ):
        digest = a_version(gamma.folders.versions)
        damage(version_path(beta.folders.versions, a_version(beta.folders.versions)))
        assert await fetch(alpha, digest, "beta", "gamma") == do.VersionHere(digest)
        assert is_sound(alpha.folders.versions, digest, SHAPE.digest)
        with pytest.raises(BlobUnknown):  # a damaged one is not handed on
            await beta.exchange.source("alpha", pb.BlobName(kind=pb.MODEL_VERSION, digest=digest))


async def test_a_damaged_version_is_fetched_again(federation: Federation) -> None:
    async with at(federation, "beta") as beta, at(federation, "alpha") as alpha:
        digest = a_version(beta.folders.versions)
        a_version(alpha.folders.versions)
        damage(version_path(alpha.folders.versions, digest))
        assert not is_sound(alpha.folders.versions, digest, SHAPE.digest)
        assert await fetch(alpha, digest, "beta") == do.VersionHere(digest)
        assert is_sound(alpha.folders.versions, digest, SHAPE.digest)


@pytest.mark.parametrize(("named", "comes"), [(1, False), (30 * SHAPE.total, True)])
async def test_another_encoders_version_is_fetched_as_long_as_is_signed(
    federation: Federation, named: int, comes: bool
) -> None:
    """By whoever votes on it, or passes it on, and can't read it; a peer can't say how long."""
    other = ShapeManifest("another", (("w", (30 * SHAPE.total,)),))
    values = np.ones(other.total, dtype=np.float32)
    async with at(federation, "beta") as beta, at(federation, "alpha") as alpha:
        step = federation.manifest(version=2, retriever=f"{other.digest.hex()}:{named}")
        alpha.membership.learn([signed(step, federation.authority)])
        digest, _ = write_version(beta.folders.versions, other.digest, values)
        said = await fetch(alpha, digest, "beta")
        assert isinstance(said, do.VersionHere) == comes
        assert await alpha.exchange.is_here(digest) == comes
        assert not await alpha.exchange.is_ours(digest)
        assert await alpha.exchange.newest_ours(digest) == (b"" if comes else digest)


@pytest.mark.slow
async def test_a_version_goes_on_at_the_byte_where_a_killed_daemon_was(
    federation: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    big = ShapeManifest("test", (("w", (2 * FRAME_BYTES,)),))  # 8 MiB
    values = np.random.default_rng(1).standard_normal(big.total, dtype=np.float32)
    monkeypatch.setattr("tests.daemon.rounds.test_catch_up.SHAPE", big)
    async with at(federation, "beta") as beta, at(federation, "alpha") as alpha:
        digest, path = write_version(beta.folders.versions, big.digest, values)
        alpha.folders.arriving.mkdir(parents=True)
        stale = alpha.folders.arriving / f"version-{b'x'.hex()}.part"
        stale.write_bytes(b"of a version that nobody waits for")
        part = alpha.folders.arriving / f"version-{digest.hex()}.gamma.part"  # gamma is gone
        part.write_bytes(path.read_bytes()[: 6 * FRAME_BYTES])
        before = alpha.transport.statistics()["beta"].bytes_received
        assert await fetch(alpha, digest, "beta") == do.VersionHere(digest)
        crossed = alpha.transport.statistics()["beta"].bytes_received - before
        assert crossed < 3 * FRAME_BYTES
        assert is_sound(alpha.folders.versions, digest, big.digest)
        assert list(alpha.folders.arriving.iterdir()) == []


@pytest.mark.slow
async def test_a_peer_whose_bytes_never_come_holds_nobody_up(federation: Federation) -> None:
    """It takes a call and never answers; the next peer is asked as well, after a moment."""
    held_open: list[asyncio.StreamWriter] = []

    async def silent(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        held_open.append(writer)

    server = await asyncio.start_server(silent, "127.0.0.1", federation.ports["beta"])
    async with server, at(federation, "gamma") as gamma, at(federation, "alpha") as alpha:
        digest = a_version(gamma.folders.versions)
        began = time.monotonic()
        assert await fetch(alpha, digest, "beta", "gamma") == do.VersionHere(digest)
        assert time.monotonic() - began < 4
        assert list(alpha.folders.arriving.iterdir()) == []
        for writer in held_open:
            writer.close()


async def test_a_version_that_does_not_fit_is_not_begun(
    federation: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with at(federation, "beta") as beta, at(federation, "alpha") as alpha:
        digest = a_version(beta.folders.versions)
        monkeypatch.setattr(exchange_module, "RESERVED_BYTES", 1 << 60)
        event = await fetch(alpha, digest, "beta")
        assert isinstance(event, do.VersionMissing)
        assert "do not fit on the disk" in event.reason
        assert beta.inbox.asked == []
        monkeypatch.undo()
        assert await fetch(alpha, digest, "beta") == do.VersionHere(digest)


async def test_the_newest_versions_stay_and_every_certificate_does(federation: Federation) -> None:
    async with at(federation, "alpha") as alpha:
        versions = [a_version(alpha.folders.versions, seed) for seed in range(6)]
        commits = history(federation, range(1, 7), ["alpha", "beta"])
        for commit, digest in zip(commits, versions, strict=True):
            commit.certificate.body.model_digest = digest
        alpha.store.persist(do.Durable(6, versions[-1]), tuple(commits))

        async def left() -> set[bytes]:
            await alpha.exchange.forget_old_versions({versions[-1], versions[1]})
            return {bytes.fromhex(p.stem) for p in alpha.folders.versions.glob("*.safetensors")}

        with alpha.exchange.keeping([versions[2]]), alpha.exchange.keeping([versions[2]]):
            assert await left() == {*versions[1:3], *versions[-2:]}, "an evaluation reads one"
        assert await left() == {versions[1], *versions[-2:]}, "two kept, and the one that answers"
        assert len(alpha.store.rounds(1, 0)) == 6


# ---- a site that joins -----------------------------------------------------------------


@pytest.mark.federation
@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_a_new_site_joins_a_running_federation(tmp_path: Path) -> None:
    """Enrolled, listed in the next manifest, started: it catches up and takes part by itself."""
    rounds = {"heartbeat_s": 0.3, "phase_deadline_s": 20.0}
    async with LiveFederation.start(
        tmp_path, ["elm", "fir", "oak"], rounds=rounds, local_epochs=1
    ) as live:
        await live.ingest_all()
        await live.train("elm", rounds=7)
        live.federation.ports["yew"] = free_port()
        live.federation.enrol("yew")
        live.reload_manifest()
        yew = await live.launch("yew")
        await live.until_connected()
        await live.until_head(7)
        status = await yew.status()
        assert status.model_digest == (await live.sites["elm"].status()).model_digest
        rounds_of_yew = await yew.rounds()
        assert [r.certificate.body.round for r in rounds_of_yew] == list(range(1, 8))
        assert {r.certificate.body.manifest_version for r in rounds_of_yew} == {1}
        await yew.ingest()
        await live.train("fir", rounds=1)
        last = (await yew.rounds())[-1]
        assert "yew" in last.certificate.body.contributors, yew.log
        assert last.certificate.body.manifest_version == 2
        assert len({(await site.status()).model_digest for site in live.sites.values()}) == 1

        await yew_mends_what_was_damaged(live, yew)


async def yew_mends_what_was_damaged(live: LiveFederation, yew: LiveSite) -> None:
    """A version comes again from a peer; promises and votes can't, so fedd refuses to start."""
    assert await yew.terminate() == 0
    folder = yew.folder / "state"
    head = max((folder / "versions").glob("*.safetensors"), key=lambda path: path.stat().st_mtime)
    whole = head.read_bytes()
    damage(head)
    cut_short = [folder / "kept" / ".new-1-0.npy.0f", folder / ".new-residual.npy.pending.0f"]
    for path in cut_short:
        path.write_bytes(b"half")  # as a worker leaves it that is killed while it writes
    yew = await live.launch("yew")
    await live.until_connected()
    async with asyncio.timeout(30):
        while head.read_bytes() != whole:
            await asyncio.sleep(0.1)
        status = await yew.status()
        while status.index_digest != status.model_digest:
            await asyncio.sleep(0.1)
            status = await yew.status()
    assert not any(path.exists() for path in cut_short)
    assert await yew.terminate() == 0
    (folder / "state.sqlite3").write_bytes(b"")
    yew = await live.launch("yew")
    assert await asyncio.wait_for(yew.process.wait(), 60) == 2
    last = yew.log.splitlines()[-1]
    assert last.startswith("fedd: cannot use the state file")
    assert "committed another round without this one" in last
