"""How well a site tells the questions that its documents answer from others.

Each question counts twice: as it is, answered by the documents, and as it would be without the
documents that answer it, answered by none. Of both there is the *evidence*
(`daemon.answering.abstention`), below whose threshold a question is refused.

========== ======================================================================
auroc      how often one that is answered has more evidence than one that is not, over all
           pairs of such; equal ones count half (Hanley and McNeil, 1982). 0.5 is chance;
           it needs no threshold
accuracy   share of both that the threshold tells rightly: answered, and refused
refused    of those that are not answered, the share that is refused
lost       of those that are answered, the share that is refused all the same: less is better
========== ======================================================================

Intervals are of questions drawn anew (`daemon.evaluation.intervals`), each with its two. These
must not be questions that the threshold was found by: there it is as good as it was made, and
the share that is lost is the one that was chosen. Who calls sees to that
(`daemon.jobs.answers.unfitted`). Nor are general questions among them, for these found it, too.
Without its documents a question may still be answered by others: then ``refused`` is too low.
"""

from __future__ import annotations

import numpy as np

from crypto.arrays import Float64
from daemon.evaluation.evaluation import Judged
from daemon.evaluation.intervals import LEVEL, RESAMPLES, Interval, draws, figures_of, interval_of

LOWER_IS_BETTER = ("lost", "p-unanswered")
_SEED = 0  # as of all intervals


def auroc(answered: Float64, unanswered: Float64) -> float:
    """How often a question that is answered has more evidence than one that is not."""
    order = np.sort(unanswered)
    below = np.searchsorted(order, answered, "left")
    equal = np.searchsorted(order, answered, "right") - below
    return float((below + equal / 2.0).mean() / len(order))


def figures_of_refusals(
    answered: Float64, unanswered: Float64, threshold: float
) -> dict[str, Interval]:
    """Of questions' evidence [n], and [n] of the same without what answers them; n is not 0."""
    lost = (answered < threshold).astype(np.float64)
    refused = (unanswered < threshold).astype(np.float64)
    shares = {"accuracy": (1.0 - lost + refused) / 2.0, "refused": refused, "lost": lost}
    return {"auroc": _auroc_interval(answered, unanswered), **figures_of(Judged(shares))}


def _auroc_interval(answered: Float64, unanswered: Float64) -> Interval:
    count, means = len(answered), []
    above = (answered[:, None] > unanswered) + (answered[:, None] == unanswered) / 2.0  # [n, n]
    for rows in draws(count, RESAMPLES, _SEED):
        # How often each question was drawn, [r, n]; each brings both of its values.
        cells = np.arange(len(rows))[:, np.newaxis] * count + rows
        times = np.bincount(cells.ravel(), minlength=len(rows) * count).reshape(len(rows), count)
        means.append(((times @ above) * times).sum(axis=1) / count**2)
    around = interval_of(above.mean(axis=1), np.concatenate(means), LEVEL)
    return Interval(auroc(answered, unanswered), around.low, around.high)
