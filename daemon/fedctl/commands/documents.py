"""fedctl documents: what the site's library holds, and how it is taken out again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from daemon.fedctl.terminal.connection import connected, run, socket_path
from daemon.fedctl.terminal.options import Out, collection_prefix, command, of_field
from daemon.fedctl.terminal.output import (
    CommandError,
    Exit,
    Session,
    also_in,
    as_plain,
    byte_count,
    columns,
    confirm,
    counted,
    in_line,
    plain_text,
    remarks,
    visible,
    write_json,
)
from daemon.fedctl.transfer import originals
from daemon.fedctl.transfer.export import Exported, checked_place, opened, receive

if TYPE_CHECKING:
    from rich.console import Console

    from proto.control_pb2 import (
        FoldersReply,
        ListWaitingReply,
        RemoveDocumentsProgress,
        ShowDocumentReply,
        StoredDocument,
    )
    from proto.control_pb2_grpc import ControlAsyncStub

topic = typer.Typer(
    name="documents",
    help="What this site's library holds. It never leaves the site.",
    no_args_is_help=True,
)

# Behind a round that is being trained, or an evaluation.
ANSWERED_WITHIN_S = 600.0
_A_PAGE = 1000
_NAMED = 5  # ids in one line
_BESIDE = 8  # characters that a column beside them needs, with its margin
_ALIKE_TOLD = 5  # documents that stay and have what was removed
_A_REQUEST = 10_000  # ids (proto/control.proto)
_LETTER = ".eml"  # files of this kind alone have others in them
_LOOKED_UP = 20  # ids of which is said before a removal whether they are here

Below = Annotated[
    str,
    typer.Option(
        "--below", metavar="BEGINNING", help="Those whose id begins so, as `manuals/` does."
    ),
]

Collection = Annotated[
    str, typer.Option(metavar="NAME", help="Those of this collection, as ingested: --below NAME/.")
]

Document = Annotated[str, typer.Argument(metavar="ID", help="As listed.")]
Force = Annotated[bool, typer.Option("--force", help="Also where a file is already.")]


@topic.command("list")
@command
def documents_list(
    session: Session,
    below: Below = "",
    collection: Collection = "",
    waiting: Annotated[
        bool, typer.Option("--waiting", help="Those with pages that wait for OCR, and which.")
    ] = False,
) -> None:
    """List the documents by id, with what is known of them and the number of passages.

    --waiting: those with pages that only OCR can read, where no engine was installed, also scans
    of which nothing could be read. When there is one, fedd reads files of watched folders again
    by itself; the list says what is to be ingested again.
    """
    begins = _begins(below, collection, [], "to be listed")
    if waiting:
        waits = run(_waiting(session, begins))
        session.result(as_plain(waits), lambda console: _show_waiting(console, waits))
        return
    found = run(_listed(session, begins))
    plain = {"documents": [as_plain(one) for one in found]}
    session.result(plain, lambda console: _show_list(console, found, begins))


@topic.command("show")
@command
def documents_show(session: Session, document: Document) -> None:
    """Show a document as it is searched, where else it stands, and if its file is kept."""
    reply = run(_shown(session, document))
    session.result(as_plain(reply), lambda console: _show(console, reply))


@topic.command("folders")
@command
def documents_folders(session: Session) -> None:
    """Show the watched folders: files seen, waiting, not read with cause, and the last look."""
    reply = run(_folders(session))
    session.result(as_plain(reply), lambda console: _show_folders(console, reply))


@topic.command("export")
@command
def documents_export(
    session: Session,
    documents: Annotated[
        list[str] | None, typer.Argument(metavar="[ID]...", help="As listed; none: all.")
    ] = None,
    below: Below = "",
    collection: Collection = "",
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="A .jsonl or .jsonl.gz that only you may read."),
    ] = None,
    force: Force = False,
) -> Exit:
    """Write documents, what is known of them, and the pairs that name them, as JSON lines.

    `fedctl ingest` reads them: at an empty site they become the same documents and pairs. Without
    --out they go to standard output. FILE appears when it is whole, with --force in the place of
    one that was there. Of documents that an older fedd stored, headings are missing until they are
    ingested again. Files that are kept are not in it (`fedctl documents original`). Ids that no
    document has are told at the end (exit code 3; 2 if it is all of them).
    """
    begins = _begins(below, collection, documents or [], "to be exported")
    if session.json and out is None:
        raise CommandError(
            "--json is for what became of an export, and the documents are on the same output",
            "Name a file with --out",
            exit_code=Exit.USAGE,
        )
    place = None if out is None else checked_place(out, replace=force)
    try:
        exported = run(_exported(session, begins, documents or [], place, replace=force))
    except KeyboardInterrupt:
        left = "what is written is not all of it" if out is None else f"{out} is as it was before"
        raise CommandError(f"interrupted; {left}", exit_code=Exit.INTERRUPTED) from None
    told = (
        f"{counted(exported.documents, 'document')} and {counted(exported.pairs, 'pair')} exported"
    )
    told += f", {byte_count(exported.bytes)}" + (f", to {out}" if out else "")
    if session.json:
        write_json({name: told for name, told in vars(exported).items() if name != "total"})
    else:
        session.note(told)
    for unknown in exported.unknown:
        session.note(f"no document {visible(unknown)!r} here")
    return Exit.PARTLY if exported.unknown else Exit.OK


@topic.command("original")
@command
def documents_original(
    session: Session, document: Document, out: Out, force: Force = False
) -> None:
    """Write the file that a document was read from, byte by byte, where fedd keeps these.

    FILE, which only you may read, ends as the document's id does, and behind that in .txt where a
    program would run what is in it, as a browser does with HTML. It appears when it is whole and
    has the digest (SHA-256) under which it is kept. Files are kept by library.keep_originals.
    """
    from daemon.library.files import ending_of

    ending = ending_of(document)
    why = "a program would take it for something else, or run what is in it"
    place = originals.place_for(out, ending, why, replace=force)
    size = run(_original(session, document, place, replace=force))
    plain = {"id": document, "file": str(place), "bytes": size}
    session.result(plain, lambda console: _show_written(console, size, place))


@topic.command("page")
@command
def documents_page(
    session: Session,
    document: Document,
    page: Annotated[int, typer.Argument(min=1, help="From 1.")],
    out: Out,
    dpi: Annotated[
        int, of_field("PageImageRequest", "dpi", help="Pixels an inch; fewer of a huge page.")
    ] = 150,
    force: Force = False,
) -> None:
    """Draw a page of a PDF that fedd keeps, as FILE.png.

    It is drawn as files are read: by a process of its own with bounded memory and time, which can
    open no other file and has no network.
    """
    place = originals.place_for(out, ".png", "it is a PNG image", replace=force)
    size = run(_page_image(session, document, (page, dpi), place, replace=force))
    plain = {"id": document, "page": page, "dpi": dpi, "file": str(place), "bytes": size}
    session.result(plain, lambda console: _show_written(console, size, place))


@topic.command("remove")
@command
def documents_remove(
    session: Session,
    documents: Annotated[
        list[str] | None, typer.Argument(metavar="[ID]...", help="As listed.")
    ] = None,
    below: Below = "",
    collection: Collection = "",
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> Exit:
    """Take documents out: of the library, the index, answers, and every file of the daemon.

    With them go the pairs that name no other document here, what `fedctl pairs` has made of
    them, and their files, where these are kept and no other document was read from equal ones.
    Model versions that were trained on them stay as they are. Ids that no document has are told
    at the end (exit code 3; 2 if it is all of them).
    """
    named = list(dict.fromkeys(documents or []))
    begins = _begins(below, collection, named, "to be removed", all_of_them=False)
    ids = named or [one.id for one in run(_listed(session, begins))]
    if not ids:
        raise CommandError(
            f"no document's id begins with {begins!r}",
            "`fedctl documents list` shows them",
            exit_code=Exit.USAGE,
        )
    if not yes:
        confirm(
            session,
            f"{_to_be_removed(session, named, len(ids))} would be taken out, with the questions "
            "that only they answer; ingested again, documents come back and such questions do not",
            "Take them out?",
            "nothing was removed",
        )
    removed = run(_removed(session, ids))
    if not removed.documents and not removed.waiting:
        raise _none_here(removed.unknown)
    session.result(as_plain(removed), lambda console: _show_removed(console, removed))
    if removed.alike:
        first = ", ".join(map(visible, removed.alike[:_ALIKE_TOLD]))
        others = len(removed.alike) - _ALIKE_TOLD
        more = f" and {others} more" * (others > 0)
        session.note(f"the same, or nearly so, still stands in: {first}{more}")
    for one in [name for name in named if name.lower().endswith(_LETTER)][:_LOOKED_UP]:
        if inner := run(_listed(session, f"{one}/")):
            stays = _some([document.id for document in inner])
            session.note(f"what was in it stays: {stays}: `fedctl documents remove --below ID/`")
    for unknown in removed.unknown:
        session.note(f"no document {visible(unknown)!r} here")
    return Exit.PARTLY if removed.unknown else Exit.OK


def _begins(
    below: str, collection: str, ids: list[str], what: str, *, all_of_them: bool = True
) -> str:
    """How the ids begin that are meant; "" where ``ids`` names them, or all are.

    Raises CommandError where that is said twice, or not at all and all can't be meant.
    """
    said = bool(ids) + bool(below) + bool(collection)
    if said > 1 or not (said or all_of_them):
        raise CommandError(
            f"which documents are {what}?",
            "Name ids, the beginning of them with --below, or a --collection: one of these"
            + (", or none for all" if all_of_them else ""),
            exit_code=Exit.USAGE,
        )
    return below or collection_prefix(collection)


def _to_be_removed(session: Session, named: list[str], ids: int) -> str:
    """How many documents, and which of the few that are named are not here."""
    if not named or ids > _LOOKED_UP:
        most = "up to " if named and ids > 1 else ""
        return most + counted(ids, "document")
    unknown = run(_unknown(session, named))
    if len(unknown) == ids:
        raise _none_here(unknown)
    said = counted(ids - len(unknown), "document")
    return f"{said} ({_some(unknown)}: not here)" if unknown else said


def _none_here(ids: Sequence[str]) -> CommandError:
    return CommandError(
        f"no such document here: {_some(ids)}",
        "`fedctl documents list` shows them",
        exit_code=Exit.USAGE,
    )


def _some(ids: Sequence[str]) -> str:
    """The first of them by name."""
    more = [f"and {len(ids) - _NAMED} more"] if len(ids) > _NAMED else []
    return ", ".join([*map(in_line, ids[:_NAMED]), *more])


# ---- the daemon -------------------------------------------------------------------


async def _listed(session: Session, begins: str) -> list[StoredDocument]:
    async with connected(socket_path(session)) as daemon:
        return await _pages(daemon, begins)


async def _pages(daemon: ControlAsyncStub, begins: str) -> list[StoredDocument]:
    from proto.control_pb2 import ListDocumentsRequest

    found: list[StoredDocument] = []
    while True:
        after = found[-1].id if found else ""
        request = ListDocumentsRequest(begins=begins, after=after, limit=_A_PAGE)
        page = (await daemon.ListDocuments(request, timeout=ANSWERED_WITHIN_S)).documents
        found.extend(page)
        if len(page) < _A_PAGE:
            return found


async def _unknown(session: Session, ids: list[str]) -> list[str]:
    """Those that neither a document has nor one with pages that wait for OCR."""
    from proto.control_pb2 import ListDocumentsRequest, ListWaitingRequest

    unknown = []
    async with connected(socket_path(session)) as daemon:
        for one in ids:  # of all ids that begin so, the whole one is the first
            asked = ListDocumentsRequest(begins=one, limit=1)
            found = [*(await daemon.ListDocuments(asked, timeout=ANSWERED_WITHIN_S)).documents]
            if [document.id for document in found] != [one]:
                waits = ListWaitingRequest(begins=one, limit=1)
                waiting = (await daemon.ListWaiting(waits, timeout=ANSWERED_WITHIN_S)).documents
                if [document.id for document in waiting] != [one]:
                    unknown.append(one)
    return unknown


async def _waiting(session: Session, begins: str) -> ListWaitingReply:
    """All of it, page by page."""
    from proto.control_pb2 import ListWaitingReply, ListWaitingRequest

    whole = ListWaitingReply()
    async with connected(socket_path(session)) as daemon:
        while True:
            after = whole.documents[-1].id if whole.documents else ""
            request = ListWaitingRequest(begins=begins, after=after, limit=_A_PAGE)
            page = await daemon.ListWaiting(request, timeout=ANSWERED_WITHIN_S)
            whole.MergeFrom(page)
            if len(page.documents) < _A_PAGE:
                return whole


async def _shown(session: Session, document: str) -> ShowDocumentReply:
    from proto.control_pb2 import ShowDocumentRequest

    async with connected(socket_path(session)) as daemon:
        request = ShowDocumentRequest(id=document)
        whole = await daemon.ShowDocument(request, timeout=ANSWERED_WITHIN_S)
        while len(whole.passages) < whole.document.passages:
            request.after = len(whole.passages)
            page = await daemon.ShowDocument(request, timeout=ANSWERED_WITHIN_S)
            if not page.passages:  # it has changed meanwhile
                break
            whole.passages.extend(page.passages)
        return whole


async def _folders(session: Session) -> FoldersReply:
    from proto.control_pb2 import FoldersRequest

    async with connected(socket_path(session)) as daemon:
        return await daemon.Folders(FoldersRequest(), timeout=ANSWERED_WITHIN_S)


async def _original(session: Session, document: str, place: Path, *, replace: bool) -> int:
    from proto.control_pb2 import OriginalRequest

    async with connected(socket_path(session)) as daemon:
        parts = daemon.Original(OriginalRequest(id=document))
        return await originals.receive(parts, place, replace=replace)


async def _page_image(
    session: Session, document: str, drawn: tuple[int, int], place: Path, *, replace: bool
) -> int:
    from proto.control_pb2 import PageImageRequest

    page, dpi = drawn
    async with connected(socket_path(session)) as daemon, remarks(session, spinner=True) as now_at:
        now_at(f"drawing page {page}")
        parts = daemon.PageImage(PageImageRequest(id=document, page=page, dpi=dpi))
        return await originals.receive(parts, place, replace=replace)


async def _removed(session: Session, ids: list[str]) -> RemoveDocumentsProgress:
    """All of them, some thousands a request; what was removed by then stays so on Ctrl-C."""
    from proto.control_pb2 import RemoveDocumentsProgress, RemoveDocumentsRequest

    whole = RemoveDocumentsProgress()
    async with connected(socket_path(session)) as daemon, remarks(session, spinner=True) as now_at:
        for first in range(0, len(ids), _A_REQUEST):
            of = counted(len(ids), "document")
            now_at(f"removed {whole.documents} of {of}; waits for training, if any")
            last = RemoveDocumentsProgress()
            request = RemoveDocumentsRequest(ids=ids[first : first + _A_REQUEST])
            async for step in daemon.RemoveDocuments(request):
                last = step
                before = f"{step.embedded} of {step.to_embed} passages that came before embedded, "
                now_at((before if step.to_embed else "") + "making the index without them")
            whole.documents += last.documents
            whole.passages += last.passages
            whole.pairs += last.pairs
            whole.waiting += last.waiting
            whole.unknown.extend(last.unknown)
            whole.alike.extend(sorted({*last.alike} - {*whole.alike} - {*ids}))
            whole.done = last.done
    return whole


async def _exported(
    session: Session, begins: str, ids: list[str], place: Path | None, *, replace: bool
) -> Exported:
    from proto.control_pb2 import ExportDocumentsRequest

    request = ExportDocumentsRequest(begins=begins, ids=ids)
    async with connected(socket_path(session)) as daemon, remarks(session, spinner=True) as now_at:

        def watch(so_far: Exported) -> None:
            of = f" of {so_far.total}" if so_far.total else ""
            size = byte_count(so_far.bytes)
            now_at(f"{so_far.documents}{of} documents, {so_far.pairs} pairs, {size}")

        with opened(place, replace=replace) as write:
            exported = await receive(daemon, request, write, watch)
            if not exported.documents:  # and no empty file takes another's place
                raise CommandError(
                    "no such document here" if begins or ids else "no documents here",
                    "`fedctl documents list` shows them",
                    exit_code=Exit.USAGE,
                )
    return exported


# ---- for people -------------------------------------------------------------------


def _show_list(console: Console, found: list[StoredDocument], below: str) -> None:
    if not found:
        why = f"no document's id begins with {below!r}" if below else "no documents"
        remedy = "fedctl documents list shows all" if below else "ingest some (fedctl ingest)"
        console.print(plain_text(f"{why}: {remedy}"))
        return
    names = ("document", "title", "author", "date", "language", "tags", "split", ">passages")
    rows = [
        (
            in_line(one.id),
            in_line(one.title),
            in_line(one.author),
            one.date,
            one.language,
            in_line(", ".join(one.tags)),
            one.split or "train",
            str(one.passages),
        )
        for one in found
    ]
    told = [place for place, values in enumerate(zip(*rows, strict=True)) if any(values)]
    _show_rows(
        console, [names[place] for place in told], [[row[place] for place in told] for row in rows]
    )


def _show_rows(console: Console, names: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table that begins with ids; each above what is told of it, where it leaves no room.

    An id is what other commands take: it is whole, also where there is little room.
    """
    longest = max(len(row[0]) for row in rows)
    if longest + _BESIDE * (len(names) - 1) > console.width:
        for one, *others in rows:
            said = zip((name.lstrip(">") for name in names[1:]), others, strict=True)
            console.print(plain_text(one), soft_wrap=True)
            line = "; ".join(f"{name}: {value}" for name, value in said if value)
            console.print(plain_text(f"  {line}"), style="dim", soft_wrap=True)
        return
    table = columns(*names)
    table.columns[0].min_width = longest
    for row in rows:
        table.add_row(*map(plain_text, row))
    console.print(table)


