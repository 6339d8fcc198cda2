"""What Word, PowerPoint and Excel write besides plain paragraphs, shapes and cells."""

from __future__ import annotations

import datetime
import io
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import docx
import openpyxl
import pptx
import pytest
from docx.enum.style import WD_STYLE_TYPE
from docx.oxml import parse_xml
from docx.oxml.ns import nsdecls
from pptx.util import Inches

from daemon.library.readers import blocks as shared
from daemon.library.readers import documents, sheets
from daemon.library.readers.documents import Block
from daemon.library.readers.docx import read_docx
from daemon.library.readers.pptx import read_pptx
from daemon.library.readers.reader import Refused
from daemon.library.readers.sheets import read_csv, read_xlsx
from tests.daemon.library.readers.known_text import blocks, problems, read_bytes, texts

W = nsdecls("w", "wp", "m") + (
    ' xmlns:mc="http://schemas.openxmlformats.org/markup-compatibility/2006"'
    ' xmlns:v="urn:schemas-microsoft-com:vml"'
)


def saved(save: Callable[[io.BytesIO], object]) -> bytes:
    """What a library writes."""
    file = io.BytesIO()
    save(file)
    return file.getvalue()


def document(*parts: str) -> bytes:
    """A Word document with these elements as its body."""
    made = docx.Document()
    for part in parts:
        opening, closing = part.split(">", 1)
        made.element.body.insert_element_before(parse_xml(f"{opening} {W}>{closing}"), "w:sectPr")
    return saved(made.save)


def run(text: str, properties: str = "") -> str:
    """A run of text, and its properties."""
    return f"<w:r><w:rPr>{properties}</w:rPr><w:t>{text}</w:t></w:r>"


# ---- Word -------------------------------------------------------------------


def test_what_was_inserted_counts_and_what_was_deleted_does_not(tmp_path: Path) -> None:
    raw = document(
        f"<w:p>{run('The lamp')}<w:ins>{run(' is lit')}</w:ins>"
        "<w:del><w:r><w:delText> is dark</w:delText></w:r></w:del>"
        f"<w:moveFrom>{run(' moved away')}</w:moveFrom>{run(' hidden', '<w:vanish/>')}"
        f"{run(' and', '<w:vanish w:val=&quot;0&quot;/>'.replace('&quot;', chr(34)))}"
        "<w:r><w:tab/><w:t>stays</w:t><w:br/><w:t>below</w:t></w:r></w:p>"
    )
    assert texts(read_bytes(read_docx, tmp_path, raw)) == ["The lamp is lit and stays\nbelow"]


def test_text_boxes_and_content_controls_are_read_once(tmp_path: Path) -> None:
    box = "<w:txbxContent><w:p><w:r><w:t>In a box.</w:t></w:r></w:p></w:txbxContent>"
    raw = document(
        f"<w:sdt><w:sdtContent><w:p>{run('In a control.')}</w:p></w:sdtContent></w:sdt>",
        f"<w:p>{run('Around it.')}<w:r><mc:AlternateContent><mc:Choice Requires='wps'>{box}"
        f"</mc:Choice><mc:Fallback><w:pict>{box}</w:pict></mc:Fallback></mc:AlternateContent>"
        "</w:r></w:p>",
    )
    assert texts(read_bytes(read_docx, tmp_path, raw)) == [
        "In a control.",
        "Around it.",
        "In a box.",
    ]


def test_pictures_and_formulas_of_a_document_are_read(tmp_path: Path) -> None:
    raw = document(
        "<w:p><w:r><w:drawing><wp:inline><wp:docPr id='1' name='P' descr='The north tower'/>"
        "</wp:inline></w:drawing></w:r></w:p>",
        "<w:p><m:oMath><m:r><m:t>a=b</m:t></m:r></m:oMath></w:p>",
    )
    assert blocks(read_bytes(read_docx, tmp_path, raw)) == [
        Block("figure", "The north tower"),
        Block("text", "a=b"),
    ]


def test_merged_and_nested_cells_of_a_document(tmp_path: Path) -> None:
    made = docx.Document()
    table = made.add_table(3, 3)
    for row in range(3):
        for column in range(3):
            table.cell(row, column).text = f"{row}{column}"
    table.cell(0, 0).merge(table.cell(0, 1)).text = "wide"
    table.cell(1, 0).merge(table.cell(2, 0)).text = "tall"
    inner = table.cell(2, 2).add_table(1, 2)
    inner.cell(0, 0).text, inner.cell(0, 1).text = "in", "side"
    assert texts(read_bytes(read_docx, tmp_path, saved(made.save)), "table") == [
        "wide\t\t02\ntall\t11\t12\n\t21\t22 in side"
    ]


