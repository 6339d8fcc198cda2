"""A state that went back: what a site has signed in a round, its peers tell it. PURE.

A daemon that starts can't know whether its disk is the one that it has stopped with. It
asks, takes what it is told for its own state, each thing by its own attempt, and signs
nothing in an attempt that was under way.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

from peers import effects as do
from peers.certificates import CertificateError
from peers.errors import RemoteProtocolError
from peers.machine import Machine
from peers.signing import Kind, must_be, name_of, read
from peers.statement import HeldLock, Known, read_lock
from proto import federation_pb2 as pb

FORGOTTEN = (
    "this site's state went back, and of the sites that answer none knows what it has promised: "
    "it stands still in this round, and asks again"
)


class Recalling(Machine):
    """What a site says, and takes for its own, about the round under way after a start."""

    def _of_round(self, known: Known) -> bool:
        return self._manifests.of_round(known.message.manifest_version) is not None

    @property
    def _held_lock(self) -> HeldLock | None:
        lock = self._kept_lock
        return read_lock(lock, self._keys, self._manifests.of_round) if lock is not None else None

    @property
    def _kept_lock(self) -> pb.Lock | None:
        return self._lock_in(self.durable.state)

    def _lock_in(self, state: pb.RoundState) -> pb.Lock | None:
        """What an older manifest allowed that was left behind before the first round is void."""
        lock = state.lock
        said = [one for one in (lock.certificate.statement, lock.root) if one]
        counts = said and all(self._of_round(Known.parse(one)) for one in said)
        return lock if counts else None

    def _owes(self, state: pb.RoundState) -> bool:
        """Whether our promise names what we do not have any more: the next one would hide it."""
        promise = pb.Promise.FromString(state.promise.promise.body)
        locked = promise.HasField("lock") and self._locked_in(state) < promise.lock.attempt
        stated = promise.HasField("stated") and stated_last(state) < promise.stated.attempt
        return locked or stated

    def _locked_in(self, state: pb.RoundState) -> int:
        """The attempt of the lock that counts; -1: there is none."""
        lock = self._lock_in(state)
        return certified_in(lock) if lock is not None else -1

    def _recall(self, peers: Iterable[str]) -> None:
        """Ask what we have said in this round; sign nothing before enough have answered."""
        self._recalling = set(peers)
        self._unanswered = set(self._recalling)
        self._ahead.clear()
        self._recall_until = self._now + self._timing.phase(0)
        asked = pb.Recall(round=self._round)
        self._emit(*(do.Send(peer, asked) for peer in sorted(self._recalling)))

    def _on_recall(self, sender: str, message: pb.Recall) -> None:
        """A site that starts asks what it has said; whoever is asked asks back, if it must."""
        answer = pb.Remembered(round=max(message.round, self._round))
        if answer.round == self._round:
            promised, promise = self._promises.get(sender), self._heard.latest_promise(sender)
            statement = self._heard.latest_statement(sender)
            question = self._heard.latest_statement(sender, question=True)
            vote = self._heard.latest_vote(sender)
            if promised is not None and promised.message.promise == promise:
                answer.promise.CopyFrom(promised.message)
            elif promise is not None:  # of a bundle, which shows of all that they name the highest
                answer.promise.promise.CopyFrom(promise)
            if statement is not None:
                answer.statement.CopyFrom(statement)
            if question is not None:
                answer.question.CopyFrom(question)
            if vote is not None:
                answer.vote.CopyFrom(vote)
            # Its vote may be here before the version that we are to vote for.
            locks = [self._kept_lock, self._pending.message if self._pending else None]
            locks.append(self._bundle.lock.message if self._bundle and self._bundle.lock else None)
            if known := [lock for lock in locks if lock is not None]:
                answer.lock.CopyFrom(max(known, key=certified_in))
        self._emit(do.Send(sender, answer))
        if answer.HasField("promise") and self._active and self.durable.signed_run is not None:
            # Forgotten, it would keep the attempt that it has promised waiting.
            self._emit(do.Send(sender, pb.RunWish(run=self.durable.signed_run)))
        if sender in self._unanswered:
            self._emit(do.Send(sender, pb.Recall(round=self._round)))

    def _on_remembered(self, sender: str, message: pb.Remembered) -> None:
        """What we have signed and do not know any more is our state again."""
        if message.round > self._round and sender in self._recalling:
            self._ahead.add(sender)
            self._emit(do.FetchCertificates(sender, self.head_round))
            return
        if message.round != self._round or sender not in self._unanswered:
            return  # an answer to what we asked before we caught up, or to nothing
        self._take_back(sender, message)
        self._recalling.discard(sender)
        self._unanswered.discard(sender)
        others = len(self.manifest.enabled_ids) - 1
        if len(self._recalling) <= others - (self.manifest.quorum - 1):
            self._recalled()

    def _recalled(self) -> None:
        """Enough peers have told us, or had the time to."""
        self._recalling.clear()
        self._ahead.clear()
        self._recall_until = math.inf
        self._pace.told(self._now)  # an attempt that waits for us waits a moment, no more

    def _take_back(self, sender: str, message: pb.Remembered) -> None:
        """Each by its own attempt: what is newer than what we have counts, and alone.

        What can't be read keeps nothing else away: a lock may be of a manifest that our
        state, put back, does not have yet.
        """
        told: list[tuple[int, str]] = []
        state = pb.RoundState()
        state.CopyFrom(self.durable.state)
        refused = None
        for take in (self._take_promise, self._take_lock, self._take_sum, self._take_question):
            try:
                told += take(state, sender, message)
            except (RemoteProtocolError, CertificateError) as error:
                refused = error
        promised = max([self.durable.promised, *(attempt for attempt, _ in told)])
        if promised_in(state) < promised and not self._owes(state):
            state.ClearField("promise")  # that of the attempt which we are in now is not known
        if told or promised > self.durable.promised:
            self._leave()
            self._ground = self._ground_of(promised)
        if state != self.durable.state or promised > self.durable.promised:
            self._persist(replace(self.durable, promised=promised, state=state))
        if told:
            self._emit(do.WentBack(self._round, sender, max(told, key=lambda one: one[0])[1]))
        if refused is not None:
            raise refused

    def _take_promise(
        self, state: pb.RoundState, sender: str, message: pb.Remembered
    ) -> list[tuple[int, str]]:
        """With what it names: in our next promise that must not be hidden."""
        told, kind = message.promise, Kind.PROMISE
        if not told.ByteSize():
            return []
        promise = read(self._keys, kind, pb.Promise, told.promise, self.manifest, past=True)
        must_be(told.promise.site == self.site, sender, "remembers another's promise")
        if promise.round != self._round:
            return []
        promised, kept = self.durable.promised, state.promise.promise.body
        contradicts = promise.attempt == promised and told.promise.body != kept
        newer = promise.attempt > promised or contradicts
        if newer:
            state.promise.CopyFrom(told)
            state.began = state.began or promise.manifest_version
        if told.HasField("lock"):
            lock = read_lock(told.lock, self._keys, self._manifests.of_round)
            self._must_be_of_round(lock, sender)
            must_be(lock.name == promise.lock, sender, "shows another lock than we have named")
            if self._locked_in(state) < lock.name.attempt:
                state.lock.CopyFrom(told.lock)
        if told.HasField("stated"):
            ours = name_of(told.stated) == promise.stated.digest
            must_be(ours, sender, "shows another sum than we have named")
            self._take_statement(state, sender, told.stated)
        return [(promise.attempt, f"promised attempt {promise.attempt}")] if newer else []

    def _take_lock(
        self, state: pb.RoundState, sender: str, message: pb.Remembered
    ) -> list[tuple[int, str]]:
        """A lock that binds us: we have voted for it, or named it or an earlier one in a promise.

        Of another's we may not have the version. A vote of ours comes back with it alone:
        without its lock it would be hidden in our next promise.
        """
        if not message.HasField("lock"):
            return []
        lock = read_lock(message.lock, self._keys, self._manifests.of_round)
        self._must_be_of_round(lock, sender)
        vote, voted, attempt = message.vote, False, lock.name.attempt
        if message.HasField("vote"):
            self._verify_vote(vote)
            must_be(vote.site == self.site, sender, "remembers another's vote")
            later = not state.HasField("vote") or state.vote.attempt < vote.attempt
            voted = vote.body.round == self._round and later and vote.attempt <= attempt
        if voted:
            state.vote.CopyFrom(vote)
        promise = pb.Promise.FromString(state.promise.promise.body)
        ours = voted or (promise.HasField("lock") and promise.lock.attempt <= attempt)
        if ours and self._locked_in(state) < attempt:
            state.lock.CopyFrom(message.lock)
        return [(vote.attempt, f"voted in attempt {vote.attempt}")] if voted else []

    def _take_sum(
        self, state: pb.RoundState, sender: str, message: pb.Remembered
    ) -> list[tuple[int, str]]:
        return self._take_statement(state, sender, message.statement)

    def _take_question(
        self, state: pb.RoundState, sender: str, message: pb.Remembered
    ) -> list[tuple[int, str]]:
        return self._take_statement(state, sender, message.question)

    def _must_be_of_round(self, lock: HeldLock, sender: str) -> None:
        latest = lock.latest.message
        named = (latest.round, latest.parent_digest)
        must_be(named == (self._round, self.durable.head_digest), sender, "shows another's lock")

    def _take_statement(
        self, state: pb.RoundState, sender: str, signed: pb.Signed
    ) -> list[tuple[int, str]]:
        if not signed.ByteSize():
            return []
        kind = Kind.STATEMENT
        statement = read(self._keys, kind, pb.Statement, signed, self.manifest, past=True)
        must_be(signed.site == self.site, sender, "remembers another's statement")
        if statement.round != self._round:
            return []
        attempt = statement.attempt
        if statement.kind == pb.SUM and attempt > stated_last(state):
            state.stated.CopyFrom(signed)
        count_draw(state, Known.parse(signed.body))
        newest = max([self.durable.promised, *map(attempt_of, state.statements)])
        known = [one.body for one in state.statements]
        if signed.body in known or attempt < newest:
            return []
        # Of one attempt, a question and a sum: those of earlier ones bind nobody now.
        of_it = [one for one in state.statements if attempt_of(one) == attempt]
        del state.statements[:]
        state.statements.extend([*of_it, signed])
        return [(attempt, f"signed a statement in attempt {attempt}")]


def promised_in(state: pb.RoundState) -> int:
    """The attempt of the promise that is kept; 0 also where none is."""
    return pb.Promise.FromString(state.promise.promise.body).attempt


def stated_last(state: pb.RoundState) -> int:
    """The attempt of the last new sum; -1: there is none."""
    return attempt_of(state.stated) if state.stated.body else -1


def certified_in(lock: pb.Lock) -> int:
    """The attempt that locks are ordered by."""
    return Known.parse(lock.certificate.statement).message.attempt


def attempt_of(statement: pb.Signed) -> int:
    """The attempt that a statement was signed in."""
    return pb.Statement.FromString(statement.body).attempt


def is_fresh(known: Known) -> bool:
    """Whether it is of integers that were drawn for it: a sum, or products that may tell one."""
    statement = known.message
    return statement.kind != pb.RESTATED and statement.plan.draw == statement.attempt


def count_draw(state: pb.RoundState, known: Known) -> None:
    """Once an attempt, whatever is stated in it."""
    if not is_fresh(known):
        return
    attempt = known.message.attempt
    of_it = [one for one in state.drawn if one.attempt == attempt]
    drawn = of_it[0] if of_it else state.drawn.add(attempt=attempt)
    drawn.sites[:] = sorted({*drawn.sites, *known.contributors})
