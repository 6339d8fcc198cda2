"""How good this site's answers are: each held-out question is asked as people ask it.

A question at a time goes to the answering worker, and its answer to be scored: whoever asks
meanwhile waits for one of them. The figures stay at the site, as do the right answers.

One that fails is counted with its cause, and the rest goes on. Where an evaluation is given up,
what was asked by then is kept in memory: its figures can be had, and the next evaluation of the
same version goes on from there.

A generator that has versions writes all answers of an evaluation with one of them, whichever comes
to answer people meanwhile.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np
import structlog

from daemon.answering.abstention import ALWAYS_ANSWERS, Abstention
from daemon.answering.answering import Answered
from daemon.answering.generator import Asking, cause_of
from daemon.evaluation.answers import Scores
from daemon.evaluation.intervals import Interval
from daemon.jobs import answers as answer_jobs
from daemon.jobs.answers import GivenAnswer, LabelFigures, MeanFigure
from daemon.learning.generator.in_use import InUse
from daemon.learning.options import EvaluationError, EvaluationProgress
from daemon.library.readers.documents import Pair
from daemon.library.store import Library
from daemon.process.workers import Worker
from daemon.services.collection import Collection
from daemon.services.rights import of_all

log = structlog.get_logger()

_LABELS = ("qtype", "reasoning")
_AT_ONCE = 32  # questions whose evidence is found, of which whoever asks meanwhile waits for all
FAILED_TOLD = 3  # of the questions that failed for one cause
_IN_A_ROW = 20  # questions that fail: the next would, too, and each may take long to
_GIVEN_UP = "it was given up"


class NothingToCompareError(EvaluationError):
    """No pair says what a right answer is."""


@dataclass(frozen=True)
class Writer:
    """A generator whose answers are judged: its ``name``, as in retrieval.generator, or base.

    ``values``: as in `daemon.answering.generator.Asking`; ``round``: of their version.
    """

    name: str = ""
    values: InUse | None = None
    round: int = 0


AS_SET = Writer()


@dataclass(frozen=True)
class AbstentionJudged:
    """How well it is told what the documents answer, by `daemon.evaluation.abstention`.

    ``cause``: why there are no figures.
    """

    by: Abstention = ALWAYS_ANSWERS
    questions: int = 0
    split: str = ""
    figures: dict[str, Interval] = field(default_factory=dict)
    cause: str = ""


@dataclass(frozen=True)
class AnswerEvaluation:
    """Figures of `daemon.evaluation.answers` over the answers to a split's questions.

    ``pairs``: those of the split that say a right answer; ``questions``: of them, those that were
    asked and scored, which the figures are over; ``failed``: the others' questions and documents
    by the cause. ``partial``: why not all were asked; "": they were. ``asked_before``: by an
    evaluation that was given up.
    ``without_answer``: pairs of the split that say no right answer, and were not asked;
    ``unanswered``: questions that were, and met nothing; ``stood_in``: whose answer the
    extractive generator wrote in the writer's place, by the cause. ``missing``: as in `Scores`.
    ``abstention``: with the first writer's, of all. ``compared``: the other writers';
    ``over_first``: in these, how much they are above the first's, over the questions that both
    answered (`daemon.jobs.answers.differences_of_answers`).
    """

    split: str
    pairs: int
    questions: int
    failed: dict[str, list[Pair]]
    partial: str
    asked_before: int
    without_answer: int
    unanswered: int
    figures: dict[str, MeanFigure]
    by_label: list[LabelFigures]
    missing: dict[str, str]
    abstention: AbstentionJudged
    model_digest: bytes
    seconds: float
    writer: Writer = AS_SET
    stood_in: dict[str, int] = field(default_factory=dict)
    compared: list[AnswerEvaluation] = field(default_factory=list)
    over_first: dict[str, MeanFigure] = field(default_factory=dict)


@dataclass(frozen=True)
class AskedPair:
    """A pair, what it was answered with, and how near that is to what is right."""

    pair: Pair
    answered: Answered
    scores: Scores


@dataclass
class _UnderWay:
    """What an evaluation has come to; the next one goes on from there, if ``of`` is the same.

    ``of``: the version, its index, what is the site's own of it, and who writes.
    """

    of: tuple[bytes, Path | None, int, Writer]
    split: str
    pairs: list[Pair]
    without: int
    asked: dict[Pair, AskedPair]
    before: int
    abstention: AbstentionJudged = AbstentionJudged(cause=f"not measured: {_GIVEN_UP}")
    failed: dict[str, list[Pair]] = field(default_factory=dict)
    partial: str = _GIVEN_UP
    seconds: float = 0.0


class AnswerJudge:
    """The evaluations of one site's answers."""

    def __init__(self, collection: Collection, answering: Worker) -> None:
        self._collection = collection
        self._answering = answering
        self._kept: list[_UnderWay] = []  # one for each writer
        self._one_at_a_time = asyncio.Lock()  # two would take what the other keeps

    async def judge(
        self,
        split: str,
        listener: Callable[[object], None] = lambda _: None,
        writers: Sequence[Writer] = (AS_SET,),
    ) -> AnswerEvaluation:
        """Ask and score each pair of a split that says a right answer; "": test, or else valid.

        Each of the ``writers`` is asked all of them; the others are compared with the first.
        ``listener`` gets `EvaluationProgress`, and each `AskedPair`. Whoever cancels waits for no
        other question; `so_far` has the figures then, and the next call asks the rest. Where
        another version comes to answer meanwhile, it ends with what the first one was asked.
        Raises NothingToCompareError, and EvaluationError where every question failed, or
        somebody else's evaluation is under way.
        """
        if self._one_at_a_time.locked():
            raise EvaluationError("answers are being judged: wait until that has ended, or end it")
        async with self._one_at_a_time:
            return await self._judge(split, listener, writers)

    async def _judge(
        self, split: str, listener: Callable[[object], None], writers: Sequence[Writer]
    ) -> AnswerEvaluation:
        listener(EvaluationProgress("index"))
        await self._collection.until_settled()
        split, pairs, without = await self._collection.read(partial(_referenced, split=split))
        kept = [self._begun(split, pairs, without, writer) for writer in writers]
        self._kept = kept
        for now in kept:
            for known in now.asked.values():
                listener(known)
        kept[0].abstention = await self.abstention(split, listener)
        whole = len(kept) * len(pairs)
        listener(EvaluationProgress("answers", sum(len(now.asked) for now in kept), whole))
        for before, now in enumerate(kept):
            at = EvaluationProgress("answers", before * len(pairs), whole)
            started = time.monotonic()
            try:
                now.partial = await self._asked(now, listener, at) or now.partial
            finally:
                now.seconds = time.monotonic() - started
            if len(now.asked) + sum(map(len, now.failed.values())) == len(pairs):
                now.partial = ""
        figures = await self._compared(kept)
        if not any(now.partial or now.failed for now in kept):
            self._kept = []  # who asks again wants it measured anew
        return figures

    async def so_far(self) -> AnswerEvaluation:
        """Of what was asked by one that was given up; raises EvaluationError for nothing."""
        if not any(now.asked for now in self._kept):
            raise EvaluationError("no question was answered and scored by then")
        return await self._compared(self._kept)

    async def abstention(
        self, split: str, listener: Callable[[object], None] = lambda _: None
    ) -> AbstentionJudged:
        """How well it is told what the documents answer, on pairs that told nobody how."""
        step = "abstention"
        listener(EvaluationProgress(step))
        apart = await self._collection.with_open_version(answer_jobs.unfitted, split)
        by, done = self._collection.opened.abstention, 0
        answered, unanswered = [np.empty(0)], [np.empty(0)]
        while done < len(apart.pairs):
            listener(EvaluationProgress(step, done, len(apart.pairs)))
            some = apart.pairs[done : done + _AT_ONCE]
            found = await self._collection.with_open_version(answer_jobs.evidence, some)
            if found[2] != by:
                return AbstentionJudged(by, cause="another version has come to answer meanwhile")
            answered.append(found[0])
            unanswered.append(found[1])
            done += len(some)
        if not done:
            return AbstentionJudged(by, cause=apart.cause)
        listener(EvaluationProgress(step, done, done))
        figures = await self._answering.run(
            answer_jobs.figures_of_abstention,
            np.concatenate(answered),
            np.concatenate(unanswered),
            by,
        )
        return AbstentionJudged(by, done, apart.split, figures)

    def _begun(self, split: str, pairs: list[Pair], without: int, writer: Writer) -> _UnderWay:
        """With what is known of these pairs by this version; who failed is asked again."""
        collection = self._collection
        of = (collection.served_digest, collection.served_index, collection.renewed, writer)
        known = next((one.asked for one in self._kept if one.of == of), {})
        asked = {pair: known[pair] for pair in pairs if pair in known}
        return _UnderWay(of, split, pairs, without, asked, before=len(asked))

    async def _asked(
        self, now: _UnderWay, listener: Callable[[object], None], at: EvaluationProgress
    ) -> str:
        """Ask the rest; why that ended before its time, or "". ``at``: before the first."""
        in_a_row, done, values = 0, at.done, now.of[3].values
        for pair in now.pairs:
            done += 1
            if pair in now.asked:
                continue
            try:
                how = Asking(measured=True, references=_answers_of(pair), values=values)
                answered = await self._collection.ask(pair.query, 0, how, warn=False, rights=of_all)
                scores = await self._answering.run(answer_jobs.score, _given(pair, answered))
            except Exception as error:  # any: it is told, and costs no other question its figures
                cause = cause_of(error)
                log.warning("a question of an evaluation failed", cause=cause, exc_info=True)
                now.failed.setdefault(cause, []).append(pair)
                in_a_row += 1
                if in_a_row == _IN_A_ROW:
                    return f"{_IN_A_ROW} questions failed one after another: {cause}"
                continue
            if answered.model_digest != now.of[0]:
                return "another model version has come to answer, and figures of two are nobody's"
            in_a_row = 0
            now.asked[pair] = AskedPair(pair, answered, scores)
            listener(now.asked[pair])
            listener(at._replace(done=done))
        return ""

    async def _compared(self, kept: Sequence[_UnderWay]) -> AnswerEvaluation:
        """Figures of the first writer, and those of the others beside these."""
        first, *others = kept
        if not any(now.asked for now in kept):
            causes = "; ".join(f"{cause} ({len(some)})" for cause, some in first.failed.items())
            raise EvaluationError(f"no question was answered: {causes or first.partial}")
        return replace(
            await self._figures(first),
            compared=[
                replace(await self._figures(now), over_first=await self._over(now, first))
                for now in others
            ],
        )

    async def _over(self, now: _UnderWay, first: _UnderWay) -> dict[str, MeanFigure]:
        both = [(now.asked[pair], first.asked[pair]) for pair in now.asked if pair in first.asked]
        if not both:
            return {}
        ours, theirs = zip(*((one.scores, other.scores) for one, other in both), strict=True)
        return await self._answering.run(answer_jobs.differences_of_answers, ours, theirs)

    async def _figures(self, now: _UnderWay) -> AnswerEvaluation:
        asked = [now.asked[pair] for pair in now.pairs if pair in now.asked]
        scored = [one.scores for one in asked]
        figures: dict[str, MeanFigure] = {}
        labelled: list[LabelFigures] = []
        if scored:
            figures, labelled = await self._answering.run(
                answer_jobs.figures_of_answers, scored, _labels_of([one.pair for one in asked])
            )
        return AnswerEvaluation(
            split=now.split,
            pairs=len(now.pairs),
            questions=len(asked),
            failed=now.failed,
            partial=now.partial,
            asked_before=now.before,
            without_answer=now.without,
            unanswered=sum(not one.figures["answered"] for one in scored),
            figures=figures,
            by_label=labelled,
            missing={
                name: why
                for one in scored
                for name, why in one.missing.items()
                if name not in figures
            },
            abstention=now.abstention,
            model_digest=now.of[0],
            seconds=now.seconds,
            writer=now.of[3],
            stood_in=Counter(one.answered.instead for one in asked if one.answered.instead),
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
    return GivenAnswer(answered.text, cited, pair.positives, _answers_of(pair), answered.likelihood)


def _answers_of(pair: Pair) -> tuple[str, ...]:
    return pair.reference.answers if pair.reference is not None else ()


def _labels_of(pairs: list[Pair]) -> dict[str, list[str]]:
    return {name: [getattr(pair.reference, name) for pair in pairs] for name in _LABELS}
