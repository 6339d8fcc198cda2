"""Stage 2 of PDD-AS2: a site fits its own query encoder to passages as all sites see them.

PDD-AS2 section 3.3 (client-customised query encoding): passages are embedded as
everywhere in the federation, so that an index, and the negatives that other sites
answer with, stay what they are; only the side that reads questions is the site's.

The passage encoder is fixed, so every passage is embedded once and what remains of
a step is the queries. Negatives are the batch's other answers, those mined among the
site's passages, and those that other sites answer with (fed-negatives, Eq. 8): a
step sends its queries' embeddings and gets the nearest passages' embeddings back.

What is tuned is kept only where the site's validation pairs rank their answers higher
than with the shared encoder: nobody loses by it on the evidence that the site has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from crypto.arrays import Float32, Rows
from daemon.learning.engine.descent import Descent
from daemon.learning.engine.engine import Engine
from daemon.learning.losses import info_nce, minimised
from daemon.learning.options import LearningError, TrainingError, TrainingOptions
from daemon.learning.retriever import training
from daemon.learning.retriever.encoder import Encoder, Texts
from daemon.learning.retriever.mining import NEAR_DUPLICATE
from daemon.learning.retriever.retriever import Retriever, adapted
from daemon.learning.retriever.training import TrainingSet
from daemon.personal.held_out import Validation
from daemon.state.versions import ShapeManifest

# Queries as embedded now [b, d] -> for each the passages that other sites answer with [n_i, d].
Fetch = Callable[[Float32], Sequence[Float32]]


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


def tune(
    retriever: PersonalQueryRetriever,
    pairs: TrainingSet,
    options: TrainingOptions,
    seed: int,
    fetch: Fetch | None = None,
    on_epoch: Callable[[int, float], None] | None = None,
    *,
    validation: Validation | None = None,
    same_above: float = NEAR_DUPLICATE,
) -> float:
    """Train the personal query encoder in place; the last epoch's mean InfoNCE loss (0: none).

    ``fetch`` is asked once a step for passages of other sites: their rows are columns
    of the loss beside the local ones, except where they say what a query's positive
    says: above a cosine of ``same_above`` with it. ``options.distill`` holds the tuned to
    the shared query encoder: the teacher is ``pairs.parent``; ``options.proximal`` holds its
    parameters to where they began.
    With ``validation`` the parameters of the best epoch stay, the first where several
    are equal, and those before training where none is better: then tuning changed
    nothing. Without, those of the last epoch.

    Deterministic as `training.fit` is, given that ``fetch`` is. Raises TrainingError for
    fewer than two pairs, for a loss or a fetched value that is not finite; the
    parameters are those before training then.
    """
    count = len(pairs.positives)
    if options.local_epochs == 0:
        return 0.0
    training.check_enough(count)
    chance = np.random.Generator(np.random.Philox(key=seed))
    parameters = retriever.personal_parameters()
    before = retriever.personal_arrays()
    start = [value.detach().clone() for value in parameters]
    ground = _Ground.of(retriever, pairs, options)
    best = _Best(retriever, validation)
    engine = Engine(retriever.encoder.device)
    descent = Descent(parameters, training.steps_of(count, options), options, engine)
    mean_loss = 0.0
    try:
        for epoch in range(1, options.local_epochs + 1):
            losses: list[float] = []
            for batch in training.batches_of(pairs, options, chance):
                drawn = np.array([chance.choice(pairs.positives[pair]) for pair in batch])  # [b]
                explicit = training.explicit_negatives(pairs, options, batch, chance)
                queries = retriever.forward_queries(pairs.queries, batch)  # [b, d] unit rows
                foreign = None if fetch is None else _foreign(fetch, queries)  # [f, d] unit rows
                rows = (batch, drawn, explicit)
                contrast = _contrast(queries, ground, rows, foreign, same_above)
                local = partial(_positives_of, queries, ground.embeddings, drawn)
                teacher = partial(training.teacher_of, pairs, batch, drawn, queries.device)
                held = (parameters, start)
                descent.accumulate(minimised(contrast, options, local, teacher, held), epoch)
                descent.step()
                losses.append(contrast.item() * len(batch))
            mean_loss = sum(losses) / count
            best.see()
            if on_epoch is not None:
                on_epoch(epoch, mean_loss)
    except BaseException:
        retriever.load_personal(before)
        raise
    best.restore()
    return mean_loss


def _positives_of(queries: Tensor, embeddings: Float32, drawn: Rows) -> tuple[Tensor, Tensor]:
    """Queries and positives, [b, d] each, of the site's passages [n, d]."""
    return queries, torch.from_numpy(embeddings[drawn]).to(queries.device)


