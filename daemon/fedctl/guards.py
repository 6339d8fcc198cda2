"""The options of `fedctl train` that say who may read an update, and which may be in the sum."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import typer

from daemon.fedctl.options import of_plan
from daemon.fedctl.output import CommandError, Exit
from proto.bounds import numbers_of
from proto.federation_pb2 import Mode, RobustRule

Rule = Literal["norm", "norm_sigma", "krum", "multi_krum"]

Mask = Annotated[
    bool, typer.Option("--mask", help="Hide updates by masks: more sites must collude.")
]
Robust = Annotated[Rule | None, typer.Option(help="Keep updates that stand out out of the sum.")]
ByzantineSites = Annotated[
    int | None,
    of_plan("TrainingPlan", "byzantine_sites", help="With --robust: sites that may poison."),
]


def guards_of(rule: Rule | None, byzantine_sites: int | None, *, mask: bool) -> dict[str, Any]:
    """How updates are hidden and compared, as fields of a training plan."""
    if mask and rule is not None:
        raise CommandError(
            "masked updates can't be compared",
            "choose one of --mask and --robust",
            exit_code=Exit.USAGE,
        )
    if byzantine_sites is not None and rule is None:
        raise CommandError(
            "--byzantine-sites says how many a rule must withstand",
            "Add --robust RULE",
            exit_code=Exit.USAGE,
        )
    guards: dict[str, Any] = {"mode": numbers_of(Mode.DESCRIPTOR)["masking"]} if mask else {}
    if rule is not None:
        guards["robust"] = numbers_of(RobustRule.DESCRIPTOR)[rule]
        guards |= {"byzantine_sites": byzantine_sites} if byzantine_sites is not None else {}
    return guards
