"""Search: two rankings, by meaning and by words, fused to one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from daemon.retrieval.index import DenseIndex
from daemon.retrieval.library import Library, Passage

Float32 = NDArray[np.float32]

_DEPTH = 50  # passages of each ranking that take part in the fusion, at least
_FUSION_K = 60  # of reciprocal rank fusion; its authors found results flat around it


@dataclass(frozen=True)
class Ranked:
    """A passage found; greater scores are better, and compare within one search only."""

    passage: Passage
    score: float


def search(
    library: Library, index: DenseIndex, question: str, vector: Float32, top_k: int
) -> list[Ranked]:
    """The ``top_k`` best passages for a question, best first.

    ``vector`` [d] is the question as the index's model version embeds it.
    """
    depth = max(_DEPTH, top_k)
    by_meaning, _ = index.search(vector[np.newaxis], depth)
    by_words = library.bm25(question, depth)
    rankings = [by_meaning[0].tolist(), [rowid for rowid, _ in by_words]]
    fused = reciprocal_rank_fusion(rankings)
    # A passage of the index whose document has changed since is gone: passed over.
    passages = library.passages_by_rowid([rowid for rowid, _ in fused])
    ranked = [Ranked(passages[rowid], score) for rowid, score in fused if rowid in passages]
    return ranked[:top_k]


def reciprocal_rank_fusion(
    rankings: Sequence[Sequence[int]], *, k: int = _FUSION_K
) -> list[tuple[int, float]]:
    """Labels with the sum of 1 / (k + rank) over the rankings, best first.

    Ranks count from 1. Only ranks are compared, so cosines and BM25 scores need
    no common scale (Cormack, Clarke and Büttcher, SIGIR 2009).
    """
    scores: dict[int, float] = {}
    for ranking in rankings:
        for rank, label in enumerate(ranking, start=1):
            scores[label] = scores.get(label, 0.0) + 1.0 / (k + rank)
    return sorted(scores.items(), key=lambda item: (-item[1], item[0]))
