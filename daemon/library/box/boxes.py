"""Readers in boxes: each file is read by a process of its own, which can do little else.

Files come from anywhere, and what parses them is large and partly written in C. So the
process that reads one, or draws a page of it, has bounded memory and time, writes no file, reads
no other and reaches no network where the kernel lets us say so (`daemon.process.confinement`),
and is over when its file is. What it tells is taken as a stranger's word: never unpickled,
bounded, and under no other file's name.

What goes wrong may be the file's fault, or pass: time that was short, a process that was killed,
a machine that refuses something (`FileProblem.passing`).
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path, PurePosixPath
from types import TracebackType
from typing import Any, Final

from daemon.library.box import told as words
from daemon.library.box.told import Limits, Senseless
from daemon.library.files import Found, reader_of, source_of
from daemon.library.readers.documents import Attached, Document, FileProblem, Item, Pair
from daemon.library.readers.reader import NoSuchPage, cause_of, is_passing
from daemon.process.confinement import INSTALLED
from daemon.process.temporary import TemporaryFolder, forget_left

_PROCESS: Final = "daemon.library.box.process"
_GRACE_S: Final = 10.0  # on a busy machine, for a reader to end itself in
_AT_ONCE: Final = 4  # readers, each with its gigabyte; fewer where there are fewer processors
_PROBLEMS: Final = 1000  # of a file
_LONGEST_NAME: Final = 200  # bytes of an attached file's name; Linux has 255
_ENVIRONMENT: Final = ("PATH", "PYTHONPATH", "TMPDIR", "TESSDATA_PREFIX", "LANG", "LC_ALL")
# Threads of number crunchers take stacks and buffers: 0.2 GiB on two processors, and on many more
# than a reader may have.
_ONE_THREAD: Final = dict.fromkeys(
    ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "OPENCV_FOR_THREADS_NUM"), "1"
)


class NotDrawn(Exception):
    """A page can't be drawn; the message is the cause and the remedy."""


