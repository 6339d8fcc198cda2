"""Tables whose cells are drawn with lines, found by pdfplumber; their words are PDFium's.

It reads a page ten to a hundred times as long as PDFium, so it is asked only for pages on
which lines cross.
"""

from __future__ import annotations

import logging
import re
import zlib
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import pdfplumber
from pdfplumber.pdf import PDF
from pdfplumber.utils.exceptions import MalformedPDFException, PdfminerException

from daemon.library.readers.pdf.drawn import Drawn
from daemon.library.readers.pdf.tables import cells_of, is_number, tables_of
from daemon.library.readers.pdf.words import Frame, Word, rows_of

# It tells on the log of each oddity of a file, which is not ours.
logging.getLogger("pdfminer").setLevel(logging.CRITICAL)

# It translates some of what a damaged file leads it to, and lets through what else its code
# stumbles over. Each `try` below holds its calls alone, so that no mistake of ours is caught.
_DAMAGED = (
    *(PdfminerException, MalformedPDFException),
    *(ArithmeticError, AssertionError, AttributeError, LookupError, TypeError, ValueError),
    *(RecursionError, OSError, zlib.error),
)
_LEAST_FILLED = 0.4  # of the cells: a page's frame and boxes around text have few

_SIGN = re.compile(r"[$€£¥%()]+")


class RuledTable(NamedTuple):
    """A table's text, its place in points, and the words that are in it."""

    text: str
    box: tuple[float, float, float, float]
    words: list[Word]


class Ruled:
    """A file opened a second time, when the first page asks for it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stack = ExitStack()
        self._file: PDF | None = None
        self._is_broken = False

    def close(self) -> None:
        """Let go of the file."""
        self._stack.close()

    def tables(
        self, page: int, frame: Frame, words: Sequence[Word], drawn: Drawn
    ) -> list[RuledTable]:
        """The tables of a page, from 1 on; none where lines draw none, or the page is turned.

        What pdfplumber can't read has none either: its tables are then found by how their
        words are aligned, as those without lines.
        """
        if frame.turns or self._is_broken or not drawn.grid:
            return []
        aligned = _aligned(words)
        if _are_statements(words, drawn, aligned):
            return []
        try:
            if self._file is None:
                # A stream of ours: closing pdfplumber's own reads a damaged file once more.
                self._file = pdfplumber.open(self._stack.enter_context(self._path.open("rb")))
            all_pages = self._file.pages
        except _DAMAGED:
            self._is_broken = True
            return []
        if page > len(all_pages):
            return []
        shown = all_pages[page - 1]
        try:
            grids = [[list(row.cells) for row in table.rows] for table in shown.find_tables()]
        except _DAMAGED:
            return []
        finally:
            shown.flush_cache()
        made = [_table(grid, frame, words, aligned) for grid in grids]
        return [table for table in made if table is not None]


def _aligned(words: Sequence[Word]) -> set[int]:
    """Ids of the words that alignment alone makes a table of."""
    rows = rows_of(words)
    return {
        id(word)
        for table in tables_of(rows)
        for row in rows[table.first : table.end]
        for word in row.words
    }


def _are_statements(words: Sequence[Word], drawn: Drawn, aligned: set[int]) -> bool:
    """Whether what lies between the lines is mostly figures that alignment finds as well.

    Many programs part the cells of statements by shades and gaps that nobody sees as lines.
    """
    x0, top, x1, bottom = drawn.lined
    between = [w for w in words if x0 < w.x1 and w.x0 < x1 and top < w.middle < bottom]
    numbers = sum(is_number(word.text) for word in between)
    covered = sum(id(word) in aligned for word in between)
    return covered > 0.6 * len(between) and numbers > 0.2 * len(between)


_Cell = tuple[float, float, float, float]


def _table(
    grid: list[list[_Cell | None]], frame: Frame, words: Sequence[Word], aligned: set[int]
) -> RuledTable | None:
    """Words in their cells; None where the lines draw no table, or do not part its rows."""
    cells = [cell for row in grid for cell in row if cell]
    if len(grid) < 2 or max(len(row) for row in grid) < 2 or not cells:
        return None
    lines: list[list[str]] = []
    taken: list[Word] = []
    for row in grid:
        texts: list[str] = []
        for cell in row:
            inside = [word for word in words if cell and _is_in(word, cell, frame)]
            found = rows_of(inside)
            values = [cell.is_value for one in found for cell in cells_of(one)]
            if len(found) > 1 and len(texts) > 0 and all(values):
                return None  # several rows between two lines
            texts.append(" ".join(one.text for one in found))
            taken += inside
        lines.append(texts)
    if _is_split(lines) or _is_headless(lines) or _is_aligned(lines, taken, aligned):
        return None
    filled = sum(bool(text) for line in lines for text in line)
    if filled < max(3, _LEAST_FILLED * len(cells)):
        return None
    box = (
        min(cell[0] for cell in cells) - frame.left,
        min(cell[1] for cell in cells),
        max(cell[2] for cell in cells) - frame.left,
        max(cell[3] for cell in cells),
    )
    full = [number for number in range(len(lines[0])) if any(line[number] for line in lines)]
    text = "\n".join("\t".join(line[number] for number in full) for line in lines if any(line))
    return RuledTable(text, box, taken) if len(full) > 1 else None


def _is_split(lines: list[list[str]]) -> bool:
    """Whether signs have cells of their own, as where shades and not lines part the cells."""
    texts = [text for line in lines for text in line if text]
    return 10 * sum(_SIGN.fullmatch(text) is not None for text in texts) > len(texts)


def _is_headless(lines: list[list[str]]) -> bool:
    """Whether the lines begin below the header: how words are aligned finds it."""
    head = [text for text in lines[0][1:] if text]
    return bool(head) and all(is_number(text) for text in head)


def _is_aligned(lines: list[list[str]], words: Sequence[Word], aligned: set[int]) -> bool:
    """Whether these are numbers that stand in columns without their lines as well.

    Lines of statements part groups of rows and columns, and seldom all of them; headers above
    several columns and rows above and below the lines are better found by alignment.
    """
    body = [text for line in lines[1:] for text in line if text]
    numbers = sum(map(is_number, body))
    covered = sum(id(word) in aligned for word in words)
    return 3 * numbers >= len(body) and covered > 0.8 * len(words)


def _is_in(word: Word, cell: _Cell, frame: Frame) -> bool:
    x0, top, x1, bottom = cell
    middle = (word.x0 + word.x1) / 2 + frame.left
    return x0 <= middle < x1 and top <= word.middle < bottom
