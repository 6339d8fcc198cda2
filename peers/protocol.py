"""The round protocol at one site. PURE: no IO, no clock, no randomness of its own.

Each round is decided by PBFT over attempts (Castro, Liskov, "Practical Byzantine Fault
Tolerance", OSDI 1999), with the messages that a round of learning has anyway. Up to f
sites, f in the signed manifest, lie in any message. The rules that all of the code obeys
(docs/decisions/0021 and 0022 say why, tests/models show what each one is for):

1. A site enters attempts one after the other (peers/pacemaker.py) and signs one promise
   for each, which names its highest lock. It is on disk before it is said, and is
   repeated byte by byte. The promises of a quorum are the attempt's bundle.
2. A site signs one sum, new or restated, and one question an attempt: only in the latest
   attempt that it has promised, and only what follows from the bundle. A bundle with a
   lock may state nothing but that lock's version. A quorum of signatures certifies.
3. Nothing is decrypted, answered or unmasked before it is certified. Whoever opens a sum
   signs the version; f + 1 alike prove it.
4. A site votes once an attempt, on a proof, with the version on its disk, and in no
   attempt earlier than one it has promised or voted in. With the vote it persists
   certificate and proof as its lock, which only rises. Of one sum it never applies or
   votes for two versions.
5. A version is committed by equal votes of a quorum, and by nothing else. A site adopts
   a version only with such a certificate, and never goes back.
6. A run is signed by the site where a person asked; without one nothing is promised.
7. What a site no longer knows of what it signed, its peers tell it before it signs more.

Time is an argument (seconds, monotonic); what must happen later is a deadline
that `next_wakeup` tells. Messages that are late are dropped silently; messages
that no honest peer would send raise RemoteProtocolError.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace

from peers import effects as do
from peers import evidence, privacy, runs
from peers.adoption import Adoption, sources
from peers.bundle import (
    Bundle,
    Ground,
    PlanFails,
    Promised,
    derive_plan,
    read_bundle,
    read_promised,
    read_run,
)
from peers.certificates import CertificateError, sign_vote
from peers.coordination import AttemptFails, Coordination
from peers.effects import Durable, Effect, Event
from peers.errors import LocalProtocolError, RemoteProtocolError
from peers.manifest import FederationManifest
from peers.manifest_in_force import ManifestInForce
from peers.messages import one_line
from peers.pacemaker import Pacemaker, reached
from peers.participation import (
    Order,
    Participation,
    check_ground,
    check_statement,
    plan_objection,
)
from peers.policy import Policy
from peers.roles import coordinator_of
from peers.signing import Keys, Kind, must_be, name_of, read, sign, sign_bytes, signature_of
from peers.statement import HeldLock, Known, read_certificate, read_lock, value_of
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
        keys: Keys,
        policy: Policy,
        timing: Timing,
        verify_vote: Callable[[pb.Vote], None],
        verify_certificate: Callable[[pb.Certificate], None],
        unix_ms: Callable[[], int],
        past_manifest: Callable[[int], FederationManifest | None],
        accused: Iterable[str] = (),
    ) -> None:
        """``verify_*`` raise CertificateError; ``unix_ms`` dates certificates, for people.

        ``keys``: this site's signature, and whom it believes. ``accused``: sites that
        evidence is kept of.
        """
        self.site = site
        self.durable = durable
        self.accused = set(accused)
        entered = self._own_promise.manifest_version if durable.state.HasField("promise") else 0
        self._manifests = ManifestInForce(manifest, past_manifest, head_certificate, entered)
        self._federation_id = federation_id
        self._head_certificate = head_certificate
        self._shape_digest = shape_digest
        self._shared_values = shared_values
        self._unix_ms = unix_ms
        self._keys = keys
        self._policy = policy
        self._timing = timing
        self._verify_vote = verify_vote
        self._situation = do.Situation(0, willing=False, reason="still starting")
        self._ground = self._ground_of(max(0, durable.promised))
        self._coordination: Coordination | None = None
        self._bundle: Bundle | None = None
        self._plan: pb.Plan | None = None
        self._part: Participation | None = None
        self._question: Known | None = None
        self._state_early: pb.State | None = None  # came before its bundle
        self._pending: HeldLock | None = None
        self._prepares: dict[str, pb.Prepare] = {}
        self._promises: dict[str, Promised] = {}
        self._generations: dict[str, int] = {}  # how far each site's runs are numbered
        self._heard = evidence.Heard()
        self._recalling: set[str] = set()
        self._recall_until = math.inf
        self._ahead: set[str] = set()
        self._too_early: list[do.Received] = []
        self._early: list[do.Received] = []
        self._adoption = Adoption(site, verify_certificate)
        self._pace = Pacemaker(timing)
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
        return min(deadline, self._pace.until, self._recall_until)

    def start(self, now: float) -> list[Effect]:
        """Begin after a (re)start of the daemon: ask what we have said, and go on."""
        self._now = now
        self._effects = []
        peers = [peer for peer in self.manifest.enabled_ids if peer != self.site]
        if peers and self.site in self.manifest.enabled_ids:
            self._recall(peers)
        if self._active:
            # A moment later, when peers can be reached; unless we hear of progress before.
            self._pace.restarted(now)
        return self._effects

    @property
    def manifest(self) -> FederationManifest:
        """The manifest in force."""
        return self._manifests.current

    @property
    def waiting_manifest(self) -> str:
        """Why a newer manifest is not in force yet; empty when none waits."""
        return self._manifests.waiting

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
        coordination, part = self._coordination, self._part
        if name.kind == pb.ENCRYPTED_UPDATE:
            return coordination is not None and coordination.expects_update(sender)
        if name.kind == pb.PUBLIC_CONTEXT:
            return coordination is not None and coordination.expects_context(sender)
        return part is not None and part.expects(sender, name.kind)

    def _take(self, event: Event) -> None:
        coordination = self._coordination
        before = coordination.phase if coordination else ""
        try:
            self._dispatch(event)
        except AttemptFails as failure:
            if coordination is None and self._coordination is None:
                raise LocalProtocolError(f"an attempt failed without one: {failure}") from failure
            self._fail_attempt(str(failure))
        if coordination is None or coordination is not self._coordination:
            return
        if coordination.phase != before:
            # The attempt that we run ourselves got on: its phases are our patience.
            self._got_on(
                f"ours {coordination.phase}", train=coordination.phase in ("plan", "train")
            )
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
                wish = runs.requested(event, self.durable, self.site, self._policy, self.manifest)
                self._announce(wish)
            case do.StopRequested(run_id):
                self._announce(runs.stopped(run_id, self.durable, self.site, self.manifest))
            case do.ManifestChanged():
                self._change_manifest(event)
            case do.PeerAhead(site, head_round):
                if head_round > self.head_round:
                    self._emit(do.FetchCertificates(site, self.head_round))
            case do.CertificatesArrived(_, certificates):
                head, everyone = self._head_certificate, self.manifest.enabled_ids
                self._emit(*self._adoption.certificates(certificates, self.durable, head, everyone))
            case do.VersionHere(digest):
                self._version_here(digest)
            case do.VersionMissing(digest, reason):
                self._version_missing(digest, reason)
            case _:
                self._worked(event)

    def _receive(self, sender: str, body: do.Body) -> None:
        match body:
            case pb.RunWish():
                self._on_run(sender, body.run)
            case pb.Prepare():
                self._on_prepare(sender, body)
            case pb.Promised():
                self._on_promised(sender, body)
            case pb.Behind():
                self._on_behind(sender, body)
            case pb.Ahead():
                self._on_ahead(sender, body)
            case pb.Bundle():
                self._on_bundle(sender, body)
            case pb.State():
                self._on_state(sender, body)
            case pb.Certified():
                self._on_certified(sender, body)
            case pb.Scale() | pb.MaskingOrder() | pb.Proof() | pb.Openings():
                self._on_order(sender, body)
            case pb.Proven():
                self._on_proven(sender, body)
            case pb.Commit():
                head, everyone = self._head_certificate, self.manifest.enabled_ids
                self._emit(*self._adoption.committed(body, self.durable, head, everyone))
            case pb.AttemptFailed():
                self._on_attempt_failed(sender, body)
            case pb.EndedAttempt():
                self._on_ended(sender, body)
            case pb.Evidence():
                self._on_evidence(body)
            case pb.Recall():
                self._on_recall(sender, body)
            case pb.Remembered():
                self._on_remembered(sender, body)
            case _:
                self._on_answer(sender, body)

    # ---- runs ------------------------------------------------------------------

    @property
    def _active(self) -> bool:
        return runs.is_active(self.durable, self.manifest)

    def _announce(self, run: pb.Run) -> None:
        signed = sign(self._keys, Kind.RUN, run)
        self._take_run(signed, run)
        others = (peer for peer in self.manifest.enabled_ids if peer != self.site)
        self._emit(*(do.Send(peer, pb.RunWish(run=signed)) for peer in others))

    def _on_run(self, sender: str, signed: pb.Signed) -> None:
        """A run that we missed, or that the sender missed."""
        known = self.durable.signed_run
        if known is not None and known.body == signed.body:
            return
        run = read_run(signed, self._keys, self.manifest)
        if sender != self.site:
            self._generations[sender] = max(run.generation, self._generations.get(sender, 0))
        if self._stands_over(run, self.run):
            self._take_run(signed, run)
            return
        # Only what the sender will take: two that take neither's would go on for ever.
        if self.run is not None and self._stands_over(self.run, run):
            self._emit(do.Send(sender, pb.RunWish(run=known)))
        if self.run is not None and (
            why := runs.weakens(run, self.run, self.head_round, self.manifest)
        ):
            raise RemoteProtocolError(f"the run of {run.requested_by} is not taken: {why}")

    def _stands_over(self, run: pb.Run, known: pb.Run | None) -> bool:
        told = {s: n for s, n in self._generations.items() if self.manifest.enabled(s)}
        usual = reached(told, self.manifest.tolerated)
        return runs.stands_over(run, known, self.head_round, self.manifest, usual=usual)

    def _take_run(self, signed: pb.Signed, run: pb.Run) -> None:
        if not self._stands_over(run, self.run):
            return
        was_active = self._active
        self._persist(replace(self.durable, signed_run=signed))
        if self._part is not None or self._coordination is not None:
            return  # the attempt under way goes on: its end decides what is next
        if self._active and not was_active:
            self._go_on_to(max(0, self.durable.promised + 1))
        elif not self._active:
            self._pace.nothing()

    # ---- which attempt ---------------------------------------------------------

    def _tick(self) -> None:
        if self._now >= self._recall_until:
            if len(self._ahead) > self.manifest.tolerated:
                self._recall(self._recalling)  # we are behind, as an honest site says
            else:
                self._recalled()
        if self._coordination and self._now >= self._coordination.deadline:
            self._emit(*self._coordination.timeout(self._now))
        if self._now < self._pace.until:
            return
        if not self._active:
            self._rest()
        elif self._recalling:
            self._pace.restarted(self._now)
        elif self._pace.part_lost:
            self._resume()
        else:
            self._enter(self.durable.promised + 1, tell_all=True)

    def _go_on_to(self, attempt: int) -> None:
        """Enter this attempt, unless what we have said is still asked for."""
        if self._recalling:
            self._pace.restarted(self._now)
        else:
            self._enter(attempt)

    def _resume(self) -> None:
        """Our part in the attempt under way is lost: nobody should wait for it."""
        attempt = self.durable.promised
        if attempt < 0:
            self._enter(0)
            return
        reason = "take part any longer: its daemon was restarted"
        if self._ground.coordinator == self.site:
            ended = self._signed_end(attempt, reason)
            others = (peer for peer in self.manifest.enabled_ids if peer != self.site)
            self._emit(*(do.Send(peer, ended) for peer in others))
            self._enter(attempt + 1)
            return
        lost = pb.AttemptFailed(round=self._round, attempt=attempt, reason=reason)
        self._emit(do.Send(self._ground.coordinator, lost))
        self._pace.entered(attempt, self._now)  # it may well succeed without us

    def _rest(self) -> None:
        """The run is over, and so is our part in what it had begun."""
        self._leave()
        self._pace.nothing()

    def _leave(self) -> None:
        """Nothing of an earlier attempt counts any more."""
        self._coordination = self._bundle = self._plan = self._part = None
        self._question = self._pending = self._state_early = None

    def _enter(self, attempt: int, *, tell_all: bool = False) -> None:
        """Promise an attempt: its coordinator hears of it, on a timeout everybody does."""
        if not self._active or self.durable.signed_run is None:
            self._rest()
            return
        if self.site not in self.manifest.enabled_ids:
            self._rest()
            self._progress("waiting", message="the manifest does not let this site take part")
            return
        if self.manifest.objection:
            self._rest()
            self._progress("failed", message=self.manifest.objection, attempt=max(0, attempt))
            return
        failed = self._failed_to_repeat()
        self._leave()
        ground = self._ground = self._ground_of(attempt)
        promised = self._make_promise(ground, tried=failed)
        state = pb.RoundState()
        state.CopyFrom(self.durable.state)
        state.promise.CopyFrom(promised)
        state.tried = state.tried or failed
        self._persist(replace(self.durable, promised=attempt, state=state))
        self._emit(do.BeginAttempt(self._round, attempt))
        self._pace.entered(attempt, self._now)
        self._progress("prepare")
        lead = ground.coordinator
        if tell_all:
            wish = pb.RunWish(run=self.durable.signed_run)
            peers = [peer for peer in self.manifest.enabled_ids if peer != self.site]
            self._emit(*(do.Send(peer, wish) for peer in peers))
            self._emit(*(do.Send(peer, promised) for peer in peers))
        elif lead != self.site:
            self._emit(do.Send(lead, promised))
        if lead == self.site:
            self._lead(ground, promised)
        elif lead in self.accused:
            self._pace.ended(attempt, self._now - self._timing.retry(attempt))
        self._prepares.pop(lead, None)

    def _lead(self, ground: Ground, own: pb.Promised) -> None:
        if self.durable.signed_run is None:
            raise AssertionError("no run, no attempt")
        self._coordination = Coordination(
            site=self.site,
            ground=ground,
            run=self.durable.signed_run,
            shape_digest=self._shape_digest,
            shared_values=self._shared_values,
            keys=self._keys,
            manifest_of=self._manifests.known,
            timing=self._timing,
            unix_ms=self._unix_ms,
            now=self._now,
            head_certificate=self._head_certificate,
        )
        self._emit(*self._coordination.prepare(own), do.Send(self.site, own))
        for promised in list(self._promises.values()):
            if promised.promise.attempt == ground.attempt and promised.site != self.site:
                self._emit(*self._coordination.promised(promised, self._now))

    def _ground_of(self, attempt: int) -> Ground:
        return Ground(
            self._federation_id,
            self._manifests.current,
            self.durable.head_round + 1,
            attempt,
            self.durable.head_digest,
        )

    def _failed_to_repeat(self) -> bool:
        """Whether the attempt that we leave should have made a sum again, and has not."""
        plan, stated = self._plan, self._stated_in(self.durable.promised)
        return plan is not None and bool(plan.scale_exponents) and stated is None

    def _make_promise(self, ground: Ground, *, tried: bool) -> pb.Promised:
        """What we know, have and can contribute, signed."""
        if self.durable.signed_run is None:
            raise AssertionError("no run, no promise")
        state, situation = self.durable.state, self._situation
        promise = pb.Promise(
            federation_id=ground.federation_id,
            manifest_digest=ground.manifest.digest,
            manifest_version=ground.manifest.version,
            round=ground.round,
            attempt=ground.attempt,
            run_digest=name_of(self.durable.signed_run),
            parent_digest=ground.parent_digest,
            shape_digest=self._shape_digest,
            num_examples=situation.num_examples,
            willing=situation.willing,
            reason=one_line(situation.reason),
            complexity=situation.complexity,
        )
        promised = pb.Promised()
        if state.HasField("lock"):
            promise.lock.CopyFrom(self._held_lock.name)
            promised.lock.CopyFrom(state.lock)
        if state.HasField("stated"):
            named = pb.Statement.FromString(state.stated.body)
            promise.stated.attempt = named.attempt
            promise.stated.digest = name_of(state.stated)
            promise.stated.tried = state.tried or tried
            promised.stated.CopyFrom(state.stated)
        promised.promise.CopyFrom(sign(self._keys, Kind.PROMISE, promise))
        return promised

    @property
    def _own_promise(self) -> pb.Promise:
        return pb.Promise.FromString(self.durable.state.promise.promise.body)

    @property
    def _held_lock(self) -> HeldLock:
        return read_lock(self.durable.state.lock, self._keys, self._manifests.known)

    def _fail_attempt(self, reason: str) -> None:
        coordination = self._coordination
        if coordination is None:
            return
        message = coordination.failed(reason)
        self._coordination = None
        self._emit(*(do.Send(site, message) for site in self.manifest.enabled_ids))

    def _signed_end(self, attempt: int, reason: str) -> pb.EndedAttempt:
        ended = pb.Ended(
            federation_id=self._federation_id,
            round=self._round,
            attempt=attempt,
            reason=one_line(reason),
        )
        return pb.EndedAttempt(ended=sign(self._keys, Kind.ENDED, ended))

    def _on_attempt_failed(self, sender: str, message: pb.AttemptFailed) -> None:
        coordination = self._coordinated(message.round, message.attempt)
        if coordination is not None:  # of a site that leaves the attempt, perhaps ourselves
            self._emit(*coordination.refused(sender, message, self._now))

    def _on_ended(self, sender: str, message: pb.EndedAttempt) -> None:
        """Only its coordinator ends an attempt; the next one begins a moment later."""
        ended = read(self._keys, Kind.ENDED, pb.Ended, message.ended, self.manifest)
        if ended.federation_id != self._federation_id:
            raise RemoteProtocolError(f"{sender} ends an attempt of another federation")
        if ended.round == self._round + 1 and self._too_early:
            self._too_early = [self._too_early[0], do.Received(sender, message)]
        if not self._is_current(ended.round, ended.attempt):
            return
        by = message.ended.site
        must_be(by == self._ground.coordinator, by, "ends an attempt that it does not run")
        self._part = self._coordination = None
        self._progress("failed", message=ended.reason)
        self._pace.ended(ended.attempt, self._now)

    # ---- prepare ---------------------------------------------------------------

    def _on_prepare(self, sender: str, message: pb.Prepare) -> None:
        if message.round < self._round:
            if self._head_certificate is not None:
                ahead = pb.Ahead(round=message.round, certificate=self._head_certificate)
                self._emit(do.Send(sender, ahead))
            return
        if message.round > self._round:
            self._catch_up_for(sender, message)
            return
        must_be(
            message.head_digest == self.durable.head_digest,
            sender,
            f"builds round {message.round} on version {message.head_digest.hex()[:12]}, "
            f"committed here is {self.durable.head_digest.hex()[:12]}",
        )
        self._check_turn(sender, message.round, message.attempt)
        self._on_run(sender, message.run)
        self._on_promised(sender, message.promise)
        if not self._active or self._recalling:
            return
        if message.attempt > self.durable.promised:
            self._prepares[sender] = message
            if self.durable.promised < 0:
                self._enter(0)
            if message.attempt != self.durable.promised:
                return
        self._repeat_promise(sender)

    def _repeat_promise(self, to: str) -> None:
        """The very bytes that are on our disk, of the latest attempt that we have promised."""
        if self.durable.state.HasField("promise") and not self._recalling:
            self._emit(do.Send(to, self.durable.state.promise))

    def _check_turn(self, sender: str, round_: int, attempt: int) -> None:
        """Only its coordinator speaks for an attempt."""
        turn = {
            coordinator_of(known, round_, attempt)
            for known in (self._ground.manifest, self._manifests.current, self._manifests.newest)
        }
        must_be(
            sender in turn,
            sender,
            f"does not coordinate attempt {attempt} of round {round_}: it is not its turn",
        )

    def _catch_up_for(self, sender: str, message: pb.Prepare) -> None:
        """A commit is still on its way to us: say so, and answer when we have caught up."""
        self._on_run(sender, message.run)
        self._too_early = [do.Received(sender, message)]
        behind = pb.Behind(round=message.round, attempt=message.attempt, head_round=self.head_round)
        self._emit(do.Send(sender, behind))
        if not self._adoption.under_way:
            self._emit(do.FetchCertificates(sender, self.head_round))

    def _on_promised(self, sender: str, message: pb.Promised) -> None:
        """A promise counts for whoever signed it, and tells how far the others are."""
        promised = read_promised(message, self._keys, self.manifest, self._manifests.known)
        promise = promised.promise
        if promise.round != self._round:
            return
        self._note(pb.TWO_PROMISES, message.promise)
        known = self._promises.get(promised.site)
        if known is None or known.promise.attempt < promise.attempt:
            self._promises[promised.site] = promised
        if promised.site == self.site and sender != self.site:
            return
        attempt = self.durable.promised
        if promise.attempt == attempt and self._coordination is not None:
            self._emit(*self._coordination.promised(promised, self._now))
        elif promise.attempt > attempt:
            self._keep_up()
        elif promise.attempt < attempt and promised.site == sender and self._active:
            self._repeat_promise(sender)

    def _keep_up(self) -> None:
        """Where f + 1 sites are, one of them honest, we may go, too."""
        far = reached(
            {
                site: one.promise.attempt
                for site, one in self._promises.items()
                if site != self.site and self.manifest.enabled(site)
            },
            self.manifest.tolerated,
        )
        if far > self.durable.promised and self._active and not self._recalling:
            self._enter(far)

    def _on_answer(self, sender: str, message: do.Answer) -> None:
        """An answer to the attempt that we coordinate; of another attempt: too late."""
        round_ = message.body.round if isinstance(message, pb.Vote) else message.round
        if isinstance(message, pb.Vote):
            must_be(message.site == sender, sender, f"sent a vote of {message.site}")
            if round_ == self._round:
                self._verify_vote(message)
                self._accuse(self._heard.vote(message))
        coordination = self._coordinated(round_, message.attempt)
        if coordination is None:
            return
        self._emit(*coordination.answered(sender, message, self._now))
        if isinstance(message, pb.AppliedSum):
            self._note(pb.TWO_APPLIED, message.applied)

    def _on_behind(self, sender: str, message: pb.Behind) -> None:
        if coordination := self._coordinated(message.round, message.attempt):
            coordination.behind(sender, message.head_round)

    def _on_ahead(self, sender: str, message: pb.Ahead) -> None:
        """Nobody's word: what it says is fetched, and verified, before it changes anything."""
        if message.certificate.body.round > self.head_round:
            self._emit(do.FetchCertificates(sender, self.head_round))

    # ---- plan, key, train ---------------------------------------------------------

    def _on_bundle(self, sender: str, message: pb.Bundle) -> None:
        if not self._from_lead(sender, message.round, message.attempt):
            self._learn_from(message)
            return
        if self._bundle is not None:
            return
        bundle = read_bundle(message, self._ground, self._keys, self._manifests.known)
        for signed in message.promises:
            self._note(pb.TWO_PROMISES, signed)
        self._bundle = bundle
        self._got_on("bundle", train=True)
        if bundle.lock is None:
            self._take_plan(sender, bundle)
        if self._state_early is not None:
            self._on_state(sender, self._state_early)

    def _take_plan(self, sender: str, bundle: Bundle) -> None:
        """Derive the plan, and take our part in it unless our policy is against it."""
        try:
            self._plan = plan = derive_plan(bundle, self._ground, self._head_certificate)
        except PlanFails as error:
            raise RemoteProtocolError(f"{sender} goes on without a plan: {error}") from error
        if self.site not in [p.site for p in plan.participants]:
            return
        part = Participation(self.site, self._ground, plan, self._keys)
        objection = plan_objection(plan, self.site, self.durable.head_digest, self._shape_digest)
        objection = objection or self._policy.objection(plan.training)
        if not plan.scale_exponents:  # what is repeated is paid for
            objection = objection or privacy.objection(plan, self._situation.least_multiplier)
        if objection:
            self._emit(*part.decline(objection))
            return
        self._part = part
        self._emit(*part.begin())

    def _learn_from(self, message: pb.Bundle) -> None:
        """An attempt that we are not in; its promises tell how far the others are."""
        if message.round != self._round or message.attempt <= self.durable.promised:
            return
        for signed in message.promises:
            promise = read(self._keys, Kind.PROMISE, pb.Promise, signed, self.manifest)
            known = self._promises.get(signed.site)
            if promise.round != self._round or signed.site == self.site:
                continue
            self._note(pb.TWO_PROMISES, signed)
            if known is None or known.promise.attempt < promise.attempt:
                shown = pb.Promised(promise=signed)
                self._promises[signed.site] = Promised(shown, promise, None)
        self._keep_up()

    def _worked(self, event: Event) -> None:
        """Local work of the attempt under way is done; of another attempt: forgotten."""
        if not isinstance(event, do.Worked) or not self._is_current(event.round, event.attempt):
            return
        coordination, part = self._coordination, self._part
        if part is not None:
            self._emit(*part.worked(event))
            if isinstance(event, do.Opened):
                self._opened(part, event)
        if coordination is not None:
            self._emit(*coordination.worked(event, self._now))
            if isinstance(event, do.UpdateAdded):
                self._progress("aggregate", contributors=coordination.contributors())

    def _on_order(self, sender: str, message: Order) -> None:
        """The attempt gets on; participants have something to do."""
        if self._from_lead(sender, message.round, message.attempt):
            if self._part is not None:
                self._emit(*self._part.ordered(message))
            self._got_on(type(message).__name__, train=isinstance(message, pb.MaskingOrder))

    # ---- state -------------------------------------------------------------------

    def _stated_in(self, attempt: int, *, question: bool = False) -> pb.Signed | None:
        """What we have signed in an attempt: the sum, or the question."""
        for signed in self.durable.state.statements:
            statement = pb.Statement.FromString(signed.body)
            if (statement.attempt, statement.kind == pb.QUESTION) == (attempt, question):
                return signed
        return None

    def _on_state(self, sender: str, message: pb.State) -> None:
        """Sign what the attempt is about: once, and only what follows from its promises."""
        if not self._from_lead(sender, message.round, message.attempt) or self._recalling:
            return
        if self._bundle is None:
            self._state_early = message
            return
        known = Known.parse(message.statement)
        question = known.message.kind == pb.QUESTION
        signed = self._stated_in(message.attempt, question=question)
        if signed is None:
            self._check_statement(known)
            by = sign_bytes(self._keys, Kind.STATEMENT, known.raw)
            signed = pb.Signed(
                body=known.raw, site=by.site, signature=by.signature, certificate=by.certificate
            )
            self._persist(replace(self.durable, state=self._with_statement(signed, known)))
        must_be(name_of(signed) == known.digest, sender, "makes two statements in one attempt")
        self._got_on(f"state {question}")
        self._progress("state", contributors=known.contributors)
        stated = pb.Stated(
            round=message.round,
            attempt=message.attempt,
            statement_digest=known.digest,
            signature=signature_of(signed),
        )
        self._emit(do.Send(sender, stated))

    def _check_statement(self, known: Known) -> None:
        """Raises RemoteProtocolError, CertificateError unless it is to be signed here."""
        bundle, lead = self._bundle, self._ground.coordinator
        if bundle is None:
            raise LocalProtocolError("a statement is held against no bundle")
        if known.message.kind == pb.RESTATED:
            check_ground(known.message, self._ground, bundle.digest, bundle.run_digest)
            named = (known.message.root_digest, known.message.model_digest)
            lock = bundle.lock
            held = (lock.root.digest, lock.applied.model_digest) if lock is not None else None
            must_be(named == held, lead, "restates another version than its promises name")
            return
        must_be(bundle.lock is None, lead, "states a new sum where one may be committed")
        check_statement(
            known,
            self._ground,
            bundle.digest,
            bundle.run_digest,
            self._plan,
            self._keys,
            self._question,
            self._expelled,
        )
        self._check_difference(known)
        if self._part is not None:
            self._part.check_own(known.message)

    def _check_difference(self, known: Known) -> None:
        """Integers that were stated once are never stated in another sum."""
        state = self.durable.state
        if known.message.kind != pb.SUM or not state.HasField("stated"):
            return
        before = Known.parse(state.stated.body)
        if before.message.plan.draw != known.message.plan.draw:
            return
        same = (
            before.contributors == known.contributors
            and before.message.scale_exponents == known.message.scale_exponents
            and before.message.plan.full_weight == known.message.plan.full_weight
        )
        must_be(same, self._ground.coordinator, "states another sum of integers stated before")

    def _with_statement(self, signed: pb.Signed, known: Known) -> pb.RoundState:
        state = pb.RoundState()
        state.CopyFrom(self.durable.state)
        question = self._stated_in(known.message.attempt, question=True)
        del state.statements[:]
        if question is not None and known.message.kind != pb.QUESTION:
            state.statements.append(question)
        state.statements.append(signed)
        if known.message.kind == pb.SUM:
            state.stated.CopyFrom(signed)
            state.tried = False
        return state

    @property
    def _expelled(self) -> frozenset[str]:
        """Who takes part by the manifest of the attempt, and by our newest does not any more."""
        newest = frozenset(self._manifests.newest.enabled_ids)
        return frozenset(self._ground.manifest.enabled_ids) - newest

    def _on_certified(self, sender: str, message: pb.Certified) -> None:
        """A quorum has signed it: now it is answered, or opened."""
        if not self._from_lead(sender, message.round, message.attempt):
            return
        keys, manifests = self._keys, self._manifests.known
        known = read_certificate(message.certificate, keys, manifests, past=False)
        bundle = self._bundle
        if bundle is None or self._part is None:
            self._got_on(f"certified {known.message.kind}")
            return
        check_ground(known.message, self._ground, bundle.digest, bundle.run_digest)
        question = known.message.kind == pb.QUESTION
        if self._stated_in(message.attempt, question=question) is None:
            self._check_statement(known)
        for signature in message.certificate.signatures:
            self._note(
                pb.TWO_STATEMENTS,
                pb.Signed(
                    body=known.raw,
                    site=signature.site,
                    signature=signature.signature,
                    certificate=signature.certificate,
                ),
            )
        if question:
            self._question = known
        self._part.check_own(known.message)
        self._emit(*self._part.certified(known))
        self._got_on(f"certified {known.message.kind}")

    # ---- open, vote --------------------------------------------------------------

    def _opened(self, part: Participation, event: do.Opened) -> None:
        """Of one sum we apply one version; it is on disk, and noted, before it is told."""
        applied = part.opened(event)
        if applied is None:
            return
        state = pb.RoundState()
        state.CopyFrom(self.durable.state)
        known = [one for one in state.applied if one.root_digest == applied.root_digest]
        if known and known[0] != applied:
            raise LocalProtocolError("one sum was applied twice, with another result")
        if not known:
            state.applied.append(applied)
            self._persist(replace(self.durable, state=state))
        message = pb.AppliedSum(
            round=event.round,
            attempt=event.attempt,
            applied=sign(self._keys, Kind.APPLIED, applied),
        )
        self._emit(do.Send(self._ground.coordinator, message))

    def _on_proven(self, sender: str, message: pb.Proven) -> None:
        """A version is proven: get it, keep the proof, vote. It stands by itself."""
        if message.round != self._round or message.attempt < self.durable.promised:
            return
        if self._recalling:
            return
        lock = read_lock(message.lock, self._keys, self._manifests.known)
        latest = lock.latest.message
        named = (latest.round, latest.attempt, latest.parent_digest)
        ours = (self._round, message.attempt, self.durable.head_digest)
        must_be(named == ours, sender, "proves a version of another attempt")
        if latest.manifest_version != self._ground_at(message.attempt).manifest.version:
            return  # quorums of another manifest than ours
        for signed in message.lock.proof:
            self._note(pb.TWO_APPLIED, signed)
        self._pending = lock
        self._got_on("proven")
        appliers = [signed.site for signed in message.lock.proof]
        likely = sources(self.site, [*appliers, sender], self.manifest.enabled_ids)
        self._emit(do.FetchVersion(lock.applied.model_digest, likely))

    def _ground_at(self, attempt: int) -> Ground:
        return self._ground if attempt == self.durable.promised else self._ground_of(attempt)

    def _vote(self, lock: HeldLock) -> None:
        """Persist lock and vote, then say it; once an attempt."""
        attempt, durable = lock.latest.message.attempt, self.durable
        if lock.root.message.round != self._round or attempt < durable.promised:
            return
        for applied in durable.state.applied:
            other = applied.model_digest != lock.applied.model_digest
            if applied.root_digest == lock.root.digest and other:
                raise RemoteProtocolError(
                    f"{self._ground_at(attempt).coordinator} proves another version of a sum "
                    "than this site has made of it"
                )
        state = pb.RoundState()
        state.CopyFrom(durable.state)
        ground = self._ground_at(attempt)
        body = value_of(lock, ground.manifest)
        if state.HasField("vote") and state.vote.body.round == self._round:
            if state.vote.attempt > attempt:
                return
            if state.vote.attempt == attempt:
                if state.vote.body == body:
                    self._emit(do.Send(ground.coordinator, state.vote))
                return
        state.vote.CopyFrom(sign_vote(self._keys.sign, body, attempt))
        if not state.HasField("lock") or self._held_lock.name.attempt < attempt:
            state.lock.CopyFrom(lock.message)
        if not any(one.root_digest == lock.root.digest for one in state.applied):
            state.applied.append(lock.applied)
        if attempt > durable.promised:  # a vote counts as a promise of its attempt
            self._leave()
            self._ground = ground
            state.ClearField("promise")
        self._persist(replace(durable, promised=attempt, state=state))
        self._got_on("vote")
        self._progress("vote", contributors=tuple(body.contributors))
        self._emit(do.Send(ground.coordinator, state.vote))

    def _version_here(self, digest: bytes) -> None:
        commits = self._adoption.here(digest)
        if commits:
            self._commit(commits)
        pending = self._pending
        if pending is not None and pending.applied.model_digest == digest:
            self._pending = None
            self._vote(pending)

    def _version_missing(self, digest: bytes, reason: str) -> None:
        self._adoption.missing(digest)
        if self._pending is not None and self._pending.applied.model_digest == digest:
            self._pending = None
        self._progress("waiting", message=f"cannot get version {digest.hex()[:12]}: {reason}")

    # ---- commit ------------------------------------------------------------------

    def _commit(self, commits: tuple[pb.Commit, ...]) -> None:
        """The head moves on; the next round begins if the run goes on."""
        last = commits[-1]
        body = last.certificate.body
        if body.round <= self.head_round:
            return
        durable = Durable(body.round, body.model_digest, signed_run=self.durable.signed_run)
        self.durable = durable
        self._emit(do.Persist(durable, commits))
        self._head_certificate = last.certificate
        self._leave()
        self._promises.clear()
        self._prepares.clear()
        self._heard.forget()
        self._manifests.new_round(last.certificate)
        self._ground = self._ground_of(0)
        self._emit(do.BeginAttempt(body.round + 1, 0))
        self._emit(do.Adopt(body.round, body.model_digest, tuple(body.contributors)))
        self._emit(do.Progress.of_commit(last))
        self._pace.nothing()
        if self._recalling:  # we were behind: what have we said in this round?
            self._recall(peer for peer in self.manifest.enabled_ids if peer != self.site)
        if self._active:
            self._go_on_to(0)
        self._early += self._too_early
        self._too_early = []

    # ---- evidence ----------------------------------------------------------------

    def _note(self, kind: pb.EvidenceKind.ValueType, signed: pb.Signed) -> None:
        self._accuse(self._heard.note(kind, signed))

    def _accuse(self, found: pb.Evidence | None) -> None:
        """Keep it, tell people, and pass it on, once a site."""
        if found is None or found.first.site in self.accused:
            return
        site = found.first.site
        self.accused.add(site)
        self._emit(do.Accuse(found))
        self._emit(
            *(
                do.Send(peer, found)
                for peer in self.manifest.enabled_ids
                if peer not in (self.site, site)
            )
        )
        self._progress("waiting", message=f"{site} has signed {evidence.WORDS[found.kind]}")
        if self._ground.coordinator == site and self._active and self._coordination is None:
            self._pace.ended(self._ground.attempt, self._now - self._timing.retry(0))

    def _on_evidence(self, message: pb.Evidence) -> None:
        if message.first.site not in self.accused:
            evidence.check_evidence(message, self._keys, self.manifest)
            self._accuse(message)

    # ---- a state that went back ----------------------------------------------------

    def _recall(self, peers: Iterable[str]) -> None:
        """Ask what we have said in this round; sign nothing before enough have answered."""
        self._recalling = set(peers)
        self._ahead.clear()
        self._recall_until = self._now + self._timing.phase(0)
        asked = pb.Recall(round=self._round)
        self._emit(*(do.Send(peer, asked) for peer in sorted(self._recalling)))

    def _on_recall(self, sender: str, message: pb.Recall) -> None:
        """A site that starts asks what it has said; whoever is asked asks back, if it must."""
        answer = pb.Remembered(round=max(message.round, self._round))
        if answer.round == self._round:
            promise = self._heard.latest_promise(sender)
            statement = self._heard.latest_statement(sender)
            vote = self._heard.latest_vote(sender)
            if promise is not None:
                answer.promise.CopyFrom(promise)
            if statement is not None:
                answer.statement.CopyFrom(statement)
            if vote is not None:
                answer.vote.CopyFrom(vote)
            if self.durable.state.HasField("lock"):
                answer.lock.CopyFrom(self.durable.state.lock)
        self._emit(do.Send(sender, answer))
        if sender in self._recalling:
            self._emit(do.Send(sender, pb.Recall(round=self._round)))

    def _on_remembered(self, sender: str, message: pb.Remembered) -> None:
        """What we have signed and do not know any more is our state again."""
        if message.round > self._round and sender in self._recalling:
            self._ahead.add(sender)
            self._emit(do.FetchCertificates(sender, self.head_round))
            return
        if message.round == self._round:
            self._take_back(sender, message)
        self._recalling.discard(sender)
        others = len(self.manifest.enabled_ids) - 1
        if len(self._recalling) <= others - (self.manifest.quorum - 1):
            self._recalled()

    def _recalled(self) -> None:
        """Enough peers have told us, or had the time to."""
        self._recalling.clear()
        self._ahead.clear()
        self._recall_until = math.inf

    def _take_back(self, sender: str, message: pb.Remembered) -> None:
        durable, state = self.durable, pb.RoundState()
        state.CopyFrom(durable.state)
        promised, forgotten = durable.promised, ""
        if message.HasField("promise"):
            promise = read(
                self._keys, Kind.PROMISE, pb.Promise, message.promise, self.manifest, past=True
            )
            must_be(message.promise.site == self.site, sender, "remembers another's promise")
            kept = durable.state.promise.promise.body
            contradicts = promise.attempt == promised and message.promise.body != kept
            if promise.round == self._round and (promise.attempt > promised or contradicts):
                promised, forgotten = promise.attempt, f"promised attempt {promise.attempt}"
                state.promise.Clear()
                state.promise.promise.CopyFrom(message.promise)
        if message.HasField("statement"):
            statement = read(
                self._keys, Kind.STATEMENT, pb.Statement, message.statement, self.manifest,
                past=True,
            )  # fmt: skip
            must_be(message.statement.site == self.site, sender, "remembers another's statement")
            unknown = message.statement.body not in [one.body for one in state.statements]
            if statement.round == self._round and unknown and statement.attempt >= promised:
                promised = max(promised, statement.attempt)
                forgotten = forgotten or f"signed a statement in attempt {statement.attempt}"
                del state.statements[:]
                state.statements.append(message.statement)
                if statement.kind == pb.SUM:
                    state.stated.CopyFrom(message.statement)
        if message.HasField("vote") and message.HasField("lock"):
            vote = message.vote
            self._verify_vote(vote)
            must_be(vote.site == self.site, sender, "remembers another's vote")
            later = not state.HasField("vote") or state.vote.attempt < vote.attempt
            if vote.body.round == self._round and later:
                lock = read_lock(message.lock, self._keys, self._manifests.known)
                if lock.latest.message.attempt >= vote.attempt:
                    promised = max(promised, vote.attempt)
                    forgotten = f"voted in attempt {vote.attempt}"
                    state.vote.CopyFrom(vote)
                    state.lock.CopyFrom(message.lock)
        if not forgotten:
            return
        self._leave()
        self._persist(replace(durable, promised=promised, state=state))
        self._ground = self._ground_of(promised)
        self._progress(
            "waiting",
            message=f"this site's state went back: {sender} knows that it has {forgotten} of "
            f"round {self._round}; it goes on behind that. Find out who restored it, or whether "
            "a second daemon runs with this site's key",
        )

    # ---- small parts ---------------------------------------------------------------

    def _emit(self, *effects: Effect) -> None:
        self._effects.extend(effects)

    def _persist(self, durable: Durable) -> None:
        self.durable = durable
        self._emit(do.Persist(durable))

    @property
    def _round(self) -> int:
        return self.durable.head_round + 1

    def _is_current(self, round_: int, attempt: int) -> bool:
        return (round_, attempt) == (self._round, self.durable.promised)

    def _from_lead(self, sender: str, round_: int, attempt: int) -> bool:
        """Whether this belongs to the attempt under way and comes from its coordinator."""
        if not self._is_current(round_, attempt):
            return False
        must_be(
            sender == self._ground.coordinator,
            sender,
            f"does not coordinate attempt {attempt} of round {round_}: it is not its turn",
        )
        return True

    def _coordinated(self, round_: int, attempt: int) -> Coordination | None:
        """The attempt that we coordinate, if it is this one."""
        c = self._coordination
        return c if c is not None and (c.round, c.attempt) == (round_, attempt) else None

    def _got_on(self, what: str, *, train: bool = False) -> None:
        """The attempt got on: its next sign of life may take this long (peers/timing.py)."""
        self._pace.got_on(what, max(0, self.durable.promised), self._now, train=train)

    def _change_manifest(self, event: do.ManifestChanged) -> None:
        """A newer manifest goes into force with the next attempt, which begins now."""
        changed = self._manifests.install(event.manifest)
        if changed and self._active and not self._pace.idle and self.durable.promised >= 0:
            self._progress("failed", message=f"manifest {self.manifest.version} is in force now")
            self._go_on_to(self.durable.promised + 1)
        elif changed and self._active and self._pace.idle:
            self._go_on_to(max(0, self.durable.promised + 1))

    def _progress(
        self,
        phase: str,
        *,
        contributors: tuple[str, ...] = (),
        message: str = "",
        attempt: int | None = None,
    ) -> None:
        attempt = max(0, self.durable.promised) if attempt is None else attempt
        lead = coordinator_of(self._ground.manifest, self._round, attempt)
        self._emit(do.Progress(self._round, attempt, phase, lead, (), contributors, message))
