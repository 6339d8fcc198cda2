"""A query encoder of the site's own before the passage encoder that all sites share.

PDD-AS2 section 3.3 (client-customised query encoding): passages are embedded as
everywhere in the federation, so that an index, and the negatives that other sites
answer with, stay what they are; only the side that reads questions is the site's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from crypto.arrays import Float32
from daemon.learning.options import LearningError
from daemon.learning.retriever.encoder import Encoder
from daemon.learning.retriever.retriever import Retriever, adapted
from daemon.learning.retriever.texts import Texts
from daemon.state.versions import ShapeManifest


class PersonalQueryRetriever:
    """A shared retriever, and a copy of it that only this site's queries go through.

    The flat vector, and so everything that leaves the site, is the shared one alone,
    of the same family as without a personal encoder. `load_vector` makes the copy
    equal to what is shared: a personal encoder belongs to the version that it was
    tuned for, and comes back by `load_personal`.
    """

    def __init__(self, shared: Retriever, own: Retriever) -> None:
        """Raises LearningError unless both are the same adaptation of the same encoder."""
        if shared.shape_manifest.digest != own.shape_manifest.digest:
            raise LearningError(
                "a personal query encoder starts as the shared one: both must be of one kind"
            )
        self.encoder: Encoder = shared.encoder
        self._shared = shared
        self._own = own
        self.load_vector(shared.vector())

    @classmethod
    def on(
        cls, encoder: Encoder, adapt: str, *, rank: int = 8, alpha: int = 16
    ) -> PersonalQueryRetriever:
        """Two copies of an adaptation on an encoder that is loaded already."""
        shared, own = (adapted(encoder, adapt, rank=rank, alpha=alpha) for _ in range(2))
        return cls(shared, own)

    @property
    def uses_features(self) -> bool:
        """Whether cached encoder features stand in for the texts."""
        return self._shared.uses_features

    @property
    def shape_manifest(self) -> ShapeManifest:
        """How the shared flat vector falls into parameter groups."""
        return self._shared.shape_manifest

    def initial_vector(self) -> Float32:
        """The shared starting vector [D]."""
        return self._shared.initial_vector()

    def load_vector(self, vector: Float32) -> None:
        """Make a flat vector [D] the shared parameters, and what queries go through, too."""
        self._shared.load_vector(vector)
        self._own.load_vector(vector)

    def vector(self) -> Float32:
        """The shared parameters as one flat vector [D] (a copy)."""
        return self._shared.vector()

    def begin(self, *, round: int, dropout: float, seed: int) -> None:
        """Make ready to train, the shared parameters or the personal ones."""
        self._shared.begin(round=round, dropout=dropout, seed=seed)
        self._own.begin(round=round, dropout=dropout, seed=seed)

    def parameters(self) -> list[nn.Parameter]:
        """What a round trains: the shared parameters (stage 1)."""
        return self._shared.parameters()

    def shared_parameters(self) -> list[nn.Parameter]:
        """What of it the others learn of."""
        return self._shared.shared_parameters()

    def personal_parameters(self) -> list[nn.Parameter]:
        """What `tuning.tune` trains (stage 2) and what never leaves the site."""
        return self._own.parameters()

    def personal_arrays(self) -> dict[str, Float32]:
        """Copies of the personal parameters, in the order of `personal_parameters`."""
        return {
            f"query.{number:04d}": value.detach().cpu().numpy().astype(np.float32, copy=True)
            for number, value in enumerate(self.personal_parameters())
        }

    def load_personal(self, arrays: Mapping[str, Float32]) -> None:
        """Take on a personal encoder; LearningError when the arrays are not one of this kind."""
        wanted = {name: value.shape for name, value in self.personal_arrays().items()}
        given = {name: value.shape for name, value in arrays.items()}
        if given != wanted or not all(np.isfinite(value).all() for value in arrays.values()):
            raise LearningError(
                "these are not the parameters of a personal query encoder of this kind: delete "
                "the file to begin it anew"
            )
        with torch.no_grad():
            for name, value in zip(sorted(wanted), self.personal_parameters(), strict=True):
                value.copy_(torch.from_numpy(np.ascontiguousarray(arrays[name])))

    def forward(self, texts: Texts, rows: NDArray[np.int64]) -> Tensor:
        """Embed some rows with the shared parameters, differentiably: [len(rows), d]."""
        return self._shared.forward(texts, rows)

    def forward_queries(self, texts: Texts, rows: NDArray[np.int64]) -> Tensor:
        """Embed some queries with the personal parameters, differentiably: [len(rows), d]."""
        return self._own.forward(texts, rows)

    def embed_queries(self, texts: Sequence[str], features: Float32 | None = None) -> Float32:
        """Embed queries as this site does: float32 [n, d], rows of length 1."""
        return self._own.embed_queries(texts, features)

    def embed_passages(self, texts: Sequence[str], features: Float32 | None = None) -> Float32:
        """Embed passages as all sites do: float32 [n, d], rows of length 1."""
        return self._shared.embed_passages(texts, features)
