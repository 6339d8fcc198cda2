"""What a site declines, and what no run may take from another site's unfinished one."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from config.loading import load
from crypto.privacy import LARGEST_MULTIPLIER, least_multiplier, scheduled_multiplier
from peers.plans import robust
from peers.plans.policy import Policy, noise_objection, weakening
from peers.wire.certificates import _PACKED, _later
from peers.wire.messages import TEXT_LENGTH, one_line
from proto import federation_pb2 as pb

Change = Callable[[pb.TrainingPlan], None]


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
    """The floor counts: a round's multiplier may be any from there on."""
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
    return policy.objection(HIDES_NOTHING) or noise_objection(plan, least)


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
    """A requirement alone, which would accept it, is no setting: tests/config/test_settings.py."""
    assert told in declined(settings, tmp_path)
    # A site that says nothing of privacy takes the noise for what it is: a favour.
    assert declined("", tmp_path) == ""


@pytest.mark.slow
@settings(deadline=None)  # the accountant is loaded in the first call
@given(epsilon=st.floats(0.001, 500_000), delta=st.floats(1e-12, 0.01))
def test_noise_that_hides_nothing_exceeds_any_budget_below_half_a_million(
    epsilon: float, delta: float
) -> None:
    assert least_multiplier((), epsilon, delta) > 0.001


# ---- runs that supersede others ----------------------------------------------------------


def setting(**fields: object) -> Change:
    """Set fields of the plan; of its privacy, what stands there."""

    def change(plan: pb.TrainingPlan) -> None:
        for name, value in fields.items():
            of_noise = name in pb.PrivacyPlan.DESCRIPTOR.fields_by_name
            setattr(plan.privacy if of_noise else plan, name, value)

    return change


def without_noise(plan: pb.TrainingPlan) -> None:
    plan.ClearField("privacy")


WEAKER = {
    "mode from ckks to masking": setting(mode=pb.MASKING),
    "min_participants from 4 to 3": setting(min_participants=3),
    "max_num_examples from 1000 to 1001": setting(max_num_examples=1001),
    "robust rule from norm to none": setting(robust=pb.ROBUST_NONE, byzantine_sites=0),
    "robust rule from norm to norm_sigma": setting(robust=pb.ROBUST_NORM_SIGMA),
    "byzantine_sites from 2 to 1": setting(byzantine_sites=1),
    "privacy from a noise multiplier of 4.0 to none": without_noise,
    "noise_multiplier from 4.0 to 3.9999999": setting(noise_multiplier=3.9999999),
    "noise_floor from 4.0 to 0.001": setting(noise_floor=0.001),
    "noise_decay from 0.9 to 0.8": setting(noise_decay=0.8),
    "loss_threshold from 1.0 to 1.5": setting(loss_threshold=1.5),
    "clip_norm from 0.5 to 0.6": setting(clip_norm=0.6),
    "clip_quantile from 0.0 to 0.5": setting(clip_quantile=0.5),
    "colluders from 2 to 1": setting(colluders=1),
    "first_round from 7 to 1": setting(first_round=1),
}

# What a superseding run may do: protect more, or change what protects nothing.
NO_WEAKER = {
    "nothing": setting(),
    "more noise": setting(noise_multiplier=5.0, noise_floor=4.5, noise_decay=1.0),
    "more noise for a loss": setting(loss_threshold=0.0),
    "a shorter norm": setting(clip_norm=0.1),
    "against more colluders": setting(colluders=3),
    "larger sums": setting(min_participants=5, max_num_examples=10),
    "against more liars": setting(byzantine_sites=3),
    "a later begin": setting(first_round=9),
    "an earlier begin of noise that stays": setting(noise_decay=1.0, first_round=1),
    "other training": setting(local_epochs=9, learning_rate=0.5, seed=4, batch_size=8),
}


def changed(old: pb.TrainingPlan, *changes: Change) -> pb.TrainingPlan:
    new = pb.TrainingPlan()
    new.CopyFrom(old)
    for change in changes:
        change(new)
    return new


@pytest.mark.parametrize("told", WEAKER)
def test_a_weakening_is_named_from_what_to_what(told: str) -> None:
    reason = weakening(changed(a_plan(), WEAKER[told]), a_plan())
    cause, _, what = reason.partition(": ")
    assert what == told
    assert "fedctl train --stop" in cause


@pytest.mark.parametrize("change", NO_WEAKER)
def test_a_run_may_protect_more(change: str) -> None:
    assert weakening(changed(a_plan(), NO_WEAKER[change]), a_plan()) == ""


@pytest.mark.parametrize("mode", [pb.CKKS, pb.MASKING])
def test_either_change_of_mode_is_one_to_another_trust(mode: pb.Mode.ValueType) -> None:
    other = pb.MASKING if mode == pb.CKKS else pb.CKKS
    assert "mode from" in weakening(pb.TrainingPlan(mode=other), pb.TrainingPlan(mode=mode))


def test_where_nothing_was_protected_nothing_is_weakened() -> None:
    bare = pb.TrainingPlan(min_participants=2, max_num_examples=1000)
    assert weakening(a_plan(0.001), bare) == ""
    assert "robust rule" not in weakening(bare, changed(a_plan(), setting(robust=pb.ROBUST_NONE)))


