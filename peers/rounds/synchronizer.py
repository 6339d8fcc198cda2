"""Which attempt a site is in, and when it goes on to the next: the synchronizer of views. PURE.

A site enters attempts one after the other, and none in which it would be alone: where f + 1
sites are, one of them honest, it may go, too. How long it stays is peers/rounds/pacemaker.py's.
"""

from __future__ import annotations

from dataclasses import replace

from peers.attempts import effects as do
from peers.attempts.bundle import Ground, read_promised
from peers.attempts.coordination import Coordination
from peers.attempts.lead import AttemptFails, Lead
from peers.rounds.acceptor import Acceptor
from peers.rounds.recall import Recall
from peers.rounds.replica import Replica
from peers.rounds.run_in_force import RunInForce
from peers.wire.certificates import CertificateError
from peers.wire.errors import RemoteProtocolError
from peers.wire.signing import Kind, must_be, read
from proto import federation_pb2 as pb


class Synchronizer:
    """The attempt that a site is in, and the one that it leads."""

    def __init__(
        self, here: Replica, in_force: RunInForce, recall: Recall, acceptor: Acceptor
    ) -> None:
        self._here = here
        self._in_force = in_force
        self._recall = recall
        self._acceptor = acceptor

    def tick(self) -> None:
        """Time has passed: what was waited for has not come, or it is this site's turn."""
        here = self._here
        if here.now >= self._recall.until:
            self._recall.time_is_up()
        if here.coordination and here.now >= here.coordination.lead.deadline:
            try:
                here.emit(*here.coordination.timeout(here.now))
            except (RemoteProtocolError, CertificateError) as error:
                raise AttemptFails(str(error)) from error
        if here.now < here.pace.until or self._recall.waits:
            return
        if not here.active:
            self.rest()
        elif here.pace.part_lost:
            self._resume()
        else:
            alone = self._is_alone()
            if here.durable.promised >= 0 and not here.pace.over and not here.pace.alone:
                said = f"nothing more came from {here.ground.coordinator}, who led it"
                waits = "; the next one waits until more sites are known to be in this one"
                here.progress("failed", message=said + waits * alone)
            if alone:  # we wait where they may find us, and say so to whoever can be reached
                here.tell_others(self._in_force.wish, here.durable.state.promise)
                here.pace.again(here.durable.promised, here.now)
            else:
                self.enter(here.durable.promised + 1)

    def go_on_to(self, attempt: int) -> None:
        """Enter this attempt, the next one; or when peers have told us what we have said.

        Nor may what can be said to one site only, a run, take it where nobody is.
        """
        if self._recall.waits or self._is_alone():
            self._here.pace.due(self._here.now)
        else:
            self.enter(attempt)

    def _resume(self) -> None:
        """Our part in the attempt under way is lost: nobody should wait for it."""
        here = self._here
        attempt = here.durable.promised
        if attempt < 0:
            self.enter(0)
            return
        reason = "take part any longer: its daemon was restarted"
        if here.ground.coordinator == here.site:
            ended = here.signed_end(attempt, f"{here.site}, who led it: its daemon was restarted")
            here.tell_others(ended)
            self.enter(attempt + 1)
            return
        lost = pb.AttemptFailed(round=here.round, attempt=attempt, reason=reason)
        here.emit(do.Send(here.ground.coordinator, lost))
        here.pace.entered(attempt, here.now)  # it may well succeed without us

    def _is_alone(self) -> bool:
        """Whether too few others, as far as we know, are in the attempt that we have promised.

        Of one that we can't show a promise of they can't know it either.
        """
        state = self._here.durable.state
        return (
            state.HasField("promise") and not self._recall.owes(state) and not self._here.has_quorum
        )

    def rest(self) -> None:
        """The run is over, and so is our part in what it had begun."""
        self._here.drop()
        self._here.pace.nothing()

    def enter(self, attempt: int) -> None:
        """Promise an attempt. All hear of it, and of the run behind one that has failed."""
        here = self._here
        if not here.active or here.durable.signed_run is None:
            self.rest()
            return
        if here.site not in here.manifest.enabled_ids:
            self.rest()
            here.progress("waiting", message="the manifest does not let this site take part")
            return
        if here.manifest.objection:
            self.rest()
            here.progress("failed", message=here.manifest.objection, attempt=max(0, attempt))
            return
        if self._recall.owes(here.durable.state):
            here.drop()
            here.progress("waiting", message=self._recall.what_it_lacks())
            here.pace.entered(here.durable.promised, here.now)
            self._recall.ask()
            self._recall.read_again()  # a manifest of the past may have come meanwhile
            return
        self._recall.since = min(self._recall.since, attempt)
        tried = self._tried()
        here.leave()
        here.manifests.began()
        ground = here.ground = here.ground_of(attempt)
        promised = self._acceptor.make_promise(ground, tried=tried)
        state = pb.RoundState()
        state.CopyFrom(here.durable.state)
        state.promise.CopyFrom(promised)
        state.tried = tried
        state.began = state.began or ground.manifest.version
        here.persist(replace(here.durable, promised=attempt, state=state))
        here.emit(do.BeginAttempt(here.round, attempt))
        here.pace.entered(attempt, here.now)
        here.progress("prepare")
        reason = pb.Promise.FromString(promised.promise.body).reason
        if reason and here.situation.willing:  # our own people have to know it, too
            here.progress("waiting", message=reason)
        lead = ground.coordinator
        if attempt:
            here.tell_others(self._in_force.wish)
        here.tell_others(promised)
        if lead == here.site:
            self._lead(ground, promised)
        elif lead in here.accused:
            here.pace.ended(attempt, here.now - here.timing.retry(attempt))

    def _tried(self) -> int:
        """One more than the last attempt in which a sum could not be made again; 0: none.

        The attempt that we leave should have, and has proven no version.
        """
        here = self._here
        state, bundle = here.durable.state, here.bundle
        again = bundle.repeated if bundle is not None else None
        if again is None or again.attempt < state.tried:
            return state.tried
        lock = self._recall.held_lock
        proven = lock is not None and lock.name.attempt == here.durable.promised
        return state.tried if proven else here.durable.promised + 1

    def _lead(self, ground: Ground, own: pb.Promised) -> None:
        here = self._here
        if here.durable.signed_run is None:
            raise AssertionError("no run, no attempt")
        here.coordination = Coordination(
            Lead(here.site, ground, here.keys, here.model, here.timing),
            here.durable.signed_run,
            here.manifests.of_round,
            here.unix_ms,
        )
        here.emit(*here.coordination.prepare(own, here.now), do.Send(here.site, own))
        for promised in list(here.promises.values()):
            if promised.promise.attempt == ground.attempt and promised.site != here.site:
                here.emit(*here.coordination.promised(promised, here.now))

    def fail(self, reason: str) -> None:
        """End the attempt that we lead, if we lead one; all hear why."""
        here = self._here
        coordination = here.coordination
        if coordination is None:
            return
        message = here.signed_end(coordination.lead.attempt, reason)
        here.coordination = None
        here.emit(*(do.Send(site, message) for site in here.manifest.enabled_ids))

    def on_promised(self, sender: str, message: pb.Promised) -> None:
        """A promise counts for whoever signed it, and tells how far the others are."""
        here = self._here
        promised = read_promised(message, here.keys, here.manifest, here.manifests.of_round)
        promise = promised.promise
        if promise.round != here.round:
            return
        here.note(pb.TWO_PROMISES, message.promise)
        if message.HasField("stated"):
            here.note(pb.TWO_STATEMENTS, message.stated)
        known = here.promises.get(promised.site)
        if known is None or known.promise.attempt < promise.attempt:
            here.promises[promised.site] = promised
        here.is_at(promised.site, promise.attempt)
        if promised.site == here.site and sender != here.site:
            return
        attempt = here.durable.promised
        if promise.attempt == attempt and here.coordination is not None:
            here.emit(*here.coordination.promised(promised, here.now))
        elif promise.attempt > attempt:
            if here.coordination is not None:
                site, now = promised.site, here.now
                here.emit(*here.coordination.left_by(site, promise.attempt, now))
            self._keep_up()
        elif promise.attempt < attempt and promised.site == sender and here.active:
            self._acceptor.repeat_promise(sender)

    def _keep_up(self) -> None:
        """Where f + 1 sites are, one of them honest, we may go, too."""
        here = self._here
        far = here.reached(here.manifest.tolerated + 1)
        waits = self._recall.waits or self._recall.owes(here.durable.state)
        if far > here.durable.promised and here.active and not waits:
            self.enter(far)

    def learn_from(self, message: pb.Bundle) -> None:
        """An attempt that we are not in; its promises tell how far the others are.

        No more: what they name is not shown, and a sum could not be made of them.
        """
        here = self._here
        if message.round != here.round or message.attempt <= here.durable.promised:
            return
        for signed in message.promises:
            promise = read(here.keys, Kind.PROMISE, pb.Promise, signed, here.manifest)
            must_be(promise.federation_id == here.federation_id, signed.site, "promises elsewhere")
            if promise.round == here.round and signed.site != here.site:
                here.note(pb.TWO_PROMISES, signed)
                here.is_at(signed.site, promise.attempt)
        self._keep_up()
