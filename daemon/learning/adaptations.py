"""What of a model trains, and what of that is exchanged: LoRA, all weights, projected weights.

FedSearch-NLP's configurations C, A and B, for a model of any kind: an encoder, a language model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from crypto.arrays import Float32
from daemon.learning.parameters import Exchanged, Parameters, uniform
from daemon.state.versions import ShapeManifest


class Adaptation(Protocol):
    """A model of torch and the flat vector that a federation trains of it."""

    model: Any

    @property
    def shape_manifest(self) -> ShapeManifest:
        """How the flat vector falls into parameter groups."""

    def initial_vector(self) -> Float32:
        """The starting vector [D], bit-identical on every machine: the model as it comes."""

    def load_vector(self, vector: Float32) -> None:
        """Make a flat vector [D] the current parameters; VersionError if it has another length."""

    def vector(self) -> Float32:
        """The current parameters as one flat vector [D] (a copy)."""

    def in_round(self, round: int) -> None:
        """Make ready to train in a round, counted from 1."""

    def parameters(self) -> list[nn.Parameter]:
        """What an optimiser trains."""

    def shared_parameters(self) -> list[nn.Parameter]:
        """What of it the others learn of."""


class Adapted:
    """Something that runs an adapted model: its vector is that of the adaptation."""

    def __init__(self, adaptation: Adaptation) -> None:
        self.adaptation = adaptation

    @property
    def shape_manifest(self) -> ShapeManifest:
        """How the flat vector falls into parameter groups."""
        return self.adaptation.shape_manifest

    def initial_vector(self) -> Float32:
        """The starting vector [D], bit-identical on every machine."""
        return self.adaptation.initial_vector()

    def load_vector(self, vector: Float32) -> None:
        """Make a flat vector [D] the current parameters; VersionError if it has another length."""
        self.adaptation.load_vector(vector)

    def vector(self) -> Float32:
        """The current parameters as one flat vector [D] (a copy)."""
        return self.adaptation.vector()

    def begin(self, *, round: int, dropout: float, seed: int) -> None:
        """Make ready to train in a round, counted from 1; dropout is the head's alone."""
        del dropout, seed
        self.adaptation.in_round(round)

    def parameters(self) -> list[nn.Parameter]:
        """What an optimiser trains."""
        return self.adaptation.parameters()

    def shared_parameters(self) -> list[nn.Parameter]:
        """What of it the others learn of, in the order of the vector's groups."""
        return self.adaptation.shared_parameters()


class _Direct(Exchanged):
    """What trains is what is exchanged."""

    def __init__(self, model: Any, family: str) -> None:
        self.model = model
        trainable = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self._shared = Parameters(family, trainable)

    def in_round(self, round: int) -> None:
        """All rounds are alike."""


class Lora(_Direct):
    """LoRA factors beside the linear layers ``targets`` (the ends of their names).

    ``model`` itself gets them, and trains nothing else. ``family``: what the vector means but
    for rank and alpha. Source: Hu et al. 2021; FedSearch-NLP Eq. 1 and configuration C.
    """

    def __init__(
        self,
        model: Any,
        family: str,
        targets: Sequence[str],
        *,
        rank: int,
        alpha: int,
        dropout: float = 0.0,
    ) -> None:
        config = LoraConfig(
            r=rank,
            lora_alpha=alpha,
            lora_dropout=dropout,
            bias="none",
            target_modules=list(targets),
        )
        adapted: Any = get_peft_model(model, config).eval()
        super().__init__(adapted, f"{family}-r{rank}-a{alpha}")
        self.load_vector(self.initial_vector())

    def initial_vector(self) -> Float32:
        """A uniform, B zero (Hu et al. 2021, section 4.1): the model as it is."""
        return factors(self.shape_manifest, lambda name: "lora_A" in name)


class AllWeights(_Direct):
    """All weights of ``model`` train and are exchanged (FedSearch-NLP, configuration A).

    ``trains``: by its name, whether a parameter does.
    """

    def __init__(
        self, model: Any, family: str, trains: Callable[[str], bool] = lambda _: True
    ) -> None:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(trains(name))
        super().__init__(model, family)
        self._initial = self.vector()

    def initial_vector(self) -> Float32:
        """The model's own weights: the same bits wherever its digest is the same."""
        return self._initial.copy()


class ProjectedWeights:
    """The weights of linear layers train in full; their rank-r projection is exchanged.

    The shared vector holds factors A [r, k] and B [d, r] a layer, and a version is
    the model with W + BA; B starts at zero. In odd rounds, and while B is zero, a
    site fits B to its change under the parent's A, in even ones A under the parent's
    B (see `onto_rows`). What the projection drops is dropped. Embeddings, biases and
    norms stay frozen: they could not be shared that way. ``trains``: by its name,
    whether a linear layer does. Source: FedSearch-NLP, configuration B.
    """

    def __init__(
        self, model: Any, family: str, rank: int, trains: Callable[[str], bool] = lambda _: True
    ) -> None:
        self.model = model
        self._weights: dict[str, nn.Parameter] = {}
        groups: dict[str, tuple[int, ...]] = {}
        for name, layer in model.named_modules():
            if not isinstance(layer, nn.Linear) or not trains(name):
                continue
            weight: nn.Parameter = model.get_parameter(f"{name}.weight")
            weight.requires_grad_(True)
            self._weights[name] = weight
            left, right = weight.shape
            groups |= {f"{name}.A": (rank, right), f"{name}.B": (left, rank)}
        self._frozen = {name: w.detach().clone() for name, w in self._weights.items()}
        self._loaded = dict(self._frozen)
        self._manifest = ShapeManifest(
            family=f"{family}-r{rank}", groups=tuple(sorted(groups.items()))
        )
        self._parent = self.initial_vector()
        self._round = 1
        self.load_vector(self._parent)

    @property
    def shape_manifest(self) -> ShapeManifest:
        """How the flat vector falls into parameter groups."""
        return self._manifest

    def initial_vector(self) -> Float32:
        """A uniform, B zero: the model as it is."""
        return factors(self._manifest, lambda name: name.endswith(".A"))

    def load_vector(self, vector: Float32) -> None:
        """Make the model's weights W + BA of a flat vector [D]."""
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

    def in_round(self, round: int) -> None:
        """The round says which factor is fitted."""
        self._round = round

    def parameters(self) -> list[nn.Parameter]:
        """What an optimiser trains: whole weight matrices."""
        return list(self._weights.values())

    def shared_parameters(self) -> list[nn.Parameter]:
        """The trained weights; their anchor is what the parent made of them."""
        return list(self._weights.values())


def factors(manifest: ShapeManifest, is_right: Callable[[str], bool]) -> Float32:
    """[D] starting values of factors: uniform where ``is_right`` says A by its name, else zero."""
    vector = np.zeros(manifest.total, dtype=np.float32)
    for stream, (name, part) in enumerate(manifest.split(vector).items()):
        if is_right(name):
            part[:] = uniform(part.shape, 1.0 / math.sqrt(part.shape[1]), stream=stream)
    return vector


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
