"""Training at one site: contrastive learning on its own question-passage pairs.

The loop is `fit`; everything above it says what goes in. A site's update is the
difference between the parameters after the loop and the parent version's.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from daemon.learning.models import Retriever, Texts
from daemon.learning.terms import TrainingError, TrainingOptions

Rows = NDArray[np.int64]

_MIN_PAIRS = 2  # with one pair there is nothing to tell it apart from
_FINAL_RATE = 0.1  # of the learning rate, reached linearly at the last step
_CLIP = 1.0  # L2 norm of a step's gradient


@dataclass(frozen=True)
class TrainingSet:
    """A site's pairs as rows of two tables of texts.

    ``positives[i]``: rows of ``passages`` that answer query i, at least one;
    ``negatives[i]``: its mined hard negatives, possibly none.
    """

    queries: Texts
    passages: Texts
    positives: list[Rows]
    negatives: list[Rows]


def fit(
    retriever: Retriever,
    pairs: TrainingSet,
    options: TrainingOptions,
    seed: int,
    on_epoch: Callable[[int, float], None] | None = None,
) -> float:
    """Train the retriever in place; returns the mean loss of the last epoch (0 for no epoch).

    The same parameters, pairs, options, seed and number of threads give the same
    bits. ``on_epoch(epoch, mean_loss)`` is called after each epoch, from 1.
    Raises TrainingError for fewer than two pairs or a loss that is not finite.
    """
    count = len(pairs.positives)
    if options.local_epochs == 0:
        return 0.0
    if count < _MIN_PAIRS:
        raise TrainingError(
            f"this site has {count} usable training pairs, and contrastive learning needs at "
            f"least {_MIN_PAIRS}: ingest question-passage pairs whose documents are in the library"
        )
    chance = np.random.Generator(np.random.Philox(key=seed))
    parameters = retriever.parameters()
    # No weight decay: the shared values' zero point is the encoder, not nothing.
    optimiser = torch.optim.AdamW(parameters, lr=options.learning_rate, weight_decay=0.0)
    steps = options.local_epochs * len(_batches(np.arange(count), options.batch_size))
    schedule = torch.optim.lr_scheduler.LinearLR(optimiser, 1.0, _FINAL_RATE, max(steps - 1, 1))
    content = _content_numbers(pairs.passages)
    mean_loss = 0.0

    for epoch in range(1, options.local_epochs + 1):
        losses: list[float] = []
        order = chance.permutation(count)
        for batch in _batches(order, options.batch_size):
            drawn = np.array([chance.choice(pairs.positives[pair]) for pair in batch])  # [b]
            mined = [pairs.negatives[pair][: options.hard_negatives] for pair in batch]
            rows = np.unique(np.concatenate([drawn, *mined]))  # [m] every candidate passage once
            target = torch.from_numpy(np.searchsorted(rows, drawn))  # [b] column of each positive
            hidden = torch.from_numpy(_also_right(pairs, batch, rows, drawn, content))  # [b, m]

            queries = retriever.forward(pairs.queries, batch)  # [b, d] unit rows
            passages = retriever.forward(pairs.passages, rows)  # [m, d] unit rows
            loss = info_nce(queries, passages, target, hidden, options.temperature)

            optimiser.zero_grad(set_to_none=True)
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(parameters, _CLIP)
            optimiser.step()
            schedule.step()
            losses.append(_finite(loss.item(), epoch) * len(batch))
        mean_loss = sum(losses) / count
        if on_epoch is not None:
            on_epoch(epoch, mean_loss)
    return mean_loss


def info_nce(
    queries: Tensor, passages: Tensor, target: Tensor, hidden: Tensor, temperature: float
) -> Tensor:
    """Cross entropy of each query's positive among the batch's passages (a scalar).

    ``queries`` [b, d] and ``passages`` [m, d] have rows of length 1; ``target``
    [b] names each query's column; ``hidden`` [b, m] is true where a passage is
    neither the positive nor a negative of that query. Source: van den Oord et
    al. 2018, equation 4, on cosines divided by ``temperature``.
    """
    scores = queries @ passages.T / temperature  # [b, m]
    scores = scores.masked_fill(hidden.to(scores.device), -torch.inf)
    return functional.cross_entropy(scores, target.to(scores.device))


def training_seed(seed: int, round_number: int, site: str) -> int:
    """The 128-bit seed of one site's training in one round.

    Mixed, so that sites do not shuffle in step and rounds do not repeat one another.
    """
    text = f"hanse-training-v1\0{seed}\0{round_number}\0{site}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:16], "little")


def _batches(order: Rows, size: int) -> list[Rows]:
    """Runs of ``size`` pairs; a lone last one, which would lack negatives, joins the one before."""
    parts = [order[start : start + size] for start in range(0, len(order), size)]
    if len(parts) > 1 and len(parts[-1]) == 1:
        parts[-2:] = [np.concatenate(parts[-2:])]
    return parts


def _also_right(
    pairs: TrainingSet, batch: Rows, rows: Rows, drawn: Rows, content: Rows
) -> NDArray[np.bool_]:
    """[b, m]: passages that answer the query too, or say the same as one that does.

    They are left out of the sum: as negatives they would teach that a right
    answer is wrong. Only the positive that was drawn stays.
    """
    hidden = np.zeros((len(batch), len(rows)), dtype=np.bool_)
    for line, (pair, positive) in enumerate(zip(batch, drawn, strict=True)):
        hidden[line] = np.isin(content[rows], content[pairs.positives[pair]])
        hidden[line, np.searchsorted(rows, positive)] = False
    return hidden


def _content_numbers(texts: Texts) -> Rows:
    """[m] A number per distinct text: equal texts are one passage to learn from."""
    numbers: dict[str, int] = {}
    return np.array(
        [numbers.setdefault(text, len(numbers)) for text in texts.texts], dtype=np.int64
    )


def _finite(loss: float, epoch: int) -> float:
    if not math.isfinite(loss):
        raise TrainingError(
            f"the training loss became {loss} in epoch {epoch}: lower the learning rate or raise "
            "the temperature; no update was made"
        )
    return loss
