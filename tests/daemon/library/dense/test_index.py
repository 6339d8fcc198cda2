"""The dense index: what any engine must do, and how an index changes without being built anew.

`ENGINES` is what is tested here (`conftest.options`): another line there has all of these run
over it.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from daemon.library.dense import graph
from daemon.library.dense.engines import (
    LEAST_RECALL,
    USUAL_BREADTH,
    compare_with_all,
    engine_of,
    measured,
)
from daemon.library.dense.index import (
    DenseIndex,
    Embedded,
    UpdatableIndex,
    Wanted,
    build_index,
    update_index,
)
from daemon.library.dense.options import EMBEDDED, IndexOptions

REMOVAL = "00" * 16


def unit_vectors(count: int, dimension: int = 24, seed: int = 3) -> NDArray[np.float32]:
    vectors = np.random.default_rng(seed).normal(size=(count, dimension)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    return vectors


def clustered(count: int, dimension: int, seed: int = 5) -> NDArray[np.float32]:
    """Vectors as encoders make them: many subjects, each with its own few directions."""
    chance = np.random.default_rng(seed)
    centres = chance.normal(size=(max(1, count // 100), dimension))
    around = centres[chance.integers(len(centres), size=count)]
    vectors = (around + 0.6 * chance.normal(size=(count, dimension))).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    return vectors


def labelled(count: int) -> NDArray[np.int64]:
    return np.arange(count, dtype=np.int64) * 3 + 7


def contents_of(labels: NDArray[np.int64], edition: int = 0) -> NDArray[np.uint8]:
    """What stands for the SHA-256 of each passage's text."""
    found = np.zeros((len(labels), 32), np.uint8)
    found[:, :8] = labels.astype("<i8").view(np.uint8).reshape(-1, 8)
    found[:, 8] = edition + 1
    return found


def index_of(count: int, options: IndexOptions = EMBEDDED) -> UpdatableIndex:
    labels = labelled(count)
    return build_index(labels, unit_vectors(count), contents=contents_of(labels), options=options)


class Passages:
    """A library that changes: labels, contents and vectors; and what of it was embedded."""

    def __init__(self, count: int, dimension: int = 24) -> None:
        self.labels = labelled(count)
        self.contents = contents_of(self.labels)
        self._vectors = dict(zip(self.labels.tolist(), unit_vectors(count, dimension), strict=True))
        self.removal = ""
        self.embedded: list[int] = []
        self._next = 1_000_000

    @property
    def vectors(self) -> NDArray[np.float32]:
        return np.stack([self._vectors[label] for label in self.labels.tolist()])

    def wanted(self) -> Wanted:
        def embed(labels: NDArray[np.int64]) -> NDArray[np.float32]:
            self.embedded += labels.tolist()
            return np.stack([self._vectors[label] for label in labels.tolist()])

        return Wanted(self.labels, self.contents, embed, self.removal)

    def add(self, count: int) -> NDArray[np.int64]:
        new = np.arange(self._next, self._next + count, dtype=np.int64)
        self._next += count
        drawn = unit_vectors(count, self.vectors.shape[1], seed=self._next)
        self._vectors |= dict(zip(new.tolist(), drawn, strict=True))
        self.labels = np.concatenate([self.labels, new])
        self.contents = np.concatenate([self.contents, contents_of(new)])
        return new

    def drop(self, rows: slice) -> NDArray[np.int64]:
        gone = self.labels[rows]
        self.labels = np.delete(self.labels, rows)
        self.contents = np.delete(self.contents, rows, axis=0)
        return gone

    def rewrite(self, row: int) -> None:
        """Another text under a label that was used before, as in a restored library."""
        self.contents[row] = contents_of(self.labels[row : row + 1], edition=1)[0]
        self._vectors[int(self.labels[row])] = unit_vectors(1, seed=row + 77)[0]


def is_exactly(index: DenseIndex, library: Passages, k: int = 10) -> None:
    """The index holds what the library does, and finds what comparing with all of it finds."""
    assert (index.count, index.dimension) == library.vectors.shape
    assert index.labels().tolist() == library.labels.tolist()
    assert np.allclose(index.vectors(library.labels), library.vectors, atol=1e-6)
    queries = unit_vectors(20, library.vectors.shape[1], seed=99)
    labels, cosines = index.search(queries, k)
    right, exact = compare_with_all(queries, library.labels, library.vectors, k)
    assert np.allclose(cosines, exact, atol=1e-5)
    assert (labels == right).mean() > 0.99  # equal cosines may change places


# ---- what any engine must do ------------------------------------------------


