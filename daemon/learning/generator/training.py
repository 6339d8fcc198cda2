"""Training of a generator at one site: to foretell the answers to its own questions.

The plan's options of contrast (temperature, negatives, batches by topic, distillation) and the
head's dropout mean nothing here and are not looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from torch import Tensor

from daemon.learning.batches import in_runs, random_batches
from daemon.learning.engine.descent import Descent
from daemon.learning.engine.engine import Engine
from daemon.learning.generator.encoding import Lesson
from daemon.learning.generator.generator import Generator
from daemon.learning.losses import proximal
from daemon.learning.options import TrainingError, TrainingOptions
from daemon.learning.parameters import copies_of


def fit(
    generator: Generator,
    lessons: Sequence[Lesson],
    options: TrainingOptions,
    seed: int,
    on_epoch: Callable[[int, float], None] | None = None,
    anchor: list[Tensor] | None = None,
    engine: Engine | None = None,
) -> float:
    """Train the generator in place; the last epoch's mean loss in nats a token of an answer.

    0: no epoch. A step is of ``batch_size`` examples times the generator's ``accumulation``;
    each token of its answers weighs the same, however they fall into batches. The proximal term
    (FedProx) is minimised with it but not counted in it. ``anchor``: the parent version's shared
    parameters, to which it holds; None: as they are now. ``engine``: of the process group that this
    process is in; None: it trains alone. Each of a group reads its share of a step's examples, and
    factors drop out in each as its rank has it. The same parameters, lessons, options,
    seed and number of threads give the same bits. ``on_epoch(epoch, mean_loss)`` is called after
    each epoch, from 1. Raises TrainingError for no lesson and for a loss that is not finite.
    """
    if options.local_epochs == 0:
        return 0.0
    check_enough(lessons)
    chance = np.random.Generator(np.random.Philox(key=seed))
    shared = generator.shared_parameters()
    start = copies_of(shared) if anchor is None and options.proximal else anchor
    a_step = options.batch_size * generator.spec.accumulation
    steps = options.local_epochs * len(in_runs(np.arange(len(lessons)), a_step))
    engine = engine or Engine(generator.device)
    descent = Descent(generator.parameters(), steps, options, engine)
    tokens = sum(len(lesson.answer) for lesson in lessons)
    mean_loss = 0.0

    with generator.training(seed + engine.rank):
        for epoch in range(1, options.local_epochs + 1):
            lost = 0.0
            for step in random_batches(len(lessons), a_step, chance):
                taken = [lessons[row] for row in step]
                answered = sum(len(lesson.answer) for lesson in taken) / engine.processes
                # Long ones first, so that the shares are of like length.
                taken.sort(key=lambda lesson: lesson.length, reverse=True)
                for part in generator.batches(engine.share(taken), options.batch_size):
                    loss = generator.loss(part)
                    descent.accumulate(loss / answered, epoch)
                    lost += loss.item()
                if start is not None and options.proximal:
                    descent.accumulate(options.proximal * proximal(shared, start), epoch)
                descent.step()
            mean_loss = engine.total(lost) / tokens
            if on_epoch is not None:
                on_epoch(epoch, mean_loss)
    return mean_loss


def check_enough(lessons: Sequence[Lesson]) -> None:
    """Raise TrainingError where there is nothing to train on."""
    if not lessons:
        raise TrainingError("there is no question-passage-answer triple to train on")
