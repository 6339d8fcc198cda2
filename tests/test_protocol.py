"""The round protocol, as conversations between simulated sites."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from peers import effects as do
from peers.certificates import RULES, sign_vote
from peers.errors import RemoteProtocolError
from peers.protocol import Protocol
from peers.roles import coordinator_of, key_holders, next_after, weights
from peers.runs import RunRefused
from peers.signing import Kind, sign
from proto import federation_pb2 as pb
from tests.scenarios.faults import Faults
from tests.signed_rounds import Stage
from tests.simulation import (
    GENESIS,
    LONGEST_WORK_S,
    TIMING,
    SimulatedKeys,
    World,
    coordinator,
    plan,
)


def until(world: World, text: str) -> None:
    """Let time pass until the transcript says this."""
    end = world.now + 1_000
    while text not in "\n".join(world.transcript[-40:]):
        assert world.now < end, f"never: {text}\n{world.text()}"
        world.step()


def words(world: World, sender: str, to: str) -> list[str]:
    """The kinds of messages that went from one site to another."""
    lines = [line for line in world.transcript if f" {sender} -> {to}: " in line]
    return [line.split(": ")[1].split()[0] for line in lines]


def said(effects: list[do.Effect], to: str = "") -> list[do.Body]:
    return [e.body for e in effects if isinstance(e, do.Send) and to in ("", e.to)]


def test_three_sites_commit_three_rounds_and_the_coordinator_rotates() -> None:
    world = World(sites=3, seed=1)
    world.train("a", rounds=3)
    world.run_until_committed(3)
    commits = world.disks["a"].commits
    assert [commits[r].report.coordinator for r in (1, 2, 3)] == ["b", "c", "a"]
    assert [commits[r].certificate.attempt for r in (1, 2, 3)] == [0, 0, 0]
    assert all(list(commits[r].certificate.body.contributors) == ["a", "b", "c"] for r in commits)
    heads = {machine.durable.head_digest for machine in world.machines.values()}
    assert len(heads) == 1


def test_a_round_speaks_its_phases_in_order() -> None:
    world = World(sites=3, seed=1, faults=Faults(delay_s=(0.01, 0.01)))
    world.run_for(1)
    world.train("b", rounds=1)
    world.transcript.clear()
    world.run_until_committed(1)
    by_b = words(world, "b", "c")
    # At one delay for all; the first two leave together.
    assert sorted(by_b[:2]) == ["Prepare", "RunWish"]
    assert by_b[2:] == ["Bundle", "Scale", "State", "Certified", "Proof", "Proven", "Commit"]
    by_c = words(world, "c", "b")
    assert by_c[:3] == ["Promised", "Promised", "PlanAnswer"], "unasked, and asked, the same"
    assert sorted(by_c[3:5]) == ["KeyCommitted", "Trained"], "the key is dealt beside training"
    assert by_c[5:8] == ["Contributed", "Stated", "Challenge"]
    assert sorted(by_c[8:]) == ["AppliedSum", "Vote"], "it votes on the proof, whoever opened first"


def test_the_report_names_every_phase_and_the_seconds_it_took() -> None:
    world = World(sites=3, seed=4)
    world.train("b", rounds=1)
    world.run_until_committed(1)
    report = world.disks["c"].commits[1].report
    phases = [p.phase for p in report.phases]
    # The key is dealt beside training: its span may end before or after the plan's.
    assert "key" in phases
    assert [p for p in phases if p != "key"] == [
        *("prepare", "plan", "train", "aggregate"),
        *("state", "open", "vote"),
    ]
    assert all(p.seconds >= 0 for p in report.phases)
    assert report.coordinator != report.key_dealer
    assert report.mean_loss == 1.0


def test_the_coordinator_never_holds_the_secret_key() -> None:
    for site in "abc":
        made = pb.Plan(participants=[pb.Participant(site=s) for s in "abc"], coordinator=site)
        assert site not in key_holders(made)
        assert next_after(site, "abc") != site


def test_weights_are_shares_of_the_largest_site() -> None:
    made = pb.Plan(
        participants=[
            pb.Participant(site="a", num_examples=50),
            pb.Participant(site="b", num_examples=200),
        ],
        full_weight=200,
    )
    assert weights(made) == {"a": 0.25, "b": 1.0}


def test_every_site_agrees_who_coordinates() -> None:
    world = World(sites=5, seed=0)
    turns = [coordinator_of(world.manifest, 1, attempt) for attempt in range(5)]
    assert sorted(turns) == list("abcde")


def test_nothing_wakes_an_idle_federation() -> None:
    world = World(sites=3, seed=1)
    world.run_for(10_000)
    assert all(machine.next_wakeup() == math.inf for machine in world.machines.values())


# ---- runs ------------------------------------------------------------------------


def test_a_second_run_is_refused_while_one_is_under_way() -> None:
    world = World(sites=3, seed=1)
    world.train("a", rounds=5)
    world.run_until_committed(1)
    with pytest.raises(RunRefused, match=r"run-\d+-5 of a is under way until round 5"):
        world.site("c").step(do.RunRequested("other", 1, plan()), world.now)


def test_a_run_can_be_stopped_from_any_site() -> None:
    world = World(sites=3, seed=2)
    world.train("a", rounds=50)
    world.run_until_committed(2)
    world.stop("c")
    world.run_for(2_000)
    heads = {machine.head_round for machine in world.machines.values()}
    assert len(heads) == 1
    assert heads.pop() <= 4


def test_a_plan_of_too_few_participants_is_refused_where_it_is_asked_for() -> None:
    world = World(sites=3, seed=1)
    with pytest.raises(RunRefused, match=r"training\.min_participants"):
        world.site("a").step(do.RunRequested("r", 1, plan(min_participants=1)), world.now)
    with pytest.raises(RunRefused, match="3 enabled sites"):
        world.site("a").step(do.RunRequested("r", 1, plan(min_participants=9)), world.now)


def test_a_run_in_a_federation_too_small_for_its_liars_is_refused_with_what_to_do() -> None:
    world = World(sites=2, seed=1, faulty_sites=1)
    with pytest.raises(RunRefused, match="Let 1 more take part"):
        world.site("a").step(do.RunRequested("r", 1, plan()), world.now)


def test_a_run_that_comes_too_late_is_answered_with_the_one_that_stands() -> None:
    world = World(sites=3, seed=1)
    world.train("a", rounds=2)
    world.run_until_committed(1)
    machine, stands = world.site("b"), world.site("b").durable.signed_run
    assert stands is not None
    old = Stage(manifest=world.manifest).run_of(
        world.training, generation=0, run_id="old", requested_by="a"
    )
    effects = machine.step(do.Received("c", pb.RunWish(run=old)), world.now)
    assert said(effects) == [pb.RunWish(run=stands)]
    assert machine.step(do.Received("c", pb.RunWish(run=stands)), world.now) == []


def test_whoever_knows_that_the_run_was_stopped_tells_the_next_coordinator() -> None:
    world = World(sites=3, seed=2, min_participants=2)
    world.train("a", rounds=50)
    world.run_until_committed(1)
    others = tuple((a, b) for a in "abc" for b in "abc" if a != b)
    world.cut(others)
    world.stop("c")
    world.run_for(1)
    world.heal(others)
    world.run_for(500)
    heads = [machine.head_round for machine in world.machines.values()]
    assert max(heads) <= 3
    assert not any(machine.busy for machine in world.machines.values())


# ---- who takes part --------------------------------------------------------------


def test_a_site_that_cannot_train_is_named_with_its_reason() -> None:
    world = World(sites=3, seed=1)
    world._feed("c", do.Situation(2, willing=False, reason="has 2 training pairs and needs 8"))
    world.train("a", rounds=1)
    world.run_for(20)
    assert "2 of 3 sites can train, the plan needs 3; c: has 2 training pairs" in world.text()


def test_a_federation_goes_on_without_an_unwilling_site_if_enough_remain() -> None:
    world = World(sites=3, seed=1, min_participants=2)
    world._feed("a", do.Situation(0, willing=False, reason="off here"))
    world.train("a", rounds=1)
    world.run_until_committed(1)
    certificate = world.disks["a"].commits[1].certificate
    assert list(certificate.body.contributors) == ["b", "c"]


def test_an_unwilling_site_coordinates_all_the_same() -> None:
    world = World(sites=3, seed=1, min_participants=2)
    world.set_willing(coordinator(world, 1), willing=False)
    world.train("a", rounds=1)
    world.run_until_committed(1)
    assert world.certificate(1).attempt == 0
    assert coordinator(world, 1) not in world.certificate(1).body.contributors


def test_a_site_that_was_away_catches_up() -> None:
    world = World(sites=3, seed=6, min_participants=2)
    world.train("a", rounds=6)
    world.run_until_committed(1)
    world.crash("a")
    world.run_for(400)
    assert world.site("b").head_round >= 3
    world.start("a")
    world._feed("a", do.PeerAhead("b", world.site("b").head_round))
    world.run_until_committed(6)
    assert world.disks["a"].durable.head_digest == world.disks["b"].durable.head_digest


# ---- what is refused -------------------------------------------------------------


def prepare(world: World, sender: str, attempt: int = 0, **changed: object) -> pb.Prepare:
    """As an honest coordinator of this run says it."""
    stage = Stage(manifest=world.manifest)
    run = world.site("a").durable.signed_run
    stage.run = run or stage.run_of(world.training)
    fields: dict[str, object] = {
        "round": 1,
        "attempt": attempt,
        "head_digest": GENESIS,
        "run": stage.run,
        "manifest_version": 1,
        "promise": stage.promised(sender, attempt),
    }
    return pb.Prepare(**{**fields, **changed})  # type: ignore[arg-type]


def test_a_prepare_out_of_turn_is_refused() -> None:
    world = World(sites=3, seed=1)
    stranger = next(s for s in "abc" if s != coordinator(world, 1) and s != "a")
    with pytest.raises(RemoteProtocolError, match="not its turn"):
        world.site("a").step(do.Received(stranger, prepare(world, stranger)), 0.0)


def test_a_coordinator_that_builds_on_another_history_is_refused() -> None:
    world = World(sites=3, seed=1)
    lead = coordinator(world, 1)
    elsewhere = prepare(world, lead, head_digest=b"x" * 32)
    with pytest.raises(RemoteProtocolError, match="committed here is"):
        world.site("a").step(do.Received(lead, elsewhere), 0.0)


def test_a_sum_of_one_update_is_signed_by_nobody() -> None:
    """And what nobody has signed nobody opens (tests/test_proving.py)."""
    world = World(sites=3, seed=1)
    world.train("a", rounds=1)
    until(world, ": Scale ")
    lead, holder = coordinator(world, 1), world.site("a")
    assert holder._bundle is not None
    assert holder._plan is not None
    stage = Stage(manifest=world.manifest)
    lone = stage.statement_of(holder._bundle, made=holder._plan, sites="c")
    state = pb.State(round=1, attempt=0, statement=lone.SerializeToString(deterministic=True))
    with pytest.raises(RemoteProtocolError, match="states a sum of 1; the plan needs 3"):
        holder.step(do.Received(lead, state), world.now)


def test_a_forged_vote_counts_for_nothing() -> None:
    world = World(sites=3, seed=1)
    world.train("a", rounds=1)
    until(world, ": Proven ")
    lead = coordinator(world, 1)
    liar = next(s for s in "abc" if s != lead)
    world.watch.liars.add(liar)
    body = pb.VoteBody(
        federation_id="simulated",
        round=1,
        parent_digest=b"p" * 32,
        model_digest=b"m" * 32,
        plan_digest=b"d" * 32,
        contributors=["a", "b", "c"],
        manifest_version=1,
        rules=RULES,
        manifest_digest=world.manifest.digest,
        statement_digest=b"s" * 32,
    )
    forged = pb.Vote(attempt=0, body=body, site=liar, signature=b"forged")
    world._feed(lead, do.Received(liar, forged))
    assert f"bad signature of {liar}" in world.text()
    world._feed(lead, do.Received(liar, sign_vote(SimulatedKeys(liar).sign, body, 0)))
    assert f"{liar} votes for something else than was proven" in world.text()
    world.run_until_committed(1)
    assert world.committed[1] != b"m" * 32


def test_a_late_vote_of_another_attempt_changes_nothing() -> None:
    world = World(sites=3, seed=1)
    machine: Protocol = world.site("b")
    late = pb.Vote(attempt=9, body=pb.VoteBody(round=3), site="c")
    assert machine.step(do.Received("c", late), 0.0) == []


def test_a_vote_that_another_site_brings_is_refused() -> None:
    world = World(sites=3, seed=1)
    theirs = pb.Vote(body=pb.VoteBody(round=1), site="a")
    with pytest.raises(RemoteProtocolError, match="c sent a vote of a"):
        world.site("b").step(do.Received("c", theirs), 0.0)


# ---- what survives ---------------------------------------------------------------


def test_a_vote_survives_a_crash_and_its_version_is_stated_again() -> None:
    """A version that one site has voted for may be committed: the next attempt begins with it."""
    world = World(sites=3, seed=3)
    world.train("a", rounds=1)
    while not any(disk.durable.state.HasField("vote") for disk in world.disks.values()):
        world.step()
    voted = next(
        d.durable.state.vote for d in world.disks.values() if d.durable.state.HasField("vote")
    )
    world.crash(coordinator(world, 1, 0))
    world.run_until_committed(1)
    assert world.committed[1] == voted.body.model_digest
    assert world.certificate(1).attempt == 1
    assert "Train 1.1" not in world.text(), "nothing is trained anew"


def test_an_attempt_number_is_never_used_twice_by_a_restarted_coordinator() -> None:
    world = World(sites=3, seed=5)
    world.train("a", rounds=1)
    until(world, "Prepare 1.0")
    lead = coordinator(world, 1, 0)
    assert world.disks[lead].durable.promised == 0, "persisted before the first Prepare"
    world.crash(lead)
    world.start(lead)
    effects = world.site(lead).start(world.now)
    assert not any(isinstance(body, pb.Prepare) for body in said(effects))
    world.run_until_committed(1)
    assert world.certificate(1).attempt == 1


def test_a_promise_is_repeated_byte_by_byte_whatever_has_changed_since() -> None:
    """Built anew it would contradict itself: two promises of one attempt are evidence."""
    world = World(sites=3, seed=5)
    world.train("a", rounds=1)
    until(world, ": Promised 1.0")
    lead = coordinator(world, 1)
    machine = world.site("a")
    promised = machine.durable.state.promise
    machine.step(do.Situation(1, willing=False, reason="off now"), world.now)
    again = machine.step(do.Received(lead, prepare(world, lead)), world.now)
    assert [body for body in said(again, lead) if isinstance(body, pb.Promised)] == [promised]


@pytest.mark.parametrize("seed", range(24))
def test_rounds_are_committed_through_loss_duplicates_and_a_crash(seed: int) -> None:
    faults = Faults(drop=0.05, duplicate=0.1, delay_s=(0.001, 1.0))
    world = World(sites=(3, 5, 7)[seed % 3], seed=seed, faults=faults, min_participants=2)
    world.train("a", rounds=3)
    world.run_for(world.random.uniform(0, 20))
    victim = world.random.choice(sorted(world.machines))
    world.crash(victim)
    world.run_for(world.random.uniform(0, 100))
    world.start(victim)
    world.run_until_committed(3, within_s=100_000)


# ---- failure paths ---------------------------------------------------------------


def dealer(world: World) -> str:
    """The key dealer of round 1, attempt 0, with everybody willing."""
    names = sorted(world.machines)
    return next_after(coordinator(world, 1), names)


def test_a_key_dealer_that_fails_ends_the_attempt_at_once_with_its_reason() -> None:
    world = World(sites=3, seed=1, min_participants=2)
    world.failing.add((dealer(world), "key"))
    world.train("a", rounds=1)
    until(world, f"failed the key dealer {dealer(world)} failed to key: hm")
    assert world.now < LONGEST_WORK_S + 2.0


def test_a_key_dealer_that_dies_costs_a_phase_not_the_training_deadline() -> None:
    world = World(sites=5, seed=1, min_participants=3)
    world.train("a", rounds=1)
    until(world, f"{dealer(world)} -> {coordinator(world, 1)}: PlanAnswer")
    world.crash(dealer(world))
    until(world, "failed no round key came from the key dealer")
    assert world.now < TIMING.phase(0) + 3.0
    world.run_until_committed(1)


def test_a_site_that_never_got_the_bundle_is_not_waited_for_in_training() -> None:
    world = World(sites=5, seed=2, min_participants=3)
    lead = coordinator(world, 1)
    deaf = next(s for s in world.machines if s not in (lead, dealer(world)))
    world.train("a", rounds=1)
    until(world, f"{deaf} -> {lead}: Promised")
    world.cut(((lead, deaf), (deaf, lead)))
    while len(world.committed) < 1:
        world.step()
    assert world.now < TIMING.phase(0) + 15.0
    assert world.certificate(1).attempt == 0
    assert deaf not in world.certificate(1).body.contributors


def test_a_coordinator_that_was_restarted_says_at_once_that_its_attempt_is_over() -> None:
    world = World(sites=5, seed=2, min_participants=3)
    world.train("a", rounds=1)
    lead = coordinator(world, 1)
    until(world, "Trained 1.0")
    world.crash(lead)
    world.start(lead)
    began = world.now
    world.run_until_committed(1)
    assert world.now < began + 15.0, "nobody waited a patience for it"
    assert world.certificate(1).attempt == 1


def test_a_participant_that_was_restarted_is_neither_waited_for_nor_in_the_way() -> None:
    """The next coordinator restarts: it does not begin its attempt while this one gets on."""
    world = World(sites=5, seed=2, min_participants=3)
    world.train("a", rounds=1)
    following = coordinator(world, 1, 1)
    until(world, f"{following} -> {coordinator(world, 1)}: PlanAnswer")
    world.crash(following)
    world.start(following)
    world.run_until_committed(1)
    assert world.certificate(1).attempt == int(following == dealer(world))
    assert world.now < 15.0


@pytest.mark.parametrize("phase", ["encrypt", "train"])
def test_a_participant_that_fails_is_left_out_at_once(phase: str) -> None:
    world = World(sites=5, seed=3, min_participants=3)
    weak = next(s for s in world.machines if s not in (coordinator(world, 1), dealer(world)))
    world.failing.add((weak, phase))
    world.train("a", rounds=1)
    world.run_until_committed(1)
    assert world.now < 12.0
    assert weak not in world.certificate(1).body.contributors


def test_a_key_holder_that_cannot_apply_fetches_the_version_and_votes() -> None:
    world = World(sites=3, seed=4, min_participants=2)
    world.failing.add((dealer(world), "apply"))
    world.train("a", rounds=1)
    world.run_until_committed(1)
    assert world.certificate(1).attempt == 0
    assert world.now < 12.0


def test_no_key_holder_that_can_apply_ends_the_attempt_with_their_reasons() -> None:
    world = World(sites=3, seed=4, min_participants=2)
    world.failing |= {(name, "apply") for name in world.machines}
    world.train("a", rounds=1)
    until(world, "failed 0 sites could open the sum, 1 prove it; a: apply: hm; c: apply: hm")
    assert world.now < 12.0


def test_an_end_heard_one_commit_too_early_is_remembered() -> None:
    """It is behind by a commit: it neither promises for nothing nor waits its patience."""
    world = World(sites=3, seed=1)
    world.train("a", rounds=3)
    world.run_until_committed(1)
    machine, lead = world.site("a"), coordinator(world, 3)
    early = prepare(world, lead, round=3, head_digest=b"x" * 32)
    told = pb.Ended(federation_id="simulated", round=3, reason="over")
    over = pb.EndedAttempt(ended=sign(SimulatedKeys(lead), Kind.ENDED, told))
    assert machine.head_round == 1
    machine.step(do.Received(lead, early), world.now)
    machine.step(do.Received(lead, over), world.now)
    assert [type(event.body) for event in machine._too_early] == [pb.Prepare, pb.EndedAttempt]


def test_a_bundle_that_comes_late_keeps_nobody_busy_once_the_run_is_stopped() -> None:
    world = World(sites=3, seed=1)
    world.train("a", rounds=1)
    until(world, "Bundle 1.0")
    leader = world.site(coordinator(world, 1))
    assert leader._bundle is not None
    late = leader._bundle.message
    machine, lead = world.site(coordinator(world, 1, 1)), leader.site
    told = pb.Ended(federation_id="simulated", round=1, reason="over")
    over = pb.EndedAttempt(ended=sign(SimulatedKeys(lead), Kind.ENDED, told))
    machine.step(do.Received(lead, late), world.now)
    machine.step(do.Received(lead, over), world.now)
    stop = Stage(manifest=world.manifest).run_of(
        world.training, generation=2, run_id="stop", target_round=0
    )
    machine.step(do.Received("a", pb.RunWish(run=stop)), world.now)
    machine.step(do.Received(lead, late), world.now)
    while (due := machine.next_wakeup()) < math.inf:
        machine.step(do.Tick(), due)
    assert not machine.busy


def test_a_manifest_takes_effect_with_the_next_attempt_which_begins_now() -> None:
    world = World(sites=3, seed=1)
    world.train("a", rounds=1)
    until(world, "Bundle 1.0")
    newer = world.manifests[2] = replace(world.manifest, version=2)
    before = {name: world.site(name).durable.promised for name in "abc"}
    for name in "abc":
        world._feed(name, do.ManifestChanged(newer, name.encode()))
    assert {world.site(name).manifest.version for name in "abc"} == {2}
    assert all(world.site(name).durable.promised > before[name] for name in "abc")
    world.run_until_committed(1)
    assert world.certificate(1).body.manifest_version == 2
    assert world.certificate(1).attempt == 1
