"""Who is who: one certificate authority per federation, one key per site.

The authority signs two kinds of things: a site's certificate, once a year or
so, and the federation manifest. It is a folder that its keeper may hold
offline. A site's private key is made at the site and never leaves it; what
travels is a certificate signing request.

A site is named in its certificate twice: as the URI
``hanse://<federation>/site/<site>``, from which we read who speaks, and as the
DNS name ``<site>.<federation>.hanse.internal``, which TLS checks against the
site we meant to call. Both are written by the authority, never copied from the
request.

Everything is ECDSA on P-256 with SHA-256. This is the only home of
``cryptography.x509``; what that raises leaves here as IdentityError.
"""

from __future__ import annotations

import hashlib
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from functools import cached_property
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.x509.oid import ExtendedKeyUsageOID
from cryptography.x509.verification import PolicyBuilder, Store, VerificationError

from crypto import keys, names
from crypto.keys import IdentityError, PrivateKey, PublicKey, read_bounded, write_new
from crypto.names import check_id, tls_name

__all__ = [
    "Identity",
    "IdentityError",
    "Trust",
    "create_authority",
    "create_site",
    "install",
    "renew_site",
    "sign_request",
    "sign_with_authority",
    "tls_name",
]

# Bounds of what is parsed: ours take about 600 bytes of DER, under 1 KiB of PEM.
_MAX_DER = 4096
_MAX_PEM = 16 * 1024
_MAX_DAYS = 20 * 366
_LONGEST_ATTEMPT = timedelta(days=1)  # [rounds] train_deadline_s is at most that
_GENERATIONS = 3  # renewals within that time
_CLOCK_SKEW = timedelta(minutes=5)  # a certificate made now is valid where clocks are behind

_AUTHORITY_KEY, _AUTHORITY_CERTIFICATE = "ca.key", "ca.crt"
_SITE_KEY, _SITE_REQUEST, _SITE_CERTIFICATE = "site.key", "site.csr", "site.crt"

_INIT_AUTHORITY = "name the folder that `fedctl ca init` made"
_FOUND = "found the federation anew (`fedctl ca init`)"
_INIT_SITE = "run `fedctl site init`"
_INSTALL = "run `fedctl site install`"
_RENEW = "ask for a new certificate (`fedctl ca sign` there, `fedctl site install` here)"

# What the library raises over foreign bytes: these have no base of their own in common.
_LIBRARY_ERRORS = (
    *(ValueError, TypeError, UnsupportedAlgorithm, InvalidSignature, VerificationError),
    *(x509.InvalidVersion, x509.ExtensionNotFound),
    *(x509.DuplicateExtension, x509.UnsupportedGeneralNameType),
)
_Named = x509.Certificate | x509.CertificateSigningRequest


# ---- the authority ----------------------------------------------------------


def create_authority(
    directory: Path, federation_id: str, *, days: int = 3650, now: datetime | None = None
) -> None:
    """Make a federation's authority: ``ca.key`` (0600) and ``ca.crt``, valid for ``days``.

    Raises IdentityError when there is one already in the folder.
    """
    check_id(federation_id, "federation id")
    start, end = _validity(days, now)
    key = keys.new_key()
    subject = _subject(federation_id, "Hanse federation authority")
    uri = x509.UniformResourceIdentifier(names.authority_uri(federation_id))
    certificate = (
        _builder(subject, subject, key.public_key(), key.public_key(), (start, end))
        .add_extension(x509.SubjectAlternativeName([uri]), critical=False)
        # Path length 0: it signs sites, and no site can sign another.
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        # digitalSignature: it also signs the manifest.
        .add_extension(_usage("digital_signature", "key_cert_sign", "crl_sign"), critical=True)
        .sign(key, hashes.SHA256())
    )
    remedy = "this folder holds an authority already; choose another folder"
    write_new(directory / _AUTHORITY_KEY, keys.key_pem(key), 0o600, remedy=remedy)
    write_new(directory / _AUTHORITY_CERTIFICATE, _pem(certificate), 0o644, remedy=remedy)


