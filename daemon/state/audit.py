"""The audit log: who did what at this site, in order, without what it was about.

Written are the privileged actions of people (over the control socket, by signal)
and every request of a peer that touched this site's data: names, digests, sizes and
outcomes, never a question, a title or a passage. daemon/state/audit_format.py has the form.

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
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any, BinaryIO, Final, Literal

import structlog

from crypto.durable import fsync
from daemon.state.audit_format import (
    BROKEN,
    TORN,
    AuditError,
    Break,
    BreakRecord,
    Chain,
    Head,
    break_before,
    digest_of_all,
    is_at,
    line_of,
    lost_end,
    noted,
    number_of,
    read_noted,
    read_over,
    segment,
    segments,
    walk,
)

log = structlog.get_logger()

_SEGMENT_BYTES: Final = 16 << 20
_PAUSE_S: Final = 1.0  # after a failure: whoever asks meanwhile is refused without a try
_OWED_KINDS: Final = 1000  # of (actor, action): a gap's memory is bounded

Action = Literal[
    "acknowledge",
    "applied",
    "ask",
    "attempt",
    "audit-embeddings",
    "audit-memory",
    "block-person",
    "build-pairs",
    "change-token",
    "contribution",
    "create-token",
    "decide-proposals",
    "drop-pairs",
    "embed",
    "evaluate",
    "evaluate-answers",
    "evidence",
    "export",
    "forget-round",
    "ingest",
    "manifest",
    "negatives",
    "original",
    "page-image",
    "passage",
    "personalise",
    "plan",
    "propose",
    "pull",
    "push",
    "reload",
    "remove",
    "revoke-token",
    "search",
    "send",
    "show-documents",
    "show-pairs",
    "start",
    "state",
    "statement",
    "stop",
    "stop-training",
    "train",
    "unblock-person",
    "upload",
    "view",
    "vote",
]
"""What an entry can be of, beside `TORN`, `BROKEN` and `SEVERAL`; docs/fedctl.md has rows."""

SEVERAL: Final = "several"
"""Actor and action of what is owed of more kinds than are remembered."""

LOOK_AT_IT: Final = (
    "look at it with `fedctl audit verify` and compare it with a backup and with heads that were "
    "noted; then `fedctl audit acknowledge`"
)

DAEMON: Final = "fedd"
"""The actor of what nobody asked for: starting, stopping, finding a torn line or a break."""


def _now() -> datetime:
    return datetime.now(UTC)


class AuditLog:
    """Appends entries to the log of one site; safe to use from several threads.

    ``trouble``: why the log could not be written last time; empty when it could. A log
    that is broken is gone on with: the breaks are recorded in it, and told until a person
    has acknowledged them (docs/decisions/0009-the-audit-log.md).
    """

    def __init__(
        self,
        folder: Path,
        *,
        head_file: Path | None = None,
        now: Callable[[], datetime] = _now,
        segment_bytes: int = _SEGMENT_BYTES,
    ) -> None:
        """Open the log, or begin one; every entry is verified. Raises AuditError.

        ``head_file``, which is not in the folder, notes the last entry: from it is known
        at the next start that the log's end was cut off, or that it was written anew.
        """
        self._folder = folder
        self._head_file = head_file
        self._now = now
        self._segment_bytes = segment_bytes
        self._lock = threading.Lock()
        self._file: BinaryIO | None = None
        self._path = segment(folder, 1)
        self._chain = Chain()
        self._noted: Head | None = None
        self._verified = False  # from the first entry on, once
        self._reminded: date | None = None
        self._owed: Counter[tuple[str, str]] = Counter()
        self._try_again = 0.0
        self.trouble = ""
        try:
            with self._lock:
                self._noted = self._read_noted()
                self._open()
                self._remind()
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

    @asynccontextmanager
    async def span(self, actor: str, action: Action, **asked: Any) -> AsyncIterator[dict[str, Any]]:
        """Recorded before it begins, or AuditError; and how it ended, with what is put in the dict.

        Whoever is cancelled leaves no begin without an end.
        """
        begun = asyncio.ensure_future(self.record(actor, action, "begun", **asked))
        outcome, found = "refused or failed", dict[str, Any]()
        try:
            await asyncio.shield(begun)
        except asyncio.CancelledError:
            with suppress(AuditError):
                await begun
                await self.record_or_owe(actor, action, outcome)
            raise
        try:
            yield found
            outcome = "done"
        finally:
            await self.record_or_owe(actor, action, outcome, **found)

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
                self._remind()
                self._pay_what_is_owed()
                self._append(actor, action, outcome, objects)
            except (OSError, AuditError) as error:
                self._close()  # what is on the disk now is found out before the next entry
                self._try_again = time.monotonic() + _PAUSE_S
                refusal = self._unwritable(error)
                if not self.trouble:
                    reason = "audit log not written: what must be in it is refused"
                    log.error(reason, cause=str(error))  # noqa: TRY400  an outside cause
                self.trouble = str(refusal)
                raise refusal from error
            if self.trouble:
                log.info("the audit log is written again")
                self.trouble = ""

    def _pay_what_is_owed(self) -> None:
        for (actor, action), times in list(self._owed.items()):
            self._append(actor, action, "done while the log could not be written", {"times": times})
            del self._owed[actor, action]

    def _append(self, actor: str, action: str, outcome: str, objects: dict[str, Any]) -> None:
        chain = self._chain
        entry = {
            "seq": chain.seq + 1,
            "time": self._now().isoformat(timespec="milliseconds"),
            "actor": actor,
            "action": action,
            "outcome": outcome,
            "objects": objects,
        }
        line, digest = line_of(entry, chain.head)
        if self._file is None:
            raise OSError("the log is closed")
        if self._file.tell() and self._file.tell() + len(line) >= self._segment_bytes:
            self._next_segment()
        _write_all(self._file, line + b"\n")
        os.fsync(self._file.fileno())
        chain.seq, chain.head = chain.seq + 1, digest
        chain.learn(entry)
        self._note_head((chain.seq, chain.head))

    def _unwritable(self, error: Exception) -> AuditError:
        return AuditError(
            f"the audit log in {self._folder} cannot be written: {error}; free or repair the disk"
        )

    # ---- opening -----------------------------------------------------------------

    def _open(self) -> None:
        """Find the end of the log, and account for what a crash or a person did to it."""
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        paths = segments(self._folder)
        # The last one may have been begun and no more: the one before has the last entry then.
        # Where there are breaks, the entries that record them may be anywhere.
        again = self._verified and not self._chain.records
        chain, at_head = Chain(), is_at(None, self._noted)
        for entry in walk(paths[-2:] if again else paths, chain, torn_end=True):
            at_head = at_head or is_at(entry, self._noted)
        self._chain, self._verified = chain, True
        self._path = paths[-1] if paths else segment(self._folder, 1)
        whole = not paths or _ends_with_a_line(self._path)
        self._file = _opened(self._path)
        if not whole:
            _write_all(self._file, b"\n")
        if chain.unread_from is not None and at_head and not chain.altered:
            self._account_for_torn()
        self._account_for_breaks(at_head)

    def _account_for_torn(self) -> None:
        torn = read_over(self._chain)
        objects = {"bytes": len(torn), "sha256": hashlib.sha256(torn).hexdigest()}
        self._append(DAEMON, TORN, "kept", objects)
        log.warning("the audit log's last line was torn by a crash", bytes=len(torn))

    def _account_for_breaks(self, at_head: bool) -> None:
        """Record breaks that no entry records; the log goes on from where it should have ended."""
        chain, breaks = self._chain, self._chain.unrecorded
        old = (chain.seq + len(chain.unread), chain.head)
        lost: Break | None = None
        if self._noted is not None and not at_head:
            lost = lost_end(self._noted, chain, self._path)
            old = self._noted if self._noted[0] >= chain.seq else old
        path, line = chain.last_line or (self._path, 0)
        end = break_before(chain, (old[0] + 1, old[1].hex()), path, line + 1)
        if end is not None:
            end.why = lost.why if lost is not None and not chain.altered else end.why
            chain.breaks.append(end)
            read_over(chain)
        if broken := end or lost:
            breaks.append(broken)
        if not breaks:
            return
        chain.seq, chain.head = old
        objects = {
            "file": breaks[0].path.name,
            "line": breaks[0].line,
            "why": breaks[0].why,
            "after": breaks[0].after,
            "breaks": len(breaks),
            "head": (self._noted if lost is not None and self._noted else old)[1].hex(),
            "first": chain.first or old[0] + 1,
            "state": digest_of_all(chain.breaks),
            "digests": [one.digest for one in breaks],
        }
        self._append(DAEMON, BROKEN, "recorded", objects)
        self._reminded = None  # today's reminder did not speak of this one

    def _remind(self) -> None:
        """Say once a day, and at each start, what nobody has acknowledged."""
        broken = self.broken
        if not broken or self._reminded == (today := self._now().date()):
            return
        self._reminded = today
        for record in broken:
            log.error(
                "the audit log is broken",
                where=f"{record.file}, line {record.line}",
                cause=record.why,
                breaks=record.breaks,
                audit_entry=record.entry,
                remedy=LOOK_AT_IT,
            )

    # ---- the head, noted beside the log --------------------------------------------

    def _read_noted(self) -> Head | None:
        if self._head_file is None:
            return None
        try:
            return read_noted(self._head_file)
        except AuditError as error:
            log.warning("whether the audit log lost its end is not known", cause=str(error))
            return None

    def _note_head(self, head: Head) -> None:
        """Not synced: after a power cut an older head may be noted, which the log has, too."""
        self._noted = head
        if self._head_file is None:
            return
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            descriptor = os.open(self._head_file, flags, 0o600)
            try:
                os.pwrite(descriptor, noted(head), 0)  # in place: there is always a head to read
            finally:
                os.close(descriptor)
        except OSError as error:
            # The entry is in the log; the head noted last is in it, too.
            log.warning("the audit log's head is not noted", cause=str(error))

    # ---- segments ----------------------------------------------------------------

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
    def broken(self) -> list[BreakRecord]:
        """Breaks that were recorded, and that no person has acknowledged."""
        return self._chain.unacknowledged

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
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    descriptor = os.open(path, flags, 0o600)
    fsync(path.parent)
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
