"""What the frozen encoder says of sentences: answers' work, kept so that it is done once.

One SQLite file beside the library, in WAL mode: the answering worker reads it and keeps what
a question met first, the learning worker fills it in the background. It is a cache: what is
not there is encoded again. What is safe and why:

- a row is of one passage and one encoder, both named by SHA-256, and says of each sentence
  the SHA-256 of the text that was read: a changed sentence, title or rule of cutting is not
  served from an old feature;
- a row is written whole or not at all, and a process that is killed leaves the rows before;
- the file has a bound, at which the rows that were written first make room;
- a row says whether it is of all sentences: a passage is ranked by these (`of_whole`), or not;
- `retain` drops the rows of passages that are gone, overwrites them, and empties the log.
"""

from __future__ import annotations

import hashlib
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from crypto.arrays import Float32
from crypto.durable import clear
from daemon.library.schema import LibraryError, transaction

MOST_BYTES = 1 << 30  # of the file: some 130,000 passages of 8 sentences, 384 values each

_SCHEMA_VERSION = 3
_SCHEMA = f"""
CREATE TABLE passage_sentences (
  id INTEGER PRIMARY KEY,  -- ascends: the lowest was written first
  encoder BLOB NOT NULL,
  content BLOB NOT NULL,   -- SHA-256 of the text that is embedded for the passage
  texts BLOB NOT NULL,     -- SHA-256 of what was read for each of its first n sentences
  vectors BLOB NOT NULL,   -- float16 [n, d], little-endian
  whole INTEGER NOT NULL,  -- 1: it has no sentence behind these
  UNIQUE (encoder, content)
);
PRAGMA user_version = {_SCHEMA_VERSION};
"""
_BUSY_MS = 30_000
_DIGEST = 32
_AT_ONCE = 64  # rows that make room together


class SentenceFeaturesError(LibraryError):
    """The sentences' file can't be opened, read or written; the message says what to do."""


