"""Bootstrap intervals: how far a mean over questions could lie from what was measured.

Questions are drawn anew with replacement (Efron 1979) and percentiles of the
means taken; for two systems their differences *on the same questions* are drawn,
so that what makes a question hard for both cancels out (Sakai, SIGIR 2006).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from daemon.learning.evaluation import Judged
from daemon.learning.terms import EvaluationError

Float64 = NDArray[np.float64]

RESAMPLES = 2000
LEVEL = 0.95
_DRAWS_AT_ONCE = 1 << 22  # bounds the table of drawn rows to 32 MiB


@dataclass(frozen=True)
class Interval:
    """A mean and where it lies with ``level`` confidence.

    ``p``: two-sided probability of a mean on the other side of zero, that is
    twice the share of resamples there, each side counted with zero itself and
    one more for what was observed; only of interest for differences.
    """

    mean: float
    low: float
    high: float
    p: float
    level: float = LEVEL


def bootstrap(
    values: Float64, *, resamples: int = RESAMPLES, level: float = LEVEL, seed: int = 0
) -> Interval:
    """The mean of ``values`` [n], one a question, with its percentile interval.

    Percentiles are order statistics of the resampled means (no interpolation).
    The same arguments give the same bits. Raises EvaluationError for no values or
    for some that are not finite.
    """
    values = np.asarray(values, dtype=np.float64)
    if values.ndim != 1 or not values.size or not np.isfinite(values).all():
        raise EvaluationError("an interval needs one finite value a question, and at least one")
    if resamples < 1 or not 0.0 < level < 1.0:
        raise EvaluationError(f"cannot take {resamples} resamples at level {level}")
    means = np.sort(resampled_means(values, resamples, seed))
    tail = (1.0 - level) / 2.0
    low, high = np.quantile(means, [tail, 1.0 - tail], method="inverted_cdf")
    # Differences of equal scores sum to rounding errors: those are zero.
    noise = 1e-12 * max(1.0, float(np.abs(values).max()))
    below, above = (int((means <= noise).sum()), int((means >= -noise).sum()))
    p = min(1.0, 2.0 * (min(below, above) + 1) / (resamples + 1))
    return Interval(float(values.mean()), float(low), float(high), p, level)


def paired_bootstrap(
    ours: Float64,
    theirs: Float64,
    *,
    resamples: int = RESAMPLES,
    level: float = LEVEL,
    seed: int = 0,
) -> Interval:
    """How much ``ours`` is above ``theirs``, both [n] for the same questions in order.

    An interval that leaves out zero means a difference. Raises EvaluationError as
    `bootstrap`, and when the two differ in length.
    """
    if np.shape(ours) != np.shape(theirs):
        raise EvaluationError(
            f"a paired comparison needs the same questions: got {np.shape(ours)} "
            f"and {np.shape(theirs)} scores"
        )
    difference = np.asarray(ours, dtype=np.float64) - np.asarray(theirs, dtype=np.float64)
    return bootstrap(difference, resamples=resamples, level=level, seed=seed)


def figures_of(judged: Judged, *, seed: int = 0) -> dict[str, Interval]:
    """Every metric of a judgement with its interval, as an operator is shown them."""
    return {name: bootstrap(values, seed=seed) for name, values in judged.scores.items()}


def resampled_means(values: Float64, resamples: int, seed: int) -> Float64:
    """Means [resamples] of as many draws of n out of n with replacement."""
    chance = np.random.Generator(np.random.Philox(key=seed))
    count = len(values)
    means = np.empty(resamples)
    at_once = max(1, _DRAWS_AT_ONCE // count)
    for start in range(0, resamples, at_once):
        rows = chance.integers(0, count, (min(at_once, resamples - start), count), dtype=np.int32)
        means[start : start + len(rows)] = values[rows].mean(axis=1)
    return means
