"""The job that fits what is this site's own to its own pairs, when a run is over.

It runs in the learning worker, for one committed model version, which stays what it is.
Nothing is written before the end, so a job that is cut short leaves nothing behind and
is simply begun anew.
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import numpy as np

from daemon.learning.options import Personalised, TrainingError, TrainingOptions
from daemon.learning.retriever.peer_negatives import AskingTerms
from daemon.learning.retriever.spec import RetrieverSpec
from daemon.personal.layer import FitRequest
from daemon.personal.layers import layer_of
from daemon.personal.serving import load_version, retriever_for, store_of
from daemon.personal.store import PersonalState


def personalise(
    spec: RetrieverSpec,
    library_path: Path,
    versions: Path,
    model_digest: bytes,
    options: TrainingOptions,
    how: AskingTerms,
) -> Personalised:
    """Fit what `RetrieverSpec.personal` says for a model version, and keep it.

    A layer that asks other sites asks the daemon (`Worker.run_asking`). Reports `EpochProgress`.
    Raises TrainingError when this site cannot train, VersionError when it lacks the version;
    nothing is written then.
    """
    started = time.monotonic()
    retriever = retriever_for(spec)
    store = store_of(spec, retriever)
    shared = load_version(retriever, versions, model_digest)
    fitted = layer_of(spec).fit(
        FitRequest(spec, retriever, shared, library_path, model_digest, options, how)
    )
    _check_finite(fitted.state)
    # In this order: a mixture without its half would be found finished after a crash, and
    # the next versions mixed with the half before.
    if fitted.half is not None:
        store.keep_half(fitted.half)
    store.put(model_digest, fitted.state)
    return replace(fitted.made, seconds=time.monotonic() - started)


def _check_finite(state: PersonalState) -> None:
    """A last step may leave what no loss has shown."""
    if not all(np.isfinite(values).all() for values in state.arrays.values()):
        raise TrainingError(
            "training left values that are not finite: lower the learning rate; what this site "
            "answers with is unchanged"
        )
