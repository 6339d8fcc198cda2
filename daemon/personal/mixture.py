"""A point between what all sites learned together and what this site learned alone.

Both lines of training begin at the same vector, the encoder as it comes, and stay near
it; between their ends lie parameters that do better at a site than either end (weights
of fine-tuned models can be averaged: Wortsman et al. 2022, "Model soups" and "Robust
fine-tuning of zero-shot models"; measured for us in docs/results/learning.md). The
shared version brings what others know, the own one what only this site's questions
teach, and the site answers with the mixture, for questions and passages alike.

Personal is the mixture, and the half of it that was learned alone. It is found when a run
is over: the own half is trained, and pairs decide what share of it answers. Pairs of split
"valid" judge every share. Where there are too few of them, training pairs
judge in turn: whether what is learned alone from the others answers them nearly as well
as the shared version does, which had them all (`near_enough`).
Where there are too few of these as well, the site stays with the shared version. Where
validation says that the encoder untrained is better than the share so found, that one answers:
what a federation learns may be of no use to a site, or harm it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from crypto.arrays import Float32, Float64, Rows
from daemon.learning.options import EpochProgress, LearningError, Personalised, TrainingOptions
from daemon.learning.retriever.spec import RetrieverSpec
from daemon.library.store import Library
from daemon.pairs.training_set import training_set
from daemon.personal.held_out import (
    FEWEST,
    Validation,
    folds_by_answer,
    judging,
    subset,
    validation_pairs,
)
from daemon.personal.layer import NOTHING_YET, Fact, FitRequest, Fitted, Layer, Serving
from daemon.personal.store import PersonalState, PersonalStore, seed_for
from daemon.process.workers import report
from daemon.state.versions import read_version

if TYPE_CHECKING:
    from daemon.learning.retriever.retriever import Retriever
    from daemon.learning.retriever.training import TrainingSet


_UNTRAINED = "the encoder as it came: the mixture did worse on validation pairs"
_FOLDS = 4  # of few training pairs: each one judges once
_EITHER_SIDE = FEWEST // 2  # pairs to learn from and to judge by, at least
_SPARED = 5  # of many, one part in so many judges, and is not learned from
SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)  # of the site's own, that are tried
PREFERRED = 0.5
# Of mean reciprocal rank. Measured: up to 0.14 where a half helped or did no harm (sites of
# MedQuAD with 33 to 140 pairs), 0.45 and more where it ruined the answers (the demo's).
FAR = 0.2


class Mixture(Layer):
    """The mean of the shared version and what the site learned alone, by the share of it."""

    kept = True
    fitted = True

    def fit(self, request: FitRequest) -> Fitted:
        """Train alone, as often as a federation of one would, and find the share to answer with."""
        retriever, shared = request.retriever, request.shared
        with Library.open(request.library_path) as library:
            own = _Alone(
                library,
                retriever,
                request.spec,
                request.options,
                request.spec.alone.local_only_rounds,
                request.model_digest,
            )
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
            model_digest=request.model_digest,
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
        facts = {"kind": self.name, "share": judged.share, "untrained": judged.untrained}
        half = PersonalState({"own": own_half}, {"share": share, "untrained": judged.untrained})
        return Fitted(made, PersonalState({self.name: vector}, facts), half)

    def is_finished(self, state: PersonalState) -> bool:
        """Not where it was carried over from an earlier version (`prepare`)."""
        return not state.facts.get("carried")

    def prepare(
        self, spec: RetrieverSpec, retriever: Retriever, versions: Path, model_digest: bytes
    ) -> None:
        """Mix a version that has no mixture yet with the half that the last one was made of.

        So a site does not fall back to what is shared for as long as a run takes: each of its
        versions is a little better than the one before, and the site's own half as good as it
        was. Found anew, and judged, when the run is over.
        """
        shape = retriever.shape_manifest.digest
        store = PersonalStore(Path(spec.personal_folder), shape)
        if store.serving(model_digest) is not None or (half := store.half()) is None:
            return
        share, own = half.facts.get("share"), half.arrays.get("own")
        if not isinstance(share, float) or own is None:
            raise LearningError(f"{store.half_path} does not hold half a mixture: delete the file")
        if share > 0.0:
            shared = read_version(versions, model_digest, shape)
            untrained = half.facts.get("untrained", False)
            facts = {
                "kind": self.name,
                "share": 0.0 if untrained else share,
                "untrained": untrained,
                "carried": True,
            }
            store.put(model_digest, PersonalState({self.name: mix(shared, own, share)}, facts))

    def load(self, retriever: Retriever, shared: Float32, state: PersonalState | None) -> None:
        """The mixture that is kept, or the shared version where there is none yet."""
        if state is None or not self.holds(state):
            retriever.load_vector(shared)
            return
        mixed = state.arrays.get(self.name)
        if mixed is None or mixed.shape != shared.shape or not np.isfinite(mixed).all():
            raise LearningError(
                "this site's mixture is damaged: delete its file in state_dir/personal, and "
                "`fedctl personalise` makes it anew"
            )
        retriever.load_vector(mixed)

    def facts(self, serving: Serving) -> list[Fact]:
        """The share of the site's own in it, and whether it was found for this version."""
        if serving.state is None:
            return [NOTHING_YET]
        facts = serving.state.facts
        share = f"{float(facts.get('share', math.nan)):.0%} of what this site learned alone"
        what = _UNTRAINED if facts.get("untrained") else share
        lines = [("mixture", f"{what}, for version {serving.version.hex()[:12]}")]
        if not self.is_finished(serving.state):
            lines.append(("", "as found for an earlier version; found anew when the run is over"))
        return lines

    def answers_with(self, made: Personalised) -> str:
        """The share of the site's own in it."""
        if made.untrained:
            return _UNTRAINED
        return f"a mixture, {made.share:.0%} of it what this site learned alone"


