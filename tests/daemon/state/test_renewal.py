"""A certificate is renewed: what was sealed for the last one, new keys, crashes, and warnings."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from crypto.identity.authority import create_authority, sign_request
from crypto.identity.keys import IdentityError
from crypto.identity.site import Identity, install, renew_site
from crypto.identity.trust import Trust
from daemon.fedctl.main import main as fedctl
from daemon.state.expiry import ExpiryWatch, expiries, warnings
from daemon.state.membership import Membership
from daemon.state.store import Store
from peers.attempts import effects as do
from peers.link.contacts import PeerStatistics
from peers.wire.certificates import CertificateError
from peers.wire.manifest import signed
from tests.crypto.identity.forgery import DAY, NOW, enrol, load
from tests.daemon.rounds.test_catch_up import GENESIS, SHAPE, history, membership_of
from tests.support.authority import Federation, signer


@pytest.fixture
def root(tmp_path: Path) -> Path:
    create_authority(tmp_path / "ca", "med")
    enrol(tmp_path, "alpha")
    return tmp_path


def renewed(root: Path, *, new_key: bool) -> Identity:
    renew_site(root / "alpha", new_key=new_key)
    request = (root / "alpha" / "site.csr").read_bytes()
    certificate = sign_request(root / "ca", request, expect_site="alpha")
    install(root / "alpha", certificate, (root / "ca" / "ca.crt").read_bytes())
    return load(root / "alpha")


@pytest.mark.parametrize("new_key", [False, True])
def test_what_was_sealed_before_a_renewal_is_unsealed_after_it(root: Path, new_key: bool) -> None:
    """An open attempt's plan names the certificate that the site had when it began."""
    old = load(root / "alpha")
    trust = Trust.from_pem(old.authority_pem)
    sealed = trust.seal_for(old.certificate_der, b"round key", b"round 1 attempt 0")
    bare = renewed(root, new_key=new_key)
    with pytest.raises(IdentityError, match="cannot unseal"):
        bare.unseal(sealed, b"round 1 attempt 0")
    new = bare.following(old)
    assert new.unseal(sealed, b"round 1 attempt 0") == b"round key"
    fresh = trust.seal_for(new.certificate_der, b"next", b"")
    assert new.unseal(fresh, b"") == b"next"
    with pytest.raises(IdentityError, match="cannot unseal"):
        new.unseal(sealed, b"round 1 attempt 1")


def test_the_last_certificate_is_kept_for_a_day_and_only_to_unseal(root: Path) -> None:
    old = load(root / "alpha")
    trust = Trust.from_pem(old.authority_pem)
    sealed = trust.seal_for(old.certificate_der, b"round key", b"")
    long_ago = renewed(root, new_key=True).following(old, now=NOW - 2 * DAY)
    with pytest.raises(IdentityError, match="cannot unseal"):
        long_ago.unseal(sealed, b"")
    new = renewed(root, new_key=True).following(old)
    assert trust.verify(new.certificate_der, new.sign(b"vote"), b"vote", at=NOW + DAY) == "alpha"
    with pytest.raises(IdentityError, match="not by site"):
        trust.verify(old.certificate_der, new.sign(b"vote"), b"vote", at=NOW)


def test_certificates_that_are_kept_do_not_pile_up(root: Path) -> None:
    identity = load(root / "alpha")
    for _ in range(8):
        identity = renewed(root, new_key=True).following(identity)
    assert len(identity.earlier) == 3
    assert all(not old.earlier for _, old in identity.earlier)
    again = load(root / "alpha").following(identity)  # a reload without a renewal
    assert again.earlier == identity.earlier


def test_a_new_key_waits_beside_the_old_one_until_its_certificate_is_here(root: Path) -> None:
    folder = root / "alpha"
    before = (folder / "site.key").read_bytes()
    renew_site(folder, new_key=True)
    assert (folder / "site.key").read_bytes() == before
    assert (folder / "site.key.next").stat().st_mode & 0o777 == 0o600
    assert load(folder).site_id == "alpha", "the daemon may restart meanwhile"
    with pytest.raises(IdentityError, match="a renewal is under way"):
        renew_site(folder, new_key=True)


def test_a_crash_between_certificate_and_key_costs_nothing(root: Path) -> None:
    folder = root / "alpha"
    old_key = (folder / "site.key").read_bytes()
    new = renewed(root, new_key=True)
    (folder / "site.key").rename(folder / "site.key.next")
    (folder / "site.key").write_bytes(old_key)
    (folder / "site.key").chmod(0o600)
    assert load(folder) == new
    (folder / "site.key.next").chmod(0o644)
    with pytest.raises(IdentityError, match="others may read the private key"):
        load(folder)


