"""From files to the daemon: what is read of them, in batches, and what became of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import aclosing, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from daemon.fedctl.terminal.output import Exit
from daemon.fedctl.transfer.originals import LocalFile, sent
from daemon.library.files import source_of

if TYPE_CHECKING:
    from daemon.library.box.boxes import Boxes
    from daemon.library.readers.documents import Document, FileProblem, Pair, Span
    from proto import control_pb2
    from proto.control_pb2 import IngestProgress, IngestRequest
    from proto.control_pb2_grpc import ControlAsyncStub

BATCH_BYTES = 4 << 20
STILL_THERE_S = 10.0  # after which the daemon is told, while nothing is to be sent
BATCH_S = 5.0  # after which what was read is sent, for it to be kept whatever happens
_ENDINGS_KEPT = 100
_OF_A_PROBLEM = ("path", "line", "page", "cause")  # and what `became` of it, when all is read


@dataclass
class Ingested:
    """What became of one ingest: counts, and one line for each refusal."""

    site: str = ""
    documents_read: int = 0
    pairs_read: int = 0
    documents_new: int = 0
    documents_changed: int = 0
    documents_unchanged: int = 0
    pairs: int = 0
    pairs_repeated: int = 0
    pairs_usable: int = 0
    unknown_document: str = ""
    known_document: str = ""
    pairs_here: dict[str, int] = field(default_factory=dict)  # that the library has, by split
    passages_total: int = 0
    passages_embedded: int = 0
    index_total: int = 0
    index_built: int = 0
    done: bool = False
    bytes_read: int = 0
    bytes_total: int = 0
    originals: int = 0  # files that fedd keeps, of this ingest
    other_kinds: int = 0  # files of folders that nobody reads
    other_endings: list[str] = field(default_factory=list)  # of these, small, as first met
    problems: list[dict[str, Any]] = field(default_factory=list)
    waiting: list[dict[str, str]] = field(default_factory=list)  # for OCR: documents, their pages
    sources: set[str] = field(default_factory=set)  # files of which something is in
    answered: bool = False  # the daemon has stored a batch

    @property
    def exit_code(self) -> Exit:
        """OK; PARTLY when something was refused, waits or can't be used; FAILED when all was."""
        if not self.problems and not self.waiting:
            return Exit.PARTLY if self.pairs_usable < self.pairs else Exit.OK
        taken = self.documents_new + self.documents_changed + self.documents_unchanged + self.pairs
        return Exit.PARTLY if taken else Exit.FAILED

    def pass_over(self, path: Path) -> None:
        """A file of a folder that nobody reads."""
        self.other_kinds += 1
        ending = path.suffix.lower()
        if ending not in self.other_endings and len(self.other_endings) < _ENDINGS_KEPT:
            self.other_endings.append(ending)

    def take(self, progress: IngestProgress) -> None:
        """Add what the daemon says: its counts are running totals, its errors are new."""
        self.answered = True
        self.documents_new = progress.documents_new
        self.documents_changed = progress.documents_changed
        self.documents_unchanged = progress.documents_unchanged
        self.pairs = progress.pairs
        self.pairs_repeated = progress.pairs_repeated
        self.pairs_usable = progress.pairs_usable
        self.unknown_document = progress.unknown_document
        self.known_document = progress.known_document
        self.passages_total = progress.passages_total
        self.passages_embedded = progress.passages_embedded
        self.index_total, self.index_built = progress.index_total, progress.index_built
        self.originals = progress.originals_kept
        self.done = progress.done
        self.problems.extend(
            {"path": "", "line": None, "page": None, "cause": e} for e in progress.errors
        )


Watcher = Callable[[Ingested], None]


@dataclass(frozen=True)
class Naming:
    """How documents are called here, and whether those of other files make way for them.

    ``tags``: beside those that they say; None: they keep what they have.
    """

    prefix: str = ""  # of all ids, also of those that pairs name
    replace: bool = False
    tags: tuple[str, ...] | None = None


async def send(
    daemon: ControlAsyncStub,
    paths: list[Path],
    watch: Watcher,
    naming: Naming | None = None,
    so_far: Ingested | None = None,
) -> Ingested:
    """Read the paths and send them in batches; ``watch`` sees each step, ``so_far`` has the last.

    A batch is sent when the one before it is stored: in the midst of sending a refusal
    would look like a broken line. The next one is read meanwhile.
    """
    so_far = so_far or Ingested()
    answers: asyncio.Queue[IngestProgress] = asyncio.Queue()
    requests = _requests(paths, so_far, watch, answers, naming or Naming())
    async for progress in daemon.Ingest(_with_signs_of_life(requests, so_far)):
        so_far.take(progress)
        watch(so_far)
        answers.put_nowait(progress)
    for problem in so_far.problems:
        is_in = source_of(Path(problem["path"])) in so_far.sources
        problem.setdefault("became", "not read whole" if is_in else "refused")
    return so_far


async def _with_signs_of_life(
    requests: AsyncGenerator[IngestRequest, None], so_far: Ingested
) -> AsyncIterator[IngestRequest]:
    """How much is read, wherever nothing is to be sent for a while: a long file, or refusals."""
    from proto import control_pb2

    async with aclosing(requests):
        while True:
            coming = asyncio.ensure_future(anext(requests, None))
            try:
                while not (await asyncio.wait([coming], timeout=STILL_THERE_S))[0]:
                    yield control_pb2.IngestRequest(bytes_read=so_far.bytes_read)
                request = await coming
            finally:
                coming.cancel()  # one that has come ignores this
                with suppress(asyncio.CancelledError):
                    await coming
            if request is None:
                return
            yield request


