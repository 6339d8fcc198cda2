"""Bootstrap intervals of one column of figures, or of the differences of two."""

from __future__ import annotations

import numpy as np

from crypto.arrays import Float64
from daemon.evaluation.intervals import LEVEL, RESAMPLES, Interval, draws, interval_of
from daemon.learning.options import EvaluationError


def bootstrap(
    values: Float64, *, resamples: int = RESAMPLES, level: float = LEVEL, seed: int = 0
) -> Interval:
    """The mean of ``values`` [n], one a question, with its percentile interval.

    The same arguments give the same bits. Raises EvaluationError for no values or
    for some that are not finite.
    """
    values = np.asarray(values, dtype=np.float64)
    if values.ndim != 1 or not values.size or not np.isfinite(values).all():
        raise EvaluationError("an interval needs one finite value a question, and at least one")
    if resamples < 1 or not 0.0 < level < 1.0:
        raise EvaluationError(f"cannot take {resamples} resamples at level {level}")
    return interval_of(values, resampled_means(values, resamples, seed), level)


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


def resampled_means(values: Float64, resamples: int, seed: int) -> Float64:
    """Means [resamples] of as many draws of n out of n with replacement."""
    return np.concatenate(
        [values[rows].mean(axis=1) for rows in draws(len(values), resamples, seed)]
    )
