"""Every attempt of every round, as this site saw it: for people who ask what went wrong.

Nothing depends on it: it is no part of the state that promises and votes stand
on (daemon/state/store.py), so its writes are not synced and never waited for.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import structlog

from peers.attempts import effects as do
from proto import control_pb2 as control

log = structlog.get_logger()

_SCHEMA = """
CREATE TABLE IF NOT EXISTS attempts (
    round INTEGER NOT NULL,
    attempt INTEGER NOT NULL,
    seen BLOB NOT NULL,
    PRIMARY KEY (round, attempt)
)
"""
_KEPT_ROUNDS = 10_000


class AttemptLog:
    """Attempts of the rounds, newest kept. `note` returns at once; a thread writes."""

    def __init__(self, path: Path, traffic: Callable[[], tuple[int, int]]) -> None:
        """``traffic`` gives bytes sent to and received from peers so far."""
        self._traffic = traffic
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="attempts")
        self._db: sqlite3.Connection | None = None
        self._writer.submit(self._open, path)
        self._round = 0
        self._current: control.Attempt | None = None
        self._began = 0.0
        self._before = (0, 0)

    def note(self, effect: do.Progress) -> None:
        """The protocol went on."""
        if effect.phase == "committed":
            self._end(effect, "committed")
            return
        current = self._current
        if current is None or (effect.round, effect.attempt) != (self._round, current.attempt):
            if current is not None:
                self._close("abandoned")
            current = self._begin(effect)
        if effect.participants:
            current.participants[:] = effect.participants
        if effect.contributors:
            current.contributors[:] = effect.contributors
        if effect.phase == "failed":
            current.reason = effect.message
            self._close("failed")
            return
        if effect.phase != "waiting":
            current.phase = effect.phase
        elif effect.message:
            current.reason = effect.message
        self._write()

    def _begin(self, effect: do.Progress) -> control.Attempt:
        self._round, self._began, self._before = effect.round, time.monotonic(), self._traffic()
        self._current = control.Attempt(
            attempt=effect.attempt,
            coordinator=effect.coordinator,
            outcome="under way",
            started_unix_ms=time.time_ns() // 1_000_000,
        )
        return self._current

    def _end(self, effect: do.Progress, outcome: str) -> None:
        current = self._current
        if current is None or (self._round, current.attempt) != (effect.round, effect.attempt):
            # Committed without us, or caught up later: the certificate tells it.
            self._close("abandoned")
            return
        current.contributors[:] = effect.contributors
        current.reason = ""
        self._close(outcome)

    def _close(self, outcome: str) -> None:
        if self._current is not None:
            self._current.outcome = outcome
            self._write()
            self._current = None

    def _write(self) -> None:
        current = self._current
        if current is None:
            return
        sent, received = self._traffic()
        current.seconds = time.monotonic() - self._began
        current.bytes_sent = max(0, sent - self._before[0])
        current.bytes_received = max(0, received - self._before[1])
        self._writer.submit(self._save, self._round, current.attempt, current.SerializeToString())

    # ---- in the writer's thread --------------------------------------------------

    def _open(self, path: Path) -> None:
        try:
            self._db = sqlite3.connect(path, isolation_level=None)
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=OFF")
            # A note is a page and comes several times a round: else 4 MiB pile up beside some KiB.
            self._db.execute("PRAGMA wal_autocheckpoint=64")
            self._db.execute(_SCHEMA)
            self._end_what_was_under_way()
        except sqlite3.Error as error:
            self._db = None
            log.warning("no log of attempts is kept", cause=str(error))

    def _end_what_was_under_way(self) -> None:
        """The last one written, if its daemon was stopped or killed in it."""
        if self._db is None:
            return
        last = self._db.execute(
            "SELECT round, attempt, seen FROM attempts ORDER BY rowid DESC LIMIT 1"
        ).fetchone()
        if last is None:
            return
        seen = control.Attempt.FromString(last[2])
        if seen.outcome == "under way":
            seen.outcome, seen.reason = "abandoned", "this daemon was stopped or killed in it"
            self._save(last[0], last[1], seen.SerializeToString())

    def _save(self, round_: int, attempt: int, seen: bytes) -> None:
        if self._db is None:
            return
        try:
            self._db.execute(
                "INSERT OR REPLACE INTO attempts VALUES (?, ?, ?)", (round_, attempt, seen)
            )
            self._db.execute("DELETE FROM attempts WHERE round < ?", (round_ - _KEPT_ROUNDS,))
        except sqlite3.Error as error:
            log.warning("an attempt is not in the log", cause=str(error))

    def _load(self, first: int, last: int) -> dict[int, list[control.Attempt]]:
        attempts: dict[int, list[control.Attempt]] = {}
        if self._db is not None:
            rows = self._db.execute(
                "SELECT round, seen FROM attempts WHERE round BETWEEN ? AND ?"
                " ORDER BY round, attempt",
                (first, last),
            )
            for round_, seen in rows:
                attempts.setdefault(round_, []).append(control.Attempt.FromString(seen))
        return attempts

    # ---- reading -------------------------------------------------------------------

    def attempts(self, first: int, last: int) -> dict[int, list[control.Attempt]]:
        """Attempts of rounds ``first`` .. ``last``. Blocks: call it from a thread."""
        return self._writer.submit(self._load, first, last).result()

    def close(self) -> None:
        """Write what waits, then close."""
        if self._db is not None:
            self._writer.submit(self._db.close)
        self._writer.shutdown(wait=True)
