"""How federations and sites are called, in messages, certificates and TLS."""

from __future__ import annotations

import re

from crypto.identity.keys import IdentityError

ID = re.compile("[a-z0-9][a-z0-9-]{0,62}")  # also fits a DNS label
LOG = re.compile(rf"{ID.pattern}(?:\.[a-z]{{1,16}})?")  # a federation's log of a model's rounds

_SITE_URI = re.compile(f"hanse://({ID.pattern})/site/({ID.pattern})")
_AUTHORITY_URI = re.compile(f"hanse://({ID.pattern})/authority")


def check_id(value: str, what: str) -> None:
    """Raises IdentityError unless ``value`` can name a federation or a site."""
    if not ID.fullmatch(value):
        raise IdentityError(
            f"{what} {value!r} is refused: expected 1 to 63 of a-z, 0-9 and -, not starting with -"
        )


def tls_name(federation_id: str, site_id: str) -> str:
    """The DNS name in a site's certificate, which TLS checks; it is never looked up."""
    return f"{site_id}.{federation_id}.hanse.internal"


def site_uri(federation_id: str, site_id: str) -> str:
    """The URI that names a site in its certificate."""
    return f"hanse://{federation_id}/site/{site_id}"


def authority_uri(federation_id: str) -> str:
    """The URI that names a federation's authority in its certificate."""
    return f"hanse://{federation_id}/authority"


def federation_named(uris: list[str]) -> str:
    """The federation of an authority whose certificate has these URIs: there must be one."""
    match = _AUTHORITY_URI.fullmatch(uris[0]) if len(uris) == 1 else None
    if match is None:
        raise IdentityError(
            f"the authority names {uris}, expected one {authority_uri('<federation>')}: make it "
            "with `fedctl ca init`"
        )
    return match[1]


def site_named(uris: list[str], others: list[str], federation_id: str, what: str) -> str:
    """The site that alternative names give: one URI of this federation, its DNS name, no more."""
    match = _SITE_URI.fullmatch(uris[0]) if len(uris) == 1 else None
    if match is None:
        raise IdentityError(
            f"{what} names {uris}, expected one {site_uri(federation_id, '<site>')}: make the "
            "request with `fedctl site init`"
        )
    if match[1] != federation_id:
        raise IdentityError(
            f"{what} is for federation {match[1]!r}, expected {federation_id!r}: make the request "
            "with `fedctl site init` for this federation"
        )
    expected = tls_name(federation_id, match[2])
    if others != [expected]:
        raise IdentityError(
            f"{what} of site {match[2]!r} also has the names {others}, expected only {expected}: "
            "make the request with `fedctl site init`"
        )
    return match[2]
