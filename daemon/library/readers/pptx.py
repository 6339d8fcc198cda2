"""Reads .pptx: slides as pages, their shapes in the order in which they are looked at."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from pptx import Presentation
from pptx.enum.shapes import PP_PLACEHOLDER
from pptx.exc import PythonPptxError
from pptx.shapes.base import BaseShape
from pptx.shapes.graphfrm import GraphicFrame
from pptx.shapes.group import GroupShape
from pptx.slide import Slide
from pptx.table import Table
from pptx.text.text import TextFrame

from daemon.library.readers.blocks import Rows, alternative, bounded, one_line
from daemon.library.readers.documents import Block, FileProblem, Place, Read
from daemon.library.readers.package import MALFORMED, Package, opened
from daemon.library.readers.reader import Refused, Source

_MOST_SLIDES = 5000
_BAND = 0.04  # of a slide's height: shapes that begin no further apart stand in a line
_TITLES = (PP_PLACEHOLDER.TITLE, PP_PLACEHOLDER.CENTER_TITLE, PP_PLACEHOLDER.VERTICAL_TITLE)
_ON_EACH_SLIDE = (
    *(PP_PLACEHOLDER.DATE, PP_PLACEHOLDER.FOOTER),
    *(PP_PLACEHOLDER.HEADER, PP_PLACEHOLDER.SLIDE_NUMBER),
)
_DIAGRAM = "{http://schemas.openxmlformats.org/drawingml/2006/diagram}relIds"
_DIAGRAM_DATA = re.compile(r"\{.*/relationships\}dm\Z")
_DRAWING = "{http://schemas.openxmlformats.org/drawingml/2006/main}"


def read_pptx(source: Source) -> Iterator[Read]:
    """What the presentation says of itself, then its slides; a slide that fails is told."""
    with opened(source, ".pptx", "presentation") as package:
        yield from bounded(source, _read(source, package))


def _read(source: Source, package: Package) -> Iterator[Read]:
    yield from package.about()
    try:
        presentation = Presentation(package.lean())
        size = (presentation.slide_width or 1, presentation.slide_height or 1)
        slides = list(presentation.slides)
    except (*MALFORMED, PythonPptxError) as error:
        raise Refused(f"damaged ({one_line(str(error))}): save it anew") from error
    for number, slide in enumerate(slides[:_MOST_SLIDES], 1):
        try:
            blocks = list(_Page(package, slide, number, size).blocks())
        except (*MALFORMED, PythonPptxError) as error:
            cause = f"damaged ({one_line(str(error))}): save the presentation anew"
            yield FileProblem(str(source.path), cause, page=number)
        else:
            yield from blocks
    if len(slides) > _MOST_SLIDES:
        yield FileProblem(str(source.path), f"only {_MOST_SLIDES} slides are read: cut it up")


@dataclass(frozen=True)
class _Frame:
    """How lengths of shapes become parts of a slide: ``scale`` times a length plus ``offset``."""

    scale: tuple[float, float]
    offset: tuple[float, float]

    def place(self, shape: BaseShape) -> Place | None:
        """Where a shape stands; None where it doesn't say."""
        # python-pptx says that they are never None, but they are where a layout says nothing.
        lengths: tuple[int | None, ...] = (shape.left, shape.top, shape.width, shape.height)
        left, top, width, height = lengths
        if left is None or top is None or width is None or height is None:
            return None
        corners = [
            begin * scale + offset
            for begins in ((left, top), (left + width, top + height))
            for begin, scale, offset in zip(begins, self.scale, self.offset, strict=True)
        ]
        x0, y0, x1, y1 = (min(1.0, max(0.0, corner)) for corner in corners)
        return (x0, y0, x1, y1)

    def inside(self, group: GroupShape) -> _Frame:
        """The same for the shapes in a group, which has lengths of its own (a:chOff, a:chExt)."""
        form = next(group.element.iter(f"{_DRAWING}xfrm"), None)
        told = {} if form is None else {one.tag.rpartition("}")[2]: one for one in form}
        if not {"off", "ext", "chOff", "chExt"} <= told.keys():
            return self
        x, y = (float(told["off"].get(key)) for key in ("x", "y"))
        w, h = (float(told["ext"].get(key)) for key in ("cx", "cy"))
        cx, cy = (float(told["chOff"].get(key)) for key in ("x", "y"))
        cw, ch = (float(told["chExt"].get(key)) for key in ("cx", "cy"))
        grown = (w / cw if cw else 1.0, h / ch if ch else 1.0)
        scale = (self.scale[0] * grown[0], self.scale[1] * grown[1])
        return _Frame(
            scale,
            (
                self.offset[0] + x * self.scale[0] - cx * scale[0],
                self.offset[1] + y * self.scale[1] - cy * scale[1],
            ),
        )


