"""Reads .html: the text that a browser would show of a page, without what leads elsewhere.

libxml2 reads it as a stream (lxml's parser target), so no tree is held, and what was left
open is closed as HTML says. Nothing is fetched.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from lxml import etree

from daemon.library.readers import documents
from daemon.library.readers.blocks import Rows, about, alternative, bounded, one_line
from daemon.library.readers.documents import Block, Read
from daemon.library.readers.reader import STEP, Refused, Source
from daemon.library.readers.text import bytes_of, decoded_as, text_of

_DEEPEST = 10_000
_WIDEST = 200  # columns that cells may reach over
_HEADINGS = ("h1", "h2", "h3", "h4", "h5", "h6")
_NEVER_SHOWN = frozenset(
    (
        *("script", "style", "noscript", "template", "iframe", "object", "embed", "applet"),
        *("svg", "math", "canvas", "audio", "video", "select", "datalist", "button"),
        *("textarea", "nav", "menu", "dialog", "map"),
    )
)
# Elements that have no end, so that nothing is inside them.
_VOID = frozenset(
    (
        *("area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "param"),
        *("source", "track", "wbr"),
    )
)
_INLINE = frozenset(
    (
        *("a", "abbr", "acronym", "b", "bdi", "bdo", "big", "cite", "code", "data", "del"),
        *("dfn", "em", "font", "i", "img", "ins", "kbd", "label", "mark", "meter", "output"),
        *("progress", "q", "rp", "rt", "ruby", "s", "samp", "small", "span", "strike"),
        *("strong", "sub", "sup", "time", "tt", "u", "var", "wbr", "input", "link", "meta"),
    )
)
_HIDDEN_STYLE = re.compile(r"(?:display\s*:\s*none|visibility\s*:\s*hidden)", re.IGNORECASE)
_OF_THE_PAGE = re.compile(r"(?:navigation|search|banner|contentinfo)\Z")
_TITLES = ("dc.title", "og:title", "citation_title")
_AUTHORS = ("author", "dc.creator", "article:author", "citation_author")
_DATES = (
    *("article:modified_time", "dcterms.modified", "last-modified"),
    *("article:published_time", "dc.date", "dcterms.created", "citation_publication_date", "date"),
)


def read_html(source: Source) -> Iterator[Read]:
    """What the page says of itself, then its blocks: those of its main part, where it has one."""
    yield from bounded(source, blocks_of(bytes_of(source)))


def blocks_of(raw: bytes, declared: str = "") -> Iterator[Read]:
    """What a page's bytes say; ``declared`` is its encoding by what it came with."""
    page = _Page()
    parser = etree.HTMLParser(target=page, encoding="utf-8", huge_tree=True, no_network=True)
    text = _decoded(raw, declared)
    try:
        for begin in range(0, len(text), STEP):
            parser.feed(text[begin : begin + STEP].encode("utf-8", "replace"))
        parser.close()
    except etree.XMLSyntaxError as error:  # HTML has no errors but where nothing is left
        if not page.heard:
            raise Refused(f"no HTML ({error.msg}): copy it again") from error
    yield from page.about()
    yield from page.blocks()


def _decoded(raw: bytes, declared: str) -> str:
    """By the mark at the beginning, else what is declared where that can be, else a guess."""
    in_page = re.search(rb"<meta[^>]{1,300}?charset\s*=\s*[\"']?\s*([\w:.-]+)", raw[:4096], re.I)
    for name in (declared, in_page.group(1).decode("ascii", "replace") if in_page else ""):
        text = decoded_as(raw, name)
        if text is not None:
            return text
    return text_of(raw)


