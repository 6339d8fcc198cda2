"""fedctl audit: who did what at this site, and is the log of it whole? What do embeddings tell?

The log is read from its files, so a daemon is not needed, and whoever verifies does not
have to believe one. Only `head` asks the daemon, unless it is told where the files are,
and `acknowledge`, which writes into the log, and `embeddings`, which attacks what the
daemon answers with.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from daemon.fedctl.terminal.connection import (
    ANSWER_WITHIN_S,
    asked_status,
    connected,
    run,
    settings_of,
    socket_path,
)
from daemon.fedctl.terminal.options import command, of_field
from daemon.fedctl.terminal.output import (
    CommandError,
    Exit,
    Session,
    as_plain,
    columns,
    confirm,
    duration,
    in_line,
    plain_text,
    short,
    visible,
    write_json,
)

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table

    from daemon.state.audit_format import BreakRecord, Chain, Head
    from proto.control_pb2 import (
        AuditBreak,
        AuditEmbeddingsRequest,
        EmbeddingsAudit,
        RecoveredShare,
        RecoveredText,
        TextsExposure,
    )

topic = typer.Typer(
    name="audit", help="The audit log: is it whole? And what could embeddings tell?"
)

_StateDir = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        help="The daemon's state_dir, or a copy of it: the log's files are read, and neither "
        "--socket nor HANSE_SOCKET names any.",
        show_default="the one of the settings (--config), else /var/lib/hanse",
    ),
]
_Files = Annotated[
    list[Path] | None,
    typer.Argument(metavar="[FILE]...", help="Segments of a log, in the place of --state-dir."),
]
_DEFAULT_STATE = Path("/var/lib/hanse")
_NAME_IT = "Name the daemon's folder (--state-dir) or settings (--config)"


@topic.callback()
@command
def audit(_session: Session) -> None:
    """The audit log: who did what here, and is it whole? And what could embeddings tell?"""


@topic.command("head")
@command
def head(session: Session, state_dir: _StateDir = None) -> None:
    """Show the last entry's number and hash: note them elsewhere, to verify against."""
    if state_dir is None:
        seq, digest = run(_head(session))
    else:
        paths = _segments(session, state_dir, None)
        chain = _verified(paths, _beside(paths))
        seq, digest = chain.seq, chain.head
    plain = {"entries": seq, "head": digest.hex()}
    session.result(plain, lambda console: console.print(f"{seq} {digest.hex()}"))


async def _head(session: Session) -> tuple[int, bytes]:
    from proto.control_pb2 import StatusRequest

    async with connected(socket_path(session)) as daemon:
        reply = await daemon.Status(StatusRequest(), timeout=ANSWER_WITHIN_S)
        return reply.audit_entries, reply.audit_head


@topic.command("verify")
@command
def verify(
    session: Session,
    files: _Files = None,
    state_dir: _StateDir = None,
    head: Annotated[
        str, typer.Option(metavar="HASH", help="A head that was noted: it must be in the log.")
    ] = "",
) -> Exit:
    """Verify every entry: none altered, removed, inserted or moved; with --head, none cut off.

    Exit code 3 when the log is broken and a person has acknowledged it.
    """
    noted = _digest(head) if head else None
    paths = _segments(session, state_dir, files)
    # Before the log is read, to which a daemon may be writing.
    chain = _verified(paths, None if files else _beside(paths), noted)
    plain = {
        "entries": chain.seq,
        "first": chain.first,
        "head": chain.head.hex(),
        "torn": chain.torn,
        "noted_head_found": None if noted is None else True,
        "breaks": [_plain(record) for record in chain.records],
    }
    session.result(plain, lambda console: console.print(plain_text(_in_words(chain, noted))))
    return Exit.PARTLY if chain.records else Exit.OK


def _plain(record: BreakRecord) -> dict[str, Any]:
    names = ("entry", "file", "line", "why", "breaks", "head", "acknowledged_by")
    plain = {name: getattr(record, name) for name in names}
    return plain | {"found": record.time, "acknowledged": record.acknowledged_at}


