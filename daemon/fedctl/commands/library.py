"""fedctl ingest, ask and search: what goes into the site's library, and what comes out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from daemon.fedctl.terminal.connection import asked_status, connected, run, socket_path
from daemon.fedctl.terminal.options import collection_prefix, command, of_field
from daemon.fedctl.terminal.output import (
    CommandError,
    Exit,
    Session,
    also_in,
    as_plain,
    byte_count,
    counted,
    duration,
    in_line,
    plain_text,
    remarks,
    short,
    visible,
)
from daemon.fedctl.transfer.sending import Ingested, Naming, send
from daemon.library.files import SUFFIXES
from proto.notes import notes_of

if TYPE_CHECKING:
    from rich.console import Console

    from proto.control_pb2 import AskReply, Citation, FoundPassage, SearchReply, SearchRequest
    from proto.control_pb2_grpc import ControlAsyncStub

topic = typer.Typer()

_NEAREST = 3  # passages, shown where there is no answer
ASK_WITHIN_S = 120.0  # the first question after a start loads the encoder and the index
_EMPTY = "Nothing is ingested here yet: fedctl ingest FOLDER"
_ENDINGS_NAMED = 10  # of files that are passed over


# ---- in -------------------------------------------------------------------------


_ON_THE_WAY = (
    "done",
    "bytes_read",
    "bytes_total",
    "index_total",
    "index_built",
    "sources",
    "answered",
)  # what is no result


@topic.command("ingest")
@command
def ingest(
    session: Session,
    paths: Annotated[
        list[Path],
        typer.Argument(
            metavar="PATH...",
            help=f"Files ({', '.join(SUFFIXES)}) and folders of them, read with your own rights.",
        ),
    ],
    collection: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="Put NAME/ before the documents' ids, so that no two folders' are the same.",
        ),
    ] = "",
    replace: Annotated[
        bool, typer.Option("--replace", help="Also documents that came from other files.")
    ] = False,
    tags: Annotated[
        list[str] | None,
        typer.Option("--tag", metavar="TAG", help="Tag the documents; more than once for more."),
    ] = None,
    no_tags: Annotated[
        bool, typer.Option("--no-tags", help="Take away the tags that the documents have here.")
    ] = False,
) -> Exit:
    """Add documents and question-passage pairs to the site's library.

    Ingesting again reads the files again, with OCR where it is needed; what is unchanged is not
    embedded again, and a document that changed replaces its old passages. A file's document is
    called as the file, from the folder named here on, with --collection before it; the same name
    from elsewhere is refused, unless --replace says that it has moved.
    Tags are to search by. Documents get those of --tag and of their lines in a .jsonl file, and
    no others; where neither names any, they keep what they have.
    Files that cannot be read are listed at the end and everything else is ingested (exit code 3).
    Pages that only OCR can read wait, where no engine is installed, and are told once (3).
    A pair is of use once a document that it names is here; else it is named at the end (3).
    A path that is not there, and paths at which there is nothing to read, are exit code 2.
    """
    naming = Naming(collection_prefix(collection), replace, _tags(tags or [], no_tags))
    for path in paths:
        _look(path)
    ingested = Ingested()
    try:
        run(_ingest_with_bars(session, paths, naming, ingested))
    except KeyboardInterrupt:
        interrupted = CommandError("interrupted", exit_code=Exit.INTERRUPTED)
        raise _broken_off(interrupted, ingested) from None
    except CommandError as error:
        raise (_broken_off(error, ingested) if ingested.answered else error) from None
    read = ingested.documents_read or ingested.pairs_read
    if not (read or ingested.problems or ingested.waiting):
        raise CommandError(
            f"nothing was read: no files at {', '.join(map(str, paths))}",
            f"Name files ({', '.join(SUFFIXES)}) or folders of them; hidden ones are passed over",
            exit_code=Exit.USAGE,
        )
    plain = {name: value for name, value in vars(ingested).items() if name not in _ON_THE_WAY}
    session.result(plain, lambda console: _show(console, ingested))
    for problem in ingested.problems:
        session.note(f"{problem['became']}: {_problem_line(problem)}")
    if ingested.waiting:
        session.note(_waiting(ingested))
    return ingested.exit_code


def _tags(tags: list[str], none: bool) -> tuple[str, ...] | None:
    """Raises CommandError for what can't be tags, and for some beside --no-tags."""
    from daemon.library.readers.bounds import metadata_fault

    fault = metadata_fault("", "", "", tags)
    if tags and none:
        fault = "--tag and --no-tags say the opposite"
    if fault:
        raise CommandError(fault, "Give others, or none", exit_code=Exit.USAGE)
    return tuple(tags) if tags or none else None


