"""fedctl learning and privacy, and what fedctl train passes on of recipes, axes and noise."""

from __future__ import annotations

import math
from typing import Any

import pytest

from daemon.fedctl.terminal.output import Exit
from proto import control_pb2 as control
from proto import federation_pb2 as pb
from tests.support.canned_daemon import CannedDaemon
from tests.support.command_line import Fedctl


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

    del daemon.learning.facts[:]
    daemon.learning.facts.add(
        name="personal layer", value="advanced (upgrade, adaptation index 0.2500)"
    )
    daemon.learning.facts.add(value="stable \x1b[31mfor 3 rounds")
    daemon.learning.plan.learning.recipe = "hanse"
    shown = fedctl("learning").out
    assert "advanced (upgrade, adaptation index 0.2500)" in shown
    assert "stable \N{REPLACEMENT CHARACTER}[31mfor 3 rounds" in shown
    assert "last run        hanse" in shown


def test_a_generators_versions_are_shown_by_round(fedctl: Fedctl, daemon: CannedDaemon) -> None:
    said = fedctl("learning", "--model", "generator")
    assert (said.code, said.err) == (0, "")
    assert [one.model for one in daemon.asked[-2:]] == ["generator"] * 2
    rows = [" ".join(line.split()) for line in said.out.splitlines()]
    assert "recipe pfedrag" in rows
    table = rows[rows.index("round version perplexity triples rouge-l-f") + 1 :]
    assert [row for row in table if row[:1].isdigit()] == [
        "0 base model 244.69 16 0.550",
        f"2 {daemon.generator_curve.answering_digest.hex()[:12]} 9.49 16 0.225 answers here",
    ]
    assert "Perplexities are over tokens of right answers: 1,234 in the newest row." in rows
    assert "Pruned before they were judged: 1, of round 1." in rows
    assert "don't compare" not in said.out
    plain = fedctl("learning", "--model", "generator", "--json").object
    assert [one["round"] for one in plain["curve"]["points"]] == [0] * 4 + [2] * 4
    assert plain["curve"]["unjudged"][0]["pruned"] is True
    assert "curve" not in fedctl("learning", "--json").object

    curve = daemon.generator_curve
    curve.missing = "it has not been judged yet: it is, in the background"
    curve.unjudged.add(round=3, model_digest=b"\x03" * 32)
    for point in curve.points[4:]:
        point.questions += 1
    shown = " ".join(fedctl("learning", "--model", "generator").out.split())
    assert "3 030303030303 not judged yet" in shown
    assert "Rows of different triples don't compare" in shown
    assert "The newest version: it has not been judged yet" in shown
    # Until a version does better here the base model answers.
    curve.answering_digest = curve.points[0].model_digest
    shown = " ".join(fedctl("learning", "--model", "generator").out.split())
    assert "0 base model 244.69 16 0.550 answers here" in shown


def test_without_any_judged_version_it_is_said_what_is_lacking(
    fedctl: Fedctl, daemon: CannedDaemon
) -> None:
    del daemon.generator_curve.points[:]
    daemon.generator_curve.missing = "to judge it takes 10 validation questions: ingest some"
    said = fedctl("learning", "--model", "generator")
    assert (said.code, said.out) == (1, "")
    assert "no version of the generator is judged here: to judge it takes 10" in said.err
    assert fedctl("learning", "--model", "reader").code == Exit.USAGE


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


def test_learning_prints_whatever_the_layer_tells(fedctl: Fedctl, daemon: CannedDaemon) -> None:
    del daemon.learning.facts[:]
    assert "layer" not in fedctl("learning").out
    daemon.learning.facts.add(name="a layer of tomorrow", value="half of it")
    daemon.learning.facts.add(value="[bold]found anew when the run is over")
    shown = fedctl("learning").out
    assert "a layer of tomorrow  half of it" in shown
    assert "[bold]found anew when the run is over" in shown


