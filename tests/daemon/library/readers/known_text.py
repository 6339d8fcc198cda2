"""One text, written for this project, as files of many kinds; and how much of it was read."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator
from difflib import SequenceMatcher
from email.message import EmailMessage
from html import escape
from pathlib import Path

import docx
import openpyxl
import pptx
from pptx.util import Inches

from daemon.library.readers.documents import Attached, Block, FileProblem, Read
from daemon.library.readers.reader import Source

Reading = Callable[[Source], Iterator[Read]]

TITLE = "House rules of the lighthouse"
LEAD = (
    "The lamp is lit an hour before sunset, whatever the weather says, and the hour is written"
    " into the log by whoever struck the match. Nobody leaves the lantern room while it is foggy."
)
HEADING = "What the keeper checks"
ITEMS = ("The wick is trimmed and dry.", "The glass is clean on both sides.", "Oil for two nights.")
CLOSING = "Whoever finds the door unlocked after ten rings the bell twice and waits for an answer."
TABLE = [
    ["Station", "Height", "Range", "Built", "Keeper"],
    *(
        [f"North {n}", str(20 + n), f"{14 + n} miles", str(1850 + n), f"Family {chr(65 + n)}berg"]
        for n in range(7)
    ),
]
TABLE[3][2] = ""  # one cell is empty
CAPTION = "Figure 1: The lantern seen from the gallery, with its lenses turned away."
WORDS = " ".join(
    [TITLE, LEAD, HEADING, *ITEMS, *(cell for row in TABLE for cell in row), CAPTION, CLOSING]
).split()


def read(reading: Reading, path: Path) -> list[Read]:
    """All that a reader makes of a file."""
    return list(reading(Source(path, path.name, path.stat().st_size)))


def read_bytes(reading: Reading, folder: Path, content: bytes, name: str = "file") -> list[Read]:
    """All that a reader makes of these bytes."""
    path = folder / name
    path.write_bytes(content)
    return read(reading, path)


def blocks(items: Iterable[Read]) -> list[Block]:
    """The blocks alone."""
    return [item for item in items if isinstance(item, Block)]


def texts(items: Iterable[Read], kind: str = "") -> list[str]:
    """The texts of the blocks, or of those of a kind."""
    return [block.text for block in blocks(items) if kind in ("", block.kind)]


def attached(items: Iterable[Read]) -> list[Attached]:
    """The files in the file."""
    return [item for item in items if isinstance(item, Attached)]


def problems(items: Iterable[Read]) -> list[str]:
    """What was not read, without its file."""
    return [item.cause for item in items if isinstance(item, FileProblem)]


def words_in_order(items: Iterable[Read]) -> float:
    """The share of the known words that were read, in their order."""
    found = " ".join(texts(items)).split()
    matching = SequenceMatcher(None, WORDS, found, autojunk=False).get_matching_blocks()
    return sum(match.size for match in matching) / len(WORDS)


def cells_in_place(items: Iterable[Read]) -> float:
    """The share of the known cells that stand in their row and column."""
    rows = [line.split("\t") for text in texts(items, "table") for line in text.split("\n")]
    right = sum(
        row < len(rows) and column < len(rows[row]) and rows[row][column] == cell
        for row, cells in enumerate(TABLE)
        for column, cell in enumerate(cells)
    )
    return right / sum(map(len, TABLE))


def as_docx() -> bytes:
    """The text as Word has it."""
    document = docx.Document()
    document.core_properties.title = TITLE
    document.core_properties.author = "The harbour office"
    document.core_properties.language = "en-GB"
    document.add_heading(TITLE, 0)
    document.add_paragraph(LEAD)
    document.add_heading(HEADING, 1)
    for item in ITEMS:
        document.add_paragraph(item, style="List Bullet")
    table = document.add_table(len(TABLE), len(TABLE[0]))
    for row, cells in zip(table.rows, TABLE, strict=True):
        for cell, text in zip(row.cells, cells, strict=True):
            cell.text = text
    document.add_paragraph(CAPTION, style="Caption")
    document.add_paragraph(CLOSING)
    document.sections[0].header.paragraphs[0].text = "Printed on every page"
    return _saved(document.save)


def as_pptx() -> bytes:
    """The text on two slides."""
    deck = pptx.Presentation()
    deck.core_properties.title = TITLE
    deck.core_properties.author = "The harbour office"
    first = deck.slides.add_slide(deck.slide_layouts[1])
    # Made first, read last: it stands at the bottom of the slide.
    rest = deck.slides.add_slide(deck.slide_layouts[6])
    last = rest.shapes.add_textbox(Inches(1), Inches(6), Inches(8), Inches(1))
    last.text_frame.text = CLOSING
    first.shapes.title.text = TITLE
    box = first.shapes.add_textbox(Inches(1), Inches(5), Inches(8), Inches(2))
    box.text_frame.text = "\n".join([HEADING, *ITEMS])
    first.placeholders[1].text = LEAD
    first.placeholders[1].left, first.placeholders[1].top = Inches(1), Inches(2)
    first.placeholders[1].width, first.placeholders[1].height = Inches(8), Inches(2)
    size = (Inches(1), Inches(1), Inches(8), Inches(3))
    table = rest.shapes.add_table(len(TABLE), len(TABLE[0]), *size).table
    for row, cells in enumerate(TABLE):
        for column, text in enumerate(cells):
            table.cell(row, column).text = text
    caption = rest.shapes.add_textbox(Inches(1), Inches(5), Inches(8), Inches(1))
    caption.text_frame.text = CAPTION
    first.notes_slide.notes_text_frame.text = ""
    return _saved(deck.save)


def as_xlsx() -> bytes:
    """The text in a sheet: a cell a paragraph, and the table between empty rows."""
    book = openpyxl.Workbook()
    book.properties.title = TITLE
    book.properties.creator = "The harbour office"
    sheet = book.active
    assert sheet is not None
    sheet.title = "Rules"
    above = [[TITLE], [LEAD], [HEADING], *([item] for item in ITEMS)]
    for cells in (*above, [], *TABLE, [], [CAPTION], [CLOSING]):
        sheet.append([_value(cell) for cell in cells])
    return _saved(book.save)


def _value(text: str) -> object:
    return int(text) if text.isdecimal() else text or None


def as_html() -> bytes:
    """The text as a page, with what pages have besides."""
    rows = [
        "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells)
        for tag, cells in zip(["th", *["td"] * 7], TABLE, strict=True)
    ]
    return f"""<!DOCTYPE html><html lang="en-GB"><head><meta charset="utf-8"><title>{TITLE}</title>
