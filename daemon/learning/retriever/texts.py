"""Texts of a training set, with what the frozen encoder made of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Texts:
    """Texts of a training set and, for retrievers that use them, their frozen features.

    ``features``: float32 [n, d] from the encoder, row i for ``texts[i]``.
    """

    texts: Sequence[str]
    features: NDArray[np.float32] | None = None
