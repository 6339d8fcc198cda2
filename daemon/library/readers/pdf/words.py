"""Words with their places, out of a PDF page's characters or an OCR engine's boxes.

Coordinates are points (1/72 inch) from the page's upper left corner as it is shown, y downwards.
"""

from __future__ import annotations

import ctypes
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import pypdfium2 as pdfium
import pypdfium2.raw as raw

from daemon.library.readers.documents import Place

MAX_CHARS = 200_000  # of a page; a dense newspaper page has 30,000
_BOLD_NAMES = (b"bold", b"black", b"heavy", b"demi")
_BOLD_WEIGHT = 600  # of 100 to 900, as in CSS
# A line's last hyphen is \x02 or \ufffe to PDFium; other signs of control mean nothing in a text.
_CLEAN = {**dict.fromkeys(range(32)), 0x7F: None, 0x02: "-", 0xFFFE: "-", 0x2010: "-"}
_WORD = re.compile(r"[^\s\0]+")
_WIDEST = 1.3  # em that a letter takes at most
_UPRIGHT = math.radians(20)  # of a letter's turn: what is turned further is a label along an axis


class Word(NamedTuple):
    """Letters without a space between them; ``size``: their line's height in points.

    ``turned``: by how many quarters, clockwise, as a label along an axis is; 4: by something
    else, as a mark across the page.
    """

    x0: float
    top: float
    x1: float
    bottom: float
    text: str
    size: float
    bold: bool = False
    turned: int = 0

    @property
    def middle(self) -> float:
        """Its height on the page."""
        return (self.top + self.bottom) / 2


@dataclass(frozen=True)
class Frame:
    """How a page's own coordinates lie on the page as it is shown; all lengths in points."""

    left: float
    bottom: float
    width: float  # as shown
    height: float
    turns: int  # quarters, clockwise

    def shown(self, x0: float, y0: float, x1: float, y1: float) -> tuple[float, ...]:
        """Left, top, right and bottom of a box whose y grows upwards."""
        x0, x1 = x0 - self.left, x1 - self.left
        y0, y1 = y0 - self.bottom, y1 - self.bottom
        if self.turns == 1:
            return y0, x0, y1, x1
        if self.turns == 2:
            return self.width - x1, y0, self.width - x0, y1
        if self.turns == 3:
            return self.width - y1, self.height - x1, self.width - y0, self.height - x0
        return x0, self.height - y1, x1, self.height - y0

    def turned(self, quarters: int) -> Frame:
        """That of the page turned clockwise."""
        width, height = self.width, self.height
        if quarters % 2:
            width, height = height, width
        return Frame(self.left, self.bottom, width, height, (self.turns + quarters) % 4)


def turned_back(place: Place, quarters: int) -> Place:
    """A place on a page that was turned clockwise, on the page as it is shown."""
    x0, top, x1, bottom = place
    for _ in range(quarters):
        x0, top, x1, bottom = top, 1 - x1, bottom, 1 - x0
    return round(x0, 4), round(top, 4), round(x1, 4), round(bottom, 4)


def turned_words(words: Iterable[Word], width: float, height: float, quarters: int) -> list[Word]:
    """Words on a page of this size, on that page turned clockwise."""
    found = list(words)
    for _ in range(quarters):
        found = [
            word._replace(
                x0=height - word.bottom,
                top=word.x0,
                x1=height - word.top,
                bottom=word.x1,
                turned=(word.turned + 1) % 4 if word.turned < 4 else 4,
            )
            for word in found
        ]
        width, height = height, width
    return found


def quarters_to_upright(words: Sequence[Word]) -> int:
    """How a page is to be turned, clockwise, so that most of its letters are upright."""
    letters = Counter[int]()
    for word in words:
        letters[word.turned % 4] += len(word.text)
    most = max(letters, key=letters.__getitem__, default=0)
    return -most % 4 if letters[most] > 0.6 * letters.total() else 0


