"""Messages to peers, in order for each peer, sent without holding up the driver."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable

import structlog

from peers.effects import Body
from proto import federation_pb2 as pb

log = structlog.get_logger()

# A peer that is away for long must not fill our memory; the protocol tolerates loss.
_WAITING_AT_MOST = 1000


class Outbox:
    """One queue and one sending task a peer, inside the task group that is given."""

    def __init__(
        self, send: Callable[[str, Body], Awaitable[None]], group: asyncio.TaskGroup
    ) -> None:
        self._send = send
        self._group = group
        self._waiting: dict[str, deque[Body]] = {}
        self._wake: dict[str, asyncio.Event] = {}

    def put(self, to: str, body: Body) -> None:
        """Queue a message; the oldest one is dropped when too many wait."""
        if to not in self._waiting:
            self._waiting[to] = deque(maxlen=_WAITING_AT_MOST)
            self._wake[to] = asyncio.Event()
            self._group.create_task(self._serve(to))
        if len(self._waiting[to]) == _WAITING_AT_MOST:
            log.warning("message dropped: too many wait for this peer", peer=to)
        self._waiting[to].append(body)
        self._wake[to].set()

    async def _serve(self, to: str) -> None:
        waiting, wake = self._waiting[to], self._wake[to]
        while True:
            await wake.wait()
            wake.clear()
            while waiting:
                await self._send(to, waiting.popleft())


def put_in_envelope(envelope: pb.Envelope, body: Body) -> None:
    """Set the field of the envelope's body that is of this message's type."""
    for field in envelope.DESCRIPTOR.oneofs_by_name["body"].fields:
        if field.message_type is body.DESCRIPTOR:
            getattr(envelope, field.name).CopyFrom(body)
            return
    raise TypeError(f"{type(body).__name__} is no body of an envelope")
