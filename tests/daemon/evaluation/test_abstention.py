"""How well refusals are judged, against figures worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from daemon.answering.abstention import Abstention
from daemon.evaluation.abstention import auroc, figures_of_refusals
from daemon.jobs.answers import figures_of_abstention

ANSWERED = np.array([0.9, 0.7, 0.5, 0.4])
UNANSWERED = np.array([0.6, 0.5, 0.1, 0.2])


def test_auroc_counts_pairs_and_equal_ones_half() -> None:
    # 0.9 is above all 4; 0.7, too; 0.5 above 2 and equal to one; 0.4 above 2.
    assert auroc(ANSWERED, UNANSWERED) == pytest.approx((4 + 4 + 2.5 + 2) / 16)
    assert auroc(UNANSWERED, ANSWERED) == pytest.approx(1 - 12.5 / 16)
    assert auroc(np.full(3, 0.5), np.full(5, 0.5)) == 0.5


def test_shares_are_of_what_the_threshold_does() -> None:
    found = figures_of_refusals(ANSWERED, UNANSWERED, 0.45)
    assert {name: one.mean for name, one in found.items()} == pytest.approx(
        {"auroc": 12.5 / 16, "accuracy": 5 / 8, "refused": 2 / 4, "lost": 1 / 4}
    )
    assert found["refused"].low <= 0.5 <= found["refused"].high
    assert figures_of_refusals(ANSWERED, UNANSWERED, 0.5)["lost"].mean == 0.25, "less, not equal"
    nothing = figures_of_refusals(ANSWERED, UNANSWERED, -math.inf)
    assert (nothing["refused"].mean, nothing["accuracy"].mean) == (0.0, 0.5)


def test_an_interval_of_auroc_holds_what_many_questions_have() -> None:
    """Of 200 sites with 60 questions each: in 95 of a hundred, about."""
    chance = np.random.default_rng(0)
    many = auroc(chance.normal(0.6, 0.1, 20_000), chance.normal(0.5, 0.1, 20_000))
    held = 0
    for _ in range(100):
        sample = chance.normal(0.6, 0.1, 60), chance.normal(0.5, 0.1, 60)
        one = figures_of_refusals(*sample, 0.5)["auroc"]
        held += one.low <= many <= one.high
    assert 88 <= held <= 100


def test_the_probability_that_was_said_is_told_where_one_was_fitted() -> None:
    by = Abstention(0.45, 10.0, -5.0, 40)
    found = figures_of_abstention(ANSWERED, UNANSWERED, by)
    expected = np.mean([1 / (1 + math.exp(5 - 10 * one)) for one in ANSWERED])
    assert found["p-answered"].mean == pytest.approx(expected)
    assert found["p-unanswered"].mean < found["p-answered"].mean
    assert "p-answered" not in figures_of_abstention(ANSWERED, UNANSWERED, Abstention(0.45))
