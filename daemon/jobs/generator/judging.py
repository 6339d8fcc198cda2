"""Jobs of the learning worker that judge the generator's versions, and choose what answers."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from daemon.answering.statements.support import Wording
from daemon.evaluation.answers import score_text
from daemon.jobs.generator.examples import examples_of
from daemon.jobs.generator.training import generator_for
from daemon.learning.generator.in_use import InUse, Judged, read_in_use, write_in_use
from daemon.learning.generator.spec import GeneratorSpec
from daemon.learning.generator.triples import Triple
from daemon.learning.options import EvaluationError
from daemon.library.passages import sentences
from daemon.library.store import Library
from daemon.pairs.triples import held_out_triples
from daemon.process.chat_client import Sampling
from daemon.state.versions import is_sound, read_version

if TYPE_CHECKING:
    from daemon.learning.generator.encoding import Example, Lesson
    from daemon.learning.generator.generator import Generator

_MARK = re.compile(r"\[(\d{1,3})\]")
_JUDGED_BY = 200  # validation triples, at most
LEAST_JUDGED_BY = 10  # with fewer a version would be chosen by chance
_WRITTEN_TO_JUDGE = 12  # answers: each takes a language model's time
_NO_WORSE = 0.01  # of ROUGE-L


def choose(
    spec: GeneratorSpec, library_path: Path, versions: Path, digest: bytes, path: Path
) -> InUse:
    """Judge a version on this site's validation triples, and use it if it does best.

    Better than what answers now, in perplexity, and no worse in what it writes (ROUGE-L, where
    that can be told). With too few triples the base model answers and nothing is judged yet.
    What came of it is written to ``path``. Raises LibraryError, VersionError, LearningError.
    """
    triples = _held_out(library_path)
    if len(triples) < LEAST_JUDGED_BY:
        found = InUse(triples=len(triples))
        write_in_use(path, found)
        return found
    judge, before = _Judge(spec, triples, versions), read_in_use(path)
    base, newest = judge.of(b""), judge.of(digest)
    version, best = "", base
    if before.version and judge.has(before.version):
        kept = judge.of(bytes.fromhex(before.version))
        version, best = (before.version, kept) if _better(kept, base) else ("", base)
    if _better(newest, best):
        version, best = digest.hex(), newest
    found = InUse(version, digest.hex(), len(triples), base, best, newest)
    write_in_use(path, found)
    return found


def judge(
    spec: GeneratorSpec, library_path: Path, versions: Path, digest: bytes
) -> tuple[Judged, int]:
    """How one version does on this site's validation triples, and on how many.

    ``digest``: b"" for the base model. Raises EvaluationError for too few of them, LibraryError,
    VersionError, LearningError.
    """
    triples = _held_out(library_path)
    if len(triples) < LEAST_JUDGED_BY:
        raise EvaluationError(too_few(len(triples)))
    return _Judge(spec, triples, versions).of(digest), len(triples)


def too_few(triples: int) -> str:
    """Why no version is judged by so many, and what to do."""
    return (
        f"to judge it takes {LEAST_JUDGED_BY} validation questions with answers, and "
        f"{triples} are here: ingest pairs of split valid with answers"
    )


def _held_out(library_path: Path) -> list[Triple]:
    from daemon.answering.citations import support_of

    with Library.open(library_path, read_only=True) as library:
        return held_out_triples(library, support_of)[:_JUDGED_BY]


class _Judge:
    """Versions, all on the same triples."""

    def __init__(self, spec: GeneratorSpec, triples: Sequence[Triple], versions: Path) -> None:
        from daemon.learning.generator.encoding import encoded

        self._generator, self._triples, self._versions = generator_for(spec), triples, versions
        model = self._generator.language_model
        self._examples = examples_of(triples, model, spec)
        self._lessons = encoded(
            model, self._examples, spec.prompt_tokens, spec.answer_tokens
        ).lessons
        self._shape = self._generator.shape_manifest.digest

    def has(self, version: str) -> bool:
        """Whether that is here, by its digest in hex."""
        return is_sound(self._versions, bytes.fromhex(version), self._shape)

    def of(self, digest: bytes) -> Judged:
        """That version; b"": the base model. Raises VersionError."""
        generator = self._generator
        generator.load_vector(
            read_version(self._versions, digest, self._shape)
            if digest
            else generator.initial_vector()
        )
        return _judged(generator, self._triples, self._examples, self._lessons)


def _better(one: Judged, other: Judged) -> bool:
    loses = one.rouge_l < other.rouge_l - _NO_WORSE  # False where either can't be told
    return one.nats < other.nats and not loses


def _judged(
    generator: Generator,
    triples: Sequence[Triple],
    examples: Sequence[Example],
    lessons: Sequence[Lesson],
) -> Judged:
    import torch

    tokens = sum(len(lesson.answer) for lesson in lessons)
    with torch.inference_mode():
        parts = [generator.loss(batch).item() for batch in generator.batches(lessons, 8)]
    sampling = Sampling(new_tokens=generator.spec.answer_tokens)
    rouge, cited = [], []
    for triple, example in zip(triples[:_WRITTEN_TO_JUDGE], examples, strict=False):
        if not example.prompt:
            continue
        text = generator.language_model.write(example.prompt, sampling)
        rouge.append(score_text(text, [triple.answer]).figures.get("rouge-l-f", math.nan))
        cited.append(_cited_rightly(text, triple.passages))
    return Judged(
        math.fsum(parts) / max(1, tokens),
        sum(rouge) / len(rouge) if rouge else math.nan,
        sum(cited) / len(cited) if cited else 0.0,
        tokens,
        len(cited),
    )


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
