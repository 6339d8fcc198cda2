"""How fields of what sites sign bound one another: plans, bundles, statements, votes. PURE.

The bounds of single fields are said in proto/federation.proto.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from google.protobuf.message import Message

from peers.wire.bounds import number, octets, one_of, real, refuse, rule_for, shown
from proto import bounds
from proto import federation_pb2 as pb
from proto.bounds import names_of, traits_of

_EXPONENTS = rule_for("Exponents", "scale_exponents")
_CLIP_NORM = rule_for("PrivacyPlan", "clip_norm")
_DIGEST = rule_for("Stated", "statement_digest")
_NOTHING = octets(0, 0)
_LEAST_NOISE = bounds.of("PrivacyPlan", "noise_floor").least
_CLIP_QUANTILE = bounds.of("PrivacyPlan", "clip_quantile")
_QUANTILE = real(_CLIP_QUANTILE.least_chosen, _CLIP_QUANTILE.most)
_MOST_COMPLEXITY = bounds.of("Plan", "most_complexity").most


def _training_plan(path: str, plan: pb.TrainingPlan) -> None:
    if not plan.HasField("privacy"):
        return
    privacy = plan.privacy
    one_of(16)(f"{path}.bits", plan.bits)  # noise needs a fine grid
    real(_LEAST_NOISE, privacy.noise_multiplier)(f"{path}.privacy.noise_floor", privacy.noise_floor)
    number(0, plan.min_participants - 1)(f"{path}.privacy.colluders", privacy.colluders)
    if privacy.clip_quantile:
        _QUANTILE(f"{path}.privacy.clip_quantile", privacy.clip_quantile)


def _plan(path: str, plan: pb.Plan) -> None:
    noised = plan.training.HasField("privacy")
    privacy = plan.training.privacy
    low, high = (privacy.noise_floor, privacy.noise_multiplier) if noised else (0.0, 0.0)
    real(low, high)(f"{path}.noise_multiplier", plan.noise_multiplier)
    clip_norm = _CLIP_NORM if noised else real(0.0, 0.0)
    clip_norm(f"{path}.clip_norm", plan.clip_norm)
    real(plan.least_complexity, _MOST_COMPLEXITY)(f"{path}.most_complexity", plan.most_complexity)
    if not traits_of(plan.training.mode).dealt:
        if plan.key_dealer:
            mode = names_of(pb.Mode.DESCRIPTOR)[plan.training.mode]
            raise refuse(f"{path}.key_dealer", shown(plan.key_dealer), f"none in {mode} mode")
    elif all(plan.key_dealer != participant.site for participant in plan.participants):
        raise refuse(f"{path}.key_dealer", shown(plan.key_dealer), "one of the participants")


def _statement(path: str, statement: pb.Statement) -> None:
    """What a kind needs is there, and nothing that has no meaning in it."""
    restated = statement.kind == pb.RESTATED
    for name in ("root_digest", "model_digest"):
        (_DIGEST if restated else _NOTHING)(f"{path}.{name}", getattr(statement, name))
    if restated:
        for field, _value in statement.ListFields():
            if field.name in _OF_A_SUM:
                raise refuse(f"{path}.{field.name}", "set", "left empty where nothing is summed")
        return
    if not statement.HasField("plan"):
        raise refuse(f"{path}.plan", "missing", "the plan that all derive")
    _DIGEST(f"{path}.sum_digest", statement.sum_digest)
    _EXPONENTS(f"{path}.scale_exponents", statement.scale_exponents)
    has = traits_of(statement.plan.training.mode)
    (_DIGEST if has.roster else _NOTHING)(f"{path}.roster_digest", statement.roster_digest)
    if statement.HasField("commitment") is not has.dealt:
        presence = "missing" if has.dealt else "set"
        raise refuse(f"{path}.commitment", presence, "one with a round key")
    if statement.question_digest:
        _DIGEST(f"{path}.question_digest", statement.question_digest)
    if statement.byzantine_sites and statement.kind != pb.QUESTION:
        raise refuse(f"{path}.byzantine_sites", "set", "left empty but in a question")


_OF_A_SUM: Final = frozenset(
    (
        *("plan", "scale_exponents", "contributions", "rejected", "sum_digest", "commitment"),
        *("roster_digest", "dropouts", "question_digest", "answers", "byzantine_sites"),
    )
)


def _vote_body(path: str, body: pb.VoteBody) -> None:
    digest = _DIGEST if body.rules else _NOTHING
    digest(f"{path}.manifest_digest", body.manifest_digest)
    digest(f"{path}.statement_digest", body.statement_digest)
    if not body.rules and (body.mean_loss or body.next_clip_norm):
        raise refuse(f"{path}.mean_loss", "set", "left empty under the rules of old")


RELATIONS: Final[dict[type[Message], Callable[[str, Any], None]]] = {
    pb.TrainingPlan: _training_plan,
    pb.Plan: _plan,
    pb.Statement: _statement,
    pb.VoteBody: _vote_body,
}
