"""The inversion audit as the daemon runs it: in a process of its own, with progress, endable.

Not in the learning worker: an audit takes minutes, and a round must not wait for it.
The process is started for the audit, polite (nice), bounded in memory, and gone after
it, so that nothing of what the attackers learned stays. Whoever hangs up ends it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Protocol

from daemon.inversion.exposure import AuditOptions, Exposure, ExposureError, ExposureProgress
from daemon.jobs.inversion import audit_embeddings
from daemon.learning.retriever.spec import RetrieverSpec
from daemon.process.streams import watched
from daemon.process.workers import Worker
from daemon.services.collection import NotIndexedYet
from proto import control_pb2 as control

# Attackers, a few thousand texts and torch: 2 GiB at the largest dictionary.
_MEMORY_BYTES = 6 << 30


class Served(Protocol):
    """What is audited: the library, and the version that answers."""

    library_path: Path

    @property
    def readable_digest(self) -> bytes:
        """Its digest; empty while there is none of the encoder in use."""


class EmbeddingAudit:
    """The audits of one site, one at a time."""

    def __init__(
        self,
        spec: RetrieverSpec,
        versions: Path,
        served: Served,
        worker: Worker,
        table_noise: float,
    ) -> None:
        """``table_noise``: of what this site would answer its peers with."""
        worker.memory_bytes = _MEMORY_BYTES
        self._spec = spec
        self._versions = versions
        self._served = served
        self._worker = worker
        self._table_noise = table_noise
        self._busy = asyncio.Lock()

    async def steps(
        self, request: control.AuditEmbeddingsRequest
    ) -> AsyncGenerator[control.AuditEmbeddingsProgress]:
        """Progress, and the result in the last message.

        Raises ExposureError for a request of too many levels, a second audit, or a site
        with too few texts; NotIndexedYet while no version answers; what the job raises.
        """
        options = replace(options_of(request), table_noise=self._table_noise)
        options.check()
        if self._busy.locked():
            raise ExposureError("another audit is under way: wait until it has ended")
        digest = self._served.readable_digest
        if not digest:
            raise NotIndexedYet("nothing is indexed yet; try again in a moment (`fedctl status`)")
        async with self._busy:

            def begin(listener: Callable[[object], None]) -> Coroutine[Any, Any, Exposure]:
                return self._worker.run_reporting(
                    listener,
                    audit_embeddings,
                    self._spec,
                    self._served.library_path,
                    self._versions,
                    digest,
                    options,
                )

            try:
                async with watched(begin, ExposureProgress) as (steps, work):
                    async for step in steps:
                        yield control.AuditEmbeddingsProgress(
                            step=step.step, fraction=step.fraction
                        )
                    result = message_of(await work, digest)
                yield control.AuditEmbeddingsProgress(step="done", fraction=1.0, result=result)
            finally:
                await self._worker.stop()


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