class _Allowance:
    """What is left to a file, with all that is in it, of its limits."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._seconds = limits.file_s
        self._records = limits.records
        self._text_bytes = limits.text_bytes
        self.attached = limits.attached

    def message(self, told: Connection) -> bytes:
        """The next that is told, as `Connection` sends it; what whoever listens takes is free.

        Raises _TooLate, EOFError, and OSError where it is too long.
        """
        (size,) = words.SIZE.unpack(self._bytes(told, words.SIZE.size))
        if not 0 < size <= words.MESSAGE_BYTES:
            raise OSError("a message out of bounds")
        return self._bytes(told, size)

    def _bytes(self, told: Connection, size: int) -> bytes:
        """So many; one that tells half of it is waited for no longer than one that is silent."""
        taken = bytearray()
        while len(taken) < size:
            began = time.monotonic()
            most = min(self._limits.pause_s + _GRACE_S, self._seconds)
            is_told = self._seconds > 0.0 and told.poll(most)
            self._seconds -= time.monotonic() - began
            if not is_told:
                raise _TooLate
            if not (piece := os.read(told.fileno(), min(size - len(taken), words.PIPE_BYTES))):
                raise EOFError
            taken += piece
        return bytes(taken)

    def take(self, size: int) -> None:
        """A document or a pair of so many bytes. Raises _Ended where it is one too many."""
        self._records -= 1
        self._text_bytes -= size
        if self._records < 0 or self._text_bytes < 0:
            raise _Ended(
                f"more than {self._limits.records:,} documents and pairs, or "
                f"{self._limits.text_bytes >> 20:,} MiB of text: read up to there, cut it into "
                "several files"
            )


@dataclass(frozen=True)
class _Begun:
    """A file that is being read, and by whom what is in it is told."""

    file: Found
    told: Connection
    forks: _Forks


class Boxes:
    """Reads files, each in a box, a few at once."""

    def __init__(self, limits: Limits | None = None) -> None:
        self._limits = limits or Limits()
        self._forks: _Forks | None = None
        self._over = threading.Event()

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
        self._over.set()
        if self._forks is not None:
            self._forks.end()

    def read(
        self,
        files: Iterable[Found | FileProblem],
        watch: Callable[[int], None] = lambda _: None,
    ) -> Generator[Item, None, None]:
        """What is in the files, in their order; ``watch`` hears of bytes as they are read."""
        waiting = iter(files)
        begun: deque[_Begun | FileProblem] = deque()
        read = 0  # of these, files
        at_once = min(_AT_ONCE, len(os.sched_getaffinity(0)))
        try:
            while True:
                # All but the first wait for their turn, once they have told as much as a
                # pipe holds: by then most have told everything.
                while not self._over.is_set() and read < at_once and (file := next(waiting, None)):
                    if isinstance(file, FileProblem):
                        begun.append(file)
                    else:
                        begun.append(self._begin(file))
                        read += 1
                if self._over.is_set() or not begun:
                    return
                first = begun[0]
                if isinstance(first, FileProblem):
                    yield first
                else:
                    yield from self._whole(first, watch)
                    read -= 1
                begun.popleft()
        except _Lost:  # all was ended while one began
            return
        finally:
            for one in begun:
                if not isinstance(one, FileProblem):
                    one.told.close()  # its reader finds nobody who listens, and ends

    def page(self, file: Found, number: int, dpi: int) -> bytes:
        """A page of a file, from 1, as a PNG; ``file.name`` says of which kind the file is.

        Raises NotDrawn, and NoSuchPage.
        """
        try:
            one = self._begin(file, (number, dpi))
            with one.told:
                kind, content = self._message(one, _Allowance(self._limits))
            if kind == words.IMAGE and content.startswith(words.PNG):
                return content
            told = words.heard(kind, content)
        except (_Ended, _Lost) as ended:
            raise NotDrawn(str(ended)) from None
        except Senseless:
            told = None
        if isinstance(told, int):
            raise NoSuchPage(told)
        if isinstance(told, FileProblem) and words.makes_sense(told):
            raise NotDrawn(told.cause)
        raise NotDrawn("what draws it told what makes no sense: the file is hostile")

    def _whole(self, one: _Begun, watch: Callable[[int], None]) -> Iterator[Item]:
        """A file; ``watch`` hears of all its bytes, also of those that were refused unread."""
        size, read = one.file.size, 0

        def count(more: int) -> None:
            nonlocal read
            more = min(more, size - read)  # it may say what it likes
            read += more
            watch(more)

        allowance, where = _Allowance(self._limits), str(one.file.path)
        try:
            yield from self._told(one, count, where, 1, allowance, patient=True)
        except _Lost:  # it had told nothing yet: once more
            if self._over.is_set():
                return
            yield from self._told(self._begin(one.file), count, where, 1, allowance)
        watch(size - read)

    def _begin(self, file: Found, drawn: tuple[int, int] | None = None) -> _Begun:
        """``drawn``: not read, but this page of it drawn, at so many pixels an inch.

        Raises _Lost where all was ended.
        """
        below = str(file.below) if file.below is not None else ""
        request = [str(file.path), file.name, below, asdict(self._limits), drawn]
        try:
            if self._forks is not None and not self._over.is_set():
                try:
                    return _Begun(file, self._forks.begin(request), self._forks)
                except ConnectionError:  # it was killed, as where memory is short: readers, too
                    self._forks.end()
            if not self._over.is_set():
                forget_left()
                self._forks = _Forks()
                if (
                    self._over.is_set()
                ):  # ended from another thread, which may not have seen this one
                    self._forks.end()
                return _Begun(file, self._forks.begin(request), self._forks)
        except OSError:
            if not self._over.is_set():
                raise
        raise _Lost("what reads was ended")

    def _told(
        self,
        one: _Begun,
        watch: Callable[[int], None],
        where: str,
        depth: int,
        allowance: _Allowance,
        *,
        patient: bool = False,
    ) -> Iterator[Item]:
        """What a reader tells of its file, which people know as ``where``, with what is in it.

        ``patient``: raises _Lost where it was lost with what forks, and had told nothing yet.
        """
        file = one.file
        reader = reader_of(PurePosixPath(file.name))
        its_id = file.name if reader is not None and reader.named_by_file else None
        documents_told, problems = 0, 0
        names: set[str] = set()
        try:
            with one.told:
                while (item := self._next(one, allowance, pairs=its_id is None)) is not None:
                    patient = patient and isinstance(item, int)
                    if isinstance(item, int):
                        watch(item)
                    elif isinstance(item, Attached):
                        yield from self._attached(file, item, names, where, depth, allowance)
                    elif isinstance(item, FileProblem):
                        problems += 1
                        if problems <= _PROBLEMS:  # a path that a file told would not be its own
                            yield replace(item, path=where, document=its_id or "")
                    elif isinstance(item, Document) and its_id is not None:
                        documents_told += 1
                        if documents_told == 1:
                            yield replace(item, id=its_id, source=source_of(Path(where)))
                    elif isinstance(item, Document):  # a record is of no file that it names
                        yield replace(item, source="")
                    else:
                        yield item
        except _Lost as lost:
            if patient:
                raise
            yield FileProblem(where, str(lost), passing=True)
        except _Ended as ended:
            yield FileProblem(where, str(ended), passing=ended.passing)

    def _next(
        self, one: _Begun, allowance: _Allowance, *, pairs: bool
    ) -> Document | Pair | FileProblem | Attached | int | None:
        """The next that is told; None: that was all. Raises _Ended.

        ``pairs``: it may be one, for the file is of records.
        """
        kind, content = self._message(one, allowance)
        if kind == words.OVER:
            return None
        size = len(content)
        item: Any = None
        with suppress(Senseless):
            if kind == words.TEXT:
                text, (kind, content) = content, self._message(one, allowance)
                item = words.heard_document(text, kind, content)
                size += len(content)
            elif kind != words.DOCUMENT:  # which comes behind its text alone
                item = words.heard(kind, content)
        makes_sense = item is not None and words.makes_sense(item)
        if not makes_sense or (isinstance(item, Pair) and not pairs):
            raise _Ended("its reader told what makes no sense: the file is hostile")
        if isinstance(item, Document | Pair):
            allowance.take(size)
        if kind != words.ATTACHED:
            return item  # type: ignore[no-any-return]
        _, content = self._message(one, allowance)
        return Attached(item, content)

    def _message(self, one: _Begun, allowance: _Allowance) -> tuple[bytes, bytes]:
        limits = self._limits
        try:
            message = allowance.message(one.told)
        except _TooLate:
            raise _Ended(
                f"not read within {limits.pause_s:.0f} s a page and {limits.file_s:.0f} s all in "
                "all: cut it into several files",
                passing=True,
            ) from None
        except EOFError:
            if one.forks.is_lost():
                raise _Lost("what reads files was killed: see that memory is not short") from None
            raise _Ended(
                f"its reader ended: a page took more than {limits.pause_s:.0f} s or "
                f"{limits.memory_bytes >> 20} MiB, or the file is damaged; save it anew or cut it",
                passing=True,
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
        allowance: _Allowance,
    ) -> Iterator[Item]:
        """What is in a file of a file. Its name is its sender's: it names no folder of ours."""
        name = PurePosixPath(attached.name.replace("\0", "")).name[-100:]
        name = "attached" if name in ("", "..") else name
        while name in names:
            name = f"{len(names)}-{name}"
        names.add(name)
        where = f"{where}/{name}"
        allowance.attached -= 1
        if allowance.attached < 0 or depth >= self._limits.depth:
            yield FileProblem(where, "too many files in files: take it out and ingest it")
            return
        reader = reader_of(Path(name))
        if reader is not None and not reader.named_by_file:
            # Whoever sends a letter would choose ids of documents here, and teach by pairs.
            yield FileProblem(where, "records, which no letter brings: take it out and ingest it")
            return
        with TemporaryFolder() as folder:
            # By its end alone it is read; a name on the disk has less room than one in a letter.
            path = Path(folder.path, name.encode()[-_LONGEST_NAME:].decode(errors="ignore"))
            try:
                path.write_bytes(attached.content)
            except OSError as error:
                cause = f"can't be taken out of its file: {cause_of(error)}"
                yield FileProblem(where, cause, passing=is_passing(error))
                return
            inner = self._begin(Found(path, f"{file.name}/{name}"))
            yield from self._told(inner, lambda _: None, where, depth + 1, allowance)


