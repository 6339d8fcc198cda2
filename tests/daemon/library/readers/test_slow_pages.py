"""Pages that take their time: each has its own, and one that takes too long is left out alone."""

from __future__ import annotations

from pathlib import Path

import pytest
from reportlab.pdfgen.canvas import Canvas

from daemon.library.box.boxes import Boxes
from daemon.library.box.told import Limits
from daemon.library.files import Found
from daemon.library.readers.documents import Document, FileProblem, Item
from daemon.library.readers.pdf import ocr
from tests.daemon.library.readers.pdf_files import SENTENCE, lines, made, picture, put_picture

COLUMNS = "level page block par line word left top width height conf text"
# What stands where tesseract would: an image takes it as long as its page says.
ENGINE = f"""#!/bin/sh
case "$*" in
*list-langs*) printf 'List of languages\\neng\\n' ;;
*) cat > /dev/null 2>&1 || cat | wc -c >&2
   sleep {{seconds}}
   printf '{COLUMNS}\\n5 1 1 1 1 1 40 40 200 40 96 Surgery\\n' | tr ' ' '\\t' ;;
esac
"""


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of programs before all others, in which there is one for OCR."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    ocr.engine.cache_clear()
    return folder / "tesseract"


def that_takes(engine: Path, seconds: float) -> None:
    engine.write_text(ENGINE.replace("{seconds}", str(seconds)))
    engine.chmod(0o755)


def figures(canvas: Canvas, count: int) -> None:
    """A page with text, and so many pictures below it."""
    lines(canvas, [SENTENCE], top=100)
    for number in range(count):
        image = picture([(40, 40, f"Ward {number}")], (600, 300))
        put_picture(canvas, image, 72, 130 + 170 * number, 288, 144)


def boxed(path: Path, **limits: float) -> list[Item]:
    with Boxes(Limits(**limits)) as boxes:  # type: ignore[arg-type]
        return list(boxes.read([Found(path, path.name)]))


@pytest.mark.slow
def test_each_image_of_a_page_has_its_own_time(tmp_path: Path, engine: Path) -> None:
    that_takes(engine, 1.0)
    (document,) = boxed(made(tmp_path / "a.pdf", lambda one: figures(one, 4)), pause_s=3.0)
    assert isinstance(document, Document), document
    assert document.text.count("Surgery") == 4


@pytest.mark.slow
def test_a_page_that_takes_too_long_is_left_out_alone(tmp_path: Path, engine: Path) -> None:
    that_takes(engine, 600)
    pages = [lambda one, n=n: figures(one, n) for n in (0, 1, 0)]
    problem, document = boxed(made(tmp_path / "a.pdf", *pages), pause_s=2.0)
    assert isinstance(problem, FileProblem)
    assert (problem.page, problem.passing) == (2, True)
    assert problem.cause.startswith("takes too long to be read")
    assert isinstance(document, Document), document
    assert [span.page for span in document.spans] == [1, 3]


@pytest.mark.slow
def test_a_page_has_so_much_time_for_all_its_images(
    tmp_path: Path, engine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    that_takes(engine, 0)
    paced = ocr.Paced(ocr.Tesseract(str(engine)), lambda: None)
    image = picture([(40, 40, "Ward")], (600, 300))
    paced.begin_page()
    assert [word.text for word in paced.read(image, sparse=True)] == ["Surgery"]
    monkeypatch.setattr(ocr, "_PAGE_SECONDS", -1)
    paced.begin_page()
    with pytest.raises(ocr.OcrFailed, match="images are not read in") as failed:
        paced.read(image, sparse=True)
    assert failed.value.passing
