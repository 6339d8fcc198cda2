"""What a participant of one attempt knows and does. PURE, like the protocol.

    plan -> (key) -> train -> encrypt -> apply -> vote

The round's context may come before or after training is done, so encryption
begins when both are here and the coordinator has told the common scale. Key
holders are the participants other than the coordinator; only they apply.
"""

from __future__ import annotations

from dataclasses import dataclass

from crypto.privacy import LARGEST_MULTIPLIER
from peers import effects as do
from peers.manifest import FederationManifest
from peers.messages import RemoteProtocolError, one_line
from peers.roles import key_holders, value_of, weights
from proto import federation_pb2 as pb


@dataclass(frozen=True)
class Policy:
    """What this site agrees to, whatever a coordinator plans: a site is sovereign."""

    min_participants: int
    max_local_epochs: int
    privacy_required: bool = False
    colluders: int = 0
    max_noise: float = LARGEST_MULTIPLIER

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


@dataclass
class Participation:
    """One attempt as a participant sees it. Methods return effects."""

    site: str
    coordinator: str
    federation_id: str
    plan: pb.Plan
    context_held: bool = False
    _trained: bool = False
    _scale: pb.Scale | None = None
    _encrypting: bool = False
    _apply: pb.Apply | None = None

    def objection(
        self, head_digest: bytes, shape_digest: bytes, manifest: FederationManifest
    ) -> str:
        """What is wrong with the plan, as this site sees it; empty when nothing is."""
        participants = {p.site for p in self.plan.participants}
        if self.plan.parent_digest != head_digest:
            return "the plan starts from a version that is not this site's head"
        if self.plan.manifest_version != manifest.version:
            return f"the plan is for manifest {self.plan.manifest_version}"
        if not participants <= set(manifest.enabled_ids):
            return "the plan names participants that the manifest does not"
        if self.plan.key_dealer == self.coordinator or self.plan.key_dealer not in participants:
            return "the key dealer must be a participant other than the coordinator"
        if len(participants) < max(2, self.plan.training.min_participants):
            return "the plan has fewer participants than it says it needs"
        if self.plan.shape_digest != shape_digest:
            return "this site's retriever differs (encoder or adaptation)"
        # A coordinator that counts itself without the plan's clip would outweigh everybody.
        most = self.plan.training.max_num_examples
        if over := [p.site for p in self.plan.participants if p.num_examples > most]:
            return f"the plan counts more examples of {over[0]} than its own bound, {most}"
        return ""

    def expects(self, sender: str, kind: pb.BlobKind.ValueType) -> bool:
        """Whether such a large object from this sender belongs to our part just now."""
        from_dealer = sender == self.plan.key_dealer and not self.context_held
        if kind == pb.SEALED_CONTEXT:
            return from_dealer and self.holds_key
        return kind == pb.ENCRYPTED_SUM and self.holds_key and sender == self.coordinator

    # ---- key, train ------------------------------------------------------------

    def worked(self, event: do.Worked) -> list[do.Effect]:
        """Local work is done, or failed."""
        match event:
            case do.ContextHeld():
                return self.key_arrived()
            case do.LocalTrained():
                return self.trained(event)
            case do.WorkFailed():
                return self.failed(event)
        return []

    def begin(self) -> list[do.Effect]:
        """Take the plan: deal the key if that is our part, and train beside it."""
        effects: list[do.Effect] = [do.Send(self.coordinator, self._answer(""))]
        if self.site == self.plan.key_dealer:
            effects.append(do.DealKey(self.plan, self.coordinator))
        effects.append(do.Train(self.plan, weights(self.plan)[self.site]))
        return [*effects, self._progress("train")]

    def decline(self, objection: str) -> list[do.Effect]:
        """Decline the plan, with the reason, for the coordinator and for our own people."""
        return [
            do.Send(self.coordinator, self._answer(objection)),
            self._progress("waiting", message=f"declined the plan: {objection}"),
        ]

    def key_arrived(self) -> list[do.Effect]:
        """The round's context is held: secret at a key holder, public at the coordinator."""
        self.context_held = True
        return self._encrypt_when_ready()

    def trained(self, event: do.LocalTrained) -> list[do.Effect]:
        """Training is done; only the scale exponents of the update are told."""
        if self._trained:
            return []
        self._trained = True
        message = pb.Trained(
            round=event.round, attempt=event.attempt, scale_exponents=event.scale_exponents
        )
        return [do.Send(self.coordinator, message), *self._encrypt_when_ready()]

    def failed(self, event: do.WorkFailed) -> list[do.Effect]:
        """Our part failed: say so at once, so that nobody waits for the deadline."""
        reason = one_line(f"{event.phase}: {event.reason}")
        message: do.Body
        if event.phase == "train" and not self._trained:
            self._trained = True
            message = pb.Trained(
                round=event.round, attempt=event.attempt, failed=True, reason=reason
            )
        else:
            message = pb.AttemptFailed(round=event.round, attempt=event.attempt, reason=reason)
        return [
            do.Send(self.coordinator, message),
            self._progress("waiting", message=f"this site failed to {reason}"),
        ]

    def ordered(self, message: pb.Scale | pb.Apply) -> list[do.Effect]:
        """The coordinator says what comes next."""
        return self.scale(message) if isinstance(message, pb.Scale) else self.apply(message)

    # ---- encrypt ---------------------------------------------------------------

    def scale(self, message: pb.Scale) -> list[do.Effect]:
        """The common scale is known."""
        if self._scale is not None:
            return []
        self._scale = message
        return self._encrypt_when_ready()

    def _encrypt_when_ready(self) -> list[do.Effect]:
        if self._scale is None or self._encrypting or not (self.context_held and self._trained):
            return []
        if self.site not in self._scale.contributors:
            return []
        self._encrypting = True
        return [
            self._progress("encrypt"),
            do.EncryptUpdate(
                self.plan.round,
                self.plan.attempt,
                self.coordinator,
                weights(self.plan)[self.site],
                tuple(self._scale.scale_exponents),
            ),
        ]

    # ---- apply -----------------------------------------------------------------

    @property
    def holds_key(self) -> bool:
        """Whether this site may decrypt the sum."""
        return self.site in key_holders(self.plan, self.coordinator)

    def apply(self, message: pb.Apply) -> list[do.Effect]:
        """The encrypted sum is here: decrypt it and apply it to the parent."""
        if self._apply is not None or not self.holds_key:
            return []
        weight = weights(self.plan)
        contributors = sorted(set(message.contributors))
        needed = max(2, self.plan.training.min_participants)
        # A key holder decrypts sums only: never a "sum" of fewer than agreed.
        if len(contributors) < needed or not set(contributors) <= set(weight):
            raise RemoteProtocolError(
                f"{self.coordinator} asks to decrypt a sum of {contributors}; "
                f"the plan needs at least {needed} of its participants"
            )
        self._apply = message
        return [
            self._progress("apply", contributors=tuple(contributors)),
            do.ApplySum(
                message.round,
                message.attempt,
                tuple(message.scale_exponents),
                sum(weight[site] for site in contributors),
                self.plan.parent_digest,
                message.sum_digest,
                len(contributors),
            ),
        ]

    def applied(self, event: do.Applied) -> pb.VoteBody | None:
        """The new version is on our disk: this is what we vote for."""
        if self._apply is None:
            return None
        return value_of(
            self.plan, self.federation_id, sorted(set(self._apply.contributors)), event.model_digest
        )

    def _answer(self, objection: str) -> pb.PlanAnswer:
        return pb.PlanAnswer(
            round=self.plan.round,
            attempt=self.plan.attempt,
            accepted=not objection,
            reason=one_line(objection),
        )

    def _progress(
        self, phase: str, *, contributors: tuple[str, ...] = (), message: str = ""
    ) -> do.Progress:
        return do.Progress(
            self.plan.round,
            self.plan.attempt,
            phase,
            self.coordinator,
            tuple(p.site for p in self.plan.participants),
            contributors,
            message,
        )
