"""What goes into a library: documents, pairs, and what could not be read, each with its bounds."""

from __future__ import annotations

import re
from dataclasses import dataclass

MAX_TEXT_BYTES = 16 << 20  # of a line or a text file; what one control message may carry
MAX_ID, MAX_TITLE, MAX_QUERY_BYTES, MAX_POSITIVES = 512, 1000, 16 << 10, 1000
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
