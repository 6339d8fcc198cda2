"""Each defence of the protocol taken away; the simulation must notice within so many seeds.

A bug is a handful of replaced methods, planted for the length of a `with`. What a rule
defends twice is taken away twice, or nothing would happen. Where an invariant is no more
than the rule itself, said again, it is taken away with it in a second bug: what the rule
is for must then be seen to happen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

from peers.attempts import bundle, ckks, participation, statement, summation
from peers.attempts import effects as do
from peers.attempts.ckks import KeyParticipant
from peers.attempts.coordination import Coordination, Tally
from peers.attempts.participation import Opening
from peers.rounds import acceptor, evidence, protocol, replica, runs
from peers.rounds.acceptor import Acceptor
from peers.rounds.adoption import Adoption
from peers.rounds.manifest_in_force import ManifestInForce
from peers.rounds.protocol import Protocol
from peers.rounds.recall import Recall
from peers.rounds.replica import Replica
from peers.rounds.run_in_force import RunInForce
from peers.wire import signing
from peers.wire.manifest import FederationManifest
from peers.wire.messages import parse
from proto import federation_pb2 as pb
from tests.simulation.network import World
from tests.simulation.scenarios.invariants import Watch
from tests.simulation.scenarios.schedule import Scenario, draw, draw_with_liar

Plant = tuple[type | ModuleType, str, Any]
Drawn = Callable[[int], Scenario]

_INHERITED = object()


@dataclass(frozen=True)
class Bug:
    """What is planted, which invariant catches it, and within how many seeds of what."""

    name: str
    caught_as: str
    seeds: int
    plants: tuple[Plant, ...]
    drawn: Drawn = draw

    @contextmanager
    def planted(self) -> Iterator[None]:
        """The bug is there until the end of the block."""
        for owner, name, _ in self.plants:
            if not hasattr(owner, name):
                raise LookupError(f"{name} is not in {owner}: nothing would be taken away")
        # A class may have it from the one that it is built on.
        kept = [
            (owner, name, owner.__dict__.get(name, _INHERITED)) for owner, name, _ in self.plants
        ]
        for owner, name, replacement in self.plants:
            setattr(owner, name, replacement)
        try:
            yield
        finally:
            for owner, name, original in reversed(kept):
                if original is _INHERITED:
                    delattr(owner, name)
                else:
                    setattr(owner, name, original)


def forget() -> None:
    """What a planted bug kept of another run."""
    _left.clear()


def _nothing(*_: object, **__: object) -> None:
    """A check that is not made."""


def _none(*_: object) -> list[Any]:
    """Of what would be kept, nothing."""
    return []


def _never(*_: object) -> bool:
    return False


def _blind(*checks: str) -> tuple[Plant, ...]:
    """Invariants that are not looked at."""
    return tuple((Watch, name, _nothing) for name in checks)


def _deaf(module: ModuleType, *complaints: str) -> Plant:
    """What a module refuses with one of these complaints, it takes."""

    def must_be(holds: object, sender: str, complaint: str) -> None:
        if not any(part in complaint for part in complaints):
            signing.must_be(holds, sender, complaint)

    return module, "must_be", must_be


# ---- what is on disk before it is said --------------------------------------------

_step = Protocol.step


def _first(body: type) -> Callable[..., Any]:
    """Messages of this kind leave before the writes that they rest on."""

    def step(self: Protocol, event: do.Event, now: float) -> list[do.Effect]:
        def waits(effect: do.Effect) -> bool:
            return not (isinstance(effect, do.Send) and isinstance(effect.body, body))

        return sorted(_step(self, event, now), key=waits)

    return step


_persist = Replica.persist


def _persist_no_promise(self: Replica, durable: do.Durable) -> None:
    """A promise is kept in memory."""
    if durable.promised == self.durable.promised:
        _persist(self, durable)
    else:
        self.durable = durable


_commit = Protocol._commit


def _commit_backwards(self: Protocol, commits: tuple[pb.Commit, ...]) -> None:
    body = commits[-1].certificate.body
    if body.round <= self.head_round:
        last = do.Durable(body.round, body.model_digest, signed_run=self.durable.signed_run)
        self._here.persist(last)
        return
    _commit(self, commits)


def _adopt_anything(self: Adoption, commit: pb.Commit) -> list[do.Effect]:
    self._waiting = (commit,)
    return [do.FetchVersion(commit.certificate.body.model_digest, self._here.manifest.enabled_ids)]


# ---- promises and locks -------------------------------------------------------------

_make_promise = Acceptor.make_promise


def _promise_without_lock(self: Acceptor, *arguments: Any, **named: Any) -> pb.Promised:
    kept = self._here.durable
    state = pb.RoundState()
    state.CopyFrom(kept.state)
    state.ClearField("lock")
    self._here.durable = replace(kept, state=state)
    try:
        return _make_promise(self, *arguments, **named)
    finally:
        self._here.durable = kept


def _no_lock(*_: object) -> None:
    """A bundle's locks are not looked at."""


