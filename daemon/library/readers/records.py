"""Reads .jsonl and .jsonl.gz: a line is a document or a question with its documents.

Nothing in a file can make the reader hold more than one line of it, and compressed ones
are counted as they expand.
"""

from __future__ import annotations

import gzip
import io
import json
import re
import zlib
from collections.abc import Iterator
from difflib import get_close_matches
from functools import cache
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, BinaryIO, cast

from daemon.library.readers import documents
from daemon.library.readers.bounds import in_order, metadata_fault, on_one_line, reference_fault
from daemon.library.readers.documents import (
    MAX_ANSWERS,
    MAX_ID,
    MAX_POSITIVES,
    MAX_QUERY_BYTES,
    MAX_TITLE,
    Document,
    FileProblem,
    Item,
    Pair,
    Reference,
    Span,
)
from daemon.library.readers.reader import STEP, Refused, Source, cause_of, decoded, limited

if TYPE_CHECKING:
    from pydantic import TypeAdapter

_MAX_PROBLEMS = 20  # told one by one for each file; the rest is counted
_PASSED_OVER = 4 << 30  # bytes of a line; what goes on any longer has no lines
_MAX_RATIO, _RATIO_FROM = 200, 1 << 30  # a file that expands further is an attack
_SPLITS = {
    "train": "train",
    "valid": "valid",
    "validation": "valid",
    "val": "valid",
    "dev": "valid",
    "test": "test",
}
_LABELS = ("qtype", "reasoning")
_OF_REFERENCES = ("answer", "answers", *_LABELS)
_PAIRS = "pairs_"  # how the names of files begin that say a split
_PAIRS_NAME = re.compile(r"(?:^|[_.-])(train|valid|validation|val|dev|test)(?:[_.-]|$)")


def read_lines(source: Source) -> Iterator[Item]:
    """Records of a .jsonl file."""
    with source.open() as file:
        yield from _read_records(source, _Lines(file))


def read_packed_lines(source: Source) -> Iterator[Item]:
    """Records of a .jsonl.gz file."""
    with source.open() as file, gzip.open(file) as packed:
        wide = io.BufferedReader(cast(io.RawIOBase, packed), STEP)
        yield from _read_records(source, _Lines(wide, packed_bytes=source.size))


class _Lines:
    """The lines of a file, one at a time, none held that is longer than the limit."""

    def __init__(self, file: BinaryIO, *, packed_bytes: int | None = None) -> None:
        self._file = file
        self._packed_bytes = packed_bytes
        self._read = 0
        self.number = 0  # of the line last returned

    def next(self) -> bytes | None:
        """The next line, None at the end; one that is too long is passed over and refused."""
        most = documents.MAX_LINE_BYTES
        line = self._take(most + 1)
        self.number += bool(line)
        if len(line) > most and not line.endswith(b"\n"):
            line = b""  # not needed while the rest goes by
            begun = self._read
            rest = self._take(STEP)  # held while it goes by
            while rest and not rest.endswith(b"\n"):
                if self._read - begun > _PASSED_OVER:
                    raise OSError(f"a line longer than {_PASSED_OVER >> 20} MiB: no file of lines")
                rest = self._take(STEP)
            raise Refused(f"longer than {most >> 20} MiB: cut it into several records")
        return line or None

    def _take(self, limit: int) -> bytes:
        line = self._file.readline(limit)
        self._read += len(line)
        packed = self._packed_bytes
        if packed is not None and self._read > max(_RATIO_FROM, _MAX_RATIO * packed):
            raise OSError(f"expands more than {_MAX_RATIO} times; pack it again from its source")
        return line


def _read_records(source: Source, lines: _Lines) -> Iterator[Item]:
    """Records of a .jsonl file; the first problems told one by one, the others counted."""
    path = str(source.path)
    try:
        split = _split_of_name(PurePosixPath(source.name).name)
    except Refused as refusal:
        yield FileProblem(path, str(refusal))
        return
    problems, records = 0, 0
    try:
        while True:
            try:
                line = lines.next()
                if line is None:
                    break
                item = _record(line, split, first=lines.number == 1)
            except Refused as refusal:
                problems += 1
                if problems <= _MAX_PROBLEMS:
                    yield FileProblem(path, str(refusal), lines.number)
                continue
            if item is not None:
                records += 1
                yield item
    except (OSError, EOFError, zlib.error) as error:
        yield FileProblem(path, f"{cause_of(error)} (read up to line {lines.number})")
        problems += 1
    if problems > _MAX_PROBLEMS:
        yield FileProblem(path, f"{problems - _MAX_PROBLEMS} more lines refused")
    if not problems and not records:
        yield FileProblem(path, "only blank lines: nothing to ingest")


def _record(line: bytes, split: str, *, first: bool) -> Document | Pair | None:
    text = decoded(line)
    if not first and text.startswith("\ufeff"):
        text = text[1:]
    if not text.strip():
        return None
    try:
        record = json.loads(text)
    except json.JSONDecodeError as error:
        raise Refused(f"broken JSON ({error.msg}, column {error.colno}): correct it") from None
    except (ValueError, RecursionError) as error:
        raise Refused(f"JSON that can't be read ({error}): correct it") from None
    if not isinstance(record, dict):
        raise Refused("expected a JSON object with 'id' and 'text', or with 'query'")
    if "query" in record:
        return _pair(record, split)
    if "text" in record:
        return _document(record)
    raise Refused("neither 'text' (a document) nor 'query' (a pair): add the key it lacks")


