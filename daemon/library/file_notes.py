"""What is kept of the files of watched folders: how each was when it was read, and what it became.

The notes lie in the library's file, so that a file's documents and its note change in one
transaction (`Library.put_files`, `Library.delete_documents`).
"""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from daemon.library.catalogue.originals import Staged
from daemon.library.readers.documents import Document, Pair, Waiting
from daemon.library.schema import explained

# The last says whether its own document is here without its bytes, and none of those that it
# became was taken out.
_NOTES = (
    "SELECT f.path, size, mtime_ns, inode, digest, refused,"
    " EXISTS (SELECT 1 FROM waiting w WHERE w.collection = f.collection AND w.path = f.path),"
    " refused = '' AND EXISTS (SELECT 1 FROM document d"
    " WHERE d.id = f.collection || '/' || CAST(f.path AS TEXT)"
    " AND NOT EXISTS (SELECT 1 FROM original o WHERE o.document_id = d.id))"
    " AND NOT EXISTS (SELECT 1 FROM file_document x"
    " WHERE x.collection = f.collection AND x.path = f.path"
    " AND NOT EXISTS (SELECT 1 FROM document d WHERE d.id = x.document_id))"
    " FROM file f WHERE f.collection = ?"
)

# Records by whose ids two files go, each with the other one.
_NAMESAKES = (
    "SELECT mine.document_id, other.collection, other.path FROM file_document mine"
    " JOIN file_document other ON other.document_id = mine.document_id"
    " AND (other.collection, other.path) != (mine.collection, mine.path) AND other.current"
    " WHERE mine.collection = ?1 AND mine.path = ?2"
)


@dataclass(frozen=True)
class Stamp:
    """By what a file is seen to have changed; ``mtime_ns``: nanoseconds since 1970."""

    size: int
    mtime_ns: int
    inode: int


UNFINISHED = Stamp(-1, 0, 0)
"""No file has so many bytes: what is noted with this one is read again."""
_SETTLED = Stamp(-2, 0, 0)  # nor so many: it is looked at, and read again if its bytes are others


@dataclass(frozen=True)
class FileNote:
    """A file as it was read; ``refused``: why it, or some of it, was not.

    ``waits``: some of its pages do, for OCR: read again when there is an engine. Told by the
    library alone, which has it of what waits. So is ``lacks_original``: it was read as
    a whole, all of it is here, and the file itself is not kept.
    """

    stamp: Stamp
    digest: bytes  # SHA-256 of its content
    refused: str = ""
    waits: bool = False
    lacks_original: bool = False


@dataclass(frozen=True)
class FilePart:
    """What was read of a file. A large one comes in several parts, in order.

    ``note`` comes with the last part. One that is not the first and has nothing in it
    changes the note alone.
    """

    name: str  # path below the folder
    note: FileNote | None = None
    documents: tuple[Document, ...] = ()
    pairs: tuple[Pair, ...] = ()
    first: bool = True
    waiting: tuple[Waiting, ...] = ()
    original: Staged | None = None  # with the last part: the file itself, where it is to be kept

    def without(self, refused: Mapping[str, str]) -> FilePart:
        """But for documents that were refused, by id, each with the cause; the note says so."""
        if not refused:
            return self
        note, causes = self.note, list(filter(None, refused.values()))
        if note is not None and causes and not note.refused:
            more = f" (and {len(causes) - 1} more)" if len(causes) > 1 else ""
            note = replace(note, refused=causes[0] + more)
        documents = tuple(one for one in self.documents if one.id not in refused)
        return replace(self, documents=documents, note=note)


@dataclass(frozen=True)
class FilesRead:
    """Parts of files of one collection, which are stored together."""

    collection: str
    parts: tuple[FilePart, ...]


@dataclass(frozen=True)
class FilesGone:
    """Files of one collection that are no longer there; ``documents``: what goes with them.

    ``shrunk``: last parts of files that are there still, from which these came before.
    """

    collection: str
    names: tuple[str, ...]
    documents: tuple[str, ...]
    shrunk: tuple[FilePart, ...] = ()


