"""What a generator remembers of single examples, as a worker's job.

Canaries are planted among the site's triples in this process's memory alone: no file has them, and
they go with the worker. What leaves it are figures. Each round goes as a site's goes: its own
training, then the step from a mean update to the next version. Nothing heavy is imported before
the job runs.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

import numpy as np

from config.recipes import ServerOptions
from crypto.arrays import Float32, Float64
from crypto.privacy import (
    Mechanism,
    NoiseTerms,
    clipped_integers,
    discrete_gaussian,
    epsilon_of,
)
from crypto.quantize import FRACTION_INTEGERS, CryptoError, dequantise_sum
from daemon.jobs.generator import training
from daemon.jobs.generator.examples import examples_of
from daemon.jobs.pairs import triples_of
from daemon.learning import server_step
from daemon.learning.batches import training_seed
from daemon.learning.generator.spec import GeneratorSpec
from daemon.learning.updates import check_update
from daemon.library.store import Library
from daemon.memorisation.audit import (
    DELTA,
    LEAST_TRIPLES,
    AuditOptions,
    AuditProgress,
    Began,
    CanaryExposure,
    Memorisation,
    MemorisationError,
    advice,
)
from daemon.memorisation.canaries import (
    OTHERS,
    Canary,
    canaries,
    chance_error,
    exposure,
    exposure_by_chance,
    is_written,
)
from daemon.personal.generator import vector_in_use
from daemon.process.chat_client import Sampling
from daemon.process.workers import report

if TYPE_CHECKING:
    from daemon.learning.generator.encoding import Lesson
    from daemon.learning.generator.generator import Generator
    from daemon.learning.generator.triples import Triple

_BITS = 16  # of the integers, as noise needs them
Share = Callable[[Float32], Float64]
"""From this site's update [D] to the mean update [D], in a federation of some kind."""


def audit_memory(
    spec: GeneratorSpec,
    library_path: Path,
    versions: Path,
    began: Began | None,
    site: str,
    options: AuditOptions,
) -> Memorisation:
    """Audit what training at this site leaves of single examples.

    ``began``: the version that training begins with; None: the base model. Reports
    `AuditProgress`. Raises MemorisationError for too few triples or a noise that can't be had,
    LearningError when the generator or the encoder can't be had or can't be trained,
    LibraryError, VersionError.
    """
    report(AuditProgress("triples", 0.0))  # before torch is loaded: people see that it began
    options.check()
    training.check_options(spec, options.training)
    for multiplier in options.noises:  # or who waits would hear of it at the end
        mechanism_of(options.clip_norm or 1.0, multiplier)
    started = time.monotonic()
    # Read only: an audit changes nothing, not even features that are kept.
    with Library.open(library_path, read_only=True) as library:
        triples = triples_of(spec.retriever, library)
    if len(triples) < LEAST_TRIPLES:
        raise MemorisationError(
            f"this site has {len(triples)} questions with passages and answers and the audit "
            f"needs {LEAST_TRIPLES}: ingest pairs with answers"
        )
    # In one process: several would be begun anew for each round of each version.
    generator = training.generator_for(replace(spec, processes=1))
    audit = _Audit(generator, triples, site, options, 2 if began is None else 3)
    start = generator.initial_vector()
    rows = [audit.row("base model", start)]
    if began is not None:
        start = vector_in_use(began.values, spec, versions, generator.shape_manifest.digest)
        rows.append(audit.row(began.name, start))
    rows += audit.trained(start)
    made = Memorisation(
        canaries=options.canaries,
        others=OTHERS,
        triples=len(triples),
        rounds=options.rounds,
        local_epochs=options.training.local_epochs,
        sites=options.sites,
        adapt=spec.adapt,
        learning_rate=options.training.learning_rate,
        update_norm=audit.update_norm,
        clip_norm=audit.clip_norm,
        delta=DELTA,
        by_chance=exposure_by_chance(OTHERS),
        chance_error=chance_error(OTHERS, options.canaries),
        most=math.log2(OTHERS + 1),
        versions=tuple(rows),
        seconds=time.monotonic() - started,
    )
    return replace(made, advice=advice(made))


@dataclass(frozen=True)
class Question:
    """A canary as the generator is asked for it; ``lessons``: of the secret, then of the others."""

    canary: Canary
    prompt: str
    lessons: Sequence[Lesson]


def questions_of(generator: Generator, secrets: Sequence[Canary]) -> list[Question]:
    """The canaries' questions as this generator is prompted. Raises TrainingError without room."""
    from daemon.learning.generator.encoding import encoded

    language, spec = generator.language_model, generator.spec
    made = []
    for canary in secrets:
        triples = [canary.triple(secret) for secret in (canary.secret, *canary.others)]
        examples = examples_of(triples, language, spec)
        taken = encoded(language, examples, spec.prompt_tokens, spec.answer_tokens)
        made.append(Question(canary, examples[0].prompt, taken.lessons))
    return made


