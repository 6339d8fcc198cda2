"""The job that fits what is this site's own to its own pairs, when a run is over.

Its query encoder (stage 2 of PDD-AS2, section 3.3) or its mixture (`daemon.learning.mixture`).
It runs in the learning worker, for one committed model version, which stays what it is.
Nothing is written before the end, so a job that is cut short leaves nothing behind and
is simply begun anew.
"""

from __future__ import annotations

import hashlib
import math
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from daemon.learning import jobs, material
from daemon.learning.foreign import Disclosure, fetcher
from daemon.learning.personal import PersonalState, PersonalStore
from daemon.learning.spec import RetrieverSpec
from daemon.learning.terms import LearningError, TrainingOptions, TrainingProgress
from daemon.retrieval.library import Library
from daemon.workers import report

if TYPE_CHECKING:
    from daemon.learning.models import Retriever, Texts
    from daemon.learning.query_encoder import PersonalQueryRetriever
    from daemon.learning.training import TrainingSet
    from daemon.learning.tuning import Validation

Float32 = NDArray[np.float32]
Rows = NDArray[np.int64]

KINDS = ("query_encoder", "mixture")  # of RetrieverSpec.personal, that this job makes
_MIXTURE = "mixture"
_FEWEST_JUDGED = 20  # validation pairs; with fewer, some of the training pairs judge
_HELD_OUT = 0.2  # of the training pairs, then
_MOST_HELD_OUT = 500


@dataclass(frozen=True)
class Personalised:
    """What came of it.

    ``judged``: pairs kept apart, on which ``mrr_before`` and ``mrr_after`` (with the shared
    and with this site's own query encoder; NaN where there were too few) were measured.
    ``changed``: whether the two encoders differ; they don't where none did better.
    ``share``: of the site's own in its mixture; NaN where there is none.
    """

    model_digest: bytes
    epochs: int
    loss: float
    pairs: int
    judged: int
    mrr_before: float
    mrr_after: float
    changed: bool
    seconds: float
    share: float = math.nan


def personalise(
    spec: RetrieverSpec,
    library_path: Path,
    versions: Path,
    model_digest: bytes,
    options: TrainingOptions,
    how: Disclosure,
    own_rounds: int,
) -> Personalised:
    """Fit what `RetrieverSpec.personal` says for a model version, and keep it.

    ``own_rounds``: that a mixture's own half is trained for. A query encoder asks the
    daemon once a step (`Worker.run_asking`). Reports `TrainingProgress`. Raises
    TrainingError when this site cannot train, VersionError when it lacks the version;
    nothing is written then.
    """
    started = time.monotonic()
    make = _mixture if spec.personal == _MIXTURE else _query_encoder
    made, state = make(spec, library_path, versions, model_digest, options, how, own_rounds)
    shape = jobs.retriever_for(spec).shape_manifest.digest
    PersonalStore(Path(spec.personal_folder), shape).put(model_digest, state)
    return replace(made, seconds=time.monotonic() - started)


def _mixture(
    spec: RetrieverSpec,
    library_path: Path,
    versions: Path,
    model_digest: bytes,
    options: TrainingOptions,
    _how: Disclosure,
    own_rounds: int,
) -> tuple[Personalised, PersonalState]:
    """Train alone, as often as a federation of one would, and find the share to answer with.

    Without pairs to judge by it stays with the shared version: on some collections half of
    each is far worse than that (the demo's, docs/results/learning-notes.md).
    """
    from daemon.learning.mixture import SHARES, best_share, mix
    from daemon.learning.training import fit

    retriever = jobs.retriever_for(spec)
    shared = jobs.load_version(retriever, versions, model_digest)
    # Nothing that a plan holds sites together by: this half is to be the site's own.
    alone = replace(options, start_from="global", distill="none", proximal=0.0)
    passes, done, loss, count = own_rounds * options.local_epochs, 0, math.nan, 0

    def on_epoch(epoch: int, mean: float) -> None:
        report(TrainingProgress(done + epoch, passes, mean))

    validation = None
    with Library.open(library_path) as library:
        retriever.load_vector(retriever.initial_vector())
        for number in range(1, own_rounds + 1):
            pairs = material.training_set(library, retriever, alone.in_round(number), spec)
            pairs, validation = set_apart(library, retriever, pairs, _seed(0, model_digest))
            count, seed = len(pairs.positives), _seed(number, model_digest)
            if validation is None:
                break  # nothing would show that it is better
            retriever.begin(round=number, dropout=options.dropout, seed=seed)
            loss = fit(retriever, pairs, alone, seed, on_epoch)
            done += options.local_epochs
    own = retriever.vector()
    ranks = {}
    if validation is not None:
        for share in SHARES:
            retriever.load_vector(mix(shared, own, share))
            ranks[share] = validation.reciprocal_ranks(retriever)
    share = best_share(ranks) if ranks else 0.0
    vector = mix(shared, own, share)
    made = Personalised(
        model_digest=model_digest,
        epochs=passes,
        loss=loss,
        pairs=count,
        judged=len(validation.positives) if validation else 0,
        mrr_before=float(ranks[0.0].mean()) if ranks else math.nan,
        mrr_after=float(ranks[share].mean()) if ranks else math.nan,
        changed=not np.array_equal(vector, shared),
        seconds=0.0,
        share=share,
    )
    return made, PersonalState({_MIXTURE: vector}, {"kind": _MIXTURE, "share": share})


