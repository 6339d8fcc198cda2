"""A federation's authorities in one file: the one in office, and those before it.

``ca.crt`` begins with the authority in office. After a rotation there follow, for each
one before it, a certificate in which the earlier authority vouches for the later one
(cross-signing, RFC 4210 §4.4), and the earlier authority itself. So whoever believes the
earlier one has its word that the later one is right, and a file in which that word is
missing is refused. Until that certificate expires what the earlier one has signed is
good, which is the window in which sites change over; what it signed in the past can be
verified for ever.

An authority of somebody else's making may be an intermediate one. It is trusted for
itself, and what stands above it in the file (its issuer, up to a self-signed root) only
proves that it is whole: nothing else under that root gets in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise

from cryptography import x509

from crypto.identity import keys
from crypto.identity import x509 as forms
from crypto.identity.keys import IdentityError

_MOST_CERTIFICATES = 24
_MOST_ABOVE = 4
_REMEDY = f"take {forms.AUTHORITY_CERTIFICATE} from the folder that `fedctl ca init` made"
_BY_HAND = "docs/fedctl.md says what an authority of your own must have"


@dataclass(frozen=True)
class Authority:
    """One authority, and until when what it signs is good for more than history (UTC)."""

    certificate: x509.Certificate
    until: datetime


def parse_bundle(pem: bytes) -> tuple[Authority, ...]:
    """The authorities of a file, the one in office first. Raises IdentityError."""
    certificates = forms.parse_certificates(pem, _MOST_CERTIFICATES)
    known, vouching, above = _sorted_out(certificates)
    used: list[x509.Certificate] = []
    for certificate in known:
        used += _check_authority(certificate, above)
    federation = forms.authority_federation(known[0])
    result = [Authority(known[0], known[0].not_valid_after_utc)]
    for later, earlier in pairwise(known):
        if forms.authority_federation(earlier) != federation:
            raise IdentityError(f"the authorities are of different federations: {_REMEDY}")
        cross = _vouches(earlier, later, vouching)
        used.append(cross)
        until = min(cross.not_valid_after_utc, earlier.not_valid_after_utc)
        result.append(Authority(earlier, until))
    if len({*known, *used}) != len(certificates):
        raise IdentityError(
            f"there are certificates with the authority's that belong to none of them: {_REMEDY}"
        )
    return tuple(result)


def _sorted_out(
    certificates: Sequence[x509.Certificate],
) -> tuple[list[x509.Certificate], list[x509.Certificate], list[x509.Certificate]]:
    """Authorities, cross-signed certificates of theirs, and what stands above them."""
    known, vouching, above = [certificates[0]], list[x509.Certificate](), list[x509.Certificate]()
    for certificate in certificates[1:]:
        try:
            forms.authority_federation(certificate)
        except IdentityError:
            above.append(certificate)
            continue
        same_key = any(certificate.public_key() == one.public_key() for one in known)
        (vouching if same_key else known).append(certificate)
    return known, vouching, above


def _vouches(
    earlier: x509.Certificate, later: x509.Certificate, vouching: Sequence[x509.Certificate]
) -> x509.Certificate:
    for cross in vouching:
        if cross.public_key() == later.public_key() and _issued(cross, earlier):
            return cross
    raise IdentityError(
        "the earlier authority does not vouch for the later one: make the later one with "
        "`fedctl ca rotate`, which needs the earlier one's key"
    )


def _check_authority(
    certificate: x509.Certificate, above: Sequence[x509.Certificate]
) -> list[x509.Certificate]:
    """What stands above it; raises IdentityError unless it may be an authority of ours."""
    chain = _chain(certificate, above)
    if chain is None:
        raise IdentityError(
            f"not the certificate of an authority, or what issued it is not in the file: {_REMEDY}"
        )
    try:
        constraints = certificate.extensions.get_extension_for_class(x509.BasicConstraints).value
    except x509.ExtensionNotFound as error:
        raise IdentityError(f"not the certificate of an authority: {_REMEDY}") from error
    if not constraints.ca or constraints.path_length != 0:
        raise IdentityError(f"expected an authority with path length 0: {_REMEDY}; {_BY_HAND}")
    keys.p256(certificate.public_key(), "the authority")
    forms.authority_federation(certificate)
    _check_usage(certificate)
    return chain


def _check_usage(certificate: x509.Certificate) -> None:
    """It signs certificates, and with digitalSignature the manifest."""
    try:
        usage = certificate.extensions.get_extension_for_class(x509.KeyUsage).value
    except x509.ExtensionNotFound:
        return  # then any use is allowed (RFC 5280 §4.2.1.3)
    if not (usage.key_cert_sign and usage.digital_signature):
        raise IdentityError(
            "the authority's key usage must allow keyCertSign (it signs sites) and "
            f"digitalSignature (it signs the manifest): {_BY_HAND}"
        )


def _chain(
    certificate: x509.Certificate, above: Sequence[x509.Certificate]
) -> list[x509.Certificate] | None:
    """What issued it, up to a self-signed one; None when that is not all there."""
    chain: list[x509.Certificate] = []
    while not _issued(certificate, certificate):
        issuers = [one for one in above if one not in chain and _issued(certificate, one)]
        if not issuers or len(chain) >= _MOST_ABOVE:
            return None
        certificate = issuers[0]
        chain.append(certificate)
    return chain


def _issued(certificate: x509.Certificate, issuer: x509.Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(issuer)
    except forms.LIBRARY_ERRORS:
        return False
    return True
