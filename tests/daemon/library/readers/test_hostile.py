"""Files that lie, break off or attack: each is refused with a cause, or gives blocks."""

from __future__ import annotations

import io
import struct
import zipfile
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from daemon.library.readers import package
from daemon.library.readers.documents import About, Attached, Block, FileProblem
from daemon.library.readers.docx import read_docx
from daemon.library.readers.html import read_html
from daemon.library.readers.mail import read_eml
from daemon.library.readers.pptx import read_pptx
from daemon.library.readers.reader import Refused
from daemon.library.readers.sheets import read_csv, read_xlsx
from daemon.library.readers.text import read_markdown, read_plain
from tests.daemon.library.readers import known_text
from tests.daemon.library.readers.known_text import Reading, read_bytes

LAUGHS = (
    "<!DOCTYPE x [<!ENTITY a 'ha'>"
    + "".join(f"<!ENTITY {b} '{f'&{a};' * 10}'>" for a, b in pairwise("abcdefghij"))
    + "]>"
)
OUTSIDE = "<!DOCTYPE x [<!ENTITY a SYSTEM 'file:///etc/hostname'>]>"
OLE = b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + bytes(504)
OFFICE: dict[str, tuple[Reading, str]] = {
    "docx": (read_docx, "word/document.xml"),
    "pptx": (read_pptx, "ppt/slides/slide1.xml"),
    "xlsx": (read_xlsx, "xl/worksheets/sheet1.xml"),
}
READERS: dict[str, Reading] = {
    **{kind: reading for kind, (reading, _) in OFFICE.items()},
    "html": read_html,
    "eml": read_eml,
    "md": read_markdown,
    "txt": read_plain,
    "csv": read_csv,
}
every_office_file = pytest.mark.parametrize("kind", OFFICE)


@cache
def good(kind: str) -> bytes:
    """A whole file of the kind."""
    made: bytes = getattr(known_text, f"as_{kind}")()
    return made


def repacked(kind: str, part: str, old: bytes, new: bytes) -> bytes:
    """A whole file with something else in one of its parts; a new part if there is no such."""
    made = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(good(kind))) as source, zipfile.ZipFile(made, "w") as packed:
        for name in source.namelist():
            raw = source.read(name)
            packed.writestr(name, raw.replace(old, new, 1) if name == part else raw)
        if part not in source.namelist():
            packed.writestr(part, new, zipfile.ZIP_DEFLATED)
    return made.getvalue()


def refusal(reading: Reading, folder: Path, raw: bytes) -> str:
    """With what a file is refused."""
    with pytest.raises(Refused) as refused:
        read_bytes(reading, folder, raw)
    assert "\n" not in str(refused.value)
    return str(refused.value)


# ---- bombs ------------------------------------------------------------------


@every_office_file
def test_a_file_that_says_it_expands_far_is_not_unpacked(kind: str, tmp_path: Path) -> None:
    raw = repacked(kind, "media/bomb.bin", b"", b"x")
    at = raw.rindex(b"PK\x01\x02")  # its entry in the archive's directory; 24: its size
    bomb = raw[: at + 24] + struct.pack("<I", 3 << 30) + raw[at + 28 :]
    told = refusal(OFFICE[kind][0], tmp_path, bomb)
    assert told == "expands more than 200 times; save it again from its source"


@every_office_file
def test_a_part_that_expands_further_than_it_says_is_cut(kind: str, tmp_path: Path) -> None:
    reading, part = OFFICE[kind]
    raw = repacked(kind, part, b"?>", b"?>" + b" " * (4 << 20))
    at = raw.rindex(part.encode()) - 46
    bomb = raw[: at + 24] + struct.pack("<I", 1000) + raw[at + 28 :]
    assert refusal(reading, tmp_path, bomb).startswith("damaged")


