"""Files that people bring with a token: taken, read in a box, and stored as an ingest stores them.

Until it is read a file lies where those arrive that are to be kept, under a name that the next
start removes (`Arriving`). What is read of it is stored in one transaction, so no kill leaves
half a document. Behind it goes what came with the one before and does not with this one, and then
the file itself is kept: where one of these fails, or a kill comes in between, the file is stored
all the same, and brought again it is done. A failure is told to who brought it and in fedd's log.
"""

from __future__ import annotations

import asyncio
import shutil
import time
import unicodedata
from collections import Counter, deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, Final, Literal

import structlog

from config.kinds import LONGEST_COLLECTION
from daemon.control.context import ServiceContext
from daemon.learning.options import LearningError
from daemon.library.box.boxes import Boxes
from daemon.library.box.told import Limits
from daemon.library.catalogue.originals import Arriving, OriginalFile, Staged
from daemon.library.files import FILE_ENDINGS, Found, is_document
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
from daemon.library.store import Library
from daemon.pairs.proposals import ProposalRefused
from daemon.process.tasks import logged
from daemon.process.workers import WorkerCrashed
from daemon.questions.credentials import Bearer, NotAllowed, without_paths
from daemon.questions.turns import InTurn
from daemon.services.collection import NotIndexedYet
from daemon.state.audit_format import AuditError
from daemon.state.people import Collections, lies_in
from proto import bounds
from proto import questions_pb2 as questions

log = structlog.get_logger()

_ARRIVING: Final = "brought"
_AT_ONCE: Final = 16  # files on their way
_WAITING: Final = 64  # files that are on their way, or on the disk and not read yet
_OF_A_SHARE: Final = 4  # of both together: so no token takes all places; reading is by turns
_TOLD: Final = 50  # files of somebody whose fate is told
_TOLD_TO: Final = 1000  # of those who bring any
_LONGEST_NAME: Final = int(bounds.of("UploadedFile", "name").most)
_SPARE: Final = 256 << 20  # bytes of the disk that stay free
_SILENT_S: Final = 60.0  # between two pieces of a file
_ARRIVE_S: Final = 600.0  # from its first piece to its last
_AGAIN_S: Final = 5.0  # and one that finds no place may come again
_PATIENT_S: Final = 20.0  # until whoever brought it is told that it is not read yet
# Of one file in memory at once, for it is stored whole or not at all: less than an operator's.
# And of time: the next one's turn comes behind it. What takes longer is for an operator to ingest.
_LIMITS: Final = Limits(records=1000, text_bytes=64 << 20, file_s=600.0)
_LOOK_EVERY_S: Final = 1.0  # while it is read, whether they may still
_INNER: Final = 1000  # documents that came with one, as what is attached to a letter
_CAUSE: Final = 1000  # characters
_BROUGHT: Final = "upload/"  # begins the source of what people brought

FAILURES: Final = (
    *(LearningError, LibraryError, ProposalRefused),
    *(WorkerCrashed, AuditError, OSError),
)
"""What the taking of a file may end with beside the two below."""

State = Literal["waiting", "reading", "stored", "searchable", "unchanged", "refused"]


class NotTakenError(Exception):
    """A file is not taken; the text says why and what to do.

    ``senseless``: it never would be; ``again_s``: it may be then.
    """

    def __init__(self, cause: str, *, senseless: bool = False, again_s: float = 0.0) -> None:
        super().__init__(cause)
        self.senseless, self.again_s = senseless, again_s


@dataclass
class _Brought:
    """A file that somebody brought, and what has become of it."""

    bearer: Bearer
    document_id: str
    replace: bool
    came_s: int
    size: int = 0
    digest: bytes = b""  # SHA-256 of its bytes
    state: State = "waiting"
    cause: str = ""

    @property
    def collection(self) -> str:
        """With its last slash."""
        return self.document_id.removesuffix(self.name)

    @property
    def name(self) -> str:
        """Of the file."""
        return PurePosixPath(self.document_id).name

    @property
    def is_stored(self) -> bool:
        """Whether it is, whatever was to come behind."""
        return self.state == "stored"

    @property
    def is_here(self) -> bool:
        """Whether it became, or was, a document."""
        return self.state in ("stored", "searchable", "unchanged")

    def is_told_to(self, bearer: Bearer, rights: Collections) -> bool:
        """Whether that is who brought it, who may bring files there still.

        A token that got the name of one before is another: it expires at another time.
        """
        return (
            self.bearer.actor == bearer.actor
            and (self.bearer.expires_s == bearer.expires_s or not bearer.is_token)
            and (rights is None or lies_in(self.document_id, rights))
        )

    def message(self) -> questions.Upload:
        """As it is told."""
        return questions.Upload(
            document_id=self.document_id,
            bytes=self.size,
            unix_s=self.came_s,
            state=self.state,
            cause=self.cause,
        )


