"""Pairs made of a site's own documents: cloze, titles, keywords, written, and their negatives."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from daemon.jobs.pairs import PairPlan, build_pairs
from daemon.learning.options import LearningError
from daemon.learning.retriever.encoder import Texts
from daemon.learning.retriever.mining import NEAR_DUPLICATE, mine_negatives
from daemon.learning.retriever.spec import RetrieverSpec
from daemon.learning.retriever.training import TrainingSet
from daemon.library.contents import Passage
from daemon.library.passages import SentenceSplitter
from daemon.library.readers.documents import Document
from daemon.library.store import Library
from daemon.pairs import made
from daemon.pairs.cloze import inverse_cloze, keywords, titles
from daemon.pairs.made import Made, PairError, learnable, merged, with_made
from daemon.pairs.round_trip import round_trip
from daemon.pairs.writing import DOMAINS, prompt, queries_of
from tests.support.small_models import small_encoder

HEART = "The heart pumps blood all day. It rests between two beats. Exercise makes it strong."


def passage(text: str, title: str = "", document: str = "d", rowid: int = 1) -> Passage:
    return Passage(rowid, f"{document}#p", document, title, text)


# ---- cloze, titles, keywords ------------------------------------------------------------------


def test_a_sentence_asks_for_the_rest_of_its_passage() -> None:
    (pair,) = inverse_cloze([passage(HEART, "Heart")], kept=0.0, seed=1)
    sentences = HEART.split(". ")
    assert pair.query in HEART
    (text,) = pair.texts
    assert text.startswith("Heart\n")
    assert pair.query not in text
    assert sum(part.rstrip(".") in text for part in sentences) == 2
    assert pair.documents == ("d",)


def test_one_in_ten_asking_sentences_stays() -> None:
    passages = [
        passage(f"Case {n} starts in the morning. Case {n} ends at night.") for n in range(600)
    ]
    pairs = inverse_cloze(passages, seed=5)
    stayed = sum(pair.query in pair.texts[0] for pair in pairs)
    assert 30 <= stayed <= 95, "a tenth of 600, four deviations around"
    assert pairs == inverse_cloze(passages, seed=5)
    assert pairs != inverse_cloze(passages, seed=6)


def test_a_passage_of_one_sentence_or_of_scraps_asks_nothing() -> None:
    assert (
        inverse_cloze([passage("A lone sentence stands here."), passage("No. Yes. See it.")]) == []
    )
    assert len(inverse_cloze([passage(HEART)], a_passage=5)) == 3, "it has three sentences"


def test_a_title_asks_for_all_passages_below_it_told_without_it() -> None:
    passages = [
        passage("Heart failure is treated with rest.", "Heart failure", "a", 1),
        passage("Salt makes it worse.", "Heart failure", "a", 2),
        passage("Nobody titled this.", "", "b", 3),
        passage("Gout", "Gout", "c", 4),
    ]
    (pair,) = titles(passages)
    assert pair.query == "Heart failure"
    assert pair.texts == ("is treated with rest.", "Salt makes it worse.")


def test_keywords_are_what_marks_a_passage_among_the_others() -> None:
    passages = [
        passage("the common words say that aspirin thins blood and aspirin helps"),
        passage("the common words say that insulin feeds cells and insulin helps"),
        passage("the common words say that nothing helps"),
    ]
    first, second, _ = keywords(passages, words=2)
    assert first.query.split() == ["aspirin", "thins"] or "aspirin" in first.query.split()
    assert "insulin" in second.query.split()
    assert not {"the", "common", "words"} & {*first.query.split(), *second.query.split()}


# ---- made pairs: merged, kept in a file, learned from -----------------------------------------


def test_what_asks_the_same_is_one_pair_with_all_its_texts() -> None:
    one = Made("What is  gout?", ("x",), ("a",), "llm")
    other = Made("what is gout?", ("y", "x"), ("b", "c"), "llm")
    (pair,) = merged([one, other])
    assert (pair.query, pair.texts, pair.documents) == ("What is gout?", ("x", "y"), ("a", "b"))


def test_a_document_that_is_gone_or_put_aside_is_no_longer_learned_from() -> None:
    both = Made("q", ("x", "y"), ("a", "b"), "title")
    gone = Made("r", ("z",), ("b",), "title")
    assert learnable([both, gone], {"a", "c"}) == [Made("q", ("x",), ("a",), "title")]
    assert learnable([both, gone], {"a", "b"}) == [both, gone]


TEXTS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20)
PAIRS = st.builds(
    lambda query, rows, how: Made(query, ("",), ("",), how).of(rows),
    TEXTS,
    st.lists(st.tuples(TEXTS, TEXTS, TEXTS | st.just("")), min_size=1, max_size=3),
    st.sampled_from(["inverse-cloze", "title", "keywords", "llm"]),
)


@given(st.lists(PAIRS, max_size=5))
@settings(max_examples=40, deadline=None)
def test_what_is_kept_comes_back(
    tmp_path_factory: pytest.TempPathFactory, pairs: list[Made]
) -> None:
    path = tmp_path_factory.mktemp("made") / "pairs.jsonl"
    made.write(path, pairs)
    assert made.read(path) == pairs
    assert [p.name for p in path.parent.iterdir()] == ["pairs.jsonl"]


@given(st.lists(PAIRS, max_size=5), st.sets(TEXTS))
@settings(max_examples=40, deadline=None)
def test_answers_stay_with_their_texts_and_go_with_their_documents(
    pairs: list[Made], gone: set[str]
) -> None:
    gone |= {pair.documents[0] for pair in pairs[::2]}
    here = {document for pair in pairs for document in pair.documents} - gone
    for pair in learnable(pairs, here):
        assert {document for _, document, _ in pair.sources} <= here
    left = [source for pair in learnable(pairs, here) for source in pair.sources]
    assert left == [source for pair in pairs for source in pair.sources if source[1] in here]
    answered = {(text, answer) for pair in pairs for text, _, answer in pair.sources}
    assert {(text, answer) for one in merged(pairs) for text, _, answer in one.sources} <= answered


@pytest.mark.parametrize(
    "spoil",
    [
        lambda text: text[: len(text) // 2],
        lambda text: "\n".join(text.splitlines()[:-1]) + "\n",
        lambda text: text.replace('"llm"', '"magic"'),
        lambda text: text.replace('["d"]', "[7]"),
        lambda text: text.replace('["d"]', "[]"),
        lambda text: text.replace('"answers": []', '"answers": ["one", "two"]'),
        lambda text: text.replace("hanse-made-pairs-2", "hanse-made-pairs-1"),
        lambda text: text.replace('"query"', '"question"'),
        lambda text: text.replace("hanse-made-pairs-2", "hanse-made-pairs-9"),
        lambda text: "[" * 100_000 + text,
        lambda text: "7\n" + text,
    ],
)
def test_a_damaged_file_is_refused(tmp_path: Path, spoil: object) -> None:
    path = tmp_path / "pairs.jsonl"
    made.write(path, [Made("q one", ("t",), ("d",), "llm"), Made("q two", ("t",), ("d",), "llm")])
    assert callable(spoil)
    path.write_text(spoil(path.read_text()))
    with pytest.raises(PairError, match=r"make (them again|the pairs again)"):
        made.read(path)
    assert made.read(tmp_path / "none") == []


def test_made_pairs_join_the_supplied_ones_and_share_their_passages() -> None:
    chance = np.random.default_rng(0)
    vectors = {name: chance.random(3).astype(np.float32) for name in ("q", "p0", "p1", "m", "new")}
    supplied = TrainingSet(
        Texts(["q"], vectors["q"][None]),
        Texts(["p0", "p1"], np.stack([vectors["p0"], vectors["p1"]])),
        [np.array([0])],
        [np.array([1])],
    )
    pairs = [Made("m", ("new", "p1"), ("d", "e"), "llm")]
    queries, texts = vectors["m"][None], np.stack([vectors["new"], vectors["p1"]])
    both = with_made(supplied, pairs, queries, texts)
    assert list(both.queries.texts) == ["q", "m"]
    assert list(both.passages.texts) == ["p0", "p1", "new"]
    assert [rows.tolist() for rows in both.positives] == [[0], [1, 2]]
    assert [rows.tolist() for rows in both.negatives] == [[1], []]
    assert both.passages.features is not None
    np.testing.assert_array_equal(both.passages.features[2], vectors["new"])
    assert both.queries.features is not None
    np.testing.assert_array_equal(both.queries.features[1], vectors["m"])
    assert with_made(supplied, [], None, None) is supplied
    with pytest.raises(PairError, match="frozen features"):
        with_made(supplied, pairs, None, texts)


# ---- the round trip ---------------------------------------------------------------------------


def asked(*texts: str, query: str = "q") -> Made:
    return Made(query, texts, tuple("d" for _ in texts), "llm")


def test_a_query_that_does_not_find_its_passage_is_lost() -> None:
    corpus = ["right", "near", "far"]
    passages = np.eye(3, dtype=np.float32)
    pairs = [asked("right", query="good"), asked("far", query="bad")]
    queries = np.array([[0.9, 0.4, 0.1], [0.8, 0.5, 0.3]], dtype=np.float32)
    assert [p.query for p in round_trip(pairs, queries, corpus, passages, k=1).kept] == ["good"]
    assert round_trip(pairs, queries, corpus, passages, k=2).lost == 1, "far is the third"
    assert round_trip(pairs, queries, corpus, passages, k=3).lost == 0


def test_copies_of_a_passage_do_not_push_it_out() -> None:
    corpus = ["other", "other", "other", "mine"]
    passages = np.array([[1, 0], [1, 0], [1, 0], [0, 1]], dtype=np.float32)
    query = np.array([[0.8, 0.6]], dtype=np.float32)
    assert round_trip([asked("mine")], query, corpus, passages, k=1).lost == 1
    assert round_trip([asked("mine")], query, corpus, passages, k=2).lost == 0


@given(st.integers(0, 2**32), st.integers(1, 12), st.integers(1, 30))
@settings(max_examples=40, deadline=None)
def test_the_round_trip_is_the_rank_among_different_texts(seed: int, k: int, count: int) -> None:
    chance = np.random.default_rng(seed)
    corpus = [f"text {n}" for n in chance.integers(0, 12, count)]
    vectors = {text: chance.normal(size=4) for text in corpus}
    passages = np.stack([vectors[text] for text in corpus]).astype(np.float32)
    pairs = [asked(text, query=f"q{n}") for n, text in enumerate(corpus)]
    queries = chance.normal(size=(count, 4)).astype(np.float32)
    kept = {pair.query for pair in round_trip(pairs, queries, corpus, passages, k=k).kept}
    for pair, query in zip(pairs, queries, strict=True):
        scores = {
            text: float(np.float32(vec.astype(np.float32) @ query)) for text, vec in vectors.items()
        }
        rank = 1 + sum(score > scores[pair.texts[0]] + 1e-6 for score in scores.values())
        close = any(
            abs(score - scores[pair.texts[0]]) < 1e-5
            for t, score in scores.items()
            if t != pair.texts[0]
        )
        assert close or (pair.query in kept) == (rank <= k)


# ---- negatives ----------------------------------------------------------------------------------


@given(st.integers(0, 2**32), st.integers(0, 8))
@settings(max_examples=60, deadline=None)
def test_no_negative_is_an_answer_or_nearly_one(seed: int, count: int) -> None:
    chance = np.random.default_rng(seed)
    passages = chance.normal(size=(40, 6)).astype(np.float32)
    passages[1] = passages[0] * 1.0001  # a copy of an answer, in another document
    passages /= np.linalg.norm(passages, axis=1, keepdims=True)
    queries = passages[:4] + 0.1
    queries /= np.linalg.norm(queries, axis=1, keepdims=True)
    documents = [f"d{n // 3}#{n % 3}" if n != 1 else "copy" for n in range(40)]
    positives = [np.array([n]) for n in range(4)]
    mined = mine_negatives(queries, passages, documents, positives, count)
    for right, rows in zip(positives, mined, strict=True):
        assert len(set(rows.tolist())) == len(rows) == count, "forty passages are enough"
        assert not {documents[row].split("#")[0] for row in rows} & {
            documents[right[0]].split("#")[0]
        }
        assert (passages[rows] @ passages[right].T <= NEAR_DUPLICATE).all()


# ---- what a model is asked and what it replies --------------------------------------------------


def test_a_reply_is_read_line_by_line() -> None:
    reply = """Here you go:
    1. What is gout?
    2) "Who gets gout most often?"
    - **How is gout treated?**
    Q3: What is gout?
    Gout

    """
    assert queries_of(reply, 9) == [
        "Here you go:",
        "What is gout?",
        "Who gets gout most often?",
        "How is gout treated?",
    ]
    assert len(queries_of(reply, 2)) == 2
    assert queries_of("x y z" * 200) == []
    assert queries_of("") == []


@pytest.mark.parametrize("domain", DOMAINS)
def test_a_prompt_holds_the_passage_as_it_is(domain: str) -> None:
    text = prompt(passage("Costs $5 {each}, $text or ${x}.", "On $title"), domain=domain, count=3)
    assert "Costs $5 {each}, $text or ${x}." in text
    assert "Title: On $title" in text
    assert "exactly 3" in text
    with pytest.raises(PairError, match="use one of"):
        prompt(passage("x"), domain="poetry")


# ---- the job ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> RetrieverSpec:
    return RetrieverSpec(
        encoder=str(small_encoder(tmp_path_factory.mktemp("encoder"))), max_tokens=64
    )


def library_of(path: Path, documents: Sequence[Document]) -> Path:
    with Library.open(path) as library:
        library.put_documents(
            documents, splitter=SentenceSplitter(lambda text: len(text.split()), 1000)
        )
    return path


@pytest.mark.parametrize("how", ["inverse-cloze", "title", "keywords"])
def test_nothing_is_made_of_held_out_documents(
    how: str, spec: RetrieverSpec, tmp_path: Path
) -> None:
    library = library_of(
        tmp_path / "library.sqlite",
        [
            Document("a", "Heart", HEART, "train"),
            Document("b", "Lung", HEART.replace("heart", "lung"), ""),
            Document("c", "Skin", HEART.replace("heart", "skin"), "valid"),
            Document("d", "Bone", HEART.replace("heart", "bone"), "test"),
        ],
    )
    assert how in ("inverse-cloze", "title", "keywords")
    counts = build_pairs(spec, library, tmp_path / "made.jsonl", PairPlan(how=how))  # type: ignore[arg-type]
    pairs = made.read(tmp_path / "made.jsonl")
    assert counts.passages == 2
    assert counts.made == len(pairs) > 0
    assert {document for pair in pairs for document in pair.documents} <= {"a", "b"}
    assert not any(word in json.dumps([p.texts for p in pairs]) for word in ("skin", "bone"))


def test_pairs_that_cannot_be_made_leave_the_old_ones(spec: RetrieverSpec, tmp_path: Path) -> None:
    library = library_of(tmp_path / "library.sqlite", [Document("a", "Heart", HEART, "train")])
    path = tmp_path / "made.jsonl"
    build_pairs(spec, library, path, PairPlan())
    before = path.read_bytes()
    with pytest.raises(PairError, match="needs a model"):
        build_pairs(spec, library, path, PairPlan(how="llm"))
    with pytest.raises(LearningError, match="use inverse-cloze"):
        build_pairs(spec, library, path, PairPlan(how="guess"))  # type: ignore[arg-type]
    assert path.read_bytes() == before
