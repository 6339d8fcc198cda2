"""A row that is quoted alone says which column each of its cells is of."""

from __future__ import annotations

from pathlib import Path

import openpyxl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from daemon.answering.statements.rows import told_row
from daemon.gateway.conversation import cited_at
from daemon.library.contents import Passage
from daemon.library.passages import SentenceSplitter
from daemon.library.readers.documents import Document
from proto.control_pb2 import AskReply, Citation
from tests.daemon.library.unboxed import read

WARDS = """\
Ward\tCharge nurse\tBeds\tNight staff\tPhone
Maple\tIngrid Sorensen\t24\t3\t4411
Larch\tAminata Diallo\t31\t5\t4413"""


def table(text: str, context: str = "") -> Passage:
    return Passage(1, "p", "d", "Title", text, context, "table")


def told(text: str, context: str = "", *, row: int = -1) -> str:
    """Its last row, or the one that is named."""
    passage = table(text, context)
    return told_row(passage, row % len(text.splitlines()))


def test_a_row_is_told_with_its_columns() -> None:
    larch = "Larch: Charge nurse Aminata Diallo; Beds 31; Night staff 5; Phone 4413"
    assert told(WARDS) == larch
    header, _, row = WARDS.splitlines()
    assert told(row, header) == larch, "also where its table's header is in another passage"
    assert told(WARDS, "Wards in 2025") == f"(Wards in 2025) {larch}"


def test_what_stands_above_a_table_says_of_what_and_in_what_unit() -> None:
    text = "Results\n(in millions)\n\t2023\t2022\nSales\t10\t12"
    assert told(text, "Annual report") == "(Results; in millions) Sales: 2023 10; 2022 12"
    cornered = "(in millions)\t2023\t2022\nSales\t10\t12"
    assert told(cornered, "Results") == "(Results; in millions) Sales: 2023 10; 2022 12"
    assert told(cornered, "Sheet1") == "(in millions) Sales: 2023 10; 2022 12"
    assert told(cornered, "long " * 40) == "(in millions) Sales: 2023 10; 2022 12"


def test_rows_of_one_name_are_told_with_their_sections() -> None:
    text = (
        "SBU\t2023\t2022\n"
        "Revenue\nSouth America\t10\t12\nAfrica\t3\t4\n"
        "Operating margin\t\t\nSouth America\t1\t2"
    )
    assert told(text, row=2) == "(Revenue) South America: 2023 10; 2022 12"
    assert told(text, row=3) == "(Revenue) Africa: 2023 3; 2022 4"
    assert told(text) == "(Operating margin) South America: 2023 1; 2022 2"


def test_empty_cells_are_left_out() -> None:
    assert told(f"{WARDS}\nBirch\t\t12") == "Birch: Beds 12"
    assert told(f"{WARDS}\n\t\t12\t1") == "Beds 12; Night staff 1"
    assert told("Ward\t\tBeds\nBirch\tnorth\t12") == "Birch: north; Beds 12"


@pytest.mark.parametrize(
    ("text", "last"),
    [
        ("Smith\tRoom 4\t4411\nJones\tRoom 5\t4412", "Jones | Room 5 | 4412"),
        ("Maple\tSorensen\t24\t3\nLarch\tDiallo\t31\t5", "Larch | Diallo | 31 | 5"),
        ("Beds\tNight\nMaple\t24\told\nLarch\t31\tnew", "Larch | 31 | new"),
        ("\tYears\nMaple\t24\t3\t1\nLarch\t31\t5\t1", "Larch | 31 | 5 | 1"),
        (WARDS.splitlines()[0], "Ward | Charge nurse | Beds | Night staff | Phone"),
    ],
    ids=["no header", "no header, of small numbers", "remarks", "two headers", "the header"],
)
def test_cells_whose_columns_are_not_known_are_told_apart(text: str, last: str) -> None:
    assert told(text) == last


