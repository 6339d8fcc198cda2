"""What a participant of one attempt knows and does. PURE, like the protocol.

    plan -> (key) -> train -> encrypt -> (compare) -> claim -> proof -> apply -> vote

In masking mode the key's place is taken by keys and shares, and between the update
and the sum the site helps to open it (peers/masking_steps.py); then all apply.

The round's context may come before or after training is done, so encryption
begins when both are here and the coordinator has told the common scale. Key
holders are the participants other than the coordinator; only they apply.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from peers import comparison
from peers import effects as do
from peers.errors import RemoteProtocolError
from peers.manifest import FederationManifest
from peers.masking_steps import MaskingPart, is_masked
from peers.messages import one_line
from peers.proving import Opening
from peers.robust import Selection
from peers.roles import key_holders, value_of, weights
from proto import federation_pb2 as pb

Order = pb.Scale | pb.MaskingOrder | pb.Compare | pb.Apply | pb.Proof


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
    _compare: pb.Compare | None = None
    _selection: Selection | None = None
    _opening: Opening = field(init=False)
    _masking: MaskingPart | None = None

    def __post_init__(self) -> None:
        self._opening = Opening(self.plan, self.coordinator)
        if is_masked(self.plan):
            self._masking = MaskingPart(self.site, self.plan)

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
        dealer, others = self.plan.key_dealer, participants - {self.coordinator}
        if dealer not in ({""} if self._masking else others):
            return "the key dealer must be a participant other than the coordinator"
        if len(participants) < max(2, self.plan.training.min_participants):
            return "the plan has fewer participants than it says it needs"
        if objection := comparison.objection(self.plan.training, len(participants)):
            return objection
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
        if kind == pb.ENCRYPTED_PRODUCTS and not comparison.is_robust(self.plan.training):
            return False
        if kind == pb.ENCRYPTED_SUM and self._opening.sum_here:
            return False
        from_coordinator = (pb.ENCRYPTED_SUM, pb.ENCRYPTED_PRODUCTS)
        return kind in from_coordinator and self.holds_key and sender == self.coordinator

    # ---- key, train ------------------------------------------------------------

    def worked(self, event: do.Worked) -> list[do.Effect]:
        """Local work is done, or failed."""
        match event:
            case do.ContextHeld():
                return [*self.key_arrived(), *(self._masking.done() if self._masking else [])]
            case do.LocalTrained():
                return self.trained(event)
            case do.Masked() if self._masking:
                return [do.Send(self.coordinator, event.answer), *self._masking.done()]
            case do.ProductsDecrypted():
                return self.decrypted(event)
            case do.SumArrived() | do.Unmasked():  # the coordinator of a masked sum has it
                self._opening.sum_here = True
                return self._apply_when_ready()
            case do.Challenging():
                return self._opening.challenging(event)
            case do.WorkFailed():
                return self.failed(event)
        return []

    def begin(self) -> list[do.Effect]:
        """Take the plan: deal the key if that is our part, and train beside it."""
        effects: list[do.Effect] = [do.Send(self.coordinator, self._answer(""))]
        if self.site == self.plan.key_dealer:
            effects.append(do.DealKey(self.plan, self.coordinator))
        effects.append(do.Train(self.plan, weights(self.plan)[self.site]))
        if self._masking is not None:
            effects += self._masking.begin()
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

    def ordered(self, message: Order) -> list[do.Effect]:
        """The coordinator says what comes next."""
        match message:
            case pb.Scale():
                return self.scale(message)
            case pb.MaskingOrder():
                return self._masking.ordered(message) if self._masking else []
            case pb.Compare():
                return self.compare(message)
            case pb.Apply():
                return self.apply(message)
            case pb.Proof():
                self._opening.proven(message)
                return self._apply_when_ready()

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

    # ---- compare ---------------------------------------------------------------

    def compare(self, message: pb.Compare) -> list[do.Effect]:
        """The products of updates are here: decrypt them. Once: other signs would tell more."""
        if not self.holds_key or message == self._compare:
            return []
        sites = set(message.sites)
        needed = max(2, self.plan.training.min_participants)
        if self._compare is not None or not comparison.is_robust(self.plan.training):
            raise RemoteProtocolError(f"{self.coordinator} asks for dot products out of turn")
        if len(sites) < needed or not sites <= set(weights(self.plan)):
            raise RemoteProtocolError(
                f"{self.coordinator} compares {sorted(sites)}; "
                f"the plan needs at least {needed} of its participants"
            )
        if message.byzantine_sites > self.plan.training.byzantine_sites:
            raise RemoteProtocolError(f"{self.coordinator} looks for more than the plan's f")
        self._compare = message
        asked = do.DecryptProducts(
            message.round, message.attempt, tuple(message.sites), message.products_digest
        )
        return [self._progress("select"), asked]

    def decrypted(self, event: do.ProductsDecrypted) -> list[do.Effect]:
        """Tell the numbers, and remember what they lead to."""
        if self._compare is None:
            return []
        asked = self._compare
        try:
            chosen = comparison.choose(self.plan, asked, event.products, event.imaginary, 0)
        except ValueError as error:
            return self.failed(do.WorkFailed(event.round, event.attempt, "select", str(error)))
        self._selection = chosen
        message = pb.Compared(
            round=event.round,
            attempt=event.attempt,
            products=event.products,
            imaginary=event.imaginary,
        )
        return [do.Send(self.coordinator, message)]

    def _check_selection(self, message: pb.Apply) -> None:
        """The coordinator must have selected what these very numbers lead to."""
        ours = self._selection
        if set(message.rejected) & set(message.contributors):
            raise RemoteProtocolError(f"{self.coordinator} sums updates that it rejects")
        if ours is not None and (
            tuple(message.contributors) != ours.kept
            or not set(ours.rejected) <= set(message.rejected)
        ):
            raise RemoteProtocolError(
                f"{self.coordinator} sums the updates of {list(message.contributors)}; "
                f"by their dot products it would be those of {list(ours.kept)}"
            )

    # ---- apply -----------------------------------------------------------------

    @property
    def holds_key(self) -> bool:
        """Whether this site may decrypt the sum."""
        return self.site in key_holders(self.plan, self.coordinator)

    def apply(self, message: pb.Apply) -> list[do.Effect]:
        """The coordinator says what it summed: from now on it is held to that."""
        if not self.holds_key or message == self._opening.claim:
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
        if self._masking and self._masking.outcome not in ((), tuple(contributors)):
            raise RemoteProtocolError(f"{self.coordinator} sends another sum than was opened")
        self._check_selection(message)
        self._opening.check(message)
        progress = self._progress("apply", contributors=tuple(contributors))
        return [progress, *self._opening.claimed(message), *self._apply_when_ready()]

    def _apply_when_ready(self) -> list[do.Effect]:
        """Claim, sum and proof are here: decrypt the sum and apply it to the parent."""
        claim = self._opening.begin()
        if claim is None:
            return []
        weight = weights(self.plan)
        return [
            do.ApplySum(
                claim.round,
                claim.attempt,
                tuple(claim.scale_exponents),
                sum(weight[site] for site in claim.contributors),
                self.plan.parent_digest,
                claim.sum_digest,
                len(claim.contributors),
                self._opening.answer,
            )
        ]

    def applied(self, event: do.Applied) -> pb.VoteBody | None:
        """The new version is on our disk: this is what we vote for."""
        claim = self._opening.claim
        if claim is None:
            return None
        return value_of(
            self.plan,
            self.federation_id,
            sorted(claim.contributors),
            event.model_digest,
            tuple(claim.rejected),
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
