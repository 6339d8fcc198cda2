"""What the figures of docs/results/memory.md are made of."""

from __future__ import annotations

import math
from pathlib import Path
from statistics import fmean

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from daemon.jobs.pairs import triples_of
from daemon.learning.retriever.spec import RetrieverSpec
from daemon.library.store import Library
from tests.generator_bench.memory import (
    DIGITS,
    canaries,
    exposure,
    exposure_by_chance,
    planted,
)

LOSSES = st.lists(st.floats(0, 100), min_size=1, max_size=60)


@given(st.floats(0, 100), LOSSES)
def test_exposure_is_between_nothing_and_all_bits(own: float, others: list[float]) -> None:
    assert 0 <= exposure(own, others) <= math.log2(len(others) + 1)


@given(LOSSES, st.floats(0, 100), st.floats(0, 100))
def test_exposure_falls_with_the_loss(others: list[float], one: float, two: float) -> None:
    assert exposure(min(one, two), others) >= exposure(max(one, two), others)


@given(st.integers(1, 300))
def test_chance_is_the_mean_over_all_ranks(others: int) -> None:
    losses = [float(rank) for rank in range(1, others + 1)]
    ranked = fmean(exposure(rank + 0.5, losses) for rank in range(others + 1))
    assert exposure_by_chance(others) == pytest.approx(ranked)


def test_secrets_are_all_unlike_and_drawn_anew_for_each() -> None:
    made = canaries(5, 99, np.random.default_rng(0))
    for one in made:
        assert len({one.secret, *one.others}) == 100
        assert len(one.secret.split()) == DIGITS
    assert len({one.secret for one in made}) == 5


def test_canaries_are_learned_from_in_a_copy_alone(tmp_path: Path) -> None:
    secrets = canaries(3, 5, np.random.default_rng(1))
    library = tmp_path / "library.sqlite"
    with Library.open(library):
        pass
    copy = planted(library, secrets, tmp_path / "copy.sqlite")
    with Library.open(copy) as made:
        triples = triples_of(RetrieverSpec(), made)
    assert [(one.question, one.answer) for one in triples] == [
        (one.question, one.secret) for one in secrets
    ]
    assert not any(
        one.secret in passage for one in secrets for t in triples for passage in t.passages
    )
    with Library.open(library, read_only=True) as before:
        assert not before.passages()
