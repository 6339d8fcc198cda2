"""What the coordinator of one attempt carries from site to site. PURE, like the protocol.

The phases, in order:

    prepare -> plan -> train -> aggregate -> (select ->) state -> open -> vote -> (commit)

* prepare ends with the promises of a quorum of the *manifest*, never of the responders.
  They are forwarded as they are; the plan follows from them. If one names a lock, its
  version is stated again and everything up to the vote is skipped: it may already be
  committed somewhere.
* plan, train and aggregate end when every site asked has answered, or at the phase's
  deadline with those that did, if they are enough. A key that is not there one phase
  after the plan ends the attempt: training would be in vain.
* with a robust rule, updates wait until all are here; a certified question has the key
  holders decrypt their dot products, and only what is selected is added.
* state ends with the signatures of a quorum under what was summed: nothing is opened before.
* open ends when f + 1 sites have made the same version of it: that is the proof.
* vote ends with equal votes of a quorum.

Nothing here decides: whatever it forwards, every site checks for itself. The coordinator
never holds the round's secret key (docs/decisions/0001), and in masking mode it opens no
more than any other contributor.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from peers import comparison
from peers import effects as do
from peers.bundle import (
    Bundle,
    Ground,
    ManifestOf,
    PlanFails,
    Promised,
    derive_plan,
    make,
    needed_contributors,
    read_bundle,
    too_dominant,
)
from peers.certificates import certificate_of
from peers.errors import RemoteProtocolError
from peers.gathering import Gathering
from peers.masking_steps import MaskingSteps
from peers.messages import one_line
from peers.proving import Challenges
from peers.roles import is_masked, key_holders
from peers.signing import Keys, Kind, digest_of, must_be, name_of, read, sign, verify
from peers.statement import Known, read_lock, scale_digest, value_of
from peers.timing import Timing
from proto import federation_pb2 as pb


class AttemptFails(Exception):
    """This attempt can't go on; the text says why and at whose side."""


