"""A federation that exists goes on: what a majority committed stays, what follows takes a quorum.

`upgrade.json` is what a site had on its disk when a majority decided: three sites (elm, fir,
oak), three committed rounds, killed in the vote of the fourth, whose value it had accepted.
"""

from __future__ import annotations

import peers.link.tls13  # noqa: F401  before anything imports grpc

# isort: split
import asyncio
import copy
import hashlib
import json
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from structlog.testing import capture_logs

from config.loading import load
from crypto.identity.keys import key_pem
from crypto.identity.trust import Trust
from daemon.state.membership import Membership
from daemon.state.store import Store, StoreError
from peers.wire.certificates import (
    RULES,
    CertificateError,
    check_follows,
    verify_certificate,
    verify_chain,
)
from peers.wire.errors import PeerError
from peers.wire.manifest import RETRIEVER, FederationManifest, parse_signed, signed
from peers.wire.messages import PROTOCOL_VERSION
from proto import control_pb2 as control
from proto import federation_pb2 as pb
from tests.support import federation as live_federation
from tests.support.authority import Federation, free_port
from tests.support.federation import LiveFederation, Surroundings
from tests.support.loopback import running
from tests.support.small_models import small_encoder
from tests.support.strangers import Answers, answering, beta_calling, refused

SITES = ("elm", "fir", "oak")
BEFORE: dict[str, Any] = json.loads(Path(__file__).with_name("upgrade.json").read_text())
TRUST = Trust.from_pem(BEFORE["ca.crt"].encode())
MANIFEST = BEFORE["manifest.json"].encode()


def laid_out(folder: Path) -> Path:
    """The state folder as it was; the state file in it."""
    path = folder / "state.sqlite3"
    (folder / "versions").mkdir(parents=True)
    with closing(sqlite3.connect(path)) as db:
        db.executescript("\n".join(BEFORE["state.sqlite3"]))
        (head,) = db.execute("SELECT head_digest FROM protocol").fetchone()
    version = folder / "versions" / f"{head.hex()}.safetensors"
    version.write_bytes(bytes.fromhex(BEFORE["head.safetensors"]))
    return path


def columns(path: Path, names: str) -> tuple[Any, ...]:
    with closing(sqlite3.connect(path)) as db:
        row: tuple[Any, ...] = db.execute(f"SELECT {names} FROM protocol").fetchone()  # noqa: S608
    return row


def certificates(path: Path) -> list[pb.Certificate]:
    store = Store(path)
    try:
        return [commit.certificate for commit in store.rounds(1, 0)]
    finally:
        store.close()


def founded(root: Path) -> Federation:
    """The same federation, with new keys and certificates of its sites.

    The authority's key is derived from a sentence that stands here: it protects nothing.
    Its certificate, and so what is signed with it, is that of the fixture.
    """
    secret = hashlib.sha256(b"the authority of tests/test_upgrade.py").digest()
    key = ec.derive_private_key(int.from_bytes(secret), ec.SECP256R1())
    (root / "ca").mkdir()
    (root / "ca" / "ca.crt").write_text(BEFORE["ca.crt"])
    (root / "ca" / "ca.key").write_bytes(key_pem(key))
    (root / "ca" / "ca.key").chmod(0o600)
    federation = Federation(root, TRUST.federation_id, {site: free_port() for site in SITES})
    for site in SITES:
        federation.enrol(site)
    return federation


# ---- the state file -----------------------------------------------------------


def test_what_was_under_way_is_dropped_and_what_is_committed_stays(tmp_path: Path) -> None:
    path = laid_out(tmp_path)
    head_round, head, promised, accepted, run, shape = columns(
        path, "head_round, head_digest, promised, accepted, run, shape_digest"
    )
    assert (head_round, promised) == (3, 0)
    assert accepted is not None
    assert run is not None
    with capture_logs() as logged:
        store = Store(path)
    (word,) = logged
    assert word["log_level"] == "warning"
    assert "promised, accepted or asked for then is dropped" in word["event"]
    assert "`fedctl train`" in word["event"]
    assert word["round"] == 4
    durable = store.load("med", shape, b"")
    assert (durable.head_round, durable.head_digest) == (3, head)
    assert durable.promised == -1
    assert durable.state == pb.RoundState()
    assert durable.signed_run is None
    assert [commit.certificate.body.round for commit in store.rounds(1, 0)] == [1, 2, 3]
    assert store.manifests() == [MANIFEST]
    store.close()
    with capture_logs() as logged:
        Store(path).close()
    assert logged == [], "once"


