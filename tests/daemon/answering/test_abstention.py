"""When a site says that its documents do not answer."""

from __future__ import annotations

import math
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from daemon.answering.abstention import (
    ALWAYS_ANSWERS,
    NO_EVIDENCE,
    NOT_ANSWERED,
    by_pairs,
    evidence_among,
    evidence_of,
    evidence_without_answers,
    without_pairs,
)
from daemon.answering.general_questions import GENERAL_QUESTIONS
from daemon.jobs import answering, answers
from daemon.library.readers.documents import Document, Pair
from daemon.library.search import USUAL_WEIGHTS, Candidates
from tests.daemon.answering.conftest import PAIRS, Site

GENERAL = np.linspace(0.0, 0.3, 100)

# ---- what is too little -----------------------------------------------------------


def test_of_answered_questions_no_more_are_refused_than_allowed() -> None:
    answered = np.linspace(0.4, 0.9, 100)
    for lost, refused in ((0.05, 4), (0.2, 19), (0.5, 49)):
        chosen = by_pairs(answered, GENERAL, GENERAL, lost)
        assert sum(chosen.abstains(one) for one in answered) == refused, lost


def test_with_too_few_questions_for_a_share_none_of_them_is_refused() -> None:
    chosen = by_pairs(np.linspace(0.4, 0.9, 18), GENERAL, GENERAL, 0.05)
    assert chosen.threshold == -math.inf


def test_of_new_questions_no_more_are_refused_than_was_allowed() -> None:
    """On average over sites: each draws 40 questions to choose by, and 1,000 others are asked."""
    chance = np.random.default_rng(0)
    refused = []
    for _ in range(200):
        chosen = by_pairs(chance.normal(0.6, 0.1, 40), GENERAL, GENERAL, 0.1)
        refused.append((chance.normal(0.6, 0.1, 1000) < chosen.threshold).mean())
    assert np.mean(refused) <= 0.1


def test_without_pairs_half_of_the_general_questions_are_refused() -> None:
    chosen = without_pairs(GENERAL)
    assert sum(chosen.abstains(one) for one in GENERAL) == 50
    assert chosen.probability(0.9) == 0.0, "nothing is known of questions that are answered"
    assert without_pairs(np.array([])) == ALWAYS_ANSWERS


# ---- how probable an answer is ----------------------------------------------------


def test_the_probability_lies_between_what_is_answered_and_what_is_not() -> None:
    chosen = by_pairs(np.full(50, 0.8), np.full(50, 0.4), np.full(100, 0.4), 0.05)
    assert chosen.probability(0.8) == pytest.approx(51 / 52, abs=0.01), "as Platt aims"
    assert chosen.probability(0.4) == pytest.approx(1 / 152, abs=0.01)
    assert 0.3 < chosen.probability(0.6) < 0.6


def test_where_evidence_says_nothing_both_are_as_probable() -> None:
    same = np.random.default_rng(1).normal(0.5, 0.1, 200)
    assert by_pairs(same, same, same, 0.05).probability(0.5) == pytest.approx(0.5, abs=0.02)


evidence = st.lists(st.floats(-1.0, 2.0, width=32), min_size=1, max_size=60)


@given(answered=evidence, unanswered=evidence, general=evidence)
def test_whatever_was_found_it_is_a_probability(
    answered: list[float], unanswered: list[float], general: list[float]
) -> None:
    chosen = by_pairs(np.array(answered), np.array(unanswered), np.array(general), 0.05)
    assert all(0.0 <= chosen.probability(one) <= 1.0 for one in (-1.0, 0.3, 2.0))
    assert sum(chosen.abstains(one) for one in answered) <= 0.05 * (len(answered) + 1)


# ---- what evidence is -------------------------------------------------------------


def candidates(labels: list[int], cosines: list[float]) -> Candidates:
    zeros = np.zeros(len(labels), np.float32)
    indexed = np.ones(len(labels), np.bool_)
    found = np.array(labels, np.int64), np.array(cosines, np.float32)
    return Candidates(*found, zeros, zeros, indexed)


def test_without_what_answers_it_a_question_has_what_is_left() -> None:
    """All parts of the answer go: another part of it would say the same."""
    document_of = {1: "rules#0", 2: "rules#1", 3: "other", 4: "rules-of-others"}
    pair = Pair("why?", ("rules#0",), "valid")
    found = candidates([1, 2, 3, 4], [0.9, 0.8, 0.3, 0.4])
    assert evidence_among([found], USUAL_WEIGHTS) == pytest.approx([0.9])
    left = evidence_without_answers([found], [pair], USUAL_WEIGHTS, document_of)
    assert left == pytest.approx([0.4])
    alone = candidates([1, 2], [0.9, 0.8])
    left = evidence_without_answers([alone], [pair], USUAL_WEIGHTS, document_of)
    assert left == pytest.approx([NO_EVIDENCE])
    assert evidence_of([]) == NO_EVIDENCE


def test_general_questions_are_a_hundred_different_ones() -> None:
    assert len(set(GENERAL_QUESTIONS)) == 100


# ---- at a site --------------------------------------------------------------------


