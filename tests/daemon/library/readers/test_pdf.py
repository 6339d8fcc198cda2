"""PDFs made for the purpose: what becomes of columns, headings, tables, and of broken files."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from PIL import Image
from reportlab.pdfgen.canvas import Canvas

from daemon.library.readers.documents import About, Block, FileProblem, Read
from daemon.library.readers.pdf import ocr
from daemon.library.readers.pdf.pdf import read_pdf
from daemon.library.readers.reader import Refused, Source
from tests.daemon.library.readers.pdf_files import (
    HEIGHT,
    SENTENCE,
    WIDTH,
    Draw,
    aligned_table,
    heading,
    huge_image,
    lines,
    made,
    numbered,
    page_tree_with_a_loop,
    picture,
    put_picture,
    ruled_table,
)


def read(path: Path) -> list[Read]:
    return list(read_pdf(Source(path, path.name, path.stat().st_size)))


def blocks(path: Path, kind: str = "") -> list[Block]:
    return [b for b in read(path) if isinstance(b, Block) and kind in ("", b.kind)]


def problems(path: Path) -> list[FileProblem]:
    return [item for item in read(path) if isinstance(item, FileProblem)]


@pytest.fixture
def without_an_engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As on a machine where none is installed; what is found is remembered."""
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    ocr.engine.cache_clear()
    yield
    monkeypatch.undo()
    ocr.engine.cache_clear()


# ---- what is on a page


def test_a_file_says_first_what_it_is(tmp_path: Path) -> None:
    path = made(
        tmp_path / "a.pdf",
        lambda canvas: lines(canvas, [SENTENCE]),
        title="Night rounds",
        author="A. Vogt",
        lang="en-GB",
    )
    first = read(path)[0]
    assert isinstance(first, About)
    assert (first.title, first.author, first.language) == ("Night rounds", "A. Vogt", "en")
    assert len(first.date) == len("2026-01-31")


def test_a_block_has_its_page_and_its_place(tmp_path: Path) -> None:
    path = made(
        tmp_path / "a.pdf",
        lambda canvas: lines(canvas, ["one"]),
        lambda canvas: lines(canvas, ["two"], x=300, top=400),
    )
    one, two = blocks(path)
    assert (one.text, one.page, two.text, two.page) == ("one", 1, "two", 2)
    assert two.place is not None
    assert two.place[0] == pytest.approx(300 / WIDTH, abs=0.001)
    assert two.place[1] < 400 / HEIGHT < two.place[3]


def test_columns_are_read_one_after_the_other(tmp_path: Path) -> None:
    left, right = numbered("L", 12), numbered("R", 12)

    def draw(canvas: Canvas) -> None:
        lines(canvas, [f"{SENTENCE} on every floor"], top=80)
        lines(canvas, left, x=72, top=120)
        lines(canvas, right, x=310, top=124)
        lines(canvas, [f"{SENTENCE} in every house"], top=320)

    text = " ".join(block.text for block in blocks(made(tmp_path / "a.pdf", draw)))
    order = [text.index(mark) for mark in ("floor", "L0", "L11", "R0", "R11", "house")]
    assert order == sorted(order)


def test_columns_keep_their_tables_and_headings_to_themselves(tmp_path: Path) -> None:
    """Their gutter is narrower than the heading's type, and than the gaps of the table."""
    rows = [["Item", "2022", "2021"], ["Beds", "1,204", "987"], ["Total", "1,239", "1,018"]]

    def draw(canvas: Canvas) -> None:
        aligned_table(canvas, rows, 80, [160, 220])
        left = [f"{line} alone" for line in numbered("L", 9)]
        left[2] = "counterdemonstrations characteristically"  # few words beside the heading's
        lines(canvas, left, x=72, top=140)
        lines(canvas, numbered("M", 5), x=262, top=84)
        canvas.setFont("Helvetica-Bold", 18)
        canvas.drawString(262, HEIGHT - 168, "A heading of words")
        lines(canvas, numbered("R", 5), x=262, top=196)

    found = blocks(made(tmp_path / "a.pdf", draw))
    assert [(block.kind, block.text[:9]) for block in found] == [
        ("table", "Item\t2022"),
        ("text", "L0 stands"),
        ("text", "M0 stands"),
        ("heading", "A heading"),
        ("text", "R0 stands"),
    ]


