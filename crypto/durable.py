"""Files that are there whole, or not at all: written beside their place, then put there.

rename(2) and link(2) are atomic, so a name without `UNFINISHED` before it is a whole file,
whatever the moment of a crash. That content is on the disk before its name is, POSIX
promises only with an fsync of the file before and of its folder after.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

UNFINISHED = ".new-"


@contextmanager
def whole(path: Path, *, fresh: bool = False, lasting: bool = True) -> Iterator[Path]:
    """Where to write what is to be ``path``; it has that name when the block is over.

    After an error, or a crash, what was there before is there still, and after an error
    nothing beside it. ``fresh``: FileExistsError where something has the name already, if
    only a link. ``lasting`` false spares the disk: good for what no power cut must outlast.
    """
    temporary = path.with_name(f"{UNFINISHED}{path.name}.{secrets.token_hex(8)}")
    try:
        yield temporary
        if lasting:
            fsync(temporary)
        # link, unlike rename, fails when the name is taken: nothing is overwritten.
        (os.link if fresh else os.rename)(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    if lasting:
        fsync(path.parent)


def write(path: Path, content: bytes, mode: int = 0o600, *, fresh: bool = False) -> None:
    """Put ``content`` under ``path``, which nobody can open before it has its ``mode``."""
    with whole(path, fresh=fresh) as temporary:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            os.fchmod(descriptor, mode)
            file.write(content)


def fsync(path: Path) -> None:
    """Have a file's content, or a folder's names, on the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def clear(path: Path) -> None:
    """Remove a folder with all in it, or what else has its name: a link, not where it leads."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def sweep(folder: Path) -> None:
    """Remove what a crash left half written, in this folder and those below.

    Also behind a link in it: a folder may lie on another disk. Only at a start: a write may be
    under way. It may hold what nobody else should read.
    """
    linked = (one for one in folder.iterdir() if one.is_symlink() and one.is_dir())
    for place in (folder, *linked):
        for leftover in place.rglob(f"{UNFINISHED}*"):
            if not leftover.is_dir():
                leftover.unlink(missing_ok=True)
