"""Retrievers: an encoder with the parameters a federation trains on top of it.

All kinds exchange one flat float32 vector, described by a `ShapeManifest`, and
all start as exactly their encoder, so that a fresh site is never worse than
that. Starting values come from the raw bits of a counter-based generator
(Philox) by exact arithmetic: every site has the same bits before the first
round, whatever its machine or its version of torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from crypto.arrays import Float32
from daemon.learning.options import LearningError
from daemon.learning.retriever.adaptations import FullRetriever, LoraRetriever, LoraServerRetriever
from daemon.learning.retriever.encoder import Encoder, Texts
from daemon.learning.retriever.heads import HeadRetriever
from daemon.state.versions import ShapeManifest


class Retriever(Protocol):
    """What training, indexing and answering use of a retriever."""

    encoder: Encoder

    @property
    def uses_features(self) -> bool:
        """Whether cached encoder features stand in for the texts."""

    @property
    def shape_manifest(self) -> ShapeManifest:
        """How the flat vector falls into parameter groups."""

    def initial_vector(self) -> Float32:
        """The starting vector [D], bit-identical on every machine."""

    def load_vector(self, vector: Float32) -> None:
        """Make a flat vector [D] the current parameters; VersionError if it has another length."""

    def vector(self) -> Float32:
        """The current parameters as one flat vector [D] (a copy)."""

    def begin(self, *, round: int, dropout: float, seed: int) -> None:
        """Make ready to train in a round, counted from 1."""

    def parameters(self) -> list[nn.Parameter]:
        """What an optimiser trains: shared parameters, and personal ones where there are any."""

    def shared_parameters(self) -> list[nn.Parameter]:
        """What of it the others learn of, in the order of the vector's groups."""

    def forward(self, texts: Texts, rows: NDArray[np.int64]) -> Tensor:
        """Embed some rows of ``texts``, differentiably: [len(rows), d], rows of length 1."""

    def embed_queries(self, texts: Sequence[str], features: Float32 | None = None) -> Float32:
        """Embed queries with the current parameters: float32 [n, d], rows of length 1."""

    def embed_passages(self, texts: Sequence[str], features: Float32 | None = None) -> Float32:
        """Embed passages with the current parameters: float32 [n, d], rows of length 1."""


def adapted(encoder: Encoder, adapt: str, *, rank: int = 8, alpha: int = 16) -> Retriever:
    """A retriever of the given adaptation on an encoder that is loaded already."""
    if adapt == "head":
        return HeadRetriever(encoder)
    if adapt == "lora":
        return LoraRetriever(encoder, rank, alpha)
    if adapt == "lora_server":
        return LoraServerRetriever(encoder, rank)
    if adapt == "full":
        return FullRetriever(encoder)
    raise LearningError(
        f"adapt = {adapt!r} is unknown: use 'head' or 'lora', 'lora_server' or 'full'"
    )
