"""What the coordinator of one attempt carries from site to site. PURE, like the protocol.

The phases, in order:

    prepare -> plan -> train -> aggregate -> (select ->) state -> open -> vote -> (commit)

* prepare ends with the promises of a quorum of the *manifest*, never of the responders.
  They are forwarded as they are; the plan follows from them. If one names a lock, its
  version is stated again and everything up to the vote is skipped: it may already be
  committed somewhere.
* plan, train, aggregate and select: the plan's sum is made (peers/attempts/summation.py).
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
from collections.abc import Callable, Set
from dataclasses import dataclass, field
from typing import Any, Final

from peers.attempts import effects as do
from peers.attempts.bundle import (
    Bundle,
    Ground,
    PlanFails,
    Promised,
    derive_plan,
    make,
    read_bundle,
)
from peers.attempts.lead import AttemptFails, Lead
from peers.attempts.modes import key_holders
from peers.attempts.statement import EncodedStatement, HeldLock, ManifestOf, read_lock, value_of
from peers.attempts.summation import Summation
from peers.plans import robust
from peers.wire.certificates import certificate_of
from peers.wire.errors import RemoteProtocolError
from peers.wire.messages import check
from peers.wire.signing import Keys, Kind, must_be, name_of, verify
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
    known: EncodedStatement | None = None
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

    def begin(self, known: EncodedStatement) -> None:
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
class Coordination:
    """One attempt as its coordinator sees it. Methods return effects."""

    lead: Lead
    run: pb.Signed
    manifest_of: ManifestOf
    unix_ms: Callable[[], int]
    bundle: Bundle | None = None
    sum: Summation | None = None  # none where a version is restated
    _tally: Tally = field(init=False)
    _unable: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._tally = Tally(self.lead.ground, self.lead.keys, self.manifest_of)

    @property
    def phase(self) -> str:
        """The phase that it is in."""
        return self.lead.phase

    @property
    def stating(self) -> EncodedStatement | None:
        """What sites are asked to sign, or have."""
        return self._tally.known

    def contributors(self) -> tuple[str, ...]:
        """Whose updates are in the sum so far."""
        return tuple(sorted(self.sum.updates.added)) if self.sum else ()

    def expects_update(self, sender: str) -> bool:
        """Whether a hidden update of this site belongs here now."""
        return self.sum is not None and self.sum.expects_update(sender)

    def expects_context(self, sender: str) -> bool:
        """Whether the key dealer's public context belongs here now."""
        return self.sum is not None and self.sum.expects_context(sender)

    # ---- prepare ---------------------------------------------------------------

    def prepare(self, own: pb.Promised, now: float) -> list[do.Effect]:
        """Ask every other enabled site for its promise."""
        lead = self.lead
        lead.began = now
        lead.extend(now)
        message = pb.Prepare(
            round=lead.round,
            attempt=lead.attempt,
            head_digest=lead.ground.parent_digest,
            run=self.run,
            shape_digest=lead.model.shape_digest,
            manifest_version=lead.ground.manifest.version,
            promise=own,
        )
        return [do.Send(peer, message) for peer in lead.enabled if peer != lead.site]

    def promised(self, promised: Promised, now: float) -> list[do.Effect]:
        """A site promised; go on when all have answered, or soon after a quorum."""
        lead = self.lead
        if promised.site in lead.promises:
            return []
        if lead.phase != "prepare":  # too late to count, and to sign; it may vote
            return [do.Send(promised.site, self.bundle.message)] if self.bundle else []
        if objection := self._disagrees(promised.promise):
            lead.refusals[promised.site] = objection
        else:
            lead.promises[promised.site] = promised
        if self._all_have_answered():
            return self._go(now)
        if len(lead.promises) == lead.ground.manifest.quorum:
            lead.hurry(now)
        return []

    def _disagrees(self, promise: pb.Promise) -> str:
        manifest = self.lead.ground.manifest
        if promise.manifest_digest != manifest.digest:
            if promise.manifest_version == manifest.version:
                return (
                    f"goes by another manifest {manifest.version} ("
                    f"{promise.manifest_digest.hex()[:12]}) than the coordinator "
                    f"({manifest.digest.hex()[:12]}): sign one of version {manifest.version + 1}"
                )
            return (
                f"goes by manifest {promise.manifest_version}, the coordinator by "
                f"{manifest.version}: install the newer one at both (SIGHUP)"
            )
        if promise.parent_digest != self.lead.ground.parent_digest:
            return "builds on another version"
        return "" if promise.run_digest == name_of(self.run) else "knows of another run"

    def behind(self, sender: str, head_round: int) -> None:
        """A site has yet to learn of the last commit; it answers when it has."""
        self.lead.behind[sender] = f"is behind, at round {head_round}"

    def _all_have_answered(self) -> bool:
        lead = self.lead
        return lead.promises.keys() | lead.refusals.keys() >= set(lead.enabled)

    def _go(self, now: float) -> list[do.Effect]:
        lead, quorum = self.lead, self.lead.ground.manifest.quorum
        if len(lead.promises) < quorum:
            raise AttemptFails(
                f"{len(lead.promises)} of {len(lead.enabled)} sites promised, "
                f"{quorum} decide{lead.why_not()}"
            )
        message = make(lead.ground, self.run, lead.promises.values())
        self.bundle = read_bundle(message, lead.ground, lead.keys, self.manifest_of)
        bundles = [do.Send(site, message) for site in sorted(lead.promises)]
        if self.bundle.lock is not None:
            return [*bundles, *self._restate(self.bundle, self.bundle.lock, now)]
        try:
            plan = derive_plan(self.bundle, lead.ground)
        except PlanFails as error:
            raise AttemptFails(f"{error}{lead.why_not()}") from error
        self.sum = Summation(lead, self.bundle, plan)
        lead.enter("plan", now)
        return [do.TakePlan(plan), *bundles]

    # ---- what sites answer, and our own work -----------------------------------------

    def answered(
        self, sender: str, message: do.AttemptMessage | pb.Vote, now: float
    ) -> list[do.Effect]:
        """A site answers; a vote is verified already."""
        match message:
            case pb.Stated():
                return self.stated(sender, message, now)
            case pb.AppliedSum():
                return self.applied(sender, message, now)
            case pb.Vote():
                return self.voted(message, now)
        return self.sum.answered(sender, message, now) if self.sum is not None else []

    def worked(self, event: do.WorkDone, now: float) -> list[do.Effect]:
        """Our own work for this attempt is done, or failed."""
        match event:
            case do.OpeningRefused():
                self.lead.refusals[event.site] = event.reason
                return self._refused_to_open(event.site)
            case do.WorkFailed(phase="key" | "aggregate" | "select" | "prove"):
                raise AttemptFails(f"{self.lead.site} failed to {event.phase}: {event.reason}")
        if self.sum is None:
            return []
        match event:
            case do.QuestionReady() if self.phase == "select" and self.stating is None:
                return self._state(self.sum.question(event), now)
            case do.SumFinished() if self.phase in ("aggregate", "select"):
                return self._state(self.sum.finished(event), now)
        return self.sum.worked(event, now)

    def refused(self, sender: str, message: pb.AttemptFailed, now: float) -> list[do.Effect]:
        """A site can't go on; once all have answered there is nothing to wait for."""
        lead = self.lead
        lead.refusals[sender] = f"failed to {message.reason}"
        if lead.phase == "prepare":
            lead.promises.pop(sender, None)
            return self._go(now) if self._all_have_answered() else []
        if self.sum is None:
            return []
        if lead.phase in ("select", "open"):
            return [*self.sum.gone(sender, now), *self._refused_to_open(sender)]
        return self.sum.refused(sender, message.reason, now)

    def left_by(self, site: str, attempt: int, now: float) -> list[do.Effect]:
        """Whoever has promised a later attempt does nothing in this one any more.

        But for a key dealer, who is waited for a phase and no more: it may have dealt.
        """
        if self.sum is None or self.sum.plan.key_dealer == site:
            return []
        reason = f"take part any longer: it has gone on to attempt {attempt}"
        at = {"round": self.lead.round, "attempt": self.lead.attempt}
        return self.refused(site, pb.AttemptFailed(**at, reason=reason), now)

    def _refused_to_open(self, sender: str) -> list[do.Effect]:
        """It can still fetch the version and vote, if enough others make it."""
        openers = self._openers()
        if self.sum is None or sender not in openers:
            return []
        self._unable.add(sender)
        left, proving = len(openers) - len(self._unable), self._tally.proving
        why_not = self.lead.why_not()
        if self.phase == "select" and left < robust.answers_needed(self.sum.plan):
            raise AttemptFails(f"too few key holders could compare updates{why_not}")
        if self.phase == "open" and left < proving:
            raise AttemptFails(f"{left} sites could open the sum, {proving} prove it{why_not}")
        return []

    def _openers(self) -> set[str]:
        """Who may open the sum."""
        known = self.stating
        contributors = known.contributors if known is not None else None
        return self.sum.steps.openers(contributors) if self.sum is not None else set()

    # ---- state -------------------------------------------------------------------

    def _restate(self, bundle: Bundle, lock: HeldLock, now: float) -> list[do.Effect]:
        """A version that may be committed somewhere goes first."""
        ground = self.lead.ground
        statement = ground.statement(pb.RESTATED, bundle.digest, bundle.run_digest)
        statement.root_digest = lock.root.digest
        statement.model_digest = lock.applied.model_digest
        return self._state(EncodedStatement.of(statement), now)

    def _state(self, known: EncodedStatement, now: float) -> list[do.Effect]:
        lead = self.lead
        self._tally.begin(known)
        if known.message.kind != pb.QUESTION:
            lead.enter("state", now)
        else:
            lead.extend(now)
        message = pb.State(round=lead.round, attempt=lead.attempt, statement=known.raw)
        try:
            check(message)  # what can't be sent must not be signed here, and kept, either
        except RemoteProtocolError as error:
            raise AttemptFails(f"what is summed can't be stated: {error}") from error
        effects: list[do.Effect] = []
        for site in sorted(lead.promises):
            # Who has not answered the plan may not have the bundle, and can't sign without.
            if self.sum is not None and self.bundle and site not in self.sum.answers:
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
        self, known: EncodedStatement, certificate: pb.StatementCertificate, now: float
    ) -> list[do.Effect]:
        lead, lock = self.lead, self.bundle.lock if self.bundle else None
        if lock is not None:
            proof = lock.message.proof
            return self._prove(
                pb.Lock(certificate=certificate, root=lock.root.raw, proof=proof), now
            )
        if self.sum is None:
            raise AssertionError("a sum is certified without a plan")
        message = pb.Certified(round=lead.round, attempt=lead.attempt, certificate=certificate)
        if known.message.kind == pb.QUESTION:
            lead.extend(now)
            self.sum.updates.question, self._tally.known = known, None
            holders = key_holders(self.sum.plan)
            sending: do.Effect = do.SendProducts(tuple(holders), message)
        else:
            lead.enter("open", now)
            holders = sorted(self._openers() - {lead.site})
            sending = do.SendSum(tuple(holders), message)
            self.sum.steps.certified(known.contributors)
        others = [do.Send(site, message) for site in sorted(set(lead.promises) - set(holders))]
        return [sending, *others]

    # ---- open, vote --------------------------------------------------------------

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
        lead = self.lead
        lead.enter("vote", now)
        self._tally.prove(lock)
        proven = pb.Proven(round=lead.round, attempt=lead.attempt, lock=lock)
        return [do.Send(site, proven) for site in lead.enabled]

    def voted(self, vote: pb.Vote, now: float) -> list[do.Effect]:
        """A verified vote: at a quorum, commit."""
        lead = self.lead
        if lead.phase != "vote":
            return []
        equal = self._tally.voted(vote, lead.site)
        if not equal:
            return []
        lead.enter("commit", now, math.inf)
        certificate = certificate_of(lead.attempt, equal, self.unix_ms())
        commit = pb.Commit(certificate=certificate, report=self._report(vote.body))
        return [do.Send(site, commit) for site in lead.enabled]

    def _report(self, body: pb.VoteBody) -> pb.RoundReport:
        lead = self.lead
        report = pb.RoundReport(
            round=lead.round,
            attempt=lead.attempt,
            coordinator=lead.site,
            contributors=body.contributors,
            phases=[pb.PhaseTime(phase=name, seconds=s) for name, s in lead.spans],
            shared_values=lead.model.values,
            mean_loss=body.mean_loss,
        )
        if self.sum is not None:
            plan = self.sum.plan
            report.key_dealer = plan.key_dealer
            report.noise_multiplier, report.clip_norm = plan.noise_multiplier, plan.clip_norm
            report.rejections.extend(self.sum.updates.rejections())
        return report

    # ---- deadlines -----------------------------------------------------------------

    def timeout(self, now: float) -> list[do.Effect]:
        """The phase's deadline has passed: go on with those that answered, or fail."""
        if self.phase == "prepare":
            return self._go(now)
        effects = self.sum.timeout(now) if self.sum is not None else None
        if effects is None:
            raise AttemptFails(self._too_slow())
        return effects

    def _too_slow(self) -> str:
        """What did not come in time, and from whom."""
        lead, tally = self.lead, self._tally
        if lead.phase == "select" and tally.known is None:
            return "updates were not compared and summed in time"
        if lead.phase in ("select", "state"):
            silent = sorted(set(lead.enabled) - set(tally.signatures))
            return f"no quorum signed in time; none came from {', '.join(silent)}{lead.why_not()}"
        if lead.phase == "open":
            silent = sorted(self._openers() - set(tally.applied))
            return f"the sum was not opened in time by {', '.join(silent)}{lead.why_not()}"
        silent = sorted(set(lead.enabled) - set(tally.votes))
        return f"no quorum of votes in time; none came from {', '.join(silent)}"
