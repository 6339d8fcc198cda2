"""So many questions wait for an answer, and no more: whoever would wait too long learns it at once.

fedd answers one question after the other. Those that wait come by turns: one of each token's,
whichever came first of it, so that who asks a hundred at once keeps nobody else waiting for a
hundred. Who comes when as many wait as may is told to come again when half of them should be
answered, as long as answers have taken lately. Files that people bring are read in such turns, too.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Final

from daemon.process import metrics

# One is answered, and the next stands ready for when it is: a worker does not wait for what is
# written of the one before. More would stand in front of whoever's turn comes meanwhile.
_AT_ONCE: Final = 2
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


class InTurn:
    """So many at once; those that wait come by turns, one of each asker's."""

    def __init__(self, at_once: int) -> None:
        self._free = at_once
        # By who asks, in the order of their turns: who was last served is last.
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}

    @asynccontextmanager
    async def due(self, asker: str) -> AsyncIterator[None]:
        """The block is run when its turn has come. ``asker``: by name."""
        await self._until_due(asker)
        try:
            yield
        finally:
            self._pass_on()

    async def _until_due(self, asker: str) -> None:
        if self._free:  # then nobody waits
            self._free -= 1
            return
        due = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(asker, deque()).append(due)
        try:
            await due
        except asyncio.CancelledError:
            if due.cancelled():
                self._forget(asker, due)
            else:  # its turn had just come
                self._pass_on()
            raise

    def _forget(self, asker: str, due: asyncio.Future[None]) -> None:
        own = self._waiting.get(asker, deque())
        with suppress(ValueError):  # passed over already
            own.remove(due)
        if not own:
            self._waiting.pop(asker, None)

    def _pass_on(self) -> None:
        """One is done: the next is the oldest of whoever was served longest ago."""
        while self._waiting:
            asker, own = next(iter(self._waiting.items()))
            del self._waiting[asker]
            while own and own[0].done():  # given up
                own.popleft()
            if own:
                due = own.popleft()
                if own:
                    self._waiting[asker] = own
                due.set_result(None)
                return
        self._free += 1


class Turns:
    """Whose question is answered next; ``clock``: seconds, of any origin."""

    def __init__(self, most: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._most, self._clock = most, clock
        self._under_way = 0
        self._answering = InTurn(_AT_ONCE)
        self._usual_s = _FIRST_S
        self._last_ended = -math.inf

    @asynccontextmanager
    async def one(self, asker: str) -> AsyncIterator[None]:
        """The block is run when its turn has come; TooManyError. ``asker``: by name."""
        if self._under_way >= self._most:
            metrics.count("hanse_questions_refused")
            wait_s = self._usual_s * self._most / 2
            raise TooManyError(self._most, min(max(1.0, wait_s), _LONGEST_S))
        begun = self._clock()
        self._under_way += 1
        metrics.count("hanse_questions_waiting")
        try:
            async with self._answering.due(asker):
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
