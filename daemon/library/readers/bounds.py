"""What a document or a pair may be: one rule, whoever tells it.

The box asks it of a reader, the daemon of `fedctl ingest` and of its watched folders.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import date
from typing import Final

from daemon.library.readers.documents import (
    KINDS,
    MAX_ANSWER_BYTES,
    MAX_ANSWERS,
    MAX_ID,
    MAX_LABEL,
    MAX_PAGE,
    MAX_POSITIVES,
    MAX_QUERY_BYTES,
    MAX_SOURCE,
    MAX_SPANS,
    MAX_TAG,
    MAX_TAGS,
    MAX_TEXT_BYTES,
    MAX_TITLE,
    Document,
    Pair,
    Reference,
    Span,
)

_DAY: Final = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}")
_LANGUAGE: Final = re.compile(r"[a-z]{2}")
_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")
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
    elif "\0" in item.id:
        fault = "its id has a NUL"
    elif len(item.source) > MAX_SOURCE:
        fault = "its source is too long"
    elif about := metadata_fault(item.author, item.date, item.language, item.tags or ()):
        fault = about
    elif len(item.spans) > MAX_SPANS:
        fault = f"more than {MAX_SPANS:,} spans: cut it"
    elif not in_order(item.spans, item.text):
        fault = "its spans don't lie in its text one after another, all of it in one of them"
    return f"document {item.id}: {fault}" if fault else ""


def in_order(spans: tuple[Span, ...], text: str) -> bool:
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


def metadata_fault(author: str, day: str, language: str, tags: Sequence[str]) -> str:
    """What of this no document may say, and what it may; "" where all is in order."""
    if len(author) > MAX_TITLE or author != on_one_line(author):
        return f"an author has up to {MAX_TITLE} characters, on one line"
    if day and not is_day(day):
        return "a date is a day, as 2024-05-31"
    if language and not is_language(language):
        return "a language has two small letters (ISO 639-1), as en"
    if len(tags) > MAX_TAGS:
        return f"a document has up to {MAX_TAGS} tags"
    if not all(1 <= len(tag) <= MAX_TAG and tag == on_one_line(tag) for tag in tags):
        return f"a tag has 1 to {MAX_TAG} characters, on one line"
    return ""


def on_one_line(text: str) -> str:
    """``text`` without control characters, each run of white space as one space."""
    return " ".join(_CONTROL.sub(" ", text).split())


def is_day(text: str) -> bool:
    """Whether it is a day of the calendar, as YYYY-MM-DD."""
    try:
        return bool(_DAY.fullmatch(text)) and bool(date.fromisoformat(text))
    except ValueError:
        return False


def is_language(text: str) -> bool:
    """Whether it has the form of ISO 639-1."""
    return bool(_LANGUAGE.fullmatch(text))


def _fault_of_pair(item: Pair) -> str:
    if not item.query.strip() or not 1 <= len(item.positives) <= MAX_POSITIVES:
        return f"a pair needs a query and 1 to {MAX_POSITIVES} positives"
    if len(item.query.encode()) > MAX_QUERY_BYTES:
        return f"a pair's query has up to {MAX_QUERY_BYTES} bytes"
    if max(map(len, item.positives)) > MAX_ID:
        return f"a pair's document id has up to {MAX_ID} characters"
    if item.split not in _SPLITS:
        return f"a pair's split {item.split!r} is not train, valid or test"
    fault = reference_fault(item.reference) if item.reference is not None else ""
    return f"a pair's {fault}" if fault else ""


def reference_fault(said: Reference) -> str:
    """What of a reference is none, and what it may be; "" where all is in order."""
    if len(said.answers) > MAX_ANSWERS:
        return f"'answers' are up to {MAX_ANSWERS} texts"
    if not all(answer.strip() for answer in said.answers):
        return "'answers' has a blank one: leave it out"
    if any(len(answer.encode()) > MAX_ANSWER_BYTES for answer in said.answers):
        return f"'answers' has one longer than {MAX_ANSWER_BYTES >> 10} KiB: shorten it"
    for key, label in (("qtype", said.qtype), ("reasoning", said.reasoning)):
        if len(label) > MAX_LABEL or label != on_one_line(label):
            return f"{key!r} has up to {MAX_LABEL} characters, on one line"
    return ""