def test_it_finds_what_a_full_scan_finds(options: IndexOptions) -> None:
    vectors, queries = unit_vectors(2000), unit_vectors(50, seed=4)
    labels, cosines = build_index(labelled(2000), vectors, options=options).search(queries, 10)
    exact = queries @ vectors.T
    best = np.argsort(-exact, axis=1)[:, :10]
    shared = [len(set(a) & set(b)) for a, b in zip(labels, labelled(2000)[best], strict=True)]
    assert np.mean(shared) >= 9.9
    assert np.allclose(cosines[:, 0], exact.max(axis=1), atol=1e-5)
    assert (np.diff(cosines, axis=1) <= 0).all()


@pytest.mark.slow
def test_of_20000_passages_it_finds_nearly_all_that_are_near(options: IndexOptions) -> None:
    vectors = clustered(20_000, 64)
    index = build_index(labelled(20_000), vectors, options=options)
    queries = clustered(20_000, 64, seed=5)[::200] + 0.3 * unit_vectors(100, 64, seed=8)
    found, _ = index.search(queries, 10)
    right, _ = compare_with_all(queries, labelled(20_000), vectors, 10)
    shared = [len(set(a) & set(b)) for a, b in zip(found, right, strict=True)]
    assert np.mean(shared) >= 9.5
    assert index.base.accuracy.recall >= LEAST_RECALL


def test_asked_for_more_than_there_is_it_gives_what_there_is(options: IndexOptions) -> None:
    labels, cosines = index_of(3, options).search(unit_vectors(2), 4)
    assert sorted(labels[0]) == [7, 10, 13]
    assert cosines.shape == (2, 3)


def test_a_thousand_equal_passages_can_be_searched(options: IndexOptions) -> None:
    """Links of equal passages lead to one another alone: all are compared with then."""
    vectors = np.repeat(unit_vectors(1), 1000, axis=0)
    labels, cosines = build_index(labelled(1000), vectors, options=options).search(vectors[:1], 100)
    assert labels.shape == (1, 100)
    assert len(set(labels[0])) == 100
    assert np.allclose(cosines, 1.0, atol=1e-5)


def test_what_is_hidden_is_never_found(options: IndexOptions, tmp_path: Path) -> None:
    """Neither by the engine itself, nor once it was written and read again and hidden there."""
    labels, vectors = labelled(200), unit_vectors(200)
    built = engine_of(options).build(labels, vectors, threads=1, told=lambda _done, _all: None)
    built.save(tmp_path / engine_of(options).file)
    opened = engine_of(options).load(tmp_path / engine_of(options).file, 200, 24)
    for neighbours in (built, opened):
        found = neighbours.nearest(vectors[:9], 1, 50)
        assert found is not None
        assert found[0][:, 0].tolist() == labels[:9].tolist()
        neighbours.hide(labels[:5])
        neighbours.hide(labels[:9])
        for k in (1, 150, 191):
            found = neighbours.nearest(vectors[:9], k, 200)
            assert found is None or not np.isin(found[0], labels[:9]).any()


def test_a_file_of_another_size_is_refused_by_its_engine(
    options: IndexOptions, tmp_path: Path
) -> None:
    path = tmp_path / engine_of(options).file
    built = engine_of(options).build(
        labelled(9), unit_vectors(9), threads=1, told=lambda _d, _a: None
    )
    built.save(path)
    with pytest.raises(ValueError, match="holds 9 passages and not 10"):
        engine_of(options).load(path, 10, 24)
    with pytest.raises(ValueError, match=r".+"):
        engine_of(options).load(tmp_path / "nothing", 9, 24)


def test_a_build_tells_how_far_it_is(options: IndexOptions) -> None:
    told: list[tuple[int, int]] = []
    build_index(
        labelled(1500),
        unit_vectors(1500, 4),
        options=options,
        told=lambda done, total: told.append((done, total)),
    )
    assert len(told) > 1
    assert told == sorted(told)
    assert told[-1] == (1500, 1500)


def test_chosen_vectors_come_as_they_were_put_in(options: IndexOptions) -> None:
    order = np.random.default_rng(1).permutation(50)
    index = build_index(labelled(50)[order], unit_vectors(50)[order], options=options)
    chosen = labelled(50)[[31, 4, 4]]
    assert np.allclose(index.vectors(chosen), unit_vectors(50)[[31, 4, 4]], atol=1e-6)
    assert index.vectors(chosen[:0]).shape == (0, 24)
    assert index.holds(np.array([8, 10, 10_000])).tolist() == [False, True, False]
    assert not build_index(labelled(0), unit_vectors(0)).holds(np.array([7])).any()


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


# ---- changes ----------------------------------------------------------------


