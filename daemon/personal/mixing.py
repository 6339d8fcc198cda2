"""A site's mixture, made: its own half is trained, and pairs decide what share of it answers.

Pairs of split "valid" judge every share. Where there are too few of them, training pairs
judge in turn: whether what is learned alone from the others answers them nearly as well
as the shared version does, which had them all (`daemon.personal.mixture.near_enough`).
Where there are too few of these as well, the site stays with the shared version. Where
validation says that the encoder untrained is better than the share so found, that one answers:
what a federation learns may be of no use to a site, or harm it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from crypto.arrays import Float32, Float64, Rows
from daemon.jobs import learning
from daemon.learning import training_data
from daemon.learning.options import Personalised, TrainingOptions, TrainingProgress
from daemon.learning.retriever.retriever import Retriever
from daemon.learning.retriever.spec import RetrieverSpec
from daemon.learning.training import MIN_PAIRS, TrainingSet, fit
from daemon.library.store import Library
from daemon.personal.held_out import FEWEST, folds_by_answer, judging, subset, validation_pairs
from daemon.personal.mixture import PREFERRED, SHARES, best_share, mix, near_enough
from daemon.personal.personal import PersonalState, seed_for
from daemon.personal.tuning import Validation
from daemon.process.workers import report

_FOLDS = 4  # of few training pairs: each one judges once
_EITHER_SIDE = FEWEST // 2  # pairs to learn from and to judge by, at least
_SPARED = 5  # of many, one part in so many judges, and is not learned from


def mixture(
    spec: RetrieverSpec,
    library_path: Path,
    versions: Path,
    model_digest: bytes,
    options: TrainingOptions,
    own_rounds: int,
) -> tuple[Personalised, Mixture]:
    """Train alone, as often as a federation of one would, and find the share to answer with."""
    retriever = learning.retriever_for(spec)
    shared = learning.load_version(retriever, versions, model_digest)
    with Library.open(library_path) as library:
        own = _Alone(library, retriever, spec, options, own_rounds, model_digest)
        validation = validation_pairs(library, retriever)
        if validation is not None:
            judged = _by_validation(own, shared, validation)
        else:
            judged = _in_turn(own, shared)
    own_half, share = judged.own, judged.share
    if judged.untrained:
        own_half, share = retriever.initial_vector(), 1.0
    vector = mix(shared, own_half, share)
    made = Personalised(
        model_digest=model_digest,
        epochs=own.done,
        loss=own.loss,
        pairs=own.pairs,
        judged=len(judged.before),
        mrr_before=float(judged.before.mean()) if len(judged.before) else math.nan,
        mrr_after=float(judged.after.mean()) if len(judged.after) else math.nan,
        changed=not np.array_equal(vector, shared),
        seconds=0.0,
        share=judged.share,
        in_turn=validation is None and len(judged.before) > 0,
        untrained=judged.untrained,
    )
    facts = {"kind": "mixture", "share": judged.share, "untrained": judged.untrained}
    half = PersonalState({"own": own_half}, {"share": share, "untrained": judged.untrained})
    return made, Mixture(PersonalState({"mixture": vector}, facts), half)


class Mixture(NamedTuple):
    """What a version answers with, and what the next ones are mixed with until they have theirs.

    ``half`` holds "own", with the share of it: nothing is mixed in where that is 0.
    """

    state: PersonalState
    half: PersonalState


@dataclass(frozen=True)
class _Judged:
    """The own half, the share of it that answers, and the reciprocal ranks that say so."""

    own: Float32
    share: float
    before: Float64
    after: Float64
    untrained: bool = False  # nothing of either answers


@dataclass
class _Alone:
    """Training by itself, from the same start as the federation and with its options."""

    library: Library
    retriever: Retriever
    spec: RetrieverSpec
    options: TrainingOptions
    rounds: int
    model_digest: bytes
    parts: int = 1  # trainings that are to come, one behind the other
    done: int = 0  # epochs
    loss: float = math.nan  # of the last epoch
    pairs: int = 0  # that the last one learned from
    _plan: TrainingOptions = field(init=False)

    def __post_init__(self) -> None:
        # Nothing that a plan holds sites together by: this half is to be the site's own.
        self._plan = replace(self.options, start_from="global", distill="none", proximal=0.0)

    def all_pairs(self) -> TrainingSet:
        """The site's pairs, without negatives, which would have to be mined."""
        plan = replace(self._plan, negatives="in_batch", batches="random")
        return training_data.training_set(self.library, self.retriever, plan, self.spec)

    def trained(self, kept: Rows | None = None) -> Float32:
        """What these rows of the pairs teach, or all; the retriever is left with it."""
        self.retriever.load_vector(self.retriever.initial_vector())
        for number in range(1, self.rounds + 1):
            plan, seed = self._plan.in_round(number), seed_for(number, self.model_digest)
            pairs = training_data.training_set(self.library, self.retriever, plan, self.spec)
            pairs = pairs if kept is None else subset(pairs, kept)
            self.retriever.begin(round=number, dropout=plan.dropout, seed=seed)
            self.loss = fit(self.retriever, pairs, self._plan, seed, self._on_epoch)
            # As a round ends: where what is exchanged is a projection, the next begins from it.
            self.retriever.load_vector(self.retriever.vector())
            self.done += plan.local_epochs
            self.pairs = len(pairs.positives)
        return self.retriever.vector()

    def _on_epoch(self, epoch: int, mean: float) -> None:
        passes = self.parts * self.rounds * self.options.local_epochs
        report(TrainingProgress(self.done + epoch, passes, mean))


