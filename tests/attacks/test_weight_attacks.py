"""A site, or a coordinator, that lies about how many examples it has learned from.

Weights are self-reported, and nobody can count another's examples: a lie is bounded, not
found. There are two bounds. The plan's ``max_num_examples``: the nearer it is to what the
largest honest site has, the less a lie is worth. And whatever was told, no site may stand
out in the sum (docs/decisions/0023), which the liar itself would: of three sites it then
weighs at most twice what the least one does.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from crypto.quantize import LOSS_BOUND
from daemon.jobs.sums import ckks
from daemon.jobs.sums.integers import Hiding, SumTerms
from daemon.state.versions import ShapeManifest, read_version, write_version
from peers.attempts import bundle, coordination, participation, statement
from peers.attempts import effects as do
from peers.attempts.ckks import Ckks
from peers.attempts.statement import EncodedStatement
from peers.plans import weights as plan_weights
from peers.plans.weights import weights
from peers.rounds import acceptor
from peers.wire.errors import RemoteProtocolError
from proto import federation_pb2 as pb
from tests.attacks.programs.planting import without
from tests.daemon.jobs.sums.proofs import LEAD, check_of, proven
from tests.simulation.network import World, plan
from tests.simulation.network import coordinator as coordinator_of

pytestmark = pytest.mark.attacks

SHAPE = ShapeManifest("weighed", (("a", (2000,)),))
TRUTH = {"a": 200, "b": 300, "c": 100}
LIE = 10**9


def planned(reported: dict[str, int], bound: int, liar: str = "c") -> tuple[World, pb.Plan]:
    """The plan that a coordinator makes of what sites report; the ``liar`` does not coordinate."""
    world = World(sites=3, seed=1, min_participants=3)
    for site, count in reported.items():
        world._feed(site, do.Situation(count, willing=True))
    agreed = plan(min_participants=3)
    agreed.max_num_examples = bound
    leader = coordinator_of(world, 1)
    assert leader != liar
    world._feed("a", do.RunRequested("run", 1, agreed))
    while (under_way := world.site(leader)._here.coordination) is None or under_way.sum is None:
        world.step()
    return world, under_way.sum.plan


def shares(made: pb.Plan) -> dict[str, float]:
    """Of the sum, by site."""
    weight = weights(made)
    return {site: value / sum(weight.values()) for site, value in weight.items()}


def version(folder: Path, made: pb.Plan) -> np.ndarray:
    """What key holders make of the encrypted sum under a plan's weights; from a version of noughts.

    Site a's update is 1 everywhere, b's 2, and the liar's -10.
    """
    ckks.deal_key(1, 0, 3, 16)
    dealt = ckks.deal_key(1, 1, 3, 16)  # attempts stand for sites: this is a key holder
    ckks.hold_context(1, 0, dealt.public, secret=False, contributors=3, bits=16)
    ckks.start_sum(1, 0, SHAPE.sizes, check_of(LEAD, "abc"))
    weight, update = weights(made), folder / "update.npy"
    for site, value in (("a", 1.0), ("b", 2.0), ("c", -10.0)):
        vector = np.full(SHAPE.total + 1, value, np.float32)
        vector[-1] = 1.0 / LOSS_BOUND
        np.save(update, vector)
        path = folder / f"encrypted-{site}"
        ckks.encrypt_update(
            *(1, 1, update, SHAPE.sizes, Hiding(weight[site], [4]), path),
            check=check_of(site, "abc"),
        )
        ckks.add_update(1, 0, site, path)
    finished = ckks.finish_sum(1, 0, folder / "sum")
    parent, _ = write_version(folder, SHAPE.digest, np.zeros(SHAPE.total, np.float32))
    total = sum(weight.values())
    applied = ckks.apply_sum(
        *(1, 1, folder / "sum"),
        SumTerms(SHAPE.sizes, [4], total, parent, SHAPE.digest, folder),
        answer=proven((1, 1), (1, 0), check_of("a", "abc"), finished),
    )
    for attempt in (0, 1):
        ckks.forget(1, attempt)
    return read_version(folder, applied.model_digest, SHAPE.digest).astype(np.float64)


def test_a_site_that_lies_about_its_examples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has a sixth of all examples and says that it has a milliard."""
    reported = {**TRUTH, "c": LIE}
    plans = {
        "the truth": planned(TRUTH, 1000)[1],
        "bounded at 300": planned(reported, 300)[1],
        "bounded at 1000": planned(reported, 1000)[1],
    }
    monkeypatch.setattr(bundle, "clipped", lambda told, _tolerated: dict(told))
    plans["1000, may stand out"] = planned(reported, 1000)[1]
    text = "min(one.num_examples, most)"
    without(monkeypatch, bundle, "derive_plan", text, instead="one.num_examples")
    for module in (coordination, acceptor):
        monkeypatch.setattr(module, "derive_plan", bundle.derive_plan)
    plans["not bounded"] = planned(reported, 1000)[1]
    step = {name: version(tmp_path, made).mean() for name, made in plans.items()}
    expected = {  # the examples that count, of a, b and the liar
        "the truth": (200, 200, 100),
        "bounded at 300": (200, 300, 300),
        "bounded at 1000": (200, 300, 400),
        "1000, may stand out": (200, 300, 1000),
        "not bounded": (200, 300, LIE),
    }
    for name, (a, b, c) in expected.items():
        share = shares(plans[name])
        print(f"{name:20}  the liar's share {share['c']:.4f}  mean step {step[name]:8.4f}")
        assert share["c"] == pytest.approx(c / (a + b + c), abs=1e-6)
        assert step[name] == pytest.approx((a + 2 * b - 10 * c) / (a + b + c), abs=2e-3)


def test_a_coordinator_that_does_not_clip_its_own_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every site derives the plan for itself, and signs no sum of another one."""
    world, _ = planned(TRUTH, 1000)
    leader = coordinator_of(world, 1)
    while (
        under_way := world.site(leader)._here.coordination
    ) is None or under_way.phase != "state":
        world.step()
    assert under_way._tally.known is not None
    lying = pb.Statement()
    lying.CopyFrom(under_way._tally.known.message)
    next(p for p in lying.plan.participants if p.site == leader).num_examples = LIE
    assert shares(lying.plan)[leader] > 0.999999

    def objection() -> str:
        try:
            world.site("c")._acceptor._check_statement(EncodedStatement.of(lying))
        except RemoteProtocolError as error:
            return str(error)
        return ""

    assert objection() == f"{leader} states another plan than follows from the promises"
    text = "must_be(statement.plan == plan, lead,"
    without(monkeypatch, participation, "check_statement", text, instead="must_be(True, lead,")
    text = "must_be(dealt, plan.coordinator,"
    without(monkeypatch, Ckks, "check_statement", text, instead="must_be(True, '',")
    monkeypatch.setattr(acceptor, "check_statement", participation.check_statement)
    # What each contributor signed names the plan that it trained for.
    assert objection() == f"{leader} sums an update that a made for something else"
    text = 'must_be(agreed, lead, f"sums an update that {site} made for something else")'
    without(monkeypatch, statement, "read_contributions", text, instead="pass")
    monkeypatch.setattr(participation, "read_contributions", statement.read_contributions)
    assert objection() == f"{leader} states a sum: {plan_weights.too_dominant(lying.plan, 'abc')}"
    monkeypatch.setattr(plan_weights, "stands_out", lambda *_, **__: False)
    assert objection() == ""
