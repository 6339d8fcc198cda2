"""From the daemon to a file or standard output: documents and pairs as `fedctl ingest` reads them.

A line is a document or a pair. Never more than a part of them is held, and a file has its name
when it is whole (`crypto.durable`), with the mode 0600 from its first byte on.
"""

from __future__ import annotations

import gzip
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from crypto.durable import whole
from daemon.fedctl.terminal.output import CommandError, Exit, as_plain
from daemon.fedctl.transfer.originals import ELSEWHERE, free_place, there_already

if TYPE_CHECKING:
    from proto.control_pb2 import Document, ExportDocumentsRequest, Pair
    from proto.control_pb2_grpc import ControlAsyncStub

_PACKED = ".jsonl.gz"


@dataclass
class Exported:
    """What was written so far; ``total``: documents that will be, 0 where it isn't known."""

    documents: int = 0
    pairs: int = 0
    bytes: int = 0  # before they are packed
    total: int = 0
    unknown: list[str] = field(default_factory=list)  # ids that no document has


async def receive(
    daemon: ControlAsyncStub,
    request: ExportDocumentsRequest,
    write: Callable[[bytes], object],
    watch: Callable[[Exported], None],
) -> Exported:
    """Write what the daemon tells, as it comes; ``watch`` sees each step. Raises OSError."""
    so_far = Exported()
    async for part in daemon.ExportDocuments(request):
        so_far.total = so_far.total or part.total
        so_far.unknown.extend(part.unknown)
        for record in (*map(_document, part.documents), *map(_pair, part.pairs)):
            line = json.dumps(record, ensure_ascii=False).encode() + b"\n"
            write(line)
            so_far.bytes += len(line)
        so_far.documents += len(part.documents)
        so_far.pairs += len(part.pairs)
        watch(so_far)
    return so_far


def _document(document: Document) -> dict[str, Any]:
    """What is empty is left out: a reader takes it so."""
    plain = as_plain(document)
    plain["tags"] = list(document.tags.tags)
    plain["spans"] = [
        {name: value for name, value in span.items() if value} | {"begin": span["begin"]}
        for span in plain["spans"]
    ]
    return {name: value for name, value in plain.items() if value or name in ("id", "text")}


def _pair(pair: Pair) -> dict[str, Any]:
    plain = {"query": pair.query, "positives": list(pair.positives), "split": pair.split}
    known = as_plain(pair.reference) if pair.HasField("reference") else {}
    return plain | {name: value for name, value in known.items() if value}


def checked_place(path: Path, *, replace: bool) -> Path:
    """Where to write, past links.

    Raises CommandError for what is no place for an export, and unless ``replace`` where one is.
    """
    if not path.name.lower().endswith((".jsonl", _PACKED)):
        raise CommandError(
            f"{path} would not be read by fedctl ingest",
            "Give it a name that ends in .jsonl or .jsonl.gz",
            exit_code=Exit.USAGE,
        )
    return free_place(path, replace=replace)


@contextmanager
def opened(place: Path | None, *, replace: bool) -> Iterator[Callable[[bytes], object]]:
    """What writes: to a file that is there when all is over, or standard output (None).

    Raises CommandError with the cause where it can't be written.
    """
    try:
        with ExitStack() as stack:
            if place is None:
                yield sys.stdout.buffer.write
                sys.stdout.buffer.flush()
                return
            temporary = stack.enter_context(whole(place, fresh=not replace))
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            file = stack.enter_context(os.fdopen(os.open(temporary, flags, 0o600), "wb"))
            if place.name.lower().endswith(_PACKED):
                packed = gzip.GzipFile("", "wb", fileobj=file, mtime=0)
                yield stack.enter_context(packed).write
            else:
                yield file.write
    except BrokenPipeError:
        raise CommandError("nobody reads what is written", "Name a file with --out") from None
    except FileExistsError:
        raise there_already(Path(place or "")) from None
    except OSError as error:
        where = place or "standard output"
        left = "what was there before is there still" if place else "what is there is not all"
        cause = f"cannot write {where} ({error.strerror or error}); {left}"
        raise CommandError(cause, ELSEWHERE if place else "") from error
