"""An authority follows another, or was made elsewhere: who is believed, when, and who is not."""

from __future__ import annotations

import peers.link.tls13  # noqa: F401  before anything imports grpc

# isort: split
import json
import shutil
import subprocess
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa

from crypto.identity.authority import (
    adopt_authority,
    create_authority,
    rotate_authority,
    sign_request,
)
from crypto.identity.keys import IdentityError
from crypto.identity.site import Identity, install, renew_site
from crypto.identity.trust import Trust
from daemon.fedctl.main import main as fedctl
from peers.wire.certificates import sign_vote, verify_certificate
from peers.wire.errors import PeerUnreachable
from peers.wire.manifest import ManifestError, parse_signed, signed
from proto import federation_pb2 as pb
from tests.support.authority import Federation, signer
from tests.support.loopback import hint, running

NOW = datetime.now(UTC) + timedelta(hours=1)  # later than what a slow run makes
DAY = timedelta(days=1)


@dataclass
class Rotated:
    """A federation whose authority has been followed; no site has heard of it yet."""

    federation: Federation
    new: Path

    @property
    def bundle(self) -> bytes:
        return (self.new / "ca.crt").read_bytes()

    def tell(self, site: str) -> Identity:
        """The site's people install the new ca.crt with the certificate that they have."""
        folder = self.federation.root / site
        install(folder, (folder / "site.crt").read_bytes(), self.bundle)
        return self.federation.identity(site)

    def renew(self, site: str) -> Identity:
        """A certificate of the new authority."""
        folder = self.federation.root / site
        renew_site(folder, new_key=False)
        request = (folder / "site.csr").read_bytes()
        install(folder, sign_request(self.new, request, expect_site=site), self.bundle)
        return self.federation.identity(site)


@pytest.fixture
def rotated(tmp_path: Path) -> Rotated:
    federation = Federation.found(tmp_path, "alpha", "beta")
    rotate_authority(federation.authority, tmp_path / "new", window_days=60)
    return Rotated(federation, tmp_path / "new")


# ---- rotation ------------------------------------------------------------------


async def test_sites_of_both_authorities_talk_while_they_change_over(rotated: Rotated) -> None:
    federation = rotated.federation
    alpha, beta = rotated.tell("alpha"), rotated.renew("beta")
    assert alpha.certificate_pem != beta.certificate_pem
    async with (
        running(federation, "alpha", identity=alpha) as old,
        running(federation, "beta", identity=beta) as new,
    ):
        for site in (old, new):  # `running` begins with the old ca.crt: as before the reload
            site.transport.reload(site.identity, federation.manifest(version=2))
        await old.transport.send("beta", hint("alpha"))
        await new.transport.send("alpha", hint("beta"))
        assert old.inbox.messages
        assert new.inbox.messages


async def test_a_site_that_was_not_told_does_not_believe_the_new_authority(
    rotated: Rotated,
) -> None:
    federation = rotated.federation
    untold, beta = federation.identity("alpha"), rotated.renew("beta")
    async with (
        running(federation, "alpha", identity=untold) as old,
        running(federation, "beta", identity=beta) as new,
    ):
        new.transport.reload(beta, federation.manifest(version=2))
        for site, to in ((old, "beta"), (new, "alpha")):
            with pytest.raises(PeerUnreachable):
                await site.transport.hello(to)


def test_a_manifest_of_either_authority_is_good_within_the_window(rotated: Rotated) -> None:
    trust = Trust.from_pem(rotated.bundle)
    manifest = rotated.federation.manifest(version=2)
    after = NOW + 61 * DAY
    for authority in (rotated.federation.authority, rotated.new):
        assert parse_signed(signed(manifest, authority), trust, at=NOW) == manifest
    by_old = signed(manifest, rotated.federation.authority)
    with pytest.raises(ManifestError, match="not signed by this federation's authority"):
        parse_signed(by_old, trust, at=after)
    assert parse_signed(by_old, trust) == manifest, "as history it stays good"
    assert parse_signed(signed(manifest, rotated.new), trust, at=after) == manifest


