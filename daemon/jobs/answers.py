"""Jobs of the answering worker that judge answers, one at a time: people ask in between.

Each answer was asked for by the job that people's questions go to (`daemon.jobs.answering.ask`).
What is refused is judged by the open version's own threshold, on pairs that it was not found by.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from crypto.arrays import Float64
from daemon.answering.abstention import Abstention, evidence_among, evidence_without_answers
from daemon.evaluation.abstention import figures_of_refusals
from daemon.evaluation.answers import (
    PERPLEXITIES,
    Scores,
    by_label,
    score_citations,
    score_likelihood,
    score_text,
    without_marks,
)
from daemon.evaluation.evaluation import Judged
from daemon.evaluation.intervals import Interval, differences_of, figures_of
from daemon.evaluation.rankings import some_of
from daemon.jobs import answering
from daemon.library.readers.documents import Pair
from daemon.process.chat_client import Likelihood

# A mean of fewer answers says nothing of their kind; a label may be anything.
_FEWEST_OF_A_LABEL = 5
_MOST_LABELS = 20
_JUDGED = 1000  # questions that abstention is judged by, at most: intervals are narrow by then


@dataclass(frozen=True)
class GivenAnswer:
    """What a question was answered with; ``cited``: the documents, by the numbers of their marks.

    Where nothing is cited nothing was found, whatever the text says of that.
    """

    text: str
    cited: tuple[tuple[int, str], ...]
    positives: tuple[str, ...]
    references: tuple[str, ...]
    likelihood: Likelihood | None = None


@dataclass(frozen=True)
class MeanFigure(Interval):
    """A mean over so many ``questions``."""

    questions: int = 0


@dataclass(frozen=True)
class LabelFigures:
    """Figures of the questions of one label, as `daemon.library.readers.documents.Reference`."""

    label: str
    value: str
    questions: int
    figures: dict[str, MeanFigure]


def score(given: GivenAnswer) -> Scores:
    """Compare one answer with the right ones, and what it cites with the right documents."""
    said = without_marks(given.text, (number for number, _ in given.cited)) if given.cited else ""
    scores = score_text(said, given.references)
    scores.figures.update(score_citations((name for _, name in given.cited), given.positives))
    scores.figures["answered"] = float(bool(given.cited))
    score_likelihood(scores, given.likelihood)
    return scores


def figures_of_answers(
    scored: Sequence[Scores], labels: Mapping[str, Sequence[str]]
) -> tuple[dict[str, MeanFigure], list[LabelFigures]]:
    """Means over all answers, and over those of each label, with their intervals.

    ``labels``: by name a value for each answer; "": it has none. A figure that some answer lacks
    is left out (a library came or went meanwhile), but a perplexity: it is over those that have it.
    """
    groups = by_label(labels, fewest=_FEWEST_OF_A_LABEL, most=_MOST_LABELS)
    return _means(scored), [
        LabelFigures(label, value, len(rows), _means([scored[row] for row in rows]))
        for label, value, rows in groups
    ]


def _means(scored: Sequence[Scores]) -> dict[str, MeanFigure]:
    names = [name for name in scored[0].figures if all(name in one.figures for one in scored)]
    columns = {name: np.array([one.figures[name] for one in scored]) for name in names}
    means = {
        name: MeanFigure(figure.mean, figure.low, figure.high, len(scored))
        for name, figure in figures_of(Judged(columns)).items()
    }
    for name in PERPLEXITIES:
        if nats := [one.nats[name] for one in scored if name in one.nats]:
            [of_nats] = figures_of(Judged({name: np.array(nats)})).values()
            mean, low, high = map(math.exp, (of_nats.mean, of_nats.low, of_nats.high))
            means[name] = MeanFigure(mean, low, high, len(nats))
    return means


def differences_of_answers(
    ours: Sequence[Scores], theirs: Sequence[Scores]
) -> dict[str, MeanFigure]:
    """How much our figures are above theirs, paired by question, with their intervals.

    Of perplexities, which are exponentials of means, the ratio; over questions that have both.
    """
    pairs = list(zip(ours, theirs, strict=True))
    names = [
        name for name in ours[0].figures if all(name in one.figures for two in pairs for one in two)
    ]
    found = differences_of(
        Judged({name: np.array([one.figures[name] for one in ours]) for name in names}),
        Judged({name: np.array([one.figures[name] for one in theirs]) for name in names}),
    )
    above = {name: MeanFigure(f.mean, f.low, f.high, len(pairs)) for name, f in found.items()}
    for name in PERPLEXITIES:
        nats = [
            (one.nats[name], other.nats[name])
            for one, other in pairs
            if name in one.nats.keys() & other.nats.keys()
        ]
        if nats:
            columns = np.array(nats).T
            [f] = differences_of(Judged({name: columns[0]}), Judged({name: columns[1]})).values()
            above[name] = MeanFigure(math.exp(f.mean), math.exp(f.low), math.exp(f.high), len(nats))
    return above


@dataclass(frozen=True)
class Unfitted:
    """Pairs that neither the threshold nor the rankings' weights were found by.

    ``cause``: why there are none.
    """

    split: str
    pairs: list[Pair]
    cause: str = ""


def unfitted(split: str) -> Unfitted:
    """Those to judge abstention by: of a split, or ("") of test, or else of valid.

    A question that the open version was fitted on is left out wherever it stands, and so are all
    training pairs: the retriever has learned from them. At most `_JUDGED` are drawn, always the
    same. Raises NotOpenError.
    """
    version = answering.opened_version()
    if split == "train":
        return Unfitted(split, [], "training pairs are what the retriever learned from")
    there, fitted_on = 0, set(map(_as_compared, version.weighed_on))
    for name in (split,) if split else ("test", "valid"):
        pairs = version.library.pairs(name)
        there += len(pairs)
        left = [pair for pair in pairs if _as_compared(pair.query) not in fitted_on]
        if left:
            return Unfitted(name, some_of(left, _JUDGED))
    which = split or "test or valid"
    cause = f"all {there:,} pairs of split {which} here are those that the threshold was found by"
    none = f"there are no pairs of split {which} here whose documents are in the library"
    return Unfitted(split, [], f"{cause if there else none}: ingest pairs of split test")


def evidence(pairs: Sequence[Pair]) -> tuple[Float64, Float64, Abstention]:
    """Of these questions [n] as they are, and [n] without the documents that answer them.

    And what the open version takes for too little. Raises NotOpenError.
    """
    version = answering.opened_version()
    met = answering.met_by(version, [pair.query for pair in pairs])
    without = evidence_without_answers(met, pairs, version.weights, version.library.document_of())
    return evidence_among(met, version.weights), without, version.abstention


def _as_compared(query: str) -> str:
    """A question as it counts as the same: it may stand in two splits."""
    return " ".join(query.casefold().split())


def figures_of_abstention(
    answered: Float64, unanswered: Float64, by: Abstention
) -> dict[str, Interval]:
    """Those of `daemon.evaluation.abstention`; and of both, what probability of an answer was said.

    ``p-answered``, ``p-unanswered``: its means, where a probability was fitted.
    """
    figures = figures_of_refusals(answered, unanswered, by.threshold)
    if by.questions:
        said = {
            "p-answered": np.array([by.probability(one) for one in answered.tolist()]),
            "p-unanswered": np.array([by.probability(one) for one in unanswered.tolist()]),
        }
        figures.update(figures_of(Judged(said)))
    return figures
