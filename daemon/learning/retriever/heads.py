"""The shared head: a residual layer on the features of a frozen encoder."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from crypto.arrays import Float32
from daemon.learning.options import LearningError
from daemon.learning.parameters import Exchanged, Parameters, uniform
from daemon.learning.retriever.encoder import Encoder, Texts
from daemon.learning.retriever.reading import Side

_HEAD_WIDTH = 4  # times the dimension (pFedRAG, section 4.1)
_ROWS = 4096  # rows through the head at a time when embedding a corpus


class Dropout:
    """Dropout with a generator of its own: the same seed drops the same values.

    Source: Srivastava et al. 2014; scaled so that the mean stays.
    """

    def __init__(self, rate: float, seed: int) -> None:
        if not 0.0 <= rate < 1.0:
            raise LearningError(f"a dropout rate lies in [0, 1), got {rate}")
        self._rate = rate
        self._generator = torch.Generator().manual_seed(seed % 2**63)

    def __call__(self, x: Tensor) -> Tensor:
        """[...] -> [...], each value 0 with the rate's probability, else x / (1 - rate)."""
        if self._rate == 0.0:
            return x
        mask = torch.rand(x.shape, generator=self._generator) >= self._rate
        return x * mask.to(x.device, x.dtype) / (1.0 - self._rate)


class ResidualHead(nn.Module):
    """x + down(GELU(up(dropout(LayerNorm(x))))), normalised; the identity while ``down`` is zero.

    Source: the shared layer of pFedRAG section 4.1, made residual.
    """

    def __init__(self, dimension: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dimension)
        self.up = nn.Linear(dimension, _HEAD_WIDTH * dimension)
        self.down = nn.Linear(_HEAD_WIDTH * dimension, dimension)

    def forward(self, x: Tensor, dropout: Dropout | None = None) -> Tensor:
        """[n, d] rows of length 1 -> [n, d] rows of length 1."""
        normed = self.norm(x)
        wide = functional.gelu(self.up(dropout(normed) if dropout else normed))  # [n, 4d]
        return functional.normalize(x + self.down(wide), dim=-1)  # [n, d]


class HeadRetriever(Exchanged):
    """A residual head on frozen features; queries and passages go through the same one.

    The features are computed once and cached, so a local epoch is arithmetic on
    matrices of a few thousand rows. For d = 384: 1,182,336 shared values.
    """

    uses_features = True

    def __init__(self, encoder: Encoder) -> None:
        self.encoder = encoder
        self._head = ResidualHead(encoder.dimension).to(encoder.device)
        self._dropout: Dropout | None = None
        self._shared = Parameters(
            f"{encoder.digest.hex()}/head-v1", dict(self._head.named_parameters())
        )
        self.load_vector(self.initial_vector())

    def initial_vector(self) -> Float32:
        """LayerNorm as it is made, ``up`` uniform, ``down`` zero: the identity."""
        manifest = self._shared.manifest
        vector = np.zeros(manifest.total, dtype=np.float32)
        parts = manifest.split(vector)
        parts["norm.weight"][:] = 1.0
        bound = 1.0 / math.sqrt(self.encoder.dimension)
        parts["up.weight"][:] = uniform(parts["up.weight"].shape, bound, stream=0)
        parts["up.bias"][:] = uniform(parts["up.bias"].shape, bound, stream=1)
        return vector

    def begin(self, *, round: int, dropout: float, seed: int) -> None:
        """Make ready to train: dropout applies in `forward` from here on."""
        del round
        self._dropout = Dropout(dropout, seed)

    def forward(self, texts: Texts, rows: NDArray[np.int64]) -> Tensor:
        """Embed some rows of ``texts`` from their features, differentiably: [len(rows), d]."""
        if texts.features is None:
            raise LearningError("the head trains on features: encode the texts first")
        frozen = torch.from_numpy(texts.features[rows]).to(self.encoder.device)  # [n, d]
        return self._through(frozen, self._dropout)

    def embed_queries(self, texts: Sequence[str], features: Float32 | None = None) -> Float32:
        """Embed queries, from their cached features when given: float32 [n, d]."""
        return self._embed(texts, features, self.encoder.reading.query)

    def embed_passages(self, texts: Sequence[str], features: Float32 | None = None) -> Float32:
        """Embed passages, from their cached features when given: float32 [n, d]."""
        return self._embed(texts, features, self.encoder.reading.passage)

    def _embed(self, texts: Sequence[str], features: Float32 | None, side: Side) -> Float32:
        frozen = self.encoder.encode(texts, side=side) if features is None else features
        out = np.zeros_like(frozen, dtype=np.float32)
        with torch.inference_mode():
            for start in range(0, len(frozen), _ROWS):
                rows = torch.from_numpy(np.ascontiguousarray(frozen[start : start + _ROWS]))
                embedded = self._through(rows.to(self.encoder.device), None)
                out[start : start + _ROWS] = embedded.cpu().numpy()
        return out

    def _through(self, frozen: Tensor, dropout: Dropout | None) -> Tensor:
        """[n, d] frozen features -> [n, d] embeddings, rows of length 1."""
        embedded: Tensor = self._head(frozen, dropout)
        return embedded
