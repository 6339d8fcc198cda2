"""Deadlines of the round protocol: two settings and one growth, no more. PURE.

P is ``phase_s``, T is ``train_s``; both grow with the attempt, so a federation
that is slower than its settings gets through after a few attempts. How the rest
follows, in the order of an attempt:

    coordinator                       waits at most     a site that hears nothing gives up
    prepare   promises                P                 2 P after its promise
      ... after a quorum promised     P / 20
    plan      answers                 P
    key       public context          P, beside train
              in masking mode keys    P, and P for shares, beside train
    train     exponents               T                 T + 2 P after the bundle, or a masking order
    aggregate updates, then the sum   P + P
    select    the question            P                 (with a robust rule)
      ...     signatures of a quorum  P
      ...     products, then the sum  P
    state     signatures of a quorum  P
    open      f + 1 equal versions    P                 (challenge, proof and the sum's transfer)
              in masking mode shares  P, then P
    vote      votes of a quorum       P                 4 P after the scale and later signs of life

What is lost on the way to one who opens the sum costs that site at most: f + 1 equal
versions prove it, and the others fetch that one.

A site's patience is the coordinator's longest silence (3 P: updates, the sum, the
question) and one P more: for the way of the messages and for clocks whose rates differ
(a quarter at worst). So the coordinator, who knows the cause, is the first to say that
an attempt failed, and a site's patience ends only if the coordinator is gone. Each kind
of sign counts once (peers/rounds/pacemaker.py).

P must exceed the longest of: encrypting and uploading an update, finishing and
sending the sum, decrypting it, fetching a version. T must exceed the local
training of the slowest site. Both are measured: `fedctl rounds` shows each
phase's seconds. A coordinator that dies costs one attempt, at most T + 2 P or 4 P,
whichever is more.
"""

from __future__ import annotations

from dataclasses import dataclass

# Seven to eight times as long, at 1.5: a federation that needs more has settings to mend, and
# people who have mended what kept it must not wait for a day until an old attempt is over.
MOST_GROWN = 5


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
        """How long it still waits for the others, after a quorum or masking's threshold."""
        return self.phase(attempt) / 20

    def patience(self, attempt: int, silent_phases: int = 1) -> float:
        """How long a site waits for a sign of progress before it gives an attempt up."""
        return (silent_phases + 1) * self.phase(attempt)

    def retry(self, attempt: int) -> float:
        """Pause after a failed attempt, so that a lasting cause does not spin: up to 30 s."""
        return min(self.phase_s * self.growth ** min(attempt, 8) / 20, 30.0)

    def _grown(self, attempt: int) -> float:
        return float(self.growth ** min(attempt, MOST_GROWN))
