"""Fed-negatives between live sites: the answering desk, and the asking for a site's training.

What may be asked and given is decided by peers/link/negatives.py, and searched for in a
worker (daemon/jobs/sharing.py); here both meet the network. Entries in the audit
log are written where the traffic passes (daemon/rounds/audited.py).
"""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random, SystemRandom
from typing import Protocol

import numpy as np
import structlog

from config.recipes import PERSONAL
from config.settings import Settings
from crypto import durable
from crypto.arrays import Float32
from daemon.jobs import sharing
from daemon.jobs.sharing import Shelf
from daemon.learning.retriever.peer_negatives import Disclosed, PeerAnswers
from daemon.library.dense.folder import IndexDamaged
from daemon.library.schema import LibraryError
from daemon.process.workers import Worker, WorkerCrashed
from daemon.services.collection import Collection
from daemon.state.store import StoreError
from peers.link.contacts import PeerStatistics
from peers.link.negatives import WIRE, AnswerPolicy, Declined, Desk, Select, select
from peers.wire.errors import PeerBusy, PeerError, PeerUnreachable
from peers.wire.negative_bounds import buckets_of, count_of, most_queries, queries_of, reply_of
from proto import federation_pb2 as pb

log = structlog.get_logger()

_SECRET_BYTES = 32
_MISSES_ALLOWED = 3  # in a row; then a peer is not waited for again in this training


# ---- answering -------------------------------------------------------------------


class AnsweringDesk:
    """What a site does with its peers' requests for negatives."""

    def __init__(
        self,
        desk: Desk,
        worker: Worker,
        collection: Collection,
        *,
        noise: float,
        secret: bytes,
        head_round: Callable[[], int],
    ) -> None:
        """``noise``: deviation a coordinate of what is not given exactly; ``secret``: its seed."""
        self.desk = desk
        self._worker = worker
        self._collection = collection
        self._noise = noise
        self._secret = secret
        self._head_round = head_round

    async def answer(self, sender: str, request: pb.NegativesRequest) -> pb.NegativesReply:
        """Embeddings near a peer's queries. Raises Declined, RemoteProtocolError."""
        index, digest = self._collection.served_index, self._collection.served_digest
        served = digest if index is not None else b""
        order = self.desk.admit(sender, request, served, self._head_round())
        if index is None:
            raise Declined("this site has no index open yet: ask again later")
        shelf = Shelf(
            self._collection.library_path,
            index,
            digest,
            self.desk.policy.collections,
            self._noise,
            self.desk.policy.bits,
            self._secret,
        )
        try:
            hits = await self._searched(shelf, sender, request, order.top_n)
        except (IndexDamaged, LibraryError, WorkerCrashed, OSError) as error:
            log.warning("negatives not searched for", peer=sender, cause=str(error))
            raise Declined("this site could not search just now; its log has the cause") from error
        return reply_of(hits)

    async def _searched(
        self, shelf: Shelf, sender: str, request: pb.NegativesRequest, top_n: int
    ) -> list[Float32]:
        if request.level == pb.BUCKET:
            names, bits = buckets_of(request), request.bits
            return await self._worker.run(sharing.in_buckets, shelf, sender, names, bits, top_n)
        exact = request.level == pb.EXACT
        queries = queries_of(request)
        return await self._worker.run(sharing.near, shelf, sender, queries, top_n, exact=exact)


async def answering_desk(
    settings: Settings,
    dimension: int,
    worker: Worker,
    collection: Collection,
    head_round: Callable[[], int],
) -> AnsweringDesk:
    """The desk as the settings have it; ``dimension`` is that of the retriever's embeddings.

    Raises StoreError when the secret of the noise can't be read or made.
    """
    chosen, personal = settings.negatives, settings.retriever.personal
    path = settings.site.state_dir / "negatives.key"
    try:
        secret = await asyncio.to_thread(own_secret, path)
    except OSError as error:
        raise StoreError(f"cannot use {path}: {error}; check its disk and its rights") from error
    policy = AnswerPolicy(
        answer=chosen.answer,
        levels=frozenset(chosen.levels),
        queries_per_round=chosen.queries_per_round,
        top_n=chosen.top_n,
        bits=chosen.bits,
        collections=chosen.collections,
    )
    embedded_by = personal if PERSONAL[personal].owns_passages else ""
    return AnsweringDesk(
        Desk(policy, dimension, embedded_by=embedded_by),
        worker,
        collection,
        noise=chosen.noise,
        secret=secret,
        head_round=head_round,
    )


def own_secret(path: Path) -> bytes:
    """This site's secret for the noise on its passages, made where there is none yet.

    Who has it takes the noise off what was sent; with a new one, the same passages leave
    under fresh noise, and two noised copies tell more than one. Raises OSError.
    """
    try:
        secret = path.read_bytes()
    except FileNotFoundError:
        secret = secrets.token_bytes(_SECRET_BYTES)
        durable.write(path, secret)
    if len(secret) != _SECRET_BYTES:
        raise OSError(
            f"{path} holds {len(secret)} bytes, {_SECRET_BYTES} were written: restore it, or "
            "delete it to draw fresh noise"
        )
    return secret


# ---- asking ----------------------------------------------------------------------


@dataclass(frozen=True)
class AskOptions:
    """Whom a site asks, and how long it waits; ``sites``: how many, where not all are asked.

    ``ask``: false where the operator lets nothing of a question leave.
    """

    select: Select = "all"
    sites: int = 3
    deadline_s: float = 5.0
    ask: bool = True


