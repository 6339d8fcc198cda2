"""PDD-AS2's layer: a copy of all that trains, for this site's questions alone.

Personal are the copy's values; passages are embedded by what is shared. Rounds do not
touch it: it is fitted when a run is over (stage 2, section 3.3), for the version that
answers, and until a version has its own, questions go through what is shared. The copy
and its training are in `tuning`.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from crypto.arrays import Float32
from daemon.learning.options import EpochProgress, LearningError, Personalised
from daemon.learning.retriever.peer_negatives import fetcher, same_above
from daemon.learning.retriever.spec import RetrieverSpec
from daemon.library.store import Library
from daemon.pairs.training_set import training_set
from daemon.personal.held_out import set_apart
from daemon.personal.layer import NOTHING_YET, Fact, FitRequest, Fitted, Layer, Serving
from daemon.personal.store import PersonalState, seed_for
from daemon.process.workers import report

if TYPE_CHECKING:
    from daemon.learning.retriever.encoder import Encoder
    from daemon.learning.retriever.retriever import Retriever
    from daemon.personal.tuning import PersonalQueryRetriever


class QueryEncoder(Layer):
    """A query encoder of the site's own before the passage encoder that all sites share."""

    kept = True
    fitted = True

    def on(self, encoder: Encoder, spec: RetrieverSpec) -> Retriever:
        """Two copies of the adaptation."""
        from daemon.personal.tuning import PersonalQueryRetriever

        return PersonalQueryRetriever.on(
            encoder, spec.adapt, rank=spec.lora_rank, alpha=spec.lora_alpha
        )

    def fit(self, request: FitRequest) -> Fitted:
        """Stage 2 of PDD-AS2, against other sites' negatives: asks the daemon once a step."""
        from daemon.personal.tuning import tune

        retriever, options = _personal(request.retriever), request.options
        seed = seed_for(options.seed, request.model_digest)
        with Library.open(request.library_path) as library:
            pairs = training_set(
                library, retriever, replace(options, start_from="global"), request.spec
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
            fetcher(request.disclosure, request.model_digest),
            lambda epoch, loss: report(EpochProgress(epoch, options.local_epochs, loss)),
            validation=validation,
            same_above=same_above(request.disclosure, retriever.encoder.dimension),
        )
        after = retriever.personal_arrays()
        changed = any(not np.array_equal(before[name], after[name]) for name in after)
        made = Personalised(
            model_digest=request.model_digest,
            epochs=options.local_epochs,
            loss=loss,
            pairs=len(pairs.positives),
            judged=len(validation.positives) if validation else 0,
            mrr_before=mrr_before,
            mrr_after=validation.mean_reciprocal_rank(retriever) if validation else math.nan,
            changed=changed,
            seconds=0.0,
        )
        return Fitted(made, PersonalState(after, {"kind": self.name, "changed": changed}))

    def load(self, retriever: Retriever, shared: Float32, state: PersonalState | None) -> None:
        """The shared version, and the query encoder that was fitted for it."""
        own = _personal(retriever)
        before = own.vector(), own.personal_arrays()
        own.load_vector(shared)
        try:
            if state is not None and self.holds(state):
                own.load_personal(state.arrays)
        except LearningError:
            own.load_vector(before[0])
            own.load_personal(before[1])
            raise

    def facts(self, serving: Serving) -> list[Fact]:
        """Whether the version that answers has one."""
        if serving.state is None:
            return [NOTHING_YET]
        return [("query encoder", f"this site's own, for version {serving.version.hex()[:12]}")]

    def answers_with(self, made: Personalised) -> str:
        """Whether it is another than the shared one: it is not where none did better."""
        if made.changed:
            return "this site's own encoder of questions"
        return "the shared encoder, as before"


def _personal(retriever: Retriever) -> PersonalQueryRetriever:
    from daemon.personal.tuning import PersonalQueryRetriever

    if not isinstance(retriever, PersonalQueryRetriever):
        raise LearningError(
            "this retriever has no query encoder of its own: it takes personal = 'query_encoder'"
        )
    return retriever
