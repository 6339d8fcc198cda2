"""Who takes part: who says that it will not, and whose update was in sums often enough."""

from __future__ import annotations

from dataclasses import replace

import pytest

from peers.attempts import effects as do
from peers.plans.policy import Policy
from peers.rounds.acceptor import MOST_DRAWS
from proto import federation_pb2 as pb
from tests.simulation.network import POLICY, World, plan
from tests.support.one_machine import Alone, refused, sent, stated, witnessing


def drawn_often(alone: Alone, sites: str, *, times: int = MOST_DRAWS) -> None:
    """As if these had been in as many sums of this round as they may, or in so many."""
    state = pb.RoundState()
    state.CopyFrom(alone.state)
    for attempt in range(100, 100 + times):
        state.drawn.add(attempt=attempt, sites=list(sites))
    alone.machine._here.durable = replace(alone.machine.durable, state=state)


def test_who_signs_counts_for_a_site_that_is_not_asked_to() -> None:
    """Else a liar has the sums of its victim signed by all the others."""
    alone = Alone()
    known = witnessing(alone)
    drawn_often(alone, "cd")
    with refused("b draws a sum of c, d anew: its update is in 8 sums of this round"):
        alone.hears("b", alone.state_of(known))


def test_the_question_of_an_attempt_is_not_counted_beside_its_sum() -> None:
    alone = Alone()
    known = witnessing(alone)
    drawn_often(alone, "abcd", times=MOST_DRAWS - 1)
    state = pb.RoundState()
    state.CopyFrom(alone.state)
    state.drawn.add(attempt=0, sites="abcd")
    alone.machine._here.durable = replace(alone.machine.durable, state=state)
    assert len(sent(alone.hears("b", alone.state_of(known)), pb.Stated)) == 1


def test_a_sum_that_is_certified_without_us_counts_as_well() -> None:
    alone = Alone()
    known = witnessing(alone)
    certificate = alone.stage.certified(known, "bcd")
    for _ in range(2):
        alone.hears("b", pb.Certified(round=1, attempt=0, certificate=certificate))
    assert [list(one.sites) for one in alone.state.drawn] == [list("abcd")]


def unequal(policy_of_d: Policy | None = None) -> World:
    """Four sites, of which one has few examples: without any of them d stands out."""
    here = World(sites=4, seed=1, faulty_sites=1, min_participants=3)
    for site, examples in zip("abcd", (100, 100, 40, 500), strict=True):
        here._feed(site, do.Situation(examples, willing=True))
    if policy_of_d is not None:
        here.site("d")._here.policy = policy_of_d
    return here


def test_a_site_that_would_decline_the_plan_is_not_in_it() -> None:
    """Else weights are clipped for it, and what the others have is too unequal without it."""
    here = unequal(replace(POLICY, mode=pb.MASKING))
    here.train("a", rounds=3)
    here.run_until_committed(3)
    for round_ in (1, 2, 3):
        certificate = here.certificate(round_)
        assert (certificate.attempt, list(certificate.body.contributors)) == (0, list("abc"))
    assert "this site takes part in masking alone" in here.text()


def test_a_site_that_can_pay_no_more_makes_the_sum_again_it_has_paid_for() -> None:
    """Made without it, the two would tell of its update."""
    for paid in (False, True):
        alone = Alone()
        private = plan(min_participants=3)
        private.privacy.noise_multiplier = private.privacy.noise_floor = 2.0
        private.privacy.clip_norm = private.privacy.noise_decay = private.privacy.first_round = 1
        alone.stage.run = alone.stage.run_of(private)
        alone.takes(do.Situation(100, willing=True))
        if paid:
            stated(alone)
        alone.takes(do.Situation(100, willing=True, least_multiplier=5.0))
        if not paid:
            alone.begins()
        alone.ticks()
        promise = pb.Promise.FromString(alone.state.promise.promise.body)
        assert (promise.willing, bool(promise.reason)) == (paid, not paid)


@pytest.mark.parametrize("gone", "abcd")
def test_a_site_that_promises_and_stays_away_costs_nobody_an_attempt(gone: str) -> None:
    here = unequal()
    here.failing.add((gone, "encrypt"))
    here.train("a", rounds=4)
    here.run_until_committed(4)
    for round_ in range(1, 5):
        certificate = here.certificate(round_)
        assert gone not in certificate.body.contributors
        assert certificate.attempt <= 1, "its own"


def test_after_so_many_sums_that_were_not_committed_somebody_has_to_look() -> None:
    """A liar that leads can have one made whenever it is its turn, of other sites each time."""
    world = World(sites=3, seed=1)
    world.train("a", rounds=1)
    while not world.site("c").durable.state.drawn:
        world.step()
    assert [list(one.sites) for one in world.site("c").durable.state.drawn] == [list("abc")]
    alone = Alone()
    alone.takes(do.Situation(100, willing=True))
    alone.begins()
    drawn_often(alone, "ad")
    effects = alone.goes_on()
    assert any("collecting them" in e.message for e in effects if isinstance(e, do.Progress))
    promise = sent(effects, pb.Promised)[0].body.promise
    told = pb.Promise.FromString(promise.body)
    assert not told.willing
    assert "somebody may be collecting them" in told.reason
