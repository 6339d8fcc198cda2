"""Float vectors as fixed-point integers, and integers as packed CKKS slots.

A site's weighted update becomes b-bit integers (stochastic rounding, so that
the rounding error has mean zero), and several integers share one slot as the
digits of a number in base 2^w. With w = b + ceil(log2 K) a digit has room for
the sum of K integers, so digits never carry into one another and the sum of
packed numbers is the packed sum of integers, exactly.

Nothing here touches a disk, a clock or a key; randomness is an argument.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from crypto.arrays import Float32, Float64, Int32, Int64

Slots = NDArray[np.complex128]

MIN_EXPONENT = -126
MAX_EXPONENT = 127

# A decrypted slot farther than this from an integer is not the sum of honest
# integers under this key; parameters are chosen so that noise stays below it.
RESIDUAL_LIMIT = 0.4

_STRIPE = 1 << 15  # values

FRACTION_INTEGERS = 2  # what `quantise_fraction` makes of a number

# The mean loss travels as the fraction loss / LOSS_BOUND behind the vector. InfoNCE
# with tau = 0.05 is below 2 / 0.05 + ln(candidates), that is 48 at 4096 of them.
LOSS_BOUND = 64.0


class CryptoError(Exception):
    """A vector, key, update or sum was refused: what, what was expected, what to do."""


@dataclass(frozen=True)
class Packing:
    """How integers share slots.

    ``bits`` of one integer (sign included), ``contributors`` that are added at
    most, ``digits`` integers in each component of a slot, ``slots`` of one
    block. A slot is a complex number; of its ``components`` both carry digits,
    or the real one alone (then the imaginary one must be zero).
    """

    bits: int
    contributors: int
    digits: int
    slots: int
    components: int = 2

    @property
    def limit(self) -> int:
        """Largest |integer| that one contributor may encode: 2^(bits-1) - 1."""
        return (1 << (self.bits - 1)) - 1

    @property
    def digit_bits(self) -> int:
        """Width of a digit: the sum of all contributors' integers fits, with its sign."""
        return self.bits + (self.contributors - 1).bit_length()

    @property
    def values_per_block(self) -> int:
        """Integers in one block: ``components`` a slot, ``digits`` in each."""
        return self.components * self.digits * self.slots

    @property
    def largest_component(self) -> int:
        """Largest |component| of a slot of the sum, when every digit is extreme."""
        ones = sum(1 << (self.digit_bits * i) for i in range(self.digits))
        return self.contributors * self.limit * ones

    def blocks(self, values: int) -> int:
        """Number of blocks for so many integers."""
        return -(-values // self.values_per_block)


def scale_exponents(vector: Float32, sizes: Sequence[int], weight: float) -> list[int]:
    """Per group the smallest e with max |weight * value| <= 2^e, within -126 .. 127.

    This is all a site tells the others about its magnitudes. Raises CryptoError
    when the vector is not finite, of the wrong length, or beyond 2^127.
    """
    _check(vector, sizes, weight)
    exponents = []
    for group in _groups(sizes):
        part = vector[group]
        largest = float(max(part.max(initial=0.0), -part.min(initial=0.0))) * weight
        mantissa, exponent = math.frexp(largest)  # largest = mantissa * 2^exponent, 0.5 <= m < 1
        if mantissa == 0.5:
            exponent -= 1
        if exponent > MAX_EXPONENT:
            raise CryptoError(
                f"the update holds a value of magnitude {largest:.3g}, beyond 2^127: "
                "training diverged; lower the learning rate"
            )
        exponents.append(max(exponent, MIN_EXPONENT) if largest else MIN_EXPONENT)
    return exponents


def quantise(
    vector: Float32,
    sizes: Sequence[int],
    weight: float,
    exponents: Sequence[int],
    bits: int,
    rng: np.random.Generator,
) -> Int32:
    """``weight * vector`` as integers in units of 2^e / (2^(bits-1) - 1) per group.

    Rounded up or down by chance, so that the expectation is exact; values
    beyond 2^e are clipped to it. Raises CryptoError as `scale_exponents`.
    """
    _check(vector, sizes, weight)
    check_exponents(sizes, exponents)
    limit = (1 << (bits - 1)) - 1
    integers = np.empty(vector.shape, dtype=np.int32)
    for group, exponent in zip(_groups(sizes), exponents, strict=True):
        factor = np.float64(math.ldexp(weight * limit, -exponent))
        for stripe in _stripes(group):
            scaled = vector[stripe] * factor
            scaled += rng.random(scaled.shape, dtype=np.float32)
            np.floor(scaled, out=scaled)
            np.clip(scaled, -limit, limit, out=scaled)
            integers[stripe] = scaled
    return integers


def dequantise_sum(
    integers: Int32 | Int64, sizes: Sequence[int], exponents: Sequence[int], bits: int
) -> Float64:
    """The sum of ``weight * value`` that summed integers stand for.

    One IEEE multiplication a value, by a factor every site computes alike, so
    that all key holders get the same bits.
    """
    check_exponents(sizes, exponents)
    if integers.shape != (sum(sizes),):
        raise CryptoError(f"expected {sum(sizes)} integers, got shape {integers.shape}")
    limit = (1 << (bits - 1)) - 1
    values = np.empty(integers.shape, dtype=np.float64)
    for group, exponent in zip(_groups(sizes), exponents, strict=True):
        np.multiply(integers[group], math.ldexp(1.0, exponent) / limit, out=values[group])
    return values


def quantise_fraction(fraction: float, bits: int, rng: np.random.Generator) -> tuple[int, int]:
    """A number in 0 .. 1 as two integers: units, and what is left in units of units.

    One number that people read deserves more than 8 bits: two integers of b bits
    resolve 2^-(2b-2).
    """
    limit = (1 << (bits - 1)) - 1
    scaled = min(max(fraction, 0.0), 1.0) * limit
    units = math.floor(scaled)
    return units, math.floor((scaled - units) * limit + rng.random())


def dequantise_fraction_sum(units: int, rest: int, bits: int) -> float:
    """The sum of the fractions whose integers were summed."""
    limit = (1 << (bits - 1)) - 1
    return (units + rest / limit) / limit


def pack(integers: Int32 | Int64, packing: Packing) -> Slots:
    """Integers as slots, shape [blocks, slots]; the last block is filled with zeros.

    Exact: a component stays below 2^53 (`crypto.ckks.parameters.choose_parameters`).
    """
    base = float(1 << packing.digit_bits)
    slots = np.empty((packing.blocks(integers.size), packing.slots), dtype=np.complex128)
    for index, block in enumerate(slots):  # one at a time: doubles of all would be two vectors
        start = index * packing.values_per_block
        part = integers[start : start + packing.values_per_block]
        digits = np.zeros((packing.components, packing.digits, packing.slots))
        digits.reshape(-1)[: part.size] = part
        components = digits[:, -1]
        for digit in range(packing.digits - 2, -1, -1):
            components = components * base + digits[:, digit]
        block.real = components[0]
        block.imag = components[1] if packing.components == 2 else 0.0
    return slots


def unpack(slots: Slots, packing: Packing, values: int) -> Int64:
    """The ``values`` summed integers of decrypted slots.

    Raises CryptoError when a slot is no integer within noise, or an integer is
    larger than the contributors' sum can be: then these slots are not a sum of
    honest updates under this round's key.
    """
    if slots.shape != (packing.blocks(values), packing.slots):
        raise CryptoError(f"{values} values do not lie in slots of shape {slots.shape}")
    half = 1 << (packing.digit_bits - 1)
    offset = sum(half << (packing.digit_bits * i) for i in range(packing.digits))
    integers = np.empty(
        (len(slots), packing.components, packing.digits, packing.slots), dtype=np.int64
    )
    # "not <=" and not ">": a NaN must be refused, too.
    if packing.components == 1 and not np.abs(slots.imag).max() <= RESIDUAL_LIMIT:
        raise CryptoError(_not_a_sum("a slot has an imaginary part, where none belongs"))
    for component, values_of in enumerate((slots.real, slots.imag)[: packing.components]):
        rest = _nearest_integers(values_of, packing)
        rest += offset  # every digit is now in 0 .. 2^w - 1, so shifts take them apart
        for digit in range(packing.digits):
            np.bitwise_and(rest, 2 * half - 1, out=integers[:, component, digit])
            rest >>= packing.digit_bits
    integers -= half
    flat = integers.reshape(-1)
    if max(flat.max(), -flat.min()) > packing.contributors * packing.limit:
        raise CryptoError(_not_a_sum("an integer exceeds what the contributors can have sent"))
    return flat[:values]


def check_exponents(sizes: Sequence[int], exponents: Sequence[int]) -> None:
    """Raises CryptoError unless there is one exponent in -126 .. 127 for each group."""
    if len(exponents) != len(sizes):
        raise CryptoError(f"expected {len(sizes)} scale exponents, got {len(exponents)}")
    if not all(MIN_EXPONENT <= e <= MAX_EXPONENT for e in exponents):
        raise CryptoError(f"scale exponents lie in {MIN_EXPONENT} .. {MAX_EXPONENT}")


def _nearest_integers(components: Float64, packing: Packing) -> Int64:
    nearest = np.rint(components)
    # "not <=" and not ">": a NaN must be refused, too.
    if not np.abs(components - nearest).max() <= RESIDUAL_LIMIT:
        raise CryptoError(_not_a_sum(f"a slot is more than {RESIDUAL_LIMIT} away from an integer"))
    if not np.abs(nearest).max() <= packing.largest_component:
        raise CryptoError(_not_a_sum("a slot exceeds what the contributors can have sent"))
    return nearest.astype(np.int64)


def _not_a_sum(reason: str) -> str:
    return (
        f"the decrypted sum was refused: {reason}. It was encrypted under another key, or a "
        "contributor sent what no honest site sends; the attempt must fail"
    )


def _check(vector: Float32, sizes: Sequence[int], weight: float) -> None:
    if vector.dtype != np.float32 or vector.shape != (sum(sizes),) or not vector.size:
        raise CryptoError(
            f"expected {sum(sizes)} float32 values, at least one, "
            f"got {vector.dtype} of shape {vector.shape}"
        )
    if not 0.0 < weight <= 1.0:
        raise CryptoError(f"a contributor's weight lies in (0, 1], got {weight}")
    check_finite(vector)


def check_finite(update: Float32) -> None:
    """Raises CryptoError unless every value of an update is a number."""
    if not np.isfinite(update).all():
        raise CryptoError(
            "the update holds NaN or infinity: training diverged; lower the learning rate"
        )


def _stripes(group: slice) -> Iterator[slice]:
    """A group in pieces: their doubles fit a cache, and no copy of the vector is made."""
    for start in range(group.start, group.stop, _STRIPE):
        yield slice(start, min(start + _STRIPE, group.stop))


def _groups(sizes: Sequence[int]) -> Iterator[slice]:
    start = 0
    for size in sizes:
        yield slice(start, start + size)
        start += size
