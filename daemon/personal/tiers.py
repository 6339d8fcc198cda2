"""DATE's personal layer in three tiers, behind the shared head; and how one becomes another.

Each tier is residual and starts as the identity, so that a site whose personal
layer is new answers as the shared head does. Source: pFedRAG section 4.1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from crypto.arrays import Float32, Rows
from daemon.learning.batches import in_runs, random_batches
from daemon.learning.losses import distillation
from daemon.learning.options import LearningError, TrainingOptions
from daemon.learning.parameters import uniform
from daemon.learning.retriever.encoder import Encoder
from daemon.learning.retriever.heads import Dropout, HeadRetriever
from daemon.learning.retriever.training import TrainingSet
from daemon.personal.depth import TIERS

_TOKENS = 8  # that the extended tier sees the 2d values as
_HEADS = 4
_FIRST_STREAM = 100  # of starting values; those before are the shared head's
_ROWS = 4096
_NEAR_ENOUGH = 1e-5  # nats; a layer that has learned for a round is beyond it


class BaseTier(nn.Module):
    """x + GELU(W x + b): one linear layer and its activation. d^2 + d values."""

    def __init__(self, dimension: int) -> None:
        super().__init__()
        self.out = nn.Linear(dimension, dimension)

    def forward(self, x: Tensor) -> Tensor:
        """[n, d] -> [n, d]."""
        y: Tensor = x + functional.gelu(self.out(x))
        return y


class AdvancedTier(nn.Module):
    """x + out(GELU(up(x))): d to 2d and back. 4d^2 + 3d values."""

    def __init__(self, dimension: int) -> None:
        super().__init__()
        self.up = nn.Linear(dimension, 2 * dimension)
        self.out = nn.Linear(2 * dimension, dimension)

    def forward(self, x: Tensor) -> Tensor:
        """[n, d] -> [n, d]."""
        y: Tensor = x + self.out(functional.gelu(self.up(x)))
        return y


class ExtendedTier(nn.Module):
    """As the advanced tier, with self-attention between its linear layers.

    The 2d values of a text are seen as 8 tokens of d/4 values each, which attend to
    one another with 4 heads (residual): a vector alone has nothing to attend to.
    """

    def __init__(self, dimension: int) -> None:
        super().__init__()
        width = 2 * dimension // _TOKENS
        if 2 * dimension % _TOKENS or width % _HEADS:
            raise LearningError(
                f"the extended tier needs a dimension that {_TOKENS * _HEADS // 2} divides, this "
                f"encoder has {dimension}: use personal = 'none'"
            )
        self.up = nn.Linear(dimension, 2 * dimension)
        self.attention = nn.MultiheadAttention(width, _HEADS, batch_first=True)
        self.out = nn.Linear(2 * dimension, dimension)

    def forward(self, x: Tensor) -> Tensor:
        """[n, d] -> [n, d]."""
        tokens = self.up(x).reshape(len(x), _TOKENS, -1)  # [n, 8, d/4]
        seen, _ = self.attention(tokens, tokens, tokens, need_weights=False)
        wide = (tokens + seen).reshape(len(x), -1)  # [n, 2d]
        y: Tensor = x + self.out(functional.gelu(wide))
        return y


_LAYERS: Mapping[str, type[nn.Module]] = dict(
    zip(TIERS, (BaseTier, AdvancedTier, ExtendedTier), strict=True)
)


def new_tier(tier: str, dimension: int) -> nn.Module:
    """A personal layer as it begins: the identity. LearningError for an unknown tier."""
    if tier not in _LAYERS:
        raise LearningError(f"tier {tier!r} is unknown: it is one of {', '.join(TIERS)}")
    layer = _LAYERS[tier](dimension)
    with torch.no_grad():
        for stream, (name, value) in enumerate(sorted(layer.named_parameters())):
            if name.startswith("out.") or value.ndim == 1:
                value.zero_()
            else:
                bound = 1.0 / math.sqrt(value.shape[1])
                start = uniform(tuple(value.shape), bound, stream=_FIRST_STREAM + stream)
                value.copy_(torch.from_numpy(start))
    return layer


class TieredHeadRetriever(HeadRetriever):
    """The shared head with a personal layer behind it.

    Both train; the flat vector, and so everything that leaves the site, is the
    shared head alone, of the same family as without a personal layer.
    """

    def __init__(self, encoder: Encoder) -> None:
        self._tier = TIERS[0]
        self._personal = new_tier(self._tier, encoder.dimension).to(encoder.device)
        super().__init__(encoder)

    @property
    def tier(self) -> str:
        """Which of the three the personal layer is."""
        return self._tier

    def begin_tier(self, tier: str) -> None:
        """Put a new personal layer, the identity, in the place of the present one."""
        self._personal = new_tier(tier, self.encoder.dimension).to(self.encoder.device)
        self._tier = tier

    def personal_arrays(self) -> dict[str, Float32]:
        """Copies of the personal parameters by name."""
        return {
            name: value.detach().cpu().numpy().astype(np.float32, copy=True)
            for name, value in self._personal.named_parameters()
        }

    def load_personal(self, tier: str, arrays: Mapping[str, Float32]) -> None:
        """Take on a personal layer; LearningError when the arrays are not that tier's."""
        layer = new_tier(tier, self.encoder.dimension)
        wanted = {name: tuple(value.shape) for name, value in layer.named_parameters()}
        given = {name: tuple(value.shape) for name, value in arrays.items()}
        if given != wanted or not all(np.isfinite(value).all() for value in arrays.values()):
            raise LearningError(
                f"these are not the parameters of a personal layer of tier {tier}: delete the "
                "file to begin it anew"
            )
        with torch.no_grad():
            for name, value in layer.named_parameters():
                value.copy_(torch.from_numpy(np.ascontiguousarray(arrays[name])))
        self._personal = layer.to(self.encoder.device)
        self._tier = tier

    def parameters(self) -> list[nn.Parameter]:
        """What an optimiser trains: the shared head and the personal layer."""
        return [*super().parameters(), *self.personal_parameters()]

    def personal_parameters(self) -> list[nn.Parameter]:
        """What never leaves the site."""
        return list(self._personal.parameters())

    def shared_output(self, features: Float32) -> Float32:
        """What the shared head makes of frozen features [n, d]: the personal layer's input."""
        out = np.zeros_like(features)
        with torch.inference_mode():
            for start in range(0, len(features), _ROWS):
                rows = torch.from_numpy(np.ascontiguousarray(features[start : start + _ROWS]))
                shared = super()._through(rows.to(self.encoder.device), None)
                out[start : start + _ROWS] = shared.cpu().numpy()
        return out

    def personal_output(self, shared: Tensor) -> Tensor:
        """[n, d] of `shared_output` -> [n, d] embeddings, rows of length 1."""
        embedded: Tensor = self._personal(shared)
        return functional.normalize(embedded, dim=-1)

    def _through(self, frozen: Tensor, dropout: Dropout | None) -> Tensor:
        return self.personal_output(super()._through(frozen, dropout))


