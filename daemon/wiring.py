"""From settings to the objects that a daemon is made of."""

from __future__ import annotations

import asyncio
import resource
import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog

from config.recipes import AloneAxes, DepthOptions
from config.settings import (
    LimitsSettings,
    NextRetrieverSettings,
    RetrieverSettings,
    Settings,
)
from daemon.answering.options import AnsweringOptions, FederatedWriter
from daemon.control.context import ServiceContext
from daemon.control.run_plan import of_generator
from daemon.control.socket import ADMINISTRATION, ServiceSocket
from daemon.jobs import learning as learning_jobs
from daemon.jobs.generator import training as generator_training
from daemon.jobs.sums import integers
from daemon.jobs.sums.sum_jobs import Credentials
from daemon.learning.from_settings import options_from
from daemon.learning.generator.spec import GeneratorSpec
from daemon.learning.options import RetrieverDescription
from daemon.learning.retriever.spec import ReadingOptions, RetrieverSpec
from daemon.library.dense.options import IndexOptions
from daemon.personal.store import embedded_by
from daemon.process.workers import Worker, import_once
from daemon.questions.service import QUESTIONS
from daemon.rounds.audited import AuditedTransport
from daemon.rounds.catch_up import CatchUp
from daemon.rounds.driver import Driver
from daemon.rounds.events import EventQueue
from daemon.rounds.readiness import Served
from daemon.rounds.work import Computing, OfSite, Trainer
from daemon.services.collection import Collection, CollectionSettings, Listeners
from daemon.services.generator.generator import FederatedGenerator
from daemon.services.generator.personaliser import GeneratorPersonaliser
from daemon.services.indexes import StandIn
from daemon.services.personaliser import Personal, Personaliser
from daemon.state.audit import AuditLog
from daemon.state.folder import StateFolder
from daemon.state.membership import LogMembership, Membership
from daemon.state.privacy_ledger import PrivacyBudget, PrivacyLedger
from daemon.state.store import Store
from daemon.state.versions import Shapes, is_sound
from peers.attempts import effects as do
from peers.attempts.lead import SharedModel
from peers.link.quotas import Quotas
from peers.link.servicer import Limits
from peers.link.transport import PeerTransport, Transport
from peers.plans.policy import Policy
from peers.rounds.manifest_in_force import ManifestInForce
from peers.rounds.pacemaker import Timing
from peers.rounds.protocol import Protocol
from peers.rounds.replica import Member, Replica, Stored, Verification
from peers.wire.manifest import GENERATOR, RETRIEVER, NamedModel
from peers.wire.messages import INCARNATION_BYTES
from proto import federation_pb2 as pb
from proto.bounds import numbers_of

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from config.tables import Section

log = structlog.get_logger()

_FILES_AT_MOST = 65_536  # descriptors that we ask for; more are for whoever sets LimitNOFILE=

# What the learning and the answering worker need; and this module, which every process
# that multiprocessing starts imports again as its main one.
_IMPORTED_ONCE = ("daemon.main", "daemon.learning.retriever.retriever", "daemon.jobs.answering")


class Sockets:
    """The daemon's Unix sockets: fedctl's, and where the settings say so that of questions."""

    def __init__(self, settings: Settings) -> None:
        control, gateway = settings.control, settings.gateway
        self._sockets = [ServiceSocket(ADMINISTRATION, control.socket, control.group)]
        if gateway.enabled:
            self._sockets.append(ServiceSocket(QUESTIONS, gateway.socket, gateway.group))

    async def check(self) -> None:
        """Whether they can be made; raises SocketError."""
        for one in self._sockets:
            await one.check()

    async def start(self, around: ServiceContext) -> None:
        """Serve. Raises SocketError."""
        for one in self._sockets:
            await one.start(around)

    async def stop(self) -> None:
        """Let nobody in any more, and end what is under way."""
        await asyncio.gather(*(one.stop() for one in self._sockets))