def test_what_is_new_is_compared_with_and_the_base_stays(options: IndexOptions) -> None:
    library = Passages(1200)
    before = update_index(None, library.wanted(), options=options)
    library.embedded.clear()
    new = library.add(60)
    gone = library.drop(slice(100, 140))
    after = update_index(before, library.wanted(), options=options)
    assert after.base is before.base
    assert library.embedded == new.tolist()
    assert (after.delta.labels.tolist(), after.gone.tolist()) == (new.tolist(), gone.tolist())
    is_exactly(after, library)
    is_exactly(after, library, k=1220)


@pytest.mark.slow
def test_of_changes_one_after_the_other_the_last_counts(options: IndexOptions) -> None:
    """What came and went is in neither part; the base goes on until a tenth has changed."""
    library = Passages(1200)
    index = update_index(None, library.wanted(), options=options)
    first, built = index.base, 0
    for step in range(12):
        library.add(9)
        library.drop(slice(1190 - 4 * step, 1196 - 4 * step))
        library.embedded.clear()
        before, index = index, update_index(index, library.wanted(), options=options)
        built += index.base is not before.base
        assert len(library.embedded) == 9, "what is there already is not embedded again"
        is_exactly(index, library)
    assert index.base is not first
    assert 1 <= built <= 2


def test_a_label_that_means_another_text_now_is_not_the_old_one(options: IndexOptions) -> None:
    """A library that was restored, or begun anew, gives labels a second time."""
    library = Passages(1200)
    index = update_index(None, library.wanted(), options=options)
    for row in (3, 700):
        library.rewrite(row)
    index = update_index(index, library.wanted(), options=options)
    assert len(index.delta) == len(index.gone) == 2
    is_exactly(index, library)
    library.rewrite(3)  # and now it is one of the delta
    library.contents[3, 8] = 9
    index = update_index(index, library.wanted(), options=options)
    assert len(index.delta) == 2
    is_exactly(index, library)
    library.contents[3] = contents_of(library.labels[3:4])[0]  # as it was at first
    index = update_index(index, library.wanted(), options=options)
    is_exactly(index, library)


@pytest.mark.parametrize(
    ("count", "added", "dropped", "stays"),
    [(1200, 120, 0, True), (1200, 121, 0, False), (1200, 60, 61, False), (900, 1, 0, False)],
)
def test_beyond_a_tenth_or_where_it_is_quick_the_base_is_built_anew(
    count: int, added: int, dropped: int, stays: bool
) -> None:
    library = Passages(count, 4)
    before = update_index(None, library.wanted())
    library.embedded.clear()
    library.add(added)
    library.drop(slice(0, dropped))
    after = update_index(before, library.wanted())
    assert (after.base is before.base) == stays
    assert len(library.embedded) == added
    assert len(after.base.embedded) == (count if stays else count + added - dropped)


@pytest.mark.slow
def test_after_a_removal_nothing_of_the_old_base_goes_on() -> None:
    """Else the vectors of what people had removed would lie in it, passed over."""
    library = Passages(1200)
    before = update_index(None, library.wanted())
    gone = library.drop(slice(5, 6))
    assert update_index(before, library.wanted()).base is before.base, "as it would be without"
    library.removal = REMOVAL
    after = update_index(before, library.wanted())
    assert not np.isin(gone, after.base.embedded.labels).any()
    assert after.base.removal == REMOVAL
    is_exactly(after, library)
    library.add(3)
    assert update_index(after, library.wanted()).base is after.base


def test_an_index_that_says_of_no_passage_what_it_is_gives_nothing_on() -> None:
    library = Passages(1200)
    before = build_index(library.labels, library.vectors)  # no contents
    update_index(before, library.wanted())
    assert library.embedded == library.labels.tolist()


def test_of_new_passages_each_must_have_a_vector_of_the_indexs_kind() -> None:
    library = Passages(1200)
    before = update_index(None, library.wanted())
    library.add(5)
    for few in (unit_vectors(4), unit_vectors(5, 23)):
        wanted = replace(library.wanted(), embed=lambda _: few)  # noqa: B023  called at once
        with pytest.raises(ValueError, match=r"expected vectors \[5, 24\]"):
            update_index(before, wanted)


@pytest.mark.slow
def test_all_may_go_and_come_back() -> None:
    library = Passages(1100)
    index = update_index(None, library.wanted())
    kept = library.labels, library.contents
    library.drop(slice(0, 1100))
    nothing = Wanted(library.labels, library.contents, lambda labels: unit_vectors(len(labels)))
    index = update_index(index, nothing)
    assert index.search(unit_vectors(2), 3)[0].shape == (2, 0)
    library.labels, library.contents = kept
    is_exactly(update_index(index, library.wanted()), library)


# ---- recall -----------------------------------------------------------------