@dataclass(frozen=True)
class Distilled:
    """How a distillation went: divergence from the old layer before and after, whether it took.

    Mean cross entropy less the teacher's entropy, in nats, over the site's pairs.
    """

    before: float
    after: float
    changed: bool


def change_tier(
    retriever: TieredHeadRetriever,
    tier: str,
    pairs: TrainingSet,
    options: TrainingOptions,
    seed: int,
) -> Distilled:
    """Replace the personal layer by one of another tier that has learned to say the same.

    The old layer teaches (Eq. 7), the shared head stays frozen and only the new
    layer trains (Eq. 8). A text's distribution is the softmax of its cosines with
    the batch's passages over tau times tau_KD. The new layer begins as the identity:
    where training takes it no nearer to the old one, it stays the identity if that
    is near enough, and else the old one stays.
    """
    depth = options.depth
    shared = _tensors(retriever, pairs, retriever.shared_output)
    teacher = _tensors(retriever, pairs, lambda features: retriever.embed_queries([], features))
    old = retriever.tier, retriever.personal_arrays()
    retriever.begin_tier(tier)
    chance = np.random.Generator(np.random.Philox(key=seed))
    temperature = options.temperature * depth.kd_temperature
    count = len(pairs.positives)

    def divergence(batch: Rows) -> Tensor:
        rows = np.unique([chance.choice(pairs.positives[pair]) for pair in batch])  # [m]
        student = [
            retriever.personal_output(x[r]) for x, r in zip(shared, (batch, rows), strict=True)
        ]
        taught = (teacher[0][batch], teacher[1][rows])
        # Less the least it can be: a constant, so that the gradient is that of Eq. 7.
        least = distillation(taught, taught, temperature)
        return distillation((student[0], student[1]), taught, temperature) - least

    def mean_divergence() -> float:
        with torch.inference_mode():
            batches = in_runs(np.arange(count), options.batch_size)
            return sum(float(divergence(batch)) * len(batch) for batch in batches) / count

    before = mean_divergence()
    optimiser = torch.optim.AdamW(
        retriever.personal_parameters(), lr=depth.kd_learning_rate, weight_decay=0.0
    )
    for _ in range(depth.kd_epochs):
        for batch in random_batches(count, options.batch_size, chance):
            loss = divergence(batch)
            optimiser.zero_grad(set_to_none=True)
            loss.backward()  # type: ignore[no-untyped-call]
            optimiser.step()
    after = mean_divergence()
    if after <= before:  # not so when it is not a number
        return Distilled(before, after, changed=True)
    if before <= _NEAR_ENOUGH:
        retriever.begin_tier(tier)
        return Distilled(before, before, changed=True)
    retriever.load_personal(*old)
    return Distilled(before, after, changed=False)


def _tensors(
    retriever: TieredHeadRetriever, pairs: TrainingSet, embed: Callable[[Float32], Float32]
) -> tuple[Tensor, Tensor]:
    """What ``embed`` makes of the queries' and of the passages' features."""
    queries, passages = pairs.queries.features, pairs.passages.features
    if queries is None or passages is None:
        raise LearningError("a personal layer trains on features: encode the texts first")
    device = retriever.encoder.device
    return torch.from_numpy(embed(queries)).to(device), torch.from_numpy(embed(passages)).to(device)
