"""The round trip: a made query must find its own passage, or it is thrown away."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from crypto.arrays import Float32
from daemon.pairs.made import Made, merged

TOP_K = 10
_QUERIES_AT_ONCE = 256  # bounds the similarity matrix to 256 x passages


@dataclass(frozen=True)
class Filtered:
    """What is left of made pairs, and how many were lost for which reason."""

    kept: list[Made]
    repeated: int  # said what another query said; their texts are with that one
    lost: int  # didn't find their passage


def round_trip(
    made: Sequence[Made],
    queries: Float32,
    corpus: Sequence[str],
    passages: Float32,
    *,
    k: int = TOP_K,
) -> Filtered:
    """Keep a query if a text of its own is among the ``k`` nearest passages, then merge.

    ``queries`` [len(made), d] and ``passages`` [len(corpus), d] have rows of length
    1, as the version in use embeds them; ``corpus`` are the texts that may be
    learned from. Equal texts are one: a passage does not compete with its copies.
    """
    numbers: dict[str, int] = {}
    number = np.array([numbers.setdefault(text, len(numbers)) for text in corpus], dtype=np.int64)
    first = np.unique(number, return_index=True)[1]  # one row for each different text
    passed: list[Made] = []
    for start in range(0, len(made), _QUERIES_AT_ONCE):
        some = made[start : start + _QUERIES_AT_ONCE]
        nearness = queries[start : start + len(some)] @ passages[first].T  # [<= 256, texts]
        for pair, row in zip(some, nearness, strict=True):
            own = [numbers[text] for text in pair.texts if text in numbers]
            if own and int((row > row[own].max()).sum()) < k:
                passed.append(pair)
    once = merged(passed)
    return Filtered(once, repeated=len(passed) - len(once), lost=len(made) - len(passed))