@dataclass(frozen=True)
class Workers:
    """The processes that compute, one kind of work each."""

    learning: Worker
    answering: Worker
    crypto: Worker
    generator_crypto: Worker
    auditing: Worker
    sharing: Worker
    reading: Worker

    @classmethod
    def of(cls, threads: int) -> Workers:
        """Training may use all threads but never at a question's or a round's expense."""
        import_once(_IMPORTED_ONCE, threads=threads)
        return cls(
            learning=Worker("learning", threads=threads, nice=5, forked=True),
            # Nobody waits for long behind a question that was given up, whatever it met.
            answering=Worker("answering", threads=threads, forked=True, patience_s=60.0),
            # Whatever a peer's bytes make of it, the next attempt need not wait for long.
            crypto=Worker("crypto", threads=1, patience_s=5.0),
            generator_crypto=Worker("generator-crypto", threads=1, patience_s=5.0),
            auditing=Worker("auditing", threads=threads, nice=15, forked=True, patience_s=5.0),
            # Peers' searches: never at a question's expense, and soon free of one that is lost.
            sharing=Worker("sharing", threads=1, nice=5, forked=True, patience_s=5.0),
            # Watched folders, at nobody's expense.
            reading=Worker("reading", threads=1, nice=10, forked=True, patience_s=5.0),
        )

    @property
    def all(self) -> tuple[Worker, ...]:
        """Each of them."""
        return (
            self.learning,
            self.answering,
            self.crypto,
            self.generator_crypto,
            self.auditing,
            self.sharing,
            self.reading,
        )

    async def stop(self) -> None:
        """End every worker process."""
        await asyncio.gather(*(worker.stop() for worker in self.all))


def _named_in(section: Section, values: type[DataclassInstance]) -> dict[str, Any]:
    """The options of a section that those values have by the same names."""
    names = {one.name for one in fields(values)}
    return {name: getattr(section, name) for name in type(section).model_fields if name in names}


def _reading_of(said: RetrieverSettings | NextRetrieverSettings) -> ReadingOptions:
    return ReadingOptions(**_named_in(said, ReadingOptions))


def retriever_spec(settings: Settings, site: str) -> RetrieverSpec:
    """What this site runs."""
    return RetrieverSpec(
        **_named_in(settings.retriever, RetrieverSpec),
        **_named_in(settings.workers, RetrieverSpec),
        **_named_in(settings.pairs, RetrieverSpec),
        reading=_reading_of(settings.retriever),
        personal_folder=str(state_of(settings).personal),
        made_pairs=str(state_of(settings).made_pairs),
        index=_index_options(settings, site),
        depth=DepthOptions(**_named_in(settings.depth, DepthOptions)),
        alone=AloneAxes(**_named_in(settings.learning, AloneAxes)),
    )


def answering_options(settings: Settings, retriever: RetrieverSpec) -> AnsweringOptions:
    """How questions are answered."""
    said = settings.retrieval.model_dump(exclude={"passage_tokens", "top_k"}, exclude_none=True)
    said |= {"cross_encoder": str(said.get("cross_encoder", ""))}
    federated = None
    if settings.generator.base_model is not None:
        state = state_of(settings)
        federated = FederatedWriter(
            generator_spec(settings, retriever),
            state.of_model(GENERATOR).versions,
            state.generator_in_use,
        )
    return AnsweringOptions(**said, device=settings.retriever.device, federated=federated)


def collection_of(
    settings: Settings, retrievers: Retrievers, workers: Workers, listeners: Listeners
) -> Collection:
    """Documents and index of the site, as its settings have them."""
    return Collection(
        spec=retrievers.spec,
        stand_in=retrievers.stand_in,
        state=state_of(settings),
        settings=CollectionSettings(
            passage_tokens=settings.retrieval.passage_tokens,
            top_k=settings.retrieval.top_k,
            willing=settings.training.willing,
            min_pairs=settings.training.min_pairs,
            tell_complexity=settings.depth.tell_complexity,
            answering=answering_options(settings, retrievers.spec),
        ),
        learning=workers.learning,
        answering=workers.answering,
        listeners=listeners,
    )


def _index_options(settings: Settings, site: str) -> IndexOptions:
    said = settings.index.model_dump(exclude_none=True)
    return IndexOptions(**{name: str(value) for name, value in said.items()}, owner=site)