def _look(path: Path) -> None:
    """Raises CommandError for a path that isn't there; the reader tells of all else."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        cause = f"{path} is not there; nothing was ingested"
        raise CommandError(cause, "Check the path", exit_code=Exit.USAGE) from None
    except OSError:
        return


def _broken_off(error: CommandError, ingested: Ingested) -> CommandError:
    """With what the daemon had told by then; it may have stored one batch more."""
    stored = ingested.documents_new + ingested.documents_changed
    what = f"{counted(stored, 'document')} {'is' if stored == 1 else 'are'}"
    again = "ngest the same paths again for the rest; what is there already is not embedded again"
    return CommandError(
        f"{error.cause}; {what} stored ({ingested.documents_new} new, {ingested.documents_changed} "
        "changed; perhaps also what was on its way), and the daemon embeds what is by itself",
        f"{error.remedy}; then i{again}" if error.remedy else f"I{again}",
        exit_code=error.exit_code,
    )


async def _ingest_with_bars(
    session: Session, paths: list[Path], naming: Naming, ingested: Ingested
) -> None:
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    bars = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[count]}"),
        TimeRemainingColumn(),
        console=session.notes,
        transient=True,
        disable=not session.notes.is_terminal,
    )
    reading = bars.add_task("read", total=None, count="")
    embedding = bars.add_task("passages embedded", total=None, count="")
    indexing = bars.add_task("passages indexed", total=None, count="", visible=False)

    async with connected(socket_path(session)) as daemon, remarks(session) as now_at:

        def watch(so_far: Ingested) -> None:
            done, total = so_far.bytes_read, so_far.bytes_total
            items = so_far.documents_read + so_far.pairs_read
            read = f"{byte_count(done)} of {byte_count(total)}: {items} documents and pairs"
            bars.update(reading, completed=done, total=total or None, count=read)
            done, total = so_far.passages_embedded, so_far.passages_total
            count = f"{done} of {total}" if total else ""
            bars.update(embedding, completed=done, total=total or None, count=count)
            now_at(f"passages embedded: {count}" if total else f"read: {read}")
            if done_of := so_far.index_total:
                count = f"{so_far.index_built} of {done_of}"
                bars.update(
                    indexing, completed=so_far.index_built, total=done_of, count=count, visible=True
                )
                now_at(f"passages indexed: {count}")

        with bars:
            await send(daemon, paths, watch, naming, ingested)
        here = await asked_status(daemon)
    ingested.site = here.site
    ingested.pairs_here = {
        "train": here.pairs_train,
        "valid": here.pairs_valid,
        "test": here.pairs_test,
    }


def _waiting(ingested: Ingested) -> str:
    """What waits for OCR: once, however many pages and files."""
    from daemon.library.readers.documents import INSTALL_OCR

    count, first = len(ingested.waiting), ingested.waiting[0]
    what = f"{counted(count, 'document')} {'has' if count == 1 else 'have'}"
    which = f"{in_line(first['document'])}: {in_line(first['pages'])}"
    return (
        f"{what} pages that wait for OCR ({'' if count == 1 else 'the first '}{which}): "
        f"{INSTALL_OCR}; `fedctl documents list --waiting` shows what is read again then"
    )


def _problem_line(problem: dict[str, Any]) -> str:
    place = problem["path"] or ""
    if problem["page"]:
        place += f", page {problem['page']}"
    if problem["line"]:
        place += f":{problem['line']}"
    return in_line(f"{place}: {problem['cause']}" if place else problem["cause"])


def _pairs(ingested: Ingested) -> str:
    """How many pairs there were, and which of them are of no use and why."""
    lost, again = ingested.pairs - ingested.pairs_usable, ingested.pairs_repeated
    said = counted(ingested.pairs, "pair")
    if again:
        said = (
            f"{counted(ingested.pairs + again, 'pair')} read, {ingested.pairs} kept ({again} "
            f"{'repeats' if again == 1 else 'repeat'} another's question and documents)"
        )
    if not lost:
        return said
    first = f"first: {visible(repr(ingested.unknown_document))}"
    if ingested.known_document:
        first += f"; is it {visible(repr(ingested.known_document))}?"
    return (
        f"{said}, of which {ingested.pairs_usable} can be used: "
        f"{lost} {'names' if lost == 1 else 'name'} documents that are not here ({first})"
    )


def _show(console: Console, ingested: Ingested) -> None:
    console.print(
        f"At site {ingested.site}: documents: {ingested.documents_new} new, "
        f"{ingested.documents_changed} changed, {ingested.documents_unchanged} unchanged; "
        f"{counted(ingested.passages_embedded, 'passage')} embedded (equal ones once); "
        f"{_pairs(ingested)}.",
        markup=False,
        soft_wrap=True,
    )
    if ingested.pairs:
        here = ", ".join(f"{count} {split}" for split, count in ingested.pairs_here.items())
        console.print(f"Pairs of use in the library now: {here}.")
    if ingested.originals:
        console.print(f"{counted(ingested.originals, 'file')} kept.")
    if ingested.other_kinds:
        console.print(plain_text(_other_kinds(ingested)), soft_wrap=True)
    if told := ingested.problems:
        # Files and lines: of one file several pages may be told.
        each = {(one["became"], one["path"] or one["cause"], one["line"]): 1 for one in told}
        kinds = Counter(became for became, *_ in each)
        console.print(f"{', '.join(f'{n} {kind}' for kind, n in kinds.items())}; see below.")


def _other_kinds(ingested: Ingested) -> str:
    one, endings = ingested.other_kinds == 1, ingested.other_endings
    named = [ending or "no ending" for ending in endings[:_ENDINGS_NAMED]]
    more = ["and others"] if len(endings) > _ENDINGS_NAMED else []
    return (
        f"{ingested.other_kinds} {'file of another kind' if one else 'files of other kinds'} "
        f"passed over ({', '.join(named + more)}); read are {', '.join(SUFFIXES)}."
    )


# ---- out ------------------------------------------------------------------------


@topic.command("ask")
@command
def ask(
    session: Session,
    question: Annotated[str, typer.Argument(help="In quotes.")],
    top_k: Annotated[
        int, of_field("AskRequest", "top_k", help="Passages to retrieve; 0: as configured.")
    ] = 0,
) -> None:
    """Answer a question from this site's documents, with citations."""
    reply, empty = run(_ask(session, question, top_k))
    session.result(
        {"question": question, **as_plain(reply), "notes": notes_of(reply)},
        lambda console: console.print(_EMPTY) if empty else show_answer(console, reply),
    )


