"""People who sign in elsewhere: who they are and what they may, by the operator's file of now.

Two kinds of signed tokens (JWT, RFC 7519) say who somebody is. One is the bearer's own, of the
institution's identity provider, verified by its public keys. The other says for whom a program
asks that has a token of this site, and is signed with a secret that the two share. Both are judged
by the same rules (RFC 8725): bounded before they are read, an algorithm that the file names, a key
that the file holds, whatever the token's own header says of keys elsewhere.

Nothing is remembered of a token: it is judged anew each time somebody asks what it lets do, by
files that are read again when they changed. So a key, a group or a person that the operator takes
out is out at once, also for questions that wait. A file that can't be used lets nobody in.

The only home of PyJWT.
"""

from __future__ import annotations

import base64
import json
import math
import os
import re
import stat
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import jwt
import structlog
from cryptography.hazmat.primitives.asymmetric import rsa
from jwt.algorithms import HMACAlgorithm

from config.loading import Problem, SettingsError
from config.people import ALGORITHMS, MOST_BYTES, Grant, Issuer, Speaker, load_people

log = structlog.get_logger()

LONGEST_JWT: Final = 8192  # bytes; some providers put hundreds of groups into one
LEEWAY_S: Final = 30.0  # between this machine's clock and who signs
_TRY_EVERY_S: Final = 1.0  # to read what can't be used
_MOST_KEYS: Final = 100
_LEAST_SECRET: Final = 32  # bytes, as RFC 7518 3.2 has it for HS256
_MOST_SECRET: Final = 4096
_RSA_BITS: Final = (2048, 8192)
_RSA_EXPONENT: Final = 1 << 33  # a larger one is of no use but to have verifying take long
_SUBJECT: Final = re.compile(r"[\x21-\x7e]{1,255}")
_TYPES: Final = ("", "jwt", "at+jwt", "application/jwt", "application/at+jwt")
_FORMED: Final = re.compile(r"[\w-]+\.[\w-]+\.[\w-]+", re.ASCII)
_ISSUERS: Final = {"open-webui": "open-webui"}  # of each kind of speaker, what its tokens say

Collections = tuple[str, ...] | None
"""That somebody may ask of, by name, ascending; None: of all documents."""
May = Mapping[str, Collections]
"""What somebody may: scopes, each with the collections that it is for."""


class SignInRefused(Exception):
    """A signed token lets nobody in; the text says why.

    ``subject``: as `Person.name`, where the signature is right and so says who it is; "" where
    it may be anybody's. ``kind``: of a cause, as the audit log has it.
    """

    def __init__(self, cause: str, kind: str = "", subject: str = "") -> None:
        super().__init__(cause)
        self.kind, self.subject = kind, subject


class PeopleUnknown(Exception):
    """The operator's file can't be used by now, so nobody's rights are known."""


@dataclass(frozen=True)
class Person:
    """Who a valid token is of. ``name``: in the audit log, and for `fedctl tokens block`."""

    name: str
    may: May
    expires_s: int


@dataclass(frozen=True)
class SignsForPeople:
    """What there is to know of an identity provider, or of a program that speaks for people."""

    name: str
    issuer: str
    groups: int
    keys: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Read:
    """The files as they were read, and of which state they were. ``stamp``: of each, by path."""

    stamp: Mapping[Path, tuple[int, ...]]
    issuers: Mapping[str, tuple[str, Issuer]] = field(default_factory=dict)  # by the claim iss
    keys: Mapping[str, Mapping[str, Mapping[str, jwt.PyJWK]]] = field(default_factory=dict)
    speakers: Mapping[str, Speaker] = field(default_factory=dict)
    secrets: Mapping[str, bytes] = field(default_factory=dict)


