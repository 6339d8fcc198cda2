"""What a passage is compared by: as a whole, by its best sentence, or by both.

A passage that answers in one sentence of eight is far from the question as a whole. By
sentences it is as near as its nearest one is (PDD-AS2, Eq. 9):

    f(p, q) = max over sentences s of p of <Enc(q), Enc(s)>

The vectors of all sentences would be ten times those of passages, so sentences rank anew
what the ranking of passages has found: its best `RANKED_ANEW`. What that loses against
comparing with all sentences is measured in docs/results/retrieval.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from config.kinds import RetrievalLevel
from crypto.arrays import Float32, Int64
from daemon.library.contents import Passage

RANKED_ANEW = 200  # passages of a question


@dataclass(frozen=True)
class Sentences:
    """How passages are compared by their sentences; ``level``: sentence or both.

    ``passages``: those of labels, by label. ``vectors``: [n, d] of all sentences of each
    passage, of length 1; None: they are not all known.
    """

    level: RetrievalLevel
    passages: Callable[[list[int]], dict[int, Passage]]
    vectors: Callable[[Sequence[Passage]], list[Float32] | None]

    def compared(self, labels: Int64, cosines: Float32, question: Float32) -> Float32 | None:
        """[n] of these passages with the question [d] at this level; ``cosines`` [n]: as a whole.

        None where not all of their sentences are known: cosines of passages and of sentences
        don't compare. A passage that is gone keeps its own.
        """
        passages = self.passages(labels.tolist())
        rows = [row for row, label in enumerate(labels.tolist()) if label in passages]
        vectors = self.vectors([passages[int(labels[row])] for row in rows])
        if vectors is None:
            return None
        nearest = cosines.copy()
        nearest[rows] = _nearest_sentence(vectors, question)
        return nearest if self.level == "sentence" else (nearest + cosines) / np.float32(2.0)


def _nearest_sentence(vectors: Sequence[Float32], question: Float32) -> Float32:
    """[n] the greatest cosine of a question and a sentence, of each passage."""
    cosines = np.concatenate(vectors) @ question
    starts = np.cumsum([0, *(len(some) for some in vectors)])[:-1]
    return np.maximum.reduceat(cosines, starts).astype(np.float32)
