"""What institutions say to each other, over mutual TLS.

`Transport` owns the server that peers call and one `PeerLink` for each peer of
the manifest in force. Together with peers/link/client.py this is the home
of grpc among the peers: nothing of it is seen outside.

A call of a peer is judged by peers/link/servicer.py; here a refusal becomes a
status, and an error of our own becomes INTERNAL without details: what went
wrong inside a site is told to its operator, not to its peers.
"""

from __future__ import annotations

import peers.link.tls13  # before grpc, see there
from crypto.arrays import Float32

# isort: split
import asyncio
import math
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar

import grpc
import grpc.aio
import structlog

from crypto.identity.keys import IdentityError
from crypto.identity.site import Identity
from crypto.identity.trust import Trust
from peers.link.client import (
    GO_AHEAD,
    RETRY_AFTER,
    SERVICE,
    SHUT_OUT,
    CallTimeouts,
    ConnectionBroken,
    Keepalive,
    Options,
    PeerLink,
)
from peers.link.contacts import Contacts, PeerStatistics, Tap
from peers.link.open_connections import OpenCalls
from peers.link.pacing import Backoff, Repeats, jittered
from peers.link.port import ListenError, check_free
from peers.link.servicer import Admission, Caller, Inbox, Limits, Reason, Refusal, Servicer
from peers.wire.errors import (
    BlobUnknown,
    LocalProtocolError,
    PeerBusy,
    PeerError,
    PeerRefused,
    PeerUnreachable,
    RemoteProtocolError,
)
from peers.wire.frames import OffsetBeyondEnd, ReceivedObject, Source
from peers.wire.manifest import FederationManifest
from peers.wire.messages import FEATURES, PROTOCOL_VERSION, SOFTWARE_VERSION
from proto import federation_pb2 as pb

T = TypeVar("T")

log = structlog.get_logger()

_SERVER_OPTIONS: Final[Options] = [
    ("grpc.so_reuseport", 0),  # a second daemon on our port is an error, not a share
    ("grpc.max_concurrent_streams", 32),  # of one connection
]

_STATUS: Final = {
    Reason.STRANGER: grpc.StatusCode.UNAUTHENTICATED,
    Reason.NOT_ALLOWED: grpc.StatusCode.PERMISSION_DENIED,
    Reason.GREETING: grpc.StatusCode.FAILED_PRECONDITION,
    Reason.MALFORMED: grpc.StatusCode.INVALID_ARGUMENT,
    Reason.UNKNOWN_BLOB: grpc.StatusCode.NOT_FOUND,
    Reason.BEYOND_END: grpc.StatusCode.OUT_OF_RANGE,
    Reason.TOO_MANY: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Reason.DECLINED: grpc.StatusCode.ABORTED,
}


@dataclass(frozen=True)
class KeepInTouch:
    """Seconds between greetings: while a peer answers, and while it does not.

    A peer that is silent is tried after ``silent_s``, then after pauses that double
    up to ``answering_s``: one that is away costs no more than one that is there. All
    are jittered, the first greetings after a start within ``start_s``, so that
    sites which start together (a release, a power cut) do not stay together.
    """

    answering_s: float = 5.0
    silent_s: float = 0.5
    start_s: float = 0.5


@dataclass(frozen=True)
class LinkOptions:
    """How the transport deals with peers; the defaults suit institutions on the internet.

    ``tidy_s``: seconds between looks for uploads that nobody goes on with and
    refusals to sum up; ``tell_again_s``: one line in so many seconds for a
    refusal that repeats.
    """

    timeouts: CallTimeouts = field(default_factory=CallTimeouts)
    limits: Limits = field(default_factory=Limits)
    keep_in_touch: KeepInTouch = field(default_factory=KeepInTouch)
    keepalive: Keepalive = field(default_factory=Keepalive)
    tidy_s: float = 5.0
    tell_again_s: float = 60.0


class PeerTransport(Protocol):
    """The way to the peers for one log of rounds; as `Transport`, which is that of the first."""

    async def send(self, to: str, envelope: pb.Envelope) -> None:
        """As `Transport.send`."""

    async def push(self, to: str, name: pb.BlobName, source: Source) -> None:
        """As `Transport.push`."""

    async def pull(
        self, to: str, name: pb.BlobName, into: Path, *, at_most: int | None = None
    ) -> ReceivedObject:
        """As `Transport.pull`."""

    async def negatives(
        self, to: str, request: pb.NegativesRequest, within_s: float
    ) -> list[Float32]:
        """As `Transport.negatives`."""

    def statistics(self) -> dict[str, PeerStatistics]:
        """As `Transport.statistics`."""


