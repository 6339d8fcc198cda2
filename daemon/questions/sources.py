"""Where a passage stands: what a person is shown of the document that an answer cites."""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Final

from daemon.library.catalogue.originals import OriginalFile
from daemon.library.contents import Passage, StoredDocument
from daemon.library.files import ending_of, reader_of
from daemon.library.store import Library
from proto import questions_pb2 as questions

_EACH_WAY: Final = 4  # passages before and behind the one that is asked for


def source_of(
    request: questions.SourceRequest,
    document: StoredDocument,
    passages: list[Passage],
    kept: OriginalFile | None,
) -> questions.SourceReply:
    """A document at one of its passages; at its beginning, where it has that one no more.

    ``passages``: all of the document's. ``kept``: its file. Where that lay when it was
    ingested is not told: it is a path on somebody's machine.
    """
    ids = [one.id for one in passages]
    at = ids.index(request.passage_id) if request.passage_id in ids else -1
    first = max(0, at - _EACH_WAY)
    shown = passages[first : max(at, 0) + _EACH_WAY + 1]
    reader = reader_of(PurePosixPath(document.id))
    return questions.SourceReply(
        title=document.title,
        author=document.author,
        date=document.date,
        language=document.language,
        tags=document.tags,
        passages=map(_message, shown),
        place=at - first + 1 if at >= 0 else 0,
        before=first,
        behind=len(passages) - first - len(shown),
        file_name=_file_name(document.id) if kept is not None else "",
        file_bytes=kept.size if kept is not None else 0,
        has_pages=kept is not None and reader is not None and reader.page is not None,
    )


def read_source(
    request: questions.SourceRequest, library: Library
) -> tuple[StoredDocument, list[Passage], OriginalFile | None] | None:
    """What `source_of` is made of; None: there is no such document."""
    found = library.documents(request.document_id, "", 1)
    if not found or found[0].id != request.document_id:
        return None
    passages = library.passages_of(request.document_id)
    return found[0], passages, library.original(request.document_id)


def _file_name(document_id: str) -> str:
    """As the document is called; what a browser would run where it lies gets an inert ending."""
    name, ending = PurePosixPath(document_id).name, ending_of(document_id)
    return name if name.lower().endswith(ending) else f"{name[: name.rindex('.')]}{ending}"


def _message(passage: Passage) -> questions.SourcePassage:
    return questions.SourcePassage(
        id=passage.id,
        text=passage.text,
        context=passage.context,
        kind=passage.kind,
        page=passage.page,
        rectangle=passage.place or (),
        ocr=passage.ocr,
    )
