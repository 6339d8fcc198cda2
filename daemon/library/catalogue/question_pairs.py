"""The pairs in a library's file: questions, each with the documents that answer it."""

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections.abc import Sequence
from dataclasses import replace

from daemon.library.readers.documents import Pair, Reference


class QuestionPairs:
    """On a library's connection; raises sqlite3.Error. What writes is called in a transaction."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db

    def put(self, pair: Pair) -> bool:
        """Whether it is new. Given again with another split, it moves there.

        A reference that comes with it takes the place of what was known.
        """
        digest = hashlib.sha256(json.dumps([pair.query, *pair.positives]).encode()).digest()
        moved = self._db.execute("UPDATE pair SET split = ? WHERE digest = ?", (pair.split, digest))
        if moved.rowcount:
            self._refer(digest, pair.reference)
            return False
        rowid = self._db.execute(
            "INSERT INTO pair(digest, query, split) VALUES (?, ?, ?)",
            (digest, pair.query, pair.split),
        ).lastrowid
        self._db.executemany(
            "INSERT INTO pair_positive(pair, position, document_id) VALUES (?, ?, ?)",
            [(rowid, position, name) for position, name in enumerate(pair.positives)],
        )
        self._refer(digest, pair.reference)
        return True

    def _refer(self, digest: bytes, known: Reference | None) -> None:
        if known is None:
            return
        (rowid,) = self._db.execute("SELECT rowid FROM pair WHERE digest = ?", (digest,)).fetchone()
        self._db.execute(
            "UPDATE pair SET qtype = ?, reasoning = ? WHERE rowid = ?",
            (known.qtype, known.reasoning, rowid),
        )
        self._db.execute("DELETE FROM pair_answer WHERE pair = ?", (rowid,))
        self._db.executemany(
            "INSERT INTO pair_answer(pair, position, answer) VALUES (?, ?, ?)",
            [(rowid, position, answer) for position, answer in enumerate(known.answers)],
        )

    def of_split(self, split: str) -> list[Pair]:
        """Oldest first, with those of their documents that are here; at least one is.

        Without their references: who learns to find passages, or ranks, needs none.
        """
        return [pair for _, pair in self._of_split(split)]

    def referenced(self, split: str) -> tuple[list[Pair], int]:
        """Those of `of_split` that have an answer to compare with, and how many have none."""
        pairs = [
            replace(pair, reference=self._reference(rowid)) for rowid, pair in self._of_split(split)
        ]
        found = [pair for pair in pairs if pair.reference is not None and pair.reference.answers]
        return found, len(pairs) - len(found)

    def _of_split(self, split: str) -> list[tuple[int, Pair]]:
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
        return [
            (rowid, Pair(queries[rowid], tuple(ids), split)) for rowid, ids in positives.items()
        ]

    def _reference(self, pair: int) -> Reference | None:
        answers = self._db.execute(
            "SELECT answer FROM pair_answer WHERE pair = ? ORDER BY position", (pair,)
        )
        (labels,) = self._db.execute("SELECT qtype, reasoning FROM pair WHERE rowid = ?", (pair,))
        known = Reference(tuple(answer for (answer,) in answers), *labels)
        return None if known == Reference() else known

    def naming(
        self, begins: str, ids: Sequence[str] | None, after: int, limit: int
    ) -> list[tuple[int, Pair]]:
        """Pairs that name a document here whose id begins so, and is one of ``ids``.

        With all that they name, their references and their numbers; in the order of these, of
        those behind ``after``.
        """
        rows = self._db.execute(
            "SELECT q.rowid, q.query, q.split FROM pair q WHERE q.rowid > ?1 AND EXISTS"
            " (SELECT 1 FROM pair_positive x JOIN document d ON d.id = x.document_id"
            " WHERE x.pair = q.rowid AND substr(x.document_id, 1, length(?2)) = ?2"
            " AND (?3 IS NULL OR x.document_id IN (SELECT value FROM json_each(?3))))"
            " ORDER BY q.rowid LIMIT ?4",
            (after, begins, None if ids is None else json.dumps(ids), limit),
        ).fetchall()
        return [
            (rowid, Pair(query, self._positives(rowid), split, self._reference(rowid)))
            for rowid, query, split in rows
        ]

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