class FileNotes:
    """The notes in an open library. What writes is the library's to call, in a transaction."""

    def __init__(self, db: sqlite3.Connection, path: Path) -> None:
        self._db = db
        self._path = path

    # ---- reading ---------------------------------------------------------------

    def of(self, collection: str) -> dict[str, FileNote]:
        """By path below the folder."""
        with explained(self._path):
            rows = self._db.execute(_NOTES, (collection,))
            return {
                os.fsdecode(path): FileNote(
                    Stamp(size, mtime_ns, inode), digest, refused, bool(waits), bool(lacks)
                )
                for path, size, mtime_ns, inode, digest, refused, waits, lacks in rows
            }

    def refused(self, collection: str, limit: int) -> tuple[int, list[tuple[str, str]]]:
        """How many files were refused, and the first of them by path, each with its cause."""
        where = " FROM file WHERE collection = ? AND refused != ''"
        with explained(self._path):
            ((count,),) = self._db.execute("SELECT count(*)" + where, (collection,))
            rows = self._db.execute(
                "SELECT path, refused" + where + " ORDER BY path LIMIT ?", (collection, limit)
            )
            return count, [(os.fsdecode(path), refused) for path, refused in rows]

    def documents_of(self, collection: str, names: Sequence[str]) -> dict[str, list[str]]:
        """Ids of the documents here that come from these files alone, by file."""
        keys = {name: (collection, os.fsencode(name)) for name in names}
        these = set(keys.values())
        found: dict[str, list[str]] = {}
        with explained(self._path):
            for name, key in keys.items():
                rows = self._db.execute(
                    "SELECT f.document_id FROM file_document f"
                    " JOIN document d ON d.id = f.document_id"
                    " WHERE f.collection = ? AND f.path = ?",
                    key,
                )
                ids = [document_id for (document_id,) in rows]
                found[name] = [one for one in ids if these.issuperset(self.owners(one))]
        return found

    def owners(self, document_id: str) -> list[tuple[str, bytes]]:
        """The files that a document comes from: collection and path."""
        return self._db.execute(
            "SELECT collection, path FROM file_document WHERE document_id = ?", (document_id,)
        ).fetchall()

    # ---- writing ---------------------------------------------------------------

    def put(self, collection: str, part: FilePart) -> bool:
        """Note a part of a file; whether documents came from it before, and do so no longer.

        It is unfinished then, until `finish`: a kill has it read again. Of a file that nothing
        could be read of, its documents stay as they were; so does what it had before, where it
        is to be read again.
        """
        key = (collection, os.fsencode(part.name))
        if part.first:
            self._note(key, FileNote(UNFINISHED, b""))
            self._mark(key, 0)
        self._db.executemany(
            "INSERT OR REPLACE INTO file_document VALUES (?, ?, ?, 1)",
            [(*key, document.id) for document in part.documents],
        )
        if part.note is None:
            return False
        rows = self._db.execute(
            "SELECT current FROM file_document WHERE collection = ? AND path = ?", key
        )
        current = [is_current for (is_current,) in rows]
        nothing_read = part.note.refused and not any(current)
        lost = not (all(current) or nothing_read or part.note.stamp == UNFINISHED)
        if not lost:
            self._mark(key, 1)
        self._note(key, FileNote(UNFINISHED, b"") if lost else self._with_namesake(key, part.note))
        return lost

    def left(self, collection: str, lost: Sequence[FilePart]) -> FilesGone:
        """What comes from no file any more, of files that have ``lost`` some by `put`.

        Another file may have become the owner of it meanwhile. Of whichever all is in others,
        that is finished.
        """
        keys = {(collection, os.fsencode(part.name)): part for part in lost}
        gone: dict[str, None] = {}
        shrunk = list[FilePart]()
        for key, part in keys.items():
            rows = self._db.execute(
                "SELECT document_id FROM file_document f WHERE collection = ? AND path = ?"
                " AND current = 0",
                key,
            ).fetchall()
            alone = [one for (one,) in rows if not self._is_elsewhere(one, keys)]
            gone |= dict.fromkeys(alone)
            last = replace(part, documents=(), pairs=(), first=False, waiting=())
            if alone:
                shrunk.append(last)
            else:
                self.finish(collection, [last])
        return FilesGone(collection, (), tuple(gone), tuple(shrunk))

    def _is_elsewhere(self, document_id: str, lost: Collection[tuple[str, bytes]]) -> bool:
        rows = self._db.execute(
            "SELECT collection, path, current FROM file_document WHERE document_id = ?",
            (document_id,),
        )
        return any(current or (name, path) not in lost for name, path, current in rows)

    def finish(self, collection: str, parts: Sequence[FilePart]) -> None:
        """Note files as they were read: what they had before and have no more, they never had."""
        for part in parts:
            key = (collection, os.fsencode(part.name))
            self._db.execute(
                "DELETE FROM file_document WHERE collection = ? AND path = ? AND current = 0", key
            )
            if part.note is not None:
                self._note(key, self._with_namesake(key, part.note))

    def _with_namesake(self, key: tuple[str, bytes], note: FileNote) -> FileNote:
        """Says of a record whose id another file has, too, that one of them stands."""
        other = self._db.execute(_NAMESAKES + " AND mine.current LIMIT 1", key).fetchone()
        if other is None or note.refused:
            return note
        document_id, _, path = other
        return replace(
            note,
            refused=f"{document_id} is in {os.fsdecode(path)}, too, and what was read last "
            "stands: give one of them another id",
        )

    def _note(self, key: tuple[str, bytes], note: FileNote) -> None:
        stamp = note.stamp
        self._db.execute(
            "INSERT INTO file(collection, path, size, mtime_ns, inode, digest, refused)"
            " VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7) ON CONFLICT(collection, path) DO UPDATE SET"
            " size = ?3, mtime_ns = ?4, inode = ?5, digest = ?6, refused = ?7",
            (*key, stamp.size, stamp.mtime_ns, stamp.inode, note.digest, note.refused),
        )

    def _mark(self, key: tuple[str, bytes], current: int) -> None:
        self._db.execute(
            "UPDATE file_document SET current = ?3 WHERE collection = ?1 AND path = ?2",
            (*key, current),
        )

    def settle(self, document_ids: Sequence[str]) -> None:
        """No file is tried again for the sake of documents that a person takes out.

        Until it changes: where its bytes are those of its last reading, its note alone is new.
        """
        self._db.executemany(
            "UPDATE file SET size = ?, refused = '' WHERE size = ? AND digest != x'' AND"
            " (collection, path) IN"
            " (SELECT collection, path FROM file_document WHERE document_id = ?)",
            [(_SETTLED.size, UNFINISHED.size, one) for one in document_ids],
        )

    def forget(self, gone: FilesGone) -> None:
        """Drop the notes of these files; what they had in the place of others is read again.

        Those that have shrunk are finished.
        """
        collection, names = gone.collection, gone.names
        self.finish(collection, gone.shrunk)
        for name in names:
            for _, *other in self._db.execute(
                _NAMESAKES, (collection, os.fsencode(name))
            ).fetchall():
                self._note((other[0], other[1]), FileNote(UNFINISHED, b""))
        self._db.executemany(
            "DELETE FROM file WHERE collection = ? AND path = ?",
            [(collection, os.fsencode(name)) for name in names],
        )

    def forget_all_but(self, collections: Sequence[str]) -> None:
        """Drop the notes of folders that are watched no longer; their documents stay."""
        self._db.execute(
            "DELETE FROM file WHERE collection NOT IN (SELECT value FROM json_each(?))",
            (json.dumps(list(collections)),),
        )
