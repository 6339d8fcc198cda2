"""DATE's layer: the site's own behind a shared head, in one of three tiers.

Personal are the values of that tier and what its scheduler remembers. Every round trains
them together with the head, so the layer is taken up before local training, judged and
kept after it, and pinned to a version when that is indexed: passages go through it.
Source: pFedRAG, sections 4.1 and 4.2; the tiers are in `tiers`, the decisions in `depth`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from crypto.arrays import Float32, Rows
from daemon.learning.options import DepthReport, LearningError, TrainingOptions
from daemon.learning.retriever import training_data
from daemon.learning.retriever.spec import RetrieverSpec
from daemon.library.store import Library
from daemon.personal.depth import (
    DepthState,
    corpus_score,
    initial_tier,
    normalised_score,
    observe,
)
from daemon.personal.layer import Fact, Layer, LocalTraining, Serving
from daemon.personal.store import PersonalState, PersonalStore, report_of

if TYPE_CHECKING:
    from daemon.learning.retriever.encoder import Encoder, Texts
    from daemon.learning.retriever.retriever import Retriever
    from daemon.learning.retriever.training import TrainingSet
    from daemon.personal.tiers import TieredHeadRetriever


_PREFIX = "personal."
_RECALL_AT = 5
_MOST_ASKED = 512  # pairs that a recall is measured on
_KD_SEED = 0x4B44  # apart from the training's draws


class TieredHead(Layer):
    """A layer behind the shared head, which rounds train and a scheduler deepens."""

    kept = True
    trained_in_rounds = True
    pinned_by_index = True

    def on(self, encoder: Encoder, spec: RetrieverSpec) -> Retriever:
        """The shared head with a layer of the base tier behind it."""
        from daemon.personal.tiers import TieredHeadRetriever

        if spec.adapt != self.traits.adapt:
            raise LearningError(
                f"personal = {self.name!r} lies behind a shared head: it needs adapt = "
                f"{self.traits.adapt!r}, not {spec.adapt!r}"
            )
        return TieredHeadRetriever(encoder)

    def before_training(
        self,
        retriever: Retriever,
        personal: PersonalState | None,
        library: Library,
        options: TrainingOptions,
    ) -> None:
        """The layer as the last round left it, or a first one by the site's score."""
        if not take_up(_tiered(retriever), personal):
            assign(_tiered(retriever), library, options)

    def after_training(self, training: LocalTraining) -> PersonalState:
        """The layer as it is now, of another tier where the scheduler says so."""
        retriever, library, seed = _tiered(training.retriever), training.library, training.seed
        recalls = (
            _recall(library, retriever, "train", seed) or 0.0,
            _recall(library, retriever, "valid", seed),
        )
        known = depth_state(training.before, retriever.tier)
        state, said = judge(
            retriever, known, training.pairs, recalls, training.loss, training.options, seed
        )
        return left_behind(retriever, state, said)

    def prepare(
        self, spec: RetrieverSpec, retriever: Retriever, versions: Path, model_digest: bytes
    ) -> None:
        """A version answers with the layer that there was when it was first indexed."""
        del versions
        folder, shape = Path(spec.personal_folder), retriever.shape_manifest.digest
        PersonalStore(folder, shape).pin(model_digest)

    def holds(self, state: PersonalState | None) -> bool:
        """Whether there is a tier in it."""
        return state is not None and "tier" in state.facts

    def load(self, retriever: Retriever, shared: Float32, state: PersonalState | None) -> None:
        """The head as it is shared, and the layer that is pinned to the version."""
        take_up(_tiered(retriever), state)
        retriever.load_vector(shared)

    def facts(self, serving: Serving) -> list[Fact]:
        """The tier after the last round, and why it is that one."""
        report = serving.report
        if report is None:
            return [("personal layer", "none until this site has trained for a round")]
        known = "" if report.api is None else f", adaptation index {report.api:.4f}"
        return [
            ("personal layer", f"{report.tier} ({report.decision}{known})"),
            ("", report.reason),
        ]

    def report(self, store: PersonalStore) -> DepthReport | None:
        """What the scheduler saw and did in the last round."""
        return report_of(store.newest())


def _tiered(retriever: Retriever) -> TieredHeadRetriever:
    from daemon.personal.tiers import TieredHeadRetriever

    if not isinstance(retriever, TieredHeadRetriever):
        raise LearningError(
            "this retriever has no layer behind its head: it takes personal = 'tiered_head'"
        )
    return retriever


