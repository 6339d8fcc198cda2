"""Rounds survive whatever happens: drawn scenarios, liars, planted bugs, a killed coordinator.

More seeds: `make sim SEEDS=100000`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest

from peers.attempts import effects as do
from peers.rounds.recall import Recall
from tests.simulation import __main__
from tests.simulation.network import TIMING, World, coordinator
from tests.simulation.scenarios import bugs, restores, rows, scripts
from tests.simulation.scenarios.bugs import BUGS, Bug, Drawn
from tests.simulation.scenarios.faults import Faults
from tests.simulation.scenarios.invariants import Violation
from tests.simulation.scenarios.schedule import (
    Restore,
    Scenario,
    draw,
    draw_with_both,
    draw_with_liar,
    draw_with_restore,
    play,
    play_in,
    world_of,
)
from tests.simulation.scenarios.shrink import fails, failure, shrunken
from tests.simulation.seeds import seeds

FIXED_SEEDS = range(120)
FRESH_SEEDS = 40
# Drawn once by `make sim`, each broke an invariant of an earlier protocol.
ONCE_BROKEN = (305245, 306406, 307261, 308485, 310264, 311320, 320350, 324146, 325741, 325925)
DRAWN = pytest.mark.parametrize(
    "drawn",
    [draw, draw_with_liar, draw_with_restore, draw_with_both],
    ids=lambda drawn: drawn.__name__,
)


def broken(seeds: range, drawn: Drawn = draw) -> list[int]:
    """The seeds that break an invariant; the first ones are shown, shrunken."""
    failed = __main__.violations(seeds, drawn)
    for seed in failed[: __main__.MOST_SHOWN]:
        __main__.show(seed, drawn)
    return failed


@DRAWN
@pytest.mark.faults
@pytest.mark.slow
def test_the_fixed_seeds_break_no_invariant(drawn: Drawn) -> None:
    assert broken(FIXED_SEEDS, drawn) == []


@pytest.mark.slow
def test_seeds_that_once_broke_an_invariant_break_none() -> None:
    assert [seed for seed in ONCE_BROKEN if broken(range(seed, seed + 1))] == []


@pytest.mark.faults
@pytest.mark.slow
@DRAWN
def test_fresh_seeds_break_no_invariant(drawn: Drawn) -> None:
    first = int.from_bytes(os.urandom(5), "big")
    print(f"fresh seeds: --first {first} --seeds {FRESH_SEEDS}")
    fresh = range(first, first + FRESH_SEEDS)
    assert broken(fresh, drawn) == [], "--replay SEED plays one again"


@pytest.mark.slow
def test_every_run_commits_ten_rounds_whatever_goes_wrong() -> None:
    for seed in range(15):
        world = play(draw(seed))
        assert set(range(1, 11)) <= set(world.committed)


SEEDS = pytest.mark.parametrize("seed", seeds([0], range(1, 4)))


def transcript(seed: int, drawn: Drawn, *, copies: bool = False) -> list[str]:
    """Of a run that is played now."""
    scenario = drawn(seed)
    return play_in(world_of(scenario, record=True, copies=copies), scenario).transcript


@cache
def transcript_before(seed: int, drawn: Drawn) -> list[str]:
    """Of a run that was played once, for all that compare another one with it."""
    return transcript(seed, drawn)


@SEEDS
@DRAWN
@pytest.mark.slow
def test_a_run_is_a_function_of_its_seed(seed: int, drawn: Drawn) -> None:
    before = transcript_before(seed, drawn)
    assert transcript(seed, drawn) == before


@SEEDS
@DRAWN
def test_receivers_share_nothing_with_senders(seed: int, drawn: Drawn) -> None:
    """Runs pass messages without copies; one with copies says word for word the same."""
    assert transcript(seed, drawn, copies=True) == transcript_before(seed, drawn)


def restored_once(seed: int) -> Scenario:
    """One site's state goes back once, while everybody whom it can ask is there."""
    scenario = draw_with_restore(seed)
    back = next(fault for fault in scenario.schedule if isinstance(fault, Restore))
    quiet = Faults(delay_s=(0.001, 1.0))
    return replace(scenario, faulty_sites=0, schedule=(back,), noise=quiet)


@pytest.mark.slow
def test_what_a_site_has_lost_of_its_state_its_peers_tell_it() -> None:
    """It counts as honest here: nothing is promised, signed or voted for a second time."""
    assert broken(range(60), restored_once) == []


@pytest.mark.slow
@pytest.mark.parametrize("lost", ["_take_back", "_recall"])
def test_without_being_told_it_contradicts_itself(lost: str) -> None:
    with bugs.planted(((Recall, lost, lambda *_: None),)):
        failed = __main__.violations(range(60), restored_once)
    assert failed


