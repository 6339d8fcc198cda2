"""When to try again, and when to say something again. PURE: clock and chance are arguments."""

from __future__ import annotations

import random
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

W = TypeVar("W")


@dataclass
class Backoff:
    """Pauses that double from ``first_s`` up to ``most_s`` seconds, each shortened by chance.

    A pause is drawn from the upper half of its bound: sites that lost each other
    at the same moment (a switch rebooted, all were updated) drift apart with every
    try, and still none tries twice at once.
    """

    first_s: float
    most_s: float
    chance: random.Random
    _bound: float = field(init=False, default=0.0)

    def pause(self) -> float:
        """Seconds to wait before the next try."""
        self._bound = min(max(self._bound * 2, self.first_s), max(self.most_s, self.first_s))
        return self.chance.uniform(self._bound / 2, self._bound)

    def reset(self) -> None:
        """It worked, or there is reason to think that it will: begin with short pauses again."""
        self._bound = 0.0


def jittered(seconds: float, chance: random.Random, share: float = 0.2) -> float:
    """``seconds``, up to ``share`` of it more or less: what begins together does not stay so."""
    return seconds * chance.uniform(1 - share, 1 + share)


@dataclass
class _Repeated(Generic[W]):
    told: float
    last: W
    held_back: int = 0


class Repeats(Generic[W]):
    """Lets the first of many like events through, then one count for each ``every_s`` seconds.

    Its memory is bounded by the kinds of events (``key``), so these must not be of
    a stranger's choosing.
    """

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self._seen: dict[Hashable, _Repeated[W]] = {}

    def is_new(self, key: Hashable, what: W, now: float) -> bool:
        """Whether to tell this event now; if not, it is counted for `overdue`."""
        repeated = self._seen.get(key)
        if repeated is None:
            self._seen[key] = _Repeated(now, what)
            return True
        repeated.last = what
        repeated.held_back += 1
        return False

    def overdue(self, now: float) -> list[tuple[W, int]]:
        """The latest event of each kind, and how many were held back since it was told."""
        due: list[tuple[W, int]] = []
        for key, repeated in list(self._seen.items()):
            if now - repeated.told < self._every_s:
                continue
            if not repeated.held_back:
                del self._seen[key]  # quiet for a whole interval: the next one is news again
                continue
            due.append((repeated.last, repeated.held_back))
            repeated.told, repeated.held_back = now, 0
        return due
