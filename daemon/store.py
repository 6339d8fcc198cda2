"""What a site must still know after a crash: protocol state and committed rounds.

One SQLite file in WAL mode with synchronous=FULL: a transaction that returned is
on disk, which is what a promise and a vote stand for. Model versions lie beside
it as files named by digest (daemon/versions.py); the store only refers to them.
"""

from __future__ import annotations

import sqlite3
import threading
from pathlib import Path

from peers.effects import Durable
from proto import federation_pb2 as pb

_SCHEMA_VERSION = 1
_SCHEMA = """
CREATE TABLE protocol (
    id INTEGER PRIMARY KEY CHECK (id = 1),
    federation TEXT NOT NULL,
    shape_digest BLOB NOT NULL,
    head_round INTEGER NOT NULL,
    head_digest BLOB NOT NULL,
    promised INTEGER NOT NULL,
    accepted BLOB,
    run BLOB
);
CREATE TABLE rounds (
    round INTEGER PRIMARY KEY,
    certificate BLOB NOT NULL,
    report BLOB NOT NULL
);
CREATE TABLE manifests (
    version INTEGER PRIMARY KEY,
    signed BLOB NOT NULL
);
"""


class StoreError(Exception):
    """The state file can't be used; the text says why and what to do."""


class Store:
    """Durable state of one site. Methods block for an fsync: call them from a thread."""

    def __init__(self, path: Path) -> None:
        """Open or create the file. Raises StoreError when it is damaged or too new."""
        self._path = path
        self._lock = threading.Lock()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=FULL")
            self._db.execute("PRAGMA busy_timeout=5000")
            self._open_schema()
        except (sqlite3.Error, OSError) as error:
            raise StoreError(
                f"cannot open the state file {path}: {error}. Check the disk and the rights of "
                "the folder; a damaged file can be moved away: the site then catches up from "
                "its peers, but must not be restored from an old copy"
            ) from error

    def _open_schema(self) -> None:
        (version,) = self._db.execute("PRAGMA user_version").fetchone()
        if version > _SCHEMA_VERSION:
            raise StoreError(
                f"{self._path} was written by a newer Hanse (schema {version}, this one knows "
                f"{_SCHEMA_VERSION}); install that version again"
            )
        if version == 0:
            self._db.executescript(f"BEGIN;{_SCHEMA}PRAGMA user_version={_SCHEMA_VERSION};COMMIT;")

    def load(self, federation: str, shape_digest: bytes, genesis: bytes) -> Durable:
        """The protocol's state; at the first start, round 0 with the ``genesis`` version.

        Raises StoreError when the file belongs to another federation or retriever.
        """
        with self._lock:
            row = self._db.execute(
                "SELECT federation, shape_digest, head_round, head_digest, promised, accepted, run"
                " FROM protocol"
            ).fetchone()
            if row is None:
                self._db.execute(
                    "INSERT INTO protocol VALUES (1, ?, ?, 0, ?, -1, NULL, NULL)",
                    (federation, shape_digest, genesis),
                )
                return Durable(0, genesis)
        if row[0] != federation:
            raise StoreError(
                f"{self._path} belongs to the federation {row[0]!r}, the certificate to "
                f"{federation!r}; give each federation a state_dir of its own"
            )
        if row[1] != shape_digest:
            raise StoreError(
                f"{self._path} belongs to another retriever (encoder or adaptation changed); "
                "restore the old [retriever] settings or start with an empty state_dir"
            )
        return Durable(
            row[2],
            row[3],
            promised=row[4],
            accepted=pb.Accepted.FromString(row[5]) if row[5] is not None else None,
            run=pb.Run.FromString(row[6]) if row[6] is not None else None,
        )

    def persist(self, durable: Durable, commits: tuple[pb.Commit, ...]) -> None:
        """Write the state and file committed rounds, in one transaction."""
        accepted = durable.accepted.SerializeToString() if durable.accepted else None
        run = durable.run.SerializeToString() if durable.run else None
        with self._lock:
            self._db.execute("BEGIN IMMEDIATE")
            try:
                for commit in commits:
                    self._db.execute(
                        "INSERT OR IGNORE INTO rounds VALUES (?, ?, ?)",
                        (
                            commit.certificate.body.round,
                            commit.certificate.SerializeToString(),
                            commit.report.SerializeToString(),
                        ),
                    )
                self._db.execute(
                    "UPDATE protocol SET head_round=?, head_digest=?, promised=?, accepted=?,"
                    " run=?",
                    (durable.head_round, durable.head_digest, durable.promised, accepted, run),
                )
                self._db.execute("COMMIT")
            except BaseException:
                self._db.execute("ROLLBACK")
                raise

    def rounds(self, first: int, limit: int) -> list[pb.Commit]:
        """Committed rounds from ``first`` on, oldest first; the newest ``limit`` if not 0."""
        with self._lock:
            rows = self._db.execute(
                "SELECT certificate, report FROM rounds WHERE round >= ?"
                " ORDER BY round DESC LIMIT ?",
                (first, limit or -1),
            ).fetchall()
        return [_commit(*row) for row in reversed(rows)]

    def rounds_from(self, first: int, limit: int) -> list[pb.Commit]:
        """At most ``limit`` committed rounds from ``first`` on, oldest first."""
        with self._lock:
            rows = self._db.execute(
                "SELECT certificate, report FROM rounds WHERE round >= ? ORDER BY round LIMIT ?",
                (first, limit),
            ).fetchall()
        return [_commit(*row) for row in rows]

    def certificate(self, round_: int) -> pb.Certificate | None:
        """The certificate of one round, if this site has it."""
        with self._lock:
            row = self._db.execute(
                "SELECT certificate FROM rounds WHERE round = ?", (round_,)
            ).fetchone()
        return pb.Certificate.FromString(row[0]) if row else None

    def file_manifest(self, version: int, signed: bytes) -> None:
        """Keep a manifest that took effect: certificates of its time are verified with it.

        Raises StoreError when a newer one was in force here: a manifest never goes back.
        """
        with self._lock:
            (newest,) = self._db.execute("SELECT MAX(version) FROM manifests").fetchone()
            if newest is not None and version < newest:
                raise StoreError(
                    f"manifest {version} is older than {newest}, which was in force here: "
                    "install the newest one, or have a newer one signed"
                )
            self._db.execute("INSERT OR IGNORE INTO manifests VALUES (?, ?)", (version, signed))

    def manifests(self) -> list[bytes]:
        """Every signed manifest that was in force here, oldest first."""
        with self._lock:
            rows = self._db.execute("SELECT signed FROM manifests ORDER BY version").fetchall()
        return [row[0] for row in rows]

    def recent_versions(self, count: int) -> set[bytes]:
        """Digests of the newest committed versions and their parents."""
        digests: set[bytes] = set()
        for commit in self.rounds(0, count):
            body = commit.certificate.body
            digests |= {body.model_digest, body.parent_digest}
        return digests

    def close(self) -> None:
        """Close the file; a later call fails."""
        with self._lock:
            self._db.close()


def _commit(certificate: bytes, report: bytes) -> pb.Commit:
    return pb.Commit(
        certificate=pb.Certificate.FromString(certificate),
        report=pb.RoundReport.FromString(report),
    )
