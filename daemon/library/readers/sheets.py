"""Reads .xlsx, .csv and .tsv: what stands in cells, as tables.

The XML of a sheet goes by bit by bit (ECMA-376 part 1, 18), and of its rows no more is held
than a table's block. openpyxl takes about twice as long and makes room up to the column that a
cell says it is in, calamine for all cells between the first and the last: a cell in a far corner
costs gigabytes. What a number format means is openpyxl's to say.
"""

from __future__ import annotations

import csv
import datetime
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby, islice

from openpyxl.styles.numbers import BUILTIN_FORMATS, is_date_format, is_timedelta_format
from openpyxl.utils.datetime import MAC_EPOCH, WINDOWS_EPOCH, from_excel

from daemon.library.readers import documents
from daemon.library.readers.blocks import Rows, bounded, one_line
from daemon.library.readers.documents import Block, FileProblem, Read
from daemon.library.readers.package import Package, opened
from daemon.library.readers.reader import Refused, Source
from daemon.library.readers.text import bytes_of, text_of

_MOST_SHEETS = 1000
_MOST_CELLS = 20_000_000  # in all sheets
_MOST_COLUMNS, _MOST_ROWS = 16_384, 1_048_576  # what Excel has
_MOST_STRINGS = 5_000_000
_LONGEST_REGION = 1 << 20  # characters held until it is known which columns are empty
_DELIMITERS = ",;\t|"
_LOOKED_AT = 100  # lines that a delimiter is found by
_SEP = re.compile(r"\Asep=(.)\n", re.IGNORECASE)  # how Excel says it
_FIXED = re.compile(r"[#,]*0(?:\.(0+))?(%?)\Z")  # number formats of fixed decimals
_REFERENCE = re.compile(r"([A-Z]{1,3})\d+\Z")
_DIGITS = 15  # of a number that a double holds exactly, and that Excel shows


def read_xlsx(source: Source) -> Iterator[Read]:
    """What the workbook says of itself, then its sheets as pages: names, and tables of values.

    Formulas count as the values that they had when the file was saved. Hidden sheets are
    passed over.
    """
    with opened(source, ".xlsx", "workbook") as package:
        yield from package.about()
        yield from bounded(source, _sheets(source, package))


def _sheets(source: Source, package: Package) -> Iterator[Read]:
    book, styles, strings = _Book(), _Styles(), _Strings()
    package.hear(package.main, book)
    for kind, handler in (("styles", styles), ("sharedStrings", strings)):
        for part in package.related(package.main, kind).values():
            package.hear(part, handler)
    parts = package.related(package.main, "worksheet")
    looked_at = 0
    for page, (key, name, visible) in enumerate(book.sheets, 1):
        if page > _MOST_SHEETS:
            yield FileProblem(str(source.path), f"only {_MOST_SHEETS} sheets are read: cut it up")
            return
        if not visible or not package.has(part := parts.get(key, "")):
            continue  # the latter: a sheet that is a chart
        yield Block("heading", one_line(name), page)
        values = _Values(styles.formats, strings.texts, book.epoch)
        sheet, regions = _Sheet(values), _Regions(page)
        for _ in package.walk(part, sheet):
            for number, cells in sheet.take():
                yield from regions.add(number, cells)
            if looked_at + sheet.count > _MOST_CELLS:
                yield from regions.end()
                cause = f"more than {_MOST_CELLS:,} cells, read up to there: cut it up"
                yield FileProblem(str(source.path), cause, page=page)
                return
        looked_at += sheet.count
        yield from regions.end()
        if sheet.unvalued:
            cause = (
                f"formulas without values in the file ({sheet.unvalued}), which are passed over: "
                "open it in a spreadsheet program and save it"
            )
            yield FileProblem(str(source.path), cause, page=page)


class _Book:
    """Hears which sheets there are: the keys of their parts, their names, whether they are seen."""

    def __init__(self) -> None:
        self.sheets: list[tuple[str, str, bool]] = []
        self.epoch = WINDOWS_EPOCH

    def start(self, name: str, attributes: dict[str, str], /) -> None:
        if name == "s:sheet":
            visible = attributes.get(":state", "visible") == "visible"
            self.sheets.append((attributes.get(":id", ""), attributes.get(":name", ""), visible))
        elif name == "s:workbookPr" and attributes.get(":date1904") in ("1", "true"):
            self.epoch = MAC_EPOCH

    def end(self, _: str, /) -> None: ...

    def data(self, _: str, /) -> None: ...


