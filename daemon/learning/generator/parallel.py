"""A generator's training in as many processes as the site's settings say."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from crypto.arrays import Float32
from daemon.learning.engine.engine import Engine
from daemon.learning.engine.group import Group, Tell, train_together
from daemon.learning.generator.encoding import Lesson
from daemon.learning.generator.generator import Generator
from daemon.learning.generator.spec import GeneratorSpec
from daemon.learning.generator.training import check_enough, fit
from daemon.learning.options import EpochProgress, TrainingOptions
from daemon.learning.parameters import arrays_of, take


@dataclass(frozen=True)
class _Work:
    """What each process is given; ``parameters`` in the generator's order."""

    spec: GeneratorSpec
    lessons: Sequence[Lesson]
    options: TrainingOptions
    seed: int
    parameters: list[Float32]


def train(
    generator: Generator,
    lessons: Sequence[Lesson],
    options: TrainingOptions,
    seed: int,
    on_epoch: Callable[[int, float], None] | None = None,
) -> float:
    """As `fit`, in ``spec.processes`` processes: without dropout the same update up to rounding.

    Each has its share of ``spec.threads``, and a copy of the base model. Where training fails
    in several, the generator is as before.
    """
    spec = generator.spec
    if spec.processes == 1 or options.local_epochs == 0:
        return fit(generator, lessons, options, seed, on_epoch)
    check_enough(lessons)
    each = replace(spec, threads=max(1, spec.threads // spec.processes))
    group = Group(spec.processes, each.threads, generator.device.type)
    work = _Work(each, lessons, options, seed, arrays_of(generator.parameters()))
    return train_together(group, _part, work, generator.parameters(), on_epoch)


def _part(tell: Tell, work: _Work) -> tuple[float, list[Float32]]:
    """In one process of a group: the mean loss, and the parameters as they are then."""
    generator, epochs = Generator.load(work.spec), work.options.local_epochs
    take(generator.parameters(), work.parameters)
    mean_loss = fit(
        generator,
        work.lessons,
        work.options,
        work.seed,
        lambda epoch, loss: tell(EpochProgress(epoch, epochs, loss)),
        engine=Engine(generator.device),
    )
    return mean_loss, arrays_of(generator.parameters())