def test_a_damaged_file_of_that_time_is_refused_and_stays_as_it_is(tmp_path: Path) -> None:
    path = laid_out(tmp_path)
    with closing(sqlite3.connect(path)) as db:
        db.execute("UPDATE protocol SET promised = 7")
        db.commit()
    with pytest.raises(StoreError, match="digest of what this site promised"):
        Store(path)
    assert columns(path, "promised, length(accepted)")[0] == 7


# ---- history --------------------------------------------------------------------


def test_the_history_verifies_under_the_rules_of_its_time(tmp_path: Path) -> None:
    path = laid_out(tmp_path / "state")
    federation = founded(tmp_path)
    settings = federation.root / "elm" / "fedd.toml"
    (settings.parent / "manifest.json").write_bytes(MANIFEST)
    settings.write_text(
        '[site]\nstate_dir = "state"\n'
        '[identity]\ndirectory = "."\nmanifest = "manifest.json"\n'
        f'[retriever]\nencoder = "{tmp_path}"\n'
    )
    membership, store = Membership(load(settings)), Store(path)
    membership.remember(store)
    history = [commit.certificate for commit in store.rounds(1, 0)]
    for certificate in history:
        assert certificate.body.rules == 0
        membership.log(RETRIEVER).verify_certificate(certificate)
    genesis = history[0].body.parent_digest
    verify_chain(history, membership.trust, membership.manifest_of, genesis)
    store.close()


def test_a_majority_was_enough_then_and_is_not_now(tmp_path: Path) -> None:
    manifest = parse_signed(MANIFEST, TRUST)
    first = certificates(laid_out(tmp_path))[0]
    two = copy.deepcopy(first)
    del two.votes[2:]
    assert (len(two.votes), manifest.majority, manifest.quorum) == (2, 2, 3)
    verify_certificate(two, TRUST, manifest, at=None)
    del two.votes[1:]
    with pytest.raises(CertificateError, match="1 votes, a majority of the 3 sites is 2"):
        verify_certificate(two, TRUST, manifest, at=None)
    # Said to be of today, it has too few votes, and signatures of something else.
    today = copy.deepcopy(first)
    today.body.rules = RULES
    today.body.manifest_digest, today.body.statement_digest = manifest.digest, bytes(32)
    with pytest.raises(CertificateError, match="vote of 'elm' is refused"):
        verify_certificate(today, TRUST, manifest, at=None)
    del today.votes[2:]
    with pytest.raises(CertificateError, match="2 votes, a quorum of the 3 sites is 3"):
        verify_certificate(today, TRUST, manifest, at=None)


def test_a_round_by_the_rules_of_old_behind_one_of_today_is_refused(tmp_path: Path) -> None:
    history = certificates(laid_out(tmp_path))
    check_follows(history[2], history[1])
    before = copy.deepcopy(history[1])
    before.body.rules = RULES
    check_follows(before, history[0])
    with pytest.raises(CertificateError, match="rules do not go back"):
        check_follows(history[2], before)


# ---- the manifest -----------------------------------------------------------------


def test_a_manifest_that_does_not_say_how_many_may_lie_counts_as_one(tmp_path: Path) -> None:
    manifest = parse_signed(MANIFEST, TRUST)
    assert manifest.faulty_sites is None
    assert (manifest.tolerated, manifest.quorum, manifest.objection) == (1, 3, "")
    # The next one goes one step from it: what it does not say counts as said.
    federation = founded(tmp_path)
    assert federation.manifest(version=2, faulty_sites=1).step_from(manifest) == ""
    assert federation.manifest(version=2, faulty_sites=0).step_from(manifest) == ""
    assert "more than one step" in federation.manifest(
        version=2, faulty_sites=0, disabled={"oak"}
    ).step_from(manifest)


def test_two_sites_under_an_old_manifest_are_told_what_to_do() -> None:
    listed = parse_signed(MANIFEST, TRUST).sites[:2]
    objection = FederationManifest("med", 1, listed).objection
    assert "two sites of manifest 1 can't run rounds where faulty_sites is 1" in objection
    assert "Let 1 more take part" in objection
    assert "--faulty-sites 0 (`fedctl manifest sign`)" in objection
    assert FederationManifest("med", 2, listed, 0).objection == ""


