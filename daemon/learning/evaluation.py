"""How well a ranking finds what it should: MRR@10, Recall@10, Hit@1, NDCG@10.

Scores come from ir-measures (trec_eval's definitions). An **answer** is what a
question is scored on: documents ``x#0``, ``x#1``, … are parts of one answer
``x``, and an answer ranks where its best part does. A document without such an
ending is an answer of its own.
"""

from __future__ import annotations

import re
from collections.abc import Sequence, Set
from dataclasses import dataclass

from daemon.learning.terms import EvaluationError

_PART = re.compile(r"#\d+\Z")


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


def evaluate_rankings(rankings: Sequence[Sequence[str]], positives: Sequence[Set[str]]) -> Metrics:
    """Score document rankings (best first) against each question's right documents.

    ``rankings[i]`` belongs to ``positives[i]``. A question whose ranking is
    empty counts as a miss. Raises EvaluationError when there is no question,
    the lengths differ, or a question has no right document.
    """
    # Here, not at the top: the daemon's main process receives Metrics and scores nothing.
    import ir_measures
    from ir_measures import RR, R, Success, nDCG

    if not rankings or len(rankings) != len(positives):
        raise EvaluationError(
            f"cannot score {len(rankings)} rankings against {len(positives)} questions: "
            "expected the same number of both, and at least one"
        )
    relevant: dict[str, dict[str, int]] = {}
    run: dict[str, dict[str, float]] = {}
    for number, (ranking, right) in enumerate(zip(rankings, positives, strict=True)):
        if not right:
            raise EvaluationError(f"question {number} has no right document: leave it out")
        answers = collapse(ranking)
        relevant[str(number)] = dict.fromkeys(map(answer_of, right), 1)
        # trec_eval orders by score and forgets the order given: hand it distinct scores.
        run[str(number)] = {answer: -float(rank) for rank, answer in enumerate(answers)}
    sums = {RR @ 10: 0.0, R @ 10: 0.0, Success @ 1: 0.0, nDCG @ 10: 0.0}
    for score in ir_measures.iter_calc(list(sums), relevant, run):
        sums[score.measure] += score.value
    count = len(rankings)  # not the number scored: an empty ranking is a miss, not an absence
    return Metrics(
        questions=count,
        mrr_at_10=sums[RR @ 10] / count,
        recall_at_10=sums[R @ 10] / count,
        hit_at_1=sums[Success @ 1] / count,
        ndcg_at_10=sums[nDCG @ 10] / count,
    )


def answer_of(document_id: str) -> str:
    """The answer a document is part of: ``x`` for ``x#3``, itself without such an ending."""
    return _PART.sub("", document_id)


def collapse(ranking: Sequence[str]) -> list[str]:
    """A ranking of documents as a ranking of answers: the best part counts."""
    return list(dict.fromkeys(map(answer_of, ranking)))
