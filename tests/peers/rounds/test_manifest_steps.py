"""A manifest changes in the middle of a round: who goes is not waited for, nothing is chosen twice.

Which manifest is in force where, the pure parts first, then whole rounds.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from peers.attempts import effects as do
from peers.attempts.ckks import next_after
from peers.rounds.manifest_in_force import ManifestInForce
from peers.wire.certificates import RULES
from peers.wire.manifest import FederationManifest, ManifestSite
from proto import federation_pb2 as pb
from tests.simulation.network import World, coordinator
from tests.simulation.seeds import seeds
from tests.simulation.work import LONGEST_WORK_S
from tests.support.signed_rounds import manifest_of

# ---- which one is in force ------------------------------------------------------------------

# One step each, but the last, which is two from the one before it.
HISTORY = {
    1: manifest_of("abcd", 1, 1),
    2: manifest_of("abcde", 1, 2),
    3: manifest_of("abcde", 0, 3),
    4: manifest_of("abc", 0, 4),
}


def head(version: int, rules: int = RULES) -> pb.Certificate:
    """The certificate of the last round."""
    return pb.Certificate(body=pb.VoteBody(round=7, manifest_version=version, rules=rules))


def in_force(newest: int, committed: pb.Certificate | None, entered: int = 0) -> ManifestInForce:
    return ManifestInForce(HISTORY[newest], HISTORY.get, committed, entered)


def test_before_the_first_round_any_manifest_will_do() -> None:
    assert in_force(4, None).current.version == 4
    assert in_force(4, head(1, rules=0)).current.version == 4, "and behind a round of old"


def test_one_step_is_made_between_two_rounds_and_the_next_waits_for_one() -> None:
    """Two steps at once: a quorum of the old list and one of the new could share no honest site."""
    rounds = in_force(2, head(1))
    assert (rounds.current.version, rounds.waiting) == (2, "")
    rounds = in_force(3, head(1))
    assert rounds.current.version == 2, "as far as one step goes"
    assert rounds.waiting == (
        "Manifest 3 is installed: connections go by it. Rounds go by 2 until one is committed "
        "under 2 (the last was under 1): fedctl train --rounds 1. From 1 to 3 e would come or go "
        "and faulty_sites would go from 1 to 0, more than one step, and each half of the sites "
        "could commit a round of its own"
    )
    rounds.new_round(head(2))
    assert (rounds.current.version, rounds.waiting) == (3, "")


def test_a_manifest_that_is_two_steps_away_waits_with_what_to_do() -> None:
    rounds = in_force(4, head(3))
    assert rounds.current.version == 3
    assert rounds.waiting.startswith(
        "Manifest 4 is installed: connections go by it. Rounds go by 3, for from manifest 3 to 4 "
        "it is more than one step: d, e would come or go at once."
    )
    assert "Sign the steps in between" in rounds.waiting
    assert "fedctl train" not in rounds.waiting, "no round would help"
    rounds.new_round(head(3))
    assert rounds.current.version == 3, "rounds go on under the one that is in force"


def test_a_newer_manifest_is_in_force_at_once_and_an_older_one_never_again() -> None:
    """Under an older one an expelled site has a vote."""
    rounds = ManifestInForce(HISTORY[1], HISTORY.get, head(1))
    assert rounds.install(HISTORY[2])
    assert rounds.current.version == 2
    assert not rounds.install(HISTORY[3]), "one step a round"
    assert rounds.current.version == 2
    again = in_force(3, head(1), entered=2)
    assert again.current.version == 2, "nor after a restart in the same round"
    for committed in (None, head(1)):
        lost = in_force(1, committed, entered=2)
        assert lost.current.version == 2, "with the older file put back"


def test_a_site_goes_on_by_the_manifest_that_it_has_promised_under() -> None:
    """Over a restart, with a newer one installed meanwhile that is a step too far."""
    rounds = in_force(4, head(2), entered=3)
    assert rounds.current.version == 3
    assert "d, e would come or go" in rounds.waiting


def test_a_manifest_that_can_run_no_round_is_passed_through() -> None:
    """It needs no round to be committed under it: none can be."""
    small, one = manifest_of("abc", 1, 1), replace(manifest_of("ab", 1, 2))
    enough = manifest_of("ab", 0, 3)
    history = {1: small, 2: one, 3: enough}
    assert one.objection
    rounds = ManifestInForce(enough, history.get, head(1))
    assert rounds.current.version in (1, 2, 3)
    rounds = ManifestInForce(enough, history.get, head(2))
    assert rounds.current.version == 3


def test_in_a_round_counts_what_its_manifest_or_the_next_one_signed() -> None:
    rounds = in_force(3, head(2))
    assert [rounds.of_round(version) for version in (1, 2, 3)] == [None, HISTORY[2], HISTORY[3]]
    assert rounds.of_round(9) is None
    assert in_force(4, head(2)).of_round(4) is None, "not in force, and two steps on"


def test_before_the_first_round_too_a_list_of_long_ago_decides_nothing() -> None:
    """Two founders that counted on each other: one lies, and of one somebody has the key."""
    grown = {1: manifest_of("bd", 0, 1), 2: manifest_of("bcd", 1, 2), 3: manifest_of("abcd", 1, 3)}
    rounds = ManifestInForce(grown[3], grown.get, None)
    assert [rounds.of_round(version) for version in grown] == [None, grown[2], grown[3]]


def test_before_the_first_round_one_step_is_made_from_what_was_promised() -> None:
    """Somebody may have committed, and be gone before anybody heard of it."""
    rounds = in_force(1, None)
    rounds.began()
    for version, current in ((2, 2), (3, 2), (4, 2)):
        rounds.install(HISTORY[version])
        assert rounds.current.version == current
    assert rounds.of_round(1) == HISTORY[1], "what was voted for under it counts"
    again = ManifestInForce(HISTORY[4], HISTORY.get, None, entered=2, began=1)
    assert again.current.version == 2, "and over a restart"


def test_what_a_site_is_told_it_has_promised_under_counts_from_then_on() -> None:
    """Of the first round: one step from there, or the lock that it has voted for is void."""
    for before, told, current in ((4, 1, 2), (2, 1, 2), (4, 9, 4)):
        rounds = in_force(before, None)
        rounds.began_under(told)
        assert rounds.current.version == current
    rounds = in_force(4, None)
    rounds.began()
    rounds.began_under(1)
    assert rounds.of_round(1) is None, "not one step from what it has promised under since"


# ---- in a round -----------------------------------------------------------------------------


@pytest.mark.slow
def test_two_steps_in_the_first_round_choose_no_second_version() -> None:
    """b has committed and was cut off before anybody heard of it; two sites come meanwhile."""
    world = World(sites=4, seed=1, faulty_sites=1, min_participants=3)
    post = world._post
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(
            world, "_post", lambda s, t, b: None if isinstance(b, pb.Commit) else post(s, t, b)
        )
        world.train("b", 1)
        while world.site("b").head_round < 1:
            world.step()
    lines = [(x, y) for x in "acdef" for y in "b"]
    lines += [(y, x) for x, y in lines]
    world.cut(tuple(lines))
    world.crash("b")
    for version, sites in ((2, "abcde"), (3, "abcdef")):
        listed = tuple(ManifestSite(site, f"{site}:1", True) for site in sites)
        world.manifests[version] = FederationManifest("simulated", version, listed, 1)
    for site in "ef":
        world.installed[site] = world.manifests[3]
        world.add(site)
    for site in "acd":
        world.install(site, world.manifests[3])
    world.run_for(3000)
    world.heal(tuple(lines))
    world.installed["b"] = world.manifests[3]
    world.start("b")
    world.run_until_committed(1)


def until(world: World, text: str) -> None:
    """Let time pass until the transcript says this."""
    end = world.now + 1_000
    while text not in "\n".join(world.transcript[-40:]):
        assert world.now < end, f"never: {text}\n{world.text()}"
        world.step()


def expel(world: World, site: str, *, at: str = "abcde", version: int = 2) -> FederationManifest:
    """The next manifest, with that site disabled, installed at these sites."""
    sites = tuple(replace(s, enabled=s.id != site) for s in world.manifest.sites)
    newer = FederationManifest("simulated", version, sites, world.manifest.faulty_sites)
    world.manifests[version] = newer
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


def training(seed: int = 1, *, f: int = 1) -> tuple[World, str, str]:
    """Five sites in round 1; its coordinator and its key dealer."""
    world = World(sites=5, seed=seed, min_participants=3, faulty_sites=f)
    world.train("a", rounds=1)
    lead = coordinator(world, 1)
    return world, lead, next_after(lead, sorted(world.machines))


def test_an_expelled_coordinators_attempt_is_over_at_once() -> None:
    world, lead, _ = training()
    until(world, "Bundle 1.0")
    began = world.now
    expel(world, lead)
    up = others(world, lead)
    assert {world.site(name).manifest.version for name in up} == {2}
    committed_at(world, up, 1, within_s=LONGEST_WORK_S * 10)
    assert world.now < began + 20.0, "nobody waited a patience for it"
    assert world.certificate(1).attempt > 0
    assert world.certificate(1).body.manifest_version == 2
    assert lead not in world.certificate(1).body.contributors


@pytest.mark.parametrize(
    "when", ["Prepare 1.0", "PlanAnswer 1.0", "Trained 1.0", "Contributed 1.0"]
)
def test_an_expelled_participant_is_not_waited_for_and_not_in_the_sum(when: str) -> None:
    world, lead, dealer = training(seed=3)
    out = others(world, lead, dealer)[-1]
    world.slowness[out] = 1_000.0  # it would be waited for until the training deadline
    until(world, when)
    began = world.now
    expel(world, out)
    committed_at(world, others(world, out), 1, within_s=60)
    assert world.now < began + 30.0
    body = world.certificate(1).body
    assert out not in body.contributors
    assert body.manifest_version == 2
    assert out not in {vote.site for vote in world.certificate(1).votes}


def test_a_coordinator_that_has_not_heard_of_an_expulsion_is_left_behind() -> None:
    world, lead, dealer = training(seed=3)
    out = others(world, lead, dealer)[-1]
    machine = world.site(lead)
    while (
        machine._here.coordination is None or out not in machine._here.coordination.contributors()
    ):
        world.step()
    for name in others(world, lead):
        expel(world, out, at=name)
    committed_at(world, others(world, lead, out), 1, within_s=60)
    assert world.certificate(1).attempt > 0
    assert out not in world.certificate(1).body.contributors


def test_nobody_who_knows_signs_a_sum_with_an_expelled_sites_update() -> None:
    """Its manifest is not in force yet (it is two steps at once); what it says is heeded."""
    world = World(sites=5, seed=3, min_participants=3, faulty_sites=1)
    world.train("a", rounds=2)
    world.run_until_committed(1)
    lead = coordinator(world, 2)
    out = others(world, lead, "a")[-1]
    machine = world.site(lead)
    while (
        machine._here.coordination is None or out not in machine._here.coordination.contributors()
    ):
        world.step()
    sites = tuple(replace(s, enabled=s.id != out) for s in world.manifest.sites)
    world.manifests[2] = FederationManifest("simulated", 2, sites, 0)
    for name in others(world, lead):
        world.install(name, world.manifests[2])
    assert {world.site(name).manifest.version for name in world.machines} == {1}
    assert "more than one step" in world.site("a").waiting_manifest
    until(world, f"{lead} states a sum with the update of {out}, expelled since")
    committed_at(world, others(world, out), 2, within_s=300)
    assert out not in world.certificate(2).body.contributors


def test_a_voted_version_keeps_its_contributors_under_the_new_manifest() -> None:
    """Somewhere it may be committed already: another one beside it would be the end."""
    world, lead, dealer = training(seed=4)
    out = others(world, lead, dealer)[-1]
    staying = [world.disks[name] for name in others(world, out)]
    while not any(disk.durable.state.HasField("vote") for disk in staying):
        world.step()
    voted = next(d.durable.state.vote for d in staying if d.durable.state.HasField("vote"))
    expel(world, out)
    committed_at(world, others(world, out), 1, within_s=120)
    certificate = world.certificate(1)
    assert certificate.body.model_digest == voted.body.model_digest
    assert out in certificate.body.contributors
    assert certificate.body.manifest_version == 2
    assert out not in {vote.site for vote in certificate.votes}
    assert certificate.attempt > 0


def test_an_expelled_site_that_coordinates_ends_its_part() -> None:
    world, lead, _ = training()
    until(world, "Bundle 1.0")
    expel(world, lead, at=lead)
    world.run_for(1)
    assert world.site(lead)._here.coordination is None
    assert world.site(lead)._here.part is None
    assert world.site(lead)._here.pace.idle


@pytest.mark.slow
def test_a_site_that_is_enabled_again_takes_part_again() -> None:
    world = World(sites=5, seed=1, min_participants=3, faulty_sites=1)
    expel(world, "e")
    world.train("a", rounds=200)
    world.run_for(40)
    assert world.site("a").head_round > world.site("e").head_round == 0
    again = replace(world.manifest, version=3)
    world.manifests[3] = again
    for name in "abcde":
        world.install(name, again)
    world.run_for(100)
    last = world.site("a").head_round
    assert "e" in world.certificate(last).body.contributors


def test_who_leads_by_an_older_manifest_gets_no_quorum_and_is_told_why() -> None:
    world = World(sites=3, seed=1, faulty_sites=1)
    newer = world.manifests[2] = replace(world.manifest, version=2)
    for name in "ac":
        world.install(name, newer)
    world.train("b", rounds=1)
    assert coordinator(world, 1) == "b"
    until(world, "goes by manifest 2, the coordinator by 1")
    assert not world.committed
    world.install("b", newer)
    world.run_until_committed(1)


def test_a_second_manifest_of_one_version_is_called_that() -> None:
    """Of two that were signed, nobody can install the newer one."""
    world = World(sites=3, seed=1, faulty_sites=1)
    for name, faulty in (("a", 0), ("b", 1), ("c", 0)):
        other = FederationManifest(world.manifest.federation_id, 2, world.manifest.sites, faulty)
        world.install(name, other)
    world.train("b", rounds=1)
    until(world, "goes by another manifest 2 (")
    assert "sign one of version 3" in world.text()


def test_votes_of_the_old_list_and_of_the_new_are_not_counted_together() -> None:
    """A proof of an attempt under another manifest than ours is voted for by nobody."""
    world, lead, _ = training(seed=4)
    until(world, ": Proven ")
    proven = next(
        e.body
        for e in world.site(lead)._here.effects  # of its last step
        if isinstance(e, do.Send) and isinstance(e.body, pb.Proven)
    )
    away = others(world, lead)[-1]
    expel(world, "a" if away != "a" and lead != "a" else "e", at=away)
    before = world.site(away).durable
    world._feed(away, do.MessageReceived(lead, proven))
    after = world.site(away).durable
    assert after.state.HasField("vote") == before.state.HasField("vote")


@pytest.mark.parametrize("seed", seeds(range(12), range(12, 40)))
def test_whoever_is_expelled_whenever_and_heard_of_whenever(seed: int) -> None:
    """The watch of the simulation raises if two versions of a round are ever committed."""
    world = World(sites=4 + seed % 2, seed=seed, min_participants=2, faulty_sites=seed % 3 % 2)
    world.train("a", rounds=3)
    world.run_for(world.random.uniform(0, 12))
    out = world.random.choice(sorted(world.machines))
    for name in sorted(world.machines):
        world.run_for(world.random.uniform(0, 1.0))
        expel(world, out, at=name)
    if out == "a":  # a run ends with who asked for it
        world.train("b", rounds=3)
    committed_at(world, others(world, out), 3, within_s=2_000)
