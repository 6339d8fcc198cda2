"""Rankings side by side on the same questions: by words, before training, now, and fused.

========  =====================================================================
bm25      by words alone
vanilla   by the encoder as it was before any training (exact search)
dense     by the model version: what training changes
fused     dense and bm25 together, as `weigh_words` found: what a question meets
========  =====================================================================

To add one: its function in `RANKINGS`, which `fedctl eval` prints as it comes.

Every ranking is cut at the same depth and a question without a find gets the rank
below it in all of them, so that average ranks and precisions can be compared.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from crypto.arrays import Float32, Int64
from daemon.evaluation.evaluation import Judged, judge
from daemon.learning.options import EvaluationError
from daemon.library.readers.documents import Pair
from daemon.library.search import USUAL_WORDS_WEIGHT, WORDS_WEIGHTS, reciprocal_rank_fusion
from daemon.library.store import Library

Labels = list[list[int]]  # passages for each question, best first

# Passages judged for each question: several may be of one answer, and ten
# different answers must remain.
DEPTH = 100
_QUERIES_AT_ONCE = 256  # bounds the similarity matrix to 256 x passages
_RANDOM_SAMPLE = 0  # the seed: the same questions each time
FEWEST_TO_WEIGH = 20  # pairs


def held_out(library: Library, split: str, *, most: int | None = None) -> tuple[str, list[Pair]]:
    """The pairs of ``split``; of "" those of test, or where there are none of valid.

    ``most``: so many of them, always the same ones. Raises EvaluationError when there
    are none.
    """
    wanted = (split,) if split else ("test", "valid")
    for name in wanted:
        pairs = library.pairs(name)
        if pairs:
            return name, _some(pairs, most)
    raise EvaluationError(
        f"there are no pairs of split {' or '.join(wanted)} here whose documents are in the "
        "library: ingest some (fedctl ingest)"
    )


def _some(pairs: list[Pair], most: int | None) -> list[Pair]:
    if most is None or len(pairs) <= most:
        return pairs
    chance = np.random.Generator(np.random.Philox(key=_RANDOM_SAMPLE))
    return [pairs[row] for row in sorted(chance.permutation(len(pairs))[:most].tolist())]


def exact(queries: Float32, labels: Int64, vectors: Float32, *, depth: int = DEPTH) -> Labels:
    """The ``depth`` nearest of ``labels`` [m] for each query, best first, equal ones by label.

    Where several are as near as the last one, which of them is the last is arbitrary.
    ``queries`` [n, d] and ``vectors`` [m, d] have rows of length 1.
    """
    rankings: Labels = []
    count = min(depth, len(labels))
    for start in range(0, len(queries), _QUERIES_AT_ONCE):
        if count == 0:
            break
        nearness = queries[start : start + _QUERIES_AT_ONCE] @ vectors.T  # [<= 256, m]
        for row in nearness:
            best = np.argpartition(-row, count - 1)[:count]
            rankings.append(labels[best[np.lexsort((labels[best], -row[best]))]].tolist())
    return rankings or [[] for _ in queries]


def weigh_words(library: Library, pairs: Sequence[Pair], dense: Labels) -> float:
    """What the ranking by words is to count beside ``dense``, by these pairs.

    The one of WORDS_WEIGHTS with the greatest mean reciprocal rank among ten, of equal ones
    the usual. Fewer than FEWEST_TO_WEIGH pairs would choose by chance.
    """
    by_words = _by_words(library, pairs)
    document_of = {passage.rowid: passage.document_id for passage in library.passages()}
    means = {
        weight: judged(_fused(dense, by_words, weight), pairs, document_of).means()["mrr@10"]
        for weight in WORDS_WEIGHTS
    }
    return max(means, key=lambda weight: (means[weight], weight == USUAL_WORDS_WEIGHT))


def _by_words(library: Library, pairs: Sequence[Pair]) -> Labels:
    return [[rowid for rowid, _ in library.bm25(pair.query, DEPTH)] for pair in pairs]


def _fused(dense: Labels, by_words: Labels, weight: float) -> Labels:
    return [
        [rowid for rowid, _ in reciprocal_rank_fusion(both, (1.0, weight))]
        for both in zip(dense, by_words, strict=True)
    ]


@dataclass(frozen=True)
class Questions:
    """What a ranking is made of: the questions, and what is known of each by now.

    ``dense`` and ``vanilla`` (where every passage has its features): passages by meaning;
    ``by_words``: the same by words; ``words_weight``: what a rank of these counts.
    """

    dense: Labels
    vanilla: Labels | None
    by_words: Labels
    words_weight: float


RANKINGS: dict[str, Callable[[Questions], Labels | None]] = {
    "bm25": lambda asked: asked.by_words,
    "vanilla": lambda asked: asked.vanilla,
    "dense": lambda asked: asked.dense,
    "fused": lambda asked: _fused(asked.dense, asked.by_words, asked.words_weight),
}
"""Those at the top of this module, in the order in which they are shown; None: not to be had."""


def judged_rankings(
    library: Library,
    pairs: Sequence[Pair],
    dense: Labels,
    vanilla: Labels | None = None,
    words_weight: float = USUAL_WORDS_WEIGHT,
) -> dict[str, Judged]:
    """Each of `RANKINGS` that is to be had, judged on ``pairs``."""
    questions = Questions(dense, vanilla, _by_words(library, pairs), words_weight)
    document_of = {passage.rowid: passage.document_id for passage in library.passages()}
    return {
        name: judged(labels, pairs, document_of)
        for name, ranking in RANKINGS.items()
        if (labels := ranking(questions)) is not None
    }


def judged(ranking: Labels, pairs: Sequence[Pair], document_of: dict[int, str]) -> Judged:
    """One ranking, judged. A question without a find ranks below all that could be ranked."""
    rankings = [_documents(labels[:DEPTH], document_of) for labels in ranking]
    scores = judge(rankings, [set(pair.positives) for pair in pairs])
    missed = scores.scores["map"] == 0.0
    lowest = min(DEPTH, len(document_of)) + 1
    ranks = np.where(missed, float(lowest), scores.scores["avg_rank"])
    return replace(scores, scores={**scores.scores, "avg_rank": ranks})


def _documents(labels: list[int], document_of: dict[int, str]) -> list[str]:
    """Documents by their best passage, each once; passages that are gone are passed over."""
    return list(dict.fromkeys(document_of[label] for label in labels if label in document_of))