def _any_lock(
    message: pb.Bundle, _promises: object, keys: Any, manifest_of: Any, _lead: str
) -> statement.HeldLock | None:
    """The lock that the coordinator shows is taken for the highest."""
    return statement.read_lock(message.lock, keys, manifest_of) if message.lock.proof else None


def _named_by_its_root(self: statement.HeldLock) -> pb.LockName:
    return pb.LockName(
        attempt=self.root.message.attempt,
        root_digest=self.root.digest,
        model_digest=self.applied.model_digest,
    )


def _keep_no_lock(self: Replica, durable: do.Durable) -> None:
    """A vote does not keep what it was cast for."""
    durable.state.ClearField("lock")
    _persist(self, durable)


def _farthest(promised: dict[str, int], _tolerated: int) -> int:
    return max(promised.values(), default=-1)


# ---- statements -----------------------------------------------------------------------

_on_state = Acceptor.on_state
_leave = Replica.leave
_left: dict[tuple[int, int, int], tuple[Any, ...]] = {}


def _signs_anew(self: Acceptor, attempt: int, *, question: bool = False) -> None:
    """What was signed in an attempt is not looked up."""


def _forgets_beside_a_question(
    self: Acceptor, signed: pb.Signed, known: statement.EncodedStatement
) -> pb.RoundState:
    """A question begins the attempt anew."""
    state = _with_statement(self, signed, known)
    if known.message.kind == pb.QUESTION:
        del state.statements[:-1]
    return state


def _remember_what_is_left(self: Replica) -> None:
    if self.bundle is not None:
        at = (id(self), self.ground.round, self.ground.attempt)
        _left[at] = (self.ground, self.bundle, self.plan, self.part)
    _leave(self)


def _sign_late(self: Acceptor, sender: str, message: pb.State) -> None:
    """What belongs to an earlier attempt is signed as if no later one were promised."""
    left = _left.get((id(self._here), message.round, message.attempt))
    if left is None or message.attempt >= self._here.durable.promised:
        _on_state(self, sender, message)
        return
    now = (self._here.ground, self._here.bundle, self._here.plan, self._here.part)
    self._here.ground, self._here.bundle, self._here.plan, self._here.part = left
    self._here.is_current = lambda *_: True  # type: ignore[method-assign]
    try:
        _on_state(self, sender, message)
    finally:
        self._here.ground, self._here.bundle, self._here.plan, self._here.part = now
        del self._here.is_current


def _open_at_once(self: Acceptor, sender: str, message: pb.State) -> None:
    """What the coordinator states is opened, whoever signs it."""
    _on_state(self, sender, message)
    if self._here.part is not None and self._here.is_current(message.round, message.attempt):
        self._here.emit(
            *self._here.part.certified(statement.EncodedStatement.parse(message.statement))
        )


def _sign_any_sum(
    known: statement.EncodedStatement, ground: Any, digest: bytes, run: bytes, *_: Any
) -> None:
    participation.check_ground(known.message, ground, digest, run)


