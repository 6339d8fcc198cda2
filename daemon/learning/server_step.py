"""From the mean update to the next version: the step that every site computes alike.

There is no server: each key holder takes this step on the same exact mean and
must get the same bits. So it is one IEEE double operation after the other on each
value, each correctly rounded (addition, multiplication, division, square root),
and no sum over values, whose order a library could choose. Moments are kept in
float32, rounded *before* they are used: a site that reads them from the version's
file goes on exactly as one that had them in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from config.recipes import ServerOptions
from crypto.arrays import Float32, Float64
from daemon.learning.options import LearningError


def _fedavg(mean: Float64, _moments: Float64, _options: ServerOptions) -> list[Float64]:
    return [mean]


def _fedavgm(mean: Float64, moments: Float64, options: ServerOptions) -> list[Float64]:
    velocity = options.momentum * moments[0] + mean
    return [_stored(velocity), velocity]


def _fedadam(mean: Float64, moments: Float64, options: ServerOptions) -> list[Float64]:
    first = options.momentum * moments[0] + (1.0 - options.momentum) * mean
    second = options.second_momentum * moments[1] + (1.0 - options.second_momentum) * mean * mean
    root = np.sqrt(_stored(second)) + options.adam_tau
    return [_stored(first) / root, first, second]


def _stored(moment: Float64) -> Float64:
    """As the version's file keeps it, so that a site that reads it steps to the same bits."""
    return moment.astype(np.float32).astype(np.float64)


@dataclass(frozen=True)
class _Rule:
    moments: int  # rows of state that it keeps, float32 [moments, D]
    # (mean [D], moments before [moments, D], options): the direction [D], the moments after it
    step: Callable[[Float64, Float64, ServerOptions], list[Float64]]


_RULES: Mapping[str, _Rule] = {
    "fedavg": _Rule(0, _fedavg),
    "fedavgm": _Rule(1, _fedavgm),
    "fedadam": _Rule(2, _fedadam),
}


def step(
    parent: Float32, mean_update: Float64, moments: Float32 | None, options: ServerOptions
) -> tuple[Float32, Float32 | None]:
    """The next version [D] and its moments: None, or float32 [1 or 2, D].

    ``parent`` [D] and ``mean_update`` [D] (sum of the updates / total weight);
    ``moments`` are those of the parent's file. Other than this rule's number of
    them, as when the rule was changed, means to start from none.

    fedavg: x + eta * d. fedavgm (Hsu et al. 2019): m = beta_1 m + d; x + eta * m.
    fedadam (Reddi et al. 2021, Algorithm 2): m = beta_1 m + (1 - beta_1) d;
    v = beta_2 v + (1 - beta_2) d^2; x + eta * m / (sqrt(v) + tau); at first v = tau^2.

    Raises LearningError when the result is not finite: no site may adopt it.
    """
    rule = _RULES[options.rule]
    if moments is None or moments.shape != (rule.moments, parent.size):
        moments = np.zeros((rule.moments, parent.size), dtype=np.float32)
        moments[1:] = options.adam_tau**2
    start, mean = parent.astype(np.float64), mean_update.astype(np.float64)
    with np.errstate(over="ignore"):  # what overflows is refused below
        direction, *after = rule.step(mean, moments.astype(np.float64), options)
        state = np.array(after, dtype=np.float32).reshape(rule.moments, parent.size)
        version = (start + options.learning_rate * direction).astype(np.float32)
    if not (np.isfinite(version).all() and np.isfinite(state).all()):
        raise LearningError(
            f"the step of {options.rule} is not finite: lower its learning rate, or look for a "
            "site whose updates are too large; the parent version stays"
        )
    return version, state if rule.moments else None