@dataclass(frozen=True)
class Retrievers:
    """What this site can read, and which of it is in use.

    ``coming``: of ``[next_retriever]``, as a manifest may name it; None: it has none, or uses
    it. ``stand_in``: what answers until the wanted version is indexed; None: there is no index.
    """

    spec: RetrieverSpec
    described: RetrieverDescription
    coming: NamedModel | None = None
    stand_in: StandIn | None = None

    @property
    def name(self) -> NamedModel:
        """Of the one in use, as a manifest may name it."""
        return named(self.described)


def named(described: RetrieverDescription) -> NamedModel:
    """A retriever as a manifest may name it."""
    return NamedModel(described.shape_manifest.digest, described.shape_manifest.total)


async def retrievers_of(
    settings: Settings, site: str, learning: Worker, wanted: NamedModel | None
) -> Retrievers:
    """Use ``[next_retriever]`` where that is ``wanted``, and ``[retriever]`` otherwise.

    Raises EncoderError when one that the settings name can't be had.
    """
    first, following = retriever_spec(settings, site), settings.next_retriever
    if following.encoder is None:
        only = await learning.run(learning_jobs.describe, first)
        return Retrievers(first, only, stand_in=await _stand_in(settings, (first, only)))
    second = replace(
        first,
        encoder=following.encoder,
        max_tokens=following.max_tokens,
        reading=_reading_of(following),
    )
    after = await learning.run(learning_jobs.describe, second)
    before = await learning.run(learning_jobs.describe, first)
    if wanted is None or wanted.digest != after.shape_manifest.digest:
        stand_in = await _stand_in(settings, (first, before))
        return Retrievers(first, before, coming=named(after), stand_in=stand_in)
    stand_in = await _stand_in(settings, (second, after), (first, before))
    return Retrievers(second, after, stand_in=stand_in)


async def _stand_in(
    settings: Settings, *retrievers: tuple[RetrieverSpec, RetrieverDescription]
) -> StandIn | None:
    """The newest version of the first of these retrievers that has an index here."""
    for spec, described in retrievers:
        digest = described.shape_manifest.digest
        found = await asyncio.to_thread(_newest_indexed, state_of(settings), spec, digest)
        if found is not None:
            return found
    return None


def _newest_indexed(state: StateFolder, spec: RetrieverSpec, shape_digest: bytes) -> StandIn | None:
    files = state.versions.glob("*.safetensors")
    for path in sorted(files, key=lambda one: one.stat().st_mtime_ns, reverse=True):
        digest = bytes.fromhex(path.stem)
        embedded = embedded_by(spec.personal, spec.personal_folder, digest)
        indexed = any(state.index.glob(f"{embedded.hex()}-*"))
        if indexed and is_sound(state.versions, digest, shape_digest):
            return StandIn(spec, digest)
    return None


async def first_version(driver: Driver, learning: Worker, spec: RetrieverSpec) -> bytes:
    """What answers as soon as it is indexed, until a round commits the next version."""
    newest = await driver.catch_up.newest_ours(driver.protocol.durable.head_digest)
    if newest:
        return newest
    versions = driver.catch_up.state.versions
    return await learning.run(learning_jobs.write_initial_version, spec, versions)


def change_model(store: Store, state: StateFolder, wanted: NamedModel) -> None:
    """Train with what the manifest in force names, if this site has trained with another."""
    if store.trained in (b"", wanted.digest):
        return
    log.info("another model is in force", model=str(wanted))
    state.residual.unlink(missing_ok=True)  # of updates of the other one
    store.change_model(wanted.digest)


def named_in_force(store: Store, rounds: LogMembership) -> NamedModel | None:
    """The model that the manifest in force in these rounds names; None: it names none.

    Raises StoreError.
    """
    if not store.trained:
        return rounds.manifest.retriever
    durable = store.load(rounds.log_id, store.trained, b"")
    return ManifestInForce.of_state(
        rounds.manifest,
        rounds.manifest_of,
        store.certificate(durable.head_round),
        durable.state,
    ).current.retriever


def state_of(settings: Settings) -> StateFolder:
    """Where the daemon of these settings keeps what it keeps."""
    return StateFolder(settings.site.state_dir)


