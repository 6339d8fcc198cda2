"""fedctl: the operator's command line, thin over control.proto.

    terminal/  what every command has: exit codes, errors, JSON, tables; --json, --socket and
               --config; the Unix socket to the daemon; the files that people name
    commands/  the commands, a file a topic: a group, or commands of their own
    transfer/  documents on their way to the daemon, and out of it
    demo/      three sites on one machine, from nothing to answers

Heavy imports (grpc, rich's tables, certificates) wait until a command needs
them: ``fedctl --help`` is to be there at once.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import typer
from typer.exceptions import TyperException

from daemon.fedctl.commands import (
    audit,
    documents,
    learning,
    library,
    mcp,
    pairs,
    privacy,
    prompts,
    rounds,
    status,
    tokens,
    train,
)
from daemon.fedctl.commands.evaluation import evaluate
from daemon.fedctl.commands.federation import authority, manifest, site
from daemon.fedctl.demo import run
from daemon.fedctl.terminal import connection
from daemon.fedctl.terminal.options import command
from daemon.fedctl.terminal.output import (
    CommandError,
    Exit,
    Session,
    barred,
    complain,
    our_fault,
)

# By kinds of error of pydantic's, which typer checks values with.
_MUST_BE = {
    "greater_than_equal": "must be at least {ge}, not {input}",
    "less_than_equal": "must be at most {le}, not {input}",
    "int_parsing": "must be a whole number, not {input}",
    "float_parsing": "must be a number, not {input}",
    "value_error": "{error}",
}
# In the order in which they are shown.
_TOPICS = (
    library,
    documents,
    train,
    learning,
    evaluate,
    prompts,
    status,
    privacy,
    authority,
    site,
    manifest,
    pairs,
    rounds,
    tokens,
    mcp,
    audit,
)

app = typer.Typer(
    name="fedctl",
    help="Administer this site's Hanse daemon, and set federations up.",
    epilog="Exit codes: 0 ok, 1 refused or failed, 2 usage, 3 partly done, "
    "4 daemon not reachable, 130 interrupted.",
    add_completion=True,
    pretty_exceptions_enable=False,
)


@app.callback()
@command
def fedctl(_session: Session) -> None:
    """Administer this site's Hanse daemon, and set federations up."""


app.command("demo")(run.demo)
for _topic in _TOPICS:
    app.add_typer(_topic.topic)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line; returns its exit code (see `Exit`). Nothing else leaves here."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    as_json = "--json" in words[: words.index("--") if "--" in words else None]
    try:
        try:
            code = typer.main.get_command(app).main(
                words or ["--help"], prog_name="fedctl", standalone_mode=False
            )
        finally:
            connection.over()
    except CommandError as error:
        return complain(error, as_json=as_json)
    except TyperException as error:
        return complain(_usage(error), as_json=as_json)
    except (KeyboardInterrupt, typer.Abort):
        code = Exit.INTERRUPTED
    except Exception as error:
        return complain(barred(error) or our_fault(error), as_json=as_json)
    if code == Exit.INTERRUPTED:
        interrupted = CommandError("interrupted", exit_code=Exit.INTERRUPTED)
        return complain(interrupted, as_json=as_json)
    return int(code or Exit.OK)


def _usage(error: TyperException) -> CommandError:
    from pydantic import ValidationError

    if isinstance(error.__cause__, ValidationError):
        found = error.__cause__.errors()[0]
        if words := _MUST_BE.get(found["type"]):
            error.message = words.format(**found.get("ctx", {}), input=found["input"])
    context = getattr(error, "ctx", None)
    command_line = context.command_path if context is not None else "fedctl"
    return CommandError(
        error.format_message(),
        f"See `{command_line} --help`",
        exit_code=Exit.USAGE,
    )
