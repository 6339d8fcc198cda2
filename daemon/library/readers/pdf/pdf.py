"""Reads .pdf: blocks in reading order, page by page, with their places.

Text comes from PDFium; tables by how words are aligned, and by their lines where they have
some; pages and figures that are images go through OCR, where an engine is installed. Some pages
are looked at beforehand (`_MOST_LEARNED`); of the others never more than one is held. A page that
takes too long is left out, and said.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import pypdfium2 as pdfium

from daemon.library.readers.documents import Block, FileProblem, Place, Read
from daemon.library.readers.pdf import ocr
from daemon.library.readers.pdf.drawn import drawn_on
from daemon.library.readers.pdf.figures import Figure, figures_of, is_image, read_words
from daemon.library.readers.pdf.layout import Style, blocks_of, box_of, place_of, regions_of
from daemon.library.readers.pdf.pages import about, opened
from daemon.library.readers.pdf.ruled import Ruled
from daemon.library.readers.pdf.running import Running
from daemon.library.readers.pdf.tables import tables_of
from daemon.library.readers.pdf.words import (
    Frame,
    Word,
    frame_of,
    quarters_to_upright,
    rows_of,
    turned_back,
    turned_words,
    words_of,
)
from daemon.library.readers.reader import Refused, Source, TooSlow

_MOST_LEARNED, _AT_ONCE = 32, 4  # pages looked at beforehand, and how many of them in a row
_MOST_DAMAGED = 25  # pages one after the other; a broken page tree may claim a million
_DAMAGED = "damaged page: print the file to a new PDF"
_TOO_SLOW = "takes too long to be read: print the file to a new PDF, or split the page"


def read_pdf(source: Source) -> Iterator[Read]:
    """What a file says of itself, then its blocks; a page that can't be read is a problem.

    Raises OSError, and Refused for a file that is damaged, locked or no PDF.
    """
    with opened(source.path) as document:
        yield about(document)
        reader = _Reader(source, document)
        try:
            yield from reader.read()
        finally:
            reader.close()


@dataclass(frozen=True)
class _Seen:
    """An open page, and what stands on it."""

    page: pdfium.PdfPage
    words: list[Word]
    frame: Frame


class _Reader:
    """One file on its way."""

    def __init__(self, source: Source, document: pdfium.PdfDocument) -> None:
        self._path = str(source.path)
        self._source = source
        self._document = document
        self._pages = len(document)
        self._style = Style()
        self._running = Running(self._pages)
        self._ruled = Ruled(source.path)
        engine = ocr.engine()
        self._engine = ocr.Paced(engine, lambda: source.watch(0)) if engine else None
        self._waiting: list[int] = []  # pages with something that no engine is there to read
        self._learned = set[int]()
        # Pages that were looked at beforehand, open: to open one is half of reading it.
        self._seen = dict[int, _Seen]()

    def close(self) -> None:
        """Let go of what was opened on the way."""
        for seen in self._seen.values():
            seen.page.close()
        self._ruled.close()

    def read(self) -> Iterator[Read]:
        """All pages; where many in a row are damaged, the rest is one problem."""
        self._look_ahead()
        damaged, told = 0, 0
        for number in range(1, self._pages + 1):
            items = self._page(number)
            told += len(items)
            yield from items
            self._tell(number)
            is_damaged = any(
                isinstance(item, FileProblem) and item.cause == _DAMAGED for item in items
            )
            damaged = damaged + 1 if is_damaged else 0
            if damaged >= _MOST_DAMAGED and number < self._pages:
                cause = f"no more of its pages are read (it claims {self._pages}): {_DAMAGED}"
                yield FileProblem(self._path, cause)
                break
        if self._waiting:
            pages = _named(self._waiting)
            one = len(self._waiting) == 1
            which = f"page {pages} waits" if one else f"pages {pages} wait"
            cause = f"{which} for OCR (`fedctl documents list --waiting`)"
            yield FileProblem(self._path, cause, lacks="ocr", pages=pages)
        elif not told:
            yield FileProblem(self._path, "no text on any page: nothing to ingest")

    def _tell(self, number: int) -> None:
        """Say how much of the file is read, as its pages are."""
        size, pages = self._source.size, self._pages
        self._source.watch(size * number // pages - size * (number - 1) // pages)

    def _look_ahead(self) -> None:
        """Learn type sizes and running lines: of all pages, or of some in each part."""
        groups = max(1, min(self._pages, _MOST_LEARNED) // _AT_ONCE)
        for group in range(groups):
            first = self._pages * group // groups
            last = self._pages * (group + 1) // groups
            for number in range(first + 1, min(last, first + _AT_ONCE) + 1):
                self._source.watch(0)
                try:
                    self._seen[number] = _seen(self._document[number - 1])
                except pdfium.PdfiumError:
                    continue  # told when its turn comes
                self._learn(number, self._seen[number].words, self._seen[number].frame)

    def _learn(self, number: int, words: Sequence[Word], frame: Frame) -> None:
        if number not in self._learned and words:
            self._learned.add(number)
            self._style.learn(words)
            self._running.learn(number, words, frame)

    def _page(self, number: int) -> list[Read]:
        try:
            seen = self._seen.pop(number, None) or _seen(self._document[number - 1])
        except pdfium.PdfiumError:
            return [FileProblem(self._path, _DAMAGED, page=number)]
        if self._engine is not None:
            self._engine.begin_page()
        try:
            return self._read_page(number, seen)
        except pdfium.PdfiumError:
            return [FileProblem(self._path, _DAMAGED, page=number)]
        except TooSlow:
            self._source.watch(0)
            return [FileProblem(self._path, _TOO_SLOW, page=number, passing=True)]
        except (ocr.OcrFailed, Refused) as failed:
            return [self._failed(failed, number)]
        finally:
            seen.page.close()

    def _failed(self, error: ocr.OcrFailed | Refused, number: int) -> FileProblem:
        passing = isinstance(error, ocr.OcrFailed) and error.passing
        return FileProblem(self._path, str(error), page=number, passing=passing)

    def _read_page(self, number: int, seen: _Seen) -> list[Read]:
        page, words, frame = seen.page, seen.words, seen.frame
        drawn = drawn_on(page, frame)
        problems: list[Read] = []
        figures: list[Figure] = []
        style = self._style
        scanned = is_image(words, drawn, frame)
        by_ocr = scanned and self._engine is not None
        if scanned:
            if self._engine is None:
                self._waiting.append(number)
            else:
                words = read_words(page, self._engine)
                style = Style()  # an engine measures letters otherwise
                style.learn(words)
        else:
            figures = figures_of(words, drawn, frame)
        if quarters := quarters_to_upright(words):  # a wide table, as it lies in a bound report
            words = turned_words(words, frame.width, frame.height, quarters)
            frame = frame.turned(quarters)
            drawn, figures = drawn_on(page, frame), []
        if style is self._style:
            self._learn(number, words, frame)
        words = self._running.without(number, words, frame)
        turned = [word for word in words if word.turned]
        words = [word for word in words if not word.turned]
        ruled = self._ruled.tables(number, frame, words, drawn)
        inside = {id(word) for table in ruled for word in table.words}
        words = [word for word in words if id(word) not in inside]
        for figure in figures:
            words = figure.take_caption(words)
        blocks: list[Block] = []
        for region in regions_of(words, frame.width):
            blocks += blocks_of(region, style, frame, number, drawn.rules)
        for table in ruled:
            _insert(blocks, Block("table", table.text, number, place_of(frame, table.box)))
        for figure in figures:
            try:
                for block in self._figure(figure, page, blocks, number):
                    _insert(blocks, block)
            except (ocr.OcrFailed, Refused) as failed:
                problems.append(self._failed(failed, number))
        if turned:
            text = " ".join(word.text for word in turned)
            blocks.append(Block("text", text, number, place_of(frame, box_of(rows_of(turned)))))
        if quarters:
            blocks = [
                replace(block, place=turned_back(block.place, quarters))
                for block in blocks
                if block.place
            ]
        if by_ocr:
            blocks = [replace(block, ocr=True) for block in blocks]
        return [*blocks, *problems]

    def _figure(
        self, figure: Figure, page: pdfium.PdfPage, blocks: list[Block], number: int
    ) -> list[Block]:
        """A figure with its caption and what is read in it; a table where it is one's image."""
        frame = frame_of(page)
        words: list[Word] = []
        if self._engine is not None:
            words = read_words(page, self._engine, figure.box)
        elif number not in self._waiting:
            self._waiting.append(number)
        rows = rows_of(word for word in words if not word.turned)
        place = place_of(frame, figure.box)
        in_tables = sum(
            len(row.words) for table in tables_of(rows) for row in rows[table.first : table.end]
        )
        if 2 * in_tables > len(words):
            return [
                replace(block, ocr=True)
                for block in blocks_of(rows, self._style, frame, number, ())
            ]
        caption = figure.caption or (_heading_above(blocks, place) if words else "")
        lines = [caption, *(row.text for row in rows)]
        text = "\n".join(line for line in lines if line)
        return [Block("figure", text, number, place, bool(rows))] if text else []


