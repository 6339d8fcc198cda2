"""A page's words to blocks in reading order: columns, headings, paragraphs, lists and tables."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, reduce
from itertools import pairwise
from operator import or_

from daemon.library.readers.documents import Block, Kind, Place
from daemon.library.readers.pdf.tables import Rule, tables_of
from daemon.library.readers.pdf.words import Frame, Row, Word, rows_of

_BINS = 256  # across a page, to look for what is empty between two columns
_ONE_SIDE = 0.7  # of a region's width: what covers less leaves room for another column
_LEAST_ROWS, _LEAST_BESIDE = 4, 2  # of a column of text, and of the one that ends it on a last page
_GUTTER = 0.9  # em that are empty between two columns of text
_MOST_WORDS_SEEN = 50_000  # of a file, to tell a broken word from two joined by a hyphen
_MANY = 0.12  # of a file's lines
_SENTENCE = 5  # words, at least, that end with a full stop
_LARGER = 1.15  # times the body's size: a heading
_LONGEST_HEADING, _MOST_HEADING_ROWS = 200, 3
_CAPITALS, _IN_CAPITALS = 0.8, (2, 12)  # of a heading's letters; of how many words
_UNSURE = 0.35  # by which the sizes of a sentence's lines may differ, as a scan's are read

_ITEM = re.compile(r"(?:[•●▪◦‣■□–—*]|[-·]|\(?(?:[a-z]|[ivx]{1,4}|\d{1,2})[.)])\s", re.IGNORECASE)
_ENDS = re.compile(r"[.:;!?][\"”’)]*$")
_NUMBERS = re.compile(r"[\d$€£%(),.\-–—]+")


@dataclass
class Style:
    """What a file's running text looks like, learned from its pages; and the words it has."""

    sizes: Counter[float] = field(default_factory=Counter)  # letters of each size, in half points
    pitches: Counter[int] = field(default_factory=Counter)  # pairs of lines, in hundredths of em
    bold: int = 0  # letters
    words: set[str] = field(default_factory=set)

    def learn(self, words: Sequence[Word]) -> None:
        """Count a page in."""
        for word in words:
            self.sizes[round(word.size * 2) / 2] += len(word.text)
            self.bold += len(word.text) * word.bold
            if len(self.words) < _MOST_WORDS_SEEN:
                self.words.add(word.text.strip(".,;:()\"“”'’").lower())
        rows = rows_of(words)
        for above, below in pairwise(rows):
            self.pitches[5 * round(20 * (below.middle - above.middle) / below.size)] += 1

    @property
    def size(self) -> float:
        """That of most letters, in points; 0 where there are none."""
        return max(self.sizes, key=self.sizes.__getitem__, default=0.0)

    @property
    def pitch(self) -> float:
        """From one line to the next of a paragraph, in em: the closest that many lines have."""
        total = self.pitches.total()
        for pitch in range(90, 260, 5):
            near = sum(self.pitches[pitch + off] for off in (-5, 0, 5))
            if near > _MANY * total:
                return pitch / 100
        return 1.2

    @property
    def is_bold(self) -> bool:
        """Whether bold says nothing here, because most is bold."""
        return 2 * self.bold > self.sizes.total()

    def is_heading(self, rows: Sequence[Row], text: str) -> bool:
        """By its size, because it is bold and short, or in capitals.

        In a scan's line of capitals no letter reaches above or below the others, so that it
        looks smaller than the body.
        """
        if len(rows) > _MOST_HEADING_ROWS or len(text) > _LONGEST_HEADING:
            return False
        if not any(letter.isalpha() for letter in text) or _ITEM.match(text[:1] + " "):
            return False
        if text[-1] == "." and len(text.split()) >= _SENTENCE:
            return False  # of a scan sizes say little
        if text[-1] not in ".,;" and _is_in_capitals(text):
            return True
        size = min(row.size for row in rows)
        bold = not self.is_bold and all(row.bold for row in rows) and text[-1] not in ".,;"
        return size >= _LARGER * self.size or (bold and size > 0.9 * self.size)

    def mended(self, left: str, right: str) -> str:
        """Two lines as one: a word that was broken between them is put together again.

        Where its parts are words of their own, or the whole is known with its hyphen, the
        hyphen is the writer's and stays.
        """
        if left.endswith("\u00ad"):
            return left[:-1] + right
        if not (len(left) > 1 and left[-1] == "-" and left[-2].isalpha()):
            return f"{left} {right}"
        if not right[:1].islower():
            return left + right
        first = re.split(r"[\s(“\"]", left[:-1])[-1].lower()
        second = re.split(r"[\s.,;:)”\"]", right)[0].lower()
        compound = f"{first}-{second}" in self.words or (
            f"{first}{second}" not in self.words and {first, second} <= self.words
        )
        return left + right if compound else left[:-1] + right


