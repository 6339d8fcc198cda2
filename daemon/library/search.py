"""Search: two rankings, by meaning and by words, fused to one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from crypto.arrays import Float32
from daemon.library.index import DenseIndex
from daemon.library.store import Library, Passage

_DEPTH = 50  # passages of each ranking that take part in the fusion, at least
_FUSION_K = 60  # of reciprocal rank fusion; its authors found results flat around it

# What the ranking by words counts, beside that by meaning: chosen on a site's own pairs
# (`daemon.evaluation.rankings.weigh_words`), of these. The usual one is where there are none
# to choose by; on seven institutions it is good before training and after it
# (docs/decisions/0019).
WORDS_WEIGHTS = (1.0, 0.5, 0.25, 0.1, 0.05, 0.0)
USUAL_WORDS_WEIGHT = 0.1


@dataclass(frozen=True)
class Ranked:
    """A passage found; greater scores are better, and compare within one search only."""

    passage: Passage
    score: float


def search(
    library: Library,
    index: DenseIndex,
    question: str,
    vector: Float32,
    top_k: int,
    words_weight: float = USUAL_WORDS_WEIGHT,
) -> list[Ranked]:
    """The ``top_k`` best passages for a question, best first.

    ``vector`` [d] is the question as the index's model version embeds it.
    ``words_weight``: what a rank by words counts, that by meaning counting 1; where a
    passage came after the index was made its words are all that finds it, and count 1 too.
    """
    depth = max(_DEPTH, top_k)
    by_meaning, _ = index.search(vector[np.newaxis], depth)
    by_words = library.bm25(question, depth)
    rowids = [rowid for rowid, _ in by_words]
    indexed = index.holds(rowids)
    new = [None if there else rowid for rowid, there in zip(rowids, indexed, strict=True)]
    fused = reciprocal_rank_fusion(
        [by_meaning[0].tolist(), rowids, new], (1.0, words_weight, 1.0 - words_weight)
    )
    # A passage of the index whose document has changed since is gone: passed over.
    passages = library.passages_by_rowid([rowid for rowid, _ in fused])
    ranked = [Ranked(passages[rowid], score) for rowid, score in fused if rowid in passages]
    return ranked[:top_k]


def reciprocal_rank_fusion(
    rankings: Sequence[Sequence[int | None]],
    weights: Sequence[float] | None = None,
) -> list[tuple[int, float]]:
    """Labels with the sum of weight / (60 + rank) over the rankings, best first.

    Ranks count from 1. Only ranks are compared, so cosines and BM25 scores need
    no common scale (Cormack, Clarke and Büttcher, SIGIR 2009). Without ``weights`` all
    count alike; a ranking that weighs nothing adds its labels behind all others. None
    holds a place in a ranking for a label that does not count in it.
    """
    scores: dict[int, float] = {}
    for ranking, weight in zip(rankings, weights or [1.0] * len(rankings), strict=True):
        for rank, label in enumerate(ranking, start=1):
            if label is None:
                continue
            scores[label] = scores.get(label, 0.0) + weight / (_FUSION_K + rank)
    return sorted(scores.items(), key=lambda item: (-item[1], item[0]))
