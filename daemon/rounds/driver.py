"""The driver: feeds the round protocol and carries out what it wishes.

One consumer takes one event at a time, steps the protocol, and carries out the
effects in order; a `Persist` is on disk before the next effect begins. What takes
long (training, encryption, transfers) runs as a task of its attempt and comes
back as an event: that is daemon/rounds/work.py, in the order of a round.

Whatever a step, an effect or a message raises ends here: it is logged and shown, the
message that led to it is refused, and the daemon lives. Only a state that can't be
written stops this site, and then it says nothing more (daemon/rounds/write_ahead.py).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import structlog

from crypto.identity.keys import IdentityError
from crypto.identity.site import Identity
from crypto.identity.trust import Trust
from crypto.quantize import CryptoError
from daemon.jobs.sums.sum_jobs import JobContext
from daemon.learning.options import LearningError
from daemon.process.faultpoints import passing
from daemon.process.tasks import causes_of, logged
from daemon.process.workers import WorkerCrashed
from daemon.rounds.audited import entered
from daemon.rounds.catch_up import CatchUp, no_room, too_large
from daemon.rounds.events import EventQueue, QueuedEvent
from daemon.rounds.events import answer as give_answer
from daemon.rounds.outbox import Outbox, ToPeers, put_in_envelope
from daemon.rounds.progress import LastError, ProgressBoard
from daemon.rounds.readiness import Readiness, Served
from daemon.rounds.unbooked import Unbooked
from daemon.rounds.work import AttemptWork, Computing, OfSite, keep_residual
from daemon.rounds.write_ahead import Unwritable, WriteAhead, still
from daemon.services.negatives import AnsweringDesk
from daemon.state.audit import AuditLog
from daemon.state.privacy_ledger import LedgerError
from daemon.state.store import StoreError
from daemon.state.versions import VersionError
from peers.attempts import effects as do
from peers.attempts.statement import named_sums
from peers.link.negatives import Declined
from peers.link.transport import PeerTransport
from peers.rounds.evidence import WORDS
from peers.rounds.protocol import Protocol
from peers.rounds.runs import RunRefused
from peers.wire.certificates import CertificateError
from peers.wire.errors import PeerError, RemoteProtocolError
from peers.wire.frames import ReceivedObject
from peers.wire.manifest import FederationManifest, model_of
from proto import federation_pb2 as pb

log = structlog.get_logger()

# What local work may fail with; anything else is our bug and is logged with its traceback.
_EXPECTED = (
    CryptoError,
    LearningError,
    VersionError,
    WorkerCrashed,
    PeerError,
    IdentityError,
    LedgerError,
    OSError,
)


@dataclass(frozen=True)
class Attached:
    """What else at this site goes by the rounds.

    ``committed`` hears of each new version, ``run_ended`` that the last one of a run is being
    indexed; ``desk`` answers peers that ask for negatives.
    """

    progress: ProgressBoard
    audit: AuditLog
    desk: AnsweringDesk | None = None
    committed: Callable[[int, bytes], None] = lambda _round, _digest: None
    run_ended: Callable[[], None] = lambda: None


@dataclass
class _Running:
    """What is there while the driver runs. ``tasks``: of the attempt under way."""

    group: asyncio.TaskGroup
    transport: PeerTransport
    outbox: Outbox
    work: AttemptWork
    attached: Attached
    tasks: set[asyncio.Task[None]] = field(default_factory=set)


class Driver:
    """One site's driver. It is the transport's inbox and the control service's target."""

    def __init__(
        self,
        *,
        site: OfSite,
        protocol: Protocol,
        manifest: FederationManifest,
        catch_up: CatchUp,
        events: EventQueue,
        served: Served,
        computing: Computing,
    ) -> None:
        """``manifest``: the newest; which one is in force, the protocol says.

        ``served``: the model of these rounds, as this site uses it.
        """
        self.model = model_of(protocol.log_id)
        self.credentials = site.credentials
        self.protocol = protocol
        self.manifest = manifest
        self.catch_up = catch_up
        self.store = catch_up.store
        self._evidence = site.evidence
        self.shapes = catch_up.shapes
        self.served = served
        self.privacy = site.privacy
        self.listening = asyncio.Event()  # the transport is there
        self._folders = catch_up.state
        self._events = events
        self._computing = computing
        self._errors = LastError()
        self.unbooked = Unbooked(
            self.identity.site_id, self.store, self.model, self.privacy, self.report
        )
        self.readiness = Readiness(served, self.privacy, self.model, events, self._errors)
        self.privacy.watch(self.model, self._look_again)
        self._journal = WriteAhead(self.store, self._refuse_waiting)
        self._waiting = ""  # why rounds do not go by the newest manifest, as it was last said
        self._run_over = False
        self._taken: QueuedEvent = do.Tick(), None  # the event whose effects are being carried out
        self._said = protocol.durable.state  # in the round under way, as it is on the disk
        self._is_running: _Running | None = None

    @property
    def identity(self) -> Identity:
        """Who this site is, by its newest certificate."""
        return self.credentials.identity

    @property
    def trust(self) -> Trust:
        """Whom it trusts."""
        return self.credentials.trust

    # ---- the loop --------------------------------------------------------------

    async def run(
        self,
        transport: PeerTransport,
        attached: Attached,
        started: Callable[[], None],
        *,
        heartbeat_s: float,
    ) -> None:
        """Drive the protocol until cancelled, from when ``listening`` is set.

        ``started`` is called when events are queued; they are taken when peers can be asked.
        Every ``heartbeat_s`` it looks at what peers have said of themselves.
        """
        async with asyncio.TaskGroup() as group:
            outbox = Outbox(self._send_one, group)
            work = self._work_of_attempts(ToPeers(outbox, transport), attached.progress)
            self._is_running = _Running(group, transport, outbox, work, attached)
            await asyncio.to_thread(self._folders.empty_spool)
            await asyncio.to_thread(self._folders.forget_kept, self.protocol.head_round)
            await self.readiness.refresh()
            await logged(self.unbooked.look())
            started()
            outbox.without_run.update(self.protocol.manifest.enabled_ids)
            group.create_task(self._keep_up_with_peers(heartbeat_s))
            group.create_task(self.catch_up.keep_head_sound(self))
            await self.listening.wait()
            await self._carry_out_all(self.protocol.start(time.monotonic()))
            await self._consume()

    def _work_of_attempts(self, peers: ToPeers, progress: ProgressBoard) -> AttemptWork:
        crypto = self._computing.crypto
        context = JobContext(
            self.credentials, self.protocol.log_id, crypto, self.shapes, self._events.feed, peers
        )
        here, folders = self._computing, self._folders
        return AttemptWork(context, here, folders, self.privacy, self.readiness, progress)

    @property
    def last_error(self) -> str:
        """What went wrong last, for people; what is wrong now goes first."""
        return self._journal.trouble or self._errors.text

    def report(self, error: str, *, round_: int = 0, about: str = "") -> None:
        """What `fedctl status` shows as the last error; ``round_``: that it belongs to.

        ``about``: what it is of, where `went_well` may be told of it.
        """
        self._errors.say(error, round_, about)

    def went_well(self, about: str) -> None:
        """An error about this is put right, and shown no longer."""
        self._errors.went_well(about)

    async def _keep_up_with_peers(self, heartbeat_s: float) -> None:
        """A peer that greets with a later round has what we missed; one may have missed a run."""
        while True:
            await asyncio.sleep(heartbeat_s)
            await logged(self._look_at_peers())

    async def _look_at_peers(self) -> None:
        peers = self.transport.statistics()
        heads = {site: p.head_of(self.protocol.log_id) for site, p in peers.items() if p.connected}
        self._out.say_again(self.protocol.wish, heads)
        farthest = max(heads, key=lambda site: heads[site], default=None)
        if farthest is not None and heads[farthest] > self.protocol.head_round:
            await self._feed_unless_still(do.PeerAhead(farthest, heads[farthest]))

    async def _feed_unless_still(self, event: do.Event) -> None:
        """What is noticed again and again must not pile up while this site stands still."""
        if not self._journal.trouble:
            await self.feed(event)

    async def _consume(self) -> None:
        while True:
            wait = self.protocol.next_wakeup() - time.monotonic()
            await self._take(*await self._events.next(wait))

    async def _take(self, event: do.Event, answer: asyncio.Future[None] | None) -> None:
        """One event: step, and carry out what follows. Raises nothing."""
        if self._journal.broken:
            give_answer(answer, still(event, self._journal.trouble))
            return
        was_busy = self.protocol.busy
        refused: Exception | None = None
        self._taken = event, answer
        try:
            effects = self.protocol.step(event, time.monotonic())
        except Exception as error:
            refused = self._blame(event, error, answer)
            effects = self.protocol.wished  # before it was refused: evidence, above all
        failed = await self._carry_out_all(effects)
        # Not before: a receipt, or "the run has begun", is a promise to somebody, too.
        give_answer(answer, refused or (self._unable(event, failed) if failed else None))
        waits = self.progress.current_phase == "waiting"  # what is said when nothing is under way
        if (was_busy or waits) and not self.protocol.busy:
            self.progress.stopped(self.protocol.head_round)
        self._say_what_waits()

    def _say_what_waits(self) -> None:
        """Once for each reason: whoever has reloaded takes the newest manifest to be in force."""
        why = self.protocol.waiting_manifest
        if why and why != self._waiting:
            log.warning(why)
        self._waiting = why

    def _blame(
        self, event: do.Event, error: Exception, answer: asyncio.Future[None] | None
    ) -> Exception:
        """A refusal goes back to who asked; our bugs go to the log."""
        if isinstance(error, RemoteProtocolError | CertificateError):
            # A message's refusal is logged where its call is refused, and there once for many.
            if answer is None:
                sender = event.sender if isinstance(event, do.MessageReceived) else ""
                log.warning("a peer misbehaved", peer=sender, cause=str(error))
            return RemoteProtocolError(str(error))
        if isinstance(error, RunRefused) and answer is not None:
            return error
        log.error("the protocol failed on an event", kind=type(event).__name__, exc_info=error)
        self.report(f"{type(event).__name__} could not be taken: {_describe(error)}")
        return self._unable(event, error)

    def _unable(self, event: do.Event, error: Exception) -> Exception:
        """How an event is refused that this site can't take, whoever is to blame for that."""
        if isinstance(error, Unwritable):
            return still(event, str(error))
        why = f"this site can't carry that out ({type(error).__name__}); its log has the details"
        return (
            RemoteProtocolError(why) if isinstance(event, do.MessageReceived) else RunRefused(why)
        )

    async def _carry_out_all(self, effects: list[do.Effect]) -> Exception | None:
        """Each in its turn; one that fails costs itself alone. What failed first, if anything.

        Behind a state that is not on the disk nothing is carried out any more.
        """
        failed: Exception | None = None
        for effect in effects:
            try:
                await self._carry_out(effect)
            except Unwritable as error:
                return error
            except Exception as error:
                name = type(effect).__name__
                self.report(f"{name} failed here: {_describe(error)}")
                log.exception("an effect was not carried out", effect=name)
                failed = failed or error
        return failed

    async def feed(self, event: do.Event) -> None:
        """Queue an event; waits only while the queue is full."""
        await self._events.feed(event)

    async def ask(self, event: do.Event) -> None:
        """Queue an event and wait until the protocol took it; raises what it raised."""
        if self._journal.trouble:
            raise still(event, self._journal.trouble)
        await self._events.ask(event)

    def _refuse_waiting(self, trouble: str) -> None:
        """Whoever waits for the protocol learns why it stands still; our own events stay."""
        for event, answer in [self._taken, *self._events.take_asked()]:
            give_answer(answer, still(event, trouble))

    def renew(self, identity: Identity, trust: Trust, manifest: FederationManifest) -> None:
        """The operator installed a new certificate or manifest (SIGHUP)."""
        self.credentials.identity, self.credentials.trust = identity, trust
        self.manifest = manifest
        self._start_task(self.feed(do.ManifestChanged(manifest)))

    async def _carry_out(self, effect: do.Effect) -> None:
        """One effect. What takes long is only begun: its end is an event."""
        match effect:
            case do.Persist(durable, commits):
                await self._journal.persist(durable, commits)
                if not commits:
                    self._said = durable.state
                self._look_for_a_stop(durable)
            case do.Send(to, body):
                self._out.put(to, body)
            case do.BeginAttempt():
                await self._at_once(effect, self._begin_attempt(effect))
            case do.TakePlan(plan):
                self._work.take_plan(plan)
            case do.Work():
                work = _bounded(effect, self._work.carry_out(effect))
                self._start(effect.at, effect.phase, work)
            case do.FetchVersion():
                fetching = self.catch_up.fetch_version(effect, self.transport)
                self._start_task(_bounded(effect, fetching))
            case do.FetchCertificates():
                fetching = self.catch_up.fetch_certificates(effect, self.transport)
                self._start_task(_bounded(effect, fetching))
            case do.Accuse():
                await self._at_once(effect, self._accuse(effect))
            case do.WentBack():
                await self._at_once(effect, self._went_back(effect))
            case do.Adopt():
                await self._at_once(effect, self._adopt(effect))
            case do.Progress():
                self._show(effect)

    async def _at_once(self, effect: do.Effect, work: Awaitable[None]) -> None:
        """Only a `Persist` must hold; a disk that fails another effect costs an attempt at most."""
        try:
            await _bounded(effect, work)
        except (OSError, StoreError) as error:
            self.report(f"{type(effect).__name__}: {error}; free or repair the disk")
            log.error("the disk failed us", effect=type(effect).__name__, cause=str(error))  # noqa: TRY400

    # ---- persist, send ---------------------------------------------------------

    async def _send_one(self, to: str, body: do.Body) -> bool:
        """Whether the peer has it. A lost message is the protocol's business: its deadlines'."""
        kind = type(body).__name__.lower()
        passing(f"send.{kind}:before")
        delivered = False
        try:
            envelope = pb.Envelope(
                federation_id=self.protocol.log_id,
                sender=self.identity.site_id,
                manifest_version=self.protocol.manifest.version,
            )
            put_in_envelope(envelope, body)
            await self.transport.send(to, envelope)
            delivered = True
        except PeerError as error:
            log.info("message not delivered", peer=to, kind=kind, cause=str(error))
        except Exception as error:  # what can't be sent ends nothing, whatever is wrong with it
            self.report(f"a {kind} could not be sent to {to}: {_describe(error)}")
            log.exception("message not sent: a bug", peer=to, kind=kind)
        passing(f"send.{kind}:after")
        return delivered

    async def _begin_attempt(self, effect: do.BeginAttempt) -> None:
        """Drop whatever belonged to another attempt: tasks, keys, spool."""
        for task in list(self._running.tasks):
            task.cancel()
        old = await self._work.begin(effect.round, effect.attempt)
        if old is not None:
            self._start_task(self._work.forget(old))
        named = {one.plan.draw for _, one in named_sums(self._said)}
        await asyncio.to_thread(self._folders.thin_kept, effect.round, named)

    # ---- evidence ----------------------------------------------------------------

    async def _accuse(self, effect: do.Accuse) -> None:
        """Keep it, and say it loudly: what to do about it is for people to decide."""
        evidence = effect.evidence
        site, words = evidence.first.site, WORDS[evidence.kind]
        self.report(f"{site} has signed {words}: see `fedctl peers`")
        log.error("a site contradicts itself", peer=site, signed=words)
        now_ms = time.time_ns() // 1_000_000
        await asyncio.to_thread(self._evidence.file_evidence, evidence, now_ms)
        await entered(self._running.attached.audit, effect, self.protocol.log_id)

    async def _went_back(self, effect: do.WentBack) -> None:
        """Say it loudly: whoever restored it should know what its copy may not hold."""
        if await asyncio.to_thread(self.store.forgotten_round) == effect.round:
            log.info(
                "this site's state went back, as forgotten on purpose (fedctl site forget-round): "
                "it goes on behind that",
                peer=effect.told_by,
                round=effect.round,
                forgotten=effect.forgotten,
            )
            await entered(self._running.attached.audit, effect, self.protocol.log_id)
            return
        text = (
            f"this site's state went back: {effect.told_by} knows that it has {effect.forgotten} "
            f"of round {effect.round}; it goes on behind that. Find out who restored it, or "
            "whether a second daemon runs with this site's key"
        )
        self.report(text)
        log.warning(text, peer=effect.told_by, round=effect.round)
        await entered(self._running.attached.audit, effect, self.protocol.log_id)

    # ---- versions and certificates ---------------------------------------------------

    async def _adopt(self, effect: do.Adopt) -> None:
        """Answer with the new version as soon as it is indexed; forget the oldest ones."""
        log.info("round committed", round=effect.round, model=effect.model_digest.hex()[:12])
        self._errors.committed(effect.round)
        attached, ours = self._running.attached, await self.catch_up.is_ours(effect.model_digest)
        if ours:
            self.served.adopt(effect.model_digest)
            attached.committed(effect.round, effect.model_digest)
        if self.identity.site_id in effect.contributors:
            named = named_sums(self._said)
            await asyncio.to_thread(
                keep_residual, self._folders, self.store.certificate, effect.round, named
            )
        await asyncio.to_thread(self._folders.forget_kept, effect.round)
        await self.unbooked.look()
        if self.privacy.committed(self.model):
            self._start_task(self.readiness.refresh())
        await self.catch_up.forget_old_versions(
            {effect.model_digest, self.served.served_digest, self.served.wanted}
        )
        run = self.protocol.run
        if ours and run is not None and run.target_round <= effect.round:
            attached.run_ended()

    def _look_again(self) -> None:
        if self._is_running is not None:  # another model's rounds have spent of the budget
            self._start_task(self.readiness.refresh())

    def _look_for_a_stop(self, durable: do.Durable) -> None:
        """A run also ends when somebody stops it, and no version follows then."""
        run = durable.run
        over = run is not None and 0 < run.target_round <= durable.head_round
        if over and not self._run_over and self.served.wanted == durable.head_digest:
            self._running.attached.run_ended()
        self._run_over = over

    def _show(self, effect: do.Progress) -> None:
        if effect.message:
            log.info(effect.phase, round=effect.round, attempt=effect.attempt, cause=effect.message)
        if effect.message and effect.phase in ("failed", "waiting"):
            line = f"round {effect.round} attempt {effect.attempt}: {effect.message}"
            self.report(line, round_=effect.round)
        for one in effect.report.rejections if effect.report else ():
            if one.site == self.identity.site_id:
                line = f"round {effect.round} went without our update: {one.reason}"
                self.report(line, round_=effect.round)
                log.warning("our update was rejected", round=effect.round, cause=one.reason)
        run = self.protocol.run
        self.progress.phase(effect, run.target_round if run else 0, self.protocol.head_round)

    # ---- inbox (peers/link/transport.py calls these) --------------------------------------

    @property
    def head_round(self) -> int:
        """The last committed round; 0: none."""
        return self.protocol.head_round

    async def message(self, sender: str, envelope: pb.Envelope) -> None:
        """A protocol message; raises RemoteProtocolError when it is out of order."""
        kind = envelope.WhichOneof("body")
        if kind is not None:
            await self.ask(do.MessageReceived(sender, getattr(envelope, kind)))

    def accepts(self, sender: str, name: pb.BlobName, total_bytes: int) -> str | None:
        """None when this object belongs to the attempt under way, else why not."""
        if self._journal.trouble:
            return self._journal.trouble
        if not self.protocol.expects(sender, name):
            kind = pb.BlobKind.Name(name.kind)
            return f"no {kind} of round {name.round} attempt {name.attempt} is expected now"
        refused = too_large(name.kind, total_bytes, self._work.plan, self.shapes)
        if not refused and (refused := no_room(self._folders.spool, total_bytes)):
            # Seen where it can be put right, too: its sender's operator has no say here.
            self.report(f"an object of site {sender!r} was declined: {refused}", round_=name.round)
        return refused

    async def blob(self, sender: str, name: pb.BlobName, blob: ReceivedObject) -> None:
        """A large object, whole and verified."""
        if blob.data is not None:
            work = self._work.take_context(sender, name, blob.data)
            self._start((name.round, name.attempt), "key", work)
        else:
            await self._work.arrived(sender, name, blob)

    async def source(self, sender: str, name: pb.BlobName) -> Path | bytes:
        """What a peer may pull: committed certificates, model versions by name."""
        return await self.catch_up.source(sender, name)

    async def negatives(self, sender: str, request: pb.NegativesRequest) -> pb.NegativesReply:
        """Embeddings near a peer's queries; raises Declined."""
        if self.desk is None:
            raise Declined("this site is still starting: ask again later")
        return await self.desk.answer(sender, request)

    # ---- small parts -----------------------------------------------------------------

    @property
    def _running(self) -> _Running:
        if self._is_running is None:
            raise RuntimeError("the driver is not running")
        return self._is_running

    @property
    def transport(self) -> PeerTransport:
        """The transport; only there while `run` runs."""
        return self._running.transport

    @property
    def progress(self) -> ProgressBoard:
        """The round under way, for people; only there while `run` runs."""
        return self._running.attached.progress

    @property
    def desk(self) -> AnsweringDesk | None:
        """Who answers peers that ask for negatives; None: not yet."""
        return self._is_running.attached.desk if self._is_running is not None else None

    @property
    def _out(self) -> Outbox:
        return self._running.outbox

    @property
    def _work(self) -> AttemptWork:
        return self._running.work

    def _start(self, at: tuple[int, int], phase: str, work: Coroutine[Any, Any, None]) -> None:
        """Run work of the attempt; a failure becomes an event with its cause."""
        tasks = self._running.tasks
        task = self._start_task(self._guard(*at, phase, work))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    async def _guard(self, round_: int, attempt: int, phase: str, work: Awaitable[None]) -> None:
        try:
            await work
        except* _EXPECTED as group:
            causes = causes_of(group)
            if any(isinstance(cause, VersionError) for cause in causes):
                self.catch_up.suspect_head()
            reason = "; ".join(str(cause) for cause in causes)
            log.warning("work failed", phase=phase, round=round_, attempt=attempt, cause=reason)
            text = f"round {round_} attempt {attempt}, {phase} failed here: {reason}"
            self.report(text, round_=round_)
            await self.feed(do.WorkFailed(round_, attempt, phase, reason))
        except* Exception:
            log.exception("work failed: a bug", phase=phase, round=round_)
            reason = "an internal error; the site's log has the details"
            await self.feed(do.WorkFailed(round_, attempt, phase, reason))

    def _start_task(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        return self._running.group.create_task(logged(work))


async def _bounded(effect: do.Effect, work: Awaitable[None]) -> None:
    """Work between the two fault points of its effect."""
    name = type(effect).__name__.lower()
    passing(f"{name}:before")
    await work
    passing(f"{name}:after")


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}; the site's log has the details"
