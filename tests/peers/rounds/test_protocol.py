"""The round protocol, as conversations between simulated sites."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from peers.attempts import effects as do
from peers.attempts.ckks import next_after
from peers.attempts.coordination import Coordination
from peers.attempts.modes import key_holders
from peers.attempts.statement import EncodedStatement
from peers.plans.weights import weights
from peers.rounds.protocol import Protocol
from peers.rounds.runs import RunRefused
from peers.wire.certificates import RULES, sign_vote
from peers.wire.errors import RemoteProtocolError
from peers.wire.manifest import FederationManifest, coordinator_of
from peers.wire.signing import Kind, sign
from proto import federation_pb2 as pb
from tests.simulation.network import (
    GENESIS,
    TIMING,
    SimulatedKeys,
    World,
    coordinator,
    plan,
)
from tests.simulation.scenarios.faults import Faults
from tests.simulation.seeds import seeds
from tests.simulation.work import LONGEST_WORK_S


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
    # At one delay for all; what it says at its start, and the run, leave with the rest.
    asked = [said for said in sent_by_b if said not in ("Recall", "Remembered", "RunWish")]
    assert asked == [
        *("Promised", "Prepare", "Bundle", "Scale", "State", "Certified"),
        *("Proof", "Proven", "Commit"),
    ]
    sent_by_c = [line.split(": ")[1].split()[0] for line in world.transcript if " c -> b: " in line]
    answered = [said for said in sent_by_c if said not in ("Recall", "Remembered", "RunWish")]
    # On entering, and once more for who may not have known it then; its key is dealt beside.
    assert answered[:3] == ["Promised", "Promised", "PlanAnswer"]
    assert {*answered[3:5]} == {"Trained", "KeyCommitted"}
    assert answered[5:8] == ["Contributed", "Stated", "Challenge"]
    assert {*answered[8:]} <= {"AppliedSum", "Vote"}, "another one may have opened it first"


def test_the_report_names_every_phase_and_the_seconds_it_took() -> None:
    world = World(sites=3, seed=4)
    world.train("b", rounds=1)
    world.run_until_committed(1)
    report = world.disks["c"].commits[1].report
    phases = [p.phase for p in report.phases]
    assert sorted(phases) == sorted(
        ["prepare", "plan", "key", "train", "aggregate", "state", "open", "vote"]
    )
    # The key is dealt beside training: its span may end before or after the plan's.
    assert [p for p in phases if p != "key"] == [
        "prepare",
        "plan",
        "train",
        "aggregate",
        "state",
        "open",
        "vote",
    ]
    assert all(p.seconds >= 0 for p in report.phases)
    assert report.coordinator != report.key_dealer
    assert report.mean_loss == 1.0


def test_the_coordinator_never_holds_the_secret_key() -> None:
    for site in "abc":
        participants = [pb.Participant(site=s) for s in "abc"]
        made = pb.Plan(participants=participants, coordinator=site)
        assert site not in key_holders(made)
        assert next_after(site, "abc") != site


def test_weights_are_shares_of_the_largest_site() -> None:
    made = pb.Plan(
        full_weight=200,
        participants=[
            pb.Participant(site="a", num_examples=50),
            pb.Participant(site="b", num_examples=200),
        ],
    )
    assert weights(made) == {"a": 0.25, "b": 1.0}


def test_a_report_says_nothing_but_what_is_signed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A coordinator signs none: it could call the others rejected, and no noise a lot."""
    honest = Coordination._report

    def invented(self: Coordination, body: pb.VoteBody) -> pb.RoundReport:
        report = honest(self, body)
        report.coordinator, report.noise_multiplier, report.mean_loss = "c", 7.0, 9.0
        report.rejections.add(site="c", reason="it lies")
        return report

    monkeypatch.setattr(Coordination, "_report", invented)
    world = World(sites=3, seed=1)
    world.train("a", rounds=1)
    world.run_until_committed(1)
    for site in "abc":
        commit = world.disks[site].commits[1]
        body, report = commit.certificate.body, commit.report
        assert (report.coordinator, report.noise_multiplier, len(report.rejections)) == ("b", 0, 0)
        assert (report.mean_loss, report.key_dealer) == (body.mean_loss, "c")
        assert list(report.contributors) == ["a", "b", "c"]


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
    world._feed("c", do.StopRequested("stop"))
    world.run_for(2_000)
    heads = {machine.head_round for machine in world.machines.values()}
    assert len(heads) == 1
    assert heads.pop() <= 4


