"""Other sites' negatives without a network: what they would answer, computed in place.

The levels of disclosure are the daemon's (`crypto.disclosure`): what a level does to
queries and to answers is done here to the same arrays by the same functions. Noise is
drawn from the cell's seed, so that a cell can be had again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from crypto.arrays import Float32
from crypto.disclosure import BucketTable, Projections, noisy
from daemon.learning.retriever.peer_negatives import AskingTerms
from peers.link.negatives import nearest


@dataclass
class Sites:
    """The passages [m_i, d] that each other site may answer with, as one version embeds them."""

    passages: Sequence[Float32]
    how: AskingTerms
    seed: int
    _chance: np.random.Generator = field(init=False)
    _tables: list[tuple[Float32, BucketTable]] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        self._chance = np.random.Generator(np.random.Philox(key=self.seed))
        if self.how.level != "exact":
            # Each passage is noised once: asking again must not average the noise away.
            self.passages = [noisy(rows, self.how.noise, self._chance) for rows in self.passages]
        if self.how.level == "bucket":
            self._projections = Projections(
                b"learning-bench", self.passages[0].shape[1], self.how.bits
            )
            self._tables = [
                (rows, BucketTable(self._projections.buckets(rows))) for rows in self.passages
            ]

    def fetch(self, queries: Float32) -> list[Float32]:
        """For each query [b, d] the ``top_n`` nearest of all sites' answers, [n, d]."""
        top_n = self.how.top_n
        if self.how.level == "bucket":
            answers = self._drawn(queries)
        else:
            sent = queries
            if self.how.level == "noisy":
                sent = noisy(queries, self.how.noise, self._chance)
            answers = [[_nearest(row, rows, top_n) for row in sent] for rows in self.passages]
        return [
            nearest(query, [of_site[row] for of_site in answers], top_n)
            for row, query in enumerate(queries)
        ]

    def _drawn(self, queries: Float32) -> list[list[Float32]]:
        names = self._projections.buckets(queries)
        return [
            [rows[table.draw(name, self.how.top_n, self._chance)] for name in names]
            for rows, table in self._tables
        ]


def _nearest(query: Float32, rows: Float32, count: int) -> Float32:
    cosines = rows @ query
    count = min(count, len(rows))
    return rows[np.argpartition(-cosines, count - 1)[:count]]
