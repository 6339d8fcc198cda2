"""The keeper's part: found an authority, sign sites and manifests, let another one follow."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes

from crypto.identity import keys, names
from crypto.identity import x509 as forms
from crypto.identity.keys import IdentityError, PrivateKey, read_bounded, write_new
from crypto.identity.names import check_id
from crypto.identity.trust import Trust


def create_authority(
    directory: Path, federation_id: str, *, days: int = 3650, now: datetime | None = None
) -> None:
    """Make a federation's authority: ``ca.key`` (0600) and ``ca.crt``, valid for ``days``.

    Raises IdentityError when there is one already in the folder.
    """
    check_id(federation_id, "federation id")
    start, end = forms.validity(days, now)
    key = keys.new_key()
    subject = forms.subject(federation_id, "Hanse federation authority")
    uri = x509.UniformResourceIdentifier(names.authority_uri(federation_id))
    certificate = (
        forms.builder(subject, subject, key.public_key(), key.public_key(), (start, end))
        .add_extension(x509.SubjectAlternativeName([uri]), critical=False)
        # Path length 0: it signs sites, and no site can sign another.
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        # digitalSignature: it also signs the manifest.
        .add_extension(forms.usage("digital_signature", "key_cert_sign", "crl_sign"), critical=True)
        .sign(key, hashes.SHA256())
    )
    remedy = "this folder holds an authority already; choose another folder"
    write_new(directory / forms.AUTHORITY_KEY, keys.key_pem(key), 0o600, remedy=remedy)
    write_new(directory / forms.AUTHORITY_CERTIFICATE, forms.pem(certificate), 0o644, remedy=remedy)


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
    trust, issuer, issuer_key = _load_authority(authority)
    forms.check_window(issuer, now or datetime.now(UTC), "the authority", forms.FOUND)
    request = forms.parse_request(request_pem)
    site_id = forms.named_site(request, trust.federation_id, "the request")
    if expect_site is not None and site_id != expect_site:
        raise IdentityError(
            f"the request is for site {site_id!r}, expected {expect_site!r}: ask that site for "
            f"its own {forms.SITE_REQUEST} (`fedctl site init`)"
        )
    start, end = forms.validity(days, now)
    start = max(start, issuer.not_valid_before_utc)
    end = min(end, issuer.not_valid_after_utc)
    certificate = (
        forms.builder(
            issuer.subject,
            forms.subject(trust.federation_id, site_id),
            issuer_key.public_key(),
            keys.p256(request.public_key(), "the request"),
            (start, end),
        )
        .add_extension(forms.site_names(trust.federation_id, site_id), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        # keyAgreement: round keys are sealed for this key.
        .add_extension(forms.usage("digital_signature", "key_agreement"), critical=True)
        .add_extension(x509.ExtendedKeyUsage(forms.BOTH_ENDS), critical=False)
        .sign(issuer_key, hashes.SHA256())
    )
    trust.site_of(forms.der(certificate), at=None)  # what is signed here, every site accepts
    return forms.pem(certificate)


def sign_with_authority(authority: Path, payload: bytes) -> bytes:
    """The authority's ECDSA P-256 SHA-256 signature (DER) over a payload."""
    return keys.sign(_load_authority(authority)[2], payload)


def rotate_authority(
    old: Path,
    new: Path,
    *,
    days: int = 3650,
    window_days: int = 90,
    now: datetime | None = None,
) -> datetime:
    """Have another authority follow: made in the folder ``new``, or found there already.

    The old one's key signs the new one's (crypto/identity/authorities.py), for
    ``window_days``: so long are certificates and manifests of either good. The old folder
    stays as it is: until all sites have the new ``ca.crt`` its key signs what all must
    accept. Returns the window's end. Raises IdentityError.
    """
    trust, issuer, issuer_key = _load_authority(old)
    forms.check_window(issuer, now or datetime.now(UTC), "the authority", forms.FOUND)
    if not (new / forms.AUTHORITY_KEY).exists():
        create_authority(new, trust.federation_id, days=days, now=now)
    following, subject, key = _load_authority(new)
    if following.federation_id != trust.federation_id:
        raise IdentityError(
            f"{new} is an authority of {following.federation_id!r}, {old} of "
            f"{trust.federation_id!r}: an authority is followed by one of its own federation"
        )
    if key.public_key() == issuer_key.public_key() or following.follows:
        raise IdentityError(f"{new} follows an authority already: choose another folder")
    start, end = forms.validity(window_days, now)
    end = min(end, issuer.not_valid_after_utc, subject.not_valid_after_utc)
    uri = x509.UniformResourceIdentifier(names.authority_uri(trust.federation_id))
    cross = (
        forms.builder(
            issuer.subject, subject.subject, issuer_key.public_key(), key.public_key(), (start, end)
        )
        .add_extension(x509.SubjectAlternativeName([uri]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(forms.usage("digital_signature", "key_cert_sign"), critical=True)
        .sign(issuer_key, hashes.SHA256())
    )
    bundle = following.authority_pem + forms.pem(cross) + trust.authority_pem
    keys.replace(new / forms.AUTHORITY_CERTIFICATE, Trust.from_pem(bundle).authority_pem, 0o644)
    return cross.not_valid_after_utc


def adopt_authority(directory: Path, federation_id: str, certificate_pem: bytes, key: Path) -> None:
    """Make an authority's folder of a certificate and a key that were made elsewhere.

    The file may be one self-signed certificate, or an intermediate authority's and what
    issued it, up to the root. Raises IdentityError, saying which of the requirements in
    docs/fedctl.md it does not meet, and when others may read the key.
    """
    check_id(federation_id, "federation id")
    trust = Trust.from_pem(certificate_pem)
    if trust.federation_id != federation_id:
        raise IdentityError(
            f"the authority names the federation {trust.federation_id!r}, expected "
            f"{federation_id!r}: its URI must be {names.authority_uri(federation_id)}"
        )
    certificate = trust.in_office
    forms.check_window(certificate, datetime.now(UTC), "the authority", forms.FOUND)
    private = keys.read_key(key, "name the authority's private key")
    forms.check_fits(private, certificate, key, "name the key that the certificate is for")
    remedy = "this folder holds an authority already; choose another folder"
    write_new(directory / forms.AUTHORITY_KEY, keys.key_pem(private), 0o600, remedy=remedy)
    write_new(directory / forms.AUTHORITY_CERTIFICATE, trust.authority_pem, 0o644, remedy=remedy)


def _load_authority(directory: Path) -> tuple[Trust, x509.Certificate, PrivateKey]:
    path = directory / forms.AUTHORITY_CERTIFICATE
    trust = Trust.from_pem(read_bounded(path, forms.MAX_PEM, remedy=forms.INIT_AUTHORITY))
    path = directory / forms.AUTHORITY_KEY
    key = keys.read_key(path, forms.INIT_AUTHORITY)
    forms.check_fits(key, trust.in_office, path, forms.INIT_AUTHORITY)
    return trust, trust.in_office, key