def _two_contribute(_plan: pb.Plan) -> int:
    return 2


def _nobody_stands_out(*_: object) -> str:
    return ""


def _as_told(examples: dict[str, int], _tolerated: int) -> dict[str, int]:
    return dict(examples)


def _never_repeated(*_: object) -> None:
    """Each sum is drawn anew."""


# ---- proofs and votes -------------------------------------------------------------------

_on_proven, _vote = Acceptor.on_proven, Acceptor.vote
_voted = Tally.voted


def _prove_by_one(
    proof: Any, root: statement.EncodedStatement, keys: Any, manifest_of: Any
) -> pb.Applied:
    manifest = statement.manifest_named(root.message, manifest_of)
    return signing.read(keys, signing.Kind.APPLIED, pb.Applied, proof[0], manifest, past=True)


def _believe_the_proof(
    proof: Any, _root: statement.EncodedStatement, _keys: Any, _manifest_of: Any
) -> pb.Applied:
    return parse(pb.Applied, proof[0].body)


def _vote_without_version(self: Acceptor, sender: str, message: pb.Proven) -> None:
    _on_proven(self, sender, message)
    if self._here.pending is not None:
        pending, self._here.pending = self._here.pending, None
        self.vote(pending)


def _prove_below_promise(self: Acceptor, sender: str, message: pb.Proven) -> None:
    kept = self._here.durable
    self._here.durable = replace(kept, promised=min(kept.promised, message.attempt))
    try:
        _on_proven(self, sender, message)
    finally:
        self._here.durable = kept


def _vote_below_promise(self: Acceptor, lock: statement.HeldLock) -> None:
    kept = self._here.durable
    attempt = lock.latest.message.attempt
    self._here.durable = replace(kept, promised=min(kept.promised, attempt))
    try:
        _vote(self, lock)
    finally:
        self._here.durable = replace(
            self._here.durable, promised=max(kept.promised, self._here.durable.promised)
        )


def _vote_and_promise_nothing(self: Acceptor, lock: statement.HeldLock) -> None:
    before = self._here.durable.promised
    start = len(self._here.effects)
    _vote(self, lock)
    self._here.durable = replace(self._here.durable, promised=before)
    for at, effect in enumerate(self._here.effects[start:], start):
        if isinstance(effect, do.Persist):
            self._here.effects[at] = do.Persist(replace(effect.durable, promised=before))


def _count_every_vote(self: Tally, vote: pb.Vote, own: str) -> list[pb.Vote]:
    if vote.site in self.votes:
        self.votes[f"{vote.site}+"] = self.votes.pop(vote.site)
    return _voted(self, vote, own)


def _commit_at_once(self: Tally, vote: pb.Vote, own: str) -> list[pb.Vote]:
    _voted(self, vote, own)
    return [self.votes[own]] if own in self.votes else []


def _majority(self: FederationManifest) -> int:
    return len(self.enabled_ids) // 2 + 1


# ---- opening ------------------------------------------------------------------------------

_begin = Opening.begin


def _apply_unproven(self: Opening) -> list[do.Effect]:
    """The answer is not waited for."""
    if isinstance(self.steps, KeyParticipant) and self.steps._told:
        self.steps.opening = self.steps.opening or bytes(8)
    return _begin(self)


def _need_nobody(self: Coordination, count: int, what: str) -> None:
    """A coordinator that goes on with one update."""


# ---- runs, ends, evidence, manifests ----------------------------------------------------------


def _read_unsigned(
    keys: signing.Keys,
    kind: signing.Kind,
    as_a: type[Any],
    signed: pb.Signed,
    manifest: FederationManifest,
    **how: bool,
) -> Any:
    """Whose signature it is that a version was applied, nobody looks at."""
    if kind == signing.Kind.APPLIED:
        return parse(as_a, signed.body)
    return signing.read(keys, kind, as_a, signed, manifest, **how)


def _believe_evidence(evidence_: pb.Evidence, *_: object) -> str:
    return evidence_.first.site


