"""Which attempt a site expects next, and how long it waits for a sign of it. PURE."""

from __future__ import annotations

import math

from peers.timing import Timing


class Patience:
    """The attempt that this site waits for, to begin it or to hear of it.

    ``until`` is when it is this site's turn to act (seconds, monotonic); infinity
    when it waits for nothing. ``part_lost``: what it did in the attempt under way
    went with a restart, and it has heard nothing of that attempt since.
    """

    def __init__(self, timing: Timing, attempt: int) -> None:
        self.attempt = attempt
        self.until = math.inf
        self.part_lost = False
        self._timing = timing

    @property
    def idle(self) -> bool:
        """Whether nothing is waited for."""
        return self.until == math.inf

    def nothing(self, attempt: int | None = None) -> None:
        """Wait for nothing, until somebody says something; ``attempt`` would be next."""
        self.attempt = self.attempt if attempt is None else attempt
        self.until, self.part_lost = math.inf, False

    def restarted(self, now: float) -> None:
        """A moment later, when peers can be reached; unless we hear of progress before."""
        self.until = now + self._timing.retry(0)
        self.part_lost = True

    def wait_for(self, attempt: int, since: float) -> None:
        """Another site's turn: give it time from then on."""
        self.attempt, self.part_lost = attempt, False
        self.until = since + self._timing.patience(attempt)

    def begin_at(self, attempt: int, when: float) -> None:
        """Our turn, at that time."""
        self.attempt, self.part_lost, self.until = attempt, False, when

    def got_on(self, attempt: int, now: float, *, train: bool) -> None:
        """The attempt under way got on: its next sign of life may take this long."""
        self.part_lost = False
        silent = self._timing.patience(attempt, 1 if train else 3)
        self.until = now + silent + (self._timing.train(attempt) if train else 0.0)
