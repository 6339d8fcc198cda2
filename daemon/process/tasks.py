"""What fails in the background: told in the log, and found in a group of tasks."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any

import structlog

log = structlog.get_logger()


async def logged(work: Awaitable[None]) -> None:
    """A bug in one piece of work must not take the daemon down, nor stay unseen."""
    try:
        await work
    except Exception:
        log.exception("background work failed: a bug")


def causes_of(group: BaseExceptionGroup[Any]) -> list[BaseException]:
    """The exceptions in a group, out of all the groups within it."""
    causes: list[BaseException] = []
    for error in group.exceptions:
        causes += causes_of(error) if isinstance(error, BaseExceptionGroup) else [error]
    return causes
