"""What is compared: every table's rows, by name."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from config.recipes import DepthOptions
from crypto.privacy import NoiseTerms
from daemon.learning.options import TrainingOptions
from daemon.learning.retriever.peer_negatives import AskingTerms
from tests.learning_bench.recipes.exchange import Training
from tests.learning_bench.recipes.named import Named
from tests.learning_bench.recipes.recipes import (
    Alone,
    Bm25,
    Centralised,
    Federated,
    Recipe,
    Vanilla,
)
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
# A federation's sites under one another, and by themselves: where sites are what changes.
SPLIT_NAMES = ("each site alone", "FedAvg", SHARED.name, "hanse")

_ONE: tuple[tuple[str, Any], ...] = (("local_epochs", 1),)
# `hanse` trains 12 epochs together and 12 alone, in rounds of one epoch, each of which mines
# negatives anew; the others 12 in rounds of four. The others in rounds of one (FedAvg is then
# the shared version of `hanse`); and the same work without a federation: twice the epochs, or the
# average of two runs of each site's own.
_FINE = Training(TrainingOptions(local_epochs=1), rounds=12)
_TWICE = Training(rounds=6)
CONTROLS: tuple[Recipe, ...] = (
    Alone("each site alone, rounds of one epoch", "each", _FINE),
    Centralised("centralised, rounds of one epoch", _FINE),
    Named("pfedrag", "pfedrag, rounds of one epoch", changes=_ONE),
    Named("pdd-as2", "pdd-as2 (head), rounds of one epoch", changes=_ONE),
    Alone("each site alone, 24 epochs", "each", _TWICE),
    Alone("each site alone, two runs averaged", "each", averaged=2),
    Centralised("centralised, 24 epochs", _TWICE),
    Federated("FedAvg, 24 epochs", _TWICE),
)

# Those that train inside the encoder, on the small sites; an epoch in all, where the name says
# nothing else.
_LORA = Training(
    TrainingOptions(local_epochs=1, learning_rate=2e-4, negatives="in_batch", hard_negatives=0),
    rounds=1,
)
LORA = Federated("FedAvg (LoRA)", _LORA, adapt="lora")
ENCODER_RECIPES: tuple[Recipe, ...] = (
    Bm25(),
    Vanilla(),
    Federated(),
    Centralised(),
    Alone("each site alone", "each"),
    Named("hanse", "hanse"),
    LORA,
    Named(
        "fedsearch",
        "fedsearch (server-only LoRA)",
        "lora_server",
        1,
        (*_ONE, ("learning_rate", 2e-5)),
    ),
    Named("fede4rag", "fede4rag (all weights)", None, 1, _ONE),
    Named("pdd-as2", "pdd-as2 (all weights), shared version", None, 1, _ONE, stage_two=False),
    Centralised("centralised (LoRA)", _LORA, adapt="lora"),
    Alone("each site alone (LoRA)", "each", _LORA, adapt="lora"),
    Federated("FedAvg (LoRA), four epochs", replace(_LORA, rounds=4), adapt="lora"),
)


QUICK_ENCODERS = 8  # of those above, the first


def _shared(what: str, *changes: tuple[str, Any], **choices: Any) -> Named:
    name = f"{SHARED.name}, {what}"
    return Named("hanse", name, changes=changes, stage_two=False, **choices)


def noise(multiplier: float) -> NoiseTerms:
    """Of seven sites one may look: the noise of five others is unknown to it and to us.

    The clip norm is what an epoch of the largest site's training comes to here.
    """
    return NoiseTerms(clip_norm=0.7, multiplier=multiplier, sharers=5)


MULTIPLIERS = (0.001, 0.01, 0.1, 1.0)
# With the paper's window of five rounds the scheduler first judges after fifteen.
_SOON = DepthOptions(window=2, stable_rounds=1, low_rounds=2, cooling_rounds=2)
ABLATIONS: tuple[Recipe, ...] = (
    Named("pdd-as2", "pdd-as2 (head), no stage 2", stage_two=False),
    Named("pdd-as2", "pdd-as2 (head), local negatives in stage 2", disclosure=None),
    Named("pdd-as2", "pdd-as2 (head), noisy negatives", disclosure=AskingTerms("noisy")),
    Named("pdd-as2", "pdd-as2 (head), bucketed negatives", disclosure=AskingTerms("bucket")),
    _shared("masked", exchange="masking"),
    _shared("in the clear", exchange="in the clear"),
    _shared("8 bits a value", bits=8),
    _shared("12 bits a value", bits=12),
    *(_shared(f"noise multiplier {z:g}", noise=noise(z)) for z in MULTIPLIERS),
    _shared("no hard negatives", ("hard_negatives", 0)),
    _shared("1 hard negative", ("hard_negatives", 1)),
    _shared("8 hard negatives", ("hard_negatives", 8)),
    _shared("temperature 0.02", ("temperature", 0.02)),
    _shared("temperature 0.1", ("temperature", 0.1)),
    _shared("temperature 1", ("temperature", 1.0)),
    _shared("topic batches", ("batches", "topic")),
    _shared("uniform weights", ("weigh", "uniform")),
    _shared("KD-GLE over pairs", ("distill", "pairs")),
    _shared("FedProx, mu 0.01", ("proximal", 0.01)),
    _shared("server momentum", ("aggregate", "fedavgm"), ("server_learning_rate", 0.3)),
    Named("pfedrag", "pfedrag, rounds of one epoch, scheduler at work", changes=_ONE, depth=_SOON),
    Named("pfedrag", "pfedrag, no personal layer", stage_two=False),
)


def changed(ablation: Recipe) -> str:
    """The name of the recipe that it is a change of."""
    bases = [
        recipe.name
        for recipe in (*RECIPES, *CONTROLS, *ABLATIONS)
        if ablation.name.startswith(f"{recipe.name}, ")
    ]
    return max(bases, key=len)


def fitting(world: World) -> list[Recipe]:
    """Those that make sense there: where questions are nobody's, nobody asks a model of its own."""
    if world.sites_ask:
        return list(RECIPES)
    alone = (SHARED.name, "each site alone")
    return [recipe for recipe in RECIPES if recipe.name not in alone]
