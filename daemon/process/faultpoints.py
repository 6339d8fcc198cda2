"""Fault points: where a test may kill this site, hang it, or fill its disk.

    HANSE_FAULT="persist:before=kill@2"                  the second time, SIGKILL
    HANSE_FAULT="persist:before=enospc@1x5"              the first five times, "no space left"
    HANSE_FAULT="send.vote:after=kill version:rename=hang"

A point stands at every boundary between two effects of the driver
(daemon/rounds/driver.py) and between two steps of a write (daemon/state/versions.py): what a
power cut can fall between. The names are ``<effect>:before`` and
``<effect>:after``; ``POINTS`` lists them all, and a name that is not there is
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

VARIABLE = "HANSE_FAULT"

_EFFECTS = (
    "persist",
    "beginattempt",
    "dealkey",
    "mask",
    "openshares",
    "startmaskedsum",
    "train",
    "encryptupdate",
    "addupdate",
    "compareupdates",
    "sendproducts",
    "decryptproducts",
    "finishsum",
    "sendsum",
    "challenge",
    "answerchallenge",
    "applysum",
    "fetchversion",
    "fetchcertificates",
    "accuse",
    "adopt",
)
_BODIES = (
    "runwish",
    "prepare",
    "promised",
    "behind",
    "ahead",
    "bundle",
    "plananswer",
    "keycommitted",
    "trained",
    "scale",
    "contributed",
    "state",
    "stated",
    "certified",
    "compared",
    "challenge",
    "proof",
    "maskingorder",
    "maskinganswer",
    "openings",
    "appliedsum",
    "proven",
    "vote",
    "commit",
    "attemptfailed",
    "endedattempt",
    "evidence",
    "recall",
    "remembered",
)
_WRITES = ("version:write", "version:rename", "version:renamed", "version:synced", "privacy:booked")

POINTS = frozenset(
    {f"{effect}:{side}" for effect in _EFFECTS for side in ("before", "after")}
    | {f"send.{body}:{side}" for body in _BODIES for side in ("before", "after")}
    | {*_WRITES}
)
"""Every fault point, by name."""

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
        if match["point"] not in POINTS:
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
        if point not in POINTS:
            raise FaultSpecError(f"the program passes {point!r}, which POINTS does not list")
        if (fault := faults.get(point)) is not None:
            fault()

    return pass_by


passing: Callable[[str], None] = passing_with(os.environ.get(VARIABLE, ""))
"""Called at a fault point with its name; does nothing unless HANSE_FAULT names it."""
