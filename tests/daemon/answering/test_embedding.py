"""What an answer embeds: with what is kept it says the same, and nothing is kept for too long."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from daemon.answering.embedding import (
    KeptSentences,
    QuestionEmbedder,
    RememberedSentences,
    Sentence,
)
from daemon.answering.extractive import sentences_of
from daemon.jobs import answering
from daemon.jobs import learning as learning_jobs
from daemon.library.contents import Passage
from daemon.library.readers.documents import Document
from daemon.library.sentence_features import SentenceFeatures
from daemon.library.store import Library
from daemon.personal.serving import open_retriever
from tests.daemon.answering.conftest import DOCUMENTS, TEXTS, Site

QUESTIONS = ["Which oil burns in every lamp?", "How is hemp rope tarred?", "What seals the pump?"]


def sentences(site: Site) -> list[Sentence]:
    """Of all that is in the library."""
    with Library.open(site.library, read_only=True) as library:
        return [one for passage in library.passages() for one in sentences_of(passage)]


def opened_without(site: Site) -> None:
    """Nothing is kept of sentences."""
    answering.open_version(site.spec, site.library, site.versions, site.digest, site.index)


def encoding_no_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on: the questions have their vectors, and whatever else is encoded is an error."""
    version = answering.opened_version()
    vectors = {question: version.embed_question(question) for question in QUESTIONS}
    monkeypatch.setattr(QuestionEmbedder, "__call__", lambda _, question: vectors[question])
    encoder = version.retriever.encoder
    encode = encoder.encode

    def nothing(texts: Sequence[str], **more: Any) -> NDArray[np.float32]:
        assert not texts
        return encode(texts, **more)

    monkeypatch.setattr(encoder, "encode", nothing)


