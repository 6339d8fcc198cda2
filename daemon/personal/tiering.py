"""A site's personal layer through a round: taken up before, judged and kept after."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from crypto.arrays import Float32, Rows
from daemon.learning.options import DepthReport, TrainingOptions
from daemon.learning.retriever.retriever import Retriever, Texts
from daemon.learning.training import TrainingSet
from daemon.library.store import Library, Passage
from daemon.personal.complexity import measure
from daemon.personal.depth import (
    DepthState,
    complexity_score,
    initial_tier,
    normalised_score,
    observe,
)
from daemon.personal.personal import PersonalState
from daemon.personal.tiers import TieredHeadRetriever, change_tier

_PREFIX = "personal."
_RECALL_AT = 5
_MOST_ASKED = 512  # pairs that a recall is measured on
_KD_SEED = 0x4B44  # apart from the training's draws


def score(library: Library) -> float:
    """S_i of the site's documents that may be learned from (pFedRAG, Eq. 3)."""
    passages = library.passages(split="train")
    of_document = itertools.groupby(passages, key=lambda passage: passage.document_id)
    texts = [" ".join(passage.text for passage in group) for _, group in of_document]
    return complexity_score(measure(texts))


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
        retriever.begin_tier(initial_tier(normalised_score(score(library), low, high)))


def depth_state(state: PersonalState | None, tier: str) -> DepthState:
    """What the scheduler remembered, or the beginning of its memory."""
    told = None if state is None else state.facts.get("depth")
    return DepthState(tier) if told is None else DepthState.from_json(told)


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


def kept(
    retriever: TieredHeadRetriever, state: DepthState, report: DepthReport
) -> tuple[dict[str, Float32], dict[str, Any]]:
    """Arrays and facts for the site's personal file."""
    arrays = {f"{_PREFIX}{name}": value for name, value in retriever.personal_arrays().items()}
    facts = {"tier": retriever.tier, "depth": state.to_json(), "report": asdict(report)}
    return arrays, facts


def recall_at(
    retriever: Retriever,
    asked: Texts,
    told: Texts,
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
    features = None if asked.features is None else asked.features[drawn]
    queries = retriever.embed_queries([asked.texts[row] for row in drawn], features)
    passages = retriever.embed_passages(told.texts, told.features)
    found = 0
    for query, row in zip(queries, drawn, strict=True):
        cosines = passages @ query
        found += int((cosines > cosines[positives[row]].max()).sum()) < _RECALL_AT
    return found / len(drawn)


def rows_by_document(passages: Sequence[Passage]) -> dict[str, list[int]]:
    """Where in a table each document's passages are."""
    rows: dict[str, list[int]] = {}
    for row, passage in enumerate(passages):
        rows.setdefault(passage.document_id, []).append(row)
    return rows
