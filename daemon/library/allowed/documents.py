"""The documents of some collections, as a library of their own in memory.

Who may ask of some collections is to be answered as if the site had no other documents. What is
counted over a whole library says something of each part of it: in how many passages a word is and
how long these are, which titles there are, which of three alike passages the other two are copies
of, which author's name is nearest to a wrong one, and how long it takes to pass over what is not
wanted. So nothing is filtered: here is a `Library` that never had anything else, and all that asks
one asks this one (docs/decisions/0046).

It is brought up to date from the file, of which only the ranges of these collections are read: ids
of documents begin with their collection's name.
"""

from __future__ import annotations

import sqlite3
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from string import Template

from crypto.arrays import Int64
from daemon.library.catalogue.minhash import Shingles, keys_of, likeness, shingles_of, words_of
from daemon.library.catalogue.near_duplicates import ALIKE, Copies, NearDuplicates, numbers_of
from daemon.library.schema import explained, in_memory
from daemon.library.store import Library

_REMEMBERED = 10_000  # texts whose shingles are; some kilobyte each
_ALLOWED = """
CREATE TEMP TABLE allowed (begins TEXT NOT NULL, below TEXT NOT NULL);
CREATE TEMP TABLE wanted (rowid INTEGER PRIMARY KEY, id TEXT NOT NULL, content BLOB NOT NULL);
"""
_DOCUMENT = "id, title, split, digest, source, author, date, language"
_PASSAGE = (
    "rowid, id, document_id, title, text, content, context, kind, page, place, begins, ends, ocr"
)
# The parts of a statement that are ours alone: ranges by the index of the table's column. A CROSS
# JOIN is carried out in the order in which it is written.
_OURS = {
    "D": _DOCUMENT,
    "P": _PASSAGE,
    "DOCUMENTS": "allowed a CROSS JOIN there.document d ON d.id >= a.begins AND d.id < a.below",
    "PASSAGES": "allowed a CROSS JOIN there.passage p"
    " ON p.document_id >= a.begins AND p.document_id < a.below",
    "POSITIVES": "allowed a CROSS JOIN there.pair_positive x"
    " ON x.document_id >= a.begins AND x.document_id < a.below",
}
# In their order, in one transaction. A passage never changes under its label; what is known of
# a document may, without one. A pair is of these collections if all that answers it is.
_UPDATE = [
    Template(statement).substitute(_OURS)
    for statement in (
        "DELETE FROM wanted",
        "INSERT INTO wanted SELECT p.rowid, p.id, p.content FROM $PASSAGES",
        "DELETE FROM main.passage WHERE NOT EXISTS (SELECT 1 FROM wanted w"
        " WHERE w.rowid = passage.rowid AND w.id = passage.id AND w.content = passage.content)",
        "INSERT INTO main.passage($P) SELECT $P FROM there.passage WHERE rowid IN"
        " (SELECT rowid FROM wanted EXCEPT SELECT rowid FROM main.passage) ORDER BY rowid",
        "DELETE FROM main.facet",
        "DELETE FROM main.document",
        "INSERT INTO main.document($D) SELECT $D FROM $DOCUMENTS",
        "INSERT INTO main.facet(kind, value, document_id) SELECT f.kind, f.value, f.document_id"
        " FROM main.document d CROSS JOIN there.facet f ON f.document_id = d.id",
        "DELETE FROM main.pair_positive",
        "DELETE FROM main.pair",
        "INSERT INTO main.pair(rowid, digest, query, split) SELECT rowid, digest, query, split"
        " FROM there.pair q WHERE split = 'valid' AND rowid IN (SELECT x.pair FROM $POSITIVES)"
        " AND NOT EXISTS (SELECT 1 FROM there.pair_positive y WHERE y.pair = q.rowid"
        " AND NOT EXISTS (SELECT 1 FROM allowed b"
        " WHERE y.document_id >= b.begins AND y.document_id < b.below))",
        "INSERT INTO main.pair_positive(pair, position, document_id)"
        " SELECT y.pair, y.position, y.document_id FROM main.pair q"
        " CROSS JOIN there.pair_positive y ON y.pair = q.rowid",
    )
]
_STATE = (
    "SELECT rowid, content FROM passage ORDER BY rowid",
    "SELECT rowid, digest FROM pair ORDER BY rowid",
)


