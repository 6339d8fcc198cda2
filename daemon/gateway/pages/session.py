"""Who a browser asks for, and that it is our own page that has it ask.

A session is a cookie with the token itself: the gateway keeps none, and `fedd` judges the token
anew at each request. No script can read the cookie, and no other site's page has it sent.
"""

from __future__ import annotations

import re
from typing import Final
from urllib.parse import urlsplit

from starlette.requests import Request
from starlette.responses import Response

# A name with this prefix is taken by browsers over TLS alone, for this host alone and all of
# it: no other host of the domain, and nobody between, can set it (RFC 6265bis, 4.1.3.2).
_OVER_TLS: Final = "__Host-hanse"
_IN_THE_CLEAR: Final = "hanse"  # on this machine, to which no certificate belongs
_LONGEST: Final = 3800  # what a cookie holds, with its name
_TOKEN: Final = re.compile(r"[A-Za-z0-9._-]+", re.ASCII)  # as it is in a cookie


def token_in(text: str) -> str:
    """A token as it was typed, if it can be one; "" otherwise."""
    text = text.strip()
    return text if len(text) <= _LONGEST and _TOKEN.fullmatch(text) else ""


def fault_of(text: str) -> str:
    """Why what was typed is no token that a browser can keep; "" where it is one."""
    text = text.strip()
    if token_in(text):
        return ""
    if _TOKEN.fullmatch(text):
        cause = f"this token has {len(text):,} characters, and a browser keeps {_LONGEST:,}"
        return f"{cause}: ask whoever runs the identity provider for one that says less"
    return "this is no token: paste all of it, and nothing else"


def credential_of(request: Request) -> str:
    """What the cookie says, as an Authorization header would; "": nobody is signed in."""
    names = [_OVER_TLS] if request.url.scheme == "https" else [_OVER_TLS, _IN_THE_CLEAR]
    tokens = (token_in(request.cookies.get(name, "")) for name in names)
    return next((f"Bearer {token}" for token in tokens if token), "")


def sign_in(request: Request, response: Response, token: str) -> None:
    """Have the browser keep the token, until it is closed or signs out."""
    over_tls = _is_over_tls(request)
    response.set_cookie(
        _OVER_TLS if over_tls else _IN_THE_CLEAR,
        token,
        secure=over_tls,
        httponly=True,
        samesite="strict",
    )


def sign_out(response: Response) -> None:
    """Have the browser forget the token; both names, for it may have come here either way."""
    for name in (_OVER_TLS, _IN_THE_CLEAR):
        response.delete_cookie(name, secure=name == _OVER_TLS, httponly=True, samesite="strict")


def is_own_page(request: Request) -> bool:
    """Whether a form was sent by a page of ours, and not by another site's in this browser.

    A browser says with each form where it is from. Sec-Fetch-Site it says itself, whatever
    stands between it and us; an older one, or one that trusts this address too little, says
    Origin. What says neither is no browser, and asks under /v1.
    """
    site, origin = request.headers.get("sec-fetch-site"), request.headers.get("origin")
    if site is not None:
        return site == "same-origin"
    host = request.headers.get("host", "").lower()
    return bool(host) and origin is not None and _host_of(origin) == host


def came_from_elsewhere(request: Request) -> bool:
    """Whether a link on another site led here: then the browser did not send the cookie."""
    return request.headers.get("sec-fetch-site", "") in ("cross-site", "same-site")


def _is_over_tls(request: Request) -> bool:
    """Whether the browser speaks TLS, to us or to a proxy before us: it says so itself."""
    origin = request.headers.get("origin", "")
    return request.url.scheme == "https" or origin.startswith("https://")


def _host_of(origin: str) -> str:
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return ""