@dataclass(frozen=True)
class _ReadFile:
    """What is in a file, under the ids that it gets here."""

    documents: list[Document]
    waiting: list[Waiting]
    problems: str


class Uploads:
    """What people bring through one socket."""

    def __init__(self, around: ServiceContext) -> None:
        self._around = around
        self._collection = around.collection
        self._most_bytes = around.settings.gateway.upload_mib << 20
        self._told: dict[str, deque[_Brought]] = {}  # by actor, who brought last is last
        self._under_way = Counter[str]()  # of each share
        self._arriving = 0
        self._reads = InTurn(1)
        self._work = set[asyncio.Task[None]]()

    def told(self, bearer: Bearer) -> questions.UploadsReply:
        """What may be brought, and what became of what was. Raises NotAllowed."""
        rights = bearer.rights()
        mine = [one for one in self._told.get(bearer.actor, ()) if one.is_told_to(bearer, rights)]
        return questions.UploadsReply(
            uploads=[one.message() for one in reversed(mine)],
            most_bytes=self._most_bytes,
            endings=FILE_ENDINGS,
            collections=rights or (),
            all_documents=rights is None,
        )

    async def take(
        self, bearer: Bearer, file: questions.UploadedFile, parts: AsyncIterator[Any]
    ) -> AsyncGenerator[questions.UploadReply, None]:
        """A file: told what it is to be called before its bytes are asked for, and behind them.

        Raises NotTakenError, NotAllowed and `FAILURES`; of one that is cut off nothing stays.
        """
        document_id = self._document_id(bearer, file)
        self._check_room(bearer)
        one = _Brought(bearer, document_id, file.replace, int(time.time()))
        async with AsyncExitStack() as stack:
            stack.enter_context(self._placed(bearer.share))
            with self._coming():
                told = {"collection": one.collection.rstrip("/")}
                span = self._around.audit.span(bearer.actor, "upload", **told)
                recorded = await stack.enter_async_context(span)
                yield questions.UploadReply(upload=one.message())
                path, original = await self._arrived(
                    parts, partial(_check_may, bearer, document_id)
                )
            stack.push_async_callback(asyncio.to_thread, path.unlink, missing_ok=True)
            one.size, one.digest = original.size, original.digest
            recorded |= {"bytes": original.size, "sha256": original.digest.hex()}
            self._remember(one)
            work = asyncio.create_task(logged(self._become(one, path, original, stack.pop_all())))
        self._work.add(work)  # the loop keeps no task by itself
        work.add_done_callback(self._work.discard)
        await asyncio.wait({work}, timeout=_PATIENT_S)
        yield questions.UploadReply(upload=one.message())

    def _remember(self, one: _Brought) -> None:
        """Nobody's are forgotten because another brings many."""
        mine = self._told.pop(one.bearer.actor, None) or deque(maxlen=_TOLD)
        self._told[one.bearer.actor] = mine
        mine.append(one)
        if len(self._told) > _TOLD_TO:
            del self._told[next(iter(self._told))]

    # ---- may it come -----------------------------------------------------------------

    def _document_id(self, bearer: Bearer, file: questions.UploadedFile) -> str:
        """What it is to be called. Raises NotTakenError, NotAllowed."""
        if not self._most_bytes:
            raise NotTakenError("this site takes no files from people (gateway.upload_mib is 0)")
        # One name, however the system that it comes from writes an accent.
        collection, name = (unicodedata.normalize("NFC", x) for x in (file.collection, file.name))
        collection = collection.strip("/")  # as `fedctl ingest --collection` has it
        if fault := _fault_of_collection(collection) or _fault_of_name(name):
            raise NotTakenError(fault, senseless=True)
        document_id = f"{collection}/{name}"
        if len(document_id) > MAX_ID:
            raise NotTakenError(f"more than {MAX_ID} characters in all", senseless=True)
        _check_may(bearer, document_id)
        for state in self._around.services.folders.states:
            if document_id.startswith(f"{state.folder.name}/"):
                cause = f"{state.folder.name!r} is the collection of a folder that fedd watches"
                raise NotTakenError(f"{cause}: choose another one", senseless=True)
        return document_id

    def _check_room(self, bearer: Bearer) -> None:
        if self._under_way[bearer.share] >= _OF_A_SHARE:
            cause = f"{_OF_A_SHARE} files of {bearer.name!r} are under way"
            raise NotTakenError(f"{cause}: wait until one of them is read", again_s=_AGAIN_S)
        if self._under_way.total() >= _WAITING or self._arriving >= _AT_ONCE:
            cause = "as many files as may be are under way: try again in a moment"
            raise NotTakenError(cause, again_s=_AGAIN_S)
        free = shutil.disk_usage(self._collection.library_path.parent).free
        if free < 2 * self._most_bytes * (self._arriving + 1) + _SPARE:
            raise NotTakenError("the disk of the site is nearly full: ask whoever administers it")

    @contextmanager
    def _placed(self, share: str) -> Iterator[None]:
        """One of those under way."""
        self._under_way[share] += 1
        try:
            yield
        finally:
            self._under_way[share] -= 1
            if not self._under_way[share]:
                del self._under_way[share]

    @contextmanager
    def _coming(self) -> Iterator[None]:
        """One of those that arrive, for which the disk must have room."""
        self._arriving += 1
        try:
            yield
        finally:
            self._arriving -= 1

    # ---- it comes ----------------------------------------------------------------------

    async def _arrived(
        self, parts: AsyncIterator[Any], check_may: Callable[[], None]
    ) -> tuple[Path, OriginalFile]:
        """Its bytes on the disk, or none of them; they may bring it to its last byte."""
        opening = asyncio.ensure_future(
            asyncio.to_thread(Arriving, self._collection.library_path, _ARRIVING)
        )
        try:
            arriving = await asyncio.shield(opening)  # who hangs up meanwhile leaves it open
            async with asyncio.timeout(_ARRIVE_S):
                return await self._written(arriving, parts, check_may)
        except BaseException as error:
            await asyncio.shield(_dropped(opening))
            if isinstance(error, TimeoutError):
                cause = f"the file took more than {_ARRIVE_S / 60:.0f} minutes to come"
                raise NotTakenError(f"{cause}: send it over a faster line") from None
            raise

    async def _written(
        self, arriving: Arriving, parts: AsyncIterator[Any], check_may: Callable[[], None]
    ) -> tuple[Path, OriginalFile]:
        last = False
        while not last:
            part = await _next(parts)
            check_may()
            if arriving.size + len(part.content) > self._most_bytes:
                cause = f"a file has at most {self._most_bytes >> 20} MiB here"
                raise NotTakenError(f"{cause}: cut it into several", senseless=True)
            await asyncio.to_thread(arriving.write, part.content)
            last = part.last
        if not arriving.size:
            raise NotTakenError("the file is empty", senseless=True)
        return arriving.path, await asyncio.to_thread(arriving.end)

    # ---- it becomes a document -------------------------------------------------------------

    async def _become(
        self, one: _Brought, path: Path, original: OriginalFile, until: AsyncExitStack
    ) -> None:
        """Read it when its turn has come, and store it; ``one`` says what came of it."""
        try:
            async with until, self._reads.due(one.bearer.share):
                _check_may(one.bearer, one.document_id)
                one.state = "reading"
                found = await self._read(one, path)
                one.cause = found.problems
                await self._store(one, Staged(one.document_id, path, original), found)
        except (NotTakenError, NotAllowed) as refusal:
            one.state, one.cause = "refused", str(refusal)[:_CAUSE]
        except FAILURES as error:
            log.warning("a file that was brought is not stored", cause=str(error))
            one.state, one.cause = "refused", without_paths(str(error))[:_CAUSE]
        except asyncio.CancelledError:
            if not one.is_stored:
                one.state, one.cause = "refused", "fedd was stopped: bring it again"
            raise
        except Exception:  # a bug, of which its log has the rest
            if not one.is_stored:
                one.state, one.cause = "refused", "fedd failed on it: its log says why"
            raise
        if one.is_stored:
            await self._found(one)

    async def _read(self, one: _Brought, path: Path) -> _ReadFile:
        """What is in it, read by a process that can do little else.

        Raises NotTakenError, and NotAllowed when they may no more: others wait for their turn.
        """
        boxes = Boxes(_LIMITS)
        items = boxes.read([Found(path, one.name)])
        reading = asyncio.ensure_future(asyncio.to_thread(_sorted_out, items, path, one))
        try:
            while not reading.done():
                await asyncio.wait({reading}, timeout=_LOOK_EVERY_S)
                _check_may(one.bearer, one.document_id)
            found = reading.result()
        finally:  # it waits for processes to end
            await asyncio.to_thread(boxes.end)
            await asyncio.wait({reading})
            if not reading.cancelled():
                reading.exception()  # nobody is left to hear of it
        if not found.documents:
            raise NotTakenError(found.problems or "there is nothing to read in it")
        return found

    async def _store(self, one: _Brought, staged: Staged, found: _ReadFile) -> None:
        """All that was read of it, or nothing, and then what hangs on it, as far as it goes.

        Raises NotTakenError, NotAllowed and `FAILURES`, and nothing is stored then.
        """
        collection, services = self._collection, self._around.services
        async with collection.changes.turn():
            _check_may(one.bearer, one.document_id)  # by now
            here = await collection.read(lambda library: _here(library, one, found))
            if here and not one.replace:
                if self._may_know(one) and await self._is_same(found.documents, here):
                    one.state = "unchanged"
                    if await services.originals.of(one.document_id) is None:  # a kill came before
                        await self._keep(one, staged)
                    return
                cause = f"there is another document {one.document_id!r}"
                raise NotTakenError(f"{cause}: choose another name, or say that this replaces it")
            if any(not source.startswith(_BROUGHT) for source in here.values()):
                cause = f"{one.document_id!r} is here from elsewhere, and nobody brought it"
                raise NotTakenError(f"{cause}: choose another name")
            # What came with the one before, and with this one no more.
            gone = sorted({*here} - {document.id for document in found.documents})
            if gone and services.pairs.busy:
                raise NotTakenError("pairs are being made: bring it again when that has ended")
            await collection.ingest(found.documents, [], replace=True, waiting=found.waiting)
            one.state = "stored"
            if gone:  # pairs may be being made by now: the ingest has waited for the worker
                with _told(one, "what came with the one before is not removed as a whole"):
                    await services.pairs.remove(gone)
            await self._keep(one, staged)

    async def _keep(self, one: _Brought, staged: Staged) -> None:
        """The file itself, where those are kept."""
        originals = self._around.services.originals
        if originals.keeping:
            with _told(one, "the file itself is not kept"):
                await originals.keep(staged)

    def _may_know(self, one: _Brought) -> bool:
        """Whether they may learn what that document says: who guesses is told nothing of it.

        Whoever brought just these bytes before learns nothing that they did not know.
        """
        own = any(
            (before.document_id, before.digest) == (one.document_id, one.digest)
            and before.is_here
            and before.is_told_to(one.bearer, None)
            for before in self._told.get(one.bearer.actor, ())
            if before is not one
        )
        return own or one.bearer.may_search(one.document_id)

    async def _is_same(self, documents: Sequence[Document], here: dict[str, str]) -> bool:
        """Whether just this is here, as it was read now."""
        if {*here} != {document.id for document in documents}:
            return False
        stored, _ = await self._collection.whole_documents(sorted(here), 1 << 62)
        texts = {document.id: (document.title, document.text) for document in stored}
        return texts == {document.id: (document.title, document.text) for document in documents}

    async def _found(self, one: _Brought) -> None:
        """Wait until questions find it."""
        self._collection.refresh()
        await self._collection.recount()
        await self._around.refresh()
        with suppress(NotIndexedYet):  # `fedctl status` says why
            await self._collection.until_settled()
            one.state = "searchable"


