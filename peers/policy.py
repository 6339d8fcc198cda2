"""What a site agrees to, whatever others propose. PURE."""

from __future__ import annotations

from dataclasses import dataclass

from crypto.privacy import LARGEST_MULTIPLIER
from peers import comparison
from proto import federation_pb2 as pb


@dataclass(frozen=True)
class Policy:
    """What this site agrees to, whatever a coordinator plans: a site is sovereign.

    ``least_noise`` and ``max_noise`` bound a plan's noise multipliers; with a least
    noise above 0 a plan needs differential privacy, as with ``privacy_required``.
    """

    min_participants: int
    max_local_epochs: int
    privacy_required: bool = False
    colluders: int = 0
    least_noise: float = 0.0
    max_noise: float = LARGEST_MULTIPLIER
    masking_only: bool = False
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
        if self.masking_only and training.mode != pb.MASKING:
            return "the plan encrypts updates, this site only masks them (training.mode)"
        if self.robust_required and not comparison.is_robust(training):
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
        # What a round has is the coordinator's to say, anywhere from the floor upwards.
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
