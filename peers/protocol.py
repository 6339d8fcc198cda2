"""The round protocol at one site. PURE: no IO, no clock, no randomness of its own.

Each round is single-decree Paxos: ballots are attempts, the value is a model digest,
acceptors are the manifest's enabled sites. The rules that all of the code obeys:

1. A site promises attempt a of round head+1 only if a >= every attempt that it
   has promised in that round, and persists the promise before it answers.
2. A site accepts a value in attempt a only if a >= promised; it persists the
   value before it signs a vote. A vote means: *this version is on my disk*.
3. A site votes once per attempt.
4. A coordinator persists its own promise before its first `Prepare`, so that an
   attempt number is never used twice, not even after a crash.
5. A coordinator that learns of an accepted value proposes that value again.
6. A version is committed by equal votes of a majority of the manifest, and by
   nothing else. A site adopts a version only with such a certificate.
7. A site never goes back: messages of rounds <= head change nothing.
8. The manifest of an attempt is fixed at its start, and a site that has accepted a
   value stays with its manifest until the round is over (peers/tenure.py).

Time is an argument (seconds, monotonic); what must happen later is a deadline
that `next_wakeup` tells. Messages that are late are dropped silently; messages
that no honest peer would send raise RemoteProtocolError.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from peers import answers, expulsion, objections, privacy, runs
from peers import effects as do
from peers.adoption import Adoption, sources
from peers.certificates import CertificateError
from peers.coordination import AttemptFails, Coordination
from peers.effects import Durable, Effect, Event
from peers.errors import LocalProtocolError, RemoteProtocolError
from peers.manifest import FederationManifest
from peers.masking_steps import is_beside_training
from peers.participation import Order, Participation
from peers.patience import Patience
from peers.policy import Policy
from peers.roles import coordinator_of, led_until
from peers.tenure import Tenure
from peers.timing import Timing
from proto import federation_pb2 as pb


class Protocol:
    """One site's part in all rounds. Feed it events in `step`, carry out its effects."""

    def __init__(
        self,
        *,
        site: str,
        federation_id: str,
        manifest: FederationManifest,
        durable: Durable,
        head_certificate: pb.Certificate | None,
        shape_digest: bytes,
        shared_values: int,
        own_certificate: bytes,
        policy: Policy,
        timing: Timing,
        verify_vote: Callable[[pb.Vote], None],
        verify_certificate: Callable[[pb.Certificate], None],
        unix_ms: Callable[[], int],
        past_manifest: Callable[[int], FederationManifest | None],
    ) -> None:
        """``verify_*`` raise CertificateError; ``unix_ms`` dates certificates, for people."""
        self.site = site
        self.durable = durable
        self._tenure = Tenure(manifest, past_manifest)
        self._tenure.settle(durable.accepted)
        self._federation_id = federation_id
        self._head_certificate = head_certificate
        self._shape_digest = shape_digest
        self._shared_values = shared_values
        self._unix_ms = unix_ms
        self._own_certificate = own_certificate
        self._policy = policy
        self._timing = timing
        self._verify_vote = verify_vote
        self._situation = do.Situation(0, willing=False, reason="still starting")
        self._coordination: Coordination | None = None
        self._part: Participation | None = None
        self._too_early: list[do.Received] = []
        self._early: list[do.Received] = []
        self._pending_accept: pb.Accept | None = None
        self._adoption = Adoption(site, verify_certificate)
        self._next = Patience(timing, max(0, durable.promised))
        self._now = 0.0
        self._effects: list[Effect] = []

    # ---- the door --------------------------------------------------------------

    def step(self, event: Event, now: float) -> list[Effect]:
        """Take one event; return what to do, in order.

        Raises RemoteProtocolError when a peer misbehaves and RunRefused when a
        person's wish can't be met; the state is unchanged then.
        """
        self._now = now
        self._effects = []
        self._take(event)
        # Messages to ourselves, and what waited for a commit, are taken at once. That is
        # safe: their consequences stand behind any Persist that their cause asked for.
        taken = 0
        while taken < len(self._effects) or self._early:
            if self._early:
                self._take_ours(self._early.pop(0))
                continue
            effect = self._effects[taken]
            taken += 1
            if isinstance(effect, do.Send) and effect.to == self.site:
                self._take_ours(do.Received(self.site, effect.body))
        return [e for e in self._effects if not (isinstance(e, do.Send) and e.to == self.site)]

    def _take_ours(self, event: do.Received) -> None:
        """What is refused here must not undo what its cause has already asked for."""
        try:
            self._take(event)
        except (RemoteProtocolError, CertificateError) as error:
            self._progress("waiting", message=str(error))

    def next_wakeup(self) -> float:
        """When a Tick is due; infinity when nothing waits."""
        deadline = self._coordination.deadline if self._coordination else math.inf
        return min(deadline, self._next.until)

    def start(self, now: float) -> list[Effect]:
        """Begin after a (re)start of the daemon."""
        self._now = now
        self._effects = []
        if self._active:
            # A moment later, when peers can be reached; unless we hear of progress before.
            self._next.restarted(now)
        return self._effects

    def _resume(self) -> None:
        """Our part in the attempt under way is lost: nobody should wait for it."""
        attempt = self.durable.promised
        lead = coordinator_of(self.manifest, self.head_round + 1, max(0, attempt))
        waiting = [lead] if lead != self.site else self.manifest.enabled_ids
        over = answers.restarted(self.head_round + 1, attempt)
        if attempt >= 0:
            self._emit(*(do.Send(peer, over) for peer in waiting if peer != self.site))
        if attempt < 0 or lead == self.site:
            self._expect(attempt + 1, delay=0)
        else:  # it may well succeed without us: don't be in its way
            self._next.attempt = attempt
            self._renew_patience(train=True)

    @property
    def manifest(self) -> FederationManifest:
        """The manifest in force: that of the attempt under way."""
        return self._tenure.in_force

    @property
    def head_round(self) -> int:
        """The last committed round; 0: none."""
        return self.durable.head_round

    @property
    def run(self) -> pb.Run | None:
        """The run under way, or the last one."""
        return self.durable.run

    @property
    def busy(self) -> bool:
        """Whether a run is under way, or an attempt that a stopped run has begun."""
        return self._active or self._part is not None or self._coordination is not None

    def expects(self, sender: str, name: pb.BlobName) -> bool:
        """Whether a large object offered by ``sender`` belongs to the attempt under way."""
        if not self._is_current(name.round, name.attempt):
            return False
        return objections.is_expected(self._part, self._coordination, sender, name.kind)

    def _take(self, event: Event) -> None:
        coordination = self._coordination
        before = coordination.phase if coordination else ""
        try:
            self._dispatch(event)
        except AttemptFails as failure:
            if coordination is None:
                raise LocalProtocolError(f"an attempt failed without one: {failure}") from failure
            self._fail_attempt(coordination, str(failure))
        if coordination is None or coordination is not self._coordination:
            return
        if coordination.phase != before:
            # The attempt that we run ourselves got on: its phases are our patience.
            self._renew_patience(train=coordination.phase in ("plan", "train"))
            self._progress(coordination.phase, contributors=coordination.contributors())

    def _dispatch(self, event: Event) -> None:
        match event:
            case do.Received(sender, body):
                self._receive(sender, body)
            case do.Tick():
                self._tick()
            case do.Situation():
                self._situation = event
            case do.RunRequested():
                if not self._active:
                    self._settle()
                wish = runs.requested(event, self.durable, self.site, self._policy, self.manifest)
                self._announce(wish)
            case do.StopRequested(run_id):
                self._announce(runs.stopped(run_id, self.durable, self.site))
            case do.ManifestChanged():
                self._change_manifest(event)
            case do.PeerAhead(site, head_round):
                if head_round > self.head_round:
                    self._emit(do.FetchCertificates(site, self.head_round))
            case do.CertificatesArrived(_, certificates):
                everyone = self.manifest.enabled_ids
                self._emit(*self._adoption.certificates(certificates, self.durable, everyone))
            case do.VersionHere(digest):
                self._version_here(digest)
            case do.VersionMissing(digest, reason):
                self._version_missing(digest, reason)
            case do.VoteSigned(vote):
                self._send_vote(vote)
            case _:
                self._worked(event)

    def _receive(self, sender: str, body: do.Body) -> None:
        match body:
            case pb.Run():
                self._adopt_run(body)
                if self.run and runs.supersedes(self.run, body):
                    self._emit(do.Send(sender, self.run))  # it was away
            case pb.Prepare():
                self._on_prepare(sender, body)
            case pb.Promise() | pb.PlanAnswer() | pb.Trained() | pb.Vote():
                self._on_answer(sender, body)
            case pb.Compared() | pb.MaskingAnswer() | pb.Challenge():
                self._on_answer(sender, body)
            case pb.Nack():
                self._on_nack(body)
            case pb.Behind():
                self._on_behind(sender, body)
            case pb.Ahead():
                self._on_ahead(sender, body)
            case pb.Plan():
                self._on_plan(sender, body)
            case pb.Scale() | pb.MaskingOrder() | pb.Compare() | pb.Apply() | pb.Proof():
                self._on_order(sender, body)
            case pb.Accept():
                self._on_accept(sender, body)
            case pb.Commit():
                self._emit(*self._adoption.committed(body, self.durable, self.manifest.enabled_ids))
            case pb.AttemptFailed():
                self._on_attempt_failed(sender, body)

    # ---- runs ------------------------------------------------------------------

    @property
    def _active(self) -> bool:
        return runs.is_active(self.durable)

    def _announce(self, run: pb.Run) -> None:
        self._adopt_run(run)
        others = (peer for peer in self.manifest.enabled_ids if peer != self.site)
        self._emit(*(do.Send(peer, run) for peer in others))

    def _adopt_run(self, run: pb.Run) -> None:
        if not runs.supersedes(run, self.durable.run):
            return
        was_active = self._active
        self._persist(replace(self.durable, run=run))
        if self._part is not None or self._coordination is not None:
            return  # the attempt under way goes on: its end decides what is next
        if self._active and not was_active:
            self._expect(self.durable.promised + 1, delay=0)
        elif not self._active:
            self._next.nothing()

    # ---- who begins, and when --------------------------------------------------

    def _expect(self, attempt: int, delay: float, older: int = 0) -> None:
        """Wait for ``attempt``: to begin it ourselves, or for its coordinator to.

        ``older``: the version of a manifest that it should go by (peers/tenure.py).
        """
        self._settle(older)
        attempt = self._tenure.whose_turn(self.head_round + 1, attempt)
        lists = (self.manifest, self._tenure.newest)
        if not any(self.site in known.enabled_ids for known in lists):
            self._next.nothing()
        elif coordinator_of(self.manifest, self.head_round + 1, attempt) != self.site:
            self._next.wait_for(attempt, self._now + delay)
        elif delay:
            self._next.begin_at(attempt, self._now + delay)
        else:
            self._begin(attempt)

    def _tick(self) -> None:
        if self._coordination and self._now >= self._coordination.deadline:
            self._emit(*self._coordination.timeout(self._now))
        if self._now < self._next.until:
            return
        if not self._active:
            self._rest()
            return
        attempt = self._next.attempt
        mine = coordinator_of(self.manifest, self.head_round + 1, attempt) == self.site
        if self._next.part_lost:
            self._resume()
        elif mine and attempt > self.durable.promised:
            self._begin(attempt)
        else:
            self._part = None
            self._expect(attempt + 1, delay=0)

    def _rest(self) -> None:
        """The run is over, and so is our part in what it had begun."""
        self._part = None
        self._next.nothing()
        self._settle()

    def _begin(self, attempt: int) -> None:
        run = self.durable.run
        if run is None or not self._active:
            self._rest()
            return
        self._enter_attempt(attempt)
        self._coordination = Coordination(
            site=self.site,
            round=self.head_round + 1,
            attempt=attempt,
            parent_digest=self.durable.head_digest,
            run=run,
            shape_digest=self._shape_digest,
            shared_values=self._shared_values,
            manifest=self.manifest,
            timing=self._timing,
            unix_ms=self._unix_ms,
            now=self._now,
            head_certificate=self._head_certificate,
        )
        self._progress("prepare")
        self._emit(*self._coordination.prepare())
        self._emit(*expulsion.exclude(self._coordination, self._tenure, self._now))
        self._emit(do.Send(self.site, self._promise()))

    def _enter_attempt(self, attempt: int) -> None:
        """Promise: nothing of an earlier attempt counts any more (rules 1 and 4)."""
        self._coordination = None
        self._part = None
        self._pending_accept = None
        self._persist(replace(self.durable, promised=attempt))
        self._emit(do.BeginAttempt(self.head_round + 1, attempt))
        self._next.wait_for(attempt, self._now)

    def _fail_attempt(self, coordination: Coordination, reason: str) -> None:
        message = coordination.failed(reason)
        self._coordination = None
        self._emit(*(do.Send(site, message) for site in self.manifest.enabled_ids))

    def _on_attempt_failed(self, sender: str, message: pb.AttemptFailed) -> None:
        coordination = self._coordinated(message.round, message.attempt)
        if coordination is not None:  # of a site that leaves the attempt, perhaps ourselves
            self._emit(*coordination.refused(sender, message, self._now))
            return
        if not self._tenure.led_by(sender, message):
            return
        if message.round == self.head_round + 2 and self._too_early:
            self._too_early = [self._too_early[0], do.Received(sender, message)]
        if message.round != self.head_round + 1 or message.attempt < self._next.attempt:
            return
        ours = sender == coordinator_of(self.manifest, message.round, message.attempt)
        if not ours and (self._part or self._coordination or self._pending_accept):
            return  # an attempt under another manifest; the one that we are in goes on
        self._part = None
        self._progress("failed", message=message.reason, attempt=message.attempt)
        if self._active:
            retry = self._timing.retry(message.attempt)
            self._expect(message.attempt + 1, retry, message.manifest_version)

    # ---- prepare ---------------------------------------------------------------

    def _on_prepare(self, sender: str, message: pb.Prepare) -> None:
        if message.round <= self.head_round:
            if self._head_certificate is not None:
                self._emit(do.Send(sender, answers.ahead(message, self._head_certificate)))
            return
        if message.round > self.head_round + 1:
            self._catch_up_for(sender, message)
            return
        objections.check_history(sender, message, self.durable)
        manifest = self._tenure.of_attempt(message, self.durable)
        if manifest is None:
            self._adopt_run_of(sender, message)
            ours = self.manifest.version
            self._emit(do.Send(sender, answers.other_manifest(message, ours, self.durable)))
            return
        objections.check_turn(sender, manifest, message.round, message.attempt)
        self._adopt_run_of(sender, message)
        if message.attempt < self.durable.promised:
            self._emit(do.Send(sender, answers.nack(message, self.durable.promised)))
            return
        if message.attempt > self.durable.promised:
            self._tenure.enter(manifest)
            self._enter_attempt(message.attempt)
            self._progress("prepare")
        self._emit(do.Send(sender, self._promise()))

    def _catch_up_for(self, sender: str, message: pb.Prepare) -> None:
        """A commit is still on its way to us: say so, and answer when we have caught up."""
        self._adopt_run_of(sender, message)
        self._too_early = [do.Received(sender, message)]
        self._emit(do.Send(sender, answers.behind(message, self.head_round)))
        if not self._adoption.under_way:
            self._emit(do.FetchCertificates(sender, self.head_round))

    def _adopt_run_of(self, sender: str, message: pb.Prepare) -> None:
        """A run that we missed, or that its coordinator missed."""
        if runs.supersedes(message.run, self.durable.run):
            self._persist(replace(self.durable, run=message.run))
            if self._active and self._next.idle:
                # Its coordinator is at work, so there is nothing to begin yet.
                self._next.wait_for(max(message.attempt, self.durable.promised), self._now)
        elif self.durable.run and runs.supersedes(self.durable.run, message.run):
            self._emit(do.Send(sender, self.durable.run))

    def _promise(self) -> pb.Promise:
        situation = answers.UNDER_OLDER_MANIFEST if self._tenure.outdated else self._situation
        return answers.promise(self.durable, situation, self._shape_digest, self._own_certificate)

    def _on_answer(self, sender: str, message: do.Answer) -> None:
        """An answer to the attempt that we coordinate; of another attempt: too late."""
        round_ = message.body.round if isinstance(message, pb.Vote) else message.round
        coordination = self._coordinated(round_, message.attempt)
        if coordination is None:
            return
        if isinstance(message, pb.Vote):
            if message.site != sender:
                raise RemoteProtocolError(f"{sender} sent a vote of {message.site}")
            self._verify_vote(message)
        self._emit(*coordination.answered(sender, message, self._now))

    def _on_nack(self, message: pb.Nack) -> None:
        if coordination := self._coordinated(message.round, message.attempt):
            later = message.promised_attempt
            self._fail_attempt(coordination, f"attempt {later} is already under way")
            self._next.wait_for(later, self._now)

    def _on_behind(self, sender: str, message: pb.Behind) -> None:
        if coordination := self._coordinated(message.round, message.attempt):
            coordination.behind(sender, message.head_round)

    def _on_ahead(self, sender: str, message: pb.Ahead) -> None:
        if message.certificate.body.round > self.head_round:
            coordination = self._coordination
            if coordination is not None and coordination.round == message.round:
                self._fail_attempt(coordination, f"{sender} knows that round as committed")
            self._emit(do.FetchCertificates(sender, self.head_round))

    # ---- plan, key, train ---------------------------------------------------------

    def _on_plan(self, sender: str, plan: pb.Plan) -> None:
        if not self._current(sender, plan.round, plan.attempt) or self._part is not None:
            return
        self._renew_patience(train=True)
        if self.site not in [p.site for p in plan.participants]:
            return
        part = Participation(self.site, sender, self._federation_id, plan)
        objection = part.objection(self.durable.head_digest, self._shape_digest, self.manifest)
        objection = objection or self._policy.objection(plan.training)
        objection = objection or privacy.objection(plan, self._situation.least_multiplier)
        if objection:
            self._emit(*part.decline(objection))
            return
        self._part = part
        self._emit(*part.begin())

    def _worked(self, event: Event) -> None:
        """Local work of the attempt under way is done; of another attempt: forgotten."""
        if not isinstance(event, do.Worked) or not self._is_current(event.round, event.attempt):
            return
        coordination, part = self._coordination, self._part
        if part is not None:
            self._emit(*part.worked(event))
            if isinstance(event, do.Applied) and (value := part.applied(event)) is not None:
                self._accept(event.attempt, value, event.mean_loss)
        if coordination is not None:
            expulsion.check_added(event, self._tenure)
            self._emit(*coordination.worked(event, self._now))
            if isinstance(event, do.UpdateAdded):
                self._progress("aggregate", contributors=coordination.contributors())

    def _on_order(self, sender: str, message: Order) -> None:
        """The attempt gets on; participants have something to do."""
        if self._current(sender, message.round, message.attempt):
            if self._part is not None:
                no = expulsion.declined(self._part, message, self._tenure)
                self._emit(*(self._part.ordered(message) if no is None else no))
            self._renew_patience(train=is_beside_training(message))

    # ---- vote --------------------------------------------------------------------

    def _on_accept(self, sender: str, message: pb.Accept) -> None:
        if message.round != self.head_round + 1 or message.attempt < self.durable.promised:
            return
        objections.check_proposal(sender, message, self.manifest, self.durable)
        if message.attempt > self.durable.promised:
            self._enter_attempt(message.attempt)
        self._pending_accept = message
        self._renew_patience()
        # Contributors hold the key, and so the version; not who led, who may be gone as well.
        led = led_until(self.manifest, message.round, message.attempt)
        holders = [site for site in message.value.contributors if site not in led]
        likely = sources(self.site, [*holders, sender], self.manifest.enabled_ids)
        self._emit(do.FetchVersion(message.value.model_digest, likely))

    def _accept(self, attempt: int, value: pb.VoteBody, mean_loss: float) -> None:
        """Rules 2 and 3: persist, then vote, once per attempt."""
        accepted = self.durable.accepted
        if accepted is not None and accepted.attempt >= attempt:
            return
        promised = max(attempt, self.durable.promised)
        now_accepted = pb.Accepted(attempt=attempt, value=value)
        self._persist(replace(self.durable, promised=promised, accepted=now_accepted))
        self._emit(do.SignVote(attempt, value, mean_loss))

    def _send_vote(self, vote: pb.Vote) -> None:
        if self._is_current(vote.body.round, vote.attempt):
            self._renew_patience()
            self._progress("vote", contributors=tuple(vote.body.contributors))
            self._to_coordinator(vote)

    def _version_here(self, digest: bytes) -> None:
        commits = self._adoption.here(digest)
        if commits:
            self._commit(commits)
        pending = self._pending_accept
        if pending and pending.value.model_digest == digest:
            self._pending_accept = None
            if pending.attempt >= self.durable.promised:
                self._accept(pending.attempt, pending.value, math.nan)

    def _version_missing(self, digest: bytes, reason: str) -> None:
        self._adoption.missing(digest)
        if self._pending_accept and self._pending_accept.value.model_digest == digest:
            self._pending_accept = None
        self._progress("waiting", message=f"cannot get version {digest.hex()[:12]}: {reason}")

    # ---- commit ------------------------------------------------------------------

    def _commit(self, commits: tuple[pb.Commit, ...]) -> None:
        """The head moves on; the next round begins if the run goes on."""
        last = commits[-1]
        body = last.certificate.body
        if body.round <= self.head_round:
            return
        durable = Durable(body.round, body.model_digest, run=self.durable.run)
        self.durable = durable
        self._emit(do.Persist(durable, commits))
        self._head_certificate = last.certificate
        self._coordination = None
        self._part = None
        self._pending_accept = None
        self._emit(do.BeginAttempt(body.round + 1, 0))
        self._emit(do.Adopt(body.round, body.model_digest, tuple(body.contributors)))
        self._emit(do.Progress.of_commit(last))
        self._next.nothing(0)
        self._settle()
        if self._active:
            self._expect(0, delay=0)
        self._early += self._too_early
        self._too_early = []

    # ---- small parts ---------------------------------------------------------------

    def _emit(self, *effects: Effect) -> None:
        self._effects.extend(effects)

    def _persist(self, durable: Durable) -> None:
        self.durable = durable
        self._emit(do.Persist(durable))

    def _is_current(self, round_: int, attempt: int) -> bool:
        return (round_, attempt) == (self.head_round + 1, self.durable.promised)

    def _current(self, sender: str, round_: int, attempt: int) -> bool:
        """Whether this belongs to the attempt under way and comes from its coordinator."""
        if not self._is_current(round_, attempt):
            return False
        objections.check_turn(sender, self.manifest, round_, attempt)
        return True

    def _coordinated(self, round_: int, attempt: int) -> Coordination | None:
        """The attempt that we coordinate, if it is this one."""
        c = self._coordination
        return c if c is not None and (c.round, c.attempt) == (round_, attempt) else None

    def _to_coordinator(self, body: do.Body) -> None:
        target = coordinator_of(self.manifest, self.head_round + 1, self.durable.promised)
        self._emit(do.Send(target, body))

    def _renew_patience(self, *, train: bool = False) -> None:
        """The attempt got on: its next sign of life may take this long (peers/timing.py)."""
        self._next.got_on(max(0, self.durable.promised), self._now, train=train)

    def _change_manifest(self, event: do.ManifestChanged) -> None:
        """In force between attempts only: the one that an attempt runs under is fixed."""
        self._own_certificate = event.own_certificate
        self._tenure.install(event.manifest)
        idle = self._next.idle
        if idle or self.durable.promised < 0:
            self._settle()
        if idle and self._active:
            self._expect(self.durable.promised + 1, self._timing.retry(0))
        elif self._coordination is not None:
            self._emit(*expulsion.exclude(self._coordination, self._tenure, self._now))
        elif self._active and self._tenure.expels_lead(self.head_round + 1, self._next.attempt):
            self._part = None  # who is expelled is out of the round under way, and nobody waits
            self._progress("failed", message="its coordinator is expelled")
            self._expect(self._next.attempt + 1, delay=0)

    def _settle(self, older: int = 0) -> None:
        if self._part is None and self._coordination is None:
            self._tenure.settle(self.durable.accepted, older)

    def _progress(
        self,
        phase: str,
        *,
        contributors: tuple[str, ...] = (),
        message: str = "",
        attempt: int | None = None,
    ) -> None:
        attempt = max(0, self.durable.promised) if attempt is None else attempt
        round_ = self.head_round + 1
        lead = coordinator_of(self.manifest, round_, attempt)
        self._emit(do.Progress(round_, attempt, phase, lead, (), contributors, message))
