"""Scores by hand on rankings small enough to check."""

from __future__ import annotations

import math

import pytest

from daemon.learning.evaluation import Metrics, answer_of, collapse, evaluate_rankings
from daemon.learning.terms import EvaluationError


def test_a_perfect_ranking_scores_one_everywhere() -> None:
    assert evaluate_rankings([["a", "b"]], [{"a"}]) == Metrics(1, 1.0, 1.0, 1.0, 1.0)


def test_the_first_right_answer_counts_by_its_rank() -> None:
    metrics = evaluate_rankings([["x", "y", "a"], ["b", "x"]], [{"a"}, {"b"}])
    assert metrics.questions == 2
    assert metrics.mrr_at_10 == pytest.approx((1 / 3 + 1) / 2)
    assert metrics.hit_at_1 == pytest.approx(0.5)
    assert metrics.recall_at_10 == pytest.approx(1.0)
    assert metrics.ndcg_at_10 == pytest.approx((1 / math.log2(4) + 1) / 2)


def test_the_order_given_is_the_order_scored_whatever_the_names() -> None:
    """trec_eval breaks ties by name; these would come out reversed if it did."""
    assert evaluate_rankings([["z", "m", "a"]], [{"z"}]).hit_at_1 == 1.0
    assert evaluate_rankings([["a", "m", "z"]], [{"a"}]).hit_at_1 == 1.0


def test_rank_ten_counts_and_rank_eleven_does_not() -> None:
    others = [f"x{i}" for i in range(20)]
    tenth = evaluate_rankings([[*others[:9], "a"]], [{"a"}])
    eleventh = evaluate_rankings([[*others[:10], "a"]], [{"a"}])
    assert tenth.mrr_at_10 == pytest.approx(0.1)
    assert tenth.recall_at_10 == 1.0
    assert (eleventh.mrr_at_10, eleventh.recall_at_10, eleventh.ndcg_at_10) == (0.0, 0.0, 0.0)


def test_parts_of_one_answer_rank_where_the_best_of_them_does() -> None:
    ranking = ["p/1#0", "p/1#1", "p/1#2", "p/2#7", "p/2#0"]
    assert collapse(ranking) == ["p/1", "p/2"]
    metrics = evaluate_rankings([ranking], [{"p/2#0", "p/2#1", "p/2#7"}])
    assert metrics.mrr_at_10 == pytest.approx(1 / 2)
    assert metrics.recall_at_10 == 1.0, "three parts, one answer"


def test_recall_is_the_share_of_right_answers() -> None:
    metrics = evaluate_rankings([["a", "x", "b#0"]], [{"a", "b#0", "b#1", "c", "d"}])
    assert metrics.recall_at_10 == pytest.approx(2 / 4)


@pytest.mark.parametrize(
    ("document", "answer"),
    [("x#0", "x"), ("x#12", "x"), ("x", "x"), ("x#", "x#"), ("x#a", "x#a"), ("x#1#2", "x#1")],
)
def test_what_is_a_part_of_an_answer(document: str, answer: str) -> None:
    assert answer_of(document) == answer


def test_an_empty_ranking_is_a_miss_and_not_left_out() -> None:
    metrics = evaluate_rankings([["a"], []], [{"a"}, {"b"}])
    assert metrics == Metrics(2, 0.5, 0.5, 0.5, 0.5)


def test_a_run_that_finds_nothing_at_all_scores_zero() -> None:
    assert evaluate_rankings([[]], [{"a"}]) == Metrics(1, 0.0, 0.0, 0.0, 0.0)


def test_what_cannot_be_scored_is_refused() -> None:
    with pytest.raises(EvaluationError, match="at least one"):
        evaluate_rankings([], [])
    with pytest.raises(EvaluationError, match="1 rankings against 2"):
        evaluate_rankings([["a"]], [{"a"}, {"b"}])
    with pytest.raises(EvaluationError, match="question 1 has no right document"):
        evaluate_rankings([["a"], ["a"]], [{"a"}, set()])
