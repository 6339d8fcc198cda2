"""Answers control.proto: what fedctl may ask of its own daemon.

Whoever may write to the control socket (daemon/control/socket.py) may administer
the site. What changes something or reads documents goes into the audit log, with
the user's id.

A refusal is a status with one or two lines of text: the cause, and the remedy.
"""

from __future__ import annotations

import peers.link.tls13  # noqa: F401  before grpc, see there

# isort: split
import asyncio
import math
import os
import pwd
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NoReturn

import grpc
import grpc.aio

from config.settings import LearningSettings, RetrieverSettings, RobustSettings, TrainingSettings
from daemon.answering.answering import QuestionRefusedError
from daemon.answering.generator import Citation
from daemon.control.learning import LearningCalls
from daemon.control.run_plan import ChoiceRefused, chosen, make_plan
from daemon.learning.options import EmbeddingProgress, EvaluationError, LearningError
from daemon.library.documents import Document, Pair
from daemon.library.schema import LibraryError
from daemon.personal.personal import PersonalStore
from daemon.process.telemetry import LoopLag, resident_bytes
from daemon.process.workers import Worker, WorkerCrashed
from daemon.rounds.driver import Node
from daemon.services.collection import NotIndexedYet
from daemon.services.curve import Curve
from daemon.services.inversion_audit import EmbeddingAudit
from daemon.services.pair_maker import PairMaker
from daemon.services.personaliser import Personaliser, last_step, told, watched
from daemon.state.audit import LOOK_AT_IT, Action, AuditLog
from daemon.state.audit_format import AuditError, BreakRecord
from daemon.state.expiry import expiries, warnings
from daemon.state.privacy_ledger import LedgerError
from peers.attempts import effects as do
from peers.link.contacts import PeerStatistics
from peers.plans.policy import noise_of_round, too_dear
from peers.rounds.evidence import WORDS
from peers.rounds.runs import RunRefused
from peers.wire.errors import RemoteProtocolError
from peers.wire.manifest import FederationManifest
from peers.wire.messages import SOFTWARE_VERSION, check
from proto import control_pb2 as control
from proto import federation_pb2 as pb

_ROUNDS_A_REPLY = 500  # a certificate of many sites is some 10 KiB; a reply has 32 MiB
_CHAIN_PART = 100
_BREAKS_A_REPLY = 20
_REFUSALS = (
    RunRefused,
    NotIndexedYet,
    QuestionRefusedError,
    EvaluationError,
    LearningError,
    LibraryError,
    LedgerError,
    WorkerCrashed,
)
_REMEDY = (
    "find out whether two daemons run with this site's key, or with an old copy of its state; "
    "if not, it breaks the protocol: expel it (`fedctl site expel`)"
)
_UNIT = "this site: all that it contributed, in every round, against zeros in its place"
Context = grpc.aio.ServicerContext[Any, Any]


@dataclass(frozen=True)
class Surroundings:
    """What the daemon knows about itself beside its node."""

    node: Node
    training: TrainingSettings
    learning: LearningSettings
    colluders: int
    robust: RobustSettings
    retriever: RetrieverSettings
    personal: PersonalStore
    lag: LoopLag
    workers: tuple[Worker, ...]
    started: float
    audit: AuditLog
    pairs: PairMaker
    curve: Curve
    embeddings: EmbeddingAudit
    personaliser: Personaliser


