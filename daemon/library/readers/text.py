"""Reads .txt and .md: a file is a document."""

from __future__ import annotations

import re
from collections.abc import Iterator

from daemon.library.readers import documents
from daemon.library.readers.documents import About, Block, Read
from daemon.library.readers.reader import Refused, Source, decoded

_HEADING = re.compile(r"^ {0,3}#{1,6}[ \t]+(.+?)[ \t]*#*[ \t]*$", re.MULTILINE)


def read_plain(source: Source) -> Iterator[Read]:
    """Text."""
    yield Block("text", _text(source))


def read_markdown(source: Source) -> Iterator[Read]:
    """Text whose first heading is its title."""
    text = _text(source)
    heading = _HEADING.search(text)
    if heading:
        yield About(heading.group(1))
    yield Block("text", text)


def _text(source: Source) -> str:
    with source.open() as file:
        raw = file.read(documents.MAX_TEXT_BYTES + 1)
    if len(raw) > documents.MAX_TEXT_BYTES:
        raise Refused(
            f"longer than {documents.MAX_TEXT_BYTES >> 20} MiB: cut it into several files"
        )
    text = decoded(raw).strip()
    if not text:
        raise Refused("only white space: nothing to ingest")
    return text
