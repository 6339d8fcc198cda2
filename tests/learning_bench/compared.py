"""What is compared: every table's rows, by name."""

from __future__ import annotations

from typing import Any

from daemon.learning.foreign import Disclosure
from daemon.learning.terms import TrainingOptions
from tests.learning_bench.learning import Training
from tests.learning_bench.named import Named
from tests.learning_bench.recipes import Alone, Bm25, Centralised, Federated, Recipe, Vanilla
from tests.learning_bench.worlds import World

SHARED = Named("hanse", "hanse, shared version", stage_two=False)

RECIPES: tuple[Recipe, ...] = (
    Bm25(),
    Vanilla(),
    Alone("each site alone", "each"),
    Alone("largest site alone", "largest"),
    Alone("smallest site alone", "smallest"),
    Named("hanse", "hanse"),
    SHARED,
    Federated(),
    Centralised(),
    Named("fede4rag", "fede4rag (head)"),
    Named("fedsearch", "fedsearch (head)"),
    Named("pfedrag", "pfedrag"),
    Named("pdd-as2", "pdd-as2 (head)"),
)
CURVE_NAMES = ("each site alone", "FedAvg", "hanse")
HELD_OUT_NAMES = ("hanse, shared version",)

# Those that train inside the encoder, on the small sites, an epoch in all.
_ONE: tuple[tuple[str, Any], ...] = (("local_epochs", 1),)
_LORA = Training(
    TrainingOptions(local_epochs=1, learning_rate=2e-4, negatives="in_batch", hard_negatives=0),
    rounds=1,
)
ENCODER_RECIPES: tuple[Recipe, ...] = (
    Bm25(),
    Vanilla(),
    Federated("FedAvg (LoRA)", _LORA, adapt="lora"),
    Centralised("centralised (LoRA)", _LORA, adapt="lora"),
    Alone("each site alone (LoRA)", "each", _LORA, adapt="lora"),
    Named(
        "fedsearch",
        "fedsearch (server-only LoRA)",
        "lora_server",
        1,
        (*_ONE, ("learning_rate", 2e-5)),
    ),
    Named("fede4rag", "fede4rag (all weights)", None, 1, _ONE),
    Named("pdd-as2", "pdd-as2 (all weights), shared version", None, 1, _ONE, stage_two=False),
    Federated(),
    Alone("each site alone", "each"),
    Named("hanse", "hanse"),
)

QUICK_ABLATIONS = 4  # of those below, the first
_TOPIC = (("batches", "topic"),)
ABLATIONS: tuple[Recipe, ...] = (
    Named("pdd-as2", "pdd-as2 (head), no stage 2", stage_two=False),
    Named("pdd-as2", "pdd-as2 (head), local negatives in stage 2", disclosure=None),
    Named("pdd-as2", "pdd-as2 (head), noisy negatives", disclosure=Disclosure("noisy")),
    Named("pdd-as2", "pdd-as2 (head), bucketed negatives", disclosure=Disclosure("bucket")),
    Named("hanse", "hanse, topic batches", changes=_TOPIC),
    Named("hanse", "hanse, 8 bits a value", bits=8),
    Named("hanse", "hanse, uniform weights", changes=(("weigh", "uniform"),)),
    Named("hanse", "hanse, temperature 0.02", changes=(("temperature", 0.02),)),
    Named("hanse", "hanse, temperature 0.1", changes=(("temperature", 0.1),)),
    Named("hanse", "hanse, no hard negatives", changes=(("hard_negatives", 0),)),
)


def fitting(world: World) -> list[Recipe]:
    """Those that make sense there: where questions are nobody's, nobody asks a model of its own."""
    if world.sites_ask:
        return list(RECIPES)
    alone = (SHARED.name, "each site alone")
    return [recipe for recipe in RECIPES if recipe.name not in alone]
