"""A state that went back: what a site has signed in a round, its peers tell it. PURE.

A daemon that starts can't know whether its disk is the one that it has stopped with, nor
in which round that was. It asks in every round, until all peers have answered in one: none of
them is then in a later round, and knows of something that it has signed there. It takes what
it is told for its own state, each thing by its own attempt, and states nothing in an attempt
that was under way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial

from peers.attempts import effects as do
from peers.attempts.statement import EncodedStatement, HeldLock, read_lock
from peers.rounds.replica import Replica
from peers.rounds.run_in_force import RunInForce
from peers.wire.certificates import CertificateError, vote_payload
from peers.wire.errors import RemoteProtocolError
from peers.wire.messages import MANIFESTS_A_ROUND
from peers.wire.signing import Kind, must_be, name_of, read, signature_of
from proto import federation_pb2 as pb

LATER_THAN_ANY = 2**64  # attempt

# On a busy machine the last of three honest peers answered 0.65 s behind the second.
GREETED_S = 1.0

FORGOTTEN = (
    "this site's state went back, and of the sites that answer none knows what it has promised: "
    "it stands still in this round, and asks again"
)


class Recall:
    """What a site says, and takes for its own, about the round under way after a start.

    ``since``: the first attempt of which it knows all that it has signed. ``until``: when it
    goes on without those who have not answered.
    """

    def __init__(self, here: Replica, in_force: RunInForce) -> None:
        self._here = here
        self._in_force = in_force
        self.asks = True  # in each round, until in one of them every peer has answered
        self.since = LATER_THAN_ANY
        self.until = math.inf
        self._told_by: set[str] = set()  # who has answered in the round under way
        self._waiting: set[str] = set()
        self._unanswered: set[str] = set()  # who may answer yet, later than that
        self._ahead: set[str] = set()  # who has said that it is in a later round

    @property
    def waits(self) -> bool:
        """Whether peers are yet to tell: nothing is signed before."""
        return bool(self._waiting)

    def of_round(self, known: EncodedStatement) -> bool:
        """Whether it may count in the round under way, by its manifest."""
        return self._here.manifests.of_round(known.message.manifest_version) is not None

    @property
    def held_lock(self) -> HeldLock | None:
        """The lock that this site holds in the round under way, read."""
        lock = self._kept_lock
        return (
            read_lock(lock, self._here.keys, self._here.manifests.of_round)
            if lock is not None
            else None
        )

    @property
    def _kept_lock(self) -> pb.Lock | None:
        return self._lock_in(self._here.durable.state)

    def _lock_in(self, state: pb.RoundState) -> pb.Lock | None:
        """The state's lock, unless a manifest allowed it that was left before the first round."""
        lock = state.lock
        said = [one for one in (lock.certificate.statement, lock.root) if one]
        counts = said and all(self.of_round(EncodedStatement.parse(one)) for one in said)
        return lock if counts else None

    def owes(self, state: pb.RoundState) -> bool:
        """Whether we have named what we do not have: our next promise would hide it."""
        if self._lacks_manifest(state) or state.unread:
            return True  # what that was can't be read yet
        locked, stated = self._locked_in(state) + 1, stated_last(state) + 1
        return locked < state.lock_named or stated < state.sum_named

    def what_it_lacks(self) -> str:
        """For people, where this site owes something."""
        state = self._here.durable.state
        if not self._lacks_manifest(state):
            return FORGOTTEN
        lacked = ", ".join(str(v) for v in state.signed_under if self._here.manifests.lacks(v))
        return (
            f"this site's state went back behind manifest {lacked}, under which it has signed in "
            "this round: it stands still until that one is here (SIGHUP), or the round is committed"
        )

    def _lacks_manifest(self, state: pb.RoundState) -> bool:
        """Whether we have signed something under one that our state, put back, does not have."""
        return any(self._here.manifests.lacks(version) for version in state.signed_under)

    def _locked_in(self, state: pb.RoundState) -> int:
        """The attempt of the lock that counts; -1: there is none."""
        lock = self._lock_in(state)
        return certified_in(lock) if lock is not None else -1

    def ask(self) -> None:
        """Ask every peer what we have signed in this round, if there are peers to ask."""
        here = self._here
        peers = here.others
        if peers and here.site in here.manifest.enabled_ids:
            self._recall(peers)

    def new_round(self) -> None:
        """Another round begins: its disk, put back, may be of a round that comes later yet."""
        self._told_by.clear()
        self._unanswered.clear()
        self._waiting.clear()
        self._ahead.clear()
        self.until = math.inf
        self.since = LATER_THAN_ANY if self.asks else 0
        if self.asks:
            self.ask()

    def _recall(self, peers: Iterable[str]) -> None:
        """Ask what we have said in this round; sign nothing before enough have answered."""
        here = self._here
        self._waiting = set(peers)
        self._unanswered = set(self._waiting)
        self._ahead.clear()
        self.until = here.now + here.timing.phase(0)
        request = pb.Recall(round=here.round)
        here.emit(*(do.Send(peer, request) for peer in sorted(self._waiting)))

    def on_recall(self, sender: str, message: pb.Recall) -> None:
        """A site that starts asks what it has said; whoever is asked asks back, if it must."""
        here = self._here
        answer = pb.Remembered(round=max(message.round, here.round))
        if answer.round == here.round:
            self._remember(sender, answer)
        here.emit(do.Send(sender, answer))
        if here.durable.signed_run is not None:
            # What it has missed of runs, or forgotten: one that was stopped it would begin again.
            here.emit(do.Send(sender, self._in_force.wish))
        if sender in self._unanswered:
            here.emit(do.Send(sender, pb.Recall(round=here.round)))

    def _remember(self, site: str, answer: pb.Remembered) -> None:
        """All that this site has signed in this round, as far as we know."""
        here = self._here
        promised, promise = here.promises.get(site), here.heard.latest_promise(site)
        statement = here.heard.latest_statement(site)
        question = here.heard.latest_statement(site, question=True)
        vote = here.heard.latest_vote(site)
        if promised is not None and promised.message.promise == promise:
            answer.promise.CopyFrom(promised.message)
        elif promise is not None:  # of a bundle, which shows of all that they name the highest
            answer.promise.promise.CopyFrom(promise)
            named = pb.Promise.FromString(promise.body)
            stated = here.heard.statement(site, here.round, named.stated.attempt)
            if named.HasField("stated") and stated is not None:
                answer.promise.stated.CopyFrom(stated)
        if statement is not None:
            answer.statement.CopyFrom(statement)
        if question is not None:
            answer.question.CopyFrom(question)
        if vote is not None:
            answer.vote.CopyFrom(vote)
        # Its vote may be here before the version that we are to vote for.
        locks = [self._kept_lock, here.pending.message if here.pending else None]
        locks.append(here.bundle.lock.message if here.bundle and here.bundle.lock else None)
        locks += [one.lock.message for one in here.promises.values() if one.lock]
        if known := [lock for lock in locks if lock is not None]:
            highest = max(known, key=certified_in)
            if highest != answer.promise.lock:
                answer.lock.CopyFrom(highest)

    def on_remembered(self, sender: str, message: pb.Remembered) -> None:
        """What we have signed and do not know any more is our state again."""
        here = self._here
        if message.round > here.round and sender in self._unanswered:
            self._ahead.add(sender)
            here.emit(do.FetchCertificates(sender, here.head_round))
            return
        if message.round != here.round or sender not in self._unanswered:
            return  # an answer to what we asked before we caught up, or to nothing
        self._unanswered.discard(sender)  # believed once, also where it is refused
        self._take_back(sender, message)
        self._told_by.add(sender)
        self.asks = self.asks and not self._told_by >= set(here.others)
        self._waiting.discard(sender)
        others = len(here.manifest.enabled_ids) - 1
        if not self._waiting:
            self._recalled()
        elif len(self._waiting) <= others - (here.manifest.quorum - 1):
            # Of those who have answered all but one may know nothing, and that one lie. Half
            # of what a coordinator waits for the last promises: we are to be among them. But
            # peers that greet one another again take a moment, whatever the deadlines are.
            moment = max(GREETED_S, here.timing.straggler(0) / 2)
            self.until = min(self.until, here.now + moment)

    def time_is_up(self) -> None:
        """Some have not answered in time."""
        if len(self._ahead) > self._here.manifest.tolerated:
            self._recall(self._waiting)  # we are behind, as an honest site says
        else:
            self._recalled()

    def _recalled(self) -> None:
        """Peers have told us, or had the time to."""
        self._waiting.clear()
        self._ahead.clear()
        self.until = math.inf
        self._here.pace.told(self._here.now)  # an attempt that waits for us waits a moment, no more

    def _take_back(self, sender: str, message: pb.Remembered) -> None:
        """Each by its own attempt: what is newer than what we have counts, and alone.

        What can't be read keeps nothing else away: a lock may be of a manifest that our
        state, put back, does not have yet. What it is named by counts then, and we owe it.
        """
        here = self._here
        answers: list[tuple[int, str]] = []
        state = pb.RoundState()
        state.CopyFrom(here.durable.state)
        refused: Exception | None = None
        shown = message.promise
        takes: list[Callable[[], list[tuple[int, str]]]] = [
            lambda: self._take_promise(state, sender, shown),
            lambda: self._take_vote(state, sender, message),
            *(
                partial(self._take_statement, state, sender, signed)
                for signed in (shown.stated, message.statement, message.question)
            ),
            *(partial(self._take_lock, state, sender, lock) for lock in (shown.lock, message.lock)),
        ]
        for take in takes:
            try:
                answers += take()
            except (RemoteProtocolError, CertificateError) as error:
                refused = error
        self._keep_unread(state, sender, message, refused=refused is not None)
        if _is_hidden(here.durable.state, state):
            # The attempt under way goes by a promise that does not tell: we do nothing in it.
            answers.append(
                (here.durable.promised + 1, "named a lock or a sum in an earlier promise")
            )
        attempts = [attempt for attempt, _ in answers]
        promised = max([here.durable.promised, self._locked_in(state), *attempts])
        self._make_whole(state, promised)
        if answers or promised > here.durable.promised:
            here.drop()
            here.ground = here.ground_of(promised)
            self.since = max(self.since, promised + 1)
            here.pace.restarted(here.now)  # nobody should wait for our part in it
        if state != here.durable.state or promised > here.durable.promised:
            here.persist(replace(here.durable, promised=promised, state=state))
        if answers:
            here.emit(do.WentBack(here.round, sender, max(answers, key=lambda one: one[0])[1]))
        if refused is not None:
            raise refused

    def _keep_unread(
        self, state: pb.RoundState, sender: str, message: pb.Remembered, *, refused: bool
    ) -> None:
        """Of each peer the last that waits for a manifest.

        What it says later takes none back: it may itself have forgotten what it has heard of us.
        """
        unread = {one.site: one.remembered for one in state.unread}
        if refused and self._lacks_manifest(state):
            unread[sender] = message
        elif unread.get(sender) == message:
            del unread[sender]
        entries = [pb.Unread(site=site, remembered=unread[site]) for site in sorted(unread)]
        del state.unread[:]
        state.unread.extend(entries)

    def read_again(self) -> None:
        """Another manifest is here: what could not be read without it may be read now."""
        for one in list(
            self._here.durable.state.unread
        ):  # kept again, where it lacks another one still
            try:
                self._take_back(one.site, one.remembered)
            except (RemoteProtocolError, CertificateError) as error:
                self._here.progress("waiting", message=f"of what {one.site} remembers: {error}")

    def _make_whole(self, state: pb.RoundState, promised: int) -> None:
        """A promise that was told is repeated with what it names, or not at all."""
        own = state.promise
        promise = pb.Promise.FromString(own.promise.body)
        lock = self._lock_in(state)
        if promise.HasField("lock") and not own.HasField("lock") and lock is not None:
            own.lock.CopyFrom(lock)
        if promise.HasField("stated") and not own.HasField("stated"):
            own.stated.CopyFrom(state.stated)
        whole = (
            promise.attempt == promised
            and (not promise.HasField("lock") or self._names(promise.lock, own.lock))
            and (not promise.HasField("stated") or name_of(own.stated) == promise.stated.digest)
        )
        if not whole:
            state.ClearField("promise")

    def _read(self, lock: pb.Lock) -> HeldLock | None:
        """None: there is none of this round, or it is of a manifest that is not here yet."""
        here = self._here
        try:
            lock_read = read_lock(lock, here.keys, here.manifests.of_round)
            self._must_be_of_round(lock_read, here.site)
        except (RemoteProtocolError, CertificateError):
            return None
        return lock_read

    def _names(self, named: pb.LockName, lock: pb.Lock) -> bool:
        lock_read = self._read(lock)
        return lock_read is not None and lock_read.name == named

    def _take_promise(
        self, state: pb.RoundState, sender: str, answer: pb.Promised
    ) -> list[tuple[int, str]]:
        """What it names must not be hidden by our next one, however old it is."""
        here = self._here
        if not answer.promise.ByteSize():
            return []
        kind, manifest = Kind.PROMISE, here.manifest
        promise = read(here.keys, kind, pb.Promise, answer.promise, manifest, past=True)
        must_be(answer.promise.site == here.site, sender, "remembers another's promise")
        if promise.round != here.round:
            return []
        if promise.HasField("lock"):
            state.lock_named = max(state.lock_named, promise.lock.attempt + 1)
        if promise.HasField("stated"):
            state.sum_named = max(state.sum_named, promise.stated.attempt + 1)
        _add_version(state, promise.manifest_version)
        if not state.began or promise.manifest_version < state.began:
            state.began = promise.manifest_version
        here.manifests.began_under(promise.manifest_version)
        promised, own = here.durable.promised, state.promise.promise.body
        contradicts = promise.attempt == promised and answer.promise.body != own
        if promise.attempt < promised or (promise.attempt == promised and not contradicts):
            return []
        state.promise.CopyFrom(answer)
        return [(promise.attempt, f"promised attempt {promise.attempt}")]

    def _take_vote(
        self, state: pb.RoundState, sender: str, message: pb.Remembered
    ) -> list[tuple[int, str]]:
        """We vote no second time in its attempt; and owe its lock, where there is one."""
        here = self._here
        if not message.HasField("vote"):
            return []
        vote, under = message.vote, message.vote.body.manifest_version
        must_be(vote.site == here.site, sender, "remembers another's vote")
        if here.manifests.lacks(under):  # that it was we who cast it can be seen
            payload = vote_payload(vote.body, vote.attempt)
            here.keys.verify(payload, signature_of(vote), here.manifest, past=True)
        else:
            here.verification.vote(vote)
        if vote.body.round != here.round:
            return []
        _add_version(state, under)
        # Read before it is owed: what is no lock, nobody could ever show.
        shown = [self._read(lock) for lock in (message.promise.lock, message.lock)]
        if any(lock is not None and lock.name.attempt >= vote.attempt for lock in shown):
            state.lock_named = max(state.lock_named, vote.attempt + 1)
        if state.HasField("vote") and state.vote.attempt >= vote.attempt:
            return []
        state.vote.CopyFrom(vote)
        return [(vote.attempt, f"voted in attempt {vote.attempt}")]

    def _take_lock(
        self, state: pb.RoundState, sender: str, answer: pb.Lock
    ) -> list[tuple[int, str]]:
        """That which we have named or voted by, and lack; or a later one of anybody's."""
        if not answer.ByteSize():
            return []
        lock = read_lock(answer, self._here.keys, self._here.manifests.of_round)
        self._must_be_of_round(lock, sender)
        attempt = lock.name.attempt
        if self._locked_in(state) + 1 < state.lock_named <= attempt + 1:
            state.lock.CopyFrom(answer)
        return []

    def _must_be_of_round(self, lock: HeldLock, sender: str) -> None:
        latest = lock.latest.message
        named = (latest.round, latest.parent_digest)
        must_be(
            named == (self._here.round, self._here.durable.head_digest),
            sender,
            "shows another round's lock",
        )

    def _take_statement(
        self, state: pb.RoundState, sender: str, signed: pb.Signed
    ) -> list[tuple[int, str]]:
        here = self._here
        if not signed.ByteSize():
            return []
        kind = Kind.STATEMENT
        statement = read(here.keys, kind, pb.Statement, signed, here.manifest, past=True)
        must_be(signed.site == here.site, sender, "remembers another's statement")
        if statement.round != here.round:
            return []
        _add_version(state, statement.manifest_version)
        attempt = statement.attempt
        if statement.kind == pb.SUM and attempt > stated_last(state):
            state.stated.CopyFrom(signed)
        count_draw(state, EncodedStatement.parse(signed.body))
        newest = max([here.durable.promised, *map(attempt_of, state.statements)])
        known = [one.body for one in state.statements]
        if signed.body in known or attempt < newest:
            return []
        # Of one attempt, a question and a sum: those of earlier ones bind nobody now.
        of_it = [one for one in state.statements if attempt_of(one) == attempt]
        del state.statements[:]
        state.statements.extend([*of_it, signed])
        return [(attempt, f"signed a statement in attempt {attempt}")]


