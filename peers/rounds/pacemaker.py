"""How long a site stays in an attempt, and what lets it go on. PURE.

A site enters attempt t + 1, never a later one, when its patience for t is over or t's
coordinator has ended it; further only when f + 1 sites have signed promises for later
attempts, of which one is honest. So nobody can push honest attempts aside, numbers can't
run away, a coordinator that is dead stops nothing, and a site that was away catches up
over any distance. And it leaves no attempt before it knows a quorum to be there; its patience
begins anew when they come. Whoever goes on alone meets nobody again. (Left out in a model,
each rule stalled: tests/models/rounds.py.)

Deadlines: two settings and one growth, no more. P is ``phase_s``, T is ``train_s``; both
grow with the attempt, so a federation that is slower than its settings gets through after
a few attempts. How the rest follows, in the order of an attempt:

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
of sign counts once.

P must exceed the longest of: encrypting and uploading an update, finishing and
sending the sum, decrypting it, fetching a version. T must exceed the local
training of the slowest site. Both are measured: `fedctl rounds` shows each
phase's seconds. A coordinator that dies costs one attempt, at most T + 2 P or 4 P,
whichever is more.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

# Seven to eight times as long, at 1.5: a federation that needs more has settings to mend, and
# people who have mended what kept it must not wait for a day until an old attempt is over.
MOST_GROWN = 5
_PAUSE_GROWN = 8  # likewise, of the pause behind a failed attempt, which is short at first
_LONGEST_PAUSE_S = 30.0


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
        """Pause after a failed attempt, so that a lasting cause does not spin."""
        grown = self.growth ** min(attempt, _PAUSE_GROWN)
        return min(self.phase_s * grown / 20, _LONGEST_PAUSE_S)

    def _grown(self, attempt: int) -> float:
        return float(self.growth ** min(attempt, MOST_GROWN))


class Pacemaker:
    """The attempt that this site is in, and how long it stays.

    ``until`` is when it is this site's turn to act (seconds, monotonic); infinity
    when it waits for nothing.
    """

    def __init__(self, timing: Timing) -> None:
        self.until = math.inf
        self.part_lost = False  # what it did in this attempt went with a restart
        self.alone = False  # it would go on, and waits until others are where it is
        self._timing = timing
        self._seen: set[str] = set()
        self._over = False  # its coordinator has ended the attempt

    @property
    def idle(self) -> bool:
        """Whether nothing is waited for."""
        return self.until == math.inf

    @property
    def over(self) -> bool:
        """Whether the attempt is over here for another reason than that nothing was heard."""
        return self._over

    def nothing(self) -> None:
        """Wait for nothing, until somebody says something."""
        self.until, self.part_lost = math.inf, False
        self._seen.clear()
        self._over = self.alone = False

    def restarted(self, now: float) -> None:
        """A moment later, when peers can be reached; unless we hear of progress before."""
        self.until, self.part_lost = now + self._timing.retry(0), True

    def told(self, now: float) -> None:
        """Peers have said what was asked at a start: it waits for them no longer."""
        if self.part_lost:
            self.until = now

    def due(self, now: float) -> None:
        """The next attempt is to be entered at once."""
        self.until, self.part_lost, self._over = now, False, True

    def entered(self, attempt: int, now: float) -> None:
        """An attempt begins here, whether its coordinator has said anything or not."""
        self._seen.clear()
        self.part_lost = self._over = self.alone = False
        self.until = now + self._timing.patience(attempt)

    def ended(self, attempt: int, now: float) -> None:
        """Its coordinator has ended the attempt: the next one after a moment."""
        self.until = min(self.until, now + self._timing.retry(attempt))
        self._over, self.part_lost = True, False

    def again(self, attempt: int, now: float) -> None:
        """The next attempt can't be entered yet: it looks again after a moment."""
        self.until, self.alone = now + self._timing.retry(attempt), True

    def got_on(self, what: str, attempt: int, now: float, *, train: bool = False) -> None:
        """The attempt got on: its next sign of life may take this long.

        Each kind of sign counts once, so that nobody holds an attempt up by repeating one.
        """
        if what in self._seen or self._over:
            return
        self._seen.add(what)
        self.part_lost = self.alone = False
        silent = self._timing.patience(attempt, 1 if train else 3)
        self.until = now + silent + (self._timing.train(attempt) if train else 0.0)


def reached(numbers: Mapping[str, int], sites: int) -> int:
    """The greatest number that so many of the sites, 1 at least, have come to; -1: none."""
    descending = sorted(numbers.values(), reverse=True)
    return descending[sites - 1] if len(descending) >= sites else -1
