"""Uploads that broke off, kept until they go on.

A participant's update may take an hour to send; a line that breaks after fifty
minutes must not cost another fifty. What has come of an object is kept under its
sender and name. The next push of it goes on from there if its length and its
first frame are the same: an update that was encrypted anew differs in its first
bytes already, and whatever differs later is found by the running digest.

What is kept is bounded, and forgotten when the site no longer wants the object
(its attempt is over) or nobody has gone on with it for long. Times are readings
of one clock, in seconds.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from peers.wire.errors import RemoteProtocolError
from peers.wire.frames import Beginning, Truncated
from proto import federation_pb2 as pb

_Key = tuple[str, str, bytes]  # sender, log of rounds, and the serialised name of the object


class Superseded(Exception):
    """The sender pushes the same object again: this push is one that it has given up."""


@dataclass(frozen=True)
class Bounds:
    """How many uploads that broke off are kept of one peer, bytes of all, and seconds of each."""

    of_a_peer: int
    bytes_in_all: int
    kept_s: float


@dataclass
class _Kept:
    site: str
    log: str
    name: pb.BlobName
    beginning: Beginning
    since: float


@dataclass
class _UnderWay:
    scope: asyncio.Timeout
    released: asyncio.Event = field(default_factory=asyncio.Event)


class Partials:
    """The uploads of all peers that are under way or broke off."""

    def __init__(
        self, spool: Path, bounds: Bounds, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._spool = spool
        self._bounds = bounds
        self._clock = clock
        self._kept: dict[_Key, _Kept] = {}  # oldest first
        self._under_way: dict[_Key, _UnderWay] = {}

    @asynccontextmanager
    async def receiving(self, site: str, first: pb.PushFrame) -> AsyncIterator[Beginning]:
        """What is held of the object that ``first`` begins; empty when it is new.

        Raises Superseded inside the block when the same site pushes the same object
        meanwhile: a sender learns of a broken line sooner than we do, and its next
        push must find what the last one brought.
        """
        key = (site, first.federation_id, first.name.SerializeToString(deterministic=True))
        await self._supersede(key)
        beginning = self._taken(key, first) or Beginning(
            # A name of its own, so that no later push can change what was verified.
            self._spool / f"{site}.{called(first.name)}.{secrets.token_hex(8)}",
            first.frame,
            first.total_bytes,
        )
        under_way = _UnderWay(asyncio.timeout(None))
        try:
            async with under_way.scope:
                self._under_way[key] = under_way
                yield beginning
        except BaseException as error:
            if under_way.scope.expired() and isinstance(error, TimeoutError):
                self._keep(key, self._kept_of(site, first, beginning))
                raise Superseded(f"{called(first.name)} is being pushed anew") from error
            if isinstance(error, Truncated) or not isinstance(error, RemoteProtocolError | OSError):
                self._keep(key, self._kept_of(site, first, beginning))
            else:
                beginning.discard()
            raise
        finally:
            del self._under_way[key]
            under_way.released.set()

    def _kept_of(self, site: str, first: pb.PushFrame, beginning: Beginning) -> _Kept:
        return _Kept(site, first.federation_id, first.name, beginning, self._clock())

    def sweep(self, wanted: Callable[[str, str, pb.BlobName, int], bool]) -> None:
        """Forget what has waited for long, or is not ``wanted`` (log, site, name, total)."""
        now = self._clock()
        for key, partial in list(self._kept.items()):
            too_old = now - partial.since > self._bounds.kept_s
            if too_old or not wanted(
                partial.log, partial.site, partial.name, partial.beginning.total
            ):
                self._forget(key)

    async def _supersede(self, key: _Key) -> None:
        while under_way := self._under_way.get(key):
            if not under_way.scope.expired():  # another one that came in its place has ended it
                under_way.scope.reschedule(asyncio.get_running_loop().time())
            await under_way.released.wait()

    def _taken(self, key: _Key, first: pb.PushFrame) -> Beginning | None:
        partial = self._kept.pop(key, None)
        if partial is None:
            return None
        if partial.beginning.is_of(first.frame, first.total_bytes):
            return partial.beginning
        partial.beginning.discard()
        return None

    def _keep(self, key: _Key, partial: _Kept) -> None:
        if not partial.beginning.size or not partial.beginning.sound:
            partial.beginning.discard()
            return
        self._kept[key] = partial
        of_this_peer = [k for k, other in self._kept.items() if other.site == partial.site]
        for oldest in of_this_peer[: -self._bounds.of_a_peer]:
            self._forget(oldest)
        while sum(k.beginning.size for k in self._kept.values()) > self._bounds.bytes_in_all:
            self._forget(next(iter(self._kept)))

    def _forget(self, key: _Key) -> None:
        self._kept.pop(key).beginning.discard()


def called(name: pb.BlobName) -> str:
    """An object's name for people and for file names."""
    kind = pb.BlobKind.Name(name.kind).lower()
    return f"{kind}-{name.digest.hex()[:16] or f'{name.round}-{name.attempt}'}"