class _Table:
    """A table that is being read."""

    def __init__(self, *, for_looks: bool) -> None:
        self.for_looks = for_looks  # it places texts on the page; its cells are no cells
        self.rows = Rows()
        self.row: list[str] = []
        self.cell: list[str] | None = None
        self.width = 1
        self.reaching: dict[int, int] = {}  # columns that cells of rows above reach down into

    def begin_cell(self, attributes: dict[str, str]) -> None:
        """The next cell, behind those that reach down into its row."""
        self.pass_reaching()
        self.cell = []
        self.width = _number(attributes.get("colspan"), max(1, _WIDEST - len(self.row)))
        down = _number(attributes.get("rowspan"), 65_534)
        if down > 1:
            for column in range(len(self.row), len(self.row) + self.width):
                self.reaching[column] = down

    def pass_reaching(self) -> None:
        """Leave those columns empty."""
        while self.reaching.get(len(self.row)):
            self.row.append("")

    def end_cell(self) -> None:
        """Its text counts once, however many columns it takes."""
        if self.cell is not None:
            self.row.append(" ".join(self.cell))
            self.row += [""] * (self.width - 1)
            self.cell = None

    def end_row(self) -> Iterator[Block]:
        """The row as it was read."""
        self.end_cell()
        yield from self.rows.add(self.row)
        self.row = []
        self.reaching = {column: n - 1 for column, n in self.reaching.items() if n > 1}


def _number(value: str | None, most: int) -> int:
    """A span as HTML reads it: from 1 to ``most``, 1 where it says nothing."""
    return max(1, min(int(value), most)) if value and value.strip().isdecimal() else 1