def _show_waiting(console: Console, reply: ListWaitingReply) -> None:
    from daemon.library.readers.documents import INSTALL_OCR

    if not reply.documents:
        console.print("no document has pages that wait for OCR")
        return
    rows = list[tuple[str, str, str]]()
    for one in reply.documents:
        by_itself = "is read again by itself" if one.read_again else "ingest it again"
        then = f"OCR failed ({in_line(one.cause)}): {by_itself}" if one.cause else by_itself
        rows.append((in_line(one.id), in_line(one.pages), then))
    _show_rows(console, ("document", "pages", "then"), rows)
    remedy = "an engine is installed now" if reply.engine_here else INSTALL_OCR
    console.print(remedy[0].upper() + remedy[1:] + ".", soft_wrap=True)


def _show(console: Console, reply: ShowDocumentReply) -> None:
    about = reply.document
    console.print(plain_text(in_line(about.title or about.id)), style="bold", soft_wrap=True)
    split = about.split or "train"
    line = f"{in_line(about.id)}: {counted(about.passages, 'passage')}, split {split}"
    console.print(plain_text(line), style="dim", soft_wrap=True)
    if reply.waiting:
        waits = f"pages that wait for OCR: {in_line(reply.waiting)}"
        console.print(plain_text(waits), style="yellow", soft_wrap=True)
    if reply.original_bytes:
        kept = f"its file is kept: {byte_count(reply.original_bytes)}"
        console.print(plain_text(kept), style="dim", soft_wrap=True)
    for name, said in _known_of(about):
        console.print(plain_text(f"{name}: {in_line(said)}"), style="dim", soft_wrap=True)
    for passage in reply.passages:
        console.print()
        page = f"page {passage.page}" if passage.page else ""
        place = ", ".join(filter(None, (page, "read by OCR" * passage.ocr)))
        above = [part for part in (place, passage.context) if part]
        if above:
            console.print(plain_text(": ".join(above)), style="dim", soft_wrap=True)
        console.print(plain_text(passage.text), soft_wrap=True)
        also_in(passage.copies, console)


