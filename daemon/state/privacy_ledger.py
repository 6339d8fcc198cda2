"""What this site's updates have told so far, and whether another may leave.

Every update that may have left the site is booked, on disk, before it is
encrypted: one of an attempt that failed afterwards, too, for nobody knows who has
seen what. An update that is sent again bit by bit (daemon/jobs/sums/kept_integers.py) tells
nothing new, and is booked once. One without noise is booked as such: no epsilon bounds it.

The ledger is a file of its own, beside the state (daemon/state/store.py): a site that
starts over with its state must not forget what it has spent.
"""

from __future__ import annotations

import asyncio
import math
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from crypto.privacy import NoiseTerms, epsilon_of, least_multiplier
from crypto.quantize import CryptoError
from daemon.process.faultpoints import passing
from daemon.process.workers import Worker
from peers.attempts import effects as do
from peers.plans.policy import too_dear
from peers.rounds.acceptor import MOST_DRAWS
from peers.wire.manifest import RETRIEVER

_SCHEMA_VERSION = 2
_SCHEMA = """
BEGIN;
CREATE TABLE IF NOT EXISTS updates (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    round INTEGER NOT NULL,
    attempt INTEGER NOT NULL,
    multiplier REAL NOT NULL,
    clip_norm REAL NOT NULL,
    sharers INTEGER NOT NULL,
    unix_ms INTEGER NOT NULL
);
PRAGMA user_version = 1;
COMMIT;
"""
# Before there were several models, all rounds were the retriever's.
_MODELS = f"""
BEGIN;
ALTER TABLE updates ADD COLUMN model TEXT NOT NULL DEFAULT '{RETRIEVER}';
PRAGMA user_version = {_SCHEMA_VERSION};
COMMIT;
"""


class LedgerError(Exception):
    """The ledger can't be used; the text says why and what to do. Nothing may leave then."""


@dataclass(frozen=True)
class Booked:
    """All updates that may have left this site: noise multipliers, oldest first; without noise."""

    multipliers: tuple[float, ...]
    bare: int


class PrivacyLedger:
    """One SQLite file, synced at every booking. Methods block: call them from a thread."""

    def __init__(self, path: Path) -> None:
        """Open or create it. Raises LedgerError when it is damaged or too new."""
        self._path = path
        self._lock = threading.Lock()
        with self._explained("use"):
            self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=FULL")  # see daemon/state/store.py
            (version,) = self._db.execute("PRAGMA user_version").fetchone()
            (verdict,) = self._db.execute("PRAGMA quick_check(1)").fetchone()
            if verdict != "ok":
                raise sqlite3.DatabaseError(verdict)
            if version > _SCHEMA_VERSION:
                raise LedgerError(
                    f"{path} was written by a newer Hanse (schema {version}, this one knows "
                    f"{_SCHEMA_VERSION}); install that version again"
                )
            if version == 0:
                self._db.executescript(_SCHEMA)
            if version < _SCHEMA_VERSION:
                self._db.executescript(_MODELS)

    def book(
        self, round_: int, attempt: int, terms: NoiseTerms | None, model: str = RETRIEVER
    ) -> None:
        """An update is about to leave; ``terms`` of its noise, None without. On disk when done.

        ``model``: whose rounds it is for.
        """
        multiplier, clip_norm, sharers = (
            (terms.multiplier, terms.clip_norm, terms.sharers) if terms else (0.0, 0.0, 0)
        )
        now_ms = time.time_ns() // 1_000_000
        with self._lock, self._explained("write"):
            self._db.execute(
                "INSERT INTO updates"
                " (round, attempt, multiplier, clip_norm, sharers, unix_ms, model)"
                " VALUES (?, ?, ?, ?, ?, ?, ?)",
                (round_, attempt, multiplier, clip_norm, sharers, now_ms, model),
            )
        passing("privacy:booked")

    def booked(self) -> Booked:
        """Everything that may have left."""
        with self._lock, self._explained("read"):
            rows = self._db.execute("SELECT multiplier FROM updates ORDER BY id").fetchall()
        multipliers = tuple(row[0] for row in rows if row[0] > 0)
        return Booked(multipliers, len(rows) - len(multipliers))

    def rounds(self, model: str) -> set[int]:
        """The rounds of a model of which something was booked."""
        with self._lock, self._explained("read"):
            rows = self._db.execute("SELECT DISTINCT round FROM updates WHERE model = ?", (model,))
            return {row[0] for row in rows}

    def close(self) -> None:
        """Close the file; a later call fails."""
        with self._lock:
            self._db.close()

    @contextmanager
    def _explained(self, what: str) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, OSError) as error:
            raise LedgerError(
                f"cannot {what} the privacy ledger {self._path}: {error}. No update leaves this "
                "site until it can be written: check the disk and the rights of the folder"
            ) from error


@dataclass(frozen=True)
class Account:
    """Where the site stands. ``budget`` None: none is set; ``cost`` NaN: no noise was given.

    ``least``: the least noise multiplier that it agrees to in another round; 0: any,
    infinity: none. ``fits``: whether it agrees to the noise and what it costs.
    """

    booked: Booked
    delta: float
    spent: float
    budget: float | None
    least: float
    cost: float
    fits: bool


