"""Files that documents were read from: each content once, gone with its last document."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from random import Random

import pytest

from daemon.jobs import originals as jobs
from daemon.library.catalogue.originals import (
    Arriving,
    OriginalFile,
    Staged,
    clear,
    containing,
    folder_of,
    is_there,
    place_of,
)
from daemon.library.passages import SentenceSplitter
from daemon.library.readers.documents import Document
from daemon.library.store import Library
from daemon.process import faultpoints

SPLITTER = SentenceSplitter(lambda text: len(text.split()), 50)
ROPE, SAIL = b"%PDF the quaxolith rope", b"%PDF a sail"


class Site:
    """A library and the folder beside it; what the learning worker does is done in place."""

    def __init__(self, root: Path) -> None:
        self.library = root / "library.sqlite3"

    def put(self, *ids: str, text: str = "Hemp rope.") -> None:
        with Library.open(self.library) as library:
            documents = [Document(one, "", text) for one in ids]
            library.put_documents(documents, splitter=SPLITTER)
        jobs.collect(self.library)

    def staged(self, document_id: str, content: bytes) -> Staged:
        arriving = Arriving(self.library, "test")
        for piece in (content[:3], content[3:]):
            arriving.write(piece)
        return Staged(document_id, arriving.path, arriving.end())

    def keep(self, **contents: bytes) -> int:
        return self.keep_all([(f"{name}.pdf", content) for name, content in contents.items()])

    def keep_all(self, contents: Sequence[tuple[str, bytes]]) -> int:
        return jobs.keep(self.library, [self.staged(*one) for one in contents])

    def remove(self, *ids: str) -> None:
        with Library.open(self.library) as library:
            library.delete_documents(ids)
            jobs.collect(self.library)
            library.erasure.clear()

    def of(self, document_id: str) -> bytes | None:
        """What the document was read from, as it lies there."""
        with Library.open(self.library, read_only=True) as library:
            original = library.original(document_id)
        if original is None:
            return None
        content = place_of(self.library, original).read_bytes()
        assert original == OriginalFile(sha256(content).digest(), len(content))
        assert is_there(self.library, original)
        return content

    @property
    def contents(self) -> list[bytes]:
        """All that lies in the folder, whatever it is called."""
        folder = folder_of(self.library)
        return sorted(one.read_bytes() for one in folder.iterdir()) if folder.exists() else []


@pytest.fixture
def site(tmp_path: Path) -> Site:
    one = Site(tmp_path)
    one.put("a.pdf", "b.pdf", "c.pdf")
    return one


def holding(word: bytes, folder: Path) -> set[str]:
    return {p.name for p in folder.rglob("*") if p.is_file() and word in p.read_bytes()}


def test_equal_files_lie_there_once_and_go_with_the_last(site: Site, tmp_path: Path) -> None:
    assert site.keep(a=ROPE, b=ROPE, c=SAIL) == 3
    assert site.contents == [SAIL, ROPE]
    assert [site.of(f"{name}.pdf") for name in "abc"] == [ROPE, ROPE, SAIL]
    site.remove("a.pdf")
    assert (site.of("a.pdf"), site.of("b.pdf")) == (None, ROPE)
    assert holding(b"quaxolith", tmp_path)
    site.remove("b.pdf")
    assert site.contents == [SAIL]
    assert holding(b"quaxolith", tmp_path) == set()
    assert holding(sha256(ROPE).digest(), tmp_path) == set(), "nor what it was"


def test_who_has_an_equal_file_has_nothing_of_another_document(site: Site) -> None:
    site.keep(a=ROPE)
    assert site.of("b.pdf") is None


def test_nobody_else_may_look_into_the_folder(site: Site) -> None:
    old = os.umask(0)
    try:
        site.keep(a=ROPE)
    finally:
        os.umask(old)
    folder = folder_of(site.library)
    assert folder.stat().st_mode & 0o777 == 0o700
    assert [one.stat().st_mode & 0o777 for one in folder.iterdir()] == [0o600]


def test_a_document_that_changes_has_its_new_file_alone(site: Site) -> None:
    site.keep(a=ROPE, b=SAIL)
    site.put("a.pdf")
    assert site.of("a.pdf") == ROPE, "it came again as it was"
    site.put("a.pdf", text="Wire rope.")
    assert (site.of("a.pdf"), site.contents) == (None, [SAIL])
    site.keep(a=b"%PDF wire")
    site.keep(b=b"%PDF new sail")
    assert site.contents == [b"%PDF new sail", b"%PDF wire"], "of text that is the same, too"


def test_a_file_whose_document_is_not_here_is_dropped(site: Site) -> None:
    assert site.keep_all([("nowhere.pdf", ROPE), ("a.pdf", SAIL)]) == 1
    assert site.contents == [SAIL]


def test_a_mail_goes_with_the_first_that_was_in_it(site: Site) -> None:
    site.put("in/m.eml", "in/m.eml/list.pdf", "in/m.em", "in/m.eml.txt")
    mails = [(one, ROPE + one.encode()) for one in ("in/m.eml", "in/m.em", "in/m.eml.txt")]
    site.keep_all(mails)
    site.remove("in/m.eml/list.pdf")
    assert site.of("in/m.eml") is None, "the list is in it"
    assert [site.of(one) for one, _ in mails[1:]] == [content for _, content in mails[1:]]


def test_what_a_document_was_in_is_named_by_its_id() -> None:
    assert containing("a/m.eml/deep/b.pdf") == ["a", "a/m.eml", "a/m.eml/deep"]
    draw = Random(7)
    for _ in range(500):
        name = "".join(draw.choice("ab/.é") for _ in range(draw.randrange(12)))
        found = containing(name)
        assert len(found) == name.count("/")
        assert all(name.startswith(f"{one}/") for one in found)
        assert name not in found


def test_what_lies_there_by_another_name_is_left_alone(site: Site) -> None:
    site.keep(a=ROPE)
    for name in ("README", "A" * 64, ".new-sent.0"):
        (folder_of(site.library) / name).write_text("mine")
    site.remove("a.pdf")
    assert site.contents == [b"mine"] * 3
    clear(site.library, "sent")
    assert site.contents == [b"mine"] * 2


def test_the_folder_may_lie_on_another_disk(site: Site, tmp_path: Path) -> None:
    """One that is not mounted costs no document what it has, and is no reason to make another."""
    disk, unmounted = tmp_path / "disk", tmp_path / "unmounted"
    disk.mkdir()
    folder_of(site.library).symlink_to(disk)
    site.keep(a=ROPE, b=SAIL)
    assert site.contents == [SAIL, ROPE]
    disk.rename(unmounted)
    jobs.collect(site.library)
    with pytest.raises(OSError):
        site.keep(c=ROPE)
    unmounted.rename(disk)
    jobs.collect(site.library)
    assert (site.of("a.pdf"), site.of("b.pdf")) == (ROPE, SAIL)


def test_a_file_that_is_given_up_leaves_nothing(site: Site) -> None:
    arriving = Arriving(site.library, "test")
    arriving.write(ROPE)
    arriving.drop()
    assert site.contents == []


@pytest.mark.slow
def test_whatever_comes_and_goes_the_folder_has_what_is_referred_to(tmp_path: Path) -> None:
    """Drawn changes beside a model: which document has which bytes."""
    for seed in range(4):
        draw, root = Random(seed), tmp_path / str(seed)
        root.mkdir()
        site, model = Site(root), dict[str, bytes | None]()
        site.put("z.pdf")
        for step in range(40):
            name = f"{draw.choice('abcd')}.pdf"
            match draw.randrange(4):
                case 0:
                    site.put(name, text=f"Text {step}.")
                    model[name] = None
                case 1:
                    site.remove(name)
                    model.pop(name, None)
                case _:
                    content = draw.choice([ROPE, SAIL, b"other"])
                    site.keep_all([(name, content)])
                    if name in model:
                        model[name] = content
            assert {one: site.of(one) for one in model} == model, (seed, step)
            assert site.contents == sorted({one for one in model.values() if one}), (seed, step)


# ---- a kill in the midst of it ------------------------------------------------------

CHILD = """
import sys
from pathlib import Path
from tests.daemon.library.catalogue.test_originals import ROPE, SAIL, Site
site = Site(Path(sys.argv[1]))
if sys.argv[2] == "keep":
    site.keep(a=ROPE, b=ROPE, c=SAIL)
