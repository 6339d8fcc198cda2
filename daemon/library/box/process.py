"""The process in which a file is read or drawn, and the one that forks it.

To start Python takes longer than to read most files: so there is one process that does nothing
but fork.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final, NoReturn

from daemon.library.box.told import (
    ATTACHED,
    DOCUMENT,
    IMAGE,
    LONGEST_CAUSE,
    NO_PAGE,
    OVER,
    PAIR,
    PROBLEM,
    READ,
    REQUEST_BYTES,
    Limits,
    tell,
)
from daemon.library.files import Found, read_file, reader_of
from daemon.library.readers.documents import Attached, Document, FileProblem, Pair
from daemon.library.readers.reader import (
    STEP,
    NoSuchPage,
    Refused,
    Source,
    TooSlow,
    cause_of,
)
from daemon.process.confinement import ConfinementError, confine, end_with_parent

_GRACE_S: Final = 5.0  # for what does not heed its alarm
_TELL_S: Final = 1.0  # a scan is few bytes a page, and people wait


def main() -> None:
    """Fork a reader for each request that comes on standard input, until nobody asks."""
    end_with_parent()
    requests = socket.socket(fileno=0)
    readers = _Readers(requests)
    while True:
        readers.end_those_over()
        request, told, _, _ = socket.recv_fds(requests, REQUEST_BYTES, 1)
        if not request:
            readers.end()
        with Connection(told[0], readable=False) as connection:
            _fork(requests, request, connection, readers)


@dataclass(frozen=True)
class _Reader:
    """``alive``: a descriptor of its process; ``told``: of the pipe in which it tells."""

    pid: int
    alive: int
    told: int


class _Readers:
    """Those that read, each with what it began in a group of processes, which it can't leave.

    A reader is over when it ends, and when nobody listens to it any more: its file is read or
    given up then, whatever the reader thinks of that.
    """

    def __init__(self, requests: socket.socket) -> None:
        self._requests = requests.fileno()
        self._by: dict[int, _Reader] = {}  # by each of its descriptors
        self._events = select.poll()
        self._events.register(self._requests, select.POLLIN)

    def begin(self, told: int) -> int:
        """As `os.fork`; what is read is told there."""
        child = os.fork()
        if child == 0:
            os.setpgid(0, 0)
            for others in self._by:
                os.close(others)
            return child
        with suppress(OSError):  # it has done so itself, or is gone
            os.setpgid(child, child)
        try:
            reader = _Reader(child, os.pidfd_open(child), os.dup(told))
        except OSError:
            _end_group(child)
            os.waitpid(child, 0)
            raise
        self._by |= {reader.alive: reader, reader.told: reader}
        self._events.register(reader.alive, select.POLLIN)
        self._events.register(reader.told, 0)  # that nobody listens is told unasked
        return child

    def end_those_over(self) -> None:
        """Until something is asked for."""
        asked = False
        while not asked:
            for descriptor, _ in self._events.poll():
                asked |= descriptor == self._requests
                if descriptor in self._by:
                    self._end(self._by[descriptor], has_ended=descriptor)

    def _end(self, reader: _Reader, *, has_ended: int) -> None:
        _end_group(reader.pid)
        self._forget(reader.told)
        if has_ended == reader.alive:
            os.waitpid(reader.pid, 0)  # from here on its number may be given to another
            self._forget(reader.alive)

    def _forget(self, descriptor: int) -> None:
        if self._by.pop(descriptor, None) is not None:
            self._events.unregister(descriptor)
            os.close(descriptor)

    def end(self) -> NoReturn:
        """End all of them, and this process."""
        for reader in self._by.values():
            _end_group(reader.pid)
        os._exit(0)


def _end_group(pid: int) -> None:
    with suppress(ProcessLookupError):  # it had not made its group yet
        os.killpg(pid, signal.SIGKILL)
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _fork(requests: socket.socket, request: bytes, told: Connection, readers: _Readers) -> None:
    """Have a request's file read. Where that can't be begun, others are read all the same."""
    path, name, below, limits, drawn = json.loads(request)
    file = Found(Path(path), name, Path(below) if below else None)
    try:
        # What it asks for first is its libraries, which its children have then. Nothing of a
        # file is looked at before its first block is asked for.
        if (reader := reader_of(Path(file.name))) is not None and reader.blocks is not None:
            reader.blocks(Source(file.path, name, 0))
        child = readers.begin(told.fileno())
    except Exception as error:
        cause = f"this machine can't begin to read it ({type(error).__name__}: {error})"
        with suppress(OSError):  # nobody listens any more
            tell(told, PROBLEM, FileProblem("", _sayable(cause), passing=True))
            told.send_bytes(OVER)
        return
    if child == 0:
        requests.close()
        if drawn:
            _draw(file, (drawn[0], drawn[1]), Limits(**limits), told)
        else:
            _read(file, Limits(**limits), told)
        os._exit(0)


# ---- a reader -----------------------------------------------------------------------


def _read(file: Found, limits: Limits, told: Connection) -> None:
    """Read a file and tell what is in it."""
    unsaid, said = 0, time.monotonic()

    def watch(count: int) -> None:
        nonlocal unsaid, said
        unsaid += count
        if unsaid >= STEP or time.monotonic() - said > _TELL_S:
            _pause()  # whoever listens may take their time
            tell(told, READ, unsaid)
            unsaid, said = 0, time.monotonic()
        signal.signal(signal.SIGALRM, _too_slow)
        signal.setitimer(signal.ITIMER_REAL, limits.pause_s, _GRACE_S)

    def ready(path: Path) -> None:
        confine(path, memory_bytes=limits.memory_bytes, cpu_s=limits.file_s)

    try:
        watch(0)
        for item in read_file(file, watch, ready):
            _pause()
            match item:
                case Document():
                    tell(told, DOCUMENT, item)
                case Pair():
                    tell(told, PAIR, item)
                case FileProblem():
                    tell(told, PROBLEM, replace(item, path="", cause=_sayable(item.cause)))
                case Attached():
                    tell(told, ATTACHED, item.name)
                    told.send_bytes(ATTACHED + item.content)
            watch(0)
        _pause()
        tell(told, READ, unsaid)
    except BrokenPipeError:
        return  # nobody listens any more
    except (TooSlow, Exception) as error:
        _pause()
        tell(told, PROBLEM, _problem_of(error, limits))
    told.send_bytes(OVER)


def _draw(file: Found, page: tuple[int, int], limits: Limits, told: Connection) -> None:
    """Draw a page of a file, by its number and pixels an inch, and tell its image."""
    reader = reader_of(Path(file.name))
    if reader is None or reader.page is None:
        cause = "not a kind of file that has pages to be drawn"
        tell(told, PROBLEM, FileProblem("", cause))
        return
    try:
        signal.signal(signal.SIGALRM, _too_slow)
        signal.setitimer(signal.ITIMER_REAL, limits.pause_s, _GRACE_S)
        confine(file.path, memory_bytes=limits.memory_bytes, cpu_s=limits.file_s)
        image = reader.page(file.path, *page)
        _pause()
        told.send_bytes(IMAGE + image)
    except NoSuchPage as error:
        tell(told, NO_PAGE, error.pages)
    except (Refused, OSError) as error:
        cause = str(error) if isinstance(error, Refused) else cause_of(error)
        with suppress(BrokenPipeError):  # nobody listens any more
            tell(told, PROBLEM, FileProblem("", _sayable(cause)))
    except (TooSlow, Exception) as error:
        _pause()
        tell(told, PROBLEM, _problem_of(error, limits))


def _problem_of(error: BaseException, limits: Limits) -> FileProblem:
    """What ended the reading of a file, and whose fault it is."""
    match error:
        case TooSlow():
            cause = f"a page took more than {limits.pause_s:.0f} s: cut it into several files"
        case ConfinementError():
            cause = str(error)
        case MemoryError():
            cause = f"needs more than {limits.memory_bytes >> 20} MiB to be read: cut it"
        case _:
            kind = type(error).__name__
            cause = f"damaged, or of a kind that isn't known ({kind}): save it anew"
    passing = isinstance(error, TooSlow | ConfinementError)
    return FileProblem("", _sayable(cause), passing=passing)


def _pause() -> None:
    signal.setitimer(signal.ITIMER_REAL, 0)


def _too_slow(_signal: int, _frame: object) -> None:
    """Raise TooSlow; what does not heed that is ended by the next alarm."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    raise TooSlow


def _sayable(cause: str) -> str:
    return cause.encode(errors="replace").decode()[:LONGEST_CAUSE]


if __name__ == "__main__":
    main()
