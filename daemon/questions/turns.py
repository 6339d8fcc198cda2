"""So many questions wait for an answer, and no more: whoever would wait too long learns it at once.

fedd answers one question after the other. Who comes when as many wait as may is told to come
again when half of them should be answered, as long as answers have taken lately.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from daemon.process import metrics

_NEWEST: Final = 0.2  # what the last answer's time weighs in the usual one
_FIRST_S: Final = 1.0  # where there was none yet
_LONGEST_S: Final = 60.0


class TooManyError(Exception):
    """One more than may wait; ``retry_after_s``: when it should be worth asking again."""

    def __init__(self, most: int, retry_after_s: float) -> None:
        super().__init__(
            f"{most} questions are being answered or wait for it, as many as may: try again in "
            f"{math.ceil(retry_after_s)} s"
        )
        self.retry_after_s = retry_after_s


class Turns:
    """Counts those that are answered or wait; ``clock``: seconds, of any origin."""

    def __init__(self, most: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._most, self._clock = most, clock
        self._under_way = 0
        self._usual_s = _FIRST_S
        self._last_ended = -math.inf

    @contextmanager
    def one(self) -> Iterator[None]:
        """Be one of them while the block lasts; TooManyError."""
        if self._under_way >= self._most:
            metrics.count("hanse_questions_refused")
            wait_s = self._usual_s * self._most / 2
            raise TooManyError(self._most, min(max(1.0, wait_s), _LONGEST_S))
        begun = self._clock()
        self._under_way += 1
        metrics.count("hanse_questions_waiting")
        try:
            yield
            self._took(begun)
        except asyncio.CancelledError:
            metrics.count("hanse_questions_given_up")
            raise
        finally:
            self._under_way -= 1
            metrics.count("hanse_questions_waiting", -1)

    def _took(self, begun: float) -> None:
        """One was answered: in the time since it came, or since the one before it was done."""
        now = self._clock()
        took = now - max(begun, self._last_ended)
        self._usual_s += _NEWEST * (took - self._usual_s)
        self._last_ended = now
