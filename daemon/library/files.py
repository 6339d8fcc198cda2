"""Files and folders to documents and question pairs, with the rights of the person who asks.

What can't be read is reported and everything else still comes: a problem is an item of
the stream, not an exception. A format is a line of `READERS` and a file that reads it.
What a file holds is looked at in a box (`daemon.library.box`), which calls `read_file`.
"""

from __future__ import annotations

import os
import stat
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePath

from daemon.library.readers.documents import Attached, FileProblem, Item, Read
from daemon.library.readers.reader import Reader, Refused, Source, cause_of, is_passing
from daemon.library.readers.records import read_lines, read_packed_lines

# What reads an office file is imported where one is read.


def _docx(source: Source) -> Iterator[Read]:
    from daemon.library.readers.docx import read_docx

    return read_docx(source)


def _html(source: Source) -> Iterator[Read]:
    from daemon.library.readers.html import read_html

    return read_html(source)


def _markdown(source: Source) -> Iterator[Read]:
    from daemon.library.readers.text import read_markdown

    return read_markdown(source)


def _pdf(source: Source) -> Iterator[Read]:
    from daemon.library.readers.pdf.pdf import read_pdf

    return read_pdf(source)


def _pdf_page(path: Path, number: int, dpi: int) -> bytes:
    from daemon.library.readers.pdf.pages import page_image

    return page_image(path, number, dpi)


def _plain(source: Source) -> Iterator[Read]:
    from daemon.library.readers.text import read_plain

    return read_plain(source)


def _eml(source: Source) -> Iterator[Read]:
    from daemon.library.readers.mail import read_eml

    return read_eml(source)


def _pptx(source: Source) -> Iterator[Read]:
    from daemon.library.readers.pptx import read_pptx

    return read_pptx(source)


def _csv(source: Source) -> Iterator[Read]:
    from daemon.library.readers.sheets import read_csv

    return read_csv(source)


def _xlsx(source: Source) -> Iterator[Read]:
    from daemon.library.readers.sheets import read_xlsx

    return read_xlsx(source)


READERS = {
    ".txt": Reader(blocks=_plain),
    ".md": Reader(blocks=_markdown),
    ".html": Reader(blocks=_html, inert=".txt"),
    ".htm": Reader(blocks=_html, inert=".txt"),
    ".pdf": Reader(blocks=_pdf, page=_pdf_page),
    ".docx": Reader(blocks=_docx),
    ".pptx": Reader(blocks=_pptx),
    ".xlsx": Reader(blocks=_xlsx),
    ".csv": Reader(blocks=_csv),
    ".tsv": Reader(blocks=_csv),
    ".eml": Reader(blocks=_eml),
    ".jsonl": Reader(records=read_lines),
    ".jsonl.gz": Reader(records=read_packed_lines),
}
"""By how a file's name ends, in small letters. None may be the end of another one."""

_DEEPEST = 200  # folders in folders
_MOST_WAYS = 10  # that lead to a folder: one, and some links

SUFFIXES = tuple(READERS)
FILE_ENDINGS = tuple(ending for ending, reader in READERS.items() if reader.named_by_file)


@dataclass(frozen=True)
class Found:
    """A file to be read; ``name``: its path below the folder that was given, and so its kind.

    ``below``: that folder, where no link is to be followed from there on (`open_below`).
    """

    path: Path
    name: str
    below: Path | None = None

    @property
    def size(self) -> int:
        """Bytes on the disk; 0 where it can't be told."""
        try:
            return self.path.stat().st_size
        except OSError:
            return 0


def found(path: Path) -> Iterator[Found | FileProblem]:
    """The files at ``path``, a file or a folder, in the order of names; hidden ones not.

    And what can't be looked into.
    """
    try:
        is_folder = stat.S_ISDIR(path.stat().st_mode)
    except OSError as error:
        yield FileProblem(str(path), cause_of(error))
        return
    if is_folder:
        yield from _found_in(path, path, frozenset(), Counter())
    else:
        yield Found(path, path.name)


