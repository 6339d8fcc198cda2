"""What the coordinator of one attempt knows and decides. PURE, like the protocol.

The phases, in order:

    prepare -> plan -> train -> aggregate -> (select or unmask) -> apply -> vote -> (commit)

* prepare ends with a majority of the *manifest*, never of the responders. If a
  promise carries an accepted value, that value is proposed again and everything
  up to the vote is skipped: it may already be committed somewhere.
* plan, train and aggregate end when every site asked has answered, or at the
  phase's deadline with those that did, if they are ``min_participants``. Who did
  not answer the plan in time is not waited for any longer, and a key that is not
  there one phase after the plan ends the attempt: training would be in vain.
* with a robust rule, updates wait until all are here; select has the key holders decrypt
  their dot products (peers/gathering.py), and only what is selected is added.
* apply hands out the sum; who is to decrypt it has it proven before (peers/proving.py).
* vote ends with equal votes of a majority of the manifest.

The coordinator never holds the round's secret key: key holders are the
participants without it (docs/decisions/0001). In masking mode there is no key; the
steps that take its place, and the phase unmask, are those of peers/masking_steps.py.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from peers import comparison
from peers import effects as do
from peers.certificates import certificate_of
from peers.errors import RemoteProtocolError
from peers.gathering import Gathering
from peers.manifest import FederationManifest
from peers.masking_steps import MaskingSteps, is_masked
from peers.messages import one_line
from peers.planning import common_scale, make_plan
from peers.proving import Challenges
from peers.roles import key_holders, value_of
from peers.timing import Timing
from proto import federation_pb2 as pb


class AttemptFails(Exception):
    """This attempt can't go on; the text says why and at whose side."""