def trained_site(site: Site) -> None:
    """Of each kind of rope a document, and a question that has its words."""
    kinds = [f"k{number}rope" for number in range(40)]
    site.ingest(
        [Document(kind, kind, f"The {kind} is tarred with {kind} oil.") for kind in kinds],
        [Pair(f"What is the {kind} tarred with?", (kind,), "valid") for kind in kinds],
    )
    site.open(index=site.indexed(site.digest), lost_answers=0.05)


def test_a_question_about_something_else_is_not_answered(site: Site) -> None:
    trained_site(site)
    known = answering.ask("What is the k7rope tarred with?", 3)
    assert "k7rope" in known.text
    strange = answering.ask("Who composed an opera?", 3)
    assert (strange.text, strange.citations) == (NOT_ANSWERED, ())
    assert len(strange.passages) == 3, "the nearest ones"
    assert strange.probability < 0.5 < known.probability


def test_where_nothing_may_be_lost_every_question_is_answered(site: Site) -> None:
    trained_site(site)
    site.open(index=site.indexed(site.digest), lost_answers=0.0)
    strange = answering.ask("Who composed an opera?", 3)
    assert strange.citations
    assert strange.probability == 0.0


def test_a_new_version_says_anew_what_is_too_little(site: Site) -> None:
    """Scores of one version say nothing of another's."""
    trained_site(site)
    before = answering.opened_version().abstention
    newer = site.other_version()
    site.open(newer, site.indexed(newer), lost_answers=0.05)
    after = answering.opened_version().abstention
    assert before.questions == after.questions == 40
    assert before.threshold != after.threshold


def test_a_question_in_a_language_not_known_is_said_to_be(site: Site, tmp_path: Path) -> None:
    """By the encoder's card; also where it is answered, for what was found may be by chance."""
    folder = shutil.copytree(site.spec.encoder, tmp_path / "encoder")
    (folder / "README.md").write_text("---\nlanguage: en\n---\n", encoding="utf-8")
    english = replace(site, spec=replace(site.spec, encoder=str(folder)))
    trained_site(english)
    german = answering.ask("Wer haftet für Schäden am Mietwagen?", 3)
    assert german.text == (
        "The documents do not answer this. It seems to be asked in de, and the encoder that finds "
        "passages was made for en: ask in that."
    )
    assert german.unread_language == "de"
    assert answering.ask("What is the k7rope tarred with?", 3).unread_language == ""
    english.open(index=english.indexed(english.digest), lost_answers=0.0)
    german = answering.ask("Womit ist das k7rope denn geteert und getränkt worden?", 3)
    assert german.citations
    assert (german.unread_language, "asked in" in german.text) == ("de", False)


def test_an_encoder_that_names_no_language_is_said_to_know_any(site: Site) -> None:
    trained_site(site)
    german = answering.ask("Wer haftet für Schäden am Mietwagen?", 3)
    assert (german.text, german.unread_language) == (NOT_ANSWERED, "")


# ---- on which questions it is judged ----------------------------------------------


def kinds_of_rope(
    first: int, last: int, split: str, asks: str = "What is the {} tarred"
) -> list[Pair]:
    kinds = [f"k{number}rope" for number in range(first, last)]
    return [Pair(f"{asks.format(kind)} with?", (kind,), split) for kind in kinds]


def test_no_question_that_found_the_threshold_judges_it(site: Site) -> None:
    """Nor one that differs by capitals and spaces, or stands in both splits."""
    trained_site(site)
    none = answers.unfitted("valid")
    assert (none.pairs, none.split) == ([], "valid")
    assert none.cause.startswith("all 40 pairs of split valid here are those that")
    known = [pair for pair in PAIRS if pair.split == "test"]
    assert answers.unfitted("").pairs == known
    again = kinds_of_rope(0, 5, "test", "what is the  {} TARRED")
    site.ingest([], again)
    assert answers.unfitted("").pairs == known, "these are known"
    others = kinds_of_rope(5, 10, "test", "Which oil is the {} tarred")
    site.ingest([], others)
    judged = answers.unfitted("")
    assert (judged.split, judged.pairs) == ("test", [*known, *others])
    assert "learned from" in answers.unfitted("train").cause


def test_pairs_that_found_nothing_judge_the_threshold_of_general_questions(site: Site) -> None:
    """Too few for a threshold: the site's is that of general questions."""
    few = kinds_of_rope(0, 10, "valid")
    site.ingest(
        [Document(kind, kind, f"The {kind} is tarred.") for [kind] in (p.positives for p in few)],
        few,
    )
    site.open(index=site.indexed(site.digest), lost_answers=0.05)
    assert answering.opened_version().abstention.questions == 0
    assert answers.unfitted("").split == "test", "the site has two of these"
    assert answers.unfitted("valid").pairs == few


def test_evidence_is_that_by_which_a_question_is_refused(site: Site) -> None:
    trained_site(site)
    asked = kinds_of_rope(0, 8, "test", "Which oil is the {} tarred")
    answered, unanswered, by = answers.evidence(asked)
    assert by == answering.opened_version().abstention
    said = [evidence_of(answering.opened_version().search(pair.query, 8)[0]) for pair in asked]
    assert answered == pytest.approx(said, abs=1e-5)
    assert (unanswered < answered).all(), "their documents are left out"
