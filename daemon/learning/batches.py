"""How a site's pairs fall into batches: at random, or by topic.

In a batch of one topic every other pair's passage is a hard negative, at no cost.
"""

from __future__ import annotations

import hashlib

import numpy as np

from crypto.arrays import Float32, Rows


def random_batches(count: int, size: int, chance: np.random.Generator) -> list[Rows]:
    """All ``count`` pairs in a random order, ``size`` a batch."""
    return in_runs(chance.permutation(count), size)


def topic_batches(points: Float32, size: int, chance: np.random.Generator) -> list[Rows]:
    """All pairs, each batch a neighbourhood: a random pair that is left and those nearest to it.

    ``points`` [n, d]: where each pair lies, rows of length 1. The batches come in a
    random order, for the last ones gathered are what others left over. Takes
    n / size products of an [n, d] matrix with a vector: 0.3 s for 5,000 pairs
    of 384 values. The same points and chance give the same batches.
    """
    left = np.ones(len(points), dtype=np.bool_)
    gathered: list[Rows] = []
    for pair in chance.permutation(len(points)):
        if not left[pair]:
            continue
        candidates = np.flatnonzero(left)
        if len(candidates) > size:
            nearness = points[candidates] @ points[pair]  # [c]
            nearness[np.searchsorted(candidates, pair)] = np.inf  # itself, whatever rounding says
            nearest = np.argpartition(-nearness, size - 1)[:size]
            candidates = np.sort(candidates[nearest])
        left[candidates] = False
        gathered.append(chance.permutation(candidates))
    if len(gathered) > 1 and len(gathered[-1]) == 1:  # as in `in_runs`
        gathered[-2:] = [np.concatenate(gathered[-2:])]
    return [gathered[place] for place in chance.permutation(len(gathered))]


def in_runs(order: Rows, size: int) -> list[Rows]:
    """Runs of ``size`` pairs; a lone last one, which would lack negatives, joins the one before."""
    parts = [order[start : start + size] for start in range(0, len(order), size)]
    if len(parts) > 1 and len(parts[-1]) == 1:
        parts[-2:] = [np.concatenate(parts[-2:])]
    return parts


def pair_points(queries: Float32, passages: Float32, positives: list[Rows]) -> Float32:
    """Where each pair lies: its query and its first positive passage together, [n, d] unit rows.

    ``queries`` [n, d], ``passages`` [m, d], ``positives[i]`` rows of ``passages``.
    """
    first = np.array([right[0] for right in positives], dtype=np.int64)
    points = queries + passages[first]
    lengths = np.linalg.norm(points, axis=1, keepdims=True)
    unit: Float32 = (points / np.maximum(lengths, 1e-12)).astype(np.float32)
    return unit


def training_seed(seed: int, round_number: int, site: str, draw: int = 0) -> int:
    """The 128-bit seed of one site's training in one round.

    Mixed, so that sites do not shuffle in step and rounds do not repeat one another.
    ``draw``: of the round; where a sum is drawn anew it is another one.
    """
    text = f"hanse-training-v1\0{seed}\0{round_number}\0{site}" + (f"\0{draw}" if draw else "")
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:16], "little")