class ControlService(LearningCalls):  # its method names are control.proto's
    """Answers one user's fedctl; every method is thin over the node and the collection."""

    def __init__(self, around: Surroundings, actor: str, ingesting: asyncio.Lock) -> None:
        """``ingesting`` is one for all users."""
        self._around = around
        self._node = around.node
        self._audit = around.audit
        self._actor = actor
        self._ingesting = ingesting

    @asynccontextmanager
    async def _audited(
        self, context: Context, action: Action, **asked: Any
    ) -> AsyncIterator[dict[str, Any]]:
        """Recorded before it begins, or refused; and how it ended, with what is put in the dict."""
        try:
            await self._audit.record(self._actor, action, "begun", **asked)
        except AuditError as error:
            await _refuse(context, str(error))
        outcome, found = "refused or failed", dict[str, Any]()
        try:
            yield found
            outcome = "done"
        finally:
            await self._audit.record_or_owe(self._actor, action, outcome, **found)

    # ---- training --------------------------------------------------------------

    async def Train(self, request: control.TrainRequest, context: Context) -> control.TrainReply:
        """Start a run."""
        if not 1 <= request.rounds <= 10_000:
            await _refuse(context, "a run has 1 to 10000 rounds", "Say --rounds N")
        plan = await self._plan(request, context)
        run_id = uuid.uuid4().hex[:12]
        async with self._audited(
            context, "train", run=run_id, rounds=request.rounds, recipe=plan.learning.recipe
        ):
            await self._answered(
                context, self._node.ask(do.RunRequested(run_id, request.rounds, plan))
            )
        return control.TrainReply(run=self._node.protocol.run)

    async def _plan(self, request: control.TrainRequest, context: Context) -> pb.TrainingPlan:
        """The plan asked for; what it leaves open comes from a recipe or this site's settings."""
        around = self._around
        try:
            training, learning = chosen(
                around.training,
                around.learning,
                around.retriever.adapt,
                request.recipe,
                request.choices,
            )
            plan = make_plan(
                request.plan, training, learning, around.robust, around.retriever.adapt
            )
            if request.plan.HasField("privacy"):
                plan.privacy.CopyFrom(await self._noise(request, context))
            check(plan)
        except (ChoiceRefused, RemoteProtocolError) as error:
            await _refuse(context, str(error), "Choose other options")
        return plan

    async def _noise(self, request: control.TrainRequest, context: Context) -> pb.PrivacyPlan:
        """The noise asked for, or what spends the epsilon asked for; the rest from settings."""
        wanted, privacy = request.plan.privacy, self._node.privacy
        multiplier = wanted.noise_multiplier or 1.0
        if request.epsilon:
            multiplier = await privacy.calibrated(request.rounds, request.epsilon)
            if math.isinf(multiplier):
                cause = f"no noise keeps {request.rounds} rounds within epsilon {request.epsilon:g}"
                await _refuse(context, cause, "Ask for fewer rounds or a larger epsilon")
            multiplier = max(multiplier, 0.001)
        least = await privacy.least()
        if multiplier < least:
            await _refuse(context, too_dear(multiplier, least), "See fedctl privacy")
        return pb.PrivacyPlan(
            clip_norm=wanted.clip_norm,
            noise_multiplier=multiplier,
            noise_floor=min(wanted.noise_floor or multiplier, multiplier),
            noise_decay=wanted.noise_decay or 1.0,
            loss_threshold=wanted.loss_threshold,
            first_round=self._node.protocol.head_round + 1,
            colluders=wanted.colluders or self._around.colluders,
            clip_quantile=wanted.clip_quantile,
        )

    async def Privacy(
        self, request: control.PrivacyRequest, context: Context
    ) -> control.PrivacyReply:
        """What this site's updates have told so far, and what further rounds would add."""
        if request.rounds > 10_000 or not 0.0 <= request.noise_multiplier <= 1000.0:
            await _refuse(context, "1 to 10000 rounds, of a noise multiplier of 0.001 to 1000")
        rounds = request.rounds or 1
        multiplier = request.noise_multiplier or await self._next_multiplier()
        account = await self._answered(context, self._node.privacy.account(multiplier, rounds))
        budget = math.nan if account.budget is None else account.budget
        return control.PrivacyReply(
            unit=_UNIT,
            delta=account.delta,
            epsilon_spent=account.spent,
            epsilon_budget=budget,
            epsilon_left=max(0.0, budget - account.spent) if account.budget else math.nan,
            updates_noised=len(account.booked.multipliers),
            updates_bare=account.booked.bare,
            further_rounds=rounds,
            further_multiplier=multiplier,
            further_cost=account.cost,
            further_fits=account.fits,
            least_multiplier=account.least,
            last_multiplier=account.booked.multipliers[-1] if account.booked.multipliers else 0.0,
            warning=self._node.unbooked.warning,
        )

    async def _next_multiplier(self) -> float:
        """Of the next round, if the run under way or the last one went on; 0: without noise."""
        run, head = self._node.protocol.run, self._node.protocol.head_round
        if run is None:
            return 0.0
        certificate = await asyncio.to_thread(self._node.store.certificate, head)
        return noise_of_round(run.plan, head + 1, certificate)[0]

    async def StopTraining(
        self, _request: control.StopTrainingRequest, context: Context
    ) -> control.TrainReply:
        """End the run under way, everywhere."""
        async with self._audited(context, "stop-training"):
            await self._answered(context, self._node.ask(do.StopRequested(uuid.uuid4().hex[:12])))
        return control.TrainReply(run=self._node.protocol.run)

    async def WatchTraining(
        self, _request: control.WatchTrainingRequest, _context: Context
    ) -> AsyncIterator[control.TrainingProgress]:
        """The run under way, step by step, until it is over."""
        run = self._node.protocol.run
        if run is not None:
            active = run.target_round > self._node.protocol.head_round
            async for progress in self._node.progress.watch(active):
                yield progress

    async def Personalise(
        self, request: control.PersonaliseRequest, context: Context
    ) -> AsyncIterator[control.PersonaliseProgress]:
        """Fit this site's query encoder to its own pairs."""
        if request.local_epochs > 100:
            await _refuse(context, "1 to 100 passes over the pairs", "Say --local-epochs N")
        async with self._audited(context, "personalise") as recorded:
            async with watched(self._around.personaliser, request.local_epochs) as (steps, work):
                async for step in steps:
                    yield step
                outcome = await self._answered(context, work)
            recorded |= told(outcome)
            yield last_step(outcome, self._around.personaliser.spec)

    # ---- documents and questions -------------------------------------------------

    async def Ingest(
        self, requests: AsyncIterator[control.IngestRequest], context: Context
    ) -> AsyncIterator[control.IngestProgress]:
        """Documents and pairs in batches; then they are embedded and indexed."""
        if self._ingesting.locked():
            await _refuse(context, "another ingest is under way", "Wait until it has ended")
        async with self._ingesting, self._audited(context, "ingest") as recorded:
            state = control.IngestProgress()
            # Their documents may come later in this call. Usually these are few.
            lost: list[Pair] = []
            async for request in requests:
                documents, pairs, errors = _parsed(request)
                counts = await self._answered(
                    context, self._node.collection.ingest(documents, pairs)
                )
                state.documents_new += counts.new
                state.documents_changed += counts.changed
                state.documents_unchanged += counts.unchanged
                state.pairs += len(pairs)
                lost += await self._answered(context, self._node.collection.unusable(pairs))
                recorded["bytes"] = recorded.get("bytes", 0) + request.ByteSize()
                recorded |= _counted(state)
                yield _with_errors(state, errors)
            await self._answered(context, self._count_usable(state, lost))
            async for step in self._indexed(state, context):
                yield step
            await self._node.readiness.refresh()

    async def _count_usable(self, state: control.IngestProgress, lost: list[Pair]) -> None:
        """How many pairs have a document here, and of the others what the first may mean."""
        collection = self._node.collection
        lost = await collection.unusable(lost)
        state.pairs_usable = state.pairs - len(lost)
        if lost:
            state.unknown_document = lost[0].positives[0]
            state.known_document = await collection.similar(state.unknown_document)

    async def _indexed(
        self, state: control.IngestProgress, context: Context
    ) -> AsyncIterator[control.IngestProgress]:
        steps: asyncio.Queue[EmbeddingProgress | None] = asyncio.Queue()

        def listener(item: object) -> None:
            if isinstance(item, EmbeddingProgress):
                steps.put_nowait(item)

        work = asyncio.create_task(self._node.collection.index(listener))
        work.add_done_callback(lambda _: steps.put_nowait(None))
        try:
            while (step := await steps.get()) is not None:
                state.passages_total, state.passages_embedded = step.total, step.done
                yield _with_errors(state, [])
            await self._answered(context, work)
        finally:
            work.cancel()
        state.done = True
        yield _with_errors(state, [])

    async def Ask(self, request: control.AskRequest, context: Context) -> control.AskReply:
        """Answer a question from this site's documents."""
        started = time.monotonic()
        outcome, citations = "refused or failed", 0
        try:
            answered = await self._answered(
                context, self._node.collection.ask(request.question, request.top_k)
            )
            outcome, citations = "answered", len(answered.citations)
        finally:
            # Owed, if need be: people get their answers from a site whose disk is full, too.
            await self._audit.record_or_owe(self._actor, "ask", outcome, citations=citations)
        return control.AskReply(
            answer=answered.text,
            citations=[_citation(citation) for citation in answered.citations],
            passages=[_citation(passage) for passage in answered.passages],
            model_digest=answered.model_digest,
            seconds=time.monotonic() - started,
        )

    # ---- looking -------------------------------------------------------------------

    async def Status(
        self, _request: control.StatusRequest, context: Context
    ) -> control.StatusReply:
        """How the daemon is."""
        around, node = self._around, self._node
        counts = await self._answered(context, node.collection.counts())
        lag = around.lag.since_start()
        seen = node.transport.statistics()
        peers = seen.values()
        pids = [os.getpid(), *(w.pid for w in around.workers if w.pid is not None)]
        resident = await asyncio.to_thread(resident_bytes, pids)
        audit_entries, audit_head = around.audit.head
        return control.StatusReply(
            site=node.identity.site_id,
            federation_id=node.identity.federation_id,
            software_version=SOFTWARE_VERSION,
            manifest_version=node.protocol.manifest.version,
            head_round=node.protocol.head_round,
            model_digest=node.protocol.durable.head_digest,
            index_digest=node.collection.served_digest,
            documents=counts.documents,
            passages=counts.passages,
            pairs_train=counts.pairs_train,
            pairs_test=counts.pairs_test,
            pairs_valid=counts.pairs_valid,
            uptime_s=time.monotonic() - around.started,
            loop_lag_p50_ms=lag.p50_ms,
            loop_lag_p99_ms=lag.p99_ms,
            loop_lag_max_ms=lag.max_ms,
            resident_bytes=resident,
            run=node.protocol.run,
            phase=node.progress.current_phase,
            bytes_sent=sum(peer.bytes_sent for peer in peers),
            bytes_received=sum(peer.bytes_received for peer in peers),
            certificate_expires_unix_s=int(node.identity.not_after.timestamp()),
            peers_connected=sum(peer.connected for peer in peers),
            peers_total=len(peers),
            encoder=around.retriever.encoder,
            last_error=self._last_error(),
            audit_entries=audit_entries,
            audit_head=audit_head,
            authority_expires_unix_s=_unix_s(node.trust.not_after),
            warnings=[
                *self._broken(),
                *warnings(expiries(node.identity, node.trust, seen)),
                *filter(None, [node.protocol.waiting_manifest, node.unbooked.warning]),
                *shut_out(node.identity.site_id, node.manifest, seen),
                *unverified(node.exchange.unverified, node.protocol.head_round, seen),
            ],
            audit_breaks=[_break(record) for record in self._open_breaks()],
        )

    def _open_breaks(self) -> list[BreakRecord]:
        """Not acknowledged; the oldest, for whoever can write the log can make it many."""
        return self._audit.broken[:_BREAKS_A_REPLY]

    def _broken(self) -> list[str]:
        """Breaks of the audit log that no person has acknowledged, in words."""
        return [f"the audit log is broken at {r.text}: {LOOK_AT_IT}" for r in self._open_breaks()]

    def _last_error(self) -> str:
        """A broken audit log must not hide an attempt's error, nor the other way round."""
        others = self._node.last_error or self._node.collection.last_error
        if self._audit.trouble or not self._audit.broken:
            return self._audit.trouble or others
        return "; ".join([self._broken()[0], *([others] if others else [])])

    async def AcknowledgeBreaks(
        self, request: control.AcknowledgeBreaksRequest, context: Context
    ) -> control.AcknowledgeBreaksReply:
        """A person has looked; the breaks stay in the log, and are warned of no longer."""
        records = {record.entry: record for record in self._audit.broken}
        asked = sorted(set(request.entries))
        if not asked or not records.keys() >= set(asked):
            unknown = ", ".join(str(entry) for entry in asked if entry not in records)
            cause = f"no break waits to be acknowledged at entry {unknown or '(none was named)'}"
            await _refuse(context, cause, "`fedctl status` lists those that do")
        user = await asyncio.to_thread(_user_name, self._actor)
        try:
            await self._audit.record(self._actor, "acknowledge", "done", breaks=asked, **user)
        except AuditError as error:
            await _refuse(context, str(error))
        return control.AcknowledgeBreaksReply(breaks=[_break(records[entry]) for entry in asked])

    async def Peers(self, _request: control.PeersRequest, _context: Context) -> control.PeersReply:
        """The other sites, as this one sees them."""
        node, now = self._node, time.monotonic()
        peers = node.transport.statistics()
        expiring = warnings(expiries(node.identity, node.trust, peers))
        reply = control.PeersReply(warnings=[*self._broken(), *expiring])
        for found in await asyncio.to_thread(node.store.evidence):
            reply.accused.add(
                site=found.site,
                signed=WORDS[found.kind],
                first_seen_unix_ms=found.unix_ms,
                remedy=_REMEDY,
            )
        rejected = await asyncio.to_thread(node.store.rejected_rounds)
        desk = node.desk.desk if node.desk else None
        for site, seen in peers.items():
            reply.peers.add(
                site=site,
                address=node.manifest.site(site).address,
                connected=seen.connected,
                software_version=seen.software_version,
                head_round=seen.head_round,
                manifest_version=seen.manifest_version,
                last_contact_s=-1.0 if seen.last_contact is None else now - seen.last_contact,
                clock_offset_ms=seen.clock_offset_ms or 0.0,
                bytes_sent=seen.bytes_sent,
                bytes_received=seen.bytes_received,
                last_error=seen.last_error,
                round_trip_ms=-1.0 if seen.round_trip_ms is None else seen.round_trip_ms,
                certificate_expires_unix_s=_unix_s(seen.certificate_not_after),
                refused=seen.refused,
                over_quota=seen.over_quota,
                rejected_rounds=rejected[site],
                negatives_answered=desk.answered[site] if desk else 0,
                negatives_declined=desk.refused[site] if desk else 0,
            )
        return reply

    async def Rounds(
        self, request: control.RoundsRequest, _context: Context
    ) -> control.RoundsReply:
        """Committed rounds, oldest first, each with the attempts that this site saw."""
        limit = min(request.limit or _ROUNDS_A_REPLY, _ROUNDS_A_REPLY)
        commits = await asyncio.to_thread(self._node.store.rounds, request.first, limit)
        reply = control.RoundsReply(open_round=self._node.protocol.head_round + 1)
        first = commits[0].certificate.body.round if commits else reply.open_round
        seen = await self._attempts(first, reply.open_round)
        for commit in commits:
            reply.rounds.add(
                certificate=commit.certificate,
                report=commit.report,
                attempts=seen.get(commit.certificate.body.round, []),
            )
        reply.open_attempts.extend(seen.get(reply.open_round, []))
        return reply

    async def _attempts(self, first: int, last: int) -> dict[int, list[control.Attempt]]:
        log_of_attempts = self._node.progress.attempts
        if log_of_attempts is None:
            return {}
        return await asyncio.to_thread(log_of_attempts.attempts, first, last)

    async def Chain(
        self, request: control.ChainRequest, _context: Context
    ) -> AsyncIterator[control.ChainPart]:
        """Every certificate from a round on, with the manifests they were signed under."""
        store = self._node.store
        yield control.ChainPart(manifests=await asyncio.to_thread(store.manifests))
        first = max(1, request.first)
        while commits := await asyncio.to_thread(store.rounds_from, first, _CHAIN_PART):
            yield control.ChainPart(certificates=[c.certificate for c in commits])
            first = commits[-1].certificate.body.round + 1

    async def _answered(self, context: Context, work: Awaitable[Any]) -> Any:
        """The result of ``work``; what it refuses is told to the person as it is."""
        try:
            return await work
        except _REFUSALS as refusal:
            await _refuse(context, str(refusal))


