"""The round protocol, as conversations between simulated sites."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from peers import effects as do
from peers.errors import RemoteProtocolError
from peers.manifest import FederationManifest
from peers.protocol import Protocol
from peers.roles import coordinator_of, key_holders, next_after, weights
from peers.runs import RunRefused
from proto import federation_pb2 as pb
from tests.scenarios.faults import Faults
from tests.simulation import GENESIS, LONGEST_WORK_S, TIMING, World, coordinator, plan


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
    world.train("b", rounds=1)
    world.run_until_committed(1)
    sent_by_b = [line.split(": ")[1].split()[0] for line in world.transcript if " b -> c: " in line]
    # At one delay for all; the first two leave together.
    assert sorted(sent_by_b[:2]) == ["Prepare", "Run"]
    assert sent_by_b[2:] == ["Plan", "Scale", "Apply", "Proof", "Commit"]
    sent_by_c = [line.split(": ")[1].split()[0] for line in world.transcript if " c -> b: " in line]
    assert sent_by_c == ["Promise", "PlanAnswer", "Trained", "Challenge", "Vote"]


def test_the_report_names_every_phase_and_the_seconds_it_took() -> None:
    world = World(sites=3, seed=4)
    world.train("b", rounds=1)
    world.run_until_committed(1)
    report = world.disks["c"].commits[1].report
    phases = [p.phase for p in report.phases]
    assert sorted(phases) == sorted(
        ["prepare", "plan", "key", "train", "aggregate", "apply", "vote"]
    )
    # The key is dealt beside training: its span may end before or after the plan's.
    assert [p for p in phases if p != "key"] == [
        "prepare",
        "plan",
        "train",
        "aggregate",
        "apply",
        "vote",
    ]
    assert all(p.seconds >= 0 for p in report.phases)
    assert report.coordinator != report.key_dealer
    assert report.mean_loss == 1.0


def test_the_coordinator_never_holds_the_secret_key() -> None:
    for site in "abc":
        made = pb.Plan(participants=[pb.Participant(site=s) for s in "abc"])
        assert site not in key_holders(made, site)
        assert next_after(site, "abc") != site


def test_weights_are_shares_of_the_largest_site() -> None:
    made = pb.Plan(
        participants=[
            pb.Participant(site="a", num_examples=50),
            pb.Participant(site="b", num_examples=200),
        ]
    )
    assert weights(made) == {"a": 0.25, "b": 1.0}


def test_a_second_run_is_refused_while_one_is_under_way() -> None:
    world = World(sites=3, seed=1)
    world.train("a", rounds=5)
    world.run_until_committed(1)
    with pytest.raises(RunRefused, match=r"run-1-5 of a is under way until round 5"):
        world.site("c").step(do.RunRequested("other", 1, plan()), world.now)


def test_a_run_can_be_stopped_from_any_site() -> None:
    world = World(sites=3, seed=2)
    world.train("a", rounds=50)
    world.run_until_committed(2)
    world._feed("c", do.StopRequested("stop"))
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


def test_a_prepare_out_of_turn_is_refused() -> None:
    world = World(sites=3, seed=1)
    stranger = next(s for s in "abc" if s != coordinator(world, 1) and s != "a")
    prepare = pb.Prepare(round=1, attempt=0, head_digest=GENESIS, manifest_version=1)
    with pytest.raises(RemoteProtocolError, match="not its turn"):
        world.site("a").step(do.Received(stranger, prepare), 0.0)


def test_a_coordinator_that_builds_on_another_history_is_refused() -> None:
    world = World(sites=3, seed=1)
    prepare = pb.Prepare(round=1, attempt=0, head_digest=b"x" * 32, manifest_version=1)
    with pytest.raises(RemoteProtocolError, match="committed here is"):
        world.site("a").step(do.Received(coordinator(world, 1), prepare), 0.0)


def test_a_sum_of_one_update_is_never_decrypted() -> None:
    world = World(sites=3, seed=1)
    world.train("a", rounds=1)
    while not any("Scale" in line for line in world.transcript):
        world.step()
    holder = world.site("a")
    lone = pb.Apply(round=1, attempt=0, contributors=["c"], sum_digest=b"0" * 32)
    with pytest.raises(RemoteProtocolError, match="plan needs at least 3"):
        holder.step(do.Received(coordinator(world, 1), lone), world.now)


def test_a_forged_vote_counts_for_nothing() -> None:
    world = World(sites=3, seed=1)
    world.train("a", rounds=1)
    while not any("Apply" in line for line in world.transcript):
        world.step()
    lead = coordinator(world, 1)
    other = next(s for s in "abc" if s != lead)
    body = pb.VoteBody(
        federation_id="simulated",
        round=1,
        parent_digest=b"p" * 32,
        model_digest=b"m" * 32,
        plan_digest=b"d" * 32,
        contributors=["a", "b", "c"],
        manifest_version=1,
    )
    forged = pb.Vote(attempt=0, body=body, site=other, signature=b"forged")
    world._feed(lead, do.Received(other, forged))
    assert "bad signature" in world.text()
    world.run_until_committed(1)
    assert world.committed[1] != b"m" * 32


def test_promise_and_accepted_value_survive_a_crash() -> None:
    """A value that one site accepted is proposed again by the next coordinator."""
    world = World(sites=3, seed=3)
    world.train("a", rounds=1)
    while not any(disk.durable.accepted for disk in world.disks.values()):
        world.step()
    accepted = next(d.durable.accepted for d in world.disks.values() if d.durable.accepted)
    assert accepted is not None
    world.crash(coordinator(world, 1, 0))
    world.run_until_committed(1)
    assert world.committed[1] == accepted.value.model_digest


def test_of_two_accepted_values_the_later_one_is_proposed_again() -> None:
    """The earlier one was given up when the later one was chosen; the reverse is a fork."""
    world = World(sites=5, seed=3)
    world.train("a", rounds=1)
    until(world, "Prepare 1.0")
    lead = coordinator(world, 1)
    others = [name for name in "abcde" if name != lead]
    bodies = [pb.VoteBody(round=1, model_digest=bytes([n]) * 32) for n in range(2)]
    said: list[do.Effect] = []
    for name, attempt, body in zip(others, (3, 5, 3, 3), (0, 1, 0, 0), strict=True):
        accepted = pb.Accepted(attempt=attempt, value=bodies[body])
        promise = pb.Promise(round=1, attempt=0, accepted=accepted)
        said += world.site(lead).step(do.Received(name, promise), world.now)
    proposed = [e.body for e in said if isinstance(e, do.Send) and isinstance(e.body, pb.Accept)]
    assert proposed
    assert all(accept.value == bodies[1] for accept in proposed)


def test_an_attempt_number_is_never_used_twice_by_a_restarted_coordinator() -> None:
    world = World(sites=3, seed=5)
    world.train("a", rounds=1)
    world.run_for(0.2)
    lead = coordinator(world, 1, 0)
    promised = world.disks[lead].durable.promised
    assert promised == 0, "persisted before the first Prepare"
    world.crash(lead)
    world.start(lead)
    effects = world.site(lead).start(world.now)
    assert not any(isinstance(e, do.Send) and isinstance(e.body, pb.Prepare) for e in effects)


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


def test_a_late_vote_of_another_attempt_changes_nothing() -> None:
    world = World(sites=3, seed=1)
    machine: Protocol = world.site("b")
    late = pb.Vote(attempt=9, body=pb.VoteBody(round=1), site="c")
    assert machine.step(do.Received("c", late), 0.0) == []


def test_nothing_wakes_an_idle_federation() -> None:
    world = World(sites=3, seed=1)
    world.run_for(10_000)
    assert all(machine.next_wakeup() == math.inf for machine in world.machines.values())


def test_a_manifest_takes_effect_between_attempts_only() -> None:
    world = World(sites=3, seed=1)
    world.train("a", rounds=1)
    while not any("Plan" in line for line in world.transcript):
        world.step()
    newer = replace(world.manifest, version=2)
    for name in "abc":
        world._feed(name, do.ManifestChanged(newer, name.encode()))
    assert world.site("b").manifest.version == 1
    world.run_until_committed(1)
    assert {world.site(name).manifest.version for name in "abc"} == {2}


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


def until(world: World, text: str) -> None:
    """Let time pass until the transcript says this."""
    end = world.now + 1_000
    while text not in "\n".join(world.transcript[-40:]):
        assert world.now < end, f"never: {text}\n{world.text()}"
        world.step()


def dealer(world: World) -> str:
    """The key dealer of round 1, attempt 0, with everybody willing."""
    names = sorted(world.machines)
    return next_after(coordinator(world, 1), names)


def test_a_key_dealer_that_fails_ends_the_attempt_at_once_with_its_reason() -> None:
    world = World(sites=3, seed=1, min_participants=2)
    world.failing.add((dealer(world), "key"))
    world.train("a", rounds=1)
    until(world, f"failed the key dealer {dealer(world)} failed to key: hm")
    assert world.now < LONGEST_WORK_S + 1.0


def test_a_key_dealer_that_dies_costs_a_phase_not_the_training_deadline() -> None:
    world = World(sites=5, seed=1, min_participants=3)
    world.train("a", rounds=1)
    until(world, f"{dealer(world)} -> {coordinator(world, 1)}: PlanAnswer")
    world.crash(dealer(world))
    until(world, "failed no round key came from the key dealer")
    assert world.now < TIMING.phase(0) + 2.0
    world.run_until_committed(1)


def test_a_site_that_never_got_the_plan_is_not_waited_for_in_training() -> None:
    world = World(sites=5, seed=2, min_participants=3)
    lead = coordinator(world, 1)
    deaf = next(s for s in world.machines if s not in (lead, dealer(world)))
    world.train("a", rounds=1)
    until(world, f"{deaf} -> {lead}: Promise")
    world.cut(((lead, deaf), (deaf, lead)))
    while len(world.committed) < 1:
        world.step()
    assert world.now < TIMING.phase(0) + 10.0
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
    assert world.now < 10.0
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
    until(world, "failed no key holder could apply the sum; a: apply: hm; c: apply: hm")
    assert world.now < 12.0


def test_an_unwilling_site_coordinates_all_the_same() -> None:
    world = World(sites=3, seed=1, min_participants=2)
    world.set_willing(coordinator(world, 1), willing=False)
    world.train("a", rounds=1)
    world.run_until_committed(1)
    assert world.certificate(1).attempt == 0
    assert coordinator(world, 1) not in world.certificate(1).body.contributors


def test_a_failure_heard_one_commit_too_early_is_remembered() -> None:
    """It is behind by a commit: it neither promises for nothing nor waits its patience."""
    world = World(sites=3, seed=1)
    world.train("a", rounds=3)
    world.run_until_committed(1)
    machine, lead = world.site("a"), coordinator(world, 3)
    prepare = pb.Prepare(round=3, head_digest=b"x" * 32, run=machine.run, manifest_version=1)
    over = pb.AttemptFailed(round=3, reason="over")
    assert machine.head_round == 1
    machine.step(do.Received(lead, prepare), world.now)
    machine.step(do.Received(lead, over), world.now)
    assert [type(event.body) for event in machine._too_early] == [pb.Prepare, pb.AttemptFailed]


def test_a_coordinator_that_is_too_late_waits_for_the_attempt_under_way() -> None:
    world = World(sites=3, seed=1)
    world.train("a", rounds=1)
    until(world, "Prepare 1.0")
    lead = world.site(coordinator(world, 1))
    effects = lead.step(do.Received("a", pb.Nack(round=1, promised_attempt=7)), world.now)
    said = [e.body for e in effects if isinstance(e, do.Send)]
    assert all(isinstance(body, pb.AttemptFailed) for body in said)
    assert lead.next_wakeup() == world.now + TIMING.patience(7)


def test_a_run_that_comes_too_late_is_answered_with_the_one_that_stands() -> None:
    world = World(sites=3, seed=1)
    world.train("a", rounds=2)
    world.run_until_committed(1)
    machine, stands = world.site("b"), world.site("b").run
    assert stands is not None
    old = pb.Run(run_id="old", requested_by="c", target_round=9, plan=stands.plan)
    effects = machine.step(do.Received("c", old), world.now)
    assert [(e.to, e.body) for e in effects if isinstance(e, do.Send)] == [("c", stands)]
    assert machine.step(do.Received("c", stands), world.now) == []


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


# ---- manifests -------------------------------------------------------------------


def successor(world: World, *, without: str) -> FederationManifest:
    """The next manifest, with one site disabled."""
    sites = tuple(replace(s, enabled=s.id != without) for s in world.manifest.sites)
    newer = FederationManifest("simulated", 2, sites)
    world.manifests[2] = newer
    return newer


def test_a_site_that_voted_stays_with_the_manifest_of_its_vote_over_a_restart() -> None:
    world = World(sites=5, seed=1, min_participants=3)
    world.train("a", rounds=1)
    while not (voters := [n for n in "abcde" if world.disks[n].durable.accepted]):
        world.step()
    newer = successor(world, without=next(n for n in "abcde" if n not in voters))
    voter = voters[0]
    world.crash(voter)
    world.installed[voter] = newer
    world.start(voter)
    assert world.site(voter).manifest.version == 1
    world.run_until_committed(1)
    assert world.site(voter).manifest.version == 2


def test_an_older_manifest_is_good_for_an_accepted_value_not_for_training() -> None:
    world = World(sites=3, seed=1)
    newer = successor(world, without="c")
    world.install("a", newer)
    prepare = pb.Prepare(round=1, head_digest=GENESIS, run=pb.Run(), manifest_version=1)
    effects = world.site("a").step(do.Received("b", prepare), 0.0)
    promise = next(e.body for e in effects if isinstance(e, do.Send))
    assert isinstance(promise, pb.Promise)
    assert not promise.willing
    assert "newer federation manifest" in promise.reason


def test_a_site_that_is_enabled_again_takes_part_again() -> None:
    world = World(sites=5, seed=1, min_participants=3)
    newer = successor(world, without="e")
    for name in "abcde":
        world.install(name, newer)
    world.train("a", rounds=200)
    world.run_for(30)
    assert world.site("a").head_round > world.site("e").head_round == 0
    again = replace(world.manifest, version=3)
    world.manifests[3] = again
    for name in "abcde":
        world.install(name, again)
    world.run_for(100)
    head = world.site("a").head_round
    assert "e" in world.certificate(head).body.contributors


def test_every_site_agrees_who_coordinates() -> None:
    world = World(sites=5, seed=0)
    turns = [coordinator_of(world.manifest, 1, attempt) for attempt in range(5)]
    assert sorted(turns) == list("abcde")


def test_who_has_accepted_nothing_goes_by_the_older_manifest_of_those_who_have() -> None:
    """a and b accepted a value under the old list; c, which did not, hears of it and joins."""
    world = World(sites=5, seed=1, min_participants=3)
    lead = world.site("c")
    world.train("c", rounds=1)
    newer = successor(world, without="e")
    world.install("c", newer)
    attempt = next(n for n in range(9) if coordinator_of(newer, 1, n) == "c")
    lead._begin(attempt)
    lead.step(do.Received("c", lead._promise()), world.now)
    assert lead.manifest.version == 2
    for site in "abd":
        bound = 1 if site in "ab" else 0
        no = pb.AttemptFailed(round=1, attempt=attempt, reason="no", manifest_version=bound)
        effects = lead.step(do.Received(site, no), world.now)
    said = [e.body for e in effects if isinstance(e, do.Send) and e.to == "d"]
    over = [body for body in said if isinstance(body, pb.AttemptFailed)]
    assert [message.manifest_version for message in over] == [1]
    assert lead.manifest.version == 1

    other = world.site("d")
    world.install("d", newer)
    assert lead.run is not None
    other.step(do.Received("c", lead.run), world.now)
    other.step(do.Received("c", over[0]), world.now)
    assert other.manifest.version == 1
    while other.manifest.version == 1:  # nobody begins it: the newest is tried again
        other.step(do.Tick(), other.next_wakeup())
    assert other.manifest.version == 2


def test_a_plan_that_comes_late_keeps_nobody_busy_once_the_run_is_stopped() -> None:
    world = World(sites=3, seed=1)
    world.train("a", rounds=1)
    until(world, "Plan 1.0")
    leader = world.site(coordinator(world, 1))
    assert leader._coordination is not None
    late = leader._coordination.plan
    assert late is not None
    machine, lead, run = world.site(coordinator(world, 1, 1)), leader.site, leader.run
    assert run is not None
    stop = pb.Run(generation=run.generation + 1, run_id="stop", requested_by="b", plan=run.plan)
    for body in (pb.AttemptFailed(round=1, reason="over"), late, stop):
        machine.step(do.Received(lead, body), world.now)
    assert machine.busy
    while (due := machine.next_wakeup()) < math.inf:
        machine.step(do.Tick(), due)
    assert not machine.busy
