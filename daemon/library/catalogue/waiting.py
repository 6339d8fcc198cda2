"""Which documents have pages that only OCR can read, in a library's file.

A row is there as long as the pages wait: it goes when its document is read without any, when
that is taken out, and when its watched file is gone. What waits of a watched folder has the key
of its file, by which the next look knows that it is to be read again (`FileNote.waits`).
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from daemon.library.readers.documents import Waiting


@dataclass(frozen=True)
class StoredWaiting:
    """`Waiting` as it is stored.

    ``folder``: the watched one that its file lies in, or "". ``cause``: why OCR could not read
    the pages, where it has been tried; else "".
    """

    document_id: str
    pages: str
    source: str
    folder: str
    cause: str


class WaitingPages:
    """On a library's connection; raises sqlite3.Error. What writes is called in a transaction."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db

    # ---- writing ---------------------------------------------------------------

    def put(
        self,
        waiting: Iterable[Waiting],
        file: tuple[str, bytes] | None = None,
        *,
        replace: bool = False,
    ) -> None:
        """Note what waits; ``file``: of a watched folder, by collection and path.

        Unless it is of one, or is to ``replace`` them, nothing is noted of a document that is
        here, or waits, from another file: that one was refused.
        """
        collection, path = file or (None, None)
        self._db.executemany(
            "INSERT OR REPLACE INTO waiting(document_id, pages, source, collection, path, cause)"
            " SELECT ?1, ?2, ?3, ?4, ?5, '' WHERE ?6 OR ?4 IS NOT NULL OR NOT EXISTS"
            " (SELECT 1 FROM document WHERE id = ?1 AND source NOT IN ('', ?3)"
            " UNION ALL SELECT 1 FROM waiting WHERE document_id = ?1 AND source NOT IN ('', ?3))",
            [
                (one.document_id, one.pages, one.source, collection, path, replace)
                for one in waiting
            ],
        )

    def drop(self, document_id: str) -> None:
        """Nothing waits of a document any more."""
        self._db.execute("DELETE FROM waiting WHERE document_id = ?", (document_id,))

    def drop_of_file(self, file: tuple[str, bytes]) -> None:
        """Nothing waits of a watched file any more, by collection and path."""
        self._db.execute("DELETE FROM waiting WHERE collection = ? AND path = ?", file)

    def drop_of(self, ids: Sequence[str]) -> int:
        """Nothing waits of these documents any more; of how many something did."""
        return self._db.execute(
            "DELETE FROM waiting WHERE document_id IN (SELECT value FROM json_each(?))",
            (json.dumps(ids),),
        ).rowcount

    # ---- reading ---------------------------------------------------------------

    def count(self) -> int:
        """Of how many documents something waits."""
        return int(self._db.execute("SELECT count(*) FROM waiting").fetchone()[0])

    def page(self, begins: str, after: str, limit: int) -> list[StoredWaiting]:
        """Those whose id begins so, in the order of ids, of those behind ``after``."""
        rows = self._db.execute(
            "SELECT document_id, pages, source, coalesce(collection, ''), cause FROM waiting"
            " WHERE document_id > ?1 AND document_id >= ?2"
            " AND substr(document_id, 1, ?3) = ?2 ORDER BY document_id LIMIT ?4",
            (after, begins, len(begins), limit),
        )
        return [StoredWaiting(*row) for row in rows]

    def known(self, ids: Iterable[str]) -> set[str]:
        """Those of the ids of which something waits."""
        rows = self._db.execute(
            "SELECT document_id FROM waiting WHERE document_id IN (SELECT value FROM json_each(?))",
            (json.dumps(list(ids)),),
        )
        return {name for (name,) in rows}