class SentenceFeatures:
    """An open file of sentences' features. One connection: use it in the thread that opened it."""

    def __init__(self, connection: sqlite3.Connection, path: Path, most_bytes: int) -> None:
        self._db = connection
        self._path = path
        self._most_bytes = most_bytes

    @classmethod
    def open(cls, path: Path, *, most_bytes: int | None = None) -> SentenceFeatures:
        """Open the file at ``path``, or begin it; one that is damaged is begun anew.

        ``most_bytes`` bounds it; None: MOST_BYTES. Raises SentenceFeaturesError.
        """
        most = MOST_BYTES if most_bytes is None else most_bytes
        with _explained(path):
            try:
                return cls(_opened(path), path, most)
            except sqlite3.OperationalError:
                raise  # a full disk, a lock: what is there may be sound
            except sqlite3.DatabaseError:
                # Not a database of ours. Whoever else has it open keeps a file without a name.
                for end in ("", "-wal", "-shm"):
                    clear(path.with_name(path.name + end))
                return cls(_opened(path), path, most)

    def close(self) -> None:
        """Close the file; this object is of no use afterwards."""
        self._db.close()

    def get(self, encoder: bytes, content: bytes, texts: Sequence[str]) -> Float32:
        """The features [m, d] of the first m of ``texts``: as many as are kept just so.

        ``content`` is the passage's; ``texts``: what the encoder reads for its sentences,
        from the first.
        """
        with _explained(self._path):
            row = self._db.execute(
                "SELECT texts, vectors FROM passage_sentences WHERE encoder = ? AND content = ?",
                (encoder, content),
            ).fetchone()
        if row is None:
            return np.zeros((0, 0), np.float32)
        count = len(row[0]) // _DIGEST
        alike = 0
        for text in texts[:count]:
            if row[0][alike * _DIGEST : (alike + 1) * _DIGEST] != _digest(text):
                break
            alike += 1
        vectors = np.frombuffer(row[1], dtype="<f2").reshape(count, -1)
        return vectors[:alike].astype(np.float32)

    def of_whole(self, encoder: bytes, contents: Sequence[bytes]) -> dict[bytes, Float32]:
        """The features [n, d] of each of these passages of which all sentences are kept.

        Nothing is compared with the sentences: what their texts were is not asked here.
        """
        found: dict[bytes, Float32] = {}
        with _explained(self._path):
            for content in contents:
                row = self._db.execute(
                    "SELECT length(texts), vectors FROM passage_sentences"
                    " WHERE encoder = ? AND content = ? AND whole",
                    (encoder, content),
                ).fetchone()
                if row is not None:
                    vectors = np.frombuffer(row[1], dtype="<f2").reshape(row[0] // _DIGEST, -1)
                    found[content] = vectors.astype(np.float32)
        return found

    def put(
        self,
        encoder: bytes,
        content: bytes,
        texts: Sequence[str],
        features: Float32,
        *,
        whole: bool,
    ) -> None:
        """Keep the features [n, d] of a passage's first sentences, in the place of older ones.

        ``whole``: it has no others.
        """
        raw = np.ascontiguousarray(features, dtype="<f2").tobytes()
        digests = b"".join(map(_digest, texts))
        with self._transaction():
            self._make_room()
            self._db.execute(
                "INSERT OR REPLACE INTO passage_sentences(encoder, content, texts, vectors, whole)"
                " VALUES (?, ?, ?, ?, ?)",
                (encoder, content, digests, raw, whole),
            )

    def _make_room(self) -> None:
        while self.bytes_used() >= self._most_bytes:
            gone = self._db.execute(
                "DELETE FROM passage_sentences WHERE id IN"
                " (SELECT id FROM passage_sentences ORDER BY id LIMIT ?)",
                (_AT_ONCE,),
            )
            if gone.rowcount == 0:
                return

    def bytes_used(self) -> int:
        """Of the file, without the pages that the next rows take."""
        with _explained(self._path):
            pages, free, size = (
                self._db.execute(f"PRAGMA {name}").fetchone()[0]
                for name in ("page_count", "freelist_count", "page_size")
            )
        return int((pages - free) * size)

    @property
    def full(self) -> bool:
        """Whether what is kept from now on pushes something else out, or nearly."""
        return self.bytes_used() >= 0.9 * self._most_bytes

    def whole(self, encoder: bytes) -> set[bytes]:
        """The passages of which all sentences are kept."""
        with _explained(self._path):
            rows = self._db.execute(
                "SELECT content FROM passage_sentences WHERE encoder = ? AND whole", (encoder,)
            ).fetchall()
        return {content for (content,) in rows}

    def retain(self, contents: set[bytes]) -> None:
        """Drop what is kept of all other passages; no file holds it when this ends.

        Raises SentenceFeaturesError also where somebody who reads keeps the log from being
        emptied.
        """
        with self._transaction():
            rows = self._db.execute("SELECT id, content FROM passage_sentences").fetchall()
            gone = [(number,) for number, content in rows if content not in contents]
            self._db.executemany("DELETE FROM passage_sentences WHERE id = ?", gone)
        # Also where nothing went: a removal before this one may have been killed here.
        with _explained(self._path):
            busy, _, _ = self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        if busy:
            raise SentenceFeaturesError(
                f"the log of {self._path} could not be emptied, for somebody reads it: what was "
                "removed leaves it when fedd is started again"
            )

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        with _explained(self._path), transaction(self._db):
            yield


def _opened(path: Path) -> sqlite3.Connection:
    path.parent.mkdir(parents=True, exist_ok=True)
    connection = sqlite3.connect(path, isolation_level=None, timeout=_BUSY_MS / 1000)
    try:
        # Of an encoder's features something can be read back: what goes is overwritten.
        connection.execute("PRAGMA secure_delete = ON")
        connection.execute("PRAGMA journal_mode = WAL")
        # No wait for the disk at each row: when the power fails the last ones are lost.
        connection.execute("PRAGMA synchronous = NORMAL")
        if connection.execute("PRAGMA user_version").fetchone()[0] != _SCHEMA_VERSION:
            connection.executescript(
                f"BEGIN IMMEDIATE; DROP TABLE IF EXISTS passage_sentences; {_SCHEMA} COMMIT;"
            )
    except BaseException:
        connection.close()
        raise
    return connection


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Translate SQLite's errors at the door: cause and remedy."""
    try:
        yield
    except (sqlite3.Error, OSError) as error:
        raise SentenceFeaturesError(
            f"sentences' features {path}: {error}: free space on that disk, and see that the "
            "daemon's user may write there; a file that is damaged can be deleted"
        ) from error


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()
