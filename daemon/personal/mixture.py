"""A point between what all sites learned together and what this site learned alone.

Both lines of training begin at the same vector, the encoder as it comes, and stay near
it; between their ends lie parameters that do better at a site than either end (weights
of fine-tuned models can be averaged: Wortsman et al. 2022, "Model soups" and "Robust
fine-tuning of zero-shot models"; measured for us in docs/results/learning.md). The
shared version brings what others know, the own one what only this site's questions
teach, and the site answers with the mixture, for questions and passages alike.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from crypto.arrays import Float32, Float64
from daemon.learning.options import LearningError

SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)  # of the site's own, that are tried
PREFERRED = 0.5
# Of mean reciprocal rank. Measured: up to 0.14 where a half helped or did no harm (sites of
# MedQuAD with 33 to 140 pairs), 0.45 and more where it ruined the answers (the demo's).
FAR = 0.2


def mix(shared: Float32, own: Float32, share: float) -> Float32:
    """(1 - share) shared + share own, each value rounded once: float32 [D]."""
    if shared.shape != own.shape:
        raise LearningError(
            f"parameters of shapes {shared.shape} and {own.shape} cannot be mixed: this site's own "
            "were made for another retriever"
        )
    mixed = (1.0 - share) * shared.astype(np.float64) + share * own.astype(np.float64)
    return mixed.astype(np.float32)


def best_share(ranks: Mapping[float, Float64]) -> float:
    """Which share to answer with, by the reciprocal ranks [questions] that each one got.

    The preferred one, unless another does better by more than one standard error of
    the difference between the two, question by question (the one-standard-error rule,
    Breiman et al. 1984): a few dozen validation pairs would else choose by chance. Of
    several such the best. And the shared version (0), where that does better than the
    one so found: nobody is to lose by what is his own. Raises KeyError without ranks of
    these two shares.
    """
    usual = ranks[PREFERRED]
    chosen, most = PREFERRED, 0.0
    for share, found in ranks.items():
        gain = found - usual
        if gain.size < 2:
            continue
        error = float(gain.std(ddof=1)) / math.sqrt(gain.size)
        mean = float(gain.mean())
        if mean > max(error, most):
            chosen, most = share, mean
    return 0.0 if ranks[0.0].mean() > ranks[chosen].mean() else chosen


def near_enough(shared: Float64, own: Float64) -> bool:
    """Whether half of what was learned alone may be mixed in, where no pairs are impartial.

    ``shared``: reciprocal ranks [questions] of the shared version, which has learned from
    these questions and is flattered; ``own``: of what was learned alone from *other*
    questions of the site. If even so the own one is nearly as good, both are good models of
    these documents, and half-way between two such lies a better one. Far below lies what
    learned nothing that serves the next question; half of that is half of nothing.
    """
    return float(shared.mean() - own.mean()) <= FAR
