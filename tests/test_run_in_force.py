"""Which run a site goes by: it is told of several, of some again, and some are a liar's."""

from __future__ import annotations

from dataclasses import replace

import pytest

from peers import effects as do
from peers import runs
from peers.certificates import CertificateError
from peers.signing import Kind, sign
from peers.statement import Known
from proto import federation_pb2 as pb
from tests.one_machine import Alone, refused, sent, stated
from tests.simulation import FEDERATION, World


def wished(
    alone: Alone, site: str, generation: int, *, less: bool = False, target: int = 9
) -> pb.Signed:
    """A run that this site's person has asked for."""
    run = pb.Run.FromString(alone.stage.run.body)
    run.requested_by, run.run_id, run.generation = site, f"{site}-{generation}", generation
    run.target_round = target
    run.plan.min_participants -= less
    return sign(alone.stage.keys[site], Kind.RUN, run)


def test_without_a_run_that_a_person_has_signed_nothing_is_promised() -> None:
    alone = Alone()
    others = alone.prepare("b", 0)
    others.run.signature = b"forged"
    with pytest.raises(CertificateError, match="bad signature of a"):
        alone.hears("b", others)
    theirs = alone.prepare("b", 0)
    by = alone.stage.keys["b"].sign(Kind.RUN.value + theirs.run.body)
    theirs.run.site, theirs.run.signature = "b", by.signature
    with refused("b signs another site's run"):
        alone.hears("b", theirs)
    over = alone.stage.run_of(alone.world.training, target_round=0)
    alone.hears("b", alone.prepare("b", 0, run=over))
    assert alone.promised == -1


def test_who_stops_a_run_is_named() -> None:
    """Anybody may; people have to see who it was."""
    alone = Alone()
    alone.begins()
    run = pb.Run.FromString(alone.stage.run.body)
    run.generation, run.requested_by, run.target_round = run.generation + 1, "d", 0
    stop = sign(alone.stage.keys["d"], Kind.RUN, run)
    effects = alone.hears("d", pb.RunWish(run=stop))
    assert "d has stopped the run" in "".join(
        e.message for e in effects if isinstance(e, do.Progress)
    )


def test_who_puts_its_own_run_in_the_place_of_a_persons_is_named() -> None:
    """It may train as it likes where it takes no protection away: people have to see it."""
    alone = Alone()
    alone.begins()
    run = pb.Run.FromString(alone.stage.run.body)
    run.generation, run.requested_by, run.target_round = run.generation + 1, "d", 900
    wish = pb.RunWish(run=sign(alone.stage.keys["d"], Kind.RUN, run))
    said = "".join(e.message for e in alone.hears("d", wish) if isinstance(e, do.Progress))
    assert "d's run takes its place: to round 900, by its own plan" in said


def test_a_run_numbered_out_of_reach_is_not_taken() -> None:
    alone = Alone()
    for generation in (runs.FARTHEST + 1, 2**62):
        far = alone.stage.run_of(alone.world.training, generation=generation)
        alone.hears("b", pb.RunWish(run=far))
    assert alone.machine.run is None
    alone.begins()
    over = wished(alone, "b", runs.FARTHEST + 1, target=0)
    alone.hears("b", pb.RunWish(run=alone.stage.run, over=over))
    assert alone.promised == 0
    assert alone.machine._active


def test_a_site_that_was_away_takes_the_run_that_more_sites_go_by_than_may_lie() -> None:
    """A liar has raised the number as far as it may, twice; whoever missed one of the runs
    would never take part again."""
    alone = Alone()
    far = alone.stage.run = alone.stage.run_of(
        alone.world.training, generation=2 * runs.FARTHEST, run_id="far"
    )
    alone.hears("d", pb.RunWish(run=far))
    alone.hears("d", alone.stage.promised("d", 0))
    alone.hears("d", pb.RunWish(run=far))
    assert alone.machine.run is None, "one site may lie"
    alone.hears("c", alone.stage.promised("c", 0))
    alone.hears("c", pb.RunWish(run=far))
    assert alone.machine.durable.signed_run == far


def test_a_site_that_hears_only_from_a_liar_is_not_led_where_nobody_could_follow() -> None:
    """One step is within the reach of all; a second one, of its own making, is not taken."""
    alone = Alone()
    alone.begins()
    first = alone.stage.run_of(alone.world.training, generation=runs.FARTHEST)
    alone.hears("d", pb.RunWish(run=first))
    assert alone.machine.durable.signed_run == first
    second = alone.stage.run_of(alone.world.training, generation=2 * runs.FARTHEST)
    alone.hears("d", pb.RunWish(run=second))
    assert alone.machine.durable.signed_run == first
    alone.hears("b", pb.RunWish(run=first))
    alone.hears("c", pb.RunWish(run=first))
    alone.hears("d", pb.RunWish(run=second))
    assert alone.machine.durable.signed_run == second, "others are there, too"


