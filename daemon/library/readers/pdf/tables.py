"""Tables without ruling lines, by how words are aligned: on PDF pages and on what OCR has read.

A value is a number, a dash or a word that stands for one. Rows with values at the same places
make a table; what stands above its columns is its header. Financial statements are printed so.
All lengths named ``em`` are parts of the type's size.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from daemon.library.readers.pdf.words import Row, Word

CELL_GAP = 0.7  # em between cells; a space in justified text seldom has more
_MOST_BETWEEN = 3  # rows without a value between two with some: wrapped labels, subheadings
_MOST_HEADER_ROWS = 12
_FAR = 2.5  # em: what is further above a table is no header of it
_WIDER = 0.1  # em that each column more is worth: a header above many may fit some of them, too
_SPAN = 0.6  # em by which a header's middle may miss that of the columns it stands above

_MONEY = re.compile(r"(?:US|CA|C|A|HK|R)?[$€£¥S]")
_TAIL = re.compile(r"%|\)|\)%|pts?|bps|x")
_MARK = re.compile(r"[•●▪◦‣·*–—-]|\(?(?:[a-z]|[ivx]+|\d{1,2})[.)]", re.IGNORECASE)
_LEADER = re.compile(r"[.·…_\s]{2,}|\.")
_LEADER_AFTER = re.compile(r"(?:\s?[.·…_]){3,}\s*$")
_VALUE = re.compile(
    r"(?:(?:US|CA|C|A|HK|R)?[$€£¥]\s*)?[-–—+<>~≈(]*\s*(?:[$€£¥]\s*)?[-–—(]*"
    r"\d[\d,.’'/:]*(?:\s\d{3}\b)*\s*(?:%|x|bps?|pts?|[kKmMbB]n?)?\s*\)?\s*%?\s*"
    r"(?:\(\w{1,2}\)|[*†‡]+)?"
    r"|(?:[$€£¥]\s*)?[-–—]{1,2}\s*%?|NM|N/M|N\.M\.|n\.?m\.?|N/A|n/?a|NA|nil|Nil|none|None"
)
_DATE = re.compile(
    r"(?:FY|Q[1-4]|[1-4]Q)?\s?[’']?(?:19|20)\d\d[EAe]?(?:\s?\([a-z\d]\))?"
    r"|\d{1,2}[/-]\d{2}(?:[/-](?:19|20)?\d\d)?|\d{1,2}\.\d{1,2}\.(?:19|20)\d\d"
)


class Rule(NamedTuple):
    """A horizontal line that is drawn on a page, in points."""

    x0: float
    x1: float
    y: float


class Cell:
    """Words of a row that belong together."""

    __slots__ = ("is_value", "middle", "text", "words", "x0", "x1")

    def __init__(self, words: list[Word]) -> None:
        self.words = words
        # Without the dots that lead to the next cell.
        self.text = _LEADER_AFTER.sub("", " ".join(word.text for word in words))
        self.x0 = words[0].x0
        self.x1 = max(word.x1 for word in words)
        self.middle = (self.x0 + self.x1) / 2
        self.is_value = _VALUE.fullmatch(self.text) is not None  # a number, or stands for one


@dataclass
class Column:
    """Where values stand one below the other."""

    x0: float
    x1: float
    rows: set[int] = field(default_factory=set)
    has_value: bool = True  # otherwise it is words that do not stand below values

    def overlap(self, x0: float, x1: float) -> float:
        """Points that are shared; negative: how far off."""
        return min(self.x1, x1) - max(self.x0, x0)

    def take(self, cell: Cell, row: int) -> None:
        """Widen it to a cell of a row."""
        self.x0, self.x1 = min(self.x0, cell.x0), max(self.x1, cell.x1)
        self.rows.add(row)


@dataclass(frozen=True)
class Table:
    """Rows ``first`` to before ``end`` of a page, as cells; the header first, where it has one."""

    first: int
    end: int
    cells: list[list[str]]

    @property
    def text(self) -> str:
        """A line a row, a tab between cells."""
        return "\n".join("\t".join(row) for row in self.cells)


def cells_of(row: Row) -> list[Cell]:
    """A row's cells; signs that are set apart from their number or their item belong to it."""
    cells: list[Cell] = []
    sign: list[Word] = []  # a currency's, close behind the cell before its own
    for part in row.parts(CELL_GAP):
        words = [*sign, *part.words]
        sign = [words.pop()] if len(words) > 1 and _MONEY.fullmatch(words[-1].text) else []
        cell = Cell(words)
        if _LEADER.fullmatch(cell.text) or not cell.text:
            continue
        last = cells[-1] if cells else None
        if last is not None and (
            _MONEY.fullmatch(last.text)
            or (len(cells) == 1 and _MARK.fullmatch(last.text))
            or (last.is_value and _TAIL.fullmatch(cell.text))
        ):
            cells[-1] = Cell([*last.words, *words])
        else:
            cells.append(cell)
    if sign and cells:
        cells[-1] = Cell([*cells[-1].words, *sign])
    return cells


