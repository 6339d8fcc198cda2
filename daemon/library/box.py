"""Readers in boxes: each file is read by a process of its own, which can do little else.

Files come from anywhere, and what parses them is large and partly written in C. So the
process that reads one has bounded memory and time, writes no file and reaches no network
where the kernel lets us say so, and is over when its file is. What it tells is taken as a
stranger's word: never unpickled, bounded, and under no other file's name.

To start Python takes longer than to read most files: so there is one process that does
nothing but fork (`main`).
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path, PurePosixPath
from types import TracebackType
from typing import Any, Final

from pydantic import TypeAdapter, ValidationError

from daemon.library.files import Found, read_file, reader_of
from daemon.library.readers import documents
from daemon.library.readers.documents import Attached, Document, FileProblem, Item, Pair
from daemon.library.readers.reader import STEP, Source, cause_of

_MESSAGE_BYTES: Final = 6 * documents.MAX_TEXT_BYTES  # a text, and where its blocks lie
_REQUEST_BYTES: Final = 64 << 10
_PIPE_BYTES: Final = 1 << 20
_GRACE_S: Final = 10.0  # on a busy machine, for a reader to end itself in
_PROBLEMS: Final = 1000  # of a file
_TELL_S: Final = 1.0  # a scan is few bytes a page, and people wait
_LONGEST_CAUSE: Final = 1000  # characters
_LONGEST_NAME: Final = 200  # bytes of an attached file's name; Linux has 255
_ENVIRONMENT: Final = ("PATH", "PYTHONPATH", "TMPDIR", "TESSDATA_PREFIX", "LANG", "LC_ALL")

_TOLD: Final[dict[bytes, TypeAdapter[Any]]] = {
    b"D": TypeAdapter(Document),
    b"P": TypeAdapter(Pair),
    b"F": TypeAdapter(FileProblem),
    b"B": TypeAdapter(int),  # bytes read
    b"A": TypeAdapter(str),  # the name of what is attached; its content is the next message
}
_OVER: Final = b"O"


@dataclass(frozen=True)
class Limits:
    """What the reader of a file may take."""

    memory_bytes: int = 1 << 30  # of data
    pause_s: float = 120.0  # from one block to the next; so a page takes no longer
    file_s: float = 1800.0  # all of it
    attached: int = 100  # files in it
    depth: int = 3  # files in files in files


class _Clock:
    """The seconds that a file may take; what whoever listens takes does not count."""

    def __init__(self, seconds: float) -> None:
        self._left = seconds

    def wait(self, told: Connection, most: float) -> bool:
        """Whether something is told in time."""
        began = time.monotonic()
        is_told = self._left > 0.0 and told.poll(min(most, self._left))
        self._left -= time.monotonic() - began
        return is_told


class Boxes:
    """Reads files, each in a box, as many at once as there are processors."""

    def __init__(self, limits: Limits | None = None) -> None:
        self._limits = limits or Limits()
        self._forks: _Forks | None = None
        self._over = False

    def __enter__(self) -> Boxes:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.end()

    def end(self) -> None:
        """End all that still reads, and what waits for it; from any thread."""
        self._over = True
        if self._forks is not None:
            self._forks.end()

    def read(
        self,
        files: Iterable[Found | FileProblem],
        watch: Callable[[int], None] = lambda _: None,
    ) -> Generator[Item, None, None]:
        """What is in the files, in their order; ``watch`` hears of bytes as they are read."""
        waiting = iter(files)
        begun: deque[tuple[Found, Connection] | FileProblem] = deque()
        read = 0  # of these, files
        try:
            while True:
                # All but the first wait for their turn, once they have told as much as a
                # pipe holds: by then most have told everything.
                while (
                    not self._over
                    and read < (os.cpu_count() or 1)
                    and (file := next(waiting, None))
                ):
                    if isinstance(file, FileProblem):
                        begun.append(file)
                    else:
                        begun.append((file, self._begin(file)))
                        read += 1
                if self._over or not begun:
                    return
                first = begun[0]
                if isinstance(first, FileProblem):
                    yield first
                else:
                    with first[1]:
                        yield from self._whole(*first, watch)
                    read -= 1
                begun.popleft()
        finally:
            for one in begun:
                if not isinstance(one, FileProblem):
                    one[1].close()  # its reader finds nobody who listens, and ends

    def _whole(self, file: Found, told: Connection, watch: Callable[[int], None]) -> Iterator[Item]:
        """A file; ``watch`` hears of all its bytes, also of those that were refused unread."""
        size, read = file.size, 0

        def count(more: int) -> None:
            nonlocal read
            read += more
            watch(more)

        clock = _Clock(self._limits.file_s)
        yield from self._told(file, told, count, str(file.path), 1, clock)
        watch(size - read)

    def _begin(self, file: Found) -> Connection:
        below = str(file.below) if file.below is not None else ""
        request = [str(file.path), file.name, below, asdict(self._limits)]
        if self._forks is not None:
            try:
                return self._forks.begin(request)
            except ConnectionError:  # it was killed, as where memory is short: its readers, too
                self._forks.end()
        self._forks = _Forks()
        return self._forks.begin(request)

    def _told(
        self,
        file: Found,
        told: Connection,
        watch: Callable[[int], None],
        where: str,
        depth: int,
        clock: _Clock,
    ) -> Iterator[Item]:
        """What a reader tells of its file, which people know as ``where``, with what is in it."""
        reader = reader_of(file.path)
        its_id = file.name if reader is not None and reader.named_by_file else None
        documents_told, problems = 0, 0
        names: set[str] = set()
        try:
            while (item := self._next(told, clock)) is not None:
                if isinstance(item, int):
                    watch(item)
                elif isinstance(item, Attached):
                    yield from self._attached(file, item, names, where, depth, clock)
                elif isinstance(item, FileProblem):
                    problems += 1
                    if problems <= _PROBLEMS:  # a path that a file told would not be its own
                        yield replace(item, path=where)
                elif isinstance(item, Document) and its_id is not None:
                    documents_told += 1
                    if documents_told == 1:
                        source = str(Path(where).absolute()).encode(errors="replace")
                        yield replace(item, id=its_id, source=source.decode())
                else:
                    yield item
        except _Ended as ended:
            yield FileProblem(where, str(ended))

    def _next(
        self, told: Connection, clock: _Clock
    ) -> Document | Pair | FileProblem | Attached | int | None:
        """The next that is told; None: that was all. Raises _Ended."""
        kind, content = self._message(told, clock)
        if kind == _OVER:
            return None
        try:
            item = _TOLD[kind].validate_json(content)
            makes_sense = _makes_sense(item)
        except (KeyError, ValidationError):
            makes_sense = False
        if not makes_sense:
            raise _Ended("its reader told what makes no sense: the file is hostile")
        if kind != b"A":
            return item  # type: ignore[no-any-return]
        _, content = self._message(told, clock)
        return Attached(item, content)

    def _message(self, told: Connection, clock: _Clock) -> tuple[bytes, bytes]:
        limits = self._limits
        try:
            if not clock.wait(told, limits.pause_s + _GRACE_S):
                raise _Ended(
                    f"not read within {limits.pause_s:.0f} s a page and {limits.file_s:.0f} s "
                    "all in all: cut it into several files"
                )
            message = told.recv_bytes(_MESSAGE_BYTES)
        except EOFError:
            raise _Ended(
                f"its reader ended: a page took more than {limits.pause_s:.0f} s or "
                f"{limits.memory_bytes >> 20} MiB, or the file is damaged; save it anew or cut it"
            ) from None
        except OSError as error:
            raise _Ended(f"its reader told too much ({error}): cut it into several files") from None
        return message[:1], message[1:]

    def _attached(
        self,
        file: Found,
        attached: Attached,
        names: set[str],
        where: str,
        depth: int,
        clock: _Clock,
    ) -> Iterator[Item]:
        """What is in a file of a file. Its name is its sender's: it names no folder of ours."""
        name = PurePosixPath(attached.name.replace("\0", "")).name[-100:]
        name = "attached" if name in ("", "..") else name
        while name in names:
            name = f"{len(names)}-{name}"
        names.add(name)
        where = f"{where}/{name}"
        if len(names) > self._limits.attached or depth >= self._limits.depth:
            yield FileProblem(where, "too many files in files: take it out and ingest it")
            return
        with tempfile.TemporaryDirectory(prefix="hanse-attached-") as folder:
            # By its end alone it is read; a name on the disk has less room than one in a letter.
            path = Path(folder, name.encode()[-_LONGEST_NAME:].decode(errors="ignore"))
            try:
                path.write_bytes(attached.content)
            except OSError as error:
                yield FileProblem(where, f"can't be taken out of its file: {cause_of(error)}")
                return
            inner = Found(path, f"{file.name}/{name}")
            with self._begin(inner) as told:
                yield from self._told(inner, told, lambda _: None, where, depth + 1, clock)


