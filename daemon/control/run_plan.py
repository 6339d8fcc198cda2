"""The plan that a run is proposed with: what was asked for, else the recipe, else settings."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import fields
from typing import Any

from google.protobuf.message import Message
from pydantic import ValidationError

from config.loading import RENAMED, explained
from config.recipes import DEFAULT_RECIPE, RECIPES, AloneAxes
from config.settings import LearningSettings, RobustSettings, Settings, TrainingSettings
from daemon.learning.from_settings import learning_plan
from daemon.learning.plan_fields import fill
from proto import federation_pb2 as pb


class ChoiceRefused(Exception):
    """A recipe or a choice that there is none of; the text says what there is."""


def chosen(
    training: TrainingSettings,
    learning: LearningSettings,
    adapt: str,
    recipe: str,
    choices: Sequence[str],
) -> tuple[TrainingSettings, LearningSettings]:
    """This site's settings, with a recipe and single choices (``axis=value``) in their place.

    Raises ChoiceRefused, also for a recipe that trains something else than this
    federation exchanges (``adapt``).
    """
    tables = {"training": training.model_dump(), "learning": learning.model_dump()}
    if recipe:
        if recipe not in RECIPES:
            raise ChoiceRefused(f"there is no recipe {recipe!r}: there are {', '.join(RECIPES)}")
        if RECIPES[recipe].adapt != adapt:
            raise ChoiceRefused(
                f"the recipe {recipe} trains adapt = {RECIPES[recipe].adapt!r}, and this "
                f"federation exchanges {adapt!r}: a new federation can begin with it "
                "([learning] recipe, at every site)"
            )
        for name, table in tables.items():
            table.update(RECIPES[recipe].settings[name])
        tables["learning"]["recipe"] = recipe
    written: dict[str, str] = {}
    for choice in choices:
        said, _, value = choice.partition("=")
        name = RENAMED["learning"].get(said, said)
        if name not in _CHOOSABLE:
            known = ", ".join(sorted(_CHOOSABLE))
            raise ChoiceRefused(f"{choice!r} is no choice: say axis=value; axes are {known}")
        section = "training" if name in TrainingSettings.model_fields else "learning"
        tables[section][name] = _value(value)
        if name != said:
            written[f"{section}.{name}"] = f"{section}.{said}"
    try:
        return TrainingSettings(**tables["training"]), LearningSettings(**tables["learning"])
    except ValidationError as error:
        section = "training" if error.title == TrainingSettings.__name__ else "learning"
        raise ChoiceRefused("; ".join(explained(section, error, written))) from error


def of_generator(settings: Settings) -> tuple[TrainingSettings, LearningSettings, str]:
    """What a run of the generator's rounds goes by, where nothing is chosen for it.

    As [generator] says, else as [training] and [learning] do, but for what concerns retrieval.
    """
    own = settings.generator
    steps = {
        "local_epochs": own.local_epochs,
        "batch_size": own.batch_size,
        "learning_rate": own.learning_rate,
        "hard_negatives": 0,
    }
    axes = {
        "recipe": "fedavg",
        "negatives": "in_batch",
        "batches": "random",
        "distill": "none",
        "start_from": "global",
    }
    return (
        settings.training.model_copy(update=steps),
        settings.learning.model_copy(update=axes),
        own.adapt,
    )


# Policy of a site is not for one run to change; bits and mode have options of their own, and
# what a site learns by itself stands in no plan.
_CHOOSABLE = frozenset(
    {*RECIPES[DEFAULT_RECIPE].settings["training"], *LearningSettings.model_fields}
    - {"recipe", *(axis.name for axis in fields(AloneAxes))}
)


def _value(text: str) -> Any:
    """As it would stand in a settings file; a bare word is a text."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def make_plan(
    wanted: pb.TrainingPlan,
    training: TrainingSettings,
    learning: LearningSettings,
    robust: RobustSettings,
    adapt: str,
) -> pb.TrainingPlan:
    """The plan asked for; what it leaves open comes from settings."""
    plan = pb.TrainingPlan(learning=learning_plan(learning))
    # What a site's weight is clipped to: at 1 all sites count the same.
    most_examples = 1 if learning.weigh == "uniform" else training.max_num_examples
    fill(
        plan,
        training.model_dump()
        | robust.model_dump()
        | {"robust": robust.rule, "max_num_examples": most_examples},
    )
    for field, value in wanted.ListFields():
        if field.message_type is None:
            setattr(plan, field.name, value)
    fill(plan, {"adapt": adapt})
    plan.seed = plan.seed or int.from_bytes(os.urandom(4))
    if not plan.robust:
        plan.byzantine_sites = 0
    return plan


def put_noughts(plan: pb.TrainingPlan, noughts: Iterable[str]) -> None:
    """Set numbers to 0 that are chosen to be; a plan that is asked for leaves open what is 0.

    Raises ChoiceRefused for a name that is none of its numbers, or of its noise's.
    """
    parts: list[Message] = [plan, *([plan.privacy] if plan.HasField("privacy") else [])]
    for name in noughts:
        for part in parts:
            field = part.DESCRIPTOR.fields_by_name.get(name)
            if field is not None and field.message_type is None:
                setattr(part, name, 0)
                break
        else:
            raise ChoiceRefused(f"{name!r} is no number of this plan, to be 0")