async def _requests(
    paths: list[Path],
    so_far: Ingested,
    watch: Watcher,
    answers: asyncio.Queue[IngestProgress],
    naming: Naming,
) -> AsyncGenerator[IngestRequest, None]:
    """Requests within their bounds, of about BATCH_BYTES or BATCH_S, read in a thread.

    Behind each batch the files that its documents are, where fedd keeps these.
    """
    from daemon.library.box.boxes import Boxes

    boxes, files = Boxes(), dict[str, LocalFile]()
    items = _read(paths, so_far, boxes, watch, files)
    before: dict[str, LocalFile] | None = None  # of the batch that was sent last
    try:
        while True:
            batch, problems = await asyncio.to_thread(_next_batch, items, naming)
            so_far.problems.extend(problems)
            so_far.documents_read += len(batch.documents)
            so_far.pairs_read += len(batch.pairs)
            so_far.sources.update(one.source for one in batch.documents if one.source)
            watch(so_far)
            so_far.waiting.extend(
                {"document": one.document_id, "pages": one.pages} for one in batch.waiting
            )
            if before is not None and (await answers.get()).keeps_originals:
                async for request in sent(before, answers, so_far.problems):
                    yield request
            if not (batch.documents or batch.pairs or batch.waiting):
                return
            before = {one.id: files[one.source] for one in batch.documents if one.source in files}
            yield batch
    finally:
        boxes.end()  # on Ctrl-C the thread waits for a reader, and a page may take a minute


def _read(
    paths: list[Path],
    so_far: Ingested,
    boxes: Boxes,
    watch: Watcher,
    files: dict[str, LocalFile],
) -> Iterator[Document | Pair | FileProblem]:
    """What is in the files at the paths; ``files`` gets those that are documents, by source."""
    from daemon.library.files import Found, found, is_document, reader_of

    def count(read: int) -> None:
        so_far.bytes_read += read
        watch(so_far)

    listed: list[Found | FileProblem] = []
    for path in paths:
        for one in found(path):
            # Of a folder that is given, a file of another kind is nobody's mistake.
            if isinstance(one, Found) and one.path != path and reader_of(one.path) is None:
                so_far.pass_over(one.path)
                continue
            listed.append(one)
            if isinstance(one, Found) and is_document(one.path):
                with suppress(OSError):  # which its reader will tell
                    files[source_of(one.path)] = LocalFile.at(one.path)
    so_far.bytes_total = sum(one.size for one in listed if isinstance(one, Found))
    yield from boxes.read(listed, count)


def _document(document: Document, naming: Naming) -> control_pb2.Document:
    from proto import control_pb2

    told = control_pb2.Document(
        id=naming.prefix + document.id,
        title=document.title,
        text=document.text,
        split=document.split,
        spans=map(_span, document.spans),
        source=document.source,
        author=document.author,
        date=document.date,
        language=document.language,
    )
    if document.tags is not None or naming.tags is not None:
        told.tags.tags.extend(dict.fromkeys((*(document.tags or ()), *(naming.tags or ()))))
        told.tags.SetInParent()  # also where there are none
    return told


def _pair(pair: Pair, naming: Naming) -> control_pb2.Pair:
    from proto import control_pb2

    known = None if pair.reference is None else control_pb2.Reference(**asdict(pair.reference))
    return control_pb2.Pair(
        query=pair.query,
        positives=[naming.prefix + document_id for document_id in pair.positives],
        split=pair.split,
        reference=known,
    )


def _span(span: Span) -> control_pb2.Span:
    from proto import control_pb2

    return control_pb2.Span(
        kind=span.kind,
        begin=span.begin,
        end=span.end,
        page=span.page,
        place=span.place or (),
        ocr=span.ocr,
    )


def _next_batch(
    items: Iterator[Document | Pair | FileProblem], naming: Naming
) -> tuple[IngestRequest, list[dict[str, Any]]]:
    """The next request (empty at the end) and what was refused on the way to it."""
    from daemon.library.readers.documents import Document, Pair
    from proto import bounds, control_pb2

    batch, problems, size = control_pb2.IngestRequest(replace=naming.replace), [], 0
    until = time.monotonic() + BATCH_S
    most = bounds.of("IngestRequest", "documents").items.most  # as of pairs
    for item in items:
        if isinstance(item, Document):
            document = _document(item, naming)
            batch.documents.append(document)
            size += document.ByteSize()
        elif isinstance(item, Pair):
            pair = _pair(item, naming)
            batch.pairs.append(pair)
            size += pair.ByteSize()
        elif item.lacks:
            batch.waiting.add(
                document_id=naming.prefix + item.document,
                pages=item.pages,
                source=source_of(Path(item.path)),
            )
        else:
            problems.append({name: getattr(item, name) for name in _OF_A_PROBLEM})
        told = (len(batch.documents), len(batch.pairs), len(batch.waiting))
        if size >= BATCH_BYTES or most in told or (any(told) and time.monotonic() > until):
            break
    return batch, problems