def _is_hidden(before: pb.RoundState, answer: pb.RoundState) -> bool:
    """Whether the promise that we go by says less than an earlier one, told of late."""
    promise = pb.Promise.FromString(before.promise.promise.body)
    locked = promise.lock.attempt + 1 if promise.HasField("lock") else 0
    summed = promise.stated.attempt + 1 if promise.HasField("stated") else 0
    # A lock of this attempt was voted for behind the promise.
    hides_lock = locked < answer.lock_named <= promise.attempt
    return hides_lock or summed < answer.sum_named <= promise.attempt


def _add_version(state: pb.RoundState, version: int) -> None:
    state.signed_under[:] = sorted({*state.signed_under, version})[-MANIFESTS_A_ROUND:]


def stated_last(state: pb.RoundState) -> int:
    """The attempt of the last new sum; -1: there is none."""
    return attempt_of(state.stated) if state.stated.body else -1


def certified_in(lock: pb.Lock) -> int:
    """The attempt that locks are ordered by."""
    return EncodedStatement.parse(lock.certificate.statement).message.attempt


def attempt_of(statement: pb.Signed) -> int:
    """The attempt that a statement was signed in."""
    return pb.Statement.FromString(statement.body).attempt


def is_fresh(known: EncodedStatement) -> bool:
    """Whether it is of integers that were drawn for it: a sum, or products that may tell one."""
    statement = known.message
    return statement.kind != pb.RESTATED and statement.plan.draw == statement.attempt


def count_draw(state: pb.RoundState, known: EncodedStatement) -> None:
    """Once an attempt, whatever is stated in it."""
    if not is_fresh(known):
        return
    attempt = known.message.attempt
    of_it = [one for one in state.drawn if one.attempt == attempt]
    drawn = of_it[0] if of_it else state.drawn.add(attempt=attempt)
    drawn.sites[:] = sorted({*drawn.sites, *known.contributors})
