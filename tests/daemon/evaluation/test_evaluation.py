"""Scores by hand on rankings small enough to check."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from daemon.evaluation.evaluation import Metrics, collapse, judge
from daemon.learning.options import EvaluationError
from daemon.library.readers.documents import answer_of
from tests.daemon.evaluation.rankings import evaluate_rankings


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


# ---- every metric, by hand -------------------------------------------------------------


def test_every_metric_of_one_question_by_hand() -> None:
    """Right answers a, b, c; a is second, b is fourth, c is not found."""
    judged = judge([["x", "a", "y", "b"]], [{"a", "b", "c"}], cutoffs=(1, 3, 5))
    ideal = 1 + 1 / math.log2(3) + 1 / math.log2(4)
    expected = {
        "hit@1": 0,
        "hit@3": 1,
        "hit@5": 1,
        "mrr@1": 0,
        "mrr@3": 1 / 2,
        "mrr@5": 1 / 2,
        "map": (1 / 2 + 2 / 4) / 3,
        "recall@1": 0,
        "recall@3": 1 / 3,
        "recall@5": 2 / 3,
        "precision@1": 0,
        "precision@3": 1 / 3,
        "precision@5": 2 / 5,
        "f1@1": 0,
        "f1@3": 1 / 3,
        "f1@5": 2 * (2 / 3) * (2 / 5) / (2 / 3 + 2 / 5),
        "dcg@1": 0,
        "dcg@3": 1 / math.log2(3),
        "dcg@5": 1 / math.log2(3) + 1 / math.log2(5),
        "idcg@1": 1,
        "idcg@3": ideal,
        "idcg@5": ideal,
        "em": 0,
        "avg_rank": 2,
    }
    for k in (1, 3, 5):
        expected[f"ndcg@{k}"] = expected[f"dcg@{k}"] / expected[f"idcg@{k}"]
    assert judged.means() == pytest.approx(expected)


def test_exact_match_wants_all_right_answers_first_and_no_other() -> None:
    rankings = [["b", "a", "x"], ["a", "x", "b"], ["a"], ["a", "b"]]
    judged = judge(rankings, [{"a", "b"}, {"a", "b"}, {"a", "b"}, {"a"}])
    assert judged.scores["em"].tolist() == [1, 0, 0, 1]


def test_a_question_without_a_find_ranks_below_everything_ranked() -> None:
    judged = judge([["x", "y"], [], ["x", "a"]], [{"a"}, {"a"}, {"a"}])
    assert judged.scores["avg_rank"].tolist() == [3, 1, 2]


DOCUMENTS = st.lists(st.sampled_from("abcdefghijklmnop"), max_size=16, unique=True)


@pytest.mark.slow
@given(st.lists(st.tuples(DOCUMENTS, DOCUMENTS.filter(bool)), min_size=1, max_size=8))
@settings(max_examples=60, deadline=None)
def test_metrics_agree_with_one_another(cases: list[tuple[list[str], list[str]]]) -> None:
    """What the library counts and what we count must fit together, whatever the ranking."""
    judged = judge([ranking for ranking, _ in cases], [set(right) for _, right in cases])
    scores = judged.scores
    for k in (1, 5, 10):
        np.testing.assert_allclose(scores[f"dcg@{k}"] / scores[f"idcg@{k}"], scores[f"ndcg@{k}"])
        np.testing.assert_array_equal(scores[f"hit@{k}"] > 0, scores[f"recall@{k}"] > 0)
        np.testing.assert_array_equal(
            scores[f"mrr@{k}"],
            np.where(scores["avg_rank"] <= k, scores[f"hit@{k}"] / scores["avg_rank"], 0.0),
        )
        assert (
            scores[f"f1@{k}"] <= (scores[f"precision@{k}"] + scores[f"recall@{k}"]) / 2 + 1e-9
        ).all()
    everything = scores["recall@10"] == 1.0
    few = np.array([len(right) <= 10 for _, right in cases])
    assert (~(scores["em"] > 0) | everything | ~few).all()
    for name, values in scores.items():
        assert len(values) == len(cases)
        assert name == "avg_rank" or name.startswith(("dcg", "idcg")) or (values <= 1.0).all()
