"""The steps of local training, whatever trains: AdamW, clipped, with a rate that falls."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from daemon.learning.engine.engine import Engine
from daemon.learning.options import TrainingError, TrainingOptions

FINAL_RATE = 0.1  # of the learning rate, reached linearly at the last step
CLIP = 1.0  # L2 norm of a step's gradient


class Descent:
    """AdamW on an engine, its rate falling linearly over so many ``steps``."""

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        steps: int,
        options: TrainingOptions,
        engine: Engine,
    ) -> None:
        self._parameters = parameters
        self._engine = engine
        # No decay unless asked for: the shared values' zero point is the encoder, not nothing.
        # Fused: a sixth of the time, which each of several processes takes for all weights.
        optimiser = torch.optim.AdamW(
            parameters, lr=options.learning_rate, weight_decay=options.weight_decay, fused=True
        )
        schedule = torch.optim.lr_scheduler.LinearLR(optimiser, 1.0, FINAL_RATE, max(steps - 1, 1))
        self._optimiser, self._schedule = engine.prepared(optimiser, schedule)
        self._optimiser.zero_grad(set_to_none=True)  # of a descent that ended with an error

    def accumulate(self, loss: Tensor, epoch: int) -> None:
        """A part of the next step's loss, which is the sum of its parts.

        Of several processes one may have more parts than another, or none. Raises TrainingError
        when it is not finite.
        """
        if not math.isfinite(loss.item()):
            raise TrainingError(
                f"the training loss became {loss.item()} in epoch {epoch}: lower the learning "
                "rate (or, of a retriever, raise the temperature); no update was made"
            )
        self._engine.backward(loss)

    def step(self) -> None:
        """Take one step down what was accumulated."""
        self._engine.agree(self._parameters)
        self._engine.clip(self._parameters, CLIP)
        self._optimiser.step()
        self._schedule.step()
        self._optimiser.zero_grad(set_to_none=True)
