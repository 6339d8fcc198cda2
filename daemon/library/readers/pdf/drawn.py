"""What is drawn on a PDF page besides letters: lines and images, by their places alone."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import pypdfium2 as pdfium
import pypdfium2.raw as raw

from daemon.library.readers.pdf.tables import Rule
from daemon.library.readers.pdf.words import Frame

MAX_OBJECTS = 20_000  # of a page; a map may have a million
_MAX_DEPTH = 3  # of forms in forms
_MOST_LINES = 2_000  # each way, of the tables of a page
_THIN = 2.5  # points: a rectangle no thicker is a line
_LONG = 8.0  # points: a line no longer is none of a table

_Box = tuple[float, ...]
_Matrix = tuple[float, float, float, float, float, float]
_SAME: _Matrix = (1, 0, 0, 1, 0, 0)


@dataclass
class Drawn:
    """Places of lines and images in points; ``grid``: lines cross as those of a table do."""

    rules: list[Rule] = field(default_factory=list)
    images: list[_Box] = field(default_factory=list)  # left, top, right, bottom; within the page
    uprights: int = 0  # how many lines run down
    levels: int = 0  # and how many across, as far as can be told without looking into each path
    lined: _Box = (math.inf, math.inf, -math.inf, -math.inf)  # around all that run down
    paths: int = 0
    pixels: int = 0  # that the largest image claims to have

    @property
    def grid(self) -> bool:
        """Whether lines run down as well as across, as many as two columns of two rows have.

        Not where they are more than a table's: a drawing, in which looking for cells has no end.
        """
        return all(3 <= count <= _MOST_LINES for count in (self.uprights, self.levels))


def drawn_on(page: pdfium.PdfPage, frame: Frame) -> Drawn:
    """A page's lines and images, as it is shown."""
    drawn = Drawn()
    left, bottom, right, top = (ctypes.c_float() for _ in range(4))
    wide, high = ctypes.c_uint(), ctypes.c_uint()
    for count, (item, matrix) in enumerate(_objects(page)):
        if count >= MAX_OBJECTS:
            break
        kind = raw.FPDFPageObj_GetType(item)
        if kind not in (raw.FPDF_PAGEOBJ_PATH, raw.FPDF_PAGEOBJ_IMAGE):
            continue
        if not raw.FPDFPageObj_GetBounds(item, left, bottom, right, top):
            continue
        box = _moved((left.value, bottom.value, right.value, top.value), matrix)
        x0, y0, x1, y1 = frame.shown(*box)
        if kind == raw.FPDF_PAGEOBJ_IMAGE:
            drawn.images.append(
                (max(x0, 0.0), max(y0, 0.0), min(x1, frame.width), min(y1, frame.height))
            )
            if raw.FPDFImageObj_GetImagePixelSize(item, wide, high):
                drawn.pixels = max(drawn.pixels, wide.value * high.value)
        else:
            drawn.paths += 1
            _add_lines(drawn, item, (x0, y0, x1, y1))
    drawn.rules = _joined(drawn.rules)
    return drawn


def _objects(page: pdfium.PdfPage) -> Iterator[tuple[ctypes.c_void_p, _Matrix]]:
    """A page's objects with the matrix of the form they are part of, in the page's order."""
    handle = page.raw
    for index in range(min(raw.FPDFPage_CountObjects(handle), MAX_OBJECTS)):
        item = raw.FPDFPage_GetObject(handle, index)
        kind = raw.FPDFPageObj_GetType(item)
        if kind == raw.FPDF_PAGEOBJ_FORM:
            yield from _with_parts(item, _SAME, 0)
        elif kind != raw.FPDF_PAGEOBJ_TEXT:  # most are letters
            yield item, _SAME


def _with_parts(
    item: ctypes.c_void_p, matrix: _Matrix, depth: int
) -> Iterator[tuple[ctypes.c_void_p, _Matrix]]:
    if raw.FPDFPageObj_GetType(item) != raw.FPDF_PAGEOBJ_FORM:
        yield item, matrix
        return
    own = raw.FS_MATRIX()
    if depth >= _MAX_DEPTH or not raw.FPDFPageObj_GetMatrix(item, own):
        return
    inner = _times((own.a, own.b, own.c, own.d, own.e, own.f), matrix)
    for index in range(raw.FPDFFormObj_CountObjects(item)):
        yield from _with_parts(raw.FPDFFormObj_GetObject(item, index), inner, depth + 1)


def _times(one: _Matrix, other: _Matrix) -> _Matrix:
    a, b, c, d, e, f = one
    g, h, i, j, k, m = other
    return (
        a * g + b * i,
        a * h + b * j,
        c * g + d * i,
        c * h + d * j,
        e * g + f * i + k,
        e * h + f * j + m,
    )


def _moved(box: tuple[float, float, float, float], matrix: _Matrix) -> _Box:
    if matrix is _SAME:
        return box
    a, b, c, d, e, f = matrix
    corners = [(a * x + c * y + e, b * x + d * y + f) for x in box[::2] for y in box[1::2]]
    across, up = [x for x, _ in corners], [y for _, y in corners]
    return min(across), min(up), max(across), max(up)


def _add_lines(drawn: Drawn, path: ctypes.c_void_p, box: _Box) -> None:
    """Lines, thin rectangles and the sides of stroked boxes; what is only filled has none."""
    x0, y0, x1, y1 = box
    if y1 - y0 <= _THIN:
        if x1 - x0 >= _LONG:
            drawn.rules.append(Rule(x0, x1, (y0 + y1) / 2))
            drawn.levels += 1
        return
    if y1 - y0 < _LONG:
        return
    if x1 - x0 <= _THIN:
        drawn.uprights += 1
        drawn.lined = _around(drawn.lined, box)
        return
    fill, stroke = ctypes.c_int(), ctypes.c_int()
    if raw.FPDFPath_GetDrawMode(path, fill, stroke) and stroke.value:
        drawn.rules += [Rule(x0, x1, y0), Rule(x0, x1, y1)]
        # A grid may be one path: two points a line, and a curve has more of them.
        more = max(0, raw.FPDFPath_CountSegments(path) - 5) // 4
        drawn.uprights += 2 + more
        drawn.levels += 2 + more
        drawn.lined = _around(drawn.lined, box)


def _around(one: _Box, other: _Box) -> _Box:
    return (*map(min, one[:2], other[:2]), *map(max, one[2:], other[2:]))


def _joined(rules: list[Rule]) -> list[Rule]:
    """Lines that overlap at one height are one; those that only touch are cells' own."""
    joined: list[Rule] = []
    for rule in sorted(rules, key=lambda rule: (round(rule.y), rule.x0)):
        last = joined[-1] if joined else None
        if last and abs(last.y - rule.y) < 1 and rule.x0 < last.x1 - 0.5:
            joined[-1] = Rule(last.x0, max(last.x1, rule.x1), last.y)
        else:
            joined.append(rule)
    return joined
