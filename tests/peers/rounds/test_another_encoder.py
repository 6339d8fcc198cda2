"""The manifest names another encoder: rounds go over to it, and nothing is chosen twice.

A site uses one encoder from its start on, so going over is a restart: some have gone, others not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from daemon.control.status import other_retriever
from peers.attempts.lead import SharedModel
from peers.wire.manifest import FederationManifest, ManifestError, NamedModel
from tests.simulation.network import SHAPE, World, coordinator
from tests.support.signed_rounds import manifest_of

OTHER = b"\x07" * 32
NAMED = NamedModel(OTHER, 2)


def name_other(world: World, *, at: str) -> FederationManifest:
    """The next manifest, which names the other encoder, installed at these sites."""
    newer = replace(world.manifest, version=2, retriever=NAMED)
    world.manifests[2] = newer
    for name in at:
        world.install(name, newer)
    return newer


def go_over(world: World, *sites: str) -> None:
    """Their daemons are started again, and use the other encoder from now on."""
    for name in sites:
        world.crash(name)
        world.shapes[name] = OTHER
        world.start(name)


def shapes_of(world: World, round_: int) -> set[bytes]:
    """Of the plans that this round was made by."""
    committed = world.certificate(round_).attempt
    return {plan.shape_digest for at, plan in world.plans.items() if at == (round_, committed)}


# ---- what the manifest says -----------------------------------------------------------------


def test_another_encoder_is_one_step_and_no_site_comes_with_it() -> None:
    before = manifest_of("abcd", 1, 1)
    after = replace(before, version=2, retriever=NAMED)
    assert after.step_from(before) == ""
    both = replace(manifest_of("abcde", 1, 2), retriever=NAMED)
    assert "e would come or go and the retriever would be another at once" in both.step_from(before)


def test_a_manifest_that_names_none_is_signed_as_it_always_was() -> None:
    assert b"retriever" not in manifest_of("abcd", 1, 1).payload
    other = replace(manifest_of("abcd", 1, 1), retriever=NAMED)
    assert manifest_of("abcd", 1, 1).digest != other.digest


@pytest.mark.parametrize(
    "text", ["", "ab:2", f"{'0' * 64}:0", f"{'0' * 64}", f"{'A' * 64}:2", f"{'0' * 64}:9999999999"]
)
def test_what_is_no_name_of_an_encoder_is_refused(text: str) -> None:
    with pytest.raises(ManifestError, match=r"names no model|is refused"):
        NamedModel.parse(text)


def test_a_name_is_read_as_it_is_written() -> None:
    assert NamedModel.parse(str(NAMED)) == NAMED


def test_an_encoder_is_compared_where_the_manifest_names_one() -> None:
    older = manifest_of("abcd", 1, 1)
    newer = replace(older, version=2, retriever=NAMED)
    assert SharedModel(SHAPE, 2).objection(older) == SharedModel(OTHER, 2).objection(older) == ""
    assert SharedModel(OTHER, 2).objection(newer) == ""
    assert SharedModel(SHAPE, 2).objection(newer).startswith("manifest 2 names another encoder")


# ---- in rounds ------------------------------------------------------------------------------


def world_of(sites: int, *, seed: int, f: int = 1) -> World:
    return World(sites=sites, seed=seed, min_participants=3, faulty_sites=f)


def committed_at(world: World, sites: Sequence[str], round_: int, within_s: float = 600) -> None:
    end = world.now + within_s
    while not all(world.site(name).head_round >= round_ for name in sites):
        assert world.now < end, world.text()
        world.step()


@pytest.mark.parametrize("seed", range(4))
def test_rounds_go_over_and_the_chain_goes_on(seed: int) -> None:
    world = world_of(4, seed=seed)
    world.train("a", 2)
    world.run_until_committed(2)
    before = world.certificate(2).body
    name_other(world, at="abcd")
    go_over(world, *"abcd")
    world.train("a", 2)
    world.run_until_committed(4)
    after = world.certificate(3).body
    assert (after.parent_digest, after.manifest_version) == (before.model_digest, 2)
    assert (shapes_of(world, 2), shapes_of(world, 3)) == ({SHAPE}, {OTHER})


@pytest.mark.parametrize("late", "abcde")
def test_who_has_not_gone_over_votes_and_is_in_no_sum(late: str) -> None:
    """Also where it would have coordinated: that attempt ends at once."""
    world = world_of(5, seed=3)
    name_other(world, at="abcde")
    go_over(world, *(name for name in "abcde" if name != late))
    lacking, has_it = other_retriever(world.site(late), None), NamedModel(OTHER, 2)
    assert "name that encoder in [next_retriever] and restart fedd. Until then" in lacking[0]
    ready = other_retriever(world.site(late), has_it)
    assert "it is that of [next_retriever]: restart fedd. Until then" in ready[0]
    world.train(late, 3)
    began = world.now
    committed_at(world, "abcde", 3)
    assert world.now < began + 120, "nobody waited a patience for it"
    voted = set[str]()
    for round_ in (1, 2, 3):
        certificate = world.certificate(round_)
        assert late not in certificate.body.contributors
        assert coordinator(world, round_, certificate.attempt) != late
        voted |= {vote.site for vote in certificate.votes}
    assert late in voted
    go_over(world, late)
    world.train("a", 1)
    committed_at(world, "abcde", 4)
    assert late in world.certificate(4).body.contributors
    assert other_retriever(world.site(late), None) == []


def test_rounds_wait_until_enough_have_gone_over() -> None:
    world = world_of(4, seed=5)
    name_other(world, at="abcd")
    go_over(world, "a")
    world.train("a", 1)
    world.run_for(300)
    assert world.site("a").head_round == 0
    go_over(world, "b", "c")
    committed_at(world, "abcd", 1)
    assert "d" not in world.certificate(1).body.contributors


@pytest.mark.parametrize("when", ["Trained 1.0", "Contributed 1.0", "Stated 1.0", "Vote 1.0"])
def test_a_step_in_the_middle_of_a_round_chooses_no_second_version(when: str) -> None:
    """What was voted for goes on as it is, whatever it was trained by."""
    world = world_of(4, seed=2)
    world.train("a", 2)
    while when not in "\n".join(world.transcript[-40:]):
        world.step()
    name_other(world, at="abcd")
    go_over(world, *"abcd")
    committed_at(world, "abcd", 2)
    assert world.certificate(2).body.manifest_version == 2
    assert shapes_of(world, 2) == {OTHER}


def test_a_sum_of_the_encoder_before_keeps_no_round_waiting() -> None:
    """Its sites use another encoder now and decline to make it again; then it is drawn anew."""
    world = world_of(4, seed=2)
    world.train("a", 1)
    while not any(disk.durable.state.HasField("stated") for disk in world.disks.values()):
        world.step()
    name_other(world, at="abcd")
    go_over(world, *"abcd")
    committed_at(world, "abcd", 1, within_s=300)
    assert world.certificate(1).body.manifest_version == 2


def test_who_was_away_catches_up_without_the_encoder() -> None:
    world = world_of(5, seed=7)
    world.train("a", 1)
    world.run_until_committed(1)
    world.crash("e")
    name_other(world, at="abcd")
    go_over(world, *"abcd")
    world.train("a", 2)
    committed_at(world, "abcd", 3)
    world.start("e")  # with the manifest and the encoder of before
    committed_at(world, "e", 3)
    world.install("e", world.manifests[2])
    assert "names another encoder" in world.site("e").other_retriever
    go_over(world, "e")
    world.train("e", 1)
    committed_at(world, "abcde", 4)
    assert "e" in world.certificate(4).body.contributors


def test_who_joins_behind_it_needs_no_encoder_of_the_beginning() -> None:
    """Its own first version is the other encoder's, and round 1 was made of another."""
    world = world_of(4, seed=9)
    world.train("a", 1)
    world.run_until_committed(1)
    world.crash("d")
    name_other(world, at="abc")
    go_over(world, *"abc")
    world.train("a", 1)
    committed_at(world, "abc", 2)
    world.disks["d"].durable = replace(
        world.disks["d"].durable, head_round=0, head_digest=OTHER, promised=-1
    )
    world.disks["d"].commits.clear()
    world.installed["d"] = world.manifests[2]
    world.shapes["d"] = OTHER
    world.start("d")
    committed_at(world, "d", 2)
