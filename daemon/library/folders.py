"""Watched folders: what a look finds in one, and what follows from it.

A look asks for each file's name, size and times and opens none. What it does then is decided
here, from the notes of what was read before (`FileNote`) and from the look before (`Memory`):

- a file is read when its size, its time of change or its inode is another than noted. One that
  changed within the last two seconds, or whose size is another than when it last had to
  wait, is being written, and waits for the next look;
- what could not be read for a cause that may pass (`FileProblem.passing`) is tried again after
  pauses that grow, and after five tries in all remembered like any other that is refused;
- what is noted and no longer there is gone, unless the folder that it lay in could not be
  looked into;
- a folder that is not there, or in which no file is left, may be a disk that is not mounted:
  nothing is taken to be gone;
- where more than half of the files are gone, and ten or more, three further looks have to find
  the same before they are.

No link is followed: whoever may write to a folder could have the daemon read what only it may.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from daemon.library.file_notes import FileNote, Stamp
from daemon.library.files import SUFFIXES, is_document

_SETTLED_NS = 2_000_000_000
_FEW = 10  # files, which people do remove at once
_AGREEING = 3  # further looks
_PAUSES_NS = tuple(minutes * 60_000_000_000 for minutes in (10, 60, 360, 1440))  # between tries


@dataclass(frozen=True)
class Folder:
    """A folder that is watched; its name is the collection of what is in it."""

    name: str
    path: Path


@dataclass(frozen=True)
class NotRead:
    """Something below a folder that was not read, and why; ``name``: its path there."""

    name: str
    cause: str


@dataclass(frozen=True)
class Tree:
    """What is in a folder: files that may be read, by their path below it."""

    files: Mapping[str, Stamp] = field(default_factory=dict)
    other_kinds: int = 0  # files that no reader is for
    links: int = 0  # to files and folders, none of which is followed
    problems: tuple[NotRead, ...] = ()
    unseen: tuple[str, ...] = ()  # folders that could not be looked into, with a / behind each
    missing: str = ""  # why the folder itself can't be looked into


@dataclass(frozen=True)
class Retry:
    """A file that could not be read for a cause that may pass: how often, and when to try next."""

    stamp: Stamp
    tries: int
    not_before_ns: int  # since 1970


@dataclass(frozen=True)
class Memory:
    """What one look tells the next; of ``retries`` a restart begins anew."""

    waiting: Mapping[str, Stamp] = field(default_factory=dict)
    gone: bytes = b""  # a digest of what was gone, where that was held back
    agreed: int = 0  # looks that found the same after that
    retries: Mapping[str, Retry] = field(default_factory=dict)


@dataclass(frozen=True)
class Changes:
    """What a look found changed, by path below the folder."""

    read: tuple[str, ...]
    waiting: Mapping[str, Stamp]
    gone: tuple[str, ...]


# ---- looking ---------------------------------------------------------------------


def look(folder: Path) -> Tree:
    """Look through a folder and the folders in it. Hidden files are passed over."""
    files: dict[str, Stamp] = {}
    problems: list[NotRead] = []
    unseen: list[str] = []
    waiting = [""]
    other_kinds = links = 0
    while waiting:
        below = waiting.pop()
        try:
            for entry in _entries(folder / below):
                name = below + entry.name
                if entry.is_symlink():
                    links += 1
                elif entry.is_dir(follow_symlinks=False):
                    waiting.append(f"{name}/")
                elif not entry.name.lower().endswith(SUFFIXES):
                    other_kinds += 1
                elif not stat.S_ISREG((status := entry.stat(follow_symlinks=False)).st_mode):
                    problems.append(NotRead(name, "not a regular file: it is not opened"))
                else:
                    files[name] = Stamp(status.st_size, status.st_mtime_ns, status.st_ino)
        except OSError as error:
            if not below:
                return Tree(missing=cause_for_daemon(error))
            # Also one that went while it was looked into: the next look knows.
            unseen.append(below)
            problems.append(NotRead(below, cause_for_daemon(error)))
    return Tree(files, other_kinds, links, tuple(problems), tuple(unseen))


def _entries(folder: Path) -> Iterator[os.DirEntry[str]]:
    """What is not hidden there. Raises OSError."""
    with os.scandir(folder) as entries:
        yield from (entry for entry in entries if not entry.name.startswith("."))


def cause_for_daemon(error: OSError) -> str:
    """One line for what the system said to the daemon, with what to do."""
    if isinstance(error, PermissionError):
        return "permission denied: let the daemon's user read it, and enter the folders above it"
    if isinstance(error, FileNotFoundError):
        return "not there (any more)"
    return error.strerror or str(error)


# ---- deciding --------------------------------------------------------------------


def changes(
    notes: Mapping[str, FileNote],
    tree: Tree,
    before: Memory,
    now_ns: int,
    *,
    ocr: bool = False,
    keep: bool = False,
) -> Changes:
    """What is to be read, what waits, and what is gone; of a missing folder nothing.

    ``ocr``: an engine is installed, for what waits for one. ``keep``: files are to be kept.
    """
    read: list[str] = []
    waiting: dict[str, Stamp] = {}
    for name, stamp in tree.files.items():
        note = notes.get(name)
        if note is not None and note.stamp == stamp and not _again(name, note, ocr, keep):
            continue
        retry = before.retries.get(name)
        if retry is not None and retry.stamp == stamp and now_ns < retry.not_before_ns:
            continue
        if _settled(stamp, before.waiting.get(name), now_ns):
            read.append(name)
        else:
            waiting[name] = stamp
    gone: list[str] = []
    if not tree.missing:
        gone = [n for n in notes if n not in tree.files and not n.startswith(tree.unseen)]
    return Changes(tuple(sorted(read)), waiting, tuple(sorted(gone)))


def _again(name: str, note: FileNote, ocr: bool, keep: bool) -> bool:
    """Whether a file that is as it was read is of use once more."""
    return (note.waits and ocr) or (note.lacks_original and keep and is_document(Path(name)))


def _settled(stamp: Stamp, before: Stamp | None, now_ns: int) -> bool:
    """Whether nobody writes to the file any more, as far as can be seen."""
    if before is not None and before.size != stamp.size:
        return False
    if stamp.mtime_ns > now_ns:  # of a clock that is ahead: two looks have to agree
        return before == stamp
    return now_ns - stamp.mtime_ns >= _SETTLED_NS


def retry_of(before: Retry | None, stamp: Stamp, now_ns: int) -> Retry | None:
    """When a file that may be read another time is tried again; None: not any more."""
    tries = 1 if before is None or before.stamp != stamp else before.tries + 1
    if tries > len(_PAUSES_NS):
        return None
    return Retry(stamp, tries, now_ns + _PAUSES_NS[tries - 1])


def kept_again(before: Retry | None, stamp: Stamp, now_ns: int) -> Retry:
    """When a file that could not be kept is copied again: at last once a day, for ever."""
    if before is None or before.stamp != stamp:
        return Retry(stamp, 1, now_ns + _PAUSES_NS[0])
    pause = _PAUSES_NS[min(before.tries, len(_PAUSES_NS) - 1)]
    return Retry(stamp, before.tries + 1, now_ns + pause)


def held_back(gone: Sequence[str], noted: int, tree: Tree, before: Memory) -> tuple[str, Memory]:
    """Why files that are gone are not taken for that yet, "" if they are; for the next look.

    ``gone``: those of ``noted`` files that documents are here from. What waits is not told.
    """
    if not gone:
        return "", Memory()
    if not tree.files:
        return (
            f"no file is left in it, and {len(gone)} were read from it: nothing is removed, for "
            "a disk may not be mounted; if it is meant, remove them with `fedctl documents remove`"
        ), Memory()
    if len(gone) < _FEW or 2 * len(gone) <= noted:
        return "", Memory()
    digest = hashlib.sha256("\0".join(gone).encode(errors="surrogateescape")).digest()
    agreed = before.agreed + 1 if digest == before.gone else 0
    if agreed >= _AGREEING:
        return "", Memory()
    return (
        f"{len(gone)} of {noted} files are gone at once: nothing is removed until "
        f"{_AGREEING - agreed} more looks find the same, for a disk may not be mounted"
    ), Memory(gone=digest, agreed=agreed)
