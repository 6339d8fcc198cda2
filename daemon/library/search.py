"""Search: two rankings, by meaning and by words, fused to one; titles count in the first.

A question that names a company or a year means a document, and no embedding of a passage
says well whose it is. So a passage's cosine is raised by what its document's title says of
the question (`daemon.library.titles`), and passages under the titles that say most are
looked at as well, though they may be far from the nearest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from config.kinds import RetrievalLevel
from crypto.arrays import Float32, Int64
from daemon.library.contents import Passage
from daemon.library.dense.index import DenseIndex
from daemon.library.levels import RANKED_ANEW, Sentences
from daemon.library.store import Library
from daemon.library.titles import Titles, title_words

FUSION_DEPTH = 50  # passages of each ranking that take part in the fusion, at least
_FUSION_K = 60  # of reciprocal rank fusion; its authors found results flat around it
# Passages that are looked at for their titles. More of them cost a millisecond a thousand;
# with fewer a long document that a question names is not seen whole.
_BY_TITLE = 2000
_BLOCK = 1 << 14  # passages whose vectors are in memory at a time

# What the ranking by words counts, beside that by meaning, and what a title that has all of
# a question's words adds to a cosine: chosen on a site's own pairs
# (`daemon.evaluation.rankings.weigh`), of these. The usual ones are where there are none to
# choose by (docs/decisions/0019 and 0029).
WORDS_WEIGHTS = (1.0, 0.5, 0.25, 0.1, 0.05, 0.0)
TITLE_WEIGHTS = (0.0, 0.05, 0.1, 0.2, 0.3, 0.5)
USUAL_WORDS_WEIGHT = 0.1
USUAL_TITLE_WEIGHT = 0.1


@dataclass(frozen=True)
class RankingWeights:
    """``words``: what a rank by words counts, one by meaning counting 1.

    ``title``: what a title with all of the question's words adds to a cosine.
    """

    words: float = USUAL_WORDS_WEIGHT
    title: float = USUAL_TITLE_WEIGHT


USUAL_WEIGHTS = RankingWeights()


@dataclass(frozen=True)
class Explanation:
    """How a passage came to its score, which is the sum of both parts.

    Places count from 1; 0: not in that ranking. The place by meaning is that of
    ``cosine`` plus the title's weight times ``title_share``. ``level``: what of the passage
    the cosine is of (`daemon.library.levels`).
    """

    meaning_place: int
    cosine: float  # NaN for a passage that came after the index was made
    title_share: float  # 0 .. 1; see `daemon.library.titles`
    words_place: int
    bm25: float  # NaN without a place by words
    meaning_part: float
    words_part: float
    level: RetrievalLevel = "passage"


@dataclass(frozen=True)
class Ranked:
    """A passage found; greater scores are better, and compare within one search only."""

    passage: Passage
    score: float
    explanation: Explanation | None = None


@dataclass(frozen=True)
class Candidates:
    """Passages that may answer a question, before anything is weighed.

    ``nearest``: labels by the index, best first. ``labels`` [n], ascending: those and what
    titles brought, with their exact ``cosines`` [n] and their titles' ``shares`` [n].
    ``words``: (label, BM25), best first; ``indexed``: which of these the index holds.
    ``level``: what of a passage the cosines are of.
    """

    nearest: list[int]
    labels: Int64
    cosines: Float32
    shares: Float32
    words: list[tuple[int, float]]
    indexed: list[bool]
    level: RetrievalLevel = "passage"

    def by_meaning(self, title_weight: float) -> list[int]:
        """As many labels as are ``nearest``, best first, with titles counting so much.

        Where they count nothing, or none says anything, these are the nearest.
        """
        if title_weight == 0.0 or not self.shares.any():
            return self.nearest
        scores = self.cosines + np.float32(title_weight) * self.shares
        best = np.lexsort((self.labels, -scores))[: len(self.nearest)]
        ranked: list[int] = self.labels[best].tolist()
        return ranked

    def fused(self, weights: RankingWeights) -> list[tuple[int, float]]:
        """Labels with their scores, best first; see `search`."""
        rowids = [rowid for rowid, _ in self.words]
        new = [None if held else rowid for rowid, held in zip(rowids, self.indexed, strict=True)]
        return reciprocal_rank_fusion(
            [self.by_meaning(weights.title), rowids, new], (1.0, weights.words, 1.0 - weights.words)
        )

    def explained(self, labels: Sequence[int], weights: RankingWeights) -> list[Explanation]:
        """How each of these labels came to its score."""
        meaning = _places(self.by_meaning(weights.title))
        words = _places([rowid for rowid, _ in self.words])
        return [
            self._explained(label, meaning.get(label, 0), words.get(label, 0), weights)
            for label in labels
        ]

    def _explained(
        self, label: int, meaning: int, words: int, weights: RankingWeights
    ) -> Explanation:
        counts = weights.words if words and self.indexed[words - 1] else 1.0
        at = int(np.searchsorted(self.labels, label))
        here = at < len(self.labels) and self.labels[at] == label
        return Explanation(
            meaning_place=meaning,
            cosine=float(self.cosines[at]) if here else float("nan"),
            title_share=float(self.shares[at]) if here else 0.0,
            words_place=words,
            bm25=self.words[words - 1][1] if words else float("nan"),
            meaning_part=1.0 / (_FUSION_K + meaning) if meaning else 0.0,
            words_part=counts / (_FUSION_K + words) if words else 0.0,
            level=self.level,
        )


def search(
    library: Library,
    index: DenseIndex,
    titles: Titles,
    question: str,
    vector: Float32,
    top_k: int,
    weights: RankingWeights = USUAL_WEIGHTS,
    among: Int64 | None = None,
    sentences: Sentences | None = None,
) -> list[Ranked]:
    """The ``top_k`` best passages for a question, best first; of ``among`` (labels), or of all.

    ``vector`` [d] is the question as the index's model version embeds it. Where a passage
    came after the index was made its words are all that finds it, and count in full.
    ``titles``: of the passages that the index holds, or of more. ``sentences``: where these
    are compared (`daemon.library.levels`), and not passages alone.
    """
    depth = max(FUSION_DEPTH, top_k)
    looked_at = depth_of(depth, sentences)
    if among is None:
        nearest = index.search(vector[np.newaxis], looked_at)[0][0].tolist()
        words = library.bm25(question, depth)
    else:
        nearest = _nearest_among(index, among, vector, looked_at)
        words = library.bm25(question, depth, among.tolist())
    found = candidates(index, titles, question, vector, nearest, words, among)
    if sentences is not None:
        found = by_sentences(found, vector, sentences, depth)
    fused = found.fused(weights)
    # A passage of the index whose document has changed since is gone: passed over.
    passages = library.passages_by_rowid([rowid for rowid, _ in fused])
    there = [(rowid, score) for rowid, score in fused if rowid in passages][:top_k]
    explained = found.explained([rowid for rowid, _ in there], weights)
    return [
        Ranked(passages[rowid], score, explanation)
        for (rowid, score), explanation in zip(there, explained, strict=True)
    ]


def candidates(
    index: DenseIndex,
    titles: Titles,
    question: str,
    vector: Float32,
    nearest: list[int],
    words: list[tuple[int, float]],
    among: Int64 | None = None,
) -> Candidates:
    """What both rankings of a question have found, and what titles bring to the first.

    ``vector`` [d]: the question; ``nearest``: labels by the index, ``words``: labels with
    BM25, both best first. With ``among`` titles bring these labels, and no others.
    """
    indexed = index.holds([rowid for rowid, _ in words])
    shares = titles.shares(titles.asked(question))
    by_title = titles.best(shares, _BY_TITLE) if among is None else among
    labels = np.union1d(np.array(nearest, np.int64), _held(index, by_title))
    cosines = _cosines(index, labels, vector)
    return Candidates(nearest, labels, cosines, titles.shares_of(labels, shares), words, indexed)


def depth_of(depth: int, sentences: Sentences | None) -> int:
    """How many of the nearest passages are looked at, of which ``depth`` are to remain."""
    return depth if sentences is None else max(depth, RANKED_ANEW)


def by_sentences(
    found: Candidates, vector: Float32, sentences: Sentences, depth: int
) -> Candidates:
    """The best of those passages, compared at another level with the question [d].

    The ``depth`` best of them are the nearest. Where not all of their sentences are known
    they are compared as before.
    """
    scores = found.cosines + np.float32(USUAL_TITLE_WEIGHT) * found.shares
    best = np.sort(np.lexsort((found.labels, -scores))[:RANKED_ANEW])
    labels, shares = found.labels[best], found.shares[best]
    cosines = sentences.compared(labels, found.cosines[best], vector) if len(best) else None
    if cosines is None:
        return replace(found, nearest=found.nearest[:depth])
    nearest: list[int] = labels[np.lexsort((labels, -cosines))][:depth].tolist()
    return replace(
        found,
        nearest=nearest,
        labels=labels,
        cosines=cosines,
        shares=shares,
        level=sentences.level,
    )


def labels_of(library: Library, begins: str, title: str) -> Int64 | None:
    """Passages of documents whose id begins so and whose title has these words; None: all.

    Every word of ``title`` must be there, in any order (`daemon.library.titles.title_words`).
    """
    if not begins and not title:
        return None
    wanted = title_words(title)
    fits: dict[str, bool] = {}
    found = []
    for label, document_id, of in library.titles():
        if of not in fits:
            fits[of] = wanted <= title_words(of)
        if fits[of] and document_id.startswith(begins):
            found.append(label)
    return np.array(found, np.int64)


def _held(index: DenseIndex, labels: Int64) -> Int64:
    held: Int64 = labels[np.array(index.holds(labels.tolist()), dtype=bool)]
    return held


def _nearest_among(index: DenseIndex, among: Int64, vector: Float32, depth: int) -> list[int]:
    """The ``depth`` nearest of these labels, best first: exact, for a graph can't pass over any."""
    held = _held(index, among)
    nearest: list[int] = held[np.lexsort((held, -_cosines(index, held, vector)))][:depth].tolist()
    return nearest


def _cosines(index: DenseIndex, labels: Int64, vector: Float32) -> Float32:
    """[n] of a question and these passages, some at a time: each block is a copy."""
    blocks = [
        index.vectors(labels[start : start + _BLOCK]) @ vector
        for start in range(0, len(labels), _BLOCK)
    ]
    return np.concatenate(blocks) if blocks else np.zeros(0, np.float32)


def _places(ranking: Sequence[int]) -> dict[int, int]:
    return {label: place for place, label in enumerate(ranking, start=1)}


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
