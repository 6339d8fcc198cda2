"""Documents to passages: whole sentences, within a budget of tokens.

Sentence boundaries are found by sentencex (Wikimedia; rules and abbreviations,
MIT), which gives every character back: 20,000 random texts and megabytes of
dots, quotes and brackets came back whole, in linear time.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import sentencex

from daemon.library.readers.documents import Document

CountTokens = Callable[[str], int]

_LANGUAGE = "en"
_RULE = "sentences-1"  # change it when the same text would be cut elsewhere
_WORD_START = re.compile(r"(?<=\s)(?=\S)")


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
        """Rule, budget and language: with another name documents are split anew."""
        return f"{_RULE}/{self.budget}/{_LANGUAGE}"

    def __call__(self, document: Document, /) -> list[str]:
        """The texts of the document's passages, in reading order; none if it is blank."""
        return split_text(document.text, self.budget, self.count_tokens)


def split_text(text: str, budget: int, count_tokens: CountTokens) -> list[str]:
    """Passages of ``text`` in order, each of at most ``budget`` tokens.

    Only white space between passages is left out. (A single character that
    counts more than ``budget`` tokens is a passage all the same.)
    """
    text = text.strip()
    if not text:
        return []
    if count_tokens(text) <= budget:
        return [text]
    pieces = [
        piece
        for sentence in sentencex.segment(_LANGUAGE, text)
        for piece in _within(sentence, budget, count_tokens)
    ]
    packed = _pack(pieces, [count_tokens(piece) for piece in pieces], budget, count_tokens)
    return [passage for passage in (group.strip() for group in packed) if passage]


def sentences(text: str) -> list[str]:
    """The sentences of ``text`` in order, lines of a list apart, without white space around."""
    parts = (sentence.strip() for sentence in sentencex.segment(_LANGUAGE, text))
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
    """Where the word nearest the middle starts; the middle itself when there is one word."""
    half = len(text) // 2
    starts = (match.start() for match in _WORD_START.finditer(text))
    return min(starts, key=lambda start: abs(start - half), default=half)


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
    for piece, count in zip(pieces, counts, strict=True):
        # Counts of parts may add up to less than the count of the whole, in a
        # tokeniser that doesn't start afresh at each word: so count the whole.
        full = size + count > budget or count_tokens((group + piece).strip()) > budget
        if group and (full or size >= share):
            groups.append(group)
            group, size = "", 0
        group += piece
        size += count
    groups.append(group)
    return groups
