"""Levels of disclosure: noise is what was said, buckets are the same everywhere."""

from __future__ import annotations

import hashlib
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crypto.arrays import Float32
from crypto.disclosure import (
    MAX_BITS,
    BucketTable,
    PrefixTable,
    Projections,
    chance_from,
    noise_for,
    noisy,
)
from crypto.quantize import CryptoError


def units(n: int, d: int, seed: int = 0) -> Float32:
    values = np.random.default_rng(seed).normal(size=(n, d))
    result: Float32 = (values / np.linalg.norm(values, axis=1, keepdims=True)).astype(np.float32)
    return result


# ---- noise --------------------------------------------------------------------------


@pytest.mark.slow
def test_the_analytic_mechanism_is_balle_and_wangs() -> None:
    # delta = Phi(1/2s - e s) - e^eps Phi(-1/2s - e s), their Theorem 8, at sensitivity 1.
    def phi(x: float) -> float:
        return 0.5 * math.erfc(-x / math.sqrt(2.0))

    for epsilon, delta in [(0.5, 1e-5), (1.0, 1e-5), (8.0, 1e-6), (50.0, 1e-9)]:
        s = noise_for(epsilon, delta) / 2.0
        reached = phi(0.5 / s - epsilon * s) - math.exp(epsilon) * phi(-0.5 / s - epsilon * s)
        assert reached == pytest.approx(delta, rel=1e-3)


@pytest.mark.parametrize(("epsilon", "delta"), [(0.0, 1e-5), (-1, 1e-5), (math.nan, 1e-5), (1, 0)])
def test_no_noise_for_what_no_noise_gives(epsilon: float, delta: float) -> None:
    with pytest.raises(CryptoError):
        noise_for(epsilon, delta)


def test_noise_has_the_deviation_that_was_asked_for() -> None:
    vectors, sigma = units(400, 384), 0.05
    result = noisy(vectors, sigma, chance_from(lambda n: bytes(range(n))))
    assert result.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(result, axis=1), 1.0, atol=1e-6)
    # v + e has norm sqrt(1 + d sigma^2), so the cosine with v is its inverse.
    cosines = (result * vectors).sum(axis=1)
    assert cosines.mean() == pytest.approx(1 / math.sqrt(1 + 384 * sigma**2), abs=0.01)
    grown = result * math.sqrt(1 + 384 * sigma**2)
    assert (grown - vectors).std() == pytest.approx(sigma, rel=0.05)


def test_no_noise_leaves_directions_and_two_draws_differ() -> None:
    vectors = units(8, 16)
    np.testing.assert_allclose(noisy(vectors, 0.0, chance_from()), vectors, atol=1e-6)
    first, second = (noisy(vectors, 0.1, chance_from()) for _ in range(2))
    assert not np.allclose(first, second)


@pytest.mark.parametrize("sigma", [-0.1, math.nan, math.inf])
def test_senseless_noise_is_refused(sigma: float) -> None:
    with pytest.raises(CryptoError):
        noisy(units(2, 4), sigma, chance_from())


def test_what_is_not_finite_is_refused() -> None:
    broken = units(2, 4)
    broken[1, 2] = np.nan
    with pytest.raises(CryptoError):
        noisy(broken, 0.1, chance_from())
    with pytest.raises(CryptoError):
        Projections(b"seed", 4, 8).buckets(broken)


# ---- buckets ------------------------------------------------------------------------


def test_buckets_are_the_same_bits_everywhere() -> None:
    # Of vectors whose bits follow from whole numbers alone, in whatever order sums are taken.
    vectors = ((np.arange(64 * 96).reshape(64, 96) * 7919 % 2001 - 1000) / 16384).astype("<f4")
    names = Projections(b"a model's digest", 96, 20).buckets(vectors)
    assert names.shape == (64, 3)
    assert hashlib.sha256(names.tobytes()).hexdigest() == (
        "578c92a1ca2900a6da10403b920771a678ea80fb609c8a862cdc73dca3521cdf"
    )