class People:
    """Who signs in elsewhere, by a file that is looked at again at each question.

    To look costs some microseconds a file; to read them again, when one changed, milliseconds.
    """

    def __init__(self, path: Path | None) -> None:
        """``path``: of the file; None: there is none. Blocks; raises SettingsError."""
        self._path = path
        self._fault = ""
        self._tried, self._tried_s = dict[Path, tuple[int, ...]](), -math.inf
        self._read = _Read({}) if path is None else _read(path)

    @property
    def are_known(self) -> bool:
        """Whether anybody can sign in elsewhere."""
        return self._path is not None

    def fault(self) -> str:
        """Why nobody is let in by now; "": they are."""
        try:
            self._now()
        except PeopleUnknown as error:
            return str(error)
        return ""

    def issuers(self) -> list[SignsForPeople]:
        """Identity providers, by name, with the ids of their keys; as last read."""
        return [
            SignsForPeople(name, issuer, len(one.groups), tuple(sorted(self._read.keys[name])))
            for issuer, (name, one) in sorted(self._read.issuers.items(), key=lambda kv: kv[1][0])
        ]

    def speakers(self) -> list[SignsForPeople]:
        """Tokens that speak for people, by name; as last read."""
        read = sorted(self._read.speakers.items())
        return [SignsForPeople(name, one.kind, len(one.groups)) for name, one in read]

    def speaks(self, token: str) -> bool:
        """Whether that token of the site asks for people, and may do nothing without saying whom.

        Where the file can't be used it is as it was: none that spoke for people is anybody's own.
        """
        try:
            return token in self._now().speakers
        except PeopleUnknown:
            return token in self._read.speakers

    def signed_in(self, token: str, now_s: float) -> Person:
        """Whose token of an identity provider it is. Raises SignInRefused, PeopleUnknown."""
        read = self._now()
        header = _header_of(token)
        named = read.issuers.get(_issuer_of(token))
        if named is None:
            raise SignInRefused("it is of no issuer that this site knows (claim iss)")
        name, issuer = named
        algorithm, kid = header.get("alg"), header.get("kid")
        if algorithm not in issuer.algorithms:
            raise SignInRefused(
                f"it is not signed as this site has it ({', '.join(issuer.algorithms)})"
            )
        keys = read.keys[name].get(kid) if isinstance(kid, str) else None
        if keys is None or algorithm not in keys:
            raise SignInRefused(
                "it names no key that this site has of its issuer (kid): where the issuer changed "
                "its keys, whoever administers the site brings the new ones"
            )
        claims = _verified(
            token,
            keys[algorithm],
            algorithm,
            issuer=issuer.issuer,
            audience=issuer.audience,
        )
        return _person(f"oidc:{name}", claims, issuer, now_s)

    def spoken_for(self, speaker: str, token: str, now_s: float) -> Person:
        """Whom that token of the site asks for. Raises SignInRefused, PeopleUnknown."""
        read = self._now()
        options = read.speakers.get(speaker)
        if options is None:
            raise SignInRefused("the token does not speak for others")
        if _header_of(token).get("alg") != "HS256":
            raise SignInRefused("it is not signed by HS256")
        said = _ISSUERS[options.kind]
        claims = _verified(token, read.secrets[speaker], "HS256", issuer=said, audience=None)
        return _person(f"token:{speaker}", claims, options, now_s)

    def _now(self) -> _Read:
        """The files as they are; read again where one is another than it was."""
        if self._path is None:
            return self._read
        stamp = {path: _stamp(path) for path in self._read.stamp}
        if stamp == self._read.stamp:
            self._fault = ""
            return self._read
        # What the file names by now may be another one than those that are looked at.
        late = time.monotonic() >= self._tried_s + _TRY_EVERY_S
        if self._fault and stamp == self._tried and not late:
            raise PeopleUnknown(self._fault)
        self._tried, self._tried_s = stamp, time.monotonic()
        try:
            self._read = _read(self._path)
        except SettingsError as error:
            fault = str(error)
            if fault != self._fault:
                log.error("nobody who signs in elsewhere is let in", cause=fault)  # noqa: TRY400
            self._fault = fault
            raise PeopleUnknown(fault) from error
        self._fault = ""
        log.info("who signs in elsewhere was read again", file=str(self._path))
        return self._read


