"""What a site does with the calls of its peers. Bytes in, bytes out; no grpc here.

For every call the same questions, in this order:

1. Whose certificate is on the connection, and does our authority vouch for it *now*?
2. Is that site in the manifest in force, and enabled?
3. Has that site a call to spare (peers/link/quotas.py)? Only now is its message read.
4. Do the bytes parse, and is every field within its bounds?
5. Is it for this federation, and does it name the certificate's site as its sender?
6. Has that site greeted this process, speaking our protocol version?

Only then does the `Inbox` see it. Whatever is not right is a `Refusal` with its
cause and remedy, which peers/link/transport.py turns into a status.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import (
    AbstractContextManager,
    ExitStack,
    aclosing,
    asynccontextmanager,
    contextmanager,
    nullcontext,
)
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import Enum, auto
from pathlib import Path
from typing import Final, Protocol, TypeVar

import structlog

from crypto.identity.keys import IdentityError
from crypto.identity.site import Identity
from crypto.identity.trust import Trust, expiry_of
from peers.link.contacts import Contacts
from peers.link.negatives import Declined, QuotaSpent
from peers.link.partials import Bounds, Partials, Superseded, called
from peers.link.quotas import QuotaLedger, Quotas, TooMuch
from peers.wire.errors import BlobUnknown, RemoteProtocolError
from peers.wire.frames import DigestMismatch, ReceivedObject, Source, frames, receive_in_memory
from peers.wire.manifest import FederationManifest
from peers.wire.messages import (
    BLOB_BYTES,
    FEATURES,
    GIB,
    MIB,
    PROTOCOL_VERSION,
    SOFTWARE_VERSION,
    check,
    decode,
    one_line,
    parse,
)
from proto import federation_pb2 as pb

R = TypeVar("R", pb.Envelope, pb.PullRequest, pb.NegativesRequest)

log = structlog.get_logger()

# Kept in memory: small, and a sealed key has no business on a disk.
_IN_MEMORY: Final = (pb.PUBLIC_CONTEXT, pb.SEALED_CONTEXT)

# A search takes a processor for a while; a step of a peer's training asks for one or a few.
_SEARCHES: Final = 4

# Before it goes on, a sender reads and digests what is held here; a slow disk does this much.
_DIGESTED_A_SECOND: Final = 50 * MIB


class Inbox(Protocol):
    """Whom the transport serves; daemon/rounds/driver.py, behind daemon/rounds/audited.py.

    A peer may deliver or push the same thing twice (when a receipt was lost).
    A `RemoteProtocolError` raised here goes back to the peer as the reason of a
    refusal; any other exception is logged and told without its details.
    """

    @property
    def head_round(self) -> int:
        """The last committed round of its log; 0: none."""

    async def message(self, sender: str, envelope: pb.Envelope) -> None:
        """A message whose bounds and sender are checked."""

    async def blob(self, sender: str, name: pb.BlobName, blob: ReceivedObject) -> None:
        """A whole object; its file, if it has one, is the inbox's from here on."""

    def accepts(self, sender: str, name: pb.BlobName, total_bytes: int) -> str | None:
        """Asked before an object's bytes are taken: None for yes, else why not."""

    async def source(self, sender: str, name: pb.BlobName) -> Source:
        """An object that a peer wants to have; raises BlobUnknown."""

    async def negatives(self, sender: str, request: pb.NegativesRequest) -> pb.NegativesReply:
        """Embeddings near a peer's queries; raises Declined."""


class Reason(Enum):
    """Why a call is refused; each has one status on the wire."""

    STRANGER = auto()  # no certificate, or none that our authority vouches for
    NOT_ALLOWED = auto()  # a known site that may not say this
    GREETING = auto()  # no greeting yet, or one in another protocol version
    MALFORMED = auto()  # out of bounds, out of order, damaged
    UNKNOWN_BLOB = auto()
    BEYOND_END = auto()  # the transfer can't go on from where it should: start from 0
    TOO_MANY = auto()
    DECLINED = auto()  # not wanted, or not fast enough


class Refusal(Exception):
    """A peer's call is turned down; the text goes to the peer and into our log.

    ``retry_after_s``: when the same call would be taken, if that is known. ``shut_out``:
    the version of the manifest in which the caller takes no part; 0: that is not why.
    """

    def __init__(
        self,
        reason: Reason,
        text: str,
        retry_after_s: float | None = None,
        shut_out: int = 0,
    ) -> None:
        super().__init__(one_line(text))
        self.reason = reason
        self.retry_after_s = retry_after_s
        self.shut_out = shut_out


