"""Jobs of the learning worker that judge the generator's versions, and choose what answers."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from crypto.arrays import Float32
from daemon.answering.statements.support import Wording
from daemon.evaluation.answers import score_text
from daemon.jobs.generator.examples import examples_of
from daemon.jobs.generator.training import generator_for
from daemon.learning.generator.in_use import InUse, Judged, read_in_use, write_in_use
from daemon.learning.generator.spec import GeneratorSpec
from daemon.learning.language_model import LanguageModelError
from daemon.learning.options import EvaluationError, EvaluationProgress
from daemon.library.passages import sentences
from daemon.library.store import Library
from daemon.pairs.triples import held_out_triples
from daemon.personal.generator import drop_owns, is_usable, vector_in_use
from daemon.process.chat_client import Sampling
from daemon.process.workers import report
from daemon.state.versions import read_version

if TYPE_CHECKING:
    from daemon.learning.generator.encoding import Example, Lesson
    from daemon.learning.generator.generator import Generator

_MARK = re.compile(r"\[(\d{1,3})\]")
_JUDGED_BY = 200  # validation triples, at most
LEAST_JUDGED_BY = 10  # with fewer a version would be chosen by chance
_WRITTEN_TO_JUDGE = 12  # answers: each takes a language model's time
ANSWER_WITHIN_S = 60.0  # one that takes longer ends the writing: training waits behind it
_NO_WORSE = 0.01  # of ROUGE-L


@dataclass(frozen=True)
class Judgement:
    """How a vector does: ``nats``, ``tokens`` as in `Judged`, the others of each written answer."""

    nats: float
    rouge_l: tuple[float, ...]
    cited: tuple[float, ...]
    tokens: int = 0

    @property
    def told(self) -> Judged:
        """In means."""
        rouge_l, cited = _mean(self.rouge_l), _mean(self.cited, 0.0)
        return Judged(self.nats, rouge_l, cited, self.tokens, len(self.rouge_l))

    def is_better_than(self, other: Judgement) -> bool:
        """In perplexity, and no worse in what both have written, where that can be told."""
        both = min(len(self.rouge_l), len(other.rouge_l))
        mine, others = _mean(self.rouge_l[:both]), _mean(other.rouge_l[:both])
        loses = mine < others - _NO_WORSE  # False where either can't be told
        return self.nats < other.nats and not loses


class Judge:
    """This site's validation triples, and how vectors of its generator do on them."""

    def __init__(
        self,
        spec: GeneratorSpec,
        library_path: Path,
        *,
        answer_within_s: float = ANSWER_WITHIN_S,
    ) -> None:
        """Raises LibraryError."""
        from daemon.answering.citations import support_of

        with Library.open(library_path, read_only=True) as library:
            self.triples = held_out_triples(library, support_of)[:_JUDGED_BY]
        self._spec = spec
        self._answer_within_s = answer_within_s
        self._examples: list[Example] = []
        self._lessons: Sequence[Lesson] = []

    @property
    def has_enough(self) -> bool:
        """Whether there are so many that it is not chance which does best."""
        return len(self.triples) >= LEAST_JUDGED_BY

    def nats(self, vector: Float32) -> float:
        """Mean negative log-likelihood of a token of an answer; the generator has it loaded then.

        Raises TrainingError where none of the triples fits into a prompt.
        """
        import torch

        generator = self._loaded(vector)
        with torch.inference_mode():
            parts = [generator.loss(batch).item() for batch in generator.batches(self._lessons, 8)]
        return math.fsum(parts) / max(1, self._tokens)

    def judged(self, vector: Float32) -> Judgement:
        """How a vector does. Reports `EvaluationProgress` with each answer. Raises as `nats`."""
        nats = self.nats(vector)
        rouge, cited = [], []
        pairs = list(zip(self.triples, self._examples, strict=True))[:_WRITTEN_TO_JUDGE]
        asked = [(triple, example.prompt) for triple, example in pairs if example.prompt]
        for number, (triple, prompt) in enumerate(asked):
            report(EvaluationProgress("answers", number, len(asked)))
            text = self._written(prompt)
            if text is None:
                break
            rouge.append(score_text(text, [triple.answer]).figures.get("rouge-l-f", math.nan))
            cited.append(_cited_rightly(text, triple.passages))
        return Judgement(nats, tuple(rouge), tuple(cited), self._tokens)

    def _loaded(self, vector: Float32) -> Generator:
        from daemon.learning.generator.encoding import encoded

        generator, spec = generator_for(self._spec), self._spec
        generator.load_vector(vector)
        if not self._examples:
            model = generator.language_model
            self._examples = examples_of(self.triples, model, spec)
            taken = encoded(model, self._examples, spec.prompt_tokens, spec.answer_tokens)
            self._lessons = taken.lessons
        return generator

    @property
    def _tokens(self) -> int:
        return sum(len(lesson.answer) for lesson in self._lessons)

    def _written(self, prompt: str) -> str | None:
        """None: it took too long."""
        started = time.monotonic()
        sampling = Sampling(new_tokens=self._spec.answer_tokens)
        language_model = generator_for(self._spec).language_model
        try:
            return language_model.write(prompt, sampling, self._answer_within_s)
        except LanguageModelError:
            if time.monotonic() - started <= self._answer_within_s:
                raise
            return None