# ---- sites of both releases -----------------------------------------------------------


async def test_a_site_of_the_older_release_is_named_where_it_calls(tmp_path: Path) -> None:
    federation = Federation.found(tmp_path, "alpha", "beta")
    told = f"site 'beta' speaks protocol version {PROTOCOL_VERSION - 1} (software '9.9'), "
    older = "update 'beta', which has the older release"
    async with running(federation, "alpha"), beta_calling(federation) as beta:
        with (
            capture_logs() as logged,
            refused(grpc.StatusCode.FAILED_PRECONDITION, told, older),
        ):
            await beta.hello(version=PROTOCOL_VERSION - 1)
        (word,) = (one for one in logged if told in one.get("cause", ""))
        assert older in word["cause"]
        newer = "update 'alpha', which has the older release"
        with refused(grpc.StatusCode.FAILED_PRECONDITION, newer):
            await beta.hello(version=PROTOCOL_VERSION + 1)


@pytest.mark.parametrize(("by", "older"), [(-1, "that site"), (1, "this site")])
async def test_a_site_of_another_release_is_named_where_it_answers(
    tmp_path: Path, by: int, older: str
) -> None:
    """`fedctl peers` shows it as the last error."""
    federation = Federation.found(tmp_path, "alpha", "beta")
    version = PROTOCOL_VERSION + by
    reply = pb.HelloReply(protocol_version=version, sender="beta", software_version="9.9")
    async with answering(federation, Answers([], reply)), running(federation, "alpha") as alpha:
        with pytest.raises(PeerError):
            await alpha.transport.hello("beta")
        told = alpha.transport.statistics()["beta"].last_error
    assert f"speaks protocol version {version} (software '9.9'), we speak" in told
    assert f"update {older}, which has the older release" in told


# ---- real daemons -----------------------------------------------------------------


@asynccontextmanager
async def upgraded(root: Path) -> AsyncIterator[LiveFederation]:
    """Three daemons of today on state folders of that time, under new addresses."""
    federation = founded(root)
    encoder = small_encoder(root / "encoder", words=live_federation._words(), dimension=8)
    live = Continued(federation, encoder, "head", Surroundings())
    live.version = 2
    async with live._stack:
        for site in SITES:
            laid_out(root / site / "state")
            await live.launch(site)
        await live.until_connected()
        yield live


class Continued(LiveFederation):
    """Its manifests do not say how many sites may lie, as the one before them."""

    disabled: frozenset[str] = frozenset()

    def _signed_manifest(self) -> bytes:
        says = self.federation.manifest(version=self.version, disabled=self.disabled)
        silent = FederationManifest(says.federation_id, says.version, says.sites)
        return signed(silent, self.federation.authority)


@pytest.mark.federation
@pytest.mark.slow
async def test_a_federation_goes_on_behind_its_history(tmp_path: Path) -> None:
    async with upgraded(tmp_path) as live:
        assert isinstance(live, Continued)
        for site in live.sites.values():
            status = await site.status()
            assert status.head_round == 3
            assert not status.HasField("run"), "nobody has signed the one from before"
            assert "a majority decided" in site.log
        await live.ingest_all()
        await live.train("fir", rounds=2)
        for site in live.sites.values():
            history = [one.certificate for one in await site.rounds()]
            assert [one.body.rules for one in history] == [0, 0, 0, RULES, RULES]
            assert [len(one.votes) for one in history[3:]] == [3, 3], "all of three decide"
            verify_chain(
                history,
                TRUST,
                {1: parse_signed(MANIFEST, TRUST), 2: silent_manifest(live)}.get,
                history[0].body.parent_digest,
            )
        # Of two sites, one that lies could split the history: no round, until the keeper says so.
        live.disabled = frozenset({"oak"})
        live.reload_manifest()
        elm = live.sites["elm"]
        async with asyncio.timeout(60):
            while (await elm.status()).manifest_version != 3:
                await asyncio.sleep(0.05)
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await elm.stub.Train(control.TrainRequest(rounds=1), timeout=30)
        assert "two sites of manifest 3 can't run rounds" in (refusal.value.details() or "")
        assert "--faulty-sites 0" in (refusal.value.details() or "")


def silent_manifest(live: Continued) -> FederationManifest:
    return parse_signed(live._signed_manifest(), TRUST)
