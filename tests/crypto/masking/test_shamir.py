"""Shamir's sharing: any t give the secret, t - 1 fit every secret."""

from __future__ import annotations

import secrets

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crypto.masking import shamir
from crypto.quantize import CryptoError

SECRETS = st.binary(min_size=32, max_size=32) | st.sampled_from([bytes(32), b"\xff" * 32])


@st.composite
def sharings(draw: st.DrawFn) -> tuple[bytes, int, int, list[int]]:
    """A secret, t, n, and n points in some order."""
    n = draw(st.integers(1, 64))
    t = draw(st.integers(1, n))
    return draw(SECRETS), t, n, draw(st.permutations(range(1, n + 1)))


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(sharings())
def test_any_threshold_of_shares_gives_the_secret(case: tuple[bytes, int, int, list[int]]) -> None:
    secret, t, n, points = case
    shares = shamir.split(secret, t, n)
    assert {len(share) for share in shares} == {shamir.SHARE_BYTES}
    assert shamir.combine({point: shares[point - 1] for point in points[:t]}, t) == secret


@settings(max_examples=100, deadline=None)
@given(sharings(), SECRETS)
def test_one_share_less_fits_every_other_secret(
    case: tuple[bytes, int, int, list[int]], other: bytes
) -> None:
    """Shamir 1979: t - 1 shares and *any* value at 0 lie on exactly one polynomial."""
    secret, t, n, points = case
    if t == n:
        return
    shares = shamir.split(secret, t, n)
    held, missing = points[: t - 1], points[t - 1]
    # The value that the missing share would have if the secret were the other one.
    value = _interpolated({0: int.from_bytes(other, "big"), **_values(shares, held)}, missing)
    forged = {point: shares[point - 1] for point in held}
    forged[missing] = value.to_bytes(shamir.SHARE_BYTES, "big")
    assert shamir.combine(forged, t) == other


def _values(shares: list[bytes], points: list[int]) -> dict[int, int]:
    return {point: shamir.parse(shares[point - 1]) for point in points}


def _interpolated(values: dict[int, int], at: int) -> int:
    """Lagrange's formula, written down a second time."""
    total = 0
    for point, value in values.items():
        term = value
        for other in values:
            if other != point:
                quotient = (at - other) * pow(point - other, -1, shamir.PRIME)
                term = term * quotient % shamir.PRIME
        total += term
    return total % shamir.PRIME


def test_known_polynomial(monkeypatch: pytest.MonkeyPatch) -> None:
    """3 + 5x + 7x^2 has 15, 41, 81 at 1, 2, 3."""
    drawn = iter([7, 5])
    monkeypatch.setattr(secrets, "randbelow", lambda _limit: next(drawn))
    shares = shamir.split((3).to_bytes(32, "big"), 3, 3)
    assert [int.from_bytes(share, "big") for share in shares] == [15, 41, 81]


def test_the_field_is_that_of_a_prime_above_every_secret() -> None:
    assert shamir.PRIME > 2**256
    assert all(pow(base, shamir.PRIME - 1, shamir.PRIME) == 1 for base in range(2, 60))


def test_shares_of_one_secret_are_fresh_each_time() -> None:
    assert not set(shamir.split(bytes(32), 2, 5)) & set(shamir.split(bytes(32), 2, 5))


@pytest.mark.parametrize(
    ("secret", "threshold", "shares"),
    [
        (bytes(31), 2, 3),
        (bytes(33), 2, 3),
        (bytes(32), 0, 3),
        (bytes(32), 4, 3),
        (bytes(32), 2, 257),
    ],
)
def test_a_sharing_that_cannot_be_is_refused(secret: bytes, threshold: int, shares: int) -> None:
    with pytest.raises(CryptoError):
        shamir.split(secret, threshold, shares)


@pytest.mark.parametrize(
    "share",
    [
        b"",
        bytes(32),
        bytes(34),
        shamir.PRIME.to_bytes(33, "big"),
        (shamir.PRIME + 1).to_bytes(33, "big"),
        b"\xff" * 33,
    ],
)
def test_a_share_has_one_encoding(share: bytes) -> None:
    good = shamir.split(bytes(32), 2, 3)
    with pytest.raises(CryptoError):
        shamir.combine({1: good[0], 2: share}, 2)


def test_too_few_too_many_and_impossible_points_are_refused() -> None:
    one, two, three = shamir.split(bytes(32), 2, 3)
    for shares in ({}, {1: one}, {1: one, 2: two, 3: three}, {0: one, 1: two}, {1: one, 257: two}):
        with pytest.raises(CryptoError):
            shamir.combine(shares, 2)


def test_shares_of_no_32_byte_secret_are_refused() -> None:
    """A constant polynomial of 2^256: an element of the field, and no secret."""
    share = (2**256).to_bytes(33, "big")
    with pytest.raises(CryptoError, match="not of one secret"):
        shamir.combine({1: share, 2: share}, 2)