# ---- teeth ---------------------------------------------------------------------


# The first seed that caught it, where that was not among the first; it is played first, and
# if it is none any more (something is drawn otherwise), all are from the beginning.
LATE = {
    "hide the lock: a fork": 16,
    "decrypt a sum of too few": 12,
    "vote below the promise": 49,
    "what was stopped begins again": 253,
    "a promise outlives its run": 170,
}


def catch(bug: Bug) -> tuple[int, str]:
    """A seed that catches a planted bug, and as what."""
    first = [LATE[bug.name]] if bug.name in LATE else []
    with bug.planted():
        for seed in [*first, *range(bug.seeds)]:
            bugs.forget()
            try:
                play(bug.drawn(seed))
            except AssertionError as violation:
                return seed, str(violation)
    pytest.fail(f"{bug.name}: not caught within {bug.seeds} seeds")


@pytest.mark.slow
@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_the_simulation_catches_a_planted_bug(bug: Bug) -> None:
    seed, violation = catch(bug)
    print(f"{bug.name}: seed {seed}: {violation}")
    assert re.search(bug.caught_as, violation)


Scripted = tuple[Callable[[], None], tuple[bugs.Plant, ...], str]

# What is scripted, the defences that it is about, and what happens without them. Where a
# name begins with a row it is that of the table of lies in tests/attacks/.
SCRIPTED: dict[str, Scripted] = {
    "two restatements of an attempt": (
        lambda: scripts.restate_both(*scripts.two_locks()),
        bugs.UNCERTIFIED,
        "two versions of round 1 are chosen",
    ),
    "two restatements of an attempt, two of seven lie": (
        lambda: scripts.restate_both(*scripts.two_locks(sites=7, liars="cd")),
        bugs.UNCERTIFIED,
        "two versions of round 1 are chosen",
    ),
    "row 6: two certificates": (
        lambda: scripts.certify_both(*scripts.two_locks(sites=5)),
        bugs.MAJORITY,
        "two versions of round 1, one at",
    ),
    "a lock that is not the highest": (
        lambda: scripts.restate_the_lower(*scripts.two_locks()),
        bugs.ANY_LOCK,
        "over the lock of 1",
    ),
    "a lock ranked by its root": (
        lambda: scripts.restate_the_older(*scripts.two_locks()),
        bugs.BY_ITS_ROOT,
        "hides the lock of 5",
    ),
    "a lock ranked by its root: a fork": (
        lambda: scripts.restate_the_older(*scripts.two_locks()),
        bugs.BY_ITS_ROOT_UNSEEN,
        "two versions of round 1 are chosen",
    ),
    "two votes an attempt": (
        lambda: scripts.prove_two(*scripts.two_locks()),
        bugs.TWO_VOTES,
        "a site votes once",
    ),
    "a vote promises nothing": (
        scripts.prove_to_one_who_promised_nothing,
        bugs.NO_PROMISE,
        "a vote that promises nothing",
    ),
    "row 1: weights as they were told": (
        rows.one_has_most_examples,
        bugs.AS_TOLD,
        "honest attempts fail",
    ),
    "row 1: the coordinator's own weights": (
        rows.another_plan,
        bugs.ANY_PLAN,
        "weighs",
    ),
    "a sum of anybody's": (
        rows.sum_of_one,
        bugs.ANYBODY,
        "a sum of 1 updates may be opened",
    ),
    "row 11: contributions to something else": (
        rows.contribution_of_another_attempt,
        bugs.SOMETHING_ELSE,
        "states a contribution that d has not made",
    ),
    "row 9: an Ahead is believed": (
        rows.far_ahead,
        bugs.BELIEVE_AHEAD,
        "honest attempts fail",
    ),
    "row 9: a certificate is believed": (
        rows.far_ahead,
        bugs.BELIEVE_CERTIFICATES,
        "never cast the vote certified",
    ),
    "row 9: one high number is followed": (
        rows.far_ahead,
        bugs.FARTHEST,
        "honest attempts fail",
    ),
    "row 11: a sum less one of its updates": (
        rows.sum_less,
        bugs.ANOTHER_SUM,
        "two sums of one draw",
    ),
    "row 11: two statements an attempt": (
        rows.two_sums_an_attempt,
        bugs.TWO_STATEMENTS,
        "signs two statements",
    ),
    "row 11: a question behind a sum": (
        rows.question_behind_a_sum,
        bugs.QUESTION_FIRST,
        "signs two statements",
    ),
    "row 11: a sum and one less of an attempt": (
        rows.sum_less_an_attempt,
        bugs.TWO_DIFFERENT,
        "signs two statements",
    ),
    "row 11: less is stated than was summed": (
        rows.stated_less_than_summed,
        bugs.UNPROVEN,
        "without the proof of its claim",
    ),
    "a restored site is told a bare promise": (
        restores.a_lock_that_was_named,
        bugs.BARE_PROMISE,
        "two versions of round 1",
    ),
    "a restored site is asked about an older round": (
        restores.a_copy_of_the_round_before,
        bugs.ASKED_ONCE,
        "two promises of 2",
    ),
    "a restored site meets a newer manifest": (
        restores.a_newer_manifest,
        bugs.NEWEST_BASE,
        "hides the lock|two versions of round 1",
    ),
    "a restored site makes another sum again": (
        restores.a_sum_that_was_signed,
        bugs.ANOTHER_DIFFERENCE,
        "two sums of one draw",
    ),
    "a site is said to have applied two versions": (
        rows.applied_in_anothers_name,
        bugs.AS_SAID,
        "accuses",
    ),
    "row 12: the next turn is prepared": (
        rows.prepares_its_own,
        bugs.ENTER_WHEN_PREPARED,
        "honest attempts fail",
    ),
    "row 12: an attempt is ended for one site": (
        rows.ends_for_one,
        (*bugs.WAITS_FOR_NOBODY, *bugs.ENDS_FOR_ITSELF),
        "honest attempts fail",
    ),
    "row 12: a run of its own": (
        rows.supersedes,
        bugs.WEAKER,
        "the run of c takes over a run of b, and is weaker",
    ),
    "row 12: a run that was stopped": (
        rows.says_a_stopped_run_again,
        bugs.NOTHING_IS_OVER,
        "a run that a person has stopped goes on",
    ),
}


