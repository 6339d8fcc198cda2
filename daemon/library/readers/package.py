"""Opens what office programs write: a ZIP archive of XML parts (OPC, ECMA-376 part 2).

Nothing in such a file can make its reader hold more than it should. What an archive says it
holds is added up before anything is unpacked, and Python's zipfile gives out no more of a
part than was said. No part may have a document type (ECMA-376 part 2, 7.2.3.2: no DTD
declarations), so there are no entities that could be expanded or fetched.
"""

from __future__ import annotations

import errno
import io
import posixpath
import struct
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, NoReturn, Protocol
from xml.parsers import expat

from daemon.library.readers.blocks import about
from daemon.library.readers.documents import About
from daemon.library.readers.reader import Refused, Source

_MAX_RATIO, _RATIO_FROM = 200, 1 << 30  # what expands further is an attack
_MAX_XML = 1 << 30  # bytes of all XML in a file that is read bit by bit
_MAX_TREE = 128 << 20  # the same where a library holds all of it at once
_MAX_PARTS = 20_000
_XML = (".xml", ".rels")
_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
_MOST_OPEN = 1000  # elements within one another
_CHUNK = 1 << 16
_PREFIXES = {
    "http://schemas.openxmlformats.org/wordprocessingml/2006/main": "w",
    "http://purl.oclc.org/ooxml/wordprocessingml/main": "w",
    "http://schemas.openxmlformats.org/spreadsheetml/2006/main": "s",
    "http://purl.oclc.org/ooxml/spreadsheetml/main": "s",
    "http://schemas.openxmlformats.org/drawingml/2006/wordprocessingDrawing": "wp",
    "http://purl.oclc.org/ooxml/drawingml/wordprocessingDrawing": "wp",
    "http://schemas.openxmlformats.org/markup-compatibility/2006": "mc",
    "http://schemas.openxmlformats.org/officeDocument/2006/math": "m",
    "http://purl.oclc.org/ooxml/officeDocument/math": "m",
    "http://purl.org/dc/elements/1.1/": "dc",
    "http://purl.org/dc/terms/": "dcterms",
}
_MAGIC = (
    (b"%PDF-", "a PDF"),
    (b"{\\rtf", "an RTF file"),
    (b"\x89PNG", "a picture"),
    (b"\xff\xd8\xff", "a picture"),
    (b"<", "an HTML or XML file"),
)
# What is said of an archive, or XML, that is not whole.
_DAMAGED = (
    *(zipfile.BadZipFile, zlib.error, EOFError, struct.error, UnicodeDecodeError),
    *(NotImplementedError, expat.ExpatError),
)
# What libraries raise when XML is not what they expect.
MALFORMED = (KeyError, IndexError, ValueError, TypeError, AttributeError, SyntaxError)
_OLE = b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1"
# What the file system in an OLE file calls the content of an office file with a password
# (MS-OFFCRYPTO 2.3.2.2).
_ENCRYPTED = "EncryptedPackage".encode("utf-16-le")


class Handler(Protocol):
    """What hears the XML of a part; names are like ``w:p`` where their namespace is known."""

    def start(self, name: str, attributes: dict[str, str], /) -> None:
        """An element begins."""

    def end(self, name: str, /) -> None:
        """An element ends."""

    def data(self, text: str, /) -> None:
        """Text, in pieces of any size."""


