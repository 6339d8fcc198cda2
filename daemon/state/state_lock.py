"""One daemon per state: a lock on the state folder, for as long as the process lives.

A second daemon on the same folder would empty the spool under the first one's hands,
write into its audit log and promise and vote beside it. The lock is flock(2) on a file
in the folder: it belongs to the open file, not to a name or a number that is written
down, so the kernel lets go of it when the process is gone, whatever ended it.

The descriptor is closed by exec, and every child of ours is exec'ed (multiprocessing's
`spawn` and `forkserver`; a worker is forked from the latter, which never had it). So a
worker that outlives a killed daemon does not keep the lock, and one that ends does not
take it along. A record lock (fcntl F_SETLK) would be lost as soon as anything in this
process opened the file once more and closed it.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import psutil
import structlog

log = structlog.get_logger()

LOCK_FILE: Final = "fedd.lock"
"""Name of the file in the state folder; it holds the process id of the daemon that runs."""

_NAMED_WITHIN_S: Final = 1.0  # between having the lock and having written one's number


class StateError(Exception):
    """The state folder can't be used; the text says why and what to do."""


class StateInUse(StateError):
    """Another daemon uses the state folder."""


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Have the state folder for this process alone; made if it is missing.

    Raises StateInUse, having changed nothing in the folder, when another process has it,
    and StateError when the folder or the file can't be made or locked.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # No link is followed: what it names would be emptied.
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        descriptor = os.open(folder / LOCK_FILE, flags, 0o600)
    except OSError as error:
        raise StateError(
            f"cannot use the folder {folder}: {error.strerror} ({error.filename}); "
            "check [site] state_dir, its disk and its rights"
        ) from error
    try:
        _lock(descriptor, folder)
        _write(descriptor, f"{os.getpid()}\n".encode())
        try:
            yield
        finally:
            # The file stays: who has it open to wait for us would lock what has no name.
            _write(descriptor, b"")
    finally:
        os.close(descriptor)


def _lock(descriptor: int, folder: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise StateInUse(
            f"another fedd (process {_holder(descriptor)}) uses the state folder {folder}, and "
            "nothing in it was changed: stop that one, or give this one a folder of its own "
            "([site] state_dir)"
        ) from None
    except OSError as error:
        raise StateError(
            f"cannot lock {folder / LOCK_FILE}: {error.strerror}; [site] state_dir must be on a "
            "local disk"
        ) from error


def _holder(descriptor: int) -> str:
    """Who has the lock, as the file says; the number of one that was killed is passed over."""
    until = time.monotonic() + _NAMED_WITHIN_S
    while True:
        written = os.pread(descriptor, 20, 0).strip()
        alive = written.isdigit() and psutil.pid_exists(int(written))
        if alive or time.monotonic() > until:
            # Of another container on this machine, the number is not among ours.
            return written.decode() if written.isdigit() else "of unknown number"
        time.sleep(0.02)


def _write(descriptor: int, text: bytes) -> None:
    """For people; the lock does not depend on it, and a full disk must not keep a site down."""
    try:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, text, 0)
    except OSError as error:
        log.warning("the lock file does not name this process", cause=str(error))
