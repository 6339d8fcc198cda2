"""Watched folders: what appears in them is read, what changes replaces, what vanishes goes.

A look every so many seconds is the truth (daemon/library/folders.py); it runs in the reading
worker, one folder after the other. What it has read it hands over batch by batch, and each is
stored before it goes on: by the learning worker, which trains first where it trains. People's
ingests and removals come in between (`LibraryChanges`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final, Literal

import structlog

from daemon.jobs import folders as jobs
from daemon.jobs.folders import Looked
from daemon.learning.options import LearningError
from daemon.library.file_notes import FilesGone, FilesRead
from daemon.library.folders import Folder, Memory
from daemon.library.schema import LibraryError
from daemon.process.confinement import ConfinementError, landlock_version
from daemon.process.tasks import logged
from daemon.process.workers import Worker, WorkerCrashed
from daemon.services.collection import Collection
from daemon.services.pair_maker import PairMaker
from daemon.state.audit import DAEMON, AuditLog
from daemon.state.audit_format import AuditError

log = structlog.get_logger()

_FIND_S: Final = 300.0  # what a long look has read is found after so long, not at its end
_FAILURES = (LibraryError, LearningError, WorkerCrashed, AuditError, OSError)


@dataclass(frozen=True)
class Watching:
    """What the operator chose; ``vanished``: of the documents of files that are gone."""

    folders: Mapping[str, Path]
    vanished: Literal["remove", "keep"]
    scan_s: float
    keep_originals: bool = False


@dataclass
class FolderState:
    """How a folder was at the last look."""

    folder: Folder
    looked: Looked = field(default_factory=lambda: Looked(Memory()))
    looked_unix_ms: int = 0
    refused: tuple[int, list[tuple[str, str]]] = (0, [])  # as `WatchedFolders.refused`
    trouble: str = ""
    reading: bool = False

    @property
    def warnings(self) -> list[str]:
        """What people should look at: that it, or a part of it, can't be read, and why."""
        about = f"the watched folder {self.folder.name} ({self.folder.path})"
        found = [f"{about}: {self.trouble}"] if self.trouble else []
        not_read = [(one.name, one.cause) for one in self.looked.not_read[:1]] + self.refused[1]
        if not_read:
            (name, cause), count = not_read[0], self.looked.not_read_count + self.refused[0]
            found.append(
                f"{about}: {count} not read, or not whole, the first {name}: {cause} "
                "(`fedctl documents folders`)"
            )
        # A file's name is not ours, and need not be UTF-8.
        return [line.encode(errors="replace").decode() for line in found]


@dataclass
class _Done:
    """What one look has changed, for the audit log: numbers, for ids say what they are about."""

    documents_new: int = 0
    documents_changed: int = 0
    documents_unchanged: int = 0
    documents_removed: int = 0
    originals: int = 0
    files: int = 0