@dataclass
class Coordination:
    """One attempt as its coordinator sees it. Methods return effects."""

    site: str
    ground: Ground
    run: pb.Signed
    shape_digest: bytes
    shared_values: int
    keys: Keys
    manifest_of: ManifestOf
    timing: Timing
    unix_ms: Callable[[], int]
    now: float
    head_certificate: pb.Certificate | None = None
    phase: str = "prepare"
    deadline: float = 0.0
    bundle: Bundle | None = None
    plan: pb.Plan | None = None
    plan_digest: bytes = b""
    _promises: dict[str, Promised] = field(default_factory=dict)
    _refusals: dict[str, str] = field(default_factory=dict)
    _behind: dict[str, str] = field(default_factory=dict)
    _answers: dict[str, pb.PlanAnswer] = field(default_factory=dict)
    _masking: MaskingSteps | None = None
    _roster_digest: bytes = b""
    _trained: dict[str, pb.Signed | None] = field(default_factory=dict)
    _exponents: dict[str, tuple[int, ...]] = field(default_factory=dict)
    _public_digest: bytes = b""
    _commitment: pb.Signed | None = None
    _context_held: bool = False
    _updates: Gathering | None = None
    _extended: bool = False
    _statement: Known | None = None
    _signatures: dict[str, pb.Signature] = field(default_factory=dict)
    _certificate: pb.StatementCertificate | None = None
    _challenges: Challenges | None = None
    _applied: dict[str, pb.Signed] = field(default_factory=dict)
    _unable: set[str] = field(default_factory=set)
    _proven: pb.Proven | None = None
    _value: pb.VoteBody | None = None
    _votes: dict[str, pb.Vote] = field(default_factory=dict)
    _phases: list[tuple[str, float]] = field(default_factory=list)
    _phase_began: float = 0.0

    def __post_init__(self) -> None:
        self._phase_began = self.now
        self.deadline = self.now + self.timing.phase(self.attempt)

    @property
    def round(self) -> int:
        """The round under way."""
        return self.ground.round

    @property
    def attempt(self) -> int:
        """The attempt of it."""
        return self.ground.attempt

    def answered(self, sender: str, message: do.Answer, now: float) -> list[do.Effect]:
        """A site answers; a vote is verified already."""
        match message:
            case pb.PlanAnswer():
                return self.plan_answered(sender, message, now)
            case pb.KeyCommitted():
                return self.key_committed(sender, message, now)
            case pb.Trained():
                return self.trained(sender, message, now)
            case pb.MaskingAnswer():
                return self.masking_answered(sender, message, now)
            case pb.Contributed():
                return self.contributed(sender, message, now)
            case pb.Stated():
                return self.stated(sender, message, now)
            case pb.Compared():
                return self.compared(sender, message)
            case pb.Challenge():
                return self._challenges.asked(sender, message) if self._challenges else []
            case pb.AppliedSum():
                return self.applied(sender, message, now)
            case pb.Vote():
                return self.voted(message, now)

    def worked(self, event: do.Worked, now: float) -> list[do.Effect]:
        """Our own work for this attempt is done, or failed."""
        match event:
            case do.ContextHeld():  # in masking mode it tells of our own shares, as a participant
                return [] if self._masking else self.context_held(event, now)
            case do.MaskedSumStarted():
                self._roster_digest = event.roster_digest
                return self._key_ready(now)
            case do.UpdateArrived():
                return self.update_arrived(event, now)
            case do.UpdateAdded():
                return self.update_added(event.site, now)
            case do.UpdateRefused():
                return self.update_refused(event.site, event.reason, now)
            case do.QuestionReady():
                return self.question_ready(event, now)
            case do.SumFinished():
                return self.sum_finished(event, now)
            case do.ChallengeAnswered():
                proof = pb.Proof(round=self.round, attempt=self.attempt, answer=event.answer)
                return [do.Send(event.holder, proof)]
            case do.ChallengeRefused():
                self._refusals[event.holder] = event.reason
                return self._refused_to_open(event.holder)
            case do.WorkFailed(phase="key" | "aggregate" | "select" | "prove"):
                raise AttemptFails(f"{self.site} failed to {event.phase}: {event.reason}")
        return []

    # ---- prepare ---------------------------------------------------------------

    def prepare(self, own: pb.Promised) -> list[do.Effect]:
        """Ask every other enabled site for its promise."""
        message = pb.Prepare(
            round=self.round,
            attempt=self.attempt,
            head_digest=self.ground.parent_digest,
            run=self.run,
            shape_digest=self.shape_digest,
            manifest_version=self.ground.manifest.version,
            promise=own,
        )
        return [do.Send(peer, message) for peer in self._enabled if peer != self.site]

    def promised(self, promised: Promised, now: float) -> list[do.Effect]:
        """A site promised; go on when all have answered, or soon after a quorum."""
        if promised.site in self._promises:
            return []
        if self.phase != "prepare":  # too late to count; it may still sign, and vote
            late = self.bundle.message if self.bundle else None
            return [do.Send(promised.site, late)] if late is not None else []
        if objection := self._disagrees(promised.promise):
            self._refusals[promised.site] = objection
        else:
            self._promises[promised.site] = promised
        if self._all_have_answered():
            return self._go(now)
        if len(self._promises) == self.ground.manifest.quorum:
            self.deadline = min(self.deadline, now + self.timing.straggler(self.attempt))
        return []

    def _disagrees(self, promise: pb.Promise) -> str:
        if promise.manifest_digest != self.ground.manifest.digest:
            return (
                f"goes by manifest {promise.manifest_version}, the coordinator by "
                f"{self.ground.manifest.version}: install the newer one at both (SIGHUP)"
            )
        if promise.parent_digest != self.ground.parent_digest:
            return "builds on another version"
        return "" if promise.run_digest == self._run_digest else "knows of another run"

    @property
    def _run_digest(self) -> bytes:
        return name_of(self.run)

    def refused(self, sender: str, message: pb.AttemptFailed, now: float) -> list[do.Effect]:
        """A site can't go on; once all have answered there is nothing to wait for."""
        self._refusals[sender] = reason = message.reason
        if self.phase == "prepare" and self._all_have_answered():
            return self._go(now)
        if self.phase in ("plan", "train"):
            return self._refused_before_scale(sender, reason, now)
        if self.phase == "aggregate" and self.expects_update(sender):
            return self.update_refused(sender, reason, now)
        if self.phase in ("select", "open") and self.plan is not None:
            return [*self._masking_without(sender, now), *self._refused_to_open(sender)]
        return []

    def _refused_before_scale(self, sender: str, reason: str, now: float) -> list[do.Effect]:
        if sender == self._plan.key_dealer and not self._context_held:
            raise AttemptFails(f"the key dealer {sender} failed to {reason}")
        if sender not in self.participants:
            return []
        self._trained[sender] = None
        masking = self._masking_without(sender, now)
        return [*masking, *(self._all_planned(now) or self._scale_if_all_trained(now))]

    def _refused_to_open(self, sender: str) -> list[do.Effect]:
        """It can still fetch the version and vote, if enough others make it."""
        openers = self._openers()
        if sender not in openers:
            return []
        self._unable.add(sender)
        left = len(openers) - len(self._unable)
        if self.phase == "select" and left < comparison.answers_needed(self._plan):
            raise AttemptFails(f"too few key holders could compare updates{self._why_not()}")
        if self.phase == "open" and left < self._proving:
            raise AttemptFails(
                f"{left} sites could open the sum, {self._proving} prove it{self._why_not()}"
            )
        return []

    def _openers(self) -> set[str]:
        """Who may open the sum."""
        if self._masking is not None and self._statement is not None:
            return set(self._statement.contributors)
        return set(key_holders(self._plan))

    @property
    def _proving(self) -> int:
        return self.ground.manifest.tolerated + 1

    def behind(self, sender: str, head_round: int) -> None:
        """A site has yet to learn of the last commit; it answers when it has."""
        self._behind[sender] = f"is behind, at round {head_round}"

    def _all_have_answered(self) -> bool:
        return set(self._promises) | set(self._refusals) >= set(self._enabled)

    def _go(self, now: float) -> list[do.Effect]:
        quorum = self.ground.manifest.quorum
        if len(self._promises) < quorum:
            raise AttemptFails(
                f"{len(self._promises)} of {len(self._enabled)} sites promised, "
                f"{quorum} decide{self._why_not()}"
            )
        message = make(self.ground, self.run, self._promises.values())
        self.bundle = read_bundle(message, self.ground, self.keys, self.manifest_of)
        bundles = [do.Send(site, message) for site in sorted(self._promises)]
        if self.bundle.lock is not None:
            return [*bundles, *self._restate(self.bundle, now)]
        try:
            self.plan = derive_plan(self.bundle, self.ground, self.head_certificate)
        except PlanFails as error:
            raise AttemptFails(f"{error}{self._why_not()}") from error
        self.plan_digest = digest_of(self.plan)
        self._updates = Gathering(self.plan)
        self._masking = MaskingSteps(self.plan) if is_masked(self.plan) else None
        self._enter("plan", now, self.timing.phase(self.attempt))
        return [do.Coordinate(self.plan), *bundles]

    # ---- plan and key ------------------------------------------------------------

    def plan_answered(self, sender: str, answer: pb.PlanAnswer, now: float) -> list[do.Effect]:
        """A participant took or declined the plan; a declining key dealer ends the attempt."""
        if self.plan is None or sender not in self.participants or sender in self._answers:
            return []
        self._answers[sender] = answer
        if not answer.accepted:
            self._refusals[sender] = answer.reason
            if sender == self.plan.key_dealer:
                raise AttemptFails(f"the key dealer {sender} declined the plan: {answer.reason}")
            return [*self._masking_without(sender, now), *self._all_planned(now)]
        return self._all_planned(now)

    def _all_planned(self, now: float) -> list[do.Effect]:
        """Every participant has answered the plan, or has failed since."""
        heard = self._answers.keys() | self._trained.keys()
        if self.phase != "plan" or not heard >= set(self.participants):
            return []
        return self._begin_training(now)

    def _begin_training(self, now: float) -> list[do.Effect]:
        phase, train = self.timing.phase(self.attempt), self.timing.train(self.attempt)
        self._enter("train", now, train if self._context_held else min(phase, train))
        return self._scale_if_all_trained(now)

    def expects_context(self, sender: str) -> bool:
        """Whether the key dealer's public context belongs here now."""
        waiting = self.phase in ("plan", "train") and not self._public_digest
        return waiting and self.plan is not None and sender == self.plan.key_dealer

    def key_committed(self, sender: str, message: pb.KeyCommitted, now: float) -> list[do.Effect]:
        """The dealer's word on the key, which everybody will hold it to."""
        if self.plan is None or self._commitment is not None or not self.plan.key_dealer:
            return []
        manifest, signed = self.ground.manifest, message.commitment
        told = read(self.keys, Kind.KEY_COMMITMENT, pb.KeyCommitment, signed, manifest)
        dealer = signed.site == sender == self.plan.key_dealer
        must_be(dealer, sender, "commits itself to a key that it does not deal")
        must_be(told.plan_digest == self.plan_digest, sender, "deals a key for another plan")
        self._commitment = signed
        return self._key_ready(now)

    def context_held(self, event: do.ContextHeld, now: float) -> list[do.Effect]:
        """The public context is here."""
        self._public_digest = self._public_digest or event.digest
        return self._key_ready(now)

    def _key_ready(self, now: float) -> list[do.Effect]:
        """With key and commitment, or the sharers' roster, updates can be added from now on."""
        if self._context_held:
            return []
        if self._masking is None:
            if self._commitment is None or not self._public_digest:
                return []
            told = pb.KeyCommitment.FromString(self._commitment.body)
            if told.public_digest != self._public_digest:
                dealer = self._plan.key_dealer
                raise AttemptFails(f"the key dealer {dealer} sent another key than it signed")
        elif not self._roster_digest:
            return []
        self._context_held = True
        if self.phase == "train":
            self.deadline = self._phase_began + self.timing.train(self.attempt)
        # Runs beside training, so it is a span since the plan, not a phase.
        self._phases.append(("key", now - self._phase_began))
        return self._scale_if_all_trained(now)

    # ---- masking -----------------------------------------------------------------

    def masking_answered(
        self, sender: str, answer: pb.MaskingAnswer, now: float
    ) -> list[do.Effect]:
        """A participant has done its step of masking."""
        if self._masking is None or not self._masking.answered(sender, answer):
            return []
        return self._masking_on(now)

    def _masking_without(self, sender: str, now: float) -> list[do.Effect]:
        """A site is out of the attempt: its step is not waited for."""
        if self._masking is None:
            return []
        self._masking.gone(sender)
        return self._masking_on(now)

    def _masking_on(self, now: float) -> list[do.Effect]:
        """When all have answered: pass it on. With enough of them, the rest gets a moment."""
        steps = self._masking
        if steps is None:
            return []
        if steps.complete:
            return self._pass_on(steps, now)
        if self.phase == "open" and steps.heard >= steps.threshold:
            self.deadline = min(self.deadline, now + self.timing.straggler(self.attempt))
        return []

    def _pass_on(self, steps: MaskingSteps, now: float) -> list[do.Effect]:
        step = "" if steps.step is None else pb.MaskingStep.Name(steps.step).lower()
        if steps.heard < steps.threshold:
            raise AttemptFails(
                f"{steps.heard} sites have answered masking's {step or 'last'} step, "
                f"{steps.threshold} must{self._why_not()}"
            )
        effects = steps.pass_on()
        if self.phase != "plan":
            self.deadline = now + self.timing.phase(self.attempt)
        return effects

    # ---- train -------------------------------------------------------------------

    def trained(self, sender: str, message: pb.Trained, now: float) -> list[do.Effect]:
        """A participant has trained, or says that it could not."""
        if self.plan is None or sender not in self.participants or sender in self._trained:
            return []
        if message.HasField("exponents"):
            signed = message.exponents
            told = read(self.keys, Kind.EXPONENTS, pb.Exponents, signed, self.ground.manifest)
            must_be(signed.site == sender, sender, "reports another site's training")
            must_be(told.plan_digest == self.plan_digest, sender, "trained for another plan")
            self._trained[sender] = signed
            self._exponents[sender] = tuple(told.scale_exponents)
        else:
            self._trained[sender] = None
            self._refusals[sender] = message.reason
        return self._all_planned(now) or self._scale_if_all_trained(now)

    def _scale_if_all_trained(self, now: float) -> list[do.Effect]:
        agreed = {site for site, answer in self._answers.items() if answer.accepted}
        waiting = agreed - set(self._trained)
        if self.phase == "train" and self._context_held and not waiting:
            return self._scale(now)
        return []

    def _scale(self, now: float) -> list[do.Effect]:
        """Pass on what all have told: one fixed-point scale follows from it."""
        if not self._context_held:
            raise AttemptFails(f"no round key came from the key dealer {self._plan.key_dealer}")
        told = {site: signed for site, signed in self._trained.items() if signed is not None}
        if self._masking is not None:  # who has shared no secrets can't be in the sum
            told = {site: one for site, one in told.items() if site in self._masking.sharers}
        self._need(len(told), "have trained")
        try:
            exponents, rejected = scale_of(self._plan, {s: self._exponents[s] for s in told})
        except ValueError as error:
            raise AttemptFails(str(error)) from error
        self._reject(rejected)
        asked = sorted(set(told) - set(rejected))
        self._need(len(asked), "can contribute")
        self._gathered.ask(asked, exponents)
        self._enter("aggregate", now, self.timing.phase(self.attempt))
        message = pb.Scale(
            round=self.round, attempt=self.attempt, exponents=[told[s] for s in sorted(told)]
        )
        # To all who promised: who is not asked learns that the attempt goes on.
        return [do.Send(site, message) for site in sorted(self._promises)]

    # ---- aggregate ---------------------------------------------------------------

    def expects_update(self, sender: str) -> bool:
        """Whether an encrypted update of this site belongs here now."""
        return self.phase == "aggregate" and self._gathered.expects(sender)

    def contributed(self, sender: str, message: pb.Contributed, now: float) -> list[do.Effect]:
        """A participant's word on its upload, which may be here already."""
        if self.phase != "aggregate" or sender not in self._gathered.asked:
            return []
        signed = message.contribution
        kind, manifest = Kind.CONTRIBUTION, self.ground.manifest
        told = read(self.keys, kind, pb.Contribution, signed, manifest)
        must_be(signed.site == sender, sender, "brings another site's contribution")
        agreed = (self.plan_digest, scale_digest(self._gathered.exponents))
        if (told.plan_digest, told.scale_digest) != agreed:
            return self.update_refused(sender, "contributes to another plan or scale", now)
        return self._joined(sender, self._gathered.signed(sender, signed, told), now)

    def update_arrived(self, event: do.UpdateArrived, now: float) -> list[do.Effect]:
        """An update is here, whole; its owner's word on it may be still to come."""
        if not self.expects_update(event.site):
            return []
        return self._joined(event.site, self._gathered.arrived(event.site, event.digest), now)

    def _joined(self, sender: str, effects: list[do.Effect] | None, now: float) -> list[do.Effect]:
        if effects is None:
            return self.update_refused(sender, "uploaded something else than it signed", now)
        return effects or self._go_on(now)

    def update_added(self, sender: str, now: float) -> list[do.Effect]:
        """An update is in the sum."""
        if self.phase not in ("aggregate", "select"):
            return []
        self._gathered.added.add(sender)
        return self._go_on(now)

    def update_refused(self, sender: str, reason: str, now: float) -> list[do.Effect]:
        """An update was malformed: go on without it."""
        if self._gathered.selected:
            raise AttemptFails(f"the update of {sender} was selected and can't be added: {reason}")
        self._refusals[sender] = reason
        self._gathered.without(sender)
        self._need(len(self._gathered.asked), "can contribute")
        return self._go_on(now)

    def _go_on(self, now: float) -> list[do.Effect]:
        """Compare what is here, or finish the sum, when nothing is missing."""
        if self._gathered.to_be_compared:
            return self._compare(now)
        return self._finish() if self._gathered.complete else []

    def _finish(self) -> list[do.Effect]:
        self._need(len(self._gathered.added), "have contributed")
        return self._gathered.finish()

    # ---- select ------------------------------------------------------------------

    def _compare(self, now: float) -> list[do.Effect]:
        self._need(len(self._gathered.asked), "have contributed")
        self._enter("select", now, self.timing.phase(self.attempt))
        return self._gathered.compare()

    def question_ready(self, event: do.QuestionReady, now: float) -> list[do.Effect]:
        """The products are written: which, is certified before anybody decrypts them."""
        if self.phase != "select" or self._statement is not None:
            return []
        self._reject(dict(event.refused))
        self._need(len(event.sites), "can contribute")
        self._gathered.asked = event.sites
        question = self._about(pb.QUESTION, event.digest, event.sites)
        question.byzantine_sites = self._gathered.still_byzantine
        return self._state(Known.of(question), now)

    def compared(self, sender: str, message: pb.Compared) -> list[do.Effect]:
        """A key holder's numbers: with enough equal ones, select, and add what is selected."""
        question = self._gathered.question if self._updates else None
        if self.phase != "select" or question is None or self._gathered.selected:
            return []
        signed = message.products
        must_be(
            signed.site == sender in key_holders(self._plan),
            sender,
            "holds no key and can have decrypted nothing",
        )
        told = read(self.keys, Kind.PRODUCTS, pb.Products, signed, self.ground.manifest)
        must_be(told.question_digest == question.digest, sender, "answers another question")
        answers = self._gathered.answered(signed, comparison.answers_needed(self._plan))
        if not answers:
            return []
        try:
            exponent = max(self._gathered.exponents)
            chosen = comparison.choose(self._plan, question, told, exponent)
        except ValueError as error:
            raise AttemptFails(str(error)) from error
        self._gathered.select(chosen)
        self._reject(dict(chosen.rejected))
        self._need(len(self._gathered.asked), "are left in the sum")
        return self._gathered.add_selected()

    def _reject(self, rejected: dict[str, str]) -> None:
        self._gathered.reject(rejected)
        self._refusals |= {site: f"rejected, {reason}" for site, reason in rejected.items()}

    # ---- state -------------------------------------------------------------------

    def sum_finished(self, finished: do.SumFinished, now: float) -> list[do.Effect]:
        """The sum is written: what it is made of is signed before it is opened."""
        if self.phase not in ("aggregate", "select"):
            return []
        statement = self._about(pb.SUM, finished.sum_digest, sorted(self._gathered.added))
        if objection := too_dominant(self._plan, self._gathered.added):
            raise AttemptFails(objection)
        if self._masking is not None:
            statement.dropouts.extend(self._masking.conclude(self._gathered.added))
        if self._gathered.question is not None:
            statement.question_digest = self._gathered.question.digest
            statement.answers.extend(self._gathered.answers)
        return self._state(Known.of(statement), now)

    def _about(
        self, kind: pb.StatementKind.ValueType, digest: bytes, sites: Iterable[str]
    ) -> pb.Statement:
        statement = self._statement_of(kind)
        statement.plan.CopyFrom(self._plan)
        statement.scale_exponents.extend(self._gathered.exponents)
        statement.contributions.extend(self._gathered.contributions[site] for site in sites)
        statement.rejected.extend(sorted(self._gathered.rejected))
        statement.sum_digest = digest
        if self._commitment is not None:
            statement.commitment.CopyFrom(self._commitment)
        statement.roster_digest = self._roster_digest
        return statement

    def _statement_of(self, kind: pb.StatementKind.ValueType) -> pb.Statement:
        ground = self.ground
        return pb.Statement(
            federation_id=ground.federation_id,
            manifest_digest=ground.manifest.digest,
            manifest_version=ground.manifest.version,
            round=ground.round,
            attempt=ground.attempt,
            parent_digest=ground.parent_digest,
            run_digest=self._run_digest,
            bundle_digest=self.bundle.digest if self.bundle else b"",
            kind=kind,
        )

    def _restate(self, bundle: Bundle, now: float) -> list[do.Effect]:
        """A version that may be committed somewhere goes first."""
        if bundle.lock is None:
            raise AssertionError("nothing to restate")
        statement = self._statement_of(pb.RESTATED)
        statement.root_digest = bundle.lock.root.digest
        statement.model_digest = bundle.lock.applied.model_digest
        return self._state(Known.of(statement), now)

    def _state(self, known: Known, now: float) -> list[do.Effect]:
        self._statement, self._signatures, self._certificate = known, {}, None
        if known.message.kind != pb.QUESTION:
            self._enter("state", now, self.timing.phase(self.attempt))
        else:
            self.deadline = now + self.timing.phase(self.attempt)
        message = pb.State(round=self.round, attempt=self.attempt, statement=known.raw)
        effects: list[do.Effect] = []
        for site in sorted(self._promises):
            # Who has not answered the plan may not have the bundle, and can't sign without.
            if self.plan is not None and self.bundle and site not in self._answers:
                effects.append(do.Send(site, self.bundle.message))
            effects.append(do.Send(site, message))
        return effects

    def stated(self, sender: str, message: pb.Stated, now: float) -> list[do.Effect]:
        """A site signed the statement; with a quorum it is certain."""
        known = self._statement
        if known is None or self._certificate is not None:
            return []
        if message.statement_digest != known.digest or sender in self._signatures:
            return []
        signature, manifest = message.signature, self.ground.manifest
        must_be(signature.site == sender, sender, "brings another site's signature")
        verify(self.keys, Kind.STATEMENT, known.raw, signature, manifest)
        self._signatures[sender] = signature
        if len(self._signatures) < manifest.quorum:
            return []
        self._certificate = pb.StatementCertificate(
            statement=known.raw,
            signatures=[self._signatures[site] for site in sorted(self._signatures)],
        )
        return self._certified(known, self._certificate, now)

    def _certified(
        self, known: Known, certificate: pb.StatementCertificate, now: float
    ) -> list[do.Effect]:
        if known.message.kind == pb.RESTATED and self.bundle and self.bundle.lock:
            lock = pb.Lock(
                certificate=certificate,
                root=self.bundle.lock.root.raw,
                proof=self.bundle.lock.message.proof,
            )
            return self._prove(lock, now)
        message = pb.Certified(round=self.round, attempt=self.attempt, certificate=certificate)
        if known.message.kind == pb.QUESTION:
            self.deadline = now + self.timing.phase(self.attempt)
            self._gathered.question = known
            self._statement = None
            holders = key_holders(self._plan)
            sending: do.Effect = do.SendProducts(tuple(holders), message)
        else:
            self._enter("open", now, self.timing.phase(self.attempt))
            holders = sorted(self._openers() - {self.site})
            self._challenges = Challenges(self._plan)
            sending = do.SendSum(tuple(holders), message)
            if self._masking is not None:
                self._masking.open(known.contributors)
        others = [do.Send(site, message) for site in sorted(set(self._promises) - set(holders))]
        return [sending, *others]

    # ---- open --------------------------------------------------------------------

    def applied(self, sender: str, message: pb.AppliedSum, now: float) -> list[do.Effect]:
        """Somebody has opened the sum; f + 1 equal versions prove it."""
        known = self._statement
        if self.phase != "open" or known is None or self._certificate is None:
            return []
        signed = message.applied
        must_be(signed.site == sender, sender, "brings what another site applied")
        told = read(self.keys, Kind.APPLIED, pb.Applied, signed, self.ground.manifest)
        must_be(told.root_digest == known.digest, sender, "applied another sum")
        self._applied.setdefault(sender, signed)
        tally = Counter(one.body for one in self._applied.values())
        body, count = tally.most_common(1)[0]
        if count < self._proving:
            return self._refused_to_open("") if self._hopeless(tally) else []
        proof = [self._applied[s] for s in sorted(self._applied) if self._applied[s].body == body]
        return self._prove(pb.Lock(certificate=self._certificate, proof=proof), now)

    def _hopeless(self, tally: Counter[bytes]) -> bool:
        left = len(self._openers() - self._unable - set(self._applied))
        if max(tally.values()) + left >= self._proving:
            return False
        seen = ", ".join(
            f"{site} {pb.Applied.FromString(one.body).model_digest.hex()[:12]}"
            for site, one in sorted(self._applied.items())
        )
        raise AttemptFails(f"those who opened the sum differ, no version is proven: {seen}")

    def _prove(self, lock: pb.Lock, now: float) -> list[do.Effect]:
        self._enter("vote", now, self.timing.phase(self.attempt))
        held = read_lock(lock, self.keys, self.manifest_of)
        self._value = value_of(held, self.ground.manifest)
        self._proven = pb.Proven(round=self.round, attempt=self.attempt, lock=lock)
        return [do.Send(site, self._proven) for site in self._enabled]

    # ---- vote --------------------------------------------------------------------

    def voted(self, vote: pb.Vote, now: float) -> list[do.Effect]:
        """A verified vote: at a quorum, commit."""
        if self.phase != "vote" or vote.site in self._votes:
            return []
        if vote.body != self._value:
            raise RemoteProtocolError(f"{vote.site} votes for something else than was proven")
        self._votes[vote.site] = vote
        # Our own vote is waited for, so that the coordinator too has the version.
        if len(self._votes) < self.ground.manifest.quorum or self.site not in self._votes:
            return []
        self._enter("commit", now, math.inf)
        equal = [self._votes[site] for site in sorted(self._votes)]
        certificate = certificate_of(self.attempt, equal, self.unix_ms())
        commit = pb.Commit(certificate=certificate, report=self._report(vote.body))
        return [do.Send(site, commit) for site in self._enabled]

    def _report(self, body: pb.VoteBody) -> pb.RoundReport:
        return pb.RoundReport(
            round=self.round,
            attempt=self.attempt,
            coordinator=self.site,
            key_dealer=self.plan.key_dealer if self.plan else "",
            contributors=body.contributors,
            phases=[pb.PhaseTime(phase=name, seconds=s) for name, s in self._phases],
            shared_values=self.shared_values,
            mean_loss=body.mean_loss,
            noise_multiplier=self.plan.noise_multiplier if self.plan else 0.0,
            clip_norm=self.plan.clip_norm if self.plan else 0.0,
            rejections=self._updates.rejections() if self._updates else (),
        )

    def failed(self, reason: str) -> pb.EndedAttempt:
        """This attempt is over, in this coordinator's own words."""
        ended = pb.Ended(
            federation_id=self.ground.federation_id,
            round=self.round,
            attempt=self.attempt,
            reason=one_line(reason),
        )
        return pb.EndedAttempt(ended=sign(self.keys, Kind.ENDED, ended))

    # ---- deadlines -----------------------------------------------------------------

    def timeout(self, now: float) -> list[do.Effect]:
        """The phase's deadline has passed: go on with those that answered, or fail."""
        if self.phase == "prepare":
            return self._go(now)
        if self.phase == "plan":
            heard = {site: answer.accepted for site, answer in self._answers.items()}
            heard |= {site: signed is not None for site, signed in self._trained.items()}
            absent = sorted(set(self.participants) - heard.keys())
            self._refusals |= dict.fromkeys(absent, "did not answer the plan")
            self._need(sum(heard.values()), "took the plan")
            left = [e for site in absent for e in self._masking_without(site, now)]
            return [*left, *self._begin_training(now)]
        if self.phase == "train" and self._masking and self._masking.step is not None:
            return self._pass_on(self._masking, now)
        if self.phase == "train":
            return self._scale(now)
        if self.phase == "open" and self._masking and self._masking.step is not None:
            return self._pass_on(self._masking, now)
        if self.phase == "aggregate":
            # A site whose update is not in the sum by now is no contributor.
            if self._extended:
                raise AttemptFails("the sum was not finished in time")
            self._extended = True
            self.deadline = now + self.timing.phase(self.attempt)
            self._gathered.cut_off()
            return self._compare(now) if self._gathered.robust else self._finish()
        raise AttemptFails(self._too_slow())

    def _too_slow(self) -> str:
        """What did not come in time, and from whom."""
        if self.phase == "select" and self._statement is None:
            return "updates were not compared and summed in time"
        if self.phase in ("select", "state"):
            silent = sorted(set(self._enabled) - set(self._signatures))
            return f"no quorum signed in time; none came from {', '.join(silent)}{self._why_not()}"
        if self.phase == "open":
            silent = sorted(self._openers() - set(self._applied))
            return f"the sum was not opened in time by {', '.join(silent)}{self._why_not()}"
        silent = sorted(set(self._enabled) - set(self._votes))
        return f"no quorum of votes in time; none came from {', '.join(silent)}"

    def contributors(self) -> tuple[str, ...]:
        """Whose updates are in the sum so far."""
        return tuple(sorted(self._updates.added)) if self._updates else ()

    @property
    def _gathered(self) -> Gathering:
        if self._updates is None:
            raise AssertionError(f"phase {self.phase} without a plan")
        return self._updates

    @property
    def participants(self) -> list[str]:
        """Sites of the plan, sorted."""
        return [p.site for p in self.plan.participants] if self.plan else []

    @property
    def _plan(self) -> pb.Plan:
        if self.plan is None:
            raise AssertionError(f"phase {self.phase} without a plan")
        return self.plan

    @property
    def _enabled(self) -> tuple[str, ...]:
        return self.ground.manifest.enabled_ids

    def _enter(self, phase: str, now: float, allowance: float) -> None:
        self._phases.append((self.phase, now - self._phase_began))
        self.phase, self._phase_began, self.deadline = phase, now, now + allowance

    def _need(self, count: int, what: str) -> None:
        minimum = needed_contributors(self._plan) + self._gathered.still_byzantine
        if count < minimum:
            raise AttemptFails(f"{count} sites {what}, the plan needs {minimum}{self._why_not()}")

    def _why_not(self) -> str:
        reasons = dict(self._refusals)
        for site, promised in self._promises.items():
            promise = promised.promise
            if not promise.willing:
                reasons[site] = promise.reason or "not willing to train"
            elif promise.shape_digest != self.shape_digest:
                reasons[site] = "its retriever differs (encoder or adaptation)"
        for site in self._enabled:
            if self.phase == "prepare" and site not in self._promises:
                reasons.setdefault(site, self._behind.get(site, "did not answer"))
        return "".join(f"; {site}: {reasons[site]}" for site in sorted(reasons))


def scale_of(
    plan: pb.Plan, exponents: dict[str, tuple[int, ...]]
) -> tuple[tuple[int, ...], dict[str, str]]:
    """The scale that follows from what participants told, and who is left out of it.

    A sum that is repeated has its scale already. Raises ValueError.
    """
    if plan.scale_exponents:
        return tuple(plan.scale_exponents), {}
    return comparison.common_scale(plan, exponents)
