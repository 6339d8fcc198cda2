"""Files as they were ingested, where they are kept: taken in, given out, and their pages drawn."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

from daemon.jobs import originals as jobs
from daemon.library.box.boxes import Boxes
from daemon.library.catalogue.originals import (
    MOST_BYTES,
    PIECE,
    Arriving,
    OriginalFile,
    Staged,
    is_there,
    place_of,
)
from daemon.library.files import Found
from daemon.process.workers import Worker
from daemon.services.collection import Collection

_DRAWN_AT_ONCE: Final = 2  # pages, each with its gigabyte
_ARRIVING: Final = "sent"  # what names files on their way to be kept


class KeptOriginals:
    """Those of one site; ``keeping``: those of documents that are ingested are kept."""

    def __init__(self, collection: Collection, learning: Worker, keeping: bool) -> None:
        self.keeping = keeping
        self._collection = collection
        self._learning = learning
        self._drawing = asyncio.Semaphore(_DRAWN_AT_ONCE)

    def upload(self) -> Upload:
        """What one ingest brings."""
        return Upload(self._collection, self._learning)

    async def of(self, document_id: str) -> tuple[OriginalFile, Path] | None:
        """What a document was read from, and where that lies; None: it is not kept."""
        original = await self._collection.read(lambda library: library.original(document_id))
        if original is None:
            return None
        return original, place_of(self._collection.library_path, original)

    async def keep(self, staged: Staged) -> None:
        """Make a whole file its document's original. Raises LibraryError."""
        await self._learning.run(jobs.keep, self._collection.library_path, [staged])

    async def page(self, document_id: str, path: Path, number: int, dpi: int) -> bytes:
        """A page of the file at ``path``, of the kind that the id says. As `Boxes.page`.

        Whoever goes away ends it.
        """
        async with self._drawing:
            boxes = Boxes()
            try:
                return await asyncio.to_thread(boxes.page, Found(path, document_id), number, dpi)
            finally:  # it waits for processes to end
                await asyncio.to_thread(boxes.end)


class Upload:
    """The files of one ingest: offered, wanted, staged and kept.

    All bytes of a file are wanted unless its own document has just these: to know a digest, or to
    have ingested an equal file, is no right to what another document has.
    """

    def __init__(self, collection: Collection, learning: Worker) -> None:
        self._collection = collection
        self._learning = learning
        self._open = frozenset[str]()  # ids of documents whose files may be offered
        self._wanted: dict[str, OriginalFile] = {}
        self._arriving: tuple[str, Arriving] | None = None
        self._staged: list[Staged] = []
        self._writing = threading.Lock()
        self._over = False

    async def begin(self, ids: Iterable[str]) -> int:
        """Files of these documents may be offered now; how many of those before are kept."""
        kept = await self.keep()
        self._open = frozenset(ids)
        return kept

    async def offer(self, offered: Mapping[str, OriginalFile]) -> list[str]:
        """Those of the documents whose files are to be sent."""
        asked = {one: told for one, told in offered.items() if one in self._open}
        here = await self._collection.read(
            lambda library: {one: library.original(one) for one in asked}
        )
        path = self._collection.library_path

        def wanted() -> dict[str, OriginalFile]:
            return {
                one: told
                for one, told in asked.items()
                if 0 < told.size <= MOST_BYTES and not (here[one] == told and is_there(path, told))
            }

        self._wanted = await asyncio.to_thread(wanted)
        return list(self._wanted)

    async def take(self, pieces: Sequence[tuple[str, bytes]]) -> list[str]:
        """What comes of files, by document, in order; a line for each that is given up.

        Pieces of files that are not wanted are passed over.
        """
        return await asyncio.to_thread(self._written, pieces)

    async def keep(self) -> int:
        """Make what is whole the originals of their documents; of how many. Raises LibraryError."""
        if not self._staged:
            return 0
        kept = await self._learning.run(
            jobs.keep, self._collection.library_path, list(self._staged)
        )
        self._staged.clear()
        return kept

    async def drop(self) -> None:
        """Leave nothing of what is not kept by now."""
        await asyncio.to_thread(self._dropped)

    def _written(self, pieces: Sequence[tuple[str, bytes]]) -> list[str]:
        faults: list[str] = []
        with self._writing:
            for document_id, content in pieces:
                if self._over or document_id not in self._wanted:
                    continue
                try:
                    fault = self._write(document_id, content)
                except OSError as error:
                    fault = error.strerror or str(error)
                if fault:
                    del self._wanted[document_id]
                    self._drop_arriving()
                    faults.append(f"the file of {document_id} is not kept: {fault}")
        return faults

    def _write(self, document_id: str, content: bytes) -> str:
        """Why its file is given up; "" where it is not. Raises OSError."""
        offered = self._wanted[document_id]
        if self._arriving is None or self._arriving[0] != document_id:
            self._drop_arriving()
            self._arriving = document_id, Arriving(self._collection.library_path, _ARRIVING)
        arriving = self._arriving[1]
        if len(content) > PIECE or arriving.size + len(content) > offered.size:
            return "more was sent than was offered"
        arriving.write(content)
        if arriving.size < offered.size:
            return ""
        if arriving.end() != offered:
            return "it changed while it was sent: ingest it again"
        self._staged.append(Staged(document_id, arriving.path, offered))
        del self._wanted[document_id]
        self._arriving = None
        return ""

    def _drop_arriving(self) -> None:
        if self._arriving is not None:
            self._arriving[1].drop()
            self._arriving = None

    def _dropped(self) -> None:
        with self._writing:
            self._over = True
            self._drop_arriving()
            for one in self._staged:
                one.path.unlink(missing_ok=True)
            self._staged.clear()
