"""Documents to passages: whole sentences or rows, within a budget of tokens.

No passage crosses a heading, or a table's edge: what stands above it (the heading, and the
header of a table) is read with it by the encoder and the words' index, and not quoted.

Sentence boundaries are found by sentencex (Wikimedia; rules and abbreviations by language,
MIT), which gives every character back: 20,000 random texts and megabytes of
dots, quotes and brackets came back whole, in linear time. A language that it doesn't know, or
that nobody does, is cut as English.
"""

from __future__ import annotations

import hashlib
import math
import re
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import sentencex

from daemon.library.readers.documents import Document, Kind, Place, Span

CountTokens = Callable[[str], int]

USUAL_LANGUAGE = "en"
_COUNTED_ANEW = 64  # times, of a text's characters; a passage of sentences needs some ten
_RULE = "sentences-2"  # change it when the same text would be cut elsewhere
_WORD_START = re.compile(r"(?<=\s)(?=\S)")
_NEAR = 1000  # characters from the middle, in which a word is looked for
_LONGEST_TOKEN = 32  # characters; words that are longer are many tokens, or one that says nothing
_LINE = re.compile(r"[^\n]+")
LONGEST_CONTEXT = 200  # characters of a heading, or of a row of a table's header, at most
_TITLED = 3  # rows of a table that may be its title, above the first with several cells
_LEVELS = 6  # headings that stand one below the other, at most, as in HTML


@dataclass(frozen=True)
class Piece:
    """A passage of a document: characters ``begin`` to ``end``, without it, of its text.

    ``context``: what stands above it and is not part of it. ``page`` and ``place``: of its
    beginning; 0 and None where there are no pages. ``ocr``: some of it, or of what stands above
    it, is from a picture.
    """

    text: str
    begin: int
    end: int
    kind: Kind = "text"
    page: int = 0
    place: Place | None = None
    context: str = ""
    ocr: bool = False


