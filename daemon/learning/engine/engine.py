"""What training runs on: Hugging Face Accelerate, in one process or as one of several.

Several processes train as one: each draws the same batches from the same seed, embeds
its slice of a batch's rows, and is given what the others made of theirs
(`Engine.embedded`), so that all have the in-batch negatives of one. Each then has the
whole loss, and of its gradient the part that goes through its own slice. Where a loss is a
sum over examples each has the loss of its own (`Engine.share`), as often as there are processes.
Of both the mean of the gradients (`Engine.agree`) is that of one process, up to the order of sums.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, Final, Literal, TypeVar

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import Tensor, distributed, nn

from crypto.arrays import Rows

T = TypeVar("T")
Precision = Literal["float32", "bfloat16"]

_MIXED: Final[dict[Precision, str]] = {"float32": "no", "bfloat16": "bf16"}
# By these Accelerate and its like are told what they are to be; a training is told by settings.
_SAID_BY_LAUNCHERS: Final = ("ACCELERATE_", "FSDP_", "PMI_", "OMPI_COMM_", "MV2_COMM_")
_PLACES: Final = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")


class Engine:
    """One process's part in a training, on one device.

    Alone, it changes no bit of what plain torch does with the same steps. In a process
    group (`daemon.learning.engine.group.together`) each process makes one.
    ``precision``: "bfloat16" embeds in mixed precision; parameters, the loss and the
    optimiser's state stay float32.
    """

    def __init__(self, device: torch.device, precision: Precision = "float32") -> None:
        in_group = distributed.is_initialized()
        self.rank = distributed.get_rank() if in_group else 0
        self.processes = distributed.get_world_size() if in_group else 1
        self._message: Tensor | None = None
        place = (self.rank, self.rank, self.processes, self.processes) if in_group else ()
        # Kept for the process, and with it the device and precision of the engine before.
        AcceleratorState._reset_state(reset_partial_state=True)
        with _told_by_us(dict(zip(_PLACES, map(str, place), strict=False))):
            self._accelerator = Accelerator(
                cpu=device.type == "cpu",
                mixed_precision=_MIXED[precision],
                step_scheduler_with_optimizer=False,  # else it falls once a process
            )

    def prepared(
        self, optimiser: torch.optim.Optimizer, schedule: torch.optim.lr_scheduler.LRScheduler
    ) -> tuple[Any, Any]:
        """Both, to be stepped as they were."""
        optimiser, schedule = self._accelerator.prepare(optimiser, schedule)
        return optimiser, schedule

    def embedded(self, embed: Callable[[Rows], Tensor], rows: Rows, width: int) -> Tensor:
        """What ``embed`` makes of all ``rows``, differentiably: [len(rows), width].

        Each process embeds its slice. The gradient that goes into it is ``processes`` times
        that of one process, for `agree` takes the mean.
        """
        if self.processes == 1:
            return self._embedded(embed, rows)
        slices = np.array_split(rows, self.processes)
        mine = slices[self.rank]
        if len(mine):
            part = self._embedded(embed, mine)
        else:  # a batch of fewer rows than processes
            part = torch.zeros(0, width, device=self._accelerator.device, requires_grad=True)
        gathered: Tensor = _Gathered.apply(  # type: ignore[no-untyped-call]
            part, [len(one) for one in slices], self.rank, self._accelerator
        )
        return gathered

    def _embedded(self, embed: Callable[[Rows], Tensor], rows: Rows) -> Tensor:
        with self._accelerator.autocast():
            return embed(rows).float()

    def share(self, items: Sequence[T]) -> Sequence[T]:
        """Of what all processes have been given, what is this one's to do; may be none of it."""
        return items[self.rank :: self.processes]

    def total(self, value: float) -> float:
        """The sum of what the processes have; each says it in its turn."""
        if self.processes == 1:
            return value
        values = torch.tensor([value], dtype=torch.float64, device=self._accelerator.device)
        distributed.all_reduce(values)
        return float(values)

    def backward(self, loss: Tensor) -> None:
        """Add this process's gradients of ``loss``."""
        self._accelerator.backward(loss)

    def agree(self, parameters: Sequence[nn.Parameter]) -> None:
        """Make the gradients their mean over the processes, in each the same bits."""
        if self.processes == 1:
            return
        # In one message, with whether a process has any: without, the optimiser leaves one be.
        has = torch.tensor([float(one.grad is not None) for one in parameters])
        parts = [
            (torch.zeros_like(one) if one.grad is None else one.grad).reshape(-1)
            for one in parameters
        ]
        parts.append(has.to(parts[0].device))
        sizes = [len(one) for one in parts]
        if self._message is None or len(self._message) != sum(sizes):
            # Kept: memory that is new in each step costs more than to write to it.
            self._message = torch.empty(sum(sizes), device=parts[0].device)
        flat = torch.cat(parts, out=self._message)
        distributed.all_reduce(flat)  # in place: Accelerate's own copies all gradients once more
        mean = torch.split(flat.div_(self.processes), sizes)
        for one, gradient, had in zip(parameters, mean, mean[-1].tolist(), strict=False):
            if not had:
                continue
            if one.grad is None:
                one.grad = torch.empty_like(one)
            one.grad.copy_(gradient.view_as(one))

    def clip(self, parameters: Sequence[nn.Parameter], norm: float) -> None:
        """Make the gradient's L2 norm at most ``norm``."""
        self._accelerator.clip_grad_norm_(parameters, norm)


class _Gathered(torch.autograd.Function):
    """Rows of all processes [n, d] of the part that each has; slices may be unequal.

    Backwards no process is asked: each has the whole loss, and so the gradient of its part.
    """

    @staticmethod
    def forward(
        ctx: Any, part: Tensor, sizes: list[int], rank: int, accelerator: Accelerator
    ) -> Tensor:
        ctx.bounds = list(pairwise(np.cumsum([0, *sizes]).tolist()))[rank]
        ctx.processes = len(sizes)
        longest = max(sizes)
        padded = part.new_zeros(longest, part.shape[1])
        padded[: len(part)] = part
        every = accelerator.gather(padded).split(longest)
        return torch.cat([one[:size] for one, size in zip(every, sizes, strict=True)])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        start, end = ctx.bounds
        return ctx.processes * gradients[0][start:end], None, None, None


@contextmanager
def _told_by_us(variables: dict[str, str]) -> Iterator[None]:
    """An environment with these variables, and none that a launcher of fedd may have set."""
    before = dict(os.environ)
    for name in before:
        if name.startswith(_SAID_BY_LAUNCHERS) or name in _PLACES:
            del os.environ[name]
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables:
            os.environ.pop(name, None)
        os.environ.update(before)
