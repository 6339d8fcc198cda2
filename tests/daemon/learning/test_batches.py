"""Batches: every pair once, whatever the sizes; by topic, of one neighbourhood."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crypto.arrays import Float32
from daemon.learning.batches import pair_points, random_batches, topic_batches


def chance(seed: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(key=seed))


def points(count: int, topics: int = 4, noise: float = 0.05) -> Float32:
    draw = np.random.default_rng(7)
    middle = draw.normal(size=(topics, 8))
    rows = middle[np.arange(count) % topics] + noise * draw.normal(size=(count, 8))
    unit: Float32 = (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)
    return unit


@settings(max_examples=60, deadline=None)
@given(count=st.integers(2, 90), size=st.integers(2, 40), seed=st.integers(0, 2**32))
def test_every_pair_is_in_one_batch_and_none_is_alone(count: int, size: int, seed: int) -> None:
    for batches in (
        random_batches(count, size, chance(seed)),
        topic_batches(points(count), size, chance(seed)),
    ):
        assert sorted(np.concatenate(batches).tolist()) == list(range(count))
        assert all(2 <= len(batch) <= size + 1 for batch in batches)
        full = -(-count // size) - (count % size == 1 and count > size)
        assert len(batches) == full


def test_batches_by_topic_are_of_one_topic() -> None:
    batches = topic_batches(points(64), 16, chance(1))
    assert [len({int(pair) % 4 for pair in batch}) for batch in batches] == [1, 1, 1, 1]
    mixed = random_batches(64, 16, chance(1))
    assert min(len({int(pair) % 4 for pair in batch}) for batch in mixed) > 1


def test_the_same_chance_gives_the_same_batches() -> None:
    def drawn(seed: int) -> list[list[int]]:
        return [batch.tolist() for batch in topic_batches(points(50), 8, chance(seed))]

    assert drawn(3) == drawn(3)
    assert drawn(3) != drawn(4)


def test_equal_points_do_not_lose_a_pair() -> None:
    same = np.full((33, 4), 0.5, dtype=np.float32)
    for seed in range(10):
        batches = topic_batches(same, 4, chance(seed))
        assert sorted(np.concatenate(batches).tolist()) == list(range(33))


def test_a_pair_lies_between_its_query_and_its_passage() -> None:
    queries = np.array([[1.0, 0.0]], dtype=np.float32)
    passages = np.array([[1.0, 0.0], [0.0, 1.0]], dtype=np.float32)
    lies = pair_points(queries, passages, [np.array([1])])
    np.testing.assert_allclose(lies, [[2**-0.5, 2**-0.5]], rtol=1e-6)


@pytest.mark.slow
def test_batches_of_5000_pairs_by_topic_take_a_moment() -> None:
    many = np.random.default_rng(0).normal(size=(5000, 384)).astype(np.float32)
    started = time.process_time()
    topic_batches(many, 32, chance(0))
    assert time.process_time() - started < 5  # 0.5 s on an idle core
