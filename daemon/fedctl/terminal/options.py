"""The options that every command takes, added to each in one place."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from config import control_socket
from daemon.fedctl.terminal.output import CommandError, Exit, Session
from proto import bounds

_Json = Annotated[
    bool,
    typer.Option(
        "--json", help="Machine-readable: one JSON object on stdout (JSON lines for streams)."
    ),
]
_Socket = Annotated[
    Path | None,
    typer.Option(
        "--socket",
        help="The daemon's control socket; beats the environment's HANSE_SOCKET, as does --config.",
        show_default=str(control_socket.PATH),
    ),
]
_Config = Annotated[
    Path | None,
    typer.Option("--config", help="The daemon's settings file, to take the socket from."),
]
LEAST_ABOVE_NOTHING = 1e-9  # of a number that must be above 0


def of_field(message: str, name: str, *flags: str, help: str, least: int = 0) -> Any:
    """The option that fills a field of a message, within its bounds, and from ``least``."""
    low, above, high = bounds.chosen(message, name)
    low = LEAST_ABOVE_NOTHING if above else max(low, least)
    return typer.Option(*flags, min=low, max=high, help=help)


def an_id(metavar: str, *, help: str) -> Any:
    """The option that names a federation or a site."""
    return typer.Option(metavar=metavar, help=f"{help}: a-z, 0-9 and -.", callback=_checked_id)


def _checked_id(value: str) -> str:
    if not re.fullmatch(bounds.of("Signed", "site").pattern, value):
        raise typer.BadParameter(f"{value!r}; expected 1 to 63 of a-z, 0-9 and -, the first no -")
    return value


def collection_prefix(collection: str) -> str:
    """How the ids of a collection's documents begin; "" for "". Raises CommandError for no name."""
    from config.kinds import LONGEST_COLLECTION

    name = collection.strip("/")
    parts = name.split("/")
    wrong = not name.isprintable() or not all(parts) or not {".", ".."}.isdisjoint(parts)
    if collection and (wrong or len(name) > LONGEST_COLLECTION):
        raise CommandError(
            f"{collection!r} is no name of a collection",
            f"Give 1 to {LONGEST_COLLECTION} printable characters, as contracts/2024; no . or ..",
            exit_code=Exit.USAGE,
        )
    return f"{name}/" if name else ""


MODELS = ("retriever", "generator")


def _checked_model(value: str) -> str:
    if value not in MODELS:
        raise typer.BadParameter(f"{value!r}; expected one of {', '.join(MODELS)}")
    return value


# Whose rounds a command is about.
Model = Annotated[
    str,
    typer.Option(metavar=f"<{'|'.join(MODELS)}>", help="Whose rounds.", callback=_checked_model),
]
Authority = Annotated[
    Path, typer.Option("--ca", metavar="DIR", help="The authority's folder, of `fedctl ca init`.")
]
Out = Annotated[Path, typer.Option(metavar="FILE", help="Where to write it.")]
# Of every command.
_EVERYWHERE = {"as_json": (_Json, False), "socket": (_Socket, None), "config": (_Config, None)}


def command(function: Callable[..., Exit | None]) -> Callable[..., None]:
    """Make ``function(session, ...)`` a typer command with --json, --socket and --config.

    What it returns becomes the exit code; returning nothing means it went well.
    The same options are accepted before the command's name, too.
    """

    @functools.wraps(function)
    def run(
        context: typer.Context,
        *,
        as_json: bool,
        socket: Path | None,
        config: Path | None,
        **own: Any,
    ) -> None:
        session = _session(context)
        session.json = session.json or as_json
        session.socket = socket or session.socket
        session.config = config or session.config
        if context.invoked_subcommand is None:
            raise typer.Exit(function(session, **own) or Exit.OK)

    _declare(run, function)
    # Typer wraps the first paragraph alone. A line that is to stay a line is indented.
    run.__doc__ = re.sub(r"(?<=\S)\n(?=\S)", " ", inspect.cleandoc(function.__doc__ or ""))
    return run


def _session(context: typer.Context) -> Session:
    """The one session of this command line; groups and commands add to it."""
    root = context.find_root()
    if not isinstance(root.obj, Session):
        root.obj = Session()
    return root.obj


def _declare(run: Callable[..., None], function: Callable[..., Exit | None]) -> None:
    """Tell typer (it reads the signature) of the own and the added parameters."""
    own = list(inspect.signature(function, eval_str=True).parameters.values())[1:]
    parameters = [
        inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context),
        *(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in own),
        *(
            inspect.Parameter(
                name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind
            )
            for name, (kind, default) in _EVERYWHERE.items()
        ),
    ]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