def sign_request(
    authority: Path,
    request_pem: bytes,
    *,
    expect_site: str | None = None,
    days: int = 365,
    now: datetime | None = None,
) -> bytes:
    """A certificate (PEM) for the site that a request names.

    The request proves that its maker holds the key, and nothing else: whoever
    runs this must know, from a channel they trust, whose request it is, and
    say so with ``expect_site``. Names are written anew; a request that asks for
    other names than its own is refused. Never valid beyond the authority itself.
    """
    issuer, issuer_key = _load_authority(authority)
    trust = Trust.from_pem(_pem(issuer))
    _check_window(issuer, now or datetime.now(UTC), "the authority", _FOUND)
    request = _parse_request(request_pem)
    site_id = _named_site(request, trust.federation_id, "the request")
    if expect_site is not None and site_id != expect_site:
        raise IdentityError(
            f"the request is for site {site_id!r}, expected {expect_site!r}: ask that site for "
            f"its own {_SITE_REQUEST} (`fedctl site init`)"
        )
    start, end = _validity(days, now)
    start = max(start, issuer.not_valid_before_utc)
    end = min(end, issuer.not_valid_after_utc)
    certificate = (
        _builder(
            issuer.subject,
            _subject(trust.federation_id, site_id),
            issuer_key.public_key(),
            keys.p256(request.public_key(), "the request"),
            (start, end),
        )
        .add_extension(_site_names(trust.federation_id, site_id), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        # keyAgreement: round keys are sealed for this key.
        .add_extension(_usage("digital_signature", "key_agreement"), critical=True)
        .add_extension(x509.ExtendedKeyUsage(_BOTH_ENDS), critical=False)
        .sign(issuer_key, hashes.SHA256())
    )
    trust.site_of(_der(certificate), at=None)  # what is signed here, every site accepts
    return _pem(certificate)


def sign_with_authority(authority: Path, payload: bytes) -> bytes:
    """The authority's ECDSA P-256 SHA-256 signature (DER) over a payload."""
    return keys.sign(_load_authority(authority)[1], payload)


def _load_authority(directory: Path) -> tuple[x509.Certificate, PrivateKey]:
    path = directory / _AUTHORITY_CERTIFICATE
    certificate = _parse_authority(read_bounded(path, _MAX_PEM, remedy=_INIT_AUTHORITY))
    path = directory / _AUTHORITY_KEY
    key = keys.read_key(path, _INIT_AUTHORITY)
    _check_fits(key, certificate, path, _INIT_AUTHORITY)
    return certificate, key


# ---- a site -----------------------------------------------------------------


def create_site(directory: Path, federation_id: str, site_id: str) -> None:
    """Make a site's key (``site.key``, 0600, never overwritten) and its ``site.csr``."""
    check_id(federation_id, "federation id")
    check_id(site_id, "site id")
    key = keys.new_key()
    remedy = f"to start anew, move it away and {_INIT_SITE} again"
    write_new(directory / _SITE_KEY, keys.key_pem(key), 0o600, remedy=remedy)
    keys.replace(directory / _SITE_REQUEST, _request(key, federation_id, site_id), 0o644)


def renew_site(directory: Path, *, new_key: bool) -> None:
    """Write a new ``site.csr`` for an enrolled site: for its key, or for a new one.

    The new key waits beside the old one as ``site.key.next`` (0600), which the running
    daemon does not touch; `install` puts it in the old one's place, together with its
    certificate. An expired certificate can be renewed, too.
    """
    path = directory / _SITE_KEY
    key = keys.read_key(path, _INIT_SITE)
    old = read_bounded(directory / _SITE_CERTIFICATE, _MAX_PEM, remedy=_INSTALL)
    authority = read_bounded(directory / _AUTHORITY_CERTIFICATE, _MAX_PEM, remedy=_INSTALL)
    trust = Trust.from_pem(authority)
    site_id = trust.site_of(old, at=None)
    if new_key:
        key = keys.new_key()
        remedy = (
            "a renewal is under way: install its certificate, or remove that file to start anew"
        )
        write_new(_next(path), keys.key_pem(key), 0o600, remedy=remedy)
    keys.replace(directory / _SITE_REQUEST, _request(key, trust.federation_id, site_id), 0o644)


def _request(key: PrivateKey, federation_id: str, site_id: str) -> bytes:
    request = (
        x509.CertificateSigningRequestBuilder()
        .subject_name(_subject(federation_id, site_id))
        .add_extension(_site_names(federation_id, site_id), critical=False)
        .sign(key, hashes.SHA256())
    )
    return request.public_bytes(serialization.Encoding.PEM)


def _next(key: Path) -> Path:
    return key.with_name(f"{key.name}.next")


def _key_of(certificate: x509.Certificate, path: Path, remedy: str) -> tuple[PrivateKey, Path]:
    """The key of this certificate: that in ``path``, or one that waits beside it.

    A crash between the two steps of `install` leaves the certificate of the new key
    beside the old key; so the new one is looked for, too.
    """
    key, waiting = keys.read_key(path, _INIT_SITE), _next(path)
    if key.public_key() != certificate.public_key() and waiting.exists():
        new = keys.read_key(waiting, remedy)
        if new.public_key() == certificate.public_key():
            return new, waiting
    _check_fits(key, certificate, path, remedy)
    return key, path


def install(
    directory: Path, certificate_pem: bytes, authority_pem: bytes, *, now: datetime | None = None
) -> None:
    """Put ``site.crt`` and ``ca.crt`` beside a site's key, after every check a peer would make.

    Raises IdentityError when the certificate does not fit the key, the request
    or the authority, or when another authority is already installed: who
    exchanges the authority decides whom this site believes.
    """
    trust = Trust.from_pem(authority_pem)
    site_id = trust.site_of(certificate_pem, at=now or datetime.now(UTC))
    certificate = _parse_certificate(certificate_pem)
    site_key = directory / _SITE_KEY
    _, key_path = _key_of(certificate, site_key, f"have this site's own {_SITE_REQUEST} signed")
    request = _parse_request(read_bounded(directory / _SITE_REQUEST, _MAX_PEM, remedy=_INIT_SITE))
    asked = _named_site(request, trust.federation_id, "the request")
    if asked != site_id:
        raise IdentityError(
            f"the certificate is for site {site_id!r}, expected {asked!r} as in {_SITE_REQUEST}: "
            "have that request signed (`fedctl ca sign`)"
        )
    path = directory / _AUTHORITY_CERTIFICATE
    if path.exists():
        installed = _parse_authority(read_bounded(path, _MAX_PEM, remedy=_INSTALL))
        if _pem(installed) != trust.authority_pem:
            raise IdentityError(
                f"{path} is another authority than the one given: to join another federation, "
                f"{_INIT_SITE} in a new folder"
            )
    keys.replace(path, trust.authority_pem, 0o644)
    keys.replace(directory / _SITE_CERTIFICATE, _pem(certificate), 0o644)
    if key_path != site_key:  # behind the certificate: `_key_of` knows what a crash here leaves
        keys.rename(key_path, site_key)


@dataclass(frozen=True)
class Identity:
    """What a site proves itself with. The key is in memory; it is never printed."""

    site_id: str
    federation_id: str
    certificate_pem: bytes = field(repr=False)
    certificate_der: bytes = field(repr=False)
    key_pem: bytes = field(repr=False)
    authority_pem: bytes = field(repr=False)
    not_after: datetime  # UTC
    # Certificates that this site had before, and until when they are good for unsealing.
    earlier: tuple[tuple[datetime, Identity], ...] = field(default=(), repr=False, compare=False)

    @classmethod
    def load(
        cls, certificate: Path, key: Path, authority: Path, *, now: datetime | None = None
    ) -> Identity:
        """Read and check the three files of a site.

        Raises IdentityError when a file is missing, too large or damaged, the
        key is readable by others or belongs to another certificate, or peers
        would refuse the certificate at ``now`` (default: this machine's clock).
        """
        trust = Trust.from_pem(read_bounded(authority, _MAX_PEM, remedy=_INSTALL))
        pem = read_bounded(certificate, _MAX_PEM, remedy=_INSTALL)
        site_id = trust.site_of(pem, at=now or datetime.now(UTC))
        parsed = _parse_certificate(pem)
        private_key, _ = _key_of(parsed, key, _RENEW)
        return cls(
            site_id=site_id,
            federation_id=trust.federation_id,
            certificate_pem=_pem(parsed),
            certificate_der=_der(parsed),
            key_pem=keys.key_pem(private_key),
            authority_pem=trust.authority_pem,
            not_after=parsed.not_valid_after_utc,
        )

    def following(self, before: Identity, *, now: datetime | None = None) -> Identity:
        """This identity, which can also unseal what peers sealed for the one before it.

        Peers seal a round's key for the certificate that a site had when the attempt
        began. So a renewal in the middle of an attempt costs nothing, for as long as an
        attempt may take (a day). Signing and TLS go by the new certificate at once.
        """
        moment = now or datetime.now(UTC)
        if before.certificate_der == self.certificate_der:
            kept = before.earlier
        else:
            kept = ((moment + _LONGEST_ATTEMPT, replace(before, earlier=())), *before.earlier)
        good = tuple((until, old) for until, old in kept if until > moment)
        return replace(self, earlier=good[:_GENERATIONS])

    @cached_property
    def _key(self) -> PrivateKey:
        return keys.parse_key(self.key_pem, Path(_SITE_KEY))

    def sign(self, payload: bytes) -> bytes:
        """ECDSA P-256 SHA-256 signature (DER, at most 80 bytes); begin payloads with their kind."""
        return keys.sign(self._key, payload)

    def unseal(self, sealed: bytes, associated: bytes) -> bytes:
        """The plaintext of what a peer sealed with `Trust.seal_for` for this certificate.

        Or for one that it followed (see `following`). Raises IdentityError when it was
        sealed for another certificate or with other associated bytes, or was changed:
        which of these cannot be told.
        """
        try:
            return keys.unseal(self._key, sealed, _seal_context(self.certificate_der, associated))
        except IdentityError:
            now = datetime.now(UTC)
            for until, old in self.earlier:
                if now < until:
                    with suppress(IdentityError):
                        return old.unseal(sealed, associated)
            raise


# ---- what a site believes ---------------------------------------------------


@dataclass(frozen=True)
class Trust:
    """A federation's authority as its sites know it: it tells whom a certificate names."""

    authority_pem: bytes = field(repr=False)
    federation_id: str

    @classmethod
    def from_pem(cls, authority_pem: bytes) -> Trust:
        """From the authority's certificate; raises IdentityError when it is not one."""
        authority = _parse_authority(authority_pem)
        return cls(_pem(authority), _authority_federation(authority))

    @cached_property
    def _authority(self) -> x509.Certificate:
        return _parse_authority(self.authority_pem)

    @property
    def not_after(self) -> datetime:
        """Until when the authority's certificate is valid (UTC)."""
        return self._authority.not_valid_after_utc

    def site_of(self, certificate: bytes, *, at: datetime | None) -> str:
        """The site that a certificate (DER or PEM) names.

        ``at`` is the moment (with time zone) at which it must be valid; None
        accepts one that was valid at any time, for votes of long ago. Raises
        IdentityError for a wrong authority, moment, federation, name or form.
        """
        return self._verified(certificate, at)[0]

    def verify(
        self, certificate: bytes, signature: bytes, payload: bytes, *, at: datetime | None
    ) -> str:
        """The site that signed ``payload``; raises IdentityError as `site_of`, or if none did."""
        site_id, key = self._verified(certificate, at)
        keys.check_signature(key, signature, payload, f"site {site_id!r}")
        return site_id

    def verify_authority(self, signature: bytes, payload: bytes) -> None:
        """Raises IdentityError unless the authority itself signed ``payload``."""
        key = keys.p256(self._authority.public_key(), "the authority")
        keys.check_signature(key, signature, payload, f"the authority of {self.federation_id!r}")

    def seal_for(self, certificate: bytes, plaintext: bytes, associated: bytes) -> bytes:
        """Encrypt so that only the site of this certificate can read it (see `keys.seal`).

        Bound to the certificate's digest and to ``associated``, which says who
        seals, for whom and for which attempt; the recipient must know it too.
        It does not prove who sealed: the connection that it arrives on does.
        """
        _, key = self._verified(certificate, None)
        der = _der(_parse_certificate(certificate))
        return keys.seal(key, plaintext, _seal_context(der, associated))

    def _verified(self, certificate: bytes, at: datetime | None) -> tuple[str, PublicKey]:
        parsed, authority = _parse_certificate(certificate), self._authority
        try:
            parsed.verify_directly_issued_by(authority)
        except _LIBRARY_ERRORS as error:
            raise IdentityError(
                "the certificate was not issued by this federation's authority "
                f"({self.federation_id!r}): {_RENEW}"
            ) from error
        if at is None:  # the first moment at which both are valid will do
            at = max(parsed.not_valid_before_utc, authority.not_valid_before_utc)
        _check_window(parsed, at, "the certificate", _RENEW)
        _check_window(authority, at, "the authority", _FOUND)
        try:
            # Constraints, usages, key identifiers and algorithms, as RFC 5280 and the
            # Web PKI want them; there are no intermediate authorities.
            policy = PolicyBuilder().store(Store([authority])).time(at)
            policy.build_client_verifier().verify(parsed, [])
        except _LIBRARY_ERRORS as error:
            raise IdentityError(f"the certificate is refused ({error}): {_RENEW}") from error
        site_id = _named_site(parsed, self.federation_id, "the certificate")
        return site_id, keys.p256(parsed.public_key(), "the certificate")


def expiry_of(certificate: bytes) -> datetime:
    """The moment (UTC) until which a certificate (DER or PEM) is valid; raises IdentityError.

    Says nothing about who issued it: ask `Trust` that.
    """
    return _parse_certificate(certificate).not_valid_after_utc


# ---- parsing and checks -----------------------------------------------------


def _parse_certificate(raw: bytes) -> x509.Certificate:
    is_pem = raw.lstrip().startswith(b"-----BEGIN")
    _check_size(raw, _MAX_PEM if is_pem else _MAX_DER, "a certificate")
    try:
        if is_pem:
            (certificate,) = x509.load_pem_x509_certificates(raw)
        else:
            certificate = x509.load_der_x509_certificate(raw)
        # Parsed on first use by the library: let it be here.
        _ = certificate.extensions, certificate.public_key()
        _ = certificate.subject, certificate.issuer
    except _LIBRARY_ERRORS as error:
        raise IdentityError(f"expected one X.509 certificate ({error}): {_RENEW}") from error
    _check_size(_der(certificate), _MAX_DER, "a certificate")
    return certificate


def _parse_authority(pem: bytes) -> x509.Certificate:
    remedy = f"take {_AUTHORITY_CERTIFICATE} from the folder that `fedctl ca init` made"
    certificate = _parse_certificate(pem)
    try:
        certificate.verify_directly_issued_by(certificate)
        constraints = certificate.extensions.get_extension_for_class(x509.BasicConstraints).value
    except _LIBRARY_ERRORS as error:
        raise IdentityError(f"not the certificate of an authority: {remedy}") from error
    if not constraints.ca or constraints.path_length != 0:
        raise IdentityError(f"expected an authority with path length 0: {remedy}")
    keys.p256(certificate.public_key(), "the authority")
    _authority_federation(certificate)
    return certificate


def _parse_request(pem: bytes) -> x509.CertificateSigningRequest:
    remedy = f"send the {_SITE_REQUEST} that `fedctl site init` made"
    _check_size(pem, _MAX_PEM, "a certificate signing request")
    try:
        request = x509.load_pem_x509_csr(pem)
        proven = request.is_signature_valid
        keys.p256(request.public_key(), "the request")
        _ = request.extensions
    except _LIBRARY_ERRORS as error:
        raise IdentityError(f"not a certificate signing request ({error}): {remedy}") from error
    if not proven:
        raise IdentityError(f"the request is not signed by the key that it is for: {remedy}")
    return request


def _authority_federation(certificate: x509.Certificate) -> str:
    return names.federation_named(_alternative_names(certificate, "the authority")[0])


def _named_site(named: _Named, federation_id: str, what: str) -> str:
    return names.site_named(*_alternative_names(named, what), federation_id, what)


def _alternative_names(named: _Named, what: str) -> tuple[list[str], list[str]]:
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


def _check_fits(key: PrivateKey, certificate: x509.Certificate, path: Path, remedy: str) -> None:
    if key.public_key() != certificate.public_key():
        raise IdentityError(f"the certificate belongs to another key than {path}: {remedy}")


def _check_window(certificate: x509.Certificate, at: datetime, what: str, remedy: str) -> None:
    start, end = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    if at > end:
        raise IdentityError(f"{what} expired on {end:%Y-%m-%d %H:%M} UTC: {remedy}")
    if at < start:
        raise IdentityError(
            f"{what} is not valid before {start:%Y-%m-%d %H:%M} UTC and it is {at:%Y-%m-%d %H:%M}: "
            f"correct this machine's clock, or {remedy}"
        )


def _check_size(raw: bytes, limit: int, what: str) -> None:
    if not 0 < len(raw) <= limit:
        raise IdentityError(f"{what} has 1 to {limit} bytes, not {len(raw)}: get it again")


def _validity(days: int, now: datetime | None) -> tuple[datetime, datetime]:
    if not 1 <= days <= _MAX_DAYS:
        raise IdentityError(f"a certificate is valid for 1 to {_MAX_DAYS} days, not {days}")
    moment = now or datetime.now(UTC)
    return moment - _CLOCK_SKEW, moment + timedelta(days=days)


# ---- building blocks --------------------------------------------------------

# In the order of RFC 5280 §4.2.1.3, which is that of KeyUsage's arguments.
_USAGES = (
    *("digital_signature", "content_commitment", "key_encipherment", "data_encipherment"),
    *("key_agreement", "key_cert_sign", "crl_sign", "encipher_only", "decipher_only"),
)
_BOTH_ENDS = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]


def _builder(
    issuer: x509.Name,
    subject: x509.Name,
    issuer_key: PublicKey,
    subject_key: PublicKey,
    window: tuple[datetime, datetime],
) -> x509.CertificateBuilder:
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


def _subject(federation_id: str, name: str) -> x509.Name:
    return x509.Name.from_rfc4514_string(f"CN={name},O={federation_id}")  # both are checked ids


def _site_names(federation_id: str, site_id: str) -> x509.SubjectAlternativeName:
    uri = x509.UniformResourceIdentifier(names.site_uri(federation_id, site_id))
    return x509.SubjectAlternativeName([uri, x509.DNSName(tls_name(federation_id, site_id))])


def _usage(*allowed: str) -> x509.KeyUsage:
    return x509.KeyUsage(*(usage in allowed for usage in _USAGES))


def _seal_context(certificate_der: bytes, associated: bytes) -> bytes:
    # The digest has a fixed length: no two pairs give the same bytes.
    return hashlib.sha256(certificate_der).digest() + associated


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _der(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.DER)