def _heading_above(blocks: Sequence[Block], place: Place) -> str:
    """The nearest heading above a place on its page; "" where there is none."""
    above = [
        (block.place[3], block.text)
        for block in blocks
        if block.kind == "heading" and block.place and block.place[3] <= place[1]
    ]
    return max(above)[1] if above else ""


def _insert(blocks: list[Block], new: Block) -> None:
    """Put a block before the first one that begins below it in the same part of the page."""
    left, top, right, _ = new.place or (0.0, 0.0, 1.0, 1.0)
    for at, block in enumerate(blocks):
        place = block.place
        if place and place[1] >= top and place[0] < right and left < place[2]:
            blocks.insert(at, new)
            return
    blocks.append(new)


def _seen(page: pdfium.PdfPage) -> _Seen:
    try:
        frame = frame_of(page)
        return _Seen(page, words_of(page, frame), frame)
    except pdfium.PdfiumError:
        page.close()
        raise


def _named(pages: Sequence[int]) -> str:
    """``4``; ``4, 6 to 9``."""
    runs: list[list[int]] = []
    for page in pages:
        if runs and page == runs[-1][1] + 1:
            runs[-1][1] = page
        else:
            runs.append([page, page])
    parts = [f"{first}" if first == last else f"{first} to {last}" for first, last in runs[:20]]
    parts += [f"{len(runs) - 20} more ranges"] * (len(runs) > 20)
    return ", ".join(parts)
