"""Deadlines of the round protocol: two settings and one growth, no more. PURE.

P is ``phase_s``, T is ``train_s``; both grow with the attempt, so a federation
that is slower than its settings gets through after a few attempts. How the rest
follows, in the order of an attempt:

    coordinator                       waits at most     a site that hears nothing gives up
    prepare   promises                P                 2 P after its promise
      ... after a majority promised   P / 20
    plan      answers                 P
    key       public context          P, beside train
    train     exponents               T                 T + 2 P after the plan (P + T, and P)
    aggregate updates, then the sum   P + P
    unmask    each of two answers     P, in masking mode; then P for the sum
    select    products, then the sum  P               (with a robust rule; all hear of it)
    apply     the first vote          P               (claim, proof and the sum's transfer)
    vote      a majority              P                 4 P after the scale (3 P, and P)

What is lost on the way to a proof costs the holder at most: who has not asked for one
when the first vote comes is told to fetch that version, and who waits for an answer
gets the version with the commit.

A site's patience is the coordinator's longest silence and one P more: for the
way of the messages and for clocks whose rates differ (a quarter at worst). So
the coordinator, who knows the cause, is the first to say that an attempt failed,
and a site's patience ends only if the coordinator is gone.

P must exceed the longest of: encrypting and uploading an update, finishing and
sending the sum, decrypting it, fetching a version. T must exceed the local
training of the slowest site. Both are measured: `fedctl rounds` shows each
phase's seconds. A coordinator that dies costs one attempt, at most T + 2 P.
"""

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

    def patience(self, attempt: int, silent_phases: int = 1) -> float:
        """How long a site waits for a sign of progress before it gives an attempt up."""
        return (silent_phases + 1) * self.phase(attempt)

    def retry(self, attempt: int) -> float:
        """Pause after a failed attempt, so that a lasting cause does not spin."""
        return min(self.phase(attempt) / 20, 30.0)

    def _grown(self, attempt: int) -> float:
        return float(self.growth ** min(attempt, 8))