def test_a_run_that_weakens_what_people_asked_for_is_answered_with_it() -> None:
    alone = Alone()
    alone.begins()
    weak = pb.TrainingPlan()
    weak.CopyFrom(alone.world.training)
    weak.min_participants = 2
    run = pb.Run.FromString(alone.stage.run.body)
    run.requested_by, run.run_id, run.generation = "d", "weak", 2
    run.plan.CopyFrom(weak)
    wish = pb.RunWish(run=sign(alone.stage.keys["d"], Kind.RUN, run))
    why = "the run of d is not taken: .*min_participants from 3 to 2"
    answers = []
    for _ in range(5):
        with refused(why):
            alone.hears("d", wish)
        answers += sent(alone.machine.wished, pb.RunWish)
    assert alone.machine.durable.signed_run == alone.stage.run
    assert [send.body.run for send in answers] == [alone.stage.run], "once"


def test_a_run_that_one_site_is_told_of_all_hear_of() -> None:
    """Sites that know of different runs share no attempt: a liar told each its own."""
    alone = Alone()
    wish = pb.RunWish(run=alone.stage.run)
    assert {send.to for send in sent(alone.hears("c", wish), pb.RunWish)} == set("bcd")
    assert not sent(alone.hears("d", wish), pb.RunWish), "once"


def test_of_runs_that_were_stopped_none_comes_back_whoever_says_it_again() -> None:
    alone = Alone()
    strong, stop = wished(alone, "b", 1), wished(alone, "c", 2, target=0)
    weak, end = wished(alone, "d", 3, less=True), wished(alone, "b", 4, target=0)
    for said in (strong, stop, weak):
        alone.hears(said.site, pb.RunWish(run=said))
        assert alone.machine.durable.signed_run == said
    for again in (strong, stop, wished(alone, "b", 1, less=True)):
        [answer] = sent(alone.hears("c", pb.RunWish(run=again)), pb.RunWish)
        assert answer.body == pb.RunWish(run=weak, over=stop), "c hears how things stand"
    alone.hears("b", pb.RunWish(run=end))
    alone.restarts()
    for again in (strong, weak, stop, strong):
        alone.hears("c", pb.RunWish(run=again))
        assert alone.machine.durable.signed_run == end


def test_who_has_missed_a_stop_hears_of_it_with_the_run_that_came_after_it() -> None:
    """That asks for less; by itself it would not be taken, and the stopped one told to others."""
    alone = Alone()
    strong, stop = wished(alone, "b", 1), wished(alone, "c", 2, target=0)
    weak = wished(alone, "d", 3, less=True)
    alone.hears("b", pb.RunWish(run=strong))
    with refused("the run of d is not taken"):
        alone.hears("d", pb.RunWish(run=weak))
    effects = alone.hears("d", pb.RunWish(run=weak, over=stop))
    assert alone.machine.durable.signed_run == weak
    assert sent(effects, pb.RunWish)[-1].body == pb.RunWish(run=weak, over=stop)


def test_what_is_over_is_learned_beside_a_run_that_stands_over_it() -> None:
    alone = Alone()
    strong, stop = wished(alone, "b", 1), wished(alone, "c", 2, target=0)
    weak = wished(alone, "d", 3, less=True)
    alone.hears("d", pb.RunWish(run=weak))
    effects = alone.hears("b", pb.RunWish(run=weak, over=stop))
    assert {send.to for send in sent(effects, pb.RunWish)} == set("bcd"), "and passed on"
    assert not sent(alone.hears("c", pb.RunWish(run=weak, over=stop)), pb.RunWish), "once"
    alone.hears("b", pb.RunWish(run=strong))
    assert alone.machine.durable.signed_run == weak
    alone.hears("b", pb.RunWish(run=weak, over=wished(alone, "b", 1, target=0)))
    assert list(alone.state.over) == [stop], "nor does an older stop take its place"


def test_what_is_over_elsewhere_and_not_here_yet_is_no_stop() -> None:
    """A site that is behind would take a liar's word for how far the others are."""
    alone = Alone()
    strong, later = wished(alone, "b", 1), wished(alone, "c", 2, target=5)
    alone.hears("b", pb.RunWish(run=strong))
    alone.hears("b", pb.RunWish(run=strong, over=later))
    assert alone.machine.durable.signed_run == strong
    assert not alone.state.over


