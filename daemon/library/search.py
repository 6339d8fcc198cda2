"""Search: passages by meaning, raised by what their title and their words have of a question.

    score = cosine + title weight x title share + words weight x words share

A question that names a company or a year means a document, and one that asks for a form's
number means the passage that has it: of neither an embedding says much. Titles are as
`daemon.library.titles` has them, words as `daemon.library.words`.
That scores are added and not ranks is measured in docs/decisions/0035.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from config.kinds import RetrievalLevel
from crypto.arrays import Bools, Float32, Int64
from daemon.library.catalogue.filters import Filters
from daemon.library.catalogue.near_duplicates import Copies
from daemon.library.contents import Passage
from daemon.library.dense.index import DenseIndex
from daemon.library.levels import RANKED_ANEW, Sentences
from daemon.library.store import Library
from daemon.library.titles import Titles

DEPTH = 50  # passages of each ranking that are looked at, at least
# Passages that are looked at for their titles. More of them cost a millisecond a thousand;
# with fewer a long document that a question names is not seen whole.
_BY_TITLE = 2000
# Where copies leave too few different ones, so many times as many are looked at, and again.
_DEEPER, _DEEPEST = 10, 5000
_DEEPEST_BY_SENTENCES = 500  # a quarter of a second; of 5,000 passages' it would be more than one
_BLOCK = 1 << 14  # passages whose vectors are in memory at a time

# What a title that has all of a question's words adds to a cosine, and what a passage that
# has them does: chosen on a site's own pairs (`daemon.evaluation.rankings.weigh`), of these.
# The usual ones are where there are none to choose by (docs/decisions/0029 and 0035).
TITLE_WEIGHTS = (0.0, 0.05, 0.1, 0.2, 0.3, 0.5)
WORDS_WEIGHTS = (0.0, 0.05, 0.1, 0.2, 0.3, 0.5)
USUAL_TITLE_WEIGHT = 0.1
USUAL_WORDS_WEIGHT = 0.2


@dataclass(frozen=True)
class RankingWeights:
    """What is added to a cosine: ``title``, times the title's share; ``words``, times the text's.

    A share is 1 where a title has all of the question's words, and about 1 where a passage
    has each of them once.
    """

    words: float = USUAL_WORDS_WEIGHT
    title: float = USUAL_TITLE_WEIGHT


USUAL_WEIGHTS = RankingWeights()


@dataclass(frozen=True)
class Explanation:
    """How a passage came to its score: cosine + title_part + words_part.

    Places count from 1; 0: not in that ranking. ``level``: what of the passage the cosine is
    of (`daemon.library.levels`). ``indexed``: whether the index holds it; the cosine of one
    that came later is that of the passage whose place by meaning is its place by words.
    ``cross_score``, ``place_before``: of one that a cross-encoder has ranked anew
    (`daemon.answering.cross_encoder`), its score there and its place by all the rest.
    """

    meaning_place: int  # by cosine
    cosine: float
    title_share: float  # 0 .. 1; see `daemon.library.titles`
    words_place: int
    words_share: float  # see `daemon.library.words`; 0 without a place by words
    title_part: float
    words_part: float
    indexed: bool
    level: RetrievalLevel
    cross_score: float = 0.0
    place_before: int = 0  # 0: it was not ranked anew


@dataclass(frozen=True)
class Ranked:
    """A passage found; greater scores are better, and compare within one search only.

    ``copies``: what says nearly the same, where there is any.
    """

    passage: Passage
    score: float
    explanation: Explanation | None = None
    copies: Copies | None = None


@dataclass(frozen=True)
class Candidates:
    """Passages that may answer a question, before anything is weighed.

    ``labels`` [n], ascending: the nearest by the index, those that titles bring, and the best
    by words; with their ``cosines`` [n], their ``titles``' shares [n] and their ``words``'
    [n], 0 where they are not among the best. ``indexed`` [n]: those that the index holds; the
    others' cosines as in `Explanation`. ``level``: what of a passage the cosines are of.
    """

    labels: Int64
    cosines: Float32
    titles: Float32
    words: Float32
    indexed: Bools
    level: RetrievalLevel = "passage"

    def scores(self, weights: RankingWeights) -> Float32:
        """[n] what they are ranked by."""
        added = np.float32(weights.title) * self.titles
        added += np.float32(weights.words) * self.words
        return self.cosines + added

    def ranked(self, weights: RankingWeights, most: int | None = None) -> list[int]:
        """Their rows, best first, equal ones by label; the first ``most``, or all."""
        rows: list[int] = np.lexsort((self.labels, -self.scores(weights)))[:most].tolist()
        return rows

    def at(self, rows: Int64) -> Candidates:
        """Those in these rows, which ascend."""
        return Candidates(
            *(self.labels[rows], self.cosines[rows], self.titles[rows]),
            *(self.words[rows], self.indexed[rows], self.level),
        )

    def explained(self, weights: RankingWeights) -> Callable[[int], Explanation]:
        """Of each row, how it came to its score."""
        meaning = _places(np.lexsort((self.labels, -self.cosines)), self.indexed)
        words = _places(np.lexsort((self.labels, -self.words)), self.words > 0.0)

        def explanation(row: int) -> Explanation:
            return Explanation(
                meaning_place=int(meaning[row]),
                cosine=float(self.cosines[row]),
                title_share=float(self.titles[row]),
                words_place=int(words[row]),
                words_share=float(self.words[row]),
                title_part=weights.title * float(self.titles[row]),
                words_part=weights.words * float(self.words[row]),
                indexed=bool(self.indexed[row]),
                level=self.level,
            )

        return explanation


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

    They are different texts: of several that say nearly the same the best stands for the
    others, which are told with it.

    ``vector`` [d] is the question as the index's model version embeds it. Where a passage
    came after the index was made its words are all that finds it, and count in full.
    ``titles``: of the passages that the index holds, or of more. ``sentences``: where these
    are compared (`daemon.library.levels`), and not passages alone.
    """

    def ranked(depth: int) -> tuple[Candidates, Int64]:
        if among is None:
            nearest = index.search(vector[np.newaxis], depth_of(depth, sentences))[0][0]
            words = library.bm25(question, depth)
        else:
            nearest = among  # all of them are compared: a graph can't pass over any
            words = library.bm25(question, depth, among.tolist())
        found = candidates(index, titles, question, vector, nearest, words, among)
        if sentences is not None:
            found = by_sentences(found, vector, sentences, depth)
        return found, np.array(found.ranked(weights, depth), np.int64)

    depth = max(DEPTH, top_k)
    deepest = _DEEPEST if sentences is None else _DEEPEST_BY_SENTENCES
    found, rows = ranked(depth)
    groups = groups_of(library, found.labels[rows].tolist())
    # Copies fill them, and there may be more behind these.
    while len(groups) < top_k and len(rows) == depth < deepest:
        depth = min(_DEEPER * depth, deepest)
        found, rows = ranked(depth)
        groups = groups_of(library, found.labels[rows].tolist())
    return _shown(library, groups[:top_k], found, weights, among)