@dataclass(frozen=True)
class _Format:
    """How numbers are shown; ``decimals``: None for as many as there are."""

    date: bool = False
    duration: bool = False
    decimals: int | None = None
    per_cent: bool = False


def _format_of(code: str) -> _Format:
    fixed = _FIXED.match(code)
    if fixed:
        return _Format(decimals=len(fixed.group(1) or ""), per_cent=bool(fixed.group(2)))
    return _Format(date=is_date_format(code), duration=is_timedelta_format(code))


class _Styles:
    """Hears how numbers are shown, by the number of a cell's style."""

    def __init__(self) -> None:
        self.formats: list[_Format] = []
        self._codes: dict[str, str] = {str(key): code for key, code in BUILTIN_FORMATS.items()}
        self._of_cells = False

    def start(self, name: str, attributes: dict[str, str], /) -> None:
        if name == "s:numFmt":
            code = attributes.get(":formatCode", "")[:1000]
            self._codes[attributes.get(":numFmtId", "")] = code
        elif name == "s:cellXfs":
            self._of_cells = True
        elif name == "s:xf" and self._of_cells:
            code = self._codes.get(attributes.get(":numFmtId", "0"), "General")
            self.formats.append(_format_of(code))

    def end(self, name: str, /) -> None:
        if name == "s:cellXfs":
            self._of_cells = False

    def data(self, _: str, /) -> None: ...


class _Strings:
    """Hears the texts that cells share, by their number; how kanji are read is left out."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self._pieces: list[str] = []
        self._hears = self._phonetic = False
        self._held = 0

    def start(self, name: str, _: dict[str, str], /) -> None:
        self._phonetic = self._phonetic or name == "s:rPh"
        self._hears = name == "s:t" and not self._phonetic

    def end(self, name: str, /) -> None:
        self._hears = False
        if name == "s:rPh":
            self._phonetic = False
        elif name == "s:si":
            self.texts.append(one_line("".join(self._pieces)))
            self._pieces = []
            if len(self.texts) > _MOST_STRINGS:
                raise Refused(f"more than {_MOST_STRINGS:,} texts: cut it into several files")

    def data(self, text: str, /) -> None:
        if self._hears:
            self._held += len(text)
            if self._held > 4 * documents.MAX_TEXT_BYTES:  # some are used in no cell
                most = 4 * documents.MAX_TEXT_BYTES >> 20
                raise Refused(f"more than {most} MiB of text: cut it into several files")
            self._pieces.append(text)


@dataclass(frozen=True)
class _Values:
    """What the cells of a workbook show."""

    formats: list[_Format]
    strings: list[str]
    epoch: datetime.datetime

    def shown(self, kind: str, style: str, text: str) -> str:
        """A cell's content as a person reads it: dates as ISO 8601 has them, numbers plainly."""
        if kind == "s":
            at = int(text) if text.isdecimal() else len(self.strings)
            return self.strings[at] if at < len(self.strings) else ""
        if kind == "b":
            return "FALSE" if text == "0" else "TRUE"
        if kind == "d":
            return text.removesuffix("T00:00:00")
        if kind not in ("", "n"):
            return one_line(text)
        at = int(style) if style.isdecimal() else 0
        form = self.formats[at] if at < len(self.formats) else _Format()
        try:
            return self._number(float(text), form)
        except ValueError:  # no number, whatever it is called
            return one_line(text)

    def _number(self, value: float, form: _Format) -> str:
        if form.date:
            try:
                return _moment(from_excel(value, self.epoch, timedelta=form.duration))
            except (OverflowError, ValueError):  # Excel shows ##### for a day before its first
                return f"{value:.{_DIGITS}g}"
        if form.decimals is not None:
            shown = value * 100 if form.per_cent else value
            return f"{shown:.{form.decimals}f}{'%' * form.per_cent}"
        if value.is_integer() and abs(value) < 10**_DIGITS:
            return str(int(value))
        return f"{value:.{_DIGITS}g}"


def _moment(when: object) -> str:
    if isinstance(when, datetime.datetime):
        if when.time() == datetime.time():
            return when.date().isoformat()
        return when.isoformat(sep=" ", timespec="seconds" if when.second else "minutes")
    if isinstance(when, datetime.time):
        return when.isoformat(timespec="seconds")
    return str(when)


