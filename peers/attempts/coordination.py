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
from collections.abc import Iterable, Set
from dataclasses import dataclass, field
from typing import Any, Final

from peers.attempts import effects as do
from peers.attempts.bundle import Ground
from peers.attempts.modes import key_holders, mode_of
from peers.attempts.preparing import AttemptFails, Preparing
from peers.attempts.statement import HeldLock, Known, ManifestOf, read_lock, scale_digest, value_of
from peers.plans import robust
from peers.plans.weights import too_dominant
from peers.wire.certificates import certificate_of
from peers.wire.errors import RemoteProtocolError
from peers.wire.messages import check
from peers.wire.signing import Keys, Kind, must_be, read, verify
from proto import federation_pb2 as pb

# What sites tell the coordinator of an attempt, in every secure-sum mode.
ANSWERS: Final[tuple[type[Any], ...]] = (
    *(pb.PlanAnswer, pb.Trained, pb.Contributed, pb.Stated, pb.Compared),
    *(pb.AppliedSum, pb.Vote),
)


@dataclass
class Tally:
    """What sites have signed of one attempt, at its coordinator."""

    ground: Ground
    keys: Keys
    manifest_of: ManifestOf
    known: Known | None = None
    certificate: pb.StatementCertificate | None = None
    signatures: dict[str, pb.Signature] = field(default_factory=dict)
    applied: dict[str, pb.Signed] = field(default_factory=dict)
    votes: dict[str, pb.Vote] = field(default_factory=dict)
    _value: pb.VoteBody | None = None

    @property
    def proving(self) -> int:
        """Equal versions that prove one: of f + 1 sites one is honest."""
        return self.ground.manifest.tolerated + 1

    # ---- signatures --------------------------------------------------------------

    def begin(self, known: Known) -> None:
        """This is what is to be signed now."""
        self.known, self.signatures, self.certificate = known, {}, None

    def stated(self, sender: str, message: pb.Stated) -> pb.StatementCertificate | None:
        """A site signed the statement; with a quorum it is certain, once."""
        known = self.known
        if known is None or self.certificate is not None:
            return None
        if message.statement_digest != known.digest or sender in self.signatures:
            return None
        signature, manifest = message.signature, self.ground.manifest
        must_be(signature.site == sender, sender, "brings another site's signature")
        verify(self.keys, Kind.STATEMENT, known.raw, signature, manifest)
        self.signatures[sender] = signature
        if len(self.signatures) < manifest.quorum:
            return None
        self.certificate = pb.StatementCertificate(
            statement=known.raw,
            signatures=[self.signatures[site] for site in sorted(self.signatures)],
        )
        return self.certificate

    # ---- versions ----------------------------------------------------------------

    def opened(self, sender: str, message: pb.AppliedSum) -> pb.Lock | None:
        """Somebody has opened the sum; f + 1 equal versions prove it."""
        known = self.known
        if known is None or self.certificate is None:
            return None
        signed = message.applied
        applied = pb.Applied.FromString(signed.body)  # read by peers/rounds/protocol.py
        must_be(applied.root_digest == known.digest, sender, "applied another sum")
        self.applied.setdefault(sender, signed)
        body, count = self._most()
        if count < self.proving:
            return None
        proof = [self.applied[s] for s in sorted(self.applied) if self.applied[s].body == body]
        return pb.Lock(certificate=self.certificate, proof=proof)

    def _most(self) -> tuple[bytes, int]:
        return Counter(one.body for one in self.applied.values()).most_common(1)[0]

    def hopeless(self, openers: Set[str]) -> str:
        """Why no version can be proven any more by these; empty while one can."""
        left = len(openers - set(self.applied))
        if not self.applied or self._most()[1] + left >= self.proving:
            return ""
        seen = ", ".join(
            f"{site} {pb.Applied.FromString(one.body).model_digest.hex()[:12]}"
            for site, one in sorted(self.applied.items())
        )
        return f"those who opened the sum differ, no version is proven: {seen}"

    # ---- votes -------------------------------------------------------------------

    def prove(self, lock: pb.Lock) -> None:
        """This is what is voted for from now on."""
        proven = read_lock(lock, self.keys, self.manifest_of)
        self._value = value_of(proven, self.ground.manifest)

    def voted(self, vote: pb.Vote, own: str) -> list[pb.Vote]:
        """A verified vote: equal ones of a quorum, with our own, once there are.

        It is waited for, so that the coordinator, too, has the version.
        """
        if vote.site in self.votes:
            return []
        if vote.body != self._value:
            raise RemoteProtocolError(f"{vote.site} votes for something else than was proven")
        self.votes[vote.site] = vote
        if len(self.votes) < self.ground.manifest.quorum or own not in self.votes:
            return []
        return [self.votes[site] for site in sorted(self.votes)]


