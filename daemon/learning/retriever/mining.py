"""Hard negatives: passages that the parent version takes for an answer and that are none.

A passage is a hard negative of a query when it is among the nearest to it by
the parent version's embeddings (or, to warm up, among the best by words), and

- its document is none of the query's positives, nor another part of the same
  answer (``x#1`` beside ``x#0``);
- it is no near-duplicate of a positive (cosine above 0.95): institutions repeat
  themselves, and a repeated answer must not be learned as a wrong one.

Which passages may be learned from is decided before: those handed in here.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from crypto.arrays import Float32, Rows
from daemon.library.readers.documents import answer_of

NEAR_DUPLICATE = 0.95  # cosine
_COMPARED_AT_ONCE = 64
_SPARE = 64  # candidates beyond the number wanted, since some are excluded
_QUERIES_AT_ONCE = 256  # bounds the similarity matrix to 256 x passages


def mine_negatives(
    queries: Float32,
    passages: Float32,
    document_ids: Sequence[str],
    positives: Sequence[Rows],
    count: int,
) -> list[Rows]:
    """Up to ``count`` passage rows per query, nearest first.

    ``queries`` [n, d] and ``passages`` [m, d] have rows of length 1;
    ``document_ids[j]`` is the document of passage j; ``positives[i]`` are the
    passage rows that answer query i (at least one). A query for which too few
    passages qualify gets fewer.
    """
    if count == 0:
        return [np.empty(0, dtype=np.int64) for _ in positives]
    answers = np.array([answer_of(document) for document in document_ids])
    mined: list[Rows] = []
    for start in range(0, len(queries), _QUERIES_AT_ONCE):
        stop = start + _QUERIES_AT_ONCE
        similarity = queries[start:stop] @ passages.T  # [<= 256, m]
        for row, right in zip(similarity, positives[start:stop], strict=True):
            candidates = _nearest(row, candidates_for(count, right))
            mined.append(_wrong(candidates, passages, answers, right, count))
    return mined


def filter_ranked(
    ranked: Sequence[Rows],
    passages: Float32,
    document_ids: Sequence[str],
    positives: Sequence[Rows],
    count: int,
) -> list[Rows]:
    """As `mine_negatives`, from rankings made elsewhere (BM25: PDD-AS2's warm-up).

    ``ranked[i]``: rows of passages for query i, best first.
    """
    answers = np.array([answer_of(document) for document in document_ids])
    return [
        _wrong(candidates, passages, answers, right, count)
        for candidates, right in zip(ranked, positives, strict=True)
    ]


def candidates_for(count: int, right: Rows) -> int:
    """How many candidates to rank for ``count`` negatives, since some are excluded."""
    return count + len(right) + _SPARE


def _wrong(
    candidates: Rows, passages: Float32, answers: NDArray[np.str_], right: Rows, count: int
) -> Rows:
    """The first ``count`` candidates that are no answer to the query, in the order given.

    Compared with the answers a few at a time, for a question may have thousands of them.
    """
    others = candidates[~np.isin(answers[candidates], answers[right])]
    wrong: Rows = others[:0]
    for start in range(0, len(others), _COMPARED_AT_ONCE):
        some = others[start : start + _COMPARED_AT_ONCE]
        to_positive = (passages[some] @ passages[right].T).max(axis=1)  # [<= 64]
        wrong = np.concatenate([wrong, some[to_positive <= NEAR_DUPLICATE]])
        if len(wrong) >= count:
            break
    return wrong[:count]


def _nearest(similarity: Float32, count: int) -> Rows:
    """Rows of the greatest similarities, greatest first; equal ones by row."""
    count = min(count, len(similarity))
    nearest = np.argpartition(-similarity, count - 1)[:count]
    order = np.lexsort((nearest, -similarity[nearest]))
    return nearest[order].astype(np.int64)