class _Sheet:
    """Hears the rows of a sheet: what is shown in their cells, by column from 1."""

    def __init__(self, values: _Values) -> None:
        self._values = values
        self._done: list[tuple[int, dict[int, str]]] = []
        self._cells: dict[int, str] = {}
        self._row = self._column = 0
        self._kind = self._style = ""
        self._pieces: list[str] = []
        self._hears = self._phonetic = False
        self._formula = False
        self.count = 0  # cells and rows so far
        self.unvalued = 0  # formulas whose value the file does not have

    def start(self, name: str, attributes: dict[str, str], /) -> None:
        if name == "s:c":
            self._column = self._column_of(attributes.get(":r", ""))
            self._kind, self._style = attributes.get(":t", ""), attributes.get(":s", "0")
            self._pieces, self._formula = [], False
            self.count += 1
        elif name == "s:f":
            self._formula = True
        elif name == "s:v" or (name == "s:t" and not self._phonetic):
            self._hears = True
        elif name == "s:rPh":
            self._phonetic = True
        elif name == "s:row":
            number = attributes.get(":r", "")
            self._row = int(number) if number.isdecimal() else self._row + 1
            self._cells, self._column = {}, 0
            self.count += 1
            if self._row > _MOST_ROWS:
                raise Refused(f"damaged (row {self._row}): save it anew")

    def _column_of(self, reference: str) -> int:
        column = 0 if reference else self._column + 1
        found = _REFERENCE.match(reference)
        for letter in found.group(1) if found else "":
            column = column * 26 + ord(letter) - ord("A") + 1
        if not 0 < column <= _MOST_COLUMNS:
            raise Refused(f"damaged (cell {reference[:20]}): save it anew")
        return column

    def end(self, name: str, /) -> None:
        if name in ("s:v", "s:t"):
            self._hears = False
        elif name == "s:rPh":
            self._phonetic = False
        elif name == "s:c" and self._pieces:
            shown = self._values.shown(self._kind, self._style, "".join(self._pieces))
            if shown:
                self._cells[self._column] = shown
        elif name == "s:c" and self._formula and self._kind in ("", "n"):  # "" is a text's value
            self.unvalued += 1
        elif name == "s:row" and self._cells:
            self._done.append((self._row, self._cells))

    def data(self, text: str, /) -> None:
        if self._hears:
            self._pieces.append(text)

    def take(self) -> list[tuple[int, dict[int, str]]]:
        """The rows with something in them that were heard since."""
        done, self._done = self._done, []
        return done


class _Regions:
    """A sheet's rows to tables: what empty rows and empty columns divide."""

    def __init__(self, page: int) -> None:
        self._page = page
        self._rows: list[dict[int, str]] = []
        self._held = 0
        self._last = 0  # the number of the row before

    def add(self, number: int, cells: dict[int, str]) -> Iterator[Block]:
        """The next row with something in it."""
        if number != self._last + 1:
            yield from self.end()
        self._last = number
        if self._held + _length(cells) > _LONGEST_REGION and len(self._rows) > 1:
            header = self._rows[0]  # it goes on below its header
            yield from self.end()
            self._rows, self._held = [header], _length(header)
        self._rows.append(cells)
        self._held += _length(cells)

    def end(self) -> Iterator[Block]:
        """What was read, a table for each run of columns with something in them."""
        rows, self._rows, self._held = self._rows, [], 0
        columns = sorted(set[int]().union(*rows))
        # Neighbours keep their distance from their place among those that are filled.
        for _, run in groupby(enumerate(columns), key=lambda one: one[1] - one[0]):
            neighbours = [column for _, column in run]
            begin, end = neighbours[0], neighbours[-1]
            table = Rows(self._page)
            for row in rows:
                last = min(end, max(row))
                yield from table.add([row.get(at, "") for at in range(begin, last + 1)])
            yield from table.end()


def _length(cells: dict[int, str]) -> int:
    """Characters of a row as a line of a table, at most."""
    return max(cells) + sum(map(len, cells.values()))


# ---- text -------------------------------------------------------------------


def read_csv(source: Source) -> Iterator[Read]:
    """The rows of a .csv or .tsv as one table; its encoding and its delimiter are found."""
    text = text_of(bytes_of(source))
    said = _SEP.match(text)
    begin = said.end() if said else 0
    delimiter = said.group(1) if said else _delimiter(list(islice(_lines(text), _LOOKED_AT)))
    yield from bounded(source, _table(csv.reader(_lines(text, begin), delimiter=delimiter)))


def _lines(text: str, begin: int = 0) -> Iterator[str]:
    """Its lines with their ends, none held but the one that is read."""
    while end := text.find("\n", begin) + 1:
        yield text[begin:end]
        begin = end
    yield text[begin:]


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