class PrivacyBudget:
    """The site's ledger and its budget. Epsilon is computed in the crypto worker.

    ``epsilon`` None: no budget, everything is booked and nothing refused. ``least_noise``
    is only told to the site's people here; plans below it are `peers.plans.policy`'s to decline.
    """

    def __init__(
        self,
        ledger: PrivacyLedger,
        crypto: Worker,
        epsilon: float | None,
        delta: float,
        *,
        least_noise: float = 0.0,
    ) -> None:
        self._ledger = ledger
        self._crypto = crypto
        self._epsilon = epsilon
        self._delta = delta
        self._least_noise = least_noise
        self._least: float | None = None  # None: not known since the last booking
        # Of each model the round of which so many noised updates were booked.
        self._tries: dict[str, tuple[int, int]] = {}
        self._watching: dict[str, Callable[[], None]] = {}  # by the model
        self._turn = asyncio.Lock()

    def watch(self, model: str, changed: Callable[[], None]) -> None:
        """Have a model's rounds hear when another's have spent: it is one budget."""
        self._watching[model] = changed

    def tell_others(self, model: str) -> None:
        """A model's rounds have spent. Nobody is waited for."""
        for other, changed in self._watching.items():
            if other != model:
                changed()

    async def least(self) -> float:
        """The least noise multiplier that another round may have; 0: any, infinity: none."""
        async with self._turn:
            return await self._known_least()

    async def _known_least(self) -> float:
        if self._epsilon is None:
            return 0.0
        if self._least is None:
            booked = await asyncio.to_thread(self._ledger.booked)
            self._least = await self._crypto.run(
                least_multiplier, booked.multipliers, self._epsilon, self._delta
            )
        return self._least

    async def spend(
        self, round_: int, attempt: int, terms: NoiseTerms | None, model: str = RETRIEVER
    ) -> None:
        """Book an update that is about to leave, for a round of that model.

        Raises CryptoError, and nothing is booked, when the budget does not allow it;
        LedgerError when it can't be written. Then the update must not leave.
        """
        multiplier = terms.multiplier if terms else 0.0
        async with self._turn:
            least = await self._known_least()
            if multiplier < least:
                raise CryptoError(too_dear(multiplier, least))
            booking = asyncio.ensure_future(
                asyncio.to_thread(self._ledger.book, round_, attempt, terms, model)
            )
            try:
                await asyncio.shield(booking)
            finally:  # an attempt that is given up meanwhile is booked before the next one asks
                await asyncio.wait([booking])
                self._least = None
                if multiplier:
                    before, tries = self._tries.get(model, (0, 0))
                    self._tries[model] = round_, tries + 1 if round_ == before else 1

    async def unbooked(self, rounds: Sequence[int], model: str = RETRIEVER) -> list[int]:
        """Those of a model's rounds of which the ledger knows nothing. Raises LedgerError."""
        booked = await asyncio.to_thread(self._ledger.rounds, model)
        return [round_ for round_ in rounds if round_ not in booked]

    async def limit(self, situation: do.Situation, model: str = RETRIEVER) -> do.Situation:
        """What the site can contribute to a model, given what is left of its budget."""
        least = await self.least()
        round_, tries = self._tries.get(model, (0, 0))
        if tries >= MOST_DRAWS and situation.willing:
            of = "" if model == RETRIEVER else f" --model {model}"
            reason = (
                f"{tries} noised updates of round {round_} are booked, and none was "
                f"committed: find out why (fedctl rounds show {round_}{of}), then restart fedd"
            )
            return replace(situation, willing=False, reason=reason, least_multiplier=least)
        if math.isinf(least) and situation.willing:
            reason = "this site's privacy budget is spent (privacy.epsilon): fedctl privacy"
            return replace(situation, willing=False, reason=reason, least_multiplier=least)
        return replace(situation, least_multiplier=least)

    def committed(self, model: str = RETRIEVER) -> bool:
        """A round is over; whether that was in the way of this site's taking part."""
        _, tries = self._tries.pop(model, (0, 0))
        return tries >= MOST_DRAWS

    async def calibrated(self, rounds: int, epsilon: float) -> float:
        """The noise with which so many rounds spend ``epsilon`` by themselves; infinity: none."""
        return await self._crypto.run(least_multiplier, (), epsilon, self._delta, rounds=rounds)

    async def account(self, multiplier: float, rounds: int) -> Account:
        """Where the site stands, and what ``rounds`` more with that noise would add."""
        booked = await asyncio.to_thread(self._ledger.booked)
        spent = await self._crypto.run(epsilon_of, booked.multipliers, self._delta)
        cost = math.nan
        if multiplier:
            further = (*booked.multipliers, *([multiplier] * rounds))
            cost = await self._crypto.run(epsilon_of, further, self._delta) - spent
        budget = self._epsilon
        fits = multiplier > 0 and (budget is None or spent + cost <= budget)
        fits = fits and multiplier >= self._least_noise
        least = max(self._least_noise, await self.least())
        return Account(booked, self._delta, spent, budget, least, cost, fits)