class Transport:
    """One site's connections with its peers. Make it and use it on one event loop."""

    def __init__(
        self,
        admission: Admission,
        bind: str,
        spool: Path,
        inboxes: Mapping[str, Inbox],
        *,
        options: LinkOptions | None = None,
        tap: Tap | None = None,
        chance: random.Random | None = None,
    ) -> None:
        """``admission`` says who we are and who may speak to us.

        ``bind`` is the host:port listened on (port 0: any), ``spool`` a folder of ours,
        ``inboxes`` by the ids of the logs of rounds, the federation's own among them,
        ``tap`` sees the bytes of every message that crosses (for audits), ``chance``
        spreads greetings and tries over time.
        """
        if not peers.link.tls13.holds():
            raise LocalProtocolError(
                "grpc was imported before peers.link.tls13, so TLS 1.2 would be accepted: "
                "import peers.link.tls13 first in the module that imports grpc"
            )
        self._bind = bind
        self._spool = spool
        self._options = options or LinkOptions()
        self._chance = chance or random.Random()  # noqa: S311  # spreads load, keeps no secret
        self._contacts = Contacts(tap)
        self._servicer = Servicer(
            admission,
            spool,
            inboxes,
            self._contacts,
            self._options.limits,
            self._heard,
        )
        self._refusals = Repeats[dict[str, str]](self._options.tell_again_s)
        self._open = OpenCalls()
        self._certificates_changed = False
        self._changed = asyncio.Event()
        self.newer_manifest = asyncio.Event()  # a peer told of one: see `who_has_newer_manifests`
        self._links: dict[str, PeerLink] = {}
        self._retired: list[PeerLink] = []
        self._server: grpc.aio.Server | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self.port = 0

    # ---- life ----------------------------------------------------------------

    async def start(self) -> None:
        """Listen, and begin to keep in touch with every peer. Raises ListenError."""
        await asyncio.to_thread(_clear_spool, self._spool)
        self._link_up()
        server = grpc.aio.server(
            options=self._server_options(), compression=grpc.Compression.NoCompression
        )
        server.add_generic_rpc_handlers((self._handlers(),))
        check_free(self._bind)
        try:
            self.port = server.add_secure_port(self._bind, self._server_credentials())
        except RuntimeError as error:
            raise ListenError(self._bind, "in use, or not ours to take") from error
        await server.start()
        self._server = server
        self._tasks = [
            asyncio.create_task(self._keep_in_touch(), name="keep-in-touch"),
            asyncio.create_task(self._keep_tidy(), name="keep-tidy"),
        ]

    async def stop(self, grace: float = 5.0) -> None:
        """Take no new calls, give those under way ``grace`` seconds, close everything."""
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        if self._server is not None:
            await self._server.stop(grace)
            self._server = None
        self._open.end(lambda _site: False, self.port)  # grpc tells them later than it returns
        await self._servicer.close()
        self._retired.extend(self._links.values())
        self._links = {}
        await self._close_retired()

    def reload(self, identity: Identity, manifest: FederationManifest) -> None:
        """Take a renewed certificate and a new manifest into use, without a restart.

        From here on the new manifest decides who may call: whom it does not admit is
        refused, and its calls and connections end at once. Other connections stay,
        except those whose certificate or address changed.
        Raises IdentityError when they are of another site or federation.
        """
        before = self._servicer.membership
        if identity.site_id != before.identity.site_id:
            raise IdentityError(
                f"the certificate is of site {identity.site_id!r}, this is "
                f"{before.identity.site_id!r}: install this site's, or start another fedd"
            )
        self._servicer.membership = Admission(
            identity, Trust.from_pem(identity.authority_pem), manifest
        )
        self._certificates_changed |= identity != before.identity
        if self._server is not None:
            self._link_up()
            self._changed.set()
            self._servicer.forget_disabled()
            for site in self._open.end(manifest.enabled, self.port):
                log.warning("connections closed", peer=site, manifest=manifest.version)

    # ---- what the driver asks for ------------------------------------------------

    async def send(self, to: str, envelope: pb.Envelope) -> None:
        """Deliver one message. It may arrive twice if the connection breaks meanwhile.

        Raises PeerUnreachable, PeerRefused, RemoteProtocolError; LocalProtocolError
        when the message is out of bounds.
        """
        await self._persistently(to, lambda link: link.deliver(envelope))

    async def push(
        self, to: str, name: pb.BlobName, source: Source, *, log: str | None = None
    ) -> None:
        """Send a large object of a log (None: the federation's own); it may arrive twice, too.

        When its connection broke, it goes on from the last whole frame that arrived,
        in this call or the next one: call again with the same ``name`` and bytes.
        Raises as `send`; OSError when a file cannot be read here.
        """
        await self._persistently(to, lambda link: link.push(log, name, source))

    async def pull(
        self,
        to: str,
        name: pb.BlobName,
        into: Path,
        *,
        at_most: int | None = None,
        log: str | None = None,
    ) -> ReceivedObject:
        """Fetch a large object into the file ``into``, at most ``at_most`` bytes.

        Goes on from what ``<into>.part`` holds of an earlier transfer, and starts
        anew if that proves to be something else. Raises as `send`, BlobUnknown
        when the peer has no such object, OSError when it cannot be written here.
        """
        return await self._persistently(to, lambda link: link.pull(log, name, into, at_most))

    async def negatives(
        self, to: str, request: pb.NegativesRequest, within_s: float
    ) -> list[Float32]:
        """A peer's embeddings near each query of ``request``, asked once; raises as `send`."""
        return await self._link(to).negatives(request, within_s)

    async def hello(self, to: str) -> pb.HelloReply:
        """Greet a peer; raises as `send`."""
        return await self._link(to).hello()

    def statistics(self) -> dict[str, PeerStatistics]:
        """Every peer of the manifest in force, by site id."""
        return {site: self._contacts.statistics(site) for site in self._links}

    def who_has_newer_manifests(self) -> dict[str, int]:
        """Peers that told of a newer manifest than ours, and its version; the newest first."""
        ours = self._servicer.membership.manifest.version
        versions = {site: seen.manifest_version for site, seen in self.statistics().items()}
        newer = {site: version for site, version in versions.items() if version > ours}
        return dict(sorted(newer.items(), key=lambda item: -item[1]))

    async def _persistently(self, to: str, call: Callable[[PeerLink], Awaitable[T]]) -> T:
        """Make a call again when its connection broke, and later when the peer says so."""
        most_s = self._options.timeouts.busy_s
        backoff, waited_s = Backoff(0.25, most_s / 4, self._chance), 0.0
        while True:
            try:
                return await self._reconnecting(to, call)
            except PeerBusy as busy:
                # At least what it asks for, and longer each time: others ask it, too.
                pause = max(busy.retry_after_s, backoff.pause())
                if waited_s + pause > most_s:
                    raise
                waited_s += pause
                await asyncio.sleep(pause)

    async def _reconnecting(self, to: str, call: Callable[[PeerLink], Awaitable[T]]) -> T:
        """Make a call again when its connection broke, on the link that is then in force."""
        for pause in self._options.timeouts.pauses_s:
            with suppress(ConnectionBroken):
                return await call(self._link(to))
            await asyncio.sleep(jittered(pause, self._chance, 0.5))
        return await call(self._link(to))

    # ---- links -----------------------------------------------------------------

    def _link(self, to: str) -> PeerLink:
        link = self._links.get(to)
        if link is None:
            manifest = self._servicer.membership.manifest
            raise PeerUnreachable(
                f"site {to!r} is no enabled peer in manifest version {manifest.version}"
            )
        return link

    def _link_up(self) -> None:
        """One link for each enabled peer; those that no longer fit are retired."""
        membership = self._servicer.membership
        wanted = {
            site.id: site
            for site in membership.manifest.sites
            if site.enabled and site.id != membership.identity.site_id
        }
        links: dict[str, PeerLink] = {}
        for site, link in self._links.items():
            if wanted.get(site) == link.peer and link.identity == membership.identity:
                links[site] = link
            else:
                self._retired.append(link)
        for site, entry in wanted.items():
            if site not in links:
                links[site] = PeerLink(
                    membership.identity,
                    entry,
                    self._introduction,
                    self._contacts,
                    self._options.timeouts,
                    self._options.keepalive,
                )
        self._links = dict(sorted(links.items()))

    def _introduction(self) -> pb.HelloRequest:
        membership = self._servicer.membership
        return pb.HelloRequest(
            protocol_version=PROTOCOL_VERSION,
            software_version=SOFTWARE_VERSION,
            features=FEATURES,
            federation_id=membership.identity.federation_id,
            sender=membership.identity.site_id,
            manifest_version=membership.manifest.version,
        )

    async def _close_retired(self) -> None:
        retired, self._retired = self._retired, []
        await asyncio.gather(*(link.close(None) for link in retired))

    async def _keep_in_touch(self) -> None:
        """Greet every peer at an interval, and start over when the manifest changes."""
        while True:
            self._changed.clear()
            await self._close_retired()
            async with asyncio.TaskGroup() as group:
                greeters = [group.create_task(self._greet(link)) for link in self._links.values()]
                await self._changed.wait()
                for greeter in greeters:
                    greeter.cancel()

    async def _greet(self, link: PeerLink) -> None:
        options, reason = self._options.keep_in_touch, ""
        backoff = Backoff(options.silent_s, options.answering_s, self._chance)
        await asyncio.sleep(self._chance.uniform(0, options.start_s))
        while True:
            pause = jittered(options.answering_s, self._chance)
            try:
                await link.hello()
                if reason != "":
                    log.info("peer answers", peer=link.peer.id)
                reason = ""
                backoff.reset()
                self._compare_manifests(link.peer.id)
            except PeerError as error:
                # Who refuses us will not change its mind within a second.
                if isinstance(error, PeerUnreachable):
                    pause = backoff.pause()
                if str(error) != reason:
                    log.warning("peer does not answer", peer=link.peer.id, cause=str(error))
                reason = str(error)
            except Exception:
                # A bug of ours must not end the keeping in touch, nor go unseen.
                log.exception("greeting a peer failed", peer=link.peer.id)
            with suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await link.heard.wait()
                    backoff.reset()
            link.heard.clear()

    def _heard(self, site: str) -> None:
        """A peer greeted us. If it did not answer before, it will now: no need to wait longer."""
        self._compare_manifests(site)
        link = self._links.get(site)
        if link is not None and not self._contacts.statistics(site).connected:
            link.heard.set()

    def _compare_manifests(self, site: str) -> None:
        """Told in every greeting, both ways: a newer one is noticed within a heartbeat."""
        theirs = self._contacts.statistics(site).manifest_version
        if theirs > self._servicer.membership.manifest.version:
            self.newer_manifest.set()

    async def _keep_tidy(self) -> None:
        """Forget uploads that nobody goes on with; sum up the refusals that repeat."""
        while True:
            await asyncio.sleep(self._options.tidy_s)
            try:
                self._servicer.forget_unwanted()
            except Exception:
                # As for greetings: seen, and tried again.
                log.exception("forgetting uploads that broke off failed")
            for refusal, times in self._refusals.overdue(time.monotonic()):
                log.warning("peer refused again", **refusal, times=times)

    # ---- the server --------------------------------------------------------------

    def _server_options(self) -> Options:
        options = self._options
        return [
            *options.keepalive.server_options(),
            *_SERVER_OPTIONS,
            # who connects and says nothing goes again, and so does who is silent later on
            ("grpc.server_handshake_timeout_ms", int(options.limits.handshake_s * 1000)),
            ("grpc.max_connection_idle_ms", int(options.limits.idle_s * 1000)),
            # Descriptors are for the daemon's own files, too: see daemon/wiring.py.
            ("grpc.max_allowed_incoming_connections", options.limits.connections),
        ]

    def _server_credentials(self) -> grpc.ServerCredentials:
        return grpc.dynamic_ssl_server_credentials(
            self._certificate_configuration(),
            self._changed_certificates,  # type: ignore[arg-type]  # may return None; stubs err
            require_client_authentication=True,
        )

    def _certificate_configuration(self) -> grpc.ServerCertificateConfiguration:
        identity = self._servicer.membership.identity
        return grpc.ssl_server_certificate_configuration(
            [(identity.key_pem, identity.certificate_pem)],
            root_certificates=identity.roots_pem,
        )

    def _changed_certificates(self) -> grpc.ServerCertificateConfiguration | None:
        """Asked by grpc, in a thread of its own, before every handshake; None: as before."""
        if not self._certificates_changed:
            return None
        self._certificates_changed = False
        return self._certificate_configuration()

    def _handlers(self) -> Any:
        # Bytes in and out: parsing is the servicer's, so that garbage is refused with a reason.
        # All calls stream in: grpc would read a single message before it asked us, for as long
        # as the peer likes and as often. On the wire it is the same.
        return grpc.method_handlers_generic_handler(
            SERVICE,
            {
                "Hello": grpc.stream_unary_rpc_method_handler(self._hello),
                "Deliver": grpc.stream_unary_rpc_method_handler(self._deliver),
                "Push": grpc.stream_unary_rpc_method_handler(self._push),
                "Pull": grpc.stream_stream_rpc_method_handler(self._pull),
                "Negatives": grpc.stream_unary_rpc_method_handler(self._negatives),
            },
        )

    async def _hello(self, incoming: AsyncIterator[bytes], context: Any) -> bytes:
        async with self._answering("Hello", context) as caller:
            return await self._servicer.hello(caller, incoming)

    async def _deliver(self, incoming: AsyncIterator[bytes], context: Any) -> bytes:
        async with self._answering("Deliver", context) as caller:
            return await self._servicer.deliver(caller, incoming)

    async def _negatives(self, incoming: AsyncIterator[bytes], context: Any) -> bytes:
        async with self._answering("Negatives", context) as caller:
            return await self._servicer.negatives(caller, incoming)

    async def _push(self, incoming: AsyncIterator[bytes], context: Any) -> bytes:
        async def go_ahead(offset: int) -> None:
            await context.send_initial_metadata(((GO_AHEAD, str(offset)),))

        async with self._answering("Push", context) as caller:
            return await self._servicer.push(caller, incoming, go_ahead)

    async def _pull(self, incoming: AsyncIterator[bytes], context: Any) -> None:
        async with (
            self._answering("Pull", context) as caller,
            aclosing(self._servicer.pull(caller, incoming)) as outgoing,
        ):
            async for frame in outgoing:
                await self._write(frame, context)

    async def _write(self, frame: bytes, context: Any) -> None:
        try:
            async with asyncio.timeout(self._options.limits.frame_s):
                await context.write(frame)
        except TimeoutError as error:
            raise Refusal(
                Reason.DECLINED, "too slow to take a frame: pull again, from where this ended"
            ) from error

    @asynccontextmanager
    async def _answering(self, call: str, context: Any) -> AsyncIterator[Caller]:
        """Who calls; and what becomes of whatever goes wrong in answering."""
        certificates = context.auth_context().get("x509_pem_cert", [b""])
        caller = Caller(certificate=certificates[0], address=context.peer())
        try:
            with self._open.one(caller):
                yield caller
        except grpc.aio.AbortError:
            raise
        except Exception as error:
            refusal = _as_refusal(error)
            if refusal is None:
                log.exception("answering a peer failed", call=call, peer=caller.site)
                site = self._servicer.membership.identity.site_id
                await context.abort(
                    grpc.StatusCode.INTERNAL, f"site {site!r} failed; its log has the cause"
                )
            else:
                self._note_refusal(call, caller, refusal)
                hint: tuple[tuple[str, str], ...] = ()
                if refusal.retry_after_s is not None:
                    hint = ((RETRY_AFTER, str(math.ceil(refusal.retry_after_s * 1000))),)
                elif refusal.shut_out:
                    hint = ((SHUT_OUT, str(refusal.shut_out)),)
                await context.abort(_STATUS[refusal.reason], str(refusal), hint)

    def _note_refusal(self, call: str, caller: Caller, refusal: Refusal) -> None:
        if caller.site:
            self._contacts.refused(caller.site, too_much=refusal.retry_after_s is not None)
        reason = refusal.reason.name.lower()
        line = {
            "call": call,
            "peer": caller.site or "unknown",
            "address": caller.address,
            "reason": reason,
            "cause": str(refusal),
        }
        # Not by address or cause: these are of the caller's choosing.
        if self._refusals.is_new((call, caller.site, reason), line, time.monotonic()):
            log.warning("peer refused", **line)


def _as_refusal(error: Exception) -> Refusal | None:
    """The refusal that an error means, or None if it is a bug of ours."""
    if isinstance(error, Refusal):
        return error
    if isinstance(error, BlobUnknown):
        return Refusal(Reason.UNKNOWN_BLOB, str(error))
    if isinstance(error, OffsetBeyondEnd):
        return Refusal(Reason.BEYOND_END, str(error))
    if isinstance(error, RemoteProtocolError | PeerRefused):
        return Refusal(Reason.MALFORMED, str(error))
    return None


def _clear_spool(spool: Path) -> None:
    """Make the folder, empty: what a crash left there, half received or whole, is nobody's."""
    spool.mkdir(parents=True, exist_ok=True)
    for leftover in spool.iterdir():
        leftover.unlink(missing_ok=True)
