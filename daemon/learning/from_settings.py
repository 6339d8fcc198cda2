"""From an operator's settings to what training is asked for."""

from __future__ import annotations

from config.settings import LearningSettings, TrainingSettings
from daemon.learning.options import TrainingOptions
from daemon.learning.plan_fields import fill
from proto import federation_pb2 as pb


def learning_plan(chosen: LearningSettings) -> pb.LearningPlan:
    """The axes of learning, as they stand in a plan."""
    plan = pb.LearningPlan()
    fill(plan, chosen.model_dump())
    return plan


def options_from(training: TrainingSettings, learning: LearningSettings) -> TrainingOptions:
    """What this site's own settings ask of training."""
    plan = pb.TrainingPlan(learning=learning_plan(learning))
    fill(plan, training.model_dump())
    return TrainingOptions.of(plan)
