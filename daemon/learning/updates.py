"""What a site's training hands to the crypto worker: checked, and whole or not at all."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from crypto.arrays import Float32
from crypto.durable import whole
from crypto.quantize import LOSS_BOUND
from daemon.learning.options import TrainingError


def update_of(trained: Float32, parent: Float32, mean_loss: float) -> Float32:
    """[D + 1]: what was trained less the parent version, then the mean loss over LOSS_BOUND."""
    tail = np.float32(min(max(mean_loss / LOSS_BOUND, 0.0), 1.0))
    update: Float32 = np.append(trained - parent, tail)
    return update


def check_update(update: Float32, num_examples: int, *kept: Float32) -> None:
    """What others would have to refuse, this site refuses itself; what it keeps, too.

    Raises TrainingError.
    """
    if not all(np.isfinite(values).all() for values in (update, *kept)):
        raise TrainingError(
            "training left values that are not finite: lower the learning rate; no update was made"
        )
    if num_examples <= 0:
        raise TrainingError("an update of no example weighs nothing: no update was made")


def write_update(path: Path, update: Float32) -> None:
    """As float32 in .npy; the crypto worker must never read half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole(path, lasting=False) as unfinished, unfinished.open("wb") as file:
        np.save(file, update.astype(np.float32), allow_pickle=False)
