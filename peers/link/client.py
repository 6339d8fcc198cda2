"""Calls to one peer: greeting, deadlines, and who is to blame.

Every failure of a call leaves here as one of the errors of peers/wire/errors.py:
the peer misbehaves, the peer refused, or the network.
"""

from __future__ import annotations

import peers.link.tls13  # noqa: F401  before grpc, see there
from crypto.arrays import Float32

# isort: split
import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import Message

from crypto.identity.names import tls_name
from crypto.identity.site import Identity
from peers.link.contacts import Contacts
from peers.wire.errors import (
    BlobUnknown,
    LocalProtocolError,
    PeerBusy,
    PeerError,
    PeerRefused,
    PeerUnreachable,
    RemoteProtocolError,
)
from peers.wire.frames import DigestMismatch, PartialFile, ReceivedObject, Source, frames, size_of
from peers.wire.manifest import ManifestSite
from peers.wire.messages import (
    BLOB_BYTES,
    FRAME_BYTES,
    MESSAGE_BYTES,
    PROTOCOL_VERSION,
    SOFTWARE_VERSION,
    check,
    check_unshared,
    decode,
    one_line,
    parse,
)
from peers.wire.negative_bounds import answers_of
from proto import federation_pb2 as pb

T = TypeVar("T")

SERVICE: Final = pb.DESCRIPTOR.services_by_name["Federation"].full_name

GO_AHEAD: Final = "hanse-go-ahead"
"""Key of the initial metadata with which a peer says that it wants the rest of an object.

The value is the byte from which on it wants it, in decimal digits.
"""

RETRY_AFTER: Final = "hanse-retry-after-ms"
"""Key of the trailing metadata with which a peer says when to ask again, in milliseconds."""

SHUT_OUT: Final = "hanse-shut-out"
"""Key of the trailing metadata with which a peer says in which manifest we take no part.

The value is that manifest's version, in decimal digits.
"""

Options = list[tuple[str, Any]]

_OPTIONS: Final[Options] = [
    # What is parsed at most; a frame of 1 MiB fits with room to spare.
    ("grpc.max_send_message_length", MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MESSAGE_BYTES),
    ("grpc.max_metadata_size", 16 * 1024),
    # Ciphertexts do not compress; and what is never inflated is no bomb: a call with a compressed
    # message ends before the message is inflated. Beneath lies grpc's own bound: what it inflates
    # is never more than max_receive_message_length. Both were measured with grpcio 1.85, see
    # tests/attacks/test_abuse_attacks.py. (grpc.per_message_decompression, which would hand us the
    # message as it came, loses frames that had arrived when a connection breaks.)
    ("grpc.compression_enabled_algorithms_bitset", 1),  # 1: identity alone
    ("grpc.keepalive_permit_without_calls", 1),  # a silent line is the one that NAT forgets
    ("grpc.http2.max_pings_without_data", 0),  # 0: as many as keepalive needs
]

_CHANNEL_OPTIONS: Final[Options] = [
    ("grpc.enable_retries", 0),  # we retry: only we know what may be repeated
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 5_000),
    ("grpc.max_reconnect_backoff_ms", 1_000),  # a peer that is back waits for our answers
    ("grpc.use_local_subchannel_pool", 1),  # a renewed certificate gets a new connection
    ("grpc.enable_http_proxy", 0),  # the manifest says where a peer is, not the environment
    ("grpc.service_config_disable_resolution", 1),
]


_FAILURES: Final = (grpc.aio.AioRpcError, grpc.aio.UsageError, grpc.aio.InternalError)


