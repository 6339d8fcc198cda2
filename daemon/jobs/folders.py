"""The job of the reading worker: look through a watched folder, and read what has changed.

It writes nothing, but for copies of files that are to be kept, in a place where they are nobody's:
what it has read or found gone it hands to the daemon, a little at a time, and goes on when that is
stored. So a look that is cut short, or killed, has stored what it had
handed over, and the next one goes on from there.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from daemon.library.box.boxes import Boxes
from daemon.library.catalogue.originals import MOST_BYTES, Arriving, Staged, clear
from daemon.library.file_notes import (
    UNFINISHED,
    FileNote,
    FilePart,
    FilesGone,
    FilesRead,
    Stamp,
)
from daemon.library.files import Found, is_document, open_below
from daemon.library.folders import (
    Changes,
    Folder,
    Memory,
    NotRead,
    Retry,
    Tree,
    cause_for_daemon,
    changes,
    held_back,
    kept_again,
    look,
    retry_of,
)
from daemon.library.readers.bounds import fault_of
from daemon.library.readers.documents import (
    MAX_ID,
    MAX_SOURCE,
    Document,
    FileProblem,
    Item,
    Pair,
    Waiting,
)
from daemon.library.readers.pdf import engines
from daemon.library.store import Library
from daemon.process.workers import ask

# Handed over at once: stored in one transaction, for which a training that has not begun waits.
_BATCH_BYTES: Final = 1 << 20
_BATCH_ITEMS: Final = 500  # files, documents and pairs
_GONE_AT_ONCE: Final = 1000
_TOLD: Final = 100  # of what was not read
_CAUSE: Final = 500  # characters
# How long a file's bytes may take to come: one of a slow disk keeps the other folders waiting, and
# one that is all gap costs who made it nothing.
_DIGEST_S: Final = 180.0
_STEP: Final = 1 << 20
_ARRIVING: Final = "looked"  # what names copies on their way to be kept

_boxes = Boxes()  # begun with the first file, and over with this process


@dataclass(frozen=True)
class Looked:
    """What a look found; ``not_read``: the first of what no note tells of."""

    memory: Memory
    seen: int = 0  # files
    other_kinds: int = 0
    links: int = 0
    not_read: tuple[NotRead, ...] = ()
    not_read_count: int = 0
    trouble: str = ""  # why the folder was not looked into, or what is held back
    seconds: float = 0.0


def look_through(
    folder: Folder,
    library_path: Path,
    before: Memory,
    keep: bool = False,
    give: Callable[[FilesRead | FilesGone], object] = ask,
    now_ns: Callable[[], int] = time.time_ns,
) -> Looked:
    """Look through a folder once, and ``give`` what changed. Raises LibraryError, and what it does.

    ``before``: of the last look; none: the daemon has started since. ``keep``: the files, too.
    """
    started = time.monotonic()
    clear(library_path, _ARRIVING)
    tree = look(folder.path)
    with Library.open(library_path, read_only=True) as library:
        notes = library.notes.of(folder.name)
    found = changes(notes, tree, before, now_ns(), ocr=engines.installed(), keep=keep)
    if tree.missing:
        trouble = (
            f"{tree.missing}; nothing that was read from it is removed meanwhile: mount its disk, "
            "or correct library.folders and restart"
        )
        memory = Memory(retries=before.retries)
        return Looked(memory, trouble=trouble, seconds=time.monotonic() - started)
    seconds = time.monotonic() - started
    keeping = library_path if keep else None
    reading = _Reading(folder, tree, notes, before.retries, now_ns, keeping)
    for batch in _batches(reading.parts(found.read)):
        give(FilesRead(folder.name, tuple(batch)))
    trouble, memory = _give_gone(folder, library_path, tree, found, (len(notes), before), give)
    not_read = [*tree.problems, *reading.failed]
    return Looked(
        replace(
            memory,
            waiting={**found.waiting, **reading.changing},
            retries={n: one for n, one in reading.retries.items() if n in tree.files},
        ),
        seen=len(tree.files),
        other_kinds=tree.other_kinds,
        links=tree.links,
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
    # What is here from nowhere else.
    lasting = [name for name in found.gone if documents[name]]
    trouble, memory = held_back(lasting, *noted[:1], tree, noted[1])
    # A file's note also says that a person took its document out: while the disk may not be
    # mounted, none is forgotten, or it would be read again when it is.
    going = [] if trouble or not tree.files else found.gone
    for first in range(0, len(going), _GONE_AT_ONCE):
        names = going[first : first + _GONE_AT_ONCE]
        ids = [one for name in names for one in documents[name]]
        give(FilesGone(folder.name, tuple(names), tuple(ids)))
    return trouble, memory


@dataclass
class _UnderWay:
    """A file that is read, and what was read of it since the part before."""

    name: str
    note: FileNote  # as it is when it is read to its end
    first: bool = True
    documents: list[Document] = field(default_factory=list)
    pairs: list[Pair] = field(default_factory=list)
    causes: list[str] = field(default_factory=list)
    passing: bool = False  # one of the causes is: it is tried again
    waiting: list[Waiting] = field(default_factory=list)
    size: int = 0
    is_document: bool = False  # it has been read as the document of its name, now or before

    @property
    def large(self) -> bool:
        """Whether it is enough for a part."""
        items = len(self.documents) + len(self.pairs)
        return self.size >= _BATCH_BYTES or items >= _BATCH_ITEMS

    def part(self, note: FileNote | None = None, original: Staged | None = None) -> FilePart:
        """What was read; with the last part ``note``, and ``original`` where it is to be kept."""
        told = (tuple(self.documents), tuple(self.pairs), self.first, tuple(self.waiting))
        self.documents, self.pairs, self.waiting = [], [], []
        self.size, self.first = 0, False
        return FilePart(self.name, note, *told, original)


_END: Final = FileProblem("", "")  # behind each file: boxes tell problems as they were given


class _Reading:
    """The reading of a look's files: what could not be opened, and what changed meanwhile."""

    def __init__(
        self,
        folder: Folder,
        tree: Tree,
        notes: dict[str, FileNote],
        retries: Mapping[str, Retry],
        now_ns: Callable[[], int],
        keeping: Path | None = None,
    ) -> None:
        """``retries``: of the look before. ``keeping``: the library beside which files are kept."""
        self.failed: list[NotRead] = []
        self.changing: dict[str, Stamp] = {}
        self.retries = dict(retries)  # for the next look
        self._now_ns = now_ns
        self._keeping = keeping
        self._folder = folder
        self._tree = tree
        self._notes = notes
        self._begun: deque[_UnderWay] = deque()

    def parts(self, names: Sequence[str]) -> Iterator[FilePart]:
        """What is in the files. One that can't be opened is tried again with each look."""
        for item in _boxes.read(self._opened(names)):
            file = self._begun[0]
            if item is _END:
                self._begun.popleft()
                yield from self._ended(file)
            else:
                self._take(file, item)
                if file.large:
                    yield file.part()

    def _opened(self, names: Sequence[str]) -> Iterator[Found | FileProblem]:
        """The files, each with its end behind it; some are opened while others are read."""
        folder = self._folder.path
        for name in names:
            stamp, digest = self._tree.files[name], b""
            refusal: FileProblem | None = None
            try:
                seen, digest = _seen(folder, name)
            except FileNotFoundError:
                continue  # gone meanwhile: the next look will find it so
            except _NotDigested as error:
                seen, refusal = stamp, FileProblem("", str(error), passing=error.passing)
            except OSError as error:
                self.failed.append(NotRead(name, cause_for_daemon(error)))
                continue
            if seen != stamp:
                self.changing[name] = seen
                continue
            if refusal is not None:
                self._begun.append(_UnderWay(name, FileNote(stamp, digest)))
                yield refusal
                yield _END
                continue
            before = self._notes.get(name)
            # What it was is what it is: only its note changes.
            same = before is not None and before.digest == digest and not before.refused
            one = _UnderWay(name, FileNote(stamp, digest), first=not same)
            one.is_document = same and before is not None and before.lacks_original
            self._begun.append(one)
            if not same:
                yield Found(folder / name, name, below=folder)
            yield _END

    def _take(self, file: _UnderWay, item: Item) -> None:
        prefix = f"{self._folder.name}/"
        if isinstance(item, FileProblem):
            file.causes.append(item.beside(str(self._folder.path / file.name)))
            file.passing = file.passing or item.passing
            if item.lacks and len(prefix) + len(item.document) <= MAX_ID:
                file.waiting.append(Waiting(prefix + item.document, item.pages, _source(item)))
        elif isinstance(item, Pair):
            named = tuple(prefix + one for one in item.positives)
            pair = replace(item, positives=named)
            if fault := fault_of(pair):
                file.causes.append(fault)
                return
            file.pairs.append(pair)
            file.size += len(item.query) + sum(map(len, named))
        elif len(prefix) + len(item.id) > MAX_ID:
            file.causes.append(f"an id or path longer than {MAX_ID} characters: shorten it")
        elif fault := fault_of(document := replace(item, id=prefix + item.id)):
            file.causes.append(fault)
        else:
            file.documents.append(document)
            file.size += len(item.text)
            file.is_document = file.is_document or item.id == file.name

    def _ended(self, file: _UnderWay) -> Iterator[FilePart]:
        """The last part of a file, if it did not change while it was read."""
        try:
            stamp = _stamp_of(self._folder.path, file.name)
        except OSError:
            return  # gone meanwhile, or another in its place: the next look sees
        if stamp != file.note.stamp:
            self.changing[file.name] = stamp
            return
        is_kept, before = True, self.retries.get(file.name)
        try:
            original = self._staged(file)
        except _Changed:
            self.changing[file.name] = stamp
            return
        except OSError as error:
            self.failed.append(NotRead(file.name, f"not kept: {cause_for_daemon(error)}"))
            original, is_kept = None, False
        refused = file.causes[0][:_CAUSE] if file.causes else ""
        if len(file.causes) > 1:
            refused += f" (and {len(file.causes) - 1} more)"
        retry = None
        if file.passing:
            retry = retry_of(before, stamp, self._now_ns())
        if retry is None:
            self.retries.pop(file.name, None)
            if not is_kept:
                self.retries[file.name] = kept_again(before, stamp, self._now_ns())
            yield file.part(replace(file.note, refused=refused), original)
            return
        self.retries[file.name] = retry
        at = datetime.fromtimestamp(retry.not_before_ns / 1e9, UTC)
        refused += f" (try {retry.tries}; another one from {at:%Y-%m-%d %H:%M} UTC on)"
        yield file.part(replace(file.note, stamp=UNFINISHED, refused=refused), original)

    def _staged(self, file: _UnderWay) -> Staged | None:
        """A copy of the file, if it is one to be kept. Raises OSError, and _Changed."""
        if not self._keeping or not file.is_document or not is_document(Path(file.name)):
            return None
        arriving = Arriving(self._keeping, _ARRIVING)
        try:
            with os.fdopen(open_below(self._folder.path, file.name), "rb") as content:
                left = file.note.stamp.size
                while left > 0 and (piece := content.read(min(left, _STEP))):
                    arriving.write(piece)
                    left -= len(piece)
            original = arriving.end()
        except BaseException:
            arriving.drop()
            raise
        if original.digest != file.note.digest:  # of what was read
            arriving.drop()
            raise _Changed
        key = (self._folder.name, os.fsencode(file.name))
        return Staged(f"{self._folder.name}/{file.name}", arriving.path, original, key)


