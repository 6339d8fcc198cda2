"""A site is expelled in the middle of a round: nobody waits for it, and nothing is voted twice."""

from __future__ import annotations

from dataclasses import replace

import pytest

from peers import effects as do
from peers.manifest import FederationManifest
from peers.roles import next_after
from proto import federation_pb2 as pb
from tests.simulation import LONGEST_WORK_S, World, coordinator


def until(world: World, text: str) -> None:
    """Let time pass until the transcript says this."""
    end = world.now + 1_000
    while text not in "\n".join(world.transcript[-40:]):
        assert world.now < end, f"never: {text}\n{world.text()}"
        world.step()


def expel(world: World, site: str, *, at: str = "abcde") -> FederationManifest:
    """The next manifest, with that site disabled, installed at these sites."""
    sites = tuple(replace(s, enabled=s.id != site) for s in world.manifest.sites)
    newer = world.manifests[2] = FederationManifest("simulated", 2, sites)
    for name in at:
        world.install(name, newer)
    return newer


def committed_at(world: World, sites: list[str], round_: int, within_s: float) -> None:
    end = world.now + within_s
    while not all(world.site(name).head_round >= round_ for name in sites):
        assert world.now < end, world.text()
        world.step()


def others(world: World, *but: str) -> list[str]:
    return [name for name in sorted(world.machines) if name not in but]


def training(seed: int = 1) -> tuple[World, str, str]:
    """Five sites in round 1; its coordinator and its key dealer."""
    world = World(sites=5, seed=seed, min_participants=3)
    world.train("a", rounds=1)
    lead = coordinator(world, 1)
    return world, lead, next_after(lead, sorted(world.machines))


def test_an_expelled_coordinators_attempt_is_over_at_once() -> None:
    world, lead, _ = training()
    until(world, "Plan 1.0")
    began = world.now
    expel(world, lead)
    up = others(world, lead)
    assert {world.site(name).manifest.version for name in up} == {2}
    committed_at(world, up, 1, within_s=LONGEST_WORK_S * 4)
    assert world.now < began + 15.0, "nobody waited a patience for it"
    assert world.certificate(1).attempt > 0
    assert world.certificate(1).body.manifest_version == 2
    assert lead not in world.certificate(1).body.contributors


@pytest.mark.parametrize("when", ["PlanAnswer 1.0", "Trained 1.0"])
def test_an_expelled_participant_is_not_waited_for_and_not_in_the_sum(when: str) -> None:
    world, lead, dealer = training(seed=3)
    out = others(world, lead, dealer)[0]
    world.slowness[out] = 1_000.0  # it would be waited for until the training deadline
    until(world, when)
    began = world.now
    expel(world, out)
    committed_at(world, others(world, out), 1, within_s=60)
    assert world.now < began + 30.0
    assert world.certificate(1).attempt == 0, "the training of the others is not lost"
    assert out not in world.certificate(1).body.contributors
    assert out not in {vote.site for vote in world.certificate(1).votes}


def test_a_site_that_is_expelled_while_promises_come_in_holds_up_nobody() -> None:
    world, lead, _ = training(seed=3)
    until(world, "Prepare 1.0")
    out = others(world, lead)[0]
    began = world.now
    expel(world, out)
    committed_at(world, others(world, out), 1, within_s=60)
    assert world.now < began + 15.0
    assert out not in world.certificate(1).body.contributors


def test_an_update_that_is_in_the_sum_already_costs_the_attempt() -> None:
    world, lead, dealer = training(seed=3)
    out = others(world, lead, dealer)[0]
    machine = world.site(lead)
    while machine._coordination is None or out not in machine._coordination.contributors():
        world.step()
    assert machine._coordination.phase == "aggregate"
    expel(world, out)
    until(world, f"the update of {out} is in the sum, and manifest 2 has expelled {out}")
    committed_at(world, others(world, out), 1, within_s=60)
    assert world.certificate(1).attempt == 1
    assert out not in world.certificate(1).body.contributors


def test_an_update_that_was_being_added_when_its_site_was_expelled_costs_the_attempt() -> None:
    world, lead, dealer = training(seed=3)
    out = others(world, lead, dealer)[0]
    machine = world.site(lead)
    while machine._coordination is None or not machine._coordination.expects_update(out):
        world.step()
    expel(world, out)
    effects = machine.step(do.UpdateAdded(1, 0, out), world.now)
    said = [e.body for e in effects if isinstance(e, do.Send)]
    over = [body for body in said if isinstance(body, pb.AttemptFailed)]
    assert over
    assert over[0].reason.startswith(f"the update of {out} came into the sum")


def test_the_turn_of_an_expelled_site_is_not_waited_for_under_the_older_manifest() -> None:
    """A site that has voted stays with the old list, in whose rotation the expelled one is."""
    world, lead, _ = training(seed=4)
    out = coordinator(world, 1, 1)
    while not (voters := [n for n in others(world, lead, out) if world.disks[n].durable.accepted]):
        world.step()
    machine = world.site(voters[0])
    expel(world, out)
    machine._part = None
    machine._expect(1, delay=0.0)
    assert machine.manifest.version == 1
    assert machine._next.attempt == 2


def test_a_value_that_was_voted_for_stays_with_its_contributors() -> None:
    """Somewhere it may be committed already: another one beside it would be the end."""
    world, lead, dealer = training(seed=4)
    out = others(world, lead, dealer)[0]
    machine = world.site(lead)
    while machine._coordination is None or machine._coordination.phase != "vote":
        world.step()
    expel(world, out)
    committed_at(world, others(world, out), 1, within_s=60)
    assert world.certificate(1).attempt == 0
    assert out in world.certificate(1).body.contributors
    assert world.certificate(1).body.manifest_version == 1


def test_a_key_holder_that_knows_opens_no_sum_with_an_expelled_sites_update() -> None:
    """The coordinator has not heard of it; nobody who has helps it to a version."""
    world, lead, dealer = training(seed=3)
    out = others(world, lead, dealer)[0]
    machine = world.site(lead)
    while machine._coordination is None or machine._coordination.phase != "apply":
        world.step()
    for name in others(world, lead, out):
        expel(world, out, at=name)
    world.crash(out)
    until(world, f"the sum has the update of {out}, and manifest 2 has expelled {out}")
    until(world, f"{lead} 1.0 failed")
    expel(world, out, at=lead)
    committed_at(world, others(world, out), 1, within_s=120)
    assert out not in world.certificate(1).body.contributors


def test_an_expelled_site_that_coordinates_gives_up() -> None:
    world, lead, _ = training()
    until(world, "Plan 1.0")
    expel(world, lead, at=lead)
    until(world, f"failed manifest 2 has expelled {lead}")
    assert world.site(lead)._coordination is None


@pytest.mark.parametrize("seed", range(40))
def test_whoever_is_expelled_whenever_and_heard_of_whenever(seed: int) -> None:
    """The watch of the simulation raises if two versions of a round are ever committed."""
    world = World(sites=4 + seed % 2, seed=seed, min_participants=2)
    world.train("a", rounds=3)
    world.run_for(world.random.uniform(0, 12))
    out = world.random.choice(sorted(world.machines))
    for name in sorted(world.machines):
        world.run_for(world.random.uniform(0, 1.0))
        expel(world, out, at=name)
    committed_at(world, others(world, out), 3, within_s=2_000)
