"""Adaptations that run the encoder in every step: LoRA, all weights, projected weights."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from crypto.arrays import Float32
from daemon.learning.options import LearningError
from daemon.learning.parameters import Exchanged, Parameters, uniform
from daemon.learning.retriever.encoder import Encoder, Texts
from daemon.state.versions import ShapeManifest

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


class _TextRetriever:
    """What these have in common: every step runs an adapted copy of the encoder on texts.

    Minutes on a CPU where the head needs seconds. The encoder itself stays untouched.
    """

    uses_features = False

    def __init__(self, encoder: Encoder, model: Any) -> None:
        self.encoder = encoder
        self._model = model

    def begin(self, *, round: int, dropout: float, seed: int) -> None:
        """Make ready to train; dropout is the head's alone."""
        del round, dropout, seed

    def forward(self, texts: Texts, rows: NDArray[np.int64]) -> Tensor:
        """Embed some rows of ``texts`` with the adapted encoder, differentiably: [len(rows), d]."""
        return self.encoder.embed(self._model, [texts.texts[row] for row in rows], texts.side)

    def embed_queries(self, texts: Sequence[str], features: Float32 | None = None) -> Float32:
        """Embed queries; frozen features are of no use here and are ignored."""
        del features
        return self.encoder.encode(texts, model=self._model, side=self.encoder.reading.query)

    def embed_passages(self, texts: Sequence[str], features: Float32 | None = None) -> Float32:
        """Embed passages; frozen features are of no use here and are ignored."""
        del features
        return self.encoder.encode(texts, model=self._model, side=self.encoder.reading.passage)


class _DirectRetriever(Exchanged, _TextRetriever):
    """What trains is what is exchanged."""

    def __init__(self, encoder: Encoder, model: Any, kind: str) -> None:
        super().__init__(encoder, model)
        trainable = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self._shared = Parameters(f"{encoder.digest.hex()}/{kind}", trainable)


class LoraRetriever(_DirectRetriever):
    """LoRA on the query and value projections of every attention layer.

    Source: Hu et al. 2021; FedSearch-NLP Eq. 1 and configuration C.
    """

    def __init__(self, encoder: Encoder, rank: int = 8, alpha: int = 16) -> None:
        kind = str(encoder.model.config.model_type)
        if kind not in _LORA_TARGETS:
            raise LearningError(
                f"adapt = 'lora' does not know the attention layers of a {kind!r} encoder "
                f"(it knows {', '.join(_LORA_TARGETS)}): use adapt = 'head'"
            )
        config = LoraConfig(
            r=rank,
            lora_alpha=alpha,
            lora_dropout=0.0,
            bias="none",
            target_modules=list(_LORA_TARGETS[kind]),
        )
        model: Any = get_peft_model(copy.deepcopy(encoder.model), config).eval()
        super().__init__(encoder, model, f"lora-v1-r{rank}-a{alpha}")
        self.load_vector(self.initial_vector())

    def initial_vector(self) -> Float32:
        """A uniform, B zero (Hu et al. 2021, section 4.1): the encoder as it is."""
        vector = np.zeros(self.shape_manifest.total, dtype=np.float32)
        for stream, (name, part) in enumerate(self.shape_manifest.split(vector).items()):
            if "lora_A" in name:
                part[:] = uniform(part.shape, 1.0 / math.sqrt(part.shape[1]), stream=stream)
        return vector


class FullRetriever(_DirectRetriever):
    """All weights of the encoder train and are exchanged (FedSearch-NLP, configuration A)."""

    def __init__(self, encoder: Encoder) -> None:
        model = copy.deepcopy(encoder.model)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not name.startswith(_POOLER))
        super().__init__(encoder, model, "full-v1")
        self._initial = self.vector()

    def initial_vector(self) -> Float32:
        """The encoder's own weights: the same bits wherever its digest is the same."""
        return self._initial.copy()


