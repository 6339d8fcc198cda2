"""What a reader is: one file to a stream of documents and pairs, and how it refuses."""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from daemon.library.readers.documents import Item

STEP = 1 << 20  # bytes read at a time


@dataclass(frozen=True)
class Source:
    """A regular file that is not empty; ``name``: its path below the folder that was given.

    ``watch`` hears of the bytes that are read, as they lie on the disk, as ``size`` is.
    """

    path: Path
    name: str
    size: int
    watch: Callable[[int], None] = lambda _: None

    def open(self) -> io.BufferedReader:
        """To read it from its beginning; raises OSError."""
        return io.BufferedReader(_Watched(self.path, self.watch), STEP)


class _Watched(io.FileIO):
    """A file that tells how much of it is read."""

    def __init__(self, path: Path, watch: Callable[[int], None]) -> None:
        super().__init__(path)
        self._watch = watch

    def readinto(self, buffer: Any) -> int:
        count = super().readinto(buffer) or 0  # None: it would block, and regular files don't
        self._watch(count)
        return count


@dataclass(frozen=True)
class Reader:
    """How files of a kind are read, never more than a document of them held at a time.

    ``read`` may raise `Refused`, OSError, EOFError and zlib.error: what it has yielded by then
    counts. ``named_by_file``: its documents' ids are their files' names.
    """

    read: Callable[[Source], Iterator[Item]]
    named_by_file: bool = False


class Refused(Exception):
    """A record or a file that is not taken; the message is the cause and the remedy."""


def decoded(raw: bytes) -> str:
    """The text of a file or a line. Raises Refused for what is no UTF-8."""
    if b"\0" in raw:
        raise Refused("binary, or text in UTF-16 (it has zero bytes): save it as UTF-8 text")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise Refused(f"not UTF-8 (at byte {error.start}): save it as UTF-8 text") from None


def limited(what: str, value: str, limit: int) -> str:
    """``value``; Refused when it has more characters than that."""
    if len(value) > limit:
        raise Refused(f"{what} is longer than {limit} characters: shorten it")
    return value


def cause_of(error: Exception) -> str:
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
