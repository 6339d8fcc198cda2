"""DATE's depth controller: every formula by hand, and the course of a site through its tiers."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from config.recipes import DepthOptions
from daemon.personal import depth
from daemon.personal.depth import CorpusStatistics, DepthState, observe

# ---- Eq. 3 and 5 -------------------------------------------------------------------


def test_equation_3() -> None:
    measured = CorpusStatistics(size=0.5, length=0.4, variety=0.6, perplexity=0.25)
    # 0.8 * 0.5 + 1.5 * (0.5 * 0.4 + 0.5 * 0.6) + 1.2 * 0.25
    assert depth.complexity_score(measured) == pytest.approx(0.4 + 0.75 + 0.3)


def test_scores_are_put_between_the_sites_lowest_and_highest() -> None:
    assert depth.normalised_score(2.0, 1.0, 5.0) == 0.25
    assert depth.normalised_score(9.0, 1.0, 5.0) == 1.0
    assert depth.normalised_score(0.0, 1.0, 5.0) == 0.0
    assert depth.normalised_score(3.0, 3.0, 3.0) == 0.0


@pytest.mark.parametrize(
    ("normalised", "tier"),
    [
        (0.0, "base"), (0.33, "base"), (0.34, "advanced"), (0.67, "advanced"), (0.68, "extended"),
        (1.0, "extended"),
    ],
)  # fmt: skip
def test_equation_5(normalised: float, tier: str) -> None:
    assert depth.initial_tier(normalised) == tier


# ---- what is measured ------------------------------------------------------------------


def test_the_type_token_ratio_does_not_fall_with_length() -> None:
    text = [f"w{number % 100}" for number in range(1000)]
    assert depth.type_token_ratio(text) == 0.1
    assert depth.type_token_ratio(text * 3) == pytest.approx(0.1)
    assert depth.type_token_ratio(text * 3 + ["odd"] * 10) == pytest.approx(0.1)
    assert depth.type_token_ratio(["a", "b", "a"]) == pytest.approx(2 / 3)


def test_perplexity_by_hand() -> None:
    # The first document is asked, the second is known: a b a, n = 3, V = 2.
    # p(b|a) = .5 * 1/1 + .4 * 1/3 + .1/3; p(c|b) = .5 * 0 + .4 * 0 + .1/3.
    first, second = 0.5 + 0.4 / 3 + 0.1 / 3, 0.1 / 3
    expected = math.exp(-(math.log(first) + math.log(second)) / 2)
    assert depth.perplexity([["a", "b", "c"], ["a", "b", "a"]]) == pytest.approx(expected)
    # c was never seen before another word: its weight goes to the single words.
    unseen = 0.9 / 3 + 0.1 / 3
    assert depth.perplexity([["c", "b"], ["a", "b", "a"]]) == pytest.approx(1 / unseen)
    assert depth.perplexity([["a", "b"]]) == 1.0
    # The sixth is asked as well, and so not known: its word would be no surprise else.
    known = [["a", "b", "a"]] * 4
    asked = [["a", "b"], *known, ["a", "c"]]
    chance = [0.5 * 4 / 4 + 0.4 * 4 / 12 + 0.1 / 3, 0.1 / 3]
    assert depth.perplexity(asked) == pytest.approx((chance[0] * chance[1]) ** -0.5)


def test_what_is_predictable_has_less_perplexity_and_a_lower_score() -> None:
    dull = ["the pump is checked in spring and the lamp in autumn"] * 40
    rich = [" ".join(f"w{(7 * i * i + 13 * j) % 997}" for j in range(11)) for i in range(40)]
    one, other = depth.measure(dull), depth.measure(rich)
    assert one.perplexity < other.perplexity
    assert one.variety < other.variety
    assert (one.size, one.length) == (other.size, other.length)
    assert depth.complexity_score(one) < depth.complexity_score(other)


def test_no_documents_have_no_complexity() -> None:
    assert depth.complexity_score(depth.measure([])) == 0.0
    assert depth.complexity_score(depth.measure(["...", ""])) == 0.0


@given(st.lists(st.text(max_size=60), max_size=12))
def test_statistics_of_any_text_lie_between_0_and_1(documents: list[str]) -> None:
    measured = depth.measure(documents)
    for value in (measured.size, measured.length, measured.variety, measured.perplexity):
        assert 0.0 <= value <= 1.0


# ---- Eq. 10, 11, 4 ------------------------------------------------------------------------


def test_equation_10() -> None:
    losses = [9.0, 5.0, 4.5, 4.0, 3.5, 3.0]  # window 2: L_{t-4} = 5, L_{t-2} = 4, L_t = 3
    assert depth.momentum(losses, 2) == (5.0 - 3.0) / (5.0 - 4.0)
    assert depth.momentum([4.0, 4.0, 4.0], 2) is None
    assert depth.momentum([4.0, 2.0, 2.0], 1) == 1.0, "nothing gained since"
    assert depth.momentum([4.0, 2.0, 4.0], 1) == 0.0, "all of it lost again"


def test_equation_10_where_it_is_not_defined_or_has_the_wrong_sign() -> None:
    assert depth.momentum([4.0, 5.0, 2.0], 1) == 2.0, "a gain, though the first window lost"
    assert depth.momentum([4.0, 4.0, 4.0], 1) == 0.0
    assert depth.momentum([4.0, 4.0, 3.0], 1) == 4.0
    assert depth.momentum([4.0, 4.0, 5.0], 1) == -4.0


def test_equation_11() -> None:
    # Gains: training (0.8 - 0.4) / (0.6 - 0.4) = 2, held out (0.55 - 0.4) / (0.5 - 0.4) = 1.5.
    found = depth.overfitting([0.4, 0.6, 0.8], [0.4, 0.5, 0.55], 1)
    assert found == pytest.approx(0.5)
    assert depth.overfitting([0.4, 0.5, 0.55], [0.4, 0.6, 0.8], 1) == 0.0
    assert depth.overfitting([0.4, 0.5, 0.6], [], 1) == 0.0, "nothing is held out"
    assert depth.overfitting([0.4, 0.5], [0.4, 0.5], 1) is None


def test_equation_4() -> None:
    assert depth.normalised_momentum(2.0) == 1.0
    assert depth.normalised_momentum(-9.0) == -1.0
    assert depth.normalised_overfitting(0.5) == 0.25
    assert depth.adaptation_index(0.5, 0.25, 0.8) == pytest.approx(0.8 * 0.5 - 0.2 * 0.25)


# ---- Eq. 12 to 17, 6 -------------------------------------------------------------------------


def test_equations_12_to_16() -> None:
    indices = [9.0, 0.2, 0.4, 0.6]
    assert depth.mean_index(indices, 3) == pytest.approx(0.4)
    sigma = depth.deviation(indices, 3)
    assert sigma == pytest.approx(math.sqrt((0.04 + 0 + 0.04) / 3))
    assert depth.half_band(0.4, sigma) == pytest.approx(0.04), "a tenth of the mean is less"
    assert depth.half_band(-0.4, 0.01) == 0.01
    assert depth.upper_threshold(0.4, 0.04) == pytest.approx(0.44)
    assert depth.lower_threshold(0.4, 0.04) == pytest.approx(0.36)


def test_equation_17() -> None:
    assert depth.count(0.5, 0.44, 0.36, (2, 0)) == (3, 0)
    assert depth.count(0.5, 0.44, 0.36, (0, 2)) == (1, 0)
    assert depth.count(0.3, 0.44, 0.36, (2, 0)) == (0, 1)
    assert depth.count(0.44, 0.44, 0.36, (2, 0)) == (0, 0), "on the threshold is within the band"


@pytest.mark.parametrize(
    ("counters", "tier", "decision", "leads_to"),
    [
        ((3, 0), "base", "upgrade", "advanced"),
        ((2, 0), "base", "none", "base"),
        ((3, 0), "extended", "none", "extended"),
        ((0, 4), "extended", "downgrade", "advanced"),
        ((0, 3), "advanced", "none", "advanced"),
        ((0, 9), "base", "none", "base"),
    ],
)
def test_equation_6(counters: tuple[int, int], tier: str, decision: str, leads_to: str) -> None:
    assert depth.decide(counters, tier, DepthOptions()) == decision
    assert depth.after(decision, tier) == leads_to


# ---- the course of a site ------------------------------------------------------------------------


QUICK = DepthOptions(window=2, stable_rounds=2, low_rounds=2, cooling_rounds=3)


def rounds(count: int, tier: str, growing: bool, cooling: int = 3) -> list[tuple[str, str]]:
    """Tier and decision a round, when each index lies above (below) those before it."""
    options = DepthOptions(
        window=2, stable_rounds=2, low_rounds=2, cooling_rounds=cooling, momentum_weight=1.0
    )
    state, seen = DepthState(tier), []
    for t in range(count):
        index = 0.01 * 1.3**t if growing else 0.9 * 0.7**t
        # Histories of 2 T_w + 1 losses: L_{t-4} = 10, L_{t-2} = 9, L_t as the index asks.
        known = replace(state, losses=(0, 10, 9.5, 9.0, 9.0), recalls=(0.5,) * 5)
        state, report = observe(known, 10.0 - 2.0 * index, 0.5, None, options)
        assert report.api == pytest.approx(index)
        seen.append((state.tier, report.decision))
    return seen


def test_rising_indices_upgrade_and_falling_ones_downgrade() -> None:
    # The first round has no window, the second and third are counted.
    assert rounds(3, "base", growing=True) == [
        ("base", "none"), ("base", "none"), ("advanced", "upgrade")
    ]  # fmt: skip
    assert rounds(3, "extended", growing=False)[-1] == ("advanced", "downgrade")


@given(st.lists(st.floats(0.01, 5.0), min_size=16, max_size=16))
def test_with_the_papers_window_nothing_changes_in_the_first_16_rounds(
    losses: list[float],
) -> None:
    """2 T_w + 1 losses, T_w indices, tau_s rounds in a row; decision 0018 builds on it."""
    state = DepthState("base")
    for loss in losses:
        state, report = observe(state, loss, 0.5, None, DepthOptions())
        assert report.decision == "none"


def test_no_change_while_it_cools() -> None:
    tiers = [tier for tier, _ in rounds(9, "base", growing=True, cooling=3)]
    assert tiers == ["base"] * 2 + ["advanced"] * 4 + ["extended"] * 3
    quick = [tier for tier, _ in rounds(6, "base", growing=True, cooling=0)]
    assert quick == ["base"] * 2 + ["advanced"] * 2 + ["extended"] * 2


@pytest.mark.slow
@given(
    losses=st.lists(st.floats(0, 50), min_size=1, max_size=40),
    held_out=st.lists(st.floats(0, 1), min_size=40, max_size=40),
    tier=st.sampled_from(depth.TIERS),
)
def test_any_course_keeps_the_rules(losses: list[float], held_out: list[float], tier: str) -> None:
    state = DepthState(tier)
    since = None
    for loss, recall in zip(losses, held_out, strict=False):
        before = state.tier
        # Through JSON, as it goes from round to round in the site's file.
        assert DepthState.from_json(json.loads(json.dumps(state.to_json()))) == state
        state, report = observe(state, loss, recall, 1 - recall, QUICK)
        assert report.tier == state.tier == depth.after(report.decision, before)
        assert report.api is None or -1.0 <= report.api <= 1.0
        assert len(state.losses) <= 2 * QUICK.window + 1
        if report.decision != "none":
            assert since is None or since >= QUICK.cooling_rounds
            since = 0
        elif since is not None:
            since += 1