def _verified(paths: list[Path], beside: Head | None, noted: bytes | None = None) -> Chain:
    """The chain of a log that is whole, or whose breaks are all acknowledged.

    ``beside``: the head that fedd noted beside the log; ``noted``: one that a person did.
    """
    from daemon.state.audit_format import BEGINNING, Chain, is_at, lost_end, walk

    chain, found, at_head = Chain(), noted in (None, BEGINNING), is_at(None, beside)
    try:
        for entry in walk(paths, chain):
            found = found or entry["hash"] == (noted or b"").hex()
            at_head = at_head or is_at(entry, beside)
    except OSError as error:
        raise _unreadable(error) from error
    if beside is not None and not at_head and not chain.unrecorded:
        chain.breaks.append(lost_end(beside, chain, paths[-1]))
    _complain_of_breaks(chain)
    if not found:
        raise CommandError(
            f"the head that was noted is not in the log, which ends with entry {chain.seq} "
            f"({chain.head.hex()})",
            "Its end was cut off, or it was written anew: compare it with a backup",
        )
    return chain


def _complain_of_breaks(chain: Chain) -> None:
    """Raises CommandError unless each break is recorded and acknowledged."""
    keep = "Keep the files as they are, compare them with a backup and with heads that were noted"
    if unrecorded := chain.unrecorded:
        first = unrecorded[0]
        others = f" (and {len(unrecorded) - 1} more)" if unrecorded[1:] else ""
        whole = "readable, with breaks that are recorded" if chain.records else "whole"
        raise CommandError(
            f"the audit log breaks at {first}{others}",
            f"Up to entry {first.after} it is {whole}. {keep}. fedd records it when it is started "
            "next, and goes on",
        )
    if unacknowledged := chain.unacknowledged:
        first_record = unacknowledged[0]
        others = f", and others: {len(unacknowledged) - 1}" if unacknowledged[1:] else ""
        raise CommandError(
            f"the audit log breaks at {first_record.text} (recorded by entry {first_record.entry}, "
            f"{first_record.time}{others})",
            f"{keep}; then `fedctl audit acknowledge`",
        )


def _in_words(chain: Chain, noted: bytes | None) -> str:
    if not chain.first:
        return "The log has no entries."
    # Of a log with a break nobody knows what stood there: it is readable, no more.
    how = "readable, but not as they were written" if chain.records else "verified"
    parts = [f"Entries {chain.first} to {chain.seq} {how}; head {chain.head.hex()}."]
    if chain.first > 1:
        parts.append(f"Entries 1 to {chain.first - 1} are in older segments, not seen here.")
    if chain.torn:
        parts.append(
            f"Torn by a crash, and accounted for by the entry after: {', '.join(chain.torn)}."
        )
    parts += [_acknowledged(record) for record in chain.records]
    if noted is None:
        parts.append("Entries cut off at the end show only against a head that was noted (--head).")
    return " ".join(parts)


def _acknowledged(record: BreakRecord) -> str:
    return (
        f"BROKEN at {record.text}; found {record.time} (entry {record.entry}), "
        f"acknowledged by {record.acknowledged_by} {record.acknowledged_at}."
    )


