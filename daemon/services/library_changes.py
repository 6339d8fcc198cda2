"""Changes to the library, one at a time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager


class ChangeUnderWay(Exception):
    """Somebody changes the library just now, and others are refused; the text says so."""


class SilentError(Exception):
    """Who asked for a change is heard no more, and others wait; the text says so."""


class LibraryChanges:
    """Changes to the library, one at a time: those that people ask for, and the daemon's own.

    A person's ingest or removal may take long, and a second person is told so. Each thing that
    changes waits for its turn: while an ingest waits for its next documents, which a person's
    machine may read for an hour, what a watched folder has is taken in.
    """

    def __init__(self) -> None:
        self._asked: tuple[str, float] | None = None  # what a person asked for, and since when
        self._turn = asyncio.Lock()

    @contextmanager
    def asked_for(self, what: str) -> Iterator[None]:
        """A person's change, an ingest or a removal. Raises ChangeUnderWay where there is one."""
        if self._asked is not None:
            raise ChangeUnderWay(
                f"{self.under_way} is under way\nWait until it has ended: `fedctl status` shows it"
            )
        self._asked = what, time.monotonic()
        try:
            yield
        finally:
            self._asked = None

    @property
    def under_way(self) -> str:
        """The change that a person has asked for, and its age; "": there is none."""
        if self._asked is None:
            return ""
        what, since = self._asked
        return f"{what} that began {time.monotonic() - since:.0f} s ago"

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Something changes, and nothing else does meanwhile."""
        async with self._turn:
            yield
