"""A question's journey, from the extractive generator to the answering worker's jobs."""

from __future__ import annotations

import re
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from daemon.answering.abstention import NOT_ANSWERED
from daemon.answering.answering import Answered, QuestionRefusedError
from daemon.answering.extractive import ExtractiveGenerator, sentences_of
from daemon.answering.generator import GeneratedAnswer, cite
from daemon.evaluation.rankings import exact, held_out, weigh
from daemon.evaluation.rankings import judged as judged_ranking
from daemon.jobs import answering
from daemon.jobs import learning as learning_jobs
from daemon.learning.options import EvaluationError
from daemon.library.catalogue.filters import Filters
from daemon.library.contents import Passage
from daemon.library.dense.folder import IndexDamaged
from daemon.library.readers.documents import Document, Pair
from daemon.library.schema import LibraryError
from daemon.library.search import USUAL_WEIGHTS, Candidates, Ranked
from daemon.library.store import Library
from daemon.process.workers import Worker
from daemon.state.versions import VersionError, read_version
from tests.daemon.answering.conftest import PAIRS, TEXTS, WORDS, Site
from tests.daemon.library.test_search import bag_of_words

# ---- the extractive generator -----------------------------------------------------


def ranked(*texts: str, title: str = "") -> list[Ranked]:
    return [
        Ranked(Passage(n, f"p{n}", f"d{n}", title, text), 1.0 / (60 + n))
        for n, text in enumerate(texts, start=1)
    ]


TABLE = "Wing\tBeds\nEast\t30\nWest\t28"
WARDS = Passage(1, "p", "d", "Wards", TABLE, "Beds in use", "table", 4)


def test_a_row_of_a_table_is_cited_with_its_header() -> None:
    whole = Ranked(WARDS, 1.0)
    assert cite(1, whole, "East\t30").context == "Beds in use\nWing\tBeds"
    assert cite(1, whole, "Wing\tBeds").context == "Beds in use"
    assert cite(0, whole, TABLE).context == "Beds in use", "which begins with its header"
    scan = cite(1, Ranked(replace(WARDS, page=4, ocr=True), 1.0), TABLE)
    assert (scan.page, scan.ocr, cite(1, whole, TABLE).ocr) == (4, True, False)
    later = Ranked(replace(WARDS, text="West\t28", context="Wing\tBeds"), 1.0)
    assert cite(1, later, "West\t28").context == "Wing\tBeds"


def test_no_row_stands_above_another_one() -> None:
    titled = replace(WARDS, text=f"By wing\n{TABLE}")
    assert titled.above("West\t28") == "Beds in use\nBy wing\nWing\tBeds"
    assert [titled.above(row) for row in ("By wing", "Wing\tBeds")] == ["Beds in use"] * 2
    later = replace(WARDS, text="East\t30\nWest\t28", context="By wing\nWing\tBeds")
    assert later.above("West\t28") == "By wing\nWing\tBeds"
    single = replace(WARDS, text="North\nEast\nWest", context="Wings")
    assert single.above("West") == "Wings"


def test_a_row_of_a_table_answers_and_not_the_header_above_it() -> None:
    rows = sentences_of(WARDS)
    assert [one.text for one in rows] == ["Wing\tBeds", "East\t30", "West\t28"]
    assert rows[2].embedding_text == "Wards\nBeds in use\nWing\tBeds\nWest\t28"
    given = answer("beds, west wing, west", [Ranked(WARDS, 1.0)])
    assert given.text == "(Beds in use; Wing: Beds) West: 28 [1]"
    assert given.citations[0].text == "West\t28", "it cites the row as it stands in the document"


def test_every_row_of_a_table_may_answer() -> None:
    """Sentences further down say less than the first; rows further down do not."""
    rows = "\n".join(f"bed {n}\t{n}" for n in range(40))
    table = Ranked(replace(WARDS, text=f"{rows}\nrope\tgreen"), 1.0)
    given = answer("rope green", [*ranked("One. Two. Three. Four. Five. Six."), table])
    assert [one.text for one in given.citations] == ["rope\tgreen"]


