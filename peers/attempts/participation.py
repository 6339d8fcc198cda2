"""What a participant of one attempt knows and does. PURE, like the protocol.

    plan -> (key) -> train -> hide -> (compare) -> state -> open -> vote

What stands in the key's place, and how the certified sum is opened, is the mode's to say
(peers/attempts/secure_sum.py).

The round's context may come before or after training is done, so hiding begins when
both are here and the others' exponents have been passed on. Before this site signs a
statement it holds it against what it has seen itself: its contribution, its scale, its key.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, field

from peers.attempts import effects as do
from peers.attempts.bundle import Ground, needed_contributors
from peers.attempts.modes import mode_of
from peers.attempts.scale import Scaled
from peers.attempts.secure_sum import ParticipantSteps
from peers.attempts.statement import (
    EncodedStatement,
    check_selection,
    read_contributions,
    scale_digest,
    weights_of,
)
from peers.plans import robust
from peers.plans.weights import too_dominant, weights
from peers.wire.messages import one_line
from peers.wire.signing import Keys, Kind, digest_of, must_be, sign
from proto import federation_pb2 as pb
from proto.bounds import traits_of


@dataclass
class Opening:
    """At a site that opens the sum: its statement, the sum, and what the mode needs for it.

    They come in any order.
    """

    plan: pb.Plan
    steps: ParticipantSteps
    known: EncodedStatement | None = None
    sum_here: bool = False
    _begun: bool = False

    def certified(self, known: EncodedStatement) -> list[do.Effect]:
        """The statement is certain: from now on its sum, and no other, is opened."""
        self.known = known
        self.sum_here = self.sum_here or self.steps.has_sum
        return self.steps.certified(known.message)

    def begin(self) -> list[do.Effect]:
        """Open the sum, once, as soon as everything is here."""
        known = self.known
        if known is None or self._begun or not (self.sum_here and self.steps.ready):
            return []
        self._begun = True
        weight = weights_of(known.message)
        return [
            do.ApplySum(
                self.plan.round,
                self.plan.attempt,
                root_digest=known.digest,
                scale_exponents=tuple(known.message.scale_exponents),
                total_weight=math.fsum(weight[site] for site in known.contributors),
                parent_digest=self.plan.parent_digest,
                sum_digest=known.message.sum_digest,
                contributors=known.contributors,
                dropouts=tuple(known.message.dropouts),
                opening=self.steps.opening,
            )
        ]


@dataclass
class Participation:
    """One attempt as a participant sees it. Methods return effects."""

    site: str
    ground: Ground
    plan: pb.Plan
    keys: Keys
    _reported: tuple[int, ...] | None = None
    _exponents: tuple[int, ...] | None = None
    _hiding: bool = False
    _contribution: pb.Signed | None = None
    _question: EncodedStatement | None = None
    _steps: ParticipantSteps = field(init=False)
    _opening: Opening = field(init=False)

    def __post_init__(self) -> None:
        manifest = self.ground.manifest
        self._steps = mode_of(self.plan).participant(self.site, self.plan, self.keys, manifest)
        self._opening = Opening(self.plan, self._steps)
        self.plan_digest = digest_of(self.plan)

    @property
    def coordinator(self) -> str:
        """Who carries this attempt."""
        return self.plan.coordinator

    def expects(self, sender: str, kind: pb.BlobKind.ValueType) -> bool:
        """Whether such a large object from this sender belongs to our part just now."""
        if kind == pb.SEALED_CONTEXT:
            return self._steps.expects_context(sender)
        if sender != self.coordinator or not self._steps.may_open:
            return False
        if kind == pb.ENCRYPTED_PRODUCTS:
            return robust.is_robust(self.plan.training) and self._question is not None
        return kind == pb.ENCRYPTED_SUM and self._takes_sum

    @property
    def _takes_sum(self) -> bool:
        return self._opening.known is not None and not self._opening.sum_here

    # ---- key, train ------------------------------------------------------------

    def worked(self, event: do.WorkDone) -> list[do.Effect]:
        """Local work is done, or failed."""
        match event:
            case do.ContextHeld():
                self._steps.context_digest = event.digest
                return [*self._hide_when_ready(), *self._steps.worked(event)]
            case do.LocalTrained():
                return self.trained(event.scale_exponents)
            case do.UpdateReady():
                return self.update_ready(event)
            case do.ProductsDecrypted():
                return self.decrypted(event)
            case do.SumArrived():
                self._opening.sum_here = True
                return self._opening.begin()
            case do.WorkFailed():
                return self.failed(event)
        return self._steps.worked(event)

    def begin(self) -> list[do.Effect]:
        """Take the plan: deal the key if that is our part, and train beside it."""
        effects: list[do.Effect] = [
            do.Send(self.coordinator, self._answer("")),
            do.TakePlan(self.plan),
            *self._steps.begin(),
        ]
        if self.plan.scale_exponents:  # what this site sends is kept: nothing is trained anew
            effects += self.trained(tuple(self.plan.scale_exponents))
        else:
            effects.append(do.Train(self.plan, weights(self.plan)[self.site]))
        return [*effects, self._progress("train")]

    def decline(self, objection: str) -> list[do.Effect]:
        """Decline the plan, with the reason, for the coordinator and for our own people."""
        return [
            do.Send(self.coordinator, self._answer(objection)),
            self._progress("waiting", message=f"declined the plan: {objection}"),
        ]

    def trained(self, exponents: tuple[int, ...]) -> list[do.Effect]:
        """Training is done; only the scale exponents of the update are told."""
        if self._reported is not None:
            return []
        self._reported = exponents
        report = pb.Exponents(plan_digest=self.plan_digest, scale_exponents=exponents)
        message = pb.Trained(
            round=self.plan.round,
            attempt=self.plan.attempt,
            exponents=sign(self.keys, Kind.EXPONENTS, report),
        )
        return [do.Send(self.coordinator, message), *self._hide_when_ready()]

    def failed(self, event: do.WorkFailed) -> list[do.Effect]:
        """Our part failed: say so at once, so that nobody waits for the deadline."""
        reason = one_line(f"{event.phase}: {event.reason}")
        message: do.Body
        if event.phase == "train" and self._reported is None:
            self._reported = ()
            message = pb.Trained(round=event.round, attempt=event.attempt, reason=reason)
        else:
            message = pb.AttemptFailed(round=event.round, attempt=event.attempt, reason=reason)
        return [
            do.Send(self.coordinator, message),
            self._progress("waiting", message=f"this site failed to {reason}"),
        ]

    def ordered(self, message: do.AttemptMessage) -> list[do.Effect]:
        """The coordinator passes on what the mode wants."""
        return [*self._steps.ordered(message), *self._opening.begin()]

    # ---- hide ------------------------------------------------------------------

    def scale(self, scaled: Scaled) -> list[do.Effect]:
        """What all have told is known: the scale follows from it."""
        ours = scaled.reports.get(self.site)
        if self._exponents is not None or not self._reported:
            return []
        if ours is None:  # late, or kept back: the attempt goes on without us
            lead = self.coordinator
            text = f"{lead} goes on without our update: what we told came late, or was kept back"
            return [self._progress("waiting", message=text)]
        must_be(ours == self._reported, self.coordinator, "passes on exponents that are not ours")
        if self.site in scaled.left_out:
            reason = scaled.left_out[self.site]
            return [self._progress("waiting", message=f"our update is left out: {reason}")]
        self._exponents = scaled.exponents
        return self._hide_when_ready()

    def _hide_when_ready(self) -> list[do.Effect]:
        if self._exponents is None or self._hiding or not self._steps.context_digest:
            return []
        self._hiding = True
        return [
            self._progress("encrypt"),
            do.HideUpdate(
                self.plan.round,
                self.plan.attempt,
                self.coordinator,
                weights(self.plan)[self.site],
                self._exponents,
                self.plan.draw,
            ),
        ]

    def update_ready(self, event: do.UpdateReady) -> list[do.Effect]:
        """The update is on its way: sign what it is, for whom and on which scale."""
        if self._contribution is not None or self._exponents is None:
            return []
        contribution = pb.Contribution(
            plan_digest=self.plan_digest,
            scale_digest=scale_digest(self._exponents),
            upload_digest=event.upload_digest,
            nonce=event.nonce,
        )
        self._contribution = sign(self.keys, Kind.CONTRIBUTION, contribution)
        message = pb.Contributed(
            round=event.round, attempt=event.attempt, contribution=self._contribution
        )
        return [do.Send(self.coordinator, message)]

    # ---- state -----------------------------------------------------------------

    def check_own(self, statement: pb.Statement) -> None:
        """Hold a statement against what this site knows. Raises RemoteProtocolError."""
        lead = self.coordinator
        ours = {one.site: one for one in statement.contributions}.get(self.site)
        if ours is not None:
            must_be(ours == self._contribution, lead, "states another contribution than ours")
            same = tuple(statement.scale_exponents) == self._exponents
            must_be(same, lead, "states another scale than follows from what all told")
        self._steps.check_own(statement)

    # ---- compare ---------------------------------------------------------------

    def certified(self, known: EncodedStatement) -> list[do.Effect]:
        """A quorum has signed it, and it agrees with what we know: answer, or open."""
        contributors = known.contributors
        if known.message.kind == pb.QUESTION:
            if self._question is not None or not self._compares:
                self._question = self._question or known
                return []
            self._question = known
            at = (self.plan.round, self.plan.attempt)
            decryption = do.DecryptProducts(*at, contributors, known.message.sum_digest)
            return [self._progress("select"), decryption]
        if self._opening.known is not None or not self._steps.opens(contributors):
            return []
        effects = self._opening.certified(known)
        progress = self._progress("open", contributors=contributors)
        return [progress, *effects, *self._opening.begin()]

    def decrypted(self, event: do.ProductsDecrypted) -> list[do.Effect]:
        """Sign the numbers, and tell them."""
        if self._question is None:
            return []
        answer = pb.Products(
            question_digest=self._question.digest,
            products=event.products,
            imaginary=event.imaginary,
        )
        signed = sign(self.keys, Kind.PRODUCTS, answer)
        message = pb.Compared(round=event.round, attempt=event.attempt, products=signed)
        return [do.Send(self.coordinator, message)]

    @property
    def _compares(self) -> bool:
        """Whether this site decrypts what updates are compared by."""
        return traits_of(self.plan.training.mode).comparable and self._steps.may_open

    def opened(self, event: do.SumOpened) -> pb.Applied | None:
        """The new version is on our disk: what we sign of it, once."""
        known = self._opening.known
        if known is None or known.digest != event.root_digest:
            return None
        return pb.Applied(
            root_digest=event.root_digest,
            model_digest=event.model_digest,
            mean_loss=event.mean_loss,
            next_clip_norm=event.next_clip_norm,
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


def plan_objection(plan: pb.Plan, site: str, head_digest: bytes, shape_digest: bytes) -> str:
    """What is wrong with a derived plan, as this site sees it; empty when nothing is."""
    participants = {p.site for p in plan.participants}
    if site not in participants:
        return "this site takes no part"
    if plan.parent_digest != head_digest:
        return "the plan starts from a version that is not this site's head"
    if plan.shape_digest != shape_digest:
        return "this site's retriever differs (encoder or adaptation)"
    return ""


def check_statement(
    known: EncodedStatement,
    ground: Ground,
    bundle_digest: bytes,
    run_digest: bytes,
    plan: pb.Plan | None,
    keys: Keys,
    left_out: Collection[str],
    question: EncodedStatement | None,
    expelled: frozenset[str],
) -> None:
    """Whether a new sum, or a question, is what every site can see that it should be.

    ``left_out``: who is, by the exponents that were passed on here. Witnesses check it,
    too. Raises RemoteProtocolError, CertificateError.
    """
    statement, lead, manifest = known.message, ground.coordinator, ground.manifest
    check_ground(statement, ground, bundle_digest, run_digest)
    must_be(plan is not None, lead, "states a sum where a version has to be restated")
    must_be(statement.plan == plan, lead, "states another plan than follows from the promises")
    read_contributions(statement, keys, manifest)
    sites = known.contributors
    _check_who(statement, sites, expelled)
    mode_of(statement.plan).check_statement(statement, keys, manifest)
    if statement.kind == pb.QUESTION:
        training = statement.plan.training
        must_be(robust.is_robust(training), lead, "compares without a robust rule")
        # As many may lie as the run says, less whom all have left out by what it signed.
        may_lie = max(0, training.byzantine_sites - len(left_out))
        right = statement.byzantine_sites == may_lie
        must_be(right, lead, f"compares as if {statement.byzantine_sites} might lie")
        rejected: Collection[str] = left_out
    else:
        rejected = {*left_out, *check_selection(statement, question, keys, manifest)}
    # A name in a certificate is a word against a site: it is there by what sites have signed.
    named = ", ".join(sorted(statement.rejected)) or "nobody"
    instead = ", ".join(sorted(rejected)) or "nobody"
    right = set(statement.rejected) == set(rejected)
    must_be(right, lead, f"rejects {named}; by what sites have signed it would be {instead}")


_FRAME = (
    *("federation_id", "manifest_digest", "manifest_version", "round", "attempt"),
    *("parent_digest", "bundle_digest", "run_digest"),
)


def check_ground(
    statement: pb.Statement, ground: Ground, bundle_digest: bytes, run_digest: bytes
) -> None:
    """Raises RemoteProtocolError unless a statement is of this attempt and its promises."""
    frame = ground.statement(statement.kind, bundle_digest, run_digest)
    said, agreed = ([getattr(one, name) for name in _FRAME] for one in (statement, frame))
    must_be(said == agreed, ground.coordinator, "makes a statement of another attempt")


def _check_who(statement: pb.Statement, sites: tuple[str, ...], expelled: frozenset[str]) -> None:
    """Whose updates are in it: enough, nobody stands out, nobody is expelled."""
    plan, lead = statement.plan, statement.plan.coordinator
    participants = {one.site for one in plan.participants}
    everyone = {*sites, *statement.rejected, *statement.dropouts}
    must_be(everyone <= participants, lead, "states a sum of sites that take no part")
    must_be(not set(sites) & set(statement.rejected), lead, "sums updates that it rejects")
    must_be(not set(sites) & set(statement.dropouts), lead, "asks for both secrets of a site")
    needed = needed_contributors(plan)
    must_be(len(sites) >= needed, lead, f"states a sum of {len(sites)}; the plan needs {needed}")
    must_be(not (objection := too_dominant(plan, sites)), lead, f"states a sum: {objection}")
    gone = sorted(expelled & set(sites))
    must_be(not gone, lead, f"states a sum with the update of {', '.join(gone)}, expelled since")
