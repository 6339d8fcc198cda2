"""What ends with a run, what goes on, and what never begins again."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from peers.attempts import effects as do
from peers.attempts.ckks import DealKey
from peers.attempts.statement import EncodedStatement
from peers.rounds import runs
from peers.wire.signing import Kind, sign
from proto import federation_pb2 as pb
from tests.peers.attempts.test_robust_rounds import robust_plan
from tests.peers.rounds.test_run_in_force import expelled, wished
from tests.simulation.network import SimulatedKeys, World
from tests.support.one_machine import Alone, refused, sent, stated


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
    ours = (do.TakePlan, DealKey, do.Train, do.HideUpdate)
    said = (pb.Trained, pb.Contributed, pb.Stated)
    return not any(isinstance(one, ours) for one in effects) and not any(
        sent(effects, kind) for kind in said
    )


@pytest.mark.parametrize("by", ["a stop", "a stop, and a new run", "more protection"])
def test_what_was_promised_for_another_run_begins_nothing(by: str) -> None:
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
    assert any(isinstance(one, do.TakePlan) for one in alone.hears("b", alone.everybody(0).message))
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
    assert any(isinstance(one, do.TakePlan) for one in alone.hears("b", bundle.message))
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
    known = EncodedStatement.of(alone.stage.statement_of(bundle, sites=["b", "c", "d"]))
    assert sent(alone.hears("b", alone.state_of(known)), pb.Stated)
    alone.hears("c", pb.RunWish(run=wished(alone, "c", 2, target=0)))
    assert nothing_of_ours(alone.takes(do.LocalTrained(1, 0, (1, 2))))


# ---- what stays over ------------------------------------------------------------------------


def test_a_stopped_run_stays_stopped_when_others_that_did_so_are_expelled() -> None:
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
        assert not alone.machine._here.active


def test_a_run_put_aside_for_more_protection_does_not_come_back_behind_it() -> None:
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
    assert not alone.machine._here.active
    alone.hears("d", pb.RunWish(run=weak))
    assert not alone.machine._here.active
    alone.hears("b", pb.RunWish(run=wished(alone, "b", 4, less=True)))
    assert alone.machine._here.active, "what is asked for anew is taken"


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
    machine.step(do.MessageReceived("b", pb.RunWish(run=run)), world.now)
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
    for signs, anew in ((False, False), (True, False), (True, True)):
        world = federation()
        world.train("a", rounds=5)
        while not any(name for name in "abcd" if world.site(name)._here.part is not None):
            world.step()
        while signs and not all(disk.durable.state.statements for disk in world.disks.values()):
            world.step()
        world.stop("d")
        if anew:
            world.train("d", rounds=1)
        world.run_for(100.0)
        assert [disk.durable.head_round for disk in world.disks.values()] == [signs] * 4
        if signs:
            assert world.certificate(1).attempt == 0
            continue
        world.train("a", rounds=2)
        world.run_until_committed(2)
        assert world.certificate(1).attempt > 0, "that one was left for good"
        assert world.certificate(2).attempt == 0


def ended(effects: list[do.Effect]) -> bool:
    """Whether workers are told to drop what they do for the attempt."""
    return any(isinstance(one, do.BeginAttempt) for one in effects)


def of_one_who_leaves() -> tuple[Alone, pb.Bundle]:
    """Site a of five has promised attempt 0, for a run of e's; and its bundle."""
    alone = Alone(sites=5)
    alone.takes(do.Situation(100, willing=True))
    alone.stage.run = wished(alone, "e", 1)
    alone.hears("e", pb.RunWish(run=alone.stage.run))
    return alone, alone.everybody(0).message


@pytest.mark.parametrize("begun", [False, True], ids=["held back", "begun"])
def test_a_run_and_what_it_began_end_when_who_asked_for_it_is_expelled(
    begun: bool,
) -> None:
    alone, bundle = of_one_who_leaves()
    lead = alone.machine._here.ground.coordinator
    if begun:
        alone.hears(lead, bundle)
    known = alone.stage.manifest
    sites = tuple(replace(one, enabled=one.id != "e") for one in known.sites)
    alone.world.manifests[2] = replace(known, version=2, sites=sites)
    assert ended(alone.takes(do.ManifestChanged(alone.world.manifests[2]))) == begun
    assert nothing_of_ours(alone.hears(lead, bundle))
    assert nothing_of_ours(alone.takes(do.LocalTrained(1, 0, (1, 2))))
    assert alone.machine.next_wakeup() > alone.now + 1e6, "it waits for nothing"


