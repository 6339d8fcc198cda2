"""Running headers, footers and page numbers: lines that several pages have at the same place."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Sequence

from daemon.library.readers.pdf.words import Frame, Row, Word, rows_of

_MARGIN = 0.09  # of a page's height, above and below: where such lines stand
_SAME_PLACE = 5.0  # points
_MOST_LINES = 3  # at each edge
_MOST_KEYS, _MOST_PAGES = 5_000, 64  # remembered: lines of a file, pages of a line
_ENOUGH = 3  # pages; of a file with fewer than four, two

_DIGITS = re.compile(r"\d+")
_PAGE_NUMBER = re.compile(
    r"[-–—|\s]*(?:(?:page|seite|p\.|s\.)\s*)?(?:[A-Z]{1,2}\s*[-–.]?\s*)?"
    r"(?:\d{1,4}|[ivxl]{1,6})(?:\s*(?:of|von|/)\s*\d{1,4})?[-–—|\s]*",
    re.IGNORECASE,
)


class Running:
    """Learns from pages which lines run on, and takes them away."""

    def __init__(self, pages: int) -> None:
        self._enough = _ENOUGH if pages > 3 else 2
        self._seen = defaultdict[str, dict[int, float]](dict)
        self._offsets = Counter[int]()  # of the numbers printed on pages to those of the pages

    def learn(self, page: int, words: Sequence[Word], frame: Frame) -> None:
        """Remember the lines at a page's edges."""
        rows = rows_of(word for word in words if _in_margin(word, frame))
        for row in (*rows[:_MOST_LINES], *rows[-_MOST_LINES:]):
            key = _key(row)
            if key in self._seen or len(self._seen) < _MOST_KEYS:
                pages = self._seen[key]
                if len(pages) < _MOST_PAGES:
                    pages[page] = row.middle
        if all_rows := rows_of(words):
            ends = {all_rows[0].text, all_rows[-1].text}
            self._offsets.update(int(end) - page for end in ends if _is_short_number(end))

    def without(self, page: int, words: list[Word], frame: Frame) -> list[Word]:
        """A page's words without those of its running lines.

        From each edge inwards, up to the first line that does not run on: a table's head may
        well stand at one place on several pages.
        """
        rows = rows_of(words)
        gone = set[int]()
        for ordered in (rows, rows[::-1]):
            if ordered and self._is_counted(page, ordered[0].text):
                gone.update(map(id, ordered[0].words))
                continue
            for row, inner in zip(ordered[:_MOST_LINES], [*ordered[1:], None], strict=False):
                if not all(_in_margin(word, frame) for word in row.words):
                    break
                if not (self._runs(row) or _is_page_number(row, inner)):
                    break
                gone.update(map(id, row.words))
        return [word for word in words if id(word) not in gone]

    def _is_counted(self, page: int, text: str) -> bool:
        """Whether a page's first or last line is a number that counts pages, as on others."""
        return _is_short_number(text) and self._offsets[int(text) - page] >= _ENOUGH

    def _runs(self, row: Row) -> bool:
        places = self._seen.get(_key(row), {}).values()
        return sum(abs(y - row.middle) <= _SAME_PLACE for y in places) >= self._enough


def _is_short_number(text: str) -> bool:
    return text.isdecimal() and text.isascii() and len(text) <= 4


def _in_margin(word: Word, frame: Frame) -> bool:
    return not _MARGIN * frame.height < word.middle < (1 - _MARGIN) * frame.height


def _key(row: Row) -> str:
    """Its text, whatever the page's number in it is."""
    return _DIGITS.sub("#", row.text)[:200]


def _is_page_number(row: Row, inner: Row | None) -> bool:
    """Whether it is a number alone, and apart from what stands further in."""
    if not _PAGE_NUMBER.fullmatch(row.text):
        return False
    if inner is None:
        return True
    return max(inner.top - row.bottom, row.top - inner.bottom) > row.size / 2