def test_what_only_names_or_announces_something_is_no_answer() -> None:
    given = answer("How is hemp tarred?", ranked("How hemp is tarred. Hemp is tarred by:", "Hemp"))
    assert given.text == "How hemp is tarred. [1]"
    table = replace(WARDS, text="Wing\tBeds\nBeds of all wings\t\nWest\t28")
    given = answer("beds of all wings, west", [Ranked(table, 1.0)])
    assert [one.text for one in given.citations] == ["West\t28"], "the other row has no number"
    assert answer("Hemp?", ranked("Hemp")).text == "Hemp [1]", "where there is nothing else"


def test_neither_the_header_of_a_letter_nor_whom_it_greets_answers() -> None:
    letter = (
        "From: Ole Berg <ole@north.example>\nTo: Dr. Diallo. <ad@north.example>\n"
        "Date: Tue, 5 Mar 2024 10:00:00 +0100\n\nDear Dr Diallo,\n\nThe mast is tarred by hand."
    )
    [found] = ranked(letter)
    mail = replace(found, passage=replace(found.passage, document_id="post/mast.eml"))
    for question in ("Date from Ole Berg to Diallo, mast", "Dear Dr Diallo, mast"):
        assert answer(question, [mail]).text == "The mast is tarred by hand. [1]"
    assert "From: Ole" in answer("From: Ole Berg", [found]).text, "in a file that is no letter"
    header = letter.partition("\n\n")[0]
    alone = replace(mail, passage=replace(mail.passage, text=header))
    assert "Ole Berg" in answer("from Ole Berg", [alone]).text, "where there is nothing else"


def answer(question: str, passages: list[Ranked]) -> GeneratedAnswer:
    return ExtractiveGenerator(
        lambda asked: bag_of_words([asked])[0],
        lambda sentences: bag_of_words([sentence.embedding_text for sentence in sentences]),
    ).generate(question, passages)


def test_without_passages_nothing_was_found() -> None:
    assert answer("Which rope?", []) == GeneratedAnswer(NOT_ANSWERED, ())


def test_the_sentence_nearest_the_question_is_the_answer() -> None:
    text = "The yard opens at dawn. Hemp rope is tarred twice. Geese fly south in autumn."
    given = answer("Is hemp rope tarred?", ranked("The mast is a pine trunk.", text))
    assert given.text == "Hemp rope is tarred twice. [1]"
    [citation] = given.citations
    assert (citation.number, citation.document_id, citation.passage_id) == (1, "d2", "p2")
    assert citation.text == "Hemp rope is tarred twice."
    assert citation.score == pytest.approx(1 / 62)


def test_good_sentences_stand_in_reading_order_each_with_its_mark() -> None:
    given = answer(
        "How is hemp rope tarred?",
        ranked(
            "Hemp rope is slowly tarred. A cook eats fish.", "Now how is hemp rope really tarred?"
        ),
    )
    assert given.text == ("Hemp rope is slowly tarred. [1] Now how is hemp rope really tarred? [2]")
    assert [c.document_id for c in given.citations] == ["d1", "d2"]


def test_the_same_sentence_is_not_said_twice() -> None:
    given = answer(
        "Is rope tarred?", ranked("Rope is tarred.", "Rope is tarred!", "ROPE is tarred.")
    )
    assert given.text == "Rope is tarred. [1]"


def test_of_equal_sentences_that_of_the_better_passage_is_cited() -> None:
    given = answer("Is rope tarred?", ranked("Rope is tarred.", "Rope is tarred."))
    assert [c.document_id for c in given.citations] == ["d1"]


def test_a_long_first_passage_leaves_room_for_the_others() -> None:
    long = " ".join(f"The {word} goose flies south." for word in WORDS[:20])
    given = answer("Is hemp rope tarred?", ranked(long, "Hemp rope is tarred twice."))
    assert given.text == "Hemp rope is tarred twice. [1]"


