"""Messages to peers, in order for each peer, sent without holding up the driver.

A peer that is slow or away must not fill our memory, and when it is back it
should hear what is true now before all. So what waits for one peer is bounded in
messages and bytes, the oldest going first; and of a message that a later one
makes needless only the later one waits. All of this is safe, for the protocol
tolerates the loss of any message; its deadlines deal with it.

Two kinds are said again to who did not get them, once it answers. One is a run:
nothing else tells a site of a run that began and ended while it was away, and a run
that its own people then ask for would be numbered as the one it missed, and lose to
it everywhere (docs/decisions/0006). The other is a site's question, at its start, what
it has said: until it is answered it says nothing more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable, Iterable
from pathlib import Path
from random import SystemRandom
from typing import Final

import structlog

from peers.attempts import effects as do
from peers.attempts.effects import Body
from peers.link.pacing import Backoff
from peers.link.transport import PeerTransport
from peers.wire.errors import PeerRefused, PeerUnreachable
from peers.wire.messages import MIB
from proto import federation_pb2 as pb

log = structlog.get_logger()

_MESSAGES_AT_MOST: Final = 1000
_BYTES_AT_MOST: Final = 8 * MIB  # four messages of the largest size that a peer takes

# These say how things stand at this site, and that only moves on: runs in one order
# (peers/rounds/runs.py), attempts and heads by number. So the newest of a kind says
# whatever an older one said. A promise is not among them, nor is what follows from
# one: each is a step of its own attempt, and the one that a quorum still lacks may be
# the older one.
_NEWEST_SAYS_ALL: Final = (pb.RunWish, pb.Prepare, pb.Behind, pb.Ahead)


class Waiting:
    """What waits for one peer, oldest first."""

    def __init__(
        self, messages_at_most: int = _MESSAGES_AT_MOST, bytes_at_most: int = _BYTES_AT_MOST
    ) -> None:
        self.bytes = 0
        self._messages_at_most = messages_at_most
        self._bytes_at_most = bytes_at_most
        self._bodies: dict[Hashable, Body] = {}  # by what makes another one needless

    def __len__(self) -> int:
        return len(self._bodies)

    def add(self, body: Body) -> int:
        """Queue a message in the place of the one that it makes needless; how many were lost.

        The newest is never lost, however large it is.
        """
        subject = _subject(body)
        if subject in self._bodies:
            self._remove(subject)
        self._bodies[subject] = body
        self.bytes += body.ByteSize()
        lost = 0
        while len(self) > 1 and (
            len(self) > self._messages_at_most or self.bytes > self._bytes_at_most
        ):
            self.take()
            lost += 1
        return lost

    def take(self) -> Body:
        """The oldest message, which waits no longer."""
        return self._remove(next(iter(self._bodies)))

    def _remove(self, subject: Hashable) -> Body:
        body = self._bodies.pop(subject)
        self.bytes -= body.ByteSize()
        return body


def _subject(body: Body) -> Hashable:
    """Of two messages on one subject, the later one says all."""
    kind = type(body).__name__
    if isinstance(body, _NEWEST_SAYS_ALL):
        return kind
    return kind, body.SerializeToString(deterministic=True)  # the same message again


class Outbox:
    """One queue and one sending task a peer, inside the task group that is given."""

    def __init__(
        self, send: Callable[[str, Body], Awaitable[bool]], group: asyncio.TaskGroup
    ) -> None:
        """``send`` says whether the peer has it."""
        self.without_run: set[str] = set()  # peers that may not have the newest run
        self._unasked: dict[str, pb.Recall] = {}  # peers that did not get our question
        self._send = send
        self._group = group
        self._waiting: dict[str, Waiting] = {}
        self._lost: dict[str, int] = {}
        self._wake: dict[str, asyncio.Event] = {}

    def put(self, to: str, body: Body) -> None:
        """Queue a message; the oldest ones are dropped when too much waits."""
        if to not in self._waiting:
            self._waiting[to] = Waiting()
            self._lost[to] = 0
            self._wake[to] = asyncio.Event()
            self._group.create_task(self._serve(to))
        lost = self._waiting[to].add(body)
        if lost and not self._lost[to]:
            log.warning("messages dropped: too much waits for this peer", peer=to)
        self._lost[to] += lost
        self._wake[to].set()

    def say_again(self, wish: pb.RunWish, to: Iterable[str]) -> None:
        """Say to these peers what they did not get: the newest run, and what we asked."""
        answering = set(to)
        if wish.HasField("run"):
            for peer in self.without_run & answering:
                self.put(peer, wish)
        for peer in self._unasked.keys() & answering:
            self.put(peer, self._unasked.pop(peer))

    async def _serve(self, to: str) -> None:
        waiting, wake = self._waiting[to], self._wake[to]
        while True:
            await wake.wait()
            wake.clear()
            while waiting:
                body = waiting.take()
                delivered = await self._send(to, body)
                if isinstance(body, pb.RunWish):
                    (self.without_run.discard if delivered else self.without_run.add)(to)
                if isinstance(body, pb.Recall) and not delivered:
                    self._unasked[to] = body
            if self._lost[to]:
                log.info("the peer has what waited for it", peer=to, dropped=self._lost[to])
                self._lost[to] = 0


def put_in_envelope(envelope: pb.Envelope, body: Body) -> None:
    """Set the field of the envelope's body that is of this message's type."""
    for field in envelope.DESCRIPTOR.oneofs_by_name["body"].fields:
        if field.message_type is body.DESCRIPTOR:
            getattr(envelope, field.name).CopyFrom(body)
            return
    raise TypeError(f"{type(body).__name__} is no body of an envelope")


class ToPeers:
    """The ways out of an attempt: messages in their order, large objects until they are taken."""

    def __init__(self, outbox: Outbox, transport: PeerTransport) -> None:
        self._outbox = outbox
        self._transport = transport

    async def push(self, to: str, name: pb.BlobName, source: Path | bytes) -> None:
        """Push until the peer takes it; the end of the attempt cancels us."""
        pauses = Backoff(0.02, 2.0, SystemRandom())
        while True:
            try:
                await self._transport.push(to, name, source)
            except (PeerRefused, PeerUnreachable) as error:
                # It may not have seen the message that makes it expect this.
                log.debug("push not taken yet", peer=to, cause=str(error))
                await asyncio.sleep(pauses.pause())
            else:
                return

    async def send_behind(
        self, what: do.SendBehind, kind: pb.BlobKind.ValueType, path: Path
    ) -> None:
        """What is certified to each of its holders, and behind it a large object."""
        name = pb.BlobName(kind=kind, round=what.certified.round, attempt=what.certified.attempt)
        async with asyncio.TaskGroup() as group:
            for holder in what.holders:
                self._outbox.put(holder, what.certified)
                group.create_task(self.push(holder, name, path))
