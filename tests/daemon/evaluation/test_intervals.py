"""Bootstrap intervals: a case that can be counted out, and coverage by simulation."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from daemon.evaluation.evaluation import judge
from daemon.evaluation.intervals import differences_of, figures_of
from daemon.learning.options import EvaluationError
from tests.learning_bench.intervals import bootstrap, paired_bootstrap, resampled_means


def test_the_resampled_means_of_three_values_are_those_of_all_27_draws() -> None:
    """Every draw of 3 out of {0, 0, 1} is one of 27, counted by hand: means 0, 1/3, 2/3, 1."""
    values = np.array([0.0, 0.0, 1.0])
    draws = [sum(draw) / 3 for draw in itertools.product(values, repeat=3)]
    expected = {mean: draws.count(mean) / 27 for mean in set(draws)}
    assert sorted(round(27 * share) for share in expected.values()) == [1, 6, 8, 12]
    means = resampled_means(values, 40_000, seed=1)
    for mean, share in expected.items():
        assert np.isclose(means, mean).mean() == pytest.approx(share, abs=0.01)


def test_an_interval_by_hand() -> None:
    """Of {0, 1} a mean is 0, 1/2 or 1 with 1/4, 1/2, 1/4: at level 0.6 the tails of 1/5
    lie within the outer quarters, at level 0.4 those of 3/10 lie within the middle."""
    values = np.array([0.0, 1.0])
    wide = bootstrap(values, resamples=20_000, level=0.6)
    assert (wide.mean, wide.low, wide.high) == (0.5, 0.0, 1.0)
    narrow = bootstrap(values, resamples=20_000, level=0.4)
    assert (narrow.low, narrow.high) == (0.5, 0.5)


def test_a_difference_is_taken_question_by_question() -> None:
    """Hard and easy questions: unpaired the systems overlap widely, paired they never do."""
    chance = np.random.default_rng(0)
    theirs = chance.random(200) * 0.9
    ours = theirs + 0.01
    assert bootstrap(ours).low < theirs.mean()
    difference = paired_bootstrap(ours, theirs)
    assert difference.low == pytest.approx(0.01)
    assert difference.high == pytest.approx(0.01)
    assert paired_bootstrap(theirs, ours).mean == pytest.approx(-0.01)


def test_no_difference_is_none() -> None:
    same = np.array([0.1, 0.2, 0.3, 1 / 3])
    found = paired_bootstrap(same, same + 1e-17)
    assert (found.mean, found.low, found.high) == pytest.approx((0.0, 0.0, 0.0), abs=1e-15)


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    right=st.floats(0.15, 0.85),
    count=st.integers(60, 300),
    gain=st.floats(0.0, 0.2),
)
def test_the_interval_covers_the_truth_about_as_often_as_it_says(
    seed: int, right: float, count: int, gain: float
) -> None:
    """Of 120 experiments with a known mean difference, 95 % should cover it; with the
    binomial's own spread and the percentile method's bias anything above 84 % is sound."""
    chance = np.random.default_rng(seed)
    covered = 0
    for experiment in range(120):
        theirs = (chance.random(count) < right).astype(float)
        ours = theirs + chance.normal(gain, 0.3, count)
        found = paired_bootstrap(ours, theirs, resamples=300, seed=experiment)
        covered += found.low <= gain <= found.high
    assert 0.84 <= covered / 120 <= 1.0


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=40), st.integers(0, 2**64 - 1))
@settings(max_examples=60, deadline=None)
def test_an_interval_lies_within_its_values_and_comes_out_again(
    values: list[float], seed: int
) -> None:
    array = np.array(values)
    found = bootstrap(array, resamples=50, seed=seed)
    spare = 1e-9 * max(1.0, np.abs(array).max())
    assert array.min() - spare <= found.low <= found.high <= array.max() + spare
    assert found == bootstrap(array, resamples=50, seed=seed)


def test_many_questions_are_resampled_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.random.default_rng(2).random(50)
    whole = resampled_means(values, 64, seed=9)
    monkeypatch.setattr("daemon.evaluation.intervals._DRAWS_AT_ONCE", 7 * 50)
    np.testing.assert_array_equal(resampled_means(values, 64, seed=9), whole)


def test_a_judgement_goes_straight_into_an_interval() -> None:
    judged = judge([["a"], ["x", "b"], ["x"]], [{"a"}, {"b"}, {"c"}])
    found = bootstrap(judged.scores["mrr@10"])
    assert found.mean == pytest.approx(judged.mean("mrr@10")) == pytest.approx(0.5)


def test_what_has_no_interval_is_refused() -> None:
    for values in ([], [[1.0]], [1.0, np.nan], [np.inf]):
        with pytest.raises(EvaluationError, match="one finite value a question"):
            bootstrap(np.array(values))
    with pytest.raises(EvaluationError, match="same questions"):
        paired_bootstrap(np.zeros(2), np.zeros(3))
    with pytest.raises(EvaluationError, match="at level"):
        bootstrap(np.zeros(2), level=1.0)


def test_all_metrics_at_once_have_the_intervals_that_each_has_alone() -> None:
    chance = np.random.default_rng(3)
    letters = [*"abcdefghij"]
    right = [{letters[n % 10]} for n in range(37)]
    ours, theirs = (
        judge([chance.permutation(letters).tolist() for _ in right], right) for _ in range(2)
    )
    for name, figure in figures_of(ours).items():
        alone = bootstrap(ours.scores[name])
        assert figure.mean == alone.mean
        assert (figure.low, figure.high) == pytest.approx((alone.low, alone.high), abs=1e-12)
    for name, gain in differences_of(ours, theirs).items():
        alone = paired_bootstrap(ours.scores[name], theirs.scores[name])
        assert gain.mean == pytest.approx(alone.mean, abs=1e-12)
        assert (gain.low, gain.high) == pytest.approx((alone.low, alone.high), abs=1e-12)
    assert differences_of(ours, theirs)["mrr@10"].mean == pytest.approx(
        ours.mean("mrr@10") - theirs.mean("mrr@10")
    )
    with pytest.raises(EvaluationError, match="same questions"):
        differences_of(ours, judge([["a"]], [{"a"}]))
