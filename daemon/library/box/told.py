"""What a reader tells of its file, and whoever listens takes for a stranger's word.

Messages go through a pipe as `Connection` sends them: a letter that says what it is, and JSON or
bytes. A document is two of them, its text and what is said of it: so what has to be parsed is
small, and of a list that is wrong throughout one mistake is told, not each.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cache
from multiprocessing.connection import Connection
from typing import Any, Final

from pydantic import TypeAdapter, ValidationError
from pydantic_core import SchemaValidator

from daemon.library.readers import documents
from daemon.library.readers.bounds import fault_of
from daemon.library.readers.documents import Document, FileProblem, Pair

MESSAGE_BYTES: Final = 6 * documents.MAX_TEXT_BYTES  # of what is attached, at most
_JSON_BYTES: Final = 24 << 20  # where the blocks of a text lie
REQUEST_BYTES: Final = 64 << 10  # to read or draw a file
PIPE_BYTES: Final = 1 << 20
SIZE: Final = struct.Struct("!i")  # before each message
LONGEST_CAUSE: Final = 1000  # characters

TEXT: Final = b"T"  # of the document that the next message says the rest of
DOCUMENT: Final = b"D"
PAIR: Final = b"P"
PROBLEM: Final = b"F"
READ: Final = b"B"  # so many bytes
ATTACHED: Final = b"A"  # the name of what is attached; its content is the next message
NO_PAGE: Final = b"N"  # the one to be drawn is not there; how many are
OVER: Final = b"O"
IMAGE: Final = b"I"  # and its bytes
PNG: Final = b"\x89PNG\r\n\x1a\n"  # how one begins (PNG, 5.2)

_KINDS: Final[dict[bytes, TypeAdapter[Any]]] = {
    DOCUMENT: TypeAdapter(Document),
    PAIR: TypeAdapter(Pair),
    PROBLEM: TypeAdapter(FileProblem),
    READ: TypeAdapter(int),
    ATTACHED: TypeAdapter(str),
    NO_PAGE: TypeAdapter(int),
}


class Senseless(Exception):
    """A message is none that a reader of ours would send."""


@dataclass(frozen=True)
class Limits:
    """What the reader of a file may take."""

    memory_bytes: int = 1 << 30  # of data
    pause_s: float = 120.0  # from one block, or image that is read, to the next
    file_s: float = 1800.0  # all of it
    attached: int = 100  # files in it, and in these
    depth: int = 3  # files in files in files
    records: int = 1_000_000  # documents and pairs, with those of files in it
    text_bytes: int = 1 << 30  # of these; a packed file can hold 200 times its size


def tell(told: Connection, kind: bytes, item: Any) -> None:
    """Send what is told. Raises BrokenPipeError where nobody listens any more."""
    if isinstance(item, Document):
        told.send_bytes(TEXT + item.text.encode())
        item = replace(item, text="")
    told.send_bytes(kind + _KINDS[kind].dump_json(item))


def heard(kind: bytes, content: bytes) -> Any:
    """What a message says. Raises Senseless."""
    if len(content) > _JSON_BYTES:
        raise Senseless
    try:
        return _checked()[kind].validate_json(content)
    except (KeyError, ValidationError):
        raise Senseless from None


def heard_document(text: bytes, kind: bytes, content: bytes) -> Document:
    """The document that a text and the message behind it say. Raises Senseless."""
    if kind != DOCUMENT:
        raise Senseless
    document: Document = heard(kind, content)
    try:
        return replace(document, text=text.decode())
    except UnicodeDecodeError:
        raise Senseless from None


def makes_sense(item: object) -> bool:
    """Whether it is within the bounds of what may be told."""
    if isinstance(item, Document | Pair):
        return not fault_of(item)
    if isinstance(item, int):
        return 0 <= item < 1 << 62
    if isinstance(item, FileProblem):
        in_bounds = len(item.cause) <= LONGEST_CAUSE
        return in_bounds and len(item.pages) <= documents.MAX_PAGES_NAMED
    return True


@cache
def _checked() -> dict[bytes, SchemaValidator]:
    """By kind. A million mistakes in a list would be told by a gigabyte: they end at the first."""
    checked = {}
    for kind, adapter in _KINDS.items():
        schema = deepcopy(adapter.core_schema)
        for node in _nodes(schema):
            if node.get("type") in ("tuple", "list"):
                node["fail_fast"] = True
        checked[kind] = SchemaValidator(schema)
    return checked


def _nodes(schema: Any) -> Iterator[dict[str, Any]]:
    if isinstance(schema, dict):
        yield schema
    for inner in schema.values() if isinstance(schema, dict) else schema:
        if isinstance(inner, dict | list | tuple):
            yield from _nodes(inner)