def test_after_the_window_the_old_authoritys_sites_are_refused(rotated: Rotated) -> None:
    trust = Trust.from_pem(rotated.bundle)
    old, new = rotated.federation.identity("alpha"), rotated.renew("beta")
    assert trust.site_of(old.certificate_der, at=NOW + 59 * DAY) == "alpha"
    with pytest.raises(IdentityError, match="an authority that another one followed"):
        trust.site_of(old.certificate_der, at=NOW + 61 * DAY)
    assert trust.site_of(new.certificate_der, at=NOW + 61 * DAY) == "beta"
    assert trust.roots(NOW).count(b"BEGIN") == 2
    assert trust.roots(NOW + 61 * DAY).count(b"BEGIN") == 1
    # So a site is warned of the day on which it is shut out, not of its certificate's own end.
    assert rotated.tell("alpha").not_after < NOW + 61 * DAY


def test_votes_of_earlier_rounds_verify_after_a_rotation(rotated: Rotated) -> None:
    federation = rotated.federation
    voters = {site: federation.identity(site) for site in ("alpha", "beta")}
    body = pb.VoteBody(
        federation_id="med",
        round=1,
        parent_digest=bytes(32),
        model_digest=b"m" * 32,
        contributors=sorted(voters),
        manifest_version=1,
        plan_digest=bytes(32),
    )
    certificate = pb.Certificate(body=body)
    for identity in voters.values():
        certificate.votes.append(sign_vote(signer(identity), body, 0))
    manifest = federation.manifest()
    verify_certificate(certificate, Trust.from_pem(rotated.bundle), manifest, at=None)
    create_authority(federation.root / "alone", "med")
    alone = Trust.from_pem((federation.root / "alone" / "ca.crt").read_bytes())
    with pytest.raises(Exception, match="not issued by this federation's authority"):
        verify_certificate(certificate, alone, manifest, at=None)


def test_an_authority_may_be_followed_more_than_once(rotated: Rotated, tmp_path: Path) -> None:
    rotate_authority(rotated.new, tmp_path / "newer", window_days=30)
    trust = Trust.from_pem((tmp_path / "newer" / "ca.crt").read_bytes())
    alpha, beta = rotated.federation.identity("alpha"), rotated.renew("beta")
    assert {trust.site_of(one.certificate_der, at=NOW) for one in (alpha, beta)} == {
        "alpha",
        "beta",
    }
    assert trust.roots(NOW).count(b"BEGIN") == 3


# ---- who may not follow ----------------------------------------------------------


def test_an_authority_that_the_old_one_does_not_vouch_for_is_not_installed(
    rotated: Rotated, tmp_path: Path
) -> None:
    """Its own bundle with the old authority's certificate copied behind it, or none at all."""
    create_authority(tmp_path / "impostor", "med")
    impostor = (tmp_path / "impostor" / "ca.crt").read_bytes()
    old = (rotated.federation.authority / "ca.crt").read_bytes()
    with pytest.raises(IdentityError, match="does not vouch for the later one"):
        Trust.from_pem(impostor + old)
    end = b"-----END CERTIFICATE-----\n"
    cross = rotated.bundle.split(end)[1] + end  # vouches for another key than the impostor's
    with pytest.raises(IdentityError, match="what issued it is not in the file"):
        Trust.from_pem(impostor + cross + old)
    folder = rotated.federation.root / "alpha"
    request = (folder / "site.csr").read_bytes()
    with pytest.raises(IdentityError, match="another authority than the one given"):
        install(folder, sign_request(tmp_path / "impostor", request), impostor)


def test_who_has_the_new_authority_does_not_go_back_to_the_old_one(rotated: Rotated) -> None:
    rotated.renew("beta")
    folder = rotated.federation.root / "beta"
    request = (folder / "site.csr").read_bytes()
    old = rotated.federation.authority
    with pytest.raises(IdentityError, match="another authority than the one given"):
        install(folder, sign_request(old, request), (old / "ca.crt").read_bytes())