@every_office_file
def test_a_file_with_too_much_xml_is_refused(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(package, "_MAX_XML", 1000)
    assert "when unpacked" in refusal(OFFICE[kind][0], tmp_path, good(kind))


@pytest.mark.parametrize("doctype", [LAUGHS, OUTSIDE], ids=["laughs", "outside"])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-16"])
@every_office_file
def test_no_part_may_declare_entities(
    kind: str, encoding: str, doctype: str, tmp_path: Path
) -> None:
    reading, part = OFFICE[kind]
    with zipfile.ZipFile(io.BytesIO(good(kind))) as source:
        old = source.read(part)
    xml = old.decode().partition("?>")[2] or old.decode()
    bad = f"<?xml version='1.0' encoding='{encoding}'?>{doctype}{xml}".encode(encoding)
    told = refusal(reading, tmp_path, repacked(kind, part, old, bad))
    assert told == "declares a document type, which office files don't: save it again"


def test_elements_within_one_another_without_end_are_refused(tmp_path: Path) -> None:
    deep = b"<w:body>" + b"<w:p>" * 2000 + b"</w:p>" * 2000
    raw = repacked("docx", "word/document.xml", b"<w:body>", deep)
    assert "nested too deeply" in refusal(read_docx, tmp_path, raw)


def test_entities_of_a_page_are_not_expanded(tmp_path: Path) -> None:
    page = f"{LAUGHS}<p>&j; {OUTSIDE} &a;</p>".encode()
    text = "".join(known_text.texts(read_bytes(read_html, tmp_path, page)))
    assert len(text) < 2000
    assert "haha" not in text


@pytest.mark.parametrize("reference", ["XFE1", "ZZZZZZ1", "nonsense"])
def test_a_cell_outside_of_any_sheet_is_refused(reference: str, tmp_path: Path) -> None:
    new = f'r="{reference}"'.encode()
    raw = repacked("xlsx", "xl/worksheets/sheet1.xml", b'r="A1"', new)
    assert reference in refusal(read_xlsx, tmp_path, raw)


# ---- what it isn't, or is no more --------------------------------------------


@every_office_file
@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (b"%PDF-1.7\n...", "(it is a PDF)"),
        (b"<html><p>Hi", "(it is an HTML or XML file)"),
        (b"Just text.", "(no ZIP archive)"),
        (OLE + "EncryptedPackage".encode("utf-16-le"), "encrypted: save it without a password"),
        (OLE, "in the old binary format of Office"),
        (b"PK\x03\x04 and nothing else", "damaged"),
    ],
)
def test_what_another_program_wrote_is_named(
    kind: str, raw: bytes, said: str, tmp_path: Path
) -> None:
    assert said in refusal(OFFICE[kind][0], tmp_path, raw)


@every_office_file
def test_an_office_file_of_another_kind_is_refused(kind: str, tmp_path: Path) -> None:
    for other in OFFICE.keys() - {kind}:
        told = refusal(OFFICE[kind][0], tmp_path, good(other))
        assert told.startswith(f"no .{kind} file, whatever its name says")


@every_office_file
def test_an_office_file_that_breaks_off_is_refused(kind: str, tmp_path: Path) -> None:
    raw = good(kind)
    for tenth in range(1, 10):
        told = refusal(OFFICE[kind][0], tmp_path, raw[: len(raw) * tenth // 10])
        assert told.startswith("damaged")


@pytest.mark.parametrize("kind", ["html", "eml"])
def test_a_text_that_breaks_off_is_read_up_to_there(kind: str, tmp_path: Path) -> None:
    raw, before = good(kind), 0
    for tenth in range(5, 11):
        items = read_bytes(READERS[kind], tmp_path, raw[: len(raw) * tenth // 10])
        length = sum(map(len, known_text.texts(items)))
        assert length >= before
        before = length


# ---- anything ---------------------------------------------------------------


def blocks_or_refused(reading: Reading, folder: Path, raw: bytes) -> None:
    try:
        items = read_bytes(reading, folder, raw or b" ")
    except Refused as refused:
        assert str(refused)
        assert "\n" not in str(refused)
        return
    for item in items:
        assert isinstance(item, Block | About | Attached | FileProblem)
        if isinstance(item, Block):
            assert item.text.encode()


@pytest.mark.parametrize("kind", READERS)
def test_any_bytes_give_blocks_or_are_refused(
    kind: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp(kind)
    beginnings = st.sampled_from([b"", b"PK\x03\x04", b"From: a\n", b"<p>", b"\xff\xfe", b"---\n"])

    @settings(max_examples=20)
    @given(beginnings, st.binary(max_size=200))
    def check(beginning: bytes, rest: bytes) -> None:
        blocks_or_refused(READERS[kind], folder, beginning + rest)

    check()


@pytest.mark.parametrize("kind", [*OFFICE, "html", "eml"])
def test_a_file_with_other_bytes_in_it_gives_blocks_or_is_refused(
    kind: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp(kind)
    raw = good(kind)
    if kind in OFFICE:
        with zipfile.ZipFile(io.BytesIO(raw)) as source:
            raw = source.read(OFFICE[kind][1])
    bits = st.sampled_from([b"<", b">", b'"', b"&", b"\0", b"\xff", b"-1", b"99999999", b"\n", b""])

    @settings(max_examples=15)
    @given(st.integers(0, len(raw) - 1), st.integers(0, 20), bits)
    def check(at: int, length: int, new: bytes) -> None:
        bad = raw[:at] + new + raw[at + length :]
        if kind in OFFICE:
            bad = repacked(kind, OFFICE[kind][1], raw, bad)
        blocks_or_refused(READERS[kind], folder, bad)

    check()
