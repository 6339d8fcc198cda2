"""The part of control.proto that shows how the site is, its peers and its rounds."""

from __future__ import annotations

import asyncio
import os
import pwd
import time
from collections.abc import AsyncIterator, Mapping
from datetime import datetime
from typing import Any

from daemon.control.context import Calls, Context, ServiceContext, refuse
from daemon.control.library_messages import told_threshold
from daemon.jobs.answering import OpenIndex
from daemon.library.readers.documents import INSTALL_OCR
from daemon.library.readers.pdf import engines
from daemon.process import metrics
from daemon.process.telemetry import resident_bytes
from daemon.rounds.driver import Driver
from daemon.state.audit import LOOK_AT_IT
from daemon.state.audit_format import AuditError, BreakRecord
from daemon.state.expiry import expiries, warnings
from peers.link.contacts import PeerStatistics
from peers.rounds.evidence import WORDS
from peers.rounds.protocol import Protocol
from peers.wire.manifest import GENERATOR, RETRIEVER, FederationManifest, NamedModel
from peers.wire.messages import SOFTWARE_VERSION
from proto import control_pb2 as control

_ROUNDS_A_REPLY = 500  # a certificate of many sites is some 10 KiB; a reply has 32 MiB
_CHAIN_PART = 100
_BREAKS_A_REPLY = 20
_REMEDY = (
    "find out whether two daemons run with this site's key, or with an old copy of its state; "
    "if not, it breaks the protocol: expel it (`fedctl site expel`)"
)


