"""Reads .docx: what Word shows of a document's body, in the order in which it is read.

The XML goes by bit by bit (ECMA-376 part 1, 17), so that no more is held than a paragraph or
a row of a table. python-docx would hold all of it, and leaves out text boxes, content
controls, footnotes and what was inserted under tracking.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from daemon.library.readers import documents
from daemon.library.readers.blocks import Rows, alternative, bounded, one_line
from daemon.library.readers.documents import Block, Read
from daemon.library.readers.package import Package, opened
from daemon.library.readers.reader import Refused, Source

_HEADING = re.compile(r"(?:heading \d|title|subtitle)\Z")
_CONTENTS = re.compile(r"(?:toc \d|toc heading|table of figures)\Z")  # says other places again
_LIST = re.compile(r"list(?: bullet| number)?(?: \d)?\Z")
_OF_A_TABLE = re.compile(r"tab[a-z]*\b", re.IGNORECASE)  # Table, Tabelle, Tableau, Tabla
_OFF = ("0", "false", "off", "none")
# What is within these is not read: the second form of what stands in another form before it,
# and what was moved away under tracking. Deleted text has elements of its own.
_PASSED_OVER = ("mc:Fallback", "w:moveFrom")
_CHARACTERS = {"w:tab": " ", "w:cr": "\n", "w:noBreakHyphen": "-", "w:ptab": " "}
_MOST_COLUMNS = 1000


def read_docx(source: Source) -> Iterator[Read]:
    """What the document says of itself, then its blocks."""
    with opened(source, ".docx", "document") as package:
        yield from bounded(source, _read(package))


def _read(package: Package) -> Iterator[Read]:
    yield from package.about()
    styles = _Styles()
    for part in package.related(package.main, "styles").values():
        package.hear(part, styles)
    notes: dict[tuple[str, str], str] = {}
    for kind in ("footnote", "endnote"):
        for part in package.related(package.main, f"{kind}s").values():
            listened = _Body(styles, {}, note=f"w:{kind}")
            package.hear(part, listened)
            notes |= {(kind, key): text for key, text in listened.notes.items()}
    body = _Body(styles, notes)
    for _ in package.walk(package.main, body):
        yield from body.take()
    body.end_list()
    yield from body.take()


@dataclass
class _Style:
    name: str = ""
    above: str = ""  # the style that it is based on
    outline: bool = False  # whether it makes headings
    listed: bool = False


class _Styles:
    """The styles of a document by their ids; a handler of its part."""

    def __init__(self) -> None:
        self._styles: dict[str, _Style] = {}
        self._current = _Style()

    def start(self, name: str, attributes: dict[str, str]) -> None:
        value = attributes.get("w:val", "")
        if name == "w:style":
            self._current = self._styles[attributes.get("w:styleId", "")] = _Style()
        elif name == "w:name":
            self._current.name = value.lower()
        elif name == "w:basedOn":
            self._current.above = value
        elif name == "w:outlineLvl":
            self._current.outline = value != "9"  # 9: body text
        elif name == "w:numId":
            self._current.listed = value != "0"

    def end(self, name: str) -> None: ...

    def data(self, text: str) -> None: ...

    def chain(self, key: str) -> list[_Style]:
        """A style and those that it is based on."""
        found: dict[str, _Style] = {}
        while (style := self._styles.get(key)) and key not in found:
            found[key] = style
            key = style.above
        return list(found.values())


@dataclass
class _Paragraph:
    pieces: list[str] = field(default_factory=list)
    style: str = ""
    outline: bool = False
    listed: bool | None = None  # None: as its style says
    after: list[Block] = field(default_factory=list)  # text boxes, pictures and notes in it


@dataclass
class _Table:
    rows: Rows = field(default_factory=Rows)
    row: list[str] = field(default_factory=list)
    cell: list[str] = field(default_factory=list)
    span: int = 1
    inner: list[str] = field(default_factory=list)  # rows, where it lies in another one's cell


class _Body:
    """Hears a document's body, or its notes, and makes blocks of it."""

    def __init__(self, styles: _Styles, notes: dict[tuple[str, str], str], note: str = "") -> None:
        self._styles = styles
        self._notes = notes
        self._note = note  # the element that holds one, where notes are heard
        self.notes: dict[str, str] = {}
        self._done: list[Block] = []
        self._items: list[str] = []  # of the list that is being read
        self._open: list[_Paragraph | _Table] = []
        self._passing = 0  # how deep in what is not read
        self._hidden = self._in_text = self._in_properties = False
        self._held = 0  # characters and cells of what is not done

    # ---- what the package tells

    def start(self, name: str, attributes: dict[str, str]) -> None:
        """An element begins."""
        if self._passing or name in _PASSED_OVER:
            self._passing += 1
            return
        if name == "w:p":
            self._open.append(_Paragraph())
        elif name == "w:tbl":
            self.end_list()
            self._open.append(_Table())
        elif name == self._note:
            self._key = attributes.get("w:id", "")
        elif self._open:
            inner = self._open[-1]
            if isinstance(inner, _Table):
                self._start_in_table(inner, name, attributes)
            else:
                self._start_in_paragraph(inner, name, attributes)

    def _start_in_table(self, table: _Table, name: str, attributes: dict[str, str]) -> None:
        if name == "w:tc":
            table.cell, table.span = [], 1
        elif name in ("w:gridSpan", "w:gridBefore"):
            value = attributes.get("w:val", "")
            columns = min(int(value), _MOST_COLUMNS) if value.isdecimal() else 1
            if name == "w:gridSpan":
                table.span = max(1, columns)
            else:
                table.row += [""] * columns
                self._hold(columns)

    def _start_in_paragraph(
        self, paragraph: _Paragraph, name: str, attributes: dict[str, str]
    ) -> None:
        value = attributes.get("w:val", "")
        if name == "w:r":
            self._hidden = False
        elif name in ("w:t", "m:t"):
            self._in_text = not self._hidden
        elif name == "w:pPr":
            self._in_properties = True
        elif name == "w:vanish":  # of a paragraph's properties it hides its mark alone
            self._hidden = not self._in_properties and value not in _OFF
        elif name == "w:pStyle":
            paragraph.style = value
        elif name == "w:outlineLvl":
            paragraph.outline = value != "9"
        elif name == "w:numId":
            paragraph.listed = value != "0"
        elif name == "wp:docPr":
            shown = alternative(attributes.get(":descr") or attributes.get(":title", ""))
            paragraph.after += [Block("figure", shown)] if shown else []
        elif name in ("w:footnoteReference", "w:endnoteReference"):
            kind = name.removeprefix("w:").removesuffix("Reference")
            note = self._notes.get((kind, attributes.get("w:id", "")), "")
            paragraph.after += [Block("text", note)] if note else []
        elif name == "w:br":
            paragraph.pieces.append("" if attributes.get("w:type") == "page" else "\n")
        elif not self._in_properties and name in _CHARACTERS:
            paragraph.pieces.append(_CHARACTERS[name])

    def data(self, text: str) -> None:
        """Text, in pieces of any size."""
        if self._in_text and not self._passing and self._open:
            inner = self._open[-1]
            if isinstance(inner, _Paragraph):
                self._hold(len(text))
                inner.pieces.append(text)

    def end(self, name: str) -> None:
        """An element ends."""
        if self._passing:
            self._passing -= 1
        elif name in ("w:t", "m:t"):
            self._in_text = False
        elif name == "w:pPr":
            self._in_properties = False
        elif name == self._note:
            self.end_list()
            self.notes[self._key] = one_line(" ".join(block.text for block in self.take()))
        elif name in ("w:p", "w:tbl", "w:tr", "w:tc") and self._open:
            self._end_part(name)

    def _end_part(self, name: str) -> None:
        inner = self._open[-1]
        if isinstance(inner, _Paragraph):
            if name == "w:p":
                self._open.pop()
                self._end_paragraph(inner)
        elif name == "w:tc":
            inner.row.append(" ".join(inner.cell))
            inner.row += [""] * (inner.span - 1)
            self._hold(inner.span)
        elif name == "w:tr":
            self._end_row(inner)
        elif name == "w:tbl":
            self._open.pop()
            for block in inner.rows.end():
                self._put(block)
            if inner.inner:
                self._put(Block("text", " ".join(inner.inner)))

    # ---- what it makes of it

    def _hold(self, count: int) -> None:
        self._held += count
        if self._held > documents.MAX_TEXT_BYTES:
            most = documents.MAX_TEXT_BYTES >> 20
            raise Refused(f"a paragraph or a row longer than {most} MiB: cut it")

    def _end_row(self, table: _Table) -> None:
        if len(self._open) > 1:  # it lies in a cell, or in a text box: its text goes on there
            table.inner.append(" ".join(filter(None, table.row)))
        else:
            for block in table.rows.add(table.row):
                self._put(block)
            self._held = 0
        table.row = []

    def _end_paragraph(self, paragraph: _Paragraph) -> None:
        text = "".join(paragraph.pieces)
        chain = self._styles.chain(paragraph.style)
        names = [style.name for style in chain]
        if not any(map(_CONTENTS.match, names)):
            text = "\n".join(filter(None, map(one_line, text.split("\n"))))
            heading = paragraph.outline or any(
                style.outline or _HEADING.match(style.name) for style in chain
            )
            listed = paragraph.listed
            if listed is None:
                listed = any(style.listed or _LIST.match(style.name) for style in chain)
            if heading:
                self._put(Block("heading", one_line(text)))
            elif "caption" in names and not _OF_A_TABLE.match(text):
                self._put(Block("figure", text))
            elif listed and text and not self._open:
                self._items.append(f"- {text}")
            else:
                self._put(Block("text", text))
        for block in paragraph.after:
            self._put(block)
        if not self._open and not self._items:
            self._held = 0

    def _put(self, block: Block) -> None:
        """Where a finished block belongs: after the paragraph that it is in, in a cell, or here."""
        if not block.text:
            return
        if not self._open:
            self.end_list()
            self._done.append(block)
        elif isinstance(inner := self._open[-1], _Paragraph):
            inner.after.append(block)
        else:
            inner.cell.append(block.text)

    def end_list(self) -> None:
        """Nothing follows in the list that was being read, if there was one."""
        if self._items:
            items, self._items = self._items, []
            self._done.append(Block("text", "\n".join(items)))

    def take(self) -> list[Block]:
        """The blocks that were finished since."""
        done, self._done = self._done, []
        return done