def is_number(text: str) -> bool:
    """Whether a text is a value, and no year or date, as headers have them."""
    return _VALUE.fullmatch(text) is not None and _DATE.fullmatch(text) is None


def tables_of(rows: Sequence[Row], rules: Sequence[Rule] = ()) -> list[Table]:
    """The tables among a region's rows, from top to bottom.

    ``rules``: lines drawn below headers say how many columns they stand above.
    """
    cells = [cells_of(row) for row in rows]
    tables: list[Table] = []
    at = 0
    while at < len(rows):
        if not _has_values(cells[at]):
            at += 1
            continue
        end = _end_of_run(rows, cells, at)
        columns = _columns(cells, at, end)
        if _is_table(columns):
            above = tables[-1].end if tables else 0
            table = _Maker(rows, cells, columns, rules).made(above, at, end)
            tables.append(table)
            at = table.end
        else:
            at += 1
    return tables


def _has_values(cells: list[Cell]) -> bool:
    """Whether a row has values beside something else, and not only years or dates."""
    if len(cells) < 2:
        return False
    values = sum(cell.is_value for cell in cells)
    return any(is_number(cell.text) for cell in cells) and (not cells[0].is_value or values >= 2)


def _is_header(cells: list[Cell]) -> bool:
    """Whether the values of a row are years or dates, and there are some."""
    values = [cell for cell in cells[1:] if cell.is_value]
    return bool(values) and all(_DATE.fullmatch(cell.text) for cell in values)


def _end_of_run(rows: Sequence[Row], cells: list[list[Cell]], first: int) -> int:
    """Behind the last row with values that goes on what begins at ``first``."""
    left = min(cell.x0 for cell in cells[first][1:] if cell.is_value)
    end, at = first + 1, first + 1
    while at < len(rows) and at - end < _MOST_BETWEEN + 1:
        if rows[at].top - rows[at - 1].bottom > _FAR * rows[at].size:
            break
        if _has_values(cells[at]):
            left = min([left, *(cell.x0 for cell in cells[at][1:] if cell.is_value)])
            end = at + 1
        elif _is_header(cells[at]) or max(cell.x1 for cell in cells[at] or [_NOTHING]) > left:
            break
        at += 1
    return end


_NOTHING = Cell([Word(0, 0, 0, 0, "", 0)])


def _columns(cells: list[list[Cell]], first: int, end: int) -> list[Column]:
    """Where cells overlap from row to row, the narrow ones first: a wide one bridges columns."""
    found = [
        (cell, at, not number, not cell.is_value)
        for at in range(first, end)
        if _has_values(cells[at])
        for number, cell in enumerate(cells[at])
        if number or cell.is_value
    ]
    found.sort(key=lambda one: (one[2], one[3], one[0].x1 - one[0].x0))
    columns: list[Column] = []
    for cell, at, is_first, is_text in found:
        over = [column for column in columns if column.overlap(cell.x0, cell.x1) > 0]
        if not over:
            if not is_first or cell.x0 > min(column.x0 for column in columns):
                columns.append(Column(cell.x0, cell.x1, {at}, not is_text))
        elif len(over) == 1:
            if not is_text or not over[0].has_value:
                over[0].take(cell, at)
        elif not is_text and sum(len(one.rows) for one in over) == len(
            set().union(*(one.rows for one in over))
        ):
            # No row has a value in two of them: they are one column, raggedly set.
            for other in over[1:]:
                columns.remove(other)
                over[0].x0, over[0].x1 = min(over[0].x0, other.x0), max(over[0].x1, other.x1)
                over[0].rows |= other.rows
            over[0].take(cell, at)
    return sorted(
        (column for column in columns if column.has_value or len(column.rows) > 1),
        key=lambda column: column.x0,
    )


