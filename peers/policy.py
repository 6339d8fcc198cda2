"""What a site agrees to, whatever others propose: a site is sovereign. PURE."""

from __future__ import annotations

from dataclasses import dataclass

from crypto.privacy import LARGEST_MULTIPLIER
from peers import comparison
from proto import federation_pb2 as pb


@dataclass(frozen=True)
class Policy:
    """What this site agrees to, whatever a coordinator plans."""

    min_participants: int
    max_local_epochs: int
    privacy_required: bool = False
    colluders: int = 0
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
        if self.privacy_required:
            return (
                "the plan has no differential privacy, this site requires it "
                "(privacy.required or privacy.epsilon): fedctl train --clip NORM"
            )
        return ""

    def _objection_to_noise(self, privacy: pb.PrivacyPlan) -> str:
        if privacy.colluders < self.colluders:
            return (
                f"the plan's noise holds against {privacy.colluders} sites that pool what they "
                f"know, this site requires {self.colluders} (privacy.colluders)"
            )
        if privacy.noise_multiplier > self.max_noise:
            return (
                f"the plan's noise multiplier {privacy.noise_multiplier:g} is above "
                f"{self.max_noise:g} (privacy.max_noise): it would drown what is learned"
            )
        return ""
