"""When to say that the documents do not answer a question.

A question's *evidence* is the score of the best passage for it: the cosine, and what titles and
words add (`daemon.library.search`). Scores of different questions compare at one site and one
version, and nowhere else, so what is too little follows from questions whose answer is known:

- A site's validation pairs are answered by its documents. The *threshold* is the evidence that
  all but a chosen share of them have (an order statistic, so that of questions like these no
  more are refused: Vovk, Gammerman and Shafer, Algorithmic Learning in a Random World, 2005,
  section 2.2).
- The same questions are not answered once the documents that answer them are left out, nor are
  general ones (`daemon.answering.general_questions`). Between these and those a *probability*
  that the documents answer is fitted (Platt 1999).
- Without enough pairs the threshold is the median of what general questions have, and there is
  no probability.

It says whether there is a passage about what is asked. It doesn't read the passage: where a
document is about the very thing and lacks the detail, it is taken for an answer.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from crypto.arrays import Bools, Float64
from daemon.library.readers.documents import Pair, answer_of
from daemon.library.search import Candidates, Ranked, RankingWeights

NOT_ANSWERED = "The documents do not answer this."
NO_EVIDENCE = -1.0  # of a question for which nothing was found: less than any cosine adds to
_STEPS, _PULL = 50, 1e-3  # of Newton's method; how much a slope is drawn to 0, so that there is one
_SURE = 20.0  # log odds, about as far as floats tell from certain


@dataclass(frozen=True)
class Abstention:
    """What is too little evidence, and how probable an answer is.

    ``threshold``: with less evidence a question is not answered. ``slope``, ``offset``: of the
    probability's logistic curve, where it was fitted on ``questions`` validation pairs (0: there
    were too few).
    """

    threshold: float = -math.inf
    slope: float = 0.0
    offset: float = 0.0
    questions: int = 0

    def abstains(self, evidence: float) -> bool:
        """Whether so little is no answer."""
        return evidence < self.threshold

    def probability(self, evidence: float) -> float:
        """That the documents answer, 0 .. 1; 0 where it is not known."""
        return _logistic(self.slope * evidence + self.offset) if self.questions else 0.0


ALWAYS_ANSWERS = Abstention()


def evidence_of(passages: Sequence[Ranked]) -> float:
    """Of what was found, also where a cross-encoder has changed its order."""
    explained = (one.explanation for one in passages if one.explanation is not None)
    scores = [one.cosine + one.title_part + one.words_part for one in explained]
    return max(scores, default=NO_EVIDENCE)


def evidence_among(found: Iterable[Candidates], weights: RankingWeights) -> Float64:
    """[n] of each question's candidates."""
    return np.array([_best(one, weights) for one in found])


def evidence_without_answers(
    found: Iterable[Candidates],
    pairs: Iterable[Pair],
    weights: RankingWeights,
    document_of: dict[int, str],
) -> Float64:
    """[n] of each pair's question, had the site none of the documents that answer it."""
    left = []
    for one, pair in zip(found, pairs, strict=True):
        right = {answer_of(document) for document in pair.positives}
        others = [
            row
            for row, label in enumerate(one.labels.tolist())
            if answer_of(document_of.get(label, "")) not in right
        ]
        left.append(_best(one.at(np.array(others, np.int64)), weights))
    return np.array(left)


def without_pairs(general: Float64) -> Abstention:
    """By the evidence [g] of general questions alone."""
    return Abstention(float(np.median(general))) if len(general) else ALWAYS_ANSWERS


def by_pairs(answered: Float64, unanswered: Float64, general: Float64, lost: float) -> Abstention:
    """By the evidence of validation questions: [n], and [m] without what answers them.

    ``lost``: the share of questions like these that may be refused.
    """
    may_be_lost = math.floor(lost * (len(answered) + 1))
    threshold = float(np.sort(answered)[may_be_lost - 1]) if may_be_lost else -math.inf
    slope, offset = _fitted(answered, [one for one in (unanswered, general) if len(one)])
    return Abstention(threshold, slope, offset, len(answered))


def _best(one: Candidates, weights: RankingWeights) -> float:
    return float(one.scores(weights).max(initial=NO_EVIDENCE))


def _fitted(answered: Float64, unanswered: Sequence[Float64]) -> tuple[float, float]:
    """Slope and offset of Platt's curve; answered and not weigh the same, each kind of these too.

    What is aimed at is a little less than certain, the less the fewer there are (his section 2.2).
    """
    evidence = np.concatenate([answered, *unanswered])
    yes: Bools = np.arange(len(evidence)) < len(answered)
    aims = np.where(yes, (len(answered) + 1) / (len(answered) + 2), 1 / ((~yes).sum() + 2))
    kinds = [np.full(len(one), 1 / (len(unanswered) * len(one))) for one in unanswered]
    weights = np.concatenate([np.full(len(answered), 1 / len(answered)), *kinds])
    mean, scale = evidence.mean(), evidence.std() or 1.0
    inputs = np.stack([(evidence - mean) / scale, np.ones(len(evidence))])  # [2, n]
    found, pull = np.array([1.0, 0.0]), np.diag([_PULL, 0.0])
    for _ in range(_STEPS):
        said = 1 / (1 + np.exp(-np.clip(found @ inputs, -_SURE, _SURE)))
        gradient = inputs @ (weights * (said - aims)) + pull @ found
        curvature = (inputs * (weights * said * (1 - said))) @ inputs.T + pull
        found -= np.linalg.solve(curvature + 1e-9 * np.eye(2), gradient)
    slope = float(found[0] / scale)
    return slope, float(found[1] - found[0] * mean / scale)


def _logistic(value: float) -> float:
    return 1 / (1 + math.exp(-max(-700.0, min(700.0, value))))
