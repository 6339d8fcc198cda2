"""A small federation on disk, and the certificates and requests that an attacker would make."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID

from crypto.identity.authority import create_authority, sign_request
from crypto.identity.keys import IdentityError
from crypto.identity.site import Identity, create_site, install
from crypto.identity.trust import Trust
from peers.wire.certificates import CertificateError
from peers.wire.manifest import FederationManifest
from proto import federation_pb2 as pb

NOW = datetime.now(UTC) + timedelta(hours=1)  # later than what a slow run makes
DAY = timedelta(days=1)

Name = x509.GeneralName
URI = x509.UniformResourceIdentifier("hanse://med/site/mallory")
DNS = x509.DNSName("mallory.med.hanse.internal")


@dataclass(frozen=True)
class Federation:
    """An authority and two enrolled sites, on disk."""

    authority: Path
    alpha_dir: Path
    alpha: Identity
    beta: Identity
    trust: Trust


@dataclass(frozen=True)
class IdentityKeys:
    """A site's real key as the round protocol has it; certificates are verified ``at`` a moment."""

    identity: Identity
    trust: Trust
    at: datetime

    def sign(self, payload: bytes) -> pb.Signature:
        return pb.Signature(
            site=self.identity.site_id,
            signature=self.identity.sign(payload),
            certificate=self.identity.certificate_der,
        )

    def verify(
        self, payload: bytes, signature: pb.Signature, manifest: FederationManifest, *, past: bool
    ) -> None:
        if not manifest.enabled(signature.site):
            raise CertificateError(f"{signature.site} is not enabled")
        at = None if past else self.at
        try:
            signer = self.trust.verify(signature.certificate, signature.signature, payload, at=at)
        except IdentityError as error:
            raise CertificateError(f"the signature of {signature.site}: {error}") from error
        if signer != signature.site:
            raise CertificateError(f"{signer} signed in the name of {signature.site}")


def found(root: Path) -> Federation:
    """A fresh federation "med" of alpha and beta, under ``root``."""
    create_authority(root / "ca", "med")
    alpha, beta = enrol(root, "alpha"), enrol(root, "beta")
    trust = Trust.from_pem(alpha.authority_pem)
    return Federation(root / "ca", root / "alpha", alpha, beta, trust)


def enrol(root: Path, site: str, federation: str = "med") -> Identity:
    """A site as its people would enrol it: key, request, certificate, installed."""
    create_site(root / site, federation, site)
    request = (root / site / "site.csr").read_bytes()
    certificate = sign_request(root / "ca", request, expect_site=site)
    install(root / site, certificate, (root / "ca" / "ca.crt").read_bytes())
    return load(root / site)


def load(folder: Path, now: datetime | None = None) -> Identity:
    """What fedd loads at its start."""
    return Identity.load(folder / "site.crt", folder / "site.key", folder / "ca.crt", now=now)


def forged_certificate(
    authority: Path,
    names: list[Name] | None = None,
    *,
    usage: x509.ObjectIdentifier = ExtendedKeyUsageOID.CLIENT_AUTH,
    is_authority: bool = False,
    public_key: ec.EllipticCurvePublicKey | rsa.RSAPublicKey | None = None,
) -> bytes:
    """What a stolen or careless authority could sign: a good signature over wrong contents."""
    issuer = x509.load_pem_x509_certificate((authority / "ca.crt").read_bytes())
    key = serialization.load_pem_private_key((authority / "ca.key").read_bytes(), None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    public_key = public_key or ec.generate_private_key(ec.SECP256R1()).public_key()
    path_length = 0 if is_authority else None
    builder = (
        x509.CertificateBuilder(issuer.subject, issuer.subject, public_key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(NOW - DAY)
        .not_valid_after(NOW + DAY)
        .add_extension(x509.BasicConstraints(is_authority, path_length), True)
        .add_extension(x509.ExtendedKeyUsage([usage]), False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(key.public_key()), False)
    )
    if names:
        builder = builder.add_extension(x509.SubjectAlternativeName(names), False)
    return builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.DER)


def forged_request(names: list[Name], key: ec.EllipticCurvePrivateKey | None = None) -> bytes:
    """A request that asks for whatever names it likes."""
    key = key or ec.generate_private_key(ec.SECP256R1())
    builder = x509.CertificateSigningRequestBuilder(x509.Name([]))
    if names:
        builder = builder.add_extension(x509.SubjectAlternativeName(names), False)
    return builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


def self_signed(name: x509.GeneralName, constraints: x509.BasicConstraints) -> bytes:
    """An authority of the attacker's own making, as PEM."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name.from_rfc4514_string("CN=authority")
    return (
        x509.CertificateBuilder(subject, subject, key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(NOW - DAY)
        .not_valid_after(NOW + DAY)
        .add_extension(constraints, True)
        .add_extension(x509.SubjectAlternativeName([name]), False)
        .sign(key, hashes.SHA256())
        .public_bytes(serialization.Encoding.PEM)
    )