<meta name="author" content="The harbour office"><meta name="date" content="2024-03-05T10:00:00Z">
<style>p {{ color: red }}</style><script>var hidden = "<p>script</p>";</script></head><body>
<nav><ul><li><a href="/">Home</a></li></ul></nav><!-- a comment -->
<h1>{TITLE}</h1><p>{LEAD}</p><p style="display: none">never seen</p><h2>{HEADING}</h2>
<ul>{"".join(f"<li>{item}" for item in ITEMS)}</ul>
<table>{"".join(f"<tr>{row}</tr>" for row in rows)}</table>
<figure><img src="lamp.png" alt="lamp.png"><figcaption>{CAPTION}</figcaption></figure>
<p>{CLOSING}<footer>Imprint and contact</footer></body></html>""".encode()


def as_eml() -> bytes:
    """The text as a letter that is a page."""
    letter = EmailMessage()
    letter["Subject"] = TITLE
    letter["From"] = "The harbour office <office@harbour.example>"
    letter["To"] = "keepers@harbour.example"
    letter["Date"] = "Tue, 05 Mar 2024 10:00:00 +0100"
    letter.set_content(as_html().decode(), subtype="html", cte="quoted-printable")
    return letter.as_bytes()


def _saved(save: Callable[[io.BytesIO], object]) -> bytes:
    file = io.BytesIO()
    save(file)
    return file.getvalue()