def _is_in_capitals(text: str) -> bool:
    letters = [letter for letter in text if letter.isalpha()]
    few, many = _IN_CAPITALS
    return few <= len(text.split()) <= many and sum(map(str.isupper, letters)) >= _CAPITALS * len(
        letters
    )


def place_of(frame: Frame, box: tuple[float, ...]) -> Place:
    """A box in points as parts of its page."""
    x0, top, x1, bottom = box
    across, down = frame.width or 1.0, frame.height or 1.0
    parts = (x0 / across, top / down, x1 / across, bottom / down)
    left, above, right, below = (round(min(max(part, 0.0), 1.0), 4) for part in parts)
    return left, above, right, below


def box_of(rows: Iterable[Row]) -> tuple[float, float, float, float]:
    """Left, top, right and bottom of rows together."""
    found = list(rows)
    return (
        min(row.x0 for row in found),
        min(row.top for row in found),
        max(row.x1 for row in found),
        max(row.bottom for row in found),
    )


# ---- columns


def regions_of(words: Sequence[Word], width: float) -> list[list[Row]]:
    """Rows in reading order: column after column, where a page has several."""
    rows = rows_of(words)
    masks = [_covered(row, width) for row in rows]
    regions: list[list[Row]] = []
    begun = at = tried = 0  # where the plain rows begin; the rows of a band that had no columns
    while at < len(rows):
        end, gutter = _band(rows, masks, at, width)
        # A table's rows are a band as well: not tried again before much of it has gone by.
        if end - at < _LEAST_ROWS or (tried and end - at > 0.75 * tried):
            at += 1
            continue
        left, right = _sides(rows[at:end], gutter)
        if not (_is_text(left, _LEAST_ROWS) and _is_text(right, _LEAST_BESIDE)):
            tried = end - at
            at += 1
            continue
        while at > begun and not (masks[at - 1] >> int(gutter / width * _BINS)) & 1:
            if not (tried and _is_lettered(rows[at - 1])):
                break
            at -= 1
        left, right = _sides(rows[at:end], gutter)
        regions += [rows[begun:at]] if at > begun else []
        regions += regions_of(left, width) + regions_of(right, width)
        begun, at, tried = end, end, 0
    return [*regions, rows[begun:]] if begun < len(rows) else regions


def _sides(rows: Iterable[Row], gutter: float) -> tuple[list[Word], list[Word]]:
    """Words to the left and to the right of a gutter."""
    words = [word for row in rows for word in row.words]
    left = [word for word in words if word.x0 + word.x1 < 2 * gutter]
    return left, [word for word in words if word.x0 + word.x1 >= 2 * gutter]


def _is_lettered(row: Row) -> bool:
    """Whether most words of a row are none of a table's numbers."""
    numbers = sum(_NUMBERS.fullmatch(word.text) is not None for word in row.words)
    return numbers < 0.3 * len(row.words)


def _covered(row: Row, width: float) -> int:
    """A bit for each part of the page's width that a row's words, and spaces in them, cover."""
    mask = 0
    for part in row.parts(_GUTTER * _smallest(row) / row.size):
        first, last = (min(max(int(x / width * _BINS), 0), _BINS - 1) for x in (part.x0, part.x1))
        mask |= (1 << (last + 1)) - (1 << first)
    return mask


def _smallest(row: Row) -> float:
    """The size of its smallest type: a heading beside a column's line makes no gutter wider."""
    return min([word.size for word in row.words]) or 1.0


def _band(rows: Sequence[Row], masks: Sequence[int], first: int, width: float) -> tuple[int, float]:
    """As many rows as have one gap in common, from ``first`` on; its middle in points."""
    union, gutter, end = 0, 0.0, first
    whole = _span(reduce(or_, masks))
    while end < len(rows):
        union |= masks[end]
        needed = max(1, int(_GUTTER * _smallest(rows[end]) / width * _BINS) - 1)
        gap = _widest_gap(union)
        if gap is None or gap[1] - gap[0] < needed:
            if (
                not gutter and _span(union) < _ONE_SIDE * whole
            ):  # the other column begins further down
                end += 1
                continue
            break
        gutter = (gap[0] + gap[1]) / 2 / _BINS * width
        end += 1
    return end, gutter


def _span(mask: int) -> int:
    """From the first part that is covered to the last one."""
    return mask.bit_length() - (mask & -mask).bit_length() + 1


