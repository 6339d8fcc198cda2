"""What readers of one document share: clean text, tables as text, what a file says of itself."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from daemon.library.readers import documents
from daemon.library.readers.documents import (
    MAX_TITLE,
    About,
    Block,
    FileProblem,
    Place,
    Read,
)
from daemon.library.readers.reader import Source

_LONGEST_TABLE = 1 << 20  # characters; a longer one goes on in a further block
_LONGEST_NAME = 300  # characters of an author, or of several
# What no text has: controls but tab and line feed, halves of surrogate pairs.
_UNWANTED = re.compile("[\x00-\x08\x0b-\x1f\x7f\ud800-\udfff\ufeff]")
_LANGUAGE = re.compile(r"([A-Za-z]{2})(?:[-_]|\Z)")
_PICTURE = re.compile(r"^\S+\.(?:png|jpe?g|gif|emf|wmf|bmp|tiff?|svg|webp)$", re.IGNORECASE)
_DATE = re.compile(r"\s*(\d{4}-(?:0[1-9]|1[0-2])-(?:0[1-9]|[12]\d|3[01]))(?:\D|\Z)")


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
