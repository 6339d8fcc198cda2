"""What a look finds in a watched folder, and what follows from that and from looks before."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from daemon.library.file_notes import UNFINISHED, FileNote, Stamp
from daemon.library.files import Found, read_file
from daemon.library.folders import Memory, Retry, Tree, changes, held_back, look, retry_of
from daemon.library.readers.documents import Document

NOW = 1_000_000_000_000
OLD = NOW - 60_000_000_000
A = Stamp(10, OLD, 1)
B = Stamp(20, OLD, 2)


def noted(**stamps: Stamp) -> dict[str, FileNote]:
    return {name: FileNote(stamp, b"digest") for name, stamp in stamps.items()}


def many(count: int) -> dict[str, Stamp]:
    return {f"{number:03}.txt": Stamp(1, OLD, number) for number in range(count)}


# ---- looking ------------------------------------------------------------------


def test_files_are_found_by_their_path_below_the_folder(tmp_path: Path) -> None:
    for name in ("a.txt", "in/b.MD", "in/deep/c.jsonl.gz", ".hidden.txt", ".git/d.txt", "e.exe"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("text")
    tree = look(tmp_path)
    assert sorted(tree.files) == ["a.txt", "in/b.MD", "in/deep/c.jsonl.gz"]
    status = (tmp_path / "a.txt").stat()
    assert tree.files["a.txt"] == Stamp(4, status.st_mtime_ns, status.st_ino)
    assert (tree.other_kinds, tree.problems, tree.missing) == (1, (), "")


def test_no_link_is_followed_and_no_pipe_is_opened(tmp_path: Path) -> None:
    outside, folder = tmp_path / "outside", tmp_path / "folder"
    outside.mkdir()
    folder.mkdir()
    (outside / "secret.txt").write_text("secret")
    (folder / "to_file.txt").symlink_to(outside / "secret.txt")
    (folder / "to_folder").symlink_to(outside)
    (folder / "nowhere.txt").symlink_to(folder / "none.txt")
    os.mkfifo(folder / "pipe.txt")
    tree = look(folder)
    assert dict(tree.files) == {}
    assert [one.name for one in tree.problems] == ["pipe.txt"], "a link is nobody's mistake"
    assert tree.links == 3


def test_a_file_is_opened_step_by_step_and_never_through_a_link(tmp_path: Path) -> None:
    """Whoever reads it opens what was found there, by whatever library."""
    outside, folder = tmp_path / "outside", tmp_path / "folder"
    for root in (outside, folder / "in"):
        root.mkdir(parents=True)
        (root / "a.txt").write_text(f"Of {root.name}.")
    (folder / "link").symlink_to(outside)
    (folder / "a.txt").symlink_to(outside / "a.txt")

    def read(name: str) -> list[str]:
        items = read_file(Found(folder / name, name, below=folder))
        return [one.text if isinstance(one, Document) else str(one) for one in items]

    assert read("in/a.txt") == ["Of in."]
    assert read("link/a.txt") == [f"{folder}/link/a.txt: Not a directory"]
    assert read("a.txt") == [f"{folder}/a.txt: Too many levels of symbolic links"]
    for name in ("link/a.txt", "a.txt"):
        (through,) = read_file(Found(folder / name, name))
        assert isinstance(through, Document), "a person reads with rights of their own"


def test_a_watched_folder_may_itself_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "a.txt").write_text("text")
    (tmp_path / "here").symlink_to(tmp_path / "there")
    assert list(look(tmp_path / "here").files) == ["a.txt"]


def test_a_folder_that_is_not_there_says_so(tmp_path: Path) -> None:
    assert look(tmp_path / "none").missing == "not there (any more)"
    (tmp_path / "file").write_text("text")
    assert look(tmp_path / "file").missing == "Not a directory"


def test_a_folder_that_goes_under_the_look_hides_what_was_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "in" / "deep").mkdir(parents=True)
    (tmp_path / "a.txt").write_text("text")
    opened = os.scandir

    def refusing(path: Path) -> object:
        if Path(path).name == "deep":
            raise PermissionError(13, "Permission denied")
        return opened(path)

    monkeypatch.setattr("os.scandir", refusing)
    tree = look(tmp_path)
    assert tree.unseen == ("in/deep/",)
    assert tree.problems[0].cause.startswith("permission denied: let the daemon's user")
    notes = noted(**{"in/deep/b.txt": A, "in/c.txt": A})
    assert changes(notes, tree, Memory(), NOW).gone == ("in/c.txt",), "the other is not known"


# ---- what is read, and what waits ---------------------------------------------


def test_what_appears_or_changes_is_read_and_nothing_else() -> None:
    tree = Tree({"new": A, "same": A, "grown": Stamp(11, OLD, 1), "swapped": Stamp(10, OLD, 3),
                 "touched": Stamp(10, OLD + 1, 1)})  # fmt: skip
    found = changes(noted(same=A, grown=A, swapped=A, touched=A), tree, Memory(), NOW)
    assert found.read == ("grown", "new", "swapped", "touched")
    assert (found.waiting, found.gone) == ({}, ())


def test_what_changed_a_moment_ago_waits() -> None:
    fresh = Stamp(10, NOW - 1_000_000_000, 1)
    found = changes({}, Tree({"a": fresh}), Memory(), NOW)
    assert (found.read, found.waiting) == ((), {"a": fresh})
    again = changes({}, Tree({"a": fresh}), Memory(waiting={"a": fresh}), NOW + 1_000_000_000)
    assert again.read == ("a",), "two seconds are over"


def test_what_grew_since_it_last_waited_waits_again() -> None:
    """A copy that keeps an old time of change, as cp -p does."""
    memory = Memory(waiting={"a": Stamp(5, OLD, 1)})
    found = changes({}, Tree({"a": A}), memory, NOW)
    assert (found.read, found.waiting) == ((), {"a": A})
    assert changes({}, Tree({"a": A}), Memory(waiting=found.waiting), NOW).read == ("a",)


def test_a_time_in_the_future_needs_two_looks_and_no_more() -> None:
    ahead = Stamp(10, NOW + 10**12, 1)
    assert changes({}, Tree({"a": ahead}), Memory(), NOW).read == ()
    assert changes({}, Tree({"a": ahead}), Memory(waiting={"a": ahead}), NOW).read == ("a",)


# ---- what is gone ---------------------------------------------------------------


def test_what_vanishes_is_gone_at_once() -> None:
    tree = Tree({"a": A})
    assert changes(noted(a=A, b=B), tree, Memory(), NOW).gone == ("b",)
    assert held_back(("b",), 2, tree, Memory()) == ("", Memory())


def test_of_a_folder_that_is_missing_nothing_is_gone() -> None:
    found = changes(noted(a=A, b=B), Tree(missing="not there"), Memory(), NOW)
    assert (found.read, found.gone) == ((), ())


def test_a_folder_in_which_nothing_is_left_removes_nothing_ever() -> None:
    memory = Memory()
    for _ in range(9):
        why, memory = held_back(("a",), 1, Tree(), memory)
        assert "a disk may not be mounted" in why


def test_more_than_half_are_held_until_three_more_looks_agree() -> None:
    left, gone = Tree(many(4)), tuple(sorted(many(20)))[4:]
    whys, memory = [], Memory()
    for _ in range(4):
        why, memory = held_back(gone, 20, left, memory)
        whys.append(why)
    assert [why.partition("until ")[2].partition(",")[0] for why in whys] == [
        "3 more looks find the same",
        "2 more looks find the same",
        "1 more looks find the same",
        "",
    ]


def test_looks_that_disagree_begin_anew() -> None:
    left, gone = Tree(many(4)), tuple(sorted(many(20)))[4:]
    memory = Memory()
    for fewer in (0, 0, 0, 1, 1, 1):
        why, memory = held_back(gone[fewer:], 20, left, memory)
        assert why
    assert memory.agreed == 2
    assert held_back((), 20, Tree(many(20)), memory) == ("", Memory()), "it was mounted again"


@pytest.mark.parametrize(("gone", "held"), [(9, False), (10, False), (11, True)])
def test_half_of_the_files_or_nine_go_at_once(gone: int, held: bool) -> None:
    names = tuple(sorted(many(gone)))
    assert bool(held_back(names, 20, Tree(many(1)), Memory())[0]) is held
    assert not held_back(names[:9], 10, Tree(many(1)), Memory())[0]


# ---- what may be read another time ------------------------------------------------


def test_a_file_to_be_tried_again_waits_for_its_time_or_its_change() -> None:
    notes = noted(a=UNFINISHED)
    memory = Memory(retries={"a": Retry(A, 1, NOW + 1)})
    assert changes(notes, Tree({"a": A}), memory, NOW).read == ()
    assert changes(notes, Tree({"a": A}), memory, NOW + 1).read == ("a",)
    assert changes(notes, Tree({"a": B}), memory, NOW).read == ("a",), "it is another file now"
    assert changes(notes, Tree({"a": A}), Memory(), NOW).read == ("a",), "after a restart"


def test_pauses_between_tries_grow_and_come_to_an_end() -> None:
    retry, pauses = retry_of(None, A, NOW), list[int]()
    while retry is not None:
        pauses.append(retry.not_before_ns - NOW)
        assert retry.tries == len(pauses)
        retry = retry_of(retry, A, NOW)
    assert len(pauses) == 4
    assert pauses == sorted(set(pauses))
    assert retry_of(Retry(A, 4, NOW), B, NOW) == retry_of(None, B, NOW), "it has changed"


def test_a_file_whose_pages_wait_is_read_again_when_an_engine_is_here() -> None:
    notes = {"a": FileNote(A, b"digest", "pages wait", waits=True)} | noted(b=B)
    tree = Tree({"a": A, "b": B})
    assert changes(notes, tree, Memory(), NOW).read == ()
    assert changes(notes, tree, Memory(), NOW, ocr=True).read == ("a",)
