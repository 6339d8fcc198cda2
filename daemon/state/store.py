"""What a site must still know after a crash: protocol state, committed rounds, its curve.

One SQLite file in WAL mode with synchronous=FULL. Votes need FULL: with it SQLite
fsyncs the log before a COMMIT returns, so a transaction that returned survives a
power cut, which is what a promise and a vote stand for. NORMAL, the usual advice
for WAL, syncs at checkpoints only: the file stays sound, but the last commits may
be gone, and a site that forgot its vote may vote a second time
(https://www.sqlite.org/pragma.html#pragma_synchronous). The log's own folder entry
is synced by SQLite; that of the file itself is synced here, when it is made.

An empty or damaged file is never taken for a first start: the file is made under
another name and renamed when its schema is on disk. Model versions lie beside it
as files named by digest (daemon/state/versions.py); the store only refers to them.
"""

from __future__ import annotations

import hashlib
import sqlite3
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import structlog
from google.protobuf.message import DecodeError

from crypto.durable import fsync
from daemon.process.faultpoints import passing
from daemon.state.schema import CURVE, EVIDENCE, PROTOCOL, SCHEMA, SCHEMA_VERSION
from peers.attempts.effects import Durable
from proto import federation_pb2 as pb

log = structlog.get_logger()

# What the state says is sealed by a digest: SQLite finds a torn page, not a flipped bit.
_HEAD = "federation, shape_digest, head_round, head_digest"
_STATE = f"{_HEAD}, promised, state, run"
_STATE_BEFORE_5 = f"{_HEAD}, promised, accepted, run"
_SEAL, _SEAL_BEFORE_5 = b"hanse-state-v3\0", b"hanse-state-v2\0"
# A lost vote may be given twice. Once a quorum that this site was not part of has
# committed a round, every quorum meets it in an honest site, and nothing that was forgotten
# can change that round or one before it.
_MOVE_AWAY = (
    "Move it away only after the other sites have committed another round without this one: "
    "before that, a vote that it has forgotten could be given a second time. The site then "
    "catches up from its peers. Never put an old copy in its place"
)


# What no disk is to blame for: to try it again would fail again.
_NOT_THE_DISK = (
    sqlite3.ProgrammingError,
    sqlite3.InterfaceError,
    sqlite3.DataError,
    sqlite3.IntegrityError,
)


class StoreError(Exception):
    """The state file can't be used; the text says why and what to do."""


@dataclass(frozen=True)
class CurvePoint:
    """How a version did in one metric on this site's validation pairs.

    ``questions``: how many were asked; ``unix_ms``: when, by this site's clock. ``kind``:
    as in `daemon.jobs.curve`, "" where an older Hanse judged, which did not say;
    ``own_digest``: SHA-256 of what of this site's own went into it, empty for "shared".
    """

    round: int
    model_digest: bytes
    metric: str
    value: float
    questions: int
    unix_ms: int
    kind: str = "shared"
    own_digest: bytes = b""


@dataclass(frozen=True)
class Accusation:
    """What a site has signed that contradicts itself, since when it is known here (unix ms)."""

    site: str
    kind: pb.EvidenceKind.ValueType
    unix_ms: int
    shown: pb.Evidence


