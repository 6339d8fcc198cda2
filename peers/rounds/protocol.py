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
from collections.abc import Set

from peers.attempts import effects as do
from peers.attempts.coordination import ANSWERS
from peers.attempts.effects import Durable, Effect, Event
from peers.attempts.lead import AttemptFails
from peers.attempts.modes import MODES_ANSWERS, MODES_ORDERS
from peers.rounds import runs
from peers.rounds.acceptor import Acceptor
from peers.rounds.adoption import Adoption
from peers.rounds.recall import Recall
from peers.rounds.replica import Replica, check_turn
from peers.rounds.run_in_force import RunInForce
from peers.rounds.synchronizer import Synchronizer
from peers.wire.certificates import CertificateError
from peers.wire.errors import LocalProtocolError, RemoteProtocolError
from peers.wire.manifest import FederationManifest
from peers.wire.signing import Kind, must_be, read, sign
from proto import federation_pb2 as pb


class Protocol:
    """One site's part in all rounds. Feed it events in `step`, carry out its effects."""

    def __init__(self, here: Replica) -> None:
        self._here = here
        self._in_force = RunInForce(here)
        self._recall = Recall(here, self._in_force)
        self._acceptor = Acceptor(here, self._in_force, self._recall)
        self._synchronizer = Synchronizer(here, self._in_force, self._recall, self._acceptor)
        self._adoption = Adoption(here)
        self._early: list[do.MessageReceived] = []  # of the next round, which has begun

    # ---- what people and the driver see of it --------------------------------------

    @property
    def site(self) -> str:
        """Which site this is."""
        return self._here.site

    @property
    def durable(self) -> Durable:
        """What it must still know after a crash."""
        return self._here.durable

    @property
    def accused(self) -> Set[str]:
        """Sites that evidence is kept of."""
        return self._here.accused

    @property
    def manifest(self) -> FederationManifest:
        """The manifest in force."""
        return self._here.manifest

    @property
    def waiting_manifest(self) -> str:
        """Why rounds do not go by the newest manifest yet; empty when they do."""
        return self._here.manifests.waiting

    @property
    def other_retriever(self) -> str:
        """Why this site takes no part in training under the manifest in force; empty if it may."""
        return self._here.model.objection(self._here.manifest)

    @property
    def log_id(self) -> str:
        """What names these rounds in whatever is signed."""
        return self._here.federation_id

    @property
    def head_round(self) -> int:
        """The last committed round; 0: none."""
        return self._here.head_round

    @property
    def run(self) -> pb.Run | None:
        """The run under way, or the last one."""
        return self._here.run

    @property
    def wish(self) -> pb.RunWish:
        """What it knows of runs, for peers; the run is empty where there is none."""
        return self._in_force.wish

    @property
    def busy(self) -> bool:
        """Whether a run is under way, or an attempt that a stopped run has begun."""
        here = self._here
        return here.active or here.part is not None or here.coordination is not None

    # ---- the door --------------------------------------------------------------

    def step(self, event: Event, now: float) -> list[Effect]:
        """Take one event; return what to do, in order.

        Raises RemoteProtocolError when a peer misbehaves and RunRefused when a
        person's wish can't be met; what came before the refusal is in `wished`.
        """
        here = self._here
        here.now = now
        here.effects = []
        self._take(event)
        # Messages to ourselves, and what waited for a commit, are taken at once. That is
        # safe: their consequences stand behind any Persist that their cause asked for.
        taken = 0
        while taken < len(here.effects) or self._early:
            if self._early:
                self._take_ours(self._early.pop(0))
                continue
            effect = here.effects[taken]
            taken += 1
            if isinstance(effect, do.Send) and effect.to == here.site:
                self._take_ours(do.MessageReceived(here.site, effect.body))
        return self.wished

    @property
    def wished(self) -> list[Effect]:
        """Effects of the last step: when it was refused, of what it had done before.

        They are carried out all the same: the state, and whom we accuse, go by them.
        """
        return [
            e
            for e in self._here.effects
            if not (isinstance(e, do.Send) and e.to == self._here.site)
        ]

    def _take_ours(self, event: do.MessageReceived) -> None:
        """What is refused here must not undo what its cause has already asked for."""
        try:
            self._take(event)
        except (RemoteProtocolError, CertificateError) as error:
            self._here.progress("waiting", message=str(error))

    def next_wakeup(self) -> float:
        """When a Tick is due; infinity when nothing waits."""
        here = self._here
        deadline = here.coordination.lead.deadline if here.coordination else math.inf
        # What else is due waits until peers have told us what we have said.
        pace = math.inf if self._recall.waits else here.pace.until
        return min(deadline, pace, self._recall.until)

    def start(self, now: float) -> list[Effect]:
        """Begin after a (re)start of the daemon: ask what we have said, and go on."""
        here = self._here
        here.now = now
        here.effects = []
        self._recall.read_again()  # the manifest that was missing may have come with this start
        self._recall.ask()
        if here.active:
            # A moment later, when peers can be reached; unless we hear of progress before.
            here.pace.restarted(now)
        return here.effects

    def expects(self, sender: str, name: pb.BlobName) -> bool:
        """Whether a large object offered by ``sender`` belongs to the attempt under way."""
        here = self._here
        if not here.is_current(name.round, name.attempt):
            return False
        coordination, part = here.coordination, here.part
        if name.kind == pb.ENCRYPTED_UPDATE:
            return coordination is not None and coordination.expects_update(sender)
        if name.kind == pb.PUBLIC_CONTEXT:
            return coordination is not None and coordination.expects_context(sender)
        return part is not None and part.expects(sender, name.kind)

    def _take(self, event: Event) -> None:
        here = self._here
        coordination = here.coordination
        before = coordination.phase if coordination else ""
        try:
            self._dispatch(event)
        except AttemptFails as failure:
            if coordination is None and here.coordination is None:
                raise LocalProtocolError(f"an attempt failed without one: {failure}") from failure
            self._synchronizer.fail(str(failure))
        if coordination is None or coordination is not here.coordination:
            return
        if coordination.phase != before:
            # The attempt that we run ourselves got on: its phases are our patience.
            here.got_on(f"ours {coordination.phase}", train=coordination.phase in ("plan", "train"))
            here.progress(coordination.phase, contributors=coordination.contributors())

    def _dispatch(self, event: Event) -> None:
        here = self._here
        match event:
            case do.MessageReceived(sender, body):
                self._receive(sender, body)
            case do.Tick():
                self._synchronizer.tick()
            case do.Situation():
                here.situation = event
            case do.RunRequested():
                runs.must_take_part(here.site, here.manifests.newest)
                wish = runs.requested(event, here.durable, here.site, here.policy, here.manifest)
                self._announce(wish)
            case do.StopRequested(run_id):
                runs.must_take_part(here.site, here.manifests.newest)
                self._announce(runs.stopped(run_id, here.durable, here.site, here.manifest))
            case do.ManifestChanged():
                self._change_manifest(event)
            case do.PeerAhead(site, head_round):
                if head_round > here.head_round:
                    here.emit(do.FetchCertificates(site, here.head_round))
            case do.CertificatesArrived(certificates):
                here.emit(*self._adoption.certificates(certificates))
            case do.VersionHere(digest):
                self._version_here(digest)
            case do.VersionMissing(digest, reason):
                self._version_missing(digest, reason)
            case do.WorkDone():
                self._worked(event)
            case _:
                raise LocalProtocolError(f"an event of no kind that is known: {event}")

    def _receive(self, sender: str, body: do.Body) -> None:
        here = self._here
        match body:
            case pb.RunWish():
                self._on_wish(sender, body)
            case pb.Prepare():
                self._on_prepare(sender, body)
            case pb.Promised():
                self._synchronizer.on_promised(sender, body)
            case pb.Behind():
                self._on_behind(sender, body)
            case pb.Ahead():
                self._on_ahead(sender, body)
            case pb.Bundle():
                if here.from_lead(sender, body.round, body.attempt):
                    self._acceptor.on_bundle(sender, body)
                else:
                    self._synchronizer.learn_from(body)
            case pb.State():
                self._acceptor.on_state(sender, body)
            case pb.Certified():
                self._acceptor.on_certified(sender, body)
            case pb.Scale():
                self._acceptor.on_scale(sender, body)
            case pb.Proven():
                self._acceptor.on_proven(sender, body)
            case pb.Commit():
                here.emit(*self._adoption.committed(body))
            case pb.AttemptFailed():
                self._on_attempt_failed(sender, body)
            case pb.EndedAttempt():
                self._acceptor.on_ended(sender, body)
            case pb.Evidence():
                here.on_evidence(body)
            case pb.Recall():
                self._recall.on_recall(sender, body)
            case pb.Remembered():
                self._recall.on_remembered(sender, body)
            case _ if isinstance(body, MODES_ORDERS):
                self._acceptor.on_order(sender, body)
            case _ if isinstance(body, ANSWERS + MODES_ANSWERS):
                self._on_answer(sender, body)
            case _:
                raise RemoteProtocolError(f"{sender} sends a {type(body).__name__}, unasked")

    # ---- runs ------------------------------------------------------------------

    def _announce(self, run: pb.Run) -> None:
        here = self._here
        # Above what was not taken here, too.
        run.generation = max(run.generation, self._in_force.usual + 1)
        self._take_run(sign(here.keys, Kind.RUN, run), run)
        if here.run != run:
            raise runs.RunRefused(f"it does not take the place of {runs.in_words(here.run)}")

    def _on_wish(self, sender: str, wish: pb.RunWish) -> None:
        try:
            over = self._in_force.new_over(sender, wish.over) if wish.HasField("over") else None
            if over is not None:
                self._take_run(wish.over, over)
            # Though a later run is in force:
            if self._acceptor.is_over and not self._acceptor.has_stated:
                self._synchronizer.fail("its run has been stopped")
                self._here.drop()
                self._synchronizer.go_on_to(self._here.durable.promised + 1)
        finally:  # what is over may be of a site that is not in our manifest: the run is another's
            self._on_run(sender, wish.run)

    def _on_run(self, sender: str, signed: pb.Signed) -> None:
        """A run that we missed, or that the sender missed."""
        if (run := self._in_force.new_run(sender, signed)) is not None:
            self._take_run(signed, run)

    def _take_run(self, signed: pb.Signed, run: pb.Run) -> None:
        here = self._here
        if not self._in_force.stands_over(run, here.run):
            return
        was_active, before = here.active, here.run
        entered = here.durable.promised >= 0 and not here.pace.idle
        self._in_force.keep(signed)
        later = was_active and before is not None and self._in_force.goes_on(before)
        stays = entered and (later or self._acceptor.has_stated)
        if was_active:
            by, stopped = run.requested_by, "has stopped the run (fedctl train --stop)"
            said = f"'s run takes its place: to round {run.target_round}, by its own plan"
            reason = f"{by}{said}" if here.active else f"{by} {stopped}"
            if entered and not stays and not here.pace.over:
                here.progress("failed", message=reason)
                self._synchronizer.fail(reason)  # where we lead it
            here.progress("waiting", message=reason)
        if stays:
            return  # the end of the attempt decides: what we have signed may be opened
        if not here.active:
            self._synchronizer.rest()
        elif not here.pace.part_lost and (entered or not was_active):
            here.drop()
            self._synchronizer.go_on_to(max(0, here.durable.promised + 1))

    # ---- the attempt, at its coordinator and before ------------------------------

    def _on_prepare(self, sender: str, message: pb.Prepare) -> None:
        here = self._here
        if message.round < here.round:
            if here.head_certificate is not None:
                ahead = pb.Ahead(round=message.round, certificate=here.head_certificate)
                here.emit(do.Send(sender, ahead))
            return
        if message.round > here.round:
            self._catch_up_for(sender, message)
            return
        must_be(
            message.head_digest == here.durable.head_digest,
            sender,
            f"builds round {message.round} on version {message.head_digest.hex()[:12]}, "
            f"committed here is {here.durable.head_digest.hex()[:12]}",
        )
        manifests = here.ground.manifest, here.manifests.current, here.manifests.newest
        check_turn(sender, message.round, message.attempt, *manifests)
        try:
            self._on_run(sender, message.run)
        finally:  # a promise counts also where the run does not
            self._synchronizer.on_promised(sender, message.promise)
        if not here.active or self._recall.waits:
            return
        if message.attempt > here.durable.promised:
            if here.durable.promised < 0:
                self._synchronizer.enter(0)
            if message.attempt != here.durable.promised:
                return
        self._acceptor.repeat_promise(sender)

    def _catch_up_for(self, sender: str, message: pb.Prepare) -> None:
        """A commit is still on its way to us: say so, and answer when we have caught up."""
        here = self._here
        here.too_early = [do.MessageReceived(sender, message)]
        behind = pb.Behind(round=message.round, attempt=message.attempt, head_round=here.head_round)
        here.emit(do.Send(sender, behind))
        if not self._adoption.under_way:
            here.emit(do.FetchCertificates(sender, here.head_round))
        self._on_run(sender, message.run)  # of a round that may lie behind a stop of ours

    def _on_answer(self, sender: str, message: do.AttemptMessage | pb.Vote) -> None:
        """An answer to the attempt that we coordinate; of another attempt: too late."""
        here = self._here
        round_ = message.body.round if isinstance(message, pb.Vote) else message.round
        if isinstance(message, pb.Vote):
            must_be(message.site == sender, sender, f"sent a vote of {message.site}")
            if round_ == here.round:
                here.verification.vote(message)
                here.accuse(here.heard.vote(message))
        if isinstance(message, pb.AppliedSum):
            must_be(message.applied.site == sender, sender, "brings what another site applied")
            read(here.keys, Kind.APPLIED, pb.Applied, message.applied, here.manifest)
            here.note(pb.TWO_APPLIED, message.applied)
        coordination = here.coordinated(round_, message.attempt)
        if coordination is None:
            return
        stating = coordination.stating
        here.emit(*coordination.answered(sender, message, here.now))
        if isinstance(message, pb.Stated) and stating is not None:
            self._acceptor.heard_of(stating, sender, message)

    def _on_attempt_failed(self, sender: str, message: pb.AttemptFailed) -> None:
        here = self._here
        coordination = here.coordinated(message.round, message.attempt)
        if coordination is not None:  # of a site that leaves the attempt, perhaps ourselves
            here.emit(*coordination.refused(sender, message, here.now))

    def _on_behind(self, sender: str, message: pb.Behind) -> None:
        if coordination := self._here.coordinated(message.round, message.attempt):
            coordination.behind(sender, message.head_round)

    def _on_ahead(self, sender: str, message: pb.Ahead) -> None:
        """Nobody's word: what it says is fetched, and verified, before it changes anything."""
        here = self._here
        if message.certificate.body.round > here.head_round:
            here.emit(do.FetchCertificates(sender, here.head_round))

    def _worked(self, event: do.WorkDone) -> None:
        """Local work of the attempt under way is done; of another attempt: forgotten."""
        here = self._here
        if not here.is_current(event.round, event.attempt):
            return
        coordination, part = here.coordination, here.part
        if part is not None:
            here.emit(*part.worked(event))
            if isinstance(event, do.SumOpened):
                self._acceptor.opened(part, event)
        if coordination is not None:
            here.emit(*coordination.worked(event, here.now))
            if isinstance(event, do.UpdateAdded):
                here.progress("aggregate", contributors=coordination.contributors())

    # ---- commit ------------------------------------------------------------------

    def _version_here(self, digest: bytes) -> None:
        commits = self._adoption.here(digest)
        if commits:
            self._commit(commits)
        pending = self._here.pending
        if pending is not None and pending.applied.model_digest == digest:
            self._here.pending = None
            self._acceptor.vote(pending)

    def _version_missing(self, digest: bytes, reason: str) -> None:
        here = self._here
        self._adoption.missing(digest)
        if here.pending is not None and here.pending.applied.model_digest == digest:
            here.pending = None
        here.progress("waiting", message=f"cannot get version {digest.hex()[:12]}: {reason}")

    def _commit(self, commits: tuple[pb.Commit, ...]) -> None:
        """The head moves on; the next round begins if the run goes on."""
        here = self._here
        last = commits[-1]
        body = last.certificate.body
        if body.round <= here.head_round:
            return
        if last.HasField("report"):
            last = self._acceptor.as_signed(last)
            commits = (*commits[:-1], last)
        durable = Durable(
            body.round,
            body.model_digest,
            state=runs.kept(here.durable.state),
            signed_run=here.durable.signed_run,
        )
        here.durable = durable
        here.emit(do.Persist(durable, commits))
        here.head_certificate = last.certificate
        here.leave()
        here.left = -1
        here.promises.clear()
        here.attempts.clear()
        here.heard.forget()
        here.manifests.new_round(last.certificate)
        here.ground = here.ground_of(0)
        here.emit(do.BeginAttempt(body.round + 1, 0))
        here.emit(do.Adopt(body.round, body.model_digest, tuple(body.contributors)))
        here.emit(do.Progress.of_commit(last))
        here.pace.nothing()
        self._in_force.new_round()
        self._recall.new_round()
        if here.active:
            self._synchronizer.go_on_to(0)
        self._early += here.too_early
        here.too_early = []

    def _change_manifest(self, event: do.ManifestChanged) -> None:
        """A newer manifest goes into force with the next attempt, which begins now."""
        here = self._here
        changed = here.manifests.install(event.manifest)
        self._recall.read_again()
        if self._recall.asks:
            self._recall.ask()  # for what could not be read without it
        if changed and here.active and (here.pace.idle or here.durable.promised >= 0):
            said = f"manifest {here.manifest.version} is in force now"
            here.progress("failed" if not here.pace.idle else "waiting", message=said)
            self._synchronizer.go_on_to(max(0, here.durable.promised + 1))
        elif changed and not here.active and not self._acceptor.has_stated:
            self._synchronizer.fail(f"its run is over under manifest {here.manifest.version}")
            self._synchronizer.rest()
