"""What a site declines, whatever others plan."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from config.settings import load
from crypto.privacy import LARGEST_MULTIPLIER, least_multiplier
from peers import privacy
from peers.policy import Policy
from proto import federation_pb2 as pb


def a_plan(multiplier: float | None = 4.0, **noise: float) -> pb.TrainingPlan:
    """A plan with every protection on; ``multiplier`` None: without noise."""
    plan = pb.TrainingPlan(
        local_epochs=1,
        bits=16,
        min_participants=4,
        max_num_examples=1000,
        mode=pb.CKKS,
        robust=pb.ROBUST_NORM,
        byzantine_sites=2,
    )
    if multiplier is not None:
        fields = {
            "clip_norm": 0.5,
            "noise_multiplier": multiplier,
            "noise_floor": multiplier,
            "noise_decay": 0.9,
            "loss_threshold": 1.0,
            "first_round": 7,
            "colluders": 2,
            **noise,
        }
        for name, value in fields.items():
            setattr(plan.privacy, name, value)
    return plan


# ---- what a site declines --------------------------------------------------------------


def test_a_site_that_requires_noise_declines_a_plan_without_it() -> None:
    bare = a_plan(None)
    for policy in (Policy(2, 10, privacy_required=True), Policy(2, 10, least_noise=0.001)):
        assert "no differential privacy, this site requires it" in policy.objection(bare)
        assert policy.objection(a_plan(1.0)) == ""
    assert Policy(2, 10).objection(bare) == ""


def test_a_site_declines_noise_that_covers_too_little_or_drowns_everything() -> None:
    policy = Policy(2, 10, colluders=2, max_noise=50.0)
    assert "holds against 1 sites" in policy.objection(a_plan(1.0, colluders=1))
    assert "above 50" in policy.objection(a_plan(51.0))
    assert policy.objection(a_plan(50.0)) == ""


def test_a_site_declines_less_noise_than_its_least_now_or_later() -> None:
    """The floor counts: a coordinator may name any multiplier from there on for its round."""
    policy = Policy(2, 10, least_noise=2.0)
    assert "multiplier 1.9 is below 2 (privacy.least_noise)" in policy.objection(a_plan(1.9))
    falling = a_plan(8.0, noise_floor=0.5)
    assert "may fall to a multiplier of 0.5, below 2" in policy.objection(falling)
    assert policy.objection(a_plan(8.0, noise_floor=2.0)) == ""
    assert policy.objection(a_plan(2.0)) == ""


MULTIPLIERS = st.floats(0.001, LARGEST_MULTIPLIER)


@given(least=MULTIPLIERS, multiplier=MULTIPLIERS, floor=MULTIPLIERS)
def test_no_round_of_an_accepted_plan_has_less_than_the_least_noise(
    least: float, multiplier: float, floor: float
) -> None:
    plan = a_plan(multiplier, noise_floor=min(floor, multiplier))
    accepted = not Policy(2, 10, least_noise=least).objection(plan)
    assert accepted == (min(floor, multiplier) >= least)


# ---- one round of multiplier 0.001 is epsilon = 506,184 ----------------------------------

HIDES_NOTHING = a_plan(0.001)


def declined(settings: str, folder: Path) -> str:
    """Why a site with these settings declines, in its first round, noise that hides nothing."""
    path = folder / "fedd.toml"
    path.write_text(f"[privacy]\n{settings}", encoding="utf-8")
    chosen = load(path).privacy
    policy = Policy(2, 10, privacy_required=True, least_noise=chosen.least_noise or 0.0)
    least = 0.0
    if chosen.epsilon is not None:
        least = least_multiplier((), chosen.epsilon, chosen.delta)
    plan = pb.Plan(training=HIDES_NOTHING, noise_multiplier=0.001, clip_norm=0.5)
    return policy.objection(HIDES_NOTHING) or privacy.objection(plan, least)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ("required = true\nepsilon = 8.0", "exceed this site's privacy budget"),
        ("required = true\nleast_noise = 1.0", "privacy.least_noise"),
        ("required = true\nepsilon = 8.0\nleast_noise = 1.0", "privacy.least_noise"),
        ("required = true\nepsilon = 500000", "exceed this site's privacy budget"),
        ("epsilon = 8.0", "exceed this site's privacy budget"),
        ("least_noise = 0.0011", "privacy.least_noise"),
    ],
)
def test_a_site_that_requires_privacy_declines_noise_that_hides_nothing(
    tmp_path: Path, settings: str, told: str
) -> None:
    """A requirement alone, which would accept it, is no setting: tests/test_settings.py."""
    assert told in declined(settings, tmp_path)
    # A site that says nothing of privacy takes the noise for what it is: a favour.
    assert declined("", tmp_path) == ""


@given(epsilon=st.floats(0.001, 500_000), delta=st.floats(1e-12, 0.01))
def test_whatever_the_budget_below_half_a_million_noise_that_hides_nothing_exceeds_it(
    epsilon: float, delta: float
) -> None:
    assert least_multiplier((), epsilon, delta) > 0.001
