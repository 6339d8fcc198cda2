"""How well a ranking finds what it should, question by question, with intervals.

An **answer** is what a question is scored on: documents ``x#0``, ``x#1``, … are
parts of one answer ``x``, and an answer ranks where its best part does. A
document without such an ending is an answer of its own. All questions weigh
equally.

Scores come from ir-measures (trec_eval's definitions) where it has them:

========== ======================================================================
hit@k      a right answer is among the first k (Success@k)
mrr@k      1 / rank of the first right answer, 0 below rank k (RR@k)
map        average precision over the whole ranking (AP)
ndcg@k     DCG over that of the best order there can be
recall@k   share of the right answers that are among the first k
precision@k share of the first k that are right, k even where fewer were found
========== ======================================================================

It lacks these, which are ours:

========== ======================================================================
dcg@k      sum over the right answers at ranks r <= k of 1 / log2(r + 1)
idcg@k     the same of the best order there can be
f1@k       harmonic mean of precision@k and recall@k, of each question
em         the first R answers are exactly the R right ones
avg_rank   rank of the first right answer; where none was found, one more than
           the answers that were ranked: a lower bound, so rank all of a corpus
           (or equally many) before comparing
========== ======================================================================

``em`` is named in FedE4RAG (section V-B) in words that its Table II doesn't follow:
there EM is below Acc@1. The reading above fits both. Its Acc@k is none of these:
by the text the share of the first k whose cosine is above a threshold that it
doesn't give, by the table precision@1 and hit@10 (decision 0044).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass

import numpy as np

from crypto.arrays import Float64
from daemon.learning.options import EvaluationError
from daemon.library.readers.documents import answer_of

CUTOFFS = (1, 5, 10)


@dataclass(frozen=True)
class Metrics:
    """Means over questions, each counted equally; all four in [0, 1].

    ``mrr_at_10``: 1 / rank of the first right answer, 0 below rank 10.
    ``recall_at_10``: share of the right answers that are among the first ten.
    """

    questions: int
    mrr_at_10: float
    recall_at_10: float
    hit_at_1: float
    ndcg_at_10: float


@dataclass(frozen=True)
class Judged:
    """Every metric of every question: ``scores[name]`` is float64 [questions].

    Kept by question because a comparison needs pairs: two systems' scores on the
    same question differ far less than two questions do.
    """

    scores: Mapping[str, Float64]

    @property
    def questions(self) -> int:
        """How many questions were judged."""
        return len(next(iter(self.scores.values())))

    def mean(self, name: str) -> float:
        """The mean of one metric over all questions."""
        return float(self.scores[name].mean())

    def means(self) -> dict[str, float]:
        """The means of all metrics."""
        return {name: self.mean(name) for name in self.scores}

    def metrics(self) -> Metrics:
        """The four figures that a daemon reports."""
        return Metrics(
            questions=self.questions,
            mrr_at_10=self.mean("mrr@10"),
            recall_at_10=self.mean("recall@10"),
            hit_at_1=self.mean("hit@1"),
            ndcg_at_10=self.mean("ndcg@10"),
        )


def judge(
    rankings: Sequence[Sequence[str]],
    positives: Sequence[Set[str]],
    *,
    cutoffs: Sequence[int] = CUTOFFS,
) -> Judged:
    """Every metric at the top of this module, for each question.

    ``rankings[i]`` are documents, best first, and belong to ``positives[i]``. A
    question whose ranking is empty is a miss, not an absence. Raises EvaluationError
    when there is no question, lengths differ, or a question has no right document.
    """
    _check(rankings, positives)
    answers = [collapse(ranking) for ranking in rankings]
    right = [frozenset(map(answer_of, documents)) for documents in positives]
    scores = _from_library(answers, right, cutoffs)
    scores |= _ours(answers, right, cutoffs)
    for k in cutoffs:
        precision, recall = scores[f"precision@{k}"], scores[f"recall@{k}"]
        total = precision + recall
        scores[f"f1@{k}"] = 2 * precision * recall / np.where(total > 0, total, 1.0)
    return Judged(scores)


def collapse(ranking: Sequence[str]) -> list[str]:
    """A ranking of documents as a ranking of answers: the best part counts."""
    return list(dict.fromkeys(map(answer_of, ranking)))


def _check(rankings: Sequence[Sequence[str]], positives: Sequence[Set[str]]) -> None:
    if not rankings or len(rankings) != len(positives):
        raise EvaluationError(
            f"cannot score {len(rankings)} rankings against {len(positives)} questions: "
            "expected the same number of both, and at least one"
        )
    for number, right in enumerate(positives):
        if not right:
            raise EvaluationError(f"question {number} has no right document: leave it out")


def _from_library(
    answers: Sequence[Sequence[str]], right: Sequence[Set[str]], cutoffs: Sequence[int]
) -> dict[str, Float64]:
    # Here, not at the top: the daemon's main process receives Metrics and scores nothing.
    import ir_measures
    from ir_measures import AP, RR, P, R, Success, nDCG

    names = {AP: "map"}
    for k in cutoffs:
        names |= {
            Success @ k: f"hit@{k}",
            RR @ k: f"mrr@{k}",
            nDCG @ k: f"ndcg@{k}",
            R @ k: f"recall@{k}",
            P @ k: f"precision@{k}",
        }
    relevant = {str(n): dict.fromkeys(documents, 1) for n, documents in enumerate(right)}
    # trec_eval orders by score and forgets the order given: hand it distinct scores.
    run = {
        str(n): {answer: -float(rank) for rank, answer in enumerate(ranking)}
        for n, ranking in enumerate(answers)
    }
    # Zeros where nothing comes back: the library passes over empty rankings.
    scores = {name: np.zeros(len(answers)) for name in names.values()}
    for score in ir_measures.iter_calc(list(names), relevant, run):
        scores[names[score.measure]][int(score.query_id)] = score.value
    return scores


def _ours(
    answers: Sequence[Sequence[str]], right: Sequence[Set[str]], cutoffs: Sequence[int]
) -> dict[str, Float64]:
    count = len(answers)
    names = ["em", "avg_rank", *(f"{name}@{k}" for k in cutoffs for name in ("dcg", "idcg"))]
    scores = {name: np.zeros(count) for name in names}
    for number, (ranking, wanted) in enumerate(zip(answers, right, strict=True)):
        ranks = [rank for rank, answer in enumerate(ranking, start=1) if answer in wanted]
        scores["em"][number] = ranks[: len(wanted)] == [*range(1, len(wanted) + 1)]
        scores["avg_rank"][number] = ranks[0] if ranks else len(ranking) + 1
        for k in cutoffs:
            scores[f"dcg@{k}"][number] = _gain(rank for rank in ranks if rank <= k)
            scores[f"idcg@{k}"][number] = _gain(range(1, min(len(wanted), k) + 1))
    return scores


def _gain(ranks: Iterable[int]) -> float:
    return sum(1.0 / math.log2(rank + 1) for rank in ranks)
