"""Whose signatures count at a site: enabled sites', by their newest certificates."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path

import pytest

from config.loading import load
from crypto.identity.authority import sign_request
from crypto.identity.site import Identity
from daemon.state import membership as module
from daemon.state.membership import Membership
from daemon.state.store import Store
from peers.rounds.manifest_in_force import ManifestInForce
from peers.wire.certificates import CertificateError, sign_vote, vote_payload
from peers.wire.manifest import GENERATOR, RETRIEVER, ManifestError, signed
from proto import federation_pb2 as pb
from tests.support.authority import Federation

DAY = timedelta(days=1)
SAID = b"hanse-test\0what is said"


@dataclass
class Place:
    """Alpha's membership, in a federation of three."""

    federation: Federation
    here: Membership

    @classmethod
    def of(cls, root: Path) -> Place:
        federation = Federation.found(root, "alpha", "beta", "gamma")
        folder = root / "alpha"
        (folder / "manifest.json").write_bytes(signed(federation.manifest(), federation.authority))
        (folder / "fedd.toml").write_text('[identity]\ndirectory = "."\n')
        return cls(federation, Membership(load(folder / "fedd.toml")))

    def renewed(self, site: str, *, begins: datetime, days: int = 365) -> Identity:
        """The same key with another certificate, which is not installed."""
        folder = self.federation.root / site
        request = (folder / "site.csr").read_bytes()
        pem = sign_request(self.federation.authority, request, days=days, now=begins)
        (folder / "other.crt").write_bytes(pem)
        moment = begins + timedelta(hours=1)
        return Identity.load(
            folder / "other.crt", folder / "site.key", folder / "ca.crt", now=moment
        )

    def verify(self, by: pb.Signature, *, past: bool = False, said: bytes = SAID) -> None:
        self.here.verify(said, by, self.here.manifest, past=past)

    def refuses(self, by: pb.Signature, why: str, *, past: bool = False) -> None:
        with pytest.raises(CertificateError, match=why):
            self.verify(by, past=past)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place.of(tmp_path)


def of(identity: Identity, said: bytes = SAID) -> pb.Signature:
    return pb.Signature(
        site=identity.site_id,
        signature=identity.sign(said),
        certificate=identity.certificate_der,
    )


def test_an_enabled_sites_signature_counts_again_and_again(place: Place) -> None:
    beta = of(place.federation.identity("beta"))
    for past in (False, True, False):
        place.verify(beta, past=past)
    place.verify(place.here.sign(SAID))


def test_what_is_not_so_is_refused_also_behind_what_is(place: Place) -> None:
    """A signature that was found good opens no door to one that differs in anything."""
    beta = of(place.federation.identity("beta"))
    place.verify(beta)
    with pytest.raises(CertificateError, match="not by site 'beta' over these bytes"):
        place.verify(beta, said=SAID + b"!")
    in_gammas_name = pb.Signature(
        site="gamma", signature=beta.signature, certificate=beta.certificate
    )
    place.refuses(in_gammas_name, "the certificate is of beta")
    gammas = place.federation.identity("gamma").certificate_der
    place.refuses(replaced(beta, certificate=gammas), "the certificate is of gamma")
    place.refuses(replaced(beta, certificate=b""), "has 1 to")
    place.refuses(replaced(beta, certificate=beta.certificate + bytes(5000)), "has 1 to")
    place.refuses(replaced(beta, signature=b"\x30" * 70), "not by site 'beta'")


def replaced(
    by: pb.Signature, *, signature: bytes = b"", certificate: bytes | None = None
) -> pb.Signature:
    given = by.certificate if certificate is None else certificate
    return pb.Signature(site=by.site, signature=signature or by.signature, certificate=given)


def test_a_site_that_is_not_enabled_is_refused_whatever_it_signed_before(place: Place) -> None:
    beta = of(place.federation.identity("beta"))
    place.verify(beta)
    without = place.federation.manifest(version=2, disabled={"beta"})
    for past in (False, True):
        with pytest.raises(CertificateError, match="'beta' is not an enabled site of manifest 2"):
            place.here.verify(SAID, beta, without, past=past)
    elsewhere = replace(place.here.manifest, federation_id="other")
    with pytest.raises(CertificateError, match="another one"):
        place.here.log(RETRIEVER).verify(SAID, beta, elsewhere, past=True)


def test_a_manifest_that_cannot_be_parsed_is_named(place: Place) -> None:
    file = place.federation.root / "alpha" / "manifest.json"
    file.write_text("{")
    with pytest.raises(ManifestError, match=f"{file}: the manifest is not JSON"):
        place.here.reload()


def test_a_stranger_is_refused(place: Place, tmp_path: Path) -> None:
    stranger = Federation.found(tmp_path / "own", "beta").identity("beta")
    place.refuses(of(stranger), "not issued by this federation's authority", past=True)


