"""The job of the reading worker: look through a watched folder, and read what has changed.

It writes nothing: what it has read or found gone it hands to the daemon, a little at a time,
and goes on when that is stored. So a look that is cut short, or killed, has stored what it had
handed over, and the next one goes on from there.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from daemon.library.file_notes import FileNote, FilePart, FilesGone, FilesRead, Stamp
from daemon.library.folders import (
    Changes,
    Folder,
    Memory,
    NotRead,
    Tree,
    cause_for_daemon,
    changes,
    held_back,
    look,
)
from daemon.library.readers.box import Boxes
from daemon.library.readers.documents import MAX_ID, Document, FileProblem, Pair
from daemon.library.readers.files import Found
from daemon.library.readers.reader import open_below
from daemon.library.store import Library
from daemon.process.workers import ask

# Handed over at once: stored in one transaction, for which a training that has not begun waits.
_BATCH_BYTES: Final = 1 << 20
_BATCH_ITEMS: Final = 500  # files, documents and pairs
_GONE_AT_ONCE: Final = 1000
_TOLD: Final = 100  # of what was not read
_CAUSE: Final = 500  # characters

_boxes = Boxes()  # begun with the first file, and over with this process


@dataclass(frozen=True)
class Looked:
    """What a look found; ``not_read``: the first of what no note tells of."""

    memory: Memory
    seen: int = 0  # files
    other_kinds: int = 0
    not_read: tuple[NotRead, ...] = ()
    not_read_count: int = 0
    trouble: str = ""  # why the folder was not looked into, or what is held back
    seconds: float = 0.0


def look_through(
    folder: Folder,
    library_path: Path,
    before: Memory,
    give: Callable[[FilesRead | FilesGone], object] = ask,
    now_ns: Callable[[], int] = time.time_ns,
) -> Looked:
    """Look through a folder once, and ``give`` what changed. Raises LibraryError, and what it does.

    ``before``: of the last look; none: the daemon has started since.
    """
    started = time.monotonic()
    tree = look(folder.path)
    with Library.open(library_path, read_only=True) as library:
        notes = library.notes.of(folder.name)
    found = changes(notes, tree, before, now_ns())
    if tree.missing:
        trouble = (
            f"{tree.missing}; nothing that was read from it is removed meanwhile: mount its disk, "
            "or correct library.folders and restart"
        )
        return Looked(Memory(), trouble=trouble, seconds=time.monotonic() - started)
    seconds = time.monotonic() - started
    reading = _Reading(folder, tree, notes)
    for batch in _batches(reading.parts(found.read)):
        give(FilesRead(folder.name, tuple(batch)))
    trouble, memory = _give_gone(folder, library_path, tree, found, (len(notes), before), give)
    not_read = [*tree.problems, *reading.failed]
    return Looked(
        replace(memory, waiting={**found.waiting, **reading.changing}),
        seen=len(tree.files),
        other_kinds=tree.other_kinds,
        not_read=tuple(not_read[:_TOLD]),
        not_read_count=len(not_read),
        trouble=trouble,
        seconds=seconds,
    )


def _give_gone(
    folder: Folder,
    library_path: Path,
    tree: Tree,
    found: Changes,
    noted: tuple[int, Memory],
    give: Callable[[FilesRead | FilesGone], object],
) -> tuple[str, Memory]:
    """Hand over what is gone, or hold it back; why, and what the next look has to know."""
    documents: dict[str, list[str]] = {}
    if found.gone:
        with Library.open(library_path, read_only=True) as library:
            documents = library.notes.documents_of(folder.name, found.gone)
    # What is here from nowhere else; a file of which nothing is here is forgotten in any case.
    lasting = [name for name in found.gone if documents[name]]
    trouble, memory = held_back(lasting, *noted[:1], tree, noted[1])
    going = [name for name in found.gone if not (trouble and documents[name])]
    for first in range(0, len(going), _GONE_AT_ONCE):
        names = going[first : first + _GONE_AT_ONCE]
        ids = [one for name in names for one in documents[name]]
        give(FilesGone(folder.name, tuple(names), tuple(ids)))
    return trouble, memory


class _Reading:
    """The reading of a look's files: what could not be opened, and what changed meanwhile."""

    def __init__(self, folder: Folder, tree: Tree, notes: dict[str, FileNote]) -> None:
        self.failed: list[NotRead] = []
        self.changing: dict[str, Stamp] = {}
        self._folder = folder
        self._tree = tree
        self._notes = notes

    def parts(self, names: Sequence[str]) -> Iterator[FilePart]:
        """What is in the files. One that can't be opened is tried again with each look."""
        for name in names:
            try:
                stamp, digest = _opened(self._folder.path, name)
                if stamp != self._tree.files[name]:
                    self.changing[name] = stamp
                    continue
                note = self._notes.get(name)
                if note is not None and note.digest == digest and not note.refused:
                    yield FilePart(name, FileNote(stamp, digest), first=False)
                else:
                    yield from self._read(name, FileNote(stamp, digest))
            except FileNotFoundError:
                continue  # gone meanwhile: the next look will find it so
            except OSError as error:
                self.failed.append(NotRead(name, cause_for_daemon(error)))

    def _read(self, name: str, note: FileNote) -> Iterator[FilePart]:
        """The parts of a file; the last one only if it did not change while it was read."""
        folder, prefix = self._folder.path, f"{self._folder.name}/"
        documents: list[Document] = []
        pairs: list[Pair] = []
        causes: list[str] = []
        first, size = True, 0
        for item in _boxes.read([Found(folder / name, name, below=folder)]):
            if isinstance(item, FileProblem):
                causes.append(_cause(item, folder / name))
                continue
            if isinstance(item, Pair):
                named = tuple(prefix + one for one in item.positives)
                pairs.append(replace(item, positives=named))
                size += len(item.query) + sum(map(len, named))
            elif len(prefix) + len(item.id) > MAX_ID:
                causes.append(f"an id or path longer than {MAX_ID} characters: shorten it")
            else:
                documents.append(replace(item, id=prefix + item.id))
                size += len(item.text)
            if size >= _BATCH_BYTES or len(documents) + len(pairs) >= _BATCH_ITEMS:
                yield FilePart(name, None, tuple(documents), tuple(pairs), first)
                documents, pairs, first, size = [], [], False, 0
        stamp = _stamp_of(folder, name)
        if stamp != note.stamp:
            self.changing[name] = stamp
            return
        if causes:
            more = f" (and {len(causes) - 1} more)" if len(causes) > 1 else ""
            note = replace(note, refused=causes[0][:_CAUSE] + more)
        yield FilePart(name, note, tuple(documents), tuple(pairs), first)


