"""Canaries and how far they are exposed, whatever the losses are."""

from __future__ import annotations

import math
import random
from statistics import fmean, pstdev

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from daemon.memorisation.canaries import (
    DIGITS,
    canaries,
    chance_error,
    exposure,
    exposure_by_chance,
    is_written,
)

LOSSES = st.lists(st.floats(0, 100), min_size=1, max_size=60)


@given(st.floats(0, 100), LOSSES)
def test_exposure_is_between_nothing_and_all_bits(own: float, others: list[float]) -> None:
    assert 0 <= exposure(own, others) <= math.log2(len(others) + 1)


@given(LOSSES, st.floats(0, 100), st.floats(0, 100))
def test_exposure_falls_with_the_loss(others: list[float], one: float, two: float) -> None:
    assert exposure(min(one, two), others) >= exposure(max(one, two), others)


@given(st.integers(1, 300))
def test_chance_is_the_mean_over_all_ranks_and_scatters_as_they_do(others: int) -> None:
    losses = [float(rank) for rank in range(1, others + 1)]
    ranked = [exposure(rank + 0.5, losses) for rank in range(others + 1)]
    assert exposure_by_chance(others) == pytest.approx(fmean(ranked))
    assert chance_error(others, 4) == pytest.approx(pstdev(ranked) / 2)


def test_secrets_are_all_unlike_and_drawn_anew_for_each() -> None:
    made = canaries(5, 99, np.random.default_rng(0))
    for one in made:
        assert len({one.secret, *one.others}) == 100
        assert len(one.secret.split()) == DIGITS
    assert len({one.secret for one in made}) == 5


@given(st.floats(), st.lists(st.floats(), min_size=1, max_size=60), st.randoms())
def test_exposure_is_the_same_in_any_order_and_of_any_losses(
    own: float, others: list[float], chance: random.Random
) -> None:
    bits = exposure(own, others)
    assert 0 <= bits <= math.log2(len(others) + 1)
    chance.shuffle(others)
    assert exposure(own, others) == bits


def test_a_model_that_says_the_same_of_all_secrets_exposes_none() -> None:
    assert exposure(1.0, [1.0] * 255) == 0
    assert exposure(math.nan, [1.0] * 255) == 0, "nor does one that says nothing"


@pytest.mark.parametrize("text", ["1 2 3 4", "It is 1 2 3 4.", "1234", "a1 2\n3 4 [1]"])
def test_a_secret_is_written_however_it_is_spaced(text: str) -> None:
    assert is_written("1 2 3 4", text)
    assert not is_written("1 2 3 5", text)
