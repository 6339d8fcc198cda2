"""Weights: one site's update must not be the sum, whoever drops out."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peers.plans.weights import borne, clipped, stands_out, too_dominant
from tests.support.signed_rounds import Stage


def weights(*counts: int, f: int = 1) -> tuple[int, ...]:
    """Numbers of examples, clipped, in the order given."""
    told = {f"s{position:03}": count for position, count in enumerate(counts)}
    cut = clipped(told, f)
    return tuple(cut[site] for site in told)


@pytest.mark.parametrize(
    ("told", "f", "clipped_to"),
    [
        ((100_000, 1, 1), 1, (2, 1, 1)),
        ((100_000, 10, 10), 1, (20, 10, 10)),  # its own update would have a cosine of 1 - 2e-8
        ((100_000, 1, 1, 1), 1, (2, 1, 1, 1)),
        ((100_000, 100_000, 1, 1, 1), 1, (2, 2, 1, 1, 1)),  # one subtracts its own, one is away
        ((100_000, 100_000, 1, 1, 1), 2, (2, 2, 1, 1, 1)),
        ((30, 20, 10), 1, (20, 20, 10)),
        ((20, 10, 10), 1, (20, 10, 10)),
        ((10, 10, 10), 1, (10, 10, 10)),
        ((7, 7, 7, 7), 2, (7, 7, 7, 7)),
        ((100_000, 1), 1, (100_000, 1)),  # of two, each can subtract its own whatever it weighs
        ((100_000, 1), 0, (100_000, 1)),
        ((100_000, 10, 10), 0, (20, 10, 10)),  # where nobody lies, each looks all the same
    ],
)
def test_weights_that_would_show_one_sites_update_are_clipped(
    told: tuple[int, ...], f: int, clipped_to: tuple[int, ...]
) -> None:
    assert weights(*told, f=f) == clipped_to


numbers = st.lists(
    st.one_of(st.integers(1, 5), st.integers(1, 10**6), st.integers(1, 2**62)),
    min_size=2,
    max_size=9,
)


def shown(counts: tuple[int, ...], lookers: tuple[int, ...], victim: int) -> float:
    """The cosine of the victim's update with what ``lookers`` leave, all updates orthogonal."""
    left = [count for site, count in enumerate(counts) if site not in lookers]
    return counts[victim] / math.sqrt(math.fsum(float(count) ** 2 for count in left))


@given(counts=numbers, f=st.integers(0, 3))
def test_nobody_stands_out_for_any_f_others_of_any_number_of_sites(
    counts: list[int], f: int
) -> None:
    """Every choice of who subtracts and of who is looked for, not the rule's own worst case."""
    looking = max(1, f)
    cut = weights(*counts, f=f)
    assert all(1 <= after <= before for after, before in zip(cut, counts, strict=True))
    if len(cut) <= looking + 1:
        return  # who subtracts leaves one site, whatever the weights are
    everyone = range(len(cut))
    for lookers in itertools.combinations(everyone, looking):
        for victim in set(everyone) - set(lookers):
            assert shown(cut, lookers, victim) <= 1 / math.sqrt(1.25) + 1e-9


@given(counts=numbers, f=st.integers(0, 3))
def test_clipping_is_by_the_highest_cap_allowed_and_changes_nothing_twice(
    counts: list[int], f: int
) -> None:
    cut = weights(*counts, f=f)
    cap = max(cut)
    assert cut == tuple(min(count, cap) for count in counts), "who tells less keeps it"
    assert weights(*cut, f=f) == cut
    if cap < max(counts):
        above = [min(count, cap + 1) for count in counts]
        assert stands_out(above, f, dropouts=borne(len(counts), f))


@given(counts=numbers, f=st.integers(0, 3))
def test_nobody_stands_out_either_when_as_many_drop_out_as_may(counts: list[int], f: int) -> None:
    """Else a site that promises and stays away fails every attempt of everybody."""
    cut = weights(*counts, f=f)
    for gone in itertools.combinations(range(len(cut)), borne(len(cut), f)):
        left = [count for site, count in enumerate(cut) if site not in gone]
        assert not stands_out(left, f)


@given(counts=numbers, f=st.integers(0, 3), more=st.integers(1, 10**6))
def test_who_tells_more_weighs_no_less_and_takes_from_nobody(
    counts: list[int], f: int, more: int
) -> None:
    before = weights(*counts, f=f)
    after = weights(counts[0] + more, *counts[1:], f=f)
    assert all(now >= then for now, then in zip(after, before, strict=True))


@given(count=st.integers(1, 10**9), sites=st.integers(2, 40), f=st.integers(0, 8))
def test_honest_equal_weights_are_untouched(count: int, sites: int, f: int) -> None:
    """As long as enough are left beside those who subtract (four of weight one have 4/3)."""
    told = (count,) * sites
    assert weights(*told, f=f) == told


def test_a_dropout_that_lays_one_site_bare_costs_the_sum() -> None:
    """Weights are clipped for all that take part; who is left is looked at again."""
    stage = Stage("abcde", faulty_sites=1)
    told = {"a": 40, "b": 20, "c": 20, "d": 2, "e": 2}
    made = stage.plan(stage.bundle([stage.promised(s, num_examples=n) for s, n in told.items()]))
    assert not too_dominant(made, "abcde")
    assert not too_dominant(made, "abc")
    assert "one site weighs so much" in too_dominant(made, "ade")
