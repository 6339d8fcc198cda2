"""One plan at its coordinator: from the answers to it to the sum of its updates. PURE.

    plan -> train -> aggregate (-> select)

* plan, train and aggregate end when every site asked has answered, or at the phase's
  deadline with those that did, if they are enough. A key that is not there one phase
  after the plan ends the attempt: training would be in vain.
* with a robust rule, updates wait until all are here; a certified question has the key
  holders decrypt their dot products, and only what is selected is added.
"""

from __future__ import annotations

from collections.abc import Iterable

from peers.attempts import effects as do
from peers.attempts.bundle import Bundle, needed_contributors
from peers.attempts.gathering import Gathering
from peers.attempts.lead import AttemptFails, Lead
from peers.attempts.modes import key_holders, mode_of
from peers.attempts.scale import Reports
from peers.attempts.statement import EncodedStatement, scale_digest
from peers.plans import robust
from peers.plans.weights import too_dominant
from peers.wire.errors import RemoteProtocolError
from peers.wire.signing import Kind, digest_of, must_be, read
from proto import federation_pb2 as pb


class Summation:
    """One plan as its coordinator sees it. Methods return effects.

    ``answers``: to the plan, by site; ``updates``: what is summed; ``steps``: the mode's part.
    """

    def __init__(self, lead: Lead, bundle: Bundle, plan: pb.Plan) -> None:
        self.plan = plan
        self.participants = [one.site for one in plan.participants]
        self.answers: dict[str, pb.PlanAnswer] = {}
        self.updates = Gathering(plan)
        self.steps = mode_of(plan).coordinator(plan, lead.keys, lead.ground.manifest)
        self._lead = lead
        self._bundle = bundle
        self._plan_digest = digest_of(plan)
        self._reports = Reports(lead.ground, lead.keys, plan)
        self._can_add = False
        self._extended = False

    def answered(self, sender: str, message: do.AttemptMessage, now: float) -> list[do.Effect]:
        """A site answers, to the plan or what followed."""
        match message:
            case pb.PlanAnswer():
                return self.plan_answered(sender, message, now)
            case pb.Trained():
                return self.trained(sender, message, now)
            case pb.Contributed():
                return self.contributed(sender, message, now)
            case pb.Compared():
                return self.compared(sender, message)
        return self._steps_answered(sender, message, now)

    def worked(self, event: do.WorkDone, now: float) -> list[do.Effect]:
        """Our own work for the sum is done."""
        match event:
            case do.UpdateArrived():
                return self.update_arrived(event, now)
            case do.UpdateAdded():
                return self.update_added(event.site, now)
            case do.UpdateRefused():
                return self.update_refused(event.site, event.reason, now)
        return [*self.steps.worked(event), *self._updates_welcome(now)]

    # ---- plan and key ----------------------------------------------------------------

    def plan_answered(self, sender: str, answer: pb.PlanAnswer, now: float) -> list[do.Effect]:
        """A participant took or declined the plan; a declining key dealer ends the attempt."""
        if sender not in self.participants or sender in self.answers:
            return []
        self.answers[sender] = answer
        if not answer.accepted:
            self._lead.refusals[sender] = answer.reason
            if sender == self.plan.key_dealer:
                raise AttemptFails(f"the key dealer {sender} declined the plan: {answer.reason}")
            return [*self.gone(sender, now), *self._all_planned(now)]
        return self._all_planned(now)

    def _all_planned(self, now: float) -> list[do.Effect]:
        """Every participant has answered the plan, or has failed since."""
        heard = self.answers.keys() | self._reports.signed.keys()
        if self._lead.phase != "plan" or not heard >= set(self.participants):
            return []
        return self._begin_training(now)

    def _begin_training(self, now: float) -> list[do.Effect]:
        lead, timing = self._lead, self._lead.timing
        phase, train = timing.phase(lead.attempt), timing.train(lead.attempt)
        lead.enter("train", now, train if self._can_add else min(phase, train))
        return self._scale_if_all_trained(now)

    def expects_context(self, sender: str) -> bool:
        """Whether the key dealer's public context belongs here now."""
        return self._lead.phase in ("plan", "train") and self.steps.expects_context(sender)

    # ---- what the mode of the sum wants ----------------------------------------------

    def _steps_answered(
        self, sender: str, message: do.AttemptMessage, now: float
    ) -> list[do.Effect]:
        """A site answers in the words of the plan's mode. Raises RemoteProtocolError for others."""
        if type(message) not in mode_of(self.plan).answers:
            raise RemoteProtocolError(f"{sender} answers in the words of another mode")
        effects = self.steps.answered(sender, message)
        return [*effects, *self._updates_welcome(now), *self._steps_on(now)]

    def _updates_welcome(self, now: float) -> list[do.Effect]:
        """With key and commitment, or the sharers' roster, updates can be added from now on."""
        if self._can_add or not self.steps.ready:
            return []
        if objection := self.steps.objection:
            raise AttemptFails(objection)
        self._can_add = True
        if self._lead.phase == "train":
            self._lead.deadline = self._lead.began + self._lead.timing.train(self._lead.attempt)
        # Runs beside training, so it is a span since the plan, not a phase.
        self._lead.spans.append(("key", now - self._lead.began))
        return self._scale_if_all_trained(now)

    def gone(self, sender: str, now: float) -> list[do.Effect]:
        """A site is out of the attempt: its steps are not waited for."""
        self.steps.gone(sender)
        return self._steps_on(now)

    def _steps_on(self, now: float) -> list[do.Effect]:
        """When all have answered: pass it on. With enough of them, the rest gets a moment."""
        if not self.steps.collecting:
            return []
        if self.steps.complete:
            return self._pass_on(now)
        if self._lead.phase == "open" and not self.steps.shortage:
            self._lead.hurry(now)
        return []

    def _pass_on(self, now: float) -> list[do.Effect]:
        if shortage := self.steps.shortage:
            raise AttemptFails(f"{shortage}{self._why_not()}")
        effects = self.steps.pass_on()
        if self._lead.phase != "plan":
            self._lead.extend(now)
        return effects

    # ---- train -----------------------------------------------------------------------

    def trained(self, sender: str, message: pb.Trained, now: float) -> list[do.Effect]:
        """A participant has trained, or says that it could not."""
        if sender not in self.participants or sender in self._reports.signed:
            return []
        self._reports.trained(sender, message)
        if not message.HasField("exponents"):
            self._lead.refusals[sender] = message.reason
        return self._all_planned(now) or self._scale_if_all_trained(now)

    def _scale_if_all_trained(self, now: float) -> list[do.Effect]:
        agreed = {site for site, answer in self.answers.items() if answer.accepted}
        waiting = agreed - set(self._reports.signed)
        if self._lead.phase == "train" and self._can_add and not waiting:
            return self._scale(now)
        return []

    def _scale(self, now: float) -> list[do.Effect]:
        """Pass on what all have told: one fixed-point scale follows from it."""
        if not self._can_add:
            raise AttemptFails(f"no round key came from the key dealer {self.plan.key_dealer}")
        reports = self._reports.of(self.steps.able)
        self._need(len(reports), "have trained")
        try:
            exponents, rejected = self._reports.scale(reports)
        except ValueError as error:
            raise AttemptFails(str(error)) from error
        self._reject(rejected)
        self.updates.left_out = len(rejected)
        sites = sorted(set(reports) - set(rejected))
        self._need(len(sites), "can contribute")
        self.updates.ask(sites, exponents)
        self._lead.enter("aggregate", now)
        at = {"round": self._lead.round, "attempt": self._lead.attempt}
        message = pb.Scale(**at, exponents=list(reports.values()))
        # To all who promised: who is not asked learns that the attempt goes on.
        return [do.Send(site, message) for site in sorted(self._lead.promises)]

    def _reject(self, rejected: dict[str, str]) -> None:
        self.updates.reject(rejected)
        self._lead.refusals |= {site: f"rejected, {reason}" for site, reason in rejected.items()}

    def refused(self, sender: str, reason: str, now: float) -> list[do.Effect]:
        """A site can't go on, and leaves the attempt before its sum is finished."""
        if self._lead.phase not in ("plan", "train"):
            return self.update_refused(sender, reason, now) if self.expects_update(sender) else []
        if sender == self.plan.key_dealer and not self._can_add:
            raise AttemptFails(f"the key dealer {sender} failed to {reason}")
        if sender not in self.participants:
            return []
        self._reports.signed[sender] = None
        left = self.gone(sender, now)
        return [*left, *(self._all_planned(now) or self._scale_if_all_trained(now))]

    def _need(self, count: int, what: str) -> None:
        minimum = needed_contributors(self.plan) + self.updates.still_byzantine
        if count < minimum:
            raise AttemptFails(f"{count} sites {what}, the plan needs {minimum}{self._why_not()}")

    def _why_not(self) -> str:
        if self._lead.phase not in ("plan", "train"):
            return self._lead.why_not()
        return self._lead.why_not(set(self.participants) - self._reports.signed.keys())

    # ---- aggregate -------------------------------------------------------------------

    def expects_update(self, sender: str) -> bool:
        """Whether a hidden update of this site belongs here now."""
        return self._lead.phase == "aggregate" and self.updates.expects(sender)

    def contributed(self, sender: str, message: pb.Contributed, now: float) -> list[do.Effect]:
        """A participant's word on its upload, which may be here already."""
        if self._lead.phase != "aggregate" or sender not in self.updates.asked:
            return []
        signed = message.contribution
        kind, manifest = Kind.CONTRIBUTION, self._lead.ground.manifest
        contribution = read(self._lead.keys, kind, pb.Contribution, signed, manifest)
        must_be(signed.site == sender, sender, "brings another site's contribution")
        agreed = (self._plan_digest, scale_digest(self.updates.exponents))
        if (contribution.plan_digest, contribution.scale_digest) != agreed:
            return self.update_refused(sender, "contributes to another plan or scale", now)
        if len(contribution.nonce) != mode_of(self.plan).tag_bytes(self.plan, sender):
            return self.update_refused(sender, "signed tags that prove nothing", now)
        return self._joined(sender, self.updates.signed(sender, signed, contribution), now)

    def update_arrived(self, event: do.UpdateArrived, now: float) -> list[do.Effect]:
        """An update is here, whole; its owner's word on it may be still to come."""
        if not self.expects_update(event.site):
            return []
        return self._joined(event.site, self.updates.arrived(event.site, event.digest), now)

    def _joined(self, sender: str, effects: list[do.Effect] | None, now: float) -> list[do.Effect]:
        if effects is None:
            return self.update_refused(sender, "uploaded something else than it signed", now)
        return effects or self._go_on(now)

    def update_added(self, sender: str, now: float) -> list[do.Effect]:
        """An update is in the sum."""
        if self._lead.phase not in ("aggregate", "select"):
            return []
        self.updates.added.add(sender)
        return self._go_on(now)

    def update_refused(self, sender: str, reason: str, now: float) -> list[do.Effect]:
        """An update was malformed: go on without it."""
        if self.updates.selected:
            raise AttemptFails(f"the update of {sender} was selected and can't be added: {reason}")
        self._lead.refusals[sender] = reason
        self.updates.without(sender)
        self._need(len(self.updates.asked), "can contribute")
        return self._go_on(now)

    def _go_on(self, now: float) -> list[do.Effect]:
        """Compare what is here, or finish the sum, when nothing is missing."""
        if self.updates.to_be_compared:
            return self._compare(now)
        return self._finish() if self.updates.complete else []

    def _finish(self) -> list[do.Effect]:
        self._need(len(self.updates.added), "have contributed")
        return self.updates.finish()

    # ---- select ----------------------------------------------------------------------

    def _compare(self, now: float) -> list[do.Effect]:
        self._need(len(self.updates.asked), "have contributed")
        self._lead.enter("select", now)
        return self.updates.compare()

    def question(self, event: do.QuestionReady) -> EncodedStatement:
        """The products are written: which, is certified before anybody decrypts them."""
        self._lead.refusals |= dict(event.refused)
        self._need(len(event.sites), "can contribute")
        self.updates.asked = event.sites
        question = self._about(pb.QUESTION, event.digest, event.sites)
        question.byzantine_sites = self.updates.still_byzantine
        return EncodedStatement.of(question)

    def compared(self, sender: str, message: pb.Compared) -> list[do.Effect]:
        """A key holder's numbers: with enough equal ones, select, and add what is selected."""
        question = self.updates.question
        if self._lead.phase != "select" or question is None or self.updates.selected:
            return []
        signed = message.products
        must_be(
            signed.site == sender in key_holders(self.plan),
            sender,
            "holds no key and can have decrypted nothing",
        )
        keys, manifest = self._lead.keys, self._lead.ground.manifest
        products = read(keys, Kind.PRODUCTS, pb.Products, signed, manifest)
        must_be(products.question_digest == question.digest, sender, "answers another question")
        answers = self.updates.answered(signed, robust.answers_needed(self.plan))
        if not answers:
            return []
        try:
            exponent = max(self.updates.exponents)
            chosen = robust.choose(self.plan, question.message, products, exponent)
        except ValueError as error:
            raise AttemptFails(str(error)) from error
        self.updates.select(chosen)
        self._reject(dict(chosen.rejected))
        self._need(len(self.updates.asked), "are left in the sum")
        return self.updates.add_selected()

    # ---- the sum ---------------------------------------------------------------------

    def finished(self, event: do.SumFinished) -> EncodedStatement:
        """The sum is written: what it is made of is signed before it is opened."""
        statement = self._about(pb.SUM, event.sum_digest, sorted(self.updates.added))
        if objection := too_dominant(self.plan, self.updates.added):
            raise AttemptFails(objection)
        statement.dropouts.extend(self.steps.dropouts(self.updates.added))
        if self.updates.question is not None:
            statement.question_digest = self.updates.question.digest
            statement.answers.extend(self.updates.answers)
        return EncodedStatement.of(statement)

    def _about(
        self, kind: pb.StatementKind.ValueType, digest: bytes, sites: Iterable[str]
    ) -> pb.Statement:
        bundle = self._bundle
        statement = self._lead.ground.statement(kind, bundle.digest, bundle.run_digest)
        statement.plan.CopyFrom(self.plan)
        self.updates.describe(statement, sites)
        statement.sum_digest = digest
        self.steps.describe(statement)
        return statement

    # ---- deadlines -----------------------------------------------------------------

    def timeout(self, now: float) -> list[do.Effect] | None:
        """The phase's deadline has passed: go on with those that answered; None: no way to."""
        lead = self._lead
        if lead.phase == "plan":
            heard = {site: answer.accepted for site, answer in self.answers.items()}
            heard |= {site: signed is not None for site, signed in self._reports.signed.items()}
            absent = sorted(set(self.participants) - heard.keys())
            lead.refusals |= dict.fromkeys(absent, "did not answer the plan")
            self._need(sum(heard.values()), "took the plan")
            left = [e for site in absent for e in self.gone(site, now)]
            return [*left, *self._begin_training(now)]
        if lead.phase in ("train", "open") and self.steps.collecting:
            return self._pass_on(now)
        if lead.phase == "train":
            return self._scale(now)
        if lead.phase == "aggregate":
            # A site whose update is not in the sum by now is no contributor.
            if self._extended:
                raise AttemptFails("the sum was not finished in time")
            self._extended = True
            lead.extend(now)
            self.updates.cut_off()
            return self._compare(now) if self.updates.robust else self._finish()
        return None
