"""What goes into a library: documents, pairs, and what could not be read, each with its bounds."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import Literal, get_args

MAX_TEXT_BYTES = 16 << 20  # of a document or a text file; what one control message may carry
MAX_LINE_BYTES = 48 << 20  # of records: a text as JSON writes it, and where its blocks lie
MAX_ID, MAX_TITLE, MAX_QUERY_BYTES, MAX_POSITIVES = 512, 1000, 16 << 10, 1000
MAX_SOURCE = 4096  # characters of a path
MAX_ANSWERS, MAX_ANSWER_BYTES, MAX_LABEL = 20, 8 << 10, 64  # of a pair; a label in characters
MAX_SPANS = 100_000  # blocks of a document
MAX_TAGS, MAX_TAG = 50, 100  # of a document; characters of one
_BETWEEN = "\n\n"  # blocks
_PART = re.compile(r"#\d+\Z")
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")


Kind = Literal["text", "heading", "table", "figure"]

KINDS: tuple[Kind, ...] = get_args(Kind)
MAX_PAGE = 1 << 20
MAX_PAGES_NAMED = 1000  # characters of `FileProblem.pages`
INSTALL_OCR = "install tesseract-ocr, with its package for each language"

Place = tuple[float, float, float, float]
"""Left, top, right and bottom on a page, as parts of its width and height: 0 to 1."""


@dataclass(frozen=True)
class Block:
    """A piece of a file in reading order; a reader makes these, and nothing else of a text.

    The text of a table is a line a row, the header first; its cells stand between tabs.
    That of a figure is its caption and what was read in it.
    """

    kind: Kind
    text: str
    page: int = 0  # from 1; 0: a file without pages
    place: Place | None = None  # None: a file without a layout
    ocr: bool = False  # read from a picture, some of it at least


@dataclass(frozen=True)
class About:
    """What a file says about itself; all of it may be empty, and none of it need be true."""

    title: str = ""
    author: str = ""
    date: str = ""  # YYYY-MM-DD
    language: str = ""  # ISO 639-1


@dataclass(frozen=True)
class Attached:
    """A file in a file, as in a letter: read as a document of its own, where its kind is known."""

    name: str
    content: bytes


@dataclass(frozen=True)
class Span:
    """Where a block lies in its document's text: characters ``begin`` to ``end``, without it."""

    kind: Kind
    begin: int
    end: int
    page: int = 0
    place: Place | None = None
    ocr: bool = False


@dataclass(frozen=True)
class Document:
    """One text of a site; ``split`` is "" or train, valid, test: what may be learned from.

    ``spans``: its blocks in order; none of them overlap. Without any all of it is text.
    ``source``: the file that it is; "" where a file holds many. ``tags``: what people call it
    here; None: nothing is said of them, and they stay as they are. The rest: as in `About`.
    """

    id: str
    title: str
    text: str
    split: str = ""
    spans: tuple[Span, ...] = ()
    source: str = ""
    author: str = ""
    date: str = ""
    language: str = ""
    tags: tuple[str, ...] | None = None


def joined(blocks: Iterable[Block]) -> tuple[str, tuple[Span, ...]]:
    """The text that blocks make together, and where each of them lies in it."""
    texts: list[str] = []
    spans: list[Span] = []
    begin = 0
    for block in blocks:
        texts.append(block.text)
        end = begin + len(block.text)
        spans.append(Span(block.kind, begin, end, block.page, block.place, block.ocr))
        begin = end + len(_BETWEEN)
    return _BETWEEN.join(texts), tuple(spans)


@dataclass(frozen=True)
class Reference:
    """What a site knows of a question's right answer, to compare answers with; it never leaves it.

    Each of the ``answers`` is right. ``qtype`` and ``reasoning`` say what is asked for, and what
    it takes to answer (FedE4RAG, section VI-E), in the site's own words; "": nothing is said.
    """

    answers: tuple[str, ...] = ()
    qtype: str = ""
    reasoning: str = ""


@dataclass(frozen=True)
class Pair:
    """A question and the ids of the documents that answer it.

    ``reference``: None: nothing is said of it, and what is known stays.
    """

    query: str
    positives: tuple[str, ...]
    split: str = "train"
    reference: Reference | None = None


def answer_of(document_id: str) -> str:
    """The answer a document is part of: ``x`` for ``x#3``, itself without such an ending."""
    return _PART.sub("", document_id)


@dataclass(frozen=True)
class FileProblem:
    """What was not read, why, and what to do; ``line`` and ``page`` count from 1.

    ``passing``: it need not be the file's fault, and another try may go well. ``lacks``: what
    is not installed here and would have read it, of ``pages`` (as people write them: 4, 6 to 9);
    it comes behind its document. ``document``: the one that the file is, if it is one.
    """

    path: str
    cause: str
    line: int | None = None
    page: int | None = None
    passing: bool = False
    lacks: Literal["", "ocr"] = ""
    pages: str = ""
    document: str = ""

    def __str__(self) -> str:
        where = self.path
        if self.page is not None:
            where += f", page {self.page}"
        if self.line is not None:
            where += f", line {self.line}"
        # A file's name is not ours: it must not break the line or paint the terminal.
        return _CONTROL.sub("?", f"{where}: {self.cause}".encode(errors="replace").decode())

    def beside(self, path: str) -> str:
        """Likewise, where the name of the file at ``path`` that was read stands beside it."""
        inner = "" if self.path == path else PurePath(self.path).name
        return str(replace(self, path=inner)).lstrip(":, ")


@dataclass(frozen=True)
class Waiting:
    """Pages of a document that only OCR can read, where no engine is installed.

    ``document_id`` need not be in the library: a scan may have no other page. ``pages``: as in
    `FileProblem`; ``source``: as in `Document`.
    """

    document_id: str
    pages: str
    source: str = ""


Item = Document | Pair | FileProblem
Read = Block | About | Attached | FileProblem  # what a reader of one document makes of its file
