"""Recipes: named sets of choices about how a federation learns.

A recipe fills in what the settings file leaves open, so every choice can also be
made alone. `Recipe`'s own defaults are plain federated averaging of a head; each
recipe says what it does otherwise. What the axes mean, and what goes wrong when
one is off, stands in ``fedd.example.toml``; where each recipe departs from its
paper, in docs/decisions/0018.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal

Adapt = Literal["head", "lora", "lora_server", "full"]
Personal = Literal["none", "tiered_head", "query_encoder", "mixture"]
Negatives = Literal["static", "bm25", "in_batch"]
Batches = Literal["random", "topic"]
Distill = Literal["none", "pairs", "matrix"]
StartFrom = Literal["global", "local"]
Aggregate = Literal["fedavg", "fedavgm", "fedadam"]
Weigh = Literal["num_examples", "uniform"]


@dataclass(frozen=True)
class Recipe:
    """One choice on every axis of learning; units and bounds are those of the settings."""

    adapt: Adapt = "head"
    personal: Personal = "none"
    local_epochs: int = 4
    batch_size: int = 32
    learning_rate: float = 1e-4
    temperature: float = 0.05
    hard_negatives: int = 4
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
    weigh: Weigh = "num_examples"
    own_rounds: int = 3
    aggregate: Aggregate = "fedavg"
    server_learning_rate: float = 1.0

    @property
    def settings(self) -> dict[str, dict[str, Any]]:
        """The choices as tables of a settings file."""
        tables: dict[str, dict[str, Any]] = {"retriever": {}, "training": {}, "learning": {}}
        for name, value in asdict(self).items():
            tables[_TABLES.get(name, "learning")][name] = value
        return tables


_TABLES = {
    **dict.fromkeys(("adapt", "personal"), "retriever"),
    **dict.fromkeys(
        ("local_epochs", "batch_size", "learning_rate", "temperature", "hard_negatives"), "training"
    ),
}

RecipeName = Literal["hanse", "fedavg", "fede4rag", "fedsearch", "pfedrag", "pdd-as2"]

RECIPES: Final[Mapping[str, Recipe]] = {
    # The combination that does best on seven institutions: docs/results/learning.md.
    "hanse": Recipe(personal="mixture", local_epochs=1, own_rounds=12),
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