def test_a_first_column_may_be_without_a_name() -> None:
    assert told("\tBeds\tNight\nMaple\t24\t3\nLarch\t31\t5") == "Larch: Beds 31; Night 5"
    assert told("Beds\tNight\nMaple\t24\t3\nLarch\t31\t5") == "Larch: Beds 31; Night 5"
    columns = "Grade\t1\t2\t3\nPay\t20\t30\t40"
    assert told(columns) == "Pay: 1 20; 2 30; 3 40", "numbers may be names"


def test_a_remark_beside_one_row_takes_no_other_ones_columns() -> None:
    text = f"{WARDS}\nBirch\tOle Berg\t12\t1\t4415\tclosed in May"
    assert told(text, row=2).endswith("Night staff 5; Phone 4413")
    assert told(text).endswith("Night staff 1; Phone 4415; closed in May")


def test_two_columns_are_told_so_that_either_reading_is_right() -> None:
    """A list of properties has no header, and looks like a table that has one."""
    assert told("Wing\tBeds\nEast\t30", "Beds in use") == "(Beds in use; Wing: Beds) East: 30"
    assert told("Ward\tLarch\nCharge nurse\tDiallo") == "(Ward: Larch) Charge nurse: Diallo"


def test_a_header_that_was_cut_names_what_is_left_of_it() -> None:
    header = f"Ward\tBeds\tNight staff\t{'very ' * 60}long\tPhone"[:200]
    row = "Larch\t31\t5\t7\t4413"
    assert told(row, header) == "Larch: Beds 31; Night staff 5; 7; 4413"


def test_a_number_in_brackets_is_no_mark_of_a_citation() -> None:
    oil = told("Oil\t2023 [1]\t2022\nWhale [2, 3]\t[4]\t7 [1]")
    text = f"{oil} [1]"
    assert text == "Whale [ 2, 3 ]: 2023 [ 1 ] [ 4 ]; 2022 7 [ 1 ] [1]"
    numbers = [Citation(number=n, document_id=f"d{n}") for n in range(1, 5)]
    [mark] = cited_at(AskReply(answer=text, citations=numbers))
    assert mark["url_citation"]["start_index"] == len(text) - 3


CELL = st.text(
    st.characters(exclude_categories=["Cc", "Cs", "Zl", "Zp"], exclude_characters="["), max_size=12
)
LINES = st.lists(st.lists(CELL, min_size=1, max_size=6).map("\t".join), min_size=1, max_size=8)


@given(rows=LINES, context=LINES | st.just([]))
def test_nothing_of_a_row_is_lost_and_no_tab_is_left(rows: list[str], context: list[str]) -> None:
    passage = table("\n".join(rows), "\n".join(context))
    for position, row in enumerate(passage.text.splitlines()):
        line = told_row(passage, position)
        assert "\t" not in line
        assert "\n" not in line
        for cell in row.split("\t"):
            assert " ".join(cell.split()) in line


def test_a_workbook_is_told_row_by_row(tmp_path: Path) -> None:
    book = openpyxl.Workbook()
    sheet = book.worksheets[0]
    sheet.title = "Staffing"
    sheet.append(["Wards of the north house"])
    for row in WARDS.splitlines():
        sheet.append([int(cell) if cell.isdecimal() else cell for cell in row.split("\t")])
    sheet.append(["Birch", None, 12])
    for number in range(40):
        sheet.append([f"Annex {number}", "nobody", number])
    book.save(tmp_path / "wards.xlsx")
    [document] = [one for one in read(tmp_path / "wards.xlsx") if isinstance(one, Document)]
    pieces = SentenceSplitter(lambda text: len(text.split()), 60)(document)
    assert len(pieces) > 1
    lines = [
        told_row(table(piece.text, piece.context), position)
        for piece in pieces
        for position in range(len(piece.text.splitlines()))
    ]
    front = "(Staffing; Wards of the north house)"
    assert (
        f"{front} Larch: Charge nurse Aminata Diallo; Beds 31; Night staff 5; Phone 4413" in lines
    )
    assert f"{front} Birch: Beds 12" in lines
    assert lines[-1] == f"{front} Annex 39: Charge nurse nobody; Beds 39", "in a later passage"