@settings(deadline=None, max_examples=40)
@given(
    st.integers(1, 8),
    st.integers(1, 70),
    st.integers(1, 40),
    st.integers(0, 2**32 - 1),
)
def test_a_name_does_not_depend_on_the_order_of_sums(n: int, d: int, bits: int, seed: int) -> None:
    vectors = units(n, d, seed)
    projections = Projections(seed.to_bytes(4, "little"), d, bits)
    names = projections.buckets(vectors)
    assert names.dtype == np.uint8
    assert names.shape == (n, projections.width) == (n, -(-bits // 8))
    steps = [[round(float(x) * 2**24) for x in row] for row in vectors]
    weights = projections._weights.astype(int).tolist()
    for row, name in zip(steps, names, strict=True):
        for bit in range(8 * projections.width):
            got = name[bit // 8] >> (bit % 8) & 1
            exact = (
                sum(a * w for a, w in zip(row, weights[bit], strict=True)) >= 0
                if bit < bits
                else False
            )
            assert got == exact


def test_bits_differ_as_often_as_the_angle_says() -> None:
    d, theta = 384, 0.3 * math.pi
    first = units(1, d)
    second = units(1, d, seed=1)
    second -= (second @ first.T) * first
    second /= np.linalg.norm(second)
    turned = (math.cos(theta) * first + math.sin(theta) * second).astype(np.float32)
    differ = [
        np.bitwise_count(p.buckets(first) ^ p.buckets(turned)).sum() / MAX_BITS
        for p in (Projections(bytes([seed]), d, MAX_BITS) for seed in range(20))
    ]
    assert np.mean(differ) == pytest.approx(0.3, abs=0.02)


def test_another_seed_gives_other_buckets() -> None:
    vectors = units(50, 64)
    first, second = (Projections(seed, 64, 32).buckets(vectors) for seed in (b"a", b"b"))
    assert (first != second).any(axis=1).all()


@pytest.mark.parametrize(("dimension", "bits"), [(0, 8), (4, 0), (4, MAX_BITS + 1), (10**6, 8)])
def test_impossible_projections_are_refused(dimension: int, bits: int) -> None:
    with pytest.raises(CryptoError):
        Projections(b"", dimension, bits)


# ---- looking up ---------------------------------------------------------------------


def test_rows_of_a_bucket_and_of_the_nearest_when_it_is_empty() -> None:
    names = np.array([[0b0000], [0b0111], [0b0000], [0b1111]], dtype=np.uint8)
    table = BucketTable(names)
    assert len(table) == 3
    assert table.rows(np.array([0b0000], np.uint8)).tolist() == [0, 2]
    assert table.rows(np.array([0b0110], np.uint8)).tolist() == [1]
    assert table.rows(np.array([0b1011], np.uint8)).tolist() == [3]
    # 0b0011: one bit from 0111, two from 0000 and 1111
    assert table.rows(np.array([0b0011], np.uint8)).tolist() == [1]
    # 0b0101_0000 is at distance 2 from 0000 alone; 0b1001: 2 from 0000 and 2 from 1111
    assert table.rows(np.array([0b1001], np.uint8)).tolist() == [0, 2, 3]


@settings(deadline=None, max_examples=50)
@given(st.integers(1, 40), st.integers(1, 20), st.integers(1, 6), st.integers(0, 2**32 - 1))
def test_drawn_rows_lie_in_a_nearest_bucket(n: int, bits: int, count: int, seed: int) -> None:
    projections = Projections(b"s", 12, bits)
    names = projections.buckets(units(n, 12, seed))
    asked = projections.buckets(units(1, 12, seed + 1))[0]
    drawn = BucketTable(names).draw(asked, count, np.random.default_rng(seed))
    distances = np.bitwise_count(names ^ asked).sum(axis=1)
    nearest = np.flatnonzero(distances == distances.min())
    assert len(drawn) == len(set(drawn.tolist())) == min(count, len(nearest))
    assert set(drawn.tolist()) <= set(nearest.tolist())


@pytest.mark.slow
@settings(deadline=None, max_examples=50)
@given(st.integers(1, 60), st.integers(1, 30), st.integers(1, 24), st.integers(0, 2**32 - 1))
def test_the_first_bits_of_a_name_are_the_name_of_fewer_bits(
    n: int, most: int, d: int, seed: int
) -> None:
    """And a table of the most bits has the buckets of all fewer ones."""
    vectors = units(n, d, seed)
    names = Projections(b"s", d, most).buckets(vectors)
    table = PrefixTable(names)
    flags = np.unpackbits(names, axis=1, bitorder="little")
    for bits in range(1, most + 1):
        fewer = Projections(b"s", d, bits)
        alone = fewer.buckets(vectors)
        np.testing.assert_array_equal(np.packbits(flags[:, :bits], 1, bitorder="little"), alone)
        own, derived = BucketTable(alone), table.of(bits)
        assert len(own) == len(derived)
        for name in fewer.buckets(units(5, d, seed + 1)):
            np.testing.assert_array_equal(derived.rows(name), own.rows(name))
            chances = [np.random.default_rng(seed) for _ in range(2)]
            np.testing.assert_array_equal(
                derived.draw(name, 2, chances[0]), own.draw(name, 2, chances[1])
            )


def test_more_bits_than_a_table_has_are_refused() -> None:
    table = PrefixTable(np.zeros((3, 2), np.uint8))
    for bits in (0, 17):
        with pytest.raises(CryptoError, match="bits of names that have 16"):
            table.of(bits)
    with pytest.raises(CryptoError, match="a bucket's name has 2 bytes"):
        table.of(16).rows(np.zeros(1, np.uint8))
    with pytest.raises(CryptoError, match="needs rows"):
        PrefixTable(np.zeros((0, 2), np.uint8))


def test_a_table_without_rows_and_a_name_of_another_width_are_refused() -> None:
    with pytest.raises(CryptoError):
        BucketTable(np.zeros((0, 2), np.uint8))
    with pytest.raises(CryptoError):
        BucketTable(np.zeros((3, 2), np.uint8)).rows(np.zeros(1, np.uint8))