def test_headings_are_told_by_their_size_or_weight(tmp_path: Path) -> None:
    def draw(canvas: Canvas) -> None:
        heading(canvas, "Large", 90, bold=False)
        lines(canvas, [SENTENCE] * 4, top=120)
        heading(canvas, "Bold and small", 200, size=10)
        lines(canvas, [SENTENCE] * 4, top=220)

    found = [(b.kind, b.text[:14]) for b in blocks(made(tmp_path / "a.pdf", draw))]
    body = ("text", SENTENCE[:14])
    assert found == [("heading", "Large"), body, ("heading", "Bold and small"), body]


def test_a_line_in_capitals_is_a_heading(tmp_path: Path) -> None:
    def draw(canvas: Canvas) -> None:
        lines(canvas, ["SERVICE CONTRACT No. 7781"], top=90)
        lines(canvas, [SENTENCE] * 4, top=120)
        lines(canvas, ["NATO"], top=200)  # one word may be a name

    found = [(b.kind, b.text[:16]) for b in blocks(made(tmp_path / "a.pdf", draw))]
    assert found[0] == ("heading", "SERVICE CONTRACT")
    assert [kind for kind, _ in found[1:]] == ["text", "text"]


def test_a_sentence_whose_lines_differ_in_size_is_one_as_in_scans(tmp_path: Path) -> None:
    def draw(canvas: Canvas) -> None:
        for row, (text, size) in enumerate(
            [("The contractor inspects the generator every", 12), ("six weeks and fills it.", 10)]
        ):
            canvas.setFont("Helvetica", size)
            canvas.drawString(72, HEIGHT - 90 - 13 * row, text)
        lines(canvas, [SENTENCE] * 6, top=140)

    found = [(b.kind, b.text) for b in blocks(made(tmp_path / "a.pdf", draw))]
    assert found[0] == (
        "text",
        "The contractor inspects the generator every six weeks and fills it.",
    )


def test_running_lines_and_page_numbers_are_left_out(tmp_path: Path) -> None:
    def draw(number: int) -> Draw:
        def on(canvas: Canvas) -> None:
            lines(canvas, ["Handbook of the northern wards"], top=40)
            lines(canvas, [f"Chapter {number} begins here", SENTENCE], top=100)
            lines(canvas, [f"Page {number} of 4"], x=280, top=HEIGHT - 40)

        return on

    path = made(tmp_path / "a.pdf", *(draw(number) for number in range(1, 5)))
    texts = [block.text for block in blocks(path)]
    assert texts == [f"Chapter {number} begins here {SENTENCE}" for number in range(1, 5)]


def test_lists_are_kept_by_line(tmp_path: Path) -> None:
    items = ["• first of the", "   things", "• second of them", "• third"]
    (block,) = blocks(made(tmp_path / "a.pdf", lambda canvas: lines(canvas, items)))
    assert block.text == "• first of the things\n• second of them\n• third"


def test_words_broken_at_a_line_are_mended(tmp_path: Path) -> None:
    texts = [
        "Each institution keeps its docu-",
        "ments, and agrees on long-",
        "term storage of a long term, and non-",
        "GAAP figures, and all of its documents",
    ]
    (block,) = blocks(made(tmp_path / "a.pdf", lambda canvas: lines(canvas, texts)))
    assert block.text == (
        "Each institution keeps its documents, and agrees on long-term storage of a long term, "
        "and non-GAAP figures, and all of its documents"
    )