@dataclass
class Coordination:
    """One attempt as its coordinator sees it. Methods return effects."""

    site: str
    round: int
    attempt: int
    parent_digest: bytes
    run: pb.Run
    shape_digest: bytes
    shared_values: int
    manifest: FederationManifest
    timing: Timing
    unix_ms: Callable[[], int]
    now: float
    phase: str = "prepare"
    deadline: float = 0.0
    plan: pb.Plan | None = None
    value: pb.VoteBody | None = None
    head_certificate: pb.Certificate | None = None
    _promises: dict[str, pb.Promise] = field(default_factory=dict)
    _refusals: dict[str, str] = field(default_factory=dict)
    _behind: dict[str, str] = field(default_factory=dict)
    _answers: dict[str, pb.PlanAnswer] = field(default_factory=dict)
    _masking: MaskingSteps | None = None
    _trained: dict[str, pb.Trained] = field(default_factory=dict)
    _context_held: bool = False
    _updates: Gathering | None = None
    _challenges: Challenges | None = None
    _extended: bool = False
    _unable: set[str] = field(default_factory=set)
    _bound: set[int] = field(default_factory=set)
    _proposed: pb.VoteBody | None = None
    _votes: dict[str, pb.Vote] = field(default_factory=dict)
    _phases: list[tuple[str, float]] = field(default_factory=list)
    _phase_began: float = 0.0

    def __post_init__(self) -> None:
        self._phase_began = self.now
        self.deadline = self.now + self.timing.phase(self.attempt)

    def answered(self, sender: str, message: do.Answer, now: float) -> list[do.Effect]:
        """A site answers; a vote is verified already."""
        match message:
            case pb.Promise():
                return self.promised(sender, message, now)
            case pb.PlanAnswer():
                return self.plan_answered(sender, message, now)
            case pb.Trained():
                return self.trained(sender, message, now)
            case pb.MaskingAnswer():
                return self.masking_answered(sender, message, now)
            case pb.Compared():
                return self.compared(sender, message)
            case pb.Challenge():
                return self._challenges.asked(sender, message) if self._challenges else []
            case pb.Vote():
                return self.voted(message, now)

    def worked(self, event: do.Worked, now: float) -> list[do.Effect]:
        """Our own work for this attempt is done, or failed."""
        match event:
            case do.ContextHeld():  # in masking mode it tells of our own shares, as a participant
                return [] if self._masking else self.context_held(now)
            case do.UpdateArrived():
                return self.update_arrived(event.site, now)
            case do.UpdateAdded():
                return self.update_added(event.site, now)
            case do.UpdateRefused():
                return self.update_refused(event.site, event.reason, now)
            case do.QuestionReady():
                return self.question_ready(event)
            case do.SumFinished():
                return self.sum_finished(event, now)
            case do.Unmasked():
                return self._hand_out(event, now) if self.phase == "unmask" else []
            case do.ChallengeAnswered():
                proof = pb.Proof(round=self.round, attempt=self.attempt, answer=event.answer)
                return [do.Send(event.holder, proof)]
            case do.ChallengeRefused():
                self._refusals[event.holder] = event.reason
                return self._refused_to_apply(event.holder)
            case do.WorkFailed(phase="key" | "aggregate" | "select" | "unmask" | "prove"):
                raise AttemptFails(f"{self.site} failed to {event.phase}: {event.reason}")
        return []

    # ---- prepare ---------------------------------------------------------------

    def prepare(self) -> list[do.Effect]:
        """Ask every other enabled site for its promise."""
        message = pb.Prepare(
            round=self.round,
            attempt=self.attempt,
            head_digest=self.parent_digest,
            run=self.run,
            shape_digest=self.shape_digest,
            manifest_version=self.manifest.version,
        )
        return [do.Send(peer, message) for peer in self._others()]

    def promised(self, sender: str, promise: pb.Promise, now: float) -> list[do.Effect]:
        """A site promised; go on when all have answered, or soon after a majority."""
        if self.phase != "prepare" or sender in self._promises:
            return []
        self._promises[sender] = promise
        if self._all_have_answered():
            return self._plan_or_propose(now)
        if len(self._promises) == self.manifest.majority:
            self.deadline = min(self.deadline, now + self.timing.straggler(self.attempt))
        return []

    def refused(self, sender: str, message: pb.AttemptFailed, now: float) -> list[do.Effect]:
        """A site can't go on; once all have answered there is nothing to wait for."""
        self._refusals[sender] = reason = message.reason
        if message.manifest_version:
            self._bound.add(message.manifest_version)
        if self.phase == "prepare" and self._all_have_answered():
            return self._plan_or_propose(now)
        if self.phase in ("plan", "train"):
            return self._refused_before_scale(sender, reason, now)
        if self.phase == "aggregate" and self.expects_update(sender):
            return self.update_refused(sender, reason, now)
        if self.phase == "select":
            self._gathered.unable_to_compare(sender)
            if self._gathered.hopeless:
                raise AttemptFails(f"too few key holders could compare updates{self._why_not()}")
        if self.phase == "unmask":
            return self._masking_without(sender, now)
        if self.phase in ("apply", "vote") and self.plan is not None:
            return self._refused_to_apply(sender)
        return []

    def _refused_before_scale(self, sender: str, reason: str, now: float) -> list[do.Effect]:
        if sender == self._plan.key_dealer and not self._context_held:
            raise AttemptFails(f"the key dealer {sender} failed to {reason}")
        if sender not in self.participants:
            return []
        self._trained[sender] = pb.Trained(failed=True, reason=reason)
        masking = self._masking_without(sender, now)
        return [*masking, *(self._all_planned(now) or self._scale_if_all_trained(now))]

    def _refused_to_apply(self, sender: str) -> list[do.Effect]:
        """It can still fetch the version and vote, if another holder makes it."""
        if sender not in key_holders(self._plan, self.site):
            return []
        self._unable.add(sender)
        if self._proposed is not None:
            proposal = pb.Accept(round=self.round, attempt=self.attempt, value=self._proposed)
            return [do.Send(sender, proposal)]
        if self._unable >= set(key_holders(self._plan, self.site)):
            raise AttemptFails(f"no key holder could apply the sum{self._why_not()}")
        return []

    def behind(self, sender: str, head_round: int) -> None:
        """A site has yet to learn of the last commit; it answers when it has."""
        self._behind[sender] = f"is behind, at round {head_round}"

    def _all_have_answered(self) -> bool:
        return set(self._promises) | set(self._refusals) >= set(self.manifest.enabled_ids)

    def _plan_or_propose(self, now: float) -> list[do.Effect]:
        if len(self._promises) < self.manifest.majority:
            raise AttemptFails(
                f"{len(self._promises)} of {len(self.manifest.enabled_ids)} sites promised, "
                f"a majority is {self.manifest.majority}{self._why_not()}"
            )
        accepted = [p.accepted for p in self._promises.values() if p.HasField("accepted")]
        if accepted:
            self.value = max(accepted, key=lambda a: a.attempt).value
            self._enter("vote", now, self.timing.phase(self.attempt))
            proposal = pb.Accept(round=self.round, attempt=self.attempt, value=self.value)
            return [do.Send(site, proposal) for site in self.manifest.enabled_ids]
        return self._make_plan(now)

    # ---- plan and key ------------------------------------------------------------

    def _make_plan(self, now: float) -> list[do.Effect]:
        training = self.run.plan
        willing = {
            site: promise
            for site, promise in self._promises.items()
            if promise.willing
            and promise.num_examples > 0
            and promise.shape_digest == self.shape_digest
        }
        needed = comparison.participants_needed(training)
        if len(willing) < needed:
            raise AttemptFails(
                f"{len(willing)} of {len(self.manifest.enabled_ids)} sites can train, "
                f"the plan needs {needed}{self._why_not()}"
            )
        if objection := comparison.objection(training, len(willing)):
            raise AttemptFails(objection)
        self.plan = make_plan(
            pb.Plan(
                round=self.round,
                attempt=self.attempt,
                parent_digest=self.parent_digest,
                training=training,
                shape_digest=self.shape_digest,
                manifest_version=self.manifest.version,
                train_deadline_ms=min(round(self.timing.train(self.attempt) * 1000), 86_400_000),
            ),
            self.site,
            willing,
            self.head_certificate,
        )
        self._updates = Gathering(self.plan)
        self._masking = MaskingSteps(self.plan) if is_masked(self.plan) else None
        self._enter("plan", now, self.timing.phase(self.attempt))
        plans = [do.Send(site, self.plan) for site in sorted(self._promises)]
        return [do.Coordinate(self.plan), *plans]

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
        waiting = self.phase in ("plan", "train") and not self._context_held
        return waiting and self.plan is not None and sender == self.plan.key_dealer

    def context_held(self, now: float) -> list[do.Effect]:
        """The public context is here: updates can be added from now on."""
        if not self._context_held:
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
        if self.phase == "unmask" and steps.heard >= steps.threshold:
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
        if step == "shares":
            return [*effects, *self.context_held(now)]
        return effects

    # ---- train -------------------------------------------------------------------

    def trained(self, sender: str, message: pb.Trained, now: float) -> list[do.Effect]:
        """A participant has trained, or says that it could not."""
        if self.plan is None or sender not in self.participants or sender in self._trained:
            return []
        if message.failed:
            self._refusals[sender] = message.reason
        self._trained[sender] = message
        return self._all_planned(now) or self._scale_if_all_trained(now)

    def _scale_if_all_trained(self, now: float) -> list[do.Effect]:
        agreed = {site for site, answer in self._answers.items() if answer.accepted}
        waiting = agreed - set(self._trained)
        if self.phase == "train" and self._context_held and not waiting:
            return self._scale(now)
        return []

    def _scale(self, now: float) -> list[do.Effect]:
        """One fixed-point scale for all: the largest exponent of each group."""
        if not self._context_held:
            raise AttemptFails(f"no round key came from the key dealer {self._plan.key_dealer}")
        reports = {site: m for site, m in self._trained.items() if not m.failed}
        if self._masking is not None:  # who has shared no secrets can't be in the sum
            reports = {s: m for s, m in reports.items() if s in self._masking.sharers}
        self._need(len(reports), "have trained")
        try:
            exponents, rejected = common_scale(self._plan, reports)
        except ValueError as error:
            raise AttemptFails(str(error)) from error
        self._reject(rejected)
        reports = {site: m for site, m in reports.items() if site not in rejected}
        self._need(len(reports), "can contribute")
        self._gathered.ask(sorted(reports), exponents)
        self._enter("aggregate", now, self.timing.phase(self.attempt))
        message = pb.Scale(
            round=self.round,
            attempt=self.attempt,
            scale_exponents=exponents,
            contributors=self._gathered.asked,
        )
        # To all who promised: who is not asked learns that the attempt goes on.
        return [do.Send(site, message) for site in sorted(self._promises)]

    # ---- aggregate ---------------------------------------------------------------

    def expects_update(self, sender: str) -> bool:
        """Whether an encrypted update of this site belongs here now."""
        return self.phase == "aggregate" and self._gathered.expects(sender)

    def update_arrived(self, sender: str, now: float) -> list[do.Effect]:
        """An update is here, whole."""
        if not self.expects_update(sender):
            return []
        return self._gathered.arrived(sender) or self._go_on(now)

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

    def question_ready(self, event: do.QuestionReady) -> list[do.Effect]:
        """The products are written: to the key holders with them."""
        if self.phase != "select":
            return []
        self._reject(dict(event.refused))
        self._need(len(event.sites), "can contribute")
        holders = key_holders(self._plan, self.site)
        return self._gathered.question(event, holders, self._promises)

    def compared(self, sender: str, message: pb.Compared) -> list[do.Effect]:
        """A key holder's numbers: with enough of them, select, and add what is selected."""
        if self.phase != "select" or not self._gathered.answered(sender, message):
            return []
        try:
            self._reject(self._gathered.select())
        except ValueError as error:
            raise AttemptFails(str(error)) from error
        self._need(len(self._gathered.asked), "are left in the sum")
        return self._gathered.add_selected()

    def _reject(self, rejected: dict[str, str]) -> None:
        self._gathered.reject(rejected)
        self._refusals |= {site: f"rejected, {reason}" for site, reason in rejected.items()}

    # ---- the sum -----------------------------------------------------------------

    def sum_finished(self, finished: do.SumFinished, now: float) -> list[do.Effect]:
        """The sum is written: to the key holders with it. A masked one is opened first."""
        if self.phase not in ("aggregate", "select"):
            return []
        if self._masking is not None:
            self._enter("unmask", now, self.timing.phase(self.attempt))
            return self._masking.conclude(self._gathered.added, self._promises)
        return self._hand_out(finished, now)

    def _hand_out(self, finished: do.SumFinished | do.Unmasked, now: float) -> list[do.Effect]:
        self._enter("apply", now, self.timing.phase(self.attempt))
        message = self._gathered.claim(finished)
        holders = key_holders(self._plan, self.site)
        self._challenges = Challenges(self._plan, holders)
        sending = do.SendSum(tuple(site for site in holders if site != self.site), message)
        return [sending, *(do.Send(site, message) for site in holders if site == self.site)]

    # ---- vote --------------------------------------------------------------------

    def voted(self, vote: pb.Vote, now: float) -> list[do.Effect]:
        """A verified vote: at the first, get the version; at a majority, commit."""
        if self.phase not in ("apply", "vote") or vote.site in self._votes:
            return []
        self._check_value(vote)
        self._votes[vote.site] = vote
        result: list[do.Effect] = []
        if self.phase == "apply":
            self._enter("vote", now, self.timing.phase(self.attempt))
            self._proposed = vote.body
            holders = set(key_holders(self._plan, self.site)) - self._unable
            holders -= self._challenges.silent if self._challenges else set()
            proposal = pb.Accept(round=self.round, attempt=self.attempt, value=vote.body)
            result = [
                do.Send(site, proposal) for site in self.manifest.enabled_ids if site not in holders
            ]
        return result + self._commit_if_majority(now)

    def _check_value(self, vote: pb.Vote) -> None:
        """A vote is for what this attempt is about; only the model digest is the voter's word."""
        expected = self.value
        if expected is None:
            expected = value_of(
                self._plan,
                vote.body.federation_id,
                self.contributors(),
                vote.body.model_digest,
                tuple(self._gathered.rejected),
            )
        if vote.body != expected:
            raise RemoteProtocolError(f"{vote.site} votes for something else than was proposed")

    def _commit_if_majority(self, now: float) -> list[do.Effect]:
        tally = Counter(_key(vote.body) for vote in self._votes.values())
        winner, count = tally.most_common(1)[0]
        open_votes = len(self.manifest.enabled_ids) - len(self._votes)
        if count + open_votes < self.manifest.majority:
            raise AttemptFails(f"votes differ, no majority is possible: {self._describe_votes()}")
        # Our own vote is waited for, so that the coordinator too has the version.
        own = self._votes.get(self.site)
        if count < self.manifest.majority or own is None or _key(own.body) != winner:
            return []
        self._enter("commit", now, math.inf)
        equal = [self._votes[s] for s in sorted(self._votes) if _key(self._votes[s].body) == winner]
        certificate = certificate_of(self.attempt, equal, self.unix_ms())
        commit = pb.Commit(certificate=certificate, report=self._report(equal))
        return [do.Send(site, commit) for site in self.manifest.enabled_ids]

    def _report(self, votes: list[pb.Vote]) -> pb.RoundReport:
        losses = [vote.mean_loss for vote in votes if not math.isnan(vote.mean_loss)]
        return pb.RoundReport(
            round=self.round,
            attempt=self.attempt,
            coordinator=self.site,
            key_dealer=self.plan.key_dealer if self.plan else "",
            contributors=votes[0].body.contributors,
            phases=[pb.PhaseTime(phase=name, seconds=s) for name, s in self._phases],
            shared_values=self.shared_values,
            mean_loss=losses[0] if losses else math.nan,
            noise_multiplier=self.plan.noise_multiplier if self.plan else 0.0,
            clip_norm=self.plan.clip_norm if self.plan else 0.0,
            rejections=self._updates.rejections() if self._updates else (),
        )

    def failed(self, reason: str) -> pb.AttemptFailed:
        """This attempt is over: why, and by which manifest the next one should go."""
        accepted = any(promise.HasField("accepted") for promise in self._promises.values())
        return pb.AttemptFailed(
            round=self.round,
            attempt=self.attempt,
            reason=one_line(reason),
            manifest_version=self.manifest.version if accepted else min(self._bound, default=0),
        )

    # ---- deadlines -----------------------------------------------------------------

    def timeout(self, now: float) -> list[do.Effect]:
        """The phase's deadline has passed: go on with those that answered, or fail."""
        if self.phase == "prepare":
            return self._plan_or_propose(now)
        if self.phase == "plan":
            heard = {site: answer.accepted for site, answer in self._answers.items()}
            heard |= {site: not message.failed for site, message in self._trained.items()}
            absent = sorted(set(self.participants) - heard.keys())
            self._refusals |= dict.fromkeys(absent, "did not answer the plan")
            self._need(sum(heard.values()), "took the plan")
            left = [e for site in absent for e in self._masking_without(site, now)]
            return [*left, *self._begin_training(now)]
        if self.phase == "train" and self._masking and not self._context_held:
            return self._pass_on(self._masking, now)
        if self.phase == "train":
            return self._scale(now)
        if self.phase == "unmask" and self._masking and self._masking.step is not None:
            return self._pass_on(self._masking, now)
        if self.phase == "unmask":
            raise AttemptFails("the masked sum was not opened in time")
        if self.phase == "aggregate":
            # A site whose update is not in the sum by now is no contributor.
            if self._extended:
                raise AttemptFails("the sum was not finished in time")
            self._extended = True
            self.deadline = now + self.timing.phase(self.attempt)
            self._gathered.cut_off()
            return self._compare(now) if self._gathered.robust else self._finish()
        if self.phase == "select":
            raise AttemptFails("updates were not compared and summed in time")
        silent = sorted(set(self.manifest.enabled_ids) - set(self._votes))
        raise AttemptFails(f"no majority of votes in time; none came from {', '.join(silent)}")

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

    def _enter(self, phase: str, now: float, allowance: float) -> None:
        self._phases.append((self.phase, now - self._phase_began))
        self.phase, self._phase_began, self.deadline = phase, now, now + allowance

    def _need(self, count: int, what: str) -> None:
        masked = self._masking.threshold if self._masking else 2
        minimum = max(masked, self._plan.training.min_participants)
        minimum += self._gathered.still_byzantine
        if count < minimum:
            raise AttemptFails(f"{count} sites {what}, the plan needs {minimum}{self._why_not()}")

    def _why_not(self) -> str:
        reasons = dict(self._refusals)
        for site, promise in self._promises.items():
            if not promise.willing:
                reasons[site] = promise.reason or "not willing to train"
            elif promise.shape_digest != self.shape_digest:
                reasons[site] = "its retriever differs (encoder or adaptation)"
        for site in self.manifest.enabled_ids:
            if self.phase == "prepare" and site not in self._promises:
                reasons.setdefault(site, self._behind.get(site, "did not answer"))
        return "".join(f"; {site}: {reasons[site]}" for site in sorted(reasons))

    def _describe_votes(self) -> str:
        return ", ".join(
            f"{site} {vote.body.model_digest.hex()[:12]}"
            for site, vote in sorted(self._votes.items())
        )

    def _others(self) -> list[str]:
        return [site for site in self.manifest.enabled_ids if site != self.site]


def _key(body: pb.VoteBody) -> bytes:
    return body.SerializeToString(deterministic=True)