@dataclass(frozen=True)
class Keepalive:
    """How a silent connection is kept, and a dead one found; seconds.

    ``ping_s``: after so long without a byte from the other end it is asked for a
    sign of life. RFC 5382 (REQ-5) wants address translators to remember a silent
    TCP connection for two hours, but many forget it after 60 to 300 s, and a VPN's
    UDP mapping below it after 30 s: 20 s is sooner than all of these. Less would
    only cost pings.

    ``answer_s``: who has not answered by then is gone; the connection is closed,
    and calls on it fail at once in the place of waiting for their deadlines. A
    dead line is so found within half a minute. Too short breaks connections that
    are merely slow.

    ``tolerated_s``: grpc counts every ping that comes sooner than this after the
    last as a strike, and ends the connection at the third with "too many pings";
    its own default is 300 s, or two hours while no call is under way. Half of
    ``ping_s`` leaves room for a ping that was held up and its successor on time.
    """

    ping_s: float = 20.0
    answer_s: float = 10.0
    tolerated_s: float = 10.0

    def options(self) -> Options:
        """For either end of a connection: both ping."""
        return [
            *_OPTIONS,
            ("grpc.keepalive_time_ms", int(self.ping_s * 1000)),
            ("grpc.keepalive_timeout_ms", int(self.answer_s * 1000)),
            # What in truth ends a connection whose pings are not answered: 60 s if not set.
            ("grpc.http2.ping_timeout_ms", int(self.answer_s * 1000)),
        ]

    def server_options(self) -> Options:
        """For the end that is called, which alone counts strikes."""
        tolerated_ms = int(self.tolerated_s * 1000)
        # grpc's own name for it is GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS.
        return [*self.options(), ("grpc.http2.min_ping_interval_without_data_ms", tolerated_ms)]


@dataclass(frozen=True)
class CallTimeouts:
    """How long a peer may take (seconds), and how often a broken call is made again.

    ``hello_s`` for a greeting and the connection that it may need, so that whoever
    waits for one of several peers soon asks the next; ``call_s`` for a message,
    ``frame_s`` for each frame of a large object; ``pauses_s`` before the second,
    third, … try of a call whose connection broke, each up to half of it more or less.
    ``busy_s``: how long a call is made again to a peer that says that we ask too much.
    """

    hello_s: float = 5.0
    call_s: float = 10.0
    frame_s: float = 30.0
    pauses_s: tuple[float, ...] = (0.1, 0.3, 1.0, 2.0)
    busy_s: float = 30.0


class ConnectionBroken(PeerUnreachable):
    """There was no connection, or it broke: trying again may help at once."""


