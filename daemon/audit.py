"""The audit log: who did what at this site, in order, without what it was about.

Written are the privileged actions of people (over the control socket, by signal)
and every request of a peer that touched this site's data: names, digests, sizes and
outcomes, never a question, a title or a passage. daemon/audit_chain.py has the form.

An entry is on the disk (fsync) before what it says is done or leaves the site. While
the log can't be written, what would have to be in it is refused, with two exceptions
that are owed and written as soon as it can be: questions of this site's people, and
the votes and answers of the round protocol, which have a record of their own
(docs/decisions/0009-the-audit-log.md says why).
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import os
import threading
import time
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO, Final, Literal

import structlog

from daemon.audit_chain import (
    TORN,
    AuditError,
    Break,
    Chain,
    entries,
    line_of,
    number_of,
    segment,
    segments,
)

log = structlog.get_logger()

_SEGMENT_BYTES: Final = 16 << 20
_PAUSE_S: Final = 1.0  # after a failure: whoever asks meanwhile is refused without a try
_OWED_KINDS: Final = 1000  # of (actor, action): a gap's memory is bounded

Action = Literal[
    "applied",
    "ask",
    "attempt",
    "audit-embeddings",
    "build-pairs",
    "contribution",
    "drop-pairs",
    "evaluate",
    "evidence",
    "ingest",
    "manifest",
    "negatives",
    "personalise",
    "plan",
    "pull",
    "push",
    "reload",
    "send",
    "show-pairs",
    "start",
    "statement",
    "stop",
    "stop-training",
    "train",
    "vote",
]
"""What an entry can be of, beside `TORN` and `SEVERAL`; docs/fedctl.md has a row for each."""

SEVERAL: Final = "several"
"""Actor and action of what is owed of more kinds than are remembered."""

DAEMON: Final = "fedd"
"""The actor of what nobody asked for: starting, stopping, finding a torn line."""


def _now() -> datetime:
    return datetime.now(UTC)


class AuditLog:
    """Appends entries to the log of one site; safe to use from several threads.

    ``trouble``: why the log could not be written last time; empty when it could.
    """

    def __init__(
        self,
        folder: Path,
        *,
        now: Callable[[], datetime] = _now,
        segment_bytes: int = _SEGMENT_BYTES,
    ) -> None:
        """Open the log, or begin one. Raises AuditError when it is not what was written."""
        self._folder = folder
        self._now = now
        self._segment_bytes = segment_bytes
        self._lock = threading.Lock()
        self._file: BinaryIO | None = None
        self._path = segment(folder, 1)
        self._chain = Chain()
        self._owed: Counter[tuple[str, str]] = Counter()
        self._try_again = 0.0
        self.trouble = ""
        try:
            with self._lock:
                self._open()
        except Break as error:
            remedy = "look at it with `fedctl audit verify`; to begin anew, move its folder away"
            raise Break(error.path, error.line, f"{error.why}; {remedy} and keep it") from error
        except OSError as error:
            raise self._unwritable(error) from error

    # ---- writing ---------------------------------------------------------------

    async def record(self, actor: str, action: Action, outcome: str, **objects: Any) -> None:
        """Append an entry; it is on the disk when this returns. Raises AuditError.

        In a thread, for an fsync takes its time. It is finished even if the caller is
        cancelled meanwhile, which leaves an entry about something that then did not happen.
        """
        await asyncio.to_thread(self.write, actor, action, outcome, **objects)

    async def record_or_owe(self, actor: str, action: Action, outcome: str, **objects: Any) -> None:
        """Append an entry; if that fails, the next one that succeeds says that it is missing."""
        await asyncio.to_thread(self._write_or_owe, actor, action, outcome, objects)

    def _write_or_owe(
        self, actor: str, action: Action, outcome: str, objects: dict[str, Any]
    ) -> None:
        try:
            self.write(actor, action, outcome, **objects)
        except AuditError:
            with self._lock:
                full = len(self._owed) >= _OWED_KINDS and (actor, action) not in self._owed
                self._owed[(SEVERAL, SEVERAL) if full else (actor, action)] += 1

    def write(self, actor: str, action: Action, outcome: str, **objects: Any) -> None:
        """As `record`, in the caller's thread."""
        with self._lock:
            if self.trouble and time.monotonic() < self._try_again:
                raise AuditError(self.trouble)
            try:
                if self._file is None:
                    self._open()
                self._pay_what_is_owed()
                self._append(actor, action, outcome, objects)
            except (OSError, AuditError) as error:
                self._close()  # what is on the disk now is found out before the next entry
                self._try_again = time.monotonic() + _PAUSE_S
                refusal = self._unwritable(error)
                if not self.trouble:
                    told = "audit log not written: what must be in it is refused"
                    log.error(told, cause=str(error))  # noqa: TRY400  an outside cause
                self.trouble = str(refusal)
                raise refusal from error
            if self.trouble:
                log.info("the audit log is written again")
                self.trouble = ""

    def _pay_what_is_owed(self) -> None:
        for (actor, action), times in list(self._owed.items()):
            self._append(actor, action, "done while the log could not be written", {"times": times})
            del self._owed[actor, action]

    def _append(
        self, actor: str, action: str, outcome: str, objects: dict[str, Any], after: bytes = b""
    ) -> None:
        entry = {
            "seq": self._chain.seq + 1,
            "time": self._now().isoformat(timespec="milliseconds"),
            "actor": actor,
            "action": action,
            "outcome": outcome,
            "objects": objects,
        }
        line, digest = line_of(entry, self._chain.head)
        if self._file is None:
            raise OSError("the log is closed")
        if self._file.tell() and self._file.tell() + len(line) >= self._segment_bytes:
            self._next_segment()
        _write_all(self._file, after + line + b"\n")
        os.fsync(self._file.fileno())
        self._chain.seq, self._chain.head = self._chain.seq + 1, digest

    def _unwritable(self, error: Exception) -> AuditError:
        return AuditError(
            f"the audit log in {self._folder} cannot be written: {error}; free or repair the disk"
        )

    # ---- segments ----------------------------------------------------------------

    def _open(self) -> None:
        """Find the end of the log, and account for what a crash left there."""
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        found = segments(self._folder)
        chain = Chain()
        # The last one may have been begun and no more: the one before has the last entry then.
        for _ in entries(found[-2:], chain, torn_end=True):
            pass
        self._chain = chain
        self._path = found[-1] if found else segment(self._folder, 1)
        whole = not found or _ends_with_a_line(self._path)
        self._file = _opened(self._path)
        if chain.unread:
            torn = b"\n".join(chain.unread)
            sha256 = hashlib.sha256(torn).hexdigest()
            objects = {"bytes": len(torn), "sha256": sha256}
            self._append(DAEMON, TORN, "kept", objects, after=b"" if whole else b"\n")
            log.warning("the audit log's last line was torn by a crash", bytes=len(torn))
        elif not whole:
            self._file.write(b"\n")  # only the line's end was missing

    def _next_segment(self) -> None:
        path = segment(self._folder, number_of(self._path) + 1)
        file = _opened(path)
        self._close()
        self._path, self._file = path, file
        self.tell_head("a new segment of the audit log begins")

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    # ---- what others see -----------------------------------------------------------

    @property
    def head(self) -> tuple[int, bytes]:
        """Number and hash of the last entry; 0 and zeros when there is none."""
        return self._chain.seq, self._chain.head

    def tell_head(self, event: str) -> None:
        """In the daemon's own log, which may be kept on another machine."""
        log.info(event, audit_entry=self._chain.seq, audit_head=self._chain.head.hex())

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._close()


def _opened(path: Path) -> BinaryIO:
    """For appending, unbuffered: a line is one write. Its name is on the disk, too."""
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
    file = os.fdopen(descriptor, "ab", buffering=0)
    file.seek(0, os.SEEK_END)
    return file


def _write_all(file: BinaryIO, line: bytes) -> None:
    written = file.write(line)
    if written != len(line):  # a disk takes what fits, and says so with the next write only
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _ends_with_a_line(path: Path) -> bool:
    with path.open("rb") as file:
        if not file.seek(0, os.SEEK_END):
            return True
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"