def _known_of(document: StoredDocument) -> Iterator[tuple[str, str]]:
    """What is known of a document beside its passages, each with its name."""
    yield from (
        (name, said)
        for name, said in (
            ("author", document.author),
            ("date", document.date),
            ("language", document.language),
            ("tags", ", ".join(document.tags)),
            ("from", document.source),
        )
        if said
    )


def _show_folders(console: Console, reply: FoldersReply) -> None:
    if not reply.folders:
        console.print("no folder is watched: name some in library.folders (fedd.example.toml)")
        return
    table = columns("folder", "path", ">files", ">to read", ">not all read", ">links", "last look")
    for one in reply.folders:
        at = datetime.fromtimestamp(one.looked_unix_ms / 1000, UTC)
        looked = f"{at:%Y-%m-%d %H:%M:%S} UTC" if one.looked_unix_ms else "none yet"
        table.add_row(
            plain_text(in_line(one.name)),
            plain_text(in_line(one.path)),
            str(one.files),
            str(one.waiting),
            str(one.refused),
            str(one.links),
            "under way" if one.reading else looked,
        )
    console.print(table)
    for one in reply.folders:
        if one.trouble:
            line = f"{in_line(one.name)}: {in_line(one.trouble)}"
            console.print(plain_text(line), style="yellow", soft_wrap=True)
        for file in one.not_read:
            line = f"{in_line(one.name)}/{in_line(file.path)}: {in_line(file.cause)}"
            console.print(plain_text(line), soft_wrap=True)
        if (more := one.refused - len(one.not_read)) > 0:
            console.print(f"and {more} more in {in_line(one.name)}", soft_wrap=True)


def _show_written(console: Console, size: int, place: Path) -> None:
    console.print(plain_text(f"{byte_count(size)} written to {place}"), soft_wrap=True)


def _show_removed(console: Console, removed: RemoveDocumentsProgress) -> None:
    console.print(
        plain_text(
            f"{counted(removed.documents, 'document')} removed, "
            f"{counted(removed.passages, 'passage')}, {counted(removed.pairs, 'pair')} "
            "that only they answered\n"
            "What a model version has learned of them stays in it. Backups, and what was ingested "
            "from, are yours to clear."
        ),
        soft_wrap=True,
    )
