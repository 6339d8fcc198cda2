"""Differential privacy: clipping, noise, what the accountant says, and what others claimed."""

from __future__ import annotations

import math
import os
import random
import subprocess
import sys
from decimal import Context, Decimal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crypto import privacy
from crypto.arrays import Float32
from crypto.privacy import (
    LARGEST_MULTIPLIER,
    LOSS_CLIP,
    TAIL_DEVIATIONS,
    Mechanism,
    NoiseTerms,
    _table,
    clipped_integers,
    discrete_gaussian,
    epsilon_of,
    least_multiplier,
    loss_of_sum,
    next_clip_norm,
    scheduled_multiplier,
)
from crypto.quantize import CryptoError

DELTA = 1e-5
# Statistical tests below fail by chance once in 2e-7 runs at most: 5.2 deviations, two-sided.
SURE = 5.2
TERMS = NoiseTerms(clip_norm=0.7, multiplier=1.3, sharers=2)


def update(seed: int, norm: float, values: int = 20_000) -> Float32:
    vector = np.random.default_rng(seed).normal(size=values)
    return (vector * (norm / np.linalg.norm(vector))).astype(np.float32)


# ---- accounting: three independent computations -----------------------------------------


def gaussian_delta(mu: float, epsilon: float) -> float:
    """delta(epsilon) of a Gaussian mechanism of sensitivity / deviation mu, in closed form.

    Balle and Wang, ICML 2018, Theorem 8. n rounds of multipliers z_i are one of
    mu = sqrt(sum 1 / z_i^2) (Dong, Roth, Su 2019, Corollary 3.3).
    """

    def tail(x: float) -> float:
        return 0.5 * math.erfc(-x / math.sqrt(2.0))

    first = tail(mu / 2 - epsilon / mu)
    second = tail(-mu / 2 - epsilon / mu)
    return first - (math.exp(epsilon + math.log(second)) if second > 0 else 0.0)


def exact_epsilon(multipliers: list[float], delta: float) -> float:
    """What continuous Gaussian noise spends, exactly: by halving."""
    mu = math.sqrt(sum(z**-2 for z in multipliers))
    low, high = 0.0, 700.0
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if gaussian_delta(mu, middle) > delta else (low, middle)
    return high


def renyi_epsilon(multipliers: list[float], delta: float) -> float:
    """From the Renyi divergences alpha / 2 sum z^-2, by a search over alpha of our own.

    Canonne, Kamath, Steinke 2020, Proposition 12: the conversion that holds for the
    discrete Gaussian that is really sent.
    """
    rho = sum(z**-2 for z in multipliers) / 2

    def bound(log_order: float) -> float:
        order = 1.0 + math.exp(log_order)
        return (
            rho * order + math.log1p(-1 / order) - (math.log(delta) + math.log(order)) / (order - 1)
        )

    low, high = math.log(1e-3), math.log(1e6)
    for _ in range(200):  # golden section: the bound has one minimum
        a, b = low + 0.381966 * (high - low), high - 0.381966 * (high - low)
        low, high = (low, b) if bound(a) < bound(b) else (a, high)
    return bound(low)


SCHEDULES = {
    "10 rounds of 1": [1.0] * 10,
    "100 rounds of 8": [8.0] * 100,
    "one of 0.5": [0.5],
    "one of 20": [20.0],
    "falling": [5.0 * 0.95**t for t in range(30)],
    "1000 rounds of 30": [30.0] * 1000,
}


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.slow
def test_epsilon_of_a_fixed_schedule_is_what_another_computation_says(name: str) -> None:
    multipliers = SCHEDULES[name]
    ours = epsilon_of(multipliers, DELTA)
    renyi = renyi_epsilon(multipliers, DELTA)
    exact = exact_epsilon(multipliers, DELTA)
    print(f"{name}: accountant {ours:.4f}, by hand {renyi:.4f}, continuous and exact {exact:.4f}")
    assert ours == pytest.approx(renyi, rel=0.01)
    # Never below the truth. What the conversion from Renyi divergences costs is bounded, too.
    assert exact <= ours <= 1.2 * exact


def test_the_closed_form_here_is_the_textbook_one() -> None:
    """Its own check: published values of the analytic Gaussian mechanism at mu = 1."""
    assert gaussian_delta(1.0, 0.0) == pytest.approx(0.3829, abs=1e-4)
    assert gaussian_delta(1.0, 1.0) == pytest.approx(0.1269, abs=1e-4)


