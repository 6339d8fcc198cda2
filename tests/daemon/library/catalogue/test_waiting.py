"""What waits for OCR is noted as long as it does, and no longer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from daemon.library.contents import RemovedCounts
from daemon.library.file_notes import FileNote, FilePart, FilesGone, FilesRead, Stamp
from daemon.library.passages import SentenceSplitter
from daemon.library.readers.documents import Document, Waiting
from daemon.library.store import Library

SPLITTER = SentenceSplitter(lambda text: len(text.split()), 50)
ROPE = Document("rope.pdf", "Rope", "Hemp rope is tarred.", source="/srv/rope.pdf")
ROPE_WAITS = Waiting("rope.pdf", "2 to 4", "/srv/rope.pdf")
SCAN_WAITS = Waiting("scan.pdf", "1", "/srv/scan.pdf")
NOTE = FileNote(Stamp(1, 1, 1), b"digest", refused="page 1 waits for OCR")


@pytest.fixture
def library(tmp_path: Path) -> Iterator[Library]:
    with Library.open(tmp_path / "library.sqlite3") as opened:
        opened.put_documents([ROPE], splitter=SPLITTER, waiting=[ROPE_WAITS, SCAN_WAITS])
        yield opened


def waiting(library: Library) -> dict[str, str]:
    found = {one.document_id: one.pages for one in library.waiting("", "", 100)}
    assert library.counts().waiting == len(found)
    return found


def looked(library: Library, *parts: FilePart) -> None:
    library.put_files(FilesRead("contracts", parts), SPLITTER)


def test_what_waits_is_listed_by_id_also_without_a_document(library: Library) -> None:
    assert waiting(library) == {"rope.pdf": "2 to 4", "scan.pdf": "1"}
    assert [one.document_id for one in library.waiting("s", "", 1)] == ["scan.pdf"]
    assert [one.document_id for one in library.waiting("", "rope.pdf", 9)] == ["scan.pdf"]
    assert library.waiting_of(["scan.pdf", "nowhere"]) == {"scan.pdf"}


def test_a_document_that_is_read_whole_waits_no_longer(library: Library) -> None:
    library.put_documents([ROPE], splitter=SPLITTER, waiting=[ROPE_WAITS])
    assert "rope.pdf" in waiting(library), "it was read again, and they wait again"
    library.put_documents([ROPE], splitter=SPLITTER)
    assert waiting(library) == {"scan.pdf": "1"}
    read = Document("scan.pdf", "Scan", "A lamp burns train oil.")
    library.put_documents([read], splitter=SPLITTER)
    assert waiting(library) == {}


def test_another_file_of_the_name_takes_over_nothing_that_waits(library: Library) -> None:
    other = replace(SCAN_WAITS, pages="9", source="/home/eve/scan.pdf")
    library.put_documents([], splitter=SPLITTER, waiting=[other])
    assert waiting(library)["scan.pdf"] == "1"
    library.put_documents([], splitter=SPLITTER, waiting=[other], replace=True)
    assert waiting(library)["scan.pdf"] == "9"


def test_what_is_taken_out_waits_no_longer(library: Library) -> None:
    removed = library.delete_documents(["rope.pdf", "scan.pdf"])
    assert removed == RemovedCounts(documents=1, passages=1, waiting=2)
    assert waiting(library) == {}


def test_another_file_of_that_name_does_not_say_what_waits(library: Library) -> None:
    other = replace(ROPE, text="Hemp rope is sold.", source="/tmp/rope.pdf")
    theirs = Waiting("rope.pdf", "9", "/tmp/rope.pdf")
    counts = library.put_documents([other], splitter=SPLITTER, waiting=[theirs])
    assert len(counts.refused) == 1
    assert waiting(library)["rope.pdf"] == "2 to 4"
    copied = replace(ROPE, source="/tmp/rope.pdf")
    library.put_documents([copied], splitter=SPLITTER, waiting=[theirs])
    assert waiting(library)["rope.pdf"] == "2 to 4", "what it has of text is the same"


def test_what_waits_of_a_watched_file_goes_with_it(library: Library) -> None:
    scan = Waiting("contracts/scan.pdf", "1", "/srv/contracts/scan.pdf")
    looked(library, FilePart("scan.pdf", NOTE, waiting=(scan,)))
    assert library.notes.of("contracts")["scan.pdf"].waits
    assert waiting(library)["contracts/scan.pdf"] == "1"
    library.delete_documents([], FilesGone("contracts", ("scan.pdf",), ()))
    assert "contracts/scan.pdf" not in waiting(library)


def test_a_watched_file_that_is_read_anew_says_anew_what_waits(library: Library) -> None:
    scan = Waiting("contracts/scan.pdf", "1", "/srv/contracts/scan.pdf")
    looked(library, FilePart("scan.pdf", NOTE, waiting=(scan,)))
    looked(library, FilePart("scan.pdf", NOTE, waiting=(replace(scan, pages="1 to 3"),)))
    assert waiting(library)["contracts/scan.pdf"] == "1 to 3"
    looked(library, FilePart("scan.pdf", replace(NOTE, refused="tesseract failed")))
    assert "contracts/scan.pdf" not in waiting(library), "an engine was there"
    assert not library.notes.of("contracts")["scan.pdf"].waits


def test_no_look_brings_back_what_a_person_took_out(library: Library) -> None:
    scan = Waiting("contracts/scan.pdf", "2", "/srv/contracts/scan.pdf")
    first = Document("contracts/scan.pdf", "Scan", "A lamp burns train oil.")
    looked(library, FilePart("scan.pdf", NOTE, (first,), waiting=(scan,)))
    library.delete_documents(["contracts/scan.pdf"])
    assert not library.notes.of("contracts")["scan.pdf"].waits