def test_a_turned_page_reads_as_it_is_shown(tmp_path: Path) -> None:
    def draw(canvas: Canvas) -> None:
        canvas.rotate(90)
        canvas.translate(0, -WIDTH)  # a page that lies on its side, as it is shown
        lines(canvas, ["upper", "lower"], x=100, top=HEIGHT - WIDTH + 50)

    (block,) = blocks(made(tmp_path / "a.pdf", draw, turned=90))
    assert block.text == "upper lower"
    assert block.place is not None
    assert block.place[0] == pytest.approx(100 / WIDTH, abs=0.01)


@pytest.mark.parametrize(("angle", "to"), [(90, (0, -WIDTH)), (-90, (-HEIGHT, 0))])
def test_a_table_laid_sideways_is_read_upright(
    tmp_path: Path, angle: int, to: tuple[float, float]
) -> None:
    rows = [["", "2022", "2021"], ["North", "1,204", "9,871"], ["South", "3,512", "4,444"]]

    def draw(canvas: Canvas) -> None:
        canvas.rotate(angle)
        canvas.translate(*to)
        aligned_table(canvas, rows, 400, [300, 400])

    (table,) = blocks(made(tmp_path / "a.pdf", draw))
    assert [line.split("\t") for line in table.text.split("\n")] == rows
    assert table.place is not None
    left, top, right, bottom = table.place
    assert bottom - top == pytest.approx((400 - 72) / HEIGHT, abs=0.02)
    assert right - left < 0.1


# ---- tables


def test_a_table_without_lines_keeps_rows_and_columns(tmp_path: Path) -> None:
    rows = [
        ["", "2022", "2021"],
        ["Ward north, of all", "", ""],
        ["patients", "1,204", "987"],
        ["Ward south", "(35)", "—"],
        ["Total", "1,169", "987"],
    ]

    def draw(canvas: Canvas) -> None:
        lines(canvas, [SENTENCE], top=80)
        aligned_table(canvas, rows, 120, [300, 400])
        lines(canvas, [SENTENCE], top=220)

    before, table, after = blocks(made(tmp_path / "a.pdf", draw))
    assert (before.kind, table.kind, after.kind) == ("text", "table", "text")
    assert [line.split("\t") for line in table.text.split("\n")] == [
        ["", "2022", "2021"],
        ["Ward north, of all patients", "1,204", "987"],
        ["Ward south", "(35)", "—"],
        ["Total", "1,169", "987"],
    ]


def test_a_header_above_two_columns_names_both(tmp_path: Path) -> None:
    def draw(canvas: Canvas) -> None:
        canvas.setFont("Helvetica", 10)
        canvas.drawCentredString(340, HEIGHT - 107, "Quarter ended")
        rows = [["", "2022", "2021"], ["North", "1,204", "9,871"], ["South", "3,512", "4,444"]]
        aligned_table(canvas, rows, 120, [300, 400])

    (table,) = blocks(made(tmp_path / "a.pdf", draw))
    assert table.text.split("\n")[0] == "\tQuarter ended 2022\tQuarter ended 2021"


def test_a_ruled_table_keeps_cells_of_several_lines(tmp_path: Path) -> None:
    rows = [
        [["Alarm"], ["Who comes"]],
        [["Fire on", "a ward"], ["The house service,", "and the brigade"]],
        [["Missing patient"], ["Volunteers"]],
    ]

    def draw(canvas: Canvas) -> None:
        lines(canvas, [SENTENCE], top=80)
        ruled_table(canvas, rows, 120, [72, 200, 400])

    text, table = blocks(made(tmp_path / "a.pdf", draw))
    assert text.text == SENTENCE
    assert (table.kind, table.text) == (
        "table",
        "Alarm\tWho comes\n"
        "Fire on a ward\tThe house service, and the brigade\n"
        "Missing patient\tVolunteers",
    )


# ---- files that are broken, locked or lie