def test_answers_are_the_same_with_and_without_what_is_kept(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened_without(site)
    without = [answering.ask(question, 4) for question in QUESTIONS]
    assert not site.sentences.exists()
    site.open()
    assert [answering.ask(question, 4) for question in QUESTIONS] == without
    encoding_no_sentence(monkeypatch)
    assert [answering.ask(question, 4) for question in QUESTIONS] == without
    assert all(answered.citations for answered in without)
    site.open()  # as after a restart
    assert [answering.ask(question, 4) for question in QUESTIONS] == without


def test_kept_sentences_are_as_each_version_embeds_them(opened: Site) -> None:
    newer = opened.other_version()
    index = opened.indexed(newer)
    for digest, folder in ((opened.digest, opened.index), (newer, index)):
        opened.open(digest, folder)
        version, some = answering.opened_version(), sentences(opened)
        for _ in range(2):
            got = version.embed_sentences(some)
            texts = [one.embedding_text for one in some]
            assert np.abs(got - version.retriever.embed_passages(texts)).max() < 1e-3
    assert version.embed_sentences([]).shape == (0, version.retriever.encoder.dimension)


def test_a_changed_sentence_is_not_served_from_an_old_feature(opened: Site) -> None:
    before = answering.opened_version().embed_sentences(sentences(opened))
    changed = Document("rope", "Rope", "Hemp rope is tarred against rot. It lasts four lamps.")
    opened.ingest([changed], [])
    some = sentences(opened)
    version = answering.opened_version()
    exact = version.retriever.embed_passages([one.embedding_text for one in some])
    assert np.abs(version.embed_sentences(some) - exact).max() < 1e-3
    assert np.abs(before - exact[: len(before)]).max() > 1e-2


def features_in_files(site: Site, of: NDArray[np.float32]) -> set[str]:
    """Files of the site in which one of these vectors lies as it is kept."""
    raw = [row.tobytes() for row in of.astype("<f2")]
    files = [file for file in site.folder.rglob("*") if file.is_file()]
    return {file.name for file in files if any(row in file.read_bytes() for row in raw)}


@pytest.mark.parametrize("killed", [False, True])
def test_nothing_of_a_removed_document_is_kept(opened: Site, killed: bool) -> None:
    version = answering.opened_version()
    some = sentences(opened)
    version.embed_sentences(some)
    encoder = version.retriever.encoder
    of = {
        name: encoder.encode(
            [one.embedding_text for one in some if one.passage.document_id == name]
        )
        for name in TEXTS
    }
    kept = {f"sentences.sqlite3{end}" for end in ("", "-wal")}
    assert features_in_files(opened, of["lamp"]) & kept
    learning_jobs.remove(opened.library, ["lamp"])
    if killed:  # between the two steps: made up for when the version is opened
        opened.open()
    else:
        answering.forget_removed(opened.library, opened.sentences)
    assert features_in_files(opened, of["lamp"]) == set()
    assert features_in_files(opened, of["rope"]) & kept


def test_a_removal_begins_no_file(site: Site) -> None:
    answering.forget_removed(site.library, site.sentences)
    assert not site.sentences.exists()


def test_answers_do_not_wait_for_a_disk_that_refuses(site: Site) -> None:
    opened_without(site)
    expected = [answering.ask(question, 4) for question in QUESTIONS]
    site.sentences.mkdir()
    site.open()
    assert [answering.ask(question, 4) for question in QUESTIONS] == expected
    site.sentences.rmdir()
    site.open()
    embedder = answering.opened_version().embed_sentences
    assert isinstance(embedder, KeptSentences)
    assert embedder._kept is not None
    embedder._kept._db.execute("PRAGMA query_only = ON")  # as where nothing can be written
    assert [answering.ask(question, 4) for question in QUESTIONS] == expected
    assert embedder._kept is None


def test_for_what_was_read_in_the_background_no_question_waits(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened_without(site)
    expected = [answering.ask(question, 4) for question in QUESTIONS]

    def some(seconds: float) -> int:
        return learning_jobs.keep_sentences(site.spec, site.library, site.sentences, seconds)

    assert some(0.0) == 0
    assert some(60.0) == len(DOCUMENTS)
    assert some(60.0) == 0
    site.open()
    encoding_no_sentence(monkeypatch)
    assert [answering.ask(question, 4) for question in QUESTIONS] == expected


def test_passages_rank_by_sentences_when_the_background_has_read_them(site: Site) -> None:
    def levels() -> set[str]:
        ranked = answering.search(QUESTIONS[0], 4, explain=True).passages
        return {one.explanation.level for one in ranked if one.explanation is not None}

    site.open(level="sentence")
    assert levels() == {"passage"}
    answering.ask(QUESTIONS[0], 4)  # keeps some sentences of some passages
    assert levels() == {"passage"}
    learning_jobs.keep_sentences(site.spec, site.library, site.sentences, 60.0)
    assert levels() == {"sentence"}
    best = answering.search(QUESTIONS[0], 1, explain=True).passages[0]
    version = answering.opened_version()
    question = version.embed_question(QUESTIONS[0])
    nearest = version.embed_sentences(sentences_of(best.passage)) @ question
    assert best.explanation is not None
    assert best.explanation.cosine == pytest.approx(float(nearest.max()), abs=1e-6)


def test_of_a_trained_encoder_passages_rank_as_a_whole(site: Site) -> None:
    remembered = RememberedSentences(open_retriever(replace(site.spec, adapt="full")))
    some = sentences(site)
    remembered(some)
    assert remembered.of_passages([one.passage for one in some]) is None


def test_the_background_stops_where_the_file_is_full(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("daemon.library.sentence_features.MOST_BYTES", 8192)
    assert learning_jobs.keep_sentences(site.spec, site.library, site.sentences, 60.0) == 0
    monkeypatch.undo()
    with closing(SentenceFeatures.open(site.sentences)) as kept:
        assert kept.bytes_used() > 8192 * 0.9


# ---- an encoder that is trained -----------------------------------------------------------


def passage(number: int, *texts: str) -> list[Sentence]:
    of = Passage(number, f"p{number}", f"d{number}", "Rope", " ".join(texts))
    return [Sentence(of, position, text) for position, text in enumerate(texts)]


def test_of_a_trained_encoder_the_latest_sentences_are_remembered(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    retriever = open_retriever(replace(site.spec, adapt="full"))
    assert not retriever.uses_features
    embed, encoded = retriever.embed_passages, list[str]()

    def counted(texts: Sequence[str], features: Any = None) -> NDArray[np.float32]:
        encoded.extend(texts)
        return embed(texts, features)

    monkeypatch.setattr(retriever, "embed_passages", counted)
    remembered = RememberedSentences(retriever, most=3)
    first, second = passage(1, "Hemp rots.", "Flax rots."), passage(2, "Oil burns.", "Hemp rots.")
    for some in (first, first, second, second):
        got = remembered(some)
        assert np.allclose(got, embed([one.embedding_text for one in some]), atol=1e-6)
    assert encoded == ["Rope\nHemp rots.", "Rope\nFlax rots.", "Rope\nOil burns."]
    remembered(passage(3, "Wax melts."))  # makes room: flax was asked for longest ago
    remembered(passage(1, "Hemp rots."))
    assert encoded[3:] == ["Rope\nWax melts."]
    remembered(passage(1, "Flax rots."))
    assert encoded[4:] == ["Rope\nFlax rots."]
    assert remembered([]).shape == (0, retriever.encoder.dimension)


def test_what_is_remembered_goes_with_the_version(site: Site) -> None:
    spec = replace(site.spec, adapt="full")
    digest = learning_jobs.write_initial_version(spec, site.versions)
    index = learning_jobs.build_index(
        spec, site.library, site.versions, digest, site.folder / "index"
    )
    embedders = []
    for _ in range(2):
        answering.open_version(
            spec, site.library, site.versions, digest, index, sentences_path=site.sentences
        )
        assert answering.ask(QUESTIONS[0], 4).citations[0].document_id == "lamp"
        embedders.append(answering.opened_version().embed_sentences)
    assert embedders[0] is not embedders[1]
    assert not site.sentences.exists(), "of such an encoder nothing is on the disk"