def test_headings_are_known_by_their_outline_and_contents_left_out(tmp_path: Path) -> None:
    made = docx.Document()
    own = made.styles.add_style("House heading", WD_STYLE_TYPE.PARAGRAPH)
    own.base_style = made.styles["Heading 2"]
    contents = made.styles.add_style("toc 1", WD_STYLE_TYPE.PARAGRAPH)
    made.add_paragraph("Lamps .... 3", style=contents)
    made.add_paragraph("Lamps", style=own)
    assert blocks(read_bytes(read_docx, tmp_path, saved(made.save))) == [Block("heading", "Lamps")]


def test_styles_based_on_thousands_of_others_are_soon_looked_up(tmp_path: Path) -> None:
    count = 3000
    chain = "".join(
        f'<w:style w:styleId="s{n}"><w:basedOn w:val="s{(n + 1) % count}"/></w:style>'
        for n in range(count)
    )
    text = f'<w:p><w:pPr><w:pStyle w:val="s0"/></w:pPr>{run("Lamps")}</w:p>'
    made = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(document(*[text] * 30))) as source,
        zipfile.ZipFile(made, "w") as packed,
    ):
        for name in source.namelist():
            raw = source.read(name).replace(b"</w:styles>", chain.encode() + b"</w:styles>")
            packed.writestr(name, raw)
    begun = time.process_time()
    assert texts(read_bytes(read_docx, tmp_path, made.getvalue())) == ["Lamps"] * 30
    assert time.process_time() - begun < 5  # a tenth of a second; looked for in a list, a minute


def test_a_long_table_goes_on_below_its_header(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared, "_LONGEST_TABLE", 30)
    rows = "a,b\n" + "\n".join(f"row {n},{n}" for n in range(6))
    assert texts(read_bytes(read_csv, tmp_path, rows.encode())) == [
        "a\tb\nrow 0\t0\nrow 1\t1\nrow 2\t2",
        "a\tb\nrow 3\t3\nrow 4\t4\nrow 5\t5",
    ]


def test_a_paragraph_without_an_end_is_not_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = document(f"<w:p>{run('x' * 5000) * 3}</w:p>")
    monkeypatch.setattr(documents, "MAX_TEXT_BYTES", 10_000)
    with pytest.raises(Refused, match="a paragraph or a row longer"):
        read_bytes(read_docx, tmp_path, raw)


# ---- PowerPoint -------------------------------------------------------------


def test_shapes_are_read_as_they_are_looked_at(tmp_path: Path) -> None:
    deck = pptx.Presentation()
    slide = deck.slides.add_slide(deck.slide_layouts[5])
    spots = {"low": (1, 6), "right": (5, 3), "left": (1, 3.1), "top": (1, 2)}
    for text, (left, top) in spots.items():
        box = slide.shapes.add_textbox(Inches(left), Inches(top), Inches(2), Inches(0.5))
        box.text_frame.text = text
    slide.shapes.title.text = "Title"
    slide.shapes.title.top = Inches(6.5)
    slide.notes_slide.notes_text_frame.text = "Say it slowly."
    found = texts(read_bytes(read_pptx, tmp_path, saved(deck.save)))
    assert found == ["Title", "top", "left", "right", "low", "Say it slowly."]


def test_shapes_in_groups_have_the_place_where_they_are_seen(tmp_path: Path) -> None:
    deck = pptx.Presentation()
    slide = deck.slides.add_slide(deck.slide_layouts[6])
    group = slide.shapes.add_group_shape()
    box = group.shapes.add_textbox(0, 0, Inches(2), Inches(2))
    box.text_frame.text = "moved"
    group.left, group.top = Inches(5), Inches(3.75)
    group.width, group.height = Inches(1), Inches(1)  # half as large as within
    (block,) = blocks(read_bytes(read_pptx, tmp_path, saved(deck.save)))
    assert block.place == pytest.approx((0.5, 0.5, 0.6, 0.5 + 1 / 7.5))


def test_merged_cells_of_a_slide_count_once(tmp_path: Path) -> None:
    deck = pptx.Presentation()
    slide = deck.slides.add_slide(deck.slide_layouts[6])
    table = slide.shapes.add_table(2, 2, 0, 0, Inches(3), Inches(1)).table
    table.cell(0, 0).merge(table.cell(0, 1))
    table.cell(0, 0).text, table.cell(1, 0).text, table.cell(1, 1).text = "wide", "a", "b"
    assert texts(read_bytes(read_pptx, tmp_path, saved(deck.save))) == ["wide\na\tb"]


# ---- Excel and CSV ----------------------------------------------------------


