"""Long work as its caller sees it: step by step, and given up when the caller goes away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from typing import Any, TypeVar

Step = TypeVar("Step")
Outcome = TypeVar("Outcome")


@asynccontextmanager
async def watched(
    begin: Callable[[Callable[[object], None]], Coroutine[Any, Any, Outcome]],
    *kinds: type[Step],
) -> AsyncIterator[tuple[AsyncIterator[Step], asyncio.Task[Outcome]]]:
    """Begin, and give it up when the block is left early: steps, and the task that they are of.

    ``begin`` gets who listens; of what it tells, what is of these ``kinds`` are the steps. They
    end when the work does, whose result or refusal is the task's.
    """
    steps: asyncio.Queue[Step | None] = asyncio.Queue()

    def listener(item: object) -> None:
        if isinstance(item, kinds):
            steps.put_nowait(item)

    work = asyncio.create_task(begin(listener))
    work.add_done_callback(lambda _: steps.put_nowait(None))
    try:
        yield _until_none(steps), work
    finally:
        if not work.done():
            work.cancel()
            with suppress(asyncio.CancelledError):
                await work


async def _until_none(steps: asyncio.Queue[Step | None]) -> AsyncIterator[Step]:
    while (step := await steps.get()) is not None:
        yield step