async def _refuse(context: Context, cause: str, remedy: str = "") -> NoReturn:
    text = f"{cause}\n{remedy}" if remedy else cause
    await context.abort(grpc.StatusCode.FAILED_PRECONDITION, text)


def _break(record: BreakRecord) -> control.AuditBreak:
    return control.AuditBreak(
        entry=record.entry,
        found=record.time,
        file=record.file,
        line=record.line,
        why=record.why,
        breaks=record.breaks,
        head=bytes.fromhex(record.head),
    )


def _user_name(actor: str) -> dict[str, str]:
    """What this machine calls a user; uids are given to somebody else some day."""
    try:
        return {"user": pwd.getpwuid(int(actor.removeprefix("uid:"))).pw_name}
    except KeyError:
        return {}


def shut_out(
    site: str, manifest: FederationManifest, seen: Mapping[str, PeerStatistics]
) -> list[str]:
    """That this site takes no part any more, by its own newest manifest or a peer's newer one.

    A site that is expelled is shut out before the manifest that does it can reach it.
    """
    if not manifest.enabled(site):
        return [f"this site is disabled in manifest {manifest.version}, which is installed here"]
    said: dict[int, list[str]] = {}
    for peer, statistics in sorted(seen.items()):
        if statistics.shut_out > manifest.version:
            said.setdefault(statistics.shut_out, []).append(peer)
    return [
        f"this site is disabled in manifest {version} (said by {', '.join(peers)}): it takes "
        "part in no round until the federation's keeper signs one that enables it"
        for version, peers in sorted(said.items())
    ]