def _by_validation(own: _Alone, shared: Float32, validation: Validation) -> _Judged:
    if len(own.all_pairs().positives) < MIN_PAIRS:
        return _without_own(own, shared, validation)
    vector = own.trained()
    ranks: dict[float, Float64] = {}
    for share in SHARES:
        own.retriever.load_vector(mix(shared, vector, share))
        ranks[share] = validation.reciprocal_ranks(own.retriever)
    share = best_share(ranks)
    own.retriever.load_vector(own.retriever.initial_vector())
    start = validation.reciprocal_ranks(own.retriever)
    if start.mean() > ranks[share].mean():
        return _Judged(vector, 0.0, ranks[0.0], start, untrained=True)
    return _Judged(vector, share, ranks[0.0], ranks[share])


def _without_own(own: _Alone, shared: Float32, validation: Validation) -> _Judged:
    """A site that has questions to judge by and none to learn from."""
    own.retriever.load_vector(shared)
    before = validation.reciprocal_ranks(own.retriever)
    own.retriever.load_vector(own.retriever.initial_vector())
    start = validation.reciprocal_ranks(own.retriever)
    if start.mean() > before.mean():
        return _Judged(shared, 0.0, before, start, untrained=True)
    return _Judged(shared, 0.0, before, before)


def _in_turn(own: _Alone, shared: Float32) -> _Judged:
    """By training pairs: few of them in turn, of many a part that is not learned from."""
    pairs = own.all_pairs()
    count = own.pairs = len(pairs.positives)
    nothing = np.empty(0)
    stays = _Judged(shared, 0.0, nothing, nothing)
    if count < FEWEST:
        return stays
    seed = seed_for(0, own.model_digest)
    if count >= FEWEST * _SPARED:
        held = folds_by_answer(pairs, _SPARED, seed)[:1]
    else:
        held = [rows for rows in folds_by_answer(pairs, _FOLDS, seed) if len(rows)]
    # Where nearly all questions have one answer, nothing is left on one of the sides.
    learned, judging_it = count - max(map(len, held)), sum(map(len, held))
    if min(learned, judging_it) < _EITHER_SIDE:
        return stays
    own.parts = len(held) + (len(held) > 1)
    before, after, vector = nothing, nothing, shared
    for rows, kept in _parts(held, count):
        vector = own.trained(kept)
        after = np.append(after, judging(pairs, rows).reciprocal_ranks(own.retriever))
        own.retriever.load_vector(shared)
        before = np.append(before, judging(pairs, rows).reciprocal_ranks(own.retriever))
    if not near_enough(before, after):
        return _Judged(vector, 0.0, before, after)
    if len(held) > 1:
        vector = own.trained()
    return _Judged(vector, PREFERRED, before, after)


def _parts(held: list[Rows], count: int) -> Iterator[tuple[Rows, Rows]]:
    """Rows to judge by, and all others."""
    for rows in held:
        yield rows, np.setdiff1d(np.arange(count), rows)
