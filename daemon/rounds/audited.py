"""What of the traffic with peers goes into the audit log, and when.

`AuditedInbox` stands between the transport and a log's driver for what comes in,
`AuditedTransport` between the driver and the peers for what goes out; the driver tells of
accusations and of going back. An entry is on the disk before what it tells of happens. What
is of another log of rounds than the retriever's says of which model.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from pathlib import Path
from typing import Any, Final

from crypto.arrays import Float32
from daemon.state.audit import DAEMON, Action, AuditLog
from daemon.state.audit_format import AuditError
from peers.attempts import effects as do
from peers.link.contacts import PeerStatistics
from peers.link.servicer import Inbox
from peers.link.transport import Transport
from peers.wire.errors import PeerRefused
from peers.wire.frames import ReceivedObject, Source, size_of
from peers.wire.manifest import RETRIEVER, model_of
from peers.wire.negative_bounds import count_of
from proto import federation_pb2 as pb

_REMEMBERED: Final = 256


def of_site(site: str) -> str:
    """A peer as an actor."""
    return f"site:{site}"


def of_model(log_id: str) -> dict[str, Any]:
    """Whose rounds an entry is about; nothing where they are the retriever's."""
    model = model_of(log_id)
    return {} if model == RETRIEVER else {"model": model}


def _named(name: pb.BlobName) -> dict[str, Any]:
    """An object's name, as entries have it."""
    named: dict[str, Any] = {"kind": pb.BlobKind.Name(name.kind).lower()}
    if name.digest:
        named["digest"] = name.digest.hex()
    else:
        named |= {"round": name.round, "attempt": name.attempt}
    return named


def _asked(request: pb.NegativesRequest) -> dict[str, Any]:
    """How much of whose embeddings, as entries have it."""
    return {
        "level": pb.Disclosure.Name(request.level).lower(),
        "queries": count_of(request),
        "digest": request.model_digest.hex(),
    }


async def entered(audit: AuditLog, what: do.Accuse | do.WentBack, log_id: str) -> None:
    """What whoever has to decide about a site should find in the audit log."""
    of = of_model(log_id)
    match what:
        case do.Accuse(evidence):
            await audit.record_or_owe(
                DAEMON,
                "evidence",
                "kept",
                **of,
                site=evidence.first.site,
                signed=pb.EvidenceKind.Name(evidence.kind).lower(),
                sha256=hashlib.sha256(evidence.SerializeToString(deterministic=True)).hexdigest(),
            )
        case do.WentBack(round_, told_by, forgotten):
            await audit.record_or_owe(
                DAEMON,
                "state",
                "went back",
                **of,
                round=round_,
                told_by=told_by,
                forgotten=forgotten,
            )


class AuditedInbox:
    """A driver whose peers' requests for its data, and gifts to it, are recorded."""

    def __init__(self, inbox: Inbox, audit: AuditLog, log_id: str) -> None:
        """``log_id``: whose rounds the driver keeps."""
        self._inbox = inbox
        self._audit = audit
        self._of = of_model(log_id)

    @property
    def head_round(self) -> int:
        """As the driver says."""
        return self._inbox.head_round

    async def message(self, sender: str, envelope: pb.Envelope) -> None:
        """Messages of the protocol touch no data by themselves; what they lead to does."""
        await self._inbox.message(sender, envelope)

    def accepts(self, sender: str, name: pb.BlobName, total_bytes: int) -> str | None:
        """As the driver says; nothing while it could not be recorded."""
        return self._inbox.accepts(sender, name, total_bytes) or self._audit.trouble or None

    async def blob(self, sender: str, name: pb.BlobName, blob: ReceivedObject) -> None:
        """A peer's object is taken."""
        objects = _named(name) | {"bytes": blob.size, "sha256": blob.digest.hex()}
        await self._record(sender, "push", "taken", objects)
        await self._inbox.blob(sender, name, blob)

    async def source(self, sender: str, name: pb.BlobName) -> Source:
        """A peer gets an object of ours."""
        source = await self._inbox.source(sender, name)
        await self._record(
            sender, "pull", "served", _named(name) | {"bytes": await size_of(source)}
        )
        return source

    async def negatives(self, sender: str, request: pb.NegativesRequest) -> pb.NegativesReply:
        """A peer gets embeddings of ours."""
        reply = await self._inbox.negatives(sender, request)
        objects = _asked(request) | {"embeddings": sum(reply.counts)}
        await self._record(sender, "negatives", "answered", objects)
        return reply

    async def _record(
        self, sender: str, action: Action, outcome: str, objects: dict[str, Any]
    ) -> None:
        try:
            await self._audit.record(of_site(sender), action, outcome, **self._of, **objects)
        except AuditError as error:
            raise PeerRefused(str(error)) from error


