"""Jobs of the learning worker that train the generator: plain functions with plain arguments.

As `daemon.jobs.learning`, whose names and arguments they have where they do the same. A worker
keeps one loaded generator; every job loads the model version it works on.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from daemon.jobs.generator.examples import examples_of
from daemon.jobs.pairs import triples_of
from daemon.learning.batches import training_seed
from daemon.learning.generator.spec import GeneratorSpec
from daemon.learning.options import (
    EpochProgress,
    GeneratorDescription,
    LearningError,
    TrainingOptions,
    TrainingResult,
)
from daemon.learning.updates import check_update, update_of, write_update
from daemon.library.store import Library
from daemon.pairs.triples import counts_of, questions_to_learn
from daemon.process.workers import report
from daemon.state.versions import read_version, write_version

if TYPE_CHECKING:
    from daemon.learning.generator.encoding import Lesson
    from daemon.learning.generator.generator import Generator
    from daemon.learning.generator.triples import Triple


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
    check_options(spec, options)
    generator = generator_for(spec)
    parent = read_version(versions, parent_digest, generator.shape_manifest.digest)
    generator.load_vector(parent)
    with Library.open(library_path) as library:
        triples = triples_of(spec.retriever, library)
    mean_loss, count = 0.0, max(1, len(triples))  # a weight must be positive
    if options.local_epochs > 0:
        taken = lessons_of(generator, triples, options)
        count = len(taken)
        seed = training_seed(options.seed, round, site, draw)
        mean_loss = learn(generator, taken, options, round, seed)
    update = update_of(generator.vector(), parent, mean_loss)
    check_update(update, count)
    write_update(update_path, update)
    return TrainingResult(mean_loss, count)


def check_options(spec: GeneratorSpec, options: TrainingOptions) -> None:
    """Raise LearningError for choices that don't go with a generator."""
    options.check_adapt(spec.adapt)
    if options.start_from != "global":
        raise LearningError(
            "start_from = 'local' keeps a student of the site's own, and a generator has none: "
            "use 'global'"
        )


def lessons_of(
    generator: Generator, triples: Sequence[Triple], options: TrainingOptions
) -> tuple[Lesson, ...]:
    """What a generator trains on; reports `GeneratorLoad`. Raises TrainingError."""
    from daemon.learning.generator.encoding import encoded
    from daemon.learning.generator.memory import load_of

    language, spec = generator.language_model, generator.spec
    examples = examples_of(triples, language, spec)
    taken = encoded(language, examples, spec.prompt_tokens, spec.answer_tokens)
    report(load_of(generator, taken, options.batch_size))
    return taken.lessons


def learn(
    generator: Generator,
    lessons: Sequence[Lesson],
    options: TrainingOptions,
    round: int,
    seed: int,
) -> float:
    """A round's training in place, from the version that is loaded; its mean loss.

    Reports `EpochProgress`. Raises TrainingError.
    """
    from daemon.learning.generator import parallel

    generator.begin(round=round, dropout=0.0, seed=seed)
    return parallel.train(
        generator,
        lessons,
        options,
        seed,
        lambda epoch, loss: report(EpochProgress(epoch, options.local_epochs, loss)),
    )
