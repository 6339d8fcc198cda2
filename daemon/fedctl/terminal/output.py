"""What fedctl says and how it ends: exit codes, errors, JSON and tables.

Results go to stdout, everything else (progress, notes, errors) to stderr. With
``--json`` stdout carries one object, or one object a line for a stream, and
nothing else.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import sys
import tempfile
import traceback
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from google.protobuf.message import Message
    from rich.console import Console
    from rich.table import Table

    from proto.control_pb2 import Copies

# Into a file or a pipe tables are not squeezed to a terminal's 80 columns.
WIDTH_OF_FILES = 200
_REMARK_EVERY_S = 60.0


class Exit(IntEnum):
    """Exit codes of every fedctl command."""

    OK = 0
    FAILED = 1  # refused or failed; the cause is on stderr
    USAGE = 2  # the command line or a file it names makes no sense, or what it names is not here
    PARTLY = 3  # part was done, part refused; the list is on stderr
    UNREACHABLE = 4  # no daemon answers at the socket
    INTERRUPTED = 130  # Ctrl-C or SIGTERM


class CommandError(Exception):
    """A command cannot go on: what was refused, and what to do about it."""

    def __init__(self, cause: str, remedy: str = "", *, exit_code: Exit = Exit.FAILED) -> None:
        super().__init__(cause)
        self.cause = cause
        self.remedy = remedy
        self.exit_code = exit_code


@dataclass
class Session:
    """The options that every command takes, and where it writes."""

    json: bool = False
    socket: Path | None = None
    config: Path | None = None

    @property
    def console(self) -> Console:
        """For results that people read."""
        return _console(stderr=False)

    @property
    def notes(self) -> Console:
        """For progress and remarks; never part of the result."""
        return _console(stderr=True)

    def note(self, text: str) -> None:
        """One remark on stderr, as it is (no markup)."""
        print(text, file=sys.stderr, flush=True)

    def line(self, plain: Mapping[str, Any]) -> None:
        """One object of a stream; people see the stream's live view instead."""
        if self.json:
            write_json(plain)

    def result(self, plain: Mapping[str, Any], show: Callable[[Console], None]) -> None:
        """The result: the object for machines, or ``show`` for people."""
        if self.json:
            write_json(plain)
        else:
            show(self.console)


@asynccontextmanager
async def remarks(
    session: Session, *, spinner: bool = False
) -> AsyncIterator[Callable[[str], None]]:
    """What long work tells where no bar can be drawn: where it is, in a line each minute.

    ``spinner``: shows it at a terminal, too, where no bar does.
    """
    if session.notes.is_terminal:
        if not spinner:
            yield lambda _: None
            return
        with session.notes.status("") as status:
            yield status.update
        return
    latest = ""

    def now_at(text: str) -> None:
        nonlocal latest
        latest = text

    async def tell() -> None:
        while True:
            await asyncio.sleep(_REMARK_EVERY_S)
            session.note(latest)

    telling = asyncio.create_task(tell())
    try:
        yield now_at
    finally:
        telling.cancel()