def unverified(
    causes: Mapping[str, str], head_round: int, seen: Mapping[str, PeerStatistics]
) -> list[str]:
    """Whose later rounds can't be taken here, and why: it lies, or this site is cut off."""
    return [
        f"the rounds of {site}, which says that it is at {seen[site].head_round}, do not verify "
        f"here: {cause}; where those of the others do neither, compare the manifests "
        "(`fedctl manifest show`)"
        for site, cause in sorted(causes.items())
        if site in seen and seen[site].head_round > head_round
    ]


def _unix_s(moment: datetime | None) -> int:
    return int(moment.timestamp()) if moment else 0


def _parsed(
    request: control.IngestRequest,
) -> tuple[list[Document], list[Pair], list[str]]:
    """Documents and pairs of a batch; what is out of bounds is refused by name, the rest kept."""
    documents: list[Document] = []
    pairs: list[Pair] = []
    errors: list[str] = []
    for item in request.documents:
        if not 1 <= len(item.id) <= 512:
            errors.append(f"document id of {len(item.id)} characters: 1 to 512 are allowed")
        elif item.split not in ("", "train", "valid", "test"):
            errors.append(f"document {item.id}: split {item.split!r} is not train, valid or test")
        else:
            documents.append(Document(item.id, item.title, item.text, item.split))
    for pair in request.pairs:
        if not pair.query.strip() or not 1 <= len(pair.positives) <= 1000:
            errors.append("a pair needs a query and 1 to 1000 positives")
        elif pair.split not in ("train", "valid", "test"):
            errors.append(f"a pair's split {pair.split!r} is not train, valid or test")
        else:
            pairs.append(Pair(pair.query, tuple(pair.positives), pair.split))
    return documents, pairs, errors


def _with_errors(state: control.IngestProgress, errors: list[str]) -> control.IngestProgress:
    step = control.IngestProgress()
    step.CopyFrom(state)
    step.errors.extend(errors)
    return step


def _counted(state: control.IngestProgress) -> dict[str, int]:
    """What an ingest did, in numbers; ids of documents may say what they are about."""
    return {
        "documents_new": state.documents_new,
        "documents_changed": state.documents_changed,
        "documents_unchanged": state.documents_unchanged,
        "pairs": state.pairs,
    }


def _citation(citation: Citation) -> control.Citation:
    return control.Citation(
        number=citation.number,
        document_id=citation.document_id,
        passage_id=citation.passage_id,
        title=citation.title,
        text=citation.text,
        score=citation.score,
    )