@pytest.mark.parametrize("name", SCRIPTED)
def test_what_chance_hardly_draws_is_scripted(name: str) -> None:
    """With all defences nothing happens; without them what they are for."""
    play_script, defences, caught_as = SCRIPTED[name]
    play_script()
    with bugs.planted(defences), pytest.raises(Violation, match=caught_as):
        play_script()


@pytest.mark.parametrize(
    ("name", "left_out"),
    [
        ("two votes an attempt", bugs.UNCERTIFIED),
        ("a restored site is told a bare promise", bugs.BARE_PROMISE[:1]),
        ("a restored site is told a bare promise", bugs.BARE_PROMISE[2:]),
        ("row 11: a sum less one of its updates", bugs.ANOTHER_DIFFERENCE),
        ("row 1: the coordinator's own weights", bugs.ITS_OWN_PLAN),
        ("row 1: the coordinator's own weights", bugs.ANYBODY),
        ("row 11: a sum and one less of an attempt", bugs.TWO_STATEMENTS),
        ("row 11: a sum and one less of an attempt", bugs.ANOTHER_DIFFERENCE),
        ("row 12: an attempt is ended for one site", bugs.WAITS_FOR_NOBODY),
        ("row 12: an attempt is ended for one site", bugs.ENDS_FOR_ITSELF),
    ],
)
def test_each_of_two_defences_is_enough(name: str, left_out: tuple[bugs.Plant, ...]) -> None:
    play_script, _, _ = SCRIPTED[name]
    with bugs.planted(left_out):
        play_script()


def test_nothing_stays_planted() -> None:
    with pytest.raises(Violation), BUGS[0].planted():
        play(draw(0))
    play(draw(0))


@pytest.mark.slow
def test_a_failing_run_is_shrunken_to_its_cause() -> None:
    """A lock that is hidden matters only if its attempt fails: little is left."""
    bug = next(bug for bug in BUGS if bug.name == "hide the lock")
    seed, _ = catch(bug)
    with bug.planted():
        whole, small = draw(seed), shrunken(draw(seed))
        assert fails(small)
        text = failure(small)
    assert small.sites <= whole.sites
    assert small.rounds <= whole.rounds
    assert len(small.schedule) <= 2
    assert "VIOLATION" in text
    assert "hides the lock" in text.splitlines()[-1]


# ---- the command line ------------------------------------------------------------


