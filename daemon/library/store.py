"""The library of a site: documents, their passages, question pairs and cached features.

One SQLite file in WAL mode: the learning worker writes, the answering worker
reads at the same time. What is safe and why:

- a passage's ``rowid`` is its label in the dense index and is never used again
  (AUTOINCREMENT), so an index built before a change can only miss a passage,
  never name a wrong one;
- features (what the frozen encoder says about a text) are addressed by the
  SHA-256 of that text and of the encoder: an old feature can't be taken for a
  new text, and a text that comes back is not encoded again;
- documents change, and what hung on their old passages goes, in one transaction.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import sqlite3
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from crypto.arrays import Float32, Int64, UInt8
from daemon.library.catalogue.catalogue import Catalogue
from daemon.library.catalogue.filters import Filters, fitting
from daemon.library.catalogue.language import language_of
from daemon.library.catalogue.near_duplicates import NearDuplicates
from daemon.library.catalogue.originals import OriginalFile, Originals
from daemon.library.catalogue.question_pairs import QuestionPairs
from daemon.library.catalogue.waiting import StoredWaiting, WaitingPages
from daemon.library.contents import (
    FromElsewhere,
    IngestCounts,
    LibraryCounts,
    Passage,
    RemovedCounts,
    Splitter,
    StoredDocument,
    digests_of,
    embedding_text,
    matrix_of,
    query_content_of,
    raw_rows,
    row_of,
)
from daemon.library.erasure import Erasure
from daemon.library.file_notes import FileNotes, FilePart, FilesGone, FilesRead
from daemon.library.files import FILE_ENDINGS
from daemon.library.passages import passage_ids
from daemon.library.readers.documents import Document, Pair, Waiting
from daemon.library.schema import explained, open_database, transaction
from daemon.library.words import WordsRanking
from daemon.process.faultpoints import passing

_PASSAGES = (
    "SELECT p.rowid, p.id, p.document_id, p.title, p.text, p.context, p.kind, p.page,"
    " (SELECT language FROM document d WHERE d.id = p.document_id), p.ocr, p.place FROM passage p"
)


class Library:
    """An open library. One connection: use it in the thread that opened it."""

    def __init__(self, connection: sqlite3.Connection, path: Path) -> None:
        self._db = connection
        self._path = path
        self.notes = FileNotes(connection, path)  # to be read
        self.near = NearDuplicates(connection, lambda: explained(path), self._transaction)
        self._words = WordsRanking(connection)
        self._catalogue = Catalogue(connection)
        self._pairs = QuestionPairs(connection)
        self._waiting = WaitingPages(connection)
        self._originals = Originals(connection, path)
        self.erasure = Erasure(connection, path)

    @classmethod
    def open(cls, path: Path, *, read_only: bool = False) -> Library:
        """Open the library at ``path``; unless ``read_only``, make it where there is none.

        Raises LibraryError: missing (read only), damaged, from a newer version,
        or an SQLite without FTS5.
        """
        return cls(open_database(path, read_only=read_only), path)

    def close(self) -> None:
        """Close the file; the library is of no use afterwards."""
        self._db.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # ---- documents and passages ----------------------------------------------

    def put_documents(
        self,
        documents: Iterable[Document],
        *,
        splitter: Splitter,
        replace: bool = False,
        waiting: Iterable[Waiting] = (),
    ) -> IngestCounts:
        """Store documents in one transaction: all of them or, on an error, none.

        A document with a known id replaces the old one and its passages; one
        that is the same as before costs a hash. Of two with one id the last
        stands. One that was read from another file is refused unless ``replace``. What is
        ``waiting`` is told behind its documents.
        """
        tally = Counter[str]()
        elsewhere: dict[str, str] = {}
        with self._transaction():
            dropped: set[bytes] = set()
            for document in documents:
                try:
                    tally[self._put_document(document, splitter, dropped, replace)] += 1
                except FromElsewhere as error:
                    elsewhere[document.id] = str(error)
            self._waiting.put(waiting, replace=replace)
            self._drop_features(dropped)
        return IngestCounts.of(tally, elsewhere)

    def _put_document(
        self, document: Document, splitter: Splitter, dropped: set[bytes], replace: bool
    ) -> str:
        row = self._db.execute(
            "SELECT digest, source, language FROM document WHERE id = ?", (document.id,)
        ).fetchone()
        language = document.language or (row[2] if row is not None else "")
        digest, earlier = digests_of(document, language, splitter)
        same = row is not None and row[0] in (digest, earlier)
        if row is not None and not replace and row[1] not in ("", document.source):
            if same and not self._catalogue.says_else(document):
                raise FromElsewhere
            raise FromElsewhere(
                f"{document.id} is here from {row[1]}, and {document.source or 'a record'} says "
                "otherwise: give one of them a --collection, or --replace it if the file has moved"
            )
        if same:
            self._db.execute(
                "UPDATE document SET digest = ?, source = ? WHERE id = ?",
                (digest, document.source or row[1], document.id),
            )
            self._waiting.drop(document.id)  # what still does is told behind it
            return "changed" if self._catalogue.enter(document) else "unchanged"
        language = language_of(document)  # that of another text may be another one
        digest, _ = digests_of(document, language, splitter)
        tags = self._catalogue.tags_of(document.id) if document.tags is None else document.tags
        document = dataclasses.replace(document, tags=tags, language=language)
        if row is not None:
            dropped |= self._remove(document.id)
        self._waiting.drop(document.id)
        self._db.execute(
            "INSERT INTO document(id, title, split, digest, source) VALUES (?, ?, ?, ?, ?)",
            (document.id, document.title, document.split, digest, document.source),
        )
        self._catalogue.enter(document)
        pieces = splitter(document)
        names = passage_ids(document.id, [piece.text for piece in pieces])
        self._db.executemany(
            "INSERT INTO passage(id, document_id, title, text, content, context, kind, page, place,"
            " begins, ends, ocr) VALUES (:id, :of, :title, :text, :content, :context, :kind, :page,"
            " :place, :begin, :end, :ocr)",
            [row_of(document, *named) for named in zip(names, pieces, strict=True)],
        )
        return "new" if row is None else "changed"

    def put_files(self, read: FilesRead, splitter: Splitter) -> tuple[IngestCounts, FilesGone]:
        """Store what was read of a watched folder's files, and its notes, in one transaction.

        What a file was before, it replaces; whatever else had its documents' ids, too: the
        collection's name is the folder's. A record, whose id is its own, replaces no file.
        With what came of it what `delete_documents` has still to take out: till then it is here.
        """
        tally = Counter[str]()
        elsewhere: dict[str, str] = {}
        with self._transaction():
            dropped: set[bytes] = set()
            lost: list[FilePart] = []
            for part in read.parts:
                file = (read.collection, os.fsencode(part.name))
                if part.first:
                    self._waiting.drop_of_file(file)
                refused: dict[str, str] = {}
                for one in part.documents:
                    try:
                        tally[self._put_document(one, splitter, dropped, one.source != "")] += 1
                    except FromElsewhere as error:
                        refused[one.id] = str(error)
                for pair in part.pairs:
                    self._pairs.put(pair)
                if self.notes.put(read.collection, stored := part.without(refused)):
                    lost.append(stored)
                elsewhere |= refused
                self._waiting.put(part.waiting, file)
            self._drop_features(dropped)
            left = self.notes.left(read.collection, lost)
            passing("files:write")
        passing("files:written")
        return IngestCounts.of(tally, elsewhere), left

    def forget_other_folders(self, watched: Sequence[str]) -> None:
        """Drop the notes of folders that are watched no longer; what was read there stays."""
        with self._transaction():
            self.notes.forget_all_but(watched)

    def delete_documents(self, ids: Iterable[str], gone: FilesGone | None = None) -> RemovedCounts:
        """Remove documents, and what hangs on them: passages, features, pairs of theirs alone.

        In one transaction, with the notes of the files that are ``gone``, or have shrunk. With
        `erasure.clear` behind it, no file holds their texts.
        """
        ids = list(ids)
        with self._transaction():
            if gone is None:
                self.notes.settle(ids)
            removed = self._delete(ids)
            if gone is not None:
                self.notes.forget(gone)
            passing("files:write")
        passing("files:written")
        return removed

    def _delete(self, ids: Sequence[str]) -> RemovedCounts:
        waiting = self._waiting.drop_of(ids)
        removed = sorted(self.known(ids))
        if not removed:
            return RemovedCounts(waiting=waiting)
        ((passages,),) = self._rows(
            "SELECT count(*) FROM passage WHERE document_id IN (SELECT value FROM json_each(?))",
            (json.dumps(removed),),
        )
        dropped: set[bytes] = set()
        for document_id in removed:
            dropped |= self._remove(document_id)
        self._drop_features(dropped)
        self._originals.drop_containing(removed)
        pairs, queries = self._pairs.drop_of(removed)
        self._db.executemany(
            "DELETE FROM query_feature WHERE content = ?",
            [(query_content_of(query),) for query in queries],
        )
        self.erasure.owe()
        # It marks words that are gone, and keeps them until its parts are merged.
        self._db.execute("INSERT INTO passage_words(passage_words) VALUES ('optimize')")
        return RemovedCounts(len(removed), passages, pairs, waiting)

    def documents(self, begins: str, after: str, limit: int) -> list[StoredDocument]:
        """Documents whose id begins so, in the order of ids, of those behind ``after``."""
        rows = self._rows(
            "SELECT d.id, d.title, d.split,"
            " (SELECT count(*) FROM passage p WHERE p.document_id = d.id),"
            " d.source, d.author, d.date, d.language"
            " FROM document d WHERE d.id > ?1 AND d.id >= ?2 AND substr(d.id, 1, ?3) = ?2"
            " ORDER BY d.id LIMIT ?4",
            (after, begins, len(begins), limit),
        )
        found = [StoredDocument(*row) for row in rows]
        return [dataclasses.replace(x, tags=self._catalogue.tags_of(x.id)) for x in found]

    def whole_documents(self, ids: Iterable[str], most: int) -> tuple[list[Document], int]:
        """As `Catalogue.whole`."""
        with explained(self._path):
            return self._catalogue.whole(ids, most)

    def waiting(self, begins: str, after: str, limit: int) -> list[StoredWaiting]:
        """As `WaitingPages.page`."""
        with explained(self._path):
            return self._waiting.page(begins, after, limit)

    def waiting_of(self, ids: Iterable[str]) -> set[str]:
        """As `WaitingPages.known`."""
        with explained(self._path):
            return self._waiting.known(ids)

    def original(self, document_id: str) -> OriginalFile | None:
        """As `Originals.of`."""
        with explained(self._path):
            return self._originals.of(document_id)

    def fitting(self, filters: Filters) -> list[int] | None:
        """Labels of the passages of documents that fit, ascending; None: all do.

        Raises NothingFits, which says what there is.
        """
        with explained(self._path):
            return fitting(self._db, filters)

    def passages_of(self, document_id: str) -> list[Passage]:
        """The passages of a document, in reading order; none where it isn't here."""
        return self._passages(
            _PASSAGES + " WHERE document_id = ? ORDER BY rowid",
            (document_id,),
        )

    def passage(self, passage_id: str) -> tuple[Passage | None, str, str]:
        """A passage, and the ids of those in front of it and behind it in its document."""
        found = self._passages(_PASSAGES + " WHERE id = ?", (passage_id,))
        if not found:
            return None, "", ""
        one, query = found[0], "SELECT id FROM passage WHERE document_id = ? AND rowid"
        where = (one.document_id, one.rowid)
        before = self._rows(f"{query} < ? ORDER BY rowid DESC LIMIT 1", where) or [("",)]
        after = self._rows(f"{query} > ? ORDER BY rowid LIMIT 1", where) or [("",)]
        return one, before[0][0], after[0][0]

    def _remove(self, document_id: str) -> set[bytes]:
        """Delete a document and its passages; the contents those passages had."""
        rows = self._db.execute("SELECT content FROM passage WHERE document_id = ?", (document_id,))
        contents = {row[0] for row in rows}
        # Passages by a statement of their own: a cascade would fire the triggers
        # as well, but only while foreign keys are enforced on this connection.
        self._db.execute("DELETE FROM passage WHERE document_id = ?", (document_id,))
        self._db.execute("DELETE FROM document WHERE id = ?", (document_id,))
        return contents

    def _drop_features(self, contents: set[bytes]) -> None:
        """Delete the features of texts that no passage has any more."""
        self._db.executemany(
            "DELETE FROM feature WHERE content = ?1"
            " AND NOT EXISTS (SELECT 1 FROM passage WHERE content = ?1)",
            [(content,) for content in contents],
        )

    def passages(self, *, split: str | None = None) -> list[Passage]:
        """All passages by rowid; or those of one split (a document without one is train)."""
        query = _PASSAGES
        if split is None:
            return self._passages(query + " ORDER BY p.rowid", ())
        query += (
            " JOIN document d ON d.id = p.document_id"
            " WHERE CASE d.split WHEN '' THEN 'train' ELSE d.split END = ? ORDER BY p.rowid"
        )
        return self._passages(query, (split,))

    def labels(self, split: str, collections: Sequence[str] = ()) -> dict[int, bytes]:
        """Rowids of the passages of a split, ascending, each with the digest of what is embedded.

        A document without a split is train.

        With ``collections``: of documents whose id begins with one of these, as it is
        written, capitals and all.
        """
        rows = self._rows(
            "SELECT p.rowid, p.document_id, p.content"
            " FROM passage p JOIN document d ON d.id = p.document_id"
            " WHERE CASE d.split WHEN '' THEN 'train' ELSE d.split END = ? ORDER BY p.rowid",
            (split,),
        )
        begins = tuple(collections)
        return {
            rowid: content for rowid, name, content in rows if not begins or name.startswith(begins)
        }

    def passages_by_rowid(self, rowids: Sequence[int]) -> dict[int, Passage]:
        """Passages by label; labels that are gone are left out."""
        labels = json.dumps([int(rowid) for rowid in rowids])
        where = " WHERE rowid IN (SELECT value FROM json_each(?))"
        return {one.rowid: one for one in self._passages(_PASSAGES + where, (labels,))}

    def _passages(self, query: str, values: Sequence[object]) -> list[Passage]:
        rows = self._rows(query, values)
        return [
            Passage(*(*row, bool(ocr), place and tuple(json.loads(place))))
            for *row, ocr, place in rows
        ]

    # ---- question pairs --------------------------------------------------------

    def put_pairs(self, pairs: Iterable[Pair]) -> int:
        """Store pairs; how many were not there before.

        A pair is its query and its documents: given again with another split,
        it moves there, so that no pair is both learned from and tested on.
        """
        added = 0
        with self._transaction():
            for pair in pairs:
                added += self._pairs.put(pair)
        return added

    def pairs(self, split: str) -> list[Pair]:
        """The pairs of a split, oldest first, with those of their documents that are here.

        A pair none of whose documents is here is left out: nothing can be
        learned from it and no ranking could be right.
        """
        with explained(self._path):
            return self._pairs.of_split(split)

    def referenced(self, split: str) -> tuple[list[Pair], int]:
        """As `QuestionPairs.referenced`."""
        with explained(self._path):
            return self._pairs.referenced(split)

    def changes(self) -> int:
        """Another number whenever somebody else has changed the library."""
        return int(self._rows("PRAGMA data_version", ())[0][0])

    def pairs_naming(
        self, begins: str, ids: Sequence[str] | None, after: int, limit: int
    ) -> list[tuple[int, Pair]]:
        """As `QuestionPairs.naming`."""
        with explained(self._path):
            return self._pairs.naming(begins, ids, after, limit)

    def known(self, ids: Iterable[str]) -> set[str]:
        """Those of the ids whose documents are here."""
        query = "SELECT id FROM document WHERE id IN (SELECT value FROM json_each(?))"
        return {row[0] for row in self._rows(query, (json.dumps(list(ids)),))}

    def similar(self, wrong_id: str) -> str:
        """As `Catalogue.similar`."""
        with explained(self._path):
            return self._catalogue.similar(wrong_id, FILE_ENDINGS)

    # ---- features ----------------------------------------------------------------

    def missing_features(self, encoder_digest: bytes, limit: int) -> list[tuple[int, str]]:
        """Up to ``limit`` (rowid, text to embed) without a feature; equal texts once."""
        rows = self._rows(
            "SELECT min(p.rowid), p.title, p.text, p.context FROM passage p WHERE NOT EXISTS"
            " (SELECT 1 FROM feature f WHERE f.encoder = ? AND f.content = p.content)"
            " GROUP BY p.content ORDER BY 1 LIMIT ?",
            (encoder_digest, limit),
        )
        return [(rowid, embedding_text(*of_passage)) for rowid, *of_passage in rows]

    def put_features(self, encoder_digest: bytes, rowids: Sequence[int], vectors: Float32) -> None:
        """Cache one vector for each passage: ``vectors`` is float32 [len(rowids), d].

        Passages that are gone by now are passed over.
        """
        raw = raw_rows(vectors, len(rowids))
        with self._transaction():
            self._db.executemany(
                "INSERT OR REPLACE INTO feature(encoder, content, vector)"
                " SELECT ?, content, ? FROM passage WHERE rowid = ?",
                [
                    (encoder_digest, vector, int(rowid))
                    for rowid, vector in zip(rowids, raw, strict=True)
                ],
            )

    def features(
        self, encoder_digest: bytes, rowids: Sequence[int] | None = None
    ) -> tuple[Int64, Float32]:
        """Labels [n] and cached vectors [n, d] of all passages that have one, by rowid.

        With ``rowids`` of these alone.
        """
        rows = self._rows(
            "SELECT p.rowid, f.vector FROM passage p"
            " JOIN feature f ON f.encoder = ?1 AND f.content = p.content"
            " WHERE ?2 IS NULL OR p.rowid IN (SELECT value FROM json_each(?2)) ORDER BY p.rowid",
            (encoder_digest, None if rowids is None else json.dumps(list(rowids))),
        )
        labels = np.array([rowid for rowid, _ in rows], dtype=np.int64)
        return labels, matrix_of([vector for _, vector in rows])

    def put_query_features(
        self, encoder_digest: bytes, queries: Sequence[str], vectors: Float32
    ) -> None:
        """Cache one vector for each query: ``vectors`` is float32 [len(queries), d]."""
        raw = raw_rows(vectors, len(queries))
        with self._transaction():
            self._db.executemany(
                "INSERT OR REPLACE INTO query_feature(encoder, content, vector) VALUES (?, ?, ?)",
                [
                    (encoder_digest, query_content_of(query), vector)
                    for query, vector in zip(queries, raw, strict=True)
                ],
            )

    def query_features(self, encoder_digest: bytes, queries: Sequence[str]) -> dict[str, Float32]:
        """The cached vectors [d] of those queries that have one."""
        features: dict[str, Float32] = {}
        for query in queries:
            rows = self._rows(
                "SELECT vector FROM query_feature WHERE encoder = ? AND content = ?",
                (encoder_digest, query_content_of(query)),
            )
            if rows:
                features[query] = np.frombuffer(rows[0][0], dtype="<f4")
        return features

    # ---- words ---------------------------------------------------------------------

    def bm25(
        self, query: str, k: int, among: Sequence[int] | None = None
    ) -> list[tuple[int, float]]:
        """The ``k`` best passages by BM25 over title and text: (rowid, share), best first.

        Shares as in `daemon.library.words`. Any text is a valid query; one without a word
        finds nothing. With ``among``: of these rowids.
        """
        with explained(self._path):
            return self._words.best(query, k, among)

    def words_in(self, query: str, rowids: Sequence[int]) -> dict[int, list[str]]:
        """The query's words that are in each of these passages, in the query's order."""
        with explained(self._path):
            return self._words.found_in(query, rowids)

    def count_common_words(self, seconds: float) -> None:
        """Count in how many passages common words are, for so long: a question is to know it."""
        with explained(self._path):
            self._words.count_common(seconds)

    # ---- the whole -------------------------------------------------------------------

    def counts(self) -> LibraryCounts:
        """Sizes; pairs as `pairs` returns them."""
        usable = (
            "SELECT count(*) FROM pair q WHERE q.split = ? AND EXISTS (SELECT 1 FROM"
            " pair_positive x JOIN document d ON d.id = x.document_id WHERE x.pair = q.rowid)"
        )
        queries: list[tuple[str, tuple[str, ...]]] = [
            ("SELECT count(*) FROM document", ()),
            ("SELECT count(*) FROM passage", ()),
            *((usable, (split,)) for split in ("train", "valid", "test")),
            ("SELECT count(*) FROM waiting", ()),
        ]
        return LibraryCounts(*(self._rows(query, values)[0][0] for query, values in queries))

    def titles(self) -> list[tuple[int, str, str]]:
        """Label, document id and title of all passages, by label."""
        return [
            (rowid, name, title)
            for rowid, name, title in self._rows(
                "SELECT rowid, document_id, title FROM passage ORDER BY rowid", ()
            )
        ]

    def document_of(self) -> dict[int, str]:
        """The document of each passage, by label: to judge a ranking takes no text."""
        return dict(self._rows("SELECT rowid, document_id FROM passage ORDER BY rowid", ()))

    def rowids(self) -> list[int]:
        """The labels of all passages, ascending."""
        return [rowid for (rowid,) in self._rows("SELECT rowid FROM passage ORDER BY rowid", ())]

    def contents(self) -> tuple[Int64, UInt8]:
        """The labels of all passages [n], ascending, and SHA-256 of what is embedded [n, 32]."""
        rows = self._rows("SELECT rowid, content FROM passage ORDER BY rowid", ())
        digests = np.frombuffer(b"".join(content for _, content in rows), np.uint8)
        return np.array([rowid for rowid, _ in rows], np.int64), digests.reshape(len(rows), 32)

    def content_labels(self) -> dict[bytes, int]:
        """The digests of the texts that are embedded, each with a passage's label."""
        return dict(self._rows("SELECT content, min(rowid) FROM passage GROUP BY content", ()))

    def content_digest(self) -> bytes:
        """SHA-256 over labels, embedded texts and the last removal.

        An index with another one is stale, or may hold what was removed.
        """
        digest = hashlib.sha256(b"hanse-library-v1\0")
        with explained(self._path):
            for rowid, content in self._db.execute(
                "SELECT rowid, content FROM passage ORDER BY rowid"
            ):
                digest.update(rowid.to_bytes(8, "little") + content)
        digest.update(self.erasure.last_removal())
        return digest.digest()

    def _rows(self, query: str, values: Sequence[object]) -> list[tuple[Any, ...]]:
        with explained(self._path):
            return self._db.execute(query, tuple(values)).fetchall()

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        with explained(self._path), transaction(self._db):
            yield
