"""Jobs of the learning worker that train the generator: plain functions with plain arguments.

As `daemon.jobs.learning`, whose names and arguments they have where they do the same. A worker
keeps one loaded generator; every job loads the model version it works on.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from crypto.arrays import Float32
from daemon.answering.prompts.kinds import kind_of
from daemon.answering.prompts.prompts import NoRoomError, neutral, prompt
from daemon.answering.statements.support import Wording
from daemon.evaluation.answers import score_text
from daemon.jobs.pairs import triples_of
from daemon.learning.batches import training_seed
from daemon.learning.generator.in_use import InUse, Judged, read_in_use, write_in_use
from daemon.learning.generator.spec import GeneratorSpec
from daemon.learning.generator.triples import Triple
from daemon.learning.options import (
    EpochProgress,
    GeneratorDescription,
    LearningError,
    TrainingOptions,
    TrainingResult,
)
from daemon.learning.updates import check_update, update_of, write_update
from daemon.library.contents import Passage
from daemon.library.passages import sentences
from daemon.library.store import Library
from daemon.pairs.triples import counts_of, held_out_triples, questions_to_learn
from daemon.process.chat_client import Sampling
from daemon.process.workers import report
from daemon.state.versions import is_sound, read_version, write_version

if TYPE_CHECKING:
    from daemon.learning.generator.encoding import Example, Lesson
    from daemon.learning.generator.generator import Generator
    from daemon.learning.language_model import LanguageModel

_ENDS = ".!?…"
_MARK = re.compile(r"\[(\d{1,3})\]")
_JUDGED_BY = 200  # validation triples, at most
_LEAST_JUDGED_BY = 10  # with fewer a version would be chosen by chance
_WRITTEN_TO_JUDGE = 12  # answers: each takes a language model's time
_NO_WORSE = 0.01  # of ROUGE-L


@functools.lru_cache(maxsize=1)
def generator_for(spec: GeneratorSpec) -> Generator:
    """The worker's one loaded generator; raises LearningError when it cannot be had."""
    from daemon.learning.generator.generator import Generator

    if not spec.base_model:
        raise LearningError("this site trains no generator: set generator.base_model")
    return Generator.load(spec)


def describe(spec: GeneratorSpec) -> GeneratorDescription:
    """What this site's generator is; raises LearningError when it cannot be had."""
    return GeneratorDescription(generator_for(spec).shape_manifest)


def write_initial_version(spec: GeneratorSpec, versions: Path) -> bytes:
    """Store the version every site starts from; its digest is the same at all of them."""
    generator = generator_for(spec)
    digest, _ = write_version(versions, generator.shape_manifest.digest, generator.initial_vector())
    return digest


def trainable(spec: GeneratorSpec, library_path: Path) -> int:
    """How many triples the site would train on now, at most; reads no model.

    Of some questions nothing can be distilled, and some may be too long. Raises LibraryError,
    PairError.
    """
    with Library.open(library_path, read_only=True) as library:
        counts = counts_of(questions_to_learn(spec.retriever, library))
    return counts.supplied + counts.made + counts.to_distil


def train(
    spec: GeneratorSpec,
    library_path: Path,
    versions: Path,
    parent_digest: bytes,
    options: TrainingOptions,
    round: int,
    site: str,
    update_path: Path,
    *,
    draw: int = 0,
) -> TrainingResult:
    """Train from the parent version on this site's triples and write the update.

    ``update_path`` gets float32 [D + 1] in .npy: new minus parent, then the mean loss (nats a
    token of an answer) over LOSS_BOUND. ``draw`` as in `training_seed`. Reports `GeneratorLoad`,
    then `EpochProgress`. Raises TrainingError when this site cannot train, VersionError when it
    lacks the parent; nothing is written then.
    """
    from daemon.learning.generator.encoding import encoded
    from daemon.learning.generator.memory import load_of
    from daemon.learning.generator.training import fit

    options.check_adapt(spec.adapt)
    if options.start_from != "global":
        raise LearningError(
            "start_from = 'local' keeps a student of the site's own, and a generator has none: "
            "use 'global'"
        )
    generator = generator_for(spec)
    parent = read_version(versions, parent_digest, generator.shape_manifest.digest)
    generator.load_vector(parent)
    with Library.open(library_path) as library:
        triples = triples_of(spec.retriever, library)
    mean_loss, count = 0.0, max(1, len(triples))  # a weight must be positive
    if options.local_epochs > 0:
        examples = examples_of(triples, generator.language_model, spec)
        taken = encoded(generator.language_model, examples, spec.prompt_tokens, spec.answer_tokens)
        count = len(taken.lessons)
        report(load_of(generator, taken, options.batch_size))
        seed = training_seed(options.seed, round, site, draw)
        generator.begin(round=round, dropout=0.0, seed=seed)
        mean_loss = fit(
            generator,
            taken.lessons,
            options,
            seed,
            lambda epoch, loss: report(EpochProgress(epoch, options.local_epochs, loss)),
        )
    update = update_of(generator.vector(), parent, mean_loss)
    check_update(update, count)
    write_update(update_path, update)
    return TrainingResult(mean_loss, count)