async def _ask(session: Session, question: str, top_k: int) -> tuple[AskReply, bool]:
    async with connected(socket_path(session)) as daemon:
        reply = await put_question(daemon, question, top_k)
        return reply, not reply.passages and await _is_empty(daemon)


async def _is_empty(daemon: ControlAsyncStub) -> bool:
    """Whether nothing was ingested here, not even what waits for OCR."""
    here = await asked_status(daemon)
    return not here.documents and not here.documents_waiting


async def put_question(daemon: ControlAsyncStub, question: str, top_k: int = 0) -> AskReply:
    """Ask the daemon one question."""
    from proto.control_pb2 import AskRequest

    return await daemon.Ask(AskRequest(question=question, top_k=top_k), timeout=ASK_WITHIN_S)


def show_answer(console: Console, reply: AskReply) -> None:
    """The answer and, below it, what each of its marks stands for."""
    answer = reply.answer or "No passage here answers that."
    console.print(plain_text(answer), soft_wrap=True)
    if reply.citations:
        console.print()
    for citation in reply.citations:
        title = citation.title or citation.document_id
        where = visible(f"{title} ({citation.passage_id}{_page(citation)})").replace("\n", " ")
        said = _with_header(citation, answer)
        doubt = " (does not support all that cites it)" if citation.unsupported else ""
        line = f"[{citation.number}] {where}{doubt}: {said}"
        console.print(plain_text(line), soft_wrap=True)
        also_in(citation.copies, console)
    if reply.abstained and reply.passages:
        _show_nearest(console, reply)
    for note in notes_of(reply):
        console.print(plain_text(f"\n{in_line(note)}"), style="dim", soft_wrap=True)
    by = reply.generator_digest
    _show_retrieved(console, reply, f", written by generator {short(by.hex())}" if by else "")


