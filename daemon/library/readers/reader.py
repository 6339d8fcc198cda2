"""What a reader is: one file to a stream of documents and pairs, and how it refuses.

A reader of one document makes blocks; what all of those share is here, too: tables as text,
and the bounds of what a file may say.
"""

from __future__ import annotations

import gzip
import io
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from daemon.library.readers import documents
from daemon.library.readers.documents import (
    MAX_TITLE,
    About,
    Block,
    FileProblem,
    Item,
    Place,
    Read,
)

STEP = 1 << 20  # bytes read at a time
_LONGEST_TABLE = 1 << 20  # characters; a longer one goes on in a further block
_LONGEST_NAME = 300  # characters of an author, or of several
# What no text has: controls but tab and line feed, halves of surrogate pairs.
_UNWANTED = re.compile("[\x00-\x08\x0b-\x1f\x7f\ud800-\udfff\ufeff]")
_LANGUAGE = re.compile(r"([A-Za-z]{2})(?:[-_]|\Z)")
_PICTURE = re.compile(r"^\S+\.(?:png|jpe?g|gif|emf|wmf|bmp|tiff?|svg|webp)$", re.IGNORECASE)
_DATE = re.compile(r"\s*(\d{4}-(?:0[1-9]|1[0-2])-(?:0[1-9]|[12]\d|3[01]))(?:\D|\Z)")


@dataclass(frozen=True)
class Source:
    """A regular file that is not empty; ``name``: its path below the folder that was given.

    ``watch`` hears of the bytes that are read, as they lie on the disk, as ``size`` is.
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

    ``read`` may raise `Refused`, OSError, EOFError and zlib.error: what it has yielded by then
    counts. ``named_by_file``: its documents' ids are their files' names.
    """

    read: Callable[[Source], Iterator[Item]]
    named_by_file: bool = False


class Refused(Exception):
    """A record or a file that is not taken; the message is the cause and the remedy."""


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


def one_line(text: str) -> str:
    """``text`` with each run of white space as one space."""
    return " ".join(text.split())


def alternative(text: str) -> str:
    """What is told of a picture to who can't see it; "" where that is but its file's name."""
    line = one_line(text)
    return "" if _PICTURE.search(line) else line


def about(title: str = "", author: str = "", date: str = "", language: str = "") -> Iterator[About]:
    """What a file says of itself, in the form of the contract; nothing where it says nothing."""
    day, code = _DATE.match(date), _LANGUAGE.match(language.strip())
    said = About(
        one_line(_UNWANTED.sub(" ", title))[:MAX_TITLE],
        one_line(_UNWANTED.sub(" ", author))[:_LONGEST_NAME],
        day.group(1) if day else "",
        code.group(1).lower() if code else "",
    )
    if said != About():
        yield said


class Rows:
    """The rows of a table, as they are read, to blocks that each begin with its header.

    Nearly always it is one block; of a very long table no more than a block is held. What has
    but one column is no table: it becomes text, a line a row.
    """

    def __init__(self, page: int = 0, place: Place | None = None) -> None:
        self._page, self._place = page, place
        self._lines: list[str] = []
        self._held = 0
        self._columns = 0

    def add(self, cells: Sequence[str]) -> Iterator[Block]:
        """Take a row; an empty one is left out."""
        filled = len(cells)
        while filled and not cells[filled - 1]:
            filled -= 1
        texts = [one_line(cell) for cell in cells[:filled]]
        while texts and not texts[-1]:  # what was but white space
            texts.pop()
        if not texts:
            return
        line = "\t".join(texts)
        if self._held + len(line) > _LONGEST_TABLE and len(self._lines) > 1:
            header = self._lines[0]
            yield self._block()
            self._lines, self._held = [header], len(header)
        self._lines.append(line)
        self._held += len(line) + 1
        self._columns = max(self._columns, len(texts))

    def end(self) -> Iterator[Block]:
        """The rest of it."""
        if self._lines:
            yield self._block()
        self._lines, self._held, self._columns = [], 0, 0

    def _block(self) -> Block:
        kind: documents.Kind = "table" if self._columns > 1 else "text"
        return Block(kind, "\n".join(self._lines), self._page, self._place)


def bounded(source: Source, items: Iterable[Read]) -> Iterator[Read]:
    """``items`` with clean texts, up to what a document may hold; then it says where it stopped.

    Blocks without text are left out.
    """
    left = documents.MAX_TEXT_BYTES
    for item in items:
        if not isinstance(item, Block):
            yield item
            continue
        text = _UNWANTED.sub(" ", item.text).strip("\n" if item.kind == "table" else None)
        raw = text.encode()
        left -= len(raw) + 2  # with what stands between blocks
        if left < 0:
            text = raw[:left].decode(errors="ignore")  # it may end within a character
            text = text.rpartition("\n")[0] if item.kind == "table" else text
            if text:
                yield Block(item.kind, text, item.page, item.place)
            most = documents.MAX_TEXT_BYTES >> 20
            cause = f"more than {most} MiB of text, read up to there: cut it into several files"
            yield FileProblem(str(source.path), cause, page=item.page or None)
            return
        if text:
            yield Block(item.kind, text, item.page, item.place)