class LoraServerRetriever(_TextRetriever):
    """The weights of all linear layers train in full; their rank-r projection is exchanged.

    The shared vector holds factors A [r, k] and B [d, r] a layer, and a version is
    the encoder with W + BA; B starts at zero. In odd rounds, and while B is zero, a
    site fits B to its change under the parent's A, in even ones A under the parent's
    B (see `projection`). What the projection drops is dropped. Embeddings, biases and
    norms stay frozen: they could not be shared that way.
    Source: FedSearch-NLP, configuration B.
    """

    def __init__(self, encoder: Encoder, rank: int = 8) -> None:
        super().__init__(encoder, copy.deepcopy(encoder.model))
        self._weights: dict[str, nn.Parameter] = {}
        groups: dict[str, tuple[int, ...]] = {}
        for name, layer in self._model.named_modules():
            if not isinstance(layer, nn.Linear) or name.startswith(_POOLER):
                continue
            weight: nn.Parameter = self._model.get_parameter(f"{name}.weight")
            weight.requires_grad_(True)
            self._weights[name] = weight
            left, right = weight.shape
            groups |= {f"{name}.A": (rank, right), f"{name}.B": (left, rank)}
        self._frozen = {name: w.detach().clone() for name, w in self._weights.items()}
        self._loaded = dict(self._frozen)
        self._manifest = ShapeManifest(
            family=f"{encoder.digest.hex()}/lora-server-v1-r{rank}",
            groups=tuple(sorted(groups.items())),
        )
        self._parent = self.initial_vector()
        self._round = 1
        self.load_vector(self._parent)

    @property
    def shape_manifest(self) -> ShapeManifest:
        """How the flat vector falls into parameter groups."""
        return self._manifest

    def initial_vector(self) -> Float32:
        """A uniform, B zero: the encoder as it is."""
        vector = np.zeros(self._manifest.total, dtype=np.float32)
        for stream, (name, part) in enumerate(self._manifest.split(vector).items()):
            if name.endswith(".A"):
                part[:] = uniform(part.shape, 1.0 / math.sqrt(part.shape[1]), stream=stream)
        return vector

    def load_vector(self, vector: Float32) -> None:
        """Make the encoder's weights W + BA of a flat vector [D]."""
        parts = self._manifest.split(np.array(vector, dtype=np.float32))
        self._parent = np.array(vector, dtype=np.float32)
        with torch.no_grad():
            for name, weight in self._weights.items():
                left, right = (torch.from_numpy(parts[f"{name}.{half}"]) for half in "BA")
                product = (left.double() @ right.double()).float()
                weight.copy_(self._frozen[name] + product.to(weight.device))
                self._loaded[name] = weight.detach().clone()

    def vector(self) -> Float32:
        """The loaded factors with the projection of what has changed since, [D]."""
        vector = self._parent.copy()
        parts = self._manifest.split(vector)
        # One rule for all layers, on what all sites have alike: the parent and the round.
        nothing_yet = not any(part.any() for name, part in parts.items() if name.endswith(".B"))
        fit_left = nothing_yet or self._round % 2 == 1
        for name, weight in self._weights.items():
            change = (weight.detach() - self._loaded[name]).cpu()  # [d, k]
            left, right = parts[f"{name}.B"], parts[f"{name}.A"]
            if fit_left:
                left += onto_rows(change, torch.from_numpy(right)).float().numpy()
            else:
                right += onto_columns(change, torch.from_numpy(left)).float().numpy()
        return vector

    def begin(self, *, round: int, dropout: float, seed: int) -> None:
        """Make ready to train: the round says which factor is fitted."""
        del dropout, seed
        self._round = round

    def parameters(self) -> list[nn.Parameter]:
        """What an optimiser trains: whole weight matrices."""
        return list(self._weights.values())

    def shared_parameters(self) -> list[nn.Parameter]:
        """The trained weights; their anchor is what the parent made of them."""
        return list(self._weights.values())


# ---- rank-r projections of a weight matrix's change, for sites that train in full ---------
#
# FedSearch-NLP's configuration B trains all weights and shares low-rank factors, and
# reports that the two do not fit together (its Table V). They do not if each site
# shares the factors of its own truncation: the mean of products is no product of
# means. Here one factor is the same at every site during a round, taken from the
# parent version, and only the other one is fitted. That is linear in the change, so
# the mean of what the sites share is exactly the projection of their mean change.
# Rounds alternate between the factors (subspace iteration, as in PowerSGD, Vogels et
# al. 2019), so that the common subspace turns towards what is learned.


def onto_rows(change: Tensor, right: Tensor) -> Tensor:
    """[d, r]: the X for which X @ ``right`` is nearest to ``change`` (least squares).

    ``change`` [d, k], ``right`` [r, k]. Computed in float64.
    """
    inverse: Tensor = torch.linalg.pinv(right.double())  # [k, r]
    return change.double() @ inverse


def onto_columns(change: Tensor, left: Tensor) -> Tensor:
    """[r, k]: the X for which ``left`` @ X is nearest to ``change`` (least squares).

    ``change`` [d, k], ``left`` [d, r]; columns of ``left`` that say the same give a
    smallest X, zero columns a zero one. Computed in float64.
    """
    inverse: Tensor = torch.linalg.pinv(left.double())  # [r, d]
    return inverse @ change.double()