@lru_cache(maxsize=4096)
def _widest_gap(union: int) -> tuple[int, int] | None:
    """First and past-last bit of the widest run of zeros between ones, in the page's middle."""
    best: tuple[int, int] | None = None
    bits = f"{union:0{_BINS}b}"[::-1]
    for match in re.finditer(r"(?<=1)0+(?=1)", bits):
        middle = (match.start() + match.end()) / 2
        wide = match.end() - match.start()
        if 0.15 * _BINS < middle < 0.85 * _BINS and (best is None or wide > best[1] - best[0]):
            best = match.span()
    return best


def _is_text(words: Sequence[Word], least: int) -> bool:
    """Whether words are ``least`` lines of a text, as a column has them, and no table's cells."""
    rows = rows_of(words)
    if len(rows) < least:
        return False
    counts = sorted(len(row.words) for row in rows)
    wide = max(row.x1 for row in rows) - min(row.x0 for row in rows)
    widths = sorted(row.x1 - row.x0 for row in rows)
    numbers = sum(_NUMBERS.fullmatch(word.text) is not None for word in words)
    half = len(rows) // 2
    return counts[half] >= 3 and widths[half] > wide / 2 and numbers < 0.3 * len(words)


# ---- blocks


def blocks_of(
    region: Sequence[Row], style: Style, frame: Frame, page: int, rules: Sequence[Rule]
) -> Iterator[Block]:
    """A region's blocks from top to bottom."""
    at = 0
    for table in tables_of(region, rules):
        yield from _texts(region[at : table.first], style, frame, page)
        rows = region[table.first : table.end]
        yield Block("table", table.text, page, place_of(frame, box_of(rows)))
        at = table.end
    yield from _texts(region[at:], style, frame, page)


def _texts(rows: Sequence[Row], style: Style, frame: Frame, page: int) -> Iterator[Block]:
    """Paragraphs, lists and headings; a list is one block, with a line for each item."""
    waiting: list[tuple[Kind, str, list[Row]]] = []
    for part in _paragraphs(rows, style.pitch):
        text = part[0].text
        for row in part[1:]:
            text = style.mended(text, row.text)
        text = text.replace("\u00ad", "")
        kind: Kind = "heading" if style.is_heading(part, text) else "text"
        if waiting and _goes_on(waiting[-1], kind, text, part):
            _, before, above = waiting.pop()
            between = " " if kind == "heading" else "\n"
            text, part = f"{before}{between}{text}", [*above, *part]
        waiting.append((kind, text, part))
        while len(waiting) > 1:
            kind, text, part = waiting.pop(0)
            yield Block(kind, text, page, place_of(frame, box_of(part)))
    for kind, text, part in waiting:
        yield Block(kind, text, page, place_of(frame, box_of(part)))


def _goes_on(last: tuple[Kind, str, list[Row]], kind: Kind, text: str, rows: list[Row]) -> bool:
    """Whether a list's next item follows, or a heading's next line."""
    kind_before, before, above = last
    gap = rows[0].top - above[-1].bottom
    if kind == "text":
        items = _ITEM.match(text) and _ITEM.match(before)
        return bool(items) and kind_before == "text" and gap < 2.5 * rows[0].size
    return (
        kind_before == "heading"
        and gap < rows[0].size / 2
        and abs(rows[0].size - above[-1].size) < 0.05 * rows[0].size
        and len(above) < _MOST_HEADING_ROWS
    )


def _paragraphs(rows: Sequence[Row], pitch: float) -> Iterator[list[Row]]:
    if not rows:
        return
    right = max(row.x1 for row in rows)
    left = min(row.x0 for row in rows)
    part = [rows[0]]
    for row in rows[1:]:
        if _begins(part, row, pitch, (left, right)):
            yield part
            part = []
        part.append(row)
    yield part


def _begins(part: list[Row], row: Row, pitch: float, edges: tuple[float, float]) -> bool:
    """Whether a row begins a paragraph of its own behind those of ``part``."""
    last, size = part[-1], row.size
    left, right = edges
    if row.middle - last.middle > 1.3 * pitch * max(size, last.size):
        return True
    difference = abs(size - last.size) / max(size, last.size)
    in_a_sentence = row.text[:1].islower() and not _ENDS.search(last.text)
    if row.bold != last.bold or difference > (_UNSURE if in_a_sentence else 0.08):
        return True
    if _ITEM.match(row.text):
        return True
    short = last.x1 < right - 0.25 * (right - left)
    if short and _ENDS.search(last.text):
        return True
    is_item = _ITEM.match(part[0].text) is not None
    indented = row.x0 > min(one.x0 for one in part) + size
    full = last.x1 > right - 4 * size
    return indented and full and not is_item and row.x0 < left + 8 * size
