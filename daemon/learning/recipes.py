"""From an operator's choices to the plan that sites agree on."""

from __future__ import annotations

from config.settings import LearningSettings, TrainingSettings
from daemon.learning.options import TrainingOptions
from proto import federation_pb2 as pb

ADAPT = {"head": pb.HEAD, "lora": pb.LORA, "lora_server": pb.LORA_SERVER, "full": pb.FULL}


def learning_plan(chosen: LearningSettings) -> pb.LearningPlan:
    """The axes of learning, as they stand in a plan."""
    return pb.LearningPlan(
        recipe=chosen.recipe,
        negatives=pb.Negatives.Value(f"NEGATIVES_{chosen.negatives.upper()}"),
        bm25_rounds=chosen.bm25_rounds,
        random_negatives=chosen.random_negatives,
        batches=pb.Batches.Value(f"BATCHES_{chosen.batches.upper()}"),
        distill=pb.Distill.Value(f"DISTILL_{chosen.distill.upper()}"),
        kd_weight=chosen.kd_weight,
        proximal=chosen.proximal,
        start_from=pb.StartFrom.Value(f"START_FROM_{chosen.start_from.upper()}"),
        dropout=chosen.dropout,
        weight_decay=chosen.weight_decay,
        aggregate=pb.Aggregate.Value(f"AGGREGATE_{chosen.aggregate.upper()}"),
        server_learning_rate=chosen.server_learning_rate,
        momentum=chosen.momentum,
        second_momentum=chosen.second_momentum,
        floor=chosen.floor,
    )


def most_examples(training: TrainingSettings, learning: LearningSettings) -> int:
    """What a site's weight is clipped to; at 1 all sites count the same."""
    return 1 if learning.weigh == "uniform" else training.max_num_examples


def options_from(training: TrainingSettings, learning: LearningSettings) -> TrainingOptions:
    """What this site's own settings ask of training."""
    plan = pb.TrainingPlan(
        local_epochs=training.local_epochs,
        batch_size=training.batch_size,
        learning_rate=training.learning_rate,
        temperature=training.temperature,
        hard_negatives=training.hard_negatives,
        learning=learning_plan(learning),
    )
    return TrainingOptions.of(plan)