def test_no_more_than_three_sentences() -> None:
    text = " ".join(f"Rope number {word} is tarred." for word in ("one", "red", "old", "big"))
    assert len(answer("Which rope number is tarred?", ranked(text)).citations) == 3


def test_a_sentence_that_says_it_is_known_by_its_title() -> None:
    passages = [
        *ranked("It is tarred twice.", title="Anchor chain"),
        *ranked("It is tarred twice a year.", title="Hemp rope"),
    ]
    assert answer("Is hemp rope tarred twice?", passages).citations[0].title == "Hemp rope"


def test_line_breaks_inside_a_sentence_do_not_break_the_answer() -> None:
    assert answer("Is rope tarred?", ranked("Rope is\n  tarred.")).text == "Rope is tarred. [1]"


# ---- the answering worker's jobs ----------------------------------------------------


def test_a_question_is_answered_with_citations_and_passages(opened: Site) -> None:
    answered = answering.ask("Which oil burns in every lamp?", 2)
    assert "Whale oil burns in every lamp. [1]" in answered.text
    assert answered.citations[0].document_id == "lamp"
    assert answered.citations[0].text == "Whale oil burns in every lamp."
    assert (answered.passages[0].number, answered.passages[0].document_id) == (0, "lamp")
    assert answered.passages[0].text == TEXTS["lamp"][1]
    assert len(answered.passages) == 2
    assert answered.model_digest == opened.digest


def test_each_mark_has_its_citation_and_each_citation_its_passage(opened: Site) -> None:
    answered = answering.ask("What is cut, sealed and tarred daily?", 4)
    marks = [int(mark) for mark in re.findall(r"\[(\d+)\]", answered.text)]
    assert marks == [citation.number for citation in answered.citations]
    texts = {passage.passage_id: passage.text for passage in answered.passages}
    assert all(citation.text in texts[citation.passage_id] for citation in answered.citations)


def test_passages_are_found_without_an_answer(opened: Site) -> None:
    question = "Which oil burns in Lamps?"
    searched = answering.search(question, 3, explain=True)
    answered = answering.ask(question, 3)
    assert [(r.passage.id, r.score) for r in searched.passages] == [
        (one.passage_id, one.score) for one in answered.passages
    ]
    at = [r.passage.document_id for r in searched.passages].index("lamp")
    assert searched.words[at] == ["oil", "burns", "in", "lamps"], "lamps are found by lamp"
    assert searched.title_words[at] == ["lamps"]
    assert searched.title_words[1 - at] == []
    assert (searched.model_digest, searched.weights) == (opened.digest, USUAL_WEIGHTS)
    of = [
        [r.passage.document_id for r in answering.search(question, 3, False, only).passages]
        for only in (Filters("ro"), Filters(title="sails"), Filters(title="Rope"))
    ]
    assert of == [["rope"], ["sail"], ["rope"]]
    with pytest.raises(QuestionRefusedError, match="no document here fits all"):
        answering.search(question, 3, False, Filters("lamp", title="rope"))
    plain = answering.search(question, 3, explain=False)
    assert [r.passage for r in plain.passages] == [r.passage for r in searched.passages]
    assert plain.words == plain.title_words == [[], [], []]
    with pytest.raises(QuestionRefusedError, match="blank"):
        answering.search(" ", 3, explain=False)


def test_before_a_version_is_open_a_question_is_refused(site: Site) -> None:
    with pytest.raises(answering.NotOpenError, match="ingest documents"):
        answering.ask("Which rope?", 3)


@pytest.mark.parametrize(
    ("question", "refusal"),
    [
        (" \n", "blank"),
        ("w" * 16385, "longer than 16 KiB"),
        ("é" * 8193, "longer than 16 KiB"),
    ],
)
def test_malformed_questions_are_refused(opened: Site, question: str, refusal: str) -> None:
    with pytest.raises(QuestionRefusedError, match=refusal):
        answering.ask(question, 3)