class _Texts:
    """Hears what stands in a diagram (SmartArt), a line a point."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._pieces: list[str] = []
        self._hears = False

    def start(self, name: str, _: dict[str, str], /) -> None:
        self._hears = name == ":t"

    def end(self, name: str) -> None:
        self._hears = False
        if name == ":p" and self._pieces:
            self.lines.append(one_line("".join(self._pieces)))
            self._pieces = []

    def data(self, text: str) -> None:
        if self._hears:
            self._pieces.append(text)


class _Page:
    """A slide to its blocks."""

    def __init__(self, package: Package, slide: Slide, number: int, size: tuple[int, int]) -> None:
        self._package, self._slide, self._number = package, slide, number
        self._frame = _Frame((1 / size[0], 1 / size[1]), (0.0, 0.0))

    def blocks(self) -> Iterator[Block]:
        """The title, the shapes from top to bottom and from left to right, the notes."""
        yield from self._of_shapes(self._slide.shapes, self._frame)
        if self._slide.has_notes_slide:
            notes = self._slide.notes_slide.notes_text_frame
            if notes is not None and notes.text.strip():
                yield Block("text", _text_of(notes), self._number)

    def _of_shapes(self, shapes: Iterable[BaseShape], frame: _Frame) -> Iterator[Block]:
        def top(one: tuple[BaseShape, Place | None]) -> float:
            if _kind_of(one[0]) in _TITLES:
                return -1.0
            return one[1][1] if one[1] else 1.0

        lines: list[list[tuple[BaseShape, Place | None]]] = []
        for one in sorted(((shape, frame.place(shape)) for shape in shapes), key=top):
            if not lines or top(one) > top(lines[-1][0]) + _BAND:
                lines.append([])
            lines[-1].append(one)
        for line in lines:
            for shape, place in sorted(line, key=lambda one: one[1][0] if one[1] else 0.0):
                yield from self._of_shape(shape, place, frame)

    def _of_shape(self, shape: BaseShape, place: Place | None, frame: _Frame) -> Iterator[Block]:
        kind = _kind_of(shape)
        if kind in _ON_EACH_SLIDE:
            return
        if isinstance(shape, GroupShape):
            yield from self._of_shapes(shape.shapes, frame.inside(shape))
        elif isinstance(shape, GraphicFrame) and shape.has_table:
            yield from _rows(shape.table, Rows(self._number, place))
        elif isinstance(shape, GraphicFrame):
            for text in self._in_diagram(shape):
                yield Block("text", text, self._number, place)
        text_frame = getattr(shape, "text_frame", None) if shape.has_text_frame else None
        text = _text_of(text_frame) if text_frame is not None else ""
        if text and kind in _TITLES:
            yield Block("heading", one_line(text), self._number, place)
        elif text:
            yield Block("text", text, self._number, place)
        told = next((one.get("descr", "") for one in shape.element.iter() if _named(one)), "")
        if not isinstance(shape, GroupShape) and (shown := alternative(told)):
            yield Block("figure", shown, self._number, place)

    def _in_diagram(self, shape: GraphicFrame) -> Iterator[str]:
        for ids in shape.element.iter(_DIAGRAM):
            for name, value in ids.attrib.items():
                if _DIAGRAM_DATA.match(str(name)):
                    part = self._slide.part.related_part(value).partname.lstrip("/")
                    texts = _Texts()
                    self._package.hear(part, texts)
                    yield "\n".join(filter(None, texts.lines))


def _named(element: object) -> bool:
    """Whether an element is what names a shape and tells of it."""
    tag = getattr(element, "tag", "")
    return isinstance(tag, str) and tag.endswith("}cNvPr")


def _kind_of(shape: BaseShape) -> PP_PLACEHOLDER | None:
    return shape.placeholder_format.type if shape.is_placeholder else None


def _text_of(frame: TextFrame) -> str:
    """A line a paragraph, further in where it is a point below another."""
    lines = []
    for paragraph in frame.paragraphs:
        if line := one_line(paragraph.text):
            lines.append("  " * paragraph.level + line)
    return "\n".join(lines).lstrip()


def _rows(table: Table, rows: Rows) -> Iterator[Block]:
    for row in table.rows:
        yield from rows.add(["" if cell.is_spanned else cell.text for cell in row.cells])
    yield from rows.end()
