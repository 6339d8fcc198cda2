"""Reads .txt and .md: a file is a document."""

from __future__ import annotations

import re
from collections.abc import Iterator

from daemon.library.readers import documents
from daemon.library.readers.documents import MAX_ID, MAX_TITLE, Document, Item
from daemon.library.readers.reader import Refused, Source, decoded, limited

_HEADING = re.compile(r"^ {0,3}#{1,6}[ \t]+(.+?)[ \t]*#*[ \t]*$", re.MULTILINE)


def read_text(source: Source) -> Iterator[Item]:
    """One document; its title is the first heading (.md) or the file's name."""
    path, name = source.path, source.name
    with source.open() as file:
        raw = file.read(documents.MAX_TEXT_BYTES + 1)
    if len(raw) > documents.MAX_TEXT_BYTES:
        raise Refused(
            f"longer than {documents.MAX_TEXT_BYTES >> 20} MiB: cut it into several files"
        )
    text = decoded(raw).strip()
    if not text:
        raise Refused("only white space: nothing to ingest")
    try:
        name.encode()
    except UnicodeEncodeError:
        raise Refused("the file's name is not UTF-8: rename it") from None
    heading = _HEADING.search(text) if path.suffix.lower() == ".md" else None
    title = heading.group(1) if heading else path.stem
    yield Document(limited("its path", name, MAX_ID), title[:MAX_TITLE], text)
