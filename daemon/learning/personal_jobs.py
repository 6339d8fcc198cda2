"""The job of stage 2 (PDD-AS2, section 3.3): fit this site's query encoder to its own pairs.

It runs in the learning worker, for one committed model version, whose parameters and
whose passages' embeddings stay what they are. Nothing is written before the end, so a
job that is cut short leaves nothing behind and is simply begun anew.
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

from daemon.learning import jobs
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

_KIND = "query_encoder"
_FEWEST_JUDGED = 20  # validation pairs; with fewer, some of the training pairs judge
_HELD_OUT = 0.2  # of the training pairs, then
_MOST_HELD_OUT = 500


@dataclass(frozen=True)
class Personalised:
    """What came of it.

    ``judged``: pairs kept apart, on which ``mrr_before`` and ``mrr_after`` (with the shared
    and with this site's own query encoder; NaN where there were too few) were measured.
    ``changed``: whether the two encoders differ; they don't where none did better.
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


def personalise(
    spec: RetrieverSpec,
    library_path: Path,
    versions: Path,
    model_digest: bytes,
    options: TrainingOptions,
    how: Disclosure,
) -> Personalised:
    """Fit the query encoder for a model version, with other sites' negatives, and keep it.

    Asks the daemon once a step (`Worker.run_asking`); reports `TrainingProgress`. Raises
    TrainingError when this site cannot train, VersionError when it lacks the version;
    nothing is written then.
    """
    from daemon.learning.tuning import tune

    started = time.monotonic()
    retriever = _personal(jobs._retriever(spec))
    jobs._load(retriever, versions, model_digest)
    seed = _seed(options.seed, model_digest)
    with Library.open(library_path) as library:
        pairs = jobs._training_set(library, retriever, replace(options, start_from="global"), spec)
        pairs, validation = _judged(library, retriever, pairs, seed)
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
        seconds=time.monotonic() - started,
    )
    state = PersonalState(after, {"kind": _KIND, "changed": changed})
    _store(spec, retriever).put(model_digest, state)
    return result


def load_serving(
    spec: RetrieverSpec, retriever: Retriever, vector: Float32, model_digest: bytes
) -> None:
    """Make a version current, and for queries the encoder that this site keeps for it.

    Raises LearningError when what is kept is damaged; the retriever stays as it was then.
    """
    own = _personal(retriever)
    state = _store(spec, own).serving(model_digest)
    before = own.vector(), own.personal_arrays()
    own.load_vector(vector)
    try:
        if state is not None and state.facts.get("kind") == _KIND:
            own.load_personal(state.arrays)
    except LearningError:
        own.load_vector(before[0])
        own.load_personal(before[1])
        raise


def _personal(retriever: Retriever) -> PersonalQueryRetriever:
    from daemon.learning.query_encoder import PersonalQueryRetriever

    if not isinstance(retriever, PersonalQueryRetriever):
        raise LearningError(
            "this retriever has no query encoder of its own: it takes personal = 'query_encoder'"
        )
    return retriever


def _store(spec: RetrieverSpec, retriever: PersonalQueryRetriever) -> PersonalStore:
    return PersonalStore(Path(spec.personal_folder), retriever.shape_manifest.digest)


def _seed(seed: int, model_digest: bytes) -> int:
    """128 bits; the same for another try at the same version."""
    text = b"hanse-personal-v1\0" + seed.to_bytes(8, "little") + model_digest
    return int.from_bytes(hashlib.sha256(text).digest()[:16], "little")


def _judged(
    library: Library, retriever: PersonalQueryRetriever, pairs: TrainingSet, seed: int
) -> tuple[TrainingSet, Validation | None]:
    """Pairs to learn from, and pairs to judge by, of which nothing is learned.

    Those of the split "valid"; where they are few, a part of the training pairs; where
    these are few, too, none.
    """
    from daemon.learning.models import Texts
    from daemon.learning.tiering import rows_by_document
    from daemon.learning.tuning import Validation

    passages = [*library.passages(split="train"), *library.passages(split="valid")]
    queries, positives = jobs._usable(library, "valid", rows_by_document(passages))
    if len(positives) >= _FEWEST_JUDGED:
        told = Texts(
            [passage.embedding_text for passage in passages],
            jobs._passage_features(library, retriever, [p.rowid for p in passages]),
        )
        asked = Texts(queries, jobs._query_features(library, retriever, queries))
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
