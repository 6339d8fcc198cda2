"""Fed-negative exchange: who may ask what, how much, and what is returned.

PURE: no IO, no clock, no randomness of its own. Source: PDD-AS2, section 3.2, Eq. 7-8.

The rules of a site that answers, in this order:

1. It answers nobody unless its operator said so.
2. Its passages are embedded by what the version shares, and by nothing personal.
3. Both sites work with the same model version: its digest covers encoder, shape and
   parameters, so a vector of one means the same at the other.
4. The level of disclosure, and the number of a bucket's bits, are among those it allows.
5. A peer gets answers to so many queries a round, whether it takes them or not, and so
   many embeddings for each.

What is returned are embeddings of passages: never an id, a text or a score.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Final, Literal

import numpy as np

from crypto.arrays import Float32
from peers.wire.bounds import refuse
from peers.wire.errors import PeerError
from peers.wire.negative_bounds import count_of
from proto import federation_pb2 as pb
from proto.bounds import names_of, numbers_of

Select = Literal["all", "random", "nearest"]

NAMES: Final = names_of(pb.Disclosure.DESCRIPTOR)
WIRE: Final = numbers_of(pb.Disclosure.DESCRIPTOR)


class Declined(PeerError):
    """A request for negatives is not answered; the text is for the asking site's people."""


class QuotaSpent(Declined):
    """The peer has asked for as much as it gets in this round."""


# ---- answering -------------------------------------------------------------------


@dataclass(frozen=True)
class AnswerPolicy:
    """What the operator allows. ``top_n``: embeddings a query; ``bits``: of a bucket, at most.

    ``collections``: beginnings of document ids that may be answered from; none: all.
    """

    answer: bool = False
    levels: frozenset[str] = frozenset({"bucket"})
    queries_per_round: int = 20_000
    top_n: int = 10
    bits: int = 12
    collections: tuple[str, ...] = ()


@dataclass(frozen=True)
class Order:
    """What is to be searched for: already allowed and paid for."""

    level: str
    count: int
    top_n: int


class Desk:
    """The answering site's side: admits requests, and counts what each peer was given."""

    def __init__(self, policy: AnswerPolicy, dimension: int, *, embedded_by: str = "") -> None:
        """``embedded_by``: the personal layer that embeds this site's passages, if one does."""
        self.policy = policy
        self._dimension = dimension
        self.answered: Counter[str] = Counter()  # queries by peer since the start
        self.refused: Counter[str] = Counter()  # requests by peer since the start
        self._embedded_by = embedded_by
        self._round = -1
        self._spent: Counter[str] = Counter()

    def admit(
        self, sender: str, request: pb.NegativesRequest, served_digest: bytes, round: int
    ) -> Order:
        """What to search for, charged to the sender; raises Declined, RemoteProtocolError.

        ``served_digest``: of the version whose index this site has open; ``round``: the
        last that it has committed.
        """
        try:
            order = self._allowed(request, served_digest)
            self._charge(sender, order.count, round)
        except PeerError:
            self.refused[sender] += 1
            raise
        self.answered[sender] += order.count
        return order

    def _allowed(self, request: pb.NegativesRequest, served_digest: bytes) -> Order:
        policy, level = self.policy, NAMES[request.level]
        if not policy.answer:
            raise Declined(
                "this site gives no negatives: its operator would have to switch on "
                "negatives.answer"
            )
        if self._embedded_by:
            raise Declined(
                f"this site embeds its passages as no other site does (retriever.personal = "
                f"{self._embedded_by!r}): ask others, or have its operator choose a layer that "
                "embeds them as the shared version does"
            )
        if not served_digest or request.model_digest != served_digest:
            ours = served_digest.hex()[:12] or "none yet"
            raise Declined(
                f"this site answers with model version {ours}, the queries are of "
                f"{request.model_digest.hex()[:12]}: wait until both have the newest one"
            )
        if request.dimension != self._dimension:  # of the same version, it says
            raise refuse("dimension", str(request.dimension), f"{self._dimension}, the version's")
        if level not in policy.levels:
            allowed = ", ".join(sorted(policy.levels)) or "none"
            raise Declined(
                f"this site discloses nothing at level {level!r}, but at {allowed}: set "
                "negatives.level accordingly, or have its operator change negatives.levels"
            )
        if level == "bucket" and request.bits > policy.bits:
            raise Declined(
                f"buckets of {request.bits} bits name single passages, this site allows "
                f"{policy.bits}: lower negatives.bits"
            )
        return Order(level, count_of(request), min(request.top_n, policy.top_n))

    def _charge(self, sender: str, count: int, round: int) -> None:
        if round != self._round:
            self._round = round
            self._spent.clear()
        most = self.policy.queries_per_round
        if self._spent[sender] + count > most:
            raise QuotaSpent(
                f"site {sender!r} has had answers to {self._spent[sender]} of {most} queries in "
                f"round {round}, {count} more are too many: go on after the next round, or have "
                "this site's operator raise negatives.queries_per_round"
            )
        self._spent[sender] += count


# ---- asking ----------------------------------------------------------------------


def select(
    latencies: Mapping[str, float | None], how: Select, count: int, chance: Random
) -> list[str]:
    """Whom to ask (Eq. 7): all, ``count`` at random, or the ``count`` nearest.

    ``latencies``: of every peer that answers, ms; None where none was measured yet, which
    counts as far. Sorted by name, except that the nearest come first.
    """
    names = sorted(latencies)
    if how == "random":
        return sorted(chance.sample(names, min(count, len(names))))
    if how == "nearest":
        far = float("inf")

        def distance(name: str) -> float:
            latency = latencies[name]
            return far if latency is None else latency

        return sorted(names, key=distance)[:count]
    return names


def nearest(query: Float32, embeddings: Sequence[Float32], top_n: int) -> Float32:
    """The ``top_n`` of all sites' embeddings that are nearest to a query [d] (Eq. 8): [n, d].

    Nearest first. Of equal ones each counts once: two sites may hold the same passage.
    """
    every = np.concatenate([*embeddings, np.zeros((0, len(query)), np.float32)])
    every = np.unique(every, axis=0)
    order = np.argsort(-(every @ query), kind="stable")[:top_n]
    return every[order]
