"""The pairs in a library's file: questions, each with the documents that answer it."""

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections.abc import Sequence

from daemon.library.readers.documents import Pair


class QuestionPairs:
    """On a library's connection; raises sqlite3.Error. What writes is called in a transaction."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db

    def put(self, pair: Pair) -> bool:
        """Whether it is new. Given again with another split, it moves there."""
        digest = hashlib.sha256(json.dumps([pair.query, *pair.positives]).encode()).digest()
        moved = self._db.execute("UPDATE pair SET split = ? WHERE digest = ?", (pair.split, digest))
        if moved.rowcount:
            return False
        rowid = self._db.execute(
            "INSERT INTO pair(digest, query, split) VALUES (?, ?, ?)",
            (digest, pair.query, pair.split),
        ).lastrowid
        self._db.executemany(
            "INSERT INTO pair_positive(pair, position, document_id) VALUES (?, ?, ?)",
            [(rowid, position, name) for position, name in enumerate(pair.positives)],
        )
        return True

    def of_split(self, split: str) -> list[Pair]:
        """Oldest first, with those of their documents that are here; at least one is."""
        rows = self._db.execute(
            "SELECT q.rowid, q.query, x.document_id FROM pair q"
            " JOIN pair_positive x ON x.pair = q.rowid JOIN document d ON d.id = x.document_id"
            " WHERE q.split = ? ORDER BY q.rowid, x.position",
            (split,),
        )
        queries: dict[int, str] = {}
        positives: dict[int, list[str]] = {}
        for rowid, query, document_id in rows:
            queries[rowid] = query
            positives.setdefault(rowid, []).append(document_id)
        return [Pair(queries[rowid], tuple(ids), split) for rowid, ids in positives.items()]

    def naming(
        self, begins: str, ids: Sequence[str] | None, after: int, limit: int
    ) -> list[tuple[int, Pair]]:
        """Pairs that name a document here whose id begins so, and is one of ``ids``.

        With all that they name, and their numbers; in the order of these, of those behind
        ``after``.
        """
        rows = self._db.execute(
            "SELECT q.rowid, q.query, q.split FROM pair q WHERE q.rowid > ?1 AND EXISTS"
            " (SELECT 1 FROM pair_positive x JOIN document d ON d.id = x.document_id"
            " WHERE x.pair = q.rowid AND substr(x.document_id, 1, length(?2)) = ?2"
            " AND (?3 IS NULL OR x.document_id IN (SELECT value FROM json_each(?3))))"
            " ORDER BY q.rowid LIMIT ?4",
            (after, begins, None if ids is None else json.dumps(ids), limit),
        ).fetchall()
        return [(rowid, Pair(query, self._positives(rowid), split)) for rowid, query, split in rows]

    def _positives(self, pair: int) -> tuple[str, ...]:
        rows = self._db.execute(
            "SELECT document_id FROM pair_positive WHERE pair = ? ORDER BY position", (pair,)
        )
        return tuple(name for (name,) in rows)

    def drop_of(self, removed: Sequence[str]) -> tuple[int, set[str]]:
        """Delete those that named a document that went, and none that is here.

        How many these were, and which of their questions no other pair asks.
        """
        rows = self._db.execute(
            "SELECT DISTINCT q.rowid, q.query FROM pair_positive x JOIN pair q ON q.rowid = x.pair"
            " WHERE x.document_id IN (SELECT value FROM json_each(?)) AND NOT EXISTS"
            " (SELECT 1 FROM pair_positive y JOIN document d ON d.id = y.document_id"
            " WHERE y.pair = q.rowid)",
            (json.dumps(removed),),
        ).fetchall()
        self._db.executemany("DELETE FROM pair WHERE rowid = ?", [(rowid,) for rowid, _ in rows])
        queries = {query for _, query in rows}
        asked = self._db.execute(
            "SELECT query FROM pair WHERE query IN (SELECT value FROM json_each(?))",
            (json.dumps(sorted(queries)),),
        )
        return len(rows), queries - {query for (query,) in asked}
