"""Search: two rankings become one."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from daemon.library.index import DenseIndex, build_index
from daemon.library.passages import SentenceSplitter
from daemon.library.readers.documents import Document
from daemon.library.search import USUAL_WORDS_WEIGHT, Ranked, reciprocal_rank_fusion, search
from daemon.library.store import Library

TEXTS = {
    "rope": "Hemp rope is tarred against rot.",
    "sail": "Flax sails are lighter than others.",
    "lamp": "Whale oil burns in every lamp.",
    "pump": "The pump clears the bilge at dawn.",
}


def bag_of_words(texts: Sequence[str], dimension: int = 64) -> NDArray[np.float32]:
    """Each word a random direction, each text the mean of its words: [n, d], length 1."""
    rows = np.zeros((len(texts), dimension), dtype=np.float32)
    for row, text in zip(rows, texts, strict=True):
        for word in text.lower().replace(".", "").replace("?", "").split():
            row += np.random.default_rng(zlib.crc32(word.encode())).normal(size=dimension)
        row /= np.linalg.norm(row) or 1.0
    return rows


def indexed(library: Library) -> DenseIndex:
    passages = library.passages()
    vectors = bag_of_words([passage.embedding_text for passage in passages])
    return build_index(np.array([p.rowid for p in passages], dtype=np.int64), vectors)


def found(
    library: Library,
    index: DenseIndex,
    question: str,
    top_k: int,
    vector_of: str = "",
    *,
    words_weight: float = USUAL_WORDS_WEIGHT,
) -> list[Ranked]:
    vector = bag_of_words([vector_of or question])[0]
    return search(library, index, question, vector, top_k, words_weight)


@pytest.fixture
def library(tmp_path: Path) -> Iterator[Library]:
    with Library.open(tmp_path / "library.sqlite3") as opened:
        documents = [Document(name, "", text) for name, text in TEXTS.items()]
        opened.put_documents(documents, splitter=SentenceSplitter(lambda t: len(t.split()), 50))
        yield opened


def test_fusion_adds_the_reciprocals_of_ranks() -> None:
    fused = dict(reciprocal_rank_fusion([[7, 8, 9], [9, 7]]))
    assert fused == {
        7: pytest.approx(1 / 61 + 1 / 62),
        8: pytest.approx(1 / 62),
        9: pytest.approx(1 / 63 + 1 / 61),
    }


def test_fusion_is_best_first_and_ties_have_one_order() -> None:
    assert [label for label, _ in reciprocal_rank_fusion([[3, 1], [1, 3]])] == [1, 3]
    assert [label for label, _ in reciprocal_rank_fusion([[5, 4], [6]])] == [5, 6, 4]
    assert reciprocal_rank_fusion([[], []]) == []


def test_a_rank_counts_by_the_weight_of_its_ranking() -> None:
    assert dict(reciprocal_rank_fusion([[7, 8], [9, 7]], (1.0, 0.5))) == {
        7: pytest.approx(1 / 61 + 0.5 / 62),
        8: pytest.approx(1 / 62),
        9: pytest.approx(0.5 / 61),
    }
    assert [label for label, _ in reciprocal_rank_fusion([[7, 8], [9, 7]], (1.0, 0.0))] == [7, 8, 9]
    assert dict(reciprocal_rank_fusion([[None, 8]])) == {8: pytest.approx(1 / 62)}


def test_words_decide_as_far_as_they_count(library: Library) -> None:
    index = indexed(library)
    asked = ("tarred rope", 4, TEXTS["sail"])  # by words the rope, by meaning the sail
    first = {
        weight: found(library, index, *asked, words_weight=weight)[0].passage.document_id
        for weight in (0.0, 1.0)
    }
    assert first == {0.0: "sail", 1.0: "rope"}


def test_an_index_knows_what_it_holds(library: Library) -> None:
    index = indexed(library)
    rowids = index.labels().tolist()
    assert index.holds([0, *rowids, 10**9]) == [False, *([True] * len(rowids)), False]
    empty = build_index(np.empty(0, dtype=np.int64), np.empty((0, 64), dtype=np.float32))
    assert (index.holds([]), empty.holds([1, 2])) == ([], [False, False])


def test_words_count_in_full_for_what_the_index_has_not_seen(library: Library) -> None:
    index = indexed(library)
    splitter = SentenceSplitter(lambda t: len(t.split()), 50)
    library.put_documents([Document("keel", "", "Oak makes a straight keel.")], splitter=splitter)
    ranked = found(library, index, "straight keel", 6, "tarred rope", words_weight=0.0)
    assert [r.passage.document_id for r in ranked][:2] in (["keel", "rope"], ["rope", "keel"])


def test_what_both_rankings_like_comes_first(library: Library) -> None:
    ranked = found(library, indexed(library), "Which rope is tarred?", 4)
    assert ranked[0].passage.document_id == "rope"
    assert ranked[0].score == pytest.approx((1 + USUAL_WORDS_WEIGHT) / 61)
    assert [r.score for r in ranked] == sorted((r.score for r in ranked), reverse=True)


def test_meaning_and_words_each_bring_what_the_other_misses(library: Library) -> None:
    """The words name the lamp, the vector points at the sail: both are among the first two."""
    ranked = found(library, indexed(library), "lamp", 2, vector_of=TEXTS["sail"])
    assert {r.passage.document_id for r in ranked} == {"lamp", "sail"}


def test_no_more_than_asked_for_and_no_more_than_there_is(library: Library) -> None:
    index = indexed(library)
    assert len(found(library, index, "the pump", 1)) == 1
    assert len(found(library, index, "the pump", 100)) == 4


def test_a_question_without_words_is_searched_by_meaning_alone(library: Library) -> None:
    ranked = found(library, indexed(library), "?!", 2, vector_of=TEXTS["pump"])
    assert ranked[0].passage.document_id == "pump"


def test_a_passage_that_went_after_the_index_was_built_is_passed_over(library: Library) -> None:
    index = indexed(library)
    library.delete_documents(["rope"])
    ranked = found(library, index, "Which rope is tarred?", 4)
    assert [r.passage.document_id for r in ranked if r.passage.document_id == "rope"] == []
    assert len(ranked) == 3


def test_an_empty_library_has_no_passages_to_find(tmp_path: Path) -> None:
    with Library.open(tmp_path / "empty.sqlite3") as library:
        empty = build_index(np.zeros(0, np.int64), np.zeros((0, 64), np.float32))
        assert found(library, empty, "Which rope?", 5) == []
