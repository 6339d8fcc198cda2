"""Trainable parameters as one flat vector, and starting values that are the same everywhere."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from crypto.arrays import Float32
from daemon.state.versions import ShapeManifest

_START_SEED = 0x48414E5345  # "HANSE"; part of the family: changing it needs a new version name


class Parameters:
    """Named trainable parameters as one flat vector, in the order of their names."""

    def __init__(self, family: str, named: dict[str, nn.Parameter]) -> None:
        self.named = dict(sorted(named.items()))
        self.manifest = ShapeManifest(
            family=family,
            groups=tuple((name, tuple(value.shape)) for name, value in self.named.items()),
        )

    def load(self, vector: Float32) -> None:
        """Make a flat vector [D] the current values; VersionError if it has another length."""
        parts = self.manifest.split(np.asarray(vector, dtype=np.float32))
        with torch.no_grad():
            for name, value in self.named.items():
                # A copy: training must not write into the caller's array.
                value.copy_(torch.from_numpy(parts[name].copy()))

    def flat(self) -> Float32:
        """The current values as one flat vector [D] (a copy)."""
        values = [value.detach().cpu().numpy().reshape(-1) for value in self.named.values()]
        return np.concatenate(values).astype(np.float32)

    def values(self) -> list[nn.Parameter]:
        """The parameters themselves, in vector order."""
        return list(self.named.values())


class Exchanged:
    """A retriever that trains what it exchanges, ``_shared``."""

    _shared: Parameters

    @property
    def shape_manifest(self) -> ShapeManifest:
        """How the flat vector falls into parameter groups."""
        return self._shared.manifest

    def load_vector(self, vector: Float32) -> None:
        """Make a flat vector [D] the current parameters."""
        self._shared.load(vector)

    def vector(self) -> Float32:
        """The current parameters as one flat vector [D] (a copy)."""
        return self._shared.flat()

    def parameters(self) -> list[nn.Parameter]:
        """What an optimiser trains."""
        return self._shared.values()

    def shared_parameters(self) -> list[nn.Parameter]:
        """What the flat vector holds, in its order."""
        return self._shared.values()


def arrays_of(parameters: Sequence[Tensor]) -> list[Float32]:
    """Copies for another process: a tensor that is sent is shared, and both would train it."""
    return [np.array(value.detach().cpu().numpy(), dtype=np.float32) for value in parameters]


def take(parameters: Sequence[nn.Parameter], values: Sequence[Float32]) -> None:
    """Make the arrays of `arrays_of` the parameters' values."""
    with torch.no_grad():
        for parameter, value in zip(parameters, values, strict=True):
            parameter.copy_(torch.from_numpy(value))


def copies_of(parameters: Sequence[Tensor]) -> list[Tensor]:
    """Them as they are now, for the proximal term to hold to."""
    return [value.detach().clone() for value in parameters]


def uniform(shape: tuple[int, ...], bound: float, *, stream: int) -> Float32:
    """Uniform values in [-bound, bound), the same bits everywhere.

    The top 24 bits of each raw 64-bit word are an exact float32; scaling by a
    power of two is exact and the last product is one correctly rounded IEEE
    operation, so nothing depends on a library's sampling code.
    """
    raw = np.random.Philox(key=[_START_SEED, stream]).random_raw(math.prod(shape))
    integers = (raw >> np.uint64(40)).astype(np.int64) - (1 << 23)  # [-2^23, 2^23)
    unit = integers.astype(np.float32) * np.float32(2.0**-23)  # [-1, 1), exact
    return (unit * np.float32(bound)).reshape(shape)