@pytest.mark.slow
def test_the_command_ends_with_the_figures(capsys: pytest.CaptureFixture[str]) -> None:
    assert __main__.main(["--seeds", "60", "--jobs", "2"]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert re.fullmatch(r"60 runs, 0 violations, \d+ runs/min", last)


@pytest.mark.slow
def test_a_violation_is_shown_with_its_seed_and_fails_the_command(
    capsys: pytest.CaptureFixture[str],
) -> None:
    bug = next(bug for bug in BUGS if bug.name == "commit with too few votes")
    with bug.planted():
        assert __main__.main(["--first", "3", "--seeds", "4", "--jobs", "1"]) == 1
    out = capsys.readouterr().out
    assert re.search(r"violation at seed \d; shrunken to:", out)
    assert "VIOLATION: round 1: certified by too few" in out
    assert re.fullmatch(r"4 runs, [1-4] violations, \d+ runs/min", out.splitlines()[-1])


def test_one_seed_is_replayed(capsys: pytest.CaptureFixture[str]) -> None:
    assert __main__.main(["--replay", "7"]) == 0
    assert capsys.readouterr().out.endswith("no violation\n")


# ---- a coordinator that dies ---------------------------------------------------------


def kill_in(phase: str, seed: int) -> tuple[float, int] | None:
    """Seconds from the coordinator's death to the others' commit, and the attempt of it.

    None: it was never seen in that phase. Who has everybody's promise when it enters an
    attempt is not in ``prepare``.
    """
    world = World(sites=5, seed=seed, min_participants=3)
    world.train("a", rounds=1)
    lead = coordinator(world, 1)
    while (under_way := world.site(lead)._here.coordination) is None or under_way.phase != phase:
        if world.site(lead).head_round:
            return None
        world.step()
    world.crash(lead)
    killed = world.now
    world.run_until_committed(1)
    return world.now - killed, world.certificate(1).attempt


# How long the others wait at most before they give a silent coordinator up (timing.py).
PATIENCE = {
    "prepare": TIMING.patience(0),
    "plan": TIMING.patience(0) + TIMING.train(0),
    "train": TIMING.patience(0) + TIMING.train(0),
    "aggregate": TIMING.patience(0, 3),
    "state": TIMING.patience(0, 3),
    "open": TIMING.patience(0, 3),
    "vote": TIMING.patience(0, 3),
}


@pytest.mark.parametrize(
    "tried", [range(5), pytest.param(range(5, 15), marks=pytest.mark.slow)], ids=["few", "more"]
)
@pytest.mark.parametrize("phase", PATIENCE)
def test_a_coordinator_that_dies_costs_one_attempt(phase: str, tried: range) -> None:
    recoveries = [seen for seed in tried if (seen := kill_in(phase, seed)) is not None]
    assert len(recoveries) > len(tried) // 3
    longest = max(seconds for seconds, _ in recoveries)
    attempts = [attempt for _, attempt in recoveries]
    print(f"{phase:10} {longest:6.1f} s, patience {PATIENCE[phase]:5.1f} s, attempts {attempts}")
    assert max(attempts) <= 1
    # The next attempt waits once more for the dead site's promise, then takes its time.
    assert longest < PATIENCE[phase] + TIMING.phase(1) + 20.0


# ---- a crash at every boundary -----------------------------------------------------


class Doomed(World):
    """A world in which one site dies at one boundary: behind the n-th effect of its m-th step."""

    victim = ""
    boundary = (-1, -1)
    lengths: tuple[int, ...] = ()

    def _carry_out_all(self, name: str, effects: list[do.Effect]) -> None:
        if name == self.victim and effects:
            if len(self.lengths) == self.boundary[0]:
                self.doom(name, self.boundary[1], 1.0, writing=False)
            self.lengths = (*self.lengths, len(effects))
        super()._carry_out_all(name, effects)


def doomed(victim: str, boundary: tuple[int, int]) -> Doomed:
    """Two rounds of three sites, with one crash."""
    world = Doomed(sites=3, seed=2, min_participants=2, record=False)
    world.victim, world.boundary = victim, boundary
    world.train("a", rounds=2)
    world.run_until_committed(2, within_s=1_000.0)
    return world


@pytest.mark.slow
@pytest.mark.parametrize("victim", "abc")
def test_a_crash_at_any_boundary_of_any_step_costs_attempts_only(victim: str) -> None:
    """The request itself (a's first step) aside: what was not written was never asked for."""
    whole = doomed(victim, (-1, -1)).lengths
    boundaries = [
        (step, after)
        for step, effects in enumerate(whole)
        for after in range(effects + 1)
        if (victim, step, after) != ("a", 0, 0)
    ]
    assert len(boundaries) > 60
    for boundary in boundaries:
        world = doomed(victim, boundary)
        attempts = [world.certificate(round_).attempt for round_ in (1, 2)]
        assert sum(attempts) <= 2, f"{victim} at {boundary}: attempts {attempts}"
