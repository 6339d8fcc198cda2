"""The catalogue in a library's file: tags, words of titles and authors, and texts as read.

What documents are found by, beside what is in their passages, are *facets*: a kind (title,
author, date, language, tag), a value, and the documents that have it. The primary key is in
that order, so each filter is a range of it.
"""

from __future__ import annotations

import json
import sqlite3
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace

from daemon.library.catalogue.language import language_of
from daemon.library.catalogue.name_words import name_words
from daemon.library.readers.documents import Block, Document, Place, Span, joined


class Catalogue:
    """On a library's connection; raises sqlite3.Error. What writes is called in a transaction."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db

    # ---- writing ---------------------------------------------------------------

    def enter(self, document: Document) -> bool:
        """Of a document whose row is there, all that it says of itself; whether any of it is new.

        To find out its language takes longer than all else: done only where it isn't known.
        """
        before = self._db.execute(
            "SELECT author, date, language FROM document WHERE id = ?", (document.id,)
        ).fetchone()
        is_known = self._has_text(document.id)  # a format before kept none
        is_told = is_known and document.language in ("", before[2])
        language = before[2] if is_told else language_of(document)
        about = (document.author, document.date, language)
        if is_known and about == before:
            return self._tag(document.id, document.tags)
        self._db.execute(
            "UPDATE document SET author = ?, date = ?, language = ? WHERE id = ?",
            (*about, document.id),
        )
        return self._put(replace(document, language=language)) or about != before

    def _put(self, document: Document) -> bool:
        """Its facets and its text, its language told or found; whether its tags have changed."""
        said = [("title", word) for word in name_words(document.title)]
        said += [("author", word) for word in name_words(document.author)]
        said += [("date", document.date), ("language", document.language)]
        self._db.execute(
            "DELETE FROM facet WHERE document_id = ? AND kind != 'tag'", (document.id,)
        )
        self._enter(document.id, [one for one in said if one[1]])
        self._db.execute("DELETE FROM document_text WHERE document_id = ?", (document.id,))
        spans = [asdict(span) for span in document.spans]
        self._db.execute(
            "INSERT INTO document_text(document_id, text, spans) VALUES (?, ?, ?)",
            (document.id, _packed(document.text), _packed(json.dumps(spans)) if spans else b""),
        )
        return self._tag(document.id, document.tags)

    def _tag(self, document_id: str, tags: Iterable[str] | None) -> bool:
        """Give a document these tags and no others; whether any changed. None: they stay."""
        before = self.tags_of(document_id)
        if tags is None or before == (after := tuple(sorted(set(tags)))):
            return False
        self._db.execute("DELETE FROM facet WHERE document_id = ? AND kind = 'tag'", (document_id,))
        self._enter(document_id, [("tag", tag) for tag in after])
        return True

    def _enter(self, document_id: str, said: Sequence[tuple[str, str]]) -> None:
        self._db.executemany(
            "INSERT OR IGNORE INTO facet(kind, value, document_id) VALUES (?, ?, ?)",
            [(kind, value, document_id) for kind, value in said],
        )

    # ---- reading ---------------------------------------------------------------

    def tags_of(self, document_id: str) -> tuple[str, ...]:
        """A document's tags, in their order."""
        rows = self._db.execute(
            "SELECT value FROM facet WHERE document_id = ? AND kind = 'tag' ORDER BY value",
            (document_id,),
        )
        return tuple(value for (value,) in rows)

    def _has_text(self, document_id: str) -> bool:
        """Whether its text is kept as it was read: not of one that an older format stored."""
        rows = self._db.execute("SELECT 1 FROM document_text WHERE document_id = ?", (document_id,))
        return rows.fetchone() is not None

    def says_else(self, document: Document) -> bool:
        """Whether it tells another author, date, language or tags than what is here."""
        here = self._db.execute(
            "SELECT author, date, language FROM document WHERE id = ?", (document.id,)
        ).fetchone()
        told = (document.author, document.date, document.language)
        if any(one not in ("", there) for one, there in zip(told, here, strict=True)):
            return True
        tags = document.tags
        return tags is not None and tuple(sorted(set(tags))) != self.tags_of(document.id)

    def whole(self, ids: Iterable[str], most: int) -> tuple[list[Document], int]:
        """The first of these with their texts, and of how many ids that is; what is gone is not.

        Texts of ``most`` characters together, or one more document.
        """
        found: list[Document] = []
        size = taken = 0
        for document_id in ids:
            if size >= most:
                break
            taken += 1
            row = self._db.execute(
                "SELECT id, title, split, author, date, language, text, spans FROM document"
                " LEFT JOIN document_text ON document_id = id WHERE id = ?",
                (document_id,),
            ).fetchone()
            if row is None:
                continue
            name, title, split, author, date, language, text, spans = row
            document = Document(
                name,
                title,
                text="",
                split=split,
                author=author,
                date=date,
                language=language,
                tags=self.tags_of(name),
            )
            if text is None:
                document = self._of_passages(document)
            else:
                document = replace(document, text=_unpacked(text), spans=_spans(spans))
            size += len(document.text)
            found.append(document)
        return found, taken

    def similar(self, wrong_id: str, endings: Sequence[str]) -> str:
        """The id of a document that is here and that a wrong id may mean; empty: none.

        People leave out the ending (one of ``endings``) or the folder of a file, or name the
        folder above it.
        """
        ends = ("", *endings)
        names = [name + end for name in (wrong_id, wrong_id.rpartition("/")[2]) for end in ends]
        for name in names:
            rows = self._db.execute(
                "SELECT id FROM document WHERE id = ?1"
                " OR substr(id, -length(?2)) = ?2 ORDER BY id LIMIT 1",
                (name, f"/{name}"),
            ).fetchall()
            if rows:
                return str(rows[0][0])
        return ""

    def _of_passages(self, document: Document) -> Document:
        """Of a document without its text what its passages have: all but its headings."""
        rows = self._db.execute(
            "SELECT kind, text, page, place, ocr FROM passage WHERE document_id = ? ORDER BY rowid",
            (document.id,),
        )
        blocks = [
            Block(kind, text, page, _place(json.loads(place)) if place else None, bool(ocr))
            for kind, text, page, place, ocr in rows
        ]
        text, spans = joined(blocks)
        plain = all(block == Block("text", block.text) for block in blocks)
        return replace(document, text=text, spans=() if plain else spans)


def _packed(text: str) -> bytes:
    return zlib.compress(text.encode(errors="surrogatepass"))


def _unpacked(raw: bytes) -> str:
    return zlib.decompress(raw).decode(errors="surrogatepass")


def _spans(raw: bytes) -> tuple[Span, ...]:
    if not raw:
        return ()
    return tuple(
        Span(**(one | {"place": _place(one["place"]) if one["place"] else None}))
        for one in json.loads(_unpacked(raw))
    )


def _place(told: Sequence[float]) -> Place:
    left, top, right, bottom = told
    return left, top, right, bottom