class Package:
    """An office file that may be read; its parts are given out by name."""

    def __init__(self, archive: zipfile.ZipFile, ending: str) -> None:
        self._archive = archive
        self._ending = ending
        self._xml: list[zipfile.ZipInfo] = []
        self.main = ""  # the part that the others are related to

    def check(self, size: int, root: str) -> None:
        """Refused for what is damaged, dangerous, or no document of the kind."""
        parts = self._archive.infolist()
        told = sum(part.file_size for part in parts)
        if told > max(_RATIO_FROM, _MAX_RATIO * size):
            raise Refused(f"expands more than {_MAX_RATIO} times; save it again from its source")
        if len(parts) > _MAX_PARTS:
            raise Refused(f"more than {_MAX_PARTS} parts: cut it into several files")
        if any(part.flag_bits & 1 for part in parts):
            raise Refused("encrypted: save it without a password")
        if any(part.compress_type not in _METHODS for part in parts):
            raise Refused("packed in another way than office files are: save it anew")
        for part in parts:
            first = self._root(part)
            if first or part.filename.endswith(_XML):
                self._xml.append(part)
        self._limit(_MAX_XML)
        self.main = next(iter(self.related("", "officeDocument").values()), "")
        if not self.has(self.main) or self._root(self._archive.getinfo(self.main)) != root:
            raise Refused(f"no {self._ending} file, whatever its name says: give it its own ending")

    def _limit(self, most: int) -> None:
        """Refused where all XML of the file together has more bytes than that."""
        if sum(part.file_size for part in self._xml) > most:
            raise Refused(f"more than {most >> 20} MiB when unpacked: cut it into several files")

    def _root(self, part: zipfile.ZipInfo) -> str:
        """The local name of a part's outermost element; "" where it is no XML."""
        root: list[str] = []
        parser = _parser(self._refuse_types)
        parser.StartElementHandler = lambda name, _: root.append(name)
        with self._archive.open(part) as file:
            try:
                while not root and (chunk := file.read(_CHUNK)):
                    parser.Parse(chunk)
            except expat.ExpatError:
                pass  # whatever is no XML is not read as such; where some must be, that refuses
            except (ValueError, LookupError) as error:
                if part.filename.endswith(_XML):
                    raise Refused(f"no XML of office files ({error}): save it anew") from error
        return root[0].rpartition(" ")[2] if root else ""

    def _refuse_types(self, *_: object) -> NoReturn:
        raise Refused("declares a document type, which office files don't: save it again")

    def has(self, name: str) -> bool:
        """Whether there is such a part."""
        return name in self._archive.NameToInfo

    def walk(self, name: str, handler: Handler) -> Iterator[None]:
        """Tell ``handler`` a part, bit by bit; Refused where it is damaged."""
        parser = _parser(self._refuse_types)
        names: dict[str, str] = {}
        depth = 0

        def short(name: str) -> str:
            space, _, local = name.rpartition(" ")
            return names.setdefault(name, f"{_PREFIXES.get(space, '')}:{local}")

        def start(name: str, attributes: dict[str, str]) -> None:
            nonlocal depth
            depth += 1
            if depth > _MOST_OPEN:
                raise Refused("elements nested too deeply: save it again from its source")
            told = {names.get(key) or short(key): value for key, value in attributes.items()}
            handler.start(names.get(name) or short(name), told)

        def end(name: str) -> None:
            nonlocal depth
            depth -= 1
            handler.end(names[name])

        parser.StartElementHandler, parser.EndElementHandler = start, end
        parser.CharacterDataHandler = handler.data
        with self._archive.open(name) as file:
            while chunk := file.read(_CHUNK):
                parser.Parse(chunk)
                yield
            parser.Parse(b"", True)
        yield

    def hear(self, name: str, handler: Handler) -> None:
        """Tell ``handler`` all of a part, where there is one."""
        if self.has(name):
            for _ in self.walk(name, handler):
                pass

    def related(self, part: str, kind: str) -> dict[str, str]:
        """The parts that one is related to in a way ("styles"), by the relations' ids."""
        folder, name = posixpath.split(part)
        relations = _Relations(kind)
        self.hear(posixpath.join(folder, "_rels", f"{name}.rels"), relations)
        return {
            key: posixpath.normpath(posixpath.join("/", folder, target)).lstrip("/")
            for key, target in relations.targets.items()
        }

    def about(self) -> Iterator[About]:
        """Title, author, day of the last change and language, as they were filled in."""
        for core in self.related("", "core-properties").values():
            said = _Properties()
            self.hear(core, said)
            texts = said.texts
            date = texts.get("dcterms:modified") or texts.get("dcterms:created", "")
            yield from about(
                texts.get("dc:title", ""),
                texts.get("dc:creator", ""),
                date,
                texts.get("dc:language", ""),
            )
            return

    def lean(self) -> io.BytesIO:
        """The same file without pictures, sounds and films, for a library that loads it whole."""
        self._limit(_MAX_TREE)
        wanted = {id(part) for part in self._xml}
        copy = io.BytesIO()
        with zipfile.ZipFile(copy, "w") as packed:
            for name, part in self._archive.NameToInfo.items():
                packed.writestr(name, self._archive.read(part) if id(part) in wanted else b"")
        copy.seek(0)
        return copy


def _parser(refuse: object) -> expat.XMLParserType:
    parser = expat.ParserCreate(namespace_separator=" ")
    parser.buffer_text = True
    parser.StartDoctypeDeclHandler = refuse  # type: ignore[assignment]  # it returns nothing
    return parser


@dataclass
class _Relations:
    kind: str

    def __post_init__(self) -> None:
        self.targets: dict[str, str] = {}

    def start(self, name: str, attributes: dict[str, str]) -> None:
        if not name.endswith(":Relationship") or attributes.get(":TargetMode") == "External":
            return
        if attributes.get(":Type", "").rpartition("/")[2] == self.kind:
            self.targets[attributes.get(":Id", "")] = attributes.get(":Target", "")

    def end(self, name: str) -> None: ...

    def data(self, text: str) -> None: ...


class _Properties:
    """The texts of a flat part, by the names of their elements."""

    def __init__(self) -> None:
        self.texts: dict[str, str] = {}
        self._name = ""

    def start(self, name: str, _: dict[str, str], /) -> None:
        self._name = name

    def end(self, _: str, /) -> None:
        self._name = ""

    def data(self, text: str) -> None:
        if self._name:
            self.texts[self._name] = (self.texts.get(self._name, "") + text)[:10_000]


@contextmanager
def opened(source: Source, ending: str, root: str) -> Iterator[Package]:
    """A file as a package whose main part has that outermost element; Refused where it is none.

    What is found to be damaged while it is read is refused, too, in the words for the person.
    """
    with source.open() as file:
        _look(file, ending)
        try:
            with zipfile.ZipFile(file) as archive:
                package = Package(archive, ending)
                package.check(source.size, root)
                yield package
        except _DAMAGED as error:
            raise Refused(f"damaged ({error}): copy it again, or save it anew") from error
        except OSError as error:
            if error.errno != errno.EINVAL:  # a place before the file's beginning
                raise
            raise Refused("damaged (parts outside of it): copy it again") from error


def _look(file: IO[bytes], ending: str) -> None:
    """Refuse by name what doesn't begin as an office file does."""
    begin = file.read(8)
    if begin == _OLE:
        if _ENCRYPTED in begin + file.read(8 << 20):
            raise Refused("encrypted: save it without a password")
        raise Refused(f"in the old binary format of Office: save it as {ending}")
    if not begin.startswith(b"PK"):
        what = next((name for magic, name in _MAGIC if begin.lstrip().startswith(magic)), "")
        other = f"it is {what}" if what else "no ZIP archive"
        raise Refused(f"no {ending} file ({other}): give it its own ending, or copy it again")
    file.seek(0)
