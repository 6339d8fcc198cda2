"""How much of a PDF a reader gets: words in order, cells in their row and column."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher

from daemon.library.readers.documents import Block

_HYPHENS = re.compile(r"[-\u00ad\u2010\ufffe]")
_NUMBER = re.compile(r"\(?-?[$€£]?\(?[\d,.]*\d%?\)?%?|[—–-]|NM")
_LONE_NUMBER = re.compile(r"(?:[A-Z] ?- ?)?\d+")


@dataclass(frozen=True)
class Share:
    """``right`` of ``all``."""

    right: int = 0
    all: int = 0

    def __add__(self, other: Share) -> Share:
        return Share(self.right + other.right, self.all + other.all)

    @property
    def part(self) -> float:
        return self.right / self.all if self.all else 1.0

    def __str__(self) -> str:
        return f"{self.right}/{self.all} = {self.part:.4f}"


def words(text: str) -> list[str]:
    """Between white space, hyphens left out: PDFium drops them at the end of a line."""
    return [word for part in text.split() if (word := _HYPHENS.sub("", part))]


def in_order(truth: Sequence[str], found: Sequence[str]) -> Share:
    """Words of the truth that are found in its order, by an alignment of both.

    That of difflib, which is never better than the best one. What is found besides costs
    nothing: a header above several columns is repeated for each of them.
    """
    blocks = SequenceMatcher(None, truth, found, autojunk=False).get_matching_blocks()
    return Share(sum(block.size for block in blocks), len(truth))


def without_running_lines(pages: Sequence[str]) -> list[str]:
    """Texts of a file's pages without first lines that several of them have, and page numbers."""
    firsts = Counter(re.sub(r"\d+", "#", text.split("\n")[0]) for text in pages)
    cut = []
    for text in pages:
        lines = text.split("\n")
        if firsts[re.sub(r"\d+", "#", lines[0])] >= 3:
            lines = lines[1:]
        if lines and _LONE_NUMBER.fullmatch(lines[-1].strip()):
            lines = lines[:-1]
        cut.append("\n".join(lines))
    return cut


def tables(blocks: Iterable[Block]) -> list[list[list[str]]]:
    """The cells of table blocks: table, row, column."""
    return [
        [line.split("\t") for line in block.text.split("\n")]
        for block in blocks
        if block.kind == "table"
    ]


def value(cell: str) -> str:
    """A cell's number, whether its currency and percent signs are set apart or not."""
    return re.sub(r"[\s$€£]|%$", "", cell)


def plain(label: str) -> str:
    return re.sub(r"\W+", " ", label).strip().lower()


def same_label(one: str, other: str) -> bool:
    return SequenceMatcher(None, plain(one), plain(other), autojunk=False).ratio() > 0.93


def has_cell(blocks: Iterable[Block], row: str, section: str, column: str, expected: str) -> bool:
    """Whether a table has a value in the row and under the column that are named.

    ``section``: a label alone in its row, somewhere above; "" for any. A letter of a label may
    be misread, as on a scan; none of the value and of the header.
    """
    for table in tables(blocks):
        below = ""
        for line in table[1:]:
            if not any(line[1:]):
                below = line[0]
            if not same_label(line[0], row) or (section and not same_label(below, section)):
                continue
            for head, cell in zip(table[0][1:], line[1:], strict=True):
                wanted = set(column.lower().split()) <= set(head.lower().split())
                if wanted and value(cell) == value(expected):
                    return True
    return False


def rows_with_values(text: str) -> list[list[str]]:
    """The numbers that end a line of a page's text, where there are two or more."""
    found = []
    for line in text.split("\n"):
        parts = [part for part in line.split() if part not in ("$", "%", ")")]
        values: list[str] = []
        while parts and _NUMBER.fullmatch(parts[-1]):
            values.insert(0, value(parts.pop()))
        if len(values) >= 2 and len(parts) > 1:
            found.append([one for one in values if one])
    return found


def cells_in_order(text: str, blocks: Iterable[Block]) -> Share:
    """Numbers of a page's lines that stand in one row of a table, each in a cell of its own.

    A number that is part of a label ("net of tax of $0") stands in the row's first cell.
    """
    rows = [
        [*map(value, line[0].split()), *(value(cell) for cell in line[1:] if cell)]
        for table in tables(blocks)
        for line in table
    ]
    share = Share()
    for wanted in rows_with_values(text):
        best = max((in_order(wanted, row).right for row in rows), default=0)
        share += Share(best, len(wanted))
    return share