# ---- judging a token --------------------------------------------------------------


def _header_of(token: str) -> Mapping[str, Any]:
    """What its header says, of which nothing is believed but for choosing among our own keys."""
    if len(token) > LONGEST_JWT or not _FORMED.fullmatch(token):
        raise SignInRefused(f"it is no signed token of at most {LONGEST_JWT >> 10} KiB")
    try:
        # Without the rest, which PyJWT would look through, character by character.
        header = jwt.get_unverified_header(f"{token.partition('.')[0]}.e30.e30")
    except (jwt.PyJWTError, ValueError, RecursionError) as error:
        raise SignInRefused("its header can't be read") from error
    kind = header.get("typ", "")
    # Whoever signs says by the type what it signed: a notice of a sign-out is no sign-in.
    if not isinstance(kind, str) or kind.lower() not in _TYPES or "crit" in header:
        raise SignInRefused("it is another kind of signed token (typ, crit)")
    if "b64" in header or "zip" in header:
        raise SignInRefused("it is another kind of signed token (b64, zip)")
    return header


def _issuer_of(token: str) -> str:
    """Whom it says it is of, which is believed when it is verified by that one's keys."""
    part = token.split(".")[1]
    try:
        claims = json.loads(base64.urlsafe_b64decode(part + "=" * (-len(part) % 4)))
    except (ValueError, RecursionError) as error:
        raise SignInRefused("it can't be read") from error
    claimed = claims.get("iss") if isinstance(claims, dict) else None
    return claimed if isinstance(claimed, str) else ""


def _verified(
    token: str, key: jwt.PyJWK | bytes, algorithm: str, *, issuer: str, audience: str | None
) -> Mapping[str, Any]:
    """What is signed. Its times are judged by `_person`, for this clock and no other."""
    try:
        return jwt.decode(
            token,
            key,
            algorithms=[algorithm],
            issuer=issuer,
            audience=audience,
            options={
                "require": ["iss", "sub", "iat", "exp", *(["aud"] if audience else [])],
                "verify_aud": audience is not None,
                "verify_exp": False,
                "verify_nbf": False,
                "verify_iat": False,
            },
        )
    except jwt.MissingRequiredClaimError as error:
        raise SignInRefused(f"it does not say {error.claim}") from error
    except jwt.InvalidAudienceError as error:
        raise SignInRefused(f"it is not for this site: its aud has to be {audience!r}") from error
    except jwt.InvalidIssuerError as error:
        raise SignInRefused(f"its iss has to be {issuer!r}") from error
    except (jwt.PyJWTError, ValueError, RecursionError) as error:
        raise SignInRefused("its signature is wrong") from error


def _person(origin: str, claims: Mapping[str, Any], by: Issuer | Speaker, now_s: float) -> Person:
    """Who it is, and what their groups may; what is signed counts from here on."""
    said = claims["sub"]
    if not isinstance(said, str) or not _SUBJECT.fullmatch(said):
        # Not made fit: two people must not become one in the audit log.
        raise SignInRefused("its sub is not 1 to 255 characters of ASCII without spaces")
    name = f"{origin}:{said}"
    if "events" in claims:
        raise SignInRefused(f"that is a notice of an event of {name}", "no sign-in", name)
    issued_s, expires_s = _time(claims, "iat", name), _time(claims, "exp", name)
    begins_s = max(issued_s, _time(claims, "nbf", name) if "nbf" in claims else issued_s)
    if begins_s > now_s + LEEWAY_S:
        raise SignInRefused(f"{name} may not ask yet (iat, nbf)", "not yet valid", name)
    if now_s >= expires_s + LEEWAY_S:
        raise SignInRefused(f"the token of {name} is expired: sign in again", "expired", name)
    if expires_s - issued_s > by.longest_hours * 3600:
        cause = f"the token of {name} lives longer than this site takes: {by.longest_hours:g} h"
        raise SignInRefused(cause, "lives too long", name)
    grants = [by.groups[one] for one in _groups(claims, by.groups_claim) if one in by.groups]
    if not grants:
        cause = f"{name} is in no group that may ask here (claim {'.'.join(by.groups_claim)})"
        raise SignInRefused(cause, "no known group", name)
    return Person(name, _together(grants), math.floor(expires_s))


