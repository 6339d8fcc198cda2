"""`fedd`: settings -> wiring -> signals -> systemd.

One asyncio process. It starts in an order in which nothing is promised before
it can be kept: settings, the state folder's lock, identity and manifest, the port and
the sockets' places (refused at once if wrong), the retriever's description,
durable state, peers, the sockets, and only then READY.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import structlog

from config.loading import SettingsError, load
from config.settings import Settings
from crypto.durable import sweep
from crypto.identity.keys import IdentityError
from crypto.quantize import CryptoError
from daemon.answering.generators import GENERATORS
from daemon.control.context import ProcessFigures, ServiceContext, Services
from daemon.control.socket import SocketError
from daemon.jobs import learning as learning_jobs
from daemon.learning.language_model import LanguageModelError
from daemon.learning.options import EncoderError, LearningError
from daemon.learning.retriever.spec import RetrieverSpec
from daemon.library.schema import LibraryError
from daemon.personal.store import PersonalStore
from daemon.process import faultpoints
from daemon.process.log import configure_logging
from daemon.process.systemd import Notifier
from daemon.process.telemetry import LoopLag
from daemon.process.workers import Worker, WorkerCrashed, WorkersRefused
from daemon.rounds.attempt_log import AttemptLog
from daemon.rounds.audited import AuditedInbox, of_site
from daemon.rounds.driver import Attached, Driver
from daemon.rounds.manifest_gossip import ManifestGossip
from daemon.rounds.progress import ProgressBoard
from daemon.rounds.readiness import refresh
from daemon.rounds.work import JOBS, Trainer
from daemon.services.answer_evaluation import AnswerJudge
from daemon.services.collection import Collection, Listeners
from daemon.services.curve import Curve
from daemon.services.folders import WatchedFolders, Watching
from daemon.services.generator.generator import FederatedGenerator
from daemon.services.generator.memory_audit import MemoryAudit
from daemon.services.inversion_audit import AuditProcess, EmbeddingAudit
from daemon.services.negatives import AnsweringDesk, answering_desk
from daemon.services.originals import KeptOriginals
from daemon.services.pair_maker import PairMaker, WriterSettings
from daemon.state.audit import DAEMON, AuditLog
from daemon.state.audit_format import AuditError
from daemon.state.expiry import ExpiryWatch, expiries
from daemon.state.membership import Membership
from daemon.state.privacy_ledger import LedgerError, PrivacyLedger
from daemon.state.state_lock import StateError, StateInUse, locked
from daemon.state.store import Store, StoreError
from daemon.state.tokens import TokenError, Tokens
from daemon.wiring import (
    Personalisers,
    Retrievers,
    Rounds,
    Site,
    Sockets,
    Workers,
    change_model,
    collection_of,
    first_version,
    generator_of,
    limits_of,
    named_in_force,
    personalisers_of,
    retriever_spec,
    retrievers_of,
    state_of,
    way_of,
)
from peers.link.contacts import Tap
from peers.link.port import ListenError, check_free
from peers.link.servicer import Admission
from peers.link.transport import KeepInTouch, LinkOptions, PeerTransport, Transport
from peers.plans import robust
from peers.wire.manifest import GENERATOR, RETRIEVER, ManifestError, NamedModel
from peers.wire.messages import SOFTWARE_VERSION
from proto import federation_pb2 as pb
from proto.bounds import numbers_of

log = structlog.get_logger()

_RELOAD = "reload"  # what an error may be about, until a reload goes well

# What may be wrong at a start; each says its cause and remedy in one line.
_MISCONFIGURED = (
    *(SettingsError, IdentityError, ManifestError, StateInUse, WorkersRefused),
    *(EncoderError, LanguageModelError),
)
_REFUSALS = (
    *_MISCONFIGURED,
    StateError,
    StoreError,
    AuditError,
    LedgerError,
    TokenError,
    SocketError,
    ListenError,
    *(LearningError, LibraryError, WorkerCrashed),
)


class Daemon:
    """The wiring of one site, and its life from start to SIGTERM."""

    def __init__(self, settings: Settings, tap: Tap | None = None) -> None:
        """``tap`` sees every message that crosses; no setting switches one on."""
        self._settings = settings
        self._state = state_of(settings)
        self._tap = tap
        self._membership = Membership(settings)
        # Until it is known which one is in use.
        self._spec = retriever_spec(settings, self._membership.identity.site_id)
        self._notifier = Notifier.from_environment()
        self._lag = LoopLag()
        self._stopping = asyncio.Event()
        self._ready = False
        self._started = time.monotonic()
        self._reloads: asyncio.Queue[None] = asyncio.Queue()

    async def run(self) -> None:
        """Serve until SIGTERM or SIGINT; everything started is stopped again."""
        self._on_signals()
        try:
            async with AsyncExitStack() as stack:
                await self._serve(stack)
        except asyncio.CancelledError:
            if not self._stopping.is_set():
                raise
            # Asked to stop before READY: starting was cut short, which is no failure.
        log.info("stopped")

    async def _serve(self, stack: AsyncExitStack) -> None:
        log.info("starting", site=self._membership.identity.site_id)
        check_free(self._settings.network.bind)
        sockets = Sockets(self._settings)
        await sockets.check()
        workers = Workers.of(self._settings.workers.threads)
        stack.push_async_callback(workers.stop)
        if faults := os.environ.get(faultpoints.VARIABLE):
            log.warning("a test makes this daemon fail on purpose", faults=faults)
        here, collection, curve, retrievers, driver = await self._make_driver(workers, stack)
        self._spec = retrievers.spec
        generator, others = await generator_of(here, self._spec, collection, stack)
        drivers = {RETRIEVER: driver, **others}
        audit = await self._open_audit(driver, stack)
        transport = self._make_transport(drivers, audit)
        ways = {name: way_of(transport, audit, one) for name, one in drivers.items()}
        own = personalisers_of(here, collection, generator, drivers, ways[RETRIEVER], audit)
        boards = {name: self._make_progress(transport, one, stack) for name, one in drivers.items()}
        attached = {
            name: Attached(board, audit, run_ended=own.ended(name))
            for name, board in boards.items()
        }
        attached[RETRIEVER] = replace(
            attached[RETRIEVER],
            desk=await self._make_desk(driver, collection, retrievers, workers),
            committed=curve.committed,
        )
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(self._keep_reloading(drivers, transport, audit)),
                group.create_task(self._lag.run()),
                group.create_task(self._notifier.keep_watchdog_fed()),
                group.create_task(collection.run()),
                group.create_task(curve.run()),
                group.create_task(generator.run(one.protocol for one in drivers.values())),
                *(
                    group.create_task(worker.stop_when_idle(self._settings.workers.idle_stop_s))
                    for worker in (workers.learning, workers.sharing)
                ),
                group.create_task(self._warm_up(workers.crypto)),
            ]
            for name, one in drivers.items():
                tasks.append(await self._run(group, one, ways[name], attached[name]))
            collection.adopt(await first_version(driver, workers.learning, self._spec))
            tasks.append(group.create_task(_train_when_embedded(driver, collection)))
            tasks.append(group.create_task(own.run()))
            await transport.start()
            stack.push_async_callback(transport.stop, 1.0)
            for one in drivers.values():
                one.listening.set()
            tasks.append(group.create_task(self._spread(drivers, transport, audit)))
            tasks.append(group.create_task(_expiry_watch(driver, transport).run()))
            services = self._make_services(
                *(drivers, collection, generator, workers, audit, curve, own)
            )
            around = await self._context(
                *(drivers, collection, generator, workers, audit, services, retrievers.coming)
            )
            stack.callback(around.tokens.close)
            stack.push_async_callback(sockets.stop)
            await sockets.start(around)
            tasks.append(group.create_task(around.services.folders.run()))
            self._ready = True
            self._notifier.ready(self._line(driver))
            log.info("ready", bind=self._settings.network.bind)
            await self._stopping.wait()
            self._notifier.stopping("stopping")
            log.info("stopping")
            for task in tasks:
                task.cancel()

    async def _run(
        self, group: asyncio.TaskGroup, driver: Driver, way: PeerTransport, attached: Attached
    ) -> asyncio.Task[None]:
        """Drive the rounds of a model; returns when they take events."""
        running, heartbeat_s = asyncio.Event(), self._settings.rounds.heartbeat_s
        work = driver.run(way, attached, running.set, heartbeat_s=heartbeat_s)
        task = group.create_task(work)
        await running.wait()
        return task

    async def _make_desk(
        self, driver: Driver, collection: Collection, retrievers: Retrievers, workers: Workers
    ) -> AnsweringDesk:
        return await answering_desk(
            self._settings,
            retrievers.described.dimension,
            workers.sharing,
            collection,
            lambda: driver.head_round,
        )

    async def _spread(
        self, drivers: Mapping[str, Driver], transport: Transport, audit: AuditLog
    ) -> None:
        """Take newer manifests from peers, and do what a reload does."""

        async def apply(peer: str) -> None:
            self._renew(drivers, transport)
            # Owed, if need be: a full disk must not keep an expelled site in.
            version = self._membership.manifest.version
            await audit.record_or_owe(of_site(peer), "manifest", "adopted", manifest=version)

        folder = self._state.arriving
        spreading = ManifestGossip(self._membership, transport, folder, apply)
        await spreading.run(adopting=self._settings.identity.adopt_manifests)

    def _renew(self, drivers: Mapping[str, Driver], transport: Transport) -> None:
        """What was reloaded is in use; raises IdentityError, and nothing is, for another site's."""
        membership = self._membership
        transport.reload(membership.identity, membership.manifest)
        for model, driver in drivers.items():
            driver.renew(membership.identity, membership.trust, membership.log(model).manifest)
        self._notifier.ready(self._line(drivers[RETRIEVER]))

    async def _warm_up(self, crypto: Worker) -> None:
        """The first round should not wait for a library to load."""
        sites = len(self._membership.manifest.enabled_ids)
        rule = self._settings.robust.rule
        if vacuous := robust.warning(rule, sites):
            log.warning(vacuous)
        try:
            bits, measurable = self._settings.training.bits, rule != robust.NONE
            jobs = JOBS[numbers_of(pb.Mode.DESCRIPTOR)[self._settings.training.mode]]
            await jobs.warm_up(crypto, max(2, sites), bits, measurable=measurable)
        except WorkerCrashed as error:
            log.warning("the first round will wait for its library to load", cause=str(error))
        except CryptoError as error:
            # A plan of other bits may still work; a round that can't says so itself.
            log.warning("these training.bits can't be encrypted exactly here", cause=str(error))

    def _make_progress(
        self, transport: Transport, driver: Driver, stack: AsyncExitStack
    ) -> ProgressBoard:
        def traffic() -> tuple[int, int]:
            return _traffic(transport)

        attempts = AttemptLog(driver.catch_up.state.attempts, traffic)
        stack.push_async_callback(asyncio.to_thread, attempts.close)
        return ProgressBoard(traffic, attempts)

    def _make_curve(
        self,
        spec: RetrieverSpec,
        store: Store,
        learning: Worker,
        head: Callable[[], tuple[int, bytes]],
    ) -> Curve:
        return Curve(
            spec=spec,
            state=self._state,
            store=store,
            learning=learning,
            questions=self._settings.evaluation.curve_questions,
            head=head,
        )

    def _make_pairs(self, collection: Collection, workers: Workers) -> PairMaker:
        pairs = self._settings.pairs
        return PairMaker(
            spec=self._spec,
            state=self._state,
            collection=collection,
            writer=WriterSettings(pairs.writer or "", pairs.domain),
            learning=workers.learning,
            answering=workers.answering,
        )

    async def _make_driver(
        self, workers: Workers, stack: AsyncExitStack
    ) -> tuple[Site, Collection, Curve, Retrievers, Driver]:
        settings, membership, state = self._settings, self._membership, self._state
        store = await asyncio.to_thread(Store, state.store)
        stack.callback(store.close)
        ledger = await asyncio.to_thread(PrivacyLedger, state.privacy)
        stack.callback(ledger.close)
        await asyncio.to_thread(membership.remember, store)
        log.info("loading the encoder", encoder=settings.retriever.encoder)
        rounds = membership.log(RETRIEVER)
        wanted = await asyncio.to_thread(named_in_force, store, rounds)
        retrievers = await retrievers_of(
            settings, membership.identity.site_id, workers.learning, wanted
        )
        spec, shapes = retrievers.spec, retrievers.described.shape_manifest
        await asyncio.to_thread(sweep, state.root)
        if wanted is not None and wanted.digest == retrievers.name.digest:
            await asyncio.to_thread(change_model, store, state, wanted)
        genesis = b""
        if store.fresh:
            genesis = await workers.learning.run(
                learning_jobs.write_initial_version, spec, state.versions
            )
        site = Site.of(settings, membership, workers, ledger, store)
        made = await asyncio.to_thread(Rounds, site, rounds, store, state, shapes, genesis)

        def newest() -> tuple[int, bytes]:
            return made.protocol.durable.head_round, collection.wanted

        curve = self._make_curve(spec, store, workers.learning, newest)
        listeners = Listeners(made.catch_up.suspect_head, curve.answers, curve.changed)
        collection = collection_of(settings, retrievers, workers, listeners)
        await collection.prepare()
        trainer = Trainer(spec, learning_jobs.train, learning_jobs.write_initial_version)
        driver = made.driver(collection, workers.crypto, trainer, collection.library_path)
        return site, collection, curve, retrievers, driver

    def _make_transport(self, drivers: Mapping[str, Driver], audit: AuditLog) -> Transport:
        membership = self._membership
        logs = {one.protocol.log_id: one for one in drivers.values()}
        return Transport(
            Admission(membership.identity, membership.trust, membership.manifest),
            self._settings.network.bind,
            self._state.incoming,
            {log_id: AuditedInbox(one, audit, log_id) for log_id, one in logs.items()},
            options=LinkOptions(
                limits=limits_of(self._settings.limits),
                keep_in_touch=KeepInTouch(answering_s=self._settings.rounds.heartbeat_s),
            ),
            tap=self._tap,
        )

    async def _open_audit(self, driver: Driver, stack: AsyncExitStack) -> AuditLog:
        log.info("verifying the audit log")
        where, head = self._state.audit, self._state.audit_head
        audit = await asyncio.to_thread(AuditLog, where, head_file=head)
        stack.callback(audit.close)
        stack.push_async_callback(audit.record_or_owe, DAEMON, "stop", "done")
        await audit.record_or_owe(
            DAEMON,
            "start",
            "done",
            software=SOFTWARE_VERSION,
            manifest=self._membership.manifest.version,
            head_round=driver.protocol.head_round,
        )
        audit.tell_head("the audit log goes on")
        return audit

    def _make_services(
        self,
        drivers: Mapping[str, Driver],
        collection: Collection,
        generator: FederatedGenerator,
        workers: Workers,
        audit: AuditLog,
        curve: Curve,
        own: Personalisers,
    ) -> Services:
        pairs, library = self._make_pairs(collection, workers), self._settings.library
        auditing = AuditProcess(workers.auditing)
        return Services(
            pairs=pairs,
            curve=curve,
            embeddings=EmbeddingAudit(
                *(self._spec, self._state.versions, collection, auditing),
                self._settings.negatives.noise,
            ),
            memory=MemoryAudit(
                *(generator, collection.library_path, self._state.of_model(GENERATOR).versions),
                auditing,
                self._membership.identity.site_id,
            ),
            personaliser=own.retriever,
            own_generator=own.generator,
            answers=AnswerJudge(collection, workers.answering),
            folders=WatchedFolders(
                Watching(library.folders, library.vanished, library.scan_s, library.keep_originals),
                collection=collection,
                pairs=pairs,
                reading=workers.reading,
                audit=audit,
                changed=lambda: refresh(one.readiness for one in drivers.values()),
            ),
            originals=KeptOriginals(collection, workers.learning, library.keep_originals),
        )

    async def _context(
        self,
        drivers: Mapping[str, Driver],
        collection: Collection,
        generator: FederatedGenerator,
        workers: Workers,
        audit: AuditLog,
        services: Services,
        coming: NamedModel | None,
    ) -> ServiceContext:
        return ServiceContext(
            drivers=drivers,
            collection=collection,
            generator=generator,
            settings=self._settings,
            coming=coming,
            personal=PersonalStore(self._state.personal, drivers[RETRIEVER].shapes.digest),
            audit=audit,
            tokens=await asyncio.to_thread(
                Tokens, self._state.tokens, people=self._settings.gateway.people
            ),
            services=services,
            process=ProcessFigures(self._lag, workers.all, self._started),
        )

    # ---- signals ---------------------------------------------------------------

    def _on_signals(self) -> None:
        loop = asyncio.get_running_loop()
        task = asyncio.current_task()

        def stop() -> None:
            self._stopping.set()
            if not self._ready and task is not None:
                task.cancel()

        def reload() -> None:
            if self._ready:  # before that there is nothing to reload
                self._reloads.put_nowait(None)

        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop)
        loop.add_signal_handler(signal.SIGHUP, reload)

    async def _keep_reloading(
        self, drivers: Mapping[str, Driver], transport: Transport, audit: AuditLog
    ) -> None:
        """One reload after the other, each recorded before it and after it."""
        while True:
            await self._reloads.get()
            self._notifier.reloading()
            try:
                await audit.record("signal:HUP", "reload", "begun")
            except AuditError as error:
                log.error("reload refused, it cannot be recorded", cause=str(error))  # noqa: TRY400
                self._notifier.ready(self._line(drivers[RETRIEVER]))
                continue
            done = self._apply_reload(drivers, transport)
            await audit.record_or_owe(
                "signal:HUP",
                "reload",
                "done" if done else "refused or failed",
                manifest=self._membership.manifest.version,
                certificate=hashlib.sha256(self._membership.identity.certificate_der).hexdigest(),
            )

    def _apply_reload(self, drivers: Mapping[str, Driver], transport: Transport) -> bool:
        """Take a new manifest and certificates into use; keep the old ones if they are wrong."""
        done, driver = False, drivers[RETRIEVER]
        try:
            self._membership.reload()
            self._renew(drivers, transport)
        except (IdentityError, ManifestError, StoreError) as error:
            log.error("reload refused, the old manifest and certificates stay", cause=str(error))  # noqa: TRY400
            why = f"a reload was refused, the old manifest and certificates stay: {error}"
            driver.report(why, about=_RELOAD)
            self._notifier.ready(self._line(driver))
        else:
            driver.went_well(_RELOAD)
            log.info("reloaded", manifest=self._membership.manifest.version)
            done = True
        return done

    def _line(self, driver: Driver) -> str:
        return (
            f"site {driver.identity.site_id}, round {driver.protocol.head_round}, "
            f"manifest {driver.protocol.manifest.version}"
        )