@dataclass(frozen=True)
class SentenceSplitter:
    """Cuts documents into passages of at most ``budget`` tokens.

    ``count_tokens`` says how many tokens the encoder makes of a text. A
    document that fits the budget is one passage; a longer one becomes passages
    of about equal length that end with a sentence; a sentence that is too long
    by itself is cut between words, a word that is too long between characters.
    """

    count_tokens: CountTokens
    budget: int

    def __post_init__(self) -> None:
        if self.budget < 1:
            raise ValueError(f"a passage needs at least 1 token, not {self.budget}")

    @property
    def name(self) -> str:
        """Rule, budget and usual language: with another name documents are split anew."""
        return f"{_RULE}/{self.budget}/{USUAL_LANGUAGE}"

    def __call__(self, document: Document, /) -> list[Piece]:
        """The document's passages, in reading order; none if it is blank."""
        text = document.text
        pieces: list[Piece] = []
        for kind, spans, headings in _sections(document):
            begin, end = spans[0].begin, spans[-1].end
            context = "\n".join(
                document.text[one.begin : one.end][:LONGEST_CONTEXT] for one in headings
            )
            budget = self._beside(context, self.budget)
            part = text[begin:end]
            if kind == "table":
                cut = self._rows(part, budget, context, document.language)
            else:
                cut = self._sentences(part, budget, context, document.language)
            for first, last, above in cut:
                piece = text[begin + first : begin + last]
                at = begin + first, begin + last
                page, place, ocr = _where(spans, *at)
                ocr |= any(heading.ocr for heading in headings)
                pieces.append(Piece(piece, *at, kind, page, place, above, ocr))
        return pieces

    def _beside(self, context: str, budget: int) -> int:
        """What is left of the budget; at least half of it, or a heading could take it all."""
        return max(1, budget // 2, budget - self.count_tokens(context))

    def _sentences(
        self, text: str, budget: int, context: str, language: str
    ) -> Iterator[tuple[int, int, str]]:
        for begin, end in split_ranges(text, budget, self.count_tokens, language):
            yield begin, end, context

    def _rows(
        self, table: str, budget: int, context: str, language: str
    ) -> Iterator[tuple[int, int, str]]:
        """Whole rows, as many as fit; all but the first passage have the header above them."""
        if self.count_tokens(table) <= budget:
            yield 0, len(table), context
            return
        rows = [match.span() for match in _LINE.finditer(table)]
        lines = [table[begin:end] for begin, end in rows[: _TITLED + 1]]
        header = "\n".join(row[:LONGEST_CONTEXT] for row in header_of(lines) or lines[:1])
        under = "\n".join(filter(None, (context, header)))
        room = self._beside(header, budget)

        def tokens(row: int) -> int:
            """At least one, or rows of nothing that is a token would never fill a passage."""
            return max(1, self.count_tokens(table[slice(*rows[row])]))

        first, above = 0, context
        while first < len(rows):
            last = first + 1
            begin, end = rows[first]
            size = tokens(first)
            while last < len(rows) and size + (more := tokens(last)) <= room:
                end = rows[last][1]
                size += more
                last += 1
            for a, b in split_ranges(table[begin:end], budget, self.count_tokens, language):
                yield begin + a, begin + b, above
            first, above = last, under


def header_of(rows: Sequence[str]) -> Sequence[str]:
    """The first rows of a table that say what its columns are: a title, and the row below it.

    None where the first rows are of one cell: it has no columns.
    """
    for number, row in enumerate(rows[: _TITLED + 1]):
        if "\t" in row:
            return rows[: number + 1]
    return ()


def _sections(document: Document) -> Iterator[tuple[Kind, list[Span], list[Span]]]:
    """What no passage crosses: pages, runs of text, tables and figures, each under its headings.

    On the next page a heading still stands above text that goes on, and above no table.
    """
    spans = document.spans or (Span("text", 0, len(document.text)),)
    if all(span.kind == "heading" for span in spans):
        yield "text", list(spans), []
        return
    above: list[Span] = []
    page = 0  # of what stands above
    run: list[Span] = []
    for before, span in zip((None, *spans), spans, strict=False):
        if run and (span.kind != "text" or span.page != run[-1].page):
            yield "text", run, above
            run = []
        if span.kind == "heading":
            if before is None or before.kind != "heading":
                above = []
            # No more than have levels: each passage below keeps them all.
            above = [*above, span][-_LEVELS:]
            page = span.page
        elif span.kind == "text":
            run.append(span)
        else:
            yield span.kind, [span], above if page == span.page else []
    if run:
        yield "text", run, above


def _where(spans: Sequence[Span], begin: int, end: int) -> tuple[int, Place | None, bool]:
    """The page on which a passage begins, what it covers there, and whether OCR read any of it."""
    first = bisect_right(spans, begin, key=lambda span: span.end)
    covered = spans[first : bisect_left(spans, end, key=lambda span: span.begin)]
    page, ocr = covered[0].page, any(span.ocr for span in covered)
    places = [span.place for span in covered if span.page == page and span.place is not None]
    if not places:
        return page, None, ocr
    left, top, right, bottom = zip(*places, strict=True)
    return page, (min(left), min(top), max(right), max(bottom)), ocr


def split_ranges(
    text: str, budget: int, count_tokens: CountTokens, language: str = ""
) -> list[tuple[int, int]]:
    """Where the passages of ``text`` begin and end, each of at most ``budget`` tokens.

    Only white space between passages is left out. (A single character that
    counts more than ``budget`` tokens is a passage all the same.)
    """
    whole = text.strip()
    if not whole:
        return []
    begin = len(text) - len(text.lstrip())
    count = _bounded(count_tokens, budget)
    if count(whole) <= budget:
        return [(begin, begin + len(whole))]
    pieces = [
        piece
        for sentence in sentencex.segment(language or USUAL_LANGUAGE, whole)
        for piece in _within(sentence, budget, count)
    ]
    ranges = []
    for group in _pack(pieces, [count(piece) for piece in pieces], budget, count):
        if passage := group.strip():
            first = begin + len(group) - len(group.lstrip())
            ranges.append((first, first + len(passage)))
        begin += len(group)
    return ranges


def _bounded(count_tokens: CountTokens, budget: int) -> CountTokens:
    """Takes a text for as many tokens as it must have, and counts none that is over the budget.

    To count a mebibyte takes seconds, and 250 of them in memory.
    """

    def count(text: str) -> int:
        least = math.ceil(len(text) / _LONGEST_TOKEN)
        return least if least > budget else max(least, count_tokens(text))

    return count


def sentences(text: str, language: str = "") -> list[str]:
    """The sentences of ``text`` in order, lines of a list apart, without white space around.

    ``language``: ISO 639-1; "" where it is not known.
    """
    parts = (part.strip() for part in sentencex.segment(language or USUAL_LANGUAGE, text))
    return [sentence for sentence in parts if sentence]


def passage_ids(document_id: str, texts: Sequence[str]) -> list[str]:
    """Stable ids: document, first 16 hex digits of the text's SHA-256, ordinal among equals.

    An edit elsewhere in the document leaves the ids of untouched passages alone.
    """
    seen: Counter[str] = Counter()
    ids = []
    for text in texts:
        digest = hashlib.sha256(text.encode()).hexdigest()[:16]
        ids.append(f"{document_id}@{digest}.{seen[digest]}")
        seen[digest] += 1
    return ids


def _within(text: str, budget: int, count_tokens: CountTokens) -> list[str]:
    """``text`` in pieces of at most ``budget`` tokens, halved at the word nearest its middle."""
    done: list[str] = []
    waiting = [text]
    while waiting:
        piece = waiting.pop()
        if len(piece) < 2 or count_tokens(piece) <= budget:
            done.append(piece)
            continue
        cut = _middle(piece)
        waiting += [piece[cut:], piece[:cut]]
    return done


def _middle(text: str) -> int:
    """Where the word nearest the middle starts; the middle itself when none is near."""
    half = len(text) // 2
    near = _WORD_START.finditer(text, max(0, half - _NEAR), half + _NEAR)
    return min((m.start() for m in near), key=lambda start: abs(start - half), default=half)


def _pack(
    pieces: Sequence[str], counts: Sequence[int], budget: int, count_tokens: CountTokens
) -> list[str]:
    """Consecutive pieces joined to passages of about equal length within the budget.

    A passage is closed when it has its share: filled to the brim, the last one
    would often be a lone sentence without its context.
    """
    total = sum(counts)
    share = total / -(-total // budget)
    groups: list[str] = []
    group, size = "", 0
    left = _COUNTED_ANEW * sum(map(len, pieces))  # characters
    for piece, count in zip(pieces, counts, strict=True):
        # Counts of parts may add up to less than the count of the whole, in a
        # tokeniser that doesn't start afresh at each word: so count the whole. Of a text that
        # is all short lines that would take minutes, of one without tokens for ever.
        full = size + count > budget
        if not full and left > 0:
            left -= len(group) + len(piece)
            full = count_tokens((group + piece).strip()) > budget
        if group and (full or size >= share):
            groups.append(group)
            group, size = "", 0
        group += piece
        size += count
    groups.append(group)
    return groups
