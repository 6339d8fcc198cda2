"""Differential privacy of a site's update: clipping, noise on the integer grid, accounting.

The unit is a site: all that it contributed, in every round, against zeros in its place.

    clip      the weighted update and the loss beside it, together, to an L2 norm of C
    round     to the integers that are sent; their norm is what is bounded, in integers
    add       each site a share of discrete Gaussian noise, before anything is encrypted
    account   Renyi divergences of the noise multipliers really used, composed

The sum carries noise of deviation z * C at least, whoever drops out: each of the K
contributors adds variance (z * C)^2 / (n - t), where n is the fewest whose updates may
be added (`min_participants`) and t how many of them may pool what they know, their own
noise included. The sum of discrete Gaussians is no discrete Gaussian, but differs from
one by a factor of e^(5 sum_k exp(-2 pi^2 sigma^2 k / (k + 1))) at most (Kairouz, Liu,
Steinke, "The Distributed Discrete Gaussian Mechanism", ICML 2021, Theorem 1 and
Proposition 13): nothing, from sigma = 4 units on, which `Mechanism.of` requires. A
discrete Gaussian has the Renyi divergences of the continuous one at most (Canonne,
Kamath, Steinke, "The Discrete Gaussian", NeurIPS 2020, Proposition 5). So what an
accountant says of Gaussian noise holds for what is sent, rounding included.

No clock, no disk; randomness is an argument, by default the kernel's. `dp_accounting`
lives here and is loaded only where something is accounted for.
"""

from __future__ import annotations

import bisect
import math
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Context, Decimal, localcontext
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from crypto.arrays import Float32, Float64, Int64
from crypto.quantize import (
    FRACTION_INTEGERS,
    MAX_EXPONENT,
    MIN_EXPONENT,
    CryptoError,
    check_finite,
)

if TYPE_CHECKING:
    from dp_accounting.rdp import RdpAccountant

Draw = Callable[[int], bytes]  # so many bytes that nobody can predict: os.urandom

# Noise is cut off here. What lies beyond has probability 3.6e-33 a value, and goes into
# delta, e^epsilon fold: 1/1000 of delta is set aside, enough at 1e-5 and epsilon = 10 for
# 1e20 values.
TAIL_DEVIATIONS = 12
_SPARE_DELTA = 1e-3
# Below this many units the sum of shares is not near enough to a discrete Gaussian.
LEAST_DEVIATION_UNITS = 4.0
LEAST_CLIP_UNITS = 16  # of the clipped norm: with fewer, nothing of an update is left
# The loss takes this share of C, leaving sqrt(1 - 1/16) = 97 % to the update. A larger
# loss than the bound counts as the bound: InfoNCE at tau = 0.05 starts below 5.
LOSS_SHARE = 0.25
LOSS_CLIP = 8.0
COUNT_SHARE = 0.25  # likewise, where the clip norm follows a quantile
_CLIP_STEP = 0.2  # eta_C of Andrew et al. 2021, section 3.1

LARGEST_MULTIPLIER = 1000.0

_EXACT = Context(prec=40)


@dataclass(frozen=True)
class NoiseTerms:
    """What a round's plan says of its noise.

    ``clip_norm``: C, the L2 norm that a weighted contribution is clipped to.
    ``multiplier``: z; the sum's noise has a deviation of z * C.
    ``sharers``: the fewest contributors whose noise is unknown to whoever looks,
    min_participants - colluders. ``counted``: whether "my update was within C" goes
    along, for a clip norm that follows a quantile.
    """

    clip_norm: float
    multiplier: float
    sharers: int
    counted: bool = False


@dataclass(frozen=True)
class Mechanism:
    """Clipping and noise in integer units; follows from terms and bits, at every site alike.

    A unit is 2^``exponent`` / (2^(bits-1) - 1), as in `crypto.quantize`.
    ``clip_units``: the norm of the integers before noise, at most.
    ``deviation``: of this site's noise on each integer. ``tail``: its largest |value|.
    """

    exponent: int
    clip_units: int
    deviation: float
    tail: int
    counted: bool = False

    @classmethod
    def of(cls, terms: NoiseTerms, bits: int) -> Mechanism:
        """The finest grid on which clipped value and noise fit: it depends on no data.

        Raises CryptoError when noise would be too coarse or beyond the grid.
        """
        limit = (1 << (bits - 1)) - 1
        if not (terms.clip_norm > 0 and terms.multiplier > 0 and terms.sharers >= 1):
            raise CryptoError(f"no noise can be made of {terms}")
        share = terms.multiplier / math.sqrt(terms.sharers)
        _, exponent = math.frexp(terms.clip_norm * (1.0 + TAIL_DEVIATIONS * share))
        if not MIN_EXPONENT <= exponent <= MAX_EXPONENT:
            raise CryptoError(f"a clip norm of {terms.clip_norm} is beyond the grid")
        clip_units = math.floor(math.ldexp(terms.clip_norm * limit, -exponent))
        deviation = share * clip_units
        tail = min(math.ceil(TAIL_DEVIATIONS * deviation), limit - clip_units)
        if clip_units < LEAST_CLIP_UNITS:
            raise CryptoError(
                f"a noise multiplier of {terms.multiplier:g}, shared by {terms.sharers}, leaves "
                f"{clip_units} units of the grid to the update, {LEAST_CLIP_UNITS} are needed: "
                "choose less noise, or more participants"
            )
        if deviation < LEAST_DEVIATION_UNITS:
            raise CryptoError(
                f"noise of {deviation:.2f} units on a grid of {bits} bits is too coarse to account "
                f"for, {LEAST_DEVIATION_UNITS:g} are needed: use 16 bits, or another multiplier"
            )
        return cls(exponent, clip_units, deviation, tail, terms.counted)

    @property
    def loss_units(self) -> int:
        """Units that stand for a weighted loss of LOSS_CLIP."""
        return math.floor(LOSS_SHARE * self.clip_units)

    @property
    def count_units(self) -> int:
        """Units, plus or minus, that stand for an update within the clip norm, or beyond it."""
        return math.floor(COUNT_SHARE * self.clip_units) if self.counted else 0

    @property
    def update_units(self) -> float:
        """The norm that is left to the update beside loss and count."""
        return math.sqrt(self.clip_units**2 - self.loss_units**2 - self.count_units**2)


