"""From files to the daemon and back: what documents were read from, as it is.

On the way in, never more than some pieces of a file are held. Which files fedd keeps it says
itself, and of these it asks for what it has not: it is told what each file is (SHA-256) before
any of it is sent.
"""

from __future__ import annotations

import asyncio
import hashlib
import io
import os
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from crypto.durable import whole
from daemon.fedctl.terminal.output import CommandError, Exit

if TYPE_CHECKING:
    from proto.control_pb2 import FilePart, IngestProgress, IngestRequest, OfferedOriginal

_AT_ONCE: Final = 4 << 20  # bytes of a request
ELSEWHERE: Final = "Choose a folder you may write to, with room in it"
_CHANGED: Final = "it changed while it was ingested, and is not kept: ingest it again"


@dataclass(frozen=True)
class LocalFile:
    """A file as it was before it was read."""

    path: Path
    size: int
    mtime_ns: int
    inode: int

    @classmethod
    def at(cls, path: Path) -> LocalFile:
        """As it is now. Raises OSError."""
        return cls._of(path, path.stat())

    @classmethod
    def _of(cls, path: Path, status: os.stat_result) -> LocalFile:
        return cls(path, status.st_size, status.st_mtime_ns, status.st_ino)

    def open(self) -> io.BufferedReader:
        """To read it from its beginning. Raises OSError, and Changed where it is another one."""
        # A pipe put in its place would keep whoever opens it waiting.
        descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        file = os.fdopen(descriptor, "rb")
        if self._of(self.path, os.fstat(descriptor)) != self:
            file.close()
            raise Changed
        return file


class Changed(Exception):
    """A file is not what was read any more."""


async def sent(
    files: Mapping[str, LocalFile],
    answers: asyncio.Queue[IngestProgress],
    problems: list[dict[str, Any]],
) -> AsyncIterator[IngestRequest]:
    """The files of documents, by their ids: what they are, then those of them that fedd wants.

    ``answers`` has one for each request. What can't be sent is put to the ``problems``.
    """
    from proto.control_pb2 import IngestRequest

    offered = await asyncio.to_thread(_offered, files, problems)
    if not offered:
        return
    yield IngestRequest(offered=offered)
    wanted = {one: files[one] for one in (await answers.get()).originals_wanted}
    requests = _requests(wanted.items(), problems)
    while (request := await asyncio.to_thread(next, requests, None)) is not None:
        yield request
        await answers.get()


def _offered(
    files: Mapping[str, LocalFile], problems: list[dict[str, Any]]
) -> list[OfferedOriginal]:
    from proto import bounds
    from proto.control_pb2 import OfferedOriginal

    most = int(bounds.of("OfferedOriginal", "size").most)
    told: list[OfferedOriginal] = []
    for document_id, local in files.items():
        if local.size > most:
            cause = f"it is larger than {most >> 30} GiB, and is not kept"
            problems.append(_problem(local, cause))
            continue
        try:
            with local.open() as file:
                digest = hashlib.file_digest(file, "sha256").digest()
        except (OSError, Changed) as error:
            problems.append(_problem(local, _cause(error)))
            continue
        told.append(OfferedOriginal(document_id=document_id, digest=digest, size=local.size))
    return told


def _requests(
    files: Iterable[tuple[str, LocalFile]], problems: list[dict[str, Any]]
) -> Iterator[IngestRequest]:
    """The files, one after the other, in pieces, some of them in a request."""
    from proto import bounds
    from proto.control_pb2 import IngestRequest

    most = bounds.of("IngestRequest", "pieces").items.most
    request, size = IngestRequest(), 0
    for document_id, local in files:
        try:
            for content in _pieces(local):
                request.pieces.add(document_id=document_id, content=content)
                size += len(content)
                if size >= _AT_ONCE or len(request.pieces) == most:
                    yield request
                    request, size = IngestRequest(), 0
        except (OSError, Changed) as error:
            problems.append(_problem(local, _cause(error)))
    if size:
        yield request


def _pieces(local: LocalFile) -> Iterator[bytes]:
    """A file's bytes. Raises OSError, and Changed where they are fewer than they were."""
    from proto import bounds

    piece, left = int(bounds.of("OriginalPiece", "content").most), local.size
    with local.open() as file:
        while left > 0 and (content := file.read(min(piece, left))):
            left -= len(content)
            yield content
    if left:
        raise Changed


def _cause(error: OSError | Changed) -> str:
    if isinstance(error, Changed):
        return _CHANGED
    return f"it is not kept, for it can't be read any more ({error.strerror})"


def _problem(local: LocalFile, cause: str) -> dict[str, Any]:
    place = {"path": str(local.path), "line": None, "page": None}
    return {**place, "cause": cause, "became": "not kept"}


# ---- out ---------------------------------------------------------------------------


def place_for(path: Path, ending: str, why: str, *, replace: bool) -> Path:
    """Where to write a file whose name has that ending, past links.

    Raises CommandError for what is no place for it, and unless ``replace`` where one is.
    """
    place = path.resolve()
    if wrong := [one for one in (path, place) if not one.name.lower().endswith(ending)]:
        raise CommandError(
            f"{wrong[0]} does not end in {ending}: {why}",
            f"Give it a name that ends in {ending}",
            exit_code=Exit.USAGE,
        )
    return free_place(path, replace=replace)


def free_place(path: Path, *, replace: bool) -> Path:
    """Where to write a file, past links.

    Raises CommandError where no file can be, and unless ``replace`` where one is.
    """
    place = path.resolve()
    if place.exists() and not place.is_file():
        raise CommandError(f"{path} is no file", "Name another", exit_code=Exit.USAGE)
    if place.exists() and not replace:
        raise there_already(path)
    if not place.parent.is_dir():
        raise CommandError(f"{place.parent} is no folder", "Make it", exit_code=Exit.USAGE)
    return place


async def receive(parts: AsyncIterable[FilePart], place: Path, *, replace: bool) -> int:
    """Write a file as it comes, whole or not at all, for its owner alone; its bytes.

    Raises CommandError where it can't be written, or is not what the first part said.
    """
    digest, told, size = hashlib.sha256(), b"", 0
    try:
        with whole(place, fresh=not replace) as temporary:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            with os.fdopen(os.open(temporary, flags, 0o600), "wb") as file:
                async for part in parts:
                    told = told or part.digest
                    digest.update(part.content)
                    file.write(part.content)
                    size += len(part.content)
            if digest.digest() != told:
                raise CommandError(
                    f"what came is not what was kept ({size} bytes of another SHA-256); nothing "
                    "is written",
                    "Put the state folder of a backup back, or ingest the file again",
                )
    except FileExistsError:
        raise there_already(place) from None
    except OSError as error:
        cause = f"cannot write {place} ({error.strerror or error}); it is as it was before"
        raise CommandError(cause, ELSEWHERE) from error
    return size


def there_already(path: Path) -> CommandError:
    """What is told where a file is that is not to be replaced."""
    return CommandError(
        f"{path} is there already", "Name another, or --force", exit_code=Exit.USAGE
    )