class _Ended(Exception):
    """A reader tells nothing more; the message is the cause and the remedy."""

    def __init__(self, cause: str, *, passing: bool = False) -> None:
        super().__init__(cause)
        self.passing = passing


class _TooLate(Exception):
    """A reader tells nothing, or half of something, and its time is over."""


class _Lost(Exception):
    """A reader was lost with what forks, for no fault of its file; the message says so."""


# ---- the process that forks (`daemon.library.box.process`) ------------------------


class _Forks:
    """A process that forks a reader for each file."""

    def __init__(self) -> None:
        self._requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                # Not from the folder in which somebody stands: that is not ours to run, nor a
                # reader's to read.
                [sys.executable, "-P", "-m", _PROCESS],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=_environment(),
                start_new_session=True,  # Ctrl-C is for us to hear
            )

    def begin(self, request: list[Any]) -> Connection:
        """Have a file read; what is told of it can be received. Raises OSError."""
        ours, theirs = os.pipe2(os.O_CLOEXEC)
        told = Connection(ours, writable=False)
        try:
            with suppress(PermissionError):  # one has so much for all pipes together
                fcntl.fcntl(theirs, fcntl.F_SETPIPE_SZ, words.PIPE_BYTES)
            socket.send_fds(self._requests, [json.dumps(request).encode()], [theirs])
        except OSError:
            told.close()
            raise
        finally:
            os.close(theirs)
        return told

    def is_lost(self) -> bool:
        """Whether it has ended, and with it what it began."""
        try:
            return not self._requests.recv(1, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:  # the line is broken, or we have ended it
            return True

    def end(self) -> None:
        """End it with all that it began, and what those did: an OCR engine outlives its reader."""
        self._requests.close()  # by which it ends, when it has ended them
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_GRACE_S)
        self._process.kill()
        self._process.wait()


def _environment() -> dict[str, str]:
    """Nothing that a reader has no use for, and where this program is."""
    kept = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ} | _ONE_THREAD
    here = Path(__file__).parents[3]
    paths = list(filter(None, kept.get("PYTHONPATH", "").split(os.pathsep)))
    if here.name not in INSTALLED:
        paths.append(str(here))
    return {**kept, "PYTHONPATH": os.pathsep.join(paths)} if paths else kept