def test_a_liar_that_stops_and_starts_runs_takes_nobody_far_away() -> None:
    """It says so to one site alone, whose attempts nobody else would be in."""
    alone = Alone()
    alone.begins()
    run = alone.machine.run
    assert run is not None
    keys = alone.stage.keys["c"]
    for number in range(20):
        stop = runs.following(run, "c", FEDERATION, f"stop-{number}", 0, run.plan)
        run = runs.following(stop, "c", FEDERATION, f"start-{number}", 1, run.plan)
        for one in (stop, run):
            alone.hears("c", pb.RunWish(run=sign(keys, Kind.RUN, one)))
    assert alone.machine.run == run
    assert alone.promised == 0


@pytest.mark.parametrize("by", ["a", "c"])
def test_an_attempt_in_which_nobody_has_work_yet_is_over_with_its_run(by: str) -> None:
    """People see that it failed, and why; and then that nothing is under way."""
    alone = Alone()
    alone.begins()
    run = alone.machine.run
    assert run is not None
    stop = runs.following(run, by, FEDERATION, "stop", 0, run.plan)
    effects = alone.hears(by, pb.RunWish(run=sign(alone.stage.keys[by], Kind.RUN, stop)))
    said = [(one.phase, one.message) for one in effects if isinstance(one, do.Progress)]
    assert [phase for phase, _ in said] == ["failed", "waiting"]
    assert all(f"{by} has stopped the run" in message for _, message in said)


def test_a_site_that_starts_is_told_of_runs_whatever_it_has_promised() -> None:
    """While it was away one was stopped, perhaps, which it would begin again."""
    alone = Alone()
    alone.begins()
    effects = alone.hears("c", pb.Recall(round=1))
    assert [send.body for send in sent(effects, pb.RunWish)] == [pb.RunWish(run=alone.stage.run)]


def test_what_is_over_is_remembered_from_round_to_round() -> None:
    world = World(sites=4, seed=1, faulty_sites=1, min_participants=3)
    world.train("a", rounds=50)
    old = world.disks["a"].durable.signed_run
    assert old is not None
    world.run_until_committed(1)
    world.stop("b")
    world.run_for(60.0)
    world.training.min_participants = 2
    world.train("c", rounds=3)
    head = world.disks["d"].durable.head_round
    for round_ in (head + 1, head + 2):
        world.run_until_committed(round_)
        machine = world.site("d")
        answers = []
        for _ in range(2):
            effects = machine.step(do.Received("b", pb.RunWish(run=old)), world.now)
            answers += sent(effects, pb.RunWish)
        assert machine.run is not None and machine.run.requested_by == "c"
        assert len(answers) == 1, "and said once a round"


def test_a_stop_fails_no_attempt_that_was_never_entered() -> None:
    """A site that has just started waits a moment before it takes part again."""
    alone = Alone()
    alone.begins()
    head = alone.machine.durable
    alone.world.disks["a"].durable = do.Durable(
        head.head_round, head.head_digest, signed_run=head.signed_run
    )
    alone.restarts()
    effects = alone.hears("c", pb.RunWish(run=wished(alone, "c", 2, target=0)))
    assert [one.phase for one in effects if isinstance(one, do.Progress)] == ["waiting"]


# ---- what a run had begun, when it is over -------------------------------------------------


def more_protection(alone: Alone, generation: int = 2) -> pb.Signed:
    """A run of d's that takes the place of a's."""
    run = pb.Run.FromString(wished(alone, "d", generation).body)
    run.plan.min_participants += 1
    return sign(alone.stage.keys["d"], Kind.RUN, run)


def taking_part() -> Alone:
    """Site a, which can train, has promised attempt 0."""
    alone = Alone()
    alone.takes(do.Situation(100, willing=True))
    alone.begins()
    return alone


def nothing_of_ours(effects: list[do.Effect]) -> bool:
    """Whether no part begins and nothing is signed in an attempt."""
    ours = (do.Coordinate, do.DealKey, do.Train, do.EncryptUpdate)
    said = (pb.Trained, pb.Contributed, pb.Stated)
    return not any(isinstance(one, ours) for one in effects) and not any(
        sent(effects, kind) for kind in said
    )