@pytest.mark.parametrize("question", ['" OR 1=1; --', "\0", "漢字?", "w" * 16384, "*" * 99])
def test_any_other_question_gets_an_answer(opened: Site, question: str) -> None:
    assert answering.ask(question, 100).text


def test_a_site_without_documents_says_that_it_found_nothing(site: Site) -> None:
    empty = Site(site.spec, site.folder / "empty", site.digest, site.index)
    shutil.copytree(site.versions, empty.versions)
    empty.ingest([], [])
    empty.open(index=empty.indexed(empty.digest))
    answered = answering.ask("Which rope?", 5)
    assert (answered.text, answered.citations, answered.passages) == (NOT_ANSWERED, (), ())


def test_a_question_asked_meanwhile_is_answered_by_the_old_version(opened: Site) -> None:
    newer = opened.other_version()
    index = opened.indexed(newer)
    assert answering.ask("Which oil?", 3).model_digest == opened.digest
    opened.open(newer, index)
    assert answering.ask("Which oil?", 3).model_digest == newer
    shape = learning_jobs.describe(opened.spec).shape_manifest
    vector = read_version(opened.versions, newer, shape.digest)
    assert (answering.opened_version().retriever.vector() == vector).all()


def same(one: Answered, other: Answered) -> bool:
    return (one.text, one.passages, one.model_digest) == (
        other.text,
        other.passages,
        other.model_digest,
    )


def damage_index(site: Site, index: Path) -> None:
    (index / "index.hnsw").write_bytes(b"rubbish")


def damage_version(site: Site, index: Path) -> None:
    for path in site.versions.iterdir():
        if path.stem != site.digest.hex():
            path.write_bytes(b"rubbish")


def remove_library(site: Site, index: Path) -> None:
    site.library.unlink()


@pytest.mark.parametrize(
    ("damage", "refusal"),
    [
        (damage_index, IndexDamaged),
        (damage_version, VersionError),
        (remove_library, LibraryError),
    ],
)
def test_a_version_that_cannot_be_opened_leaves_the_old_one_answering(
    opened: Site, damage: Callable[[Site, Path], None], refusal: type[Exception]
) -> None:
    before = answering.ask("Which oil burns?", 3)
    newer = opened.other_version()
    index = opened.indexed(newer)
    damage(opened, index)
    with pytest.raises(refusal):
        opened.open(newer, index)
    assert same(answering.ask("Which oil burns?", 3), before)


def test_an_index_of_one_version_is_not_opened_with_another(opened: Site) -> None:
    with pytest.raises(IndexDamaged, match="another model version"):
        opened.open(opened.other_version(), opened.index)


def test_documents_that_came_after_the_index_are_found_by_their_words(opened: Site) -> None:
    opened.ingest([Document("keel", "Keels", "Oak makes a straight keel.")], [])
    assert "keel" in [passage.document_id for passage in answering.ask("keel", 5).passages]
    assert "keel" not in [passage.document_id for passage in answering.ask("rope", 5).passages]


def test_nothing_is_judged_while_passages_are_not_embedded(opened: Site) -> None:
    """Questions about them would count as not found, and the version as ruined."""
    opened.ingest([Document("keel", "Keels", "Oak makes a straight keel.")], [])
    with pytest.raises(EvaluationError, match="1 of 5 passages are not embedded yet"):
        answering.evaluate("test")


def test_evaluation_scores_the_ranking_that_training_changes(opened: Site) -> None:
    judged = answering.evaluate("test")
    assert judged.dense.questions == 2
    assert judged.dense.recall_at_10 == 1.0  # four documents: all are among the first ten
    assert 0.25 <= judged.dense.mrr_at_10 <= 1.0
    assert judged.model_digest == opened.digest
    assert set(judged.figures) == {"bm25", "vanilla", "dense", "fused"}
    for figures in judged.figures.values():
        assert figures["mrr@10"].low <= figures["mrr@10"].mean <= figures["mrr@10"].high
    figures = judged.figures["dense"]
    assert figures["mrr@10"].mean == judged.dense.mrr_at_10
    assert figures["hit@1"].mean == judged.dense.hit_at_1
    newer = opened.other_version()
    opened.open(newer, opened.indexed(newer))
    assert answering.evaluate("test").model_digest == newer


