"""With all of its rules a round has one version; without any one of them a seed has two."""

from __future__ import annotations

import pytest

from tests.models.rounds import RULES, fork, honest_attempts

# The rules left out, of how many sites, and a seed that forks then.
FORKS = {
    "a bundle's highest lock is restated": (4, 3),
    "a sum has one version": (4, 4116),
    "locks are ranked by their latest certificate": (4, 472),
    "no vote below a promise": (4, 4),
    "quorums share an honest site": (5, 1909),
    "restatements are certified, too": (4, 1035),
    "votes of one attempt count together": (4, 1274),
}


@pytest.mark.parametrize("sites", [3, 4, 5, 7])
def test_with_all_rules_no_round_forks(sites: int) -> None:
    assert [seed for seed in range(300) if fork(seed, sites, RULES)] == []


@pytest.mark.parametrize("rule", sorted(FORKS))
def test_a_round_forks_without(rule: str) -> None:
    sites, seed = FORKS[rule]
    assert fork(seed, sites, RULES) == []
    assert len(fork(seed, sites, RULES - {rule})) == 2


@pytest.mark.parametrize("sites", [4, 5])
@pytest.mark.parametrize("dead", [False, True], ids=["preempting", "dead"])
def test_attempt_by_attempt_honest_sites_get_their_turn(sites: int, dead: bool) -> None:
    """Without pacing site 0 pushes many of their attempts aside, or all wait behind it."""
    for seed in range(10):
        paced = honest_attempts(seed, sites, paced=True, dead=dead)
        unpaced = honest_attempts(seed, sites, paced=False, dead=dead)
        assert paced > 1.5 * unpaced
        assert not dead or unpaced < sites


@pytest.mark.parametrize("sites", [4, 5])
def test_a_site_whose_attempts_end_early_does_not_run_away_from_the_others(sites: int) -> None:
    """Whoever waits for nobody is never again where the others are."""
    for seed in range(10):
        near, alone = (
            honest_attempts(seed, sites, paced=True, dead=True, hasty=True, near=near)
            for near in (True, False)
        )
        assert near > 30
        assert alone < 3
