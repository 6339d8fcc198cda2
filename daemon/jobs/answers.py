"""Jobs of the answering worker that judge answers, one at a time: people ask in between.

Each answer was asked for by the job that people's questions go to (`daemon.jobs.answering.ask`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from daemon.evaluation.answers import (
    Figures,
    Scores,
    by_label,
    score_citations,
    score_text,
    without_marks,
)
from daemon.evaluation.evaluation import Judged
from daemon.evaluation.intervals import Interval, figures_of

# A mean of fewer answers says nothing of their kind; a label may be anything.
_FEWEST_OF_A_LABEL = 5
_MOST_LABELS = 20


@dataclass(frozen=True)
class GivenAnswer:
    """What a question was answered with; ``cited``: the documents, by the numbers of their marks.

    Where nothing is cited nothing was found, whatever the text says of that.
    """

    text: str
    cited: tuple[tuple[int, str], ...]
    positives: tuple[str, ...]
    references: tuple[str, ...]


@dataclass(frozen=True)
class LabelFigures:
    """Figures of the questions of one label, as `daemon.library.readers.documents.Reference`."""

    label: str
    value: str
    questions: int
    figures: dict[str, Interval]


def score(given: GivenAnswer) -> Scores:
    """Compare one answer with the right ones, and what it cites with the right documents."""
    said = without_marks(given.text, (number for number, _ in given.cited)) if given.cited else ""
    scores = score_text(said, given.references)
    scores.figures.update(score_citations((name for _, name in given.cited), given.positives))
    scores.figures["answered"] = float(bool(given.cited))
    return scores


def figures_of_answers(
    scored: Sequence[Figures], labels: Mapping[str, Sequence[str]]
) -> tuple[dict[str, Interval], list[LabelFigures]]:
    """Means over all answers, and over those of each label, with their intervals.

    ``labels``: by name a value for each answer; "": it has none.
    """
    columns = {name: np.array([one[name] for one in scored]) for name in scored[0]}
    groups = by_label(labels, fewest=_FEWEST_OF_A_LABEL, most=_MOST_LABELS)
    return figures_of(Judged(columns)), [
        LabelFigures(
            label,
            value,
            len(rows),
            figures_of(Judged({name: column[rows] for name, column in columns.items()})),
        )
        for label, value, rows in groups
    ]
