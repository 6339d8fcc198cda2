"""What one site computes of a secure sum: the same interface in every mode.

daemon/rounds/work.py carries out the work of an attempt in the order of a round and knows
of no mode; where a mode matters, it asks the plan's `SumJobs`. Each mode has one, beside
the jobs that it runs in the crypto worker's process.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Final, Protocol, TypeAlias

from crypto.identity.site import Identity
from crypto.identity.trust import Trust
from daemon.jobs.sums.integers import Hiding, NewVersion, SumTerms, Uploaded
from daemon.process.workers import Worker
from daemon.state.versions import Shapes
from peers.attempts import effects as do
from peers.wire.vectors import BlobInfo
from proto import federation_pb2 as pb

ATTEMPTS_HELD: Final = 2  # by the crypto worker: the one under way, and the one before


@dataclass
class Credentials:
    """Who this site is and whom it trusts; new ones on SIGHUP."""

    identity: Identity
    trust: Trust


@dataclass
class AttemptState:
    """What is held of one attempt outside the crypto worker; its folder goes with it."""

    round: int
    attempt: int
    folder: Path
    plan: pb.Plan | None = None
    sum_digest: bytes = b""
    updates: set[str] = field(default_factory=set)  # whose have arrived
    products_digest: bytes = b""
    products_here: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def planned(self) -> pb.Plan:
        """The plan, which is known before there is work."""
        if self.plan is None:
            raise RuntimeError("work of an attempt without a plan")
        return self.plan

    @property
    def update(self) -> Path:
        """This site's update, as it was trained."""
        return self.folder / "update.npy"

    def hidden(self, site: str) -> Path:
        """A site's hidden update."""
        return self.folder / f"hidden-{site}.bin"

    @property
    def products(self) -> Path:
        """The encrypted dot products of updates."""
        return self.folder / "products.bin"

    @property
    def sum(self) -> Path:
        """The hidden sum."""
        return self.folder / "sum.bin"


class Peers(Protocol):
    """The way to other sites (`daemon.rounds.outbox`)."""

    async def push(self, to: str, name: pb.BlobName, source: Path | bytes) -> None:
        """Push a large object until the peer takes it."""

    async def send_behind(
        self, what: do.SendBehind, kind: pb.BlobKind.ValueType, path: Path
    ) -> None:
        """What is certified to each of its holders, and behind it a large object."""


@dataclass(frozen=True)
class JobContext:
    """What every mode's jobs work with.

    ``log_id``: whose rounds; ``feed``: an event for their protocol.
    """

    credentials: Credentials
    log_id: str
    crypto: Worker
    shapes: Shapes
    feed: Callable[[do.Event], Awaitable[None]]
    peers: Peers


Carrying: TypeAlias = Callable[[Any, AttemptState, Any], Awaitable[None]]


class SumJobs(ABC):
    """One mode's work at one site.

    ``work``: the effects that this mode alone has, each with what carries it out.
    """

    work: ClassVar[Mapping[type[do.Work], Carrying]] = {}

    def __init__(self, context: JobContext) -> None:
        self._context = context

    @classmethod
    async def warm_up(cls, crypto: Worker, sites: int, bits: int, *, measurable: bool) -> None:
        """Have the crypto worker load what the first round will need, where that takes long.

        For so many ``sites`` and ``bits`` of an update; ``measurable``: that are compared.
        Raises CryptoError where such updates can't be hidden, WorkerCrashed.
        """
        del crypto, sites, bits, measurable

    @property
    def _site(self) -> str:
        return self._context.credentials.identity.site_id

    async def _run(self, job: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        return await self._context.crypto.run(job, *arguments, **named)

    async def _feed(self, event: do.Event) -> None:
        await self._context.feed(event)

    async def take_context(
        self, state: AttemptState, sender: str, name: pb.BlobName, data: bytes
    ) -> None:
        """The key dealer's context, where there is one."""
        del state, sender, name, data

    @abstractmethod
    async def hide(self, state: AttemptState, hiding: Hiding) -> Uploaded:
        """Quantise this site's update and hide it, in its file of the attempt."""

    @abstractmethod
    async def add(self, state: AttemptState, site: str, nonce: bytes) -> None:
        """Add an update to the sum. Raises CryptoError, the sum unchanged, when it is refused."""

    @abstractmethod
    async def finish(self, state: AttemptState) -> BlobInfo:
        """Write the sum, hidden as it is, in its file of the attempt."""

    @abstractmethod
    async def apply(
        self,
        state: AttemptState,
        effect: do.ApplySum,
        terms: SumTerms,
    ) -> NewVersion:
        """Open the certified sum and make the new version from it."""

    @abstractmethod
    async def forget(self, round_: int, attempt: int) -> None:
        """Wipe an attempt's secrets and sum from the crypto worker."""
