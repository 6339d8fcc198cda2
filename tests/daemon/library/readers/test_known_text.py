"""The same text is read from files of every kind: its words in order, its cells in place."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from daemon.library.readers.documents import About
from daemon.library.readers.docx import read_docx
from daemon.library.readers.html import read_html
from daemon.library.readers.mail import read_eml
from daemon.library.readers.pptx import read_pptx
from daemon.library.readers.sheets import read_xlsx
from tests.daemon.library.readers.known_text import (
    CAPTION,
    HEADING,
    ITEMS,
    TABLE,
    TITLE,
    Reading,
    as_docx,
    as_eml,
    as_html,
    as_pptx,
    as_xlsx,
    blocks,
    cells_in_place,
    read_bytes,
    texts,
    words_in_order,
)

KINDS = {
    "docx": (read_docx, as_docx),
    "pptx": (read_pptx, as_pptx),
    "xlsx": (read_xlsx, as_xlsx),
    "html": (read_html, as_html),
    "eml": (read_eml, as_eml),
}
every_kind = pytest.mark.parametrize(("reading", "made"), KINDS.values(), ids=KINDS)


@every_kind
def test_words_are_read_in_their_order(
    reading: Reading, made: Callable[[], bytes], tmp_path: Path
) -> None:
    assert words_in_order(read_bytes(reading, tmp_path, made())) >= 0.98


@every_kind
def test_a_table_keeps_its_rows_and_columns(
    reading: Reading, made: Callable[[], bytes], tmp_path: Path
) -> None:
    items = read_bytes(reading, tmp_path, made())
    assert len(texts(items, "table")) == 1
    assert cells_in_place(items) >= 0.95


@every_kind
def test_what_a_file_says_of_itself_comes_first(
    reading: Reading, made: Callable[[], bytes], tmp_path: Path
) -> None:
    first, *others = read_bytes(reading, tmp_path, made())
    assert isinstance(first, About)
    assert first.title == TITLE
    assert first.author.startswith("The harbour office")
    assert not [item for item in others if isinstance(item, About)]


@pytest.mark.parametrize("kind", ["docx", "html", "eml"])
def test_headings_lists_and_captions_are_known_as_such(kind: str, tmp_path: Path) -> None:
    reading, made = KINDS[kind]
    items = read_bytes(reading, tmp_path, made())
    assert texts(items, "heading") == [TITLE, HEADING]
    assert texts(items, "figure") == [CAPTION]
    assert "\n".join(f"- {item}" for item in ITEMS) in texts(items, "text")
    assert texts(items, "table")[0].split("\n")[0] == "\t".join(TABLE[0])


@pytest.mark.parametrize("kind", KINDS)
def test_what_no_reader_looks_for_is_left_out(kind: str, tmp_path: Path) -> None:
    reading, made = KINDS[kind]
    whole = "\n".join(texts(read_bytes(reading, tmp_path, made())))
    for unwanted in ("Printed on every page", "Home", "never seen", "Imprint", "script", "color"):
        assert unwanted not in whole


def test_a_slide_is_a_page_and_its_shapes_have_places(tmp_path: Path) -> None:
    found = blocks(read_bytes(read_pptx, tmp_path, as_pptx()))
    assert [block.page for block in found] == [1, 1, 1, 2, 2, 2]
    assert found[0].kind == "heading"
    for block in found:
        assert block.place is not None
        left, top, right, bottom = block.place
        assert 0 <= left < right <= 1
        assert 0 <= top < bottom <= 1


def test_a_sheet_is_a_page_below_its_name(tmp_path: Path) -> None:
    found = blocks(read_bytes(read_xlsx, tmp_path, as_xlsx()))
    assert {block.page for block in found} == {1}
    assert (found[0].kind, found[0].text) == ("heading", "Rules")
