"""Watched folders whose files are kept: as they were read, and no longer than their documents."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from email.message import EmailMessage
from pathlib import Path
from typing import Any

import pytest

from daemon.jobs import folders, originals
from daemon.jobs.folders import Looked, look_through
from daemon.library.box.boxes import Boxes
from daemon.library.catalogue.originals import folder_of, place_of
from daemon.library.file_notes import FilesGone, FilesRead
from daemon.library.schema import LibraryError
from daemon.library.store import Library
from daemon.process import faultpoints
from tests.daemon.jobs.test_folders import LATER, Site

MINUTE = 60_000_000_000  # ns


class KeepingSite(Site):
    """As the daemon does it: with the documents their files, and then what nobody has goes."""

    keep = True

    def give(self, item: FilesRead | FilesGone) -> None:
        super().give(item)
        staged = []
        if isinstance(item, FilesRead):
            staged = [part.original for part in item.parts if part.original]
        originals.keep(self.library, staged)

    def look(self, later: int = LATER) -> Looked:
        self.given = []
        now = max((f.stat().st_mtime_ns for f in self.folder.path.rglob("*")), default=0) + later
        looked = look_through(
            self.folder, self.library, self.memory, self.keep, give=self.give, now_ns=lambda: now
        )
        self.memory = looked.memory
        return looked

    def take_out(self, name: str) -> None:
        with Library.open(self.library) as library:
            library.delete_documents([f"contracts/{name}"])
        originals.collect(self.library)

    @property
    def kept(self) -> dict[str, bytes]:
        """Files by their documents; nothing else lies there."""
        found: dict[str, bytes] = {}
        with Library.open(self.library, read_only=True) as library:
            for one in library.documents("", "", 1000):
                if original := library.original(one.id):
                    found[one.id] = place_of(self.library, original).read_bytes()
        folder = folder_of(self.library)
        there = sorted(one.read_bytes() for one in folder.iterdir()) if folder.exists() else []
        assert there == sorted(set(found.values()))
        return found


@pytest.fixture(autouse=True, scope="module")
def boxes() -> Iterator[None]:
    """Some of this module's own, for they are over with it."""
    with pytest.MonkeyPatch.context() as patch, Boxes() as own:
        patch.setattr(folders, "_boxes", own)
        yield


@pytest.fixture
def site(tmp_path: Path) -> KeepingSite:
    return KeepingSite(tmp_path)


@pytest.mark.slow
def test_a_file_is_kept_as_long_as_it_is_there(site: KeepingSite) -> None:
    site.write("in/rope.txt", "Hemp rope.\r\n")
    site.write("copy.txt", "Hemp rope.\r\n")
    site.look()
    rope = b"Hemp rope.\r\n"
    assert site.kept == {"contracts/in/rope.txt": rope, "contracts/copy.txt": rope}
    site.write("in/rope.txt", "Wire rope.")
    site.look()
    assert site.kept == {"contracts/in/rope.txt": b"Wire rope.", "contracts/copy.txt": rope}
    (site.folder.path / "copy.txt").unlink()
    site.look()
    assert site.kept == {"contracts/in/rope.txt": b"Wire rope."}


def test_bytes_change_where_the_text_does_not(site: KeepingSite) -> None:
    site.write("a.html", "<p>Hemp rope.</p>")
    site.look()
    site.write("a.html", "<p>Hemp rope.</p><!-- tarred -->")
    site.look()
    assert site.kept == {"contracts/a.html": b"<p>Hemp rope.</p><!-- tarred -->"}


def test_records_and_what_cannot_be_read_are_not_kept(site: KeepingSite) -> None:
    line = json.dumps({"id": "all.jsonl", "title": "", "text": "Entry."}) + "\n"
    site.write("all.jsonl", line)
    site.write("bad.docx", b"no archive")
    site.look()
    assert (set(site.texts()), site.kept) == ({"contracts/all.jsonl"}, {})
    site.look()
    assert site.given == [], "nothing is looked for again and again"


def test_a_file_that_gets_damaged_leaves_what_was_read(site: KeepingSite) -> None:
    site.write("a.txt", "Hemp rope.")
    site.look()
    site.write("a.txt", b"\0\0")
    site.look()
    assert site.kept == {"contracts/a.txt": b"Hemp rope."}
    for _ in range(2):
        site.look()
    assert site.given == []


def test_what_was_read_before_is_kept_without_being_read_again(site: KeepingSite) -> None:
    site.keep = False
    site.write("a.txt", "Hemp rope.")
    site.write("b.txt", "A sail.")
    site.look()
    site.take_out("b.txt")
    site.look()
    assert (site.kept, site.given) == ({}, [])
    site.keep = True
    site.look()
    assert site.kept == {"contracts/a.txt": b"Hemp rope."}
    (part,) = (part for item in site.given if isinstance(item, FilesRead) for part in item.parts)
    assert (part.name, part.documents) == ("a.txt", ())
    site.look()
    assert site.given == []


