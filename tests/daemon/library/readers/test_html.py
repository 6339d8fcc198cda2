"""Pages: what a browser shows of them, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from daemon.library.readers.documents import About, Block
from daemon.library.readers.html import blocks_of, read_html
from daemon.library.readers.reader import Refused
from tests.daemon.library.readers.known_text import read_bytes, texts


def shown(page: str, folder: Path) -> list[tuple[str, str]]:
    """Kinds and texts of a page's blocks."""
    items = read_bytes(read_html, folder, page.encode())
    return [(item.kind, item.text) for item in items if isinstance(item, Block)]


def test_what_is_not_shown_is_not_read(tmp_path: Path) -> None:
    page = """<body><p>Seen <span hidden>one</span>here<script>two</script></p>
    <div style="visibility:hidden"><p>three<img alt="four"></div><noscript>five</noscript>
    <nav>six</nav><div role="navigation">seven</div><template><p>eight</p></template>
    <p aria-hidden="true">nine</p><button>ten</button><select><option>eleven</select>
    <textarea>twelve</textarea><footer>thirteen</footer><p>Last.</body>"""
    assert shown(page, tmp_path) == [("text", "Seen here"), ("text", "Last.")]


def test_of_a_page_with_a_main_part_that_is_read(tmp_path: Path) -> None:
    page = "<div>Menu</div><div role=main><div>A</div><p>B</p></div><main>C</main><aside>D</aside>"
    assert shown(page, tmp_path) == [("text", "A"), ("text", "B"), ("text", "C")]


def test_lists_keep_their_order_and_depth(tmp_path: Path) -> None:
    page = "<ol start=3><li>three<ul><li>inner</ul><li><p>four</p><p>more</p></ol><p>after"
    assert shown(page, tmp_path) == [
        ("text", "3. three\n  - inner\n4. four\nmore"),
        ("text", "after"),
    ]


def test_merged_cells_count_once_and_push_nothing_aside(tmp_path: Path) -> None:
    page = """<table><caption>Shifts</caption>
    <tr><th>Day<th colspan=2>Keepers<th>Oil</tr>
    <tr><td rowspan=2>Mon<td>Ada<td>Ole<td>2</tr>
    <tr><td>Eva<td><table><tr><td>Kai<td>or Jan</table><td>3</tr></table>"""
    assert shown(page, tmp_path) == [
        ("text", "Shifts"),
        ("table", "Day\tKeepers\t\tOil\nMon\tAda\tOle\t2\n\tEva\tKai or Jan\t3"),
    ]


def test_a_table_for_looks_is_no_table(tmp_path: Path) -> None:
    page = "<table><tr><td><h1>Top</h1><p>One.<p>Two.<td>Aside</table>"
    assert shown(page, tmp_path) == [
        ("heading", "Top"),
        ("text", "One."),
        ("text", "Two."),
        ("text", "Aside"),
    ]


def test_breaks_and_preformatted_lines_stay(tmp_path: Path) -> None:
    page = "<p>one<br>two   three</p><pre>a\n  b</pre>"
    assert shown(page, tmp_path) == [("text", "one\ntwo three"), ("text", "a\n  b")]


def test_pictures_are_what_is_told_of_them(tmp_path: Path) -> None:
    page = "<p>A<img alt='The north tower' src=x><img alt='dsc_001.jpg'><img alt=''>B"
    assert shown(page, tmp_path) == [("text", "A"), ("figure", "The north tower"), ("text", "B")]


@pytest.mark.parametrize(
    ("head", "encoding"),
    [
        ('<meta charset="windows-1251">', "cp1251"),
        ('<meta http-equiv="Content-Type" content="text/html; charset=windows-1251">', "cp1251"),
        ("<meta charset='iso-8859-5'>", "iso-8859-5"),
        ("", "utf-16"),
        ("<meta charset=utf-16>", "utf-8"),
        ("<meta charset=no-such-one>", "utf-8"),
        ("", "cp1251"),
    ],
)
def test_the_encoding_of_a_page_is_found(head: str, encoding: str, tmp_path: Path) -> None:
    text = "Смотритель маяка зажигает лампу за час до заката и записывает время в журнал."
    raw = f"<html><head>{head}<title>Маяк</title></head><p>{text}</p></html>".encode(encoding)
    assert read_bytes(read_html, tmp_path, raw) == [About("Маяк"), Block("text", text)]


def test_a_page_that_breaks_off_is_read_up_to_there(tmp_path: Path) -> None:
    page = "<table><tr><td>a<td>b<tr><td>c<td>d"
    assert shown(page, tmp_path) == [("table", "a\tb\nc\td")]


@pytest.mark.slow
def test_elements_that_are_never_closed_are_refused(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="nested too deeply"):
        read_bytes(read_html, tmp_path, b"<b>" * 11_000 + b"</i>" * 11_000)


def test_cells_that_claim_a_thousand_columns_cost_nothing(tmp_path: Path) -> None:
    page = "<table>" + "<tr>" + "<td colspan=1000 rowspan=65534>x" * 2000 + "</table>"
    (text,) = texts(read_bytes(read_html, tmp_path, page.encode()))
    assert len(text) < 10_000


TAGS = (
    "<p> </p> <table> </table> <tr> <td> </td> <ul> <li> </ul> <h1> </h1> <main> </main>"
    " <div> </div> <pre> </pre> <br> <img> <figcaption> x <title> </title>"
)


@settings(max_examples=60)
@given(st.lists(st.sampled_from(TAGS.split(" ")), max_size=30))
def test_any_markup_gives_blocks(tags: list[str]) -> None:
    try:
        items = list(blocks_of("".join(tags).encode()))
    except Refused:
        items = []
    assert all(isinstance(item, Block | About) for item in items)