def _page(of: Citation | FoundPassage) -> str:
    """Where in its document a passage is, behind the document's name; files need not have pages."""
    return f", page {of.page}" * bool(of.page) + ", read by OCR" * of.ocr


def _with_header(citation: Citation, answer: str) -> str:
    """What is cited; a row of a table behind its header, unless the answer says its columns."""
    header = citation.context.rpartition("\n")[2]
    if citation.kind != "table" or "\t" not in header:
        return citation.text
    columns = list(zip(header.split("\t"), citation.text.split("\t"), strict=False))[1:]
    if all(name.strip() in answer for name, cell in columns if cell):
        return citation.text
    return f"{header.strip()}: {citation.text}"


def _show_nearest(console: Console, reply: AskReply) -> None:
    """What there is instead of an answer, and how probable one was."""
    if reply.probability:
        console.print(f"That they do is taken to be {reply.probability:.0%} probable.")
    console.print("\nThe nearest passages:")
    for passage in reply.passages[:_NEAREST]:
        where = f"{passage.title or passage.document_id} ({passage.passage_id}{_page(passage)})"
        said = " ".join(passage.text.split())
        line = visible(f"  {where}: {said}").replace("\n", " ")
        console.print(plain_text(line), overflow="ellipsis", no_wrap=True)


def _show_retrieved(console: Console, reply: AskReply | SearchReply, more: str = "") -> None:
    console.print(
        plain_text(
            f"\n{counted(len(reply.passages), 'passage')} retrieved in {duration(reply.seconds)}, "
            f"model version {short(reply.model_digest.hex())}{more}"
        ),
        style="dim",
    )


@topic.command("search")
@command
def search(
    session: Session,
    question: Annotated[str, typer.Argument(help="In quotes.")],
    top_k: Annotated[
        int, of_field("SearchRequest", "top_k", help="Passages to retrieve; 0: as configured.")
    ] = 0,
    explain: Annotated[
        bool, typer.Option("--explain", help="Say how each passage came to its place.")
    ] = False,
    below: Annotated[
        str,
        typer.Option(
            "--below",
            metavar="BEGINNING",
            help="Only documents whose id begins so, as `manuals/` does.",
        ),
    ] = "",
    collection: Annotated[
        str, typer.Option(metavar="NAME", help="Only of this collection, as ingested.")
    ] = "",
    title: Annotated[
        str, typer.Option(metavar="WORDS", help="Only with all of these words in the title.")
    ] = "",
    author: Annotated[
        str, typer.Option(metavar="WORDS", help="Only with all of these words in the author.")
    ] = "",
    since: Annotated[
        str, typer.Option(metavar="DATE", help="Only of this day or later, as 2024-05-31.")
    ] = "",
    until: Annotated[str, typer.Option(metavar="DATE", help="Only of this day or earlier.")] = "",
    language: Annotated[
        str, typer.Option(metavar="CODE", help="Only in this language, as en or de.")
    ] = "",
    tags: Annotated[
        list[str] | None,
        typer.Option("--tag", metavar="TAG", help="Only with this tag; more than once for more."),
    ] = None,
) -> None:
    """Find passages for a question in this site's documents, without an answer.

    They are ranked as those that answers are made of. Of several that say nearly the same the best
    is shown, and where the others are. --explain shows each one's place by
    meaning (cosine, and the share of the question that its title has) and by words (BM25),
    what both add to its score, and the words that matched. Documents that are searched have all
    that the other options ask for; one that says no date, or author, is not among them.
    """
    from proto.control_pb2 import SearchRequest

    _check_days(since, until)
    asked = SearchRequest(
        begins=below,
        collection=collection,
        title=title,
        author=author,
        since=since,
        until=until,
        language=language.lower(),
        tags=tags,
    )
    among = "of the documents that are asked for" if asked.ByteSize() else "here"
    asked.MergeFrom(SearchRequest(question=question, top_k=top_k, explain=explain))
    reply, empty = run(_search(session, asked))
    session.result(
        {"question": question, **as_plain(reply)},
        lambda console: console.print(_EMPTY) if empty else _show_found(console, reply, among),
    )


