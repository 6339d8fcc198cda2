"""Of which documents somebody may ask, looked up when the question is answered.

A question waits for its turn behind others, up to minutes. What whoever asks may do then counts,
and not what they might when it came; and again when there is an answer, before it is given.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

from daemon.process.workers import Worker

T = TypeVar("T")
Rights = Callable[[], tuple[str, ...] | None]
"""The collections, by name; None: all documents. Raises RightsLost."""
Told = Callable[[object], None]


class RightsLost(Exception):
    """Who asked may not any more; the text says why."""


def of_all() -> None:
    """The rights of who administers the site."""


async def run_for(
    rights: Rights | None, worker: Worker, told: Told | None, job: Callable[..., T], *given: Any
) -> T:
    """The job's result for these rights, which are the last that it is given; None: nothing is.

    ``told`` gets what it reports, as long as the rights are what they were when it began.
    Raises what the rights raise: then nothing was run, or its result is nobody's.
    """
    if rights is None:
        return await worker.run(job, *given)
    while True:
        now: list[tuple[str, ...] | None] = []

        def due(now: list[tuple[str, ...] | None] = now) -> tuple[Any, ...]:
            now.append(rights())
            return *given, now[0]

        def heard(item: object, now: list[tuple[str, ...] | None] = now) -> None:
            with suppress(RightsLost):
                if told is not None and rights() == now[0]:
                    told(item)

        result = await worker.run_as_due(job, due, None if told is None else heard)
        if rights() == now[0]:
            return result