class Store:
    """Durable state of one site. Methods block for an fsync: call them from a thread."""

    def __init__(self, path: Path) -> None:
        """Open or create the file. Raises StoreError when it is damaged or too new."""
        self._path = path
        self._lock = threading.Lock()
        try:
            _make_if_missing(path)
            self._db = _connect(path)
            self._check()
        except (sqlite3.Error, OSError) as error:
            raise self._damaged(str(error)) from error

    def _damaged(self, cause: str) -> StoreError:
        return StoreError(
            f"cannot use the state file {self._path}: {cause}. Check the disk and the rights of "
            f"the folder. If the file itself is damaged: {_MOVE_AWAY}"
        )

    def _check(self) -> None:
        """Raises StoreError unless the file is whole and of a schema that we know."""
        (version,) = self._db.execute("PRAGMA user_version").fetchone()
        if version > SCHEMA_VERSION:
            raise StoreError(
                f"{self._path} was written by a newer Hanse (schema {version}, this one knows "
                f"{SCHEMA_VERSION}); install that version again"
            )
        if version == 0:
            raise self._damaged("it has no schema, which every state file of ours has")
        (verdict,) = self._db.execute("PRAGMA quick_check(1)").fetchone()
        if verdict != "ok":
            raise self._damaged(str(verdict))
        if version < SCHEMA_VERSION:
            self._upgrade(version)

    def _upgrade(self, version: int) -> None:
        """From schema 1: nothing was sealed, every manifest had been in force.

        2: there was no curve. 3: no point said whether something of the site's own was in it.
        4: a majority decided; nothing that was promised or accepted then counts today.
        """
        with self._transaction():
            if version == 1:
                self._db.execute(
                    "ALTER TABLE manifests ADD COLUMN in_force INTEGER NOT NULL DEFAULT 1"
                )
            if version == 3:
                self._db.execute("ALTER TABLE curve RENAME TO older")
            if version < 4:
                self._db.execute(CURVE)
            if version == 3:
                self._db.execute(
                    "INSERT INTO curve SELECT round, model_digest, '', metric, value, questions,"
                    " unix_ms, x'' FROM older"
                )
                self._db.execute("DROP TABLE older")
            self._begin_anew(sealed=version > 1)
            self._db.execute(EVIDENCE)
            self._db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")

    def _begin_anew(self, *, sealed: bool) -> None:
        """The head stays; what was under way by the rules of old is over."""
        columns = f"{_STATE_BEFORE_5}, seal" if sealed else _STATE_BEFORE_5
        row = self._db.execute(f"SELECT {columns} FROM protocol").fetchone()  # noqa: S608  ours
        if row is not None and sealed and row[7] != _seal(row[:7], _SEAL_BEFORE_5):
            raise self._wrong_seal()
        self._db.execute("DROP TABLE protocol")
        self._db.execute(PROTOCOL)
        if row is None:
            return
        if row[5] is not None or row[6] is not None:
            log.warning(
                "the state is of a time when a majority decided: what was promised, accepted or "
                "asked for then is dropped, and committed rounds stay; ask again for the rounds "
                "that were under way (`fedctl train`)",
                round=row[2] + 1,
            )
        self._insert_state((*row[:4], -1, b"", None))

    def _insert_state(self, state: tuple[object, ...]) -> None:
        self._db.execute(
            "INSERT INTO protocol VALUES (1, ?, ?, ?, ?, ?, ?, ?, ?)", (*state, _seal(state))
        )

    def _wrong_seal(self) -> StoreError:
        return self._damaged(
            "the digest of what this site promised and voted is wrong "
            "(`fedctl site forget-round` forgets it and keeps the history; with --model generator "
            "where this file is the generator's)"
        )

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._db.execute("COMMIT")
        except BaseException:
            if self._db.in_transaction:  # SQLite may have rolled back already, on a full disk
                self._db.execute("ROLLBACK")
            raise

    @property
    def fresh(self) -> bool:
        """Whether no round was committed here yet: the first version is still needed."""
        with self._lock:
            row = self._db.execute("SELECT head_round FROM protocol").fetchone()
        return row is None or row[0] == 0

    @property
    def trained(self) -> bytes:
        """The shape digest that this site has trained with last; empty at the first start."""
        with self._lock:
            row = self._db.execute("SELECT shape_digest FROM protocol").fetchone()
        return row[0] if row else b""

    def change_model(self, shape_digest: bytes) -> None:
        """Train with another one from now on, as a manifest in force has it.

        Promises, run, rounds and head stay. Raises StoreError where no round is committed: the
        first version is the model's own, and its digest is what sites have promised.
        """
        with self._lock:
            row = self._db.execute(f"SELECT {_STATE} FROM protocol").fetchone()  # noqa: S608
        if not row[2]:
            raise StoreError(
                f"{self._path} is of another model, and no round is committed in it: start "
                "with an empty state_dir, in which nothing is lost but the library"
            )
        with self._lock, self._explained("write"), self._transaction():
            self._db.execute("DELETE FROM protocol")
            self._insert_state((row[0], shape_digest, *row[2:]))

    def load(self, federation: str, shape_digest: bytes, genesis: bytes) -> Durable:
        """The protocol's state; at the first start, round 0 with the ``genesis`` version.

        Raises StoreError when the file belongs to another federation or retriever.
        """
        with self._lock:
            row = self._db.execute(f"SELECT {_STATE}, seal FROM protocol").fetchone()  # noqa: S608
            if row is None:
                self._begin_history((federation, shape_digest, 0, genesis, -1, b"", None))
                return Durable(0, genesis)
        if row[7] != _seal(row[:7]):
            raise self._wrong_seal()
        if row[0] != federation:
            raise StoreError(
                f"{self._path} belongs to the federation {row[0]!r}, the certificate to "
                f"{federation!r}; give each federation a state_dir of its own"
            )
        if row[1] != shape_digest:
            raise StoreError(
                f"{self._path} belongs to another retriever (encoder or adaptation changed); "
                "restore the old [retriever] settings. Another encoder is a step of the manifest: "
                "name it in [next_retriever], and see docs/fedctl.md, The encoder is changed"
            )
        try:
            durable = Durable(
                row[2],
                row[3],
                promised=row[4],
                state=pb.RoundState.FromString(row[5]),
                signed_run=pb.Signed.FromString(row[6]) if row[6] is not None else None,
            )
            self._check_head(durable)
        except DecodeError as error:
            raise self._damaged(str(error)) from error
        return durable

    def _begin_history(self, state: tuple[object, ...]) -> None:
        if self._db.execute("SELECT 1 FROM rounds LIMIT 1").fetchone() is not None:
            raise self._damaged("it holds committed rounds and no word of what this site promised")
        with self._transaction():
            self._insert_state(state)

    def _check_head(self, durable: Durable) -> None:
        """The head has its proof, and the history no gap."""
        head = self.certificate(durable.head_round)
        with self._lock:
            (count,) = self._db.execute("SELECT COUNT(*) FROM rounds").fetchone()
        proven = head is not None and head.body.model_digest == durable.head_digest
        if durable.head_round and not proven:
            raise self._damaged(f"the certificate of round {durable.head_round} is not in it")
        if count != durable.head_round:
            raise self._damaged(f"it holds {count} rounds and stands at {durable.head_round}")

    def forget_round(self) -> int:
        """Forget the run and all that was said in the round under way; its number.

        What was said need not be sound. Raises StoreError, and changes nothing, when the
        head and the committed rounds, which stay, do not belong together.
        """
        with self._lock:
            row = self._db.execute(f"SELECT {_HEAD} FROM protocol").fetchone()  # noqa: S608  ours
        if row is None:
            raise self._damaged("it does not say which federation it belongs to")
        try:
            self._check_head(Durable(row[2], row[3]))
        except DecodeError as error:
            raise self._damaged(str(error)) from error
        with self._lock, self._explained("write"), self._transaction():
            self._db.execute("DELETE FROM protocol")
            self._insert_state((*row, -1, b"", None))
            # Of no schema: an older fedd passes it over, and it is missing where nobody forgot.
            self._db.execute("CREATE TABLE IF NOT EXISTS forgotten (round INTEGER PRIMARY KEY)")
            self._db.execute("INSERT OR IGNORE INTO forgotten VALUES (?)", (int(row[2]) + 1,))
        return int(row[2]) + 1

    def forget_sums(self) -> int:
        """Count the sums of the round under way from zero again; its number.

        All that was said in it stays. Raises StoreError when that is damaged.
        """
        with self._lock:
            row = self._db.execute(f"SELECT {_STATE}, seal FROM protocol").fetchone()  # noqa: S608
        if row is None:
            raise self._damaged("it does not say which federation it belongs to")
        if row[7] != _seal(row[:7]):
            raise self._wrong_seal()
        try:
            state = pb.RoundState.FromString(row[5])
        except DecodeError as error:
            raise self._damaged(str(error)) from error
        del state.drawn[:]
        with self._lock, self._explained("write"), self._transaction():
            self._db.execute("DELETE FROM protocol")
            self._insert_state((*row[:5], state.SerializeToString(), row[6]))
        return int(row[2]) + 1

    def forgotten_round(self) -> int:
        """The last round that a person had this site forget (`forget_round`); 0: none."""
        with self._lock:
            named = "SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = 'forgotten'"
            if self._db.execute(named).fetchone() is None:
                return 0
            (round_,) = self._db.execute("SELECT MAX(round) FROM forgotten").fetchone()
        return round_ or 0

    def persist(self, durable: Durable, commits: tuple[pb.Commit, ...]) -> None:
        """Write the state and file committed rounds, in one transaction.

        Raises StoreError or OSError, and then nothing of it is written.
        """
        passing("persist:before")
        state = durable.state.SerializeToString()
        run = durable.signed_run.SerializeToString() if durable.signed_run else None
        changing = (durable.head_round, durable.head_digest, durable.promised, state, run)
        with self._lock, self._explained("write"):
            ours = self._db.execute("SELECT federation, shape_digest FROM protocol").fetchone()
            with self._transaction():
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
                    "UPDATE protocol SET head_round=?, head_digest=?, promised=?, state=?,"
                    " run=?, seal=?",
                    (*changing, _seal((*ours, *changing))),
                )
        passing("persist:after")

    @contextmanager
    def _explained(self, what: str) -> Iterator[None]:
        try:
            yield
        except _NOT_THE_DISK:
            raise
        except sqlite3.Error as error:
            raise StoreError(f"cannot {what} the state file {self._path}: {error}") from error

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

    def rejected_rounds(self) -> Counter[str]:
        """Per site the committed rounds whose robust rule kept its update out."""
        with self._lock:
            rows = self._db.execute("SELECT certificate FROM rounds").fetchall()
        certificates = (pb.Certificate.FromString(row[0]) for row in rows)
        return Counter(site for one in certificates for site in one.body.rejected)

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
        with self._lock, self._explained("write"):
            (newest,) = self._db.execute(
                "SELECT MAX(version) FROM manifests WHERE in_force"
            ).fetchone()
            if newest is not None and version < newest:
                raise StoreError(
                    f"manifest {version} is older than {newest}, which was in force here: "
                    "install the newest one, or have a newer one signed"
                )
            self._db.execute(
                "INSERT INTO manifests VALUES (?, ?, 1)"
                " ON CONFLICT (version) DO UPDATE SET in_force = 1",
                (version, signed),
            )

    def manifest_in_force(self) -> bytes | None:
        """The newest signed manifest that took effect here."""
        with self._lock:
            row = self._db.execute(
                "SELECT signed FROM manifests WHERE in_force ORDER BY version DESC LIMIT 1"
            ).fetchone()
        return row[0] if row else None

    def learn_manifests(self, learnt: Sequence[tuple[int, bytes]]) -> None:
        """Keep manifests that peers showed us: never in force here, only to verify with."""
        with self._lock, self._explained("write"), self._transaction():
            self._db.executemany("INSERT OR IGNORE INTO manifests VALUES (?, ?, 0)", learnt)

    def manifests(self, first: int = 0) -> list[bytes]:
        """Every signed manifest that is known here from version ``first`` on, oldest first."""
        with self._lock:
            rows = self._db.execute(
                "SELECT signed FROM manifests WHERE version >= ? ORDER BY version", (first,)
            ).fetchall()
        return [row[0] for row in rows]

    def file_scores(
        self,
        round_: int,
        model_digest: bytes,
        scores: Mapping[str, float],
        questions: int,
        unix_ms: int,
        *,
        kind: str = "shared",
        own_digest: bytes = b"",
    ) -> None:
        """Keep how a version did on this site's validation pairs; raises StoreError.

        It takes the place of what was known of that kind, and of what says no kind.
        """
        version = (round_, model_digest)
        with self._lock, self._explained("write"), self._transaction():
            self._db.execute(
                "DELETE FROM curve WHERE round = ? AND model_digest = ? AND kind = ''", version
            )
            self._db.executemany(
                "INSERT OR REPLACE INTO curve VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                [
                    (*version, kind, metric, value, questions, unix_ms, own_digest)
                    for metric, value in scores.items()
                ],
            )

    def judged(self, round_: int, model_digest: bytes) -> frozenset[bytes]:
        """As what a version was judged: its points' ``own_digest``, of those that say a kind."""
        with self._lock:
            rows = self._db.execute(
                "SELECT DISTINCT own_digest FROM curve"
                " WHERE round = ? AND model_digest = ? AND kind <> ''",
                (round_, model_digest),
            ).fetchall()
        return frozenset(row[0] for row in rows)

    def curve(self, metric: str = "") -> list[CurvePoint]:
        """How versions did, oldest round first; in one metric, or in all by name.

        Of a version what is shared comes before what is the site's own.
        """
        with self._lock:
            rows = self._db.execute(
                "SELECT round, model_digest, metric, value, questions, unix_ms, kind, own_digest"
                " FROM curve WHERE ? IN ('', metric)"
                " ORDER BY round, kind NOT IN ('', 'shared'), unix_ms, metric",
                (metric,),
            ).fetchall()
        return [CurvePoint(*row) for row in rows]

    # ---- evidence ----------------------------------------------------------------

    def file_evidence(self, shown: pb.Evidence, unix_ms: int) -> None:
        """Keep that a site contradicts itself, once of each kind; raises StoreError."""
        with self._lock, self._explained("write"):
            self._db.execute(
                "INSERT OR IGNORE INTO evidence VALUES (?, ?, ?, ?)",
                (shown.first.site, shown.kind, unix_ms, shown.SerializeToString()),
            )

    def evidence(self) -> list[Accusation]:
        """All that is kept, by site."""
        with self._lock:
            rows = self._db.execute(
                "SELECT site, kind, unix_ms, shown FROM evidence ORDER BY site, unix_ms"
            ).fetchall()
        return [
            Accusation(site, kind, unix_ms, pb.Evidence.FromString(shown))
            for site, kind, unix_ms, shown in rows
        ]

    def accused(self) -> frozenset[str]:
        """Sites that evidence is kept of."""
        with self._lock:
            rows = self._db.execute("SELECT DISTINCT site FROM evidence").fetchall()
        return frozenset(row[0] for row in rows)

    def recent_versions(self, count: int) -> set[bytes]:
        """Digests of the newest ``count`` committed versions."""
        return {commit.certificate.body.model_digest for commit in self.rounds(0, count)}

    def close(self) -> None:
        """Close the file; a later call fails."""
        with self._lock:
            self._db.close()


