"""Question-passage-answer triples: supplied, made, distilled, and what is never among them."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from daemon.answering.citations import support_of, supported_text
from daemon.jobs.pairs import (
    PairPlan,
    build_pairs,
    forget_documents,
    keep_answers,
    overview,
    triples_of,
    write_answers,
)
from daemon.learning.generator.triples import Triple
from daemon.learning.retriever.spec import RetrieverSpec
from daemon.library.contents import Passage
from daemon.library.passages import SentenceSplitter
from daemon.library.readers.documents import Document, Pair, Reference
from daemon.library.store import Library
from daemon.pairs import made
from daemon.pairs.made import Made
from daemon.pairs.triples import (
    PASSAGES,
    Asked,
    TripleCounts,
    counts_of,
    questions_to_learn,
    triples,
)
from daemon.pairs.writing import answer_of, answer_prompt
from tests.daemon.library.unboxed import read
from tests.daemon.pairs.test_pair_writers import about, completion, serving
from tests.support.small_models import small_encoder

PUMP = "The pump lifts water. It is greased every ninth day."
GATE = "The gate closes at dusk. Its keeper has the only key."
MILL = "The mill grinds rye. Nobody works there on Sundays."
WORDS = ["pump", "lifts", "water", "gate", "dusk", "keeper"]
LOCK = "The lock holds four barges. Its sluices open by hand."


def splitter(words: int = 100) -> SentenceSplitter:
    return SentenceSplitter(lambda text: len(text.split()), words)


def answered(query: str, *documents: str, answer: str = "", split: str = "train") -> Pair:
    return Pair(query, documents, split, Reference((answer,)) if answer else None)


class Site:
    """A library and a file of made pairs, without a daemon."""

    def __init__(self, folder: Path, encoder: Path) -> None:
        self.library, self.made = folder / "library.sqlite", folder / "made.jsonl"
        self.spec = RetrieverSpec(
            encoder=str(encoder),
            max_tokens=32,
            learn_from="supplied+made",
            made_pairs=str(self.made),
        )

    def put(self, documents: Sequence[Document], pairs: Sequence[Pair], words: int = 100) -> None:
        with Library.open(self.library) as library:
            library.put_documents(documents, splitter=splitter(words))
            library.put_pairs(pairs)

    def triples(self) -> list[Triple]:
        with Library.open(self.library) as library:
            return triples_of(self.spec, library)

    def counts(self) -> TripleCounts:
        return overview(self.spec, self.library, self.made).triples


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    words = " ".join((PUMP, GATE, MILL, LOCK)).lower().replace(".", "").split()
    return small_encoder(tmp_path_factory.mktemp("encoder"), words)


@pytest.fixture
def site(tmp_path: Path, encoder: Path) -> Site:
    return Site(tmp_path, encoder)


DOCUMENTS = [
    Document("pump", "Pump", PUMP, "train"),
    Document("gate", "Gate", GATE),
    Document("mill", "Mill", MILL, "train"),
    Document("lock", "Lock", LOCK, "test"),
]


# ---- which answer a question has ----------------------------------------------------------------


def test_supplied_before_made_before_distilled_and_one_a_question(site: Site) -> None:
    site.put(DOCUMENTS, [
        answered("what does the pump lift?", "pump", answer="Water."),
        answered("when does the gate close?", "gate"),
        answered("what does the mill grind?", "mill"),
    ])  # fmt: skip
    made.write(site.made, [
        Made("What does the  pump lift?", (f"Pump\n{PUMP}",), ("pump",), "llm", ("It lifts oil.",)),
        Made("When does the gate close?", (f"Gate\n{GATE}",), ("gate",), "llm", ("At dusk.",)),
        Made("who works at the mill?", (f"Mill\n{MILL}",), ("mill",), "title"),
    ])  # fmt: skip
    found = site.triples()
    assert [(one.how, one.question.lower()) for one in found] == [
        ("supplied", "what does the pump lift?"),
        ("made", "when does the gate close?"),
        ("distilled", "what does the mill grind?"),
        ("distilled", "who works at the mill?"),
    ]
    assert [one.answer for one in found[:2]] == ["Water.", "At dusk."]
    assert [one.passages for one in found[:2]] == [(f"Pump\n{PUMP}",), (f"Gate\n{GATE}",)]
    assert site.counts() == TripleCounts(supplied=1, made=1, to_distil=2)
    assert site.triples() == found


@pytest.mark.parametrize(
    ("learn_from", "kinds"),
    [("supplied", ["supplied"]), ("made", ["made"]), ("supplied+made", ["supplied", "made"])],
)
def test_what_is_learned_from_is_as_the_operator_chose(
    site: Site, learn_from: str, kinds: list[str]
) -> None:
    site.put(DOCUMENTS, [answered("what does the pump lift?", "pump", answer="Water.")])
    made.write(
        site.made,
        [Made("when does it close?", (f"Gate\n{GATE}",), ("gate",), "llm", ("At dusk.",))],
    )
    site.spec = replace(site.spec, learn_from=learn_from)  # type: ignore[arg-type]
    assert [one.how for one in site.triples()] == kinds


def test_the_answers_of_a_pairs_file_are_read_and_kept(site: Site, tmp_path: Path) -> None:
    path = tmp_path / "pairs_train.jsonl"
    path.write_text(
        '{"query": "what does the pump lift?", "positives": ["pump"], "answer": "Water."}\n'
        '{"query": "who has the key?", "positives": ["gate"], '
        '"answers": ["The warden.", "Its keeper has the only key."]}\n'
    )
    pairs = [item for item in read(path) if isinstance(item, Pair)]
    site.put(DOCUMENTS, pairs)
    site.put([], [replace(pair, reference=None) for pair in pairs])  # which says nothing of them
    # Of two right answers the one that the passages say.
    assert [one.answer for one in site.triples()] == ["Water.", "Its keeper has the only key."]


def test_the_passages_are_those_that_support_the_answer_best(site: Site) -> None:
    text = " ".join(f"Barge {n} carries {cargo}." for n, cargo in enumerate(
        ("coal", "salt", "rye", "hemp", "wine", "tar", "iron"), start=1
    ))  # fmt: skip
    site.put(
        [Document("barges", "", text)],
        [answered("which one has wine?", "barges", answer="Barge 5 carries wine.")],
        words=4,
    )
    (triple,) = site.triples()
    assert triple.passages[0] == "Barge 5 carries wine."
    assert len(triple.passages) == PASSAGES


@given(
    scores=st.lists(
        st.lists(st.floats(0, 3, allow_nan=False), min_size=1, max_size=6), min_size=1, max_size=4
    ).filter(lambda rows: len({len(row) for row in rows}) == 1)
)
@settings(max_examples=60, deadline=None)
def test_no_passage_left_out_supports_the_answer_better(scores: list[list[float]]) -> None:
    passages = tuple(Passage(n, str(n), "d", "", f"passage {n}") for n in range(len(scores[0])))
    answers = tuple(f"answer {n}" for n in range(len(scores)))

    def support(answer: str, passage: Passage) -> float:
        return scores[answers.index(answer)][passage.rowid]

    (triple,) = triples(
        [Asked("q", passages, answers)], {}, support=support, distil=lambda _q, _p: ("", ())
    )
    own = scores[answers.index(triple.answer)]
    taken = [own[int(text.split()[1])] for text in triple.passages]
    assert max(own) == max(itertools.chain(*scores))
    assert taken == sorted(own, reverse=True)[: len(taken)]
    assert 1 <= len(taken) <= PASSAGES
    assert len(taken) == min(PASSAGES, max(1, sum(score > 0 for score in own)))


@given(words=st.lists(st.sampled_from(WORDS), max_size=8))
@settings(max_examples=60, deadline=None)
def test_support_grows_with_what_the_passage_says(words: list[str]) -> None:
    passage = Passage(1, "p", "d", "Pump", PUMP)
    text = " ".join(words)
    score = support_of(text, passage)
    assert 0 <= score < 2
    assert (score >= 1) == bool(supported_text(text, passage))
    # What stands above or in it says all of itself.
    assert support_of(PUMP, passage) > 2 > support_of(GATE, passage)


# ---- made by the site's own model -----------------------------------------------------------


def test_an_answer_that_its_passage_does_not_support_is_dropped(site: Site) -> None:
    """A model that says what stands there, adds a lie, denies it, refuses and babbles."""
    texts = {
        "a": "The pump lifts water.",
        "b": "The gate closes at dusk.",
        "c": "The mill grinds rye.",
        "d": "The lock holds four barges.",
        "e": "Eels live below the weir.",
    }
    says = {
        texts["a"]: "The pump lifts water. [1]",
        texts["b"]: "The gate closes at dusk. Pirates guard it.",
        texts["c"]: "The mill does not grind rye.",
        texts["d"]: '"Not answered."',
        texts["e"]: "x" * 9000,
    }
    site.put([Document(name, "", text) for name, text in texts.items()], [])
    plan = PairPlan(how="llm", a_passage=1, top_k=5, answers=True)
    replies = site.made.with_name("replies.jsonl")

    def write(body: dict[str, object]) -> tuple[int, bytes]:
        text = about(body)
        return completion(says[text] if "Answer:" in str(body) else f"1. What of: {text}")

    with serving(write) as (url, asked):
        plan = replace(plan, model=f"{url}#m")
        counts = build_pairs(site.spec, site.library, site.made, plan, replies_path=replies)
        assert (counts.made, counts.answered) == (5, 0)
        where = (site.spec, site.library, site.made)
        progress = write_answers(*where, replies, plan, 60.0)
        assert (progress.done, progress.total, len(asked)) == (5, 5, 10)
        assert keep_answers(*where, plan, replies_path=replies) == (1, 4)
        assert len(asked) == 10, "each once"
    assert not replies.exists()
    assert {pair.answers for pair in made.read(site.made)} == {(), ("The pump lifts water.",)}
    assert site.counts() == TripleCounts(supplied=0, made=1, to_distil=4)
    shown = overview(site.spec, site.library, site.made, examples=5)
    assert (shown.kinds["llm"].usable, shown.kinds["llm"].answered) == (5, 1)
    assert {one.answers for one in shown.examples} == {(), ("The pump lifts water.",)}


def test_a_prompt_for_an_answer_says_what_to_write_where_there_is_none() -> None:
    text = answer_prompt(Passage(1, "p", "d", "", PUMP), "what does\n it lift?")
    assert f"Passage: {PUMP}\n" in text and "Question: what does it lift?\n" in text
    assert 'write "Not answered"' in text
    assert answer_of(' "NOT ANSWERED." ') == answer_of("") == ""
    assert answer_of(" At\n dusk. ") == "At dusk."


def test_pairs_made_before_there_were_answers_are_read(site: Site) -> None:
    site.made.write_text(
        '{"format": "hanse-made-pairs-1", "pairs": 1}\n'
        '{"query": "q", "texts": ["t"], "documents": ["d"], "how": "title"}\n'
    )
    assert made.read(site.made) == [Made("q", ("t",), ("d",), "title")]


# ---- distilled ----------------------------------------------------------------------------------


def test_what_is_distilled_stands_in_its_passages(site: Site) -> None:
    site.put(DOCUMENTS, [
        answered("when does the gate close?", "gate"),
        answered("who greases the pump?", "pump", "mill"),
    ])  # fmt: skip
    found = site.triples()
    assert [one.how for one in found] == ["distilled", "distilled"]
    with Library.open(site.library) as library:
        stands = {one.embedding_text: one for one in library.passages(split="train")}
    for one in found:
        assert all(text in stands for text in one.passages)
        sentences = one.answer.replace(". ", ".\n").splitlines()
        assert sentences and all(
            any(s in text and supported_text(s, stands[text]) for text in one.passages)
            for s in sentences
        )


def test_what_is_known_is_not_looked_at_again_and_forgotten_when_gone() -> None:
    asked = [Asked(f"q{n}", (Passage(n, "p", "d", "", f"text {n}"),)) for n in range(3)]
    known: dict[bytes, Triple | None] = {}
    looked: list[str] = []

    def distil(question: str, passages: Sequence[Passage]) -> tuple[str, Sequence[Passage]]:
        looked.append(question)
        return ("" if question == "q1" else f"of {question}"), passages

    first = triples(asked, known, support=support_of, distil=distil)
    assert [one.answer for one in first] == ["of q0", "of q2"]
    assert triples(asked, known, support=support_of, distil=distil) == first
    assert (sorted(looked), len(known)) == (["q0", "q1", "q2"], 3), "each once"
    changed = replace(asked[2], passages=(replace(asked[2].passages[0], text="another"),))
    (one,) = triples([changed], known, support=support_of, distil=distil)
    assert (one.passages, looked[3:], len(known)) == (("another",), ["q2"], 1)
    assert "text 2" not in repr(known)


# ---- what is never in it -----------------------------------------------------------------------


def test_a_held_out_document_is_in_no_triple(site: Site) -> None:
    """Nor an answer that may be its own, nor a question that versions are judged by."""
    site.put(DOCUMENTS, [
        answered("what does the lock hold?", "lock", answer="It holds four barges."),
        answered("what opens by hand?", "gate", "lock", answer="The sluices open by hand."),
        answered("what is lifted?", "pump", answer="Water is lifted."),
        answered("What  is LIFTED?", "pump", "mill", answer="Rye.", split="valid"),
    ])  # fmt: skip
    lock = f"Lock\n{LOCK}"
    made.write(site.made, [
        Made("what holds barges?", (lock,), ("lock",), "llm", ("The lock holds four barges.",)),
        Made("what closes?", (f"Gate\n{GATE}", lock), ("gate", "lock"), "llm", ("", "The lock.")),
    ])  # fmt: skip
    found = site.triples()
    assert [(one.how, one.question) for one in found] == [
        ("distilled", "what opens by hand?"),
        ("distilled", "what closes?"),
    ]
    told = " ".join(text for one in found for text in (*one.passages, one.answer)).lower()
    assert not any(word in told for word in ("lock", "barges", "sluices", "lifted", "rye"))


def test_the_answers_of_a_removed_document_are_gone_from_the_disk(site: Site) -> None:
    site.put(DOCUMENTS, [answered("what does the pump lift?", "pump", answer="Zephyrine water.")])
    made.write(site.made, [
        Made("q one", (f"Pump\n{PUMP}",), ("pump",), "llm", ("Quixotic.",)),
        Made("q two", (f"Gate\n{GATE}", PUMP), ("gate", "pump"), "llm", ("At dusk.", "Vexing.")),
    ])  # fmt: skip
    words = (b"Zephyrine", b"Quixotic", b"Vexing")
    assert all(word in _bytes_in(site.library.parent) for word in words)
    assert [one.how for one in site.triples()] == ["supplied", "made", "made"]
    replies = site.made.with_name("replies.jsonl")
    forget_documents(site.library, site.made, replies, ["pump"])
    with Library.open(site.library) as library:
        library.delete_documents(["pump"])
        library.erasure.clear()
    assert not any(word in _bytes_in(site.library.parent) for word in words)
    (left,) = site.triples()
    assert (left.how, left.answer, left.passages) == ("made", "At dusk.", (f"Gate\n{GATE}",))


def _bytes_in(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())


@given(
    splits=st.lists(st.sampled_from(["", "train", "valid", "test"]), min_size=1, max_size=5),
    pairs=st.lists(
        st.tuples(
            st.sampled_from("abc"),
            st.sets(st.integers(0, 5), min_size=1, max_size=3),
            st.booleans(),
            st.sampled_from(["train", "valid", "test"]),
        ),
        max_size=8,
    ),
)
@settings(max_examples=40, deadline=None)
def test_one_question_each_and_only_of_what_may_be_learned(
    splits: list[str], pairs: list[tuple[str, set[int], bool, str]]
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        site = Site(Path(folder), Path("none"))
        site.put(
            [Document(str(n), "", f"Text {n}.", split) for n, split in enumerate(splits)],
            [
                answered(q, *map(str, sorted(names)), answer=f"answer {q}" * has, split=split)
                for q, names, has, split in pairs
            ],
        )
        with Library.open(site.library) as library:
            found = questions_to_learn(site.spec, library)
            judged = {pair.query for name in ("valid", "test") for pair in library.pairs(name)}
            learned = {pair.query for pair in library.pairs("train")}
    assert len({one.question for one in found}) == len(found)
    assert {one.question for one in found} <= learned - judged
    assert all(one.passages for one in found)
    may = {str(n) for n, split in enumerate(splits) if split in ("", "train")}
    assert {passage.document_id for one in found for passage in one.passages} <= may
    counts = counts_of(found)
    assert counts.supplied + counts.made + counts.to_distil == len(found)
    assert counts.supplied == sum(bool(one.answers) for one in found)
