"""Looks through a real folder into a real library: what is stored, and what a kill leaves."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from email.message import EmailMessage
from pathlib import Path
from random import Random
from typing import Any

import pytest
from PIL import Image, ImageDraw, ImageFont

from daemon.jobs import folders
from daemon.jobs.folders import Looked, look_through
from daemon.library.box.boxes import Boxes
from daemon.library.box.told import Limits
from daemon.library.file_notes import (
    UNFINISHED,
    FileNote,
    FilePart,
    FilesGone,
    FilesRead,
    Stamp,
)
from daemon.library.folders import Folder, Memory, look
from daemon.library.passages import SentenceSplitter
from daemon.library.readers.documents import Document, FileProblem, Pair
from daemon.library.schema import LibraryError
from daemon.library.store import Library
from daemon.process import faultpoints

SPLITTER = SentenceSplitter(lambda text: len(text.split()), 50)
LATER = 10_000_000_000  # ns: nothing is being written any more
MINUTE = 60_000_000_000
A_STAMP = Stamp(1, 1, 1)


class Site:
    """A watched folder and the library that it becomes.

    What the daemon does between the two is for tests/daemon/services/test_folders.py.
    """

    def __init__(self, root: Path) -> None:
        self.folder = Folder("contracts", root / "folder")
        self.folder.path.mkdir(exist_ok=True)
        self.library = root / "library.sqlite3"
        self.memory = Memory()
        self.given: list[FilesRead | FilesGone] = []
        Library.open(self.library).close()

    def give(self, item: FilesRead | FilesGone) -> None:
        self.given.append(item)
        with Library.open(self.library) as library:
            if isinstance(item, FilesRead):
                _, left = library.put_files(item, SPLITTER)
                library.delete_documents(left.documents, left)
            else:
                library.delete_documents(item.documents, item)

    def look(self, later: int = LATER) -> Looked:
        self.given = []
        now = max((f.stat().st_mtime_ns for f in self.folder.path.rglob("*")), default=0) + later
        looked = look_through(
            self.folder, self.library, self.memory, give=self.give, now_ns=lambda: now
        )
        self.memory = looked.memory
        return looked

    def write(self, name: str, text: str | bytes) -> Path:
        path = self.folder.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    def texts(self) -> dict[str, str]:
        with Library.open(self.library, read_only=True) as library:
            return {one.document_id: one.text for one in library.passages()}

    def refused(self) -> dict[str, str]:
        with Library.open(self.library, read_only=True) as library:
            return dict(library.notes.refused("contracts", 100)[1])


@pytest.fixture(autouse=True, scope="module")
def boxes() -> Iterator[None]:
    """Where files are read is over with these tests, not with their process."""
    with folders._boxes:
        yield


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("tesseract") is None, reason="tesseract-ocr is not installed")
def test_pages_that_wait_for_ocr_are_read_when_it_is_there(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = Image.new("L", (1240, 1754), 255)
    font = ImageFont.load_default(size=60)
    ImageDraw.Draw(page).text((120, 200), "Hemp rope is tarred", fill=0, font=font)
    page.save(site.folder.path / "scan.pdf", resolution=150)

    def looked(path: str) -> Looked:
        monkeypatch.setenv("PATH", path)
        with Boxes() as boxes:
            monkeypatch.setattr(folders, "_boxes", boxes)
            return site.look()

    path, without = os.environ["PATH"], str(tmp_path / "no programs")
    looked(without)
    assert "page 1 waits for OCR" in site.refused()["scan.pdf"]
    looked(without)
    assert site.given == [], "no look reads it in vain"
    looked(path)
    assert site.refused() == {}
    assert "rope" in site.texts()["contracts/scan.pdf"]
    looked(path)
    assert site.given == []


@pytest.mark.slow
def test_a_file_appears_changes_moves_and_vanishes(site: Site) -> None:
    site.write("rope.txt", "Hemp rope is tarred.")
    site.write("in/sail.txt", "Flax makes a sail.")
    assert site.look().seen == 2
    assert site.texts() == {
        "contracts/rope.txt": "Hemp rope is tarred.",
        "contracts/in/sail.txt": "Flax makes a sail.",
    }
    with Library.open(site.library, read_only=True) as library:
        (rope,) = library.documents("contracts/rope", "", 9)
    assert rope.source == str(site.folder.path / "rope.txt")
    site.look()
    assert site.given == [], "nothing has changed"

    site.write("rope.txt", "Hemp rope is tarred twice.")
    site.look()
    assert site.texts()["contracts/rope.txt"] == "Hemp rope is tarred twice."
    assert len(site.given) == 1

    (site.folder.path / "in" / "sail.txt").rename(site.folder.path / "mainsail.txt")
    site.look()
    assert set(site.texts()) == {"contracts/rope.txt", "contracts/mainsail.txt"}

    (site.folder.path / "rope.txt").unlink()
    site.look()
    assert set(site.texts()) == {"contracts/mainsail.txt"}


def test_a_file_that_was_only_touched_is_not_read_again(site: Site) -> None:
    path = site.write("rope.txt", "Hemp rope is tarred.")
    site.look()
    os.utime(path, (1, 1))
    site.look()
    (item,) = site.given
    assert isinstance(item, FilesRead)
    assert [part.documents for part in item.parts] == [()]
    assert "contracts/rope.txt" in site.texts()
    site.look()
    assert site.given == [], "its new time is noted"


def test_a_file_that_is_being_written_waits(site: Site) -> None:
    site.write("rope.txt", "Hemp ro")
    assert len(site.look(later=1_000_000_000).memory.waiting) == 1
    assert site.texts() == {}
    site.write("rope.txt", "Hemp rope is tarred.")
    assert len(site.look().memory.waiting) == 1, "it has grown"
    site.look()
    assert site.texts() == {"contracts/rope.txt": "Hemp rope is tarred."}


def test_a_file_that_changes_while_it_is_read_is_not_taken(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = site.write("rope.txt", "Hemp rope is tarred.")
    read = Boxes.read

    def disturbed(boxes: Boxes, *args: object) -> object:
        items = list(read(boxes, *args))  # type: ignore[arg-type]
        path.write_text("Hemp")
        return iter(items)

    monkeypatch.setattr(Boxes, "read", disturbed)
    assert list(site.look().memory.waiting) == ["rope.txt"]
    assert site.texts() == {}
    monkeypatch.undo()
    site.look()
    assert site.texts() == {"contracts/rope.txt": "Hemp"}


def test_a_refused_file_is_remembered_until_it_is_mended(site: Site) -> None:
    site.write("rope.txt", "Hemp rope.")
    site.write("lamp.docx", b"no archive")
    site.look()
    assert set(site.refused()) == {"lamp.docx"}
    site.look()
    assert site.given == [], "it is not read again and again"
    site.write("rope.txt", "")
    site.look()
    assert site.refused()["rope.txt"].startswith("empty file")
    assert site.texts() == {"contracts/rope.txt": "Hemp rope."}, "what it was stays"
    site.write("rope.txt", "Wire rope.")
    (site.folder.path / "lamp.docx").unlink()
    site.look()
    assert (site.refused(), site.texts()) == ({}, {"contracts/rope.txt": "Wire rope."})


@contextmanager
def busy_machine() -> Iterator[None]:
    """No file is read in time."""
    with Boxes(Limits(file_s=0.0)) as boxes, pytest.MonkeyPatch.context() as patch:
        patch.setattr(folders, "_boxes", boxes)
        yield


@pytest.mark.slow
def test_what_was_not_read_in_time_is_tried_again_and_told(site: Site) -> None:
    site.write("rope.txt", "Hemp rope.")
    site.write("sail.txt", "Flax sail.")
    with busy_machine():
        site.look()
        told = site.refused()["rope.txt"]
        assert told.startswith("not read within 120 s a page and 0 s all in all")
        assert " (try 1; another one from " in told
        assert told.endswith(" UTC on)")
    site.look()
    assert site.given == [], "not with each look: it takes what a file may take"
    site.write("sail.txt", "Cotton sail.")
    site.look()
    assert site.texts() == {"contracts/sail.txt": "Cotton sail."}, "what has changed is read"
    site.look(later=LATER + 11 * MINUTE)
    assert (set(site.texts()), site.refused()) == ({"contracts/rope.txt", "contracts/sail.txt"}, {})
    assert site.memory.retries == {}


@pytest.mark.slow
def test_what_a_person_removed_is_not_tried_again(site: Site) -> None:
    """Of a letter whose attachment was not read in time, its own text is here by then."""
    letter = EmailMessage()
    letter["Subject"] = "Rope"
    letter.set_content("Hemp rope.")
    letter.add_attachment("Flax sail.", filename="sail.txt")
    site.write("rope.eml", letter.as_bytes())
    late = FileProblem("sail.txt", "late", passing=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Boxes, "_attached", lambda *_: iter([late]))
        site.look()
    assert set(site.texts()) == {"contracts/rope.eml"}
    with Library.open(site.library) as library:
        library.delete_documents(["contracts/rope.eml"])
    site.memory = Memory()  # a start
    for minutes in (0, 11, 1000):
        site.look(later=LATER + minutes * MINUTE)
        assert site.texts() == {}
    letter.replace_header("Subject", "New rope")
    site.write("rope.eml", letter.as_bytes())
    site.look()
    assert set(site.texts()) == {"contracts/rope.eml", "contracts/rope.eml/sail.txt"}


@pytest.mark.slow
def test_what_is_never_read_in_time_is_given_up(site: Site) -> None:
    site.write("rope.txt", "Hemp rope.")
    tries, day = 0, 24 * 60 * MINUTE
    with busy_machine():
        for days in range(1, 9):
            site.look(later=days * day + LATER)
            tries += bool(site.given)
    assert tries == 5
    assert "not read within" in site.refused()["rope.txt"]
    assert "another one" not in site.refused()["rope.txt"]
    site.write("rope.txt", "Wire rope.")
    site.look()
    assert site.texts() == {"contracts/rope.txt": "Wire rope."}


def test_what_a_file_had_before_stays_until_it_is_read_again(site: Site) -> None:
    letter = EmailMessage()
    letter["Subject"] = "The lamp"
    letter.set_content("The lamp burns oil.")
    letter.add_attachment("It is trimmed daily.", filename="trim.txt")
    site.write("letter.eml", letter.as_bytes())
    site.look()
    both = site.texts()
    assert len(both) == 2
    source = str(site.folder.path / "letter.eml")
    alone = Document("contracts/letter.eml", "The lamp", "The lamp burns oil.", source=source)
    for note in (FileNote(UNFINISHED, b"", "trim.txt: not read in time"), FileNote(A_STAMP, b"")):
        site.give(FilesRead("contracts", (FilePart("letter.eml", note, (alone,)),)))
        assert (site.texts() == both) == (note.stamp == UNFINISHED)
    assert set(site.texts()) == {"contracts/letter.eml"}


def test_a_record_replaces_no_file_beside_it(site: Site) -> None:
    site.write("lease.txt", "The rent is 700.")
    site.look()
    records = [
        {"id": "lease.txt", "title": "", "text": "The rent is 7."},
        {"id": "other", "title": "", "text": "Another one."},
    ]
    site.write("all.jsonl", "".join(json.dumps(one) + "\n" for one in records))
    site.look()
    here = {"contracts/lease.txt": "The rent is 700.", "contracts/other": "Another one."}
    assert site.texts() == here
    assert "contracts/lease.txt is here from" in site.refused()["all.jsonl"]
    (site.folder.path / "all.jsonl").unlink()
    site.look()
    assert site.texts() == {"contracts/lease.txt": "The rent is 700."}


def test_a_file_that_is_all_gap_keeps_nobody_waiting(site: Site) -> None:
    site.write("rope.txt", "Hemp rope.")
    os.truncate(site.write("all.jsonl", ""), 1 << 40)
    site.look()
    assert site.texts() == {"contracts/rope.txt": "Hemp rope."}
    assert site.refused() == {"all.jsonl": "larger than 4 GiB: cut it into several files"}
    site.look()
    assert site.given == []


def test_a_file_that_a_disk_hardly_gives_waits_for_another_try(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.write("rope.txt", "Hemp rope.")
    monkeypatch.setattr(folders, "_DIGEST_S", -1.0)
    site.look()
    assert site.refused()["rope.txt"].startswith("takes more than -1 s to come from its disk (try")
    monkeypatch.undo()
    site.look(later=LATER + 11 * MINUTE)
    assert site.texts() == {"contracts/rope.txt": "Hemp rope."}


@pytest.mark.slow
def test_records_and_pairs_are_called_after_the_folder(site: Site) -> None:
    lines: list[dict[str, Any]] = [
        {"id": str(n), "title": "", "text": f"Entry {n}."} for n in range(1200)
    ]
    lines.append({"query": "Which entry?", "positives": ["7"]})
    site.write("all.jsonl", "".join(json.dumps(line) + "\n" for line in lines))
    site.look()
    assert len(site.given) == 3, "a large file comes in several parts"
    assert len(site.texts()) == 1200
    with Library.open(site.library, read_only=True) as library:
        assert library.pairs("train") == [Pair("Which entry?", ("contracts/7",), "train")]
    site.write("all.jsonl", json.dumps(lines[7]) + "\n")
    site.look()
    assert site.texts() == {"contracts/7": "Entry 7."}


def test_pairs_kept_for_testing_by_their_files_name_stay_so(site: Site) -> None:
    line = json.dumps({"query": "Which entry?", "positives": ["7"]}) + "\n"
    site.write("all.jsonl", json.dumps({"id": "7", "title": "", "text": "Entry."}) + "\n")
    site.write("in/pairs_test.jsonl", line)
    site.write("pairs_valid.jsonl.gz", gzip.compress(line.replace("Which", "What").encode()))
    site.look()
    with Library.open(site.library, read_only=True) as library:
        found = {split: library.pairs(split) for split in ("train", "valid", "test")}
    assert found == {
        "train": [],
        "valid": [Pair("What entry?", ("contracts/7",), "valid")],
        "test": [Pair("Which entry?", ("contracts/7",), "test")],
    }


def test_a_document_that_moves_to_another_file_stays(site: Site) -> None:
    line = json.dumps({"id": "x", "title": "", "text": "Entry."}) + "\n"
    other = json.dumps({"id": "y", "title": "", "text": "Other."}) + "\n"
    site.write("a.jsonl", line)
    site.look()
    site.write("a.jsonl", other)
    site.write("b.jsonl", line)
    site.look()
    assert set(site.texts()) == {"contracts/x", "contracts/y"}
    (site.folder.path / "a.jsonl").write_text(line)
    site.look()
    (site.folder.path / "b.jsonl").unlink()
    site.look()
    assert set(site.texts()) == {"contracts/x"}, "the other file has it, too"


def test_of_two_records_of_one_id_the_other_is_back_when_one_goes(site: Site) -> None:
    for name in ("a", "b"):
        site.write(f"{name}.jsonl", json.dumps({"id": "x", "title": "", "text": f"Of {name}."}))
        site.look()
    assert site.texts() == {"contracts/x": "Of b."}
    assert site.refused()["b.jsonl"].startswith("contracts/x is in a.jsonl, too")
    (site.folder.path / "b.jsonl").unlink()
    site.look()
    site.look()
    assert site.texts() == {"contracts/x": "Of a."}, "the text goes with its file"
    assert not site.refused()


def test_a_link_put_in_a_files_place_is_not_followed(site: Site, tmp_path: Path) -> None:
    """Between the look and the reading, too: the look has seen a file there."""
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "a.txt").write_text("The key is under the mat.")
    inner = site.write("in/a.txt", "Harmless.").parent

    def swapped(path: Path) -> object:
        tree = look(path)
        inner.rename(site.folder.path / ".aside")
        inner.symlink_to(tmp_path / "secret")
        return tree

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("daemon.jobs.folders.look", swapped)
        found = site.look()
    assert site.texts() == {}
    assert [one.name for one in found.not_read] == ["in/a.txt"]
    inner.unlink()
    (site.folder.path / ".aside").rename(inner)
    assert site.look().not_read == (), "what could not be opened is tried again"
    assert site.texts() == {"contracts/in/a.txt": "Harmless."}


def test_a_folder_that_is_missing_or_emptied_removes_nothing(site: Site) -> None:
    site.write("rope.txt", "Hemp rope.")
    site.look()
    site.folder.path.rename(site.folder.path.with_name("away"))
    assert "not there (any more); nothing" in site.look().trouble
    site.folder.path.mkdir()
    assert "no file is left in it, and 1 were read" in site.look().trouble
    assert set(site.texts()) == {"contracts/rope.txt"}
    with Library.open(site.library) as library:
        library.delete_documents(["contracts/rope.txt"])
    assert site.look().trouble == "", "a person has removed it: there is nothing to hold"
    site.folder.path.rmdir()
    site.folder.path.with_name("away").rename(site.folder.path)
    site.look()
    assert site.texts() == {}, "mounted again, it does not bring back what a person took out"


def test_a_document_that_a_person_removed_comes_back_when_it_changes(site: Site) -> None:
    site.write("rope.txt", "Hemp rope.")
    site.write("sail.txt", "A sail.")
    site.look()
    with Library.open(site.library) as library:
        library.delete_documents(["contracts/rope.txt"])
    site.look()
    assert set(site.texts()) == {"contracts/sail.txt"}
    site.write("rope.txt", "Wire rope.")
    site.look()
    assert set(site.texts()) == {"contracts/sail.txt", "contracts/rope.txt"}


def test_a_folder_that_is_watched_no_longer_leaves_its_documents(site: Site) -> None:
    site.write("rope.txt", "Hemp rope.")
    site.look()
    with Library.open(site.library) as library:
        library.forget_other_folders(["letters"])
        assert library.notes.of("contracts") == {}
    assert set(site.texts()) == {"contracts/rope.txt"}


# ---- a kill in the midst of it ------------------------------------------------


def everything(library: Path) -> tuple[object, ...]:
    """Documents, passages and notes, without what differs from one reading to another."""
    with Library.open(library, read_only=True) as one:
        passages = sorted((p.document_id, p.text) for p in one.passages())
        documents = one.documents("", "", 1000)
        notes = sorted(
            (n, note.digest, note.refused) for n, note in one.notes.of("contracts").items()
        )
        owned = one.notes.documents_of("contracts", [name for name, *_ in notes])
    return passages, [(d.id, d.title) for d in documents], notes, owned


def fill(site: Site, draw: Random) -> None:
    for number in range(6):
        site.write(f"{number}.txt", f"Rope {number} is {draw.random()}.")
    lines = [{"id": f"r{n}", "title": "", "text": f"Entry {draw.random()}."} for n in range(1100)]
    site.write("all.jsonl", "".join(json.dumps(line) + "\n" for line in lines))
    site.write("bad.docx", b"no archive")


def change(site: Site, draw: Random) -> None:
    site.write("1.txt", f"Sail {draw.random()}.")
    (site.folder.path / "2.txt").unlink()
    site.write("all.jsonl", json.dumps({"id": "r5", "title": "", "text": "Last."}) + "\n")
    site.write("bad.docx", b"still none")


CHILD = (
    "import sys; from pathlib import Path; from tests.daemon.jobs.test_folders import Site;"
    "Site(Path(sys.argv[1])).look()"
)


def killed(root: Path, fault: str) -> bool:
    """Whether a look in a process of its own is ended by the fault."""
    ran = subprocess.run(
        [sys.executable, "-c", CHILD, str(root)],
        env={**os.environ, faultpoints.VARIABLE: fault},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode in (0, -signal.SIGKILL), ran.stderr
    return ran.returncode != 0


@pytest.mark.slow
@pytest.mark.parametrize("stage", [fill, change])
def test_a_look_killed_anywhere_ends_in_the_library_of_one_undisturbed(
    tmp_path: Path, stage: Callable[[Site, Random], None]
) -> None:
    undisturbed, disturbed = tmp_path / "one", tmp_path / "other"
    for root in (undisturbed, disturbed):
        root.mkdir()
        site = Site(root)
        if stage is change:
            fill(site, Random(1))
            site.look()
        stage(site, Random(2))
    Site(undisturbed).look()
    expected = everything(undisturbed / "library.sqlite3")
    points = [("files:write", 1), ("files:written", 1), ("files:write", 2)]
    # Each time the look goes on from where it was ended.
    kills = 0
    for point, nth in Random(stage.__name__).sample(points, 2):
        kills += killed(disturbed, f"{point}=kill@{nth}")
        assert_notes_fit(disturbed / "library.sqlite3")
    assert kills
    Site(disturbed).look()
    found = everything(disturbed / "library.sqlite3")
    assert found[:3] == expected[:3]
    assert found[3] == expected[3]


def assert_notes_fit(library: Path) -> None:
    """No document without its note, and no finished note of a text file without its document."""
    with Library.open(library, read_only=True) as one:
        ids = {document.id for document in one.documents("", "", 5000)}
        notes = one.notes.of("contracts")
        owned = one.notes.documents_of("contracts", list(notes))
    assert ids == {one for ids_of_file in owned.values() for one in ids_of_file}
    for name, note in notes.items():
        if name.endswith(".txt") and note.stamp.size >= 0:
            assert owned[name] == [f"contracts/{name}"]


def test_what_cannot_be_stored_ends_the_look(site: Site) -> None:
    site.write("rope.txt", "Hemp rope.")

    def full(_: object) -> None:
        raise LibraryError("the disk is full")

    with pytest.raises(LibraryError, match="the disk is full"):
        look_through(site.folder, site.library, Memory(), give=full, now_ns=lambda: 2**62)
    assert site.texts() == {}
    site.look()
    assert set(site.texts()) == {"contracts/rope.txt"}