def _time(claims: Mapping[str, Any], claim: str, name: str) -> float:
    value = claims[claim]
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e11:
        raise SignInRefused(f"{claim} of the token of {name} is no time", "no time", name)
    return float(value)


def _groups(claims: Mapping[str, Any], way: Sequence[str]) -> list[str]:
    """What stands at the end of the way: texts of a list, or one text."""
    found: Any = claims
    for one in way:
        found = found.get(one) if isinstance(found, dict) else None
    several = found if isinstance(found, list) else [found]
    return [one for one in several if isinstance(one, str)]


# ---- rights ------------------------------------------------------------------------


def _together(grants: Iterable[Grant]) -> May:
    """Each scope for the collections of those groups that have it, and of no others."""
    may: dict[str, Collections] = {}
    for grant in grants:
        given = None if grant.all_documents else outermost(grant.collections)
        for scope in grant.scopes:
            before = may.get(scope, ())
            if before is None or given is None:
                may[scope] = None
            else:
                may[scope] = outermost((*before, *given))
    return may


def shared(one: May, other: May) -> May:
    """What both may."""
    return {scope: both(one[scope], other[scope]) for scope in one if scope in other}


def outermost(names: Iterable[str]) -> tuple[str, ...]:
    """Each once, ascending; one that lies in another one of them says nothing more."""
    there = {*names}
    return tuple(sorted(one for one in there if not any(_lies_in(one, other) for other in there)))


def lies_in(document_id: str, collections: Iterable[str]) -> bool:
    """Whether a document is in one of these, by its id."""
    return document_id.startswith(tuple(f"{name}/" for name in collections))


def both(one: Collections, other: Collections) -> Collections:
    """What lies in both; it may be nothing."""
    if one is None or other is None:
        return other if one is None else one
    pairs = [(a, b) for a in one for b in other]
    return outermost(
        {a for a, b in pairs if a == b or _lies_in(a, b)} | {b for a, b in pairs if _lies_in(b, a)}
    )


def _lies_in(one: str, other: str) -> bool:
    return one.startswith(f"{other}/")


# ---- files -------------------------------------------------------------------------


def _stamp(path: Path) -> tuple[int, ...]:
    """What changes when the file does; () where there is none."""
    try:
        told = path.stat()
    except OSError:
        return ()
    return told.st_mtime_ns, told.st_ctime_ns, told.st_size, told.st_ino


def _read(path: Path) -> _Read:
    """The file and those that it names; their stamps are of before they were read."""
    stamp = {path: _stamp(path)}
    people = load_people(path)
    files = [one.keys for one in people.issuers.values()]
    files += [one.secret for one in people.speakers.values()]
    stamp |= {file: _stamp(file) for file in files}
    try:
        return _Read(
            stamp,
            {one.issuer: (name, one) for name, one in people.issuers.items()},
            {name: _keys(name, one) for name, one in people.issuers.items()},
            people.speakers,
            {name: _secret(name, one) for name, one in people.speakers.items()},
        )
    except _Unusable as error:
        raise SettingsError(path, (error.problem,)) from error


class _Unusable(Exception):
    def __init__(self, key: str, file: Path, why: str, remedy: str) -> None:
        super().__init__(why)
        self.problem = Problem(key, str(file), f"a file that can be used ({why})", remedy)


