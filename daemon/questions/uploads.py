"""Files that people bring with a token: taken, read in a box, and stored as an ingest stores them.

Until it is read a file lies where those arrive that are to be kept, under a name that the next
start removes (`Arriving`). What is read of it is stored in one transaction. So a kill leaves
neither a half document nor a file that nobody has; whoever brought it brings it again.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import time
import unicodedata
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any, Final, Literal

import structlog

from config.kinds import LONGEST_COLLECTION
from daemon.control.context import ServiceContext
from daemon.learning.options import LearningError
from daemon.library.box.boxes import Boxes
from daemon.library.box.told import Limits
from daemon.library.catalogue.originals import Arriving, OriginalFile, Staged
from daemon.library.files import Found, is_document
from daemon.library.readers.bounds import fault_of
from daemon.library.readers.documents import (
    MAX_ID,
    Document,
    FileProblem,
    Item,
    Pair,
    Waiting,
)
from daemon.library.schema import LibraryError
from daemon.process.tasks import logged
from daemon.process.workers import WorkerCrashed
from daemon.questions.credentials import Bearer, NotAllowed, actor_of
from daemon.state.audit_format import AuditError
from proto import questions_pb2 as questions

log = structlog.get_logger()

_ARRIVING: Final = "brought"
_AT_ONCE: Final = 4  # files on their way
_WAITING: Final = 16  # files that are on the disk and not read yet
_OF_A_TOKEN: Final = 4  # of both together
_TOLD: Final = 50  # files of a token whose fate is told
_TOLD_IN_ALL: Final = 1000
_LONGEST_NAME: Final = 150  # characters
_SPARE: Final = 256 << 20  # bytes of the disk that stay free
_SILENT_S: Final = 60.0  # between two pieces of a file
# Of one file in memory at once, for it is stored whole or not at all: less than an operator's.
_LIMITS: Final = Limits(records=1000, text_bytes=64 << 20)
_FAILURES: Final = (LearningError, LibraryError, WorkerCrashed, AuditError, OSError)

State = Literal["waiting", "reading", "stored", "searchable", "unchanged", "refused"]


class NotTakenError(LearningError):
    """A file is not taken; the text says why and what to do. ``senseless``: it never would be."""

    def __init__(self, cause: str, *, senseless: bool = False) -> None:
        super().__init__(cause)
        self.senseless = senseless


@dataclass
class _Brought:
    """A file that somebody brought, and what has become of it."""

    token: bytes  # its digest: a name may be given again
    document_id: str
    came_s: int
    size: int = 0
    state: State = "waiting"
    cause: str = ""


@dataclass(frozen=True)
class _Whole:
    """A file on the disk, as it came."""

    path: Path
    original: OriginalFile
    replace: bool


class Uploads:
    """What people bring through one socket."""

    def __init__(self, around: ServiceContext) -> None:
        self._around = around
        self._collection = around.driver.collection
        self.most_bytes = around.settings.gateway.upload_mib << 20
        self._told = deque[_Brought](maxlen=_TOLD_IN_ALL)
        self._under_way = Counter[bytes]()  # of each token
        self._arriving = 0
        self._reads = asyncio.Lock()
        self._work = set[asyncio.Task[None]]()

    def told(self, bearer: Bearer) -> questions.UploadsReply:
        """What became of what this token brought."""
        mine = [one for one in self._told if one.token == bearer.token.digest]
        uploads = [
            questions.Upload(
                document_id=one.document_id,
                bytes=one.size,
                unix_s=one.came_s,
                state=one.state,
                cause=one.cause,
            )
            for one in reversed(mine[-_TOLD:])
        ]
        return questions.UploadsReply(uploads=uploads, most_bytes=self.most_bytes)

    async def take(
        self, bearer: Bearer, file: questions.UploadedFile, parts: AsyncIterator[Any]
    ) -> AsyncIterator[questions.UploadReply]:
        """A file: said what it is to be called before its bytes are asked for, and behind them.

        Raises NotTakenError, NotAllowed, AuditError, OSError; of one that is cut off nothing stays.
        """
        document_id = self._document_id(bearer, file)
        self._check_room(bearer)
        one = _Brought(bearer.token.digest, document_id, int(time.time()))
        self._under_way[one.token] += 1
        told = {"document": document_id}
        handed_over = False
        try:
            await self._around.audit.record(actor_of(bearer), "upload", "begun", **told)
            try:
                yield questions.UploadReply(document_id=document_id)
                whole = await self._received(one, file, parts)
                self._told.append(one)
                work = asyncio.create_task(logged(self._become(one, whole, bearer)))
                self._work.add(work)
                work.add_done_callback(self._work.discard)
                handed_over = True
            finally:
                if not handed_over:
                    await self._around.audit.record_or_owe(
                        actor_of(bearer), "upload", "refused or failed", **told
                    )
        finally:
            if not handed_over:
                self._done_with(one)
        yield questions.UploadReply(document_id=document_id)

    # ---- may it come -----------------------------------------------------------------

    def _document_id(self, bearer: Bearer, file: questions.UploadedFile) -> str:
        """What it is to be called. Raises NotTakenError, NotAllowed."""
        if not self.most_bytes:
            raise NotTakenError("this site takes no files from people (gateway.upload_mib is 0)")
        if fault := _fault_of_collection(file.collection) or _fault_of_name(file.name):
            raise NotTakenError(fault, senseless=True)
        document_id = f"{file.collection}/{file.name}"
        if len(document_id) > MAX_ID:
            raise NotTakenError(f"more than {MAX_ID} characters in all", senseless=True)
        _check_may(bearer, document_id)
        for state in self._around.services.folders.states:
            if document_id.startswith(f"{state.folder.name}/"):
                cause = f"{state.folder.name!r} is the collection of a folder that fedd watches"
                raise NotTakenError(f"{cause}: choose another one", senseless=True)
        return document_id

    def _check_room(self, bearer: Bearer) -> None:
        if self._under_way[bearer.token.digest] >= _OF_A_TOKEN:
            cause = f"{_OF_A_TOKEN} files of the token {bearer.name!r} are under way"
            raise NotTakenError(f"{cause}: wait until one of them is read")
        if self._under_way.total() >= _WAITING or self._arriving >= _AT_ONCE:
            raise NotTakenError("as many files as may are under way: try again in a moment")
        free = shutil.disk_usage(self._collection.library_path.parent).free
        if free < 2 * self.most_bytes * (self._arriving + 1) + _SPARE:
            raise NotTakenError("the disk of the site is nearly full: ask whoever administers it")

    def _done_with(self, one: _Brought) -> None:
        self._under_way[one.token] -= 1
        if not self._under_way[one.token]:
            del self._under_way[one.token]

    # ---- it comes ----------------------------------------------------------------------

    async def _received(
        self, one: _Brought, file: questions.UploadedFile, parts: AsyncIterator[Any]
    ) -> _Whole:
        """Its bytes on the disk, or none of them."""
        self._arriving += 1
        arriving = await asyncio.to_thread(Arriving, self._collection.library_path, _ARRIVING)
        whole = None
        try:
            last = False
            while not last:
                part = await _next(parts)
                if arriving.size + len(part.content) > self.most_bytes:
                    cause = f"a file has at most {self.most_bytes >> 20} MiB here"
                    raise NotTakenError(f"{cause}: cut it into several", senseless=True)
                await asyncio.to_thread(arriving.write, part.content)
                last = part.last
            if not arriving.size:
                raise NotTakenError("the file is empty", senseless=True)
            whole = _Whole(arriving.path, await asyncio.to_thread(arriving.end), file.replace)
            one.size = whole.original.size
        finally:
            self._arriving -= 1
            if whole is None:
                await asyncio.to_thread(arriving.drop)
        return whole

    # ---- it becomes a document -------------------------------------------------------------

    async def _become(self, one: _Brought, whole: _Whole, bearer: Bearer) -> None:
        """Read it, one after the other, and store it; ``one`` says what came of it."""
        try:
            async with self._reads:
                one.state = "reading"
                documents, waiting, problems = await self._read(one, whole)
                await self._store(one, whole, documents, waiting, bearer)
            one.cause = problems
        except (NotAllowed, *_FAILURES) as error:
            one.state, one.cause = "refused", str(error)
        except asyncio.CancelledError:
            one.state, one.cause = "refused", "fedd was stopped: bring it again"
            raise
        finally:
            self._done_with(one)
            await asyncio.to_thread(whole.path.unlink, missing_ok=True)
            await self._around.audit.record_or_owe(
                actor_of(bearer),
                "upload",
                "refused or failed" if one.state == "refused" else "done",
                document=one.document_id,
                bytes=one.size,
                sha256=whole.original.digest.hex(),
            )
        if one.state == "stored":
            await self._found(one)

    async def _found(self, one: _Brought) -> None:
        """Wait until questions find it."""
        self._collection.refresh()
        await self._collection.recount()
        await self._around.driver.readiness.refresh()
        with contextlib.suppress(Exception):
            await self._collection.until_settled()
            one.state = "searchable"

    async def _read(
        self, one: _Brought, whole: _Whole
    ) -> tuple[list[Document], list[Waiting], str]:
        """What is in it, read by a process that can do little else. Raises NotTakenError."""
        boxes = Boxes(_LIMITS)
        name = PurePosixPath(one.document_id).name
        try:
            items = await asyncio.to_thread(lambda: list(boxes.read([Found(whole.path, name)])))
        finally:  # it waits for processes to end
            await asyncio.to_thread(boxes.end)
        collection = one.document_id.removesuffix(name)
        documents, waiting, problems = _sorted_out(items, collection, one.document_id)
        if not documents and not waiting:
            raise NotTakenError("; ".join(problems) or "there is nothing to read in it")
        return documents, waiting, "; ".join(problems)[:1000]

    async def _store(
        self,
        one: _Brought,
        whole: _Whole,
        documents: Sequence[Document],
        waiting: Sequence[Waiting],
        bearer: Bearer,
    ) -> None:
        """All of it, or nothing. Raises NotTakenError, NotAllowed and what an ingest fails with."""
        async with self._collection.changes.turn():
            _check_may(bearer, one.document_id)  # by now
            ids = [one.document_id, *(document.id for document in documents)]
            known = await self._collection.known(ids)
            if known and not whole.replace:
                if await self._is_same(documents, known):
                    one.state = "unchanged"
                    return
                cause = f"there is another document {one.document_id!r}"
                raise NotTakenError(f"{cause}: choose another name, or say that this replaces it")
            await self._collection.ingest(documents, [], replace=True, waiting=waiting)
            originals = self._around.services.originals
            if originals.keeping and documents:
                await originals.keep(Staged(one.document_id, whole.path, whole.original))
            one.state = "stored"

    async def _is_same(self, documents: Sequence[Document], known: set[str]) -> bool:
        """Whether all of it is here as it was read now."""
        if known < {document.id for document in documents}:
            return False
        here, _ = await self._collection.whole_documents(sorted(known), 1 << 62)
        texts = {document.id: (document.title, document.text) for document in here}
        return texts == {document.id: (document.title, document.text) for document in documents}


def _sorted_out(
    items: Sequence[Item], collection: str, document_id: str
) -> tuple[list[Document], list[Waiting], list[str]]:
    """What a box has told of a file, under the ids that it gets here."""
    documents, waiting, problems = list[Document](), list[Waiting](), list[str]()
    source = f"upload/{document_id}"
    for item in items:
        if isinstance(item, FileProblem):
            problems.append(item.cause)
            if item.lacks and len(collection) + len(item.document) <= MAX_ID:
                waiting.append(Waiting(collection + item.document, item.pages, source))
        elif isinstance(item, Pair):
            problems.append("pairs are the operator's to ingest")
        else:
            one = replace(item, id=collection + item.id, source=source, split="")
            within = one.id == document_id or one.id.startswith(f"{document_id}/")
            if fault := "" if within else "it tells of another file":
                problems.append(fault)
            elif fault := fault_of(one):
                problems.append(fault)
            else:
                documents.append(one)
    return documents, waiting, problems


async def _next(parts: AsyncIterator[Any]) -> Any:
    """The next part. Raises NotTakenError where none comes, or another file begins."""
    try:
        async with asyncio.timeout(_SILENT_S):
            part = await anext(parts, None)
    except TimeoutError:
        raise NotTakenError(f"no more of the file came for {_SILENT_S:g} s") from None
    if part is None:
        raise NotTakenError("the file was cut off: send it again", senseless=True)
    if part.HasField("file"):
        raise NotTakenError("one file at a time", senseless=True)
    return part


def _check_may(bearer: Bearer, document_id: str) -> None:
    """Whether the token may put that there, now. Raises NotTakenError, NotAllowed."""
    collections = bearer.rights()
    if collections is not None and not document_id.startswith(tuple(f"{x}/" for x in collections)):
        cause = f"the token {bearer.name!r} may bring files into {', '.join(collections)} alone"
        raise NotTakenError(cause, senseless=True)


def _fault_of_collection(name: str) -> str:
    if not name or len(name) > LONGEST_COLLECTION:
        return f"name the collection that it is for: 1 to {LONGEST_COLLECTION} characters"
    if fault := next(filter(None, map(_fault_of_part, name.split("/"))), ""):
        return f"the collection: {fault}"
    return ""


def _fault_of_name(name: str) -> str:
    if not name or len(name) > _LONGEST_NAME:
        return f"a file's name has 1 to {_LONGEST_NAME} characters"
    if "/" in name:
        return "a file's name has no folder in it"
    if fault := _fault_of_part(name):
        return f"the file's name: {fault}"
    if not is_document(Path(name)):
        return "files of this kind are not taken: docs/fedctl.md has those that are read"
    return ""


def _fault_of_part(part: str) -> str:
    """Why this is no name of a file or a folder, whatever reads it later; "" where it is one."""
    if not part or part != part.strip() or part.startswith(".") or part.endswith("."):
        return "no part of it is empty, or begins or ends with a space or a dot"
    if "\\" in part or any(unicodedata.category(sign)[0] == "C" for sign in part):
        return "no backslash and no control character"
    return ""
