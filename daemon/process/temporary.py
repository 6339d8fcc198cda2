"""Folders in the system's temporary one, which what a killed process left there does not outlive.

There because a socket's name must be short. Who has one holds a lock on it (flock(2)), which the
kernel takes away with the process: what nobody holds is over, whatever its number was.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Final, Self

_PREFIX: Final = "hanse-tmp-"
# All of what `tempfile` makes of it: nobody's own folder is called so by chance.
_OURS: Final = re.compile(re.escape(_PREFIX) + "[a-z0-9_]{8}")


class TemporaryFolder:
    """For us alone: never wider than 0700, and just that under a mask that would keep us out."""

    def __init__(self) -> None:
        """Raises OSError."""
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=_PREFIX))
            with suppress(BlockingIOError, FileNotFoundError):  # who tidies was here first
                self.path.chmod(0o700)
                self._held = _held(self.path)
                if self.path.exists():
                    return
                os.close(self._held)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.cleanup()

    def cleanup(self) -> None:
        """Remove it, with what is in it."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._held >= 0:
            os.close(self._held)
        self._held = -1


def forget_left() -> None:
    """Remove what killed processes of this user have left: documents may lie there in clear."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        if not _OURS.fullmatch(folder.name):
            continue
        with suppress(OSError):  # it is in use, another user's, or gone by now
            held = _held(folder)
            try:
                if os.fstat(held).st_uid == os.getuid():
                    shutil.rmtree(folder)
            finally:
                os.close(held)


def _held(folder: Path) -> int:
    held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(held)
        raise
    return held
