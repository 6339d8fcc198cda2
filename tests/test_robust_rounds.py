"""Rounds with a robust rule, as conversations between simulated sites."""

from __future__ import annotations

import pytest

from peers import effects as do
from peers.comparison import Comparison, objection
from peers.errors import RemoteProtocolError
from peers.policy import Policy
from peers.runs import RunRefused
from proto import federation_pb2 as pb
from tests.scenarios.faults import Faults
from tests.scenarios.updates import HONEST, products_of
from tests.simulation import World, plan


def world(
    sites: int,
    rule: pb.RobustRule.ValueType,
    f: int,
    *,
    seed: int = 1,
    faults: Faults | None = None,
    least: int | None = None,
) -> World:
    made = World(sites=sites, seed=seed, faults=faults, min_participants=least)
    made.training = plan(least or f + 3)
    made.training.robust = rule
    made.training.byzantine_sites = f
    return made


def around(*distances: float) -> tuple[float, ...]:
    return tuple(value + d for value, d in zip(HONEST, distances, strict=True))


RULES = (pb.ROBUST_NORM, pb.ROBUST_MULTI_KRUM)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("factor", [30.0, -10.0])
def test_an_attacker_is_not_in_the_sum_and_its_name_is_signed(
    rule: pb.RobustRule.ValueType, factor: float
) -> None:
    here = world(5, rule, 1)
    here.updates["c"] = tuple(factor * value for value in HONEST)
    here.train("a", rounds=2)
    here.run_until_committed(2)
    for round_ in (1, 2):
        body = here.certificate(round_).body
        assert "c" in body.rejected
        assert "c" not in body.contributors
        assert len(body.contributors) >= 4 if rule == pb.ROBUST_NORM else 4
        report = here.disks["c"].commits[round_].report
        reasons = {one.site: one.reason for one in report.rejections}
        assert ("MADs above" if rule == pb.ROBUST_NORM else "squared distances") in reasons["c"]
        assert "select" in [phase.phase for phase in report.phases]


def test_without_an_attacker_the_norm_filter_rejects_nobody() -> None:
    here = world(5, pb.ROBUST_NORM, 1)
    here.updates |= {"b": around(0.3, 0, 0), "d": around(0, -0.4, 0.1)}
    here.train("b", rounds=1)
    here.run_until_committed(1)
    body = here.certificate(1).body
    assert list(body.contributors) == ["a", "b", "c", "d", "e"]
    assert not body.rejected


def test_krum_sums_no_fewer_than_hide_one_another() -> None:
    here = world(5, pb.ROBUST_KRUM, 1, least=4)
    here.updates |= {name: around(0.01 * k, 0, 0) for k, name in enumerate("abde")}
    here.updates["c"] = (90.0, 0.0, 0.0)
    here.train("b", rounds=1)
    here.run_until_committed(1)
    assert list(here.certificate(1).body.contributors) == ["a", "b", "d", "e"]


def test_nobody_is_asked_for_products_before_all_updates_are_in() -> None:
    here = world(5, pb.ROBUST_NORM, 1, faults=Faults(delay_s=(0.01, 0.01)))
    here.train("a", rounds=1)
    here.run_until_committed(1)
    lead = here.disks["a"].commits[1].report.coordinator
    holder = next(name for name in "abcde" if name != lead)
    said = [
        line.split(": ")[1].split()[0]
        for line in here.transcript
        if f" {lead} -> {holder}: " in line
    ]
    assert [word for word in said if word in ("Scale", "Compare", "Apply", "Commit")] == [
        "Scale", "Compare", "Apply", "Commit",
    ]  # fmt: skip


def test_lying_key_holders_change_nothing() -> None:
    here = world(6, pb.ROBUST_NORM, 2, least=4)
    here.updates["c"] = tuple(30 * value for value in HONEST)
    here.liars = {"e", "f"}
    here.train("a", rounds=3)
    here.run_until_committed(3)
    for round_ in (1, 2, 3):
        body = here.certificate(round_).body
        assert list(body.rejected) == ["c"]
        assert list(body.contributors) == ["a", "b", "d", "e", "f"]


def test_a_plain_round_says_nothing_of_it() -> None:
    here = World(sites=5, seed=1)
    here.train("a", rounds=1)
    here.run_until_committed(1)
    assert not here.certificate(1).body.rejected
    assert "Compare" not in here.text()


# ---- what goes wrong -----------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("rule", RULES)
def test_robust_rounds_get_through_faults(seed: int, rule: pb.RobustRule.ValueType) -> None:
    """The invariants of the simulation hold, and the attacker is in no sum."""
    faults = Faults(drop=0.03, duplicate=0.1, delay_s=(0.001, 2.0), cut=0.05, fail=0.01)
    here = world(7, rule, 1, seed=seed, faults=faults, least=4)
    here.updates["c"] = tuple(30 * value for value in HONEST)
    here.train("a", rounds=3)
    here.at(20.0, here.crash, "d")
    here.at(60.0, here.start, "d")
    here.run_until_committed(3, within_s=20_000)
    for round_ in (1, 2, 3):
        assert "c" not in here.certificate(round_).body.contributors


