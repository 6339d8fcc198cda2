"""Tokens of people's programs: who may ask through the gateway, and for what.

Who signs in elsewhere needs none (daemon/state/people.py), and can be blocked here.

A token is 256 bits of chance, told once, when it is made; only its SHA-256 is kept. So whoever
reads the state folder, or a backup of it, can ask nothing. A slow hash would add nothing: nobody
tries 2^256 of them. Whoever can *write* the folder can make tokens, as they can make anything.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import secrets
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import structlog

from config.kinds import LONGEST_COLLECTION, OF_ALL_DOCUMENTS
from daemon.state.people import People, both, outermost

log = structlog.get_logger()

_BYTES: Final = 32
_MARK: Final = "hanse_"  # by which people and scanners know one where it should not be
_MOST: Final = 1000  # each is compared at every call
_DAY_S: Final = 86_400
_MOST_BLOCKED: Final = 10_000
_SCHEMA_VERSION: Final = 3
_EVERY: Final = "all"  # where a list of collections would stand; a list begins with a bracket
_SCHEMA: Final = """
BEGIN IMMEDIATE;
CREATE TABLE IF NOT EXISTS tokens (
    name TEXT PRIMARY KEY,
    digest BLOB NOT NULL UNIQUE,
    scopes TEXT NOT NULL,
    created_s INTEGER NOT NULL,
    expires_s INTEGER NOT NULL,
    last_used TEXT NOT NULL,
    revoked_s INTEGER NOT NULL,
    collections TEXT NOT NULL          -- as JSON; 'all': of all documents
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS blocked (name TEXT PRIMARY KEY, since_s INTEGER NOT NULL) WITHOUT ROWID;
PRAGMA user_version = 3;
COMMIT;
"""
# In version 1 every token might ask of all.
_SINCE_1: Final = """
BEGIN IMMEDIATE;
ALTER TABLE tokens ADD COLUMN collections TEXT NOT NULL DEFAULT 'all';
PRAGMA user_version = 2;
COMMIT;
"""
# In version 2 nobody signed in elsewhere.
_SINCE_2: Final = """
BEGIN IMMEDIATE;
CREATE TABLE blocked (name TEXT PRIMARY KEY, since_s INTEGER NOT NULL) WITHOUT ROWID;
PRAGMA user_version = 3;
COMMIT;
"""
_SINCE: Final = {0: (_SCHEMA,), 1: (_SINCE_1, _SINCE_2), 2: (_SINCE_2,)}


class TokenError(Exception):
    """The file of tokens can't be used; the text says why and what to do."""


class TokenRefused(Exception):
    """No such token can be made or revoked; the text says why and what to do."""


@dataclass(frozen=True)
class Token:
    """What is known of a token; times in seconds of Unix. ``revoked_s`` 0: it is not.

    ``collections``: that it may ask of, by name, ascending; None: of all documents.
    """

    name: str
    digest: bytes
    scopes: tuple[str, ...]
    created_s: int
    expires_s: int
    last_used: str = ""  # the day, UTC; coarse on purpose: it is no record of anybody's hours
    revoked_s: int = 0
    collections: tuple[str, ...] | None = None

    @property
    def actor(self) -> str:
        """As the audit log has it. No name of a token has a colon."""
        return f"token:{self.name}"

    def fault(self, now_s: float) -> str:
        """Why it is refused: "revoked" or "expired"; empty: it is not."""
        if self.revoked_s:
            return "revoked"
        return "" if now_s < self.expires_s else "expired"


class Tokens:
    """One SQLite file, synced at every change, and all of it in memory.

    Checks happen there, on the event loop; the coroutines write in a thread.
    """

    def __init__(
        self, path: Path, now: Callable[[], float] = time.time, people: Path | None = None
    ) -> None:
        """Open or create it. Blocks; raises TokenError when it is damaged or too new.

        ``people``: the file of those who sign in elsewhere; SettingsError where it can't be used.
        """
        self.people = People(people)
        self._path = path
        self._now = now
        self._lock = threading.Lock()
        self._turn = asyncio.Lock()
        with self._explained("use"):
            self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=FULL")  # a token that was revoked stays so
            (version,) = self._db.execute("PRAGMA user_version").fetchone()
            if version > _SCHEMA_VERSION:
                raise TokenError(
                    f"{path} was written by a newer Hanse (schema {version}, this one knows "
                    f"{_SCHEMA_VERSION}); install that version again"
                )
            for change in _SINCE.get(version, ()):
                self._db.executescript(change)
            rows = self._db.execute("SELECT * FROM tokens ORDER BY name").fetchall()
            blocked = self._db.execute("SELECT name, since_s FROM blocked").fetchall()
        self._tokens = {row[0]: self._read(*row) for row in rows}
        self._blocked: dict[str, int] = dict(blocked)
        self._unwritten: set[str] = set()  # tokens and people whose end the disk doesn't know yet

    @property
    def all(self) -> list[Token]:
        """Each of them, by name; also those that are refused by now."""
        return [self._tokens[name] for name in sorted(self._tokens)]

    async def create(
        self, name: str, scopes: Sequence[str], days: int, collections: Sequence[str] | None = None
    ) -> tuple[str, Token]:
        """A new token, in the place of one of that name that is refused by now.

        ``collections``: that it may ask of; None: of all. Raises TokenRefused, and TokenError
        when it can't be written.
        """
        allowed = None if collections is None else _names(collections)
        _agree(scopes, allowed)
        async with self._turn:
            now_s = self._now()
            before = self._tokens.get(name)
            if before is not None and not before.fault(now_s):
                raise TokenRefused(
                    f"there is a token {name!r} already: choose another name, or revoke it first "
                    f"(`fedctl tokens revoke {name}`)"
                )
            if before is None and len(self._tokens) >= _MOST:
                raise TokenRefused(
                    f"there are {_MOST:,} tokens: give this one the name of a revoked one"
                )
            secret = _MARK + secrets.token_urlsafe(_BYTES)
            wanted = tuple(dict.fromkeys(scopes))
            expires_s = int(now_s) + days * _DAY_S
            token = Token(name, _digest(secret), wanted, int(now_s), expires_s, collections=allowed)
            await self._keep(token)
            return secret, token

    async def change(
        self,
        name: str,
        scopes: Sequence[str] = (),
        collections: Sequence[str] = (),
        *,
        all_documents: bool = False,
    ) -> Token:
        """From now on it is for that; what is empty stays as it was.

        Less holds whatever the disk says, as a revocation does. Raises TokenRefused, TokenError.
        """
        if (collections and all_documents) or not (collections or all_documents or scopes):
            raise TokenRefused(
                "say what the token may ask of: either collections, or all documents; or what it "
                "is for"
            )
        async with self._turn:
            token = self._known(name)
            if fault := token.fault(self._now()):
                raise TokenRefused(f"the token {name!r} is {fault}: create another one")
            allowed = _names(collections) if collections else token.collections
            allowed = None if all_documents else allowed
            wanted = tuple(dict.fromkeys(scopes)) or token.scopes
            _agree(wanted, allowed)
            changed = replace(token, scopes=wanted, collections=allowed)
            # Until it is written it may do what it may before and after. Others see it at once.
            self._tokens[name] = replace(
                changed,
                scopes=tuple(one for one in wanted if one in token.scopes),
                collections=both(token.collections, allowed),
            )
            await self._keep(changed)
            return changed

    async def revoke(self, name: str) -> Token:
        """From now on it is refused. Raises TokenRefused where there is none to revoke.

        Raises TokenError when it can't be written: until then it may be revoked again, or a
        daemon that starts anew would take the token.
        """
        async with self._turn:
            token = self._known(name)
            if token.revoked_s and name not in self._unwritten:
                raise TokenRefused(f"the token {name!r} is revoked already")
            token = replace(token, revoked_s=token.revoked_s or int(self._now()))
            # At once, whatever the disk says; and if that says no, who asked is told.
            self._tokens[name] = token
            self._unwritten.add(name)
            await self._keep(token)
            return token

    def find(self, secret: str) -> Token | None:
        """The token, if it is one of ours; whether it is refused all the same says `now`.

        In the same time for each secret that is none: all are compared, whole.
        """
        digest, found = _digest(secret), None
        for token in self._tokens.values():
            if hmac.compare_digest(token.digest, digest):
                found = token
        return found

    def now(self, token: Token) -> tuple[Token, str]:
        """What a token that was found before is by now, and why it is refused; "": it is not."""
        newest = self._tokens.get(token.name)
        if newest is None or newest.digest != token.digest:  # its name is another's: it was refused
            return token, token.fault(self._now()) or "revoked"
        return newest, newest.fault(self._now())

    @property
    def now_s(self) -> float:
        """Seconds of Unix, by the clock that tokens expire by."""
        return self._now()

    @property
    def blocked(self) -> dict[str, int]:
        """People who are let in by no signed token, by name, and since when."""
        return dict(sorted(self._blocked.items()))

    def is_blocked(self, name: str) -> bool:
        """Whether that person is."""
        return name in self._blocked

    async def block(self, name: str) -> None:
        """Have no signed token let that person in, from now on, whatever the disk says.

        Raises TokenRefused, and TokenError when it can't be written: as `revoke`.
        """
        async with self._turn:
            if name in self._blocked and name not in self._unwritten:
                raise TokenRefused(f"{name} is blocked already")
            if len(self._blocked) >= _MOST_BLOCKED:
                raise TokenRefused(
                    f"{_MOST_BLOCKED:,} people are blocked: unblock those who are gone "
                    "(`fedctl tokens block NAME --undo`)"
                )
            since_s = int(self._now())
            self._blocked[name] = since_s
            self._unwritten.add(name)
            change = "INSERT OR REPLACE INTO blocked VALUES (?, ?)"
            await asyncio.to_thread(self._execute, change, (name, since_s))
            self._unwritten.discard(name)

    async def unblock(self, name: str) -> None:
        """Have signed tokens count again for that person. Raises TokenRefused, TokenError."""
        async with self._turn:
            if name not in self._blocked:
                raise TokenRefused(f"{name} is not blocked: `fedctl tokens list` shows who is")
            change = "DELETE FROM blocked WHERE name = ?"
            await asyncio.to_thread(self._execute, change, (name,))
            del self._blocked[name]
            self._unwritten.discard(name)

    async def used(self, token: Token) -> None:
        """Note the day. A full disk keeps nobody from asking."""
        today = datetime.fromtimestamp(self._now(), UTC).date().isoformat()
        async with self._turn:
            newest = self._tokens.get(token.name)
            if newest is None or newest.digest != token.digest or newest.last_used == today:
                return
            try:
                await self._keep(replace(newest, last_used=today))
            except TokenError as error:
                log.warning("the day of a token's last use is not noted", cause=str(error))

    def close(self) -> None:
        """Close the file; a later change fails."""
        with self._lock:
            self._db.close()

    async def _keep(self, token: Token) -> None:
        await asyncio.to_thread(self._write, token)
        self._tokens[token.name] = token
        self._unwritten.discard(token.name)

    def _write(self, token: Token) -> None:
        values = (
            *(token.name, token.digest, " ".join(token.scopes), token.created_s),
            *(token.expires_s, token.last_used, token.revoked_s),
            _EVERY if token.collections is None else json.dumps(token.collections),
        )
        self._execute("INSERT OR REPLACE INTO tokens VALUES (?, ?, ?, ?, ?, ?, ?, ?)", values)

    def _execute(self, change: str, values: tuple[Any, ...]) -> None:
        with self._lock, self._explained("write"):
            self._db.execute(change, values)

    def _known(self, name: str) -> Token:
        token = self._tokens.get(name)
        if token is None:
            raise TokenRefused(f"no token {name!r} here: `fedctl tokens list` shows them")
        return token

    def _read(self, name: str, digest: bytes, scopes: str, *rest: Any) -> Token:
        """As it stands in the file; what is no list of collections is not taken for all."""
        *known, collections = rest
        token = Token(name, digest, tuple(scopes.split()), *known)
        if collections == _EVERY:
            return token
        damaged = f"the file of tokens {self._path} is damaged: put a backup of it back"
        try:
            names = json.loads(collections)
        except ValueError as error:
            raise TokenError(damaged) from error
        if not isinstance(names, list) or not all(isinstance(one, str) for one in names):
            raise TokenError(damaged)
        return replace(token, collections=tuple(names))

    @contextmanager
    def _explained(self, what: str) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, OSError) as error:
            raise TokenError(
                f"cannot {what} the file of tokens {self._path}: {error}; check the disk and the "
                "rights of the folder, or put a backup of it back"
            ) from error


def _digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode(errors="replace")).digest()


def _names(collections: Sequence[str]) -> tuple[str, ...]:
    """Names of collections as ids begin with them, each once, ascending; TokenRefused for others.

    One that lies in another one of them says nothing more.
    """
    names = {one.strip("/") for one in collections}
    wrong = [one for one in names if not one or len(one) > LONGEST_COLLECTION]
    if wrong or not names:
        raise TokenRefused(
            f"a collection has a name of 1 to {LONGEST_COLLECTION} characters, as contracts/2024"
        )
    return outermost(names)


def _agree(scopes: Sequence[str], collections: tuple[str, ...] | None) -> None:
    """The site's figures and curve are of all documents: not for who may ask of some."""
    wide = [one for one in OF_ALL_DOCUMENTS if one in scopes]
    if collections is not None and wide:
        raise TokenRefused(
            "figures are of all documents, so a token for some collections can't have the scope "
            f"{wide[0]}: make one of its own for that"
        )