def groups_of(library: Library, labels: Sequence[int]) -> list[list[int]]:
    """These labels in their order, each with those behind it that say nearly the same.

    A passage of the index whose document has changed since is gone: passed over.
    """
    leaders = library.near.leaders(labels)
    groups: dict[int, list[int]] = {}
    for label in labels:
        if label in leaders:
            groups.setdefault(leaders[label], []).append(label)
    return list(groups.values())


def _shown(
    library: Library,
    groups: Sequence[Sequence[int]],
    found: Candidates,
    weights: RankingWeights,
    among: Int64 | None,
) -> list[Ranked]:
    passages = library.passages_by_rowid([first for first, *_ in groups])
    copies = library.near.copies({first: others for first, *others in groups}, among)
    scores, explained = found.scores(weights), found.explained(weights)
    rows = {first: int(np.searchsorted(found.labels, first)) for first, *_ in groups}
    return [
        Ranked(passages[label], float(scores[row]), explained(row), copies.get(label))
        for label, row in rows.items()
        if label in passages
    ]


def candidates(
    index: DenseIndex,
    titles: Titles,
    question: str,
    vector: Float32,
    nearest: Int64,
    words: list[tuple[int, float]],
    among: Int64 | None = None,
) -> Candidates:
    """What both rankings of a question have found, and what titles bring.

    ``vector`` [d]: the question; ``nearest``: labels by the index, ``words``: labels with
    shares, best first. With ``among`` these are all that may be found.
    """
    shares = titles.shares(titles.asked(question))
    by_title = titles.best(shares, _BY_TITLE) if among is None else among
    by_words = np.array([label for label, _ in words], np.int64)
    labels = np.unique(np.concatenate([nearest, by_title, by_words]))
    indexed = index.holds(labels)
    kept = indexed.copy()
    kept[np.searchsorted(labels, by_words)] = True  # also what came after the index was made
    labels, indexed = labels[kept], indexed[kept]
    by, cosines = np.zeros(len(labels), np.float32), np.zeros(len(labels), np.float32)
    by[np.searchsorted(labels, by_words)] = [score for _, score in words]
    cosines[indexed] = _cosines(index, labels[indexed], vector)
    if indexed.any() and not indexed.all():
        best = -np.sort(-cosines[indexed])
        places = np.flatnonzero(np.isin(by_words, labels[~indexed]))
        new = np.searchsorted(labels, by_words[places])
        cosines[new] = best[np.minimum(places, len(best) - 1)]
    return Candidates(labels, cosines, titles.shares_of(labels, shares), by, indexed)


def depth_of(depth: int, sentences: Sentences | None) -> int:
    """How many of the nearest passages are looked at, of which ``depth`` are to remain."""
    return depth if sentences is None else max(depth, RANKED_ANEW)


def by_sentences(
    found: Candidates, vector: Float32, sentences: Sentences, depth: int = DEPTH
) -> Candidates:
    """The best of those passages, compared at another level with the question [d].

    Of these ``depth`` are to remain. Where not all of their sentences are known they are
    compared as before.
    """
    most = depth_of(depth, sentences)
    best = found.at(np.sort(np.array(found.ranked(USUAL_WEIGHTS, most), np.int64)))
    if not len(best.labels):
        return found
    cosines = sentences.compared(best.labels, best.cosines, vector)
    return found if cosines is None else replace(best, cosines=cosines, level=sentences.level)


def labels_of(library: Library, filters: Filters) -> Int64 | None:
    """The passages of documents that fit, ascending; None: of all. Raises NothingFits."""
    labels = library.fitting(filters)
    return None if labels is None else np.array(labels, np.int64)


def _cosines(index: DenseIndex, labels: Int64, vector: Float32) -> Float32:
    """[n] of a question and these passages, some at a time: each block is a copy."""
    blocks = [
        index.vectors(labels[start : start + _BLOCK]) @ vector
        for start in range(0, len(labels), _BLOCK)
    ]
    return np.concatenate(blocks) if blocks else np.zeros(0, np.float32)


def _places(order: Int64, among: Bools) -> Int64:
    """[n] the place of each row of ``among``, from 1, in that order; 0 for the others."""
    places = np.zeros(len(order), np.int64)
    kept = order[among[order]]
    places[kept] = np.arange(1, len(kept) + 1)
    return places
