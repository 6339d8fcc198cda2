"""What a process can't do any more that has given it up; readers' own tests have the rest."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(
    platform.machine() != "x86_64", reason="its calls have other numbers"
)

# As on a kernel whose Landlock lets signals through (before 6.12).
PROGRAM = """
import ctypes, fcntl, os, signal, sys
from daemon.process import confinement

confinement.landlock_version = lambda: 5
confinement._prctl(confinement._PR_SET_NO_NEW_PRIVS, 1)
other, me = os.getppid(), os.getpid()
handle, (reading, _) = os.pidfd_open(other), os.pipe()
if sys.argv[1:] == ["filtered"]:
    confinement._call_nobody()
libc = ctypes.CDLL(None, use_errno=True)

def called(*call):
    if libc.syscall(*call) < 0:
        raise OSError(ctypes.get_errno(), "")

for act in (
    lambda: os.kill(other, 0),
    lambda: called(200, other, 0),  # tkill
    lambda: called(234, other, other, 0),  # tgkill
    lambda: called(424, handle, 0, 0, 0),  # pidfd_send_signal
    lambda: fcntl.fcntl(reading, 8, other),  # F_SETOWN
    lambda: os.kill(me, 0),
    lambda: called(234, me, me, 0),
    lambda: fcntl.fcntl(reading, fcntl.F_GETFL),
):
    try:
        act()
        print("done", end=" ")
    except PermissionError:
        print("refused", end=" ")
"""


@pytest.mark.parametrize(
    ("how", "others"), [("filtered", "refused"), ("as it was", "done")], ids=["filtered", "not"]
)
def test_where_landlock_lets_signals_through_the_filter_does_not(how: str, others: str) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM, how], capture_output=True, text=True, timeout=60, check=True
    )
    assert ran.stdout.split() == [others] * 5 + ["done"] * 3
