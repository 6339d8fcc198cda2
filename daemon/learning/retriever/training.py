"""Training at one site: contrastive learning on its own question-passage pairs.

The loop is `fit`; everything above it says what goes in, `losses` what is
minimised. A site's update is the difference between the shared parameters after
the loop and the parent version's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from crypto.arrays import Float32, Rows
from daemon.learning.batches import in_runs, pair_points, random_batches, topic_batches
from daemon.learning.engine.descent import Descent
from daemon.learning.engine.engine import Engine
from daemon.learning.losses import info_nce, minimised
from daemon.learning.options import TrainingError, TrainingOptions
from daemon.learning.parameters import copies_of
from daemon.learning.retriever.encoder import Texts
from daemon.learning.retriever.retriever import Retriever

MIN_PAIRS = 2  # with one pair there is nothing to tell it apart from


@dataclass(frozen=True)
class TrainingSet:
    """A site's pairs as rows of two tables of texts.

    ``positives[i]``: rows of ``passages`` that answer query i, at least one;
    ``negatives[i]``: its mined hard negatives, possibly none. ``parent``: what
    the parent version makes of the queries [n, d] and the passages [m, d], the
    teacher of KD-GLE and the ground on which batches by topic are found. ``right[i]``:
    rows that answer query i, those included that it is never to find (the passage that
    an asking sentence was cut out of, another part of the answer, what another pair says
    of the same question): no negatives; None: as ``positives``.
    """

    queries: Texts
    passages: Texts
    positives: list[Rows]
    negatives: list[Rows]
    parent: tuple[Float32, Float32] | None = None
    right: list[Rows] | None = None

    @property
    def answers(self) -> list[Rows]:
        """Of each query all rows that are no negatives of it."""
        return self.positives if self.right is None else self.right


def fit(
    retriever: Retriever,
    pairs: TrainingSet,
    options: TrainingOptions,
    seed: int,
    on_epoch: Callable[[int, float], None] | None = None,
    anchor: list[Tensor] | None = None,
    engine: Engine | None = None,
) -> float:
    """Train the retriever in place; returns the last epoch's mean InfoNCE loss (0: no epoch).

    Distillation and the proximal term are minimised with it but not counted in
    it: the number stays comparable. ``anchor``: the parent version's shared
    parameters, to which the proximal term holds; None: as they are now. The same
    parameters, pairs, options, seed and number of threads give the same bits.
    ``engine``: what it runs on; None: this process alone, in float32.
    ``on_epoch(epoch, mean_loss)`` is called after each epoch, from 1. Raises
    TrainingError for fewer than two pairs or a loss that is not finite.
    """
    count = len(pairs.positives)
    if options.local_epochs == 0:
        return 0.0
    check_enough(count)
    chance = np.random.Generator(np.random.Philox(key=seed))
    shared = retriever.shared_parameters()
    start = copies_of(shared) if anchor is None else anchor
    engine = engine or Engine(retriever.encoder.device)
    width = retriever.encoder.dimension
    descent = Descent(retriever.parameters(), steps_of(count, options), options, engine)
    content = content_numbers(pairs.passages)
    mean_loss = 0.0

    for epoch in range(1, options.local_epochs + 1):
        losses: list[float] = []
        for batch in batches_of(pairs, options, chance):
            drawn = np.array([chance.choice(pairs.positives[pair]) for pair in batch])  # [b]
            explicit = explicit_negatives(pairs, options, batch, chance)
            rows = np.unique(np.concatenate([drawn, explicit]))  # [m] every candidate once
            columns = np.searchsorted(rows, drawn)  # [b] where each positive is
            hidden = torch.from_numpy(also_right(pairs, batch, rows, drawn, content))  # [b, m]

            asked = partial(retriever.forward, pairs.queries)
            told = partial(retriever.forward, pairs.passages)
            queries = engine.embedded(asked, batch, width)  # [b, d] unit rows
            passages = engine.embedded(told, rows, width)  # [m, d] unit rows
            target = torch.from_numpy(columns)
            contrast = info_nce(queries, passages, target, hidden, options.temperature)
            local = partial(_positives_of, queries, passages, target)
            teacher = partial(teacher_of, pairs, batch, drawn, queries.device)
            loss = minimised(contrast, options, local, teacher, (shared, start))
            descent.accumulate(loss, epoch)
            descent.step()
            losses.append(contrast.item() * len(batch))
        mean_loss = sum(losses) / count
        if on_epoch is not None:
            on_epoch(epoch, mean_loss)
    return mean_loss


def _positives_of(queries: Tensor, passages: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Queries and positives, [b, d] each, of passages [m, d]."""
    return queries, passages[target.to(passages.device)]


def steps_of(count: int, options: TrainingOptions) -> int:
    """The steps that so many pairs take in all epochs."""
    return options.local_epochs * len(in_runs(np.arange(count), options.batch_size))


def check_enough(count: int) -> None:
    """Raise TrainingError for fewer pairs than contrastive learning needs."""
    if count < MIN_PAIRS:
        raise TrainingError(
            f"this site has {count} usable training pairs, and contrastive learning needs at "
            f"least {MIN_PAIRS}: ingest question-passage pairs whose documents are in the library"
        )


def batches_of(
    pairs: TrainingSet, options: TrainingOptions, chance: np.random.Generator
) -> list[Rows]:
    """One epoch's batches: every pair in exactly one."""
    if options.batches == "topic":
        points = pair_points(*_parent(pairs), pairs.positives)
        return topic_batches(points, options.batch_size, chance)
    return random_batches(len(pairs.positives), options.batch_size, chance)


def explicit_negatives(
    pairs: TrainingSet, options: TrainingOptions, batch: Rows, chance: np.random.Generator
) -> Rows:
    """Rows of the batch's mined negatives, and of passages drawn at random beside them."""
    mined = [pairs.negatives[pair][: options.hard_negatives] for pair in batch]
    if options.random_negatives:
        count = options.random_negatives * len(batch)
        mined.append(chance.integers(len(pairs.passages.texts), size=count))
    return np.concatenate(mined).astype(np.int64)


def _parent(pairs: TrainingSet) -> tuple[Float32, Float32]:
    if pairs.parent is None:
        raise TrainingError(
            "batches by topic and distillation need what the parent version makes of the texts: "
            "a bug"
        )
    return pairs.parent


def teacher_of(
    pairs: TrainingSet, batch: Rows, drawn: Rows, device: torch.device
) -> tuple[Tensor, Tensor]:
    """The global model's view of a batch: queries [b, d] and their positives [b, d]."""
    queries, passages = _parent(pairs)
    return (
        torch.from_numpy(queries[batch]).to(device),
        torch.from_numpy(passages[drawn]).to(device),
    )


def also_right(
    pairs: TrainingSet, batch: Rows, rows: Rows, drawn: Rows, content: Rows
) -> NDArray[np.bool_]:
    """[b, m]: passages that answer the query too, or say the same as one that does.

    They are left out of the sum: as negatives they would teach that a right
    answer is wrong. Only the positive that was drawn stays.
    """
    hidden = np.zeros((len(batch), len(rows)), dtype=np.bool_)
    for line, (pair, positive) in enumerate(zip(batch, drawn, strict=True)):
        hidden[line] = np.isin(content[rows], content[pairs.answers[pair]])
        hidden[line, np.searchsorted(rows, positive)] = False
    return hidden


def content_numbers(texts: Texts) -> Rows:
    """[m] A number per distinct text: equal texts are one passage to learn from."""
    numbers: dict[str, int] = {}
    return np.array(
        [numbers.setdefault(text, len(numbers)) for text in texts.texts], dtype=np.int64
    )
