"""Search: two rankings become one."""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from daemon.library.catalogue.filters import EVERY, Filters, NothingFits
from daemon.library.dense.index import DenseIndex, build_index
from daemon.library.passages import SentenceSplitter
from daemon.library.readers.documents import Document
from daemon.library.search import (
    DEPTH,
    USUAL_WEIGHTS,
    Ranked,
    RankingWeights,
    labels_of,
    search,
)
from daemon.library.store import Library
from daemon.library.titles import Titles

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
    weights: RankingWeights = USUAL_WEIGHTS,
) -> list[Ranked]:
    vector = bag_of_words([vector_of or question])[0]
    return search(library, index, Titles(library.titles()), question, vector, top_k, weights)


@pytest.fixture
def library(tmp_path: Path) -> Iterator[Library]:
    with Library.open(tmp_path / "library.sqlite3") as opened:
        documents = [Document(name, "", text) for name, text in TEXTS.items()]
        opened.put_documents(documents, splitter=SentenceSplitter(lambda t: len(t.split()), 50))
        yield opened


def test_words_decide_as_far_as_they_count(library: Library) -> None:
    index = indexed(library)
    asked = ("tarred rope", 4, TEXTS["sail"])  # by words the rope, by meaning the sail
    first = {
        weight: found(library, index, *asked, weights=RankingWeights(words=weight))[
            0
        ].passage.document_id
        for weight in (0.0, 1.0)
    }
    assert first == {0.0: "sail", 1.0: "rope"}


def test_an_index_knows_what_it_holds(library: Library) -> None:
    index = indexed(library)
    rowids = index.labels().tolist()
    there = index.holds(np.array([0, *rowids, 10**9]))
    assert there.tolist() == [False, *([True] * len(rowids)), False]
    empty = build_index(np.empty(0, dtype=np.int64), np.empty((0, 64), dtype=np.float32))
    none, two = np.zeros(0, np.int64), np.array([1, 2])
    assert (index.holds(none).size, empty.holds(two).tolist()) == (0, [False, False])


def test_what_the_index_has_not_seen_is_placed_by_its_words(library: Library) -> None:
    index = indexed(library)
    splitter = SentenceSplitter(lambda t: len(t.split()), 50)
    library.put_documents([Document("keel", "", "Oak makes a straight keel.")], splitter=splitter)
    ranked = found(
        library, index, "straight keel", 6, "tarred rope", weights=RankingWeights(words=0.0)
    )
    assert [r.passage.document_id for r in ranked][:2] in (["keel", "rope"], ["rope", "keel"])


def test_what_both_rankings_like_comes_first(library: Library) -> None:
    index = indexed(library)
    ranked = found(library, index, "Which rope is tarred?", 4)
    assert ranked[0].passage.document_id == "rope"
    [(rope, share)] = library.bm25("rope tarred", 1)
    cosine = float(index.vectors(np.array([rope]))[0] @ bag_of_words(["Which rope is tarred?"])[0])
    assert ranked[0].score == pytest.approx(cosine + USUAL_WEIGHTS.words * share, abs=1e-6)
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


# ---- titles ---------------------------------------------------------------------------


@pytest.fixture
def filings(tmp_path: Path) -> Iterator[Library]:
    """Ninety documents that say nearly the same, each of another yard and year."""
    with Library.open(tmp_path / "filings.sqlite3") as opened:
        documents = [
            Document(f"{yard}{year}", f"{yard.upper()}_{year}_10K", f"Rope was tarred, {n} times.")
            for n, (yard, year) in enumerate(
                (yard, year) for yard in ("alder", "birch", "cedar") for year in range(1990, 2020)
            )
        ]
        opened.put_documents(documents, splitter=SentenceSplitter(lambda t: len(t.split()), 50))
        yield opened


ASKED = "How often was rope tarred at Cedar in FY2004?"


def test_a_title_brings_what_is_far_from_the_nearest(filings: Library) -> None:
    index, far = indexed(filings), "The bilge pump."
    [of] = [p.rowid for p in filings.passages() if p.document_id == "cedar2004"]
    nearest = index.search(bag_of_words([far]), DEPTH)[0][0].tolist()
    assert of not in nearest
    titled = RankingWeights(words=0.0, title=1.0)
    first = found(filings, index, ASKED, 3, far, weights=titled)
    assert first[0].passage.document_id == "cedar2004"
    assert len({ranked.passage.rowid for ranked in first}) == 3


def test_the_more_a_title_counts_the_more_it_decides(filings: Library) -> None:
    index, like = indexed(filings), "ALDER_1990_10K Rope was tarred, 0 times."
    first = {
        title: found(filings, index, ASKED, 1, like, weights=RankingWeights(0.0, title))[0]
        for title in (0.0, 1.0)
    }
    assert first[0.0].passage.document_id == "alder1990"
    assert first[1.0].passage.document_id == "cedar2004"


def without_titles(library: Library, index: DenseIndex, question: str) -> list[tuple[int, float]]:
    """Every passage by its cosine and its words alone."""
    labels = index.labels()
    cosines = index.vectors(labels) @ bag_of_words([question])[0]
    words = dict(library.bm25(question, DEPTH))
    scores = [
        (label, float(cosine) + USUAL_WEIGHTS.words * words.get(label, 0.0))
        for label, cosine in zip(labels.tolist(), cosines, strict=True)
    ]
    return sorted(scores, key=lambda one: (-one[1], one[0]))