@dataclass
class Caller:
    """One call's other end. ``site`` is set once its certificate has been verified."""

    certificate: bytes
    address: str
    site: str = ""


@dataclass(frozen=True)
class Admission:
    """Who we are and who may speak to us; replaced as a whole on reload."""

    identity: Identity
    trust: Trust
    manifest: FederationManifest

    def __post_init__(self) -> None:
        ours = self.identity.federation_id
        for whose, other in (
            ("authority", self.trust.federation_id),
            ("manifest", self.manifest.federation_id),
        ):
            if other != ours:
                raise IdentityError(
                    f"the {whose} is of federation {other!r}, this site's certificate of "
                    f"{ours!r}: install the {whose} of {ours!r}"
                )


@dataclass(frozen=True)
class Limits:
    """What one peer may take of us, and how long a peer may keep us waiting (seconds).

    ``handshake_s`` for TLS and the greeting of HTTP/2, ``message_s`` for a message,
    ``frame_s`` for each frame, ``idle_s`` for a connection without a call.
    ``connections``: of all peers and strangers together. ``partials``: how much may
    be kept of uploads that broke off.
    """

    handshake_s: float = 10.0
    message_s: float = 10.0
    frame_s: float = 30.0
    idle_s: float = 600.0
    connections: int = 1000
    pushes: int = 4
    pulls: int = 4
    quotas: Quotas = field(default_factory=Quotas)
    partials: Bounds = field(default_factory=lambda: Bounds(2, 64 * GIB, 900.0))