def test_what_got_damaged_before_is_not_read_with_each_look(site: KeepingSite) -> None:
    site.keep = False
    site.write("a.txt", "Hemp rope.")
    site.look()
    site.write("a.txt", b"\0\0")
    site.look()
    site.keep = True
    site.look()
    assert (site.kept, site.given) == ({}, [])
    assert site.texts() == {"contracts/a.txt": "Hemp rope."}


def test_what_is_kept_stays_where_no_more_is(site: KeepingSite) -> None:
    site.write("a.txt", "Hemp rope.")
    site.write("b.txt", "A sail.")
    site.look()
    site.keep = False
    site.write("b.txt", "Another sail.")
    site.write("c.txt", "A lamp.")
    site.look()
    assert site.kept == {"contracts/a.txt": b"Hemp rope."}, "and what changed goes"


def test_what_a_person_took_out_does_not_come_back_in_a_mail(site: KeepingSite) -> None:
    mail = EmailMessage()
    mail["Subject"] = "The list"
    mail.set_content("See the list.")
    mail.add_attachment("The quaxolith is gilded.", filename="list.txt")
    site.write("m.eml", mail.as_bytes())
    site.look()
    assert set(site.kept) == {"contracts/m.eml"}
    site.take_out("m.eml/list.txt")
    assert site.kept == {}
    site.look()
    assert (site.kept, site.given) == ({}, [])
    assert set(site.texts()) == {"contracts/m.eml"}


def test_one_taken_out_during_a_look_is_not_kept(site: KeepingSite) -> None:
    """Between the copy and its storing: by then the copy has a text that is out."""
    mail = EmailMessage()
    mail["Subject"] = "The list"
    mail.set_content("See the list.")
    mail.add_attachment("The quaxolith is gilded.", filename="list.txt")
    site.keep = False
    site.write("m.eml", mail.as_bytes())
    site.look()
    give, site.keep = site.give, True

    def first_taken_out(item: FilesRead | FilesGone) -> None:
        site.take_out("m.eml/list.txt")
        give(item)

    site.give = first_taken_out  # type: ignore[method-assign]
    site.look()
    assert site.given, "it was copied"
    assert site.kept == {}


def test_a_file_that_changes_under_the_copy_is_read_again(
    site: KeepingSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its time and size put back, too: the bytes tell."""
    file = site.write("a.txt", "Hemp rope.")
    times, staged = file.stat(), folders._Reading._staged

    def changed(self: Any, under_way: Any) -> Any:
        with file.open("r+b") as opened:
            opened.write(b"Wire")
        os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
        return staged(self, under_way)

    with monkeypatch.context() as patch:
        patch.setattr(folders._Reading, "_staged", changed)
        site.look()
    assert site.kept == {}
    site.look()
    assert site.kept == {"contracts/a.txt": b"Wire rope."}
    assert site.texts() == {"contracts/a.txt": "Wire rope."}


def test_a_full_disk_is_told_and_tried_again(
    site: KeepingSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    site.write("a.txt", "Hemp rope.")
    since = LATER
    with monkeypatch.context() as patch:
        patch.setattr("daemon.jobs.folders.Arriving.write", full)
        looked = site.look(since)
        assert [str(one.cause) for one in looked.not_read] == ["not kept: No space left on device"]
        assert (set(site.texts()), site.kept) == ({"contracts/a.txt"}, {})
        for minutes in (10, 60, 360, 1440, 1440):
            assert site.look(since + MINUTE).not_read == (), "it is not copied in between"
            since += minutes * MINUTE
            assert len(site.look(since).not_read) == 1, minutes
    assert site.look(since + 1440 * MINUTE).not_read == ()
    assert site.kept == {"contracts/a.txt": b"Hemp rope."}


def test_what_could_not_be_stored_is_no_longer_there_after_a_look(site: KeepingSite) -> None:
    def full(_: object) -> None:
        raise LibraryError("the disk is full")

    site.write("a.txt", "Hemp rope.")
    with pytest.raises(LibraryError):
        look_through(site.folder, site.library, site.memory, True, full, lambda: 2**62)
    assert len(list(folder_of(site.library).iterdir())) == 1, "the copy, which is nobody's"
    site.look()
    assert site.kept == {"contracts/a.txt": b"Hemp rope."}


CHILD = (
    "import sys; from pathlib import Path; from tests.daemon.jobs.test_kept_files import"
    " KeepingSite; KeepingSite(Path(sys.argv[1])).look()"
)


@pytest.mark.slow
@pytest.mark.parametrize(
    "point", ["files:write", "files:written", "originals:named", "originals:kept"]
)
def test_a_look_that_is_killed_is_made_good_by_the_next(site: KeepingSite, point: str) -> None:
    site.write("a.txt", "Hemp rope.")
    site.write("b.txt", "A sail.")
    ran = subprocess.run(
        [sys.executable, "-c", CHILD, str(site.library.parent)],
        env={**os.environ, faultpoints.VARIABLE: f"{point}=kill"},
        check=False,
    )
    assert ran.returncode == -signal.SIGKILL
    site.look()
    assert site.kept == {"contracts/a.txt": b"Hemp rope.", "contracts/b.txt": b"A sail."}
