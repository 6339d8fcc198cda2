"""From an operator's choices to the plan that sites agree on."""

from __future__ import annotations

from config.settings import LearningSettings, TrainingSettings
from daemon.learning.options import TrainingOptions
from daemon.learning.plan import fill
from proto import federation_pb2 as pb


def learning_plan(chosen: LearningSettings) -> pb.LearningPlan:
    """The axes of learning, as they stand in a plan."""
    plan = pb.LearningPlan()
    fill(plan, chosen.model_dump())
    return plan


def most_examples(training: TrainingSettings, learning: LearningSettings) -> int:
    """What a site's weight is clipped to; at 1 all sites count the same."""
    return 1 if learning.weigh == "uniform" else training.max_num_examples


def options_from(training: TrainingSettings, learning: LearningSettings) -> TrainingOptions:
    """What this site's own settings ask of training."""
    plan = pb.TrainingPlan(learning=learning_plan(learning))
    fill(plan, training.model_dump())
    return TrainingOptions.of(plan)
