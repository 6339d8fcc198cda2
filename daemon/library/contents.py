"""What a library holds, and says of itself: passages, documents without their text, counts."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any, Protocol

import numpy as np

from crypto.arrays import Float32
from daemon.library.passages import USUAL_LANGUAGE, Piece, header_of, sentences
from daemon.library.readers.documents import Document, Kind, Place
from daemon.library.schema import LibraryError


class Splitter(Protocol):
    """How a document becomes passages; see `daemon.library.passages`."""

    @property
    def name(self) -> str:
        """Names rule and budget: another name means that documents are split anew."""

    def __call__(self, document: Document, /) -> list[Piece]:
        """The document's passages, in reading order."""


@dataclass(frozen=True)
class Passage:
    """A retrievable piece of a document; ``rowid`` is its label in the dense index.

    ``context``, ``kind``, ``page``, ``ocr`` and ``place``: as in `daemon.library.passages.Piece`;
    ``language``: its document's.
    """

    rowid: int
    id: str
    document_id: str
    title: str
    text: str
    context: str = ""
    kind: Kind = "text"
    page: int = 0
    language: str = ""
    ocr: bool = False
    place: Place | None = None

    @property
    def sentences(self) -> list[str]:
        """Of its text, in order."""
        return sentences(self.text, self.language)

    def above(self, part: str) -> str:
        """What stands above one of its sentences; above a row of a table its header, too."""
        if self.kind != "table" or "\t" in self.context:  # of a part of a table it is there
            return self.context
        header = header_of(self.text.splitlines())
        return self.context if part in header else "\n".join(filter(None, (self.context, *header)))

    @property
    def embedding_text(self) -> str:
        """What the encoder reads for this passage."""
        return embedding_text(self.title, self.text, self.context)

    @property
    def content(self) -> bytes:
        """The digest of that, by which its features are kept."""
        return content_of(self.embedding_text)


@dataclass(frozen=True)
class IngestCounts:
    """What an ingest did to the documents; ``refused``: a line for each, with what to do.

    ``elsewhere``: their ids, which are here from other files. ``originals``: kept with it.
    """

    new: int = 0
    changed: int = 0
    unchanged: int = 0
    refused: tuple[str, ...] = ()
    elsewhere: tuple[str, ...] = ()
    originals: int = 0

    @classmethod
    def of(cls, tally: Mapping[str, int], elsewhere: Mapping[str, str]) -> IngestCounts:
        """``elsewhere``: by id the cause; "" where what is here says the same, so nothing is."""
        refused = tuple(filter(None, elsewhere.values()))
        new, changed, unchanged = (tally.get(one, 0) for one in ("new", "changed", "unchanged"))
        return cls(new, changed, unchanged + len(elsewhere) - len(refused), refused, (*elsewhere,))


class FromElsewhere(Exception):
    """A document has the id of another file's; the message is the cause and the remedy.

    Without one it says the same as what is here.
    """


@dataclass(frozen=True)
class RemovedCounts:
    """What went; ``pairs``: those that none of the documents here answers any more.

    ``waiting``: documents of which pages waited for OCR; they need not have been here.
    """

    documents: int = 0
    passages: int = 0
    pairs: int = 0
    waiting: int = 0


@dataclass(frozen=True)
class StoredDocument:
    """A document of the library without its text; ``passages``: into how many it is cut.

    ``language``: also where it was found in its text. The rest: as in `Document`.
    """

    id: str
    title: str
    split: str
    passages: int
    source: str = ""
    author: str = ""
    date: str = ""
    language: str = ""
    tags: tuple[str, ...] = ()


@dataclass(frozen=True)
class LibraryCounts:
    """Sizes of a library; a pair counts when one of its documents is here.

    ``waiting``: documents with pages that wait for OCR.
    """

    documents: int = 0
    passages: int = 0
    pairs_train: int = 0
    pairs_valid: int = 0
    pairs_test: int = 0
    waiting: int = 0


def embedding_text(title: str, text: str, context: str = "") -> str:
    """Title, context and text on lines of their own; what the next begins with only once."""
    for above in (context, title):
        if above and not text.startswith(above):
            text = f"{above}\n{text}"
    return text


def row_of(document: Document, name: str, piece: Piece) -> dict[str, Any]:
    """A passage of a document as the library keeps it, by what it is called there."""
    embedded = embedding_text(document.title, piece.text, piece.context)
    place = json.dumps(piece.place) if piece.place else None
    about = {"id": name, "of": document.id, "title": document.title}
    return vars(piece) | about | {"content": content_of(embedded), "place": place}


def content_of(embedded: str) -> bytes:
    """SHA-256 of a text as it is embedded."""
    return hashlib.sha256(embedded.encode()).digest()


def digests_of(document: Document, language: str, splitter: Splitter) -> tuple[bytes, bytes]:
    """By which what passages are cut from is known: as it is, and as format 2 had it.

    ``language``: also where it was found in its text.
    """
    fields: list[Any] = [splitter.name, document.title, document.text, document.split]
    about = (document.author, document.date, document.language)
    # What OCR did not read is known by what it was before that was noted.
    blocks = [astuple(span) if span.ocr else astuple(span)[:-1] for span in document.spans]
    if language not in ("", USUAL_LANGUAGE):  # cut by rules of its own, which format 2 had not
        own = hashlib.sha256(json.dumps([*fields, blocks, language]).encode()).digest()
        return own, own
    now = [*fields, blocks, "", "", ""] if blocks else fields
    earlier = [*fields, blocks, *about] if blocks or any(about) else fields
    first, second = (hashlib.sha256(json.dumps(x).encode()).digest() for x in (now, earlier))
    return first, second


def raw_rows(vectors: Float32, expected: int) -> list[bytes]:
    """Vectors, float32 [expected, d], as a library keeps them. Raises LibraryError for others."""
    if vectors.ndim != 2 or len(vectors) != expected:
        raise LibraryError(f"expected {expected} rows of features, got shape {vectors.shape}")
    return [row.tobytes() for row in np.ascontiguousarray(vectors, dtype="<f4")]


def matrix_of(raw: Sequence[bytes]) -> Float32:
    """Equal-length raw vectors as float32 [n, d]; [0, 0] when there are none."""
    if not raw:
        return np.zeros((0, 0), dtype=np.float32)
    if len({len(vector) for vector in raw}) != 1:
        raise LibraryError("cached features of one encoder differ in length: the file is damaged")
    return np.frombuffer(b"".join(raw), dtype="<f4").reshape(len(raw), -1).copy()


def query_content_of(query: str) -> bytes:
    """SHA-256 of a question, by which its features are kept."""
    return hashlib.sha256(query.encode()).digest()
