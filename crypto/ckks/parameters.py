"""CKKS parameters under which packed integer sums are exact, and why they are.

Pure arithmetic: the choice follows from the number of contributors and the bits
of their integers alone, so every site makes the same one and nothing about
parameters needs to be believed when a peer says it.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass

from crypto.quantize import RESIDUAL_LIMIT, CryptoError, Packing

DEGREE = 8192
SLOTS = DEGREE // 2
WORD = 8
SEED_BYTES = 64
BITS = (8, 12, 16)
MAX_CONTRIBUTORS = 256

# HomomorphicEncryption.org standard, ternary secret, classical attacks: largest
# log2 of the product of all primes at N = 8192 for 128-bit security.
MAX_MODULUS_BITS = 218

# Chains of primes, cheapest first. Ciphertexts live under the first prime in
# both; a second one only takes the noise out of public-key encryption.
_CHAINS: tuple[tuple[int, ...], ...] = ((60,), (60, 60))

# Where dot products are wanted, too: see `choose_measurable`. A prime of fewer bits
# would cost the same bytes (words are sent whole), and SEAL would compress its words.
_MEASURABLE_CHAIN = (60, 60, 60)
MEASURABLE_SCALE_BITS = 48  # the scale's bits and the integers' together

# Dot products are right to this much, in units of (the largest integer)^2.
PRODUCT_PRECISION = 2.0**-9


@dataclass(frozen=True)
class CkksParameters:
    """What two sites must agree on before they add ciphertexts.

    ``primes`` are bit sizes, ``scale_bits`` the log2 of the CKKS scale.
    """

    packing: Packing
    primes: tuple[int, ...]
    scale_bits: int

    @property
    def degree(self) -> int:
        """Ring dimension N."""
        return DEGREE

    @property
    def identity(self) -> bytes:
        """8 bytes that name these parameters in every context and file."""
        parts = (
            *("hanse-ckks-v1", self.degree, self.primes, self.scale_bits),
            *(self.packing.bits, self.packing.contributors, self.packing.digits),
            *(("real",) if self.packing.components == 1 else ()),
        )
        return hashlib.sha256(repr(parts).encode()).digest()[:8]

    @property
    def levels(self) -> int:
        """Primes that a ciphertext lives under: of several the last is the encryption's own."""
        return max(1, len(self.primes) - 1)

    @property
    def polynomial(self) -> int:
        """Bytes of one polynomial of a ciphertext: N words under each of its primes."""
        return self.levels * self.degree * WORD

    @property
    def full_block(self) -> int:
        """Bytes of a block: two polynomials. No block is longer."""
        return 2 * self.polynomial

    @property
    def seeded_block(self) -> int:
        """Bytes of a block under the secret key: one polynomial, and the seed of the other.

        The second polynomial of a fresh secret-key ciphertext is public
        randomness, so sending the seed that it was expanded from loses nothing.
        """
        return self.polynomial + SEED_BYTES

    @property
    def noise_margin(self) -> float:
        """How many times the modelled noise bound fits below the residual limit."""
        bound = _noise_bound(self.packing, self.primes) / 2.0**self.scale_bits
        return RESIDUAL_LIMIT / (bound + _float_error(self.packing))