@dataclass
class Servicer:
    """Answers the five calls of `service Federation`; ``membership`` may be replaced."""

    membership: Admission
    spool: Path
    inboxes: Mapping[str, Inbox]  # by the ids of the logs of rounds
    contacts: Contacts
    limits: Limits = field(default_factory=Limits)
    heard: Callable[[str], None] = lambda _site: None  # told of every good greeting
    partials: Partials = field(init=False)
    ledger: QuotaLedger = field(init=False)
    _greeted: set[str] = field(default_factory=set)
    _busy: Counter[tuple[str, str]] = field(default_factory=Counter)
    _taking: dict[asyncio.Task[None], str] = field(default_factory=dict)  # whose it is

    def __post_init__(self) -> None:
        self.partials = Partials(self.spool, self.limits.partials)
        self.ledger = QuotaLedger(self.limits.quotas)

    # ---- the five calls ------------------------------------------------------

    async def hello(self, caller: Caller, incoming: AsyncIterator[bytes]) -> bytes:
        """First contact: versions are compared before anything else is believed."""
        async with self._admitted(caller) as site:
            raw = await self._message(incoming)
            with self._paid(site, len(raw)):
                request = decode(pb.HelloRequest, raw)
            if request.protocol_version != PROTOCOL_VERSION:
                self._greeted.discard(site)
                older = site if request.protocol_version < PROTOCOL_VERSION else self._ours
                raise Refusal(
                    Reason.GREETING,
                    f"site {site!r} speaks protocol version {request.protocol_version} (software "
                    f"{request.software_version[:32]!r}), site {self._ours!r} speaks "
                    f"{PROTOCOL_VERSION} (software {SOFTWARE_VERSION!r}): update {older!r}, which "
                    "has the older release",
                )
            check(request)
            own = self._admit(site, request.federation_id, request.sender, own=True)
            self.contacts.received(site, raw)
            self.contacts.introduced(site, request)
            self.contacts.identified(site, expiry_of(caller.certificate))
            self._greeted.add(site)
            self.heard(site)
            reply = pb.HelloReply(
                protocol_version=PROTOCOL_VERSION,
                software_version=SOFTWARE_VERSION,
                features=[name for name in FEATURES if name in request.features],
                sender=self._ours,
                manifest_version=self.membership.manifest.version,
                head_round=own.head_round,
                unix_ms=time.time_ns() // 1_000_000,
                other_heads=[
                    pb.LogHead(log=log_id, head_round=inbox.head_round)
                    for log_id, inbox in self.inboxes.items()
                    if inbox is not own
                ],
            )
            return self._sending(site, reply.SerializeToString())

    async def deliver(self, caller: Caller, incoming: AsyncIterator[bytes]) -> bytes:
        """One message of the round protocol."""
        async with self._admitted(caller) as site:
            envelope, inbox = await self._request(site, incoming, pb.Envelope)
            await inbox.message(site, envelope)
            return self._sending(site, b"")

    async def push(
        self,
        caller: Caller,
        incoming: AsyncIterator[bytes],
        go_ahead: Callable[[int], Awaitable[None]],
    ) -> bytes:
        """A large object to us. With its first frame it is wanted or not.

        ``go_ahead`` tells the sender so, and from which byte on we want it.
        """
        async with self._admitted(caller) as site:
            pieces = _Pieces(site, incoming, self.contacts, self.limits.frame_s, self._paid)
            # Read before it may be refused: a refusal that meets the sender in the midst of
            # writing does not reach it as such (`PeerLink._go_ahead`).
            first = await anext(pieces, None)
            with ExitStack() as slot:
                slot.enter_context(self._one_of("pushes", self.limits.pushes, site))
                if first is None or not first.HasField("name"):
                    raise RemoteProtocolError("a push that does not begin with what it is")
                inbox = self._admit(site, first.federation_id, first.sender)
                self._expect_greeting(site)
                why_not = inbox.accepts(site, first.name, first.total_bytes)
                if why_not is not None:
                    raise Refusal(Reason.DECLINED, f"{called(first.name)} declined: {why_not}")
                name = first.name
                what = (first.federation_id, name.kind, name.round, name.attempt)
                pieces.pay = lambda size: self.ledger.frame(site, what, size, first.total_bytes)
                pieces.pay(len(first.frame.data))
                if first.name.kind in _IN_MEMORY:
                    received = await self._take_in_memory(first, pieces, go_ahead)
                else:
                    received = await self._take_in_file(site, first, pieces, go_ahead)
                await self._hand_over(inbox, site, first.name, received, slot)
            return self._sending(site, b"")

    async def pull(
        self, caller: Caller, incoming: AsyncIterator[bytes]
    ) -> AsyncGenerator[bytes, None]:
        """A large object from us, from a byte offset."""
        async with self._admitted(caller, pull=True) as site:
            request, inbox = await self._request(site, incoming, pb.PullRequest)
            with self._one_of("pulls", self.limits.pulls, site):
                source = await inbox.source(site, request.name)
                try:
                    async with aclosing(frames(source, request.offset)) as outgoing:
                        async for frame in outgoing:
                            yield self._sending(site, frame.SerializeToString())
                except FileNotFoundError as error:  # forgotten since, with its attempt
                    raise BlobUnknown(f"{called(request.name)} is no longer here") from error

    async def negatives(self, caller: Caller, incoming: AsyncIterator[bytes]) -> bytes:
        """Embeddings of ours near a peer's queries, if our operator allows it."""
        async with self._admitted(caller) as site:
            request, inbox = await self._request(site, incoming, pb.NegativesRequest)
            with self._one_of("searches", _SEARCHES, site):
                try:
                    reply = await inbox.negatives(site, request)
                except QuotaSpent as spent:
                    raise Refusal(Reason.TOO_MANY, str(spent)) from spent
                except Declined as declined:
                    raise Refusal(Reason.DECLINED, str(declined)) from declined
            return self._sending(site, reply.SerializeToString())

    def forget_unwanted(self) -> None:
        """Drop what is left of uploads that broke off, where nobody would take the rest."""
        self.partials.sweep(lambda log_id, *upload: self.inboxes[log_id].accepts(*upload) is None)

    def forget_disabled(self) -> None:
        """Whom the manifest does not admit any more would have to greet anew, and push anew."""
        self._greeted &= set(self.membership.manifest.enabled_ids)
        for taking, site in self._taking.items():
            if site not in self.membership.manifest.enabled_ids:
                taking.cancel()

    async def close(self) -> None:
        """End what is being taken; nothing of it stays in the spool."""
        for taking in self._taking:
            taking.cancel()
        if self._taking:
            await asyncio.wait(list(self._taking))

    # ---- the questions -------------------------------------------------------

    @property
    def _ours(self) -> str:
        return self.membership.identity.site_id

    @asynccontextmanager
    async def _admitted(self, caller: Caller, *, pull: bool = False) -> AsyncIterator[str]:
        """Who calls, for as long as the call takes; nothing of its message has been read.

        Whoever is turned away pays like everybody else.
        """
        try:
            try:
                site = self._identify(caller)
            except Refusal:
                self.ledger.request(caller.site, time.monotonic())
                raise
            with self.ledger.stream(site):
                self.ledger.request(site, time.monotonic(), pull=pull)
                yield site
        except TooMuch as error:
            await self._hold(caller.site)
            raise Refusal(Reason.TOO_MANY, str(error), error.retry_after_s) from error

    async def _hold(self, site: str) -> None:
        """Told later, a flood is slower: its connection has no stream left for more."""
        if seconds := self.ledger.hold(site):
            try:
                await asyncio.sleep(seconds)
            finally:
                self.ledger.let_go(site)

    async def _message(self, incoming: AsyncIterator[bytes]) -> bytes:
        """The one message of a call, which must not take for ever to arrive."""
        try:
            async with asyncio.timeout(self.limits.message_s):
                raw = await anext(incoming, None)
        except TimeoutError as error:
            raise Refusal(
                Reason.DECLINED,
                f"no message for {self.limits.message_s:g} s: try again on a better line",
            ) from error
        if raw is None:
            raise RemoteProtocolError("a call without a message")
        return raw

    async def _request(
        self, site: str, incoming: AsyncIterator[bytes], kind: type[R]
    ) -> tuple[R, Inbox]:
        """The message of a call and who gets it, with the questions 4 to 6 answered."""
        raw = await self._message(incoming)
        with self._paid(site, len(raw)):
            request = parse(kind, raw)
        inbox = self._admit(site, request.federation_id, request.sender)
        self._expect_greeting(site)
        self.contacts.received(site, raw)
        return request, inbox

    @contextmanager
    def _paid(self, site: str, size: int) -> Iterator[None]:
        """The sender pays for its message: for its bytes before, for our time behind it."""
        self.ledger.message(site, size)
        began = time.thread_time()
        try:
            yield
        finally:
            self.ledger.parsed(site, time.thread_time() - began)

    def _identify(self, caller: Caller) -> str:
        try:
            # At every call, not once a connection: a certificate may expire on a long one.
            site = self.membership.trust.site_of(caller.certificate, at=datetime.now(UTC))
        except IdentityError as error:
            raise Refusal(Reason.STRANGER, str(error)) from error
        caller.site = site
        manifest = self.membership.manifest
        entry = {listed.id: listed for listed in manifest.sites}.get(site)
        if entry is None or not entry.enabled:
            state = "not in" if entry is None else "disabled in"
            raise Refusal(
                Reason.NOT_ALLOWED,
                f"site {site!r} is {state} manifest version {manifest.version} of federation "
                f"{manifest.federation_id!r} at site {self._ours!r}: have the federation's keeper "
                "sign a manifest that enables it, and install it here",
                shut_out=manifest.version,
            )
        return site

    def _admit(self, site: str, log_id: str, sender: str, *, own: bool = False) -> Inbox:
        """Whoever keeps that log of rounds here; ``own``: it must be the federation's own."""
        ours = self.membership.manifest.federation_id
        inbox = self.inboxes.get(log_id)
        if inbox is None or (own and log_id != ours):
            raise Refusal(
                Reason.NOT_ALLOWED,
                f"the message is for federation {log_id!r}, this is {ours!r}: "
                f"look at the manifest that site {site!r} has",
            )
        if sender != site:
            raise Refusal(
                Reason.NOT_ALLOWED,
                f"the message names {sender!r} as its sender, the certificate is of {site!r}: "
                "a site speaks for itself alone",
            )
        return inbox

    def _expect_greeting(self, site: str) -> None:
        if site not in self._greeted:
            raise Refusal(
                Reason.GREETING,
                f"site {site!r} has not said Hello to site {self._ours!r} since it started, in "
                f"protocol version {PROTOCOL_VERSION}: say Hello first",
            )

    @contextmanager
    def _one_of(self, what: str, most: int, site: str) -> Iterator[None]:
        if self._busy[what, site] >= most:
            raise Refusal(
                Reason.TOO_MANY,
                f"{most} {what} of site {site!r} are under way already: wait for one to end",
            )
        self._busy[what, site] += 1
        try:
            yield
        finally:
            self._busy[what, site] -= 1

    # ---- frames --------------------------------------------------------------

    async def _take_in_memory(
        self, first: pb.PushFrame, rest: _Pieces, go_ahead: Callable[[int], Awaitable[None]]
    ) -> ReceivedObject:
        await go_ahead(len(first.frame.data))
        limit = BLOB_BYTES[first.name.kind]
        async with aclosing(_frames_of(first, rest)) as incoming:
            return await receive_in_memory(incoming, limit=limit, total=first.total_bytes)

    async def _take_in_file(
        self,
        site: str,
        first: pb.PushFrame,
        rest: _Pieces,
        go_ahead: Callable[[int], Awaitable[None]],
    ) -> ReceivedObject:
        """Into a file of the spool, from where an earlier push of the same object broke off."""
        limit = BLOB_BYTES[first.name.kind]
        try:
            async with self.partials.receiving(site, first) as beginning:
                offset = beginning.size
                if offset:
                    rest.wait_for_the_next(offset / _DIGESTED_A_SECOND)
                await go_ahead(offset or len(first.frame.data))
                async with aclosing(_frames_of(None if offset else first, rest)) as incoming:
                    return await beginning.receive(incoming, limit=limit)
        except Superseded as error:
            raise Refusal(Reason.DECLINED, str(error)) from error
        except DigestMismatch as error:
            if not offset or rest.frames > 2:  # what came now is damaged, not what was held
                raise
            raise Refusal(
                Reason.BEYOND_END,
                f"the {offset} bytes held here are not the beginning of this {called(first.name)}: "
                "push it again, from its start",
            ) from error

    async def _hand_over(
        self, inbox: Inbox, site: str, name: pb.BlobName, received: ReceivedObject, slot: ExitStack
    ) -> None:
        """What is here whole is taken to the end, though its connection breaks meanwhile.

        An inbox that has begun to take it would count a second push as the same thing again.
        Until then it keeps its ``slot``: whoever cuts its line again and again has no more in
        our hands than others.
        """
        taking = asyncio.create_task(inbox.blob(site, name, received))
        self._taking[taking] = site
        kept = slot.pop_all()

        def end(taking: asyncio.Task[None]) -> None:
            del self._taking[taking]
            kept.close()
            # Not in the task: one that is cancelled before its first step does nothing at all.
            failed = taking.cancelled() or taking.exception() is not None
            if failed and received.path is not None:
                received.path.unlink(missing_ok=True)

        taking.add_done_callback(end)
        try:
            await asyncio.shield(taking)
        except asyncio.CancelledError:
            taking.add_done_callback(_tell_failure)  # no call is left to tell its sender
            raise

    def _sending(self, site: str, raw: bytes) -> bytes:
        self.contacts.sent(site, raw)
        return raw