def limits_of(wanted: LimitsSettings) -> Limits:
    """The operator's limits, within what the system gives us.

    The files of the state and the control socket need descriptors, too: connections
    get half of them, so that no crowd at the door can stop this site.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = _FILES_AT_MOST if hard == resource.RLIM_INFINITY else min(hard, _FILES_AT_MOST)
    files = max(soft, files)
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, hard))
    connections = min(wanted.connections, files // 2)
    if connections < wanted.connections:
        log.warning("fewer connections than limits.connections: raise LimitNOFILE=", files=files)
    return Limits(
        connections=connections,
        quotas=Quotas(
            requests_per_s=wanted.requests_per_s,
            burst=wanted.burst,
            pulls_per_minute=wanted.pulls_per_minute,
            streams=wanted.streams,
            copies=wanted.push_copies,
        ),
    )


def policy_of(settings: Settings) -> Policy:
    """What this site agrees to: options of that policy by their names, and what is called more."""
    training, privacy = settings.training, settings.privacy
    chosen = {
        **_named_in(training, Policy),
        **_named_in(privacy, Policy),
        "mode": numbers_of(pb.Mode.DESCRIPTOR)[training.mode],
        "privacy_required": privacy.required or privacy.epsilon is not None,
        "least_noise": privacy.least_noise or 0.0,
        "robust_required": settings.robust.required,
    }
    return Policy(**chosen)


@dataclass(frozen=True)
class Site:
    """What the rounds of all models have in common at a site.

    ``evidence``: the store that has it; ``accused``: whom it is of.
    """

    settings: Settings
    membership: Membership
    workers: Workers
    privacy: PrivacyBudget
    evidence: Store
    accused: set[str]

    @classmethod
    def of(
        cls,
        settings: Settings,
        membership: Membership,
        workers: Workers,
        ledger: PrivacyLedger,
        store: Store,
    ) -> Site:
        """``store``: of the retriever's rounds."""
        budget = PrivacyBudget(
            ledger,
            workers.crypto,
            settings.privacy.epsilon,
            settings.privacy.delta,
            least_noise=settings.privacy.least_noise or 0.0,
        )
        return cls(settings, membership, workers, budget, store, set(store.accused()))


class Rounds:
    """What the rounds of one model are made of, until their driver is."""

    def __init__(
        self,
        site: Site,
        rounds: LogMembership,
        store: Store,
        state: StateFolder,
        shapes: Shapes,
        genesis: bytes,
    ) -> None:
        """``genesis``: the version that round 1 trains from. Raises StoreError."""
        self._site, self._rounds = site, rounds
        durable = store.load(rounds.log_id, shapes.digest, genesis)
        self.protocol = _protocol_of(site, rounds, store, durable, shapes)
        self._events = EventQueue()
        self.catch_up = CatchUp(
            store=store,
            state=state,
            shapes=shapes,
            history=rounds,
            keep_versions=site.settings.rounds.keep_versions,
            feed=self._events.feed,
        )

    def driver(self, served: Served, crypto: Worker, trainer: Trainer, library: Path) -> Driver:
        """What drives them; ``crypto`` is theirs alone, for it keeps what attempts leave in it."""
        crypto.memory_bytes = integers.memory_bound(self.catch_up.shapes.total)
        membership = self._site.membership
        credentials = Credentials(membership.identity, membership.trust)
        return Driver(
            site=OfSite(credentials, self._site.privacy, self._site.evidence),
            protocol=self.protocol,
            manifest=self._rounds.manifest,
            catch_up=self.catch_up,
            events=self._events,
            served=served,
            computing=Computing(self._site.workers.learning, crypto, trainer, library),
        )


def _protocol_of(
    site: Site, rounds: LogMembership, store: Store, durable: do.Durable, shapes: Shapes
) -> Protocol:
    """The machine of a model's rounds, as their state has it and the settings want it."""
    settings = site.settings
    replica = Replica(
        Member(
            site.membership.identity.site_id,
            rounds.log_id,
            rounds,
            incarnation=secrets.token_bytes(INCARNATION_BYTES),
        ),
        Stored(durable, store.certificate(durable.head_round), site.accused),
        manifest=rounds.manifest,
        model=SharedModel(shapes.digest, shapes.total),
        unix_ms=lambda: time.time_ns() // 1_000_000,
        policy=policy_of(settings),
        timing=Timing(
            phase_s=settings.rounds.phase_deadline_s,
            train_s=settings.rounds.train_deadline_s,
            growth=settings.rounds.attempt_growth,
        ),
        verification=Verification(
            rounds.verify_vote, rounds.verify_certificate, rounds.manifest_of
        ),
    )
    return Protocol(replica)