def _makes_sense(item: object) -> bool:
    """Whether it can be sent on; the daemon looks at what it says, and refuses it by name."""
    if isinstance(item, Document):
        words = (item.id, item.title, item.split, item.author, item.date, item.language)
        return (
            len(item.text.encode()) <= documents.MAX_TEXT_BYTES
            and max(map(len, words)) <= documents.MAX_TITLE
            and len(item.spans) <= documents.MAX_SPANS
            and all(
                0 <= span.begin <= span.end <= len(item.text)
                and 0 <= span.page <= documents.MAX_PAGE
                for span in item.spans
            )
        )
    if isinstance(item, Pair):
        return (
            len(item.query.encode()) <= documents.MAX_QUERY_BYTES
            and len(item.positives) <= documents.MAX_POSITIVES
            and max(map(len, (item.split, *item.positives))) <= documents.MAX_ID
        )
    return not isinstance(item, FileProblem) or len(item.cause) <= _LONGEST_CAUSE


class _Ended(Exception):
    """A reader tells nothing more; the message is the cause and the remedy."""


# ---- the process that forks -------------------------------------------------------


class _Forks:
    """A process that forks a reader for each file."""

    def __init__(self) -> None:
        self._requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                # Nothing of the environment that a reader has no use for.
                env={name: os.environ[name] for name in _ENVIRONMENT if name in os.environ},
                start_new_session=True,  # Ctrl-C is for us to hear
            )

    def begin(self, request: list[Any]) -> Connection:
        """Have a file read; what is told of it can be received. Raises OSError."""
        ours, theirs = os.pipe2(os.O_CLOEXEC)
        told = Connection(ours, writable=False)
        try:
            fcntl.fcntl(theirs, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
            socket.send_fds(self._requests, [json.dumps(request).encode()], [theirs])
        except OSError:
            told.close()
            raise
        finally:
            os.close(theirs)
        return told

    def end(self) -> None:
        """End it with all that it began, and what those did: an OCR engine outlives its reader."""
        self._requests.close()
        with suppress(ProcessLookupError):  # ended, and waited for
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def main() -> None:
    """Fork a reader for each request that comes on standard input, until nobody asks."""
    _end_with_parent()
    requests = socket.socket(fileno=0)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # who has ended is not waited for
    while True:
        request, told, _, _ = socket.recv_fds(requests, _REQUEST_BYTES, 1)
        if not request:
            return
        path, name, below, limits = json.loads(request)
        file = Found(Path(path), name, Path(below) if below else None)
        # What it asks for first is its libraries, which its children have then. Nothing of a
        # file is looked at before its first block is asked for.
        if (reader := reader_of(file.path)) is not None and reader.blocks is not None:
            reader.blocks(Source(file.path, name, 0))
        if os.fork() == 0:
            requests.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            with Connection(told[0], readable=False) as connection:
                _read(file, Limits(**limits), connection)
            os._exit(0)
        os.close(told[0])


# ---- a reader -----------------------------------------------------------------------


def _read(file: Found, limits: Limits, told: Connection) -> None:
    """Read a file and tell what is in it."""
    unsaid, said = 0, time.monotonic()

    def watch(count: int) -> None:
        nonlocal unsaid, said
        signal.setitimer(signal.ITIMER_REAL, limits.pause_s)  # ends this process
        unsaid += count
        if unsaid >= STEP or (unsaid and time.monotonic() - said > _TELL_S):
            _tell(told, b"B", unsaid)
            unsaid, said = 0, time.monotonic()

    try:
        _confine(limits)
        watch(0)
        for item in read_file(file, watch):
            signal.setitimer(signal.ITIMER_REAL, 0)  # whoever listens may take their time
            match item:
                case Document():
                    _tell(told, b"D", item)
                case Pair():
                    _tell(told, b"P", item)
                case FileProblem():
                    cause = item.cause.encode(errors="replace").decode()[:_LONGEST_CAUSE]
                    _tell(told, b"F", replace(item, path="", cause=cause))
                case Attached():
                    _tell(told, b"A", item.name)
                    told.send_bytes(b"A" + item.content)
            watch(0)
        _tell(told, b"B", unsaid)
    except MemoryError:
        cause = f"needs more than {limits.memory_bytes >> 20} MiB to be read: cut it"
        _tell(told, b"F", FileProblem("", cause))
    except BrokenPipeError:
        return  # nobody listens any more
    except Exception as error:
        cause = f"damaged, or of a kind that isn't known ({type(error).__name__}): save it anew"
        _tell(told, b"F", FileProblem("", cause))
    told.send_bytes(_OVER)


def _tell(told: Connection, kind: bytes, item: Any) -> None:
    told.send_bytes(kind + _TOLD[kind].dump_json(item))


def _confine(limits: Limits) -> None:
    """Give up what a reader has no need of; the kernel does not give it back."""
    _end_with_parent()
    resource.setrlimit(resource.RLIMIT_DATA, (limits.memory_bytes, limits.memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    seconds = max(1, int(limits.file_s))
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    _touch_nothing()
    # Another user's network has no routes. For root alone without one of users, in which
    # root could no longer read what belongs to others.
    _LIBC.unshare(_CLONE_NEWNET if os.geteuid() == 0 else _CLONE_NEWUSER | _CLONE_NEWNET)


_LIBC: Final = ctypes.CDLL(None, use_errno=True)
_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS = 1, 38
_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000
_LANDLOCK_CREATE_RULESET, _LANDLOCK_RESTRICT_SELF = 444, 446
# WRITE_FILE, the REMOVE_ and MAKE_ rights, REFER and TRUNCATE: bits of files. To read and to
# execute (0, 2 and 3) stays, for libraries and tesseract. Each is known from a version on.
_WRITING: Final = {1: 0x1FF2, 2: 0x3FF2, 3: 0x7FF2}
_TCP: Final = 3  # to bind and to connect; version 4
_OUTWARDS: Final = 3  # abstract sockets and signals to processes outside; version 6


def _touch_nothing() -> None:
    """No file is written, made, renamed or removed, nobody called or killed (Landlock)."""
    version = _LIBC.syscall(_LANDLOCK_CREATE_RULESET, None, 0, 1)
    if version < 1:  # before Linux 5.13, or switched off: the other limits hold
        return
    rights = [_WRITING[min(version, 3)], _TCP, _OUTWARDS][: 1 + (version >= 4) + (version >= 6)]
    handled = (ctypes.c_uint64 * len(rights))(*rights)
    size = ctypes.sizeof(handled)
    rules = _LIBC.syscall(_LANDLOCK_CREATE_RULESET, ctypes.byref(handled), size, 0)
    if rules < 0 or _LIBC.syscall(_LANDLOCK_RESTRICT_SELF, rules, 0) != 0:
        raise OSError(ctypes.get_errno(), "Landlock refused")
    os.close(rules)


def _end_with_parent() -> None:
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _prctl(option: int, value: int) -> None:
    if _LIBC.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl refused")


if __name__ == "__main__":
    main()
