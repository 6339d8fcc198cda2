"""Recipes: named sets of choices about how a federation learns.

A recipe fills in what the settings file leaves open, so every choice can also be
made alone. The axes' own defaults are plain federated averaging of a head; each
recipe says what it does otherwise. An axis that every site of a round must know stands
under its name in the plan, too, and is bounded there. What the axes mean, and what goes wrong when
one is off, stands in ``fedd.example.toml``; where each recipe departs from its
paper, in docs/decisions/0018.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Any, Final, Literal

from annotated_types import Ge, Gt, Le

Adapt = Literal["head", "lora", "lora_server", "full"]
Negatives = Literal["static", "bm25", "in_batch"]
Batches = Literal["random", "topic"]
Distill = Literal["none", "pairs", "matrix"]
StartFrom = Literal["global", "local"]
Aggregate = Literal["fedavg", "fedavgm", "fedadam"]
Weigh = Literal["num_examples", "uniform"]


@dataclass(frozen=True)
class PersonalTraits:
    """What settings must know of a personal layer; the layer itself is in `daemon.personal`.

    ``owns_passages``: passages are embedded through it, as at no other site. ``adapt``:
    what it needs beneath it; None: whatever there is.
    """

    owns_passages: bool = False
    adapt: Adapt | None = None


# By the names of ``retriever.personal``.
PERSONAL: Final[Mapping[str, PersonalTraits]] = {
    "none": PersonalTraits(),
    "tiered_head": PersonalTraits(owns_passages=True, adapt="head"),
    "query_encoder": PersonalTraits(),
    "mixture": PersonalTraits(owns_passages=True),
}


# With ``adapt = "lora_server"``: the one choice that another axis has, and why.
WITH_LORA_SERVER: Final[Mapping[str, tuple[str, str]]] = {
    "start_from": (
        "global",
        "what is exchanged is a projection on the parent version's factors, which a student has "
        "left",
    ),
    "aggregate": (
        "fedavg",
        "a round trains one of two factors, and momentum goes on moving the one that sites hold "
        "fixed",
    ),
}


@dataclass(frozen=True)
class DepthAxes:
    """``[depth]``: how DATE's depth scheduler and its distillation behave.

    As in pFedRAG's Table 8, but for ``kd_learning_rate`` (docs/decisions/0018).

    ``window``: rounds T_w; ``stable_rounds`` tau_s above the band for an upgrade,
    ``low_rounds`` tau_l below it for a downgrade; ``cooling_rounds`` T_cool without
    a change after one; ``momentum_weight`` w_L of Eq. 4 (w_O is what it lacks to 1).
    ``kd_temperature`` tau_KD, ``kd_epochs`` and ``kd_learning_rate``: of the
    distillation from the old tier into the new one.
    """

    window: Annotated[int, Ge(2), Le(1000)] = 5
    stable_rounds: Annotated[int, Ge(1), Le(1000)] = 3
    low_rounds: Annotated[int, Ge(1), Le(1000)] = 4
    cooling_rounds: Annotated[int, Ge(0), Le(1000)] = 5
    momentum_weight: Annotated[float, Ge(0), Le(1)] = 0.8
    kd_temperature: Annotated[float, Ge(0.01), Le(100)] = 3.0
    kd_epochs: Annotated[int, Ge(1), Le(10_000)] = 50
    kd_learning_rate: Annotated[float, Gt(0), Le(1)] = 1e-3


@dataclass(frozen=True)
class DepthOptions(DepthAxes):
    """As a site trains: also the lowest and highest score S_i among the sites (Eq. 5).

    ``complexity_range``: None while unknown; the tier is base then.
    """

    complexity_range: tuple[float, float] | None = None


@dataclass(frozen=True)
class RetrieverAxes:
    """``[retriever]``: what is trained, and what of it each site keeps to itself."""

    adapt: Adapt = "head"
    personal: str = "none"


@dataclass(frozen=True)
class GeneratorAxes:
    """``[generator]``: what of a language model is trained, and how it reads; equal at all sites.

    ``adapt``: FedSearch-NLP's configurations: low-rank factors (``lora``, C), linear layers in
    full of which a projection of rank ``lora_rank`` is exchanged (``lora_server``, B), all weights
    (``full``, A). ``lora_targets``: linear layers by the ends of their names; none: the query and
    value projections of every attention layer. ``accumulation``: batches a step;
    ``checkpointing``: activations are computed again instead of kept.
    """

    adapt: Literal["lora", "lora_server", "full"] = "lora"
    lora_rank: Annotated[int, Ge(1), Le(256)] = 8
    lora_alpha: Annotated[int, Ge(1), Le(1024)] = 16
    lora_targets: tuple[str, ...] = ()
    lora_dropout: Annotated[float, Ge(0), Le(0.9)] = 0.0
    prompt_tokens: Annotated[int, Ge(16), Le(1_000_000)] = 512
    answer_tokens: Annotated[int, Ge(1), Le(8192)] = 128
    accumulation: Annotated[int, Ge(1), Le(4096)] = 1
    checkpointing: bool = False


@dataclass(frozen=True)
class TrainingAxes:
    """``[training]``: what every round has."""

    local_epochs: int = 4
    batch_size: int = 32
    learning_rate: float = 1e-4
    temperature: float = 0.05
    hard_negatives: int = 4


@dataclass(frozen=True)
class LocalAxes:
    """``[learning]``, as far as it is about the training of one site."""

    negatives: Negatives = "static"
    bm25_rounds: int = 0
    random_negatives: int = 0
    batches: Batches = "random"
    distill: Distill = "none"
    kd_weight: float = 1.0
    proximal: float = 0.0
    start_from: StartFrom = "global"
    dropout: float = 0.0
    weight_decay: float = 0.0


@dataclass(frozen=True, kw_only=True)
class StepOptions:
    """``[learning]``, as far as it is about one rule of the step alone; as in `ServerOptions`."""

    momentum: float = 0.9
    second_momentum: float = 0.99
    adam_tau: float = 1e-3


@dataclass(frozen=True)
class ServerOptions(StepOptions):
    """What becomes of the mean update (daemon/learning/server_step.py).

    ``rule``: ``fedavg`` adds it; ``fedavgm`` adds a running sum of such means
    (momentum); ``fedadam`` scales that by a running mean of their squares.
    ``learning_rate`` eta, ``momentum`` beta_1, ``second_momentum`` beta_2 and
    ``adam_tau`` (added to the root: the smaller, the larger the steps of values
    that hardly move).
    """

    rule: Aggregate = "fedavg"
    learning_rate: float = 1.0


@dataclass(frozen=True)
class AloneAxes:
    """``[learning]``, as far as each site goes its own way: no plan has it, and no run chooses it.

    ``local_only_rounds``: that a mixture's own half is trained for.
    """

    local_only_rounds: Annotated[int, Ge(1), Le(1000)] = 3


@dataclass(frozen=True)
class LearningAxes(AloneAxes, LocalAxes):
    """``[learning]``: also how updates count, and what becomes of their mean."""

    weigh: Weigh = "num_examples"
    aggregate: Aggregate = ServerOptions.rule
    server_learning_rate: float = ServerOptions.learning_rate


@dataclass(frozen=True)
class Recipe(LearningAxes, TrainingAxes, RetrieverAxes):
    """One choice on every axis of learning; proto/federation.proto says units and bounds."""

    @property
    def settings(self) -> dict[str, dict[str, Any]]:
        """The choices as tables of a settings file."""
        return {
            table: {axis.name: getattr(self, axis.name) for axis in fields(axes)}
            for table, axes in TABLES.items()
        }


TABLES: Final[Mapping[str, type[Any]]] = {
    "retriever": RetrieverAxes,
    "training": TrainingAxes,
    "learning": LearningAxes,
}
"""The axes that stand in each table of a settings file."""

RecipeName = Literal["hanse", "fedavg", "fede4rag", "fedsearch", "pfedrag", "pdd-as2"]

RECIPES: Final[Mapping[str, Recipe]] = {
    # The combination that does best on seven institutions: docs/results/learning.md.
    "hanse": Recipe(personal="mixture", local_epochs=1, local_only_rounds=12),
    # What the others are measured against.
    "fedavg": Recipe(),
    # FedE4RAG: all weights, each site's own student, the global model as its teacher (Eq. 8).
    "fede4rag": Recipe(
        adapt="full",
        learning_rate=2e-5,
        negatives="in_batch",
        hard_negatives=0,
        distill="pairs",
        start_from="local",
    ),
    # FedSearch-NLP, configuration C: factors inside the encoder.
    "fedsearch": Recipe(adapt="lora", learning_rate=2e-4, negatives="in_batch", hard_negatives=0),
    # pFedRAG: DATE. Five hard negatives and five drawn at random; equal votes (Eq. 9).
    "pfedrag": Recipe(
        personal="tiered_head",
        hard_negatives=5,
        random_negatives=5,
        dropout=0.1,
        weigh="uniform",
    ),
    # PDD-AS2: words for a start, then what the last version found; then a query encoder
    # of each site's own, trained against other sites' passages.
    "pdd-as2": Recipe(
        adapt="full",
        personal="query_encoder",
        learning_rate=2e-5,
        bm25_rounds=1,
        hard_negatives=1,
    ),
}
DEFAULT_RECIPE: Final[RecipeName] = "hanse"
DEFAULT_ENCODER: Final = "sentence-transformers/all-MiniLM-L6-v2"