def test_a_locked_file_is_refused_with_the_remedy(tmp_path: Path) -> None:
    path = made(tmp_path / "a.pdf", lambda canvas: lines(canvas, [SENTENCE]), password="x")
    with pytest.raises(Refused, match="needs a password: save it without one"):
        read(path)


def test_what_is_no_pdf_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.pdf"
    path.write_text("a letter, and nothing else")
    with pytest.raises(Refused, match="not a PDF"):
        read(path)


def test_a_truncated_file_is_refused_or_read_in_part(tmp_path: Path) -> None:
    """Wherever it is cut: PDFium finds the pages that are left, or there is nothing to read."""
    whole = made(tmp_path / "a.pdf", *[lambda canvas: lines(canvas, [SENTENCE])] * 6).read_bytes()
    ends = []
    for part in range(1, 10):
        path = tmp_path / f"{part}.pdf"
        path.write_bytes(whole[: len(whole) * part // 10])
        try:
            found = read(path)
        except Refused as refusal:
            ends.append(str(refusal))
        else:
            assert any(isinstance(item, Block | FileProblem) for item in found)
            ends.append("read")
    assert any("damaged" in end for end in ends)


def test_a_page_tree_with_a_loop_comes_to_an_end(tmp_path: Path) -> None:
    found = read(page_tree_with_a_loop(tmp_path / "a.pdf"))
    assert len(found) < 50
    assert any(isinstance(item, FileProblem) and "damaged" in item.cause for item in found)


def test_a_page_that_is_damaged_does_not_stop_the_rest(tmp_path: Path) -> None:
    path = made(tmp_path / "a.pdf", *[lambda canvas: lines(canvas, [SENTENCE])] * 3)
    content = path.read_bytes()
    first = content.index(b"/Type /Page\n") if b"/Type /Page\n" in content else -1
    assert first > 0
    path.write_bytes(content.replace(b"/Type /Page\n", b"/Type /Pog\n ", 1))
    assert [block.page for block in blocks(path)] == [2, 3]
    assert [problem.page for problem in problems(path)] == [1]


@pytest.mark.skipif(ocr.engine() is None, reason="no engine for OCR is installed")
def test_an_image_that_claims_too_many_pixels_is_not_drawn(tmp_path: Path) -> None:
    path = huge_image(tmp_path / "a.pdf", 30_000)
    (problem,) = problems(path)
    assert problem.page == 1
    assert "900 million pixels" in problem.cause


def test_reading_tells_of_every_byte_once(tmp_path: Path) -> None:
    path = made(tmp_path / "a.pdf", *[lambda canvas: lines(canvas, [SENTENCE])] * 7)
    heard: list[int] = []
    size = path.stat().st_size
    for _ in read_pdf(Source(path, path.name, size, heard.append)):
        pass
    assert len(list(filter(None, heard))) == 7
    assert sum(heard) == size


# ---- scanned pages and figures


def scan(path: Path, turn: float = 0) -> Path:
    texts = [(100, 100, "Alarm plan of the ward"), (100, 200, "Beds")]
    texts += [(100, 300, "North"), (600, 300, "1,204"), (900, 300, "9,871")]
    texts += [(100, 360, "South"), (600, 360, "3,512"), (900, 360, "4,444")]
    texts += [(100, 420, "Total"), (600, 420, "4,716"), (890, 420, "14,315")]
    image = picture(texts, (1240, 1754), turn)
    height = WIDTH * image.height / image.width
    return made(path, lambda canvas: put_picture(canvas, image, 0, 0, WIDTH, height))


def test_without_an_engine_the_file_says_once_what_waits(
    tmp_path: Path, without_an_engine: None
) -> None:
    image = picture([(10, 10, "x")], (600, 600))
    scans = [lambda canvas: put_picture(canvas, image, 50, 50, 400, 400)] * 3
    path = made(tmp_path / "a.pdf", lambda canvas: lines(canvas, [SENTENCE]), *scans)
    assert [block.text for block in blocks(path)] == [SENTENCE]
    (problem,) = problems(path)
    assert (problem.lacks, problem.pages) == ("ocr", "2 to 4")
    assert problem.cause.startswith("pages 2 to 4 wait for OCR")


@pytest.mark.slow
@pytest.mark.skipif(ocr.engine() is None, reason="no engine for OCR is installed")
@pytest.mark.parametrize("turn", [0, 4, 90, -90])
def test_a_scanned_table_keeps_rows_and_columns(tmp_path: Path, turn: float) -> None:
    found = blocks(scan(tmp_path / "a.pdf", turn))
    (table,) = (block for block in found if block.kind == "table")
    assert "Alarm plan of the ward" in " ".join(block.text for block in found)
    rows = [line.split("\t") for line in table.text.split("\n")]
    assert ["North", "1,204", "9,871"] in rows
    assert ["Total", "4,716", "14,315"] in rows
    assert all(block.ocr for block in found)


@pytest.mark.slow
@pytest.mark.skipif(ocr.engine() is None, reason="no engine for OCR is installed")
def test_a_figure_has_its_caption_and_what_stands_in_it(tmp_path: Path) -> None:
    image = picture([(40, 40, "Surgery"), (40, 200, "Pharmacy")], (600, 300))

    def draw(canvas: Canvas) -> None:
        lines(canvas, [SENTENCE], top=90)
        put_picture(canvas, image, 72, 120, 288, 144)
        lines(canvas, ["Figure 1. Ways to the theatre"], top=280)
        lines(canvas, [SENTENCE], top=330)

    found = blocks(made(tmp_path / "a.pdf", draw))
    assert [block.kind for block in found] == ["text", "figure", "text"]
    assert found[1].text == "Figure 1. Ways to the theatre\nSurgery\nPharmacy"
    assert [block.ocr for block in found] == [False, True, False]


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("tesseract"), reason="tesseract is not installed")
def test_tesseract_that_fails_is_the_problem_of_its_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TESSDATA_PREFIX", str(tmp_path))
    ocr.engine.cache_clear()
    found = problems(scan(tmp_path / "a.pdf"))
    ocr.engine.cache_clear()
    assert [problem.page for problem in found if problem.page] == [1]
    assert "tesseract" in found[0].cause


# ---- the specks of a scan


def spotless() -> np.ndarray:
    """Lines of strokes, each with a full stop behind the last, and empty below."""
    pixels = np.full((600, 800), 255, np.uint8)
    for top in range(40, 300, 40):
        for left in range(50, 760, 12):
            pixels[top : top + 20, left : left + 4] = 0
        pixels[top + 18 : top + 21, 758:761] = 0
    return pixels


def test_what_stands_alone_goes_and_a_full_stop_stays() -> None:
    pixels = spotless()
    spotted = pixels.copy()
    spotted[340:580:20, 20:780:20] = 0
    clean = np.asarray(ocr.cleaned(Image.fromarray(spotted)))
    assert (clean == pixels).all()


def test_an_image_of_few_specks_is_left_as_it_is() -> None:
    pixels = spotless()
    pixels[400, 300] = 0
    assert (np.asarray(ocr.cleaned(Image.fromarray(pixels))) == pixels).all()


@pytest.mark.parametrize("side", [3, 9, 17])
@given(mask=arrays.arrays(np.bool_, st.tuples(st.integers(1, 30), st.integers(1, 30))))
def test_a_square_has_as_many_pixels_as_are_counted(side: int, mask: np.ndarray) -> None:
    half, (height, width) = side // 2, mask.shape
    counted = [
        [
            mask[max(0, y - half) : y + half + 1, max(0, x - half) : x + half + 1].sum()
            for x in range(width)
        ]
        for y in range(height)
    ]
    assert (ocr._sums(mask, side) == np.array(counted)).all()
