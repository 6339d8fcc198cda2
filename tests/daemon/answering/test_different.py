"""What a question finds are different texts, and what says nearly the same is told with each."""

from __future__ import annotations

from dataclasses import replace

import pytest

from daemon.jobs import answering
from daemon.jobs import learning as learning_jobs
from daemon.library.catalogue.filters import Filters
from daemon.library.catalogue.near_duplicates import TOLD
from daemon.library.levels import RANKED_ANEW
from daemon.library.readers.documents import Document
from daemon.library.search import _DEEPER, DEPTH, Ranked
from daemon.library.store import Library
from tests.daemon.answering.conftest import DOCUMENTS, PAIRS, Site

QUESTION = "Is hemp rope tarred against rot?"
ROPE = DOCUMENTS[0]


def opened_with(site: Site, *documents: Document) -> None:
    site.ingest(list(documents), [])
    site.open(index=site.indexed(site.digest))


def copies_of(rope: Document, count: int) -> list[Document]:
    return [replace(rope, id=f"old/{n:03}") for n in range(count)]


def found(top_k: int, filters: Filters | None = None) -> list[Ranked]:
    return answering.search(QUESTION, top_k, False, filters or Filters()).passages


def told(one: Ranked) -> list[str]:
    return [] if one.copies is None else [copy.document_id for copy in one.copies.first]


def test_of_copies_the_best_is_shown_and_the_others_are_told(site: Site) -> None:
    opened_with(site, *copies_of(ROPE, 2))
    first, *others = found(4)
    assert {first.passage.document_id, *told(first)} == {"rope", "old/000", "old/001"}
    assert {one.passage.document_id for one in others} == {"sail", "lamp", "pump"}
    assert [told(one) for one in others] == [[], [], []]


def test_scores_are_those_that_they_have_without_copies(site: Site) -> None:
    site.open()
    before = {one.passage.document_id: one.explanation for one in found(4)}
    opened_with(site, *copies_of(ROPE, 2))
    for one in found(4):
        if one.passage.document_id in before and one.explanation is not None:
            alone = before[one.passage.document_id]
            assert alone is not None
            assert one.explanation.cosine == pytest.approx(alone.cosine, abs=1e-6)


@pytest.mark.parametrize(
    ("level", "count"),
    [("passage", _DEEPER * DEPTH + 20), ("sentence", RANKED_ANEW + 20), ("both", RANKED_ANEW + 20)],
)
def test_more_copies_than_are_looked_at_hide_no_other_text(
    site: Site, level: str, count: int
) -> None:
    site.ingest(copies_of(ROPE, count), [])
    while learning_jobs.work_ahead(site.spec, site.library, site.sentences, 60.0):
        pass
    site.open(index=site.indexed(site.digest), level=level)
    first, *others = found(4)
    assert first.explanation is not None
    assert first.explanation.level == level
    assert first.copies is not None
    assert first.copies.count == count
    assert len(told(first)) == TOLD
    assert {one.passage.document_id for one in others} == {"sail", "lamp", "pump"}


def test_a_copy_in_a_document_that_does_not_fit_is_not_told(site: Site) -> None:
    opened_with(site, *copies_of(ROPE, 2), replace(ROPE, id="secret/rope"))
    [one] = found(4, Filters(begins="old/"))
    assert {one.passage.document_id, *told(one)} == {"old/000", "old/001"}
    [alone] = found(4, Filters(begins="secret/"))
    assert alone.copies is None


def test_an_answer_cites_a_text_once_and_says_where_else_it_is(site: Site) -> None:
    opened_with(site, *copies_of(ROPE, 2))
    answered = answering.ask(QUESTION, 4)
    [cited] = [one for one in answered.citations if "tarred" in one.text]
    assert cited.copies is not None
    assert cited.copies.count == 2
    assert [one.copies is not None for one in answered.passages] == [True, False, False, False]


def test_a_copy_that_is_taken_out_is_told_no_longer(site: Site) -> None:
    opened_with(site, *copies_of(ROPE, 2))
    learning_jobs.remove(site.library, ["rope", "old/000"])
    first, *_ = found(4)
    assert (first.passage.document_id, first.copies) == ("old/001", None)


def test_an_evaluation_judges_the_ranking_with_copies(site: Site) -> None:
    """A question whose document is told behind a copy would count as not found else."""
    opened_with(site, *copies_of(DOCUMENTS[2], 3))
    with Library.open(site.library) as library:
        library.put_pairs([replace(PAIRS[0], positives=("old/001", "old/002", "lamp"))])
    assert answering.evaluate("test").dense.recall_at_10 == 1.0


def test_what_can_wait_marks_copies_before_it_reads_sentences(site: Site) -> None:
    with Library.open(site.library) as library:
        splitter = learning_jobs._splitter(site.spec, 20)
        library.put_documents(copies_of(ROPE, 2), splitter=splitter)
    work = (site.spec, site.library, site.sentences)
    assert learning_jobs.work_ahead(*work, 60.0) == 2
    with Library.open(site.library, read_only=True) as library:
        rows = {one.document_id: one.rowid for one in library.passages()}
        assert library.near.copies({rows["rope"]: ()})[rows["rope"]].count == 2
    while learning_jobs.work_ahead(*work, 60.0):
        pass
    assert site.sentences.exists()