def take_up(retriever: TieredHeadRetriever, state: PersonalState | None) -> bool:
    """Put a kept personal layer in place, or the base tier; whether one was kept."""
    if state is None or "tier" not in state.facts:
        retriever.begin_tier("base")
        return False
    arrays = {
        name.removeprefix(_PREFIX): value
        for name, value in state.arrays.items()
        if name.startswith(_PREFIX)
    }
    retriever.load_personal(str(state.facts["tier"]), arrays)
    return True


def assign(retriever: TieredHeadRetriever, library: Library, options: TrainingOptions) -> None:
    """The first tier of a site that has none yet: by its score among the sites' (Eq. 5)."""
    if options.depth.complexity_range is not None:
        low, high = options.depth.complexity_range
        retriever.begin_tier(initial_tier(normalised_score(corpus_score(library), low, high)))


def depth_state(state: PersonalState | None, tier: str) -> DepthState:
    """What the scheduler remembered, or the beginning of its memory."""
    fields = None if state is None else state.facts.get("depth")
    return DepthState(tier) if fields is None else DepthState.from_json(fields)


def judge(
    retriever: TieredHeadRetriever,
    known: DepthState,
    pairs: TrainingSet,
    recalls: tuple[float, float | None],
    loss: float,
    options: TrainingOptions,
    seed: int,
) -> tuple[DepthState, DepthReport]:
    """After local training: what the scheduler decides, carried out (Algorithm 1, 5 to 13).

    ``recalls``: on training pairs and on pairs held out, from `recall_at`.
    """
    from daemon.personal.tiers import change_tier

    state, report = observe(known, loss, *recalls, options.depth)
    if state.tier == retriever.tier:
        return state, report
    distilled = change_tier(retriever, state.tier, pairs, options, seed ^ _KD_SEED)
    went = f"distilled from a divergence of {distilled.before:.4f} to {distilled.after:.4f} nats"
    if distilled.changed:
        return state, replace(report, reason=f"{report.reason}; {went}")
    stays = f"{report.reason}; {went}, so {retriever.tier} stays: lower the distillation's rate"
    return (
        replace(state, tier=retriever.tier),
        replace(report, tier=retriever.tier, decision="none", reason=stays),
    )


def left_behind(
    retriever: TieredHeadRetriever, state: DepthState, report: DepthReport
) -> PersonalState:
    """What the site's personal file has of it."""
    arrays = {f"{_PREFIX}{name}": value for name, value in retriever.personal_arrays().items()}
    decided = {"depth": state.to_json(), "report": asdict(report)}
    return PersonalState(arrays, {"tier": retriever.tier, **decided})


def recall_at(
    retriever: Retriever,
    query_texts: Texts,
    passage_texts: Texts,
    positives: Sequence[Rows],
    seed: int,
) -> float | None:
    """Share of queries with a positive among their 5 nearest passages; None without queries.

    At most 512 queries, drawn by ``seed``. Equal cosines count for the positive.
    """
    count = len(positives)
    if count == 0:
        return None
    chance = np.random.Generator(np.random.Philox(key=seed))
    drawn = chance.permutation(count)[:_MOST_ASKED]
    features = None if query_texts.features is None else query_texts.features[drawn]
    queries = retriever.embed_queries([query_texts.texts[row] for row in drawn], features)
    passages = retriever.embed_passages(passage_texts.texts, passage_texts.features)
    hits = 0
    for query, row in zip(queries, drawn, strict=True):
        cosines = passages @ query
        hits += int((cosines > cosines[positives[row]].max()).sum()) < _RECALL_AT
    return hits / len(drawn)


def _recall(library: Library, retriever: Retriever, split: str, seed: int) -> float | None:
    """Recall@5 on the pairs of a split, among the passages of training and validation."""
    from daemon.learning.retriever.encoder import Texts

    passages = [*library.passages(split="train"), *library.passages(split="valid")]
    rows_of = training_data.rows_by_document(passages)
    queries, positives = training_data.usable_pairs(library, split, rows_of)
    query_texts = Texts(queries, training_data.query_features(library, retriever, queries))
    passage_texts = Texts(
        [passage.embedding_text for passage in passages],
        training_data.passage_features(library, retriever, [passage.rowid for passage in passages]),
    )
    return recall_at(retriever, query_texts, passage_texts, positives, seed)
