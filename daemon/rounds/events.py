"""The events that wait for the protocol, and who waits for it to take one.

Whatever happens at a site (a message, finished work, a person's wish) comes to the driver
through this one queue, in order.
"""

from __future__ import annotations

import asyncio

from peers.attempts import effects as do

QueuedEvent = tuple[do.Event, asyncio.Future[None] | None]  # an event, and who waits for it

_WAITING_AT_MOST = 10_000


class EventQueue:
    """Events in their order."""

    def __init__(self) -> None:
        self._events: asyncio.Queue[QueuedEvent] = asyncio.Queue(maxsize=_WAITING_AT_MOST)

    async def feed(self, event: do.Event) -> None:
        """Queue an event; waits only while the queue is full."""
        await self._events.put((event, None))

    async def ask(self, event: do.Event) -> None:
        """Queue an event and wait until the protocol took it; raises what it raised."""
        answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        await self._events.put((event, answer))
        await answer

    async def next(self, within_s: float) -> QueuedEvent:
        """The next event; a tick when none comes in time (seconds; a lasting wait for ever)."""
        try:
            async with asyncio.timeout(max(0.0, within_s) if within_s < 1e9 else None):
                return await self._events.get()
        except TimeoutError:
            return do.Tick(), None

    def take_asked(self) -> list[QueuedEvent]:
        """Those that somebody waits for, out of the queue; all others stay, in their order."""
        waiting = [self._events.get_nowait() for _ in range(self._events.qsize())]
        for entry in waiting:
            if entry[1] is None:
                self._events.put_nowait(entry)
        return [entry for entry in waiting if entry[1] is not None]

    def __len__(self) -> int:
        return self._events.qsize()


def answer(waiting: asyncio.Future[None] | None, refused: Exception | None) -> None:
    """Whoever waits for the protocol learns how it went, once."""
    if waiting is None or waiting.done():
        return
    if refused is None:
        waiting.set_result(None)
    else:
        waiting.set_exception(refused)
