"""The bundled demonstration corpus keeps the rules its README promises.

The rules are what make the demonstration honest: training never sees a test document's questions,
questions are no copies of sentences, and only the house language links the two.
"""

import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from daemon.library.passages import sentences

CORPUS = Path(__file__).parents[3] / "daemon" / "fedctl" / "demo" / "corpus"
SITES = ("ostrey", "tarrow", "vellham")
SPLITS = ("train", "test")
LONGEST_SHARED_RUN = 5  # words that a question may have in common with its document, in a row
LONGEST_SENTENCE = 36  # words; a printed answer is made of one to three sentences
LONGEST_EXPLANATION = 70  # characters; one line beneath an answer

Record = dict[str, Any]


def read(path: Path) -> list[Record]:
    lines = path.read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def documents(site: str) -> list[Record]:
    return read(CORPUS / site / "documents.jsonl")


def pairs(site: str, split: str) -> list[Record]:
    return read(CORPUS / site / f"pairs_{split}.jsonl")


def every_pair() -> Iterator[Record]:
    for site in SITES:
        for split in SPLITS:
            yield from pairs(site, split)


def words(text: str) -> list[str]:
    return re.findall(r"[a-z0-9]+", text.lower())


def full_text(document: Record) -> str:
    return f"{document['title']}\n{document['text']}"


def runs(sequence: list[str], length: int) -> set[tuple[str, ...]]:
    return {tuple(sequence[i : i + length]) for i in range(len(sequence) - length + 1)}


GLOSSARY = read(CORPUS / "glossary.jsonl")
TERM_OF = {form: entry["term"] for entry in GLOSSARY for form in entry["forms"]}
PLAIN_WORDS = {word for entry in GLOSSARY for word in entry["plain_words"]}


def subjects(document: Record) -> frozenset[str]:
    """The house words that a document is about: those it uses at least three times."""
    counts = Counter(TERM_OF[word] for word in words(full_text(document)) if word in TERM_OF)
    return frozenset(term for term, count in counts.items() if count >= 3)


def test_there_are_exactly_the_three_sites() -> None:
    folders = tuple(sorted(path.name for path in CORPUS.iterdir() if path.is_dir()))
    assert folders == SITES
    assert all(re.fullmatch(r"[a-z0-9-]+", site) for site in folders)


@pytest.mark.parametrize("site", SITES)
def test_documents_have_the_promised_format(site: str) -> None:
    for document in documents(site):
        assert list(document) == ["id", "title", "text", "split"]
        assert re.fullmatch(rf"{site}/[a-z0-9-]+", document["id"])
        assert document["split"] in SPLITS
        assert document["title"].strip() == document["title"] != ""
        assert 80 <= len(document["text"].split()) <= 140, document["id"]
        assert "\n" not in document["text"]


@pytest.mark.parametrize("site", SITES)
def test_sizes_are_large_enough_to_measure(site: str) -> None:
    splits = Counter(document["split"] for document in documents(site))
    assert splits["train"] >= 30
    assert splits["test"] >= 18
    assert len(pairs(site, "train")) >= 50
    assert len(pairs(site, "test")) >= 30


def test_document_ids_titles_and_texts_are_unique() -> None:
    everything = [document for site in SITES for document in documents(site)]
    for key in ("id", "title", "text"):
        assert len({document[key] for document in everything}) == len(everything)


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("site", SITES)
def test_pairs_point_to_documents_of_their_own_split(site: str, split: str) -> None:
    split_of = {document["id"]: document["split"] for document in documents(site)}
    for pair in pairs(site, split):
        assert list(pair) == ["query", "positives", "doc_id"]
        assert pair["positives"] == [pair["doc_id"]]
        assert split_of[pair["doc_id"]] == split, pair["query"]
        assert pair["query"].endswith("?")


@pytest.mark.parametrize("site", SITES)
def test_every_document_is_asked_about(site: str) -> None:
    asked = {pair["doc_id"] for split in SPLITS for pair in pairs(site, split)}
    assert asked == {document["id"] for document in documents(site)}


def test_no_question_occurs_twice_in_train_or_test() -> None:
    questions = Counter(" ".join(words(pair["query"])) for pair in every_pair())
    assert [question for question, count in questions.items() if count > 1] == []


def test_no_test_document_has_a_training_question() -> None:
    for site in SITES:
        trained = {pair["doc_id"] for pair in pairs(site, "train")}
        assert trained.isdisjoint(pair["doc_id"] for pair in pairs(site, "test"))