# ---- clipping ---------------------------------------------------------------------


def clipped_integers(
    delta: Float32,
    loss: float,
    weight: float,
    bits: int,
    mechanism: Mechanism,
    draw: Draw = os.urandom,
) -> Int64:
    """The weighted update, the loss and the count, as integers of norm ``clip_units`` at most.

    The update is rounded up or down by chance. What rounding adds to its norm is
    taken off again, so the bound holds for the integers themselves; where the
    grid is so coarse that this does not settle, everything is rounded towards zero.
    Raises CryptoError when the update is not finite.
    """
    check_finite(delta)
    limit = (1 << (bits - 1)) - 1
    units = delta * np.float64(math.ldexp(weight * limit, -mechanism.exponent))
    within = float(np.linalg.norm(units)) <= mechanism.update_units
    # Behind the update: the loss, and the count (0 where nothing is counted).
    integers = np.empty(delta.size + FRACTION_INTEGERS, dtype=np.int64)
    integers[:-2] = _rounded_within(units, mechanism.update_units, draw)
    share = min(max(loss, 0.0), LOSS_CLIP) / LOSS_CLIP * weight
    integers[-2] = math.floor(share * mechanism.loss_units)
    integers[-1] = mechanism.count_units if within else -mechanism.count_units
    return integers


def loss_of_sum(units: int, total_weight: float, mechanism: Mechanism) -> float:
    """The weighted mean loss that the sum's last integer stands for, noise and all.

    Held within 0 .. LOSS_CLIP, where every honest mean lies.
    """
    mean = units / mechanism.loss_units * LOSS_CLIP / total_weight
    return min(max(mean, 0.0), LOSS_CLIP)


def next_clip_norm(
    clip_norm: float, quantile: float, units: int, contributors: int, mechanism: Mechanism
) -> float:
    """A clip norm nearer to the ``quantile`` of the contributors' norms.

    C * exp(-0.2 * (share within C - quantile)), the share being noised like all else:
    Andrew et al., "Differentially Private Learning with Adaptive Clipping", NeurIPS
    2021, Algorithm 1. ``units``: the sum's last integer.
    """
    share = (units / (mechanism.count_units * contributors) + 1.0) / 2.0
    adapted = clip_norm * _exp(-_CLIP_STEP * (min(max(share, 0.0), 1.0) - quantile))
    return min(max(adapted, 1e-9), 1e9)


def _rounded_within(units: Float64, bound: float, draw: Draw) -> Int64:
    norm = float(np.linalg.norm(units))
    scaled = units * min(1.0, bound / norm) if norm > 0 else units
    chance = np.random.Generator(np.random.SFC64(int.from_bytes(draw(32), "little")))
    for _ in range(3):
        integers = np.floor(scaled + chance.random(scaled.shape)).astype(np.int64)
        square = int(integers @ integers)
        if square <= bound * bound:
            return integers
        scaled = scaled * (0.999 * bound / math.sqrt(square))
    return np.trunc(scaled).astype(np.int64)


# ---- noise ------------------------------------------------------------------------


def discrete_gaussian(count: int, deviation: float, tail: int, draw: Draw = os.urandom) -> Int64:
    """``count`` integers, each k in -tail .. tail with probability ~ exp(-k^2 / 2 deviation^2).

    By inversion of a table of cumulative probabilities of 128 bits, as lattice
    cryptography does (Peikert, "An Efficient and Parallel Gaussian Sampler for
    Lattices", CRYPTO 2010): integers only, so that no rounding of floats shows
    (Mironov, CCS 2012), and within 2^-110 of the distribution. ``draw`` gives the bytes.
    """
    upper, thresholds = _table(deviation, tail)
    first = np.frombuffer(draw(8 * count), dtype="<u8")
    places = np.searchsorted(upper, first, side="right")
    # Where the first 64 bits are those of a threshold, 64 more decide.
    below = upper[np.maximum(places - 1, 0)]
    for index in np.flatnonzero(below == first):
        whole = int(first[index]) << 64 | int.from_bytes(draw(8), "little")
        places[index] = bisect.bisect_right(thresholds, whole)
    noise: Int64 = places.astype(np.int64) - tail
    return noise