def _query_encoder(
    spec: RetrieverSpec,
    library_path: Path,
    versions: Path,
    model_digest: bytes,
    options: TrainingOptions,
    how: Disclosure,
    _own_rounds: int,
) -> tuple[Personalised, PersonalState]:
    """Stage 2 of PDD-AS2, against other sites' negatives."""
    from daemon.learning.tuning import tune

    retriever = _personal(jobs.retriever_for(spec))
    jobs.load_version(retriever, versions, model_digest)
    seed = _seed(options.seed, model_digest)
    with Library.open(library_path) as library:
        pairs = material.training_set(
            library, retriever, replace(options, start_from="global"), spec
        )
        pairs, validation = set_apart(library, retriever, pairs, seed)
    before = retriever.personal_arrays()
    mrr_before = validation.mean_reciprocal_rank(retriever) if validation else math.nan
    loss = tune(
        retriever,
        pairs,
        options,
        seed,
        fetcher(how, model_digest),
        lambda epoch, loss: report(TrainingProgress(epoch, options.local_epochs, loss)),
        validation=validation,
    )
    after = retriever.personal_arrays()
    changed = any(not np.array_equal(before[name], after[name]) for name in after)
    result = Personalised(
        model_digest=model_digest,
        epochs=options.local_epochs,
        loss=loss,
        pairs=len(pairs.positives),
        judged=len(validation.positives) if validation else 0,
        mrr_before=mrr_before,
        mrr_after=validation.mean_reciprocal_rank(retriever) if validation else math.nan,
        changed=changed,
        seconds=0.0,
    )
    return result, PersonalState(after, {"kind": "query_encoder", "changed": changed})


def load_serving(
    spec: RetrieverSpec, retriever: Retriever, vector: Float32, model_digest: bytes
) -> None:
    """Make a version current, with what this site keeps for it.

    Raises LearningError when what is kept is damaged; the retriever stays as it was then.
    """
    shape = retriever.shape_manifest.digest
    state = PersonalStore(Path(spec.personal_folder), shape).serving(model_digest)
    if spec.personal == _MIXTURE:
        retriever.load_vector(_mixed(state, vector))
        return
    own = _personal(retriever)
    before = own.vector(), own.personal_arrays()
    own.load_vector(vector)
    try:
        if state is not None and state.facts.get("kind") == spec.personal:
            own.load_personal(state.arrays)
    except LearningError:
        own.load_vector(before[0])
        own.load_personal(before[1])
        raise


def _mixed(state: PersonalState | None, shared: Float32) -> Float32:
    """The mixture that is kept, or the shared version where there is none yet."""
    if state is None or state.facts.get("kind") != _MIXTURE:
        return shared
    mixed = state.arrays.get(_MIXTURE)
    if mixed is None or mixed.shape != shared.shape or not np.isfinite(mixed).all():
        raise LearningError(
            "this site's mixture is damaged: delete its file in state_dir/personal, and "
            "`fedctl personalise` makes it anew"
        )
    return mixed


def _personal(retriever: Retriever) -> PersonalQueryRetriever:
    from daemon.learning.query_encoder import PersonalQueryRetriever

    if not isinstance(retriever, PersonalQueryRetriever):
        raise LearningError(
            "this retriever has no query encoder of its own: it takes personal = 'query_encoder'"
        )
    return retriever


def _seed(seed: int, model_digest: bytes) -> int:
    """128 bits; the same for another try at the same version."""
    text = b"hanse-personal-v1\0" + seed.to_bytes(8, "little") + model_digest
    return int.from_bytes(hashlib.sha256(text).digest()[:16], "little")


def set_apart(
    library: Library, retriever: Retriever, pairs: TrainingSet, seed: int
) -> tuple[TrainingSet, Validation | None]:
    """Pairs to learn from, and pairs to judge by, of which nothing is learned.

    Those of the split "valid"; where they are few, a part of the training pairs; where
    these are few, too, none.
    """
    from daemon.learning.models import Texts
    from daemon.learning.tiering import rows_by_document
    from daemon.learning.tuning import Validation

    passages = [*library.passages(split="train"), *library.passages(split="valid")]
    queries, positives = material.usable_pairs(library, "valid", rows_by_document(passages))
    if len(positives) >= _FEWEST_JUDGED:
        told = Texts(
            [passage.embedding_text for passage in passages],
            material.passage_features(library, retriever, [p.rowid for p in passages]),
        )
        asked = Texts(queries, material.query_features(library, retriever, queries))
        return pairs, Validation(asked, told, positives)
    count = min(int(_HELD_OUT * len(pairs.positives)), _MOST_HELD_OUT)
    if count < _FEWEST_JUDGED:
        return pairs, None
    order = np.random.Generator(np.random.Philox(key=seed)).permutation(len(pairs.positives))
    held, kept = np.sort(order[:count]), np.sort(order[count:])
    judged = Validation(
        _some(pairs.queries, held), pairs.passages, [pairs.positives[row] for row in held]
    )
    return _subset(pairs, kept), judged


def _subset(pairs: TrainingSet, rows: Rows) -> TrainingSet:
    parent = None if pairs.parent is None else (pairs.parent[0][rows], pairs.parent[1])
    return replace(
        pairs,
        queries=_some(pairs.queries, rows),
        positives=[pairs.positives[row] for row in rows],
        negatives=[pairs.negatives[row] for row in rows],
        parent=parent,
    )


def _some(texts: Texts, rows: Rows) -> Texts:
    from daemon.learning.models import Texts

    features = None if texts.features is None else texts.features[rows]
    return Texts([texts.texts[row] for row in rows], features)
