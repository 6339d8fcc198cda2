"""Opens PDF files, says what they say of themselves, and draws their pages within bounds."""

from __future__ import annotations

import ctypes
import io
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import date
from pathlib import Path

import pypdfium2 as pdfium
import pypdfium2.raw as raw
from PIL import Image

from daemon.library.readers.documents import MAX_TITLE, About
from daemon.library.readers.pdf.drawn import drawn_on
from daemon.library.readers.pdf.words import frame_of
from daemon.library.readers.reader import NoSuchPage, Refused

MAX_PIXELS = 20_000_000  # of a page that is drawn: A4 at 300 dpi has 9 million
_MOST_PIXELS = 150_000_000  # of an image as the file claims: it is unpacked whole to be drawn
_MAX_SIDE = 20_000  # pixels
_POINTS_AN_INCH = 72
_HEAD = 1024  # bytes in which "%PDF-" must stand, as readers of PDF have it

_DATE = re.compile(r"(?:D:)?(\d{4})(\d\d)?(\d\d)?")
_REFUSALS = {
    raw.FPDF_ERR_PASSWORD: "needs a password: save it without one",
    raw.FPDF_ERR_SECURITY: "locked in a way that is not known: save it without protection",
    raw.FPDF_ERR_FORMAT: "damaged: copy it again, or print it to a new PDF",
}


@contextmanager
def opened(path: Path) -> Iterator[pdfium.PdfDocument]:
    """A document to read from. Raises OSError, and Refused for what is no PDF or locked."""
    with path.open("rb") as file:
        head = file.read(_HEAD)
    if b"%PDF-" not in head:
        raise Refused("not a PDF, whatever its name says: give it the ending of what it is")
    try:
        document = pdfium.PdfDocument(path)
    except pdfium.PdfiumError as error:
        cause = _REFUSALS.get(error.err_code or 0, _REFUSALS[raw.FPDF_ERR_FORMAT])
        raise Refused(cause) from None
    try:
        if not len(document):
            raise Refused("has no pages: print it to a new PDF")
        yield document
    finally:
        document.close()


def about(document: pdfium.PdfDocument) -> About:
    """What a document says of itself."""
    told = document.get_metadata_dict()
    return About(
        _line(told.get("Title", ""))[:MAX_TITLE],
        _line(told.get("Author", ""))[:MAX_TITLE],
        _day(told.get("CreationDate", "")),
        _language(document),
    )


def _line(text: str) -> str:
    return " ".join(text.replace("\0", " ").encode(errors="replace").decode().split())


def _day(told: str) -> str:
    """A date as PDF writes it (ISO 32000-1, 7.9.4), as YYYY-MM-DD; "" for what is none."""
    match = _DATE.match(told)
    if not match:
        return ""
    year, month, day = (int(part or 1) for part in match.groups())
    try:
        return date(year, month, day).isoformat()
    except ValueError:
        return ""


def _language(document: pdfium.PdfDocument) -> str:
    """ISO 639-1 of the document's own language tag, as in ``en-GB``; "" where it has none."""
    buffer = (ctypes.c_ushort * 32)()
    length = raw.FPDFCatalog_GetLanguage(document, buffer, ctypes.sizeof(buffer))  # bytes
    if not 2 < length <= ctypes.sizeof(buffer):
        return ""
    tag = bytes(buffer)[: length - 2].decode("utf-16-le", errors="replace").lower()
    match = re.match(r"[a-z]{2}(?=$|[-_])", tag)
    return match.group() if match else ""


def drawn_image(
    page: pdfium.PdfPage, dpi: float, box: tuple[float, float, float, float] | None = None
) -> Image.Image:
    """A page, or a part of it in points, in grey; less fine than asked where it would be huge.

    Raises Refused where it can't be drawn.
    """
    width, height = page.get_size()
    x0, top, x1, bottom = box or (0.0, 0.0, width, height)
    scale = _bounded(dpi / _POINTS_AN_INCH, x1 - x0, bottom - top)
    crop = (x0, height - bottom, width - x1, top)  # left, bottom, right, top: what is cut off
    drawn: Image.Image = _rendered(page, scale, crop).convert("L")
    return drawn


def page_image(path: Path, number: int, dpi: int) -> bytes:
    """A page, from 1, in colour as a PNG; less fine than asked where it would be huge.

    Raises OSError, Refused where it can't be drawn, and NoSuchPage.
    """
    with opened(path) as document:
        if number > len(document):
            raise NoSuchPage(len(document))
        try:
            page = document[number - 1]
        except pdfium.PdfiumError:
            raise Refused("damaged page: print the file to a new PDF") from None
        try:
            image = _rendered(page, _bounded(dpi / _POINTS_AN_INCH, *page.get_size()))
        finally:
            page.close()
    packed = io.BytesIO()
    image.save(packed, "PNG")
    return packed.getvalue()


def _rendered(
    page: pdfium.PdfPage, scale: float, crop: tuple[float, float, float, float] = (0, 0, 0, 0)
) -> Image.Image:
    """A page at ``scale`` pixels a point. Raises Refused where it can't or may not be drawn."""
    pixels = drawn_on(page, frame_of(page)).pixels
    if pixels > _MOST_PIXELS:
        raise Refused(
            f"has an image of {pixels / 1e6:.0f} million pixels, more than are drawn "
            f"({_MOST_PIXELS / 1e6:.0f}): scan it less finely"
        )
    try:
        bitmap = page.render(scale=scale, crop=crop)
    except (pdfium.PdfiumError, ValueError) as error:
        raise Refused(f"can't be drawn ({error}): print it to a new PDF") from None
    try:
        drawn: Image.Image = bitmap.to_pil().convert("RGB")
        return drawn
    finally:
        bitmap.close()


def _bounded(scale: float, width: float, height: float) -> float:
    """At most ``scale`` pixels a point, so that an area of points has no more than allowed."""
    if not (math.isfinite(width) and math.isfinite(height) and width > 0 and height > 0):
        raise Refused("has a size that no page has: print it to a new PDF")
    return min(scale, math.sqrt(MAX_PIXELS / (width * height)), _MAX_SIDE / max(width, height))