def test_the_first_version_is_the_encoder_and_the_next_is_measured_by_it(
    opened: Site,
) -> None:
    more = [Pair(f"{word}?", (name,), "test") for name in TEXTS for word in WORDS[::3]]
    opened.ingest([], more)  # so many that two rankings do not score the same by chance
    first = answering.evaluate("test")
    assert first.figures["dense"] == first.figures["vanilla"]
    assert set(first.over_vanilla) == {"bm25", "dense", "fused"}
    assert {(f.mean, f.low, f.high) for f in first.over_vanilla["dense"].values()} == {(0, 0, 0)}
    newer = opened.other_version()
    opened.open(newer, opened.indexed(newer))
    second = answering.evaluate("test")
    assert second.figures["vanilla"] == first.figures["vanilla"]
    assert second.figures["bm25"] == first.figures["bm25"]
    for name, gain in second.over_vanilla["dense"].items():
        difference = second.figures["dense"][name].mean - second.figures["vanilla"][name].mean
        assert gain.mean == pytest.approx(difference, abs=1e-12)
    assert any(gain.mean for gain in second.over_vanilla["dense"].values())


def test_where_there_is_no_test_split_the_validation_pairs_are_asked(opened: Site) -> None:
    assert answering.evaluate("").split == "test"
    with pytest.raises(EvaluationError, match="no pairs of split valid"):
        answering.evaluate("valid")
    opened.ingest([], [replace(pair, split="valid") for pair in PAIRS])
    assert (answering.evaluate("").split, answering.evaluate("").dense.questions) == ("valid", 2)
    opened.ingest([], [replace(pair, split="train") for pair in PAIRS])
    with pytest.raises(EvaluationError, match="no pairs of split test or valid"):
        answering.evaluate("")


def met(library: Library, pairs: list[Pair], nearest: list[list[int]]) -> list[Candidates]:
    """What questions meet where these are the nearest, and titles say nothing."""
    labels = np.array(library.rowids())
    return [
        Candidates(
            labels,
            np.array([0.5 - 0.02 * (label not in near) for label in labels.tolist()], np.float32),
            np.zeros(len(labels), np.float32),
            np.array([by_words.get(label, 0.0) for label in labels.tolist()], np.float32),
            np.ones(len(labels), bool),
        )
        for near, by_words in (
            (near, dict(library.bm25(pair.query, 50)))
            for near, pair in zip(nearest, pairs, strict=True)
        )
    ]


@pytest.mark.slow
def test_words_count_as_the_validation_pairs_say(opened: Site) -> None:
    version = answering.opened_version()
    assert (version.weights, version.weighed_by) == (USUAL_WEIGHTS, 0)
    many = [Pair(f"{word}?", (name,), "valid") for name in TEXTS for word in WORDS[::5]]
    opened.ingest([], many[:19])
    opened.open()
    version, judged = answering.opened_version(), answering.evaluate("valid")
    assert version.weighed_by == judged.weighed_by == 0, "too few"
    opened.ingest([], many)
    opened.open()
    version, judged = answering.opened_version(), answering.evaluate("valid")
    assert version.weighed_by == judged.weighed_by == len(many)
    assert judged.weights == version.weights
    # Nothing is among the weights, so to fuse was no worse than not to.
    assert judged.figures["fused"]["mrr@10"].mean >= judged.dense.mrr_at_10
    with Library.open(opened.library, read_only=True) as library:
        of = {p.document_id: p.rowid for p in library.passages()}
        asked = [
            Pair(f"{text} ({n})", (d,), "valid") for d, (text, _) in TEXTS.items() for n in "123456"
        ]
        right = [[of[pair.positives[0]]] for pair in asked]
        wrong = [[label for label in of.values() if label != found] for (found,) in right]
        assert weigh(library, asked, met(library, asked, wrong)).words > 0.0, (
            "words find all that meaning misses"
        )
        assert weigh(library, asked, met(library, asked, right)) == USUAL_WEIGHTS, (
            "all weights do as well"
        )
        others = [
            replace(pair, positives=(d,)) for pair, d in zip(asked, [*TEXTS][1:] * 8, strict=False)
        ]
        seen = [[of[pair.positives[0]], *of.values()] for pair in others]
        chosen = weigh(library, others, met(library, others, seen))
        assert chosen.words <= USUAL_WEIGHTS.words