@pytest.mark.parametrize("by", ["a stop", "a stop, and a new run", "more protection"])
def test_what_was_promised_for_another_run_begins_nothing_whenever_it_is_shown(by: str) -> None:
    """A coordinator that lies holds the promises back until the run that they are of is over."""
    alone = taking_part()
    bundle = alone.everybody(0)
    stop, anew = wished(alone, "c", 2, target=0), wished(alone, "d", 3)
    runs_after = {
        "a stop": (stop,),
        "a stop, and a new run": (stop, anew),
        "more protection": (more_protection(alone),),
    }
    for later in runs_after[by]:
        alone.hears(later.site, pb.RunWish(run=later))
    for _ in range(2):
        effects = alone.hears("b", bundle.message)
        assert nothing_of_ours(effects)
        [answer] = sent(effects, pb.AttemptFailed)
        assert "another run is in force here" in answer.body.reason
        assert nothing_of_ours(alone.hears("b", alone.state_of(alone.stage.statement(bundle))))
        alone.restarts()
    assert not alone.state.statements


def test_what_a_site_has_begun_ends_with_a_stop() -> None:
    alone = taking_part()
    assert any(
        isinstance(one, do.Coordinate) for one in alone.hears("b", alone.everybody(0).message)
    )
    effects = alone.hears("c", pb.RunWish(run=wished(alone, "c", 2, target=0)))
    ended = [one for one in effects if isinstance(one, do.BeginAttempt)]
    assert ended == [do.BeginAttempt(1, 1)], "workers drop what they do"
    assert nothing_of_ours(alone.takes(do.LocalTrained(1, 0, (1, 2))))


def test_an_attempt_goes_on_where_another_run_is_merely_later() -> None:
    """Who asks for run after run ends none; nor is what it shows late weaker than the last."""
    alone = taking_part()
    bundle = alone.everybody(0)
    later = wished(alone, "d", 2)
    alone.hears("d", pb.RunWish(run=later))
    assert any(isinstance(one, do.Coordinate) for one in alone.hears("b", bundle.message))
    last = wished(alone, "d", 3)
    effects = alone.hears("d", pb.RunWish(run=last))
    assert alone.machine.durable.signed_run == last
    assert not any(isinstance(one, do.BeginAttempt) for one in effects)
    assert sent(alone.takes(do.LocalTrained(1, 0, (1, 2))), pb.Trained)


def test_a_sum_that_a_site_has_signed_it_votes_for_behind_a_stop() -> None:
    """It may be opened: to make the version of it costs nothing more."""
    alone = Alone()
    known = stated(alone)
    alone.hears("c", pb.RunWish(run=wished(alone, "c", 2, target=0)))
    lock = alone.stage.lock(known)
    alone.hears("b", pb.Proven(round=1, attempt=0, lock=lock.message))
    assert sent(alone.takes(do.VersionHere(lock.applied.model_digest)), pb.Vote)


def test_a_sum_without_a_site_does_not_make_it_go_on_behind_a_stop() -> None:
    """Signed while it trains yet; the others could be shown one with its update."""
    alone = taking_part()
    bundle = alone.everybody(0)
    alone.hears("b", bundle.message)
    known = Known.of(alone.stage.statement_of(bundle, sites=["b", "c", "d"]))
    assert sent(alone.hears("b", alone.state_of(known)), pb.Stated)
    alone.hears("c", pb.RunWish(run=wished(alone, "c", 2, target=0)))
    assert nothing_of_ours(alone.takes(do.LocalTrained(1, 0, (1, 2))))


# ---- what stays over ------------------------------------------------------------------------


def expelled(alone: Alone, site: str) -> None:
    """The next manifest does not let this one take part."""
    known = alone.stage.manifest
    sites = tuple(replace(one, enabled=one.id != site) for one in known.sites)
    newer = replace(known, version=2, sites=sites)
    alone.world.manifests[2] = alone.world.installed["a"] = newer
    alone.takes(do.ManifestChanged(newer))


def test_what_a_person_has_stopped_stays_stopped_when_others_that_stopped_it_are_expelled() -> None:
    """A liar says two stops of its own behind a person's, and is expelled: they count no more."""
    alone = Alone(sites=5)
    stop = wished(alone, "c", 2, target=0)
    alone.hears("c", pb.RunWish(run=stop))
    for number in (3, 4):
        alone.hears("e", pb.RunWish(run=wished(alone, "e", number, target=0)))
    expelled(alone, "e")
    alone.restarts()
    assert "e" not in alone.machine.manifest.enabled_ids
    for again in (wished(alone, "b", 1), wished(alone, "b", 1, less=True)):
        alone.hears("d", pb.RunWish(run=again))
        assert not alone.machine._active


