"""The job that fits what is this site's own to its own pairs, when a run is over.

Its query encoder (stage 2 of PDD-AS2, section 3.3) or its mixture (`daemon.personal.mixing`).
It runs in the learning worker, for one committed model version, which stays what it is.
Nothing is written before the end, so a job that is cut short leaves nothing behind and
is simply begun anew.
"""

from __future__ import annotations

import math
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from crypto.arrays import Float32
from daemon.jobs import learning
from daemon.learning import training_data
from daemon.learning.foreign import Disclosure, fetcher, same_above
from daemon.learning.options import (
    LearningError,
    Personalised,
    TrainingError,
    TrainingOptions,
    TrainingProgress,
)
from daemon.learning.retriever.spec import RetrieverSpec
from daemon.library.store import Library
from daemon.personal.mixture import mix
from daemon.personal.personal import PersonalState, PersonalStore, seed_for
from daemon.process.workers import report
from daemon.state.versions import read_version

if TYPE_CHECKING:
    from daemon.learning.retriever.retriever import Retriever
    from daemon.personal.query_encoder import PersonalQueryRetriever


KINDS = ("query_encoder", "mixture")  # of RetrieverSpec.personal, that this job makes
_MIXTURE = "mixture"


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
    store = PersonalStore(
        Path(spec.personal_folder), learning.retriever_for(spec).shape_manifest.digest
    )
    if spec.personal == _MIXTURE:
        from daemon.personal.mixing import mixture

        made, (state, half) = mixture(
            spec, library_path, versions, model_digest, options, own_rounds
        )
        _check_finite(state)
        # In this order: a mixture without its half would be found finished after a crash, and
        # the next versions mixed with the half before.
        store.keep_half(half)
        store.put(model_digest, state)
    else:
        made, state = _query_encoder(spec, library_path, versions, model_digest, options, how)
        _check_finite(state)
        store.put(model_digest, state)
    return replace(made, seconds=time.monotonic() - started)


def _check_finite(state: PersonalState) -> None:
    """A last step may leave what no loss has shown."""
    if not all(np.isfinite(values).all() for values in state.arrays.values()):
        raise TrainingError(
            "training left values that are not finite: lower the learning rate; what this site "
            "answers with is unchanged"
        )


def carry(spec: RetrieverSpec, retriever: Retriever, versions: Path, model_digest: bytes) -> None:
    """Mix a version that has no mixture yet with the half that the last mixture was made of.

    So a site does not fall back to what is shared for as long as a run takes: each of its
    versions is a little better than the one before, and the site's own half as good as it
    was. Found anew, and judged, when the run is over.
    """
    store = PersonalStore(Path(spec.personal_folder), retriever.shape_manifest.digest)
    if store.serving(model_digest) is not None or (half := store.half()) is None:
        return
    share, own = half.facts.get("share"), half.arrays.get("own")
    if not isinstance(share, float) or own is None:
        raise LearningError(f"{store.half_path} does not hold half a mixture: delete the file")
    if share > 0.0:
        shared = read_version(versions, model_digest, retriever.shape_manifest.digest)
        untrained = half.facts.get("untrained", False)
        facts = {
            "kind": _MIXTURE,
            "share": 0.0 if untrained else share,
            "untrained": untrained,
            "carried": True,
        }
        store.put(model_digest, PersonalState({_MIXTURE: mix(shared, own, share)}, facts))


def _query_encoder(
    spec: RetrieverSpec,
    library_path: Path,
    versions: Path,
    model_digest: bytes,
    options: TrainingOptions,
    how: Disclosure,
) -> tuple[Personalised, PersonalState]:
    """Stage 2 of PDD-AS2, against other sites' negatives."""
    from daemon.personal.held_out import set_apart
    from daemon.personal.tuning import tune

    retriever = _personal(learning.retriever_for(spec))
    learning.load_version(retriever, versions, model_digest)
    seed = seed_for(options.seed, model_digest)
    with Library.open(library_path) as library:
        pairs = training_data.training_set(
            library, retriever, replace(options, start_from="global"), spec
        )
        pairs, validation = set_apart(library, retriever, pairs, seed)
    before = retriever.personal_arrays()
    mrr_before = validation.mean_reciprocal_rank(retriever) if validation else math.nan
    retriever.begin(round=1, dropout=options.dropout, seed=seed)  # not as the last job left it
    loss = tune(
        retriever,
        pairs,
        options,
        seed,
        fetcher(how, model_digest),
        lambda epoch, loss: report(TrainingProgress(epoch, options.local_epochs, loss)),
        validation=validation,
        same_above=same_above(how, retriever.encoder.dimension),
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
    from daemon.personal.query_encoder import PersonalQueryRetriever

    if not isinstance(retriever, PersonalQueryRetriever):
        raise LearningError(
            "this retriever has no query encoder of its own: it takes personal = 'query_encoder'"
        )
    return retriever
