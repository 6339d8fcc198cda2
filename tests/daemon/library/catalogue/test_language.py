"""The language of a text: found where it can be told, and not guessed where it can't."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from daemon.library.catalogue.language import language_of, language_of_question
from daemon.library.passages import SentenceSplitter
from daemon.library.readers.documents import Block, Document, joined
from daemon.library.store import Library

ENGLISH = (
    "The volunteers look for the patient in the garden first, and call the ward when nobody is "
    "there. Whoever finds them walks along and lets somebody else telephone."
)
GERMAN = (
    "Die Wartung des Aufzugs wird einmal im Jahr von einer Fachkraft durchgeführt, damit er "
    "sicher bleibt. Wer einen Schaden bemerkt, ruft sofort den Dienst an."
)
FRENCH = (
    "Les bénévoles cherchent d'abord le patient dans le jardin, puis appellent le service si "
    "personne ne s'y trouve. Celui qui le rencontre marche avec lui."
)


def of_blocks(*blocks: Block) -> Document:
    text, spans = joined(blocks)
    return Document("d", "", text, spans=spans)


@pytest.mark.parametrize(("text", "code"), [(ENGLISH, "en"), (GERMAN, "de"), (FRENCH, "fr")])
def test_a_text_says_its_language(text: str, code: str) -> None:
    assert language_of(Document("d", "", text)) == code
    assert language_of(of_blocks(Block("heading", "2019"), Block("text", text))) == code


def test_what_the_document_says_stands() -> None:
    assert language_of(Document("d", "", GERMAN, language="pl")) == "pl"


@pytest.mark.parametrize(
    "document",
    [
        Document("d", "", "Lamp oil."),
        Document("d", "", "1 2 3 4 " * 500),
        of_blocks(Block("table", "\n".join(ENGLISH.split()))),
        Document("d", "", "xqzt wvkj qqpl zzrt mmnb vvcx " * 20),
        Document("d", "", "\ud800\udfff" * 200 + "\0" * 200),
        Document("d", "", " "),
    ],
)
def test_what_says_no_language_has_none(document: Document) -> None:
    assert language_of(document) == ""


def test_a_long_text_costs_what_its_beginning_costs() -> None:
    assert language_of(Document("d", "", ENGLISH * 40 + GERMAN * 40_000)) == "en"


@pytest.mark.parametrize(
    ("question", "code"),
    [
        ("Wer haftet für Schäden am Mietwagen?", "de"),
        ("Combien de comprimés peut-on prendre par jour ?", "fr"),
        ("¿Qué documentos pide el tribunal?", "es"),
        ("Perché l'ascensore è chiuso?", "it"),
        ("Ile tabletek można brać dziennie?", "pl"),
        ("Сколько таблеток можно принимать в день?", "ru"),
        ("一日に何錠まで飲めますか?", "ja"),
        ("Who is liable for damage to a hired car?", "en"),
        ("How many tablets may be taken in a day?", "en"),
    ],
)
def test_a_question_says_its_language_in_a_few_words(question: str, code: str) -> None:
    assert language_of_question(question) == code


@pytest.mark.parametrize("question", ["Tarrow?", "GFR < 30 ml/min?", "Diabetes mellitus", "1 2 3"])
def test_names_and_numbers_say_no_language(question: str) -> None:
    assert language_of_question(question) == ""


def test_a_document_is_cut_once_by_the_language_that_was_found(tmp_path: Path) -> None:
    splitter = SentenceSplitter(lambda text: len(text.split()), 30)
    dated = "Der Antrag wurde am 12. März gestellt. Er wurde am 3. Juni genehmigt."
    document = Document("d", "Aufzug", f"{GERMAN} {dated}")
    with Library.open(tmp_path / "library.sqlite3") as library:
        assert library.put_documents([document], splitter=splitter).new == 1
        passages = library.passages_of("d")
        assert [one.language for one in passages] == ["de", "de"]
        assert passages[-1].sentences == [
            "Der Antrag wurde am 12. März gestellt.",
            "Er wurde am 3. Juni genehmigt.",
        ]
        assert library.put_documents([document], splitter=splitter).unchanged == 1
        assert library.passages_of("d") == passages, "not cut anew"
        told = replace(document, language="en")  # and the file says otherwise now
        assert library.put_documents([told], splitter=splitter).changed == 1
        assert library.passages_of("d")[-1].sentences[-1] == "Juni genehmigt."
        other = replace(document, text=ENGLISH)
        assert library.put_documents([other], splitter=splitter).changed == 1
        assert {one.language for one in library.passages_of("d")} == {"en"}
