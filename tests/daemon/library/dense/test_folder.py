"""An index on the disk: whole or not at all, its base shared, and nothing believed unseen."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from daemon.library.dense.engines import engine_of
from daemon.library.dense.folder import (
    IndexDamaged,
    index_path,
    load_index,
    newest_index,
    remove_other_indexes,
    save_index,
)
from daemon.library.dense.index import UpdatableIndex, Wanted, build_index, update_index
from daemon.library.dense.options import IndexOptions
from daemon.process import faultpoints
from tests.daemon.library import changed_index
from tests.daemon.library.changed_index import AFTER, BEFORE, COUNT, MORE, save_both, wanted
from tests.daemon.library.dense.test_index import contents_of, index_of, labelled, unit_vectors

MODEL, CONTENT = b"m" * 32, b"c" * 32
FILES = ["index.hnsw", "vectors.npy", "passages.npy", "delta.npy", "tombstones.npy"]
BASE = FILES[:3]


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return save_index(index_of(50), tmp_path, MODEL, CONTENT)


def inodes(folder: Path) -> list[int]:
    return [(folder / name).stat().st_ino for name in BASE]


def changed_is_whole(index: UpdatableIndex) -> None:
    """It holds what `save_both` put into the second, and finds it."""
    labels = np.arange(10, COUNT + MORE)
    assert index.labels().tolist() == labels.tolist()
    asked = changed_index.vectors_of(labels[::40])
    assert index.search(asked, 1)[0][:, 0].tolist() == labels[::40].tolist()
    gone = changed_index.vectors_of(np.arange(10))
    assert not np.isin(index.search(gone, 50)[0], np.arange(10)).any()


def test_one_thread_builds_the_same_file_each_time(tmp_path: Path, options: IndexOptions) -> None:
    folders = [
        save_index(index_of(300, options), tmp_path / name, MODEL, CONTENT) for name in ("a", "b")
    ]
    assert len({(folder / engine_of(options).file).read_bytes() for folder in folders}) == 1


def test_saved_and_loaded_it_answers_the_same(tmp_path: Path, options: IndexOptions) -> None:
    saved = save_index(index_of(50, options), tmp_path, MODEL, CONTENT, options)
    loaded, queries = load_index(saved, MODEL, CONTENT, options=options), unit_vectors(5, seed=9)
    assert (loaded.search(queries, 7)[0] == index_of(50, options).search(queries, 7)[0]).all()
    assert (loaded.count, loaded.dimension) == (50, 24)
    assert (loaded.contents() == contents_of(labelled(50))).all()
    assert loaded.base.accuracy == index_of(50, options).base.accuracy
    assert loaded.base.engine == options.engine
    assert saved.name == f"{MODEL.hex()}-{CONTENT.hex()[:16]}"
    assert [path.name for path in saved.parent.iterdir()] == [saved.name]
    assert sorted(p.name for p in saved.iterdir()) == sorted(
        [engine_of(options).file, *FILES[1:], "index.json"]
    )


def test_an_empty_library_makes_an_index_that_finds_nothing(tmp_path: Path) -> None:
    empty = build_index(np.zeros(0, np.int64), np.zeros((0, 24), np.float32))
    path = save_index(empty, tmp_path, MODEL, CONTENT)
    labels, cosines = load_index(path, MODEL, CONTENT).search(unit_vectors(2), 10)
    assert labels.shape == cosines.shape == (2, 0)
    none = build_index(np.zeros(0, np.int64), np.zeros((0, 0), np.float32))
    path = save_index(none, tmp_path, MODEL, AFTER)
    assert load_index(path, MODEL, AFTER).search(unit_vectors(2), 10)[0].shape == (2, 0)


# ---- a base that several share ------------------------------------------------


def test_a_change_links_to_the_base_and_needs_the_old_folder_no_more(tmp_path: Path) -> None:
    first, second = save_both(tmp_path)
    assert inodes(first) == inodes(second)
    size = sum((second / name).stat().st_size for name in (*FILES[3:], "index.json"))
    assert size < 10_000, "what is written is the change"
    remove_other_indexes(tmp_path, [second])
    assert [path.name for path in tmp_path.iterdir()] == [second.name]
    changed_is_whole(load_index(second, MODEL, AFTER))


def test_a_change_of_a_loaded_change_keeps_the_base_and_both_changes(tmp_path: Path) -> None:
    _, second = save_both(tmp_path)
    remove_other_indexes(tmp_path, [second])
    again = update_index(newest_index(tmp_path, MODEL), wanted(15, COUNT + MORE))
    third = save_index(again, tmp_path, MODEL, CONTENT)
    assert inodes(third) == inodes(second)
    loaded = load_index(third, MODEL, CONTENT)
    assert loaded.labels().tolist() == list(range(15, COUNT + MORE))
    assert (len(loaded.delta), loaded.gone.tolist()) == (MORE, list(range(15)))


def test_the_newest_sound_index_of_a_version_is_gone_on_from(tmp_path: Path) -> None:
    first, second = save_both(tmp_path)
    for folder, seconds in ((first, 10), (second, 20)):
        os.utime(folder / "index.json", (seconds, seconds))
    save_index(index_of(9), tmp_path, b"x" * 32, AFTER)
    newest = newest_index(tmp_path, MODEL)
    assert newest is not None
    assert newest.count == COUNT + MORE - 10
    (second / "delta.npy").write_bytes(b"rubbish")
    newest = newest_index(tmp_path, MODEL)
    assert newest is not None
    assert newest.count == COUNT
    (first / "index.hnsw").write_bytes(b"rubbish")  # of both: they share it
    assert newest_index(tmp_path, MODEL) is None
    assert newest_index(tmp_path / "nowhere", MODEL) is None


@pytest.mark.slow
def test_a_damaged_base_that_is_shared_is_written_anew_for_the_next(tmp_path: Path) -> None:
    first, second = save_both(tmp_path)
    damaged = (second / "index.hnsw").stat().st_ino
    (second / "index.hnsw").write_bytes(b"rubbish")
    changed = update_index(newest_index(tmp_path, MODEL), wanted(10, COUNT + MORE))
    assert save_index(changed, tmp_path, MODEL, AFTER) == second
    assert (second / "index.hnsw").stat().st_ino != damaged
    changed_is_whole(load_index(second, MODEL, AFTER))
    with pytest.raises(IndexDamaged):
        load_index(first, MODEL, BEFORE)


@pytest.mark.slow
def test_vectors_of_what_was_removed_are_in_no_file(tmp_path: Path) -> None:
    """As a tombstone they would be; so the base is built anew, and the old folder goes."""
    first, _ = save_both(tmp_path)
    before = load_index(first, MODEL, BEFORE)
    asked = [row.tobytes() for row in before.vectors(np.arange(3))]
    assert all((first / "vectors.npy").read_bytes().count(one) == 1 for one in asked)
    # The graph divides by the length once more, so a last bit may differ: not of all numbers.
    numbers = [row[at : at + 4] for row in asked for at in range(0, len(row), 4)]
    graph = (first / "index.hnsw").read_bytes()
    assert (told := [one for one in numbers if one in graph])
    less = wanted(3, COUNT)
    removed = Wanted(less.labels, less.contents, less.embed, removal="ab" * 16)
    kept = save_index(update_index(before, removed), tmp_path, MODEL, CONTENT)
    remove_other_indexes(tmp_path, [kept])
    everything = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    assert len(everything) == len(FILES) + 1
    assert not any(one in file for one in (*asked, *told) for file in everything)
    assert load_index(kept, MODEL, CONTENT).base.removal == "ab" * 16


# ---- crashes ----------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("point", "second_is_there"),
    [("index:write", False), ("index:rename", False), ("index:renamed", True)],
)
def test_a_change_that_is_killed_is_there_whole_or_not_at_all(
    tmp_path: Path, point: str, second_is_there: bool
) -> None:
    crashed = subprocess.run(
        [sys.executable, "-m", "tests.daemon.library.changed_index", tmp_path],
        env={**os.environ, faultpoints.VARIABLE: f"{point}=kill@2"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert crashed.returncode == -signal.SIGKILL, crashed.stderr
    assert crashed.stdout.split() == ["first"]
    assert load_index(index_path(tmp_path, MODEL, BEFORE), MODEL, BEFORE).count == COUNT
    second = index_path(tmp_path, MODEL, AFTER)
    assert second.is_dir() == second_is_there
    newest = newest_index(tmp_path, MODEL)
    saved = save_index(update_index(newest, wanted(10, COUNT + MORE)), tmp_path, MODEL, AFTER)
    assert saved == second
    remove_other_indexes(tmp_path, [second])
    assert [path.name for path in tmp_path.iterdir()] == [second.name]
    changed_is_whole(load_index(second, MODEL, AFTER))


def test_a_disk_that_is_full_leaves_the_old_index(tmp_path: Path) -> None:
    failing = faultpoints.passing_with("index:rename=enospc")
    before = update_index(None, wanted(0, COUNT))
    first = save_index(before, tmp_path, MODEL, BEFORE)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("daemon.library.dense.folder.passing", failing)
        changed = update_index(newest_index(tmp_path, MODEL), wanted(0, COUNT + 1))
        with pytest.raises(OSError, match="No space"):
            save_index(changed, tmp_path, MODEL, AFTER)
    assert load_index(first, MODEL, BEFORE).count == COUNT
    second = save_index(changed, tmp_path, MODEL, AFTER)
    assert load_index(second, MODEL, AFTER).count == COUNT + 1


# ---- damage -----------------------------------------------------------------


def altered(path: Path, **changes: object) -> None:
    description = path / "index.json"
    description.write_text(json.dumps({**json.loads(description.read_text()), **changes}))


def test_a_missing_index_is_said_to_be_missing(tmp_path: Path) -> None:
    with pytest.raises(IndexDamaged, match=r"no index at .*: build it"):
        load_index(index_path(tmp_path, MODEL, CONTENT), MODEL, CONTENT)


@pytest.mark.parametrize("name", FILES)
def test_a_flipped_bit_is_found_before_the_loader_sees_it(saved: Path, name: str) -> None:
    raw = bytearray((saved / name).read_bytes())
    raw[40] ^= 1
    (saved / name).write_bytes(raw)
    with pytest.raises(IndexDamaged, match=f"the SHA-256 differs of {name}"):
        load_index(saved, MODEL, CONTENT)
    assert newest_index(saved.parent, MODEL) is None


def test_a_truncated_graph_is_refused(saved: Path) -> None:
    graph = saved / "index.hnsw"
    graph.write_bytes(graph.read_bytes()[:-100])
    with pytest.raises(IndexDamaged, match="the SHA-256 differs"):
        load_index(saved, MODEL, CONTENT)


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_refused(saved: Path, name: str) -> None:
    (saved / name).unlink()
    with pytest.raises(IndexDamaged, match="can't be read"):
        load_index(saved, MODEL, CONTENT)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"count": 3}', b"\xff", b"[" * 5000])
def test_a_damaged_description_is_refused(saved: Path, content: bytes) -> None:
    (saved / "index.json").write_bytes(content)
    with pytest.raises(IndexDamaged, match="damaged description"):
        load_index(saved, MODEL, CONTENT)


@pytest.mark.parametrize(
    "changes",
    [
        *({"count": -1}, {"dimension": "24"}, {"sha256": 5}, {"count": True}, {"recall": 2.0}),
        *({"breadth": -1}, {"removal": None}, {"engine": "other"}, {"engine": []}),
        *({"files": {}}, {"files": []}, {"files": {"../index.hnsw": "00"}}, {"usual_recall": "1"}),
    ],
)
def test_impossible_descriptions_are_refused(saved: Path, changes: dict[str, object]) -> None:
    altered(saved, **changes)
    with pytest.raises(IndexDamaged, match="damaged description"):
        load_index(saved, MODEL, CONTENT)


@pytest.mark.parametrize(
    "changes",
    [{"count": 49}, {"dimension": 0}, {"dimension": 48}, {"breadth": 1}, {"removal": "aa"}],
)
def test_a_description_of_another_graph_is_refused(saved: Path, changes: dict[str, object]) -> None:
    altered(saved, **changes)
    with pytest.raises(IndexDamaged, match="the SHA-256 differs"):
        load_index(saved, MODEL, CONTENT)


def test_an_index_of_another_model_or_other_passages_is_refused(saved: Path) -> None:
    with pytest.raises(IndexDamaged, match="another model version"):
        load_index(saved, b"x" * 32, CONTENT)
    with pytest.raises(IndexDamaged, match="other passages"):
        load_index(saved, MODEL, b"x" * 32)


def test_a_damaged_index_is_replaced_and_a_sound_one_kept(saved: Path) -> None:
    graph = saved / "index.hnsw"
    sound, written = graph.read_bytes(), graph.stat().st_mtime_ns
    save_index(index_of(50), saved.parent, MODEL, CONTENT)
    assert graph.stat().st_mtime_ns == written
    graph.write_bytes(b"rubbish")
    save_index(index_of(50), saved.parent, MODEL, CONTENT)
    assert graph.read_bytes() == sound


def test_the_leftover_of_a_crash_is_no_index_and_no_obstacle(tmp_path: Path) -> None:
    final = index_path(tmp_path, MODEL, CONTENT)
    leftover = tmp_path / f".{final.name}"
    leftover.mkdir()
    (leftover / "index.hnsw").write_bytes(b"half")
    assert save_index(index_of(3), tmp_path, MODEL, CONTENT) == final
    assert not leftover.exists()


def test_a_link_where_an_index_is_made_goes_and_not_what_it_leads_to(tmp_path: Path) -> None:
    """It was passed over, and no index could be made until somebody took it away."""
    root, elsewhere = tmp_path / "index", tmp_path / "elsewhere"
    final = index_path(root, MODEL, CONTENT)
    root.mkdir()
    elsewhere.mkdir()
    (elsewhere / "letter").touch()
    for link in (final, root / f".{final.name}", root / "old"):
        link.symlink_to(elsewhere)
    assert save_index(index_of(3), root, MODEL, CONTENT) == final
    remove_other_indexes(root, [final])
    assert [(path, path.is_symlink()) for path in root.iterdir()] == [(final, False)]
    assert (elsewhere / "letter").exists()


def test_old_indexes_are_removed(tmp_path: Path) -> None:
    old = save_index(index_of(3), tmp_path, b"o" * 32, CONTENT)
    kept = save_index(index_of(3), tmp_path, MODEL, CONTENT)
    remove_other_indexes(tmp_path, [kept])
    assert kept.is_dir()
    assert not old.exists()
    remove_other_indexes(tmp_path / "nowhere", [])