def _cause(problem: FileProblem, path: Path) -> str:
    """In a line, without the file's own name, which stands beside it."""
    inner = "" if problem.path == str(path) else Path(problem.path).name
    return str(replace(problem, path=inner)).lstrip(":, ")


def _opened(folder: Path, name: str) -> tuple[Stamp, bytes]:
    """How a file is, and the SHA-256 of its content. Raises OSError."""
    with os.fdopen(open_below(folder, name), "rb") as file:
        digest = hashlib.file_digest(file, "sha256").digest()
        return _stamp(os.fstat(file.fileno())), digest


def _stamp_of(folder: Path, name: str) -> Stamp:
    descriptor = open_below(folder, name)
    try:
        return _stamp(os.fstat(descriptor))
    finally:
        os.close(descriptor)


def _stamp(status: os.stat_result) -> Stamp:
    return Stamp(status.st_size, status.st_mtime_ns, status.st_ino)


def _batches(parts: Iterator[FilePart]) -> Iterator[list[FilePart]]:
    """As many as are stored at once; what was read is never held back for long."""
    batch: list[FilePart] = []
    size = items = 0
    for part in parts:
        batch.append(part)
        size += sum(len(one.text) for one in part.documents)
        items += 1 + len(part.documents) + len(part.pairs)
        if size >= _BATCH_BYTES or items >= _BATCH_ITEMS:
            yield batch
            batch, size, items = [], 0, 0
    if batch:
        yield batch


def forget_other_folders(library_path: Path, watched: Sequence[str]) -> None:
    """As `Library.forget_other_folders`."""
    with Library.open(library_path) as library:
        library.forget_other_folders(watched)


def refused(library_path: Path, collection: str) -> tuple[int, list[tuple[str, str]]]:
    """How many of a folder's files were refused, and the first of them with their causes."""
    with Library.open(library_path, read_only=True) as library:
        return library.notes.refused(collection, _TOLD)
