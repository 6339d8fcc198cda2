"""A row of a table as a statement: told with its columns, for who does not see the table.

``(In millions; Operating margin) South America: 2023 1,134; 2022 823`` is: what stands above the
table and above the row in it, the row's first cell, and each other cell behind the name of its
column. A cell is given to a column where its place says so; where it does not the cells stand
as they are, divided by " | ". In a table of two columns the first row may be a header or one as
any other, so it stands in front, which is right in either case: ``(Wing: Beds) East: 30``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from daemon.library.contents import Passage
from daemon.library.passages import LONGEST_CONTEXT, header_of

_FRONT = 80  # characters in front of a row, at most: what is longer hides what it says
_ABOVE = 2  # lines above a table, at most: the nearest
_ALONE = " | "
_LETTER = re.compile(r"[^\W\d_]")
_DIGIT = re.compile(r"\d")
# What the first column's name says of all others: "(in millions)", "Dollars in thousands", "%".
_UNIT = re.compile(r"[(%$€£¥]|\bin \w|million|thousand|billion", re.IGNORECASE)
_NUMBER = re.compile(r"(?!(?:19|20)\d\d$)[-–(]?[$€£¥]?\s?\d[\d.,]*\s?%?\)?")  # but a year
# What spreadsheet programs call a sheet that nobody named.
_UNNAMED = re.compile(r"(Sheet|Tabelle|Table|Feuil|Hoja|Foglio|Blad|Planilha)\s?\d+")
# Of numbers in brackets, which would be read as the mark of a citation.
_MARK = re.compile(r"\[(\d+(?:\s?,\s?\d+)*)\]")


def told_row(passage: Passage, position: int) -> str:
    """The row at ``position`` of a table's text, from 0, on one line and without tabs.

    The text of each cell is in it as it stands, but for white space, and for numbers in brackets,
    which get a blank beside each: "[ 1 ]" is no mark of a citation.
    """
    rows = passage.text.splitlines()
    return _MARK.sub(r"[ \1 ]", _told(passage, rows, position))


def _told(passage: Passage, rows: Sequence[str], position: int) -> str:
    row, cells = rows[position], _cells(rows[position])
    filled = [cell for cell in cells if cell]
    if len(filled) < 2:
        return " ".join(filled)
    above = passage.above(row).splitlines()
    header = above[-1] if above and "\t" in above[-1] else ""
    begin = 0 if "\t" in passage.context else len(header_of(rows))
    section = _section(rows[begin:position])
    below = [_cells(line) for line in rows[begin:] if "\t" in line]
    lines = [line for line in above if "\t" not in line]
    if header.count("\t") == 1 and all(len(one) == 2 for one in below):
        header = ": ".join(filter(None, _cells(header)))
        return f"{_front([*lines, header][-_ABOVE:], section)}{': '.join(filled)}"
    names = _names(header, below, cut="\t" in passage.context)
    unit = names[0] if names and _UNIT.search(names[0]) else ""
    front = _front([*lines[-_ABOVE:], unit], section)
    return f"{front}{_with_columns(cells, names) or _ALONE.join(filled)}"


def _cells(row: str) -> list[str]:
    return [" ".join(cell.split()) for cell in row.split("\t")]


def _section(before: Sequence[str]) -> str:
    """The nearest row that is but a name in its first cell, of those above a row."""
    for row in reversed(before):
        first, *others = _cells(row)
        if not any(others) and _LETTER.search(first):
            return first
    return ""


def _names(header: str, below: Sequence[Sequence[str]], *, cut: bool) -> list[str]:
    """What the columns are called, from the first; none where it can't be told which is which.

    ``below``: the rows with several cells. Readers keep a cell at its place and leave out empty
    ones at the end alone, so a row may be shorter than its header. ``cut``: a header that is
    longest was, and its last name with it.
    """
    names = _cells(header) if header else []
    called = [name for name in names[1:] if name]
    numbers = [name for name in called if _NUMBER.fullmatch(name)]
    # "1", "2", "3" may be columns; "Jones", "24" and "4411" are a row of a table without header.
    if numbers and (len(numbers) < len(called) or any(len(number) > 2 for number in numbers)):
        return []
    if cut and len(header) >= LONGEST_CONTEXT:
        return names[:-1]
    longer = [cells for cells in below if len(cells) > len(names)]
    if 2 * len(longer) <= len(below):
        return names
    # Some programs name no column of names and leave no room for it. An unnamed last column
    # looks the same, but is one of remarks: where it has numbers the first is the one without.
    if len(longer) == len(below) > 1 and all(
        len(cells) == len(names) + 1 and _LETTER.search(cells[0]) and _DIGIT.search(cells[-1])
        for cells in below
    ):
        return ["", *names]
    return []


def _front(above: Sequence[str], section: str) -> str:
    """In brackets what stands above a row, the farthest first; what is too long is left out."""
    kept: list[str] = []
    for line in (" ".join(line.split()) for line in (section, *reversed(above))):
        bare = line[1:-1] if re.fullmatch(r"\([^()]*\)", line) else line
        if not bare or bare in kept or _UNNAMED.fullmatch(bare):
            continue
        if len("; ".join((bare, *kept))) <= _FRONT:
            kept.insert(0, bare)
    return f"({'; '.join(kept)}) " if kept else ""


def _with_columns(cells: Sequence[str], names: Sequence[str]) -> str:
    """The row's name and each filled cell with its column's; "" where none has one."""
    called = [(names[at] if at < len(names) else "", cell) for at, cell in enumerate(cells)]
    values = [f"{name} {cell}".lstrip() for name, cell in called[1:] if cell]
    if not any(name for name, cell in called[1:] if cell):
        return ""
    return ": ".join(filter(None, (cells[0], "; ".join(values))))
