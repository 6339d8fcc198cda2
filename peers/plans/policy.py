"""What a site agrees to, and what one run may not take from another. PURE."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from crypto.privacy import Mechanism, NoiseTerms, scheduled_multiplier
from crypto.quantize import CryptoError
from peers.plans import robust
from proto import bounds
from proto import federation_pb2 as pb
from proto.bounds import names_of, traits_of


@dataclass(frozen=True)
class Policy:
    """What this site agrees to, whatever a coordinator plans: a site is sovereign.

    ``mode``: how updates are hidden in runs of its own. ``least_noise`` and
    ``max_noise`` bound a plan's noise multipliers; with a least noise above 0 a plan
    needs differential privacy, as with ``privacy_required``.
    """

    min_participants: int
    max_local_epochs: int
    privacy_required: bool = False
    colluders: int = 0
    least_noise: float = 0.0
    max_noise: float = bounds.of("PrivacyPlan", "noise_multiplier").most
    mode: int = pb.CKKS
    robust_required: bool = False

    def objection(self, training: pb.TrainingPlan) -> str:
        """Why this site declines such training; empty when it does not."""
        if training.min_participants < self.min_participants:
            return (
                f"the plan allows sums of {training.min_participants} updates, "
                f"this site requires at least {self.min_participants} (training.min_participants)"
            )
        if training.local_epochs > self.max_local_epochs:
            return (
                f"the plan asks for {training.local_epochs} local epochs, this site allows "
                f"{self.max_local_epochs} (training.max_local_epochs)"
            )
        if traits_of(self.mode).exclusive and training.mode != self.mode:
            called = names_of(pb.Mode.DESCRIPTOR)
            return (
                f"the plan hides updates by {called[training.mode]}, this site takes part in "
                f"{called[self.mode]} alone (training.mode)"
            )
        if self.robust_required and not robust.is_robust(training):
            return (
                "the plan has no rule against poisoned updates, this site requires one "
                "(robust.required): fedctl train --robust RULE"
            )
        if training.HasField("privacy"):
            return self._objection_to_noise(training.privacy)
        if self.privacy_required or self.least_noise > 0.0:
            return (
                "the plan has no differential privacy, this site requires it (privacy.required, "
                "privacy.least_noise or privacy.epsilon): fedctl train --clip NORM"
            )
        return ""

    def _objection_to_noise(self, privacy: pb.PrivacyPlan) -> str:
        if privacy.colluders < self.colluders:
            return (
                f"the plan's noise holds against {privacy.colluders} sites that pool what they "
                f"know, this site requires {self.colluders} (privacy.colluders)"
            )
        if privacy.noise_multiplier < self.least_noise:
            return (
                f"the plan's noise multiplier {privacy.noise_multiplier:g} is below "
                f"{self.least_noise:g} (privacy.least_noise): fedctl train --noise"
            )
        # What a round has follows from the loss before it, anywhere from the floor upwards.
        if privacy.noise_floor < self.least_noise:
            return (
                f"the plan's noise may fall to a multiplier of {privacy.noise_floor:g}, below "
                f"{self.least_noise:g} (privacy.least_noise): train with more noise, or with "
                "--noise-schedule static"
            )
        if privacy.noise_multiplier > self.max_noise:
            return (
                f"the plan's noise multiplier {privacy.noise_multiplier:g} is above "
                f"{self.max_noise:g} (privacy.max_noise): it would drown what is learned"
            )
        return ""


# ---- runs that supersede others ------------------------------------------------

Change = tuple[str, object, object]  # the field of the plan, from what, to what

# Of PrivacyPlan. A round's noise is max(floor, multiplier * sigmoid(loss - threshold) *
# decay^step) (`crypto.privacy.scheduled_multiplier`): the former raise it, a threshold
# lowers it. A quantile steers the norm, and the higher it is, the farther up; 0 fixes it.
_LESS_IS_WEAKER = ("noise_multiplier", "noise_floor", "noise_decay", "colluders")
_MORE_IS_WEAKER = ("loss_threshold", "clip_norm", "clip_quantile")


def weakening(new: pb.TrainingPlan, old: pb.TrainingPlan) -> str:
    """Why a run with plan ``new`` may not supersede an unfinished one, of plan ``old``.

    Sites agreed to what ``old`` protects, and nobody is to take that from them in passing.
    Names everything that is weakened, from what to what; empty when nothing is.
    """
    changes = [
        *_changes_of_sums(new, old),
        *_changes_of_rule(new, old),
        *_changes_of_noise(new, old),
    ]
    if not changes:
        return ""
    return (
        "the plan weakens what an unfinished run protects; keep that, or stop "
        "the run first (fedctl train --stop): "
        + "; ".join(f"{name} from {before} to {after}" for name, before, after in changes)
    )


def _changes_of_sums(new: pb.TrainingPlan, old: pb.TrainingPlan) -> Iterator[Change]:
    """Who can read a sum, of how many, and how much one site may make up of it."""
    if new.mode != old.mode:  # neither trust model contains the other
        called = names_of(pb.Mode.DESCRIPTOR)
        yield "mode", called[old.mode], called[new.mode]
    if new.min_participants < old.min_participants:
        yield "min_participants", old.min_participants, new.min_participants
    if new.max_num_examples > old.max_num_examples:
        yield "max_num_examples", old.max_num_examples, new.max_num_examples


def _changes_of_rule(new: pb.TrainingPlan, old: pb.TrainingPlan) -> Iterator[Change]:
    if not robust.is_robust(old):
        return
    if new.robust != old.robust:
        names = robust.RULE_NAMES
        yield "robust rule", names[old.robust], names[new.robust]
    if robust.is_robust(new) and new.byzantine_sites < old.byzantine_sites:
        yield "byzantine_sites", old.byzantine_sites, new.byzantine_sites


def _changes_of_noise(new: pb.TrainingPlan, old: pb.TrainingPlan) -> Iterator[Change]:
    if not old.HasField("privacy"):
        return
    before, after = old.privacy, new.privacy
    if not new.HasField("privacy"):
        yield "privacy", f"a noise multiplier of {before.noise_multiplier}", "none"
        return
    for name in _LESS_IS_WEAKER:
        if getattr(after, name) < getattr(before, name):
            yield name, getattr(before, name), getattr(after, name)
    for name in _MORE_IS_WEAKER:
        if getattr(after, name) > getattr(before, name):
            yield name, getattr(before, name), getattr(after, name)
    # Begun earlier, a run's noise has decayed farther.
    if after.noise_decay < 1.0 and after.first_round < before.first_round:
        yield "first_round", before.first_round, after.first_round


# ---- differential privacy --------------------------------------------------------


def noise_of_round(
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
    alone = robust.is_robust(plan.training)
    return NoiseTerms(
        clip_norm=plan.clip_norm,
        multiplier=plan.noise_multiplier,
        sharers=1 if alone else plan.training.min_participants - privacy.colluders,
        counted=privacy.clip_quantile > 0,
    )


def noise_objection(plan: pb.Plan, least_multiplier: float) -> str:
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
