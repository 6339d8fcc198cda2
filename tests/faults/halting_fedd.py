"""`fedd` with a breakpoint: the real daemon stands still where a test wants to strike.

    python -m tests.faults.halting_fedd --config site/fedd.toml     (HANSE_TAPE=folder)

As long as the folder holds a file ``halt-at`` with the name of a phase, the daemon
stops its event loop when an attempt that it coordinates enters this phase, before
anything of that phase has left the house, and says so by a file ``halted``. It goes
on when ``halt-at`` is gone.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from daemon import main as fedd
from daemon.rounds.driver import Driver
from peers.attempts import effects as do

# A coordinator that trains too shows "train" when its own part begins, and again
# when every participant has taken the plan: that is when the attempt trains.
_TIMES_SHOWN = {"train": 2}


def run() -> None:
    """The daemon's own main, with a breakpoint where it shows its progress."""
    folder = Path(os.environ["HANSE_TAPE"])
    show = Driver._show
    shown: dict[tuple[int, int, str], int] = {}

    def halting(self: Driver, effect: do.Progress) -> None:
        show(self, effect)
        wanted = folder / "halt-at"
        if effect.coordinator != self.identity.site_id or not wanted.exists():
            return
        at = (effect.round, effect.attempt, effect.phase)
        shown[at] = shown.get(at, 0) + 1
        if wanted.read_text() == effect.phase and shown[at] == _TIMES_SHOWN.get(effect.phase, 1):
            (folder / "halted").touch()
            while wanted.exists():
                time.sleep(0.002)

    Driver._show = halting  # type: ignore[method-assign]
    fedd.main()


if __name__ == "__main__":
    run()