# ---- arithmetic ------------------------------------------------------------------------


def mix(shared: Float32, own: Float32, share: float) -> Float32:
    """(1 - share) shared + share own, each value rounded once: float32 [D]."""
    if shared.shape != own.shape:
        raise LearningError(
            f"parameters of shapes {shared.shape} and {own.shape} cannot be mixed: this site's own "
            "were made for another retriever"
        )
    mixed = (1.0 - share) * shared.astype(np.float64) + share * own.astype(np.float64)
    return mixed.astype(np.float32)


def best_share(ranks: Mapping[float, Float64]) -> float:
    """Which share to answer with, by the reciprocal ranks [questions] that each one got.

    The preferred one, unless another does better by more than one standard error of
    the difference between the two, question by question (the one-standard-error rule,
    Breiman et al. 1984): a few dozen validation pairs would else choose by chance. Of
    several such the best. And the shared version (0), where that does better than the
    one so found: nobody is to lose by what is his own. Raises KeyError without ranks of
    these two shares.
    """
    usual = ranks[PREFERRED]
    chosen, most = PREFERRED, 0.0
    for share, values in ranks.items():
        gain = values - usual
        if gain.size < 2:
            continue
        error = float(gain.std(ddof=1)) / math.sqrt(gain.size)
        mean = float(gain.mean())
        if mean > max(error, most):
            chosen, most = share, mean
    return 0.0 if ranks[0.0].mean() > ranks[chosen].mean() else chosen


def near_enough(shared: Float64, own: Float64) -> bool:
    """Whether half of what was learned alone may be mixed in, where no pairs are impartial.

    ``shared``: reciprocal ranks [questions] of the shared version, which has learned from
    these questions and is flattered; ``own``: of what was learned alone from *other*
    questions of the site. If even so the own one is nearly as good, both are good models of
    these documents, and half-way between two such lies a better one. Far below lies what
    learned nothing that serves the next question; half of that is half of nothing.
    """
    return float(shared.mean() - own.mean()) <= FAR


# ---- what was learned alone, and how it is judged -----------------------------------------


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
    _own_options: TrainingOptions = field(init=False)

    def __post_init__(self) -> None:
        # Nothing that a plan holds sites together by: this half is to be the site's own.
        self._own_options = replace(self.options, start_from="global", distill="none", proximal=0.0)

    def all_pairs(self) -> TrainingSet:
        """The site's pairs, without negatives, which would have to be mined."""
        options = replace(self._own_options, negatives="in_batch", batches="random")
        return training_set(self.library, self.retriever, options, self.spec)

    def trained(self, rows: Rows | None = None) -> Float32:
        """What these rows of the pairs teach, or all; the retriever is left with it."""
        from daemon.learning.retriever.parallel import train

        self.retriever.load_vector(self.retriever.initial_vector())
        for number in range(1, self.rounds + 1):
            options, seed = self._own_options.in_round(number), seed_for(number, self.model_digest)
            pairs = training_set(self.library, self.retriever, options, self.spec)
            pairs = pairs if rows is None else subset(pairs, rows)
            self.retriever.begin(round=number, dropout=options.dropout, seed=seed)
            self.loss = train(
                *(self.spec, self.retriever, pairs, self._own_options, seed, self._on_epoch)
            )
            # As a round ends: where what is exchanged is a projection, the next begins from it.
            self.retriever.load_vector(self.retriever.vector())
            self.done += options.local_epochs
            self.pairs = len(pairs.positives)
        return self.retriever.vector()

    def _on_epoch(self, epoch: int, mean: float) -> None:
        passes = self.parts * self.rounds * self.options.local_epochs
        report(EpochProgress(self.done + epoch, passes, mean))


def _by_validation(own: _Alone, shared: Float32, validation: Validation) -> _Judged:
    from daemon.learning.retriever.training import MIN_PAIRS

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
        folds = folds_by_answer(pairs, _SPARED, seed)[:1]
    else:
        folds = [rows for rows in folds_by_answer(pairs, _FOLDS, seed) if len(rows)]
    # Where nearly all questions have one answer, nothing is left on one of the sides.
    learned, judging_it = count - max(map(len, folds)), sum(map(len, folds))
    if min(learned, judging_it) < _EITHER_SIDE:
        return stays
    own.parts = len(folds) + (len(folds) > 1)
    before, after, vector = nothing, nothing, shared
    for rows, rest in _parts(folds, count):
        vector = own.trained(rest)
        after = np.append(after, judging(pairs, rows).reciprocal_ranks(own.retriever))
        own.retriever.load_vector(shared)
        before = np.append(before, judging(pairs, rows).reciprocal_ranks(own.retriever))
    if not near_enough(before, after):
        return _Judged(vector, 0.0, before, after)
    if len(folds) > 1:
        vector = own.trained()
    return _Judged(vector, PREFERRED, before, after)


def _parts(folds: list[Rows], count: int) -> Iterator[tuple[Rows, Rows]]:
    """Rows to judge by, and all others."""
    for rows in folds:
        yield rows, np.setdiff1d(np.arange(count), rows)