@pytest.mark.parametrize(
    ("multiplier", "one", "ten"),
    [(1.0, 4.7, 19), (2.0, 2.2, 8.1), (4.0, 1.0, 3.6), (0.1, 96, 649)],
)
def test_what_the_settings_say_a_least_noise_costs(
    multiplier: float, one: float, ten: float
) -> None:
    """config/fedd.example.toml, at the default delta, with these digits."""
    assert epsilon_of([multiplier], DELTA) == pytest.approx(one, rel=0.02)
    assert epsilon_of([multiplier] * 10, DELTA) == pytest.approx(ten, rel=0.02)


def test_one_round_of_the_least_noise_of_any_plan_is_half_a_million() -> None:
    """Why noise that is required needs a measure: config/settings.py names this number."""
    assert epsilon_of([0.001], DELTA) == pytest.approx(506_184, abs=1)
    assert epsilon_of([0.001], DELTA) == pytest.approx(renyi_epsilon([0.001], DELTA), rel=0.01)


def test_what_the_accountant_says_of_the_literatures_claim(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """FedSearch-NLP, Table X: epsilon = 1.00 at sigma 0.1 falling to 0.01, delta 1e-5.

    The most favourable reading: 25 rounds of Eq. 2 with the sigmoid at its upper
    end (more noise than they can have had), each sigma the whole noise of the sum.
    """
    terms = {"base": 0.1, "floor": 0.01, "decay": 0.95, "threshold": 1.0}
    sigmas = [scheduled_multiplier(**terms, step=t, last_loss=math.nan) for t in range(25)]
    first, last, whole = (epsilon_of(some, DELTA) for some in ([0.1], [0.01], sigmas))
    needed = least_multiplier((), 1.0, DELTA, rounds=25)
    with capsys.disabled():
        print(
            f"\n  FedSearch-NLP claims epsilon = 1.00 at delta 1e-5 for sigma 0.1 -> 0.01."
            f"\n  dp-accounting: one round costs {first:,.0f} at sigma 0.1, {last:,.0f} at 0.01,"
            f"\n  25 rounds of Eq. 2 (sigma {sigmas[0]:.3f} -> {sigmas[-1]:.3f}) {whole:,.0f}."
            f"\n  25 rounds within epsilon = 1 need sigma = {needed:.1f} in each."
        )
    assert sigmas[0] == pytest.approx(0.1)
    assert first == pytest.approx(renyi_epsilon([0.1], DELTA), rel=0.01)
    assert first > 90
    assert last > 5000
    assert whole > 1500
    assert epsilon_of([needed] * 25, DELTA) <= 1.0 < epsilon_of([needed * 0.99] * 25, DELTA)


def test_nothing_spent_is_nothing() -> None:
    assert epsilon_of([], DELTA) == 0.0


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(
    spent=st.lists(st.floats(0.5, 50), max_size=4),
    more=st.floats(0.05, 5.0),
    rounds=st.integers(1, 50),
)
def test_the_least_noise_is_just_enough(spent: list[float], more: float, rounds: int) -> None:
    budget = epsilon_of(spent, DELTA) + more
    least = least_multiplier(spent, budget, DELTA, rounds=rounds)
    assert epsilon_of([*spent, *([least] * rounds)], DELTA) <= budget
    assert epsilon_of([*spent, *([least * 0.999] * rounds)], DELTA) > budget


def test_a_budget_that_is_spent_allows_no_noise_whatever() -> None:
    spent = [1.0] * 10
    assert least_multiplier(spent, epsilon_of(spent, DELTA) * 0.9, DELTA) == math.inf
    assert least_multiplier([], 1e6, DELTA) < 0.01
    assert least_multiplier([LARGEST_MULTIPLIER] * 3, 1.0, DELTA) < 10


# ---- clipping -----------------------------------------------------------------------------


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(
    norm=st.sampled_from([0.0, 1e-6, 0.3, 0.65, 0.7, 0.71, 5.0, 1e12]),
    weight=st.sampled_from([1.0, 0.4, 1e-3]),
    loss=st.sampled_from([0.0, 0.3, LOSS_CLIP, 64.0]),
    multiplier=st.sampled_from([0.02, 1.3, 40.0]),
    counted=st.booleans(),
    spiked=st.booleans(),
    seed=st.integers(0, 50),
)
def test_the_integers_are_within_the_bound_exactly(
    norm: float,
    weight: float,
    loss: float,
    multiplier: float,
    counted: bool,
    spiked: bool,
    seed: int,
) -> None:
    """Whatever the update is: sensitivity is a bound on integers, not a hope about floats."""
    mechanism = Mechanism.of(NoiseTerms(0.7, multiplier, 2, counted), 16)
    vector = update(seed, norm, values=3000)
    if spiked:  # all of the norm in one value: the worst for a grid that is fine enough for noise
        vector = np.zeros(3000, dtype=np.float32)
        vector[seed] = -norm
    integers = clipped_integers(vector, loss, weight, 16, mechanism)
    assert sum(int(i) ** 2 for i in integers) <= mechanism.clip_units**2
    limit = 2**15 - 1
    assert mechanism.clip_units * 2.0**mechanism.exponent / limit <= 0.7
    assert mechanism.clip_units + mechanism.tail <= limit
    assert np.abs(integers).max() + mechanism.tail <= limit


def test_an_update_within_the_bound_arrives_whole_and_a_larger_one_clipped() -> None:
    mechanism = Mechanism.of(TERMS, 16)
    unit = 2.0**mechanism.exponent / (2**15 - 1)
    small, large = update(1, 0.5), update(1, 50.0)
    sent = clipped_integers(small, 0.4, 1.0, 16, mechanism)[:-2] * unit
    assert np.abs(sent - small).max() <= unit
    cut = clipped_integers(large, 0.4, 1.0, 16, mechanism)[:-2] * unit
    cosine = cut @ large / (np.linalg.norm(cut) * np.linalg.norm(large))
    assert cosine > 0.99
    assert 0.9 * 0.7 < np.linalg.norm(cut) <= 0.7


def test_the_loss_counts_towards_the_bound_and_comes_back() -> None:
    mechanism = Mechanism.of(TERMS, 16)
    for loss, weight in ((2.0, 1.0), (2.0, 0.25), (100.0, 1.0)):
        units = int(clipped_integers(update(1, 9.0), loss, weight, 16, mechanism)[-2])
        assert loss_of_sum(units, weight, mechanism) == pytest.approx(min(loss, LOSS_CLIP), abs=0.1)
    assert loss_of_sum(-(10**6), 1.0, mechanism) == 0.0
    assert loss_of_sum(10**6, 1.0, mechanism) == LOSS_CLIP


def test_an_update_that_is_not_finite_is_refused() -> None:
    vector = update(1, 1.0)
    vector[7] = np.nan
    with pytest.raises(CryptoError, match="NaN or infinity"):
        clipped_integers(vector, 0.0, 1.0, 16, Mechanism.of(TERMS, 16))


def test_the_grid_depends_on_the_plan_alone_and_is_refused_if_too_coarse() -> None:
    assert Mechanism.of(TERMS, 16) == Mechanism.of(NoiseTerms(0.7, 1.3, 2), 16)
    for terms, bits in (
        (NoiseTerms(1.0, 0.001, 200), 16),  # a share of less than four units
        (NoiseTerms(1.0, 0.05, 2), 8),
        (NoiseTerms(1.0, 1000.0, 2), 16),  # nothing is left to the update
        (NoiseTerms(0.0, 1.0, 2), 16),
        (NoiseTerms(1.0, 1.0, 0), 16),
        (NoiseTerms(1e300, 1.0, 2), 16),
    ):
        with pytest.raises(CryptoError):
            Mechanism.of(terms, bits)


def test_the_clip_norm_moves_towards_the_quantile() -> None:
    mechanism = Mechanism.of(NoiseTerms(0.7, 1.3, 2, counted=True), 16)
    inside = clipped_integers(update(1, 0.3), 0.1, 1.0, 16, mechanism)[-1]
    outside = clipped_integers(update(1, 3.0), 0.1, 1.0, 16, mechanism)[-1]
    assert inside == -outside == mechanism.count_units
    assert next_clip_norm(0.7, 0.5, int(4 * inside), 4, mechanism) < 0.7
    assert next_clip_norm(0.7, 0.5, int(4 * outside), 4, mechanism) > 0.7
    assert next_clip_norm(0.7, 0.5, int(inside + outside), 2, mechanism) == pytest.approx(0.7)


@pytest.mark.slow
def test_a_clip_norm_that_follows_a_quantile_gets_there_through_the_noise() -> None:
    """Ten sites whose norms are 1 .. 10: from 0.1 towards their median."""
    norm = 0.1
    for _ in range(60):
        mechanism = Mechanism.of(NoiseTerms(norm, 0.5, 10, counted=True), 16)
        vectors = [update(n, float(n), values=50) for n in range(1, 11)]
        total = sum(int(clipped_integers(v, 0.0, 1.0, 16, mechanism)[-1]) for v in vectors)
        noise = discrete_gaussian(10, mechanism.deviation, mechanism.tail)
        norm = next_clip_norm(norm, 0.5, total + int(noise.sum()), 10, mechanism)
    assert 3.0 < norm < 10.0


def test_what_all_sites_compute_is_rounded_as_it_must_be() -> None:
    """The C library's exp and pow are a bit off now and then, and elsewhere for other numbers."""
    chance, exactly = random.Random(1), Context(prec=80)
    for _ in range(3000):
        exponent, decay, step = (
            chance.uniform(-0.2, 0.2),
            chance.uniform(0.5, 1),
            chance.randint(0, 300),
        )
        assert privacy._exp(exponent) == float(exactly.exp(Decimal(exponent)))
        scheduled = scheduled_multiplier(
            base=2.0, floor=0.0, decay=decay, threshold=0.0, step=step, last_loss=0.0
        )
        assert scheduled == float(exactly.power(Decimal(decay), step))


# ---- noise ---------------------------------------------------------------------------------


def test_noise_has_the_distribution_that_is_accounted_for() -> None:
    """Chi-squared against the discrete Gaussian, and its variance."""
    deviation, count = 6.0, 400_000
    noise = discrete_gaussian(count, deviation, 60, os.urandom)
    support = np.arange(-60, 61)
    weights = np.exp(-(support**2) / (2 * deviation**2))
    expected = count * weights / weights.sum()
    found = np.bincount(noise + 60, minlength=121)
    common = expected > 20
    statistic = float(((found - expected)[common] ** 2 / expected[common]).sum())
    freedom = int(common.sum())
    assert abs(statistic - freedom) < SURE * math.sqrt(2 * freedom) + 10
    assert abs(noise.var() / deviation**2 - 1) < SURE * math.sqrt(2 / count)
    assert abs(noise.mean()) < SURE * deviation / math.sqrt(count)


def test_the_table_is_exact_where_64_bits_are_not_enough() -> None:
    """Thresholds against a computation of our own, and the draw at both sides of one."""
    deviation, tail = 4.0, 48
    upper, thresholds = _table(deviation, tail)
    weights = [math.exp(-(k**2) / (2 * deviation**2)) for k in range(-tail, tail + 1)]
    for k in (-5, -1, 0, 3):
        share = math.fsum(weights[: k + tail + 1]) / math.fsum(weights)
        assert thresholds[k + tail] / 2**128 == pytest.approx(share, rel=1e-12)
    assert thresholds == sorted(thresholds)
    assert len(thresholds) == 2 * tail == len(upper)
    middle = thresholds[tail]  # between 0 and 1
    for offset, expected in ((-1, 0), (0, 1), (1, 1)):
        whole = middle + offset
        parts = iter([(whole >> 64).to_bytes(8, "little"), (whole % 2**64).to_bytes(8, "little")])
        assert discrete_gaussian(1, deviation, tail, lambda _, p=parts: next(p))[0] == expected  # type: ignore[misc]


def test_noise_is_cut_off_where_it_is_said_to_be() -> None:
    mechanism = Mechanism.of(TERMS, 16)
    assert mechanism.tail >= TAIL_DEVIATIONS * mechanism.deviation
    lowest, highest = bytes(8), b"\xff" * 8
    assert discrete_gaussian(1, 5.0, 60, lambda n: lowest[:n])[0] == -60
    assert discrete_gaussian(1, 5.0, 60, lambda n: highest[:n])[0] == 60


def test_noise_comes_from_the_kernel_and_is_never_drawn_twice() -> None:
    mechanism = Mechanism.of(TERMS, 16)
    draws = [discrete_gaussian(1000, mechanism.deviation, mechanism.tail) for _ in range(2)]
    assert (draws[0] != draws[1]).any()
    asked: list[int] = []

    def counted(count: int) -> bytes:
        asked.append(count)
        return os.urandom(count)

    discrete_gaussian(1000, mechanism.deviation, mechanism.tail, counted)
    assert sum(asked) >= 8000  # 64 bits a value: no generator is stretched in between


# ---- schedules -------------------------------------------------------------------------------


def test_the_adaptive_schedule_is_equation_2() -> None:
    for step, loss in ((0, 3.0), (4, 1.0), (10, 0.2)):
        printed = max(0.01, 0.1 * 1 / (1 + math.exp(-(loss - 1.0))) * 0.95**step)
        ours = scheduled_multiplier(
            base=0.1, floor=0.01, decay=0.95, threshold=1.0, step=step, last_loss=loss
        )
        assert ours == pytest.approx(printed)
    terms = {"base": 2.0, "floor": 2.0, "decay": 0.5, "threshold": 0.0}
    assert {scheduled_multiplier(**terms, step=t, last_loss=0.0) for t in range(9)} == {2.0}


@pytest.mark.slow
def test_the_accountant_is_loaded_only_to_account() -> None:
    """Sites without differential privacy do not carry its 100 MiB."""
    program = (
        "import sys, daemon.jobs.sums.ckks, daemon.state.privacy_ledger, peers.plans.policy;"
        "heavy = {'dp_accounting', 'scipy'};"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules);"
        "daemon.state.privacy_ledger.epsilon_of([1.0], 1e-5);"
        "assert heavy <= set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