def test_a_coordinator_that_selects_otherwise_gets_no_vote() -> None:
    here = world(5, pb.ROBUST_NORM, 1)
    here.updates["c"] = tuple(30 * value for value in HONEST)
    here.train("a", rounds=1)
    while not any(" Apply " in f"{line} " for line in here.transcript):
        here.step()
    order = next(line for line in here.transcript if ": Apply" in line)
    lead, holder = order.split()[1], order.split()[3].rstrip(":")
    site = here.site(holder)
    part = site._part
    assert part is not None
    part._opening.claim = None
    kept = [name for name in "abcde" if name != "c"]
    for contributors, rejected in (
        (list("abcde"), []),
        (list("abcde"), ["c"]),
        (kept[1:], ["c"]),
        (kept, []),
    ):
        wrong = pb.Apply(
            round=1, attempt=0, contributors=contributors, rejected=rejected,
            sum_digest=bytes(32), scale_exponents=(1, 2),
        )  # fmt: skip
        with pytest.raises(RemoteProtocolError, match=f"{lead} (sums|asks to decrypt)"):
            site.step(do.Received(lead, wrong), here.now)


def test_a_second_question_in_an_attempt_is_refused() -> None:
    """Other signs, other numbers: two answers would tell more than one."""
    here = world(5, pb.ROBUST_NORM, 1)
    here.train("a", rounds=1)
    while ": Compare " not in here.text():
        here.step()
    order = next(line for line in here.transcript if ": Compare " in line)
    lead, holder = order.split()[1], order.split()[3].rstrip(":")
    again = pb.Compare(round=1, attempt=0, sites=list("abcde"), products_digest=bytes(32))
    with pytest.raises(RemoteProtocolError, match="out of turn"):
        here.site(holder).step(do.Received(lead, again), here.now)


def test_a_plan_whose_rule_has_too_few_sites_is_refused_where_it_is_asked_for() -> None:
    for sites, f, least, said in ((3, 1, 3, "4 participants are needed"), (6, 2, 4, "at least 7")):
        here = world(sites, pb.ROBUST_KRUM, f, least=least)
        with pytest.raises(RunRefused, match=said):
            here.site("a").step(do.RunRequested("r", 1, here.training), here.now)


def test_a_site_declines_a_plan_whose_rule_does_not_hold() -> None:
    here = world(5, pb.ROBUST_NORM, 1)
    made = pb.Plan(
        round=1,
        participants=[pb.Participant(site=s, num_examples=1) for s in "abc"],
        training=here.training,
    )
    made.training.min_participants = 2
    assert "needs at least 4 participants" in objection(made.training, 3)


def test_a_site_that_requires_a_rule_declines_plans_without_one() -> None:
    strict = Policy(min_participants=2, max_local_epochs=10, robust_required=True)
    assert "--robust RULE" in strict.objection(plan(3))
    assert strict.objection(world(5, pb.ROBUST_NORM, 1).training) == ""


def test_masked_updates_are_not_compared() -> None:
    here = world(5, pb.ROBUST_NORM, 1)
    here.training.mode = pb.MASKING
    with pytest.raises(RunRefused, match="masked ones can't be compared"):
        here.site("a").step(do.RunRequested("r", 1, here.training), here.now)


def test_no_two_liars_among_five_answers_move_the_numbers() -> None:
    """Whichever answers come first: the median of 2f + 1 is what honest holders decrypted."""
    made = pb.Plan(
        participants=[pb.Participant(site=s, num_examples=1) for s in "abcdefg"],
        training=world(7, pb.ROBUST_NORM, 2).training,
    )
    asked = pb.Compare(sites=list("abcdefg"), byzantine_sites=2)
    updates = {"c": tuple(30 * value for value in HONEST)}
    honest = pb.Compared(products=products_of(updates, "abcdefg"))
    lie = pb.Compared(products=[1.0] * 28, imaginary=["a", "b"])
    for liars in ((0, 1), (1, 3), (3, 4)):
        comparison = Comparison(made, asked, "bcdefg")
        for place, holder in enumerate("bcdef"):
            assert not comparison.complete
            comparison.answered(holder, lie if place in liars else honest)
        assert comparison.complete
        chosen = comparison.select(0)
        assert list(chosen.rejected) == ["c"]
    with pytest.raises(RemoteProtocolError, match="holds no key"):
        comparison.answered("a", honest)
    with pytest.raises(RemoteProtocolError, match="asked were 28"):
        comparison.answered("g", pb.Compared(products=[1.0] * 3))
