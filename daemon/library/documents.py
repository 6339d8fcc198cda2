"""Files to documents and question pairs, with the rights of the person who asks.

Reads .txt, .md, .jsonl and .jsonl.gz, and folders of them. What can't be read
is reported and everything else still comes: a problem is an item of the stream,
not an exception. Nothing in a file can make the reader hold more than one
document of it: lines and files have a limit, and compressed ones are counted
as they expand.
"""

from __future__ import annotations

import gzip
import io
import json
import re
import stat
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

MAX_TEXT_BYTES = 16 << 20  # of a line or a text file; what one control message may carry
MAX_ID, MAX_TITLE, MAX_QUERY_BYTES, MAX_POSITIVES = 512, 1000, 16 << 10, 1000
TEXT_ENDINGS = (".txt", ".md")
SUFFIXES = (*TEXT_ENDINGS, ".jsonl", ".jsonl.gz")

_MAX_PROBLEMS = 20  # told one by one for each file; the rest is counted
_STEP = 1 << 20  # bytes read at a time, and held while a line that is too long goes by
_MAX_RATIO, _RATIO_FROM = 200, 1 << 30  # a file that expands further is an attack
_SPLITS = {
    "train": "train",
    "valid": "valid",
    "validation": "valid",
    "val": "valid",
    "dev": "valid",
    "test": "test",
}
_PAIRS_NAME = re.compile(r"(?:^|[_.-])(train|valid|validation|val|dev|test)(?:[_.-]|$)")
_HEADING = re.compile(r"^ {0,3}#{1,6}[ \t]+(.+?)[ \t]*#*[ \t]*$", re.MULTILINE)
_PART = re.compile(r"#\d+\Z")
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")


@dataclass(frozen=True)
class Document:
    """One text of a site; ``split`` is "" or train, valid, test: what may be learned from."""

    id: str
    title: str
    text: str
    split: str = ""


@dataclass(frozen=True)
class Pair:
    """A question and the ids of the documents that answer it."""

    query: str
    positives: tuple[str, ...]
    split: str = "train"


def answer_of(document_id: str) -> str:
    """The answer a document is part of: ``x`` for ``x#3``, itself without such an ending."""
    return _PART.sub("", document_id)


@dataclass(frozen=True)
class FileProblem:
    """What was not read, why, and what to do; ``line`` counts from 1."""

    path: str
    cause: str
    line: int | None = None

    def __str__(self) -> str:
        where = self.path if self.line is None else f"{self.path}, line {self.line}"
        # A file's name is not ours: it must not break the line or paint the terminal.
        return _CONTROL.sub("?", f"{where}: {self.cause}".encode(errors="replace").decode())


Item = Document | Pair | FileProblem


class _RefusedError(Exception):
    """A record or a file that is not taken; the message is the cause and the remedy."""


def read(path: Path) -> Iterator[Item]:
    """All documents and pairs at ``path``, a file or a folder, in the order of names.

    Hidden files are passed over. A text file's id is its path below the given
    folder; its title the first heading (.md) or the file's name.
    """
    try:
        is_folder = stat.S_ISDIR(path.stat().st_mode)
    except OSError as error:
        yield FileProblem(str(path), _cause(error))
        return
    if is_folder:
        yield from _read_folder(path, path, frozenset())
    else:
        yield from _read_file(path, path.name)


def _read_folder(folder: Path, root: Path, above: frozenset[tuple[int, int]]) -> Iterator[Item]:
    """Read a folder; ``above`` are those it lies in, so that a link to one of them ends there."""
    try:
        status = folder.stat()
        entries = sorted(folder.iterdir())
    except OSError as error:
        yield FileProblem(str(folder), _cause(error))
        return
    key = (status.st_dev, status.st_ino)
    if key in above:
        yield FileProblem(str(folder), "a link to a folder above it: not read again")
        return
    for entry in entries:
        if entry.name.startswith("."):
            continue
        try:
            is_folder = stat.S_ISDIR(entry.stat().st_mode)
        except OSError as error:
            yield FileProblem(str(entry), _cause(error))
            continue
        if is_folder:
            yield from _read_folder(entry, root, above | {key})
        else:
            yield from _read_file(entry, entry.relative_to(root).as_posix())


