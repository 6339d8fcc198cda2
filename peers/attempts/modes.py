"""The secure-sum modes, as the protocol knows them. PURE.

To add one: a value of `Mode` in proto/federation.proto with what goes with it, its object
in the table below, its coordinator's and participant's steps in a file of their own, its
jobs and their line in daemon/rounds/work.py, its arithmetic (crypto).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from peers.attempts.ckks import Ckks
from peers.attempts.masking import Masking
from peers.attempts.secure_sum import Mode
from peers.plans import robust
from proto import federation_pb2 as pb
from proto.bounds import traits_of

MODES: Final[Mapping[pb.Mode.ValueType, Mode]] = {pb.CKKS: Ckks(), pb.MASKING: Masking()}

# What coordinators pass on, and what sites answer them, in whichever mode.
MODES_ORDERS: Final[tuple[type[Any], ...]] = tuple(
    {order for mode in MODES.values() for order in mode.orders}
)
MODES_ANSWERS: Final[tuple[type[Any], ...]] = tuple(
    {answer for mode in MODES.values() for answer in mode.answers}
)


def mode_of(plan: pb.Plan) -> Mode:
    """How the plan's updates are hidden; messages of another mode than these are out of bounds."""
    return MODES[plan.training.mode]


def key_holders(plan: pb.Plan) -> list[str]:
    """Who may open a sum of this plan."""
    return mode_of(plan).holders(plan)


def objection(training: pb.TrainingPlan, sites: int) -> str:
    """Why the plan's robust rule can't be used among so many; empty when it can."""
    rule, f = robust.RULE_NAMES[training.robust], training.byzantine_sites
    if robust.is_robust(training) and not traits_of(training.mode).comparable:
        return (
            f"the rule {rule} compares encrypted updates, and masked ones can't be compared: "
            "choose training.mode ckks, or no rule"
        )
    return robust.objection(rule, f, sites, training.min_participants)