def test_a_federation_is_not_followed_by_another(rotated: Rotated, tmp_path: Path) -> None:
    create_authority(tmp_path / "other", "other")
    with pytest.raises(IdentityError, match="an authority is followed by one of its own"):
        rotate_authority(rotated.federation.authority, tmp_path / "other")
    with pytest.raises(IdentityError, match="follows an authority already"):
        rotate_authority(rotated.federation.authority, rotated.new)


def test_what_belongs_to_no_authority_is_not_carried_along(rotated: Rotated) -> None:
    for stray in (rotated.federation.identity("alpha").certificate_pem, rotated.bundle):
        with pytest.raises(IdentityError):
            Trust.from_pem(rotated.bundle + stray)
    root, _ = made("root", None, path_length=1)
    with pytest.raises(IdentityError, match="belong to none of them"):
        Trust.from_pem(rotated.bundle + pem(root))


# ---- an authority of your own -------------------------------------------------------


Key = ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey
NAME = "hanse://med/authority"


def made(
    name: str,
    issuer: tuple[x509.Certificate, Key] | None,
    *,
    uri: str | None = None,
    path_length: int | None = 0,
    key: Key | None = None,
    ca: bool = True,
    usage: tuple[bool, bool] = (True, True),
    days: int = 1000,
) -> tuple[x509.Certificate, Key]:
    """A certificate as an institution's PKI would make it; ``usage``: (signs, certifies)."""
    key = key or ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name.from_rfc4514_string(f"CN={name}")
    above, signer = issuer or (None, key)
    builder = (
        x509.CertificateBuilder(above.subject if above else subject, subject, key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(NOW - 10 * DAY)
        .not_valid_after(NOW + days * DAY)
        .add_extension(x509.BasicConstraints(ca, path_length if ca else None), True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), False
        )
        .add_extension(
            x509.KeyUsage(usage[0], False, False, False, False, usage[1], usage[1], False, False),
            True,
        )
    )
    if uri is not None:
        builder = builder.add_extension(
            x509.SubjectAlternativeName([x509.UniformResourceIdentifier(uri)]), False
        )
    return builder.sign(signer, hashes.SHA256()), key


def pem(*certificates: x509.Certificate) -> bytes:
    return b"".join(c.public_bytes(serialization.Encoding.PEM) for c in certificates)


def kept(path: Path, key: Key, mode: int = 0o600) -> Path:
    path.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    path.chmod(mode)
    return path


