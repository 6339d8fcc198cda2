"""What a site finds for its peers: of which passages, under what noise, and at what cost."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from crypto.arrays import Float32, UInt8
from crypto.disclosure import BucketTable, Projections
from daemon.jobs import sharing
from daemon.jobs.sharing import Shelf
from daemon.library.dense.folder import save_index
from daemon.library.dense.index import build_index
from daemon.library.passages import Piece
from daemon.library.readers.documents import Document
from daemon.library.store import Library

DIGEST = b"\x07" * 32
D = 8
BITS = 12


def units(n: int, d: int = D, seed: int = 0) -> Float32:
    values = np.random.default_rng(seed).normal(size=(n, d))
    result: Float32 = (values / np.linalg.norm(values, axis=1, keepdims=True)).astype("<f4")
    return result


class Whole:
    """A splitter that leaves documents whole."""

    name = "whole"

    def __call__(self, document: Document, /) -> list[Piece]:
        return [Piece(document.text, 0, len(document.text))]


@pytest.fixture
def shelf(tmp_path: Path) -> Shelf:
    """40 passages, 10 of them kept for tests; ids begin with open/ or closed/ in turn."""
    with Library.open(tmp_path / "library.sqlite3") as library:
        library.put_documents(
            (
                Document(
                    f"{'open' if n % 2 else 'closed'}/{n}",
                    "",
                    f"passage {n}",
                    "test" if n % 4 == 3 else "train",
                )
                for n in range(40)
            ),
            splitter=Whole(),
        )
        labels = np.array([passage.rowid for passage in library.passages()], dtype=np.int64)
        content = library.content_digest()
    path = save_index(build_index(labels, units(40)), tmp_path / "index", DIGEST, content)
    return Shelf(tmp_path / "library.sqlite3", path, DIGEST, (), 0.05, BITS, b"s" * 32)


def rows_in(found: Float32, table: Float32) -> list[int]:
    """Which row of the table each is; fails for one that is none."""
    same = np.abs(found[:, None] - table[None]).max(axis=2) < 1e-6
    assert (same.sum(axis=1) == 1).all()
    return [int(row) for row in same.argmax(axis=1)]


TRAIN = [n for n in range(40) if n % 4 != 3]


def test_exact_answers_are_the_nearest_that_may_be_learned_from(shelf: Shelf) -> None:
    queries, table = units(50, seed=5), units(40)
    for query, found in zip(queries, sharing.near(shelf, "b", queries, 4, exact=True), strict=True):
        best = sorted(TRAIN, key=lambda n: -float(table[n] @ query))[:4]
        assert rows_in(found, table) == best


def test_only_collections_that_may_be_are_answered_from(shelf: Shelf) -> None:
    some = replace(shelf, collections=("open/1", "open/2"))
    (found,) = sharing.near(some, "b", units(1, seed=5), 40, exact=True)
    allowed = [n for n in TRAIN if n % 2 and str(n).startswith(("1", "2"))]
    assert sorted(rows_in(found, units(40))) == allowed
    none = replace(shelf, collections=("Open/",))
    assert [len(rows) for rows in sharing.near(none, "b", units(2), 5, exact=True)] == [0, 0]
    assert sharing.in_buckets(none, "b", np.zeros((2, 1), np.uint8), 8, 5)[1].shape[0] == 0


def test_a_passage_has_one_noise_in_a_version_whoever_asks_however_often(shelf: Shelf) -> None:
    def table_of(shelf: Shelf) -> Float32:
        sharing._noised.cache_clear()  # another process
        return sharing._noised(shelf)

    first, plain = table_of(shelf), units(40)[TRAIN]
    np.testing.assert_array_equal(table_of(shelf), first)
    np.testing.assert_allclose(np.linalg.norm(first, axis=1), 1.0, atol=1e-6)
    # 1 / sqrt(1 + d sigma^2)
    assert (first * plain).sum(axis=1).mean() == pytest.approx(0.99, abs=0.01)
    assert (np.abs(first - plain).max(axis=1) > 1e-3).all()
    fewer = table_of(replace(shelf, collections=("open/",)))
    np.testing.assert_array_equal(fewer, first[[TRAIN.index(n) for n in TRAIN if n % 2]])
    other = table_of(replace(shelf, secret=b"t" * 32))
    assert (np.abs(first - other).max(axis=1) > 1e-3).all()


def test_two_deviations_of_noise_do_not_cancel(shelf: Shelf) -> None:
    """Were the second a scaled draw of the first, the passage were a sum of the two releases."""
    released = []
    for sigma in (0.05, 0.2):
        sharing._noised.cache_clear()
        released.append(sharing._noised(replace(shelf, noise=sigma)))
    for passage, *both in zip(units(40)[TRAIN], *released, strict=True):
        weights, *_ = np.linalg.lstsq(np.stack(both, axis=1), passage, rcond=None)
        assert np.linalg.norm(np.stack(both, axis=1) @ weights - passage) > 1e-3


def test_noise_belongs_to_what_is_embedded_and_not_to_its_label(tmp_path: Path) -> None:
    """A library that was made anew counts from 1: its first passage may be another one."""
    tables = []
    for number, texts in enumerate((("one", "two"), ("two", "one"))):
        with Library.open(path := tmp_path / f"{number}.sqlite3") as library:
            library.put_documents((Document(t, "", t, "train") for t in texts), splitter=Whole())
            labels = np.array(list(library.labels("train")), dtype=np.int64)
            same = np.tile(units(1), (2, 1))
            root, content = tmp_path / f"index{number}", library.content_digest()
            index = save_index(build_index(labels, same), root, DIGEST, content)
        sharing._noised.cache_clear()
        tables.append(sharing._noised(Shelf(path, index, DIGEST, (), 0.05, BITS, b"s" * 32)))
    np.testing.assert_array_equal(tables[0], tables[1][::-1])
    assert np.abs(tables[0] - tables[1]).max() > 1e-3


def test_noisy_and_bucketed_answers_come_from_the_noised_table(shelf: Shelf) -> None:
    table, queries = sharing._noised(shelf), units(30, seed=9)
    answers = sharing.near(shelf, "b", queries, 4, exact=False)
    for query, found in zip(queries, answers, strict=True):
        assert sorted(rows_in(found, table)) == sorted(np.argsort(-(table @ query))[:4].tolist())
    projections = Projections(DIGEST, D, 6)
    of_rows = projections.buckets(table)
    for name, found in zip(
        projections.buckets(queries),
        sharing.in_buckets(shelf, "b", projections.buckets(queries), 6, 3),
        strict=True,
    ):
        distances = np.bitwise_count(of_rows ^ name).sum(axis=1)
        assert all(distances[row] == distances.min() for row in rows_in(found, table))


@pytest.fixture
def projected(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, int]]]:
    """How many rows were projected on how many directions, each time."""
    done: list[tuple[int, int]] = []

    class Counted(Projections):
        def buckets(self, vectors: Float32) -> UInt8:
            done.append((len(vectors), self.bits))
            return super().buckets(vectors)

    sharing._buckets.cache_clear()
    monkeypatch.setattr(sharing, "Projections", Counted)
    yield done
    sharing._buckets.cache_clear()


def test_for_a_peer_that_asks_for_other_bits_the_table_is_projected_once(
    shelf: Shelf, projected: list[tuple[int, int]]
) -> None:
    for _ in range(3):
        for bits in range(1, BITS + 1):
            names = Projections(DIGEST, D, bits).buckets(units(2, seed=bits))
            sharing.in_buckets(shelf, "b", names, bits, 3)
    assert projected == [(len(TRAIN), BITS)]


@pytest.mark.parametrize("bits", range(1, BITS + 1))
def test_fewer_bits_are_answered_as_from_a_table_of_their_own(shelf: Shelf, bits: int) -> None:
    table, projections = sharing._noised(shelf), Projections(DIGEST, D, bits)
    own = BucketTable(projections.buckets(table))
    names = projections.buckets(units(20, seed=bits))
    answers = sharing.in_buckets(shelf, "b", names, bits, len(TRAIN))
    for name, found in zip(names, answers, strict=True):
        np.testing.assert_array_equal(found, table[own.rows(name)])