@dataclass(frozen=True)
class Candidate:
    """What may answer, by names as in `InUse`, and how it does."""

    judgement: Judgement
    version: str = ""
    own: str = ""
    share: float = 0.0


def best_of(base: Candidate, candidates: Sequence[Candidate]) -> Candidate:
    """The last one that does better than the base model, and than those chosen before it.

    Than the base model, too: what may be lost in writing is not to add up, step by step.
    """
    best = base
    for candidate in candidates:
        if all(candidate.judgement.is_better_than(one.judgement) for one in (base, best)):
            best = candidate
    return best


def choose(
    spec: GeneratorSpec,
    library_path: Path,
    versions: Path,
    digest: bytes,
    path: Path,
    *,
    answer_within_s: float = ANSWER_WITHIN_S,
) -> InUse:
    """Judge a version on this site's validation triples, and use it if it does best.

    Better than what answers now, in perplexity, and no worse in what it writes (ROUGE-L, where
    that can be told, of the answers that took no longer than ``answer_within_s``). With too few
    triples the base model answers and nothing is judged yet.
    What came of it is written to ``path``. Raises LibraryError, VersionError, LearningError.
    """
    judge = Judge(spec, library_path, answer_within_s=answer_within_s)
    if not judge.has_enough:
        found = InUse(triples=len(judge.triples))
        write_in_use(path, found)
        return found
    newest = judge.judged(version_of(spec, versions, digest))
    return settle(judge, spec, versions, path, Candidate(newest, digest.hex()))


def judge(
    spec: GeneratorSpec, library_path: Path, versions: Path, digest: bytes
) -> tuple[Judged, int]:
    """How one version does on this site's validation triples, and on how many.

    ``digest``: b"" for the base model. Raises EvaluationError for too few of them, LibraryError,
    VersionError, LearningError.
    """
    judging = Judge(spec, library_path)
    if not judging.has_enough:
        raise EvaluationError(too_few(len(judging.triples)))
    values = version_of(spec, versions, digest) if digest else generator_for(spec).initial_vector()
    return judging.judged(values).told, len(judging.triples)


def too_few(triples: int) -> str:
    """Why no version is judged by so many, and what to do."""
    return (
        f"to judge it takes {LEAST_JUDGED_BY} validation questions with answers, and "
        f"{triples} are here: ingest pairs of split valid with answers"
    )


def version_of(spec: GeneratorSpec, versions: Path, digest: bytes) -> Float32:
    """A version [D] of this site's generator; raises VersionError, LearningError."""
    return read_version(versions, digest, generator_for(spec).shape_manifest.digest)


def settle(
    judge: Judge,
    spec: GeneratorSpec,
    versions: Path,
    path: Path,
    newest: Candidate,
    mixture: Candidate | None = None,
    *,
    personalised: str = "",
) -> InUse:
    """Write to ``path`` what answers: the best of base model, what answers now, and these.

    ``newest``: the newest version. ``personalised``: as in `InUse`; "": as before. Raises as
    `choose`.
    """
    generator, before = generator_for(spec), read_in_use(path)
    shape = generator.shape_manifest.digest
    base = Candidate(judge.judged(generator.initial_vector()))
    candidates = [newest] if mixture is None else [newest, mixture]
    is_newest = before.version == newest.version and not before.own
    if before.version and not is_newest and is_usable(before, spec, versions, shape):
        values = vector_in_use(before, spec, versions, shape)
        kept = Candidate(judge.judged(values), before.version, before.own, before.share)
        candidates.insert(0, kept)
    best = best_of(base, candidates)
    found = InUse(
        best.version,
        newest.version,
        len(judge.triples),
        base.judgement.told,
        best.judgement.told,
        newest.judgement.told,
        best.own,
        best.share,
        personalised or before.personalised,
    )
    write_in_use(path, found)
    # What answered until now may be being read by the worker that answers: it goes next time.
    drop_owns(spec, found.own, before.own)
    return found


def _mean(values: Sequence[float], of_none: float = math.nan) -> float:
    return sum(values) / len(values) if values else of_none


def _cited_rightly(text: str, passages: Sequence[str]) -> float:
    """The share of an answer's sentences whose first mark names a passage that says them."""
    said = sentences(text)
    right = 0
    for sentence in said:
        mark = _MARK.search(sentence)
        number = int(mark[1]) if mark else 0
        if 1 <= number <= len(passages):
            wanted = Wording.of(_MARK.sub("", sentence)).stems
            right += bool(wanted) and wanted <= Wording.of(passages[number - 1]).stems
    return right / len(said) if said else 0.0
