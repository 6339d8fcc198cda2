"""Retrievers that run the encoder in every step: LoRA, all weights, projected weights."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from crypto.arrays import Float32
from daemon.learning.adaptations import Adaptation, Adapted, AllWeights, Lora, ProjectedWeights
from daemon.learning.options import LearningError
from daemon.learning.retriever.encoder import Encoder, Texts

# Query and value projections under the names that encoder families give them.
_LORA_TARGETS = {
    "bert": ("query", "value"),
    "roberta": ("query", "value"),
    "xlm-roberta": ("query", "value"),
    "electra": ("query", "value"),
    "mpnet": ("q", "v"),
    "distilbert": ("q_lin", "v_lin"),
}
_POOLER = "pooler"  # makes a vector of the first token, which no pooling here asks for


class _TextRetriever(Adapted):
    """What these have in common: every step runs an adapted copy of the encoder on texts.

    Minutes on a CPU where the head needs seconds. The encoder itself stays untouched.
    """

    uses_features = False

    def __init__(self, encoder: Encoder, adaptation: Adaptation) -> None:
        super().__init__(adaptation)
        self.encoder = encoder

    def forward(self, texts: Texts, rows: NDArray[np.int64]) -> Tensor:
        """Embed some rows of ``texts`` with the adapted encoder, differentiably: [len(rows), d]."""
        read = [texts.texts[row] for row in rows]
        return self.encoder.embed(self.adaptation.model, read, texts.side)

    def embed_queries(self, texts: Sequence[str], features: Float32 | None = None) -> Float32:
        """Embed queries; frozen features are of no use here and are ignored."""
        del features
        side = self.encoder.reading.query
        return self.encoder.encode(texts, model=self.adaptation.model, side=side)

    def embed_passages(self, texts: Sequence[str], features: Float32 | None = None) -> Float32:
        """Embed passages; frozen features are of no use here and are ignored."""
        del features
        side = self.encoder.reading.passage
        return self.encoder.encode(texts, model=self.adaptation.model, side=side)


class LoraRetriever(_TextRetriever):
    """LoRA on the query and value projections of every attention layer."""

    def __init__(self, encoder: Encoder, rank: int = 8, alpha: int = 16) -> None:
        kind = str(encoder.model.config.model_type)
        if kind not in _LORA_TARGETS:
            raise LearningError(
                f"adapt = 'lora' does not know the attention layers of a {kind!r} encoder "
                f"(it knows {', '.join(_LORA_TARGETS)}): use adapt = 'head'"
            )
        family = f"{encoder.digest.hex()}/lora-v1"
        model = copy.deepcopy(encoder.model)
        super().__init__(encoder, Lora(model, family, _LORA_TARGETS[kind], rank=rank, alpha=alpha))


class FullRetriever(_TextRetriever):
    """All weights of the encoder train and are exchanged."""

    def __init__(self, encoder: Encoder) -> None:
        family = f"{encoder.digest.hex()}/full-v1"
        super().__init__(encoder, AllWeights(copy.deepcopy(encoder.model), family, _is_asked))


class LoraServerRetriever(_TextRetriever):
    """The weights of all linear layers train in full; their rank-r projection is exchanged."""

    def __init__(self, encoder: Encoder, rank: int = 8) -> None:
        family = f"{encoder.digest.hex()}/lora-server-v1"
        model = copy.deepcopy(encoder.model)
        super().__init__(encoder, ProjectedWeights(model, family, rank, _is_asked))


def _is_asked(name: str) -> bool:
    return not name.startswith(_POOLER)
