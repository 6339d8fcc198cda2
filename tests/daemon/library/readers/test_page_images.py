"""Pages that are drawn in a box: in their size, and nothing that a hostile file makes of it."""

from __future__ import annotations

import io
import os
import textwrap
import threading
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

import pytest
from PIL import Image
from reportlab.pdfgen.canvas import Canvas

from daemon.library.box.boxes import Boxes, NotDrawn, _Forks
from daemon.library.box.told import Limits
from daemon.library.files import Found
from daemon.library.readers.reader import NoSuchPage
from daemon.process.confinement import landlock_version
from tests.daemon.library.readers.pdf_files import HEIGHT, WIDTH, huge_image, made, raw_pdf


def boxed(path: Path, number: int = 1, dpi: int = 72, limits: Limits | None = None) -> bytes:
    with Boxes(limits) as boxes:
        return boxes.page(Found(path, f"in/{path.name}"), number, dpi)


def drawn(path: Path, number: int = 1, dpi: int = 72) -> Image.Image:
    return Image.open(io.BytesIO(boxed(path, number, dpi)))


def box(canvas: Canvas) -> None:
    """A red square in the upper left corner."""
    canvas.setFillColorRGB(1, 0, 0)
    canvas.rect(0, HEIGHT - 100, 100, 100, stroke=0, fill=1)


@pytest.mark.slow
def test_a_page_is_drawn_as_it_is_shown(tmp_path: Path) -> None:
    path = made(tmp_path / "a.pdf", lambda _: None, box)
    assert drawn(path, 1).getcolors() == [(596 * 842, (255, 255, 255))]
    image = drawn(path, 2)
    assert (image.format, image.mode) == ("PNG", "RGB")
    assert image.size == pytest.approx((WIDTH, HEIGHT), abs=1)
    assert image.getpixel((50, 50)) == (255, 0, 0)
    assert image.getpixel((150, 50)) == (255, 255, 255)


@pytest.mark.slow
def test_a_page_that_is_turned_is_drawn_turned(tmp_path: Path) -> None:
    square = b"1 0 0 rg 0 50 50 50 re f"  # in the upper left corner, before it is turned
    path = raw_pdf(
        tmp_path / "a.pdf",
        [
            b"<</Type/Catalog/Pages 2 0 R>>",
            b"<</Type/Pages/Count 1/Kids[3 0 R]>>",
            b"<</Type/Page/Parent 2 0 R/MediaBox[0 0 200 100]/Rotate 90/Contents 4 0 R>>",
            b"<</Length %d>>\nstream\n%s\nendstream" % (len(square), square),
        ],
    )
    image = drawn(path)
    assert image.size == (100, 200)
    assert [image.getpixel(at) for at in ((75, 25), (25, 25))] == [(255, 0, 0), (255, 255, 255)]


def page_of(path: Path, width: float, height: float) -> Path:
    return raw_pdf(
        path,
        [
            b"<</Type/Catalog/Pages 2 0 R>>",
            b"<</Type/Pages/Count 1/Kids[3 0 R]>>",
            b"<</Type/Page/Parent 2 0 R/MediaBox[0 0 %.3f %.3f]>>" % (width, height),
        ],
    )


@pytest.mark.slow
def test_an_image_is_never_larger_than_allowed(tmp_path: Path) -> None:
    """Drawn sizes of pages, thin and huge ones too: as fine as asked, or within its pixels."""
    draw = Random(3)
    with Boxes() as boxes:
        for number in range(12):
            width, height = (10 ** draw.uniform(0.5, 4.1) for _ in range(2))
            dpi = draw.choice([20, 72, 150, 600])
            path = page_of(tmp_path / f"{number}.pdf", width, height)
            image = Image.open(io.BytesIO(boxes.page(Found(path, path.name), 1, dpi)))
            assert image.width * image.height <= 20_000_000 + image.width + image.height
            assert max(image.size) <= 20_001
            asked = (width * dpi / 72, height * dpi / 72)
            if asked[0] * asked[1] < 19_000_000 and max(asked) < 19_000:
                assert image.size == pytest.approx(asked, abs=1)


@pytest.mark.slow
def test_a_page_that_is_not_there_says_how_many_are(tmp_path: Path) -> None:
    path = made(tmp_path / "a.pdf", box, box, box)
    with pytest.raises(NoSuchPage) as refused:
        boxed(path, 4)
    assert refused.value.pages == 3


