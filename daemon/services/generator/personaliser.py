"""This site's own half of the generator is trained: when, and how that meets the rest.

After the last round of a run, and whenever somebody types `fedctl personalise --model generator`:
from the newest version. It waits until no run of either model is under way, for both train in the
same worker; one that begins meanwhile goes first, and behind that run it is begun anew.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import structlog

from daemon.jobs.generator.personal import PersonalisedGenerator, personalise
from daemon.learning.options import LearningError, TrainingOptions
from daemon.library.schema import LibraryError
from daemon.process.tasks import logged
from daemon.process.workers import Worker, WorkerCrashed
from daemon.services.generator.generator import FederatedGenerator
from daemon.services.personaliser import giving_way, until_idle
from daemon.state.audit import DAEMON, AuditLog
from daemon.state.audit_format import AuditError
from daemon.state.versions import VersionError
from peers.rounds.protocol import Protocol
from peers.wire.manifest import GENERATOR

log = structlog.get_logger()

_FAILURES = (LearningError, LibraryError, VersionError, WorkerCrashed, OSError)


class GeneratorPersonaliser:
    """Trains this site's own half of the generator, one time at a time."""

    def __init__(
        self,
        generator: FederatedGenerator,
        options: TrainingOptions,
        *,
        learning: Worker,
        protocols: Mapping[str, Protocol],
        audit: AuditLog,
    ) -> None:
        """``options``: as the settings say of training; ``protocols``: of each model's rounds."""
        self._generator = generator
        self._options = options
        self._learning = learning
        self._protocols = protocols
        self._audit = audit
        self._turn = asyncio.Lock()
        self._wanted = asyncio.Event()

    # ---- unasked ---------------------------------------------------------------

    def run_ended(self) -> None:
        """A run of either model is over: `run` does its work."""
        self._wanted.set()

    async def run(self) -> None:
        """After each run, and after a start for a run whose end this site has missed."""
        self._wanted.set()
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            await until_idle(self._protocols.values())
            if self._is_due:
                await logged(self._unasked())

    async def _unasked(self) -> None:
        try:
            await self._after_a_run()
        except _FAILURES as error:
            log.warning("no half of this site's own of the generator", cause=str(error))
        except AuditError as error:
            log.error("the audit log takes no record", cause=str(error))  # noqa: TRY400

    @property
    def _is_due(self) -> bool:
        """Whether a run is over whose version has no half yet, and no other one goes on."""
        generator, protocol = self._generator, self._protocols.get(GENERATOR)
        if generator.spec.personal == "none" or generator.lacking or protocol is None:
            return False
        run, newest = protocol.run, generator.wanted.hex()
        ended = run is not None and 0 < run.target_round <= protocol.head_round
        busy = self._turn.locked() or any(one.busy for one in self._protocols.values())
        return ended and not busy and newest not in ("", generator.in_use.personalised)

    async def _after_a_run(self) -> None:
        of, digest = {"model": GENERATOR}, self._generator.wanted.hex()
        await self._audit.record(DAEMON, "personalise", "begun", **of, digest=digest)
        run = self._protocols[GENERATOR].run
        options = self._options
        if run is not None:  # as the version was trained that it begins at
            options = replace(
                TrainingOptions.of(run.plan), seed=options.seed, local_epochs=options.local_epochs
            )
        made = await self._personalise(lambda _: None, options)
        await self._audit.record_or_owe(DAEMON, "personalise", "done", **of, **told(made))

    # ---- asked for -------------------------------------------------------------

    async def personalise(
        self, listener: Callable[[object], None], *, local_epochs: int = 0
    ) -> PersonalisedGenerator:
        """Train on from the newest version by this site alone, and answer with what does best.

        ``listener`` gets `EpochProgress`, then `EvaluationProgress`. ``local_epochs``: passes
        over the site's triples; 0: as in the settings. Raises LearningError with cause and remedy,
        and as `daemon.jobs.generator.personal.personalise`. Cancelled, it changes nothing.
        """
        options = self._options
        if local_epochs:
            options = replace(options, local_epochs=local_epochs)
        return await self._personalise(listener, options)

    async def _personalise(
        self, listener: Callable[[object], None], options: TrainingOptions
    ) -> PersonalisedGenerator:
        generator = self._generator
        if generator.lacking:
            raise LearningError(f"this site {generator.lacking}")
        if generator.spec.personal == "none":
            raise LearningError(
                'this site keeps nothing of its own: set generator.personal = "mixture" and start '
                "fedd again"
            )
        if not generator.wanted:
            raise LearningError("there is no version of the generator yet: try again in a moment")
        if self._turn.locked():
            raise LearningError("this site's own half is being trained already: wait for it")
        async with self._turn:
            work = self._learning.run_reporting(
                listener,
                personalise,
                generator.spec,
                generator.library,
                generator.versions,
                generator.wanted,
                options,
                generator.in_use_file,
            )
            made = await giving_way(work, self._learning, self._protocols.values())
            generator.use(made.in_use)
        log.info(
            "a half of this site's own of the generator is trained",
            version=made.in_use.judged[:12],
            of_own=made.share,
            used=made.answers,
        )
        return made


def told(made: PersonalisedGenerator) -> dict[str, Any]:
    """An outcome as entries of the audit log have it."""
    return {
        "digest": made.in_use.judged,
        "changed": made.answers,
        "share": made.share,
    }
