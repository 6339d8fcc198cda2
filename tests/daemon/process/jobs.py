"""What workers are given to do in tests; imports little, for each worker imports it anew."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
import time
from pathlib import Path

import structlog

from daemon.process.chat_client import ChatClient, Sampling
from daemon.process.workers import (
    GivenUp,
    NobodyAnswers,
    ask,
    given_up,
    reads,
    report,
    when_given_up,
)

MIB = 1 << 20


def reporting(item: int) -> int:
    report(item)
    return os.getpid()


def reporting_and_sleeping() -> None:
    report("begun")
    time.sleep(600)


def reporting_and_failing(count: int) -> None:
    for number in range(count):
        report(number)
    raise ValueError("after many reports")


def warn(event: str) -> None:
    structlog.get_logger().warning(event)


def whereabouts() -> tuple[bool, str, int]:
    """Whether what was to be imported is here, the limit on threads, and the parent."""
    return "fractions" in sys.modules, os.environ["OMP_NUM_THREADS"], os.getppid()


# ---- that ask ---------------------------------------------------------------------------


def asking(count: int, size: int) -> list[int]:
    """Lengths of the answers to ``count`` questions of ``size`` bytes."""
    return [len(ask(bytes(size))) for _ in range(count)]


def asking_until_nobody_answers() -> str:
    """Why it ended."""
    try:
        while True:
            ask("is anybody there?")
    except NobodyAnswers as error:
        return str(error)


def asking_when_let(gate: Path) -> str:
    """``gate``: a FIFO, which holds it until somebody opens it to write."""
    report("begun")
    gate.read_bytes()
    return asking_until_nobody_answers()


def asking_after_a_failure() -> str:
    try:
        ask("first")
    except ValueError as error:
        return f"{error}, then {ask('second')}"
    return "no failure"


# ---- that end badly ---------------------------------------------------------------------


@reads("the update of {site}")
def crash(how: signal.Signals, site: str) -> None:
    """As native code does: no Python runs any more."""
    if how is signal.SIGSEGV:
        ctypes.string_at(0)
    os.abort()


@reads("the update of {site}")
def take_memory(mebibytes: int, site: str) -> int:
    return len(bytearray(mebibytes * MIB))


def hang(path: Path) -> None:
    path.touch()
    while True:
        time.sleep(60)


def limits() -> tuple[int, int]:
    return resource.getrlimit(resource.RLIMIT_DATA)


# ---- that are given up ------------------------------------------------------------------


def until_given_up(told: Path) -> None:
    """Ends when nobody waits for it any more, and leaves a note of how it heard."""
    heard: list[str] = []
    with when_given_up(lambda: heard.append("called")):
        report("begun")
        while not given_up():
            time.sleep(0.005)
    told.write_text("".join(heard))
    raise GivenUp("nobody waits")


def is_given_up() -> tuple[bool, int]:
    return given_up(), os.getpid()


def noting(told: Path) -> None:
    told.write_text("begun")


def asking_a_model(url: str, told: Path) -> str:
    """What a server says; whether it was left before that stands in the file."""
    try:
        return ChatClient(url, "m").reply("Which?", Sampling(64), 300, report)
    except GivenUp:
        told.write_text("given up")
        raise