def says_all_again(world: World) -> None:
    """What each site goes by it says to all, as its outbox does when a link is there again."""
    for site in world.machines:
        for other in world.machines:
            if other != site and world.disks[site].durable.signed_run is not None:
                world._post(site, other, world.site(site).wish)


def lets(world: World, version: int, *, out: str = "") -> None:
    """The next manifest, at all sites: these may not take part."""
    sites = tuple(replace(one, enabled=one.id not in out) for one in world.manifest.sites)
    world.manifests[version] = replace(world.manifest, version=version, sites=sites)
    for site in world.machines:
        world.install(site, world.manifests[version])


def between(some: str, others: str) -> tuple[tuple[str, str], ...]:
    """The links from either to the other, both ways."""
    pairs = itertools.product(some, others)
    return tuple(link for one, other in pairs for link in ((one, other), (other, one)))


def expels(world: World, liar: str, *, parted: tuple[tuple[str, str], ...]) -> None:
    """It is gone, and those that were parted are together again."""
    world.crash(liar)
    lets(world, 2, out=liar)
    world.heal(parted)
    says_all_again(world)


def commits(world: World, sites: str, rounds: int = 2) -> bool:
    """Whether these sites come so many rounds further."""
    wanted = min(world.site(site).head_round for site in sites) + rounds
    for _ in range(40):
        if min(world.site(site).head_round for site in sites) >= wanted:
            return True
        world.run_for(50.0)
    return False


def test_a_signed_sum_outlives_the_expulsion_of_who_asked_for_its_run() -> None:
    world = World(sites=5, seed=1, faulty_sites=1, min_participants=3)
    world.train("e", rounds=5)
    while not all(disk.durable.state.statements for disk in world.disks.values()):
        world.step()
    lets(world, 2, out="e")
    world.run_for(100.0)
    assert [world.site(site).head_round for site in "abcd"] == [1] * 4
    assert world.certificate(1).attempt == 0


def test_a_run_whose_site_was_shut_out_for_a_while_parts_nobody() -> None:
    """Some took another run meanwhile and others never heard of that: they come to the same."""
    world = World(sites=5, seed=3, faulty_sites=1, min_participants=4)
    world.train("b", rounds=30)
    world.run_for(1.0)
    lets(world, 2, out="b")
    world.run_for(5.0)
    world.cut(between("ad", "bce"))
    world.training.min_participants = 3
    world.train("a", rounds=30)
    world.run_for(20.0)
    assert {world.site(site).run.requested_by for site in "ad"} == {"a"}  # type: ignore[union-attr]
    world.heal(between("ad", "bce"))
    lets(world, 3)
    says_all_again(world)
    assert commits(world, "abcde")


def test_a_site_that_is_let_in_again_goes_by_what_the_others_do() -> None:
    """With one more absent it is needed."""
    world = World(sites=5, seed=3, faulty_sites=1, min_participants=4)
    world.train("e", rounds=50)
    world.run_until_committed(1)
    world.cut(between("e", "abcd"))
    lets(world, 2, out="e")
    world.run_for(50.0)
    world.training.min_participants = 3
    world.train("a", rounds=200)
    assert commits(world, "abcd")
    lets(world, 3)
    world.heal(between("e", "abcd"))
    says_all_again(world)
    world.run_for(50.0)
    world.crash("d")
    assert commits(world, "abce")


def test_a_stop_that_one_site_heard_ends_nothing_once_its_liar_is_expelled() -> None:
    world = World(sites=5, seed=5, faulty_sites=1, min_participants=3)
    world.train("a", rounds=50)
    world.run_until_committed(1)
    world.cut(between("de", "abc"))
    world.stop("e")
    world.run_for(30.0)
    assert not world.site("d")._here.active
    expels(world, "e", parted=between("de", "abc"))
    world.run_for(50.0)
    world.crash("b")
    assert commits(world, "acd")