def _source(problem: FileProblem) -> str:
    """The file that a problem is about, as documents have theirs."""
    return problem.path.encode(errors="replace").decode()[:MAX_SOURCE]


class _Changed(Exception):
    """A file is no longer what was read: the next look reads it."""


class _NotDigested(Exception):
    """A file is not looked at; the message is the cause and the remedy."""

    def __init__(self, cause: str, *, passing: bool = False) -> None:
        super().__init__(cause)
        self.passing = passing


def _seen(folder: Path, name: str) -> tuple[Stamp, bytes]:
    """How a file is, and the SHA-256 of its content. Raises OSError and _NotDigested.

    Of no more than it says to have, for one that is not on a disk may have no end.
    """
    digest, until = hashlib.sha256(), time.monotonic() + _DIGEST_S
    with os.fdopen(open_below(folder, name), "rb") as file:
        left = os.fstat(file.fileno()).st_size
        if left > MOST_BYTES:
            raise _NotDigested(f"larger than {MOST_BYTES >> 30} GiB: cut it into several files")
        while left > 0 and (piece := file.read(min(left, _STEP))):
            digest.update(piece)
            left -= len(piece)
            if time.monotonic() > until:
                cause = f"takes more than {_DIGEST_S:.0f} s to come from its disk"
                raise _NotDigested(cause, passing=True)
        return _stamp(os.fstat(file.fileno())), digest.digest()


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
