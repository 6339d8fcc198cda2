"""Small PDFs made for tests, with reportlab, and some that no program would make."""

from __future__ import annotations

import io
import zlib
from collections.abc import Callable
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont
from reportlab.lib.pagesizes import A4
from reportlab.lib.pdfencrypt import StandardEncryption
from reportlab.lib.utils import ImageReader
from reportlab.pdfgen.canvas import Canvas

WIDTH, HEIGHT = A4  # points
LINE = 13.0
SENTENCE = "The night inspection of the northern wards is signed off by the head of nursing"

Draw = Callable[[Canvas], None]


def made(path: Path, *pages: Draw, password: str = "", turned: int = 0, **about: str) -> Path:
    """A PDF of a page for each of what draws one."""
    lock = StandardEncryption(password) if password else None
    canvas = Canvas(str(path), pagesize=A4, encrypt=lock, lang=about.get("lang"))
    canvas.setTitle(about.get("title", ""))
    canvas.setAuthor(about.get("author", ""))
    for draw in pages:
        if turned:
            canvas.setPageRotation(turned)
        draw(canvas)
        canvas.showPage()
    canvas.save()
    return path


def lines(canvas: Canvas, texts: list[str], x: float = 72, top: float = 100) -> None:
    """Lines of a text from ``top`` on, in points from the upper edge."""
    canvas.setFont("Helvetica", 10)
    for number, text in enumerate(texts):
        canvas.drawString(x, HEIGHT - top - number * LINE, text)


def heading(canvas: Canvas, text: str, top: float, size: float = 16, bold: bool = True) -> None:
    canvas.setFont("Helvetica-Bold" if bold else "Helvetica", size)
    canvas.drawString(72, HEIGHT - top, text)


def numbered(prefix: str, count: int) -> list[str]:
    """Lines that can be told apart, as long as a column's."""
    return [f"{prefix}{number} stands in the line that bears it" for number in range(count)]


def aligned_table(canvas: Canvas, rows: list[list[str]], top: float, at: list[float]) -> None:
    """Labels at the left, and values that end below one another, without any lines."""
    canvas.setFont("Helvetica", 10)
    for number, row in enumerate(rows):
        y = HEIGHT - top - number * LINE
        canvas.drawString(72, y, row[0])
        for x, text in zip(at, row[1:], strict=True):
            canvas.drawRightString(x, y, text)


def ruled_table(canvas: Canvas, rows: list[list[list[str]]], top: float, at: list[float]) -> None:
    """Cells of several lines each, with lines drawn around them."""
    canvas.setFont("Helvetica", 10)
    edges = [HEIGHT - top]
    for row in rows:
        for x, cell in zip(at, row, strict=False):
            for number, text in enumerate(cell):
                canvas.drawString(x + 3, edges[-1] - 10 - number * LINE, text)
        edges.append(edges[-1] - 4 - LINE * max(len(cell) for cell in row))
    canvas.grid(at, edges)


def picture(
    texts: list[tuple[int, int, str]], size: tuple[int, int], turn: float = 0
) -> Image.Image:
    """Black letters on white, 40 pixels high."""
    image = Image.new("L", size, 255)
    font = ImageFont.load_default(40)
    for x, y, text in texts:
        ImageDraw.Draw(image).text((x, y), text, 0, font)
    expand = abs(turn) == 90
    return image.rotate(turn, Image.Resampling.BICUBIC, expand=expand, fillcolor=255)


def put_picture(
    canvas: Canvas, image: Image.Image, x: float, top: float, width: float, height: float
) -> None:
    packed = io.BytesIO()
    image.save(packed, "PNG")
    packed.seek(0)
    canvas.drawImage(ImageReader(packed), x, HEIGHT - top - height, width, height)


def raw_pdf(path: Path, objects: list[bytes]) -> Path:
    """A file of objects as they are given, the first of them the catalogue."""
    parts, places, at = [b"%PDF-1.7\n"], [], 9
    for number, content in enumerate(objects, 1):
        parts.append(b"%d 0 obj\n%s\nendobj\n" % (number, content))
        places.append(at)
        at += len(parts[-1])
    table = b"".join(b"%010d 00000 n \n" % place for place in places)
    count = len(objects) + 1
    parts.append(b"xref\n0 %d\n0000000000 65535 f \n%s" % (count, table))
    parts.append(b"trailer\n<</Size %d/Root 1 0 R>>\nstartxref\n%d\n%%%%EOF\n" % (count, at))
    path.write_bytes(b"".join(parts))
    return path


def page_tree_with_a_loop(path: Path) -> Path:
    """The tree's root is its own child, and claims a million pages."""
    return raw_pdf(
        path,
        [
            b"<</Type/Catalog/Pages 2 0 R>>",
            b"<</Type/Pages/Count 1000000/Kids[3 0 R 2 0 R]>>",
            b"<</Type/Page/Parent 2 0 R/MediaBox[0 0 200 200]>>",
        ],
    )


def huge_image(path: Path, side: int) -> Path:
    """A page with an image that claims ``side`` pixels each way, of a few bytes."""
    data = zlib.compress(bytes(1000))
    draw = b"q 500 0 0 500 50 50 cm /I Do Q"
    return raw_pdf(
        path,
        [
            b"<</Type/Catalog/Pages 2 0 R>>",
            b"<</Type/Pages/Count 1/Kids[3 0 R]>>",
            b"<</Type/Page/Parent 2 0 R/MediaBox[0 0 600 600]/Contents 5 0 R"
            b"/Resources<</XObject<</I 4 0 R>>>>>>",
            b"<</Type/XObject/Subtype/Image/Width %d/Height %d/BitsPerComponent 8"
            b"/ColorSpace/DeviceGray/Filter/FlateDecode/Length %d>>stream\n%s\nendstream"
            % (side, side, len(data), data),
            b"<</Length %d>>stream\n%s\nendstream" % (len(draw), draw),
        ],
    )


def endless_page(path: Path) -> Path:
    """A page whose size no page has."""
    return raw_pdf(
        path,
        [
            b"<</Type/Catalog/Pages 2 0 R>>",
            b"<</Type/Pages/Count 1/Kids[3 0 R]>>",
            b"<</Type/Page/Parent 2 0 R/MediaBox[0 0 900000000 900000000]>>",
        ],
    )
