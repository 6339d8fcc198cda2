"""Pairs set apart to judge by, so that nothing is judged on what it was learned from.

Those of the split "valid" were never learned from. Of training pairs that are set apart
here, the shared version has learned in its rounds: it is flattered by them, and what is
made without them is not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from crypto.arrays import Float32, Float64, Rows
from daemon.learning.retriever import training_data
from daemon.library.store import Library

if TYPE_CHECKING:
    from daemon.learning.retriever.encoder import Texts
    from daemon.learning.retriever.retriever import Retriever
    from daemon.learning.retriever.training import TrainingSet


FEWEST = 20  # pairs that can judge; fewer choose by chance
_HELD_OUT = 5  # one in so many answers' training pairs, where those for validation are too few
_MOST_HELD_OUT = 500
_QUERIES_AT_ONCE = 256


@dataclass(frozen=True)
class Validation:
    """Pairs kept apart from training: ``positives[i]`` are rows of ``passages``, at least one."""

    queries: Texts
    passages: Texts
    positives: Sequence[Rows]

    def mean_reciprocal_rank(self, retriever: Retriever) -> float:
        """Mean of 1 / rank of the nearest positive among all ``passages``; ties count against it.

        0 for no pairs: then nothing can be shown to be better than what is shared.
        """
        if not self.positives:
            return 0.0
        return float(self.reciprocal_ranks(retriever).mean())

    def reciprocal_ranks(self, retriever: Retriever) -> Float64:
        """The same, question by question: [n]."""
        passages = retriever.embed_passages(self.passages.texts, self.passages.features)
        return self.ranks_against(retriever, passages)

    def ranks_against(self, retriever: Retriever, passages: Float32) -> Float64:
        """The same, where ``passages`` are embedded already: ``passages`` [m, d]."""
        queries = retriever.embed_queries(self.queries.texts, self.queries.features)
        ranks: list[float] = []
        for start in range(0, len(queries), _QUERIES_AT_ONCE):
            cosines = queries[start : start + _QUERIES_AT_ONCE] @ passages.T  # [<= 256, m]
            for row, right in zip(cosines, self.positives[start:], strict=False):
                best = row[right].max()
                # "not below" and not "at least": what is not a number ranks last
                others = int((~(row < best)).sum()) - int((~(row[right] < best)).sum())
                ranks.append(1.0 / (1 + others))
        return np.array(ranks)


def validation_pairs(library: Library, retriever: Retriever) -> Validation | None:
    """The pairs of split "valid", asked of all passages but those of tests; None: too few."""
    from daemon.learning.retriever.encoder import Texts

    passages = [*library.passages(split="train"), *library.passages(split="valid")]
    queries, positives = training_data.usable_pairs(
        library, "valid", training_data.rows_by_document(passages)
    )
    if len(positives) < FEWEST:
        return None
    passage_texts = Texts(
        [passage.embedding_text for passage in passages],
        training_data.passage_features(library, retriever, [p.rowid for p in passages]),
        retriever.encoder.reading.passage,
    )
    return Validation(
        Texts(
            queries,
            training_data.query_features(library, retriever, queries),
            retriever.encoder.reading.query,
        ),
        passage_texts,
        positives,
    )


def set_apart(
    library: Library, retriever: Retriever, pairs: TrainingSet, seed: int
) -> tuple[TrainingSet, Validation | None]:
    """Pairs to learn from, and pairs to judge by, of which nothing is learned from here on.

    Those of the split "valid"; where they are few, a part of the training pairs; where
    these are few, too, none.
    """
    validation = validation_pairs(library, retriever)
    if validation is not None:
        return pairs, validation
    fold = folds_by_answer(pairs, _HELD_OUT, seed)[0]
    spared = fold[:_MOST_HELD_OUT]
    if len(spared) < FEWEST or len(pairs.positives) - len(fold) < FEWEST:
        return pairs, None
    training = np.setdiff1d(np.arange(len(pairs.positives)), fold)
    return subset(pairs, training), judging(pairs, spared)


def folds_by_answer(pairs: TrainingSet, count: int, seed: int) -> list[Rows]:
    """Rows of the pairs in ``count`` folds; those of the same first answer are in the same one.

    Two questions for one passage say nearly the same: one must not judge what was learned
    from the other. Folds may be empty where there are fewer answers.
    """
    first = np.array([rows[0] for rows in pairs.answers], dtype=np.int64)
    answers, answer_of = np.unique(first, return_inverse=True)
    order = np.random.Generator(np.random.Philox(key=seed)).permutation(len(answers))
    fold_of = np.empty(len(answers), dtype=np.int64)
    fold_of[order] = np.arange(len(answers)) % count
    return [np.flatnonzero(fold_of[answer_of] == fold) for fold in range(count)]


def judging(pairs: TrainingSet, rows: Rows) -> Validation:
    """Those pairs to judge by, asked of all passages.

    Whatever answers is an answer: also the passage that an asking sentence was cut out of,
    which is the nearest there is.
    """
    answers = [pairs.answers[row] for row in rows]
    return Validation(_some(pairs.queries, rows), pairs.passages, answers)


def subset(pairs: TrainingSet, rows: Rows) -> TrainingSet:
    """Those pairs; the passages stay all."""
    parent = None if pairs.parent is None else (pairs.parent[0][rows], pairs.parent[1])
    return replace(
        pairs,
        queries=_some(pairs.queries, rows),
        positives=[pairs.positives[row] for row in rows],
        negatives=[pairs.negatives[row] for row in rows],
        parent=parent,
        right=None if pairs.right is None else [pairs.right[row] for row in rows],
    )


def _some(texts: Texts, rows: Rows) -> Texts:
    from daemon.learning.retriever.encoder import Texts

    features = None if texts.features is None else texts.features[rows]
    return Texts([texts.texts[row] for row in rows], features, texts.side)