def test_a_run_that_is_stopped_while_sites_train_is_over_at_once() -> None:
    """The next run does not wait for what the last one had begun, nor for who has left it."""
    world = World(sites=3, seed=4)
    world.train("a", rounds=2)
    while not any(
        m._here.coordination and m._here.coordination.phase == "train"
        for m in world.machines.values()
    ):
        world.step()
    world.stop("c")
    world.run_for(5.0)
    assert "c has stopped the run" in world.text()
    assert not any(machine.busy for machine in world.machines.values())
    world.train("b", rounds=1)
    world.run_until_committed(1, within_s=60)


def test_a_site_that_has_forgotten_the_round_is_not_waited_for() -> None:
    """It hears of the run again, and says that its part in the attempt is lost."""
    world = World(sites=4, seed=4, faulty_sites=1, min_participants=3)
    world.train("a", rounds=1)
    while not (lead := world.site("b")._here.coordination) or lead.phase != "train":
        world.step()
    before = world.now
    world.crash("d")
    world.disks["d"].durable = do.Durable(0, GENESIS)
    world.start("d")
    while world.site("b")._here.coordination is lead:
        world.step()
    assert world.now - before < TIMING.train_s / 2
    assert "1.0 committed" in world.text()


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
        world.site("a").step(do.MessageReceived(stranger, prepare), 0.0)


def test_a_coordinator_that_builds_on_another_history_is_refused() -> None:
    world = World(sites=3, seed=1)
    prepare = pb.Prepare(round=1, attempt=0, head_digest=b"x" * 32, manifest_version=1)
    with pytest.raises(RemoteProtocolError, match="committed here is"):
        world.site("a").step(do.MessageReceived(coordinator(world, 1), prepare), 0.0)


def test_a_sum_of_one_update_is_never_signed() -> None:
    """Not by a key holder that could open it, nor by a witness."""
    world = World(sites=3, seed=1)
    world.train("a", rounds=1)
    lead = coordinator(world, 1)
    while (leading := world.site(lead)._here.coordination) is None or leading._tally.known is None:
        world.step()
    known = leading._tally.known
    lone = pb.Statement()
    lone.CopyFrom(known.message)
    del lone.contributions[1:]
    message = pb.State(round=1, statement=EncodedStatement.of(lone).raw)
    for site in {*"abc"} - {lead}:
        with pytest.raises(RemoteProtocolError, match="states a sum of 1; the plan needs 3"):
            world.site(site).step(do.MessageReceived(lead, message), world.now)


def test_a_forged_vote_counts_for_nothing() -> None:
    world = World(sites=3, seed=1)
    world.train("a", rounds=1)
    until(world, "Certified")
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
        rules=RULES,
        manifest_digest=world.manifest.digest,
        statement_digest=b"s" * 32,
    )
    forged = pb.Vote(attempt=0, body=body, site=other, signature=b"forged")
    world._feed(lead, do.MessageReceived(other, forged))
    assert "bad signature" in world.text()
    world.run_until_committed(1)
    assert world.committed[1] != b"m" * 32


def test_promise_and_lock_survive_a_crash() -> None:
    """A version that one site voted for is stated again by the next coordinator."""
    world = World(sites=3, seed=3)
    world.train("a", rounds=1)
    locked: list[pb.RoundState] = []
    while not locked:
        world.step()
        states = [disk.durable.state for disk in world.disks.values()]
        locked = [state for state in states if state.lock.proof]
    world.crash(coordinator(world, 1, 0))
    world.run_until_committed(1)
    assert world.committed[1] == locked[0].vote.body.model_digest
    assert world.certificate(1).attempt > 0


def test_an_attempt_number_is_never_used_twice_by_a_restarted_coordinator() -> None:
    world = World(sites=3, seed=5)
    world.train("a", rounds=1)
    lead = coordinator(world, 1, 0)
    until(world, f"{lead} -> a: Prepare 1.0")
    assert world.disks[lead].durable.promised == 0, "persisted before the first Prepare"
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
    body = pb.VoteBody(
        federation_id="simulated",
        round=1,
        parent_digest=GENESIS,
        model_digest=b"m" * 32,
        plan_digest=b"d" * 32,
        contributors=["a", "b", "c"],
        manifest_version=1,
        rules=RULES,
        manifest_digest=world.manifest.digest,
        statement_digest=b"s" * 32,
    )
    late = sign_vote(SimulatedKeys("c").sign, body, 9)
    assert machine.step(do.MessageReceived("c", late), 0.0) == []


