"""The part of control.proto that is about the files that documents were read from."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from functools import partial
from hashlib import sha256
from pathlib import Path

from daemon.control.context import Caller, Calls, Context, ServiceContext, refuse
from daemon.library.box.boxes import NotDrawn
from daemon.library.catalogue.originals import PIECE, OriginalFile, containing
from daemon.library.files import is_document, reader_of
from daemon.library.readers.reader import NoSuchPage
from daemon.services.originals import Upload
from daemon.services.rights import Rights, of_all
from proto import control_pb2 as control


class OriginalCalls(Calls):
    """Files out, and images of their pages."""

    async def Original(
        self, request: control.OriginalRequest, context: Context
    ) -> AsyncIterator[control.FilePart]:
        """The file that a document was read from, piece by piece."""
        async for part in self._originals().original(request, context, of_all):
            yield part

    async def PageImage(
        self, request: control.PageImageRequest, context: Context
    ) -> AsyncIterator[control.FilePart]:
        """A page of the file that a document was read from, as a PNG."""
        async for part in self._originals().page_image(request, context, of_all):
            yield part

    def _originals(self) -> Originals:
        return Originals(self._around, self._caller)


class Originals:
    """Files given out to whoever calls, of documents that they may see.

    Each method takes these rights, and looks at them before a file is opened and once more before
    any of it is given.
    """

    def __init__(self, around: ServiceContext, caller: Caller) -> None:
        self._collection = around.collection
        self._originals = around.services.originals
        self._caller = caller

    def original(
        self, request: control.OriginalRequest, context: Context, rights: Rights
    ) -> AsyncIterator[control.FilePart]:
        """The file that a document was read from, piece by piece."""
        sees = partial(self._caller.check_sees, request.id, "original", context, rights)
        return _checked(sees, self._original(request, context, rights))

    def page_image(
        self, request: control.PageImageRequest, context: Context, rights: Rights
    ) -> AsyncIterator[control.FilePart]:
        """A page of the file that a document was read from, as a PNG."""
        sees = partial(self._caller.check_sees, request.id, "page-image", context, rights)
        return _checked(sees, self._page_image(request, context, rights))

    async def _original(
        self, request: control.OriginalRequest, context: Context, rights: Rights
    ) -> AsyncIterator[control.FilePart]:
        async with self._caller.audited(context, "original") as recorded:
            original, path = await self._kept(request.id, context, rights)
            recorded["bytes"] = 0
            part = control.FilePart(size=original.size, digest=original.digest)
            try:
                with await asyncio.to_thread(path.open, "rb") as file:
                    while content := await asyncio.to_thread(file.read, PIECE):
                        part.content = content
                        recorded["bytes"] += len(content)
                        yield part
                        part = control.FilePart()
            except OSError as error:
                await _refuse_missing(context, request.id, error)

    async def _page_image(
        self, request: control.PageImageRequest, context: Context, rights: Rights
    ) -> AsyncIterator[control.FilePart]:
        async with self._caller.audited(context, "page-image") as recorded:
            recorded["page"] = request.page
            _, path = await self._kept(request.id, context, rights)
            reader = reader_of(Path(request.id))
            if reader is None or reader.page is None:
                await refuse(
                    context,
                    f"{request.id!r} has no pages that can be drawn: only a PDF has",
                    "`fedctl documents original` gives the file",
                    senseless=True,
                )
            work = self._originals.page(request.id, path, request.page, request.dpi)
            try:
                image = await work
            except NoSuchPage as error:
                count = "1 page" if error.pages == 1 else f"{error.pages} pages"
                cause = f"{request.id!r} has {count}, and none is number {request.page}"
                await refuse(context, cause, senseless=True)
            except NotDrawn as error:
                cause = f"page {request.page} of {request.id!r} can't be drawn: {error}"
                await refuse(context, cause)
            except OSError as error:
                await _refuse_missing(context, request.id, error)
            recorded["bytes"] = len(image)
            for part in _parts(image):
                yield part

    async def _kept(
        self, document_id: str, context: Context, rights: Rights
    ) -> tuple[OriginalFile, Path]:
        """The original of a document, and where it lies; refused with the cause where none is."""
        collection, answered = self._collection, self._caller.answered
        if found := await answered(context, self._originals.of(document_id)):
            original, path = found
            return original, path
        if not await answered(context, collection.known([document_id])):
            meant = ""
            if rights is of_all:  # others learn of no document that they did not name
                meant = await answered(context, collection.similar(document_id))
            remedy = f"Is it {meant!r}?" if meant else "`fedctl documents list` shows them"
            await refuse(context, f"no document {document_id!r} here", remedy, senseless=True)
        around = await answered(context, collection.known(containing(document_id)))
        cause, remedy = self._why_not(document_id, around)
        return await refuse(context, f"the file of {document_id!r} is not kept: {cause}", remedy)

    def _why_not(self, document_id: str, around: set[str]) -> tuple[str, str]:
        """Cause and remedy, where a file is not kept; ``around``: documents that it was in."""
        if around:
            outer = max(around, key=len)
            return "it was attached to another", f"Ask for {outer!r}, which it came with"
        if not is_document(Path(document_id)):
            return (
                "it was a record in a file of records",
                "`fedctl documents export` gives all that was in it",
            )
        if self._originals.keeping:
            return (
                "it came when fedd kept none or by a file of records (an export), or what was "
                "attached to it was taken out",
                "Ingest the file again",
            )
        return (
            "fedd keeps none here",
            "Set library.keep_originals = true, restart fedd, and ingest the file again",
        )


async def _checked(
    sees: Callable[[], Awaitable[None]], parts: AsyncIterator[control.FilePart]
) -> AsyncIterator[control.FilePart]:
    """What is to be given out, looked at before it is made and again before it is given."""
    await sees()
    first = True
    async for part in parts:
        if first:
            await sees()
            first = False
        yield part


async def _refuse_missing(context: Context, document_id: str, error: OSError) -> None:
    await refuse(
        context,
        f"the file of {document_id!r} can't be read in the state folder ({error.strerror})",
        "Put the folder `originals` of a backup back, or ingest the file again",
    )


def _parts(content: bytes) -> Iterator[control.FilePart]:
    first = control.FilePart(size=len(content), digest=sha256(content).digest())
    for begin in range(0, len(content), PIECE):
        first.content = content[begin : begin + PIECE]
        yield first
        first = control.FilePart()


async def taken(
    upload: Upload, request: control.IngestRequest, state: control.IngestProgress
) -> list[str]:
    """What a request of an ingest offers or brings of files; a line for each that is not kept."""
    offered = {
        one.document_id: OriginalFile(one.digest, one.size)
        for one in request.offered
        if len(one.digest) == sha256().digest_size
    }
    del state.originals_wanted[:]
    if offered:
        state.originals_wanted.extend(await upload.offer(offered))
    return await upload.take([(one.document_id, one.content) for one in request.pieces])