@pytest.mark.slow
def test_personalise_tells_what_came_of_it(fedctl: Fedctl, daemon: CannedDaemon) -> None:
    last = daemon.personalising[-1]
    shown = fedctl("personalise", "--local-epochs", 2)
    assert (shown.code, daemon.asked[-1].local_epochs) == (Exit.OK, 2)
    assert "this site's own encoder of questions" in shown.out
    last.answers_with = "a mixture, 25% of it what this site learned alone"
    assert "a mixture, 25% of it what this site learned alone" in fedctl("personalise").out
    last.judged_in_turn = True
    assert "20 training pairs: MRR 0.500 with the shared version, which has learned" in (
        " ".join(fedctl("personalise").out.split())
    )
    last.answers_with = "the encoder as it came"
    assert "answers with   the encoder as it came" in fedctl("personalise").out
    daemon.personalising.pop()
    refused = fedctl("personalise")
    assert refused.code == Exit.UNREACHABLE
    assert "stopped telling before it was done" in refused.err


@pytest.mark.slow
def test_personalise_tells_what_became_of_a_generator(fedctl: Fedctl, daemon: CannedDaemon) -> None:
    last = daemon.personalising[-1]
    last.base_perplexity, last.shared_perplexity, last.answers_written = 8.5, 4.25, 11
    last.answers_with = "version 1a2b3c, 25% of it what this site learned behind it"
    last.own_perplexity = 2.125
    shown = fedctl("personalise", "--model", "generator")
    assert (shown.code, daemon.asked[-1].model) == (Exit.OK, "generator")
    words = " ".join(shown.out.split())
    assert "11 of them written: perplexity 8.50 of the base model, 4.25 of the version" in words
    assert "of the best mixture 2.12" in words
    assert "25% of it what this site learned behind it" in words
    last.own_perplexity = 0.0
    shown = fedctl("personalise", "--model", "generator")
    assert "of the best mixture none was better" in " ".join(shown.out.split())
    daemon.personalising.pop()
    assert "`fedctl personalise --model generator` begins anew" in " ".join(
        fedctl("personalise", "--model", "generator").err.split()
    )
    assert fedctl("personalise", "--model", "writer").code == Exit.USAGE


# ---- privacy ------------------------------------------------------------------


def test_privacy_tells_unit_spent_left_and_cost(fedctl: Fedctl, daemon: CannedDaemon) -> None:
    shown = fedctl("privacy", "--noise", 2, "--rounds", 1)
    assert (shown.code, shown.err) == (0, "")
    for fact in (
        "unit                this site",
        "delta               1e-05",
        "spent               epsilon 2.5",
        "budget              epsilon 8",
        "left                epsilon 5.5",
        "updates with noise  3, the last of multiplier 2; failed attempts count",
        "updates without     1: no epsilon bounds what they told",
        "further rounds      1 more of multiplier 2 would cost epsilon 0.75",
        "least noise         multiplier 0.9 for one more round",
    ):
        assert fact in shown.out
    assert (daemon.asked[-1].noise_multiplier, daemon.asked[-1].rounds) == (2.0, 1)

    daemon.privacy.epsilon_budget = daemon.privacy.epsilon_left = math.nan
    daemon.privacy.least_multiplier, daemon.privacy.further_multiplier = 0.0, 0.0
    shown = fedctl("privacy")
    assert "no budget, nothing is refused" in shown.out
    assert "no run with noise is known" in shown.out

    daemon.privacy.least_multiplier, daemon.privacy.further_multiplier = 4.0, 2.0
    daemon.privacy.further_fits = False
    shown = fedctl("privacy")
    assert "left                no budget" in shown.out
    assert "nothing is refused" not in shown.out
    assert "less noise than the least below, they would be declined" in shown.out

    daemon.privacy.least_multiplier = math.inf
    assert "more than is left, they would be declined" in fedctl("privacy").out
    assert "whatever the noise" in fedctl("privacy").out
    plain = fedctl("privacy", "--json").object
    assert (plain["epsilon_spent"], plain["epsilon_budget"]) == (2.5, None)
    assert plain["least_multiplier"] is None


