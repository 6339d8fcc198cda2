"""fedctl audit: who did what at this site, and is the log of it whole? What do its models tell?

The log is read from its files, so a daemon is not needed, and whoever verifies does not
have to believe one. Only `head` asks the daemon, unless it is told where the files are,
and `acknowledge`, which writes into the log, and `embeddings` and `memory`, which are about
models (model_audits.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from daemon.fedctl.commands import model_audits
from daemon.fedctl.terminal.connection import (
    ANSWER_WITHIN_S,
    asked_status,
    connected,
    run,
    settings_of,
    socket_path,
)
from daemon.fedctl.terminal.options import command
from daemon.fedctl.terminal.output import (
    CommandError,
    Exit,
    Session,
    as_plain,
    columns,
    confirm,
    in_line,
    plain_text,
    short,
    visible,
    write_json,
)

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from daemon.state.audit_format import BreakRecord, Chain, Head
    from proto.control_pb2 import AuditBreak

topic = typer.Typer(
    name="audit", help="The audit log: is it whole? And what could this site's models tell?"
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
    """The audit log: who did what here, and is it whole? And what could this site's models tell?"""


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


# ---- what models tell: daemon/fedctl/commands/model_audits.py --------------------

topic.command("embeddings")(model_audits.embeddings)
topic.command("memory")(model_audits.memory)
