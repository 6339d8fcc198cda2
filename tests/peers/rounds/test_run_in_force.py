"""Which run a site goes by: it is told of several, of some again, and some are a liar's."""

from __future__ import annotations

from dataclasses import replace

import pytest

from peers.attempts import effects as do
from peers.rounds import runs
from peers.wire.certificates import CertificateError
from peers.wire.signing import Kind, sign
from proto import federation_pb2 as pb
from tests.simulation.network import FEDERATION, World
from tests.support.one_machine import Alone, refused, sent


def wished(
    alone: Alone, site: str, generation: int, *, less: bool = False, target: int = 9
) -> pb.Signed:
    """A run that this site's person has asked for."""
    run = pb.Run.FromString(alone.stage.run.body)
    run.requested_by, run.run_id, run.generation = site, f"{site}-{generation}", generation
    run.target_round = target
    run.plan.min_participants -= less
    return sign(alone.stage.keys[site], Kind.RUN, run)


def expelled(alone: Alone, site: str) -> None:
    """The next manifest does not let this one take part."""
    known = alone.stage.manifest
    sites = tuple(replace(one, enabled=one.id != site) for one in known.sites)
    newer = replace(known, version=2, sites=sites)
    alone.world.manifests[2] = alone.world.installed["a"] = newer
    alone.takes(do.ManifestChanged(newer))


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
    assert alone.machine._here.active


def test_who_was_away_takes_the_run_that_more_sites_go_by_than_may_lie() -> None:
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


def test_who_hears_only_a_liar_is_not_led_where_nobody_could_follow() -> None:
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
            effects = machine.step(do.MessageReceived("b", pb.RunWish(run=old)), world.now)
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
    with pytest.raises(runs.RunRefused, match="does not let this site take part"):
        alone.takes(do.StopRequested("stop"))


def test_a_site_that_the_newest_manifest_excludes_asks_for_nothing() -> None:
    """Rounds go by the one before it until one is committed; nobody hears it all the same."""
    alone = Alone(sites=5)
    alone.begins()
    known = alone.stage.manifest
    sites = tuple(replace(one, enabled=one.id not in "ae") for one in known.sites)
    alone.takes(do.ManifestChanged(replace(known, version=2, sites=sites)))
    assert "a" in alone.machine.manifest.enabled_ids, "two steps are not made at once"
    for event in (do.StopRequested("stop"), do.RunRequested("ours", 3, alone.world.training)):
        with pytest.raises(runs.RunRefused, match="manifest 2 does not let this site take part"):
            alone.takes(event)


def test_a_promise_counts_though_the_run_beside_it_is_refused() -> None:
    alone = Alone()
    alone.begins()
    weak = wished(alone, "d", 2, less=True)
    with refused("the run of d is not taken"):
        alone.hears("c", alone.prepare("c", 1, run=weak))
    assert alone.machine._here.promises["c"].promise.attempt == 1
    with refused("the run of d is not taken"):
        alone.hears("c", alone.prepare("c", 0, round=2, run=weak))
    assert sent(alone.machine.wished, pb.Behind)
    assert any(isinstance(one, do.FetchCertificates) for one in alone.machine.wished)


def test_a_run_out_of_reach_is_said_to_people_with_what_to_do() -> None:
    alone = Alone()
    alone.begins()
    far = alone.stage.run_of(alone.world.training, generation=2 * runs.FARTHEST)
    said = [
        one.message
        for _ in range(2)
        for one in alone.hears("b", pb.RunWish(run=far))
        if isinstance(one, do.Progress)
    ]
    assert len(said) == 1, "once"
    assert "is not taken: it is number" in said[0]
    assert "fedctl site forget-round" in said[0]


def test_of_each_site_the_last_run_that_is_over_is_kept() -> None:
    alone = Alone()
    for number in (1, 3, 2):
        alone.hears("c", pb.RunWish(run=alone.stage.run, over=wished(alone, "c", number, target=0)))
    alone.hears("b", pb.RunWish(run=wished(alone, "b", 9)))
    [over] = [one for one in alone.state.over if one.site == "c"]
    assert pb.Run.FromString(over.body).generation == 3
