"""A folder of hostile and damaged files among good ones, given to a real `fedctl ingest`.

Every good file is in the library afterwards, every other one has a line with its cause, people
get their answers meanwhile, and what reads the files keeps to its memory.
"""

from __future__ import annotations

import peers.link.tls13  # noqa: F401  before anything imports grpc

# isort: split
import asyncio
import gzip
import io
import json
import os
import struct
import threading
import time
import zipfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from daemon.library.box.told import Limits
from proto import control_pb2 as control
from tests.daemon.library.readers import pdf_files
from tests.daemon.library.readers.test_hostile import LAUGHS, OLE, OUTSIDE, good, repacked
from tests.live.test_operations import started
from tests.support.federation import LiveFederation, LiveSite

pytestmark = [
    pytest.mark.attacks,
    pytest.mark.federation,
    pytest.mark.slow,
    pytest.mark.endurance,  # half a minute of work: `make attacks`
    pytest.mark.timeout(600),
]

ANSWER_WITHIN_S = 10.0  # on a machine that does much else
PAUSE_S = 0.5  # between two questions
# What a reader takes beside its data, all of which is bounded: code of libraries, and a stack.
BESIDE_DATA = 160 << 20

OFFICE = {
    "docx": "word/document.xml",
    "xlsx": "xl/worksheets/sheet1.xml",
    "pptx": "ppt/slides/slide1.xml",
}
SHEETS = b"http://schemas.openxmlformats.org/spreadsheetml/2006/main"
TYPE = "declares a document type"
Files = dict[str, tuple[bytes, str]]  # by name: what is in it, and a part of what is said of it


def packed_bomb(kind: str) -> bytes:
    """An office file of some kilobytes that says it holds three gigabytes."""
    raw = repacked(kind, "media/bomb.bin", b"", b"x")
    at = raw.rindex(b"PK\x01\x02")  # its entry in the archive's directory; 24: its size
    return raw[: at + 24] + struct.pack("<I", 3 << 30) + raw[at + 28 :]


def lying_size(kind: str) -> bytes:
    """A part that unpacks to more than the archive says."""
    part = OFFICE[kind]
    raw = repacked(kind, part, b"?>", b"?>" + b" " * (1 << 20))
    at = raw.rindex(part.encode()) - 46
    return raw[: at + 24] + struct.pack("<I", 1000) + raw[at + 28 :]


def overlapping(count: int) -> bytes:
    """A directory whose entries all point to one part of a megabyte (Fifield 2019)."""
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as packed:
        packed.writestr("a.xml", b" " * (1 << 20))
        one = packed.infolist()[0]
        packed.filelist += [one] * count
    return made.getvalue()


def in_a_part(kind: str, old: bytes, new: bytes) -> bytes:
    """A whole office file with something else in its main part, packed."""
    made = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(good(kind))) as source,
        zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as packed,
    ):
        for name in source.namelist():
            raw = source.read(name)
            packed.writestr(name, raw.replace(old, new, 1) if name == OFFICE[kind] else raw)
    return made.getvalue()


def cells_that_share(text: bytes) -> bytes:
    """A workbook whose first row says a text in each of a hundred cells."""
    made = io.BytesIO()
    row = b'<row r="1">' + b'<c t="s"><v>0</v></c>' * 100 + b"</row>"
    sheet = b'<worksheet xmlns="%s"><sheetData>%s</sheetData></worksheet>' % (SHEETS, row)
    strings = b'<sst xmlns="%s"><si><t>%s</t></si></sst>' % (SHEETS, text)
    # In the place of its colours, which are related to it already.
    others = {OFFICE["xlsx"]: sheet, "xl/theme/theme1.xml": strings}
    with (
        zipfile.ZipFile(io.BytesIO(good("xlsx"))) as source,
        zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as packed,
    ):
        for name in source.namelist():
            raw = others.get(name) or source.read(name)
            if name.endswith("workbook.xml.rels"):
                raw = raw.replace(b"relationships/theme", b"relationships/sharedStrings")
            packed.writestr(name, raw)
    return made.getvalue()


def letters_within_letters(depth: int) -> bytes:
    letter = b"From: a@b.example\r\n\r\nThe innermost."
    for _ in range(depth):
        letter = b"From: a@b.example\r\nContent-Type: message/rfc822\r\n\r\n" + letter
    return letter


