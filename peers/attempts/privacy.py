"""What a plan says of differential privacy, and whether this site agrees. PURE."""

from __future__ import annotations

import math

from crypto.privacy import Mechanism, NoiseTerms, scheduled_multiplier
from crypto.quantize import CryptoError
from peers.attempts import selection
from proto import federation_pb2 as pb


def of_round(
    training: pb.TrainingPlan, round_: int, head: pb.Certificate | None
) -> tuple[float, float]:
    """Noise multiplier and clip norm of a round; zeros without differential privacy.

    What they depend on, the noised loss and count of the round before, is in the body
    that all voted on: every site has it, and has the same. Of a round of a time when it
    was not, nothing is known.
    """
    if not training.HasField("privacy"):
        return 0.0, 0.0
    privacy = training.privacy
    step = max(0, round_ - privacy.first_round)
    last = head.body if head is not None and head.body.rules else None
    multiplier = scheduled_multiplier(
        base=privacy.noise_multiplier,
        floor=privacy.noise_floor,
        decay=privacy.noise_decay,
        threshold=privacy.loss_threshold,
        step=step,
        last_loss=last.mean_loss if last is not None else math.nan,
    )
    if last is None or not (privacy.clip_quantile and step and last.next_clip_norm):
        return multiplier, privacy.clip_norm
    return multiplier, last.next_clip_norm


def terms_of(plan: pb.Plan) -> NoiseTerms | None:
    """What the plan's sites do about noise; None: nothing."""
    if not plan.training.HasField("privacy"):
        return None
    privacy = plan.training.privacy
    # What is compared is decrypted on the coordinator's word: it may be one site's noise alone.
    alone = selection.is_robust(plan.training)
    return NoiseTerms(
        clip_norm=plan.clip_norm,
        multiplier=plan.noise_multiplier,
        sharers=1 if alone else plan.training.min_participants - privacy.colluders,
        counted=privacy.clip_quantile > 0,
    )


def objection(plan: pb.Plan, least_multiplier: float) -> str:
    """Why this site can't afford the round, or can't make its noise; empty when it can.

    ``least_multiplier``: the least noise with which a further round stays within the
    site's budget; 0 when it has none, infinity when nothing is left of it.
    """
    terms = terms_of(plan)
    multiplier = terms.multiplier if terms else 0.0
    if multiplier < least_multiplier:
        return too_dear(multiplier, least_multiplier)
    if terms is None:
        return ""
    try:
        Mechanism.of(terms, plan.training.bits)
    except CryptoError as error:
        return str(error)
    return ""


def too_dear(multiplier: float, least_multiplier: float) -> str:
    """The objection of a site whose budget the round would exceed."""
    needed = (
        "nothing is left of it for another round"
        if math.isinf(least_multiplier)
        else f"within it, a round needs a multiplier of {least_multiplier:.4g} or more"
    )
    noise = f"noise of multiplier {multiplier:.4g}" if multiplier else "no noise"
    return (
        f"the round would exceed this site's privacy budget (privacy.epsilon): "
        f"it has {noise}; {needed}"
    )