def _is_table(columns: list[Column]) -> bool:
    """Two columns of two values, or one of three: less may be chance."""
    supports = sorted((len(column.rows) for column in columns), reverse=True)
    return bool(supports) and (supports[0] >= 3 or (len(supports) > 1 and supports[1] >= 2))


class _Maker:
    """Puts the cells of a run of rows into its columns."""

    def __init__(
        self,
        rows: Sequence[Row],
        cells: list[list[Cell]],
        columns: list[Column],
        rules: Sequence[Rule],
    ) -> None:
        self._rows, self._cells, self._rules = rows, cells, rules
        self._columns = columns
        self._left, self._right = columns[0].x0, columns[-1].x1

    def made(self, above: int, first: int, end: int) -> Table:
        """The table of these rows; its header may begin from row ``above`` on."""
        top, bottom = self._header(above, first, end)
        body = [(at, self._row(self._cells[at])) for at in range(bottom, end)]
        lines = self._unwrapped(body)
        head = self._header_row(top, bottom)
        lines = [head, *lines] if any(head) else lines
        if not any(line[0] for line in lines):
            lines = [line[1:] for line in lines]
        return Table(top, end, lines)

    # ---- header

    def _header(self, above: int, first: int, end: int) -> tuple[int, int]:
        """Its first row, and the row behind its last one, which may be before ``first``."""
        top = bottom = first
        edge = min(row.x0 for row in self._rows[first:end])
        for at in range(first - 1, max(above, first - _MOST_HEADER_ROWS) - 1, -1):
            below = self._rows[at + 1]
            size = self._rows[at].size
            if below.top - self._rows[at].bottom > _FAR * size or self._rows[at].x0 < edge - size:
                break
            over = [cell for cell in self._cells[at] if self._is_over(cell)]
            beside = [cell for cell in self._cells[at] if cell not in over]
            if any(cell.x1 > self._left for cell in beside):
                break
            if not over:  # a subheading or a unit: the header may go on above it
                if top - at > 2:
                    break
                continue
            if len(over) == 1 and not beside and not self._span(at, over[0], [])[1]:
                break  # a title, which no columns lie below
            if top == first:
                bottom = at + 1
            top = at
        if top < bottom and self._is_titled(above, top):
            top += 1
        return top, bottom

    def _is_titled(self, above: int, at: int) -> bool:
        """Whether a row is the last line of a title: one cell, in the middle as the one above."""
        if at == above or len(self._cells[at]) != 1 or len(self._cells[at - 1]) != 1:
            return False
        own, other = self._cells[at][0], self._cells[at - 1][0]
        size = self._rows[at].size
        return (
            abs(own.middle - other.middle) < size / 3
            and self._rows[at].top - self._rows[at - 1].bottom < size
            and not self._ruled(own, ())
        )

    def _is_over(self, cell: Cell) -> bool:
        size = cell.words[0].size
        return cell.x0 > self._left - 3.5 * size and cell.middle > self._left - 2 * size

    def _span(self, at: int, cell: Cell, taken: Sequence[Cell]) -> tuple[list[int], bool]:
        """Numbers of the columns a header cell stands above, and whether it fits them.

        Those that a line below it lies above; without one more than those that it overlaps,
        where it stands in the middle of them all and no other cell of its row, ``taken``,
        stands above one of them.
        """
        if ruled := self._ruled(cell, taken):
            return ruled, True
        size, columns = self._rows[at].size, self._columns
        own = [n for n, one in enumerate(columns) if one.overlap(cell.x0, cell.x1) > 0]
        own = own or [self._nearest(cell.x0, cell.x1)]
        busy = [
            n
            for n, one in enumerate(columns)
            if any(one.overlap(other.x0, other.x1) > 0 for other in taken)
        ]
        low = max((n + 1 for n in busy if n < own[0]), default=0)
        high = min((n - 1 for n in busy if n > own[-1]), default=len(columns) - 1)
        costs = {
            (first, last): self._miss(cell, first, last) / size - _WIDER * (last - first)
            for first in range(low, own[0] + 1)
            for last in range(own[-1], high + 1)
            if self._miss(cell, first, last) < _SPAN * size
        }
        narrow = (own[0], own[-1])
        first, last = (
            narrow if narrow in costs else min(costs, key=costs.__getitem__, default=narrow)
        )
        left = columns[first].x0 - 4 * size
        if first:
            left = (columns[first - 1].x1 + columns[first].x0) / 2
        right = columns[last].x1 + 4 * size
        if last + 1 < len(columns):
            right = (columns[last].x1 + columns[last + 1].x0) / 2
        inside = left - size / 2 < cell.x0 and cell.x1 < right + size / 2
        return list(range(first, last + 1)), inside

    def _ruled(self, cell: Cell, others: Sequence[Cell]) -> list[int]:
        """Columns above which a line lies that is drawn below this header cell alone."""
        size = cell.words[0].size
        lines = [
            rule
            for rule in self._rules
            if cell.words[0].middle < rule.y < cell.words[0].bottom + size / 2
            and self._left - 6 * size < rule.x0 < cell.x0 + size
            and cell.x1 - size < rule.x1
            and not any(rule.x0 < other.middle < rule.x1 for other in others)
        ]
        if not lines:
            return []
        rule = min(lines, key=lambda rule: rule.x1 - rule.x0)
        return [
            number
            for number, column in enumerate(self._columns)
            if rule.x0 < (column.x0 + column.x1) / 2 < rule.x1
        ]

    def _miss(self, cell: Cell, first: int, last: int) -> float:
        return abs(cell.middle - (self._columns[first].x0 + self._columns[last].x1) / 2)

    def _header_row(self, top: int, bottom: int) -> list[str]:
        heads: list[list[str]] = [[] for _ in range(len(self._columns) + 1)]
        for at in range(top, bottom):
            over = [cell for cell in self._cells[at] if self._is_over(cell)]
            for cell in self._cells[at]:
                if cell not in over:
                    heads[0].append(cell.text)
                    continue
                others = [other for other in over if other is not cell]
                for number in self._span(at, cell, others)[0]:
                    heads[number + 1].append(cell.text)
        return [" ".join(head) for head in heads]

    # ---- body

    def _row(self, cells: list[Cell]) -> list[str]:
        """The label, then a text for each column."""
        texts: list[list[str]] = [[] for _ in range(len(self._columns) + 1)]
        for number, cell in enumerate(cells):
            if cell.x1 <= self._left or (not number and not cell.is_value and cell.x0 < self._left):
                texts[0].append(cell.text)
            elif self._overlapped(cell) < 2:
                texts[self._nearest(cell.x0, cell.x1) + 1].append(cell.text)
            else:  # set closer than cells elsewhere: each word to its own column
                for word in cell.words:
                    texts[self._nearest(word.x0, word.x1) + 1].append(word.text)
        return [" ".join(text) for text in texts]

    def _overlapped(self, cell: Cell) -> int:
        return sum(column.overlap(cell.x0, cell.x1) > 0 for column in self._columns)

    def _nearest(self, x0: float, x1: float) -> int:
        overlaps = [column.overlap(x0, x1) for column in self._columns]
        return overlaps.index(max(overlaps))

    def _unwrapped(self, body: list[tuple[int, list[str]]]) -> list[list[str]]:
        """Rows with the labels that went on over several lines put together again."""
        lines: list[list[str]] = []
        widest = max((self._label_end(at) for at, _ in body), default=0.0)
        begun = -1  # the row in which a label began that has no value yet
        for at, texts in body:
            label, row = texts[0], self._rows[at]
            fills = self._label_end(at - 1) > widest - 8 * row.size
            indented = begun >= 0 and row.x0 > self._rows[begun].x0 + row.size / 3
            if (
                begun >= 0
                and label
                and (label[0].islower() or label[0] in "($&," or (indented and fills))
            ):
                lines[-1] = [f"{lines[-1][0]} {label}", *texts[1:]]
            else:
                lines.append(texts)
                begun = at
            if any(texts[1:]) or label.endswith((":", "-", "–", "—")):
                begun = -1
        return lines

    def _label_end(self, at: int) -> float:
        return max((cell.x1 for cell in self._cells[at] if cell.x1 <= self._left), default=0.0)