class PeerLink:
    """One peer and the connection to it; safe to use from several tasks at once."""

    def __init__(
        self,
        identity: Identity,
        peer: ManifestSite,
        introduce: Callable[[], pb.HelloRequest],
        contacts: Contacts,
        timeouts: CallTimeouts,
        keepalive: Keepalive,
    ) -> None:
        self.heard = asyncio.Event()  # the peer called us: greet it without waiting longer
        self.identity = identity
        self.peer = peer
        self._introduce = introduce
        self._contacts = contacts
        self._timeouts = timeouts
        self._greeted = False
        self._greeting = asyncio.Lock()
        self._channel = _open_channel(identity, peer, keepalive)
        # Bytes in and out: parsing is ours, so that garbage is blamed on who sent it.
        self._hello = self._channel.unary_unary(f"/{SERVICE}/Hello")
        self._deliver = self._channel.unary_unary(f"/{SERVICE}/Deliver")
        self._push = self._channel.stream_unary(f"/{SERVICE}/Push")
        self._pull = self._channel.unary_stream(f"/{SERVICE}/Pull")
        self._negatives = self._channel.unary_unary(f"/{SERVICE}/Negatives")

    async def close(self, grace: float | None) -> None:
        """Let calls under way finish for ``grace`` seconds (None: cancel them), then close."""
        await self._channel.close(grace)

    # ---- the five calls ------------------------------------------------------

    async def hello(self) -> pb.HelloReply:
        """Say who we are and what we speak; learn the same of the peer."""
        return await self._blamed(self._say_hello)

    async def deliver(self, envelope: pb.Envelope) -> None:
        """One message."""
        raw = _serialised(envelope)
        await self._call(lambda: self._send(self._deliver, raw, self._timeouts.call_s))

    async def negatives(self, request: pb.NegativesRequest, within_s: float) -> list[Float32]:
        """The peer's embeddings near each query: [n, d] each."""
        raw = _serialised(request)

        async def ask() -> list[Float32]:
            answer = await self._send(self._negatives, raw, within_s)
            return answers_of(request, parse(pb.NegativesReply, answer))

        return await self._call(ask)

    async def push(self, log: str | None, name: pb.BlobName, source: Source) -> None:
        """A large object of a log (None: the federation's), from where a push of it broke off."""
        log = log or self.identity.federation_id
        await self._call(lambda: self._push_whole(log, name, source))

    async def pull(
        self, log: str | None, name: pb.BlobName, into: Path, at_most: int | None
    ) -> ReceivedObject:
        """A large object into a file, from where an earlier transfer ended."""
        log = log or self.identity.federation_id
        partial = PartialFile(into)
        bound = BLOB_BYTES[name.kind]
        limit = bound if at_most is None else min(bound, at_most)
        try:
            return await self._call(lambda: self._pull_rest(log, name, partial, limit))
        finally:
            if await partial.held() == 0:
                await partial.discard()

    # ---- how each is done -----------------------------------------------------

    async def _say_hello(self) -> pb.HelloReply:
        self._greeted = False  # until the peer has taken this greeting
        request = self._introduce()
        was_up = self._channel.get_state() is grpc.ChannelConnectivity.READY
        before, started = time.time(), time.perf_counter()
        raw = await self._send(self._hello, _serialised(request), self._timeouts.hello_s)
        middle_ms = (before + time.time()) * 500
        round_trip_ms = (time.perf_counter() - started) * 1000
        reply = decode(pb.HelloReply, raw)
        if reply.protocol_version != PROTOCOL_VERSION:
            older = "that site" if reply.protocol_version < PROTOCOL_VERSION else "this site"
            raise RemoteProtocolError(
                f"it speaks protocol version {reply.protocol_version} (software "
                f"{reply.software_version[:32]!r}), we speak {PROTOCOL_VERSION} (software "
                f"{SOFTWARE_VERSION!r}): update {older}, which has the older release"
            )
        check(reply)
        if reply.sender != self.peer.id:
            raise RemoteProtocolError(f"it calls itself {reply.sender!r}")
        self._greeted = True
        self._contacts.reported(self.peer.id, reply, reply.unix_ms - middle_ms)
        if was_up:  # else it is the time that TLS took
            self._contacts.timed(self.peer.id, round_trip_ms)
        return reply

    async def _send(
        self, method: Callable[..., Awaitable[bytes]], raw: bytes, timeout_s: float
    ) -> bytes:
        call = method(raw, timeout=timeout_s)
        self._contacts.sent(self.peer.id, raw)
        answer = await call
        self._contacts.received(self.peer.id, answer)
        return answer

    async def _push_whole(self, log: str, name: pb.BlobName, source: Source) -> None:
        try:
            await self._push_once(log, name, source)
        except grpc.aio.AioRpcError as error:
            if not _beyond_end(error):
                raise
            # What the peer held was of another object; it has forgotten that now.
            await self._push_once(log, name, source)

    async def _push_once(self, log: str, name: pb.BlobName, source: Source) -> None:
        total = await size_of(source)
        opening = pb.PushFrame(
            federation_id=log,
            sender=self.identity.site_id,
            name=name,
            total_bytes=total,
        )
        call = self._push(timeout=self._deadline(total))
        try:
            await self._begun(call)
            async with aclosing(frames(source)) as beginning:
                opening.frame.CopyFrom(await anext(beginning))
            await self._write(call, opening)
            offset = await self._go_ahead(call, len(opening.frame.data), total)
            if not opening.frame.last:
                async with aclosing(frames(source, offset)) as rest:
                    async for frame in rest:
                        await self._write(call, pb.PushFrame(frame=frame))
            await call.done_writing()
        except asyncio.InvalidStateError:  # the peer ended the call early: it says why below
            await call
            raise RemoteProtocolError("it thanked for an object it had not yet got") from None
        else:
            self._contacts.received(self.peer.id, await call)
        finally:
            call.cancel()  # a call that is over ignores this

    async def _begun(self, call: Any) -> None:
        """Wait until the call is on its way, or over.

        The first write waits for that, too, but for ever where the channel is closed
        meanwhile: grpc.aio ends such a call and does not wake who waits to write to it.
        """
        connection = asyncio.ensure_future(call.wait_for_connection())
        call.add_done_callback(lambda _: connection.cancel())
        async with asyncio.timeout(self._timeouts.frame_s):
            await asyncio.gather(connection, return_exceptions=True)

    async def _write(self, call: Any, push: pb.PushFrame) -> None:
        """One frame; returns when the connection has room for the next."""
        raw = _serialised(push)
        async with asyncio.timeout(self._timeouts.frame_s):
            await call.write(raw)
        self._contacts.sent(self.peer.id, raw)

    async def _go_ahead(self, call: Any, sent: int, total: int) -> int:
        """Wait until the peer wants the rest; from which byte on.

        Not only to spare the line: a refusal that meets us in the middle of a write
        may reach us as INTERNAL in the place of the peer's reason, for grpc.aio
        overwrites it (https://github.com/grpc/grpc/issues/36066).
        """
        async with asyncio.timeout(self._timeouts.frame_s):
            value = dict(await call.initial_metadata()).get(GO_AHEAD)
        if value is None:
            raise asyncio.InvalidStateError("the call is over")
        digits = str(value)
        if not (digits.isdecimal() and len(digits) < 20 and sent <= int(digits) <= total):
            raise RemoteProtocolError(
                f"it wants an object of {total} bytes from byte {digits[:40]!r} on; "
                f"expected {sent} .. {total}"
            )
        return int(digits)

    async def _pull_rest(
        self, log: str, name: pb.BlobName, partial: PartialFile, limit: int
    ) -> ReceivedObject:
        offset = await partial.held()
        if offset > limit:
            await partial.discard()
            offset = 0
        try:
            return await self._pull_once(log, name, partial, offset, limit)
        except (RemoteProtocolError, grpc.aio.AioRpcError) as error:
            if isinstance(error, RemoteProtocolError) or _beyond_end(error):
                await partial.discard()
            if not offset or not (isinstance(error, DigestMismatch) or _beyond_end(error)):
                raise
        # What was held is not the beginning of this object: it was another's, or damaged.
        return await self._pull_rest(log, name, partial, limit)

    async def _pull_once(
        self, log: str, name: pb.BlobName, partial: PartialFile, offset: int, limit: int
    ) -> ReceivedObject:
        request = pb.PullRequest(
            federation_id=log,
            sender=self.identity.site_id,
            name=name,
            offset=offset,
        )
        raw = _serialised(request)
        call = self._pull(raw, timeout=self._deadline(limit - offset))
        self._contacts.sent(self.peer.id, raw)
        try:
            async with aclosing(self._arriving(call)) as incoming:
                return await partial.receive(incoming, limit=limit)
        finally:
            call.cancel()

    async def _arriving(self, call: Any) -> AsyncGenerator[pb.Frame, None]:
        while True:
            async with asyncio.timeout(self._timeouts.frame_s):
                raw = await call.read()
            if raw is grpc.aio.EOF:  # type: ignore[attr-defined]  # missing in the stubs
                return
            self._contacts.received(self.peer.id, raw)
            yield decode(pb.Frame, raw)

    def _deadline(self, size: int) -> float:
        """Seconds for a whole object; what bites is the patience for each frame."""
        return self._timeouts.call_s + self._timeouts.frame_s * (size // FRAME_BYTES + 1)

    # ---- greeting and blame --------------------------------------------

    async def _call(self, work: Callable[[], Awaitable[T]]) -> T:
        return await self._blamed(lambda: self._greeting_first(work))

    async def _greeting_first(self, work: Callable[[], Awaitable[T]]) -> T:
        await self._greet()
        try:
            return await work()
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.FAILED_PRECONDITION:
                raise
            self._greeted = False  # the peer has restarted since
        await self._greet()
        return await work()

    async def _greet(self) -> None:
        async with self._greeting:
            if not self._greeted:
                await self._say_hello()

    async def _blamed(self, work: Callable[[], Awaitable[T]]) -> T:
        """The result of ``work``, or the error that says who is to blame."""
        site = self.peer.id
        try:
            result = await work()
        except RemoteProtocolError as error:
            misbehaviour = RemoteProtocolError(f"site {site!r} misbehaves: {error}")
            self._note(misbehaviour)
            raise misbehaviour from error
        except (TimeoutError, *_FAILURES) as error:
            blame = self._translated(error)
            self._note(blame)
            if (version := _shut_out(error)) is not None:
                self._contacts.shut_out(site, version)
            raise blame from error
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            # Not this task was cancelled but the call: its channel was closed under it.
            broken = ConnectionBroken(f"the connection to site {site!r} is being renewed")
            self._note(broken)
            raise broken from None
        self._contacts.answered(site)
        return result

    def _note(self, blame: Exception) -> None:
        text = one_line(str(blame))
        if isinstance(blame, PeerUnreachable):
            self._greeted = False  # whoever answers next may be a fresh process
            self._contacts.unreachable(self.peer.id, text)
        else:
            self._contacts.failed(self.peer.id, text, connected=self._greeted)

    def _translated(self, error: Exception) -> PeerError:
        site = f"site {self.peer.id!r}"
        if isinstance(error, TimeoutError):
            return PeerUnreachable(f"{site} moved no frame for {self._timeouts.frame_s:g} s")
        if not isinstance(error, grpc.aio.AioRpcError):
            return ConnectionBroken(f"the connection to {site} was closed here ({error})")
        code, details = error.code(), one_line(error.details() or "no reason given")
        if code is grpc.StatusCode.UNAVAILABLE:
            return ConnectionBroken(
                f"{site} cannot be reached at {self.peer.address}: {self._why(details)}"
            )
        if code in (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED):
            return PeerUnreachable(f"{site} did not answer in time ({details})")
        if code is grpc.StatusCode.NOT_FOUND:
            return BlobUnknown(f"{site}: {details}")
        if code is grpc.StatusCode.UNIMPLEMENTED or "message larger than max" in details:
            return RemoteProtocolError(f"{site} misbehaves: {details}")
        if code is grpc.StatusCode.INTERNAL and "error from Core" in details:
            # Which of the two it was, grpc.aio does not say (see `_go_ahead`). The next try
            # goes on where this one ended; if it is refused, it learns why.
            return ConnectionBroken(
                f"{site} ended the transfer early, or the connection to it broke; its log says why"
            )
        if (busy_s := _retry_after_s(error)) is not None:
            return PeerBusy(f"{site} refused: {details}", busy_s)
        return PeerRefused(f"{site} refused: {details}")

    def _why(self, details: str) -> str:
        """The likely cause, where the TLS library is not allowed to say it."""
        if self.identity.not_after <= datetime.now(UTC):
            return (
                f"our own certificate expired on {self.identity.not_after:%Y-%m-%d}: have it "
                "renewed (`fedctl ca sign`, `fedctl site install`)"
            )
        if "CERTIFICATE_VERIFY_FAILED" in details or "Hostname Verification" in details:
            return f"whoever answers there cannot prove to be {self.peer.id!r} ({details})"
        if "Socket closed" in details or "reset by peer" in details:
            return (
                "it closed the connection while it was being set up; it may not accept our "
                f"certificate (its log says so), or it is stopping ({details})"
            )
        return details


def _open_channel(identity: Identity, peer: ManifestSite, keepalive: Keepalive) -> Any:
    """A `grpc.aio.Channel`; typed Any because the stubs demand serialisers, and bytes need none."""
    credentials = grpc.ssl_channel_credentials(
        root_certificates=identity.roots_pem,
        private_key=identity.key_pem,
        certificate_chain=identity.certificate_pem,
    )
    # The name that TLS checks is the peer's, wherever its address leads.
    name = ("grpc.ssl_target_name_override", tls_name(identity.federation_id, peer.id))
    # dns: so that an address is a host and a port, whatever it looks like.
    return grpc.aio.secure_channel(
        f"dns:///{peer.address}",
        credentials,
        options=[*keepalive.options(), *_CHANNEL_OPTIONS, name],
    )


def _beyond_end(error: Exception) -> bool:
    return isinstance(error, grpc.aio.AioRpcError) and error.code() is grpc.StatusCode.OUT_OF_RANGE


def _retry_after_s(error: grpc.aio.AioRpcError) -> float | None:
    """When the peer would take the call, if it says so; what it says is bounded."""
    if error.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED:
        return None
    value = _trailing(error, RETRY_AFTER)
    return int(value) / 1000 if value.isdecimal() and len(value) < 8 else None


def _shut_out(error: Exception) -> int | None:
    """The version of the manifest in which we take no part, if that is why; bounded."""
    denied = grpc.StatusCode.PERMISSION_DENIED
    if not isinstance(error, grpc.aio.AioRpcError) or error.code() is not denied:
        return None
    value = _trailing(error, SHUT_OUT)
    return int(value) if value.isdecimal() and len(value) < 20 else None


def _trailing(error: grpc.aio.AioRpcError, key: str) -> str:
    trailing: Any = error.trailing_metadata()  # pairs, whatever the stubs say
    return str(dict(trailing or ()).get(key, ""))


def _serialised(message: Message) -> bytes:
    """Checked before it leaves: a peer would refuse it, and the bug is here."""
    try:
        check_unshared(message)
    except RemoteProtocolError as error:
        raise LocalProtocolError(f"not sent: {error}") from error
    return message.SerializeToString()