class WatchedFolders:
    """The folders of one site that the daemon reads by itself."""

    def __init__(
        self,
        watching: Watching,
        *,
        collection: Collection,
        pairs: PairMaker,
        reading: Worker,
        audit: AuditLog,
        changed: Callable[[], Awaitable[None]],
    ) -> None:
        """``changed`` is awaited when documents or pairs have come or gone."""
        self.vanished = watching.vanished
        self.scan_s = watching.scan_s
        self._keep_originals = watching.keep_originals
        named = sorted(watching.folders.items())
        self.states = [FolderState(Folder(name, path)) for name, path in named]
        self._collection = collection
        self._pairs = pairs
        self._reading = reading
        self._audit = audit
        self._changed = changed

    @property
    def warnings(self) -> list[str]:
        """Of all folders, what people should look at."""
        return [line for state in self.states for line in state.warnings]

    async def refused(self, collection: str) -> tuple[int, list[tuple[str, str]]]:
        """How many files of a folder were refused, and the first of them with their causes."""
        return await asyncio.to_thread(jobs.refused, self._collection.library_path, collection)

    async def run(self) -> None:
        """Look through one folder after the other, again and again, until cancelled."""
        with suppress(ConfinementError):  # each file says so
            if self.states and landlock_version() == 0:
                log.warning(
                    "a hostile file could read what the daemon may",
                    cause="this kernel has no Landlock (Linux 5.13): watch no folder of strangers",
                )
        await logged(self._forget_others())
        while self.states:
            for state in self.states:
                await logged(self._look(state))
            await asyncio.sleep(self.scan_s)

    async def _forget_others(self) -> None:
        names = [state.folder.name for state in self.states]
        async with self._collection.changes.turn():
            try:
                await asyncio.to_thread(
                    jobs.forget_other_folders, self._collection.library_path, names
                )
            except LibraryError as error:
                log.warning("notes of folders watched before are kept", cause=str(error))

    async def _look(self, state: FolderState) -> None:
        work = _Look(self._collection, self._pairs, self._audit, keep=self.vanished == "keep")
        said, state.reading, outcome = state.warnings, True, "refused or failed"
        try:
            looked = await self._reading.run_asking(
                lambda _: None,
                work.take,
                jobs.look_through,
                state.folder,
                self._collection.library_path,
                state.looked.memory,
                self._keep_originals,
            )
            state.refused = await self.refused(state.folder.name)
        except _FAILURES as error:
            state.trouble = f"the look broke off: {error}"
        else:
            if looked.links > state.looked.links:  # nobody's mistake, so once and no warning
                name, links = state.folder.name, looked.links
                log.info("links in a watched folder are not followed", folder=name, links=links)
            state.looked, state.looked_unix_ms = looked, time.time_ns() // 1_000_000
            state.trouble, outcome = looked.trouble or work.waits, "done"
        finally:
            state.reading = False
            await work.end(outcome)
        for line in state.warnings:
            if line not in said:  # once, not with each look
                log.warning("a watched folder is not read as it is", cause=line)
        if work.begun:
            try:
                self._collection.refresh()
                await self._collection.recount()
                await self._pairs.proposed()  # of a record that is gone nothing waits
                await self._changed()
            except _FAILURES as error:  # the next change counts again
                log.warning("the pairs are not counted anew", cause=str(error))


class _Look:
    """One look through one folder: what it hands over is stored, and counted."""

    def __init__(
        self, collection: Collection, pairs: PairMaker, audit: AuditLog, *, keep: bool
    ) -> None:
        self.begun = False  # something is changed
        self.waits = ""  # why something is not done yet
        self._collection = collection
        self._pairs = pairs
        self._audit = audit
        self._keep = keep
        self._done = _Done()
        self._found = time.monotonic()

    async def take(self, item: FilesRead | FilesGone) -> None:
        """Store what the look hands over. Raises what that fails with."""
        async with self._collection.changes.turn():
            if isinstance(item, FilesRead):
                await self._store(item)
            else:
                await self._drop(item)
        if time.monotonic() - self._found > _FIND_S:
            self._collection.refresh()
            self._found = time.monotonic()

    async def _store(self, item: FilesRead) -> None:
        if any(part.documents or part.pairs or part.original for part in item.parts):
            await self._begin()
        counts, left = await self._collection.put_files(item)
        self._done.files += sum(part.note is not None for part in item.parts)
        self._done.originals += counts.originals
        self._done.documents_new += counts.new
        self._done.documents_changed += counts.changed
        self._done.documents_unchanged += counts.unchanged
        if left.documents:
            await self._remove(left)

    async def _drop(self, item: FilesGone) -> None:
        if self._keep or not item.documents:
            await self._collection.remove((), item)
        else:
            await self._remove(item)

    async def _remove(self, item: FilesGone) -> None:
        """What files have no more goes as what a person removes, or is found again by a look."""
        if self._pairs.busy:
            self.waits = "what is gone is removed when no pairs are being made any more"
            return
        await self._begin()
        removed = await self._pairs.remove(item.documents, item)
        self._done.files += len(item.names)
        self._done.originals += sum(part.original is not None for part in item.shrunk)
        self._done.documents_removed += removed.documents

    async def _begin(self) -> None:
        """On record before anything is changed; raises AuditError."""
        if not self.begun:
            await self._audit.record(DAEMON, "ingest", "begun")
            self.begun = True

    async def end(self, outcome: str) -> None:
        """Put on record what was changed, if anything was."""
        if self.begun:
            await self._audit.record_or_owe(DAEMON, "ingest", outcome, **asdict(self._done))