class AuditedTransport:
    """The way to the peers for one log of rounds, with a record of what leaves this site on it.

    And of what it signs.
    """

    def __init__(
        self,
        transport: Transport,
        audit: AuditLog,
        log_id: str,
        *,
        statements: Callable[[], Iterable[pb.Signed]] = tuple,
    ) -> None:
        """``log_id``: whose rounds; ``statements``: what this site has signed last in them."""
        self._transport = transport
        self._audit = audit
        self._log_id = log_id
        self._of = of_model(log_id)
        self._statements = statements
        self._recorded: OrderedDict[tuple[Hashable, ...], None] = OrderedDict()

    def statistics(self) -> dict[str, PeerStatistics]:
        """As `Transport.statistics`."""
        return self._transport.statistics()

    async def pull(
        self, to: str, name: pb.BlobName, into: Path, *, at_most: int | None = None
    ) -> ReceivedObject:
        """As `Transport.pull`."""
        return await self._transport.pull(to, name, into, at_most=at_most, log=self._log_id)

    async def send(self, to: str, envelope: pb.Envelope) -> None:
        """As `Transport.send`. What a coordinator signs itself leaves it with what it carries."""
        own = envelope.sender
        match envelope.WhichOneof("body"):
            case "promised":
                if envelope.promised.promise.site == own:
                    await self._promise(envelope.promised.promise)
            case "plan_answer":
                await self._plan(to, envelope.plan_answer)
            case "contributed":
                contributed = envelope.contributed
                at = (contributed.round, contributed.attempt)
                await self._contribution(*at, contributed.contribution)
            case "state":
                state = envelope.state
                stated = pb.Statement.FromString(state.statement)
                for signed in stated.contributions:
                    if signed.site == own:
                        await self._contribution(state.round, state.attempt, signed)
            case "stated":
                await self._stated(envelope.stated)
            case "certified":
                certificate = envelope.certified.certificate
                if own in [one.site for one in certificate.signatures]:
                    digest = hashlib.sha256(certificate.statement).digest()
                    await self._statement(digest, certificate.statement)
            case "applied":
                applied = envelope.applied
                await self._applied(applied.round, applied.attempt, applied.applied)
            case "proven":
                proven = envelope.proven
                if not proven.lock.root:  # of a version that is restated it was said before
                    for signed in proven.lock.proof:
                        if signed.site == own:
                            await self._applied(proven.round, proven.attempt, signed)
            case "attempt_failed":
                await self._failed(envelope.attempt_failed)
            case "vote":
                await self._vote(envelope.vote)
            case "commit":
                # A coordinator's own vote leaves it with the certificate, and not before.
                for vote in envelope.commit.certificate.votes:
                    if vote.site == envelope.sender:
                        await self._vote(vote, envelope.commit.certificate)
        await self._transport.send(to, envelope)

    async def push(self, to: str, name: pb.BlobName, source: Source) -> None:
        """As `Transport.push`; the tries of one object are one entry."""
        if self._is_new("send", to, name.SerializeToString(deterministic=True)):
            objects = _named(name) | {"to": to, "bytes": await size_of(source)}
            await self._record(DAEMON, "send", "begun", **objects)
        await self._transport.push(to, name, source, log=self._log_id)

    async def negatives(
        self, to: str, request: pb.NegativesRequest, within_s: float
    ) -> list[Float32]:
        """As `Transport.negatives`; nothing of a query leaves before it is recorded."""
        try:
            await self._audit.record(DAEMON, "negatives", "asked", to=to, **_asked(request))
        except AuditError as error:
            raise PeerRefused(f"not asked: {error}") from error
        return await self._transport.negatives(to, request, within_s)

    async def _promise(self, signed: pb.Signed) -> None:
        """Who will not train says so, and why, before there is a plan to decline."""
        promise = pb.Promise.FromString(signed.body)
        at = (promise.round, promise.attempt)
        if not promise.willing and promise.reason and self._is_new("promise", *at):
            objects = {"round": at[0], "attempt": at[1], "reason": promise.reason}
            await self._record(DAEMON, "plan", "declined", **objects)

    async def _plan(self, to: str, answer: pb.PlanAnswer) -> None:
        await self._record(
            DAEMON,
            "plan",
            "accepted" if answer.accepted else "declined",
            round=answer.round,
            attempt=answer.attempt,
            coordinator=to,
            reason=answer.reason,
        )

    async def _contribution(self, round_: int, attempt: int, signed: pb.Signed) -> None:
        """What this site answers for in a sum."""
        if self._is_new("contribution", round_, attempt):
            contribution = pb.Contribution.FromString(signed.body)
            await self._record(
                DAEMON,
                "contribution",
                "signed",
                round=round_,
                attempt=attempt,
                digest=contribution.upload_digest.hex(),
            )

    async def _stated(self, message: pb.Stated) -> None:
        bodies = (signed.body for signed in self._statements())
        named = (one for one in bodies if hashlib.sha256(one).digest() == message.statement_digest)
        if (body := next(named, None)) is not None:
            await self._statement(message.statement_digest, body)
        elif self._is_new("statement", message.statement_digest):
            # It goes by late: this site has signed others since.
            at = {"round": message.round, "attempt": message.attempt}
            digest = message.statement_digest.hex()
            await self._record(DAEMON, "statement", "signed", **at, digest=digest)

    async def _statement(self, digest: bytes, body: bytes) -> None:
        """Whose updates this site agrees to have opened, or which version to be voted on again."""
        if not self._is_new("statement", digest):
            return
        statement = pb.Statement.FromString(body)
        await self._record(
            DAEMON,
            "statement",
            "signed",
            round=statement.round,
            attempt=statement.attempt,
            digest=digest.hex(),
            kind=pb.StatementKind.Name(statement.kind).lower(),
            contributors=[signed.site for signed in statement.contributions],
        )

    async def _applied(self, round_: int, attempt: int, signed: pb.Signed) -> None:
        """Which version this site has made of a sum that it opened."""
        applied = pb.Applied.FromString(signed.body)
        if self._is_new("applied", applied.root_digest):
            await self._record(
                DAEMON,
                "applied",
                "signed",
                round=round_,
                attempt=attempt,
                statement=applied.root_digest.hex(),
                digest=applied.model_digest.hex(),
            )

    async def _failed(self, message: pb.AttemptFailed) -> None:
        """Above all, that a sum was refused, and under whose lead."""
        if self._is_new("attempt", message.round, message.attempt):
            await self._record(
                DAEMON,
                "attempt",
                "failed",
                round=message.round,
                attempt=message.attempt,
                reason=message.reason,
            )

    async def _vote(self, vote: pb.Vote, certificate: pb.Certificate | None = None) -> None:
        body = vote.body if certificate is None else certificate.body
        if self._is_new("vote", body.round, vote.attempt):
            await self._record(
                DAEMON,
                "vote",
                "given",
                round=body.round,
                attempt=vote.attempt,
                digest=body.model_digest.hex(),
            )

    async def _record(self, actor: str, action: Action, outcome: str, **objects: Any) -> None:
        await self._audit.record_or_owe(actor, action, outcome, **self._of, **objects)

    def _is_new(self, *what: Hashable) -> bool:
        """Whether this was not recorded of late: what is sent again is one deed."""
        if what in self._recorded:
            return False
        self._recorded[what] = None
        if len(self._recorded) > _REMEMBERED:
            self._recorded.popitem(last=False)
        return True
