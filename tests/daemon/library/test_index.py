"""The dense index: it finds the nearest, and never trusts a file that isn't what it says."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from daemon.library.index import (
    DenseIndex,
    IndexDamaged,
    build_index,
    index_path,
    load_index,
    remove_other_indexes,
)

MODEL, CONTENT = b"m" * 32, b"c" * 32


def unit_vectors(count: int, dimension: int = 24, seed: int = 3) -> NDArray[np.float32]:
    vectors = np.random.default_rng(seed).normal(size=(count, dimension)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    return vectors


def labelled(count: int) -> NDArray[np.int64]:
    return np.arange(count, dtype=np.int64) * 3 + 7


def index_of(count: int) -> DenseIndex:
    return build_index(labelled(count), unit_vectors(count))


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return index_of(50).save(tmp_path, MODEL, CONTENT)


def test_it_finds_what_a_full_scan_finds() -> None:
    vectors, queries = unit_vectors(2000), unit_vectors(50, seed=4)
    labels, cosines = build_index(labelled(2000), vectors).search(queries, 10)
    exact = queries @ vectors.T
    best = np.argsort(-exact, axis=1)[:, :10]
    shared = [len(set(a) & set(b)) for a, b in zip(labels, labelled(2000)[best], strict=True)]
    assert np.mean(shared) >= 9.9
    assert np.allclose(cosines[:, 0], exact.max(axis=1), atol=1e-5)
    assert (np.diff(cosines, axis=1) <= 0).all()


def test_one_thread_builds_the_same_file_each_time(tmp_path: Path) -> None:
    folders = [index_of(300).save(tmp_path / name, MODEL, CONTENT) for name in ("a", "b")]
    assert len({(folder / "index.hnsw").read_bytes() for folder in folders}) == 1


def test_asked_for_more_than_there_is_it_gives_what_there_is() -> None:
    labels, cosines = index_of(3).search(unit_vectors(2), 4)
    assert sorted(labels[0]) == [7, 10, 13]
    assert cosines.shape == (2, 3)


def test_an_empty_library_makes_an_index_that_finds_nothing(tmp_path: Path) -> None:
    empty = build_index(np.zeros(0, np.int64), np.zeros((0, 24), np.float32))
    path = empty.save(tmp_path, MODEL, CONTENT)
    labels, cosines = load_index(path, MODEL, CONTENT).search(unit_vectors(2), 10)
    assert labels.shape == cosines.shape == (2, 0)


def test_a_thousand_equal_passages_can_be_searched() -> None:
    vectors = np.repeat(unit_vectors(1), 1000, axis=0)
    labels, cosines = build_index(labelled(1000), vectors).search(vectors[:1], 100)
    assert labels.shape[1] >= 10
    assert np.allclose(cosines, 1.0, atol=1e-5)


def test_saved_and_loaded_it_answers_the_same(saved: Path) -> None:
    loaded = load_index(saved, MODEL, CONTENT)
    queries = unit_vectors(5, seed=9)
    assert (loaded.search(queries, 7)[0] == index_of(50).search(queries, 7)[0]).all()
    assert (loaded.count, loaded.dimension) == (50, 24)
    assert saved.name == f"{MODEL.hex()}-{CONTENT.hex()[:16]}"
    assert [path.name for path in saved.parent.iterdir()] == [saved.name]


def test_chosen_vectors_come_as_they_were_put_in(saved: Path) -> None:
    order = np.random.default_rng(1).permutation(50)
    drawn = build_index(labelled(50)[order], unit_vectors(50)[order])
    chosen = labelled(50)[[31, 4, 4]]
    for index in (drawn, load_index(saved, MODEL, CONTENT)):
        assert np.allclose(index.vectors(chosen), unit_vectors(50)[[31, 4, 4]], atol=1e-6)
        assert index.vectors(chosen[:0]).shape == (0, 24)


def test_vectors_of_any_length_are_kept_as_unit_vectors() -> None:
    vectors = unit_vectors(3) * np.array([[2.0], [0.5], [0.0]], dtype=np.float32)
    kept = build_index(labelled(3), vectors).vectors(labelled(3))
    assert np.allclose(np.linalg.norm(kept, axis=1), [1.0, 1.0, 0.0], atol=1e-6)


def test_vectors_that_are_no_numbers_are_refused() -> None:
    vectors = unit_vectors(3)
    vectors[1, 1] = np.nan
    with pytest.raises(ValueError, match="finite"):
        build_index(labelled(3), vectors)


def test_a_question_of_another_dimension_is_refused() -> None:
    with pytest.raises(ValueError, match=r"expected queries \[q, 24\]"):
        index_of(3).search(unit_vectors(1, dimension=8), 1)


# ---- damage -----------------------------------------------------------------


def altered(path: Path, **changes: object) -> None:
    description = path / "index.json"
    description.write_text(json.dumps({**json.loads(description.read_text()), **changes}))


def test_a_missing_index_is_said_to_be_missing(tmp_path: Path) -> None:
    with pytest.raises(IndexDamaged, match=r"no index at .*: build it"):
        load_index(index_path(tmp_path, MODEL, CONTENT), MODEL, CONTENT)


@pytest.mark.parametrize("name", ["index.hnsw", "vectors.npy"])
def test_a_flipped_bit_is_found_before_the_loader_sees_it(saved: Path, name: str) -> None:
    raw = bytearray((saved / name).read_bytes())
    raw[40] ^= 1
    (saved / name).write_bytes(raw)
    with pytest.raises(IndexDamaged, match="SHA-256 differs"):
        load_index(saved, MODEL, CONTENT)


def test_a_truncated_graph_is_refused(saved: Path) -> None:
    graph = saved / "index.hnsw"
    graph.write_bytes(graph.read_bytes()[:-100])
    with pytest.raises(IndexDamaged, match="SHA-256 differs"):
        load_index(saved, MODEL, CONTENT)


@pytest.mark.parametrize("name", ["index.hnsw", "vectors.npy"])
def test_a_missing_file_is_refused(saved: Path, name: str) -> None:
    """An index of an older fedd has no array of its vectors: it is built again."""
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
    [{"count": -1}, {"dimension": "24"}, {"sha256": 5}, {"count": True}],
)
def test_impossible_descriptions_are_refused(saved: Path, changes: dict[str, object]) -> None:
    altered(saved, **changes)
    with pytest.raises(IndexDamaged, match="damaged description"):
        load_index(saved, MODEL, CONTENT)


@pytest.mark.parametrize(
    "changes", [{"count": 49}, {"dimension": 0}, {"dimension": 23}, {"dimension": 48}]
)
def test_a_description_of_another_graph_is_refused(saved: Path, changes: dict[str, object]) -> None:
    altered(saved, **changes)
    with pytest.raises(IndexDamaged, match="SHA-256 differs"):
        load_index(saved, MODEL, CONTENT)


def test_an_index_of_another_model_or_other_passages_is_refused(saved: Path) -> None:
    with pytest.raises(IndexDamaged, match="another model version"):
        load_index(saved, b"x" * 32, CONTENT)
    with pytest.raises(IndexDamaged, match="other passages"):
        load_index(saved, MODEL, b"x" * 32)


def test_a_damaged_index_is_replaced_and_a_sound_one_kept(saved: Path) -> None:
    graph = saved / "index.hnsw"
    sound, written = graph.read_bytes(), graph.stat().st_mtime_ns
    index_of(50).save(saved.parent, MODEL, CONTENT)
    assert graph.stat().st_mtime_ns == written
    graph.write_bytes(b"rubbish")
    index_of(50).save(saved.parent, MODEL, CONTENT)
    assert graph.read_bytes() == sound


def test_the_leftover_of_a_crash_is_no_index_and_no_obstacle(tmp_path: Path) -> None:
    final = index_path(tmp_path, MODEL, CONTENT)
    leftover = tmp_path / f".{final.name}"
    leftover.mkdir()
    (leftover / "index.hnsw").write_bytes(b"half")
    assert index_of(3).save(tmp_path, MODEL, CONTENT) == final
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
    assert index_of(3).save(root, MODEL, CONTENT) == final
    remove_other_indexes(root, [final])
    assert [(path, path.is_symlink()) for path in root.iterdir()] == [(final, False)]
    assert (elsewhere / "letter").exists()


def test_old_indexes_are_removed(tmp_path: Path) -> None:
    old = index_of(3).save(tmp_path, b"o" * 32, CONTENT)
    kept = index_of(3).save(tmp_path, MODEL, CONTENT)
    remove_other_indexes(tmp_path, [kept])
    assert kept.is_dir()
    assert not old.exists()
    remove_other_indexes(tmp_path / "nowhere", [])


def test_naming_its_errors_loads_no_native_index_code() -> None:
    program = (
        "import sys, daemon.jobs.answering; print('hnswlib' in sys.modules, 'torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[3],
    )
    assert done.stdout.split() == ["False", "False"]
