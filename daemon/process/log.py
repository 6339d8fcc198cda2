"""The daemon's log. Its lines never carry what people wrote or asked.

`redact` takes it out of every line, whoever wrote the call.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping, MutableMapping
from enum import Enum
from pathlib import Path
from typing import Any, Literal, TextIO, cast

import structlog

# The last word of a field's name decides (`best_passages`, `site_key`); a plural
# counts as its singular. Numbers under a text name are counts and stay.
_TEXT_NAMES = frozenset(
    ("answer", "content", "document", "passage", "query", "question", "sentence", "text", "title")
)
_SECRET_NAMES = frozenset(("key", "password", "pem", "secret", "share"))
_REDACTED = "<redacted>"
_DIGEST_BYTES = 32
# sd-daemon(3): the journal reads a level from the start of a line.
_JOURNAL_LEVELS = {"debug": 7, "info": 6, "warning": 4, "error": 3, "critical": 2}


Level = Literal["debug", "info", "warning", "error"]
Format = Literal["auto", "json", "console"]
chosen: tuple[Level, Format] = "info", "auto"  # of this process, for those that it starts


class _Lossy:
    """A stream whose lines are lost while they can't be written; the next line says how many.

    The disk may be full, or who read it gone: a daemon that ended for that would answer nobody.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._lost, self._written = 0, False

    def write(self, line: str) -> None:
        try:
            self._stream.write(line)
        except OSError:
            self._lost += 1
            self._written = False
        else:
            self._written = True

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError:
            self._lost += self._written
        else:
            self._lost *= not self._written

    def told(
        self, _logger: Any, _method: str, event: MutableMapping[str, Any]
    ) -> MutableMapping[str, Any]:
        """A processor of structlog's."""
        return {**event, "lines_lost": self._lost} if self._lost else event


def redact(_logger: Any, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Take out values whose names say that they are people's text or a secret.

    Objects are shown by their type alone: their fields may hold either.
    """
    for name, value in event.items():
        if not name.startswith("_") and name not in ("exc_info", "stack_info"):  # structlog's own
            event[name] = _redacted(name, value)
    return event


def _redacted(name: str, value: Any) -> Any:
    kind = name.lower().rpartition("_")[2]
    kind = "query" if kind == "queries" else kind.removesuffix("s")
    if kind in _SECRET_NAMES:
        return _REDACTED
    if value is None or isinstance(value, bool | int | float):
        return value
    if kind in _TEXT_NAMES:
        return _REDACTED
    return _shown(name, value)


def _shown(name: str, value: Any) -> Any:
    match value:
        case str() | Path() | Enum() | BaseException():
            return str(value)
        case bytes():
            return value.hex() if len(value) <= _DIGEST_BYTES else f"<{len(value)} bytes>"
        case Mapping():
            return {str(key): _redacted(str(key), inner) for key, inner in value.items()}
        case list() | tuple() | set() | frozenset():
            return [_redacted(name, inner) for inner in value]
        case _:
            return f"<{type(value).__name__}>"


def configure_logging(
    level: Level = "info",
    format: Format = "auto",
    stream: TextIO | None = None,
) -> None:
    """Write log lines to ``stream`` (default: standard error), ours and the libraries'.

    ``auto`` means console on a terminal and JSON elsewhere, as under systemd.
    Libraries are heard from level warning on.
    """
    global chosen
    chosen = level, format
    stream = stream or sys.stderr
    journal = _is_journal(stream)
    as_json = format == "json" or (format == "auto" and (journal or not stream.isatty()))
    threshold = logging.getLevelNamesMapping()[level.upper()]
    lossy = _Lossy(stream)
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        redact,
        lossy.told,
    ]
    rendered = _json_lines(journal) if as_json else _console_lines(stream)
    structlog.configure(
        processors=[*shared, *rendered],
        wrapper_class=structlog.make_filtering_bound_logger(threshold),
        logger_factory=structlog.WriteLoggerFactory(cast(TextIO, lossy)),
    )
    libraries = logging.StreamHandler(cast(TextIO, lossy))
    libraries.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[*shared, structlog.stdlib.add_logger_name],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *rendered],
        )
    )
    logging.captureWarnings(True)
    logging.basicConfig(level=max(threshold, logging.WARNING), handlers=[libraries], force=True)


def _json_lines(journal: bool) -> list[structlog.typing.Processor]:
    # format_exc_info gives the traceback as text: no local variables, which could
    # hold a question or a key.
    lines: list[structlog.typing.Processor] = [
        structlog.processors.format_exc_info,
        structlog.processors.JSONRenderer(ensure_ascii=False),
    ]
    return [_with_journal_level(lines)] if journal else lines


def _console_lines(stream: TextIO) -> list[structlog.typing.Processor]:
    # The plain traceback again because rich's would show local variables.
    return [
        structlog.dev.ConsoleRenderer(
            colors=stream.isatty(), exception_formatter=structlog.dev.plain_traceback
        )
    ]


def _with_journal_level(lines: list[structlog.typing.Processor]) -> structlog.typing.Processor:
    def render(logger: Any, method: str, event: MutableMapping[str, Any]) -> str:
        level = _JOURNAL_LEVELS.get(event.get("level", "info"), 6)
        rendered: Any = event
        for processor in lines:
            rendered = processor(logger, method, rendered)
        return f"<{level}>{rendered}"

    return render


def _is_journal(stream: TextIO) -> bool:
    """Whether the stream itself leads to the journal (systemd.exec(5), JOURNAL_STREAM).

    That the variable, or INVOCATION_ID, is set proves nothing: terminals of a
    desktop session inherit both.
    """
    try:
        status = os.fstat(stream.fileno())
    except (OSError, ValueError, AttributeError):  # no file behind it
        return False
    return os.environ.get("JOURNAL_STREAM") == f"{status.st_dev}:{status.st_ino}"