@contextmanager
def _told(one: _Brought, cause: str) -> Iterator[None]:
    """What fails in the block is told of a file that is here in spite of it."""
    try:
        yield
    except FAILURES as error:
        log.warning("of a file that was brought not all is done", cause=f"{cause}: {error}")
        told = f"it is stored, but {cause}: {without_paths(str(error))}; then bring it again"
        one.cause = "; ".join(filter(None, [told, one.cause]))[:_CAUSE]


def _here(library: Library, one: _Brought, found: _ReadFile) -> dict[str, str]:
    """Documents that are here under its name, or came with it: where each is from."""
    ids = [one.document_id, *(document.id for document in found.documents)]
    stored = [x for id_ in dict.fromkeys(ids) for x in library.documents(id_, "", 1) if x.id == id_]
    stored += library.documents(f"{one.document_id}/", "", _INNER)
    # A scan of which nothing could be read yet has its name, too.
    waiting = [x for x in library.waiting(one.document_id, "", 1) if x.document_id in ids]
    return {x.document_id: x.source for x in waiting} | {x.id: x.source for x in stored}


def _sorted_out(items: Iterable[Item], path: Path, one: _Brought) -> _ReadFile:
    """What a box has told of a file, under the ids that it gets here."""
    documents, waiting, problems = list[Document](), list[Waiting](), list[str]()
    collection, source = one.collection, f"{_BROUGHT}{one.document_id}"
    for item in items:
        if isinstance(item, FileProblem):
            problems.append(item.beside(str(path)))
            if item.lacks and len(collection) + len(item.document) <= MAX_ID:
                waiting.append(Waiting(collection + item.document, item.pages, source))
        elif isinstance(item, Pair):
            problems.append("pairs are for whoever administers the site to ingest")
        else:
            document = replace(item, id=collection + item.id, source=source, split="")
            within = document.id == one.document_id or document.id.startswith(f"{one.document_id}/")
            if fault := fault_of(document) if within else "it tells of another file":
                problems.append(fault)
            else:
                documents.append(document)
    return _ReadFile(documents, waiting, "; ".join(problems)[:_CAUSE])


