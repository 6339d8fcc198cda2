"""The inversion audit as the daemon runs it: in a process of its own, with progress, endable.

Not in the learning worker: an audit takes minutes, and a round must not wait for it.
The process is started for the audit, polite (nice), bounded in memory, and gone after
it, so that nothing of what the attackers learned stays. Whoever hangs up ends it. The audit of
what a generator remembers (`daemon.services.generator.memory_audit`) has the same one, in turn.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

from daemon.inversion.exposure import AuditOptions, Exposure, ExposureProgress
from daemon.jobs.inversion import audit_embeddings
from daemon.learning.options import LearningError
from daemon.learning.retriever.spec import RetrieverSpec
from daemon.process.streams import watched
from daemon.process.workers import Worker
from daemon.services.collection import NotIndexedYet
from proto import control_pb2 as control

Step = TypeVar("Step")
Result = TypeVar("Result")

# Attackers, a few thousand texts and torch: 2 GiB at the largest dictionary.
_MEMORY_BYTES = 6 << 30


class AuditUnderWay(LearningError):
    """Another audit has the process."""


class AuditProcess:
    """The process of a site's audits, of one at a time."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._busy = asyncio.Lock()

    @asynccontextmanager
    async def auditing(
        self, step: type[Step], memory_bytes: int, job: Callable[..., Result], *given: object
    ) -> AsyncIterator[tuple[AsyncIterator[Step], asyncio.Task[Result]]]:
        """Begin a job, and end its process with the block: its steps, and the task of its result.

        Raises AuditUnderWay.
        """
        if self._busy.locked():
            raise AuditUnderWay("another audit is under way: wait until it has ended")

        def begin(listener: Callable[[object], None]) -> Coroutine[Any, Any, Result]:
            return self._worker.run_reporting(listener, job, *given)

        async with self._busy:
            self._worker.memory_bytes = memory_bytes
            try:
                async with watched(begin, step) as under_way:
                    yield under_way
            finally:
                await self._worker.stop()


class Served(Protocol):
    """What is audited: the library, and the version that answers."""

    library_path: Path

    @property
    def readable_digest(self) -> bytes:
        """Its digest; empty while there is none of the encoder in use."""


class EmbeddingAudit:
    """The audits of the embeddings of one site."""

    def __init__(
        self,
        spec: RetrieverSpec,
        versions: Path,
        served: Served,
        process: AuditProcess,
        table_noise: float,
    ) -> None:
        """``table_noise``: of what this site would answer its peers with."""
        self._spec = spec
        self._versions = versions
        self._served = served
        self._process = process
        self._table_noise = table_noise

    async def steps(
        self, request: control.AuditEmbeddingsRequest
    ) -> AsyncGenerator[control.AuditEmbeddingsProgress]:
        """Progress, and the result in the last message.

        Raises ExposureError for a request of too many levels or a site with too few texts;
        AuditUnderWay; NotIndexedYet while no version answers; what the job raises.
        """
        options = replace(options_of(request), table_noise=self._table_noise)
        options.check()
        digest = self._served.readable_digest
        if not digest:
            raise NotIndexedYet("nothing is indexed yet; try again in a moment (`fedctl status`)")
        given = (self._spec, self._served.library_path, self._versions, digest, options)
        async with self._process.auditing(
            ExposureProgress, _MEMORY_BYTES, audit_embeddings, *given
        ) as (steps, work):
            async for step in steps:
                yield control.AuditEmbeddingsProgress(step=step.step, fraction=step.fraction)
            result = message_of(await work, digest)
            yield control.AuditEmbeddingsProgress(step="done", fraction=1.0, result=result)


def options_of(request: control.AuditEmbeddingsRequest) -> AuditOptions:
    """What is asked for; what is left open as usual."""
    usual = AuditOptions()
    levels = bool(request.noises or request.epsilons or request.bits)
    return AuditOptions(
        noises=tuple(request.noises) if levels else usual.noises,
        epsilons=tuple(request.epsilons) if levels else usual.epsilons,
        bits=tuple(request.bits) if levels else usual.bits,
        minutes=request.minutes or usual.minutes,
        show=request.show,
    )


def message_of(exposure: Exposure, model_digest: bytes) -> control.EmbeddingsAudit:
    """The audit's figures: the message's fields have the dataclass's names."""
    return control.EmbeddingsAudit(**asdict(exposure), model_digest=model_digest)
