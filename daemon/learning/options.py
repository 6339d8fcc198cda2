"""The terms of learning: what is asked, what is reported, what is refused.

Plain values and errors that any process may hold. Nothing here imports torch:
the daemon's main process receives these from its workers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields, replace
from typing import NamedTuple

from config.recipes import (
    WITH_LORA_SERVER,
    DepthOptions,
    LocalAxes,
    ServerOptions,
    TrainingAxes,
)
from daemon.learning.plan_fields import options_in
from daemon.state.versions import ShapeManifest
from proto import federation_pb2 as pb


class LearningError(Exception):
    """Learning refused or failed; the message says why and what to do."""


class EncoderError(LearningError):
    """The encoder could not be found, is not what it should be, or cannot be run."""


class TrainingError(LearningError):
    """This site cannot train on these pairs with this plan."""


class EvaluationError(LearningError):
    """These rankings cannot be scored."""


@dataclass(frozen=True)
class TrainingOptions(LocalAxes, TrainingAxes):
    """How a site trains in one round: the part of the plan that concerns learning.

    ``local_epochs``: passes over the pairs; 0 trains nothing (an exchange of zeros).
    ``batch_size``: pairs a step; more than the site has means one step an epoch.
    ``learning_rate``: AdamW's at the first step; it falls linearly to a tenth.
    ``temperature``: InfoNCE's tau, on cosines.
    ``hard_negatives``: mined passages a pair. ``seed``: of every shuffle and draw.

    ``negatives``: where the hard ones come from: the parent version (``static``),
    words (``bm25``), or nowhere (``in_batch``). ``random_negatives``: passages a pair
    drawn anew in each step. ``batches``: of pairs at random or of one neighbourhood.
    ``distill``: KD-GLE over the pairs or the whole matrix, times ``kd_weight``.
    ``proximal``: FedProx's mu. ``start_from``: the parent version, or the site's own
    student of its last round (then the parent only teaches).
    ``dropout``: of the head's input while it trains. ``weight_decay``: AdamW's.
    ``bm25_rounds``: rounds, from the first, whose hard negatives come from words.
    """

    seed: int = 0
    server: ServerOptions = field(default_factory=ServerOptions)
    depth: DepthOptions = field(default_factory=DepthOptions)

    @property
    def needs_parent(self) -> bool:
        """Whether training asks what the parent version makes of the texts."""
        mined = self.negatives != "in_batch" and self.hard_negatives > 0
        return mined or self.batches == "topic" or self.distill != "none"

    def in_round(self, round: int) -> TrainingOptions:
        """The options of one round of the history, counted from 1."""
        if round <= self.bm25_rounds and self.negatives == "static":
            return replace(self, negatives="bm25")
        return self

    def check_adapt(self, adapt: str) -> None:
        """Raise LearningError where they don't go with what this federation exchanges."""
        if adapt != "lora_server":
            return
        chosen = {"start_from": self.start_from, "aggregate": self.server.rule}
        for axis, (only, why) in WITH_LORA_SERVER.items():
            if chosen[axis] != only:
                raise LearningError(
                    f"{axis} = '{chosen[axis]}' and adapt = 'lora_server' do not combine: {why}"
                )

    @classmethod
    def of(cls, plan: pb.TrainingPlan) -> TrainingOptions:
        """What a round's plan asks of a site."""
        axes = {field.name for field in fields(cls)}
        choices = options_in(plan, axes)
        if not plan.HasField("learning"):
            return cls(**choices)
        learning = plan.learning
        server = options_in(learning, {field.name for field in fields(ServerOptions)})
        server |= {"rule": options_in(learning, {"aggregate"})["aggregate"]}
        server |= {"learning_rate": learning.server_learning_rate}
        return cls(**choices, **options_in(learning, axes), server=ServerOptions(**server))


class EpochProgress(NamedTuple):
    """Reported after each local epoch: ``loss`` is its mean."""

    epoch: int
    epochs: int
    loss: float


class EmbeddingProgress(NamedTuple):
    """Reported while passages are embedded: texts done, texts in all."""

    done: int
    total: int


class IndexingProgress(NamedTuple):
    """Reported while an index is built: passages done, passages in all."""

    done: int
    total: int


class EvaluationProgress(NamedTuple):
    """What an evaluation is at: its step, what is done of it and what there is in all.

    ``step``: "index" while it waits for one, "encoder" while passages are embedded as before
    training, "cross-encoder" while that ranks what each question finds, "questions";
    "answers" while each of them is answered. ``total`` is 0 where nothing is counted.
    """

    step: str
    done: int = 0
    total: int = 0


@dataclass(frozen=True)
class DepthReport:
    """The personal layer after a round: its tier, and why it is that one.

    ``api``: the adaptation performance index (pFedRAG, Eq. 4), None while the
    history is too short; ``decision``: upgrade, downgrade or none; ``reason`` says
    it to people.
    """

    tier: str
    decision: str
    api: float | None
    reason: str


@dataclass(frozen=True)
class TrainingResult:
    """What a comparison of recipes wants to know of a site's training; a round, nothing.

    ``mean_loss`` is that of the last epoch (0 when nothing was trained);
    ``num_examples`` the pairs trained on.
    """

    mean_loss: float
    num_examples: int


@dataclass(frozen=True)
class RetrieverDescription:
    """What a site runs: enough to tell whether two sites may add their updates."""

    dimension: int
    shape_manifest: ShapeManifest


@dataclass(frozen=True)
class GeneratorDescription:
    """What generator a site trains: enough to tell whether two sites may add their updates."""

    shape_manifest: ShapeManifest


class GeneratorLoad(NamedTuple):
    """Reported before a generator trains: what on, and what memory it takes (bytes).

    ``examples``: triples that are trained on; ``cut``: those of them whose answer is longer than
    ``answer_tokens`` and is learned to there; ``left_out``: those whose question leaves no room.
    ``padding``: share of the positions in which nothing stands. ``weights`` are there already;
    ``optimiser`` (gradients, AdamW's two moments, copies; of several processes what each has
    loaded, too) and ``activations`` come to it, and ``available`` is what this machine has for
    them.
    """

    examples: int
    cut: int
    left_out: int
    padding: float
    weights: int
    optimiser: int
    activations: int
    available: int


@dataclass(frozen=True)
class Personalised:
    """What came of fitting what is a site's own to its pairs.

    ``judged``: pairs kept apart, on which ``mrr_before`` and ``mrr_after`` (with the shared
    parameters alone and with this site's own; NaN where there were too few) were measured.
    ``changed``: whether the two differ; they don't where none did better.
    ``share``: of the site's own in its mixture; NaN where there is none. ``in_turn``: the
    pairs were training pairs, from which the shared version has learned, and what is
    measured beside it was learned alone from the others of them. ``untrained``: the
    encoder as it came did better than every mixture, and answers.
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
    in_turn: bool = False
    untrained: bool = False
