"""Retrievers: an encoder with the parameters a federation trains on top of it.

Both kinds exchange one flat float32 vector, described by a `ShapeManifest`, and
both start as exactly their encoder, so that a fresh site is never worse than
that. Starting values come from the raw bits of a counter-based generator
(Philox) by exact arithmetic: every site has the same bits before the first
round, whatever its machine or its version of torch.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.nn import functional

from daemon.learning.encoder import Encoder, Float32
from daemon.learning.spec import RetrieverSpec
from daemon.learning.terms import LearningError
from daemon.versions import ShapeManifest

_HEAD_WIDTH = 4  # times the dimension (pFedRAG, section 4.1)
_LORA_RANK = 8
_LORA_ALPHA = 16
# Query and value projections under the names that encoder families give them.
_LORA_TARGETS = {
    "bert": ("query", "value"),
    "roberta": ("query", "value"),
    "xlm-roberta": ("query", "value"),
    "electra": ("query", "value"),
    "mpnet": ("q", "v"),
    "distilbert": ("q_lin", "v_lin"),
}
_START_SEED = 0x48414E5345  # "HANSE"; part of the family: changing it needs a new version name
_ROWS = 4096  # rows through the head at a time when embedding a corpus


@dataclass(frozen=True)
class Texts:
    """Texts of a training set and, for retrievers that use them, their frozen features.

    ``features``: float32 [n, d] from the encoder, row i for ``texts[i]``.
    """

    texts: Sequence[str]
    features: Float32 | None = None


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

    def parameters(self) -> list[nn.Parameter]:
        """What an optimiser trains."""

    def forward(self, texts: Texts, rows: NDArray[np.int64]) -> Tensor:
        """Embed some rows of ``texts``, differentiably: [len(rows), d], rows of length 1."""

    def embed_queries(self, texts: Sequence[str], features: Float32 | None = None) -> Float32:
        """Embed queries with the current parameters: float32 [n, d], rows of length 1."""

    def embed_passages(self, texts: Sequence[str], features: Float32 | None = None) -> Float32:
        """Embed passages with the current parameters: float32 [n, d], rows of length 1."""


def open_retriever(spec: RetrieverSpec) -> Retriever:
    """Load the encoder and put the chosen adaptation on it, at its starting vector.

    Raises EncoderError when the encoder cannot be had, LearningError when the
    adaptation does not fit it.
    """
    encoder = Encoder.load(
        spec.encoder, max_tokens=spec.max_tokens, device=spec.device, threads=spec.threads
    )
    return adapted(encoder, spec.adapt)


def adapted(encoder: Encoder, adapt: str) -> Retriever:
    """A retriever of the given adaptation on an encoder that is loaded already."""
    if adapt == "head":
        return HeadRetriever(encoder)
    if adapt == "lora":
        return LoraRetriever(encoder)
    raise LearningError(f"adapt = {adapt!r} is unknown: use 'head' or 'lora'")


class ResidualHead(nn.Module):
    """x + down(GELU(up(LayerNorm(x)))), normalised; the identity while ``down`` is zero.

    Source: the shared layer of pFedRAG section 4.1, made residual.
    """

    def __init__(self, dimension: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dimension)
        self.up = nn.Linear(dimension, _HEAD_WIDTH * dimension)
        self.down = nn.Linear(_HEAD_WIDTH * dimension, dimension)

    def forward(self, x: Tensor) -> Tensor:
        """[n, d] rows of length 1 -> [n, d] rows of length 1."""
        wide = functional.gelu(self.up(self.norm(x)))  # [n, 4d]
        return functional.normalize(x + self.down(wide), dim=-1)  # [n, d]


class _Parameters:
    """Named trainable parameters as one flat vector, in the order of their names."""

    def __init__(self, family: str, named: dict[str, nn.Parameter]) -> None:
        self.named = dict(sorted(named.items()))
        self.manifest = ShapeManifest(
            family=family,
            groups=tuple((name, tuple(value.shape)) for name, value in self.named.items()),
        )

    def load(self, vector: Float32) -> None:
        parts = self.manifest.split(np.asarray(vector, dtype=np.float32))
        with torch.no_grad():
            for name, value in self.named.items():
                # A copy: training must not write into the caller's array.
                value.copy_(torch.from_numpy(parts[name].copy()))

    def flat(self) -> Float32:
        values = [value.detach().cpu().numpy().reshape(-1) for value in self.named.values()]
        return np.concatenate(values).astype(np.float32)


class HeadRetriever:
    """A residual head on frozen features; queries and passages go through the same one.

    The features are computed once and cached, so a local epoch is arithmetic on
    matrices of a few thousand rows. For d = 384: 1,182,336 shared values.
    """

    uses_features = True

    def __init__(self, encoder: Encoder) -> None:
        self.encoder = encoder
        self._head = ResidualHead(encoder.dimension).to(encoder.device)
        self._parameters = _Parameters(
            f"{encoder.digest.hex()}/head-v1", dict(self._head.named_parameters())
        )
        self.load_vector(self.initial_vector())

    @property
    def shape_manifest(self) -> ShapeManifest:
        """How the flat vector falls into parameter groups."""
        return self._parameters.manifest

    def initial_vector(self) -> Float32:
        """LayerNorm as it is made, ``up`` uniform, ``down`` zero: the identity."""
        manifest = self._parameters.manifest
        vector = np.zeros(manifest.total, dtype=np.float32)
        parts = manifest.split(vector)
        parts["norm.weight"][:] = 1.0
        bound = 1.0 / math.sqrt(self.encoder.dimension)
        parts["up.weight"][:] = _uniform(parts["up.weight"].shape, bound, stream=0)
        parts["up.bias"][:] = _uniform(parts["up.bias"].shape, bound, stream=1)
        return vector

    def load_vector(self, vector: Float32) -> None:
        """Make a flat vector [D] the current parameters."""
        self._parameters.load(vector)

    def vector(self) -> Float32:
        """The current parameters as one flat vector [D] (a copy)."""
        return self._parameters.flat()

    def parameters(self) -> list[nn.Parameter]:
        """What an optimiser trains."""
        return list(self._parameters.named.values())

    def forward(self, texts: Texts, rows: NDArray[np.int64]) -> Tensor:
        """Embed some rows of ``texts`` from their features, differentiably: [len(rows), d]."""
        if texts.features is None:
            raise LearningError("the head trains on features: encode the texts first")
        frozen = torch.from_numpy(texts.features[rows]).to(self.encoder.device)  # [n, d]
        embedded: Tensor = self._head(frozen)
        return embedded

    def embed_queries(self, texts: Sequence[str], features: Float32 | None = None) -> Float32:
        """Embed queries, from their cached features when given: float32 [n, d]."""
        return self._embed(texts, features)

    def embed_passages(self, texts: Sequence[str], features: Float32 | None = None) -> Float32:
        """Embed passages, from their cached features when given: float32 [n, d]."""
        return self._embed(texts, features)

    def _embed(self, texts: Sequence[str], features: Float32 | None) -> Float32:
        frozen = self.encoder.encode(texts) if features is None else features
        out = np.zeros_like(frozen, dtype=np.float32)
        with torch.inference_mode():
            for start in range(0, len(frozen), _ROWS):
                rows = torch.from_numpy(np.ascontiguousarray(frozen[start : start + _ROWS]))
                out[start : start + _ROWS] = self._head(rows.to(self.encoder.device)).cpu().numpy()
        return out


class LoraRetriever:
    """LoRA on the query and value projections of every attention layer.

    Trains on texts: every step runs the encoder, minutes on a CPU where the head
    needs seconds. The encoder itself stays untouched (an adapted copy is kept).
    """

    uses_features = False

    def __init__(self, encoder: Encoder) -> None:
        self.encoder = encoder
        kind = str(encoder.model.config.model_type)
        if kind not in _LORA_TARGETS:
            raise LearningError(
                f"adapt = 'lora' does not know the attention layers of a {kind!r} encoder "
                f"(it knows {', '.join(_LORA_TARGETS)}): use adapt = 'head'"
            )
        config = LoraConfig(
            r=_LORA_RANK,
            lora_alpha=_LORA_ALPHA,
            lora_dropout=0.0,
            bias="none",
            target_modules=list(_LORA_TARGETS[kind]),
        )
        self._model: Any = get_peft_model(copy.deepcopy(encoder.model), config).eval()
        trainable = {n: p for n, p in self._model.named_parameters() if p.requires_grad}
        self._parameters = _Parameters(
            f"{encoder.digest.hex()}/lora-v1-r{_LORA_RANK}-a{_LORA_ALPHA}", trainable
        )
        self.load_vector(self.initial_vector())

    @property
    def shape_manifest(self) -> ShapeManifest:
        """How the flat vector falls into parameter groups."""
        return self._parameters.manifest

    def initial_vector(self) -> Float32:
        """A uniform, B zero (Hu et al. 2021, section 4.1): the encoder as it is."""
        manifest = self._parameters.manifest
        vector = np.zeros(manifest.total, dtype=np.float32)
        for stream, (name, part) in enumerate(manifest.split(vector).items()):
            if "lora_A" in name:
                part[:] = _uniform(part.shape, 1.0 / math.sqrt(part.shape[1]), stream=stream)
        return vector

    def load_vector(self, vector: Float32) -> None:
        """Make a flat vector [D] the current parameters."""
        self._parameters.load(vector)

    def vector(self) -> Float32:
        """The current parameters as one flat vector [D] (a copy)."""
        return self._parameters.flat()

    def parameters(self) -> list[nn.Parameter]:
        """What an optimiser trains."""
        return list(self._parameters.named.values())

    def forward(self, texts: Texts, rows: NDArray[np.int64]) -> Tensor:
        """Embed some rows of ``texts`` with the adapted encoder, differentiably: [len(rows), d]."""
        return self.encoder.embed(self._model, [texts.texts[row] for row in rows])

    def embed_queries(self, texts: Sequence[str], features: Float32 | None = None) -> Float32:
        """Embed queries; frozen features are of no use here and are ignored."""
        del features
        return self.encoder.encode(texts, model=self._model)

    def embed_passages(self, texts: Sequence[str], features: Float32 | None = None) -> Float32:
        """Embed passages; frozen features are of no use here and are ignored."""
        del features
        return self.encoder.encode(texts, model=self._model)


def _uniform(shape: tuple[int, ...], bound: float, *, stream: int) -> Float32:
    """Uniform values in [-bound, bound), the same bits everywhere.

    The top 24 bits of each raw 64-bit word are an exact float32; scaling by a
    power of two is exact and the last product is one correctly rounded IEEE
    operation, so nothing depends on a library's sampling code.
    """
    raw = np.random.Philox(key=[_START_SEED, stream]).random_raw(math.prod(shape))
    integers = (raw >> np.uint64(40)).astype(np.int64) - (1 << 23)  # [-2^23, 2^23)
    unit = integers.astype(np.float32) * np.float32(2.0**-23)  # [-1, 1), exact
    return (unit * np.float32(bound)).reshape(shape)