def test_an_expired_certificate_can_be_renewed(root: Path) -> None:
    request = (root / "alpha" / "site.csr").read_bytes()
    create_authority(root / "older", "med", now=NOW - 100 * DAY)
    expired = sign_request(root / "older", request, days=10, now=NOW - 50 * DAY)
    (root / "alpha" / "site.crt").write_bytes(expired)
    (root / "alpha" / "ca.crt").write_bytes((root / "older" / "ca.crt").read_bytes())
    with pytest.raises(IdentityError, match="expired"):
        load(root / "alpha")
    renew_site(root / "alpha", new_key=False)


def test_the_commands_of_a_renewal(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert fedctl(["site", "renew", str(root / "alpha"), "--new-key"]) == 0
    assert "fedctl site install" in capsys.readouterr().out
    assert fedctl(["site", "renew", str(root / "alpha"), "--new-key"]) == 1
    assert "a renewal is under way" in capsys.readouterr().err


# ---- warnings ------------------------------------------------------------------


def at(left: timedelta) -> PeerStatistics:
    return PeerStatistics(certificate_not_after=NOW + left)


def test_warnings_begin_thirty_days_before(root: Path) -> None:
    identity = replace(load(root / "alpha"), not_after=NOW + 30 * DAY + timedelta(minutes=1))
    trust = Trust.from_pem(identity.authority_pem)
    peers = {"beta": at(31 * DAY), "gamma": at(DAY), "delta": at(-DAY), "new": PeerStatistics()}
    found = warnings(expiries(identity, trust, peers), NOW)
    assert [text.partition(", on")[0].partition(" on ")[0] for text in found] == [
        "the certificate of site delta expired",
        "the certificate of site gamma expires in 1 day",
    ]
    later = warnings(expiries(identity, trust, peers), NOW + timedelta(minutes=2))
    assert later[0].startswith("this site's certificate expires in 29 days")
    assert "fedctl site renew" in later[0]
    at_the_end = warnings(expiries(identity, trust, {}), trust.not_after - 10 * DAY)
    assert "the authority's certificate expires in 10 days" in at_the_end[1]
    assert "fedctl ca rotate" in at_the_end[1]


def test_the_log_says_it_once_a_day(root: Path) -> None:
    identity = replace(load(root / "alpha"), not_after=NOW + 10 * DAY)
    trust = Trust.from_pem(identity.authority_pem)
    watch = ExpiryWatch(lambda: expiries(identity, trust, {}))
    midnight = datetime(NOW.year, NOW.month, NOW.day, tzinfo=UTC)
    with capture_logs() as logs:
        for hour in range(3 * 24):
            watch.tell(midnight + timedelta(hours=hour))
    assert [(line["log_level"], line["whose"]) for line in logs] == [
        ("warning", "this site's certificate")
    ] * 3
    assert logs[0]["days_left"] > logs[2]["days_left"]


def test_after_a_restart_a_replaced_key_signs_for_nobody(tmp_path: Path) -> None:
    """Who stole beta's key, and beta has replaced it since: the last rounds' votes tell."""
    federation = Federation.found(tmp_path, "alpha", "beta")
    manifest = federation.manifest()
    old, folder = federation.identity("beta"), tmp_path / "beta"
    renew_site(folder, new_key=True)
    request, soon = (folder / "site.csr").read_bytes(), datetime.now(UTC) + timedelta(minutes=1)
    certificate = sign_request(federation.authority, request, expect_site="beta", now=soon)
    install(folder, certificate, (federation.authority / "ca.crt").read_bytes(), now=soon)
    stolen = signer(old)(b"promise")

    def started() -> Membership:
        return membership_of(federation, "alpha", signed(manifest, federation.authority))

    started().verify(b"promise", stolen, manifest, past=False)  # nothing was heard of another
    (tmp_path / "alpha" / "state").mkdir(exist_ok=True)
    store = Store(tmp_path / "alpha" / "state" / "state.sqlite3")
    store.load("med", SHAPE.digest, GENESIS)
    (commit,) = history(federation, range(1, 2), ["alpha", "beta"])
    head = commit.certificate.body
    store.persist(do.Durable(head.round, head.model_digest), (commit,))
    again = started()
    again.remember(store)
    with pytest.raises(CertificateError, match="beta has had a newer certificate since"):
        again.verify(b"promise", stolen, manifest, past=False)
    again.verify(b"promise", stolen, manifest, past=True)  # what was signed in its time stands
    again.verify(b"promise", signer(federation.identity("beta"))(b"promise"), manifest, past=False)
    store.close()