def test_a_norm_that_follows_updates_may_not_be_steered_higher() -> None:
    steered = changed(a_plan(), setting(clip_quantile=0.5))
    assert "clip_quantile from 0.5 to 0.75" in weakening(
        changed(steered, setting(clip_quantile=0.75)), steered
    )
    assert weakening(changed(steered, setting(clip_quantile=0.25)), steered) == ""
    assert weakening(a_plan(), steered) == ""


def test_everything_is_told_at_once_and_what_to_do_survives_a_cut() -> None:
    weaker = [change for told, change in WEAKER.items() if "none" not in told]
    told = one_line(weakening(changed(a_plan(), *weaker), a_plan()))
    assert len(told) == TEXT_LENGTH
    assert "fedctl train --stop" in told
    assert "mode from ckks to masking; min_participants from 4 to 3; " in told


@st.composite
def plans(draw: st.DrawFn) -> pb.TrainingPlan:
    """Any plan that a message may hold, as far as it protects something."""
    rule = draw(st.sampled_from(sorted(robust.RULE_NAMES)))
    plan = pb.TrainingPlan(
        min_participants=draw(st.integers(2, 256)),
        max_num_examples=draw(st.integers(1, 10**9)),
        mode=draw(st.sampled_from([pb.CKKS, pb.MASKING])),
        robust=rule,
        byzantine_sites=draw(st.integers(0, 64)),
    )
    if draw(st.booleans()):
        multiplier = draw(MULTIPLIERS)
        plan.privacy.CopyFrom(
            pb.PrivacyPlan(
                clip_norm=draw(st.floats(1e-9, 1e9)),
                noise_multiplier=multiplier,
                noise_floor=draw(st.floats(0.001, multiplier)),
                noise_decay=draw(st.floats(0.01, 1.0)),
                loss_threshold=draw(st.floats(0.0, 1000.0)),
                first_round=draw(st.integers(1, 1000)),
                colluders=draw(st.integers(0, plan.min_participants - 1)),
                clip_quantile=draw(st.sampled_from([0.0, 0.01, 0.5, 0.99])),
            )
        )
    return plan


@given(plan=plans())
def test_a_plan_never_weakens_itself(plan: pb.TrainingPlan) -> None:
    assert weakening(plan, plan) == ""


@given(told=st.sampled_from(sorted(WEAKER)), others=st.lists(st.sampled_from(sorted(NO_WEAKER))))
def test_a_weakening_is_found_whatever_else_changes(told: str, others: list[str]) -> None:
    """Better protection in one place makes up for nothing in another."""
    changes = [NO_WEAKER[name] for name in others]
    old = a_plan()
    # The weakening last, so that no other change undoes it; decay is what a begin depends on.
    new = changed(old, *changes, WEAKER[told])
    name = told.split(" from ")[0]
    if name == "first_round" and new.privacy.noise_decay == 1.0:
        return
    assert f"{name} from " in weakening(new, old)


@given(one=plans(), two=plans(), three=plans())
def test_what_weakens_nothing_in_two_steps_weakens_nothing_in_one(
    one: pb.TrainingPlan, two: pb.TrainingPlan, three: pb.TrainingPlan
) -> None:
    """Else a chain of runs would take away what a single one may not."""
    if not weakening(two, one) and not weakening(three, two):
        assert weakening(three, one) == ""


@given(
    old=plans(),
    noise=st.fixed_dictionaries(
        {
            "noise_multiplier": MULTIPLIERS,
            "noise_floor": MULTIPLIERS,
            "noise_decay": st.floats(0.01, 1.0),
            "loss_threshold": st.floats(0.0, 10.0),
            "first_round": st.integers(1, 100),
        }
    ),
    round_=st.integers(1, 200),
    loss=st.floats(0.0, 8.0) | st.just(math.nan),
)
def test_a_run_that_weakens_nothing_has_as_much_noise_in_every_round(
    old: pb.TrainingPlan, noise: dict[str, float], round_: int, loss: float
) -> None:
    """The fields are compared one by one; this is what for."""
    if not old.HasField("privacy"):
        return
    # No less than the old in each field, so that most examples are about something.
    raised = {
        name: max(value, getattr(old.privacy, name))
        for name, value in noise.items()
        if name != "loss_threshold"
    }
    raised["loss_threshold"] = min(noise["loss_threshold"], old.privacy.loss_threshold)
    new = changed(old, setting(**raised))
    assert weakening(new, old) == ""

    def of_round(privacy: pb.PrivacyPlan) -> float:
        return scheduled_multiplier(
            base=privacy.noise_multiplier,
            floor=privacy.noise_floor,
            decay=privacy.noise_decay,
            threshold=privacy.loss_threshold,
            step=max(0, round_ - privacy.first_round),
            last_loss=loss,
        )

    assert of_round(new.privacy) >= of_round(old.privacy) * (1 - 1e-12)


# ---- a plan's name ----


def test_a_field_that_came_later_is_in_the_digest_where_it_is_set() -> None:
    """As if the last fields of each part were not among those that are packed by hand."""
    bare = pb.TrainingPlan(local_epochs=1, learning=pb.LearningPlan(recipe="x"))
    assert _later(bare, 15, 7, 15) == b""
    plans = [copy.deepcopy(bare) for _ in range(4)]
    plans[1].learning.adam_tau = 0.5
    plans[2].learning.adam_tau = 0.25
    plans[3].privacy.clip_quantile = 0.5
    parts = [_later(plan, 15, 7, 15) for plan in plans[1:]]
    assert [len(part) for part in parts] == [512] * 3
    assert len(set(parts)) == 3
    assert not any(_later(plan, *_PACKED) for plan in plans)
