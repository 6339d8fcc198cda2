"""The page's rows of what was trained: beside what was not, on the same questions."""

from __future__ import annotations

from typing import Any

from tests.benchmarks.retrieval.page import page


def _ranks(*ranks: int) -> dict[str, Any]:
    of_way = {"BM25": [0, 0], "all sentences": [*ranks]}
    return {"text alone": {"questions": 2, "without": 0, "sentence": of_way, "passage": of_way}}


def _line(**more: Any) -> dict[str, Any]:
    triple = {"mrr@10": [0.5, 0.4, 0.6], "hit@1": [0.5, 0.4, 0.6], "hit@10": [0.5, 0.4, 0.6]}
    row = {"read": "text alone", "level": "passage", "title": 0.0, "words": 0.0, **triple}
    rows = [{**row, "untitled": 0.5, "meaning": 0.5}]
    of_corpus = {"name": "one", "corpus": "one", "passages": 2, "questions": [1, 2], "rows": rows}
    return {**of_corpus, "kinds": {}, "gold": _ranks(2, 2), **more}


def test_a_stage_is_compared_with_the_row_before_it() -> None:
    line = _line(trained={"stage 1": _ranks(1, 1), "both stages": _ranks(1, 1)})
    rows = [row for row in page([line]).splitlines() if row.startswith("| a sentence")][-3:]
    assert [row.split(" | ")[3] for row in rows] == ["as it comes", "stage 1", "both stages"]
    assert [row.split(" | ")[4] for row in rows] == [
        "0.500 (0.500 to 0.500)",
        *["1.000 (1.000 to 1.000)"] * 2,
    ]
    assert [row.split(" | ")[-1] for row in rows] == [
        " |",
        "+0.500 (+0.500 to +0.500) |",
        "+0.000 (+0.000 to +0.000) |",
    ]


def test_nothing_is_said_of_training_where_nothing_was_trained() -> None:
    assert "trained" not in page([_line()])
    assert "Sentences that answer" in page([_line()])
