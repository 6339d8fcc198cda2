"""What a site believes: whom a certificate names, and what the authority has signed."""

from __future__ import annotations

import hashlib
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property

from cryptography import x509
from cryptography.x509.verification import PolicyBuilder, Store

from crypto.identity import keys
from crypto.identity import x509 as forms
from crypto.identity.authorities import Authority, parse_bundle
from crypto.identity.keys import IdentityError, PublicKey


@dataclass(frozen=True)
class Trust:
    """A federation's authority as its sites know it: it tells whom a certificate names."""

    authority_pem: bytes = field(repr=False)
    federation_id: str

    @classmethod
    def from_pem(cls, authority_pem: bytes) -> Trust:
        """From the authority's file (authorities.py); raises IdentityError when it is not one."""
        authorities = parse_bundle(authority_pem)
        certificates = forms.parse_certificates(authority_pem, len(authority_pem))
        whole = b"".join(forms.pem(certificate) for certificate in certificates)
        return cls(whole, forms.authority_federation(authorities[0].certificate))

    @cached_property
    def _authorities(self) -> tuple[Authority, ...]:
        return parse_bundle(self.authority_pem)

    @property
    def in_office(self) -> x509.Certificate:
        """The authority that signs now."""
        return self._authorities[0].certificate

    @property
    def follows(self) -> bool:
        """Whether there was an authority before the one in office."""
        return len(self._authorities) > 1

    @property
    def not_after(self) -> datetime:
        """Until when the certificate of the authority in office is valid (UTC)."""
        return self._authorities[0].until

    def roots(self, at: datetime) -> bytes:
        """The authorities (PEM) whose sites may connect at that moment, for TLS."""
        live = [one for one in self._authorities if at <= one.until] or self._authorities[:1]
        return b"".join(forms.pem(one.certificate) for one in live)

    def knows(self, authority_pem: bytes) -> bool:
        """Whether the authority in office in that file is one of these, now or before."""
        office = parse_bundle(authority_pem)[0].certificate
        return any(one.certificate == office for one in self._authorities)

    def good_until(self, certificate: bytes) -> datetime:
        """Until when peers accept a site's certificate: its own end or its authority's."""
        parsed = forms.parse_certificate(certificate)
        return min(parsed.not_valid_after_utc, self._issuer(parsed).until)

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

    def verify_authority(
        self, signature: bytes, payload: bytes, *, at: datetime | None = None
    ) -> None:
        """Raises IdentityError unless an authority signed ``payload``.

        ``at``: the moment at which it must be in office, or within the window after it;
        None accepts any that ever was, for what was in force long ago.
        """
        for authority in self._authorities:
            if at is not None and at > authority.until:
                continue
            key = keys.p256(authority.certificate.public_key(), "the authority")
            with suppress(IdentityError):
                keys.check_signature(key, signature, payload, "the authority")
                return
        raise IdentityError(
            f"the signature is not by the authority of {self.federation_id!r} over these bytes: "
            "they were changed, or signed with another key; get them again from their author"
        )

    def seal_for(self, certificate: bytes, plaintext: bytes, associated: bytes) -> bytes:
        """Encrypt so that only the site of this certificate can read it (see `keys.seal`).

        Bound to the certificate's digest and to ``associated``, which says who
        seals, for whom and for which attempt; the recipient must know it too.
        It does not prove who sealed: the connection that it arrives on does.
        """
        _, key = self._verified(certificate, None)
        der = forms.der(forms.parse_certificate(certificate))
        return keys.seal(key, plaintext, seal_context(der, associated))

    def _issuer(self, certificate: x509.Certificate) -> Authority:
        for authority in self._authorities:
            with suppress(*forms.LIBRARY_ERRORS):
                certificate.verify_directly_issued_by(authority.certificate)
                return authority
        raise IdentityError(
            "the certificate was not issued by this federation's authority "
            f"({self.federation_id!r}): {forms.RENEW}; where ca.crt is another federation's, "
            "install its own"
        )

    def _verified(self, certificate: bytes, at: datetime | None) -> tuple[str, PublicKey]:
        parsed = forms.parse_certificate(certificate)
        issuer = self._issuer(parsed)
        authority = issuer.certificate
        if at is not None and issuer != self._authorities[0] and at > issuer.until:
            raise IdentityError(
                "the certificate was issued by an authority that another one followed; it was "
                f"good until {issuer.until:%Y-%m-%d %H:%M} UTC: {forms.RENEW}"
            )
        if at is None:  # the first moment at which both are valid will do
            at = max(parsed.not_valid_before_utc, authority.not_valid_before_utc)
        forms.check_window(parsed, at, "the certificate", forms.RENEW)
        forms.check_window(authority, at, "the authority", forms.FOUND)
        try:
            # Constraints, usages, key identifiers and algorithms, as RFC 5280 and the
            # Web PKI want them; there are no intermediate authorities.
            policy = PolicyBuilder().store(Store([authority])).time(at)
            policy.build_client_verifier().verify(parsed, [])
        except forms.LIBRARY_ERRORS as error:
            raise IdentityError(f"the certificate is refused ({error}): {forms.RENEW}") from error
        site_id = forms.named_site(parsed, self.federation_id, "the certificate")
        return site_id, keys.p256(parsed.public_key(), "the certificate")


def seal_context(certificate_der: bytes, associated: bytes) -> bytes:
    """What a seal for this certificate is bound to."""
    # The digest has a fixed length: no two pairs give the same bytes.
    return hashlib.sha256(certificate_der).digest() + associated


def expiry_of(certificate: bytes) -> datetime:
    """The moment (UTC) until which a certificate (DER or PEM) is valid; raises IdentityError.

    Says nothing about who issued it: ask `Trust` that.
    """
    return forms.parse_certificate(certificate).not_valid_after_utc
