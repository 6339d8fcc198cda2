"""The bytes of the files that documents were read from, where these are kept.

They lie in a folder beside the library's file, each content once, named by its SHA-256. Which
documents have it, the library says, each for itself: who has one of two equal files has nothing
of the other. What is safe, and why:

- one process alone names and removes them, the one that writes the library;
- a content has its name, on the disk, before a document refers to it: so no kill leaves a
  document that refers to nothing. What a kill leaves instead, a content that no document refers
  to, goes with the next `collect`;
- what arrives has no such name until it is whole, and a start removes what has none
  (`crypto.durable.sweep`);
- the original of a file that others were in (a mail with what is attached) goes with the first of
  their documents that is removed: it has that one's text, too.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import sqlite3
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from crypto.durable import UNFINISHED, fsync
from daemon.process.faultpoints import passing
from proto import bounds

MOST_BYTES: Final = int(bounds.of("OfferedOriginal", "size").most)
"""Of a file that is kept."""
PIECE: Final = int(bounds.of("OriginalPiece", "content").most)
"""Of its bytes so many are held at a time."""

_NAMED: Final = re.compile("[0-9a-f]{64}")


@dataclass(frozen=True)
class OriginalFile:
    """What a document was read from: SHA-256 of its bytes, and how many they are."""

    digest: bytes
    size: int


@dataclass(frozen=True)
class Staged:
    """A whole file that lies in the folder, and is no document's yet.

    ``file``: of a watched folder, by collection and path.
    """

    document_id: str
    path: Path
    original: OriginalFile
    file: tuple[str, bytes] | None = None


def folder_of(library: Path) -> Path:
    """Where the originals of the library at that path lie."""
    return library.with_name("originals")


def place_of(library: Path, original: OriginalFile) -> Path:
    """Where the bytes of an original lie."""
    return folder_of(library) / original.digest.hex()


def is_there(library: Path, original: OriginalFile) -> bool:
    """Whether its bytes lie where they belong, as many as there should be."""
    try:
        return place_of(library, original).stat().st_size == original.size
    except OSError:
        return False


def containing(document_id: str) -> list[str]:
    """Ids that the document of a file may have which this one was in, from the outermost."""
    parts = document_id.split("/")
    return ["/".join(parts[:count]) for count in range(1, len(parts))]


# ---- on their way in -----------------------------------------------------------------


class Arriving:
    """A file on its way into the folder. Raises OSError; `drop` leaves nothing of it."""

    def __init__(self, library: Path, whose: str) -> None:
        """``whose``: by which `clear` finds what was left of an earlier one."""
        folder = folder_of(library)
        folder.mkdir(mode=0o700, exist_ok=True)
        self.path = folder / f"{UNFINISHED}{whose}.{secrets.token_hex(8)}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        self._file = os.fdopen(os.open(self.path, flags, 0o600), "wb")
        self._digest = hashlib.sha256()
        self.size = 0

    def write(self, piece: bytes) -> None:
        """The bytes that follow."""
        self._digest.update(piece)
        self._file.write(piece)
        self.size += len(piece)

    def end(self) -> OriginalFile:
        """That was all; it is on the disk."""
        with self._file as file:
            file.flush()
            os.fsync(file.fileno())
        return OriginalFile(self._digest.digest(), self.size)

    def drop(self) -> None:
        """Nobody wants it."""
        with suppress(OSError):  # what could not be written before
            self._file.close()
        self.path.unlink(missing_ok=True)


def clear(library: Path, whose: str) -> None:
    """Remove what was left of files that arrived: of one whose process was killed."""
    for left in folder_of(library).glob(f"{UNFINISHED}{whose}.*"):
        left.unlink(missing_ok=True)


# ---- in the library --------------------------------------------------------------------


class Originals:
    """On a library's connection; raises sqlite3.Error and OSError.

    What writes is called in a transaction, but for `collect`.
    """

    def __init__(self, db: sqlite3.Connection, library: Path) -> None:
        self._db = db
        self._library = library

    def of(self, document_id: str) -> OriginalFile | None:
        """What the document was read from; None: that is not kept."""
        rows = self._db.execute(
            "SELECT digest, size FROM original WHERE document_id = ?", (document_id,)
        ).fetchall()
        return OriginalFile(*rows[0]) if rows else None

    def keep(self, staged: Iterable[Staged]) -> int:
        """Make them their documents' originals, in the place of what these had; of how many.

        One whose document is not here is dropped; so is that of a watched file of whose
        documents a person has taken one out.
        """
        kept = 0
        for one in staged:
            collection, path = one.file or (None, None)
            kept_here = self._db.execute(
                "INSERT OR REPLACE INTO original(document_id, digest, size)"
                " SELECT id, ?2, ?3 FROM document WHERE id = ?1 AND NOT EXISTS"
                " (SELECT 1 FROM file_document f WHERE f.collection = ?4 AND f.path = ?5"
                " AND NOT EXISTS (SELECT 1 FROM document d WHERE d.id = f.document_id))",
                (one.document_id, one.original.digest, one.original.size, collection, path),
            ).rowcount
            if kept_here:
                one.path.rename(place_of(self._library, one.original))
                kept += 1
            else:
                one.path.unlink(missing_ok=True)
        if kept:
            fsync(folder_of(self._library))
        passing("originals:named")
        return kept

    def drop_containing(self, ids: Sequence[str]) -> None:
        """Nothing is kept any more of files that these documents were in."""
        around = sorted({name for one in ids for name in containing(one)})
        self._db.execute(
            "DELETE FROM original WHERE document_id IN (SELECT value FROM json_each(?))",
            (json.dumps(around),),
        )

    def collect(self) -> int:
        """Remove the bytes that no document refers to; how many files that were."""
        passing("originals:collect")
        folder = folder_of(self._library)
        try:
            named = [one for one in folder.iterdir() if _NAMED.fullmatch(one.name)]
        except FileNotFoundError:
            return 0
        wanted = {digest.hex() for (digest,) in self._db.execute("SELECT digest FROM original")}
        left = [one for one in named if one.name not in wanted]
        for one in left:
            one.unlink()
        if left:
            fsync(folder)
        return len(left)
