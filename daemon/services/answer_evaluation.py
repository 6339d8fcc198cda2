"""How good this site's answers are: each held-out question is asked as people ask it.

A question at a time goes to the answering worker, and its answer to be scored: whoever asks
meanwhile waits for one of them. The figures stay at the site, as do the right answers.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from daemon.answering.answering import Answered
from daemon.evaluation.answers import Figures, Scores
from daemon.evaluation.intervals import Interval
from daemon.jobs import answers as answer_jobs
from daemon.jobs.answers import GivenAnswer, LabelFigures
from daemon.learning.options import EvaluationError, EvaluationProgress
from daemon.library.readers.documents import Pair
from daemon.library.store import Library
from daemon.process.workers import Worker
from daemon.services.collection import Collection

_LABELS = ("qtype", "reasoning")


class NothingToCompareError(EvaluationError):
    """No pair says what a right answer is."""


@dataclass(frozen=True)
class AnswerEvaluation:
    """Figures of `daemon.evaluation.answers` over the answers to a split's questions.

    ``without_answer``: pairs of the split that say no right answer, and were not asked;
    ``unanswered``: questions that were, and met nothing. ``missing``: as in `Scores`.
    """

    split: str
    questions: int
    without_answer: int
    unanswered: int
    figures: dict[str, Interval]
    by_label: list[LabelFigures]
    missing: dict[str, str]
    model_digest: bytes
    seconds: float


class AnswerJudge:
    """The evaluations of one site's answers."""

    def __init__(self, collection: Collection, answering: Worker) -> None:
        self._collection = collection
        self._answering = answering

    async def judge(
        self, split: str, listener: Callable[[object], None] = lambda _: None
    ) -> AnswerEvaluation:
        """Ask and score each pair of a split that says a right answer; "": test, or else valid.

        ``listener`` gets `EvaluationProgress`; whoever cancels waits for no other question.
        Raises NothingToCompareError, EvaluationError where another version has come to answer,
        and what asking does.
        """
        started = time.monotonic()
        listener(EvaluationProgress("index"))
        await self._collection.until_settled()
        split, pairs, without = await self._collection.read(partial(_referenced, split=split))
        scored: list[Scores] = []
        digest = b""
        for pair in pairs:
            listener(EvaluationProgress("answers", len(scored), len(pairs)))
            answered = await self._collection.ask(pair.query, 0, warn=False)
            if digest not in (b"", answered.model_digest):
                raise EvaluationError(
                    "another model version has come to answer meanwhile, and figures of two would "
                    "be nobody's: evaluate when no round is under way"
                )
            digest = answered.model_digest
            scored.append(await self._answering.run(answer_jobs.score, _given(pair, answered)))
        listener(EvaluationProgress("answers", len(pairs), len(pairs)))
        figures, labelled = await self._answering.run(
            answer_jobs.figures_of_answers, _in_common(scored), _labels_of(pairs)
        )
        return AnswerEvaluation(
            split=split,
            questions=len(pairs),
            without_answer=without,
            unanswered=sum(not one.figures["answered"] for one in scored),
            figures=figures,
            by_label=labelled,
            missing={name: why for one in scored for name, why in one.missing.items()},
            model_digest=digest,
            seconds=time.monotonic() - started,
        )


def _referenced(library: Library, split: str) -> tuple[str, list[Pair], int]:
    """The split that is asked, its pairs with a right answer, and how many have none."""
    splits = (split,) if split else ("test", "valid")
    there = 0
    for name in splits:
        pairs, without = library.referenced(name)
        if pairs:
            return name, pairs, without
        there += without
    none = f"none of {there:,} pairs" if there > 1 else "no pair"
    raise NothingToCompareError(
        f"{none} of split {' or '.join(splits)} here says what a right answer is: give pairs an "
        '"answer" (or several, as "answers") and ingest them again (docs/fedctl.md, An '
        "evaluation of answers)"
    )


def _given(pair: Pair, answered: Answered) -> GivenAnswer:
    cited = tuple((one.number, one.document_id) for one in answered.citations)
    return GivenAnswer(answered.text, cited, pair.positives, _answers_of(pair))


def _answers_of(pair: Pair) -> tuple[str, ...]:
    return pair.reference.answers if pair.reference is not None else ()


def _in_common(scored: list[Scores]) -> list[Figures]:
    """What each answer has of figures: a library that came or went meanwhile counts for none."""
    names = [name for name in scored[0].figures if all(name in one.figures for one in scored)]
    return [{name: one.figures[name] for name in names} for one in scored]


def _labels_of(pairs: list[Pair]) -> dict[str, list[str]]:
    return {name: [getattr(pair.reference, name) for pair in pairs] for name in _LABELS}