def _document(record: dict[str, object]) -> Document:
    split = _text(record, "split", optional=True).strip().lower()
    if split and split not in _SPLITS:
        raise Refused("'split' must be train, valid or test, or left out")
    title = limited("'title'", _text(record, "title", optional=True).strip(), MAX_TITLE)
    text = _text(record, "text")
    if len(text.encode()) > documents.MAX_TEXT_BYTES:
        most = documents.MAX_TEXT_BYTES >> 20
        raise Refused(f"'text' is longer than {most} MiB: cut it into several records")
    author, day, language = (
        _text(record, key, optional=True).strip() for key in ("author", "date", "language")
    )
    tags = _tags(record)
    if fault := metadata_fault(author, day, language, tags or ()):
        raise Refused(f"{fault}: correct it")
    return Document(
        id=limited("'id'", _text(record, "id"), MAX_ID),
        title=title,
        text=text,
        split=_SPLITS.get(split, ""),
        spans=_spans(record, text),
        author=author,
        date=day,
        language=language,
        tags=tags,
    )


def _tags(record: dict[str, object]) -> tuple[str, ...] | None:
    """None where the record says nothing of them; then they stay as they are."""
    tags = record.get("tags")
    if tags is None:
        return None
    if not isinstance(tags, list) or len(tags) > documents.MAX_TAGS:
        raise Refused(f"'tags' must be a list of up to {documents.MAX_TAGS} texts")
    return tuple(dict.fromkeys(_string("tags", tag) for tag in tags))


def _spans(record: dict[str, object], text: str) -> tuple[Span, ...]:
    """What the text is made of, as `fedctl documents export` writes it; none: it is all text."""
    if not (told := record.get("spans")):
        return ()
    if len(told) > documents.MAX_SPANS if isinstance(told, list) else told:
        raise Refused(f"'spans' must be a list of up to {documents.MAX_SPANS:,} blocks")
    from pydantic import ValidationError  # as in _checked

    try:
        spans = _checked().validate_python(told)
    except ValidationError as error:
        where = ".".join(map(str, error.errors()[0]["loc"]))
        raise Refused(f"'spans' has no block at {where}: leave 'spans' out") from None
    if not in_order(spans, text):
        raise Refused("'spans' don't lie in 'text' one after another: leave 'spans' out")
    return spans


@cache
def _checked() -> TypeAdapter[tuple[Span, ...]]:
    from pydantic import TypeAdapter  # not where fedctl prints its help

    return TypeAdapter(tuple[Span, ...])


def _pair(record: dict[str, object], split_of_file: str) -> Pair:
    split = _text(record, "split", optional=True).strip().lower() or split_of_file
    if split not in _SPLITS:
        raise Refused("'split' must be train, valid or test, or left out")
    query = _text(record, "query").strip()
    if len(query.encode()) > MAX_QUERY_BYTES:
        raise Refused(f"'query' is longer than {MAX_QUERY_BYTES >> 10} KiB: shorten it")
    positives = record.get("positives")
    if positives is None:
        if "doc_id" not in record:
            raise Refused("a pair needs 'positives' (document ids) or 'doc_id': add one")
        positives = [_text(record, "doc_id")]
    if not isinstance(positives, list) or not 0 < len(positives) <= MAX_POSITIVES:
        raise Refused(f"'positives' must be a list of 1 to {MAX_POSITIVES} document ids")
    ids = dict.fromkeys(limited("'positives'", _string("positives", x), MAX_ID) for x in positives)
    return Pair(query, tuple(ids), _SPLITS[split], _reference(record))


def _reference(record: dict[str, object]) -> Reference | None:
    """None where the record says nothing of it: then what is known stays as it is."""
    said = {key: record[key] for key in _OF_REFERENCES if record.get(key) is not None}
    if not said:
        return None
    answers = said.get("answers", [])
    if not isinstance(answers, list):
        raise Refused("'answers' must be a list of texts; one alone may be called 'answer'")
    answers = [said["answer"], *answers] if "answer" in said else answers
    texts = (_string("answers", answer).strip() for answer in answers[: MAX_ANSWERS + 2])
    qtype, reasoning = (on_one_line(_text(said, key, optional=True)) for key in _LABELS)
    reference = Reference(tuple(dict.fromkeys(texts)), qtype, reasoning)
    if fault := reference_fault(reference):
        raise Refused(fault)
    return reference


def _text(record: dict[str, object], key: str, *, optional: bool = False) -> str:
    """The text under ``key``; may be missing, null or blank only when ``optional``."""
    value = record.get(key)
    if value is None and optional:
        return ""
    if key not in record:
        raise Refused(f"no '{key}': add it")
    text = _string(key, value)
    if not optional and not text.strip():
        raise Refused(f"'{key}' is blank: fill it in or leave the line out")
    return text


def _string(key: str, value: object) -> str:
    if not isinstance(value, str):
        raise Refused(f"'{key}' must hold text in quotes, not {type(value).__name__}")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise Refused(f"'{key}' has half of a surrogate pair (\\ud800–\\udfff)") from None
    return value.replace("\0", " ")


def _split_of_name(name: str) -> str:
    """``pairs_test.jsonl`` is test; a name that says nothing is train.

    Raises Refused for one that begins as those of pairs do, and goes on with no split.
    """
    name = name.lower()
    if match := _PAIRS_NAME.search(name):
        return _SPLITS[match.group(1)]
    if name.startswith(_PAIRS):
        said = name.removeprefix(_PAIRS).partition(".")[0]
        near = (get_close_matches(word, _SPLITS, 1) for word in re.split(r"[_-]", said))
        meant = next((_SPLITS[found[0]] for found in near if found), "")
        example = f"{_PAIRS}{meant or f'train_{said}'}.jsonl"
        raise Refused(
            f"{said!r} in its name is not train, valid or test: "
            + (f"is it {meant}? Call it {example}" if meant else f"call it {example}, for one")
        )
    return "train"
