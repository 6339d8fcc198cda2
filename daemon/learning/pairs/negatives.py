"""Negatives for a pair: the nearest passages that are no answer, and some at random.

pFedRAG (section 5.1): the five most similar chunks of *other* articles and five
random ones, one positive to ten negatives. What is near but says the same as a
positive is left out, which the paper doesn't say and its data needs.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from daemon.learning.evaluation import answer_of
from daemon.learning.mining import NEAR_DUPLICATE, mine_negatives

Float32 = NDArray[np.float32]
Rows = NDArray[np.int64]

HARDEST, RANDOM = 5, 5
_SPARE = 4  # times as many are drawn as are wanted, since some are excluded


def hard_and_random(
    queries: Float32,
    passages: Float32,
    document_ids: Sequence[str],
    positives: Sequence[Rows],
    *,
    hardest: int = HARDEST,
    random: int = RANDOM,
    seed: int = 0,
) -> list[Rows]:
    """Passage rows for each query: up to ``hardest``, nearest first, then up to ``random``.

    Shapes as in `daemon.learning.mining.mine_negatives`, whose exclusions hold for
    both kinds: no other part of a right answer, no near-duplicate of one. A query
    gets no row twice.
    """
    chance = np.random.Generator(np.random.Philox(key=seed))
    answers = np.array([answer_of(document) for document in document_ids])
    mined = mine_negatives(queries, passages, document_ids, positives, hardest)
    drawn: list[Rows] = []
    for near, right in zip(mined, positives, strict=True):
        wanted = min(len(passages), _SPARE * random + len(near) + len(right))
        rows = chance.choice(len(passages), wanted, replace=False).astype(np.int64)
        rows = rows[~np.isin(answers[rows], answers[right]) & ~np.isin(rows, near)]
        to_positive = (passages[rows] @ passages[right].T).max(axis=1, initial=-1.0)  # [r]
        drawn.append(np.concatenate([near, rows[to_positive <= NEAR_DUPLICATE][:random]]))
    return drawn