def _read_file(path: Path, name: str) -> Iterator[Item]:
    """Read one file; whatever goes wrong in it is its own problem."""
    try:
        size = _checked_size(path)
        suffixes = path.name.lower()
        if suffixes.endswith(TEXT_ENDINGS):
            yield _read_text(path, name)
        elif suffixes.endswith(".gz"):
            with gzip.open(path) as packed:
                wide = io.BufferedReader(cast(io.RawIOBase, packed), _STEP)
                yield from _read_records(path, _Lines(wide, packed_bytes=size))
        else:
            with path.open("rb", buffering=_STEP) as file:
                yield from _read_records(path, _Lines(file))
    except _RefusedError as refusal:
        yield FileProblem(str(path), str(refusal))
    except (OSError, EOFError, zlib.error) as error:
        yield FileProblem(str(path), _cause(error))


def _checked_size(path: Path) -> int:
    """Bytes of a file that may be opened; _RefusedError for any other."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):  # opening a pipe or device might never end
        raise _RefusedError("not a regular file: give a file or a folder")
    if not path.name.lower().endswith(SUFFIXES):
        raise _RefusedError(f"not a kind of file that is read ({', '.join(SUFFIXES)}): skipped")
    if status.st_size == 0:
        raise _RefusedError("empty file: nothing to ingest")
    return status.st_size


# ---- text and markdown -------------------------------------------------------------


def _read_text(path: Path, name: str) -> Document:
    with path.open("rb") as file:
        raw = file.read(MAX_TEXT_BYTES + 1)
    if len(raw) > MAX_TEXT_BYTES:
        raise _RefusedError(f"longer than {MAX_TEXT_BYTES >> 20} MiB: cut it into several files")
    text = _decode(raw).strip()
    if not text:
        raise _RefusedError("only white space: nothing to ingest")
    try:
        name.encode()
    except UnicodeEncodeError:
        raise _RefusedError("the file's name is not UTF-8: rename it") from None
    heading = _HEADING.search(text) if path.suffix.lower() == ".md" else None
    title = heading.group(1) if heading else path.stem
    return Document(_limited("its path", name, MAX_ID), title[:MAX_TITLE], text)


def _decode(raw: bytes) -> str:
    if b"\0" in raw:
        raise _RefusedError("binary, or text in UTF-16 (it has zero bytes): save it as UTF-8 text")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise _RefusedError(f"not UTF-8 (at byte {error.start}): save it as UTF-8 text") from None


# ---- JSON lines ---------------------------------------------------------------------


class _Lines:
    """The lines of a file, one at a time, none held that is longer than the limit."""

    def __init__(self, file: BinaryIO, *, packed_bytes: int | None = None) -> None:
        self._file = file
        self._packed_bytes = packed_bytes
        self._read = 0
        self.number = 0  # of the line last returned

    def next(self) -> bytes | None:
        """The next line, None at the end; one that is too long is passed over and refused."""
        line = self._take(MAX_TEXT_BYTES + 1)
        self.number += bool(line)
        if len(line) > MAX_TEXT_BYTES and not line.endswith(b"\n"):
            line = b""  # not needed while the rest goes by
            rest = self._take(_STEP)
            while rest and not rest.endswith(b"\n"):
                rest = self._take(_STEP)
            raise _RefusedError(
                f"longer than {MAX_TEXT_BYTES >> 20} MiB: cut it into several records"
            )
        return line or None

    def _take(self, limit: int) -> bytes:
        line = self._file.readline(limit)
        self._read += len(line)
        packed = self._packed_bytes
        if packed is not None and self._read > max(_RATIO_FROM, _MAX_RATIO * packed):
            raise OSError(f"expands more than {_MAX_RATIO} times; pack it again from its source")
        return line


def _read_records(path: Path, lines: _Lines) -> Iterator[Item]:
    """Records of a .jsonl file; the first problems told one by one, the others counted."""
    split = _split_of_name(path.name)
    problems, records = 0, 0
    try:
        while True:
            try:
                line = lines.next()
                if line is None:
                    break
                item = _record(line, split, first=lines.number == 1)
            except _RefusedError as refusal:
                problems += 1
                if problems <= _MAX_PROBLEMS:
                    yield FileProblem(str(path), str(refusal), lines.number)
                continue
            if item is not None:
                records += 1
                yield item
    except (OSError, EOFError, zlib.error) as error:
        yield FileProblem(str(path), f"{_cause(error)} (read up to line {lines.number})")
        problems += 1
    if problems > _MAX_PROBLEMS:
        yield FileProblem(str(path), f"{problems - _MAX_PROBLEMS} more lines refused")
    if not problems and not records:
        yield FileProblem(str(path), "only blank lines: nothing to ingest")


def _record(line: bytes, split: str, *, first: bool) -> Document | Pair | None:
    text = _decode(line)
    if not first and text.startswith("\ufeff"):
        text = text[1:]
    if not text.strip():
        return None
    try:
        record = json.loads(text)
    except json.JSONDecodeError as error:
        raise _RefusedError(
            f"broken JSON ({error.msg}, column {error.colno}): correct it"
        ) from None
    except (ValueError, RecursionError) as error:
        raise _RefusedError(f"JSON that can't be read ({error}): correct it") from None
    if not isinstance(record, dict):
        raise _RefusedError("expected a JSON object with 'id' and 'text', or with 'query'")
    if "query" in record:
        return _pair(record, split)
    if "text" in record:
        return _document(record)
    raise _RefusedError("neither 'text' (a document) nor 'query' (a pair): add the key it lacks")


def _document(record: dict[str, object]) -> Document:
    split = _text(record, "split", optional=True).strip().lower()
    if split and split not in _SPLITS:
        raise _RefusedError("'split' must be train, valid or test, or left out")
    title = _limited("'title'", _text(record, "title", optional=True).strip(), MAX_TITLE)
    return Document(
        id=_limited("'id'", _text(record, "id"), MAX_ID),
        title=title,
        text=_text(record, "text"),
        split=_SPLITS.get(split, ""),
    )


def _pair(record: dict[str, object], split_of_file: str) -> Pair:
    split = _text(record, "split", optional=True).strip().lower() or split_of_file
    if split not in _SPLITS:
        raise _RefusedError("'split' must be train, valid or test, or left out")
    query = _text(record, "query").strip()
    if len(query.encode()) > MAX_QUERY_BYTES:
        raise _RefusedError(f"'query' is longer than {MAX_QUERY_BYTES >> 10} KiB: shorten it")
    positives = record.get("positives")
    if positives is None:
        if "doc_id" not in record:
            raise _RefusedError("a pair needs 'positives' (document ids) or 'doc_id': add one")
        positives = [_text(record, "doc_id")]
    if not isinstance(positives, list) or not 0 < len(positives) <= MAX_POSITIVES:
        raise _RefusedError(f"'positives' must be a list of 1 to {MAX_POSITIVES} document ids")
    ids = dict.fromkeys(_limited("'positives'", _string("positives", x), MAX_ID) for x in positives)
    return Pair(query, tuple(ids), _SPLITS[split])


def _text(record: dict[str, object], key: str, *, optional: bool = False) -> str:
    """The text under ``key``; may be missing, null or blank only when ``optional``."""
    value = record.get(key)
    if value is None and optional:
        return ""
    if key not in record:
        raise _RefusedError(f"no '{key}': add it")
    text = _string(key, value)
    if not optional and not text.strip():
        raise _RefusedError(f"'{key}' is blank: fill it in or leave the line out")
    return text


def _string(key: str, value: object) -> str:
    if not isinstance(value, str):
        raise _RefusedError(f"'{key}' must hold text in quotes, not {type(value).__name__}")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise _RefusedError(f"'{key}' has half of a surrogate pair (\\ud800–\\udfff)") from None
    return value.replace("\0", " ")


def _limited(what: str, value: str, limit: int) -> str:
    if len(value) > limit:
        raise _RefusedError(f"{what} is longer than {limit} characters: shorten it")
    return value


def _split_of_name(name: str) -> str:
    """``pairs_test.jsonl`` is test; a name that says nothing is train."""
    found = _PAIRS_NAME.search(name.lower())
    return _SPLITS[found.group(1)] if found else "train"


def _cause(error: Exception) -> str:
    """One line for what the system said, with what to do."""
    rules: list[tuple[type[Exception], str]] = [
        (FileNotFoundError, "not there (any more): check the path"),
        (PermissionError, "permission denied: run fedctl as someone who may read it"),
        (gzip.BadGzipFile, "not a gzip file: pack it again or drop the .gz"),
        (EOFError, "cut short: copy or pack it again"),
        (zlib.error, "damaged: copy or pack it again"),
    ]
    for kind, text in rules:
        if isinstance(error, kind):
            return text
    return getattr(error, "strerror", None) or str(error)
