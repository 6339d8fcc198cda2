"""The terms of learning: what is asked, what is reported, what is refused.

Plain values and errors that any process may hold. Nothing here imports torch:
the daemon's main process receives these from its workers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from daemon.versions import ShapeManifest
from proto import federation_pb2 as pb

# The mean loss travels as loss / LOSS_BOUND in the vector's last value. InfoNCE
# with tau = 0.05 is below 2 / 0.05 + ln(candidates), that is 48 at 4096 of them.
LOSS_BOUND = 64.0


class LearningError(Exception):
    """Learning refused or failed; the message says why and what to do."""


class EncoderError(LearningError):
    """The encoder could not be found, is not what it should be, or cannot be run."""


class TrainingError(LearningError):
    """This site cannot train on these pairs with this plan."""


class EvaluationError(LearningError):
    """These rankings cannot be scored."""


@dataclass(frozen=True)
class TrainingOptions:
    """How a site trains in one round: the part of the plan that concerns learning.

    ``local_epochs``: passes over the pairs; 0 trains nothing (an exchange of zeros).
    ``batch_size``: pairs a step; more than the site has means one step an epoch.
    ``learning_rate``: AdamW's at the first step; it falls linearly to a tenth.
    ``temperature``: InfoNCE's tau, on cosines.
    ``hard_negatives``: mined passages a pair. ``seed``: of every shuffle and draw.
    """

    local_epochs: int = 4
    batch_size: int = 32
    learning_rate: float = 1e-4
    temperature: float = 0.05
    hard_negatives: int = 4
    seed: int = 0

    @classmethod
    def of(cls, plan: pb.TrainingPlan) -> TrainingOptions:
        """What a round's plan asks of a site."""
        return cls(
            local_epochs=plan.local_epochs,
            batch_size=plan.batch_size,
            learning_rate=plan.learning_rate,
            temperature=plan.temperature,
            hard_negatives=plan.hard_negatives,
            seed=plan.seed,
        )


class TrainingProgress(NamedTuple):
    """Reported after each local epoch: ``loss`` is its mean."""

    epoch: int
    epochs: int
    loss: float


class EmbeddingProgress(NamedTuple):
    """Reported while passages are embedded: texts done, texts in all."""

    done: int
    total: int


@dataclass(frozen=True)
class TrainingResult:
    """What the round needs to know of a site's training: never the update itself.

    ``mean_loss`` is that of the last epoch (0 when nothing was trained);
    ``num_examples`` the pairs trained on.
    """

    mean_loss: float
    num_examples: int
    seconds: float


@dataclass(frozen=True)
class RetrieverDescription:
    """What a site runs: enough to tell whether two sites may add their updates."""

    encoder_digest: bytes
    dimension: int
    shape_manifest: ShapeManifest
