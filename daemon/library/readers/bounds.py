"""What a document or a pair may be: one rule, whoever tells it.

The box asks it of a reader, the daemon of `fedctl ingest` and of its watched folders.
"""

from __future__ import annotations

import re
from typing import Final

from daemon.library.readers.documents import (
    KINDS,
    MAX_ID,
    MAX_PAGE,
    MAX_POSITIVES,
    MAX_QUERY_BYTES,
    MAX_SOURCE,
    MAX_SPANS,
    MAX_TEXT_BYTES,
    MAX_TITLE,
    Document,
    Pair,
    Span,
)

_DATE: Final = re.compile(r"(\d{4}-\d{2}-\d{2})?")
_LANGUAGE: Final = re.compile(r"([a-z]{2})?")
_SPLITS: Final = ("train", "valid", "test")


def fault_of(item: Document | Pair) -> str:
    """Why it can't be taken, in a line that names it; "" where it can."""
    return _fault_of_pair(item) if isinstance(item, Pair) else _fault_of_document(item)


def _fault_of_document(item: Document) -> str:
    if not 1 <= len(item.id) <= MAX_ID:
        return f"document id of {len(item.id)} characters: 1 to {MAX_ID} are allowed"
    fault = ""
    if item.split not in ("", *_SPLITS):
        fault = f"split {item.split!r} is not train, valid or test"
    elif len(item.title) > MAX_TITLE or len(item.text.encode()) > MAX_TEXT_BYTES:
        fault = f"a title has up to {MAX_TITLE} characters, a text {MAX_TEXT_BYTES} bytes"
    elif len(item.source) > MAX_SOURCE or len(item.author) > MAX_TITLE:
        fault = "its source or author is too long"
    elif not _DATE.fullmatch(item.date) or not _LANGUAGE.fullmatch(item.language):
        fault = "no date YYYY-MM-DD, or no language of two letters"
    elif len(item.spans) > MAX_SPANS:
        fault = f"more than {MAX_SPANS:,} spans: cut it"
    elif not _covered(item.text, item.spans):
        fault = "its spans don't lie in its text one after another, all of it in one of them"
    return f"document {item.id}: {fault}" if fault else ""


def _covered(text: str, spans: tuple[Span, ...]) -> bool:
    """Whether blocks follow one another in a text, with nothing but white space between them."""
    before = 0
    for span in spans:
        at = span.place
        on_page = at is None or (len(at) == 4 and all(0.0 <= part <= 1.0 for part in at))
        in_text = before <= span.begin < span.end <= len(text)
        if not on_page or not in_text or span.kind not in KINDS or not 0 <= span.page <= MAX_PAGE:
            return False
        if text[before : span.begin].strip():
            return False
        before = span.end
    return not spans or not text[before:].strip()


def _fault_of_pair(item: Pair) -> str:
    if not item.query.strip() or not 1 <= len(item.positives) <= MAX_POSITIVES:
        return f"a pair needs a query and 1 to {MAX_POSITIVES} positives"
    if len(item.query.encode()) > MAX_QUERY_BYTES:
        return f"a pair's query has up to {MAX_QUERY_BYTES} bytes"
    if max(map(len, item.positives)) > MAX_ID:
        return f"a pair's document id has up to {MAX_ID} characters"
    if item.split not in _SPLITS:
        return f"a pair's split {item.split!r} is not train, valid or test"
    return ""