class AllowedLibrary(Library):
    """What a library has of some collections, as `update` found it last."""

    def __init__(self, path: Path, collections: Sequence[str]) -> None:
        """Empty; ``path``: of the whole library's file. ``collections``: names without a slash."""
        connection = in_memory()
        super().__init__(connection, path)
        self.near = AmongFound(connection, lambda: explained(path), self._transaction)
        connection.executescript(_ALLOWED)
        connection.executemany(
            "INSERT INTO allowed VALUES (?1 || '/', ?1 || '/' || CAST(x'ff' AS TEXT))",
            [(one,) for one in collections],
        )
        self.state = b""  # SHA-256 of its passages, and pairs to fit by

    def update(self) -> bool:
        """Bring it up to date; whether its passages, or pairs to fit by, have changed.

        Raises LibraryError; it is as it was before, then.
        """
        with explained(self._path):
            self._db.execute("ATTACH ? AS there", (str(self._path),))
            try:
                # Not IMMEDIATE, which would take the turn of who writes the file.
                self._db.execute("BEGIN")
                for statement in _UPDATE:
                    self._db.execute(statement)
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise
            finally:
                self._db.execute("DETACH there")
        digest = sha256()
        for query in _STATE:
            for rowid, content in self._rows(query, ()):
                digest.update(rowid.to_bytes(8, "little") + content)
        before, self.state = self.state, digest.digest()
        return self.state != before


@dataclass(frozen=True)
class _Text:
    """What two passages are compared by."""

    numbers: list[str]
    shingles: Shingles
    keys: list[int]


class AmongFound(NearDuplicates):
    """Near duplicates among the passages that a question has found, and no others.

    The groups of the whole library (`daemon.library.catalogue.near_duplicates`) have leaders in
    any collection, and tell of these. Here the best found is the leader. To find the groups of
    all passages would take nearly a second a thousand; a question has found some fifty.
    """

    def __init__(
        self,
        db: sqlite3.Connection,
        reading: Callable[[], AbstractContextManager[None]],
        writing: Callable[[], AbstractContextManager[None]],
    ) -> None:
        super().__init__(db, reading, writing)
        self._kept: OrderedDict[int, _Text] = OrderedDict()  # that was asked for last stands last

    def leaders(self, rowids: Sequence[int]) -> dict[int, int]:
        """As in `NearDuplicates`; the first in this order of those alike is their leader."""
        texts = self._known(rowids)
        found: dict[int, int] = {}
        met: defaultdict[int, list[int]] = defaultdict(list)  # leaders, by their keys
        for rowid in dict.fromkeys(rowids):
            if (mine := texts.get(rowid)) is None:
                continue
            best, leader = ALIKE, rowid
            for other in dict.fromkeys(one for key in mine.keys for one in met[key]):
                if texts[other].numbers == mine.numbers:
                    alike = likeness(mine.shingles, texts[other].shingles)
                    if alike > best or (alike == best and leader == rowid):
                        best, leader = alike, other
            found[rowid] = leader
            if leader == rowid:
                for key in mine.keys:
                    met[key].append(rowid)
        return found

    def copies(
        self, of: Mapping[int, Sequence[int]], among: Int64 | None = None
    ) -> dict[int, Copies]:
        """Those that each is mapped to: no others are known."""
        del among  # they are of those already
        return self._named({rowid: list(others) for rowid, others in of.items() if others})

    def _known(self, rowids: Sequence[int]) -> dict[int, _Text]:
        """The texts of those of them that are here."""
        texts: dict[int, _Text] = {}
        with self._reading():
            there = self._texts_of(rowids)
        for rowid, text in there:
            one = self._kept.pop(rowid, None)
            if one is None:
                words = words_of(text)
                shingles, numbers = shingles_of(words), numbers_of(words)
                one = _Text(numbers, shingles, keys_of(shingles, " ".join(numbers)))
            texts[rowid] = self._kept[rowid] = one
        while len(self._kept) > _REMEMBERED:
            self._kept.popitem(last=False)
        return texts
