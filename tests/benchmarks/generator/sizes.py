"""What FedSearch-NLP's three configurations exchange: parameters, and bytes of a round.

The models are FLAN-T5's by their measures (T5 v1.1: Raffel et al. 2020; Chung et al. 2022) on
torch's meta device: no weight is drawn or loaded, and every parameter is counted as the generator
of this project would train it.

    python -m tests.benchmarks.generator.sizes [--write]

``--write`` puts the table into docs/results/generator.md, between its marks.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn
from transformers import T5Config, T5ForConditionalGeneration

from crypto.arrays import Float32
from daemon.learning.adaptations import Lora

PAGE: Final = Path(__file__).parents[3] / "docs" / "results" / "generator.md"
BEGIN, END = "<!-- sizes: begin -->\n", "<!-- sizes: end -->\n"
RANKS: Final = (8, 16)
TRANSFERS: Final = 4  # the paper's two clients, each down and up, a round
MIB: Final = 2**20
# d_model, d_ff, layers on each side, heads; keys of 64 values, words of which input and output
# do not share, and a gated GELU.
SIZES: Final = {
    "FLAN-T5-small": (512, 1024, 8, 6),
    "FLAN-T5-base": (768, 2048, 12, 12),
    "FLAN-T5-large": (1024, 2816, 24, 16),
}


@dataclass(frozen=True)
class Row:
    """A configuration of a model, and the values that one site sends."""

    model: str
    configuration: str
    weights: int
    sent: int

    @property
    def bytes_sent(self) -> int:
        """In float32."""
        return 4 * self.sent

    def line(self) -> str:
        """Of the table."""
        share = f"{100 * self.sent / self.weights:.2f} %"
        update, all_ = self.bytes_sent / MIB, TRANSFERS * self.bytes_sent / MIB
        return (
            f"| {self.model} | {self.configuration} | {self.sent:,} | {share} "
            f"| {update:,.2f} MiB | {all_:,.2f} MiB |"
        )


@cache
def rows() -> tuple[Row, ...]:
    """All weights, then projections and factors of each rank, of each model."""
    found = []
    for name in SIZES:
        weights = sum(one.numel() for one in model_of(name).parameters())
        found.append(Row(name, "A, all weights", weights, weights))
        for rank in RANKS:
            projected, trained = projections(name, rank), factors(name, rank)
            found.append(Row(name, f"B, all linear layers, rank {rank}", weights, projected))
            found.append(Row(name, f"C, queries and values, rank {rank}", weights, trained))
    return tuple(found)


def model_of(name: str) -> Any:
    """A FLAN-T5 without its weights."""
    width, inner, layers, heads = SIZES[name]
    config = T5Config(
        vocab_size=32128,
        d_model=width,
        d_kv=64,
        d_ff=inner,
        num_layers=layers,
        num_decoder_layers=layers,
        num_heads=heads,
        feed_forward_proj="gated-gelu",
    )
    with torch.device("meta"):
        model = T5ForConditionalGeneration(config)
        # FLAN-T5's files have a matrix of their own; the class alone makes one of the two.
        model.lm_head.weight = nn.Parameter(torch.empty_like(model.lm_head.weight))
    return model.requires_grad_(False)


def factors(name: str, rank: int) -> int:
    """Values of C, counted in the model that peft has adapted."""
    return CountedLora(model_of(name), "", ("q", "v"), rank=rank, alpha=32).shape_manifest.total


class CountedLora(Lora):
    """One without values: there is nothing to load them into."""

    def load_vector(self, vector: Float32) -> None:
        """Nothing."""


def projections(name: str, rank: int) -> int:
    """Values of B, as `ProjectedWeights` has them: it reads weights, which these models lack."""
    model = model_of(name)
    words = model.get_output_embeddings()
    layers = [one for one in model.modules() if isinstance(one, nn.Linear) and one is not words]
    return sum(rank * (one.in_features + one.out_features) for one in layers)


def table() -> str:
    """In Markdown."""
    columns = ("model", "what is exchanged", "values", "of all", "an update", "four of them")
    head = f"| {' | '.join(columns)} |"
    return "\n".join([head, "|---|---|---|---|---|---|", *(row.line() for row in rows())]) + "\n"


def main() -> None:
    """Print the table, or write it."""
    made = table()
    if "--write" not in sys.argv[1:]:
        print(made, end="")
        return
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{BEGIN}{made}{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