@pytest.mark.slow
def test_what_cannot_be_drawn_says_why(tmp_path: Path) -> None:
    for name, content, cause in (
        ("a.pdf", b"<html>", "not a PDF"),
        ("b.pdf", b"%PDF-1.7 and no more", "damaged"),
        ("c.txt", b"text", "not a kind of file that has pages"),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(NotDrawn, match=cause):
            boxed(tmp_path / name)
    locked = made(tmp_path / "d.pdf", box, password="x")
    for path, cause in (
        (locked, "needs a password"),
        (huge_image(tmp_path / "e.pdf", 30_000), "has an image of 900 million pixels"),
        (tmp_path / "gone.pdf", "not there"),
    ):
        with pytest.raises(NotDrawn, match=cause):
            boxed(path)


# What draws a page once a file has taken it over; the file's ending chooses.
TAKEN_OVER = """
    import os, signal, time
    from pathlib import Path
    from daemon.library import files
    from daemon.library.readers.reader import Reader

    PNG = bytes([137, 80, 78, 71, 13, 10, 26, 10])

    def html(path, number, dpi):
        return b"<script>alert(1)</script>"

    def memory(path, number, dpi):
        return PNG + b"".join(bytes(16 << 20) for _ in range(100))

    def hang(path, number, dpi):
        while True:
            time.sleep(60)

    def crash(path, number, dpi):
        os.kill(os.getpid(), signal.SIGSEGV)

    def flood(path, number, dpi):
        return PNG + bytes(100 << 20)

    def spy(path, number, dpi):
        told = []
        for act in (
            lambda: Path(path.parent, "secret").read_bytes(),
            lambda: Path(path.parent, "written").write_text("x"),
            lambda: path.unlink(),
        ):
            try:
                told.append(str(act()))
            except OSError as error:
                told.append(error.strerror)
        return PNG + "; ".join(told).encode()

    for act in (html, memory, hang, crash, flood, spy):
        files.READERS["." + act.__name__] = Reader(page=act)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    code = tmp_path / "code"
    code.mkdir()
    (code / "sitecustomize.py").write_text(textwrap.dedent(TAKEN_OVER))
    monkeypatch.setenv("PYTHONPATH", f"{code}:{os.environ.get('PYTHONPATH', '')}")
    (tmp_path / "files").mkdir()
    yield tmp_path / "files"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ending", "cause"),
    [
        ("html", "makes no sense: the file is hostile"),
        ("memory", "needs more than 256 MiB"),
        ("hang", "a page took more than 1 s"),
        ("crash", "its reader ended"),
        ("flood", "its reader told too much"),
    ],
)
def test_what_draws_has_its_bounds(folder: Path, ending: str, cause: str) -> None:
    path = folder / f"a.{ending}"
    path.write_text("x")
    memory = 1 << 30 if ending == "flood" else 256 << 20
    with pytest.raises(NotDrawn, match=cause):
        boxed(path, limits=Limits(pause_s=1.0, memory_bytes=memory))


@pytest.mark.skipif(landlock_version() < 1, reason="this kernel has no Landlock")
def test_what_draws_reads_that_file_and_writes_nothing(folder: Path) -> None:
    path = folder / "a.spy"
    path.write_text("x")
    (folder / "secret").write_text("the key")
    told = boxed(path)[8:].decode().split("; ")
    assert told == ["Permission denied"] * 3
    assert {one.name for one in folder.iterdir()} == {"a.spy", "secret"}


def test_who_goes_away_ends_what_draws(folder: Path) -> None:
    path = folder / "a.hang"
    path.write_text("x")
    boxes, ended = Boxes(), threading.Event()

    def draw() -> None:
        with pytest.raises(NotDrawn):
            boxes.page(Found(path, path.name), 1, 72)
        ended.set()

    thread = threading.Thread(target=draw)
    thread.start()
    for _ in count():
        if boxes._forks is not None:
            break
    boxes.end()
    assert ended.wait(30)
    thread.join()


def test_what_was_ended_draws_and_reads_nothing_more(folder: Path) -> None:
    path = folder / "a.txt"
    path.write_text("The rope is coiled.")
    boxes = Boxes()
    assert list(boxes.read([Found(path, path.name)]))
    forks = boxes._forks
    boxes.end()
    with pytest.raises(NotDrawn, match="was ended"):
        boxes.page(Found(path, path.name), 1, 72)
    assert list(boxes.read([Found(path, path.name)])) == []
    assert boxes._forks is forks, "no other was begun"


def test_who_goes_away_while_a_page_is_begun_is_told(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = folder / "a.hang"
    path.write_text("x")
    boxes, begin = Boxes(), _Forks.begin

    def ended_before(forks: _Forks, request: list[Any]) -> Any:
        boxes.end()  # its line is closed when the request is to be sent
        return begin(forks, request)

    monkeypatch.setattr(_Forks, "begin", ended_before)
    with pytest.raises(NotDrawn, match="was ended"):
        boxes.page(Found(path, path.name), 1, 72)
