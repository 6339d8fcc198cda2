"""What the daemon says about itself: log lines, lag, systemd, memory."""

from __future__ import annotations

import asyncio
import errno
import io
import json
import logging
import mmap
import os
import pty
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import structlog

from daemon.process.log import configure_logging, redact
from daemon.process.systemd import Notifier
from daemon.process.telemetry import Lag, LoopLag, resident_bytes

QUESTION = "is my uncle's illness hereditary"


@pytest.fixture(autouse=True)
def logging_as_it_was() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    structlog.reset_defaults()
    structlog.contextvars.clear_contextvars()
    logging.basicConfig(level=level, handlers=handlers, force=True)


def json_lines(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


# ---- log --------------------------------------------------------------------


def test_a_line_is_one_json_object_where_no_terminal_is() -> None:
    stream = io.StringIO()
    configure_logging(stream=stream)
    with structlog.contextvars.bound_contextvars(round=7, attempt=1):
        structlog.get_logger().info(
            "attempt failed", coordinator="north", cause="no answer\nin time"
        )
    (line,) = json_lines(stream)
    assert line.pop("timestamp").endswith("Z")
    assert line == {
        "event": "attempt failed",
        "level": "info",
        "round": 7,
        "attempt": 1,
        "coordinator": "north",
        "cause": "no answer\nin time",
    }


def test_a_terminal_gets_lines_for_people(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INVOCATION_ID", "0" * 32)  # inherited by a desktop's terminals
    monkeypatch.setenv("JOURNAL_STREAM", "1:1")
    ours, theirs = pty.openpty()
    try:
        with os.fdopen(theirs, "w") as terminal:
            configure_logging(stream=terminal)
            structlog.get_logger().info("round committed", round=3)
            terminal.flush()
            shown = os.read(ours, 65536).decode()
    finally:
        os.close(ours)
    assert "round committed" in shown
    assert not shown.startswith("{")


def test_a_journal_gets_json_with_the_level_in_front(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "journal"
    with path.open("w") as stream:
        status = os.fstat(stream.fileno())
        monkeypatch.setenv("JOURNAL_STREAM", f"{status.st_dev}:{status.st_ino}")
        configure_logging(stream=stream)
        structlog.get_logger().error("disk full")
        logging.getLogger("library").warning("slow")
    first, second = path.read_text().splitlines()
    assert first.startswith("<3>{")
    assert second.startswith("<4>{")
    assert json.loads(second[3:])["logger"] == "library"


def test_the_level_holds_and_libraries_are_heard_from_warning_on() -> None:
    stream = io.StringIO()
    configure_logging(level="debug", stream=stream)
    structlog.get_logger().debug("ours")
    logging.getLogger("library").info("chatter")
    logging.getLogger("library").warning("theirs")
    configure_logging(level="error", stream=stream)
    structlog.get_logger().warning("ours again")
    logging.getLogger("library").warning("theirs again")
    assert [line["event"] for line in json_lines(stream)] == ["ours", "theirs"]


def test_a_warning_of_pythons_is_a_line_as_others() -> None:
    program = (
        "import warnings; from daemon.process.log import configure_logging\n"
        "configure_logging(); warnings.warn('old', UserWarning)"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, check=True, text=True
    )
    (line,) = json_lines(io.StringIO(ran.stderr))
    assert (line["level"], "UserWarning: old" in line["event"]) == ("warning", True)


class Full(io.StringIO):
    """A file on a disk that is full, until it is not."""

    full = True

    def write(self, line: str) -> int:
        if self.full:
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().write(line)


def test_lines_that_can_not_be_written_end_nobody_and_are_counted() -> None:
    stream = Full()
    configure_logging(stream=stream)
    structlog.get_logger().warning("one")
    structlog.get_logger().warning("another")
    stream.full = False
    structlog.get_logger().warning("a third")
    structlog.get_logger().warning("a fourth")
    third, fourth = json_lines(stream)
    assert (third["event"], third["lines_lost"]) == ("a third", 2)
    assert "lines_lost" not in fourth


@pytest.mark.parametrize(
    "name",
    [
        "question",
        "queries",
        "query",
        "text",
        "title",
        "Titles",
        "best_passages",
        "answer_text",
        "site_key",
        "key_pem",
        "secret",
    ],
)
@pytest.mark.parametrize("value", [QUESTION, [QUESTION], {"a": QUESTION}, QUESTION.encode()])
@pytest.mark.parametrize("format", ["json", "console"])
def test_no_line_holds_what_people_asked_or_wrote(name: str, value: Any, format: Any) -> None:
    stream = io.StringIO()
    configure_logging(format=format, stream=stream)
    log = structlog.get_logger()
    log.info("asked", **{name: value})
    log.info("asked", request={"inner": [{name: value}]})
    logging.getLogger("library").warning("asked", extra={name: value})
    assert stream.getvalue().count("asked") == 3
    assert "uncle" not in stream.getvalue()
    assert QUESTION.encode().hex() not in stream.getvalue()


def test_an_object_is_shown_by_its_type_alone() -> None:
    class AskRequest:
        def __repr__(self) -> str:
            return QUESTION

    assert redact(None, "info", {"event": "asked", "request": AskRequest()}) == {
        "event": "asked",
        "request": "<AskRequest>",
    }


def test_what_helps_and_harms_nobody_stays() -> None:
    said = {
        "event": "index swapped",
        "passages": 1200,
        "key_dealer": "south",
        "digest": b"\x01" * 32,
        "update": b"\x01" * 33,
        "path": Path("/var/lib/hanse"),
        "cause": ValueError("out of bounds"),
        "sites": ("north", "south"),
    }
    assert redact(None, "info", dict(said)) == {
        "event": "index swapped",
        "passages": 1200,
        "key_dealer": "south",
        "digest": "01" * 32,
        "update": "<33 bytes>",
        "path": "/var/lib/hanse",
        "cause": "out of bounds",
        "sites": ["north", "south"],
    }


@pytest.mark.parametrize("format", ["json", "console"])
def test_a_traceback_shows_no_local_variables(format: Any) -> None:
    stream = io.StringIO()
    configure_logging(format=format, stream=stream)
    question = "".join(reversed(QUESTION))
    nothing: dict[int, str] = {}
    try:
        nothing[len(question)]
    except KeyError:
        structlog.get_logger().exception("cannot answer")
        logging.getLogger("library").exception("cannot answer")
    assert stream.getvalue().count("KeyError: 32") == 2
    assert question not in stream.getvalue()


# ---- lag --------------------------------------------------------------------


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_quantiles_of_known_lags() -> None:
    lag = LoopLag(interval_s=10.0)
    for _ in range(980):
        lag.record(0.001)
    for _ in range(20):
        lag.record(0.050)
    seen = lag.since_start()
    assert seen.samples == 1000
    assert seen.p50_ms == pytest.approx(1.0, rel=0.13)
    assert seen.p99_ms == pytest.approx(50.0, rel=0.13)
    assert seen.max_ms == pytest.approx(50.0)


def test_before_the_first_sample_nothing_is_claimed() -> None:
    assert LoopLag().since_start() == Lag(0, 0.0, 0.0, 0.0)


def test_a_stall_counts_for_every_sample_that_it_swallowed() -> None:
    lag = LoopLag(interval_s=0.02)
    for _ in range(50):
        lag.record(0.0)
    lag.record(1.0)  # one late sample, in whose time fifty were due
    seen = lag.since_start()
    assert seen.samples == 100
    assert seen.p99_ms > 900


@pytest.mark.parametrize("lag_s", [0.0, 1e-9, 1e-4, 99.9, 1e9])
def test_any_lag_finds_its_place(lag_s: float) -> None:
    lag = LoopLag()
    lag.record(lag_s)
    seen = lag.since_start()
    assert seen.max_ms == pytest.approx(lag_s * 1e3)
    assert seen.p50_ms <= seen.p99_ms <= seen.max_ms
    assert seen.samples <= 3000


def test_the_start_is_not_forgotten() -> None:
    clock = Clock()
    lag = LoopLag(clock=clock)
    lag.record(0.5)
    clock.now += 3600
    lag.record(0.001)
    assert lag.since_start().max_ms == pytest.approx(500)


@pytest.mark.slow
async def test_a_blocked_event_loop_is_seen() -> None:
    lag = LoopLag()
    async with asyncio.timeout(5):
        sampling = asyncio.create_task(lag.run())
        await asyncio.sleep(0.2)
        calm = lag.since_start()
        time.sleep(0.3)  # noqa: ASYNC251 -- the very thing that is to be noticed
        await asyncio.sleep(0.05)
        sampling.cancel()
        with suppress(asyncio.CancelledError):
            await sampling
    assert calm.samples >= 3
    assert lag.since_start().max_ms > 250
    assert lag.since_start().max_ms > calm.max_ms


# ---- systemd ----------------------------------------------------------------


def listening(address: str) -> socket.socket:
    channel = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    channel.bind(address)
    channel.settimeout(5)
    return channel


def test_a_life_as_systemd_hears_it(tmp_path: Path) -> None:
    with listening(str(tmp_path / "notify")) as systemd:
        notifier = Notifier(str(tmp_path / "notify"))
        notifier.ready("north: 2 of 2 peers")
        notifier.status("training\nREADY=1")  # a line break must not become a message
        before_us = time.monotonic_ns() // 1000
        notifier.reloading()
        notifier.stopping("asked to")
        assert systemd.recv(4096) == b"READY=1\nSTATUS=north: 2 of 2 peers"
        assert systemd.recv(4096) == b"STATUS=training READY=1"
        reloading, monotonic = systemd.recv(4096).decode().split("\n")
        assert reloading == "RELOADING=1"
        name, microseconds = monotonic.split("=")
        assert name == "MONOTONIC_USEC"
        assert before_us <= int(microseconds) <= time.monotonic_ns() // 1000
        assert systemd.recv(4096) == b"STOPPING=1\nSTATUS=asked to"


def test_an_abstract_socket_will_do() -> None:
    name = f"hanse-test-{os.getpid()}"
    with listening(f"\0{name}") as systemd:
        Notifier(f"@{name}").status("here")
        assert systemd.recv(4096) == b"STATUS=here"


def test_children_are_not_told_where_systemd_listens() -> None:
    environment = {
        "NOTIFY_SOCKET": "/run/notify",
        "WATCHDOG_USEC": "30000000",
        "WATCHDOG_PID": str(os.getpid()),
    }
    assert Notifier.from_environment(environment).watchdog_s == 30.0
    assert "NOTIFY_SOCKET" not in environment


def test_a_watchdog_meant_for_another_process_is_left_to_it() -> None:
    environment = {"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": str(os.getpid() + 1)}
    assert Notifier.from_environment(environment).watchdog_s is None


@pytest.mark.slow
async def test_the_watchdog_is_fed_twice_in_its_interval(tmp_path: Path) -> None:
    with listening(str(tmp_path / "notify")) as systemd:
        feeding = asyncio.create_task(
            Notifier(str(tmp_path / "notify"), watchdog_s=0.1).keep_watchdog_fed()
        )
        await asyncio.sleep(0.3)
        feeding.cancel()
        systemd.settimeout(0)
        fed = 0
        with suppress(BlockingIOError):
            while systemd.recv(4096) == b"WATCHDOG=1":
                fed += 1
    assert fed >= 3


async def test_without_systemd_nothing_is_sent_and_nothing_waits() -> None:
    notifier = Notifier.from_environment({})
    notifier.ready("here")
    async with asyncio.timeout(1):
        await notifier.keep_watchdog_fed()


def test_a_systemd_that_is_gone_is_logged_and_no_reason_to_stop(tmp_path: Path) -> None:
    with structlog.testing.capture_logs() as logs:
        Notifier(str(tmp_path / "gone")).ready("here")
    assert [line["event"] for line in logs] == ["systemd not notified"]


def test_an_address_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="expected a path or an abstract name"):
        Notifier("vsock:2:1234")


# ---- memory, weight ---------------------------------------------------------


def test_memory_of_processes_that_run_and_of_those_that_ended() -> None:
    with subprocess.Popen([sys.executable, "-c", "pass"]) as ended:
        ended.wait()
    own = resident_bytes([os.getpid()])
    assert own > 5_000_000
    assert resident_bytes([os.getpid(), ended.pid]) == pytest.approx(own, rel=0.2)
    assert resident_bytes([]) == 0


def test_memory_that_processes_share_counts_once() -> None:
    shared = mmap.mmap(-1, 256 << 20)  # what the child writes of its own is less, by far
    shared.write(b"x" * len(shared))
    before = resident_bytes([os.getpid()])
    child = os.fork()
    if not child:
        shared.seek(0)
        shared.read()
        os.kill(os.getpid(), signal.SIGSTOP)
        os._exit(0)
    os.waitpid(child, os.WUNTRACED)
    try:
        assert resident_bytes([os.getpid(), child]) < before + (192 << 20)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