def choose_parameters(contributors: int, bits: int) -> CkksParameters:
    """Parameters under which sums of ``contributors`` ``bits``-bit integers are exact.

    The most integers a slot, then the cheapest chain of primes, then the
    largest scale, such that

    - the packed sum at its extreme, times the scale, stays below half the
      prime: no wrap-around, whatever the values;
    - the noise of one public-key encryption (the coordinator's) and K - 1
      secret-key ones stays below 0.4 of a unit with a failure probability of
      2^-64 a component (rounding itself fails only at 0.5);
    - log2 q <= 218, the 128-bit limit at N = 8192.

    Raises CryptoError with the remedy when there are none.
    """
    _check(contributors, bits)
    for digits in range(53 // bits, 0, -1):
        packing = Packing(bits, contributors, digits, SLOTS)
        for primes in _CHAINS:
            scale_bits = _largest_scale(packing, primes)
            parameters = CkksParameters(packing, primes, scale_bits)
            if scale_bits > 0 and parameters.noise_margin >= 1 and sum(primes) <= MAX_MODULUS_BITS:
                return parameters
    raise CryptoError(
        f"no parameters give exact sums of {contributors} integers of {bits} bits: "
        "lower bits, or have fewer contributors"
    )


def choose_measurable(contributors: int, bits: int) -> CkksParameters:
    """Parameters under which sums are exact and dot products of updates can be had.

    For rounds with a robust rule (docs/decisions/0013). One integer a slot, in
    its real part: the dot product of packed digits is not that of the integers,
    and without Galois keys an imaginary part counts negative. Ciphertexts live
    under two primes of 60 bits, so that a product, at twice the scale's bits,
    has room; the third takes the noise out of public-key encryption. Fewer bits
    an integer get a larger scale, so products are equally precise for all.

    Raises CryptoError as `choose_parameters`.
    """
    _check(contributors, bits)
    packing = Packing(bits, contributors, 1, SLOTS, components=1)
    return CkksParameters(packing, _MEASURABLE_CHAIN, MEASURABLE_SCALE_BITS - bits)


def parameters_of(contributors: int, bits: int, *, measurable: bool) -> CkksParameters:
    """The parameters of a round: with dot products (a robust rule), or without."""
    return (choose_measurable if measurable else choose_parameters)(contributors, bits)


def _check(contributors: int, bits: int) -> None:
    if bits not in BITS:
        raise CryptoError(f"bits = {bits}: the fixed-point integers have 8, 12 or 16 bits")
    if not 2 <= contributors <= MAX_CONTRIBUTORS:
        raise CryptoError(
            f"contributors = {contributors}: a sum hides its parts from 2 contributors on, and "
            f"{MAX_CONTRIBUTORS} is the most that a federation has; change the participants"
        )


def _largest_scale(packing: Packing, primes: tuple[int, ...]) -> int:
    """log2 of the largest scale at which an extreme sum does not wrap around.

    A coefficient of the encoded polynomial is at most the largest |slot|, which
    is sqrt(2) times the largest component; it must stay below half the prime
    (SEAL's primes are just below 2^60; 1/16 is kept for that and the noise).
    """
    half_prime = 2.0 ** (primes[0] - 1) * (1 - 1 / 16)
    return min(30, math.floor(math.log2(half_prime / (math.sqrt(2) * packing.largest_component))))


def _noise_bound(packing: Packing, primes: tuple[int, ...]) -> float:
    """Bound on a component's noise (before division by the scale), exceeded with p <= 2^-64.

    SEAL's error e is a centred binomial of variance 10.5, secret s and
    encryption randomness u are uniformly ternary, so |s|^2 = 2N/3. A
    polynomial with coefficient variance v has components of variance N v / 2.

    - secret key: e and the encoder's rounding; Gaussian tails.
    - public key, one prime: e u + e0 + e1 s. Evaluated at a root, a product of two
      polynomials is a product of two complex Gaussians, whose components are
      Laplace distributed: P(|x| > t) = exp(-sqrt(2) t / sigma), a much heavier tail.
    - public key, two primes: that is divided by the second prime; the rounding
      of the division stays: r0 + r1 s with variance 1/12 each; Laplace again.
    """
    error, secret, rounding = 10.5, 2 * DEGREE / 3, 1 / 12
    tail = 64 * math.log(2)
    laplace, gaussian = tail / math.sqrt(2), math.sqrt(2 * tail)
    one_prime = error * (2 * secret + 1) + rounding
    public = one_prime if len(primes) == 1 else rounding * (secret + 2)
    to_component = math.sqrt(DEGREE / 2)
    others = (packing.contributors - 1) * (error + rounding)
    return to_component * (laplace * math.sqrt(public) + gaussian * math.sqrt(others))


def _float_error(packing: Packing) -> float:
    """Bound on what double precision loses in the encoder's and decoder's transforms.

    Relative to the largest slot: 2^-53 a butterfly, log2 N layers, both ways,
    added in the worst case.
    """
    return packing.largest_component * 2.0**-53 * 2 * math.log2(DEGREE)
