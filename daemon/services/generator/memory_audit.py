"""The audit of what the generator remembers, as the daemon runs it: see `AuditProcess`."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator
from dataclasses import asdict
from pathlib import Path

from daemon.jobs.generator.memory import audit_memory
from daemon.learning.generator.in_use import InUse
from daemon.learning.options import TrainingOptions
from daemon.memorisation.audit import (
    USUAL_NOISES,
    AuditOptions,
    AuditProgress,
    Began,
    Memorisation,
    MemorisationError,
)
from daemon.services.generator.generator import FederatedGenerator
from daemon.services.inversion_audit import AuditProcess
from daemon.state.versions import is_sound
from proto import control_pb2 as control

# A model of a billion values with factors on it, or one of two hundred million, all of them
# trained. What training takes is measured before it, and refused where it isn't free.
_MEMORY_BYTES = 16 << 30


class MemoryAudit:
    """The audits of one site's generator."""

    def __init__(
        self,
        generator: FederatedGenerator,
        library: Path,
        versions: Path,
        process: AuditProcess,
        site: str,
    ) -> None:
        self._generator = generator
        self._library = library
        self._versions = versions
        self._process = process
        self._site = site

    async def steps(
        self, request: control.AuditMemoryRequest, training: TrainingOptions, sites: int
    ) -> AsyncGenerator[control.AuditMemoryProgress]:
        """Progress, and the result in the last message.

        ``training``: as in a round of this site's. ``sites``: of the federation, where the request
        says none. Raises MemorisationError for a site without a base model or with too few
        triples; AuditUnderWay; what the job raises.
        """
        options = options_of(request, training, sites)
        options.check()
        began = await self._began()
        given = (self._generator.spec, self._library, self._versions, began, self._site, options)
        async with self._process.auditing(AuditProgress, _MEMORY_BYTES, audit_memory, *given) as (
            steps,
            work,
        ):
            async for step in steps:
                yield control.AuditMemoryProgress(step=step.step, fraction=step.fraction)
            result = message_of(await work, began)
            yield control.AuditMemoryProgress(step="done", fraction=1.0, result=result)

    async def _began(self) -> Began | None:
        """What answers, else the newest version; None: there is only the base model."""
        generator = self._generator
        if generator.own is None:
            raise MemorisationError(
                "there is no base model here: set generator.base_model to a folder with a "
                "language model, and restart fedd"
            )
        if generator.served_digest:
            values = generator.in_use.values
            return Began(values, "mixture in use" if values.own else "version in use")
        newest, own = generator.wanted, generator.own
        if newest in (b"", own.name.first) or not await asyncio.to_thread(
            is_sound, self._versions, newest, own.shapes.digest
        ):  # none was trained, or it is of another base model, or still on its way
            return None
        return Began(InUse(newest.hex()), "newest version")


def options_of(
    request: control.AuditMemoryRequest, training: TrainingOptions, sites: int
) -> AuditOptions:
    """What is asked for; what is left open as usual."""
    return AuditOptions(
        training=training,
        sites=request.sites or sites,
        seed=secrets.randbits(63),
        canaries=request.canaries or AuditOptions.canaries,
        rounds=request.rounds or AuditOptions.rounds,
        noises=tuple(dict.fromkeys(request.noises)) or USUAL_NOISES,
        clip_norm=request.clip_norm,
    )


def message_of(found: Memorisation, began: Began | None) -> control.MemoryAudit:
    """The audit's figures: the message's fields have the dataclass's names."""
    return control.MemoryAudit(
        **asdict(found), model_digest=bytes.fromhex(began.values.version) if began else b""
    )
