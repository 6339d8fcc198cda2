"""The round protocol at one site. PURE: no IO, no clock, no randomness of its own.

Each round is decided by PBFT over attempts (Castro, Liskov, "Practical Byzantine Fault
Tolerance", OSDI 1999), with the messages that a round of learning has anyway. Up to f
sites, f in the signed manifest, lie in any message. The rules that all of the code obeys
(docs/decisions/0021 and 0022 say why, tests/models show what each one is for):

1. A site enters attempts one after the other (peers/rounds/pacemaker.py) and signs one promise
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
from dataclasses import replace
from typing import cast

from peers.attempts import effects as do
from peers.attempts.bundle import (
    Ground,
    read_promised,
)
from peers.attempts.coordination import Coordination
from peers.attempts.effects import Durable, Effect, Event
from peers.attempts.modes import ORDERS
from peers.attempts.preparing import AttemptFails
from peers.rounds import runs
from peers.rounds.attending import Attending
from peers.wire.certificates import CertificateError
from peers.wire.errors import LocalProtocolError, RemoteProtocolError
from peers.wire.signing import Kind, must_be, read, sign
from proto import federation_pb2 as pb


class Protocol(Attending):
    """One site's part in all rounds. Feed it events in `step`, carry out its effects."""

    # ---- the door --------------------------------------------------------------

    def step(self, event: Event, now: float) -> list[Effect]:
        """Take one event; return what to do, in order.

        Raises RemoteProtocolError when a peer misbehaves and RunRefused when a
        person's wish can't be met; what came before the refusal is in `wished`.
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
                self._take_ours(do.MessageReceived(self.site, effect.body))
        return self.wished

    @property
    def wished(self) -> list[Effect]:
        """Effects of the last step: when it was refused, of what it had done before.

        They are carried out all the same: the state, and whom we accuse, go by them.
        """
        return [e for e in self._effects if not (isinstance(e, do.Send) and e.to == self.site)]

    def _take_ours(self, event: do.MessageReceived) -> None:
        """What is refused here must not undo what its cause has already asked for."""
        try:
            self._take(event)
        except (RemoteProtocolError, CertificateError) as error:
            self._progress("waiting", message=str(error))

    def next_wakeup(self) -> float:
        """When a Tick is due; infinity when nothing waits."""
        deadline = self._coordination.deadline if self._coordination else math.inf
        # What else is due waits until peers have told us what we have said.
        pace = math.inf if self._recalling else self._pace.until
        return min(deadline, pace, self._recall_until)

    def start(self, now: float) -> list[Effect]:
        """Begin after a (re)start of the daemon: ask what we have said, and go on."""
        self._now = now
        self._effects = []
        self._read_again()  # the manifest that was missing may have come with this start
        self._ask()
        if self._active:
            # A moment later, when peers can be reached; unless we hear of progress before.
            self._pace.restarted(now)
        return self._effects

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
            case do.MessageReceived(sender, body):
                self._receive(sender, body)
            case do.Tick():
                self._tick()
            case do.Situation():
                self._situation = event
            case do.RunRequested():
                runs.must_take_part(self.site, self._manifests.newest)
                wish = runs.requested(event, self.durable, self.site, self._policy, self.manifest)
                self._announce(wish)
            case do.StopRequested(run_id):
                runs.must_take_part(self.site, self._manifests.newest)
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
                self._on_wish(sender, body)
            case pb.Prepare():
                self._on_prepare(sender, body)
            case pb.Promised():
                self._on_promised(sender, body)
            case pb.Behind():
                self._on_behind(sender, body)
            case pb.Ahead():
                self._on_ahead(sender, body)
            case pb.Bundle():
                if self._from_lead(sender, body.round, body.attempt):
                    self._on_bundle(sender, body)
                else:
                    self._learn_from(body)
            case pb.State():
                self._on_state(sender, body)
            case pb.Certified():
                self._on_certified(sender, body)
            case pb.Scale():
                self._on_scale(sender, body)
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
            case _ if isinstance(body, ORDERS):
                self._on_order(sender, body)
            case _:
                self._on_answer(sender, cast("do.OfMode | pb.Vote", body))

    # ---- runs ------------------------------------------------------------------

    def _announce(self, run: pb.Run) -> None:
        run.generation = max(run.generation, self._usual + 1)  # above what was not taken here, too
        self._take_run(sign(self._keys, Kind.RUN, run), run)
        if self.run != run:
            raise runs.RunRefused(f"it does not take the place of {runs.in_words(self.run)}")

    def _on_wish(self, sender: str, wish: pb.RunWish) -> None:
        try:
            if wish.HasField("over") and (run := self._new_over(sender, wish.over)) is not None:
                self._take_run(wish.over, run)
            if self._is_over and not self._has_stated:  # though a later run is in force
                self._fail_attempt("its run has been stopped")
                self._drop()
                self._go_on_to(self.durable.promised + 1)
        finally:  # what is over may be of a site that is not in our manifest: the run is another's
            self._on_run(sender, wish.run)

    def _on_run(self, sender: str, signed: pb.Signed) -> None:
        """A run that we missed, or that the sender missed."""
        if (run := self._new_run(sender, signed)) is not None:
            self._take_run(signed, run)

    def _take_run(self, signed: pb.Signed, run: pb.Run) -> None:
        if not self._stands_over(run, self.run):
            return
        was_active, before = self._active, self.run
        entered = self.durable.promised >= 0 and not self._pace.idle
        self._keep_run(signed)
        later = was_active and before is not None and self._goes_on(before)
        stays = entered and (later or self._has_stated)
        if was_active:
            by, stopped = run.requested_by, "has stopped the run (fedctl train --stop)"
            said = f"'s run takes its place: to round {run.target_round}, by its own plan"
            reason = f"{by}{said}" if self._active else f"{by} {stopped}"
            if entered and not stays and not self._pace.over:
                self._progress("failed", message=reason)
                self._fail_attempt(reason)  # where we lead it
            self._progress("waiting", message=reason)
        if stays:
            return  # the end of the attempt decides: what we have signed may be opened
        if not self._active:
            self._rest()
        elif not self._pace.part_lost and (entered or not was_active):
            self._drop()
            self._go_on_to(max(0, self.durable.promised + 1))

    # ---- which attempt ---------------------------------------------------------

    def _tick(self) -> None:
        if self._now >= self._recall_until:
            self._recall_over()
        if self._coordination and self._now >= self._coordination.deadline:
            try:
                self._emit(*self._coordination.timeout(self._now))
            except (RemoteProtocolError, CertificateError) as error:
                raise AttemptFails(str(error)) from error
        if self._now < self._pace.until or self._recalling:
            return
        if not self._active:
            self._rest()
        elif self._pace.part_lost:
            self._resume()
        else:
            alone = self._is_alone()
            if self.durable.promised >= 0 and not self._pace.over and not self._pace.alone:
                said = f"nothing more came from {self._ground.coordinator}, who led it"
                waits = "; the next one waits until more sites are known to be in this one"
                self._progress("failed", message=said + waits * alone)
            if alone:  # we wait where they may find us, and say so to whoever can be reached
                self._tell_others(self.wish, self.durable.state.promise)
                self._pace.again(self.durable.promised, self._now)
            else:
                self._enter(self.durable.promised + 1)

    def _go_on_to(self, attempt: int) -> None:
        """Enter this attempt, the next one; or when peers have told us what we have said.

        Nor may what can be said to one site only, a run, take it where nobody is.
        """
        if self._recalling or self._is_alone():
            self._pace.due(self._now)
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
            ended = self._signed_end(attempt, f"{self.site}, who led it: its daemon was restarted")
            self._tell_others(ended)
            self._enter(attempt + 1)
            return
        lost = pb.AttemptFailed(round=self._round, attempt=attempt, reason=reason)
        self._emit(do.Send(self._ground.coordinator, lost))
        self._pace.entered(attempt, self._now)  # it may well succeed without us

    def _rest(self) -> None:
        """The run is over, and so is our part in what it had begun."""
        self._drop()
        self._pace.nothing()

    def _enter(self, attempt: int) -> None:
        """Promise an attempt. All hear of it, and of the run behind one that has failed."""
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
        if self._owes(self.durable.state):
            self._drop()
            self._progress("waiting", message=self._what_it_lacks())
            self._pace.entered(self.durable.promised, self._now)
            self._ask()
            self._read_again()  # a manifest of the past may have come meanwhile
            return
        self._since = min(self._since, attempt)
        tried = self._tried()
        self._leave()
        self._manifests.began()
        ground = self._ground = self._ground_of(attempt)
        promised = self._make_promise(ground, tried=tried)
        state = pb.RoundState()
        state.CopyFrom(self.durable.state)
        state.promise.CopyFrom(promised)
        state.tried = tried
        state.began = state.began or ground.manifest.version
        self._persist(replace(self.durable, promised=attempt, state=state))
        self._emit(do.BeginAttempt(self._round, attempt))
        self._pace.entered(attempt, self._now)
        self._progress("prepare")
        reason = pb.Promise.FromString(promised.promise.body).reason
        if reason and self._situation.willing:  # our own people have to know it, too
            self._progress("waiting", message=reason)
        lead = ground.coordinator
        if attempt:
            self._tell_others(self.wish)
        self._tell_others(promised)
        if lead == self.site:
            self._lead(ground, promised)
        elif lead in self.accused:
            self._pace.ended(attempt, self._now - self._timing.retry(attempt))

    def _lead(self, ground: Ground, own: pb.Promised) -> None:
        if self.durable.signed_run is None:
            raise AssertionError("no run, no attempt")
        self._coordination = Coordination(
            site=self.site,
            ground=ground,
            run=self.durable.signed_run,
            model=self._model,
            keys=self._keys,
            manifest_of=self._manifests.of_round,
            timing=self._timing,
            unix_ms=self._unix_ms,
        )
        self._emit(*self._coordination.prepare(own, self._now), do.Send(self.site, own))
        for promised in list(self._promises.values()):
            if promised.promise.attempt == ground.attempt and promised.site != self.site:
                self._emit(*self._coordination.promised(promised, self._now))

    def _fail_attempt(self, reason: str) -> None:
        coordination = self._coordination
        if coordination is None:
            return
        message = self._signed_end(coordination.attempt, reason)
        self._coordination = None
        self._emit(*(do.Send(site, message) for site in self.manifest.enabled_ids))

    def _on_attempt_failed(self, sender: str, message: pb.AttemptFailed) -> None:
        coordination = self._coordinated(message.round, message.attempt)
        if coordination is not None:  # of a site that leaves the attempt, perhaps ourselves
            self._emit(*coordination.refused(sender, message, self._now))

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
        try:
            self._on_run(sender, message.run)
        finally:  # a promise counts also where the run does not
            self._on_promised(sender, message.promise)
        if not self._active or self._recalling:
            return
        if message.attempt > self.durable.promised:
            if self.durable.promised < 0:
                self._enter(0)
            if message.attempt != self.durable.promised:
                return
        self._repeat_promise(sender)

    def _catch_up_for(self, sender: str, message: pb.Prepare) -> None:
        """A commit is still on its way to us: say so, and answer when we have caught up."""
        self._too_early = [do.MessageReceived(sender, message)]
        behind = pb.Behind(round=message.round, attempt=message.attempt, head_round=self.head_round)
        self._emit(do.Send(sender, behind))
        if not self._adoption.under_way:
            self._emit(do.FetchCertificates(sender, self.head_round))
        self._on_run(sender, message.run)  # of a round that may lie behind a stop of ours

    def _on_promised(self, sender: str, message: pb.Promised) -> None:
        """A promise counts for whoever signed it, and tells how far the others are."""
        promised = read_promised(message, self._keys, self.manifest, self._manifests.of_round)
        promise = promised.promise
        if promise.round != self._round:
            return
        self._note(pb.TWO_PROMISES, message.promise)
        if message.HasField("stated"):
            self._note(pb.TWO_STATEMENTS, message.stated)
        known = self._promises.get(promised.site)
        if known is None or known.promise.attempt < promise.attempt:
            self._promises[promised.site] = promised
        self._is_at(promised.site, promise.attempt)
        if promised.site == self.site and sender != self.site:
            return
        attempt = self.durable.promised
        if promise.attempt == attempt and self._coordination is not None:
            self._emit(*self._coordination.promised(promised, self._now))
        elif promise.attempt > attempt:
            if self._coordination is not None:
                site, now = promised.site, self._now
                self._emit(*self._coordination.left_by(site, promise.attempt, now))
            self._keep_up()
        elif promise.attempt < attempt and promised.site == sender and self._active:
            self._repeat_promise(sender)

    def _keep_up(self) -> None:
        """Where f + 1 sites are, one of them honest, we may go, too."""
        far = self._reached(self.manifest.tolerated + 1)
        waits = self._recalling or self._owes(self.durable.state)
        if far > self.durable.promised and self._active and not waits:
            self._enter(far)

    def _on_answer(self, sender: str, message: do.OfMode | pb.Vote) -> None:
        """An answer to the attempt that we coordinate; of another attempt: too late."""
        round_ = message.body.round if isinstance(message, pb.Vote) else message.round
        if isinstance(message, pb.Vote):
            must_be(message.site == sender, sender, f"sent a vote of {message.site}")
            if round_ == self._round:
                self._verify_vote(message)
                self._accuse(self._heard.vote(message))
        if isinstance(message, pb.AppliedSum):
            must_be(message.applied.site == sender, sender, "brings what another site applied")
            read(self._keys, Kind.APPLIED, pb.Applied, message.applied, self.manifest)
            self._note(pb.TWO_APPLIED, message.applied)
        coordination = self._coordinated(round_, message.attempt)
        if coordination is None:
            return
        stating = coordination.stating
        self._emit(*coordination.answered(sender, message, self._now))
        if isinstance(message, pb.Stated) and stating is not None:
            self._heard_of(stating, sender, message)

    def _on_behind(self, sender: str, message: pb.Behind) -> None:
        if coordination := self._coordinated(message.round, message.attempt):
            coordination.behind(sender, message.head_round)

    def _on_ahead(self, sender: str, message: pb.Ahead) -> None:
        """Nobody's word: what it says is fetched, and verified, before it changes anything."""
        if message.certificate.body.round > self.head_round:
            self._emit(do.FetchCertificates(sender, self.head_round))

    def _learn_from(self, message: pb.Bundle) -> None:
        """An attempt that we are not in; its promises tell how far the others are.

        No more: what they name is not shown, and a sum could not be made of them.
        """
        if message.round != self._round or message.attempt <= self.durable.promised:
            return
        for signed in message.promises:
            promise = read(self._keys, Kind.PROMISE, pb.Promise, signed, self.manifest)
            if promise.round == self._round and signed.site != self.site:
                self._note(pb.TWO_PROMISES, signed)
                self._is_at(signed.site, promise.attempt)
        self._keep_up()

    def _worked(self, event: Event) -> None:
        """Local work of the attempt under way is done; of another attempt: forgotten."""
        if not isinstance(event, do.Worked) or not self._is_current(event.round, event.attempt):
            return
        coordination, part = self._coordination, self._part
        if part is not None:
            self._emit(*part.worked(event))
            if isinstance(event, do.SumOpened):
                self._opened(part, event)
        if coordination is not None:
            self._emit(*coordination.worked(event, self._now))
            if isinstance(event, do.UpdateAdded):
                self._progress("aggregate", contributors=coordination.contributors())

    # ---- commit ------------------------------------------------------------------

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

    def _commit(self, commits: tuple[pb.Commit, ...]) -> None:
        """The head moves on; the next round begins if the run goes on."""
        last = commits[-1]
        body = last.certificate.body
        if body.round <= self.head_round:
            return
        if last.HasField("report"):
            last = self._as_signed(last)
            commits = (*commits[:-1], last)
        durable = Durable(
            body.round,
            body.model_digest,
            state=runs.kept(self.durable.state),
            signed_run=self.durable.signed_run,
        )
        self.durable = durable
        self._emit(do.Persist(durable, commits))
        self._head_certificate = last.certificate
        self._leave()
        self._left = -1
        self._promises.clear()
        self._attempts.clear()
        self._heard.forget()
        self._manifests.new_round(last.certificate)
        self._ground = self._ground_of(0)
        self._emit(do.BeginAttempt(body.round + 1, 0))
        self._emit(do.Adopt(body.round, body.model_digest, tuple(body.contributors)))
        self._emit(do.Progress.of_commit(last))
        self._pace.nothing()
        self._answered.clear()
        self._ask_again()
        if self._active:
            self._go_on_to(0)
        self._early += self._too_early
        self._too_early = []

    def _change_manifest(self, event: do.ManifestChanged) -> None:
        """A newer manifest goes into force with the next attempt, which begins now."""
        changed = self._manifests.install(event.manifest)
        self._read_again()
        if self._asks:
            self._ask()  # for what could not be read without it
        if changed and self._active and (self._pace.idle or self.durable.promised >= 0):
            said = f"manifest {self.manifest.version} is in force now"
            self._progress("failed" if not self._pace.idle else "waiting", message=said)
            self._go_on_to(max(0, self.durable.promised + 1))
        elif changed and not self._active and not self._has_stated:
            self._fail_attempt(f"its run is over under manifest {self.manifest.version}")
            self._rest()