class StatusCalls(Calls):
    """How things stand; and that a person has looked at a broken audit log."""

    async def Status(
        self, _request: control.StatusRequest, context: Context
    ) -> control.StatusReply:
        """How the daemon is."""
        around, driver = self._around, self._driver
        counts, owed = await self._answered(
            context,
            around.collection.read(lambda library: (library.counts(), library.erasure.owed())),
        )
        lag = around.process.lag.since_start()
        seen = driver.transport.statistics()
        peers = seen.values()
        pids = [os.getpid(), *(w.pid for w in around.process.workers if w.pid is not None)]
        resident = await asyncio.to_thread(resident_bytes, pids)
        audit_entries, audit_head = around.audit.head
        waiting = max(0, counts.passages - around.collection.opened.passages)
        return control.StatusReply(
            site=driver.identity.site_id,
            federation_id=driver.identity.federation_id,
            software_version=SOFTWARE_VERSION,
            manifest_version=driver.protocol.manifest.version,
            head_round=driver.protocol.head_round,
            model_digest=driver.protocol.durable.head_digest,
            index_digest=around.collection.served_digest,
            documents=counts.documents,
            passages=counts.passages,
            pairs_train=counts.pairs_train,
            pairs_test=counts.pairs_test,
            pairs_valid=counts.pairs_valid,
            uptime_s=time.monotonic() - around.process.started,
            loop_lag_p50_ms=lag.p50_ms,
            loop_lag_p99_ms=lag.p99_ms,
            loop_lag_max_ms=lag.max_ms,
            resident_bytes=resident,
            run=driver.protocol.run,
            phase=driver.progress.current_phase,
            bytes_sent=sum(peer.bytes_sent for peer in peers),
            bytes_received=sum(peer.bytes_received for peer in peers),
            certificate_expires_unix_s=int(driver.identity.not_after.timestamp()),
            peers_connected=sum(peer.connected for peer in peers),
            peers_total=len(peers),
            encoder=around.services.personaliser.spec.encoder,
            retriever=str(NamedModel(driver.shapes.digest, driver.shapes.total)),
            next_retriever=str(around.coming or ""),
            wanted_digest=around.collection.wanted,
            last_error=self._last_error(),
            audit_entries=audit_entries,
            audit_head=audit_head,
            authority_expires_unix_s=_unix_s(driver.trust.not_after),
            warnings=[
                *self.federation_warnings(),
                *people_shut_out(around.tokens.people.fault()),
                *around.collection.warnings,
                *around.services.folders.warnings,
                *await waiting_for_ocr(counts.waiting),
            ],
            audit_breaks=[_break(record) for record in self._open_breaks()],
            **_of_index(around.collection.opened),
            documents_waiting=counts.waiting,
            erasure_owed=owed,
            library_change=around.collection.changes.under_way,
            passages_waiting=waiting,
            passages_embedded=around.collection.embedded_of(waiting),
            counted=metrics.counts(),
            generator=_of_generator(around),
        )

    def federation_warnings(self) -> list[str]:
        """What a person should look at that is no matter of documents."""
        driver = self._driver
        seen = driver.transport.statistics()
        return [
            *self._broken(),
            *warnings(expiries(driver.identity, driver.trust, seen)),
            *(text for one in self._around.drivers.values() for text in _of_rounds(one, seen)),
            *other_retriever(driver.protocol, self._around.coming),
            *shut_out(driver.identity.site_id, driver.manifest, seen),
        ]

    def _open_breaks(self) -> list[BreakRecord]:
        """Not acknowledged; the oldest, for whoever can write the log can make it many."""
        return self._audit.broken[:_BREAKS_A_REPLY]

    def _broken(self) -> list[str]:
        """Breaks of the audit log that no person has acknowledged, in words."""
        return [f"the audit log is broken at {r.text}: {LOOK_AT_IT}" for r in self._open_breaks()]

    def _last_error(self) -> str:
        """A broken audit log must not hide an attempt's error, nor the other way round."""
        others = self._driver.last_error or self._around.collection.last_error
        if self._audit.trouble or not self._audit.broken:
            return self._audit.trouble or others
        return "; ".join([self._broken()[0], *([others] if others else [])])

    async def AcknowledgeBreaks(
        self, request: control.AcknowledgeBreaksRequest, context: Context
    ) -> control.AcknowledgeBreaksReply:
        """A person has looked; the breaks stay in the log, and are warned of no longer."""
        records = {record.entry: record for record in self._audit.broken}
        entries = sorted(set(request.entries))
        if not entries or not records.keys() >= set(entries):
            unknown = ", ".join(str(entry) for entry in entries if entry not in records)
            cause = f"no break waits to be acknowledged at entry {unknown or '(none was named)'}"
            await refuse(context, cause, "`fedctl status` lists those that do", senseless=True)
        user = await asyncio.to_thread(_user_name, self._actor)
        try:
            await self._audit.record(self._actor, "acknowledge", "done", breaks=entries, **user)
        except AuditError as error:
            await refuse(context, str(error))
        return control.AcknowledgeBreaksReply(breaks=[_break(records[entry]) for entry in entries])

    async def Peers(self, _request: control.PeersRequest, _context: Context) -> control.PeersReply:
        """The other sites, as this one sees them."""
        driver, now = self._driver, time.monotonic()
        peers = driver.transport.statistics()
        expiring = warnings(expiries(driver.identity, driver.trust, peers))
        reply = control.PeersReply(warnings=[*self._broken(), *expiring])
        for evidence in await asyncio.to_thread(driver.store.evidence):
            reply.accused.add(
                site=evidence.site,
                signed=WORDS[evidence.kind],
                first_seen_unix_ms=evidence.unix_ms,
                remedy=_REMEDY,
            )
        rejected = await asyncio.to_thread(driver.store.rejected_rounds)
        desk = driver.desk.desk if driver.desk else None
        for site, seen in peers.items():
            reply.peers.add(
                site=site,
                address=driver.manifest.site(site).address,
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

    async def Rounds(self, request: control.RoundsRequest, context: Context) -> control.RoundsReply:
        """Committed rounds, oldest first, each with the attempts that this site saw."""
        driver = await self._driver_of(request.model, context)
        limit = min(request.limit or _ROUNDS_A_REPLY, _ROUNDS_A_REPLY)
        commits = await asyncio.to_thread(driver.store.rounds, request.first, limit)
        reply = control.RoundsReply(open_round=driver.head_round + 1)
        first = commits[0].certificate.body.round if commits else reply.open_round
        seen = await _attempts(driver, first, reply.open_round)
        for commit in commits:
            reply.rounds.add(
                certificate=commit.certificate,
                report=commit.report,
                attempts=seen.get(commit.certificate.body.round, []),
            )
        reply.open_attempts.extend(seen.get(reply.open_round, []))
        return reply

    async def Chain(
        self, request: control.ChainRequest, context: Context
    ) -> AsyncIterator[control.ChainPart]:
        """Every certificate from a round on, with the manifests they were signed under."""
        manifests = await asyncio.to_thread(self._driver.store.manifests)  # of all logs
        store = (await self._driver_of(request.model, context)).store
        yield control.ChainPart(manifests=manifests)
        first = max(1, request.first)
        while commits := await asyncio.to_thread(store.rounds_from, first, _CHAIN_PART):
            yield control.ChainPart(certificates=[c.certificate for c in commits])
            first = commits[-1].certificate.body.round + 1


async def _attempts(driver: Driver, first: int, last: int) -> dict[int, list[control.Attempt]]:
    log_of_attempts = driver.progress.attempts
    if log_of_attempts is None:
        return {}
    return await asyncio.to_thread(log_of_attempts.attempts, first, last)


def _of_generator(around: ServiceContext) -> control.GeneratorStatus:
    generator, driver = around.generator, around.drivers.get(GENERATOR)
    reply = control.GeneratorStatus(base_model=generator.spec.base_model)
    if generator.own is not None:
        reply.own = str(generator.own.name)
    if driver is None:
        reply.why_not = generator.why_no_rounds(around.driver.manifest)
        return reply
    reply.named = str(driver.protocol.manifest.retriever or "")
    reply.head_round = driver.head_round
    reply.model_digest = driver.protocol.durable.head_digest
    reply.phase = driver.progress.current_phase
    reply.why_not = generator.last.reason
    reply.triples = generator.last.num_examples
    reply.last_error = driver.last_error
    used = generator.in_use
    reply.answering_digest, reply.judged_digest = map(bytes.fromhex, (used.version, used.judged))
    reply.judged_by = used.triples
    if used.base is not None and used.best is not None:
        reply.base_perplexity, reply.perplexity = used.base.perplexity, used.best.perplexity
        reply.answers_written, reply.rouge_l = used.best.written, used.best.rouge_l
    if used.newest is not None:
        reply.newest_perplexity, reply.newest_rouge_l = used.newest.perplexity, used.newest.rouge_l
    reply.personal, reply.own_share = generator.spec.personal, used.share
    reply.personalised_digest = bytes.fromhex(used.personalised)
    if driver.protocol.run is not None:
        reply.run.CopyFrom(driver.protocol.run)
    return reply


def _of_index(opened: OpenIndex) -> dict[str, Any]:
    return {
        "index_recall": opened.recall,
        "index_engine": opened.engine,
        "abstention_threshold": told_threshold(opened.abstention),
        "abstention_pairs": opened.abstention.questions,
    }


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


def other_retriever(protocol: Protocol, coming: NamedModel | None) -> list[str]:
    """That rounds train another encoder than this site uses, and what to do here."""
    cause, wanted = protocol.other_retriever, protocol.manifest.retriever
    if not cause:
        return []
    remedy = "name that encoder in [next_retriever] and restart fedd"
    if coming is not None and wanted is not None and coming.digest == wanted.digest:
        remedy = "it is that of [next_retriever]: restart fedd"
    meanwhile = "Until then it answers as before and votes, and takes no part in training"
    return [f"{cause}: {remedy}. {meanwhile}"]


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


def _of_rounds(driver: Driver, seen: Mapping[str, PeerStatistics]) -> list[str]:
    """What a person should look at in a model's rounds."""
    log_id, causes = driver.protocol.log_id, driver.catch_up.unverified
    texts = [driver.protocol.waiting_manifest, driver.unbooked.warning]
    texts += unverified(causes, driver.head_round, seen, log_id)
    of = "" if driver.model == RETRIEVER else f"{driver.model}: "
    return [f"{of}{text}" for text in texts if text]


def unverified(
    causes: Mapping[str, str],
    head_round: int,
    seen: Mapping[str, PeerStatistics],
    log_id: str = "",
) -> list[str]:
    """Whose later rounds can't be taken here, and why: it lies, or this site is cut off.

    ``log_id``: whose rounds; "": the retriever's.
    """
    return [
        f"the rounds of {site}, which says that it is at {seen[site].head_of(log_id)}, do not "
        f"verify here: {cause}; where those of the others do neither, compare the manifests "
        "(`fedctl manifest show`)"
        for site, cause in sorted(causes.items())
        if site in seen and seen[site].head_of(log_id) > head_round
    ]


async def waiting_for_ocr(documents: int) -> list[str]:
    """That documents have pages which nobody has read here, and what to do; once for all."""
    if not documents:
        return []
    what = "1 document has" if documents == 1 else f"{documents} documents have"
    which = "`fedctl documents list --waiting`"
    if await asyncio.to_thread(engines.installed):
        return [f"{what} pages that wait for OCR: {which} says what to ingest again"]
    return [f"{what} pages that wait for OCR: {INSTALL_OCR} ({which})"]


def _unix_s(moment: datetime | None) -> int:
    return int(moment.timestamp()) if moment else 0


def people_shut_out(fault: str) -> list[str]:
    """That nobody who signs in elsewhere is let in, and why; nothing where there is no fault."""
    return [f"nobody who signs in elsewhere is let in: {fault}"] if fault else []
