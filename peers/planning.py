"""What the coordinator of an attempt plans: who takes part, and on which scale. PURE."""

from __future__ import annotations

from collections.abc import Mapping

from peers import comparison, privacy
from peers.masking_steps import is_masked
from peers.roles import next_after
from proto import federation_pb2 as pb


def make_plan(
    frame: pb.Plan,
    coordinator: str,
    willing: Mapping[str, pb.Promise],
    head: pb.Certificate | None,
) -> pb.Plan:
    """``frame`` says round, attempt, parent and training; the rest follows from the promises.

    ``willing``: the promises of the sites that take part; ``head``: the certificate of
    the round before, which noise may depend on.
    """
    training = frame.training
    plan = pb.Plan()
    plan.CopyFrom(frame)
    plan.participants.extend(
        pb.Participant(
            site=site,
            num_examples=min(willing[site].num_examples, training.max_num_examples),
            certificate=willing[site].certificate,
        )
        for site in sorted(willing)
    )
    plan.key_dealer = "" if is_masked(plan) else next_after(coordinator, sorted(willing))
    if told := [promise.complexity for promise in willing.values() if promise.complexity]:
        plan.least_complexity, plan.most_complexity = min(told), max(told)
    plan.noise_multiplier, plan.clip_norm = privacy.of_round(training, frame.round, head)
    return plan


def common_scale(
    plan: pb.Plan, reports: Mapping[str, pb.Trained]
) -> tuple[tuple[int, ...], dict[str, str]]:
    """One fixed-point scale for all: the largest exponent of each group.

    With a robust rule it is one for all groups, because only integers of one unit have
    dot products that mean something; and sites that would cost the others their bits
    are kept out: the second value says who, and why. Raises ValueError when the
    reports can't belong to the same plan.
    """
    told = {site: tuple(report.scale_exponents) for site, report in reports.items()}
    lengths = {len(exponents) for exponents in told.values()}
    if len(lengths) != 1:
        raise ValueError(f"sites report different numbers of parameter groups: {lengths}")
    if plan.noise_multiplier and len({*told.values()}) != 1:
        raise ValueError("sites differ about the scale of the same noise: update them")
    robust = comparison.is_robust(plan.training)
    rejected = comparison.wild(plan, told) if robust else {}
    kept = (exponents for site, exponents in told.items() if site not in rejected)
    largest = tuple(max(column) for column in zip(*kept, strict=True))
    return ((max(largest),) * len(largest) if robust else largest), rejected
