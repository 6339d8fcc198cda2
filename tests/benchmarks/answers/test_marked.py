"""What answers are judged by on the demo's corpus, marked before there was a way to abstain.

``answers.jsonl``: of 100 of the demo's test questions the sentences of the right document that
answer, best first; where ``enough`` is false no one of them does alone. Marked by one reader,
who marked a third twice; a sentence that is only about the subject was not taken.

``unanswerable.jsonl``: 200 questions to a site whose documents do not answer them; half are about
its own subjects (``own_subject``), half are not. ``why``: what the nearest document lacks.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from daemon.fedctl.demo.sites import BUNDLED

HERE = Path(__file__).parent
ANSWERS = HERE / "answers.jsonl"


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_marked_sentences_stand_in_a_right_document_of_their_question() -> None:
    marked = read(ANSWERS)
    assert len({(one["site"], one["query"]) for one in marked}) == 100
    for one in marked:
        pairs = read(BUNDLED / one["site"] / "pairs_test.jsonl")
        [pair] = [pair for pair in pairs if pair["query"] == one["query"]]
        assert one["document"] in pair["positives"]
        documents = read(BUNDLED / one["site"] / "documents.jsonl")
        [text] = [each["text"] for each in documents if each["id"] == one["document"]]
        assert all(text.count(sentence) == 1 for sentence in one["sentences"]), one["query"]


def test_half_of_what_is_not_answered_is_about_the_sites_own_subjects() -> None:
    questions = read(HERE / "unanswerable.jsonl")
    assert Counter(one["kind"] for one in questions) == {"own_subject": 100, "other_subject": 100}
    assert min(Counter(one["site"] for one in questions).values()) >= 66
    asked = {one["query"].casefold() for one in questions}
    assert len(asked) == 200
    for site in ("ostrey", "tarrow", "vellham"):
        for split in ("train", "test"):
            known = {pair["query"] for pair in read(BUNDLED / site / f"pairs_{split}.jsonl")}
            assert not asked & {query.casefold() for query in known}