def frame_of(page: pdfium.PdfPage) -> Frame:
    """A page's frame: what is cut off by its crop box lies outside."""
    left, bottom, _, _ = page.get_bbox()
    width, height = page.get_size()
    return Frame(left, bottom, width, height, page.get_rotation() // 90 % 4)


def words_of(page: pdfium.PdfPage, frame: Frame) -> list[Word]:
    """A page's words as they follow in the file, those outside the page left out.

    Raises pypdfium2.PdfiumError where the page's text can't be had.
    """
    text_page = page.get_textpage()
    try:
        found = [_word(text_page, frame, run) for run in _runs(text_page)]
    finally:
        text_page.close()
    return [
        word
        for word in found
        if word.text
        and 0 <= (word.x0 + word.x1) / 2 <= frame.width
        and 0 <= word.middle <= frame.height
    ]


_Box = tuple[float, float, float, float]  # left, bottom, right, top; upwards, as the file has it
_Run = tuple[int, str, list[_Box]]  # the number of its first letter, the letters, their places


def _runs(text_page: pdfium.PdfTextPage) -> Iterator[_Run]:
    """Letters that make a word: no space between them, and no jump.

    A word's ends say where it lies, as PDFium parts words itself; only where they lie too far
    apart for its letters is each of them looked at.
    """
    handle, box = text_page.raw, raw.FS_RECTF()
    box_of, place = raw.FPDFText_GetLooseCharBox, ctypes.byref(box)
    for match in _WORD.finditer(_letters(text_page)):
        letters, first, end = match.group(), match.start(), match.end()
        ends: list[_Box] = []
        for index in (first, end - 1):
            box_of(handle, index, place)
            ends.append((box.left, box.bottom, box.right, box.top))
        one, other = ends
        size = max(one[3] - one[1], 1.0)
        if (
            -size < other[0] - one[0] < _WIDEST * len(letters) * size
            and abs(other[1] - one[1]) < size / 2
        ):
            yield first, letters, ends
        else:
            yield from _parts(text_page, first, letters)


def _letters(text_page: pdfium.PdfTextPage) -> str:
    """A page's text, a letter for each of PDFium's, so that their numbers are the same."""
    count = min(text_page.count_chars(), MAX_CHARS)
    text = text_page.get_text_range(0, count) if count else ""
    unicode_of, handle = raw.FPDFText_GetUnicode, text_page.raw
    # Letters without a meaning are left out of a text; few pages have any.
    if len(text) == count and all(
        unicode_of(handle, match.start()) == ord(match.group()[0]) for match in _WORD.finditer(text)
    ):
        return text
    codes = (unicode_of(handle, index) for index in range(count))
    return "".join(
        chr(code) if 0 < code < 0xD800 or 0xDFFF < code < 0x110000 else " " for code in codes
    )


def _parts(text_page: pdfium.PdfTextPage, first: int, letters: str) -> Iterator[_Run]:
    """A word's letters, in pieces where they do not follow on one another."""
    box = raw.FS_RECTF()
    begin = first
    boxes: list[_Box] = []
    for index in range(first, first + len(letters)):
        raw.FPDFText_GetLooseCharBox(text_page.raw, index, box)
        place = (box.left, box.bottom, box.right, box.top)
        if boxes and _jumps(boxes[-1], place):
            yield begin, letters[begin - first : index - first], boxes
            begin, boxes = index, []
        boxes.append(place)
    yield begin, letters[begin - first :], boxes


def _jumps(one: _Box, other: _Box) -> bool:
    """Whether a letter does not follow on another one, along a line in any direction."""
    size = max(other[3] - other[1], one[3] - one[1], 1.0)
    return (
        other[0] - one[2] > size
        or one[0] - other[2] > size
        or other[1] - one[3] > size / 2
        or one[1] - other[3] > size / 2
    )


def _word(text_page: pdfium.PdfTextPage, frame: Frame, run: _Run) -> Word:
    first, letters, boxes = run
    lefts, bottoms, rights, tops = zip(*boxes, strict=True)
    x0, top, x1, bottom = frame.shown(min(lefts), min(bottoms), max(rights), max(tops))
    angle = raw.FPDFText_GetCharAngle(text_page.raw, first) + frame.turns * math.pi / 2
    quarters = round(angle / (math.pi / 2))
    turned = quarters % 4 if abs(angle - quarters * math.pi / 2) < _UPRIGHT else 4
    text = letters.translate(_CLEAN)
    return Word(x0, top, x1, bottom, text, bottom - top, _is_bold(text_page, first), turned)


_name = ctypes.create_string_buffer(128)
_flags = ctypes.c_int()


def _is_bold(text_page: pdfium.PdfTextPage, index: int) -> bool:
    """By the font's weight or, where the file does not say it, its name."""
    if raw.FPDFText_GetFontWeight(text_page.raw, index) >= _BOLD_WEIGHT:
        return True
    length = raw.FPDFText_GetFontInfo(text_page.raw, index, _name, len(_name), ctypes.byref(_flags))
    name = _name.value.lower() if 0 < length <= len(_name) else b""
    return any(part in name for part in _BOLD_NAMES)


class Row:
    """Words side by side on one line, from left to right."""

    __slots__ = ("bottom", "size", "top", "words", "x0", "x1")

    def __init__(self, words: Iterable[Word]) -> None:
        self.words = sorted(words)
        self.x0 = self.words[0].x0
        self.x1 = max([word.x1 for word in self.words])
        self.top = min([word.top for word in self.words])
        self.bottom = max([word.bottom for word in self.words])
        sizes = sorted([word.size for word in self.words])
        self.size = sizes[len(sizes) // 2]

    @property
    def middle(self) -> float:
        """Its height on the page."""
        return (self.top + self.bottom) / 2

    @property
    def text(self) -> str:
        """Its words, a space between them."""
        return " ".join(word.text for word in self.words)

    @property
    def bold(self) -> bool:
        """Whether most of its letters are bold."""
        letters = sum(len(word.text) for word in self.words)
        return 2 * sum(len(word.text) for word in self.words if word.bold) > letters

    def parts(self, gap: float) -> list[Row]:
        """Cut where more than ``gap`` times the type's size is empty between two words."""
        parts: list[list[Word]] = []
        right = -math.inf
        for word in self.words:
            if not parts or word.x0 - right > gap * self.size:
                parts.append([])
            parts[-1].append(word)
            right = max(right, word.x1)
        return [Row(part) for part in parts] if len(parts) > 1 else [self]


def rows_of(words: Iterable[Word]) -> list[Row]:
    """Upright words as lines from top to bottom; a raised note stays in its line."""
    rows: list[list[Word]] = []
    middle = size = 0.0
    for twice, word in sorted((word.top + word.bottom, word) for word in words):
        height = word.bottom - word.top
        tall = size if size > height else height
        if not rows or twice / 2 - middle > 0.45 * (tall if tall < 2 * height else 2 * height):
            rows.append([])
            middle, size = twice / 2, height
        rows[-1].append(word)
        middle += (twice / 2 - middle) / len(rows[-1])
        size = tall if len(rows[-1]) > 1 else height
    return [Row(row) for row in rows]
