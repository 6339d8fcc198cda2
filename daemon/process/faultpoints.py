"""Fault points: where a test may kill this site, hang it, or fill its disk.

    HANSE_FAULT="persist:before=kill@2"                  the second time, SIGKILL
    HANSE_FAULT="persist:before=enospc@1x5"              the first five times, "no space left"
    HANSE_FAULT="send.vote:after=kill version:rename=hang"

A point stands at every boundary between two effects of the driver
(daemon/rounds/driver.py) and between two steps of a write (daemon/state/versions.py,
daemon/library/dense/folder.py, daemon/library/store.py, daemon/jobs/originals.py): what a
power cut can fall between. The names are ``<effect>:before`` and
``<effect>:after``; `points` gives them all, and a name that is not there is
refused at the start, so that no test passes because it misspelt one.

Security: whoever sets a daemon's environment could stop it anyway. A fault can
kill the process, make it wait, or have a write fail as a full or read-only disk
does; it can't change a byte, skip a check or write a line less. Without the
variable, `passing` is a function that does nothing.
"""

from __future__ import annotations

import errno
import multiprocessing
import os
import re
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache

VARIABLE = "HANSE_FAULT"

# What the driver does at once, or begins, beside the work of attempts.
_EFFECTS = (
    *("persist", "beginattempt", "fetchversion", "fetchcertificates", "accuse", "wentback"),
    "adopt",
)
_SIDES = ("before", "after")
_WRITES = (
    *("version:write", "version:rename", "version:renamed", "version:synced"),
    *("index:write", "index:rename", "index:renamed"),
    *("files:write", "files:written", "privacy:booked"),
    *("originals:named", "originals:kept", "originals:collect"),
)


@cache
def points() -> frozenset[str]:
    """Every fault point, by name: of effects, of messages, of writes."""
    # Here, because only a test asks, and workers need nothing of it.
    from peers.attempts import modes  # noqa: F401  a mode's own effects
    from peers.attempts.effects import Work
    from proto import federation_pb2 as pb

    work, waiting = list[str](), Work.__subclasses__()
    while waiting:
        kind = waiting.pop()
        work.append(kind.__name__.lower())
        waiting += kind.__subclasses__()
    bodies = pb.Envelope.DESCRIPTOR.oneofs_by_name["body"].fields
    sent = (f"send.{one.message_type.name.lower()}" for one in bodies if one.message_type)
    around = (*_EFFECTS, *work, *sent)
    return frozenset({*_WRITES, *(f"{one}:{side}" for one in around for side in _SIDES)})


_FAULT = re.compile(r"(?P<point>[a-z.:]+)=(?P<what>[a-z]+)(@(?P<first>\d+))?(x(?P<times>\d+))?")


class FaultSpecError(Exception):
    """HANSE_FAULT can't be read: the text says which part."""


@dataclass
class _Fault:
    """What happens at a point, from the ``first`` time on, ``times`` times."""

    happen: Callable[[], None]
    first: int
    times: int
    passed: int = 0

    def __call__(self) -> None:
        self.passed += 1
        if self.first <= self.passed < self.first + self.times:
            self.happen()


def _kill() -> None:
    """The whole site at once, as a power cut does: a worker takes the daemon with it."""
    parent = multiprocessing.parent_process()
    if parent is not None and parent.pid is not None:
        os.kill(parent.pid, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def _hang() -> None:
    while True:
        time.sleep(3600)


def _full() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _read_only() -> None:
    raise OSError(errno.EROFS, os.strerror(errno.EROFS))


_HAPPENINGS: dict[str, Callable[[], None]] = {
    "kill": _kill,
    "hang": _hang,
    "enospc": _full,
    "erofs": _read_only,
}


def read(spec: str) -> Mapping[str, _Fault]:
    """The faults that a HANSE_FAULT asks for; raises FaultSpecError."""
    faults: dict[str, _Fault] = {}
    for part in spec.split():
        match = _FAULT.fullmatch(part)
        if match is None:
            raise FaultSpecError(f"{VARIABLE}: {part!r} is not <point>=<what>[@first][x<times>]")
        if match["point"] not in points():
            raise FaultSpecError(f"{VARIABLE}: there is no fault point {match['point']!r}")
        if match["what"] not in _HAPPENINGS:
            known = ", ".join(_HAPPENINGS)
            raise FaultSpecError(f"{VARIABLE}: {match['what']!r} is none of {known}")
        faults[match["point"]] = _Fault(
            _HAPPENINGS[match["what"]], int(match["first"] or 1), int(match["times"] or 1)
        )
    return faults


def _nothing(point: str, /) -> None:
    """No fault is asked for."""


def passing_with(spec: str) -> Callable[[str], None]:
    """What `passing` is under that HANSE_FAULT."""
    faults = read(spec)
    if not faults:
        return _nothing

    def pass_by(point: str, /) -> None:
        if point not in points():
            raise FaultSpecError(f"the program passes {point!r}, which points() does not list")
        if (fault := faults.get(point)) is not None:
            fault()

    return pass_by


passing: Callable[[str], None] = passing_with(os.environ.get(VARIABLE, ""))
"""Called at a fault point with its name; does nothing unless HANSE_FAULT names it."""
