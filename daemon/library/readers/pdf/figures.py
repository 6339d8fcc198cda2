"""Which pages and which parts of pages are images, and what OCR reads in them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import pypdfium2 as pdfium
from PIL import Image

from daemon.library.readers.pdf.drawn import Drawn
from daemon.library.readers.pdf.misread import put_right
from daemon.library.readers.pdf.ocr import Engine, cleaned, is_sideways
from daemon.library.readers.pdf.pages import drawn_image
from daemon.library.readers.pdf.words import Frame, Row, Word, rows_of, turned_words

_FEW_LETTERS = 40  # of a page: a scan may have its number and a stamp as text
_MOST_OF_PAGE, _PART_OF_PAGE = 0.8, 0.1  # an image behind text; one that may hold a page's text
_OUTLINES = 100  # shapes on a page without letters: they may be letters
_LEAST_SIDE, _LEAST_PART = 60.0, 0.02  # points, and of the page: smaller images are ornaments
_NEAR = 3.0  # em between a figure and its caption
_SIZE = 1.2  # type to its tallest letters; an engine measures ink

_CAPTION = re.compile(
    r"(?:figure|fig\.|chart|exhibit|graph|diagram|image|plate|abb(?:ildung|\.)|bild|tafel)\b",
    re.IGNORECASE,
)

Box = tuple[float, float, float, float]


@dataclass
class Figure:
    """An image on a page of text; ``box``: left, top, right and bottom in points."""

    box: Box
    caption: str = ""

    def take_caption(self, words: list[Word]) -> list[Word]:
        """Words without those of its caption: lines close below or above that say so."""
        x0, top, x1, bottom = self.box
        rows = [row for row in rows_of(words) if row.x0 < x1 and row.x1 > x0]
        for row in rows:
            far = max(row.top - bottom, top - row.bottom)
            if _CAPTION.match(row.text) and far < _NEAR * row.size:
                taken = _lines_of(row, rows)
                self.caption = " ".join(one.text for one in taken)
                gone = {id(word) for one in taken for word in one.words}
                return [word for word in words if id(word) not in gone]
        return words


def _lines_of(first: Row, rows: Sequence[Row]) -> list[Row]:
    """A caption's lines: those that follow its first one closely, in type of its size."""
    taken = [first]
    for row in rows[rows.index(first) + 1 :]:
        last = taken[-1]
        if row.top - last.bottom > row.size / 2 or abs(row.size - last.size) > row.size / 10:
            break
        taken.append(row)
        if len(taken) == 4:
            break
    return taken


def is_image(words: Sequence[Word], drawn: Drawn, frame: Frame) -> bool:
    """Whether a page's text has to be read in an image of it."""
    if sum(len(word.text) for word in words) >= _FEW_LETTERS:
        return False
    page = frame.width * frame.height
    return drawn.paths >= _OUTLINES or any(
        _area(box) > _PART_OF_PAGE * page for box in drawn.images
    )


def figures_of(words: Sequence[Word], drawn: Drawn, frame: Frame) -> list[Figure]:
    """The images of a page of text that are large enough to say something.

    One that lies behind the page's text is its background, or the scan that it was read from.
    """
    page = frame.width * frame.height
    found: list[Figure] = []
    for box in _together(drawn.images):
        x0, top, x1, bottom = box
        if min(x1 - x0, bottom - top) < _LEAST_SIDE or _area(box) < _LEAST_PART * page:
            continue
        above = [w for w in words if x0 < w.x0 and w.x1 < x1 and top < w.middle < bottom]
        letters = sum(len(word.text) for word in above)
        if _area(box) < _MOST_OF_PAGE * page and letters < _FEW_LETTERS:
            found.append(Figure(box))
    return found


def _area(box: tuple[float, ...]) -> float:
    return max(0.0, box[2] - box[0]) * max(0.0, box[3] - box[1])


def _together(boxes: Iterable[tuple[float, ...]]) -> list[Box]:
    """Images that touch are one: some programs write a picture in strips."""
    joined: list[Box] = []
    for x0, top, x1, bottom in boxes:
        box = (x0, top, x1, bottom)
        while near := [other for other in joined if _touch(box, other)]:
            joined = [other for other in joined if other not in near]
            lefts, tops, rights, bottoms = zip(box, *near, strict=True)
            box = (min(lefts), min(tops), max(rights), max(bottoms))
        joined.append(box)
        if len(joined) > 200:  # tiles of a map, or worse
            break
    return joined


def _touch(one: Box, other: Box) -> bool:
    across = min(one[2], other[2]) - max(one[0], other[0])
    down = min(one[3], other[3]) - max(one[1], other[1])
    # Side by side is not enough: strips of one picture share a whole side.
    return (across > -1 and down > 1) or (down > -1 and across > 1)


def read_words(page: pdfium.PdfPage, engine: Engine, box: Box | None = None) -> list[Word]:
    """Words that are read in a page's image, or in that of a part of it; places in points.

    Raises Refused and OcrFailed where that can't be done.
    """
    image = drawn_image(page, engine.dpi, box)
    left, top, right, _ = box or (0.0, 0.0, page.get_width(), 0.0)
    scale = (right - left) / image.width
    return [
        word._replace(
            x0=left + word.x0 * scale,
            top=top + word.top * scale,
            x1=left + word.x1 * scale,
            bottom=top + word.bottom * scale,
            size=word.size * scale,
        )
        for word in _read(image, engine, sparse=box is not None)
    ]


def _read(image: Image.Image, engine: Engine, *, sparse: bool) -> list[Word]:
    """Words in pixels; a page that was scanned sideways is read from both its sides."""
    if sparse or not is_sideways(image):
        return _read_upright(image, engine, sparse=sparse)
    left = _read_upright(image.transpose(Image.Transpose.ROTATE_90), engine, sparse=False)
    right = _read_upright(image.transpose(Image.Transpose.ROTATE_270), engine, sparse=False)
    if _letters(left) > _letters(right):  # upright after a turn against the clock
        return turned_words(left, image.height, image.width, 1)
    return turned_words(right, image.height, image.width, 3)


def _letters(words: Sequence[Word]) -> int:
    """How much of what is read looks like words; upside down, little does."""
    return sum(len(word.text) for word in words if len(word.text) > 3 and word.text.isalpha())


def _read_upright(image: Image.Image, engine: Engine, *, sparse: bool) -> list[Word]:
    rows = rows_of(engine.read(cleaned(image), sparse=sparse))
    words: list[Word] = []
    for row in put_right([row.words for row in rows]):
        heights = sorted(word.bottom - word.top for word in row)
        size = _SIZE * heights[len(heights) * 4 // 5]
        words += [word._replace(size=size) for word in row]
    return words
