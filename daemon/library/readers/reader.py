"""What a reader is: one file to a stream of blocks or of records, and how it refuses."""

from __future__ import annotations

import errno
import gzip
import io
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from daemon.library.readers import documents
from daemon.library.readers.bounds import is_day, is_language, on_one_line
from daemon.library.readers.documents import (
    MAX_ID,
    MAX_TITLE,
    About,
    Attached,
    Block,
    Document,
    FileProblem,
    Item,
    Read,
    joined,
)

STEP = 1 << 20  # bytes read at a time
_PASSING = frozenset(
    getattr(errno, name)
    for name in (
        *("EAGAIN", "EBUSY", "EDQUOT", "EHOSTDOWN", "EINTR", "EIO", "EMFILE", "ENFILE"),
        *("ENOMEM", "ENOSPC", "ENOTCONN", "ESTALE", "ETIMEDOUT"),
    )
)


@dataclass(frozen=True)
class Source:
    """A regular file that is not empty; ``name``: its path below the folder that was given.

    ``path`` is where it is opened, and need not be called as it is.

    ``watch`` hears of the bytes that are read, as they lie on the disk, as ``size`` is, and
    of each block: whoever reads is alive.
    """

    path: Path
    name: str
    size: int
    watch: Callable[[int], None] = lambda _: None

    def open(self) -> io.BufferedReader:
        """To read it from its beginning; raises OSError."""
        return io.BufferedReader(_Watched(self.path, self.watch), STEP)


class _Watched(io.FileIO):
    """A file that tells how much of it is read."""

    def __init__(self, path: Path, watch: Callable[[int], None]) -> None:
        super().__init__(path)
        self._watch = watch

    def readinto(self, buffer: Any) -> int:
        count = super().readinto(buffer) or 0  # None: it would block, and regular files don't
        self._watch(count)
        return count


@dataclass(frozen=True)
class Reader:
    """How files of a kind are read, never more than a document of them held at a time.

    One of the two is set. ``blocks``: what a file is made of, which is one document, its id
    the file's name. ``records``: documents and pairs with ids of their own; what came before
    an error counts. Both may raise `Refused`, OSError, EOFError and zlib.error, and import the
    libraries that they need when they are called: whoever looks at this table needs none.

    ``page``: draws a page of the file at a path, from 1, at so many pixels an inch, as a PNG;
    raises `NoSuchPage`, too. ``inert``: what stands behind the name of such a file where it is
    given out, so that nothing runs what is in it.
    """

    blocks: Callable[[Source], Iterator[Read]] | None = None
    records: Callable[[Source], Iterator[Item]] | None = None
    page: Callable[[Path, int, int], bytes] | None = None
    inert: str = ""

    @property
    def named_by_file(self) -> bool:
        """Whether a file is one document, under its own name."""
        return self.blocks is not None

    def read(self, source: Source) -> Iterator[Item | Attached]:
        """What is in the file."""
        if self.blocks is not None:
            yield from _document(source, self.blocks(source))
        if self.records is not None:
            yield from self.records(source)


def _document(source: Source, pieces: Iterator[Read]) -> Iterator[Item | Attached]:
    """The document that a file is, behind what it can't say and what is attached to it."""
    try:
        source.name.encode()
    except UnicodeEncodeError:
        raise Refused("the file's name is not UTF-8: rename it") from None
    name = limited("its path", source.name, MAX_ID)
    about, size, problems = About(), 0, 0
    blocks: list[Block] = []
    lacking: list[FileProblem] = []  # behind the document that they are about
    for piece in pieces:
        source.watch(0)
        if isinstance(piece, About):
            about = piece
        elif isinstance(piece, Block):
            size += len(piece.text.encode())
            if size > documents.MAX_TEXT_BYTES:
                limit = documents.MAX_TEXT_BYTES >> 20
                raise Refused(f"longer than {limit} MiB of text: cut it into several files")
            if piece.text:  # else its span would be none
                blocks.append(piece)
        elif isinstance(piece, FileProblem) and piece.lacks:
            lacking.append(piece)
        else:
            problems += isinstance(piece, FileProblem)
            yield piece
    if blocks:
        # A page's first heading says less of a document than its file's name does.
        headings = (block.text for block in blocks if block.kind == "heading" and not block.page)
        heading = next(headings, "")
        title = about.title or heading or PurePosixPath(source.name).stem
        text, spans = joined(blocks)
        if all(block == Block("text", block.text) for block in blocks):
            spans = ()  # they would say nothing
        if len(spans) > documents.MAX_SPANS:
            most = documents.MAX_SPANS
            raise Refused(f"more than {most:,} paragraphs and tables: cut it into several files")
        yield Document(
            name,
            title[:MAX_TITLE],
            text,
            spans=spans,
            author=on_one_line(about.author[:MAX_TITLE]),
            date=about.date if is_day(about.date) else "",
            language=about.language if is_language(about.language) else "",
        )
    elif not problems and not lacking:
        raise Refused("no text in it: nothing to ingest")
    yield from lacking


class Refused(Exception):
    """A record or a file that is not taken; the message is the cause and the remedy."""


class NoSuchPage(Exception):
    """A file has fewer pages than that: so many."""

    def __init__(self, pages: int) -> None:
        super().__init__(f"it has {pages} pages")
        self.pages = pages


class TooSlow(BaseException):
    """A page, or another piece of a file, takes longer than it may. Raised wherever it is read.

    No Exception: libraries go on after these.
    """


def decoded(raw: bytes) -> str:
    """The text of a file or a line. Raises Refused for what is no UTF-8."""
    if b"\0" in raw:
        raise Refused("binary, or text in UTF-16 (it has zero bytes): save it as UTF-8 text")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise Refused(f"not UTF-8 (at byte {error.start}): save it as UTF-8 text") from None


def limited(what: str, value: str, limit: int) -> str:
    """``value``; Refused when it has more characters than that."""
    if len(value) > limit:
        raise Refused(f"{what} is longer than {limit} characters: shorten it")
    return value


def cause_of(error: Exception) -> str:
    """One line for what the system said, with what to do."""
    rules: list[tuple[type[Exception], str]] = [
        (FileNotFoundError, "not there (any more): check the path"),
        (PermissionError, "permission denied: run fedctl as someone who may read it"),
        (gzip.BadGzipFile, "not a gzip file: pack it again or drop the .gz"),
        (EOFError, "cut short: copy or pack it again"),
        (zlib.error, "damaged: copy or pack it again"),
    ]
    for kind, text in rules:
        if isinstance(error, kind):
            return text
    return getattr(error, "strerror", None) or str(error)


def is_passing(error: Exception) -> bool:
    """Whether the machine's state caused it, and not the file's content."""
    return isinstance(error, OSError) and error.errno in _PASSING