def _no_weakening(*_: object) -> str:
    return ""


_UNVERIFIED = (World, "_verify_certificate", _nothing)

BUGS = (
    # What is said is on disk.
    Bug("promise before persist", "before it was persisted", 20, (
        (Protocol, "step", _first(pb.Promised)),)),
    Bug("prepare before persist", "has not persisted", 20, (
        (Protocol, "step", _first(pb.Prepare)),)),
    Bug("statement before persist", "that it has not persisted", 20, (
        (Protocol, "step", _first(pb.Stated)),)),
    Bug("applied before persist", "told before it is on disk", 20, (
        (Protocol, "step", _first(pb.AppliedSum)),)),
    Bug("vote before persist", "persisted before it is said", 20, (
        (Protocol, "step", _first(pb.Vote)),)),
    Bug("promise in memory", "before it was persisted|has not persisted", 20, (
        (Replica, "persist", _persist_no_promise),)),
    Bug("go back to an older head", "never goes back|taken back", 200, (
        (Protocol, "_commit", _commit_backwards), (Adoption, "committed", _adopt_anything))),
    # Promises and locks.
    Bug("hide the lock", "hides the lock", 200, (
        (Acceptor, "make_promise", _promise_without_lock),)),
    Bug("hide the lock: a fork", "two versions of round", 1000, (
        (Acceptor, "make_promise", _promise_without_lock),
        *_blind("_hides_no_lock", "_over_the_highest_lock", "_made_again"))),
    Bug("vote without a lock", "without the lock", 20, (
        (Replica, "persist", _keep_no_lock),)),
    Bug("a new sum over a lock", "over the lock", 200, (
        (bundle, "_lock_of", _no_lock),)),
    Bug("a new sum over a lock: a fork", "two versions of round", 1000, (
        (bundle, "_lock_of", _no_lock), *_blind("_over_the_highest_lock", "_made_again"))),
    Bug("jump on one promise", "ran away", 50, (
        (replica, "reached", _farthest),), draw_with_liar),
    # Statements.
    Bug("sign after a later promise", "signs below its promise|signs two statements", 500, (
        (Replica, "leave", _remember_what_is_left), (Acceptor, "on_state", _sign_late)),
        draw_with_liar),
    Bug("open before the certificate", "opens what no quorum signed", 20, (
        (Acceptor, "on_state", _open_at_once),)),
    Bug("decrypt a sum of too few", "a sum of . updates", 200, (
        (bundle, "needed_contributors", _two_contribute),
        (participation, "needed_contributors", _two_contribute),
        (summation, "needed_contributors", _two_contribute))),
    Bug("sum whoever stands out", "a sum of one site, nearly", 1000, (
        (participation, "too_dominant", _nobody_stands_out),
        (summation, "too_dominant", _nobody_stands_out),
        (bundle, "clipped", _as_told), *_blind("_follows")), draw_with_liar),
    Bug("draw a stated sum anew", "drawn anew", 300, (
        (bundle, "_to_be_repeated", _never_repeated),)),
    # Proofs and votes.
    Bug("a proof of one", "no honest site has made", 300, (
        (statement, "read_proof", _prove_by_one),), draw_with_liar),
    Bug("a proof by nobody", "no honest site has made", 300, (
        (statement, "read_proof", _believe_the_proof),), draw_with_liar),
    Bug("vote for what is not here", "on my disk", 20, (
        (Acceptor, "on_proven", _vote_without_version),)),
    Bug("vote below the promise", "breaks its promise|taken back", 500, (
        (Acceptor, "on_proven", _prove_below_promise),
        (Acceptor, "vote", _vote_below_promise))),
    Bug("count a vote twice", "a vote counts twice", 100, (
        (Tally, "voted", _count_every_vote), _UNVERIFIED)),
    Bug("commit with too few votes", "certified by too few", 20, (
        (Tally, "voted", _commit_at_once), _UNVERIFIED)),
    Bug("majorities for quorums", "opens what no quorum signed|certified by too few", 20, (
        (FederationManifest, "quorum", property(_majority)),), draw_with_liar),
    # Opening.
    Bug("apply without a proof", "without the proof of its claim", 20, (
        (Opening, "begin", _apply_unproven),)),
    # Runs, ends, evidence, manifests.
    Bug("anybody ends an attempt", "ends an attempt", 100, (
        _deaf(acceptor, "that it does not run"),), draw_with_liar),
    Bug("believe any evidence", "accuses", 50, (
        (evidence, "check_evidence", _believe_evidence),), draw_with_liar),
    Bug("a run that weakens", "takes over a run", 300, (
        (runs, "weakens", _no_weakening),), draw_with_liar),
    Bug("what was stopped begins again", "takes up ", 300, (
        (runs, "last_of_each", _none),), draw_with_liar),
    Bug("a promise outlives its run", "by no run that is in force", 300, (
        (Acceptor, "_is_of_another_run", _never), (Replica, "drop", Replica.leave)),
        draw_with_liar),
)  # fmt: skip

