"""What the daemon tells about itself: its log, its event loop's lag, its state.

Log lines never carry what people wrote or asked: `redact` takes it out of every
line, whoever wrote the call. Lag is how late the event loop runs what is due; it
is the daemon's promise that arithmetic does not hold up the protocol.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import socket
import sys
import time
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Literal, TextIO

import psutil
import structlog

# ---- log --------------------------------------------------------------------

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
    level: Literal["debug", "info", "warning", "error"] = "info",
    format: Literal["auto", "json", "console"] = "auto",
    stream: TextIO | None = None,
) -> None:
    """Write log lines to ``stream`` (default: standard error), ours and the libraries'.

    ``auto`` means console on a terminal and JSON elsewhere, as under systemd.
    Libraries are heard from level warning on.
    """
    stream = stream or sys.stderr
    journal = _is_journal(stream)
    as_json = format == "json" or (format == "auto" and (journal or not stream.isatty()))
    threshold = logging.getLevelNamesMapping()[level.upper()]
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        redact,
    ]
    rendered = _json_lines(journal) if as_json else _console_lines(stream)
    structlog.configure(
        processors=[*shared, *rendered],
        wrapper_class=structlog.make_filtering_bound_logger(threshold),
        logger_factory=structlog.WriteLoggerFactory(stream),
    )
    libraries = logging.StreamHandler(stream)
    libraries.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[*shared, structlog.stdlib.add_logger_name],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *rendered],
        )
    )
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


# ---- the event loop's lag ---------------------------------------------------

_SHORTEST_S = 1e-4
_STEPS_A_DECADE = 20  # a bucket is 12 % wide
_BUCKETS = 6 * _STEPS_A_DECADE  # 0.1 ms .. 100 s; longer ones fall into the last
_MOST_COUNTED_S = 60


@dataclass(frozen=True)
class Lag:
    """How late the event loop was, in milliseconds; p50 and p99 are exact to 12 %."""

    samples: int
    p50_ms: float
    p99_ms: float
    max_ms: float


class _Histogram:
    """Counts of lags in logarithmic buckets: as much memory after a year as at the start."""

    def __init__(self) -> None:
        self.counts = [0] * _BUCKETS
        self.longest_s = 0.0

    def add(self, lag_s: float) -> None:
        bucket = 0
        if lag_s > _SHORTEST_S:
            bucket = math.ceil(math.log10(lag_s / _SHORTEST_S) * _STEPS_A_DECADE)
        self.counts[min(bucket, _BUCKETS - 1)] += 1
        self.longest_s = max(self.longest_s, lag_s)


def _summary(histogram: _Histogram) -> Lag:
    counts, longest_s = histogram.counts, histogram.longest_s

    def quantile_ms(share: float) -> float:
        wanted, seen = share * sum(counts), 0
        for bucket, count in enumerate(counts):
            seen += count
            if count and seen >= wanted:
                upper_s = _SHORTEST_S * 10 ** (bucket / _STEPS_A_DECADE)
                last = bucket == _BUCKETS - 1
                return 1e3 * (longest_s if last else min(upper_s, longest_s))
        return 0.0

    return Lag(sum(counts), quantile_ms(0.50), quantile_ms(0.99), 1e3 * longest_s)


class LoopLag:
    """Samples how late the event loop wakes a sleeper, every 20 ms.

    A stall hides the samples that were due during it, so they are added as if
    they had been taken (Tene's correction for coordinated omission): a second
    of stall is fifty bad samples, as a message arriving then would have felt it.
    """

    def __init__(
        self, interval_s: float = 0.02, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._interval_s = interval_s
        self._clock = clock
        self._ever = _Histogram()

    async def run(self) -> None:
        """Sample until cancelled."""
        while True:
            due = self._clock() + self._interval_s
            await asyncio.sleep(self._interval_s)
            self.record(max(0.0, self._clock() - due))

    def record(self, lag_s: float) -> None:
        """Count a lag, and those of the samples that it kept from being taken."""
        # Of a stall without end a minute is counted: it stands out by then.
        for _ in range(int(_MOST_COUNTED_S / self._interval_s)):
            self._ever.add(lag_s)
            lag_s -= self._interval_s
            if lag_s <= 0:
                break

    def since_start(self) -> Lag:
        """The lag since the daemon started."""
        return _summary(self._ever)


# ---- systemd ----------------------------------------------------------------


class Notifier:
    """Tells systemd how the daemon is (sd_notify(3)); silent when it did not ask.

    Our own few lines because the protocol is one datagram, and the packages that
    wrap it have not been maintained for years.
    """

    def __init__(self, address: str | None, watchdog_s: float | None = None) -> None:
        if address is not None and address[:1] not in ("/", "@"):
            raise ValueError(
                f"NOTIFY_SOCKET={address!r} refused: expected a path or an abstract name (@…); "
                "start fedd by systemd with Type=notify, or unset the variable"
            )
        self._address = address
        self.watchdog_s = watchdog_s

    @classmethod
    def from_environment(cls, environment: MutableMapping[str, str] = os.environ) -> Notifier:
        """As systemd set it up; takes NOTIFY_SOCKET away so that no child speaks for us."""
        ours = environment.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        watchdog_us = environment.get("WATCHDOG_USEC", "") if ours else ""
        watchdog_s = int(watchdog_us) / 1e6 if watchdog_us.isdecimal() else None
        return cls(environment.pop("NOTIFY_SOCKET", None) or None, watchdog_s)

    def ready(self, status: str) -> None:
        """Start-up, or a reload, is complete."""
        self._send("READY=1", _status(status))

    def reloading(self) -> None:
        """A reload begins; `ready` ends it."""
        microseconds = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
        self._send("RELOADING=1", f"MONOTONIC_USEC={microseconds}")

    def stopping(self, status: str) -> None:
        """Shutdown begins."""
        self._send("STOPPING=1", _status(status))

    def status(self, status: str) -> None:
        """One line for `systemctl status`."""
        self._send(_status(status))

    async def keep_watchdog_fed(self) -> None:
        """Say that the event loop runs, at half the watchdog's interval, until cancelled.

        A loop that hangs stops saying so and systemd restarts the daemon.
        Returns at once when no watchdog is set.
        """
        while self._address is not None and self.watchdog_s:
            self._send("WATCHDOG=1")
            await asyncio.sleep(self.watchdog_s / 2)

    def _send(self, *lines: str) -> None:
        if self._address is None:
            return
        address = self._address.replace("@", "\0", 1) if self._address[0] == "@" else self._address
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as channel:
            channel.setblocking(False)  # a busy systemd must not hold up the event loop
            try:
                channel.sendto("\n".join(lines).encode(), address)
            except OSError as error:
                # Not fatal: what systemd makes of our silence is its operator's choice.
                structlog.get_logger().warning("systemd not notified", cause=str(error))


def _status(text: str) -> str:
    return "STATUS=" + " ".join(text.splitlines())


# ---- memory -----------------------------------------------------------------


def resident_bytes(pids: Iterable[int]) -> int:
    """Resident memory of these processes together, in bytes; ended ones count nothing.

    Pages that they share are counted in each.
    """
    total = 0
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            total += psutil.Process(pid).memory_info().rss
    return total