@dataclass
class Coordination(Preparing):
    """One attempt as its coordinator sees it. Methods return effects."""

    _extended: bool = False
    _tally: Tally = field(init=False)
    _unable: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._tally = Tally(self.ground, self.keys, self.manifest_of)

    def answered(self, sender: str, message: do.OfMode | pb.Vote, now: float) -> list[do.Effect]:
        """A site answers; a vote is verified already."""
        match message:
            case pb.PlanAnswer():
                return self.plan_answered(sender, message, now)
            case pb.Trained():
                return self.trained(sender, message, now)
            case pb.Contributed():
                return self.contributed(sender, message, now)
            case pb.Stated():
                return self.stated(sender, message, now)
            case pb.Compared():
                return self.compared(sender, message)
            case pb.AppliedSum():
                return self.applied(sender, message, now)
            case pb.Vote():
                return self.voted(message, now)
            case _:
                return self.steps_answered(sender, message, now)

    @property
    def stating(self) -> Known | None:
        """What sites are asked to sign, or have."""
        return self._tally.known

    def worked(self, event: do.Worked, now: float) -> list[do.Effect]:
        """Our own work for this attempt is done, or failed."""
        match event:
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
            case do.OpeningRefused():
                self._refusals[event.site] = event.reason
                return self._refused_to_open(event.site)
            case do.WorkFailed(phase="key" | "aggregate" | "select" | "prove"):
                raise AttemptFails(f"{self.site} failed to {event.phase}: {event.reason}")
        return self.steps_worked(event, now)

    def refused(self, sender: str, message: pb.AttemptFailed, now: float) -> list[do.Effect]:
        """A site can't go on; once all have answered there is nothing to wait for."""
        self._refusals[sender] = reason = message.reason
        if self.phase == "prepare":
            self._promises.pop(sender, None)
            return self._go(now) if self._all_have_answered() else []
        if self.phase in ("plan", "train"):
            return self._refused_before_scale(sender, reason, now)
        if self.phase == "aggregate" and self.expects_update(sender):
            return self.update_refused(sender, reason, now)
        if self.phase in ("select", "open") and self.plan is not None:
            return [*self._steps_without(sender, now), *self._refused_to_open(sender)]
        return []

    def left_by(self, site: str, attempt: int, now: float) -> list[do.Effect]:
        """Whoever has promised a later attempt does nothing in this one any more.

        But for a key dealer, who is waited for a phase and no more: it may have dealt.
        """
        if self.plan is None or self.plan.key_dealer == site:
            return []
        reason = f"take part any longer: it has gone on to attempt {attempt}"
        left = pb.AttemptFailed(round=self.round, attempt=self.attempt, reason=reason)
        return self.refused(site, left, now)

    def _refused_to_open(self, sender: str) -> list[do.Effect]:
        """It can still fetch the version and vote, if enough others make it."""
        openers = self._openers()
        if sender not in openers:
            return []
        self._unable.add(sender)
        left = len(openers) - len(self._unable)
        if self.phase == "select" and left < robust.answers_needed(self._plan):
            raise AttemptFails(f"too few key holders could compare updates{self._why_not()}")
        proving = self._tally.proving
        if self.phase == "open" and left < proving:
            raise AttemptFails(
                f"{left} sites could open the sum, {proving} prove it{self._why_not()}"
            )
        return []

    def _openers(self) -> set[str]:
        """Who may open the sum."""
        known = self._tally.known
        return self._steps.openers(known.contributors if known is not None else None)

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
        contribution = read(self.keys, kind, pb.Contribution, signed, manifest)
        must_be(signed.site == sender, sender, "brings another site's contribution")
        agreed = (self.plan_digest, scale_digest(self._gathered.exponents))
        if (contribution.plan_digest, contribution.scale_digest) != agreed:
            return self.update_refused(sender, "contributes to another plan or scale", now)
        if len(contribution.nonce) != mode_of(self._plan).tag_bytes(self._plan, sender):
            return self.update_refused(sender, "signed tags that prove nothing", now)
        return self._joined(sender, self._gathered.signed(sender, signed, contribution), now)

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
        if self.phase != "select" or self._tally.known is not None:
            return []
        self._refusals |= dict(event.refused)
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
        products = read(self.keys, Kind.PRODUCTS, pb.Products, signed, self.ground.manifest)
        must_be(products.question_digest == question.digest, sender, "answers another question")
        answers = self._gathered.answered(signed, robust.answers_needed(self._plan))
        if not answers:
            return []
        try:
            exponent = max(self._gathered.exponents)
            chosen = robust.choose(self._plan, question.message, products, exponent)
        except ValueError as error:
            raise AttemptFails(str(error)) from error
        self._gathered.select(chosen)
        self._reject(dict(chosen.rejected))
        self._need(len(self._gathered.asked), "are left in the sum")
        return self._gathered.add_selected()

    # ---- state -------------------------------------------------------------------

    def sum_finished(self, finished: do.SumFinished, now: float) -> list[do.Effect]:
        """The sum is written: what it is made of is signed before it is opened."""
        if self.phase not in ("aggregate", "select"):
            return []
        statement = self._about(pb.SUM, finished.sum_digest, sorted(self._gathered.added))
        if objection := too_dominant(self._plan, self._gathered.added):
            raise AttemptFails(objection)
        statement.dropouts.extend(self._steps.dropouts(self._gathered.added))
        if self._gathered.question is not None:
            statement.question_digest = self._gathered.question.digest
            statement.answers.extend(self._gathered.answers)
        return self._state(Known.of(statement), now)

    def _about(
        self, kind: pb.StatementKind.ValueType, digest: bytes, sites: Iterable[str]
    ) -> pb.Statement:
        statement = self._statement_of(kind)
        statement.plan.CopyFrom(self._plan)
        self._gathered.describe(statement, sites)
        statement.sum_digest = digest
        self._steps.describe(statement)
        return statement

    def _statement_of(self, kind: pb.StatementKind.ValueType) -> pb.Statement:
        bundle = self.bundle.digest if self.bundle else b""
        return self.ground.statement(kind, bundle, self._run_digest)

    def _restate(self, lock: HeldLock, now: float) -> list[do.Effect]:
        """A version that may be committed somewhere goes first."""
        statement = self._statement_of(pb.RESTATED)
        statement.root_digest = lock.root.digest
        statement.model_digest = lock.applied.model_digest
        return self._state(Known.of(statement), now)

    def _state(self, known: Known, now: float) -> list[do.Effect]:
        self._tally.begin(known)
        if known.message.kind != pb.QUESTION:
            self._enter("state", now, self.timing.phase(self.attempt))
        else:
            self.deadline = now + self.timing.phase(self.attempt)
        message = pb.State(round=self.round, attempt=self.attempt, statement=known.raw)
        try:
            check(message)  # what can't be sent must not be signed here, and kept, either
        except RemoteProtocolError as error:
            raise AttemptFails(f"what is summed can't be stated: {error}") from error
        effects: list[do.Effect] = []
        for site in sorted(self._promises):
            # Who has not answered the plan may not have the bundle, and can't sign without.
            if self.plan is not None and self.bundle and site not in self._answers:
                effects.append(do.Send(site, self.bundle.message))
            effects.append(do.Send(site, message))
        return effects

    def stated(self, sender: str, message: pb.Stated, now: float) -> list[do.Effect]:
        """A site signed the statement; with a quorum it is certain."""
        certificate = self._tally.stated(sender, message)
        if certificate is None or self._tally.known is None:
            return []
        return self._certified(self._tally.known, certificate, now)

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
            self._gathered.question, self._tally.known = known, None
            holders = key_holders(self._plan)
            sending: do.Effect = do.SendProducts(tuple(holders), message)
        else:
            self._enter("open", now, self.timing.phase(self.attempt))
            holders = sorted(self._openers() - {self.site})
            sending = do.SendSum(tuple(holders), message)
            self._steps.certified(known.contributors)
        others = [do.Send(site, message) for site in sorted(set(self._promises) - set(holders))]
        return [sending, *others]

    # ---- open --------------------------------------------------------------------

    def applied(self, sender: str, message: pb.AppliedSum, now: float) -> list[do.Effect]:
        """Somebody has opened the sum; f + 1 equal versions prove it."""
        if self.phase != "open":
            return []
        lock = self._tally.opened(sender, message)
        if lock is not None:
            return self._prove(lock, now)
        if why := self._tally.hopeless(self._openers() - self._unable):
            raise AttemptFails(why)
        return []

    def _prove(self, lock: pb.Lock, now: float) -> list[do.Effect]:
        self._enter("vote", now, self.timing.phase(self.attempt))
        self._tally.prove(lock)
        proven = pb.Proven(round=self.round, attempt=self.attempt, lock=lock)
        return [do.Send(site, proven) for site in self._enabled]

    # ---- vote --------------------------------------------------------------------

    def voted(self, vote: pb.Vote, now: float) -> list[do.Effect]:
        """A verified vote: at a quorum, commit."""
        if self.phase != "vote":
            return []
        equal = self._tally.voted(vote, self.site)
        if not equal:
            return []
        self._enter("commit", now, math.inf)
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
            shared_values=self.model.values,
            mean_loss=body.mean_loss,
            noise_multiplier=self.plan.noise_multiplier if self.plan else 0.0,
            clip_norm=self.plan.clip_norm if self.plan else 0.0,
            rejections=self._updates.rejections() if self._updates else (),
        )

    # ---- deadlines -----------------------------------------------------------------

    def timeout(self, now: float) -> list[do.Effect]:
        """The phase's deadline has passed: go on with those that answered, or fail."""
        if self.phase == "prepare":
            return self._go(now)
        if self.phase == "plan":
            heard = {site: answer.accepted for site, answer in self._answers.items()}
            heard |= {site: signed is not None for site, signed in self._reporting.signed.items()}
            absent = sorted(set(self.participants) - heard.keys())
            self._refusals |= dict.fromkeys(absent, "did not answer the plan")
            self._need(sum(heard.values()), "took the plan")
            left = [e for site in absent for e in self._steps_without(site, now)]
            return [*left, *self._begin_training(now)]
        if self.phase in ("train", "open") and self._steps.collecting:
            return self._pass_on(self._steps, now)
        if self.phase == "train":
            return self._scale(now)
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
        if self.phase == "select" and self._tally.known is None:
            return "updates were not compared and summed in time"
        if self.phase in ("select", "state"):
            silent = sorted(set(self._enabled) - set(self._tally.signatures))
            return f"no quorum signed in time; none came from {', '.join(silent)}{self._why_not()}"
        if self.phase == "open":
            silent = sorted(self._openers() - set(self._tally.applied))
            return f"the sum was not opened in time by {', '.join(silent)}{self._why_not()}"
        silent = sorted(set(self._enabled) - set(self._tally.votes))
        return f"no quorum of votes in time; none came from {', '.join(silent)}"

    def contributors(self) -> tuple[str, ...]:
        """Whose updates are in the sum so far."""
        return tuple(sorted(self._updates.added)) if self._updates else ()
