"""Bootstrap intervals: how far a mean over questions could lie from what was measured.

Questions are drawn anew with replacement (Efron 1979) and percentiles of the
means taken; for two systems their differences *on the same questions* are drawn,
so that what makes a question hard for both cancels out (Sakai, SIGIR 2006).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from crypto.arrays import Float64, Int32
from daemon.evaluation.evaluation import Judged
from daemon.learning.options import EvaluationError

RESAMPLES = 2000
LEVEL = 0.95
_SEED = 0  # the same draws each time
_DRAWS_AT_ONCE = 1 << 22  # bounds the table of drawn rows to 32 MiB


@dataclass(frozen=True)
class Interval:
    """A mean, and where it lies with a confidence of `LEVEL`."""

    mean: float
    low: float
    high: float


def interval_of(values: Float64, means: Float64, level: float) -> Interval:
    """The mean of ``values`` [n], and where it lies by its resampled means.

    Percentiles are order statistics of the resampled means (no interpolation).
    """
    tail = (1.0 - level) / 2.0
    low, high = np.quantile(means, [tail, 1.0 - tail], method="inverted_cdf")
    return Interval(float(values.mean()), float(low), float(high))


def figures_of(judged: Judged) -> dict[str, Interval]:
    """Every metric of a judgement with its interval, as an operator is shown them."""
    return _all_at_once(judged.scores)


def differences_of(ours: Judged, theirs: Judged) -> dict[str, Interval]:
    """How much each metric of ``ours`` is above that of ``theirs``; positive: they are better.

    Both are of the same questions in order, which raises EvaluationError otherwise.
    """
    if ours.questions != theirs.questions:
        raise EvaluationError(
            f"a paired comparison needs the same questions: got {ours.questions} "
            f"and {theirs.questions}"
        )
    return _all_at_once({name: ours.scores[name] - theirs.scores[name] for name in ours.scores})


def _all_at_once(columns: Mapping[str, Float64]) -> dict[str, Interval]:
    """Intervals of all columns on the draws they have in common, hence drawn once."""
    table = np.stack(list(columns.values()), axis=1)  # [n, metrics]
    if not table.size or not np.isfinite(table).all():
        raise EvaluationError("an interval needs one finite value a question, and at least one")
    count = len(table)
    means = np.empty((RESAMPLES, table.shape[1]))
    start = 0
    for rows in draws(count, RESAMPLES, _SEED):
        # How often each question was drawn, [r, n]: a mean is then a product.
        cells = np.arange(len(rows))[:, np.newaxis] * count + rows
        times = np.bincount(cells.ravel(), minlength=len(rows) * count).reshape(len(rows), count)
        means[start : start + len(rows)] = times.astype(np.float64) @ table / count
        start += len(rows)
    return {
        name: interval_of(values, means[:, column], LEVEL)
        for column, (name, values) in enumerate(columns.items())
    }


def draws(count: int, resamples: int, seed: int) -> Iterator[Int32]:
    """Rows drawn with replacement, [r, count] at a time until there are ``resamples`` draws."""
    chance = np.random.Generator(np.random.Philox(key=seed))
    at_once = max(1, _DRAWS_AT_ONCE // count)
    for start in range(0, resamples, at_once):
        yield chance.integers(0, count, (min(at_once, resamples - start), count), dtype=np.int32)
