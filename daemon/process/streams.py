"""Long work as its caller sees it: step by step, and given up when the caller goes away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from typing import Any, TypeVar, cast

Step = TypeVar("Step")
Outcome = TypeVar("Outcome")


class Listener:
    """Who is told what becomes of long work; never in the way of it."""

    def __init__(self, kinds: tuple[type, ...]) -> None:
        self._kinds = kinds
        self._steps: asyncio.Queue[object] = asyncio.Queue()

    def __call__(self, item: object) -> None:
        """Tell it, if it is a step."""
        if isinstance(item, self._kinds):
            self._steps.put_nowait(item)

    @property
    def behind(self) -> bool:
        """Whether something that was told has not been taken yet."""
        return not self._steps.empty()

    async def has_all(self) -> None:
        """When everything that was told has been taken."""
        await self._steps.join()

    def end(self) -> None:
        """Nothing more will be told."""
        self._steps.put_nowait(None)

    async def steps(self) -> AsyncIterator[object]:
        """What is told, to the end. A step counts as taken when the next one is asked for."""
        while (step := await self._steps.get()) is not None:
            yield step
            self._steps.task_done()


@asynccontextmanager
async def watched(
    begin: Callable[[Listener], Coroutine[Any, Any, Outcome]], *kinds: type[Step]
) -> AsyncIterator[tuple[AsyncIterator[Step], asyncio.Task[Outcome]]]:
    """Begin, and give it up when the block is left early: steps, and the task that they are of.

    ``begin`` gets who listens; of what it tells, what is of these ``kinds`` are the steps. They
    end when the work does, whose result or refusal is the task's.
    """
    listener = Listener(kinds)
    work = asyncio.create_task(begin(listener))
    work.add_done_callback(lambda _: listener.end())
    try:
        yield cast(AsyncIterator[Step], listener.steps()), work
    finally:
        if not work.done():
            work.cancel()
            with suppress(asyncio.CancelledError):
                await work
        elif not work.cancelled():
            work.exception()  # whoever left early does not ask for it