def test_formulas_that_nobody_has_calculated_are_told(tmp_path: Path) -> None:
    """A program that writes formulas does not know what they come to; Excel does, and says so."""
    book = openpyxl.Workbook()
    sheet = book.worksheets[0]
    for row in (("beds", 2), ("beds", 3), ("sum", "=SUM(B1:B2)"), ("mean", "=AVERAGE(B1:B2)")):
        sheet.append(row)
    read = read_bytes(read_xlsx, tmp_path, saved(book.save))
    assert texts(read, "table") == ["beds\t2\nbeds\t3\nsum\nmean"]
    (cause,) = problems(read)
    assert cause == (
        "formulas without values in the file (2), which are passed over: open it in a "
        "spreadsheet program and save it"
    )


def test_values_are_read_as_they_are_shown(tmp_path: Path) -> None:
    book = openpyxl.Workbook()
    sheet = book.worksheets[0]
    shown: list[tuple[str | float | datetime.date | datetime.time, str, str]] = [
        (0.1 + 0.2, "General", "0.3"),
        (1e20, "General", "1e+20"),
        (3.0, "General", "3"),
        (0.256, "0%", "26%"),
        (1234.5, "#,##0.00", "1234.50"),
        (datetime.date(2024, 3, 5), "dd.mm.yyyy", "2024-03-05"),
        (datetime.datetime(2024, 3, 5, 10, 30), "General", "2024-03-05 10:30"),
        (datetime.time(10, 30), "hh:mm", "10:30:00"),
        (True, "General", "TRUE"),
        ("two\nlines", "@", "two lines"),
        ("=1+1", "General", ""),  # nobody has computed it
    ]
    for row, (value, style, _) in enumerate(shown, 1):
        sheet.cell(row, 1, f"r{row}")
        cell = sheet.cell(row, 2, value)
        if style != "General":
            cell.number_format = style
    lines = texts(read_bytes(read_xlsx, tmp_path, saved(book.save)), "table")[0].split("\n")
    assert [line.partition("\t")[2] for line in lines] == [text for *_, text in shown]


def test_tables_are_what_empty_rows_and_columns_divide(tmp_path: Path) -> None:
    book = openpyxl.Workbook()
    sheet = book.worksheets[0]
    for row in (["a", "b", None, "x", "y"], [1, None, None, 2, 3], [], [None, None, None, 4, 5]):
        sheet.append(row)
    sheet.merge_cells("A1:A2")
    book.create_sheet("Secret").append(["unseen"])
    book["Secret"].sheet_state = "hidden"
    book.create_sheet("Last").append(["seen", 1])
    found = blocks(read_bytes(read_xlsx, tmp_path, saved(book.save)))
    assert [(block.kind, block.text, block.page) for block in found] == [
        ("heading", "Sheet", 1),
        ("table", "a\tb", 1),
        ("table", "x\ty\n2\t3", 1),
        ("table", "4\t5", 1),
        ("heading", "Last", 3),
        ("table", "seen\t1", 3),
    ]


def test_cells_in_far_corners_cost_nothing(tmp_path: Path) -> None:
    book = openpyxl.Workbook()
    sheet = book.worksheets[0]
    sheet["A1"], sheet["XFD1"], sheet["XFD1048576"] = "a", "b", "c"
    assert texts(read_bytes(read_xlsx, tmp_path, saved(book.save))) == ["Sheet", "a", "b", "c"]


def test_only_so_many_cells_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sheets, "_MOST_CELLS", 5)
    book = openpyxl.Workbook()
    for row in range(4):
        book.worksheets[0].append([row, row])
    items = read_bytes(read_xlsx, tmp_path, saved(book.save))
    assert problems(items) == ["more than 5 cells, read up to there: cut it up"]


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (b"a;b\n1,5;2,5\n", "a\tb\n1,5\t2,5"),
        (b'a,b\r\n"x, y","two\r\nlines"\r\n\r\n1,2\r\n', "a\tb\nx, y\ttwo lines\n1\t2"),
        (b"a\tb\n1\t2\n", "a\tb\n1\t2"),
        (b"sep=|\na|b\n1|2\n", "a\tb\n1\t2"),
        ("Größe;Öl\n1;2\n".encode("utf-16"), "Größe\tÖl\n1\t2"),
        ("Größe;Öl\n1;süß und ölig\n".encode("latin-1"), "Größe\tÖl\n1\tsüß und ölig"),
        (b"only\none\ncolumn\n", "only\none\ncolumn"),
    ],
)
def test_delimiter_and_encoding_are_found(raw: bytes, said: str, tmp_path: Path) -> None:
    assert texts(read_bytes(read_csv, tmp_path, raw)) == [said]
