"""The training job's side of fed-negatives: what of a step's queries leaves, and what comes back.

The job itself has no network. It discloses its queries here, in the worker, so that an
undisclosed one never reaches the process that talks to peers, and asks the daemon.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from crypto.arrays import Float32
from crypto.disclosure import Projections, chance_from, noisy
from daemon.learning.retriever.mining import NEAR_DUPLICATE
from daemon.process.workers import ask
from peers.link.negatives import nearest

_BY_CHANCE = 4.0  # deviations


@dataclass(frozen=True)
class Disclosed:
    """Queries as they may leave: ``rows`` [q, d] float32, or [q, width] uint8 at level bucket."""

    level: str
    dimension: int
    bits: int
    rows: NDArray[np.float32] | NDArray[np.uint8]


class PeerAnswers(NamedTuple):
    """What the daemon found: of each site that answered, an array [n, d] for each query."""

    answers: Sequence[Sequence[Float32]]


@dataclass(frozen=True)
class AskingTerms:
    """How a site asks: ``noise`` a coordinate, ``bits`` of a bucket, ``top_n`` kept a query."""

    level: str = "bucket"
    noise: float = 0.05
    bits: int = 8
    top_n: int = 10


def same_above(how: AskingTerms, dimension: int) -> float:
    """The cosine with a foreign passage above which it says what a passage of ours says.

    What is not exact comes under noise, which takes the cosine of equal texts from 1 to
    1 / sqrt(1 + d sigma^2) about. Whose noise it is the answering site alone knows: we take
    it to be as much as ours. Never so low that a passage about something else, whose
    noise is 1 / sqrt(d), is above it.
    """
    if how.level == "exact":
        return NEAR_DUPLICATE
    left = NEAR_DUPLICATE / math.sqrt(1.0 + dimension * how.noise**2)
    return max(left, _BY_CHANCE / math.sqrt(dimension))


def disclosed(queries: Float32, how: AskingTerms, model_digest: bytes) -> Disclosed:
    """What of unit vectors [q, d] leaves the site at that level."""
    dimension = queries.shape[1]
    if how.level == "exact":
        return Disclosed(how.level, dimension, 0, queries)
    if how.level == "noisy":
        return Disclosed(how.level, dimension, 0, noisy(queries, how.noise, chance_from()))
    names = Projections(model_digest, dimension, how.bits).buckets(queries)
    return Disclosed(how.level, dimension, how.bits, names)


def fetcher(how: AskingTerms, model_digest: bytes) -> Callable[[Float32], list[Float32]]:
    """A function from a step's queries [b, d] to the foreign negatives [n, d] of each (Eq. 8)."""

    def fetch(queries: Float32) -> list[Float32]:
        heard: PeerAnswers = ask(disclosed(queries, how, model_digest))
        return [
            nearest(query, [of_site[row] for of_site in heard.answers], how.top_n)
            for row, query in enumerate(queries)
        ]

    return fetch
