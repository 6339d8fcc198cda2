"""Shamir's secret sharing: any ``threshold`` shares give the secret, fewer say nothing of it.

A. Shamir, "How to Share a Secret", CACM 22(11), 1979. The secret is the value at
0 of a random polynomial of degree threshold - 1 over a prime field, a share is
its value at the holder's point 1, 2, ... Whoever has one share too few finds for
*every* secret exactly one polynomial that fits: what is hidden is hidden without
any assumption about computing power.

The field is that of the smallest prime above 2^256, so every secret of 32 bytes
is an element. A share has 33 bytes, big-endian, and only numbers below the prime
are accepted: no share has two encodings.

Python's integers take a time that depends on their values. Whoever could measure
it here could read this process's memory as well (docs/security.md).
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from functools import lru_cache

from crypto.quantize import CryptoError

PRIME = 2**256 + 297
SECRET_BYTES = 32
SHARE_BYTES = 33
MAX_SHARES = 256


def split(secret: bytes, threshold: int, shares: int) -> list[bytes]:
    """Shares (33 bytes each) of a 32-byte secret, for the points 1 .. ``shares``.

    The polynomial is drawn from the operating system's randomness. Raises
    CryptoError for a secret of another length or a threshold that nobody could reach.
    """
    if len(secret) != SECRET_BYTES:
        raise CryptoError(f"a shared secret has {SECRET_BYTES} bytes, not {len(secret)}")
    if not 1 <= threshold <= shares <= MAX_SHARES:
        raise CryptoError(
            f"{threshold} of {shares} shares: the threshold lies between 1 and the number of "
            f"shares, of which there are at most {MAX_SHARES}"
        )
    coefficients = [secrets.randbelow(PRIME) for _ in range(threshold - 1)]
    coefficients.append(int.from_bytes(secret, "big"))  # highest power first, the secret last
    return [_encode(_value_at(point, coefficients)) for point in range(1, shares + 1)]


def combine(shares: Mapping[int, bytes], threshold: int) -> bytes:
    """The secret (32 bytes) that exactly ``threshold`` shares, by point, stand for.

    Any shares stand for something: whether it is the secret that was shared, the
    caller must know from elsewhere (a public key, a commitment). Raises CryptoError
    when a share is malformed, too few or too many came, or no secret is encoded.
    """
    if len(shares) != threshold:
        raise CryptoError(f"a secret comes from {threshold} shares, not {len(shares)}")
    points = tuple(sorted(shares))
    if not points or not 1 <= points[0] <= points[-1] <= MAX_SHARES:
        raise CryptoError(f"shares belong to the points 1 .. {MAX_SHARES}, not {points}")
    value = 0
    for point, weight in zip(points, _weights_at_zero(points), strict=True):
        value += weight * parse(shares[point])
    value %= PRIME
    if value >= 1 << (8 * SECRET_BYTES):
        raise CryptoError("these shares are not of one secret: one of them is wrong")
    return value.to_bytes(SECRET_BYTES, "big")


def parse(share: bytes) -> int:
    """A share as an element of the field; CryptoError unless it is its one encoding."""
    if len(share) != SHARE_BYTES:
        raise CryptoError(f"a share has {SHARE_BYTES} bytes, not {len(share)}")
    value = int.from_bytes(share, "big")
    if value >= PRIME:
        raise CryptoError("a share is not a canonical element of the field")
    return value


def _encode(value: int) -> bytes:
    return value.to_bytes(SHARE_BYTES, "big")


def _value_at(point: int, coefficients: list[int]) -> int:
    """Horner's rule, highest power first."""
    value = 0
    for coefficient in coefficients:
        value = (value * point + coefficient) % PRIME
    return value


@lru_cache(maxsize=256)
def _weights_at_zero(points: tuple[int, ...]) -> tuple[int, ...]:
    """Lagrange's weights at 0; they depend on public points alone, so keeping them is safe."""
    weights = []
    for point in points:
        numerator = denominator = 1
        for other in points:
            if other != point:
                numerator = numerator * other % PRIME
                denominator = denominator * (other - point) % PRIME
        weights.append(numerator * pow(denominator, -1, PRIME) % PRIME)
    return tuple(weights)
