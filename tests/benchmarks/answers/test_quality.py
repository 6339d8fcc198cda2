"""What is said of answers is what was measured, and that is of the marked questions."""

from __future__ import annotations

import re
from pathlib import Path

from tests.benchmarks.answers.test_marked import ANSWERS, read

DOCS = Path(__file__).parents[3] / "docs"
MEASURED = DOCS / "results" / "answers.jsonl"


def test_the_figures_said_of_answers_are_those_that_were_measured() -> None:
    rows = {row["corpus"].partition(":")[0]: row for row in read(MEASURED)}
    text = (DOCS / "figures.md").read_text(encoding="utf-8")
    _, _, section = text.partition("## Answers")
    said = re.findall(
        r"^\| (\w+) \| (\d+) \| `([\w+-]+)` \| ([\d.]+) \| ([\d.]+) to ([\d.]+) \|", section, re.M
    )
    assert len(said) >= 8
    for corpus, questions, figure, *values in said:
        measured = rows[corpus][figure]
        expected = [f"{measured[part]:.2f}" for part in ("mean", "low", "high")]
        assert values == expected, (corpus, figure)
        assert int(questions) in (rows[corpus]["questions"], rows[corpus].get("compared"))


def test_what_was_measured_is_of_all_questions_that_are_marked() -> None:
    [demo] = [row for row in read(MEASURED) if row["corpus"] == "demo"]
    marked = read(ANSWERS)
    assert demo["questions"] == len(marked) == 100
    assert demo["compared"] == sum(bool(one["sentences"]) for one in marked)
    assert demo["enough"]["mean"] <= demo["marked"]["mean"] <= 1.0