else:
    site.remove("a.pdf", "b.pdf")
"""


@pytest.mark.parametrize(
    ("what", "point"),
    [
        ("keep", "originals:named"),
        ("keep", "originals:kept"),
        ("keep", "originals:collect"),
        ("remove", "files:write"),
        ("remove", "files:written"),
        ("remove", "originals:collect"),
    ],
)
@pytest.mark.slow
def test_a_kill_leaves_no_document_without_its_bytes(
    site: Site, tmp_path: Path, what: str, point: str
) -> None:
    if what == "remove":
        site.keep(a=ROPE, b=ROPE, c=SAIL)
    ran = subprocess.run(
        [sys.executable, "-c", CHILD, str(tmp_path), what],
        env={**os.environ, faultpoints.VARIABLE: f"{point}=kill"},
        check=False,
    )
    assert ran.returncode == -signal.SIGKILL
    found = {one: site.of(one) for one in ("a.pdf", "b.pdf", "c.pdf")}
    assert all(content is not None for content in found.values()) or not any(
        found[one] for one in ("a.pdf", "b.pdf")
    ), "all of them or none"
    jobs.collect(site.library)
    assert site.contents == sorted({one for one in found.values() if one})
    if what == "keep":
        assert site.keep(a=ROPE, b=ROPE, c=SAIL) == 3
        assert site.contents == [SAIL, ROPE]
    else:
        site.remove("a.pdf", "b.pdf")
        assert site.contents == [SAIL]
        assert holding(b"quaxolith", tmp_path) == set()


def test_bytes_are_on_the_disk_before_a_document_refers_to_them(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As another connection sees it at the moment at which the folder's names are synced."""
    seen: list[tuple[Path, bool, bytes | None]] = []
    there = folder_of(site.library) / sha256(ROPE).hexdigest()

    def synced(folder: Path) -> None:
        seen.append((folder, there.exists(), site.of("a.pdf")))

    monkeypatch.setattr("daemon.library.catalogue.originals.fsync", synced)
    site.keep(a=ROPE)
    assert seen == [(there.parent, True, None)]
    assert site.of("a.pdf") == ROPE


def test_a_full_disk_leaves_the_documents_as_they_were(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.keep(a=SAIL)
    failing = faultpoints.passing_with("originals:named=enospc")
    monkeypatch.setattr("daemon.library.catalogue.originals.passing", failing)
    with pytest.raises(Exception, match="No space left"):
        site.keep(a=ROPE)
    assert site.of("a.pdf") == SAIL
    jobs.collect(site.library)
    assert site.contents == [SAIL]