# ---- what is hardly ever drawn, and scripted (scripts.py) ---------------------------------

_read_certificate = statement.read_certificate


def _restated_by_anybody(
    certificate: pb.StatementCertificate, keys: Any, manifest_of: Any, *, past: bool = True
) -> statement.EncodedStatement:
    """What is stated again needs no quorum: it had one before."""
    known = statement.EncodedStatement.parse(certificate.statement)
    if known.message.kind == pb.RESTATED:
        return known
    return _read_certificate(certificate, keys, manifest_of, past=past)


def _vote_again(self: Acceptor, lock: statement.HeldLock) -> None:
    kept = self._here.durable
    state = pb.RoundState()
    state.CopyFrom(kept.state)
    state.ClearField("vote")
    self._here.durable = replace(kept, state=state)
    _vote(self, lock)


_with_statement = Acceptor._with_statement
_take_promise = Recall._take_promise


def _take_a_bare_promise(
    self: Recall, state: pb.RoundState, sender: str, told: pb.Promised
) -> list[tuple[int, str]]:
    """Of what a site has promised it is told the attempt alone."""
    return _take_promise(self, state, sender, pb.Promised(promise=told.promise))


def _ask_while_asking(self: Recall) -> None:
    """Who has been told once is told enough."""
    self.since = 0
    if self.waits:
        self.ask()


_of_round = ManifestInForce.of_round


def _no_older(self: ManifestInForce, version: int) -> FederationManifest | None:
    """Nothing counts that is of before the manifest by which this site promises first."""
    base = self._base
    return None if base is not None and version < base.version else _of_round(self, version)


_tell_others = Replica.tell_others


def _tell_no_end(self: Replica, *bodies: do.Body) -> None:
    """That its coordinator has ended an attempt is that coordinator's to say."""
    _tell_others(self, *(body for body in bodies if not isinstance(body, pb.EndedAttempt)))


def _always(_self: Replica) -> bool:
    return True


_on_prepare = Protocol._on_prepare


def _give_up(self: Protocol, sender: str, _message: pb.Ahead) -> None:
    """An attempt is over when somebody says that its round is."""
    self._synchronizer.fail(f"{sender} is ahead")


def _enter_what_is_prepared(self: Protocol, sender: str, message: pb.Prepare) -> None:
    """The attempt with the higher number is the one to be in."""
    _on_prepare(self, sender, message)
    if message.round == self._here.round and message.attempt > self.durable.promised:
        self._synchronizer.enter(message.attempt)


UNCERTIFIED: tuple[Plant, ...] = (
    (statement, "read_certificate", _restated_by_anybody),
    (acceptor, "read_certificate", _restated_by_anybody),
)
MAJORITY: tuple[Plant, ...] = (
    (FederationManifest, "quorum", property(_majority)),
    *_blind("opens", "_of_a_quorum"))  # fmt: skip