class Forgetful:
    """An engine's answer that misses, unless it may look at many candidates."""

    def __init__(self, index: UpdatableIndex, least: int) -> None:
        self._of, self._least = index.base.neighbours, least
        self.asked: list[int] = []

    def nearest(
        self, queries: NDArray[np.float32], k: int, breadth: int
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]] | None:
        self.asked.append(breadth)
        found = self._of.nearest(queries, k, breadth)
        assert found is not None
        return found if breadth >= self._least else (found[0], found[1] - np.float32(0.5))

    def hide(self, labels: NDArray[np.int64]) -> None:
        self._of.hide(labels)

    def save(self, path: Path) -> None:
        self._of.save(path)


@pytest.mark.parametrize(
    ("needs", "breadth", "recall", "usual"),
    [(1, USUAL_BREADTH, 1.0, 1.0), (512, 512, 1.0, 0.0), (100_000, 0, 1.0, 0.0)],
)
def test_an_index_looks_as_broadly_as_it_must(
    needs: int, breadth: int, recall: float, usual: float
) -> None:
    index = index_of(600)
    engine = Forgetful(index, needs)
    found = measured(engine, index.labels(), index.vectors(index.labels()))
    assert found.breadth == breadth
    assert found.recall == pytest.approx(recall, abs=0.02)
    assert found.usual_recall == pytest.approx(usual, abs=0.06)
    engine.asked.clear()
    base = replace(index.base, neighbours=engine, accuracy=found)
    nothing = np.zeros(0, np.int64)
    searched = UpdatableIndex(
        base, Embedded(nothing, contents_of(nothing), unit_vectors(0)), nothing
    )
    queries = unit_vectors(7, seed=11)
    labels, _ = searched.search(queries, 10)
    assert engine.asked == [breadth] * (breadth > 0)
    exact = compare_with_all(queries, index.labels(), index.vectors(index.labels()), 10)
    assert (labels == exact[0]).mean() > 0.97


@pytest.mark.slow
def test_the_recall_that_is_measured_is_that_of_other_questions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a graph with far too few links, and questions that lie where the sample's do not."""
    monkeypatch.setattr(graph, "_M", 4)
    monkeypatch.setattr(graph, "_EF_CONSTRUCTION", 8)
    vectors = clustered(4000, 48)
    index = build_index(labelled(4000), vectors)
    queries = 0.7 * clustered(4000, 48)[::20] + 0.7 * unit_vectors(200, 48, seed=13)
    right, exact = compare_with_all(queries, labelled(4000), vectors, 10)

    def recall(found: tuple[NDArray[np.int64], NDArray[np.float32]] | None) -> float:
        assert found is not None
        return float((found[1] >= exact[:, -1:] - 1e-5).mean())

    accuracy = index.base.accuracy
    assert accuracy.usual_recall < LEAST_RECALL
    assert accuracy.breadth != USUAL_BREADTH
    usual = recall(index.base.neighbours.nearest(queries, 10, USUAL_BREADTH))
    assert usual == pytest.approx(accuracy.usual_recall, abs=0.1)
    assert recall(index.search(queries, 10)) == pytest.approx(accuracy.recall, abs=0.1)
    assert index.search(queries, 10)[0].shape == right.shape


def test_what_is_gone_is_found_neither_where_all_is_compared_with() -> None:
    library = Passages(1200)
    before = update_index(None, library.wanted())
    scanned = replace(before.base, accuracy=replace(before.base.accuracy, breadth=0))
    before = UpdatableIndex(scanned, before.delta, before.gone)
    library.drop(slice(0, 100))
    after = update_index(before, library.wanted())
    assert (after.base, len(after.gone)) == (scanned, 100)
    is_exactly(after, library, k=1100)


def test_comparing_with_all_is_exact_and_leaves_out_what_it_must() -> None:
    labels, vectors, queries = labelled(700), unit_vectors(700), unit_vectors(300, seed=4)
    found, cosines = compare_with_all(3 * queries, labels, vectors, 5, without=labels[:650])
    exact = queries @ vectors[650:].T
    assert (found == labels[650:][np.argsort(-exact, axis=1)[:, :5]]).all()
    assert np.allclose(cosines, -np.sort(-exact, axis=1)[:, :5], atol=1e-6)
    assert compare_with_all(queries, labels, vectors, 9, without=labels)[0].shape == (300, 0)


@pytest.mark.slow
def test_naming_its_errors_loads_no_native_index_code() -> None:
    program = (
        "import sys, daemon.jobs.answering, daemon.library.dense.folder;"
        "print('hnswlib' in sys.modules, 'torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(graph.__file__).parents[2],
    )
    assert done.stdout.split() == ["False", "False"]