class _Page:
    """A parser's target: hears a page and makes blocks of it."""

    def __init__(self) -> None:
        self.heard = False
        self._depth = 0
        self._meta: dict[str, str] = {}
        self._title: list[str] | None = None
        self._language = ""
        self._blocks: list[tuple[Block, bool]] = []  # whether it is in the main part
        self._passing = self._main = self._section = self._pre = 0  # how deep in them
        self._main_tag = ""
        self._pieces: list[str] = []  # of the paragraph that is being read
        self._kind: documents.Kind = "text"
        self._lists: list[int] = []  # the number of the item in each open list; -1: without
        self._items: list[str] = []
        self._marker = ""
        self._tables: list[_Table] = []

    def about(self) -> Iterator[Read]:
        """Title, author, date and language, by the elements that usually say them."""
        meta = self._meta

        def first(names: tuple[str, ...]) -> str:
            return next((meta[name] for name in names if meta.get(name)), "")

        language = self._language or meta.get("content-language", "")
        title = meta.get("title") or first(_TITLES)
        yield from about(title, first(_AUTHORS), first(_DATES), language)

    def blocks(self) -> Iterator[Block]:
        """All of them, or those of the main part."""
        has_main = any(main for _, main in self._blocks)
        yield from (block for block, main in self._blocks if main or not has_main)

    # ---- what the parser tells

    def start(self, tag: str, given: Mapping[str, str]) -> None:
        """An element begins."""
        self.heard = True
        self._depth += 1
        if self._depth > _DEEPEST:  # each end of an element is looked for among those open
            raise Refused("elements nested too deeply: save the page again")
        if self._passing:
            self._passing += 1
            return
        attributes = dict(given)
        if tag == "meta":
            name = attributes.get("name") or attributes.get("property")
            name = (name or attributes.get("http-equiv", "")).lower()
            self._meta.setdefault(name, attributes.get("content", ""))
        elif tag == "title":
            self._title = []
        elif self._is_passed_over(tag, attributes):
            self._passing = 1
            if tag not in _INLINE:
                self._flush()
        else:
            self._open(tag, attributes)

    def _is_passed_over(self, tag: str, attributes: dict[str, str]) -> bool:
        return (
            tag in _NEVER_SHOWN
            or (tag == "footer" and not self._section and not self._main)
            or ("hidden" in attributes and attributes["hidden"] != "until-found")
            or attributes.get("aria-hidden", "").lower() == "true"
            or bool(_OF_THE_PAGE.match(attributes.get("role", "").lower()))
            or bool(_HIDDEN_STYLE.search(attributes.get("style", "")))
        )

    def _open(self, tag: str, attributes: dict[str, str]) -> None:
        if tag == "html":
            self._language = attributes.get("lang") or attributes.get("xml:lang", "")
        elif tag == "br":
            self._pieces.append("\n")
        elif tag == "img":
            alt = alternative(attributes.get("alt", ""))
            if alt and self._tables and self._tables[-1].cell is not None:
                self._pieces.append(f" {alt} ")
            elif alt:
                self._flush()
                self._put(Block("figure", alt))
        elif tag not in _INLINE:
            self._flush()
            self._open_block(tag, attributes)

    def _open_block(self, tag: str, attributes: dict[str, str]) -> None:
        if self._main:
            self._main += tag == self._main_tag
        elif tag == "main" or attributes.get("role", "").lower() == "main":
            self._main, self._main_tag = 1, tag
        self._section += tag in ("article", "section")
        if tag in _HEADINGS:
            self._kind = "heading"
            if self._tables:
                self._tables[-1].for_looks = True  # headings divide pages, not cells
        elif tag == "figcaption":
            self._kind = "figure"
        elif tag == "pre":
            self._pre += 1
        elif tag in ("ul", "ol"):
            self._lists.append(_number(attributes.get("start"), 10**6) if tag == "ol" else -1)
        elif tag == "li":
            self._marker = "- "
            if self._lists and self._lists[-1] >= 0:
                self._marker = f"{self._lists[-1]}. "
                self._lists[-1] += 1
        elif tag == "table":
            for_looks = attributes.get("role", "").lower() in ("presentation", "none")
            self._tables.append(_Table(for_looks=for_looks))
        elif self._tables and tag in ("td", "th"):
            self._tables[-1].end_cell()
            self._tables[-1].begin_cell(attributes)

    def end(self, tag: str) -> None:
        """An element ends."""
        self._depth -= 1
        if self._passing:
            self._passing -= 1
        elif tag == "title":
            if self._title:
                self._meta.setdefault("title", "".join(self._title))
            self._title = None
        elif tag not in _INLINE and tag not in _VOID:
            self._flush()
            self._main -= bool(self._main) and tag == self._main_tag
            self._close_block(tag)

    def _close_block(self, tag: str) -> None:
        if tag in _HEADINGS or tag == "figcaption":
            self._kind = "text"
        elif tag in ("article", "section"):
            self._section = max(0, self._section - 1)
        elif tag == "pre":
            self._pre = max(0, self._pre - 1)
        elif tag in ("ul", "ol") and self._lists:
            self._lists.pop()
            if not self._lists:
                self._end_list()
        elif self._tables and tag in ("td", "th"):
            self._tables[-1].end_cell()
        elif self._tables and tag in ("tr", "table"):
            self._end_rows(tag)

    def _end_rows(self, tag: str) -> None:
        table = self._tables[-1]
        if tag == "table":
            self._tables.pop()
        blocks = [*table.end_row(), *(table.rows.end() if tag == "table" else ())]
        for block in blocks:
            if self._cell() is not None and tag == "table":  # it lies in another one's cell
                block = Block("text", one_line(block.text))
            self._put(block)

    def data(self, text: str) -> None:
        """Text, in pieces of any size."""
        if self._title is not None:
            self._title.append(text)
        elif not self._passing:
            self._pieces.append(text if self._pre else re.sub(r"\s+", " ", text))

    def close(self) -> None:
        """The page ends, whatever was left open."""
        self._flush()
        while self._tables:
            self._end_rows("table")
        self._end_list()

    # ---- what it makes of it

    def _cell(self) -> list[str] | None:
        """The cell that is being read; None outside of tables, and in those for looks."""
        table = self._tables[-1] if self._tables else None
        return table.cell if table and not table.for_looks else None

    def _flush(self) -> None:
        """What was read since is a paragraph."""
        if not self._pieces:
            return
        lines = "".join(self._pieces).split("\n")
        self._pieces = []
        if not self._pre:
            lines = [one_line(line) for line in lines]
        text = "\n".join(line.rstrip() for line in lines if line.strip())
        if text:
            self._put(Block(self._kind, text))

    def _put(self, block: Block) -> None:
        cell = self._cell()
        if cell is not None:
            cell.append(block.text)
        elif self._lists and block.kind == "text":
            indent = "  " * min(len(self._lists) - 1, 10)
            self._items.append(f"{indent}{self._marker}{block.text}")
            self._marker = ""
        else:
            self._end_list()
            self._blocks.append((block, self._main > 0))

    def _end_list(self) -> None:
        if self._items:
            items, self._items = self._items, []
            self._blocks.append((Block("text", "\n".join(items)), self._main > 0))
