"""What is done when nothing else is to do: what a question would wait for, or a removal owes."""

from __future__ import annotations

import asyncio
from pathlib import Path

import structlog

from daemon.jobs import learning as learning_jobs
from daemon.learning.options import LearningError
from daemon.learning.retriever.spec import RetrieverSpec
from daemon.library.schema import LibraryError
from daemon.process.workers import Worker, WorkerCrashed

log = structlog.get_logger()

_READING_S = 2.0  # at a time: training waits no longer
_AFTER_FAILURE_S = 300.0  # the disk may be full
_FAILURES = (LearningError, LibraryError, WorkerCrashed, OSError)


class WorkAhead:
    """Of one library, by its learning worker."""

    def __init__(self, learning: Worker, library: Path, sentences: Path) -> None:
        self._learning = learning
        self._library, self._sentences = library, sentences
        self._erase_from = 0.0  # of the loop's time

    async def some(self, spec: RetrieverSpec) -> float:
        """Do some of it; seconds until more, or 0.0.

        Half of the time, so that questions meanwhile don't crawl.
        """
        owed_s = await self._erase_removed()
        try:
            done = await self._learning.run(
                learning_jobs.work_ahead, spec, self._library, self._sentences, _READING_S
            )
        except _FAILURES as error:
            log.warning("nothing is done ahead: sentences wait for a question", cause=str(error))
            return _AFTER_FAILURE_S
        return _READING_S if done else owed_s

    async def _erase_removed(self) -> float:
        """Seconds until it is tried again, which keeps nothing else from being done; or 0.0."""
        loop = asyncio.get_running_loop()
        if loop.time() >= self._erase_from:
            try:
                await self._learning.run(learning_jobs.erase_removed, self._library)
            except _FAILURES as error:
                log.warning("text of removed documents stays in the file for now", cause=str(error))
                self._erase_from = loop.time() + _AFTER_FAILURE_S
        return max(0.0, self._erase_from - loop.time())
