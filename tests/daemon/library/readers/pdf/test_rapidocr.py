"""RapidOCR as a reader's engine, in the box: what it reads, and what it makes of hostile scans."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from daemon.library.box.boxes import Boxes
from daemon.library.box.told import Limits
from daemon.library.files import Found
from daemon.library.readers.documents import Document, FileProblem
from daemon.library.readers.pdf import engines, ocr
from tests.daemon.library.readers.pdf_files import huge_image, picture

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not engines.has_rapidocr(), reason="the extra `ocr` is not installed"),
]

DPI = 150
BLANK = picture([], (1240, 1754))
PLAN = picture([(100, 100, "Alarm plan of the ward"), (100, 200, "Beds 1,204")], (1240, 1754))
PHOTO = Image.linear_gradient("L").resize((1240, 1754))


@pytest.fixture(autouse=True)
def without_tesseract(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine that has the extra alone."""
    monkeypatch.setenv("PATH", "/nowhere")


def scanned(path: Path, *pages: Image.Image) -> Path:
    pages[0].save(path, save_all=True, append_images=pages[1:], resolution=DPI)
    return path


def boxed(
    *paths: Path, limits: Limits | None = None
) -> tuple[dict[str, Document], dict[str, FileProblem]]:
    """What is read of files, and the first problem of each, by their names."""
    documents, problems = dict[str, Document](), dict[str, FileProblem]()
    with Boxes(limits) as boxes:
        for item in boxes.read([Found(path, path.name) for path in paths]):
            if isinstance(item, Document):
                documents[item.id] = item
            elif isinstance(item, FileProblem):
                problems.setdefault(Path(item.path).name, item)
    return documents, problems


def test_words_have_their_places() -> None:
    image = picture([(100, 100, "Alarm plan"), (600, 300, "1,204")], (900, 500))
    plan = {word.text: word for word in ocr.RapidOcr().read(image, sparse=False)}
    assert {"Alarm", "plan", "1,204"} <= set(plan)
    assert plan["1,204"].x0 == pytest.approx(600, abs=15)
    assert plan["Alarm"].x1 <= plan["plan"].x0


def test_scans_are_read_in_the_box_with_blank_pages_among_them(tmp_path: Path) -> None:
    documents, problems = boxed(scanned(tmp_path / "a.pdf", BLANK, PLAN, PHOTO, PLAN))
    assert not problems
    found = documents["a.pdf"]
    assert [span.page for span in found.spans] == [2, 2, 4, 4]
    assert found.text.count("Alarm plan of the ward") == 2
    assert found.text.count("1,204") == 2


@pytest.mark.timeout(300)
def test_a_dense_square_page_fits_a_readers_memory(tmp_path: Path) -> None:
    """The largest that RapidOCR looks at; what is freed of one page is there for the next."""
    words = "Nights on call are paid by the ward that asked for them, at once"
    page = picture([(40, 50 * n, f"{n} {words}") for n in range(1, 27)], (1400, 1400))
    documents, problems = boxed(scanned(tmp_path / "a.pdf", *[page] * 2))
    assert not problems
    assert documents["a.pdf"].text.count("ward") > 45


def spoiled(path: Path, image: Image.Image) -> Path:
    """A scan whose picture ends in its middle, as its file says it does not."""
    content = scanned(path, image).read_bytes()
    begin, end = content.index(b"stream\n") + 7, content.index(b"endstream")
    half = (begin + end) // 2
    path.write_bytes(content[:half] + bytes(end - half) + content[end:])
    return path


@pytest.mark.timeout(300)
def test_hostile_scans_have_a_reason_each_and_keep_no_other_out(tmp_path: Path) -> None:
    hostile: dict[str, tuple[Callable[[Path], Path], str]] = {
        "gigapixel": (lambda path: huge_image(path, 32_000), "1024 million pixels"),
        "jpeg": (lambda path: spoiled(path, BLANK), "no text on any page"),
        "fax": (lambda path: spoiled(path, BLANK.convert("1")), "no text on any page"),
        "flate": (lambda path: huge_image(path, 3000), "no text on any page"),
    }
    paths = [make(tmp_path / f"{name}.pdf") for name, (make, _) in hostile.items()]
    documents, problems = boxed(*paths, scanned(tmp_path / "good.pdf", PLAN))
    assert list(documents) == ["good.pdf"]
    for name, (_, cause) in hostile.items():
        assert cause in problems[f"{name}.pdf"].cause


def test_a_scan_of_ten_thousand_pages_ends_with_its_time(tmp_path: Path) -> None:
    long = scanned(tmp_path / "a.pdf", *[BLANK.resize((124, 175))] * 10_000)
    documents, problems = boxed(
        long, scanned(tmp_path / "good.pdf", PLAN), limits=Limits(file_s=20)
    )
    assert list(documents) == ["good.pdf"]
    assert problems["a.pdf"].passing
    assert "cut it" in problems["a.pdf"].cause
