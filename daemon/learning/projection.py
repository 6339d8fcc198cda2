"""Rank-r projections of a weight matrix's change, for sites that train in full.

FedSearch-NLP's configuration B trains all weights and shares low-rank factors, and
reports that the two do not fit together (its Table V). They do not if each site
shares the factors of its own truncation: the mean of products is no product of
means. Here one factor is the same at every site during a round, taken from the
parent version, and only the other one is fitted. That is linear in the change, so
the mean of what the sites share is exactly the projection of their mean change.
Rounds alternate between the factors (subspace iteration, as in PowerSGD, Vogels et
al. 2019), so that the common subspace turns towards what is learned.
"""

from __future__ import annotations

import torch
from torch import Tensor


def onto_rows(change: Tensor, right: Tensor) -> Tensor:
    """[d, r]: the X for which X @ ``right`` is nearest to ``change`` (least squares).

    ``change`` [d, k], ``right`` [r, k]. Computed in float64.
    """
    inverse: Tensor = torch.linalg.pinv(right.double())  # [k, r]
    return change.double() @ inverse


def onto_columns(change: Tensor, left: Tensor) -> Tensor:
    """[r, k]: the X for which ``left`` @ X is nearest to ``change`` (least squares).

    ``change`` [d, k], ``left`` [d, r]; columns of ``left`` that say the same give a
    smallest X, zero columns a zero one. Computed in float64.
    """
    inverse: Tensor = torch.linalg.pinv(left.double())  # [r, d]
    return inverse @ change.double()