def _expiry_watch(driver: Driver, transport: Transport) -> ExpiryWatch:
    return ExpiryWatch(lambda: expiries(driver.identity, driver.trust, transport.statistics()))


async def _train_when_embedded(driver: Driver, collection: Collection) -> None:
    """Behind a change of encoder this site trains again when its passages are embedded."""
    if not collection.embedded.is_set():
        await collection.embedded.wait()
        await driver.readiness.refresh()


def _traffic(transport: Transport) -> tuple[int, int]:
    peers = transport.statistics().values()
    return sum(p.bytes_sent for p in peers), sum(p.bytes_received for p in peers)


def main(tap: Tap | None = None) -> None:
    """Entry point of `fedd`.

    Exit code 0 after SIGTERM; 78 (EX_CONFIG) when a person must act first (change a file,
    stop the other daemon of this state), so that systemd does not try again; 2 when trying
    again may help.
    """
    parser = argparse.ArgumentParser(
        prog="fedd", description="Daemon of one site in a Hanse federation."
    )
    parser.add_argument(
        "--config",
        type=Path,
        default=Path("/etc/hanse/fedd.toml"),
        help="settings file (default: %(default)s)",
    )
    arguments = parser.parse_args()
    os.umask(0o077)  # as the unit has it: what is written here is for nobody else to read
    notes: list[str] = []
    try:
        settings = load(arguments.config, notes=notes, generators=tuple(GENERATORS))
        configure_logging(settings.log.level, settings.log.format)
        log.info("settings read", file=str(arguments.config), software=SOFTWARE_VERSION)
        for note in notes:
            log.warning("an option has a new name", settings=str(arguments.config), note=note)
        # Before anything in the folder is read, and until the last thread and worker is gone.
        with locked(settings.site.state_dir):
            asyncio.run(_run(Daemon(settings, tap)))
    except _REFUSALS as refusal:
        print(f"fedd: {refusal}", file=sys.stderr)
        sys.exit(os.EX_CONFIG if isinstance(refusal, _MISCONFIGURED) else 2)


async def _run(daemon: Daemon) -> None:
    try:
        await daemon.run()
    except* _REFUSALS as group:
        # Out of the task group it ran in; the first one is the cause.
        first: BaseException = group
        while isinstance(first, BaseExceptionGroup):
            first = first.exceptions[0]
        raise first from None


if __name__ == "__main__":
    main()
