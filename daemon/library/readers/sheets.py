"""Reads .xlsx, .csv and .tsv: what stands in cells, as tables.

openpyxl reads a sheet row by row. calamine does it six times as fast, but makes room for all
cells between the first and the last one, so that two cells in far corners end its process.
"""

from __future__ import annotations

import csv
import datetime
import io
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import groupby, islice

from openpyxl import load_workbook
from openpyxl.cell.cell import Cell, MergedCell
from openpyxl.cell.read_only import ReadOnlyCell
from openpyxl.utils.exceptions import InvalidFileException
from openpyxl.workbook import Workbook

from daemon.library.readers.blocks import Rows, bounded, one_line
from daemon.library.readers.documents import Block, FileProblem, Read
from daemon.library.readers.package import MALFORMED, opened
from daemon.library.readers.reader import Refused, Source
from daemon.library.readers.text import bytes_of, encoding_of

_MOST_SHEETS = 1000
_MOST_CELLS = 20_000_000  # that are looked at, in all sheets
_LONGEST_REGION = 1 << 20  # characters held until it is known which columns are empty
_DELIMITERS = ",;\t|"
_LOOKED_AT = 100  # lines that a delimiter is found by
_SEP = re.compile(r"\Asep=(.)\r?\n", re.IGNORECASE)  # how Excel says it
_FIXED = re.compile(r"[#,]*0(?:\.(0+))?(%?)\Z")  # number formats of fixed decimals
_DIGITS = 15  # of a number that a double holds exactly, and that Excel shows


def read_xlsx(source: Source) -> Iterator[Read]:
    """What the workbook says of itself, then its sheets as pages: names, and tables of values.

    Formulas count as the values that they had when the file was saved. Hidden sheets are
    passed over.
    """
    with opened(source, ".xlsx", "workbook") as package, source.open() as file:
        yield from package.about()
        try:
            book = load_workbook(file, read_only=True, data_only=True, keep_links=False)
        except (*MALFORMED, InvalidFileException) as error:
            raise Refused(f"damaged ({one_line(str(error))}): save it anew") from error
        yield from bounded(source, _sheets(source, book))


def _sheets(source: Source, book: Workbook) -> Iterator[Read]:
    looked_at = 0
    for page, name in enumerate(book.sheetnames, 1):
        if page > _MOST_SHEETS:
            yield FileProblem(str(source.path), f"only {_MOST_SHEETS} sheets are read: cut it up")
            return
        sheet = book[name]
        if sheet.sheet_state != "visible" or not hasattr(sheet, "reset_dimensions"):
            continue  # the latter: a sheet that is a chart
        sheet.reset_dimensions()  # what a sheet says of its size need not be true
        yield Block("heading", one_line(name), page)
        regions = _Regions(page)
        try:
            for row in sheet.iter_rows():
                looked_at += len(row) + 1
                if looked_at > _MOST_CELLS:
                    yield from regions.end()
                    cause = f"more than {_MOST_CELLS:,} cells, read up to there: cut it up"
                    yield FileProblem(str(source.path), cause, page=page)
                    return
                yield from regions.add([_shown(cell) for cell in row])
        except MALFORMED as error:
            cause = f"damaged ({one_line(str(error))}): save the workbook anew"
            yield FileProblem(str(source.path), cause, page=page)
        yield from regions.end()


class _Regions:
    """A sheet's rows to tables: what empty rows and empty columns divide."""

    def __init__(self, page: int) -> None:
        self._page = page
        self._rows: list[list[str]] = []
        self._held = 0

    def add(self, cells: list[str]) -> Iterator[Block]:
        """The next row; an empty one ends what was read."""
        while cells and not cells[-1]:
            cells.pop()
        if not cells:
            yield from self.end()
            return
        length = sum(map(len, cells)) + len(cells)
        if self._held + length > _LONGEST_REGION and len(self._rows) > 1:
            header = self._rows[0]  # it goes on below its header
            yield from self.end()
            self._rows, self._held = [header], sum(map(len, header)) + len(header)
        self._rows.append(cells)
        self._held += length

    def end(self) -> Iterator[Block]:
        """What was read, a table for each run of columns with something in them."""
        rows, self._rows, self._held = self._rows, [], 0
        width = max(map(len, rows), default=0)
        filled = [False] * width
        for row in rows:
            for column, text in enumerate(row):
                filled[column] = filled[column] or bool(text)
        for full, columns in groupby(range(width), key=filled.__getitem__):
            at = list(columns)
            if full:
                table = Rows(self._page)
                for row in rows:
                    yield from table.add(row[at[0] : at[-1] + 1])
                yield from table.end()


def _shown(cell: Cell | MergedCell | ReadOnlyCell) -> str:
    """A cell's value as a person reads it: dates as ISO 8601 has them, numbers without noise."""
    value: object = cell.value
    if value is None:
        return ""
    if isinstance(value, str):
        return one_line(value)
    if isinstance(value, bool):
        return "TRUE" if value else "FALSE"
    if isinstance(value, int | float):
        return _number(value, cell.number_format)
    if isinstance(value, datetime.datetime):
        if value.time() == datetime.time():
            return value.date().isoformat()
        return value.isoformat(sep=" ", timespec="seconds" if value.second else "minutes")
    if isinstance(value, datetime.time):
        return value.isoformat(timespec="seconds")
    return one_line(str(value))


def _number(value: float, style: str) -> str:
    fixed = _FIXED.match(style)
    if fixed:
        per_cent = fixed.group(2)
        return f"{value * (100 if per_cent else 1):.{len(fixed.group(1) or '')}f}{per_cent}"
    return str(value) if isinstance(value, int) else f"{value:.{_DIGITS}g}"


# ---- text -------------------------------------------------------------------


def read_csv(source: Source) -> Iterator[Read]:
    """The rows of a .csv or .tsv as one table; its encoding and its delimiter are found."""
    raw = bytes_of(source)
    text = io.TextIOWrapper(
        io.BytesIO(raw), encoding=encoding_of(raw), errors="replace", newline=""
    )
    said = _SEP.match(text.readline())
    if not said:
        text.seek(0)
    lines = list(islice(text, _LOOKED_AT))
    delimiter = said.group(1) if said else _delimiter(lines)
    text.seek(0)
    if said:
        text.readline()
    yield from bounded(source, _table(csv.reader(text, delimiter=delimiter)))


def _table(reader: Iterable[list[str]]) -> Iterator[Block]:
    rows = Rows()
    count = 0
    try:
        for row in reader:
            count += 1
            yield from rows.add(row)
    except csv.Error as error:
        raise Refused(f"no table ({error}) after row {count}: are its quotes closed?") from error
    yield from rows.end()


def _delimiter(lines: list[str]) -> str:
    """What divides most rows into the same number of cells, and into the most of them."""

    def order(delimiter: str) -> tuple[float, int]:
        try:
            widths = Counter(len(row) for row in csv.reader(lines, delimiter=delimiter) if row)
        except csv.Error:
            return 0.0, 0
        width, rows = max(widths.items(), key=lambda one: (one[1], one[0]), default=(1, 0))
        return (rows / widths.total() if width > 1 else 0.0), width

    return max(_DELIMITERS, key=order)
