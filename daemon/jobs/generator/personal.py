"""The job of the learning worker that trains this site's own half of the generator, and mixes it.

It trains on training triples and chooses by validation triples; those of tests are in neither.
Nothing is written before the end, so a job that is cut short leaves all as it was.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from crypto.arrays import Float32
from daemon.jobs.generator.judging import Candidate, Judge, settle, too_few, version_of
from daemon.jobs.generator.training import generator_for, learn, lessons_of
from daemon.jobs.pairs import triples_of
from daemon.learning.generator.in_use import InUse, Judged
from daemon.learning.generator.spec import GeneratorSpec
from daemon.learning.options import TrainingError, TrainingOptions
from daemon.library.store import Library
from daemon.personal.generator import keep_own
from daemon.personal.mixture import SHARES, mix
from daemon.personal.store import seed_for

_TRIED = [share for share in SHARES if share > 0.0]  # 0 is the shared version, judged beside them


@dataclass(frozen=True)
class PersonalisedGenerator:
    """What came of it: ``in_use`` answers from now on.

    ``epochs`` passes over ``triples``, with a mean ``loss`` in the last one (nats a token).
    ``share``: of the own half, where a mixture with it does better than the version that it was
    trained from; 0: none does. ``mixture``: how that one does; None: there is none. ``answers``:
    whether that is what answers now, and not what did before.
    """

    in_use: InUse
    epochs: int
    loss: float
    triples: int
    share: float
    mixture: Judged | None
    answers: bool
    seconds: float


def personalise(
    spec: GeneratorSpec,
    library_path: Path,
    versions: Path,
    digest: bytes,
    options: TrainingOptions,
    path: Path,
) -> PersonalisedGenerator:
    """Train on from a version by this site alone, and use the best mixture if it does best.

    ``path``: the file that says what answers. Reports `GeneratorLoad`, `EpochProgress`, then
    `EvaluationProgress`. Raises TrainingError where there is too little to train on or to judge
    by, VersionError where the version is not here; nothing is written then.
    """
    started = time.monotonic()
    judge = Judge(spec, library_path)
    if not judge.has_enough:
        raise TrainingError(too_few(len(judge.triples)))
    shared = version_of(spec, versions, digest)
    own, loss, triples = _trained(spec, library_path, digest, shared, options)
    newest = Candidate(judge.judged(shared), digest.hex())
    mixture = _best_mixture(judge, newest, shared, own)
    if mixture is not None:
        # Before it is named as what answers: a half that nothing names is dropped next time.
        half = keep_own(spec, generator_for(spec).shape_manifest.digest, own)
        mixture = replace(mixture, own=half.hex())
    in_use = settle(judge, spec, versions, path, newest, mixture, personalised=digest.hex())
    return PersonalisedGenerator(
        in_use=in_use,
        epochs=options.local_epochs,
        loss=loss,
        triples=triples,
        share=mixture.share if mixture else 0.0,
        mixture=mixture.judgement.told if mixture else None,
        answers=mixture is not None and in_use.own == mixture.own,
        seconds=time.monotonic() - started,
    )


def _trained(
    spec: GeneratorSpec,
    library_path: Path,
    digest: bytes,
    shared: Float32,
    options: TrainingOptions,
) -> tuple[Float32, float, int]:
    """The own half [D], the mean loss of the last pass, and of how many triples."""
    generator = generator_for(spec)
    generator.load_vector(shared)
    with Library.open(library_path) as library:
        triples = triples_of(spec.retriever, library)
    lessons = lessons_of(generator, triples, options)
    # Nothing that a plan holds sites together by: this half is to be the site's own.
    alone = replace(options, proximal=0.0)
    loss = learn(generator, lessons, alone, round=1, seed=seed_for(options.seed, digest))
    own = generator.vector()
    if not np.isfinite(own).all():
        raise TrainingError(
            "training left values that are not finite: lower the learning rate; what this site "
            "answers with is unchanged"
        )
    return own, loss, len(lessons)


def _best_mixture(
    judge: Judge, newest: Candidate, shared: Float32, own: Float32
) -> Candidate | None:
    """The one of least perplexity that does better than the shared version, if any does.

    Only the likeliest one writes, and the next where that writes worse: it takes minutes.
    """
    nats = {share: judge.nats(mix(shared, own, share)) for share in _TRIED}
    for share in sorted(nats, key=nats.__getitem__):
        if nats[share] >= newest.judgement.nats:
            break
        judged = judge.judged(mix(shared, own, share))
        if judged.is_better_than(newest.judgement):
            return Candidate(judged, newest.version, share=share)
    return None
