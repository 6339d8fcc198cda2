"""fedctl learning, and what fedctl train passes on of recipes and axes."""

from __future__ import annotations

from daemon.fedctl.output import Exit
from tests.canned_daemon import DIGEST, CannedDaemon
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


def test_learning_tells_what_is_this_sites_own(fedctl: Fedctl, daemon: CannedDaemon) -> None:
    personal = daemon.learning.choices[0]
    personal.value = "mixture"
    assert "nothing yet for the version that answers" in fedctl("learning").out
    daemon.learning.personal_digest, daemon.learning.own_share = DIGEST, 0.5
    assert "50% of what this site learned alone, for version" in fedctl("learning").out
    assert "found anew" not in fedctl("learning").out
    daemon.learning.carried = True
    assert "found for an earlier version; found anew when" in fedctl("learning").out
    daemon.learning.untrained = True
    assert "mixture the encoder as it came" in " ".join(fedctl("learning").out.split())
    personal.value = "query_encoder"
    assert "query encoder  this site's own, for version" in fedctl("learning").out
    personal.value = "none"
    assert "own" not in fedctl("learning").out.split("personal  ")[0]


def test_personalise_tells_what_came_of_it(fedctl: Fedctl, daemon: CannedDaemon) -> None:
    last = daemon.personalising[-1]
    shown = fedctl("personalise", "--local-epochs", 2)
    assert (shown.code, daemon.asked[-1].local_epochs) == (Exit.OK, 2)
    assert "this site's own encoder of questions" in shown.out
    last.own_share = 0.25
    assert "a mixture, 25% of it what this site learned alone" in fedctl("personalise").out
    last.judged_in_turn = True
    assert "20 training pairs: MRR 0.500 with the shared version, which has learned" in (
        " ".join(fedctl("personalise").out.split())
    )
    last.untrained = True
    assert "answers with   the encoder as it came" in fedctl("personalise").out
    daemon.personalising.pop()
    refused = fedctl("personalise")
    assert refused.code == Exit.UNREACHABLE
    assert "stopped telling before it was done" in refused.err
