"""Levels: a passage is compared as a whole, by its best sentence, or by both."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from config.kinds import RetrievalLevel
from daemon.library.contents import Passage
from daemon.library.dense.index import build_index
from daemon.library.levels import RANKED_ANEW, Sentences
from daemon.library.passages import SentenceSplitter
from daemon.library.readers.documents import Document
from daemon.library.search import Ranked, RankingWeights, search
from daemon.library.store import Library
from daemon.library.titles import Titles

QUESTION = np.array([1.0, 0.0, 0.0, 0.0], np.float32)
BY_MEANING = RankingWeights(words=0.0, title=0.0)


def at(cosine: float) -> NDArray[np.float32]:
    """A vector of length 1 with that cosine to the question."""
    return np.array([cosine, (1.0 - cosine**2) ** 0.5, 0.0, 0.0], np.float32)


# Of each document: the whole passage, and its sentences, as cosines to the question.
COSINES = {"even": (0.6, [0.6, 0.6]), "one": (0.4, [0.1, 0.95]), "far": (0.1, [0.2, 0.1])}


@pytest.fixture
def library(tmp_path: Path) -> Iterator[Library]:
    with Library.open(tmp_path / "library.sqlite3") as opened:
        documents = [Document(name, "", f"This is {name}.") for name in COSINES]
        opened.put_documents(documents, splitter=SentenceSplitter(lambda t: len(t.split()), 50))
        yield opened


def of_sentences(passages: Sequence[Passage]) -> list[NDArray[np.float32]]:
    return [np.stack(list(map(at, COSINES[one.document_id][1]))) for one in passages]


def found(
    library: Library,
    level: RetrievalLevel | None,
    vectors: Callable[[Sequence[Passage]], list[NDArray[np.float32]] | None] = of_sentences,
) -> list[Ranked]:
    passages = library.passages()
    whole = np.stack([at(COSINES[one.document_id][0]) for one in passages])
    index = build_index(np.array([one.rowid for one in passages], np.int64), whole)
    sentences = Sentences(level, library.passages_by_rowid, vectors) if level else None
    titles = Titles(library.titles())
    return search(*(library, index, titles, "?", QUESTION, 3, BY_MEANING), sentences=sentences)


def explained(ranked: Sequence[Ranked]) -> list[tuple[str, float, str]]:
    """Document, cosine and level of each."""
    return [
        (one.passage.document_id, round(one.explanation.cosine, 4), one.explanation.level)
        for one in ranked
        if one.explanation is not None
    ]


def test_a_passage_that_answers_in_one_sentence_is_found_by_it(library: Library) -> None:
    assert explained(found(library, None)) == [
        ("even", 0.6, "passage"),
        ("one", 0.4, "passage"),
        ("far", 0.1, "passage"),
    ]
    assert explained(found(library, "sentence")) == [
        ("one", 0.95, "sentence"),
        ("even", 0.6, "sentence"),
        ("far", 0.2, "sentence"),
    ]


def test_both_is_the_mean_of_whole_and_best_sentence(library: Library) -> None:
    assert explained(found(library, "both")) == [
        ("one", 0.675, "both"),
        ("even", 0.6, "both"),
        ("far", 0.15, "both"),
    ]


@pytest.mark.parametrize("level", ["sentence", "both"])
def test_where_sentences_are_not_all_known_passages_rank(
    library: Library, level: RetrievalLevel
) -> None:
    unknown = found(library, level, lambda _passages: None)
    assert explained(unknown) == explained(found(library, None))


def test_sentences_of_no_more_passages_than_said_are_looked_at(tmp_path: Path) -> None:
    count = RANKED_ANEW + 60
    looked_at = []

    def noted(passages: Sequence[Passage]) -> list[NDArray[np.float32]]:
        looked_at.append([one.document_id for one in passages])
        return [QUESTION[np.newaxis] for _ in passages]

    with Library.open(tmp_path / "many.sqlite3") as library:
        documents = [Document(f"d{number:03}", "", f"Of {number}.") for number in range(count)]
        library.put_documents(documents, splitter=SentenceSplitter(lambda t: len(t.split()), 50))
        passages = library.passages()
        cosines = {one.rowid: 1.0 - int(one.document_id[1:]) / count for one in passages}
        index = build_index(
            np.array([one.rowid for one in passages], np.int64),
            np.stack([at(cosines[one.rowid]) for one in passages]),
        )
        ranked = search(
            *(library, index, Titles(library.titles()), "?", QUESTION, 20, BY_MEANING),
            sentences=Sentences("sentence", library.passages_by_rowid, noted),
        )
    assert [sorted(some) for some in looked_at] == [[f"d{n:03}" for n in range(RANKED_ANEW)]]
    assert len(ranked) == 20


@pytest.mark.slow
@given(st.lists(st.lists(st.floats(-1, 1), min_size=1, max_size=9), min_size=1, max_size=30))
def test_a_passage_is_as_near_as_its_nearest_sentence(cosines: list[list[float]]) -> None:
    passages = [Passage(row, f"p{row}", f"d{row}", "", "text") for row in range(len(cosines))]
    by_label = {one.rowid: one for one in passages}
    sentences = Sentences(
        "sentence",
        lambda labels: {label: by_label[label] for label in labels},
        lambda some: [np.stack(list(map(at, cosines[one.rowid]))) for one in some],
    )
    labels = np.arange(len(cosines))
    got = sentences.compared(labels, np.zeros(len(cosines), np.float32), QUESTION)
    assert got is not None
    assert np.allclose(got, [max(some) for some in cosines], atol=1e-6)


def test_a_passage_that_is_gone_keeps_what_it_was_compared_by() -> None:
    there = Passage(1, "p1", "d1", "", "text")
    sentences = Sentences(
        "sentence", lambda _: {1: there}, lambda some: [at(0.9)[None] for _ in some]
    )
    got = sentences.compared(np.array([1, 2]), np.array([0.5, 0.4], np.float32), QUESTION)
    assert got is not None
    assert np.allclose(got, [0.9, 0.4])
