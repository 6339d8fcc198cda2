"""From what fedd replies to what a page shows: sentences marked, tables with cells, links. PURE."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any
from urllib.parse import urlencode

from proto.control_pb2 import AskReply, Citation, FoundPassage
from proto.questions_pb2 import SourcePassage, UploadsReply

Mark = tuple[int, int]
"""First character of what is marked, and the first behind it."""


@dataclass(frozen=True)
class Run:
    """A piece of text; ``number``: of the citation that it is the mark of, 0 for none."""

    text: str
    marked: bool = False
    number: int = 0


@dataclass(frozen=True)
class Row:
    """A row of a table."""

    cells: list[str]
    marked: bool = False


@dataclass(frozen=True)
class ShownText:
    """A passage as it is drawn: what stands above it, then running text or a table."""

    above: list[str]
    header: list[list[str]]
    rows: list[Row]
    runs: list[Run]


@dataclass(frozen=True)
class ShownPassage:
    """A passage with where it stands. ``number``: of the citation, 0 for none.

    ``link``: to its source; "": the token is not for that. ``also``: where nearly the same is.
    """

    number: int
    document_id: str
    passage_id: str
    title: str
    page: int
    kind: str
    text: ShownText
    link: str
    also: list[str]
    unsupported: bool = False
    ocr: bool = False


@dataclass(frozen=True)
class ShownUpload:
    """A file that somebody brought; ``state``: in words."""

    document_id: str
    size: str
    came: str
    state: str
    cause: str
    link: str  # "": it is not to be found yet
    refused: bool


@dataclass(frozen=True)
class ShownUploads:
    """What may be brought, and what was. ``collections``: into which; none: any."""

    collections: Sequence[str]
    most: str  # "": nothing
    most_bytes: int
    endings: Sequence[str]
    brought: Sequence[ShownUpload]
    under_way: bool


_STATES = {
    "waiting": "waits to be read",
    "reading": "is being read",
    "stored": "is read, and can be found in a moment",
    "searchable": "can be found",
    "unchanged": "is here already, word for word",
    "refused": "was not taken",
}


def uploads(reply: UploadsReply, *, linked: bool) -> ShownUploads:
    """Files that somebody brought, the newest first. ``linked``: they may see where it stands."""
    return ShownUploads(
        collections=reply.collections,
        most=_size(reply.most_bytes) if reply.most_bytes else "",
        most_bytes=reply.most_bytes,
        endings=reply.endings,
        brought=[
            ShownUpload(
                document_id=one.document_id,
                size=_size(one.bytes),
                came=datetime.fromtimestamp(one.unix_s, UTC).strftime("%Y-%m-%d %H:%M UTC"),
                state=_STATES.get(one.state, one.state),
                cause=one.cause,
                link=source_link(one.document_id)
                if linked and one.state in ("searchable", "unchanged")
                else "",
                refused=one.state == "refused",
            )
            for one in reply.uploads
        ],
        under_way=any(one.state in ("waiting", "reading", "stored") for one in reply.uploads),
    )


def _size(count: int) -> str:
    """Bytes as people read them."""
    if count < 1 << 20:
        return f"{max(1, count >> 10)} KiB"
    return f"{count / (1 << 20):.1f} MiB".replace(".0 ", " ")


def answer_runs(reply: AskReply, marks: Iterable[Mark]) -> list[Run]:
    """The answer, cut at its [n]; ``marks``: where these stand."""
    runs, at = list[Run](), 0
    for begin, end in marks:
        # A mark hangs on the word before it, as in print.
        runs.append(Run(reply.answer[at:begin].rstrip(" ")))
        runs.append(Run("", number=int(reply.answer[begin + 1 : end - 1])))
        at = end
    return [run for run in (*runs, Run(reply.answer[at:])) if run.text or run.number]


def cited(reply: AskReply, *, linked: bool) -> list[ShownPassage]:
    """The citations by number, each as its passage with the sentence marked.

    Without the passage, which a token of scope search gets, the sentence alone.
    """
    passages = {one.passage_id: one for one in reply.passages}
    return [_cited(one, passages.get(one.passage_id), linked=linked) for one in reply.citations]


def _cited(citation: Citation, passage: Citation | None, *, linked: bool) -> ShownPassage:
    whole = citation if passage is None else passage
    mark = None if passage is None else place_of(citation.text, passage.text)
    return _shown(whole, mark, linked=linked, number=citation.number, doubted=citation.unsupported)


def retrieved(reply: AskReply, *, linked: bool) -> list[ShownPassage]:
    """What the answer was made of, best first."""
    return [_shown(one, None, linked=linked) for one in reply.passages]


def found(passages: Iterable[FoundPassage]) -> list[ShownPassage]:
    """What a search found, best first."""
    return [_shown(one, None, linked=True) for one in passages]


def _shown(
    one: Citation | FoundPassage,
    mark: Mark | None,
    *,
    linked: bool,
    number: int = 0,
    doubted: bool = False,
) -> ShownPassage:
    return ShownPassage(
        number=number,
        document_id=one.document_id,
        passage_id=one.passage_id,
        title=one.title or one.document_id,
        page=one.page,
        kind=one.kind,
        text=shown_text(one.text, one.context, one.kind, mark),
        link=source_link(one.document_id, one.passage_id, mark) if linked else "",
        also=list(dict.fromkeys(copy.document_id for copy in one.copies.first)),
        unsupported=doubted,
        ocr=one.ocr,
    )


def source_link(document_id: str, passage_id: str = "", mark: Mark | None = None) -> str:
    """Where a passage is shown in its document. What was asked is in no address."""
    told: dict[str, Any] = {"document": document_id}
    if passage_id:
        told["passage"] = passage_id
    if mark is not None:
        told["from"], told["to"] = mark
    return f"/source?{urlencode(told)}{'#here' if passage_id else ''}"


def shown_text(text: str, context: str, kind: str, mark: Mark | None) -> ShownText:
    """A passage as it is drawn; a table by rows and cells."""
    above = context.splitlines()
    if kind != "table":
        return ShownText(above, [], [], _runs(text, mark))
    rows, at = [], 0
    for line in text.splitlines(keepends=True):
        begin, at = at, at + len(line)
        marked = mark is not None and mark[0] < at and begin < mark[1]
        rows.append(Row(line.rstrip("\r\n").split("\t"), marked))
    header = [line.split("\t") for line in above if "\t" in line]
    return ShownText([line for line in above if "\t" not in line], header, rows, [])


def _runs(text: str, mark: Mark | None) -> list[Run]:
    begin, end = mark or (0, 0)
    parts = (Run(text[:begin]), Run(text[begin:end], marked=True), Run(text[end:]))
    return [run for run in parts if run.text]


def place_of(part: str, text: str) -> Mark | None:
    """Where a sentence stands in its passage, however its spaces and lines are broken there."""
    words = part.split()
    place = re.search(r"\s+".join(map(re.escape, words)), text) if words else None
    return None if place is None else place.span()


def mark_in(text: str, begin: int, end: int) -> Mark | None:
    """What an address says is marked, if that is a piece of this text."""
    return (begin, end) if 0 <= begin < end <= len(text) else None


def rectangle_of(passage: SourcePassage) -> Sequence[float] | None:
    """x, y, width and height of its place on the page, as parts of it; None: it is not known."""
    sides = passage.rectangle
    if len(sides) != 4 or not all(0 <= side <= 1 for side in sides):
        return None
    left, top, right, bottom = sides
    return (left, top, right - left, bottom - top) if left < right and top < bottom else None