def _console(*, stderr: bool) -> Console:
    from rich.console import Console

    # highlight=False: a digest or an address is not to be coloured in pieces.
    console = Console(stderr=stderr, highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = WIDTH_OF_FILES
    return console


def write_json(plain: Mapping[str, Any]) -> None:
    """One object on one line of stdout (ASCII, so that any locale can carry it)."""
    print(json.dumps(plain, allow_nan=False), flush=True)


def confirm(session: Session, meaning: str, question: str, otherwise: str) -> None:
    """Raises CommandError unless a person at a terminal agrees; a script has --yes instead.

    ``meaning`` says what would be done, ``otherwise`` what it is if they do not agree.
    """
    if session.json or not sys.stdin.isatty():
        raise CommandError(
            f"{meaning}: this is not done unasked", "Add --yes", exit_code=Exit.USAGE
        )
    session.note(f"{meaning}.")
    import typer

    if not typer.confirm(question, err=True):
        raise CommandError(otherwise)


def complain(error: CommandError, *, as_json: bool) -> Exit:
    """Tell an error in one line: ``fedctl: cause. remedy.``; returns its exit code."""
    cause, remedy = _one_line(error.cause), _one_line(error.remedy)
    print(
        " ".join(["fedctl:", *(_sentence(part) for part in (cause, remedy) if part)]),
        file=sys.stderr,
    )
    if as_json:
        write_json({"error": cause, "remedy": remedy})
    return error.exit_code


def our_fault(error: Exception) -> CommandError:
    """An exception nobody expected; its traceback goes to a file, not to the screen."""
    # delete=False: the file is for the person to send; mkstemp's mode is 0600.
    with tempfile.NamedTemporaryFile(
        "w", prefix="fedctl-", suffix=".txt", delete=False, encoding="utf-8"
    ) as file:
        file.write("".join(traceback.format_exception(error)))
    return CommandError(
        f"unexpected {type(error).__name__}: {error}",
        f"This is a defect of fedctl: please report it with {file.name}",
    )


def barred(error: Exception) -> CommandError | None:
    """What the system said of a path, which a person named: no defect of ours; None: not that.

    Where a file of ours is missing, it is one.
    """
    if not isinstance(error, OSError) or isinstance(error, FileNotFoundError):
        return None
    if error.filename is None:
        return None
    return CommandError(
        f"cannot open {error.filename}: {error.strerror}",
        "Name a path that you may read and write, or run it as the user who may",
    )


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _sentence(text: str) -> str:
    return text if text.endswith((".", "!", "?", ":")) else f"{text}."


def as_plain(message: Message) -> dict[str, Any]:
    """A protobuf message as JSON values.

    Every field appears, set or not, under its name in the .proto; bytes become
    lower-case hex, enum values their names, NaN and absent messages null.
    """
    return {field.name: _plain_field(message, field) for field in message.DESCRIPTOR.fields}


def _plain_field(message: Message, field: Any) -> Any:
    value = getattr(message, field.name)
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        return dict(value)  # of scalars: no map of ours has messages
    if field.is_repeated:
        return [_plain_value(field, item) for item in value]
    if field.message_type is not None and not message.HasField(field.name):
        return None
    return _plain_value(field, value)


def _plain_value(field: Any, value: Any) -> Any:
    if field.message_type is not None:
        return as_plain(value)
    if field.enum_type is not None:
        return field.enum_type.values_by_number[value].name.lower()
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def byte_count(count: int) -> str:
    """A number of bytes for people: ``3.4 MiB``."""
    if count < 1024:
        return f"{count} B"
    size = float(count)
    for unit in ("KiB", "MiB", "GiB"):
        size /= 1024
        if size < 1024:
            return f"{size:.1f} {unit}"
    return f"{size / 1024:.1f} TiB"


def counted(count: int, one: str) -> str:
    """So many of what is called ``one``: ``1 document``, ``2 documents``."""
    return f"{count} {one}" if count == 1 else f"{count} {one}s"


def duration(seconds: float) -> str:
    """A time span for people: ``850 ms``, ``12.3 s``, ``4 min 05 s``, ``3 h 20 min``, ``12 d``."""
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    if seconds < 3600:
        return f"{int(seconds // 60)} min {int(seconds % 60):02d} s"
    if seconds < 48 * 3600:
        return f"{int(seconds // 3600)} h {int(seconds % 3600 // 60):02d} min"
    return f"{int(seconds // 86400)} d"


def short(digest: str) -> str:
    """A digest for people: its first twelve digits, or a dash when there is none."""
    return digest[:12] if digest.strip("0") else "–"


def visible(text: str) -> str:
    """Text from a document or a peer, safe for a terminal.

    Control characters could move the cursor or change the title of the
    person's terminal; they are replaced. Markup is escaped by the callers'
    use of `rich.text.Text`, which has none.
    """
    text = text.replace("\t", " | ").replace("\N{SOFT HYPHEN}", "")  # cells of a table
    return "".join(c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in text)


def in_line(text: str) -> str:
    """Likewise where it has one line, as an id in a table: a break in it would draw another row."""
    return visible(text).replace("\n", "\N{REPLACEMENT CHARACTER}")


def plain_text(value: str) -> Any:
    """A cell with foreign text in it: no markup is read from it, no control character kept."""
    from rich.text import Text

    return Text(visible(value))


def also_in(copies: Copies, console: Console) -> None:
    """Where a passage stands nearly the same once more, on a line; nothing where it does not."""
    if not copies.count:
        return
    told = [
        in_line(one.document_id) + (f", page {one.page}" if one.page else "")
        for one in copies.first
    ]
    more = [f"and {copies.count - len(told)} more"] if copies.count > len(told) else []
    line = f"also, or nearly so, in: {'; '.join(told + more)}"
    console.print(plain_text(line), style="dim", soft_wrap=True)


def facts() -> Table:
    """An empty two-column list of facts: name, value."""
    from rich.table import Table

    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(overflow="fold")  # a fingerprint must be seen whole
    return grid


def columns(*names: str) -> Table:
    """An empty table; a name that starts with ``>`` is of a column of numbers."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in names:
        table.add_column(name.lstrip(">"), justify="right" if name.startswith(">") else "left")
    return table


def tell(
    session: Session,
    plain: Mapping[str, Any],
    *what_next: str,
    as_json: Mapping[str, Any] | None = None,
) -> None:
    """The facts and, for people, what to do next; ``as_json`` if machines get other facts."""

    def show(console: Console) -> None:
        grid = facts()
        for name, value in plain.items():
            grid.add_row(name.replace("_", " "), plain_text(str(value)))
        console.print(grid)
        if what_next:
            # soft_wrap: a command that is to be copied stays on one line.
            console.print(plain_text("\n" + "\n".join(what_next)), soft_wrap=True)

    session.result(plain if as_json is None else as_json, show)