def _check_days(since: str, until: str) -> None:
    """Raises CommandError for what is no day, and for days that no document can lie between."""
    for name, day in (("--since", since), ("--until", until)):
        try:
            sound = not day or date.fromisoformat(day).isoformat() == day
        except ValueError:
            sound = False
        if not sound:
            raise CommandError(
                f"{name} {day!r} is no day", "Write it as 2024-05-31", exit_code=Exit.USAGE
            )
    if since and until and since > until:
        raise CommandError(
            f"--since {since} is later than --until {until}",
            "Exchange them",
            exit_code=Exit.USAGE,
        )


async def _search(session: Session, request: SearchRequest) -> tuple[SearchReply, bool]:
    async with connected(socket_path(session)) as daemon:
        reply = await daemon.Search(request, timeout=ASK_WITHIN_S)
        return reply, not reply.passages and await _is_empty(daemon)


def _show_found(console: Console, reply: SearchReply, among: str) -> None:
    for number, passage in enumerate(reply.passages, start=1):
        title = visible(passage.title or passage.document_id).replace("\n", " ")
        head = f"{number}. {title} ({in_line(passage.document_id)}{_page(passage)})"
        console.print(plain_text(head), style="bold", soft_wrap=True)
        if passage.HasField("explanation"):
            for line in _explained(passage):
                console.print(plain_text(line), style="dim", soft_wrap=True)
        also_in(passage.copies, console)
        console.print(plain_text(f"{passage.text}\n"), soft_wrap=True)
    if not reply.passages:
        console.print(f"No passage {among} has to do with that.")
    if any(passage.HasField("explanation") for passage in reply.passages):
        chosen_on = f"chosen on {counted(reply.weighed_by, 'pair')} of split valid"
        console.print(
            f"To a cosine, words of which a passage has each once add some {reply.words_weight:g}, "
            f"and a title that has all of them adds {reply.title_weight:g} "
            f"({chosen_on if reply.weighed_by else 'the usual'})."
        )
    _show_retrieved(console, reply)


def _explained(passage: FoundPassage) -> Iterator[str]:
    """Lines that say how a passage came to its score."""
    why = passage.explanation
    yield (
        f"score {passage.score:.4f} = {why.cosine:.4f} cosine + {why.title_part:.4f} title "
        f"+ {why.words_part:.4f} words"
    )
    if why.indexed:
        yield f"meaning: {_in_place(why.meaning_place)}{_COSINE_OF.get(why.level, '')}"
    else:
        yield "meaning: not in the index yet; its place by words stands for it"
    yield f"title: {why.title_share:.2f} of the question{_quoted(why.title_words)}"
    share = f", share {why.words_share:.2f} (1: each word once)" if why.words_place else ""
    yield f"words: {_in_place(why.words_place)}{share}{_quoted(why.words)}"
    if why.place_before:
        yield f"cross-encoder: {why.cross_score:.4f}; place {why.place_before} before"


# What of a passage was compared; nothing is said of a whole one.
_COSINE_OF = {
    "sentence": " by its best sentence",
    "both": " by the mean of the whole and its best sentence",
}


def _in_place(place: int) -> str:
    return f"place {place}" if place else "not among the first"


def _quoted(words: Sequence[str]) -> str:
    return f" ({', '.join(words)})" if words else ""