@lru_cache(maxsize=4)
def _table(deviation: float, tail: int) -> tuple[NDArray[np.uint64], list[int]]:
    """Cumulative probabilities of -tail .. tail-1 in units of 2^-128; their upper halves first."""
    one = 1 << 256
    with localcontext() as context:
        context.prec = 100
        double_variance = 2 * Decimal(deviation) ** 2
        ratio = int((-1 / double_variance).exp() * one)  # of weights k = 1 and k = 0
        step = int((-2 / double_variance).exp() * one)  # and how that ratio shrinks
    weights = [one]
    for _ in range(tail):
        weights.append(weights[-1] * ratio >> 256)
        ratio = ratio * step >> 256
    total = 2 * sum(weights) - one
    thresholds, running = [], 0
    for k in range(-tail, tail):
        running += weights[abs(k)]
        thresholds.append((running << 128) // total)
    upper = np.array([threshold >> 64 for threshold in thresholds], dtype=np.uint64)
    return upper, thresholds


# ---- schedules --------------------------------------------------------------------


def scheduled_multiplier(
    *, base: float, floor: float, decay: float, threshold: float, step: int, last_loss: float
) -> float:
    """max(floor, base * sigmoid(last_loss - threshold) * decay^step): FedSearch-NLP Eq. 2.

    ``step`` counts a run's rounds from 0. ``last_loss`` is the noised mean of the
    round before; NaN (unknown) counts as large, which gives more noise, not less.
    With ``floor`` = ``base`` the schedule is static.
    """
    distance = 50.0 if math.isnan(last_loss) else min(max(last_loss - threshold, -50.0), 50.0)
    return max(floor, base / (1.0 + _exp(-distance)) * float(_EXACT.power(Decimal(decay), step)))


def _exp(exponent: float) -> float:
    """e^x, from 40 digits rounded once: every site must find the same bits.

    The C library's may differ in the last one from machine to machine, by its version
    and by what instructions the processor has.
    """
    return float(_EXACT.exp(Decimal(exponent)))


# ---- accounting -------------------------------------------------------------------


def epsilon_of(multipliers: Sequence[float], delta: float) -> float:
    """Epsilon at ``delta`` of all these rounds together, by dp-accounting's RDP accountant.

    The noise multiplier of each round in which the site's update left it.
    """
    if not multipliers:
        return 0.0
    accountant = _accountant()
    _compose(accountant, multipliers)
    return float(accountant.get_epsilon(delta * (1.0 - _SPARE_DELTA)))


def least_multiplier(
    spent: Sequence[float], epsilon: float, delta: float, *, rounds: int = 1
) -> float:
    """The least noise with which ``rounds`` more stay within ``epsilon``; infinity: none does.

    Found by halving, to a millionth and on the safe side; never beyond LARGEST_MULTIPLIER.
    """

    def fits(multiplier: float) -> bool:
        return epsilon_of([*spent, *([multiplier] * rounds)], delta) <= epsilon

    if not fits(LARGEST_MULTIPLIER):
        return math.inf
    low, high = 0.0, LARGEST_MULTIPLIER
    while high - low > 1e-6 * high:
        middle = math.sqrt(max(low, 1e-4) * high)
        if middle <= low or middle >= high:
            break
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high


def gaussian_deviation(epsilon: float, delta: float) -> float:
    """Deviation of the analytic Gaussian mechanism at sensitivity 1, by dp-accounting.

    For what is released once; rounds are composed by `epsilon_of`. Raises CryptoError.
    """
    if not (0.0 < epsilon < math.inf and 0.0 < delta < 1.0):
        raise CryptoError(f"no noise gives epsilon {epsilon} at delta {delta}")
    from dp_accounting import get_sigma_gaussian

    return float(get_sigma_gaussian(epsilon, delta))


def _accountant() -> RdpAccountant:
    """Orders dense enough for any epsilon from 0.001 to 100,000: the best one is within 1e-4."""
    from dp_accounting import NeighboringRelation
    from dp_accounting.rdp import RdpAccountant

    orders = 1.0 + np.geomspace(0.0101, 1e5, 600)
    return RdpAccountant(list(orders), NeighboringRelation.REPLACE_SPECIAL)


def _compose(accountant: RdpAccountant, multipliers: Sequence[float]) -> None:
    from dp_accounting import GaussianDpEvent

    for multiplier, count in Counter(multipliers).items():
        accountant.compose(GaussianDpEvent(multiplier), count)
