"""A site, or a coordinator, that lies about how many examples it has learned from.

Weights are self-reported, and nobody can count another's examples: a lie is bounded, not
found. The bound is the plan's ``max_num_examples``; the nearer it is to what the largest
honest site has, the less a lie is worth.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from daemon import round_crypto
from daemon.integers import LOSS_BOUND
from daemon.versions import ShapeManifest, read_version, write_version
from peers import coordination
from peers import effects as do
from peers.participation import Participation
from peers.roles import weights
from proto import federation_pb2 as pb
from tests.attacks.planting import without
from tests.proofs import LEAD, check_of, proven
from tests.simulation import World, plan
from tests.simulation import coordinator as coordinator_of

pytestmark = pytest.mark.attacks

SHAPE = ShapeManifest("weighed", (("a", (2000,)),))
TRUTH = {"a": 200, "b": 300, "c": 100}
LIE = 10**9


def planned(reported: dict[str, int], bound: int, liar: str = "c") -> tuple[World, pb.Plan]:
    """The plan that a coordinator makes of what sites report; the ``liar`` does not coordinate."""
    world = World(sites=3, seed=1)
    for site, count in reported.items():
        world._feed(site, do.Situation(count, willing=True))
    agreed = plan(min_participants=3)
    agreed.max_num_examples = bound
    leader = coordinator_of(world, 1)
    assert leader != liar
    world._feed("a", do.RunRequested("run", 1, agreed))
    while (under_way := world.site(leader)._coordination) is None or under_way.plan is None:
        world.step()
    return world, under_way.plan


def shares(made: pb.Plan) -> dict[str, float]:
    """Of the sum, by site."""
    weight = weights(made)
    return {site: value / sum(weight.values()) for site, value in weight.items()}


def version(folder: Path, made: pb.Plan) -> np.ndarray:
    """What key holders make of the encrypted sum under a plan's weights; from a version of noughts.

    Site a's update is 1 everywhere, b's 2, and the liar's -10.
    """
    round_crypto.deal_key(1, 0, 3, 16)
    dealt = round_crypto.deal_key(1, 1, 3, 16)  # attempts stand for sites: this is a key holder
    round_crypto.hold_context(1, 0, dealt.public, secret=False, contributors=3, bits=16)
    round_crypto.start_sum(1, 0, SHAPE.sizes, check_of(LEAD, "abc"))
    weight, update = weights(made), folder / "update.npy"
    for site, value in (("a", 1.0), ("b", 2.0), ("c", -10.0)):
        vector = np.full(SHAPE.total + 1, value, np.float32)
        vector[-1] = 1.0 / LOSS_BOUND
        np.save(update, vector)
        path = folder / f"encrypted-{site}"
        round_crypto.encrypt_update(
            *(1, 1, update, SHAPE.sizes, weight[site], [4], path), check=check_of(site, "abc")
        )
        round_crypto.add_update(1, 0, site, path)
    finished = round_crypto.finish_sum(1, 0, folder / "sum")
    parent, _ = write_version(folder, SHAPE.digest, np.zeros(SHAPE.total, np.float32))
    total = sum(weight.values())
    applied = round_crypto.apply_sum(
        *(1, 1, folder / "sum", SHAPE.sizes, [4], total, parent, SHAPE.digest, folder),
        answer=proven((1, 1), (1, 0), check_of("a", "abc"), finished),
    )
    for attempt in (0, 1):
        round_crypto.forget(1, attempt)
    return read_version(folder, applied.model_digest, SHAPE.digest).astype(np.float64)


def test_a_site_that_lies_about_its_examples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has a sixth of all examples and says that it has a milliard."""
    reported = {**TRUTH, "c": LIE}
    plans = {
        "the truth": planned(TRUTH, 1000)[1],
        "clipped at 300": planned(reported, 300)[1],
        "clipped at 1000": planned(reported, 1000)[1],
    }
    text = "min(willing[site].num_examples, training.max_num_examples)"
    without(monkeypatch, coordination, "make_plan", text, instead="willing[site].num_examples")
    plans["not clipped"] = planned(reported, 1000)[1]
    share = {name: shares(made)["c"] for name, made in plans.items()}
    step = {name: version(tmp_path, made).mean() for name, made in plans.items()}
    for name in plans:
        print(f"{name:15}  the liar's share {share[name]:.4f}  mean step {step[name]:8.4f}")
    expected = {
        "the truth": 100 / 600,
        "clipped at 300": 300 / 800,
        "clipped at 1000": 1000 / 1500,
        "not clipped": 1.0,
    }
    for name, part in expected.items():
        assert share[name] == pytest.approx(part, abs=1e-6)
        honest = {site: TRUTH[site] for site in "ab"}
        rest = sum(n * v for n, v in zip(honest.values(), (1, 2), strict=True)) / 500
        assert step[name] == pytest.approx((1 - part) * rest - 10 * part, abs=2e-3)


def test_a_coordinator_that_does_not_clip_its_own_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """It makes the plan; every participant looks whether the plan keeps to its own bound."""
    world, made = planned(TRUTH, 1000)
    leader = coordinator_of(world, 1)
    lying = pb.Plan()
    lying.CopyFrom(made)
    next(p for p in lying.participants if p.site == leader).num_examples = LIE
    assert shares(lying)[leader] > 0.999999

    def objection() -> str:
        machine = world.site("c")
        part = Participation("c", leader, machine._federation_id, lying)
        return part.objection(machine.durable.head_digest, machine._shape_digest, machine.manifest)

    assert objection() == f"the plan counts more examples of {leader} than its own bound, 1000"
    text = "if over := [p.site for p in self.plan.participants if p.num_examples > most]:"
    without(monkeypatch, Participation, "objection", text)
    assert objection() == ""
