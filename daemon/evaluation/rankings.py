"""Rankings side by side on the same questions: by words, before training, now, and fused.

=============  ================================================================
bm25           by words alone
vanilla        by the encoder as it was before any training (exact search)
dense          by the model version: what training changes
fused          dense, with what titles and words add, as `weigh` found
cross-encoder  fused, the best of them as a cross-encoder has them, where a site has one
=============  ================================================================

What a question meets is the last of these that is to be had.

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
from daemon.library.dense.index import DenseIndex
from daemon.library.levels import Sentences
from daemon.library.readers.documents import Pair
from daemon.library.search import DEPTH as SEARCH_DEPTH
from daemon.library.search import (
    TITLE_WEIGHTS,
    USUAL_WEIGHTS,
    WORDS_WEIGHTS,
    Candidates,
    RankingWeights,
    by_sentences,
    candidates,
    depth_of,
)
from daemon.library.store import Library
from daemon.library.titles import Titles

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
            return name, some_of(pairs, most)
    raise EvaluationError(
        f"there are no pairs of split {' or '.join(wanted)} here whose documents are in the "
        "library: ingest some (fedctl ingest)"
    )


def some_of(pairs: list[Pair], most: int | None) -> list[Pair]:
    """So many of them in their order, always the same ones; None: all."""
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


@dataclass(frozen=True)
class Retrieved:
    """What there is of some questions before anything is weighed, in their order.

    ``dense``: passages by meaning; ``by_words``: the same by words, both DEPTH deep; ``met``:
    of which what a question meets is made.
    """

    dense: Labels
    by_words: Labels
    met: list[Candidates]


def found_by(
    library: Library,
    index: DenseIndex,
    titles: Titles,
    pairs: Sequence[Pair],
    vectors: Float32,
    sentences: Sentences | None = None,
) -> Retrieved:
    """What every ranking has of each pair's question; ``vectors`` [n, d]: as they are embedded.

    ``sentences``: as in `daemon.library.search.search`; they change what a question meets.
    """
    looked_at = depth_of(SEARCH_DEPTH, sentences)
    nearest = index.search(vectors, max(DEPTH, looked_at))[0]
    words = [library.bm25(pair.query, DEPTH) for pair in pairs]
    met = [
        candidates(index, titles, pair.query, vector, near[:looked_at], some[:SEARCH_DEPTH])
        for pair, vector, near, some in zip(pairs, vectors, nearest, words, strict=True)
    ]
    if sentences is not None:
        met = [
            by_sentences(one, vector, sentences) for one, vector in zip(met, vectors, strict=True)
        ]
    dense = [near[:DEPTH].tolist() for near in nearest]
    return Retrieved(dense, [[rowid for rowid, _ in some] for some in words], met)


def weigh(library: Library, pairs: Sequence[Pair], met: Sequence[Candidates]) -> RankingWeights:
    """What titles and words are to count for ``met``, by these pairs.

    First titles, words counting as usual, then words: of each the one with the greatest mean
    reciprocal rank among ten, if it is better than the usual by more than the standard error
    of that difference: less is chance (the one-standard-error rule: Breiman, Friedman, Olshen
    and Stone, Classification and Regression Trees, 1984, section 3.4.3). Fewer than
    FEWEST_TO_WEIGH pairs are chance altogether.
    """
    document_of = library.document_of()

    def best(among: Sequence[RankingWeights], usual: RankingWeights) -> RankingWeights:
        ranks = {
            weights: judged(_ranked(met, weights), pairs, document_of).scores["mrr@10"]
            for weights in among
        }
        greatest = max(ranks, key=lambda one: (ranks[one].mean(), one == usual))
        more = ranks[greatest] - ranks[usual]
        return greatest if more.mean() > more.std() / len(more) ** 0.5 else usual

    titled = best([replace(USUAL_WEIGHTS, title=title) for title in TITLE_WEIGHTS], USUAL_WEIGHTS)
    return best([replace(titled, words=words) for words in WORDS_WEIGHTS], titled)


def _ranked(met: Sequence[Candidates], weights: RankingWeights) -> Labels:
    return [one.labels[one.ranked(weights, SEARCH_DEPTH)].tolist() for one in met]


@dataclass(frozen=True)
class Questions:
    """What a ranking is made of; ``vanilla``: where every passage has its features.

    ``anew``: as a cross-encoder has the best, where there is one.
    """

    found: Retrieved
    vanilla: Labels | None
    weights: RankingWeights
    anew: Labels | None = None


def fused(asked: Questions) -> Labels:
    """By meaning, titles and words together."""
    return _ranked(asked.found.met, asked.weights)


RANKINGS: dict[str, Callable[[Questions], Labels | None]] = {
    "bm25": lambda asked: asked.found.by_words,
    "vanilla": lambda asked: asked.vanilla,
    "dense": lambda asked: asked.found.dense,
    "fused": fused,
    "cross-encoder": lambda asked: asked.anew,
}
"""Those at the top of this module, in the order in which they are shown; None: not to be had."""


def judged_rankings(
    library: Library, pairs: Sequence[Pair], questions: Questions
) -> dict[str, Judged]:
    """Each of `RANKINGS` that is to be had, judged on ``pairs``."""
    document_of = library.document_of()
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