def test_a_run_of_a_liars_that_some_have_heard_leaves_with_it() -> None:
    world = World(sites=5, seed=5, faulty_sites=1, min_participants=3)
    world.train("b", rounds=60)
    world.run_until_committed(1)
    world.cut(between("ace", "bd"))
    run = pb.Run.FromString(world.disks["b"].durable.signed_run.body)  # type: ignore[union-attr]
    run.generation, run.run_id, run.requested_by = 2, "later", "e"
    later = sign(SimulatedKeys("e"), Kind.RUN, run)
    for site in "ac":
        world._post("e", site, pb.RunWish(run=later))
    world.run_for(5.0)
    assert world.disks["a"].durable.signed_run == later
    expels(world, "e", parted=between("ace", "bd"))
    assert commits(world, "abcd")
    for site in "abcd":
        assert not world.disks[site].durable.state.put_aside, "it was taken up again"


def test_a_stop_ends_also_a_run_put_aside_by_others_and_refused_here() -> None:
    """They take it never again; nor may who stops, though it was numbered as that stop would be."""
    alone = Alone()
    alone.takes(do.RunRequested("ours", 5, alone.world.training))
    weak = wished(alone, "d", 2, less=True)
    for sender in "bcd":
        with refused("is not taken"):
            alone.hears(sender, pb.RunWish(run=weak))
    alone.takes(do.StopRequested("stop"))
    alone.hears("d", pb.RunWish(run=weak))
    assert not alone.machine._here.active


def test_a_number_of_a_liars_that_few_have_heard_of_leaves_with_it() -> None:
    """What people ask for next is numbered as the others count, and taken by them."""
    alone = Alone(sites=5)
    far = wished(alone, "e", runs.FARTHEST)
    alone.hears("e", pb.RunWish(run=far))
    assert alone.machine.durable.signed_run == far
    expelled(alone, "e")
    alone.takes(do.RunRequested("ours", 5, alone.world.training))
    assert alone.machine.run is not None
    assert alone.machine.run.run_id == "ours"
    assert alone.machine.run.generation == 1


def under_way(alone: Alone) -> bool:
    """Whether a run is, for site a."""
    return alone.machine._here.active


def test_a_stop_counts_again_once_its_site_is_let_in_again() -> None:
    """All go by it then, also who went on with the run while that site was shut out."""
    alone = Alone(sites=5)
    ours = wished(alone, "b", 1)
    stop = wished(alone, "e", 2, target=0)
    for said in (ours, stop):
        alone.hears(said.site, pb.RunWish(run=said))
    assert not under_way(alone)
    expelled(alone, "e")
    alone.hears("b", pb.RunWish(run=ours))
    assert alone.machine.durable.signed_run == ours
    assert under_way(alone)
    back = replace(
        alone.machine.manifest,
        version=3,
        sites=tuple(replace(one, enabled=True) for one in alone.machine.manifest.sites),
    )
    alone.world.manifests[3] = back
    alone.takes(do.ManifestChanged(back))
    assert alone.machine.manifest.version == 3
    assert not under_way(alone)
    alone.takes(
        do.RunRequested("less", 5, pb.Run.FromString(wished(alone, "a", 9, less=True).body).plan)
    )
    assert under_way(alone), "what is over protects nothing"


def test_what_is_trained_ends_also_with_what_a_site_is_told_late_of_itself() -> None:
    alone = Alone(unheard="d")
    alone.takes(do.Situation(100, willing=True))
    alone.begins()
    alone.hears("b", alone.everybody(0).message)
    assert ended(alone.hears("d", pb.Remembered(round=1, promise=alone.stage.promised("a", 3))))


def test_a_coordinator_whose_run_is_stopped_says_that_its_attempt_is_over() -> None:
    """Nobody should wait for what it does not do any more."""
    alone = taking_part()
    while alone.machine._here.coordination is None:
        alone.goes_on()
    effects = alone.hears("c", pb.RunWish(run=wished(alone, "c", 2, target=0)))
    said = [pb.Ended.FromString(one.body.ended.body) for one in sent(effects, pb.EndedAttempt)]
    assert {one.attempt for one in said} == {alone.promised}
    assert all("c has stopped the run" in one.reason for one in said)