def test_nothing_wakes_an_idle_federation() -> None:
    world = World(sites=3, seed=1)
    world.run_for(10_000)
    assert all(machine.next_wakeup() == math.inf for machine in world.machines.values())


@pytest.mark.parametrize("seed", seeds(range(9), range(9, 24)))
@pytest.mark.slow
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
    until(world, f"{deaf} -> {lead}: Promised")
    world.cut(((lead, deaf), (deaf, lead)))
    while len(world.committed) < 1:
        world.step()
    assert world.now < TIMING.phase(0) + 10.0
    assert world.certificate(1).attempt == 0
    assert deaf not in world.certificate(1).body.contributors


def test_a_restarted_coordinator_says_at_once_that_its_attempt_is_over() -> None:
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


def test_a_restarted_participant_is_neither_waited_for_nor_in_the_way() -> None:
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
    reasons = "a: failed to apply: hm; c: failed to apply: hm"
    until(world, f"failed 0 sites could open the sum, 1 prove it; {reasons}")
    assert world.now < 12.0


def test_an_unwilling_site_coordinates_all_the_same() -> None:
    world = World(sites=3, seed=1, min_participants=2)
    world.set_willing(coordinator(world, 1), willing=False)
    world.train("a", rounds=1)
    world.run_until_committed(1)
    assert world.certificate(1).attempt == 0
    assert coordinator(world, 1) not in world.certificate(1).body.contributors


def test_a_run_that_comes_too_late_is_answered_with_the_one_that_stands() -> None:
    world = World(sites=3, seed=1)
    world.train("a", rounds=2)
    world.run_until_committed(1)
    machine = world.site("b")
    stands = machine.durable.signed_run
    assert stands is not None
    assert machine.run is not None
    old = pb.Run(
        generation=1,
        run_id="0",
        requested_by="c",
        target_round=1,
        plan=machine.run.plan,
        federation_id="simulated",
    )
    wish = pb.RunWish(run=sign(SimulatedKeys("c"), Kind.RUN, old))
    effects = machine.step(do.MessageReceived("c", wish), world.now)
    said = [(e.to, e.body) for e in effects if isinstance(e, do.Send)]
    assert said == [("c", pb.RunWish(run=stands))]
    assert machine.step(do.MessageReceived("c", pb.RunWish(run=stands)), world.now) == []


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
    newer = FederationManifest("simulated", 2, sites, world.manifest.faulty_sites)
    world.manifests[2] = newer
    return newer


def test_a_manifest_takes_effect_with_the_next_attempt_begun_at_once() -> None:
    world = World(sites=5, seed=1)
    world.train("a", rounds=1)
    until(world, "Bundle 1.0")
    newer = successor(world, without="e")
    for name in "abcde":
        world.install(name, newer)
    assert {world.site(name).durable.promised for name in "abcd"} == {1}
    world.run_until_committed(1) if "e" not in world.machines else world.run_for(60)
    assert world.certificate(1).body.manifest_version == 2
    assert "e" not in world.certificate(1).body.contributors


def test_a_voted_version_is_committed_under_the_newer_manifest() -> None:
    """Its lock goes along: proven under the manifest that it was made under."""
    world = World(sites=5, seed=1, min_participants=3)
    world.train("a", rounds=1)
    while not (voters := [n for n in "abcde" if world.disks[n].durable.state.lock.proof]):
        world.step()
    model = world.disks[voters[0]].durable.state.vote.body.model_digest
    gone = next(n for n in "abcde" if n not in voters and n != "a")
    newer = successor(world, without=gone)
    for name in "abcde":
        world.install(name, newer)
    world.run_for(300)
    body = world.certificate(1).body
    assert body.model_digest == model
    assert body.manifest_version == 2


def test_within_a_round_no_site_goes_back_to_an_older_manifest_ever() -> None:
    world = World(sites=5, seed=1, min_participants=3)
    world.train("a", rounds=2)
    world.run_until_committed(1)
    newer = successor(world, without="e")
    world.install("b", newer)
    until(world, "b 2.1")
    promised = world.disks["b"].durable.promised
    world.crash("b")
    world.start("b")
    assert world.site("b").manifest.version == 2
    assert world.disks["b"].durable.promised >= promised


@pytest.mark.slow
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