def _commit(certificate: bytes, report: bytes) -> pb.Commit:
    return pb.Commit(
        certificate=pb.Certificate.FromString(certificate),
        report=pb.RoundReport.FromString(report),
    )


def _seal(state: Sequence[object], label: bytes = _SEAL) -> bytes:
    """SHA-256 over the columns of the protocol's state, each behind its length."""
    seal = hashlib.sha256(label)
    for column in state:
        raw = column if isinstance(column, bytes) else repr(column).encode()
        seal.update(type(column).__name__.encode() + len(raw).to_bytes(8) + raw)
    return seal.digest()


def _connect(path: Path) -> sqlite3.Connection:
    db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    try:
        db.execute("PRAGMA journal_mode=WAL")
        db.execute("PRAGMA synchronous=FULL")
        db.execute("PRAGMA busy_timeout=5000")
    except BaseException:
        db.close()
        raise
    return db


def _make_if_missing(path: Path) -> None:
    """A first start: the schema is on disk, whole, before the file has its name."""
    if path.exists():
        if path.stat().st_size == 0:
            raise OSError("it is empty, which no state file of ours ever is")
        return
    if path.is_symlink():
        raise OSError(
            f"it is a link to {path.readlink()}, which is not there: is its disk mounted?"
        )
    if path.with_name(path.name + "-wal").exists():
        raise OSError(f"{path} is gone and its log {path.name}-wal is there: put it back")
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(path.name + ".new")
    unfinished.unlink(missing_ok=True)
    with closing(sqlite3.connect(unfinished, isolation_level=None)) as db:
        db.execute("PRAGMA synchronous=FULL")
        db.executescript(f"BEGIN;{SCHEMA}PRAGMA user_version={SCHEMA_VERSION};COMMIT;")
    unfinished.rename(path)
    for folder in (path.parent, path.parent.parent):
        fsync(folder)