def remembered(generator: Generator, asked: Sequence[Question]) -> tuple[list[float], int]:
    """Exposures of the canaries in the generator as it is loaded now, and how many it writes."""
    sampling, exposures, written = Sampling(generator.spec.answer_tokens), [], 0
    for one in asked:
        own, *others = generator.losses(one.lessons)
        exposures.append(exposure(own, others))
        text = generator.language_model.write(one.prompt, sampling)
        written += is_written(one.canary.secret, text)
    return exposures, written


class _Audit:
    """A site's triples with canaries among them, and versions that are trained on both."""

    def __init__(
        self,
        generator: Generator,
        triples: Sequence[Triple],
        site: str,
        options: AuditOptions,
        untrained: int,
    ) -> None:
        """``untrained``: versions that are looked at and not trained, for the share that is done.

        Raises TrainingError when the triples can't be trained on.
        """
        self._generator, self._site, self._options = generator, site, options
        secrets = canaries(options.canaries, OTHERS, np.random.default_rng(options.seed))
        self._asked = questions_of(generator, secrets)
        planted = [*triples, *(one.triple(one.secret) for one in secrets)]
        self._lessons: Sequence[Lesson] = training.lessons_of(generator, planted, options.training)
        self._start = generator.initial_vector()
        trained = 2 + len(options.noises)
        # All of them have their first round in common.
        self._steps = untrained + trained + 1 + trained * (options.rounds - 1)
        self._done = 0

    def row(
        self, name: str, vector: Float32, *, planted: bool = False, multiplier: float = 0.0
    ) -> CanaryExposure:
        """What a version exposes."""
        self._tell(f"{name}: asking for the secrets")
        self._generator.load_vector(vector)
        exposures, written = remembered(self._generator, self._asked)
        spent = [multiplier] * self._options.rounds if multiplier else []
        return CanaryExposure(
            version=name,
            mean=fmean(exposures),
            largest=max(exposures),
            written=written,
            planted=planted,
            multiplier=multiplier,
            epsilon=epsilon_of(spent, DELTA),
        )

    def trained(self, start: Float32) -> list[CanaryExposure]:
        """What is exposed by training from a version: alone, and in a federation with noise."""
        self._start = start
        sites, server = self._options.sites, self._options.training.server
        federated = f"its share of {sites} sites"
        last = self._rounds("this site alone", lambda update: update.astype(float), ServerOptions())
        rows = [self.row("this site alone", last, planted=True)]
        last = self._rounds(federated, lambda update: update / np.float64(sites), server)
        rows.append(self.row(federated, last, planted=True))
        for multiplier in self._options.noises:
            mechanism = mechanism_of(self.clip_norm, multiplier)
            name = f"{federated}, noise {multiplier:g}"
            last = self._rounds(name, partial(noised, mechanism=mechanism, sites=sites), server)
            rows.append(self.row(name, last, planted=True, multiplier=multiplier))
        return rows

    @cached_property
    def _first(self) -> Float32:
        """The first round's update: the same, whatever becomes of it."""
        return self._update(self._start, 1, "this site alone")

    @property
    def update_norm(self) -> float:
        """Its L2 norm. Raises MemorisationError where it is 0."""
        norm = float(np.linalg.norm(self._first))
        if not norm > 0:
            raise MemorisationError(
                "a round of training changed nothing that could be remembered: raise "
                "generator.learning_rate"
            )
        return norm

    @property
    def clip_norm(self) -> float:
        """As asked for, or as long as the first update."""
        return self._options.clip_norm or self.update_norm

    def _rounds(self, name: str, share: Share, server: ServerOptions) -> Float32:
        version, moments = self._start, None
        for round in range(1, self._options.rounds + 1):
            update = self._first if round == 1 else self._update(version, round, name)
            version, moments = server_step.step(version, share(update), moments, server)
        return version

    def _update(self, parent: Float32, round: int, name: str) -> Float32:
        self._tell(f"{name}: round {round} of {self._options.rounds}")
        options = self._options.training
        self._generator.load_vector(parent)
        seed = training_seed(options.seed, round, self._site, 0)
        training.learn(self._generator, self._lessons, options, round, seed)
        update: Float32 = self._generator.vector() - parent
        check_update(update, len(self._lessons))
        return update

    def _tell(self, step: str) -> None:
        report(AuditProgress(step, self._done / self._steps))
        self._done += 1


def mechanism_of(clip_norm: float, multiplier: float) -> Mechanism:
    """Noise as a plan of these has it; raises MemorisationError where there can be none."""
    try:
        return Mechanism.of(NoiseTerms(clip_norm, multiplier, sharers=1), _BITS)
    except CryptoError as error:
        raise MemorisationError(f"noise {multiplier:g} can't be tried: {error}") from error


def noised(update: Float32, mechanism: Mechanism, sites: int) -> Float64:
    """The mean update [D] where only this site's isn't 0: clipped, as integers, with noise.

    As much noise as a plan of these terms has in a sum at least.
    """
    integers = clipped_integers(update, 0.0, 1.0, _BITS, mechanism)[:-FRACTION_INTEGERS]
    integers = integers + discrete_gaussian(integers.size, mechanism.deviation, mechanism.tail)
    return dequantise_sum(integers, [integers.size], [mechanism.exponent], _BITS) / sites