def test_behind_a_stop_a_version_that_may_be_committed_is_stated_again() -> None:
    """It costs nothing that was not told before, and somebody may have committed it."""
    alone = taking_part()
    lock = alone.stage.lock()
    while alone.promised < 1:
        alone.goes_on()
    bundle = alone.stage.message(
        [alone.stage.promised(site, 1, lock=lock) for site in "abcd"], attempt=1
    )
    alone.hears("c", pb.RunWish(run=wished(alone, "c", 2, target=0)))
    alone.hears("c", bundle)
    assert alone.machine._here.bundle is not None


def test_who_was_cut_off_hears_of_a_stop_though_a_later_run_is_over_too() -> None:
    """The others have told it while it was behind, and could not take it."""
    world = federation()
    world.train("b", rounds=50)
    world.run_until_committed(1)
    links = tuple((one, "d") for one in "abc") + tuple(("d", one) for one in "abc")
    world.cut(links)
    world.stop("c")
    world.run_for(60.0)
    world.training.min_participants = 2
    world.train("a", rounds=1)
    world.run_for(200.0)
    world.heal(links)
    world.run_for(200.0)
    assert not any(world.site(name)._here.active for name in "abcd")


def test_a_stop_learned_beside_a_later_run_ends_what_was_begun_before_it() -> None:
    """A liar says the later run alone, by which the attempt goes on."""
    alone = taking_part()
    bundle = alone.everybody(0)
    alone.hears("b", bundle.message)
    stop, anew = wished(alone, "c", 2, target=0), wished(alone, "c", 3)
    assert not ended(alone.hears("b", pb.RunWish(run=anew)))
    assert ended(alone.hears("c", pb.RunWish(run=anew, over=stop)))
    assert nothing_of_ours(alone.takes(do.LocalTrained(1, 0, (1, 2))))
    known = EncodedStatement.of(alone.stage.statement_of(bundle, sites=["b", "c", "d"]))
    assert nothing_of_ours(alone.hears("b", alone.state_of(known)))


def test_what_a_site_has_left_it_begins_under_no_later_run_either() -> None:
    """It is in the same attempt still, for the others hide theirs."""
    alone = Alone()
    alone.takes(do.Situation(100, willing=True))
    alone.stage.run = wished(alone, "b", 100)
    alone.hears("b", pb.RunWish(run=alone.stage.run))
    bundle = alone.everybody(0).message
    stronger = more_protection(alone, generation=2)
    for later in (stronger, wished(alone, "d", 3, target=0), wished(alone, "c", 101)):
        alone.hears(later.site, pb.RunWish(run=later))
        assert alone.machine.durable.signed_run == later
        assert nothing_of_ours(alone.hears("b", bundle))
    assert alone.promised == 0


def test_of_what_was_only_compared_no_sum_is_made_behind_a_stop() -> None:
    world = federation()
    world.training = robust_plan(pb.ROBUST_NORM, 1, 3)
    world.train("a", rounds=5)

    def asked(name: str) -> bool:
        signed = world.disks[name].durable.state.statements
        return [pb.Statement.FromString(one.body).kind for one in signed] == [pb.QUESTION]

    while not all(asked(name) for name in "abcd"):
        world.step()
    world.stop("d")
    world.run_for(100.0)
    assert not any(disk.durable.head_round for disk in world.disks.values())


def test_a_stop_counts_also_of_a_site_whose_own_run_was_put_aside() -> None:
    """Its state was put back, say: nobody tells it how far its own numbers went."""
    alone = Alone()
    run = wished(alone, "c", 1001, less=True)
    for said in (
        run,
        wished(alone, "d", 5),
        wished(alone, "d", 6, target=0),
        wished(alone, "b", 8),
    ):
        alone.hears(said.site, pb.RunWish(run=said))
        assert alone.machine.durable.signed_run == said
    alone.hears("c", pb.RunWish(run=wished(alone, "c", 9, target=0)))
    assert not alone.machine._here.active