def _keys(name: str, issuer: Issuer) -> Mapping[str, Mapping[str, jwt.PyJWK]]:
    """Of each kid its key, by each algorithm that it may be verified by.

    Keys for other ends (encryption) and of other kinds are left out; what should be nowhere is
    refused: private keys, secrets, two keys of one name.
    """
    where = f"issuers.{name}.keys"

    def refused(why: str, remedy: str) -> _Unusable:
        return _Unusable(where, issuer.keys, why, remedy)

    again = "fetch it again from the issuer's jwks_uri"
    raw = _bytes_of(issuer.keys, MOST_BYTES, where)
    try:
        told = json.loads(raw)["keys"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise refused("it is no JWKS (RFC 7517)", again) from error
    if not isinstance(told, list) or len(told) > _MOST_KEYS:
        raise refused(f"it has no list of at most {_MOST_KEYS} keys", again)
    keys: dict[str, Mapping[str, jwt.PyJWK]] = {}
    for one in told:
        if not isinstance(one, dict) or "d" in one or one.get("kty") == "oct":
            remedy = "take it out: what belongs here are public keys, and that one is no secret now"
            raise refused("it has a private key or a secret", remedy)
        kid = one.get("kid")
        if not isinstance(kid, str) or not kid or not _verifies(one):
            continue
        if kid in keys:
            raise refused("two of its keys have one kid", again)
        fitting = [each for each in issuer.algorithms if _fits(one, each)]
        try:
            made = {each: jwt.PyJWK(one, algorithm=each) for each in fitting}
        except (jwt.PyJWTError, ValueError, TypeError) as error:
            raise refused(f"its key {kid[:60]!r} can't be read", again) from error
        for key in made.values():
            if isinstance(key.key, rsa.RSAPublicKey) and not _is_sound(key.key):
                why = f"its key {kid[:60]!r} has not {_RSA_BITS[0]} to {_RSA_BITS[1]} bits"
                raise refused(why, "have the issuer make another one")
        if made:
            keys[kid] = made
    if not keys:
        why = f"it has no key with a kid that verifies {', '.join(issuer.algorithms)}"
        raise refused(why, f"name the issuer's algorithm in issuers.{name}.algorithms, or {again}")
    return keys


def _verifies(key: Mapping[str, Any]) -> bool:
    operations = key.get("key_ops", ["verify"])
    return key.get("use", "sig") == "sig" and "verify" in (
        operations if isinstance(operations, list) else []
    )


def _fits(key: Mapping[str, Any], algorithm: str) -> bool:
    kind, curves = ALGORITHMS[algorithm]
    own = key.get("alg", algorithm) == algorithm
    return own and key.get("kty") == kind and (not curves or key.get("crv") in curves)


def _is_sound(key: rsa.RSAPublicKey) -> bool:
    exponent = key.public_numbers().e
    return _RSA_BITS[0] <= key.key_size <= _RSA_BITS[1] and 2 < exponent < _RSA_EXPONENT


def _secret(name: str, speaker: Speaker) -> bytes:
    where, file = f"speakers.{name}.secret", speaker.secret
    secret = _bytes_of(file, _MOST_SECRET, where, secret=True).strip(b"\r\n")
    if len(secret) < _LEAST_SECRET:
        why = f"less than {_LEAST_SECRET} bytes"
        raise _Unusable(where, file, why, "make one: openssl rand -hex 32")
    try:
        HMACAlgorithm(HMACAlgorithm.SHA256).prepare_key(secret)
    except jwt.PyJWTError as error:
        raise _Unusable(where, file, str(error), "make one: openssl rand -hex 32") from error
    return secret


def _bytes_of(path: Path, most: int, where: str, *, secret: bool = False) -> bytes:
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            raw = file.read(most + 1)
    except OSError as error:
        why = error.strerror or str(error)
        raise _Unusable(where, path, why, "check its path and who may read it") from error
    if secret and mode & (stat.S_IRWXG | stat.S_IRWXO):
        why = f"mode {stat.S_IMODE(mode):04o}: others may read it"
        raise _Unusable(where, path, why, f"chmod 600 {path}, and have it of fedd's user")
    if len(raw) > most:
        raise _Unusable(where, path, f"more than {most} bytes", "it should be far shorter")
    return raw
