"""Certificates and requests: how they are read, what they must look like, how they are built.

With authority.py, trust.py and identity.py the only home of ``cryptography.x509``; what
that raises leaves here as IdentityError. Everything is ECDSA on P-256 with SHA-256.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.x509.oid import ExtendedKeyUsageOID
from cryptography.x509.verification import VerificationError

from crypto.identity import MAX_DAYS, keys, names
from crypto.identity.keys import IdentityError, PrivateKey, PublicKey
from crypto.identity.names import tls_name

# Bounds of what is parsed: ours take about 600 bytes of DER, under 1 KiB of PEM.
MAX_DER = 4096
MAX_PEM = 16 * 1024
_END = b"-----END CERTIFICATE-----"
_CLOCK_SKEW = timedelta(minutes=5)  # a certificate made now is valid where clocks are behind

AUTHORITY_KEY, AUTHORITY_CERTIFICATE = "ca.key", "ca.crt"
SITE_KEY, SITE_REQUEST, SITE_CERTIFICATE = "site.key", "site.csr", "site.crt"

INIT_AUTHORITY = "name the folder that `fedctl ca init` made"
FOUND = "found the federation anew (`fedctl ca init`)"
INIT_SITE = "run `fedctl site init`"
INSTALL = "run `fedctl site install`"
RENEW = "ask for a new certificate (`fedctl ca sign` there, `fedctl site install` here)"

# What the library raises over foreign bytes: these have no base of their own in common.
LIBRARY_ERRORS = (
    *(ValueError, TypeError, UnsupportedAlgorithm, InvalidSignature, VerificationError),
    *(x509.InvalidVersion, x509.ExtensionNotFound),
    *(x509.DuplicateExtension, x509.UnsupportedGeneralNameType),
)
_Named = x509.Certificate | x509.CertificateSigningRequest


# ---- parsing and checks -----------------------------------------------------


def parse_certificate(raw: bytes) -> x509.Certificate:
    """One certificate, DER or PEM, read whole; raises IdentityError."""
    is_pem = raw.lstrip().startswith(b"-----BEGIN")
    check_size(raw, MAX_PEM if is_pem else MAX_DER, "a certificate")
    try:
        if is_pem:
            (certificate,) = x509.load_pem_x509_certificates(raw)
        else:
            certificate = x509.load_der_x509_certificate(raw)
        # Parsed on first use by the library: let it be here.
        _ = certificate.extensions, certificate.public_key()
        _ = certificate.subject, certificate.issuer
    except LIBRARY_ERRORS as error:
        raise IdentityError(f"expected one X.509 certificate ({error}): {RENEW}") from error
    check_size(der(certificate), MAX_DER, "a certificate")
    return certificate


def parse_certificates(pem: bytes, most: int) -> list[x509.Certificate]:
    """The certificates of a PEM file, 1 to ``most``, none twice; raises IdentityError."""
    check_size(pem, MAX_PEM, "a file of certificates")
    blocks = [block for block in pem.split(_END) if block.strip()]
    if not 1 <= len(blocks) <= most:
        raise IdentityError(f"expected 1 to {most} certificates in a file, not {len(blocks)}")
    certificates = [parse_certificate(block.lstrip() + _END + b"\n") for block in blocks]
    if len(set(certificates)) != len(certificates):
        raise IdentityError("a certificate is twice in the file: take the file anew")
    return certificates


def parse_request(pem: bytes) -> x509.CertificateSigningRequest:
    """A request (PEM) whose maker holds the key; raises IdentityError."""
    remedy = f"send the {SITE_REQUEST} that `fedctl site init` made"
    check_size(pem, MAX_PEM, "a certificate signing request")
    try:
        request = x509.load_pem_x509_csr(pem)
        proven = request.is_signature_valid
        keys.p256(request.public_key(), "the request")
        _ = request.extensions
    except LIBRARY_ERRORS as error:
        raise IdentityError(f"not a certificate signing request ({error}): {remedy}") from error
    if not proven:
        raise IdentityError(f"the request is not signed by the key that it is for: {remedy}")
    return request


def authority_federation(certificate: x509.Certificate) -> str:
    """The federation whose authority this names; raises IdentityError."""
    return names.federation_named(alternative_names(certificate, "the authority")[0])


def named_site(named: _Named, federation_id: str, what: str) -> str:
    """The site of this federation that is named, and nothing besides; raises IdentityError."""
    return names.site_named(*alternative_names(named, what), federation_id, what)


def alternative_names(named: _Named, what: str) -> tuple[list[str], list[str]]:
    """The URIs, and all other names as text."""
    try:
        alternatives = named.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound as error:
        raise IdentityError(
            f"{what} has no subject alternative name: make the request with `fedctl site init`"
        ) from error
    uri = x509.UniformResourceIdentifier
    others = [str(name.value) for name in alternatives if not isinstance(name, uri)]
    return alternatives.get_values_for_type(uri), others


def check_fits(key: PrivateKey, certificate: x509.Certificate, path: Path, remedy: str) -> None:
    """Raises IdentityError unless the certificate is for this key."""
    if key.public_key() != certificate.public_key():
        raise IdentityError(f"the certificate belongs to another key than {path}: {remedy}")


def check_window(certificate: x509.Certificate, at: datetime, what: str, remedy: str) -> None:
    """Raises IdentityError unless the certificate is valid at that moment."""
    start, end = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    if at > end:
        raise IdentityError(f"{what} expired on {end:%Y-%m-%d %H:%M} UTC: {remedy}")
    if at < start:
        raise IdentityError(
            f"{what} is not valid before {start:%Y-%m-%d %H:%M} UTC and it is {at:%Y-%m-%d %H:%M}: "
            f"correct this machine's clock, or {remedy}"
        )


def check_size(raw: bytes, limit: int, what: str) -> None:
    """Raises IdentityError unless there are 1 to ``limit`` bytes: before anything is parsed."""
    if not 0 < len(raw) <= limit:
        raise IdentityError(f"{what} has 1 to {limit} bytes, not {len(raw)}: get it again")


def validity(days: int, now: datetime | None) -> tuple[datetime, datetime]:
    """From a little before ``now`` for so many days; raises IdentityError out of bounds."""
    if not 1 <= days <= MAX_DAYS:
        raise IdentityError(f"a certificate is valid for 1 to {MAX_DAYS} days, not {days}")
    moment = now or datetime.now(UTC)
    return moment - _CLOCK_SKEW, moment + timedelta(days=days)


# ---- building blocks --------------------------------------------------------

# In the order of RFC 5280 §4.2.1.3, which is that of KeyUsage's arguments.
_USAGES = (
    *("digital_signature", "content_commitment", "key_encipherment", "data_encipherment"),
    *("key_agreement", "key_cert_sign", "crl_sign", "encipher_only", "decipher_only"),
)
BOTH_ENDS = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]


def builder(
    issuer: x509.Name,
    subject: x509.Name,
    issuer_key: PublicKey,
    subject_key: PublicKey,
    window: tuple[datetime, datetime],
) -> x509.CertificateBuilder:
    """What all certificates of ours have in common; ``window`` is their validity (UTC)."""
    identifier = x509.SubjectKeyIdentifier.from_public_key(subject_key)
    authority = x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key)
    return (
        x509.CertificateBuilder(issuer_name=issuer, subject_name=subject, public_key=subject_key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(window[0])
        .not_valid_after(window[1])
        .add_extension(identifier, critical=False)
        .add_extension(authority, critical=False)
    )


def subject(federation_id: str, name: str) -> x509.Name:
    """The distinguished name, which people read and nobody judges by."""
    return x509.Name.from_rfc4514_string(f"CN={name},O={federation_id}")  # both are checked ids


def site_names(federation_id: str, site_id: str) -> x509.SubjectAlternativeName:
    """The two names of a site."""
    uri = x509.UniformResourceIdentifier(names.site_uri(federation_id, site_id))
    return x509.SubjectAlternativeName([uri, x509.DNSName(tls_name(federation_id, site_id))])


def usage(*allowed: str) -> x509.KeyUsage:
    """A key usage that allows these and nothing else."""
    return x509.KeyUsage(*(usage in allowed for usage in _USAGES))


def pem(certificate: x509.Certificate) -> bytes:
    """As text."""
    return certificate.public_bytes(serialization.Encoding.PEM)


def der(certificate: x509.Certificate) -> bytes:
    """As bytes."""
    return certificate.public_bytes(serialization.Encoding.DER)
