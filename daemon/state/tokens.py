"""Tokens of people's programs: who may ask through the gateway, and for what.

A token is 256 bits of chance, told once, when it is made; only its SHA-256 is kept. So whoever
reads the state folder, or a backup of it, can ask nothing. A slow hash would add nothing: nobody
tries 2^256 of them. Whoever can *write* the folder can make tokens, as they can make anything.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import secrets
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import structlog

log = structlog.get_logger()

_BYTES: Final = 32
_MARK: Final = "hanse_"  # by which people and scanners know one where it should not be
_MOST: Final = 1000  # each is compared at every call
_DAY_S: Final = 86_400
_SCHEMA_VERSION: Final = 1
# Of the collections that a token may ask of nothing is kept yet: it may ask of all.
_SCHEMA: Final = """
BEGIN;
CREATE TABLE IF NOT EXISTS tokens (
    name TEXT PRIMARY KEY,
    digest BLOB NOT NULL UNIQUE,
    scopes TEXT NOT NULL,
    created_s INTEGER NOT NULL,
    expires_s INTEGER NOT NULL,
    last_used TEXT NOT NULL,
    revoked_s INTEGER NOT NULL
) WITHOUT ROWID;
PRAGMA user_version = 1;
COMMIT;
"""


class TokenError(Exception):
    """The file of tokens can't be used; the text says why and what to do."""


class TokenRefused(Exception):
    """No such token can be made or revoked; the text says why and what to do."""


@dataclass(frozen=True)
class Token:
    """What is known of a token; times in seconds of Unix. ``revoked_s`` 0: it is not."""

    name: str
    digest: bytes
    scopes: tuple[str, ...]
    created_s: int
    expires_s: int
    last_used: str = ""  # the day, UTC; coarse on purpose: it is no record of anybody's hours
    revoked_s: int = 0

    def fault(self, now_s: float) -> str:
        """Why it is refused: "revoked" or "expired"; empty: it is not."""
        if self.revoked_s:
            return "revoked"
        return "" if now_s < self.expires_s else "expired"


class Tokens:
    """One SQLite file, synced at every change, and all of it in memory.

    Checks happen there, on the event loop; the coroutines write in a thread.
    """

    def __init__(self, path: Path, now: Callable[[], float] = time.time) -> None:
        """Open or create it. Blocks; raises TokenError when it is damaged or too new."""
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
            if version == 0:
                self._db.executescript(_SCHEMA)
            rows = self._db.execute("SELECT * FROM tokens ORDER BY name").fetchall()
        self._tokens = {
            name: Token(name, digest, tuple(scopes.split()), *rest)
            for name, digest, scopes, *rest in rows
        }

    @property
    def all(self) -> list[Token]:
        """Each of them, by name; also those that are refused by now."""
        return [self._tokens[name] for name in sorted(self._tokens)]

    async def create(self, name: str, scopes: Sequence[str], days: int) -> tuple[str, Token]:
        """A new token, in the place of one of that name that is refused by now.

        Raises TokenRefused, and TokenError when it can't be written.
        """
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
            token = Token(name, _digest(secret), wanted, int(now_s), expires_s)
            await self._keep(token)
            return secret, token

    async def revoke(self, name: str) -> Token:
        """From now on it is refused. Raises TokenRefused where there is none to revoke."""
        async with self._turn:
            token = self._tokens.get(name)
            if token is None:
                raise TokenRefused(f"no token {name!r} here: `fedctl tokens list` shows them")
            if token.revoked_s:
                raise TokenRefused(f"the token {name!r} is revoked already")
            token = replace(token, revoked_s=int(self._now()))
            # At once, whatever the disk says; and if that says no, who asked is told.
            self._tokens[name] = token
            await self._keep(token)
            return token

    def find(self, secret: str) -> tuple[Token | None, str]:
        """The token, if it is one of ours, and why it is refused all the same; "": it is not.

        In the same time for each secret that is none: all are compared, whole.
        """
        digest, found = _digest(secret), None
        for token in self._tokens.values():
            if hmac.compare_digest(token.digest, digest):
                found = token
        return found, "" if found is None else found.fault(self._now())

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

    def _write(self, token: Token) -> None:
        values = (
            *(token.name, token.digest, " ".join(token.scopes), token.created_s),
            *(token.expires_s, token.last_used, token.revoked_s),
        )
        with self._lock, self._explained("write"):
            self._db.execute("INSERT OR REPLACE INTO tokens VALUES (?, ?, ?, ?, ?, ?, ?)", values)

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
