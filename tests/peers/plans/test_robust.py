"""Robust rules: what they keep, what they say, and when they refuse to be used."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from peers.plans import robust as rules
from peers.plans.robust import (
    RULE_NAMES,
    krum_scores,
    objection,
    select,
    unweighted,
    warning,
)
from proto.bounds import sites_needed

RULES = (*RULE_NAMES.values(),)
Vectors = NDArray[np.float64]


def test_every_rule_of_the_wire_has_its_judge() -> None:
    assert {"none", *rules._JUDGES} == {*RULES}


# The rules that need every value in the clear: no round uses them.


def coordinate_median(vectors: Vectors) -> Vectors:
    """The median of each coordinate (Yin et al. 2018); ``vectors`` [n, d], result [d]."""
    median: Vectors = np.median(_checked(vectors, 1), axis=0)
    return median


def trimmed_mean(vectors: Vectors, f: int) -> Vectors:
    """The mean of each coordinate without its f greatest and f least values (Yin et al. 2018).

    ``vectors`` [n, d], result [d]. Raises ValueError unless n > 2f.
    """
    ordered = np.sort(_checked(vectors, 2 * f + 1), axis=0)
    mean: Vectors = ordered[f : len(ordered) - f].mean(axis=0)
    return mean


def _checked(vectors: Vectors, least: int) -> Vectors:
    if vectors.ndim != 2 or len(vectors) < least or not np.isfinite(vectors).all():
        raise ValueError(
            f"expected at least {least} finite vectors of one length, got shape {vectors.shape}"
        )
    return vectors


def gram(vectors: Vectors) -> list[list[float]]:
    product: list[list[float]] = (vectors @ vectors.T).tolist()
    return product


def names(count: int) -> list[str]:
    return [f"site-{number:02}" for number in range(count)]


def column(*values: float) -> Vectors:
    return np.array(values, dtype=np.float64)[:, None]


# ---- by hand --------------------------------------------------------------------------


def test_the_norm_filter_by_hand() -> None:
    # norms 1, 1.5, 2, 2.5, 9: median 2, deviations 1, .5, 0, .5, 7, MAD .5; the limit is 4.59.
    chosen = select("norm", 1, names(5), gram(column(1, -1.5, 2, -2.5, 9)))
    assert chosen.kept == tuple(names(4))
    assert chosen.rejected == {"site-04": "norm 9 is 14 MADs above the median 2"}


def test_the_norm_filter_begins_at_a_modified_z_score_of_three_and_a_half() -> None:
    inside, outside = 2 + 0.5 * 5.18, 2 + 0.5 * 5.20
    for last, kept in ((inside, 5), (outside, 4)):
        assert len(select("norm", 1, names(5), gram(column(1, 1.5, 2, 2.5, last))).kept) == kept


def test_sites_that_agree_closely_do_not_lose_one_that_differs_a_little() -> None:
    close = column(1.0, 1.001, 1.002, 1.003, 1.4)  # 200 bare MADs above the median
    assert len(select("norm", 1, names(5), gram(close)).kept) == 5
    assert len(select("norm", 1, names(5), gram(column(1.0, 1.0, 1.0, 1.0, 1.6))).kept) == 4


def test_two_and_a_half_sigma_by_hand() -> None:
    # Nine norms of 1 and one of 11: mean 2, sample deviation sqrt(10) = 3.16, z = 2.846.
    chosen = select("norm_sigma", 1, names(10), gram(column(*[1] * 9, 11)))
    assert chosen.rejected == {"site-09": "norm 11 is 2.85 standard deviations above the mean 2"}


@pytest.mark.parametrize(("sites", "fires"), [(3, False), (5, False), (8, False), (9, True)])
def test_two_and_a_half_sigma_can_only_fire_from_nine_sites_on(sites: int, fires: bool) -> None:
    """However large the attacker is; and the warning says so, with the number."""
    chosen = select("norm_sigma", 1, names(sites), gram(column(*[1] * (sites - 1), 1e9)))
    assert (len(chosen.rejected) == 1) == fires
    said = warning("norm_sigma", sites)
    assert bool(said) == (not fires)
    if said:
        assert f"{(sites - 1) / math.sqrt(sites):.2f} standard deviations" in said
    assert warning("norm", sites) == ""


def test_krum_by_hand() -> None:
    # On a line at 0, 1, 2, 3, 50 with f = 1: two nearest each.
    # 0: 1+4, 1: 1+1, 2: 1+1, 3: 1+4, 50: 47^2 + 48^2.
    line = gram(column(0, 1, 2, 3, 50))
    assert krum_scores(line, 1) == [5, 2, 2, 5, 47**2 + 48**2]
    chosen = select("krum", 1, names(5), line)
    assert chosen.kept == ("site-01",)  # equal scores: by name
    assert chosen.rejected["site-04"] == (
        "its squared distances to its 2 nearest updates add up to 4.51e+03, "
        "those of the worst update kept to 2"
    )


def test_multi_krum_by_hand() -> None:
    line = gram(column(0, 1, 2, 3, 50))
    assert select("multi_krum", 1, names(5), line).kept == ("site-01", "site-02")  # n - f - 2
    assert select("multi_krum", 1, names(5), line, least=4).kept == tuple(names(4))
    assert select("krum", 1, names(5), line, least=3).kept == ("site-00", "site-01", "site-02")


def test_median_and_trimmed_mean_by_hand() -> None:
    values = np.array([[1.0, -9.0], [2.0, 0.0], [4.0, 1.0], [90.0, 2.0], [3.0, 70.0]])
    assert coordinate_median(values).tolist() == [3.0, 1.0]
    assert trimmed_mean(values, 1).tolist() == [3.0, 1.0]
    assert trimmed_mean(values, 2).tolist() == [3.0, 1.0]
    assert trimmed_mean(values, 0).tolist() == values.mean(axis=0).tolist()


# ---- preconditions ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "f", "needed"),
    [
        ("norm", 0, 3), ("norm", 1, 3), ("norm", 2, 5), ("norm_sigma", 3, 7),
        ("krum", 0, 3), ("krum", 1, 5), ("krum", 2, 7), ("multi_krum", 3, 9),
    ],
)  # fmt: skip
def test_each_rule_says_how_many_sites_it_needs(rule: str, f: int, needed: int) -> None:
    assert objection("none", f, 1, 1, encrypted=False) == ""
    assert objection(rule, f, needed, 1, encrypted=False) == ""
    assert objection(rule, f, needed - 1, 1, encrypted=False) == (
        f"{rule} against f = {f} sites needs at least {needed} participants, not {needed - 1}"
    )


def test_a_rule_refuses_to_be_used_beyond_its_precondition() -> None:
    with pytest.raises(ValueError, match="needs at least 5 participants"):
        select("krum", 1, names(4), gram(column(1, 2, 3, 4)))
    with pytest.raises(ValueError, match="at least 5 finite vectors"):
        trimmed_mean(np.ones((4, 2)), 2)
    with pytest.raises(ValueError, match="finite"):
        coordinate_median(np.full((3, 2), np.nan))


def test_a_rule_that_would_leave_too_few_to_hide_one_another_is_refused() -> None:
    assert "min_participants" in objection("norm", 1, 3, 3, encrypted=False)
    assert "needs at least 4 participants" in objection("norm", 1, 3, 2)  # 2f + 1 must answer
    assert objection("norm", 1, 4, 3) == ""


# ---- properties -----------------------------------------------------------------------------


def drawn(seed: int, honest: int, bad: int) -> tuple[Vectors, set[int]]:
    """Honest updates around a common direction, and attackers among them at drawn places."""
    chance = np.random.default_rng(seed)
    common = chance.normal(size=40)
    rows = common + 0.6 * chance.normal(size=(honest + bad, 40))
    places = set(chance.permutation(honest + bad)[:bad].tolist())
    kind = chance.integers(4)
    poison = chance.normal(size=40) * 20
    for place in places:
        rows[place] = [rows[place] * 30, -10 * rows[place], poison, chance.normal(size=40) * 15][
            kind
        ]
    return rows, places


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    f=st.integers(0, 3),
    spare=st.integers(0, 4),
    rule=st.sampled_from(["norm", "krum", "multi_krum"]),
)
def test_under_the_bound_on_f_only_honest_sites_are_kept(
    seed: int, f: int, spare: int, rule: str
) -> None:
    count = sites_needed(rule, f, encrypted=False) + spare
    vectors, bad = drawn(seed, count - f, f)
    sites = names(count)
    chosen = select(rule, f, sites, gram(vectors))
    assert {sites[place] for place in bad} <= chosen.rejected.keys()
    assert chosen.kept
    assert set(chosen.kept) | chosen.rejected.keys() == set(sites)
    if rule == "norm" and f == 0:
        assert chosen.kept == tuple(sites)


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 2**32), count=st.integers(5, 11), rule=st.sampled_from(RULES))
def test_the_order_of_sites_does_not_matter(seed: int, count: int, rule: str) -> None:
    chance = np.random.default_rng(seed)
    vectors = chance.normal(size=(count, 6)) * chance.choice([1, 1, 1, 40], size=(count, 1))
    order = chance.permutation(count)
    sites = names(count)
    products = np.array(gram(vectors))
    straight = select(rule, 1, sites, products.tolist())
    mixed = select(rule, 1, [sites[place] for place in order], products[order][:, order].tolist())
    assert mixed == straight


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 2**32), f=st.integers(0, 3), spare=st.integers(0, 3))
def test_median_and_trimmed_mean_stay_among_the_honest(seed: int, f: int, spare: int) -> None:
    count = 2 * f + 1 + spare
    vectors, bad = drawn(seed, count - f, f)
    honest = np.delete(vectors, sorted(bad), axis=0)
    order = np.random.default_rng(seed).permutation(count)
    for robust in (coordinate_median, lambda rows: trimmed_mean(rows, f)):
        found = robust(vectors)
        assert (found >= honest.min(axis=0) - 1e-12).all()
        assert (found <= honest.max(axis=0) + 1e-12).all()
        np.testing.assert_allclose(robust(vectors[order]), found, rtol=1e-12)


def test_weights_make_nobody_an_outlier() -> None:
    chance = np.random.default_rng(4)
    vectors = chance.normal(size=(6, 50))
    weights = [1.0, 0.9, 0.05, 0.8, 0.02, 1.0]
    weighted = gram(vectors * np.array(weights)[:, None])
    np.testing.assert_allclose(unweighted(weighted, weights), gram(vectors), rtol=1e-9)


# ---- what can be no Gram matrix ---------------------------------------------------------------


def test_numbers_that_no_real_update_has_are_rejected_under_every_rule() -> None:
    honest = np.array(gram(np.random.default_rng(1).normal(size=(7, 30))))
    for rule in RULES:
        for wrong, said in ((-5.0, "squared norm of -5"), (math.nan, "nan"), (math.inf, "inf")):
            products = honest.copy()
            products[2, 2] = wrong
            chosen = select(rule, 1, names(7), products.tolist(), precision=0.01)
            assert said in chosen.rejected["site-02"]
        chosen = select(rule, 1, names(7), honest.tolist(), imaginary={"site-04"})
        assert "imaginary" in chosen.rejected["site-04"]


def test_who_is_small_alone_and_large_beside_others_is_rejected() -> None:
    """Wrapped around or imaginary, a norm can be made to look small; products betray it."""
    products = np.array(gram(np.random.default_rng(1).normal(size=(5, 30))))
    products[3, :] = products[:, 3] = 1e6
    products[3, 3] = 30.0
    chosen = select("none", 0, names(5), products.tolist())
    assert list(chosen.rejected) == ["site-03"]
    assert "its products with site-00, site-01, site-02, site-04" in chosen.rejected["site-03"]


def test_an_error_within_the_precision_rejects_nobody() -> None:
    twins = np.array(gram(np.ones((4, 9))))
    twins[0, 1] = twins[1, 0] = 9.3
    assert len(select("none", 0, names(4), twins.tolist(), precision=0.5).kept) == 4
    assert len(select("none", 0, names(4), twins.tolist(), precision=0.01).kept) == 2


def test_norms_within_the_precision_of_one_another_are_equal() -> None:
    """Updates of zeros: what is left is the noise of their dot products."""
    noise = np.diag([0.9, -0.8, 0.0, -0.3, -0.1]).tolist()
    for rule in ("norm", "norm_sigma"):
        assert len(select(rule, 1, names(5), noise, precision=1.0).kept) == 5


def test_who_is_impossible_counts_towards_f() -> None:
    """Seven sites, f = 2: one is impossible, so krum looks for one more among six."""
    vectors = np.random.default_rng(1).normal(size=(7, 30)) * 0.1 + 1
    vectors[6] *= -10
    chosen = select("multi_krum", 2, names(7), gram(vectors), imaginary={"site-00"})
    assert {"site-00", "site-06"} <= chosen.rejected.keys()
    assert len(chosen.kept) == 6 - 1 - 2


def test_the_names_are_those_of_the_design() -> None:
    assert RULES == ("none", "norm", "norm_sigma", "krum", "multi_krum")