ANY_LOCK: tuple[Plant, ...] = ((bundle, "_lock_of", _any_lock),)
BY_ITS_ROOT: tuple[Plant, ...] = ((statement.HeldLock, "name", property(_named_by_its_root)),)
BY_ITS_ROOT_UNSEEN: tuple[Plant, ...] = (
    *BY_ITS_ROOT, *_blind("_hides_no_lock", "_over_the_highest_lock"))  # fmt: skip
TWO_VOTES: tuple[Plant, ...] = (*UNCERTIFIED, (Acceptor, "vote", _vote_again))
NO_PROMISE: tuple[Plant, ...] = ((Acceptor, "vote", _vote_and_promise_nothing),)
AS_TOLD: tuple[Plant, ...] = ((bundle, "clipped", _as_told),)
TWO_STATEMENTS: tuple[Plant, ...] = ((Acceptor, "_stated_in", _signs_anew),)
QUESTION_FIRST: tuple[Plant, ...] = ((Acceptor, "_with_statement", _forgets_beside_a_question),)
BARE_PROMISE: tuple[Plant, ...] = (
    (Recall, "_take_promise", _take_a_bare_promise),
    (Recall, "_take_lock", lambda *_: []),
    (Recall, "owes", lambda *_: False))  # fmt: skip
ASKED_ONCE: tuple[Plant, ...] = ((Recall, "new_round", _ask_while_asking),)
NEWEST_BASE: tuple[Plant, ...] = (
    (ManifestInForce, "began_under", _nothing),
    (ManifestInForce, "of_round", _no_older))  # fmt: skip
ANOTHER_DIFFERENCE: tuple[Plant, ...] = ((Acceptor, "_check_difference", _nothing),)
ANYBODY: tuple[Plant, ...] = ((participation, "_check_who", _nothing),)
SOMETHING_ELSE: tuple[Plant, ...] = (_deaf(statement, "made for something else"),)
ITS_OWN_PLAN: tuple[Plant, ...] = (
    *SOMETHING_ELSE, _deaf(participation, "states another plan"),
    _deaf(ckks, "states no key"))  # fmt: skip
ANY_PLAN: tuple[Plant, ...] = (*ITS_OWN_PLAN, *ANYBODY)
TWO_DIFFERENT: tuple[Plant, ...] = (*TWO_STATEMENTS, *ANOTHER_DIFFERENCE)
ANOTHER_SUM: tuple[Plant, ...] = (
    *ANOTHER_DIFFERENCE, (participation, "_check_who", _nothing),
    *_blind("_hides_each"))  # fmt: skip
UNPROVEN: tuple[Plant, ...] = ((Opening, "begin", _apply_unproven),)
FARTHEST: tuple[Plant, ...] = ((replica, "reached", _farthest), *_blind("_not_ahead"))
AS_SAID: tuple[Plant, ...] = (
    _deaf(protocol, "brings what another site applied"),
    (protocol, "read", _read_unsigned))  # fmt: skip
BELIEVE_AHEAD: tuple[Plant, ...] = ((Protocol, "_on_ahead", _give_up),)
BELIEVE_CERTIFICATES: tuple[Plant, ...] = (_UNVERIFIED,)
WAITS_FOR_NOBODY: tuple[Plant, ...] = ((Replica, "has_quorum", property(_always)),)
ENDS_FOR_ITSELF: tuple[Plant, ...] = ((Replica, "tell_others", _tell_no_end),)
ENTER_WHEN_PREPARED: tuple[Plant, ...] = (
    (Protocol, "_on_prepare", _enter_what_is_prepared), *_blind("_not_ahead"))  # fmt: skip
WEAKER: tuple[Plant, ...] = ((runs, "weakens", _no_weakening),)
NOTHING_IS_OVER: tuple[Plant, ...] = (
    (runs, "last_of_each", _none),
    (RunInForce, "usual", property(lambda _self: 0)),  # a stop is not numbered above what was told
    *_blind("_stays_over"),
)


@contextmanager
def planted(plants: tuple[Plant, ...]) -> Iterator[None]:
    """As `Bug.planted`."""
    with Bug("", "", 0, plants).planted():
        yield