@pytest.mark.slow
def test_train_asks_for_the_noise_that_was_typed(fedctl: Fedctl, daemon: CannedDaemon) -> None:
    train = ["train", "--rounds", 4, "--detach"]

    def asked(*options: object) -> Any:
        assert fedctl(*train, *options).code == 0
        return daemon.asked[-1]

    assert not asked().plan.HasField("privacy")
    static = asked("--clip", 0.5, "--noise", 4, "--colluders", 2).plan.privacy
    assert (static.clip_norm, static.noise_multiplier, static.noise_floor) == (0.5, 4.0, 0.0)
    assert (static.colluders, static.clip_quantile) == (2, 0.0)
    claimed = asked("--clip", 1, "--noise-schedule", "adaptive").plan.privacy
    assert (claimed.noise_multiplier, claimed.noise_floor, claimed.noise_decay) == (0.1, 0.01, 0.95)
    adaptive = asked("--clip", 1, "--noise", 4, "--noise-schedule", "adaptive").plan.privacy
    assert (adaptive.noise_multiplier, adaptive.noise_floor) == (4.0, 0.4)
    budget = asked("--clip", 1, "--epsilon", 2, "--clip-quantile", 0.5)
    assert (budget.epsilon, budget.plan.privacy.clip_quantile) == (2.0, 0.5)
    chosen = asked("--clip", 1, "--set", "loss_threshold=0.5", "--set", "dropout=0.1")
    assert (chosen.plan.privacy.loss_threshold, [*chosen.choices]) == (0.5, ["dropout=0.1"])
    assert asked("--clip", 1, "--set", "colluders=0").noughts == ["colluders"]
    masked = asked("--mode", "masking").plan
    assert (masked.mode, masked.robust) == (pb.MASKING, pb.ROBUST_NONE)
    assert "mode" not in asked().noughts
    assert "mode" in asked("--mode", "ckks", "--robust", "norm").noughts
    guarded = asked("--robust", "multi_krum", "--byzantine-sites", 2).plan
    assert (guarded.robust, guarded.byzantine_sites) == (pb.ROBUST_MULTI_KRUM, 2)
    for senseless in (
        ["--mode", "masking", "--robust", "norm"],
        ["--mode", "plain"],
        ["--byzantine-sites", 1],
        ["--noise", 1],
        ["--epsilon", 1],
        ["--clip", 1, "--noise", 1, "--epsilon", 1],
        ["--clip", 1, "--set", "noise_multiplier=1", "--epsilon", 1],
        ["--set", "loss_threshold=0.5"],
        ["--clip", 1, "--set", "loss_threshold=nan"],
        ["--clip", 1, "--set", "noise_decay=0"],
        ["--clip", 1, "--set", "colluders=-1"],
        ["--clip", 1, "--set", "colluders=1.5"],
        ["--clip", 1, "--set", "clip_quantile"],
        ["--clip", 1, "--noise-schedule", "adaptive", "--epsilon", 1],
    ):
        assert fedctl(*train, *senseless).code == Exit.USAGE


def test_status_says_by_what_the_newest_generator_was_refused(
    fedctl: Fedctl, daemon: CannedDaemon
) -> None:
    daemon.generator = control.GeneratorStatus(base_model="/srv/writer", own="4f:4096:a1")
    assert "the base model: no version is judged yet" in fedctl("status").out
    daemon.generator.MergeFrom(
        control.GeneratorStatus(
            judged_digest=b"\x12" * 32,
            judged_by=12,
            answers_written=12,
            base_perplexity=1512.64,
            perplexity=1512.64,
            newest_perplexity=1509.15,
            newest_rouge_l=0.007,
            rouge_l=0.021,
        )
    )
    told = " ".join(fedctl("status").out.split())
    assert "121212121212: perplexity 1509.15, ROUGE-L 0.007; of what answers 0.021" in told
    daemon.generator.newest_rouge_l = math.nan
    assert "perplexity 1509.15, ROUGE" not in " ".join(fedctl("status").out.split())
    daemon.generator.answering_digest = daemon.generator.judged_digest
    assert "generator refused" not in fedctl("status").out