def letter_with(*names: bytes) -> bytes:
    """A letter with attachments of these names."""
    parts = b"".join(
        b'--b\r\nContent-Disposition: attachment; filename="%s"\r\n\r\nAttached.\r\n' % name
        for name in names
    )
    head = b"From: a@b.example\r\nContent-Type: multipart/mixed; boundary=b\r\n\r\n"
    return head + parts + b"--b--\r\n"


def office_files() -> Files:
    """Office files that are bombs, damaged, locked, or something else."""
    files: Files = {
        "laughs.docx": (in_a_part("docx", b"<w:document", LAUGHS.encode() + b"<w:document"), TYPE),
        "outside.docx": (
            in_a_part("docx", b"<w:document", OUTSIDE.encode() + b"<w:document"),
            TYPE,
        ),
        "deep.docx": (in_a_part("docx", b"<w:body>", b"<w:body>" + b"<w:p>" * 9000), "too deeply"),
        "row.docx": (
            in_a_part(
                "docx",
                b"<w:body>",
                b"<w:body><w:tbl><w:tr>"
                + b'<w:tc><w:tcPr><w:gridSpan w:val="1000"/></w:tcPr></w:tc>' * 20_000,
            ),
            "longer than 16 MiB",
        ),
        "overlap.docx": (overlapping(2000), "expands more than"),
        "parts.docx": (overlapping(0)[:-22], "damaged"),
        "corner.xlsx": (in_a_part("xlsx", b'r="A1"', b'r="XFE1"'), "cell XFE1"),
        "cells.xlsx": (cells_that_share(b"x" * (30 << 20) + b" y" * 9), "needs more than 1024 MiB"),
        "row.xlsx": (in_a_part("xlsx", b'<row r="1"', b'<row r="99999999"'), "row 99999999"),
    }
    for kind in OFFICE:
        files[f"bomb.{kind}"] = (packed_bomb(kind), "expands more than 200 times")
        files[f"size.{kind}"] = (lying_size(kind), "damaged")
        files[f"old.{kind}"] = (OLE, "in the old binary format")
        locked = OLE + "EncryptedPackage".encode("utf-16-le")
        files[f"locked.{kind}"] = (locked, "encrypted")
        files[f"page.{kind}"] = (b"<html><p>Hello", "HTML or XML")
        other = "xlsx" if kind == "docx" else "docx"
        files[f"other.{kind}"] = (good(other), f"no .{kind} file")
    for tenth in range(1, 10):
        raw = good("docx")
        files[f"tenth-{tenth}.docx"] = (raw[: len(raw) * tenth // 10], "damaged")
    return files


def texts_and_records() -> Files:
    """Texts, tables, pages, letters and lines."""
    return {
        "binary.txt": (b"\0\x01\x02" * 1000, "binary"),
        "lies.txt": (b"\xff\xfe" + os.urandom(9999), "no known encoding"),
        "pdf.txt": (b"%PDF-1.7\n", "a PDF"),
        "picture.md": (b"\x89PNG\r\n", "a picture"),
        "empty.txt": (b"", "empty file"),
        "blank.csv": (b"," * 1_000_000, "no text in it"),
        "quote.csv": (b'a,"' + b"x" * 1_000_000, "are its quotes closed?"),
        "deep.html": (b"<div>" * 100_000, "nested too deeply"),
        "nothing.html": (b"<script>" + b"x" * 100_000, "no text in it"),
        "spans.html": (b"<h1>a" + b"<p>b" * 100_001, "more than 100,000 paragraphs"),
        "letters.eml": (letters_within_letters(1000), ""),
        "none.eml": (b"no letter at all", "no letter"),
        "many.eml": (letter_with(*[b"a.nothing"] * 102), "only 100 attachments"),
        "names.eml": (letter_with(b"..", b".", "\u6f22".encode() * 150 + b".pdf"), "not a kind"),
        "deep.jsonl": (b"[" * 1_000_000 + b"\n", "JSON that can't be read"),
        "broken.jsonl": (b'{"id": "x", "text"\n' * 1000, "broken JSON"),
        "half.jsonl": (b'{"id": "x", "text": "\\ud800"}\n', "surrogate"),
        "digits.jsonl": (b'{"id": "x", "text": ' + b"9" * 10_000 + b"}\n", "JSON that can't be"),
        "cut.jsonl.gz": (gzip.compress(b'{"id": "x", "text": "y"}\n' * 100)[:40], "cut short"),
        "no.jsonl.gz": (b"no gzip file", "not a gzip file"),
        "tags.md": (b"---\ntitle: 0x" + b"f" * 60_000 + b"\n---\nText.\n", "damaged"),
    }


def pdf_files_in(folder: Path) -> dict[str, str]:
    """PDFs that no program would make, written there; by name, a part of what is said of them."""

    def page(canvas: Any) -> None:
        pdf_files.lines(canvas, pdf_files.numbered("g", 20))

    raw = pdf_files.made(folder / "locked.pdf", page).read_bytes()
    pdf_files.made(folder / "locked.pdf", page, password="x")
    pdf_files.page_tree_with_a_loop(folder / "loop.pdf")
    pdf_files.huge_image(folder / "gigapixel.pdf", 60_000)
    pdf_files.endless_page(folder / "endless.pdf")
    for tenth in range(1, 10, 2):
        (folder / f"tenth-{tenth}.pdf").write_bytes(raw[: len(raw) * tenth // 10])
    return {
        "locked.pdf": "needs a password",
        "loop.pdf": "damaged page",
        "gigapixel.pdf": "million pixels",
        "endless.pdf": "",
        **{f"tenth-{tenth}.pdf": "damaged" for tenth in range(1, 10, 2)},
    }


def odd_entries_in(folder: Path) -> dict[str, str]:
    """What is no file, or has a name that no file should have."""
    os.mkfifo(folder / "pipe.txt")
    (folder / "device.txt").symlink_to("/dev/zero")
    (folder / "gone.txt").symlink_to("nowhere")
    (folder / "self.txt").symlink_to("self.txt")
    (folder / "round").symlink_to(".")
    (folder / "\x1b[31mred\n.txt").write_bytes(b"\0")
    (folder / "\u202efdp.exe").write_text("x")
    (folder / os.fsdecode(b"\xff\xfe.txt")).write_text("Text.")
    for name in ("hole.txt", "hole.html", "hole.docx", "hole.eml", "hole.csv"):
        (folder / name).touch()
        os.truncate(folder / name, 1 << 40)  # a terabyte that takes no room
    deep = folder / "/".join(["deep"] * 250)
    deep.mkdir(parents=True)
    (deep / "x.txt").write_text("Text.")
    return {
        "pipe.txt": "not a regular file",
        "device.txt": "not a regular file",
        "gone.txt": "not there",
        "self.txt": "symbolic links",
        "round": "a link to a folder above it",
        "\x1b[31mred\n.txt": "binary",
        os.fsdecode(b"\xff\xfe.txt"): "not UTF-8",
        "hole.docx": "no .docx file",
        **dict.fromkeys(("hole.txt", "hole.html", "hole.eml", "hole.csv"), "longer than 64 MiB"),
        "/".join(["deep"] * 200): "nested too deeply",
    }


def good_files_in(folder: Path) -> set[str]:
    """Twenty files of all kinds, and among others where hostile ones lie."""
    (folder / "sub").mkdir()
    made = {f"sub/good-{kind}.{kind}": good(kind) for kind in (*OFFICE, "html", "eml")}
    made |= {f"good-{n:02}.txt": b"The winch %d is greased by hand.\n" % n for n in range(10)}
    made["good.md"] = b"# Winches\n\nThey are greased by hand.\n"
    made["good.csv"] = b"winch,day\nbow,1\nstern,2\n"
    made["\u202egood.txt"] = b"A name from right to left.\n"
    made["n" * 200 + ".txt"] = b"A long name.\n"
    for name, raw in made.items():
        (folder / name).write_bytes(raw)
    pdf_files.made(folder / "good.pdf", lambda canvas: pdf_files.lines(canvas, ["A good page"]))
    return {*made, "good.pdf"}


@dataclass
class Readers:
    """What a command's readers took at most, and how many of them were seen."""

    most: dict[str, int] = field(default_factory=dict)  # bytes, by what they are
    seen: set[int] = field(default_factory=set)

    def look(self, command: int) -> None:
        """At all processes that a command began; VmHWM: the most that each has taken so far."""
        waiting = [command]
        while waiting:
            pid = waiting.pop()
            try:
                lines = Path(f"/proc/{pid}/status").read_text().splitlines()
                for task in Path(f"/proc/{pid}/task").iterdir():
                    waiting += map(int, (task / "children").read_text().split())
            except (FileNotFoundError, ProcessLookupError):
                continue  # it has ended
            status = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
            if pid != command and "VmHWM" in status:
                self.seen.add(pid)
                taken = int(status["VmHWM"].split()[0]) << 10
                self.most[status["Name"]] = max(self.most.get(status["Name"], 0), taken)

    def look_until(self, end: threading.Event, command: int) -> None:
        """Look a hundred times a second: a reader takes a gigabyte in half of one."""
        while not end.wait(0.01):
            self.look(command)


async def watched(site: LiveSite, folder: Path, readers: Readers, waits: list[float]) -> Any:
    """What an ingest says as JSON; meanwhile questions are asked, and its readers looked at."""
    process = await started(site, "ingest", str(folder), "--json")
    told = asyncio.create_task(process.communicate())

    async def ask() -> None:
        while not told.done():
            begun = time.monotonic()
            asked = control.AskRequest(question="who looks after the anchor winch of elm?")
            reply = await site.stub.Ask(asked, timeout=60)
            waits.append(time.monotonic() - begun)
            assert "wardens of elm" in reply.answer
            await asyncio.wait([told], timeout=PAUSE_S)

    end = threading.Event()
    looking = asyncio.create_task(asyncio.to_thread(readers.look_until, end, process.pid))
    try:
        await ask()
        out, err = await told
    finally:
        end.set()
        await looking
    assert process.returncode == 3, err.decode()
    return json.loads(out)


def unexplained(expected: dict[str, str], problems: Iterable[dict[str, Any]], at: str) -> list[str]:
    """The files of which nothing is said, or not what is expected."""
    causes: dict[str, list[str]] = {}
    for problem in problems:
        name = problem["path"].removeprefix(f"{at}/")
        causes.setdefault(name, []).append(problem["cause"])
    within = {
        name: [c for n, cs in causes.items() if n.startswith(f"{name}/") for c in cs]
        for name in expected
    }
    return [
        f"{name!a}: {causes.get(name)} and within {within[name]}, expected {part!r}"
        for name, part in expected.items()
        if not any(part in cause for cause in [*causes.get(name, []), *within[name]])
    ]


async def library_of(site: LiveSite) -> set[str]:
    """The ids of all its documents."""
    request = control.ListDocumentsRequest(limit=1000)
    return {one.id for one in (await site.stub.ListDocuments(request, timeout=60)).documents}


@pytest.mark.asyncio
async def test_hostile_files_keep_no_good_file_out(tmp_path: Path) -> None:
    folder = tmp_path / "files"
    folder.mkdir()
    wanted = good_files_in(folder)
    expected = {**pdf_files_in(folder), **odd_entries_in(folder)}
    makes: list[Callable[[], Files]] = [office_files, texts_and_records]
    for name, (raw, part) in (item for make in makes for item in make().items()):
        (folder / name).write_bytes(raw)
        expected[name] = part
    assert len(expected) >= 60
    assert len(wanted) == 20
    readers, waits = Readers(), list[float]()
    async with LiveFederation.start(tmp_path, ["elm"], without=["fir", "oak"]) as federation:
        site = federation.sites["elm"]
        await site.ingest()
        told = await watched(site, folder, readers, waits)
        inside = await library_of(site)
        assert site.process.returncode is None
    assert wanted <= inside, sorted(map(ascii, wanted - inside))
    assert not unexplained(expected, told["problems"], str(folder))
    slowest, most = max(waits), max(readers.most.values())
    print(
        f"{len(expected)} hostile or damaged files, {len(waits)} questions, the slowest answer "
        f"{slowest:.2f} s, {len(readers.seen)} readers seen, at most {most >> 20} MiB"
    )
    assert slowest < ANSWER_WITHIN_S
    assert most <= Limits().memory_bytes + BESIDE_DATA, readers.most
