"""Real transports on loopback, and an inbox that keeps what arrives.

Example::

    async with talking(tmp_path, "alpha", "beta") as sites:
        await sites["alpha"].transport.send("beta", hint("alpha"))
        assert sites["beta"].inbox.messages == [("alpha", hint("alpha"))]
"""

from __future__ import annotations

import peers.link.tls13  # noqa: F401  before anything imports grpc

# isort: split
import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from crypto.identity.site import Identity
from peers.link.client import CallTimeouts
from peers.link.contacts import Tap
from peers.link.negatives import Declined
from peers.link.servicer import Admission, Limits
from peers.link.transport import KeepInTouch, LinkOptions, Transport
from peers.wire.errors import BlobUnknown
from peers.wire.frames import ReceivedObject, Source
from peers.wire.manifest import FederationManifest
from proto import federation_pb2 as pb
from tests.support.authority import FEDERATION_ID, Federation

# Short enough for tests; greetings only when a test wants one.
QUICK = LinkOptions(
    timeouts=CallTimeouts(hello_s=5, call_s=5, frame_s=5, pauses_s=(0.02, 0.1, 0.3, 0.5)),
    limits=Limits(frame_s=1, pushes=2, pulls=2),
    keep_in_touch=KeepInTouch(answering_s=60, silent_s=60, start_s=0),
)

# For who calls in vain and waits for the reason.
HASTY = replace(QUICK, timeouts=replace(QUICK.timeouts, pauses_s=(0.05,)))

UPDATE = pb.BlobName(kind=pb.ENCRYPTED_UPDATE, round=1, attempt=0)
VERSION = pb.BlobName(kind=pb.MODEL_VERSION, digest=bytes(32))
CONTEXT = pb.BlobName(kind=pb.SEALED_CONTEXT, round=1, attempt=0)


def hint(sender: str, attempt: int = 0) -> pb.Envelope:
    """The smallest message there is: this site is behind."""
    behind = pb.Behind(round=1, attempt=attempt)
    return pb.Envelope(
        federation_id=FEDERATION_ID, sender=sender, manifest_version=1, behind=behind
    )


@dataclass
class KeepsAll:
    """An inbox: keeps messages and objects, hands out ``shelf``, declines for ``why_not``."""

    messages: list[tuple[str, pb.Envelope]] = field(default_factory=list)
    blobs: list[tuple[str, pb.BlobName, ReceivedObject]] = field(default_factory=list)
    shelf: dict[int, Source] = field(default_factory=dict)  # by BlobKind
    why_not: str | None = None
    failure: Exception | None = None  # raised for every message
    gate: asyncio.Event | None = None  # objects are taken in only once it is set
    head_round: int = 0
    waiting: int = 0  # objects that are here, whole, before the gate

    async def message(self, sender: str, envelope: pb.Envelope) -> None:
        if self.failure is not None:
            raise self.failure
        self.messages.append((sender, envelope))

    async def blob(self, sender: str, name: pb.BlobName, blob: ReceivedObject) -> None:
        if self.gate is not None:
            self.waiting += 1
            await self.gate.wait()
        self.blobs.append((sender, name, blob))

    def accepts(self, sender: str, name: pb.BlobName, total_bytes: int) -> str | None:  # noqa: ARG002
        return self.why_not

    async def source(self, sender: str, name: pb.BlobName) -> Source:  # noqa: ARG002
        if name.kind not in self.shelf:
            raise BlobUnknown("nothing of that name here")
        return self.shelf[name.kind]

    async def negatives(
        self,
        sender: str,  # noqa: ARG002
        request: pb.NegativesRequest,  # noqa: ARG002
    ) -> pb.NegativesReply:
        raise Declined("this site gives no negatives")


@dataclass
class Site:
    """One running site."""

    identity: Identity
    transport: Transport
    inbox: KeepsAll
    spool: Path


def spooled(site: Site) -> list[Path]:
    """What lies in a site's spool, without the beginnings of objects."""
    return sorted(set(site.spool.iterdir()) - set(begun(site)))


def begun(site: Site) -> list[Path]:
    """What a site's spool holds of objects that have not arrived whole."""
    return sorted(site.spool.glob("*.incoming"))


@asynccontextmanager
async def running(
    federation: Federation,
    site: str,
    *,
    identity: Identity | None = None,
    manifest: FederationManifest | None = None,
    options: LinkOptions = QUICK,
    tap: Tap | None = None,
    chance: random.Random | None = None,
) -> AsyncIterator[Site]:
    """A site's transport, started and stopped."""
    identity = identity or federation.identity(site)
    inbox, spool = KeepsAll(), federation.root / "spool" / site
    transport = Transport(
        Admission(identity, federation.trust, manifest or federation.manifest()),
        f"127.0.0.1:{federation.ports[site]}",
        spool,
        {identity.federation_id: inbox},
        options=options,
        tap=tap,
        chance=chance,
    )
    running_site = Site(identity, transport, inbox, spool)
    await transport.start()
    try:
        yield running_site
    finally:
        await transport.stop(grace=0)


@asynccontextmanager
async def talking(
    federation: Federation, options: LinkOptions = QUICK
) -> AsyncIterator[dict[str, Site]]:
    """All sites of a federation, running."""
    async with AsyncExitStack() as stack:
        yield {
            site: await stack.enter_async_context(running(federation, site, options=options))
            for site in federation.ports
        }