def way_of(transport: Transport, audit: AuditLog, driver: Driver) -> AuditedTransport:
    """To the peers, for the rounds of one model."""

    def stated() -> Iterable[pb.Signed]:
        return driver.protocol.durable.state.statements

    return AuditedTransport(transport, audit, driver.protocol.log_id, statements=stated)


async def generator_of(
    site: Site, spec: RetrieverSpec, collection: Collection, stack: AsyncExitStack
) -> tuple[FederatedGenerator, dict[str, Driver]]:
    """What is trained to write answers, and who drives its rounds; nobody where none is named.

    Raises LearningError, StoreError.
    """
    settings, workers = site.settings, site.workers
    generator = FederatedGenerator(
        generator_spec(settings, spec),
        library=collection.library_path,
        learning=workers.learning,
        answering=workers.answering,
        willing=settings.training.willing,
        min_triples=settings.generator.min_triples,
        in_use=state_of(settings).generator_in_use,
    )
    rounds, state = site.membership.log(GENERATOR), state_of(settings).of_model(GENERATOR)
    if rounds.manifest.retriever is None:
        await generator.prepare(state.versions, None)
        return generator, {}
    await asyncio.to_thread(state.root.mkdir, mode=0o700, exist_ok=True)
    store = await asyncio.to_thread(Store, state.store)
    stack.callback(store.close)
    in_force = await asyncio.to_thread(named_in_force, store, rounds)
    named = in_force or rounds.manifest.retriever
    await generator.prepare(state.versions, named, store)
    await asyncio.to_thread(change_model, store, state, named)
    known = (site, rounds, store, state, generator.shapes, named.first)
    made = await asyncio.to_thread(Rounds, *known)
    trainer = Trainer(
        generator.spec, generator_training.train, generator_training.write_initial_version
    )
    driver = made.driver(generator, workers.generator_crypto, trainer, collection.library_path)
    generator.adopt(made.protocol.durable.head_digest)
    return generator, {GENERATOR: driver}


def generator_spec(settings: Settings, retriever: RetrieverSpec) -> GeneratorSpec:
    """The generator that this site can train."""
    return GeneratorSpec(
        retriever=retriever,
        prompt=settings.retrieval.prompt,
        personal_folder=str(state_of(settings).of_model(GENERATOR).personal),
        **_named_in(settings.generator, GeneratorSpec)
        | {"base_model": str(settings.generator.base_model or "")},
        **_named_in(settings.workers, GeneratorSpec),
        device=settings.retriever.device,
    )


@dataclass(frozen=True)
class Personalisers:
    """What fits what is this site's own of each model."""

    retriever: Personaliser
    generator: GeneratorPersonaliser

    def ended(self, model: str) -> Callable[[], None]:
        """Whom to tell that a run of that model is over: who waited for it, too."""

        def told() -> None:
            if model == RETRIEVER:
                self.retriever.run_ended()
            self.generator.run_ended()

        return told

    async def run(self) -> None:
        """Fit after each run, until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self.retriever.run())
            group.create_task(self.generator.run())


def personalisers_of(
    site: Site,
    collection: Collection,
    generator: FederatedGenerator,
    drivers: Mapping[str, Driver],
    way: PeerTransport,
    audit: AuditLog,
) -> Personalisers:
    """As the settings say of training; ``way``: to the peers, for the retriever's rounds."""
    settings, identity, learning = site.settings, site.membership.identity, site.workers.learning
    driver = drivers[RETRIEVER]
    chosen = Personal.of(settings, generator.spec.retriever, driver.shapes.digest, identity.site_id)
    training, axes, _ = of_generator(settings)
    options = replace(
        options_from(training, axes),
        local_epochs=settings.generator.personal_epochs,
        seed=chosen.options.seed,
    )
    return Personalisers(
        Personaliser(
            chosen,
            learning=learning,
            collection=collection,
            protocol=driver.protocol,
            transport=way,
            audit=audit,
            federation_id=identity.federation_id,
        ),
        GeneratorPersonaliser(
            generator,
            options,
            learning=learning,
            protocols={name: one.protocol for name, one in drivers.items()},
            audit=audit,
        ),
    )