def test_an_expired_certificate_counts_for_the_past_alone(place: Place) -> None:
    old = place.renewed("beta", begins=datetime.now(UTC) - 20 * DAY, days=1)
    place.verify(of(old), past=True)
    place.refuses(of(old), "expired on")
    place.verify(of(old), past=True)


def test_a_replaced_certificate_counts_for_what_was_seen_of_it_before(place: Place) -> None:
    """Its key may have been stolen: that is why it was replaced."""
    old = place.federation.identity("beta")
    before = of(old)
    place.verify(before)
    newer = place.renewed("beta", begins=datetime.now(UTC) + timedelta(seconds=2))
    place.verify(of(newer), past=True)  # seen in a lock, say; its time is to come
    place.verify(before)
    place.refuses(of(old, SAID), "has had a newer certificate since")
    place.verify(of(old), past=True)


def test_our_own_word_stands_when_we_have_renewed_since(place: Place) -> None:
    """A promise is repeated byte by byte, with the certificate that it was signed with."""
    promise = place.here.sign(SAID)
    newer = place.renewed("alpha", begins=datetime.now(UTC) + timedelta(seconds=2))
    place.verify(of(newer), past=True)
    place.verify(promise)


def test_of_a_vote_the_same_holds_but_we_are_reminded_of_our_own(place: Place) -> None:
    manifest = place.here.manifest
    body = pb.VoteBody(
        federation_id="med", round=1, parent_digest=bytes(32), model_digest=b"m" * 32,
        contributors=["alpha", "beta"], manifest_version=1, plan_digest=bytes(32), rules=2,
        manifest_digest=manifest.digest, statement_digest=b"s" * 32,
    )  # fmt: skip
    for site in ("alpha", "beta"):
        old = place.federation.identity(site)
        vote = sign_vote(partial(of, old), body, 0)
        newer = place.renewed(site, begins=datetime.now(UTC) + timedelta(seconds=2))
        place.here.verify(
            vote_payload(body, 1), of(newer, vote_payload(body, 1)), manifest, past=True
        )
        if site == "alpha":
            place.here.log(RETRIEVER).verify_vote(vote)
        else:
            with pytest.raises(CertificateError, match="has had a newer certificate"):
                place.here.log(RETRIEVER).verify_vote(vote)


def test_a_vote_of_one_log_counts_in_no_other(place: Place) -> None:
    """One key, one manifest, the same round: what names the log is in what is signed."""
    retriever, generator = place.here.log(RETRIEVER), place.here.log(GENERATOR)
    body = pb.VoteBody(
        federation_id=generator.log_id, round=1, parent_digest=bytes(32),
        model_digest=b"m" * 32, contributors=["alpha", "beta"], manifest_version=1,
        plan_digest=bytes(32), rules=2, manifest_digest=generator.manifest.digest,
        statement_digest=b"s" * 32,
    )  # fmt: skip
    vote = sign_vote(partial(of, place.federation.identity("beta")), body, 0)
    generator.verify_vote(vote)
    with pytest.raises(CertificateError, match=r"federation 'med\.generator', expected 'med'"):
        retriever.verify_vote(vote)
    vote.body.federation_id = "med"
    with pytest.raises(CertificateError):
        retriever.verify_vote(vote)


def test_a_log_goes_by_no_manifest_of_another(place: Place) -> None:
    signature = place.here.sign(SAID)
    retriever, generator = place.here.log(RETRIEVER), place.here.log(GENERATOR)
    generator.verify(SAID, signature, generator.manifest, past=False)
    with pytest.raises(CertificateError, match="another one"):
        generator.verify(SAID, signature, retriever.manifest, past=False)
    with pytest.raises(CertificateError, match="another one"):
        retriever.verify(SAID, signature, generator.manifest, past=False)


def test_what_is_remembered_is_bounded(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_SIGNATURES_AT_MOST", 5)
    monkeypatch.setattr(module, "_CERTIFICATES_AT_MOST", 1)
    for number in range(20):
        identity = place.federation.identity(("beta", "gamma")[number % 2])
        said = bytes([number])
        place.verify(of(identity, said), said=said)
    assert len(place.here._signatures._good) == 5
    assert len(place.here._signatures._signers) == 1


def test_manifests_between_are_kept_when_the_newest_is_adopted(place: Place) -> None:
    """A round goes over from one to the next, a step at a time."""
    store = Store(place.federation.root / "state.sqlite3")
    place.here.remember(store)
    steps = [
        place.federation.manifest(version=2, faulty_sites=1),
        place.federation.manifest(version=3, faulty_sites=1, disabled={"gamma"}),
    ]
    found = [(one, signed(one, place.federation.authority)) for one in steps]
    first = place.here.manifest
    place.here.adopt(found)
    assert place.here.manifest.version == 3
    assert [place.here.manifest_of(version) for version in (1, 2, 3)] == [first, *steps]
    in_force = ManifestInForce(first, place.here.manifest_of, None)
    assert in_force.install(place.here.manifest)
    store.close()