def test_an_encoder_that_has_not_read_every_passage_is_not_compared(opened: Site) -> None:
    """As where the index is made without the encoder's own features (adapt is not "head")."""
    with closing(sqlite3.connect(opened.library)) as library:
        library.execute("DELETE FROM feature WHERE rowid IN (SELECT min(rowid) FROM feature)")
        library.commit()
    judged = answering.evaluate("test")
    assert set(judged.figures) == {"bm25", "dense", "fused"}
    assert judged.over_vanilla == {}
    learning_jobs.embed_frozen(opened.spec, opened.library, "test", 60.0)
    assert "vanilla" in answering.evaluate("test").figures


# ---- rankings side by side ------------------------------------------------------------


def test_the_nearest_by_hand_and_equal_ones_by_label() -> None:
    vectors = np.array([[0, 1], [1, 0], [1, 0], [0.6, 0.8]], dtype=np.float32)
    labels = np.array([40, 30, 20, 10])
    queries = np.array([[1, 0], [0, 1]], dtype=np.float32)
    assert exact(queries[:1], labels, vectors, depth=3) == [[20, 30, 10]]
    assert exact(queries, labels, vectors) == [[20, 30, 10, 40], [40, 10, 20, 30]]
    assert exact(queries, labels[:0], vectors[:0]) == [[], []]


def test_who_finds_nothing_ranks_below_whoever_finds_it_late() -> None:
    """By words only one passage was found, a wrong one: that is no second place."""
    document_of = {n: f"d{n}" for n in range(1, 8)}
    pairs = [Pair("q", ("d5",), "test")]
    late = judged_ranking([[1, 2, 3, 4, 5]], pairs, document_of).scores["avg_rank"].tolist()
    never = judged_ranking([[1]], pairs, document_of).scores["avg_rank"].tolist()
    assert (late, never) == ([5], [8])


def test_a_sample_of_the_questions_is_the_same_one_each_time(opened: Site) -> None:
    many = [Pair(f"which rope is number {n}?", ("rope",), "valid") for n in range(50)]
    opened.ingest([], many)
    with Library.open(opened.library) as library:
        split, some = held_out(library, "valid", most=10)
        assert held_out(library, "valid", most=10)[1] == some
        assert (split, len(some), len(set(some))) == ("valid", 10, 10)
        assert some != many[:10]
        assert held_out(library, "valid", most=50)[1] == many


@pytest.mark.slow
async def test_in_a_worker_process_answers_and_refusals_come_back(site: Site) -> None:
    worker = Worker("answering", threads=1)
    try:
        with pytest.raises(answering.NotOpenError):
            await worker.run(answering.ask, "Which oil burns?", 2)
        await worker.run(
            answering.open_version, site.spec, site.library, site.versions, site.digest, site.index
        )
        answered = await worker.run(answering.ask, "Which oil burns in every lamp?", 2)
        assert answered.citations[0].document_id == "lamp"
        with pytest.raises(QuestionRefusedError):
            await worker.run(answering.ask, "", 2)
        with pytest.raises(IndexDamaged):
            await worker.run(
                answering.open_version,
                site.spec,
                site.library,
                site.versions,
                site.digest,
                site.folder / "nowhere",
            )
    finally:
        await worker.stop()