async def _dropped(opening: asyncio.Future[Arriving]) -> None:
    with suppress(OSError):  # it could not be opened
        arriving = await opening
        await asyncio.to_thread(arriving.drop)


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
    """Whether they may put that there, now. Raises NotTakenError, NotAllowed."""
    collections = bearer.rights()
    if collections is not None and not lies_in(document_id, collections):
        cause = f"{bearer.name!r} may bring files into {', '.join(collections)} alone"
        raise NotTakenError(cause, senseless=True)


def _fault_of_collection(name: str) -> str:
    if not name or len(name) > LONGEST_COLLECTION:
        return f"name the collection that it is for: 1 to {LONGEST_COLLECTION} characters"
    parts = name.split("/")
    if fault := next(filter(None, map(_fault_of_part, parts)), ""):
        return f"the collection: {fault}"
    if any(is_document(PurePosixPath(part)) for part in parts):  # what is below is attached to it
        return "the collection: no part of it is called like a file"
    return ""


def _fault_of_name(name: str) -> str:
    if not name or len(name) > _LONGEST_NAME:
        return f"a file's name has 1 to {_LONGEST_NAME} characters"
    if "/" in name:
        return "a file's name has no folder in it"
    if fault := _fault_of_part(name):
        return f"the file's name: {fault}"
    if not is_document(PurePosixPath(name)):
        return f"no file of this kind is taken; these are: {', '.join(FILE_ENDINGS)}"
    return ""


def _fault_of_part(part: str) -> str:
    """Why this is no name of a file or a folder, whatever reads it later; "" where it is one."""
    if not part or part != part.strip() or part.startswith(".") or part.endswith("."):
        return "no part of it is empty, or begins or ends with a space or a dot"
    if "\\" in part or any(unicodedata.category(sign)[0] == "C" for sign in part):
        return "no backslash and no control character"
    return ""
