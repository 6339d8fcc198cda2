"""A retriever's training in as many processes as the site's settings say."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from crypto.arrays import Float32
from daemon.learning.engine.engine import Engine
from daemon.learning.engine.group import Group, Tell, train_together
from daemon.learning.options import EpochProgress, TrainingOptions
from daemon.learning.parameters import arrays_of, copies_of, take
from daemon.learning.retriever.encoder import Encoder
from daemon.learning.retriever.retriever import Retriever, adapted
from daemon.learning.retriever.spec import RetrieverSpec
from daemon.learning.retriever.training import TrainingSet, check_enough, fit


@dataclass(frozen=True)
class _Work:
    """What each process is given; ``parameters`` and ``anchor`` in the retriever's order."""

    spec: RetrieverSpec
    threads: int
    pairs: TrainingSet
    options: TrainingOptions
    seed: int
    parameters: list[Float32]
    anchor: list[Float32]


def train(
    spec: RetrieverSpec,
    retriever: Retriever,
    pairs: TrainingSet,
    options: TrainingOptions,
    seed: int,
    on_epoch: Callable[[int, float], None] | None = None,
    anchor: list[Tensor] | None = None,
) -> float:
    """As `fit`, in ``spec.processes`` processes: the same update, up to the order of sums.

    Each has its share of ``spec.threads``, and a copy of the encoder. One process where a
    step costs less than to tell others of it: a head on cached features. Where training
    fails in several, the retriever is as before.
    """
    if spec.processes == 1 or retriever.uses_features or options.local_epochs == 0:
        engine = Engine(retriever.encoder.device, spec.precision)
        return fit(retriever, pairs, options, seed, on_epoch, anchor, engine)
    check_enough(len(pairs.positives))
    threads = max(1, spec.threads // spec.processes)
    group = Group(spec.processes, threads, retriever.encoder.device.type)
    start = copies_of(retriever.shared_parameters()) if anchor is None else anchor
    given = arrays_of(retriever.parameters()), arrays_of(start)
    work = _Work(spec, threads, pairs, options, seed, *given)
    return train_together(group, _part, work, retriever.parameters(), on_epoch)


def _part(tell: Tell, work: _Work) -> tuple[float, list[Float32]]:
    """In one process of a group: the mean loss, and the parameters as they are then."""
    spec, options = work.spec, work.options
    encoder = Encoder.load(
        spec.encoder,
        max_tokens=spec.max_tokens,
        device=spec.device,
        threads=work.threads,
        options=spec.reading,
    )
    retriever = adapted(encoder, spec.adapt, rank=spec.lora_rank, alpha=spec.lora_alpha)
    take(retriever.parameters(), work.parameters)
    anchor = [torch.from_numpy(value).to(encoder.device) for value in work.anchor]
    mean_loss = fit(
        retriever,
        work.pairs,
        options,
        work.seed,
        lambda epoch, loss: tell(EpochProgress(epoch, options.local_epochs, loss)),
        anchor,
        Engine(encoder.device, spec.precision),
    )
    return mean_loss, arrays_of(retriever.parameters())
