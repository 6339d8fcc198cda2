"""Poisoned updates in a real training on seven institutions' questions, with a rule and without.

Small enough for `make attacks`; `make bench-poisoning` has more of each site, and all
rules (docs/results/poisoning.md).
"""

from __future__ import annotations

import pytest

from tests.benchmarks.attacks import poisoning

pytestmark = [
    pytest.mark.attacks,
    pytest.mark.slow,
    pytest.mark.endurance,  # minutes: not in `make test`
    pytest.mark.timeout(1200),
    pytest.mark.skipif(
        not poisoning.DATA.is_dir(), reason=f"no data at {poisoning.DATA} (set HANSE_DATA)"
    ),
]

NAMES = (
    *("nobody attacks", "sign flip", "times 30", "times -30"),
    *("Gaussian, 100 x the norm", "label flip", "collusion inside the norm"),
)


def test_two_of_seven_institutions_poison_the_model() -> None:
    """What stands out in size is kept out by ``norm``; what does not, by ``multi_krum``.

    Not shown to hurt: a sign flip and flipped labels, at ordinary size, cost two of
    seven sites' worth of learning. The table says so.
    """
    size = poisoning.Size(train=40, test=40, others=150)
    rows = poisoning.run(4, NAMES, ("none", "norm", "multi_krum"), size)
    print(poisoning.table(rows))
    mrr = {(row["attack"], row["rule"]): row["mrr_at_10"] for row in rows}
    out = {(row["attack"], row["rule"]): row["rejected"] for row in rows}
    peace, both = mrr["nobody attacks", "none"], sorted(poisoning.ATTACKERS)
    assert out["nobody attacks", "norm"] == [[]] * 4
    for attack in ("times 30", "times -30", "Gaussian, 100 x the norm"):
        assert out[attack, "norm"] == [both] * 4
        assert mrr[attack, "norm"] > peace - 0.03
    for attack in ("times 30", "times -30"):
        assert mrr[attack, "none"] < rows[0]["before"] - 0.1  # worse than before any training
    for attack in NAMES[1:]:
        assert all(set(both) <= set(names) for names in out[attack, "multi_krum"])
    inside = "collusion inside the norm"
    assert out[inside, "norm"] == [[]] * 4
    assert mrr[inside, "none"] < mrr[inside, "multi_krum"]
