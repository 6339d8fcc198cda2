"""Fixed point and packing: exact where it says so, unbiased where it rounds."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crypto.quantize import (
    CryptoError,
    Packing,
    dequantise_fraction_sum,
    dequantise_sum,
    pack,
    quantise,
    quantise_fraction,
    scale_exponents,
    unpack,
)


def rng(seed: int = 1) -> np.random.Generator:
    return np.random.default_rng(seed)


def test_exponent_is_the_smallest_power_of_two_that_holds_the_group() -> None:
    vector = np.array([0.5, -1.0, 1.001, 0.0, 0.0, 3e38, -1e-45], dtype=np.float32)
    sizes = [1, 1, 1, 2, 1, 1]
    assert scale_exponents(vector[:5], sizes[:4], 1.0) == [-1, 0, 1, -126]
    assert scale_exponents(vector[:3], [3], 0.5) == [0]
    assert scale_exponents(vector[6:], [1], 1.0) == [-126]


def test_a_long_group_is_rounded_as_if_it_were_one_piece() -> None:
    sizes, exponents = [70_001, 3, 40_000], [0, -2, 1]
    vector = rng().uniform(-0.2, 0.2, sum(sizes)).astype(np.float32)
    chance, expected = rng(2), []
    for part, exponent in zip(np.split(vector, np.cumsum(sizes)[:-1]), exponents, strict=True):
        scaled = part * np.float64(0.5 * 127 * 2.0**-exponent)
        expected.append(np.floor(scaled + chance.random(part.shape, dtype=np.float32)))
    integers = quantise(vector, sizes, 0.5, exponents, 8, rng(2))
    assert np.array_equal(integers, np.concatenate(expected))


def test_a_value_beyond_two_to_127_is_refused() -> None:
    with pytest.raises(CryptoError, match="beyond 2\\^127"):
        scale_exponents(np.array([3e38], dtype=np.float32), [1], 1.0)


@pytest.mark.parametrize("bits", [8, 12, 16])
def test_quantised_values_are_within_one_unit_and_right_on_average(bits: int) -> None:
    vector = rng().normal(size=200_000).astype(np.float32)
    sizes, weight = [150_000, 50_000], 0.7
    vector[150_000:] *= 1000
    exponents = scale_exponents(vector, sizes, weight)
    integers = quantise(vector, sizes, weight, exponents, bits, rng(2))
    back = dequantise_sum(integers, sizes, exponents, bits)
    error = back - vector.astype(np.float64) * weight
    for start, stop, exponent in ((0, 150_000, exponents[0]), (150_000, 200_000, exponents[1])):
        unit = math.ldexp(1.0, exponent) / (2 ** (bits - 1) - 1)
        part = error[start:stop] / unit
        assert np.abs(part).max() <= 1 + 1e-6
        assert abs(part.mean()) < 5 * 0.5 / math.sqrt(stop - start)


def test_extremes_reach_the_limit_and_do_not_pass_it() -> None:
    vector = np.array([1.0, -1.0], dtype=np.float32)
    for seed in range(200):
        assert quantise(vector, [2], 1.0, [0], 16, rng(seed)).tolist() == [32767, -32767]
    assert quantise(vector * 7, [2], 1.0, [0], 8, rng()).tolist() == [127, -127]


@pytest.mark.parametrize(
    ("vector", "sizes", "weight", "refusal"),
    [
        (np.array([np.nan], dtype=np.float32), [1], 1.0, "NaN"),
        (np.array([np.inf], dtype=np.float32), [1], 1.0, "NaN or infinity"),
        (np.zeros(3, dtype=np.float32), [2], 1.0, "expected 2 float32"),
        (np.zeros(0, dtype=np.float32), [0], 1.0, "at least one"),
        (np.zeros(2, dtype=np.float64), [2], 1.0, "got float64"),
        (np.zeros(2, dtype=np.float32), [2], 0.0, "weight"),
        (np.zeros(2, dtype=np.float32), [2], 1.5, "weight"),
    ],
)
def test_what_cannot_be_sent_is_refused(
    vector: np.ndarray, sizes: list[int], weight: float, refusal: str
) -> None:
    with pytest.raises(CryptoError, match=refusal):
        scale_exponents(vector, sizes, weight)
    with pytest.raises(CryptoError, match=refusal):
        quantise(vector, sizes, weight, [0], 16, rng())


def test_exponents_must_fit_the_groups() -> None:
    with pytest.raises(CryptoError, match="expected 1 scale exponents, got 2"):
        quantise(np.zeros(2, dtype=np.float32), [2], 1.0, [0, 0], 16, rng())
    with pytest.raises(CryptoError, match=r"-126 \.\. 127"):
        dequantise_sum(np.zeros(2, dtype=np.int64), [2], [128], 16)


@settings(max_examples=60, deadline=None)
@given(
    bits=st.sampled_from([8, 12, 16]),
    contributors=st.integers(2, 64),
    digits=st.integers(1, 4),
    values=st.integers(1, 200),
    seed=st.integers(0, 2**32),
)
def test_packed_sums_unpack_to_the_sum_of_integers(
    bits: int, contributors: int, digits: int, values: int, seed: int
) -> None:
    packing = Packing(bits, contributors, digits, slots=16)
    if packing.largest_component * 2.0**-53 > 0.005:  # adding noise must not round it beyond 0.4
        return
    chance = rng(seed)
    limit = packing.limit
    integers = chance.choice(
        np.array([-limit, -1, 0, 1, limit], dtype=np.int32), size=(contributors, values)
    )
    integers[:, 0] = limit
    integers[:, -1] = -limit
    total = sum(pack(row, packing) for row in integers)
    assert isinstance(total, np.ndarray)
    noise = chance.uniform(-0.39, 0.39, total.shape) + 1j * chance.uniform(-0.39, 0.39, total.shape)
    expected = integers.sum(axis=0, dtype=np.int64)
    assert (unpack(total + noise, packing, values) == expected).all()


def test_slots_that_are_no_sum_are_refused() -> None:
    packing = Packing(16, 3, 2, slots=16)
    slots = pack(np.arange(64, dtype=np.int32), packing)
    with pytest.raises(CryptoError, match="away from an integer"):
        unpack(slots + 0.45, packing, 64)
    with pytest.raises(CryptoError, match="away from an integer"):
        unpack(slots * np.nan, packing, 64)
    with pytest.raises(CryptoError, match="exceeds what the contributors"):
        unpack(slots + 2.0**40, packing, 64)
    for beyond in (3 * 32767 + 1, -3 * 32767 - 1):
        with pytest.raises(CryptoError, match="integer exceeds"):
            unpack(slots + beyond, packing, 64)
    with pytest.raises(CryptoError, match="do not lie in slots"):
        unpack(slots, packing, 65)


@pytest.mark.parametrize("bits", [8, 12, 16])
def test_the_loss_keeps_its_precision_at_any_width(bits: int) -> None:
    fractions = [0.0, 1.0, 0.31 / 64, 0.999, 1 / 3]
    pairs = [quantise_fraction(f, bits, rng(i)) for i, f in enumerate(fractions)]
    assert all(0 <= number <= 2 ** (bits - 1) - 1 for pair in pairs for number in pair)
    units, rest = (sum(column) for column in zip(*pairs, strict=True))
    resolution = 1 / (2 ** (bits - 1) - 1) ** 2
    total = dequantise_fraction_sum(units, rest, bits)
    assert abs(total - sum(fractions)) <= len(fractions) * resolution
