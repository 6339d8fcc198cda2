"""What a level of disclosure leaves of negatives' use: are they the nearest, are they hard?

The site's own questions are put to its own passages as if these were another site's:
the passages of the right answer are left out. `exact` returns the nearest; `noisy` the
nearest to the noised question in the noised table; `bucket` some of those whose signs
under noise are the question's. So a site answers (`daemon.jobs.sharing`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from crypto.arrays import Float32, Rows
from crypto.disclosure import BucketTable, Projections, noisy

if TYPE_CHECKING:
    from daemon.inversion.exposure import Level


WANTED = 10  # negatives a question
_MOST_ASKED = 256


@dataclass(frozen=True)
class AuditQuestions:
    """AuditQuestions [q, d], passages [n, d], and of each question the passages left out."""

    queries: Float32
    passages: Float32
    right: Sequence[Rows]

    def __len__(self) -> int:
        return len(self.queries)

    @classmethod
    def of(
        cls, queries: Float32, passages: Float32, right: Sequence[Rows], *, seed: int
    ) -> AuditQuestions:
        """At most 256 of the questions, drawn by ``seed``."""
        chance = np.random.Generator(np.random.SFC64(seed))
        drawn = chance.permutation(len(queries))[:_MOST_ASKED]
        return cls(queries[drawn], passages, [right[row] for row in drawn])

    def allowed(self, place: int) -> Rows:
        """The rows of passages that may answer a question."""
        return np.setdiff1d(np.arange(len(self.passages)), self.right[place])


def utility_of(
    questions: AuditQuestions, level: Level, seed: bytes, table_noise: float
) -> tuple[float, float, float]:
    """Overlap with the exact nearest, mean true cosine, and number of what is returned.

    The first is the share of the exact top 10 that is among the returned, the second a
    mean over all returned, the third a mean over the questions; zeros without questions.
    ``seed`` names the projections; ``table_noise``: deviation under which passages are
    sorted into buckets (at level `noisy` it is the level's).
    """
    if not len(questions):
        return 0.0, 0.0, 0.0
    chance = np.random.Generator(np.random.SFC64(0))
    queries, table, names, query_names = questions.queries, questions.passages, None, None
    if level.kind == "noisy":
        queries = noisy(queries, level.sigma, chance)
        table = noisy(table, level.sigma, chance)
    elif level.kind == "bucket":
        projections = Projections(seed, queries.shape[1], level.bits)
        table = noisy(table, table_noise, chance)
        names, query_names = projections.buckets(table), projections.buckets(queries)
    overlaps, cosines, counts = [], list[float](), []
    for place in range(len(questions)):
        allowed = questions.allowed(place)
        if not len(allowed):
            continue
        candidates = questions.passages[allowed]
        nearest = _nearest(candidates @ questions.queries[place])
        if names is not None and query_names is not None:
            returned = BucketTable(names[allowed]).draw(query_names[place], WANTED, chance)
        else:
            returned = _nearest(table[allowed] @ queries[place])
        overlaps.append(len(np.intersect1d(nearest, returned)) / len(nearest))
        cosines.extend((candidates[returned] @ questions.queries[place]).tolist())
        counts.append(len(returned))
    if not counts:
        return 0.0, 0.0, 0.0
    return float(np.mean(overlaps)), float(np.mean(cosines)), float(np.mean(counts))


def at_random(questions: AuditQuestions) -> float:
    """Mean cosine of questions with passages that are not their answers: no hardness at all."""
    totals = [
        float((questions.passages[questions.allowed(place)] @ questions.queries[place]).mean())
        for place in range(len(questions))
        if len(questions.allowed(place))
    ]
    return float(np.mean(totals)) if totals else 0.0


def _nearest(cosines: Float32) -> Rows:
    return np.argsort(-cosines, kind="stable")[:WANTED]
