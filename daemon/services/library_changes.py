"""Changes to the library, one at a time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class ChangeUnderWay(Exception):
    """Somebody changes the library just now, and others are refused; the text says so."""


class LibraryChanges:
    """Changes to the library, one at a time: those that people ask for, and the daemon's own.

    A person's ingest or removal may take long, and a second person is told so; what the
    daemon does by itself is short, and waits.
    """

    def __init__(self) -> None:
        self._asked = False  # by a person
        self._turn = asyncio.Lock()

    @asynccontextmanager
    async def asked_for(self) -> AsyncIterator[None]:
        """A person's change. Raises ChangeUnderWay where there is one already."""
        if self._asked:
            raise ChangeUnderWay("an ingest or a removal is under way\nWait until it has ended")
        self._asked = True
        try:
            async with self._turn:
                yield
        finally:
            self._asked = False

    @asynccontextmanager
    async def by_itself(self) -> AsyncIterator[None]:
        """A change that nobody asked for: it waits for its turn."""
        async with self._turn:
            yield
