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

Everything is ECDSA on P-256 with SHA-256. The keeper's part is in authority.py, what a
site believes in trust.py and authorities.py, the form of certificates in x509.py.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from functools import cached_property
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization

from crypto.identity import keys
from crypto.identity import x509 as forms
from crypto.identity.keys import IdentityError, KeyHolder, PrivateKey, read_bounded, write_new
from crypto.identity.names import check_id
from crypto.identity.trust import Trust, seal_context

_LONGEST_ATTEMPT = timedelta(days=1)  # [rounds] train_deadline_s is at most that
_GENERATIONS = 3  # renewals within that time


def create_site(directory: Path, federation_id: str, site_id: str) -> None:
    """Make a site's key (``site.key``, 0600, never overwritten) and its ``site.csr``."""
    check_id(federation_id, "federation id")
    check_id(site_id, "site id")
    key = keys.new_key()
    remedy = f"to start anew, move it away and {forms.INIT_SITE} again"
    write_new(directory / forms.SITE_KEY, keys.key_pem(key), 0o600, remedy=remedy)
    keys.replace(directory / forms.SITE_REQUEST, _request(key, federation_id, site_id), 0o644)


def renew_site(directory: Path, *, new_key: bool) -> None:
    """Write a new ``site.csr`` for an enrolled site: for its key, or for a new one.

    The new key waits beside the old one as ``site.key.next`` (0600), which the running
    daemon does not touch; `install` puts it in the old one's place, together with its
    certificate. An expired certificate can be renewed, too.
    """
    path = directory / forms.SITE_KEY
    key = keys.read_key(path, forms.INIT_SITE)
    old = read_bounded(directory / forms.SITE_CERTIFICATE, forms.MAX_PEM, remedy=forms.INSTALL)
    authority = read_bounded(
        directory / forms.AUTHORITY_CERTIFICATE, forms.MAX_PEM, remedy=forms.INSTALL
    )
    trust = Trust.from_pem(authority)
    site_id = trust.site_of(old, at=None)
    if new_key:
        key = keys.new_key()
        remedy = (
            "a renewal is under way: install its certificate, or remove that file to start anew"
        )
        write_new(_next(path), keys.key_pem(key), 0o600, remedy=remedy)
    keys.replace(directory / forms.SITE_REQUEST, _request(key, trust.federation_id, site_id), 0o644)


def _request(key: PrivateKey, federation_id: str, site_id: str) -> bytes:
    request = (
        x509.CertificateSigningRequestBuilder()
        .subject_name(forms.subject(federation_id, site_id))
        .add_extension(forms.site_names(federation_id, site_id), critical=False)
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
    key, waiting = keys.read_key(path, forms.INIT_SITE), _next(path)
    if key.public_key() != certificate.public_key() and waiting.exists():
        new = keys.read_key(waiting, remedy)
        if new.public_key() == certificate.public_key():
            return new, waiting
    forms.check_fits(key, certificate, path, remedy)
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
    certificate = forms.parse_certificate(certificate_pem)
    site_key = directory / forms.SITE_KEY
    _, key_path = _key_of(
        certificate, site_key, f"have this site's own {forms.SITE_REQUEST} signed"
    )
    request = forms.parse_request(
        read_bounded(directory / forms.SITE_REQUEST, forms.MAX_PEM, remedy=forms.INIT_SITE)
    )
    requested = forms.named_site(request, trust.federation_id, "the request")
    if requested != site_id:
        raise IdentityError(
            f"the certificate is for site {site_id!r}, expected {requested!r} as in "
            f"{forms.SITE_REQUEST}: have that request signed (`fedctl ca sign`)"
        )
    path = directory / forms.AUTHORITY_CERTIFICATE
    if path.exists():
        installed = read_bounded(path, forms.MAX_PEM, remedy=forms.INSTALL)
        if not trust.knows(installed):
            raise IdentityError(
                f"{path} is another authority than the one given, which does not vouch for it: "
                f"to join another federation, {forms.INIT_SITE} in a new folder"
            )
    keys.replace(path, trust.authority_pem, 0o644)
    keys.replace(directory / forms.SITE_CERTIFICATE, forms.pem(certificate), 0o644)
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
    not_after: datetime  # UTC; until when peers accept the certificate
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
        trust = Trust.from_pem(read_bounded(authority, forms.MAX_PEM, remedy=forms.INSTALL))
        pem = read_bounded(certificate, forms.MAX_PEM, remedy=forms.INSTALL)
        site_id = trust.site_of(pem, at=now or datetime.now(UTC))
        parsed = forms.parse_certificate(pem)
        private_key, _ = _key_of(parsed, key, forms.RENEW)
        return cls(
            site_id=site_id,
            federation_id=trust.federation_id,
            certificate_pem=forms.pem(parsed),
            certificate_der=forms.der(parsed),
            key_pem=keys.key_pem(private_key),
            authority_pem=trust.authority_pem,
            not_after=trust.good_until(pem),
        )

    @property
    def roots_pem(self) -> bytes:
        """The authorities whose sites may connect now, for TLS."""
        return Trust.from_pem(self.authority_pem).roots(datetime.now(UTC))

    def following(self, before: Identity, *, now: datetime | None = None) -> Identity:
        """This identity, which can also unseal what peers sealed for the one before it.

        Peers seal a round's key for the certificate that a site had when the attempt
        began. So a renewal in the middle of an attempt costs nothing, for as long as an
        attempt may take (a day). Signing and TLS go by the new certificate at once.
        """
        moment = now or datetime.now(UTC)
        if before.certificate_der == self.certificate_der:
            earlier = before.earlier
        else:
            earlier = ((moment + _LONGEST_ATTEMPT, replace(before, earlier=())), *before.earlier)
        good = tuple((until, old) for until, old in earlier if until > moment)
        return replace(self, earlier=good[:_GENERATIONS])

    @cached_property
    def _key(self) -> KeyHolder:
        return keys.holder_of(self.key_pem, Path(forms.SITE_KEY))

    def sign(self, payload: bytes) -> bytes:
        """ECDSA P-256 SHA-256 signature (DER, at most 80 bytes); begin payloads with their kind."""
        return self._key.sign(payload)

    def unseal(self, sealed: bytes, associated: bytes) -> bytes:
        """The plaintext of what a peer sealed with `Trust.seal_for` for this certificate.

        Or for one that it followed (see `following`). Raises IdentityError when it was
        sealed for another certificate or with other associated bytes, or was changed:
        which of these cannot be told.
        """
        try:
            return self._key.unseal(sealed, seal_context(self.certificate_der, associated))
        except IdentityError:
            now = datetime.now(UTC)
            for until, old in self.earlier:
                if now < until:
                    with suppress(IdentityError):
                        return old.unseal(sealed, associated)
            raise