@dataclass
class Exchanged:
    """What was asked of a peer and what it gave, in queries and embeddings; and what went wrong.

    ``missed``: steps in which it did not answer in time. ``reason``: why it is not asked
    any more; empty while it is.
    """

    asked: int = 0
    answered: int = 0
    embeddings: int = 0
    missed: int = 0
    reason: str = ""


class Line(Protocol):
    """What asking needs of the transport."""

    def statistics(self) -> dict[str, PeerStatistics]:
        """Every peer, by site id."""

    async def negatives(
        self, to: str, request: pb.NegativesRequest, within_s: float
    ) -> list[Float32]:
        """One request; raises PeerError."""


@dataclass
class Asking:
    """One training's questions to other sites: the answerer of its worker.

    A peer that does not answer in time is passed over in that step; one that declines,
    or misses three steps in a row, for the rest of the training. With no peer left the
    training goes on with local negatives.
    """

    line: Line
    federation_id: str
    site: str
    model_digest: bytes
    top_n: int
    options: AskOptions
    chance: Random = field(default_factory=SystemRandom)
    peers: dict[str, Exchanged] = field(default_factory=dict)
    steps: int = 0
    unanswered: int = 0  # steps in which nobody answered
    _chosen: list[str] | None = None
    _silent: Counter[str] = field(default_factory=Counter)

    async def __call__(self, item: Disclosed) -> PeerAnswers:
        """What the chosen peers answer to one step's queries."""
        self.steps += 1
        sites = self._sites() if self.options.ask else []
        requests = self._requests(item) if sites else []
        replies = await asyncio.gather(*(self._ask(site, requests) for site in sites))
        heard = [answers for answers in replies if answers is not None]
        if not heard:
            self.unanswered += 1
            if self.unanswered == 1:
                log.warning("no peer gives negatives, local ones are used", **self._reasons())
        return PeerAnswers(heard)

    def outcome(self) -> Mapping[str, Exchanged]:
        """By peer, what was exchanged with it."""
        return self.peers

    def _reasons(self) -> dict[str, str]:
        if not self.options.ask:
            return {"cause": "this site asks nobody: negatives.ask is false"}
        reasons = [f"{site}: {seen.reason}" for site, seen in self.peers.items() if seen.reason]
        return {"cause": "; ".join(reasons) or "no peer is connected"}

    def _sites(self) -> list[str]:
        """Chosen once, and again when one of them drops out: the fewer see a query the better."""
        dropped = {site for site, seen in self.peers.items() if seen.reason}
        if self._chosen is None or dropped & set(self._chosen) or not self._chosen:
            latencies = {
                site: seen.round_trip_ms
                for site, seen in self.line.statistics().items()
                if seen.connected and site not in dropped
            }
            self._chosen = select(latencies, self.options.select, self.options.sites, self.chance)
            for site in self._chosen:
                self.peers.setdefault(site, Exchanged())
        return self._chosen

    def _requests(self, item: Disclosed) -> list[pb.NegativesRequest]:
        """The step's queries in as few requests as there is room for."""
        top_n = self.top_n
        at_once = most_queries(item.dimension, top_n)
        if at_once == 0:
            top_n, at_once = most_queries(item.dimension, 1), 1
        requests = []
        for start in range(0, len(item.rows), at_once):
            some = np.ascontiguousarray(item.rows[start : start + at_once]).tobytes()
            request = pb.NegativesRequest(
                federation_id=self.federation_id,
                sender=self.site,
                model_digest=self.model_digest,
                level=WIRE[item.level],
                dimension=item.dimension,
                top_n=top_n,
                bits=item.bits,
            )
            if item.level == "bucket":
                request.buckets = some
            else:
                request.queries = some
            requests.append(request)
        return requests

    async def _ask(
        self, site: str, requests: Sequence[pb.NegativesRequest]
    ) -> list[Float32] | None:
        """One peer's answers, [n, d] a query; None when it gives none in this step."""
        seen, answers = self.peers[site], list[Float32]()
        try:
            async with asyncio.timeout(self.options.deadline_s):
                for request in requests:
                    seen.asked += count_of(request)
                    answers += await self._patiently(site, request)
        except (TimeoutError, PeerUnreachable, PeerBusy) as error:
            seen.missed += 1
            self._silent[site] += 1
            if self._silent[site] >= _MISSES_ALLOWED:
                why = str(error) or f"no answer within {self.options.deadline_s:g} s"
                self._drop(site, f"{_MISSES_ALLOWED} steps in a row without an answer: {why}")
            return None
        except PeerError as error:
            self._drop(site, str(error))
            return None
        self._silent[site] = 0
        seen.answered += len(answers)
        seen.embeddings += sum(len(answer) for answer in answers)
        return answers

    async def _patiently(self, site: str, request: pb.NegativesRequest) -> list[Float32]:
        """Again when the peer says when; the deadline is the caller's."""
        while True:
            try:
                return await self.line.negatives(site, request, self.options.deadline_s)
            except PeerBusy as busy:
                if busy.retry_after_s > self.options.deadline_s:
                    raise
                await asyncio.sleep(busy.retry_after_s)

    def _drop(self, site: str, reason: str) -> None:
        self.peers[site].reason = reason
        log.warning("a peer gives no negatives", peer=site, cause=reason)