def _tell_failure(taking: asyncio.Task[None]) -> None:
    if not taking.cancelled() and (failure := taking.exception()) is not None:
        log.info("what arrived as its line broke was not taken", cause=str(failure))


class _Pieces:
    """A push as it arrives: parsed and checked, and no frame slower than it may be."""

    def __init__(
        self,
        site: str,
        incoming: AsyncIterator[bytes],
        contacts: Contacts,
        frame_s: float,
        paid: Callable[[str, int], AbstractContextManager[None]],
    ) -> None:
        """``paid``: for the time that the first frame takes; it may be one that nobody wants."""
        self.frames = 0
        self.pay: Callable[[int], None] = lambda _size: None  # until it is known what for
        self._paid = paid
        self._site = site
        self._incoming = incoming
        self._contacts = contacts
        self._frame_s = frame_s
        self._more_s = 0.0

    def wait_for_the_next(self, more_s: float) -> None:
        """The next frame may take so much longer."""
        self._more_s = more_s

    def __aiter__(self) -> _Pieces:
        return self

    async def __anext__(self) -> pb.PushFrame:
        patience_s = self._frame_s + self._more_s
        try:
            async with asyncio.timeout(patience_s):
                raw = await anext(self._incoming, None)
        except TimeoutError as error:
            raise Refusal(
                Reason.DECLINED,
                f"no frame for {patience_s:g} s: push again when the line is better",
            ) from error
        if raw is None:
            raise StopAsyncIteration
        self._more_s = 0.0
        self.frames += 1
        self._contacts.received(self._site, raw)
        with self._paid(self._site, 0) if self.frames == 1 else nullcontext():
            piece = parse(pb.PushFrame, raw)
        self.pay(len(piece.frame.data))
        return piece


async def _frames_of(first: pb.PushFrame | None, rest: _Pieces) -> AsyncGenerator[pb.Frame, None]:
    if first is not None:
        yield first.frame
    async for piece in rest:
        yield piece.frame