def test_a_run_that_was_put_aside_for_more_protection_does_not_come_back_behind_it() -> None:
    """That one was numbered below it: its end alone says nothing of it."""
    alone = Alone()
    weak, strong = wished(alone, "b", 3, less=True), wished(alone, "c", 2)
    for said in (weak, strong):
        alone.hears(said.site, pb.RunWish(run=said))
        assert alone.machine.durable.signed_run == said
    end = wished(alone, "c", 2, target=0)
    run = pb.Run.FromString(end.body)
    run.generation, run.run_id = 3, "c-end"
    alone.hears("c", pb.RunWish(run=sign(alone.stage.keys["c"], Kind.RUN, run)))
    assert not alone.machine._active
    alone.hears("d", pb.RunWish(run=weak))
    assert not alone.machine._active
    alone.hears("b", pb.RunWish(run=wished(alone, "b", 4, less=True)))
    assert alone.machine._active, "what is asked for anew is taken"


def test_a_person_whose_run_was_put_aside_may_ask_again() -> None:
    """For what is numbered above it, though the last run known is not."""
    alone = Alone()
    alone.hears("d", pb.RunWish(run=wished(alone, "b", 3, target=0)))
    alone.takes(do.RunRequested("ours", 5, alone.world.training))
    stronger = more_protection(alone, generation=3)
    alone.hears("d", pb.RunWish(run=stronger))
    assert alone.machine.durable.signed_run == stronger
    for again in ("stop", "ours again"):
        if again == "stop":
            alone.takes(do.StopRequested(again))
        else:
            alone.takes(do.RunRequested(again, 5, alone.world.training))
        assert alone.machine.run is not None and alone.machine.run.run_id == again


def federation() -> World:
    """Four sites, of which one may lie."""
    return World(sites=4, seed=1, faulty_sites=1, min_participants=3)


def says_again(world: World, run: pb.Signed | None) -> pb.Run | None:
    """Somebody says this run to d; by which it goes then."""
    assert run is not None
    machine = world.site("d")
    machine.step(do.Received("b", pb.RunWish(run=run)), world.now)
    return machine.run


def test_what_was_put_aside_is_remembered_from_round_to_round() -> None:
    world = federation()
    world.blocked = dict.fromkeys((("b", site) for site in "acd"), 1)
    world.training.min_participants = 2
    world.train("b", rounds=50)
    weak = world.disks["b"].durable.signed_run
    world.training.min_participants = 3
    world.train("a", rounds=2)
    world.blocked.clear()
    world.run_until_committed(1)
    assert world.site("b").run == world.site("a").run, "it protects more"
    world.run_until_committed(2)
    assert world.site("d").head_round == 2
    assert says_again(world, weak) == world.site("a").run


def test_a_stop_of_a_run_that_a_site_has_never_heard_of_is_remembered_too() -> None:
    world = federation()
    world.crash("d")
    world.train("a", rounds=50)
    old = world.disks["a"].durable.signed_run
    world.run_for(1.0)
    world.stop("b")
    world.run_for(10.0)
    world.start("d")
    world.run_for(30.0)
    world.training.min_participants = 2
    world.train("c", rounds=3)
    world.run_until_committed(max(disk.durable.head_round for disk in world.disks.values()) + 1)
    assert not world.disks["d"].durable.state.put_aside
    run = says_again(world, old)
    assert run is not None and run.requested_by == "c"


def test_a_stop_ends_an_attempt_in_which_nothing_is_signed_and_no_other() -> None:
    """What is signed may be opened: thrown away, it has cost everybody what it tells."""
    for signs in (False, True):
        world = federation()
        world.train("a", rounds=5)
        while not any(name for name in "abcd" if world.site(name)._part is not None):
            world.step()
        while signs and not all(disk.durable.state.statements for disk in world.disks.values()):
            world.step()
        world.stop("d")
        world.run_for(100.0)
        assert [disk.durable.head_round for disk in world.disks.values()] == [signs] * 4


# ---- wishes ---------------------------------------------------------------------------------


def test_a_wish_counts_also_where_what_it_says_to_be_over_can_not_be_read() -> None:
    """It is of a site, perhaps, that only the sender's manifest lists."""
    alone = Alone()
    over = wished(alone, "c", 1, target=0)
    over.site = "z"
    with pytest.raises(CertificateError, match="z is not enabled"):
        alone.hears("b", pb.RunWish(run=alone.stage.run, over=over))
    assert alone.machine.durable.signed_run == alone.stage.run


def test_a_site_that_may_not_take_part_is_told_that_it_stops_nothing() -> None:
    """Nobody would take its word, and its person would think that it is done."""
    alone = Alone(sites=5)
    alone.hears("b", pb.RunWish(run=wished(alone, "b", 1)))
    expelled(alone, "a")
    with pytest.raises(runs.RunRefused, match="stop the run at another site"):
        alone.takes(do.StopRequested("stop"))
