"""Deadlines of the round protocol: two settings and one growth, no more. PURE."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Timing:
    """Deadlines, in seconds; each grows by ``growth`` with every further attempt."""

    phase_s: float
    train_s: float
    growth: float = 1.5

    def phase(self, attempt: int) -> float:
        """How long the coordinator waits in a phase other than training."""
        return self.phase_s * self._grown(attempt)

    def train(self, attempt: int) -> float:
        """How long it waits for local training."""
        return self.train_s * self._grown(attempt)

    def straggler(self, attempt: int) -> float:
        """How long after a majority has promised it still waits for the others."""
        return self.phase(attempt) / 20

    def patience(self, attempt: int) -> float:
        """How long a site waits for a sign of progress before it gives an attempt up.

        Longer than any phase of the coordinator, so that the coordinator, who
        knows the cause, is the first to say that an attempt failed.
        """
        return 2 * self.phase(attempt)

    def retry(self, attempt: int) -> float:
        """Pause after a failed attempt, so that a lasting cause does not spin."""
        return min(self.phase(attempt) / 20, 30.0)

    def _grown(self, attempt: int) -> float:
        return float(self.growth ** min(attempt, 8))