async def test_sites_under_an_intermediate_authority_of_an_institution_talk(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root, root_key = made("Institution Root", None, path_length=2)
    middle, middle_key = made("Institution CA", (root, root_key), path_length=1)
    ours, key = made("Canals", (middle, middle_key), uri=NAME)
    (tmp_path / "chain.pem").write_bytes(pem(ours, middle, root))
    words = ["ca", "adopt", tmp_path / "ca", "--federation", "med", "--json"]
    files = ["--certificate", tmp_path / "chain.pem", "--key", kept(tmp_path / "k", key)]
    assert fedctl([str(word) for word in (*words, *files)]) == 0
    assert json.loads(capsys.readouterr().out)["federation"] == "med"
    federation = Federation(tmp_path, "med", {"alpha": 0, "beta": 0})
    from tests.support.authority import free_port

    for site in federation.ports:
        federation.ports[site] = free_port()
        federation.enrol(site)
    async with running(federation, "alpha") as alpha, running(federation, "beta") as beta:
        await alpha.transport.send("beta", hint("alpha"))
        assert beta.inbox.messages == [("alpha", hint("alpha"))]

    # Whoever else the institution's root has certified stays outside.
    stranger, _ = made("beta", (root, root_key), ca=False, uri="hanse://med/site/beta")
    with pytest.raises(IdentityError, match="not issued by this federation's authority"):
        federation.trust.site_of(pem(stranger), at=NOW)


ROOT = made("Institution Root", None, path_length=1)
REFUSED = {
    "no URI": (made("x", ROOT), "has no subject alternative name"),
    "another URI": (made("x", ROOT, uri="https://med"), r"the authority names"),
    "another federation": (made("x", ROOT, uri="hanse://other/authority"), "federation 'other'"),
    "may make authorities": (made("x", ROOT, uri=NAME, path_length=1), "path length 0"),
    "any path length": (made("x", ROOT, uri=NAME, path_length=None), "path length 0"),
    "no authority": (made("x", ROOT, uri=NAME, ca=False), "path length 0"),
    "may not certify": (made("x", ROOT, uri=NAME, usage=(True, False)), "keyCertSign"),
    "may not sign": (made("x", ROOT, uri=NAME, usage=(False, True)), "digitalSignature"),
    "expired": (made("x", ROOT, uri=NAME, days=-1), "the authority expired"),
    "RSA": (
        made("x", ROOT, uri=NAME, key=rsa.generate_private_key(65537, 2048)),
        "the key of the authority is not P-256",
    ),
    "P-384": (
        made("x", ROOT, uri=NAME, key=ec.generate_private_key(ec.SECP384R1())),
        "the key of the authority is not P-256",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_ones_own_authority_that_is_not_fit_is_refused_with_the_reason(
    tmp_path: Path, what: str
) -> None:
    (certificate, key), reason = REFUSED[what]
    with pytest.raises(IdentityError, match=reason):
        adopt_authority(
            tmp_path / "ca", "med", pem(certificate, ROOT[0]), kept(tmp_path / "key", key)
        )
    assert not (tmp_path / "ca").exists()


def test_an_intermediate_authority_needs_what_issued_it_and_its_own_key(tmp_path: Path) -> None:
    certificate, key = made("x", ROOT, uri=NAME)
    with pytest.raises(IdentityError, match="what issued it is not in the file"):
        adopt_authority(tmp_path / "ca", "med", pem(certificate), kept(tmp_path / "key", key))
    other = kept(tmp_path / "other", ROOT[1])
    with pytest.raises(IdentityError, match="belongs to another key"):
        adopt_authority(tmp_path / "ca", "med", pem(certificate, ROOT[0]), other)
    lies_open = kept(tmp_path / "open", key, mode=0o644)
    with pytest.raises(IdentityError, match="others may read the private key"):
        adopt_authority(tmp_path / "ca", "med", pem(certificate, ROOT[0]), lies_open)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs the openssl command")
def test_the_documented_openssl_commands_make_a_fit_authority(tmp_path: Path) -> None:
    text = (Path(__file__).parents[3] / "docs" / "fedctl.md").read_text()
    commands = next(b for b in text.split("```") if b.strip().startswith("openssl ecparam"))
    root = (
        "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes "
        "-keyout root.key -out root.crt -days 3650 -subj '/CN=Institution Root'"
    )
    for script in (root, commands):
        subprocess.run(
            ["bash", "-ec", script], cwd=tmp_path, check=True, capture_output=True, timeout=60
        )
    chain = (tmp_path / "chain.pem").read_bytes()
    adopt_authority(tmp_path / "ca", "trade", chain, tmp_path / "ca.key")
    assert Trust.from_pem((tmp_path / "ca" / "ca.crt").read_bytes()).federation_id == "trade"


def test_a_federation_changes_over_to_an_authority_of_its_own(tmp_path: Path) -> None:
    create_authority(tmp_path / "old", "med")
    certificate, key = made("x", ROOT, uri=NAME)
    adopt_authority(tmp_path / "new", "med", pem(certificate, ROOT[0]), kept(tmp_path / "k", key))
    words = ["ca", "rotate", tmp_path / "old", tmp_path / "new", "--window", "30"]
    assert fedctl([str(word) for word in words]) == 0
    trust = Trust.from_pem((tmp_path / "new" / "ca.crt").read_bytes())
    assert trust.knows((tmp_path / "old" / "ca.crt").read_bytes())