@dataclass(frozen=True)
class _Ground:
    """What stays the same while queries are tuned: pairs, and their passages embedded [m, d]."""

    pairs: TrainingSet
    embeddings: Float32
    content: Rows
    options: TrainingOptions

    @classmethod
    def of(
        cls, retriever: PersonalQueryRetriever, pairs: TrainingSet, options: TrainingOptions
    ) -> _Ground:
        embeddings = retriever.embed_passages(pairs.passages.texts, pairs.passages.features)
        return cls(pairs, embeddings, training.content_numbers(pairs.passages), options)


def _contrast(
    queries: Tensor,
    ground: _Ground,
    drawn_for: tuple[Rows, Rows, Rows],
    foreign: Float32 | None,
    same_above: float,
) -> Tensor:
    """InfoNCE of a batch's queries [b, d] over local passages and foreign ones [f, d].

    ``drawn_for``: the pairs of the batch, the positive drawn for each, explicit
    negatives. A foreign passage is hidden from a query whose positive says the same:
    who answers can't know which of its passages are right.
    """
    batch, drawn, explicit = drawn_for
    rows = np.unique(np.concatenate([drawn, explicit]))  # [m'] every candidate once
    hidden = training.also_right(ground.pairs, batch, rows, drawn, ground.content)  # [b, m']
    candidates = ground.embeddings[rows]  # [m', d] constants
    if foreign is not None:
        said_too = ground.embeddings[drawn] @ foreign.T > same_above  # [b, f]
        candidates = np.concatenate([candidates, foreign])
        hidden = np.concatenate([hidden, said_too], axis=1)
    target = torch.from_numpy(np.searchsorted(rows, drawn))  # [b]
    passages = torch.from_numpy(candidates).to(queries.device)  # [m' + f, d]
    temperature = ground.options.temperature
    return info_nce(queries, passages, target, torch.from_numpy(hidden), temperature)


class _Best:
    """Remembers the parameters that did best on validation; those at the start count first."""

    def __init__(self, retriever: PersonalQueryRetriever, validation: Validation | None) -> None:
        self._retriever = retriever
        self._validation = validation
        if validation is not None:
            passages = validation.passages
            self._told = retriever.embed_passages(passages.texts, passages.features)
            self._score = self._now(validation)
            self._arrays = retriever.personal_arrays()

    def see(self) -> None:
        if self._validation is None:
            return
        score = self._now(self._validation)
        if score > self._score:
            self._score, self._arrays = score, self._retriever.personal_arrays()

    def restore(self) -> None:
        if self._validation is not None:
            self._retriever.load_personal(self._arrays)

    def _now(self, validation: Validation) -> float:
        if not validation.positives:
            return 0.0
        return float(validation.ranks_against(self._retriever, self._told).mean())


def _foreign(fetch: Fetch, queries: Tensor) -> Float32:
    """[f, d] What other sites answer to a batch of queries [b, d], each row of length 1."""
    vectors: Float32 = queries.detach().cpu().numpy().astype(np.float32)
    answers = fetch(vectors.copy())
    width = vectors.shape[1]
    if len(answers) != len(vectors) or any(a.ndim != 2 or a.shape[1] != width for a in answers):
        raise TrainingError(
            f"expected negatives [n, {width}] for each of {len(vectors)} queries: got "
            f"{[a.shape for a in answers]}"
        )
    negatives = np.concatenate(answers).astype(np.float32)
    if not np.isfinite(negatives).all():
        raise TrainingError("a negative from another site has a value that is not finite")
    # Noise in a disclosure changes lengths, and info_nce wants cosines; nothing has no direction.
    lengths = np.linalg.norm(negatives, axis=1, keepdims=True)
    answered = lengths[:, 0] > 0.0
    unit: Float32 = (negatives[answered] / lengths[answered]).astype(np.float32)
    return unit