@pytest.mark.parametrize("alike", [False, True])
def test_titles_that_count_or_say_nothing_leave_the_ranking_be(
    filings: Library, library: Library, alike: bool
) -> None:
    if alike:
        copies = [Document(f"rope{n}", "", TEXTS["rope"]) for n in range(60)]
        library.put_documents(copies, splitter=SentenceSplitter(lambda t: len(t.split()), 50))
    of, weight = (library, 0.3) if alike else (filings, 0.0)
    index = indexed(of)
    ranked = found(of, index, ASKED, 20, weights=RankingWeights(title=weight))
    expected = without_titles(of, index, ASKED)[:20]
    assert [one.score for one in ranked] == pytest.approx(
        [score for _, score in expected], abs=1e-6
    )


def test_an_explanation_adds_up_to_the_score(filings: Library) -> None:
    index = indexed(filings)
    splitter = SentenceSplitter(lambda t: len(t.split()), 50)
    filings.put_documents([Document("new", "Cedar", "Rope tarred often.")], splitter=splitter)
    weights = RankingWeights(words=0.25, title=0.2)
    ranked = found(filings, index, ASKED, 60, weights=weights)
    why = [r.explanation for r in ranked if r.explanation is not None]
    assert len(why) == len(ranked)
    for one, said in zip(ranked, why, strict=True):
        parts = said.cosine + said.title_part + said.words_part
        assert one.score == pytest.approx(parts, abs=1e-6)
        assert said.title_part == pytest.approx(weights.title * said.title_share)
        assert said.words_part == pytest.approx(weights.words * said.words_share)
        assert (said.words_place > 0) == (said.words_share > 0.0)
    by_meaning = sorted((w for w in why if w.meaning_place), key=lambda w: w.meaning_place)
    assert [w.cosine for w in by_meaning] == sorted((w.cosine for w in by_meaning), reverse=True)
    [new] = [w for r, w in zip(ranked, why, strict=True) if r.passage.document_id == "new"]
    assert (new.indexed, new.meaning_place) == (False, 0)
    cosines = index.vectors(index.labels()) @ bag_of_words([ASKED])[0]
    place = [rowid for rowid, _ in filings.bm25(ASKED, DEPTH)].index(new_rowid(filings))
    assert new.cosine == pytest.approx(float(np.sort(cosines)[::-1][place]), abs=1e-6)


def new_rowid(library: Library) -> int:
    return next(p.rowid for p in library.passages() if p.document_id == "new")


def test_titles_may_know_passages_that_the_index_does_not(filings: Library) -> None:
    index = indexed(filings)
    splitter = SentenceSplitter(lambda t: len(t.split()), 50)
    filings.put_documents([Document("x", "Elder 2004", "A pump.")], splitter=splitter)
    filings.delete_documents(["cedar2004"])
    ranked = found(filings, index, "elder, cedar 2004", 99, weights=RankingWeights(title=0.3))
    assert "cedar2004" not in {r.passage.document_id for r in ranked}
    assert sum(r.passage.document_id == "x" for r in ranked) == 1


# ---- of some documents only -------------------------------------------------------------


def test_of_some_documents_all_are_seen_and_no_others(filings: Library) -> None:
    """Thirty of ninety, whatever is nearer; with their places among themselves."""
    index, near = indexed(filings), "ALDER_1990_10K Rope was tarred, 0 times."
    among = labels_of(filings, Filters("birch"))
    assert among is not None
    vector = bag_of_words([near])[0]
    titles = Titles(filings.titles())
    ranked = search(filings, index, titles, ASKED, vector, 99, USUAL_WEIGHTS, among)
    assert {r.passage.rowid for r in ranked} == set(among.tolist())
    places = [r.explanation.meaning_place for r in ranked if r.explanation is not None]
    assert sorted(places) == [*range(1, 31)]
    nothing = np.zeros(0, dtype=np.int64)
    assert search(filings, index, titles, ASKED, vector, 9, USUAL_WEIGHTS, nothing) == []


@pytest.mark.parametrize(
    ("begins", "title", "count"),
    [
        ("cedar", "", 30),
        ("cedar20", "", 20),
        ("", "10k cedar", 30),
        ("", "2004", 3),
        ("alder", "2004 10K", 1),
    ],
)
def test_documents_are_chosen_by_id_and_title(
    filings: Library, begins: str, title: str, count: int
) -> None:
    among = labels_of(filings, Filters(begins, title=title))
    assert among is not None
    found = filings.passages_by_rowid(among.tolist()).values()
    assert len(found) == len(among) == count
    assert all(p.document_id.startswith(begins) for p in found)


def test_without_a_choice_all_documents_are_searched(filings: Library) -> None:
    assert labels_of(filings, EVERY) is None


@pytest.mark.parametrize(
    ("begins", "title", "why"),
    [
        ("Cedar", "", "no document here has an id that begins with 'Cedar'"),
        ("alder", "cedar", "no document here fits all that is asked for"),
        ("", "ced", "no document here has the title 'ced'"),
        ("", "?!", "no word is in the title '?!'"),
    ],
)
def test_what_no_document_is_like_is_refused(
    filings: Library, begins: str, title: str, why: str
) -> None:
    with pytest.raises(NothingFits, match=re.escape(why)):
        labels_of(filings, Filters(begins, title=title))


def test_words_are_ranked_among_what_is_wanted(filings: Library) -> None:
    every = filings.bm25("rope 2004", 100)
    some = sorted(rowid for rowid, _ in every)[::7]
    assert filings.bm25("rope 2004", 100, some) == [one for one in every if one[0] in some]
    assert filings.bm25("rope", 100, []) == []


def test_an_empty_library_has_no_passages_to_find(tmp_path: Path) -> None:
    with Library.open(tmp_path / "empty.sqlite3") as library:
        empty = build_index(np.zeros(0, np.int64), np.zeros((0, 64), np.float32))
        assert found(library, empty, "Which rope?", 5) == []