@pytest.mark.parametrize("site", SITES)
def test_no_test_document_repeats_the_subject_of_a_training_document(site: str) -> None:
    of_split = {
        split: {subjects(document) for document in documents(site) if document["split"] == split}
        for split in SPLITS
    }
    assert of_split["train"].isdisjoint(of_split["test"])


def test_no_question_copies_a_sentence_of_its_document() -> None:
    texts = {
        document["id"]: words(full_text(document)) for site in SITES for document in documents(site)
    }
    length = LONGEST_SHARED_RUN + 1
    for pair in every_pair():
        shared = runs(words(pair["query"]), length) & runs(texts[pair["doc_id"]], length)
        assert not shared, (pair["query"], shared)


def test_questions_never_use_the_house_language() -> None:
    for pair in every_pair():
        assert TERM_OF.keys().isdisjoint(words(pair["query"])), pair["query"]


def test_documents_never_use_the_ordinary_word_for_a_house_word() -> None:
    for site in SITES:
        for document in documents(site):
            given_away = PLAIN_WORDS.intersection(words(full_text(document)))
            assert not given_away, (document["id"], given_away)


def test_every_document_is_about_house_words() -> None:
    for site in SITES:
        for document in documents(site):
            assert len(subjects(document)) >= 2, document["id"]


def test_the_federation_teaches_every_house_word_often_enough() -> None:
    subject_of = {d["id"]: subjects(d) for site in SITES for d in documents(site)}
    taught = Counter(
        term
        for site in SITES
        for pair in pairs(site, "train")
        for term in subject_of[pair["doc_id"]]
    )
    assert {entry["term"] for entry in GLOSSARY} == set(taught)
    assert min(taught.values()) >= 6, taught.most_common()[-3:]


@pytest.mark.parametrize("site", SITES)
def test_a_site_alone_is_not_taught_most_of_what_its_test_needs(site: str) -> None:
    of_split: dict[str, Counter[str]] = {split: Counter() for split in SPLITS}
    for document in documents(site):
        of_split[document["split"]].update(subjects(document))
    needed = of_split["test"]
    missing = sum(count for term, count in needed.items() if of_split["train"][term] == 0)
    assert missing / needed.total() >= 0.5


def test_glossary_forms_belong_to_one_term() -> None:
    forms = [form for entry in GLOSSARY for form in entry["forms"]]
    assert len(forms) == len(set(forms))
    assert PLAIN_WORDS.isdisjoint(forms)


# ---- what fedctl demo prints ------------------------------------------------


def test_each_house_word_is_explained_in_a_line_of_plain_words() -> None:
    for entry in GLOSSARY:
        assert entry["term"].lower() in entry["forms"]
        explanation = words(entry["means"])
        assert len(entry["means"]) <= LONGEST_EXPLANATION, entry["term"]
        assert TERM_OF.keys().isdisjoint(explanation), entry["term"]
        assert set(entry["plain_words"]).intersection(explanation), entry["term"]


def test_house_words_are_written_alike_wherever_they_occur() -> None:
    """As a name, an abbreviation or a form: a lower-case form would be an ordinary word."""
    for site in SITES:
        for document in documents(site):
            for word in re.findall(r"[A-Za-z0-9]+", full_text(document)):
                if word.lower() in TERM_OF:
                    assert word.startswith(TERM_OF[word.lower()][:3]), (document["id"], word)


def test_almost_every_sentence_holds_a_house_word() -> None:
    """Whichever sentences an answer is made of, they are in the house language."""
    of_all: list[bool] = []
    for site in SITES:
        for document in documents(site):
            texts = sentences(document["text"])
            assert max(len(text.split()) for text in texts) <= LONGEST_SENTENCE, document["id"]
            holds = [not TERM_OF.keys().isdisjoint(words(text)) for text in texts]
            assert sum(holds) / len(holds) >= 0.6, document["id"]
            of_all += holds
    assert sum(of_all) / len(of_all) >= 0.9


@pytest.mark.parametrize("site", SITES)
def test_the_question_that_the_demo_asks_needs_what_other_sites_teach(site: str) -> None:
    asked = pairs(site, "test")[0]["doc_id"]
    of_document = {document["id"]: subjects(document) for document in documents(site)}
    split_of = {document["id"]: document["split"] for document in documents(site)}
    taught_here = {
        term for one, terms in of_document.items() if split_of[one] == "train" for term in terms
    }
    assert of_document[asked].isdisjoint(taught_here)
