"""`fedd` that may be Byzantine in what it contributes.

    python -m tests.live.poisoning_fedd --config site/fedd.toml     (HANSE_TAPE=folder)

As long as the folder holds a file ``poison`` with a number, the trained update is
multiplied by it before anything else sees it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

from daemon import main as fedd
from daemon.jobs import learning
from daemon.process.workers import Worker


def poison_updates() -> None:
    """Behind the training of this process's daemon stands an attacker."""
    poison = Path(os.environ["HANSE_TAPE"]) / "poison"
    original = Worker.run_reporting

    async def poisoned(self: Worker, report: Any, job: Any, *arguments: Any, **named: Any) -> Any:
        done = await original(self, report, job, *arguments, **named)
        if job is learning.train and poison.exists():
            path = arguments[-1]
            update = np.load(path, allow_pickle=False)
            update[:-1] *= np.float32(poison.read_text())  # the last value is the loss
            np.save(path, update, allow_pickle=False)
        return done

    Worker.run_reporting = poisoned  # type: ignore[assignment,method-assign]


if __name__ == "__main__":
    poison_updates()
    fedd.main()
