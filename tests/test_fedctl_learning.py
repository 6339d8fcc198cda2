"""fedctl learning, and what fedctl train passes on of recipes and axes."""

from __future__ import annotations

from daemon.fedctl.output import Exit
from tests.canned_daemon import CannedDaemon
from tests.command_line import Fedctl


def test_learning_tells_choices_and_the_tier_with_its_reason(
    fedctl: Fedctl, daemon: CannedDaemon
) -> None:
    said = fedctl("learning")
    assert (said.code, said.err) == (0, "")
    for fact in (
        "recipe          pfedrag",
        "last run        none yet",
        "exchanged       1,182,336 values a round",
        "personal layer  none until this site has trained for a round",
        "dropout         0.3  (the recipe says 0.1)",
    ):
        assert fact in said.out
    assert fedctl("learning", "--json").object["adaptation_index"] is None

    daemon.learning.tier, daemon.learning.decision = "advanced", "upgrade"
    daemon.learning.adaptation_index, daemon.learning.reason = 0.25, "stable for 3 rounds"
    daemon.learning.plan.learning.recipe = "hanse"
    shown = fedctl("learning").out
    assert "advanced (upgrade, adaptation index 0.2500)" in shown
    assert "stable for 3 rounds" in shown
    assert "last run        hanse" in shown


def test_train_asks_for_the_recipe_and_the_choices_that_were_typed(
    fedctl: Fedctl, daemon: CannedDaemon
) -> None:
    words = ("--recipe", "pfedrag", "--set", "dropout=0.2", "--set", "batches=topic")
    assert fedctl("train", "--rounds", 2, "--detach", *words).code == Exit.OK
    asked = daemon.asked[-1]
    assert (asked.recipe, list(asked.choices)) == ("pfedrag", ["dropout=0.2", "batches=topic"])
    refused = fedctl("train", "--attach", *words)
    assert refused.code == Exit.USAGE
    assert "only a new run takes those options" in refused.err
