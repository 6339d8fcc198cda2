"""What was removed is erased: the library's file is written anew, and no byte of it stays there.

What goes with a document is for who removes it (`Library.delete_documents`) to say.

SQLite overwrites what it frees (``secure_delete``), and that is not all there is. When rows
are moved from one page of the file to another, to keep the pages evenly filled, the bytes they
had stay in the gap of the old page, until other rows happen to come there. So a row that is
deleted, and overwritten where it lies, may be found once more in other pages, with its
beginning or as a whole. Only a file that is written anew (VACUUM) holds no such copies: its
pages are made of what is there by then.

That takes a transaction of its own, behind the one that removes, and then SQLite's log (WAL) is
to be emptied. A mark in the file, set by the one that removes, says how far that is, also after a
kill or on a full disk.
"""

from __future__ import annotations

import sqlite3
from contextlib import suppress
from pathlib import Path

from daemon.library.schema import LibraryError, explained

# How far it is with what was removed.
_IN_FILE, _IN_LOG, _NOWHERE = range(3)


class Erasure:
    """On a library's connection; ``path`` is its file."""

    def __init__(self, db: sqlite3.Connection, path: Path) -> None:
        self._db, self._path = db, path

    def owe(self) -> None:
        """Note a removal, within its transaction; raises sqlite3.Error."""
        self._db.execute("DELETE FROM removal")
        self._db.execute("INSERT INTO removal(token) VALUES (randomblob(16))")

    def last_removal(self) -> bytes:
        """Another one after each removal; empty where there was none. Raises LibraryError."""
        return self._noted()[0]

    def owed(self) -> bool:
        """Whether bytes of what was removed may be in the file or its log. Raises LibraryError."""
        return self._noted()[1] != _NOWHERE

    def clear(self) -> None:
        """Leave nothing of what was removed, neither in the file nor beside it.

        The file is written anew where that is to be done still, which takes free space of
        twice its size, and holds up who writes, not who reads. Then the log, which has old
        pages, is emptied: that waits for readers. Raises LibraryError where they don't end, or
        the disk is full.
        """
        token, at = self._noted()
        if at == _IN_FILE:
            try:
                with explained(self._path):
                    self._write_anew()
                    self._mark(token, _IN_LOG)
            except LibraryError as error:
                raise LibraryError(
                    f"{error}. What was removed is out of the library, and bytes of it may be in "
                    "the file until fedd could write that anew, which it tries again by itself"
                ) from error
        with explained(self._path):
            busy, _, _ = self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        if busy:
            raise LibraryError(
                f"the log of {self._path} could not be emptied, for somebody reads it: what was "
                "removed is out of the library, and leaves the log when nobody does any more: fedd "
                "tries that again by itself"
            )
        if at != _NOWHERE:
            with explained(self._path):
                self._mark(token, _NOWHERE)

    def _write_anew(self) -> None:
        # By way of a file without a name, which holds texts: on the library's own disk, where
        # they belong, and not in a temporary folder, which may be small, or memory.
        folder = str(self._path.parent).replace("'", "''")
        self._db.execute(f"PRAGMA temp_store_directory = '{folder}'")
        try:
            self._db.execute("VACUUM")
        finally:
            with suppress(sqlite3.Error):  # it holds for the process
                self._db.execute("PRAGMA temp_store_directory = ''")

    def _mark(self, token: bytes, at: int) -> None:
        """Unless there was another removal meanwhile."""
        self._db.execute("UPDATE removal SET rewritten = ? WHERE token = ?", (at, token))

    def _noted(self) -> tuple[bytes, int]:
        """The token of the last removal, and how far it is with what was removed."""
        with explained(self._path):
            row = self._db.execute("SELECT token, rewritten FROM removal").fetchone()
        return (bytes(row[0]), int(row[1])) if row else (b"", _NOWHERE)