@topic.command("acknowledge")
@command
def acknowledge(
    session: Session,
    entries: Annotated[
        list[int] | None,
        typer.Argument(
            metavar="[ENTRY]...",
            min=1,
            help="Entries that record the breaks, as `fedctl status --json` shows them.",
            show_default="all that wait",
        ),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Say that you have looked at a broken log: recorded with your name, and warned of no more.

    Shows the breaks and asks. The log stays broken, and `fedctl audit verify` shows that, and
    who acknowledged it.
    """
    waiting = run(_waiting(session, entries or []))
    if not yes:
        texts = "; ".join(waiting.values())
        confirm(
            session,
            f"The audit log is not what was written: {texts}. Acknowledged, it is warned of no "
            "more, with your name beside it",
            f"Have you looked at {'it' if len(waiting) == 1 else 'each'}, and acknowledge it?",
            "nothing was acknowledged",
        )
    # Those that were shown, and none that was found meanwhile.
    breaks = run(_acknowledge(session, list(waiting)))
    session.result(
        {"breaks": [as_plain(one) for one in breaks]}, lambda console: _show_breaks(console, breaks)
    )


async def _waiting(session: Session, entries: list[int]) -> dict[int, str]:
    """By entry, the breaks that were named, or all that wait, in words."""
    async with connected(socket_path(session)) as daemon:
        reply = await asked_status(daemon)
    breaks = {one.entry: f"{_break_in_words(one)}; entry {one.entry}" for one in reply.audit_breaks}
    if not entries and not breaks:
        raise CommandError("no break of the audit log waits to be acknowledged")
    # Status tells the oldest 20 only; whether another one waits, the daemon knows.
    return {entry: breaks.get(entry, f"entry {entry}") for entry in entries or breaks}


async def _acknowledge(session: Session, entries: list[int]) -> list[AuditBreak]:
    from proto.control_pb2 import AcknowledgeBreaksRequest

    async with connected(socket_path(session)) as daemon:
        request = AcknowledgeBreaksRequest(entries=entries)
        return list((await daemon.AcknowledgeBreaks(request, timeout=ANSWER_WITHIN_S)).breaks)


def _show_breaks(console: Console, breaks: list[AuditBreak]) -> None:
    for one in breaks:
        console.print(plain_text(f"Acknowledged: {_break_in_words(one)}; entry {one.entry}."))


def _break_in_words(one: AuditBreak) -> str:
    others = f" (and {one.breaks - 1} more)" if one.breaks > 1 else ""
    return visible(f"{one.file}, line {one.line}: {one.why}{others}")


@topic.command("show")
@command
def show(
    session: Session,
    files: _Files = None,
    state_dir: _StateDir = None,
    since: Annotated[
        str,
        typer.Option(metavar="TIME", help="Only later ones: 2026-03-01, 2026-03-01T12:00Z or 36h."),
    ] = "",
    actor: Annotated[
        str,
        typer.Option(metavar="WHO", help="Only theirs: uid:1000, site:birch, fedd, signal:HUP."),
    ] = "",
) -> None:
    """Show the entries, oldest first, verified on the way; with --json an entry a line.

    A log that is broken is shown as far as it can be read, and then complained of.
    """
    from daemon.state.audit_format import Chain

    after, chain = _moment(since) if since else None, Chain()
    chosen = (
        entry
        for entry in _entries(_segments(session, state_dir, files), chain)
        if (not actor or entry["actor"] == actor)
        and (after is None or datetime.fromisoformat(entry["time"]) >= after)
    )
    table, matches = columns(">entry", "time", "actor", "action", "outcome", "what"), False
    for entry in chosen:
        matches = True
        if session.json:
            write_json(entry)
        else:
            table.add_row(*_row(entry))
    if table.rows:
        session.console.print(table)
    if not matches:
        session.note("No entry matches.")
    _complain_of_breaks(chain)


def _entries(paths: list[Path], chain: Chain) -> Iterator[dict[str, Any]]:
    from daemon.state.audit_format import walk

    try:
        yield from walk(paths, chain)
    except OSError as error:
        raise _unreadable(error) from error


def _row(entry: dict[str, Any]) -> Iterator[RenderableType]:
    yield str(entry["seq"])
    for name in ("time", "actor", "action", "outcome"):
        yield plain_text(entry[name])
    objects = ", ".join(f"{name} {_value(value)}" for name, value in entry["objects"].items())
    yield plain_text(in_line(objects))


def _value(value: object) -> str:
    text = str(value)
    if isinstance(value, list) and len(text) > 64:
        return str(len(value))
    return short(text) if len(text) == 64 else text


# ---- what was meant ------------------------------------------------------------


def _segments(session: Session, state_dir: Path | None, files: list[Path] | None) -> list[Path]:
    from daemon.state.audit_format import AuditError, number_of, segments
    from daemon.state.folder import StateFolder

    try:
        if files:
            return sorted(files, key=number_of)
        if session.socket is not None and state_dir is None and session.config is None:
            cause = "the log is read from its files, and a socket names none"
            raise CommandError(cause, _NAME_IT, exit_code=Exit.USAGE)
        folder = StateFolder(state_dir or _configured(session)).audit
        paths = segments(folder)
    except AuditError as error:
        raise CommandError(str(error), exit_code=Exit.USAGE) from error
    except OSError as error:
        raise _unreadable(error) from error
    if not paths:
        remedy = f"{_NAME_IT}; it is the daemon's user or root who may read it"
        raise CommandError(f"no audit log in {folder}", remedy, exit_code=Exit.USAGE)
    return paths


def _configured(session: Session) -> Path:
    return settings_of(session.config).site.state_dir if session.config else _DEFAULT_STATE


def _beside(paths: list[Path]) -> Head | None:
    """The head that fedd noted beside the log, where it did."""
    from daemon.state.audit_format import HEAD_FILE, AuditError, read_noted

    try:
        return read_noted(paths[0].parent.with_name(HEAD_FILE))
    except AuditError as error:
        raise CommandError(
            str(error), "To verify without it, name the segments instead of the folder"
        ) from error
    except OSError as error:
        raise _unreadable(error) from error


def _digest(text: str) -> bytes:
    try:
        digest = bytes.fromhex(text)
    except ValueError:
        digest = b""
    if len(digest) != 32:
        raise CommandError(
            f"{text!r} is no head of an audit log",
            "Give the 64 digits that `fedctl audit head` showed",
            exit_code=Exit.USAGE,
        )
    return digest


def _moment(text: str) -> datetime:
    units = {"m": "minutes", "h": "hours", "d": "days"}
    if text[:-1].isdecimal() and text[-1:] in units:
        return datetime.now(UTC) - timedelta(**{units[text[-1]]: int(text[:-1])})
    try:
        moment = datetime.fromisoformat(text)
    except ValueError as error:
        raise CommandError(
            f"{text!r} is no time",
            "Write 2026-03-01, 2026-03-01T12:00Z or 36h",
            exit_code=Exit.USAGE,
        ) from error
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


def _unreadable(error: OSError) -> CommandError:
    return CommandError(
        f"cannot read {error.filename}: {error.strerror}",
        "The audit log may be read by the daemon's user and root",
        exit_code=Exit.USAGE if isinstance(error, FileNotFoundError) else Exit.FAILED,
    )


# ---- what embeddings tell -------------------------------------------------------

_LEGEND = """\
F1 (precision/recall): distinct words. Telling: words that few texts have. Names: share named
exactly, and how much of what was named is right. Overlap and cosine: what is left of the
negatives' use. A bucket is what a question leaves as; passages leave exactly or under noise."""


@topic.command("embeddings")
@command
def embeddings(
    session: Session,
    noise: Annotated[
        list[float] | None,
        of_field(
            "AuditEmbeddingsRequest",
            "noises",
            help="A deviation of noise to try; as often as you like.",
        ),
    ] = None,
    epsilon: Annotated[
        list[float] | None,
        of_field(
            "AuditEmbeddingsRequest",
            "epsilons",
            help="Noise to try, by its epsilon (at delta 1e-5).",
        ),
    ] = None,
    bits: Annotated[
        list[int] | None,
        of_field(
            "AuditEmbeddingsRequest", "bits", help="A bucket's bits to try; as often as you like."
        ),
    ] = None,
    minutes: Annotated[
        float,
        of_field(
            "AuditEmbeddingsRequest", "minutes", help="For training attackers, all levels together."
        ),
    ] = 10.0,
    show: Annotated[
        int,
        of_field(
            "AuditEmbeddingsRequest",
            "show",
            help="Show so many passages with what was recovered of them.",
        ),
    ] = 0,
) -> None:
    """Attack this site's own embeddings and show how much of unseen texts can be read from them.

    Nothing leaves the site, nothing is kept. Ctrl-C ends it. Without --noise, --epsilon and
    --bits the usual levels are tried.
    """
    from proto.control_pb2 import AuditEmbeddingsRequest

    request = AuditEmbeddingsRequest(
        noises=noise or [], epsilons=epsilon or [], bits=bits or [], minutes=minutes, show=show
    )
    exposure = run(_attacked(session, request))
    session.result(as_plain(exposure), lambda console: _show_exposure(console, exposure))


async def _attacked(session: Session, request: AuditEmbeddingsRequest) -> EmbeddingsAudit:
    """The result; a bar on stderr until it is there."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    bars = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TimeElapsedColumn(),
        console=session.notes,
        transient=True,
        disable=session.json or not session.notes.is_terminal,
    )
    task, result = bars.add_task("texts are read", total=1.0), None
    async with connected(socket_path(session)) as daemon:
        with bars:
            async for progress in daemon.AuditEmbeddings(request):
                bars.update(task, description=progress.step, completed=progress.fraction)
                if progress.HasField("result"):
                    result = progress.result  # and on to the end, or it counts as given up
    if result is not None:
        return result
    raise CommandError(
        "the daemon stopped telling before the audit was over",
        "Try again; its log says more",
        exit_code=Exit.UNREACHABLE,
    )


def _show_exposure(console: Console, exposure: EmbeddingsAudit) -> None:
    console.print(
        f"Attacked: {exposure.passages_unseen} passages and "
        f"{exposure.questions_unseen} questions on "
        f"{exposure.subjects_unseen} subjects, by attackers that were trained on "
        f"{exposure.passages_known} passages of others in {duration(exposure.seconds)} and have a "
        f"dictionary of {exposure.dictionary_words} words and {exposure.dictionary_names} names. "
        f"Model version {short(exposure.model_digest.hex())}."
    )
    console.print(_exposure_table(exposure))
    console.print(_LEGEND, style="dim")
    if any(level.cut_short for level in exposure.levels):
        console.print("* more --minutes would have made a stronger attacker.", style="dim")
    console.print()
    console.print(plain_text(exposure.advice))
    for level in exposure.levels:
        for example in level.examples:
            _show_example(console, level.level, example)


def _exposure_table(exposure: EmbeddingsAudit) -> Table:
    with_questions = exposure.questions_unseen > 0
    of_questions = (">questions: F1", ">telling", ">names") if with_questions else ()
    table = columns(
        "disclosed",
        ">passages: F1 (P/R)",
        ">telling",
        ">names",
        *of_questions,
        ">overlap",
        ">cosine",
    )
    guessing = _questions(exposure.guessing_questions) if with_questions else []
    table.add_row(
        "(guessing)",
        *_passages(exposure.guessing_passages),
        *guessing,
        "",
        f"{exposure.cosine_at_random:.2f}",
    )
    if exposure.levels:
        others = _passages(exposure.levels[0].shuffled)
        table.add_row("(other texts)", *others, *[""] * len(guessing), "", "")
    for level in exposure.levels:
        table.add_row(
            plain_text(level.level + ("*" if level.cut_short else "")),
            *_passages(level.passages),
            *(_questions(level.questions) if with_questions else []),
            f"{level.overlap:.2f}",
            f"{level.cosine:.2f}",
        )
    return table


def _passages(texts: TextsExposure) -> list[str]:
    words = texts.words
    return [
        f"{words.f1:.3f} ({words.precision:.2f}/{words.recall:.2f})",
        f"{texts.telling.f1:.3f}",
        _share(texts.names),
    ]


def _questions(texts: TextsExposure) -> list[str]:
    return [f"{texts.words.f1:.3f}", f"{texts.telling.f1:.3f}", _share(texts.names)]


def _share(names: RecoveredShare) -> str:
    return f"{100 * names.recall:.0f} % ({100 * names.precision:.0f} %)"


def _show_example(console: Console, level: str, example: RecoveredText) -> None:
    console.print()
    console.print(plain_text(f"{level}: {example.text}"))
    for name, items in (
        ("right names", example.right_names),
        ("wrong names", example.wrong_names),
        ("right words", example.right_words),
        ("wrong words", example.wrong_words),
    ):
        console.print(plain_text(f"  {name}: {', '.join(items) or '–'}"), style="dim")