def _found_in(
    folder: Path,
    root: Path,
    above: frozenset[tuple[int, int]],
    ways: Counter[tuple[int, int]],
) -> Iterator[Found | FileProblem]:
    """Look through a folder; ``above`` are those it lies in: a link to one of them ends there.

    ``ways``: how often each was come to. Of folders with two links each to the next one, there
    are twice as many ways at each step.
    """
    try:
        status = folder.stat()
        entries = sorted(folder.iterdir())
    except OSError as error:
        yield FileProblem(str(folder), cause_of(error))
        return
    key = (status.st_dev, status.st_ino)
    if key in above:
        yield FileProblem(str(folder), "a link to a folder above it: not read again")
        return
    ways[key] += 1
    if ways[key] > _MOST_WAYS:
        yield FileProblem(str(folder), "a folder that many links lead to: not read again")
        return
    if len(above) >= _DEEPEST:
        yield FileProblem(str(folder), "folders nested too deeply: name it by itself")
        return
    for entry in entries:
        if entry.name.startswith("."):
            continue
        try:
            is_folder = stat.S_ISDIR(entry.stat().st_mode)
        except OSError as error:
            yield FileProblem(str(entry), cause_of(error))
            continue
        if is_folder:
            yield from _found_in(entry, root, above | {key}, ways)
        else:
            yield Found(entry, entry.relative_to(root).as_posix())


def source_of(path: Path) -> str:
    """What a document says of the file that it was."""
    return str(path.absolute()).encode(errors="replace").decode()


def reader_of(path: PurePath) -> Reader | None:
    """Who reads a file of this name; None: nobody."""
    name = path.name.lower()
    return next((reader for end, reader in READERS.items() if name.endswith(end)), None)


def is_document(path: PurePath) -> bool:
    """Whether a file of this name is one document, under its name."""
    reader = reader_of(path)
    return reader is not None and reader.named_by_file


def ending_of(document_id: str) -> str:
    """How the file of a document is called at its end where it is given out; "": as people like."""
    name = document_id.lower()
    found = [end + reader.inert for end, reader in READERS.items() if name.endswith(end)]
    return found[0] if found else ""


def read_file(
    file: Found,
    watch: Callable[[int], None] = lambda _: None,
    ready: Callable[[Path], None] = lambda _: None,
) -> Iterator[Item | Attached]:
    """Read one file in this process; whatever goes wrong in it is its own problem.

    A document's id is its file's path below the given folder, unless the file says ids.
    ``watch``: as in `Source`. ``ready`` is called with the path by which the file is opened,
    before anything of it is read.
    """
    try:
        with _openable(file) as path:
            reader, size = _checked(file, path)
            ready(path)
            yield from reader.read(Source(path, file.name, size, watch))
    except Refused as refusal:
        yield FileProblem(str(file.path), str(refusal))
    except (OSError, EOFError, zlib.error) as error:
        yield FileProblem(str(file.path), cause_of(error), passing=is_passing(error))


@contextmanager
def _openable(file: Found) -> Iterator[Path]:
    """A path by which a file can be opened, by whatever library, again and again."""
    if file.below is None:
        yield file.path
        return
    descriptor = open_below(file.below, file.name)
    try:
        yield Path(f"/proc/self/fd/{descriptor}")
    finally:
        os.close(descriptor)


def open_below(folder: Path, name: str) -> int:
    """Open a file below a folder to read it, and follow no link from there on; its descriptor.

    Step by step, for a link may be put in a folder's place while somebody looks: whoever may
    write to a watched folder may not have the daemon read what lies outside. Raises OSError.
    """
    *folders, last = name.split("/")
    flags = os.O_RDONLY | os.O_CLOEXEC
    at = os.open(folder, flags | os.O_DIRECTORY)
    try:
        for one in folders:
            inner = os.open(one, flags | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=at)
            os.close(at)
            at = inner
        # A pipe would keep whoever opens it waiting for somebody who writes to it.
        return os.open(last, flags | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=at)
    finally:
        os.close(at)


def _checked(file: Found, path: Path) -> tuple[Reader, int]:
    """Who reads a file that may be opened, and its bytes; Refused for any other."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):  # opening a pipe or device might never end
        raise Refused("not a regular file: give a file or a folder")
    reader = reader_of(PurePath(file.name))
    if reader is None:
        raise Refused(f"not a kind of file that is read ({', '.join(SUFFIXES)}): skipped")
    if status.st_size == 0:
        raise Refused("empty file: nothing to ingest")
    return reader, status.st_size