def choose(
    spec: GeneratorSpec, library_path: Path, versions: Path, digest: bytes, path: Path
) -> InUse:
    """Judge a version on this site's validation triples, and use it if it does best.

    Better than what answers now, in perplexity, and no worse in what it writes (ROUGE-L, where
    that can be told). With too few triples the base model answers and nothing is judged yet.
    What came of it is written to ``path``. Raises LibraryError, VersionError, LearningError.
    """
    from daemon.answering.citations import support_of
    from daemon.learning.generator.encoding import encoded

    with Library.open(library_path, read_only=True) as library:
        triples = held_out_triples(library, support_of)[:_JUDGED_BY]
    if len(triples) < _LEAST_JUDGED_BY:
        found = InUse(triples=len(triples))
        write_in_use(path, found)
        return found
    generator, before = generator_for(spec), read_in_use(path)
    examples = examples_of(triples, generator.language_model, spec)
    taken = encoded(generator.language_model, examples, spec.prompt_tokens, spec.answer_tokens)

    def judged(vector: Float32) -> Judged:
        generator.load_vector(vector)
        return _judged(generator, triples, examples, taken.lessons)

    shape = generator.shape_manifest.digest
    base = judged(generator.initial_vector())
    newest = judged(read_version(versions, digest, shape))
    version, best = "", base
    if before.version and is_sound(versions, bytes.fromhex(before.version), shape):
        kept = judged(read_version(versions, bytes.fromhex(before.version), shape))
        version, best = (before.version, kept) if _better(kept, base) else ("", base)
    if _better(newest, best):
        version, best = digest.hex(), newest
    found = InUse(version, digest.hex(), len(triples), base, best, newest)
    write_in_use(path, found)
    return found


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


def examples_of(
    triples: Sequence[Triple], model: LanguageModel, spec: GeneratorSpec
) -> list[Example]:
    """Triples as the site's own prompt asks, and as it wants them answered: with citations.

    The prompt takes passages, best first, until ``prompt_tokens`` are full. Where not even one
    fits, it is the question's alone, and too long to be trained on.
    """
    from daemon.learning.generator.encoding import Example

    budget = min(spec.prompt_tokens, model.room(spec.answer_tokens))
    made = []
    for triple in triples:
        passages = [Passage(n, "", "", "", text) for n, text in enumerate(triple.passages)]
        kind = kind_of(spec.prompt, triple.question)
        try:
            text, given = prompt(
                kind, triple.question, passages, budget, model.count, model.special_tokens
            )
        except NoRoomError:
            made.append(Example("", triple.answer))
            continue
        answer = neutral(triple.answer, model.special_tokens)
        made.append(Example(text, cited(answer, triple.passages[:given])))
    return made


def cited(answer: str, passages: Sequence[str]) -> str:
    """An answer with [n] at the end of each sentence: the passage with most of its words.

    One of which no passage has a word gets none: nothing there supports it.
    """
    marked = []
    for sentence in sentences(answer):
        asked = Wording.of(sentence).stems
        best = max(range(len(passages)), key=lambda n: _shared(asked, passages[n]))
        if not _shared(asked, passages[best]):
            marked.append(sentence)
            continue
        body = sentence.rstrip(_ENDS)
        marked.append(f"{body} [{best + 1}]{sentence[len(body) :]}")
    return " ".join(marked)


def _shared(asked: frozenset[str], text: str) -> int:
    return len(asked & Wording.of(text).stems)
