"""One attempt as every site sees it: bundle, statement, certificate, proof, vote. PURE.

Also sites that do not train take part in all of it, as witnesses; what a participant does
beside is peers/participation.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

from peers import effects as do
from peers import privacy
from peers.adoption import sources
from peers.bundle import (
    Bundle,
    Ground,
    PlanFails,
    derive_plan,
    read_bundle,
)
from peers.certificates import sign_vote
from peers.errors import LocalProtocolError, RemoteProtocolError
from peers.machine import Machine
from peers.messages import one_line
from peers.participation import (
    Order,
    Participation,
    check_ground,
    check_statement,
    plan_objection,
)
from peers.signing import Kind, must_be, name_of, read, sign, sign_bytes, signature_of
from peers.statement import HeldLock, Known, read_certificate, read_lock, value_of
from proto import federation_pb2 as pb

# Sums of other sets, drawn anew, each tell a little of a site. A liar that leads can have
# one made whenever it is its turn, and commit none: after so many somebody must look.
MOST_DRAWS = 8

TOO_MANY_DRAWS = (
    f"its update is in {MOST_DRAWS} sums of this round, and none was committed: somebody may be "
    "collecting them; find out why attempts fail, then fedctl site forget-round"
)


class Attending(Machine):
    """A site in an attempt, from the promises that it rests on to its vote."""

    def _leave(self) -> None:
        """Nothing of an earlier attempt counts any more."""
        self._coordination = self._bundle = self._plan = self._part = None
        self._question = self._pending = self._state_early = None

    def _tried(self) -> int:
        """One more than the attempt of the last sum that could not be made again; 0: none.

        The attempt that we leave should have, and has proven no version.
        """
        state, bundle = self.durable.state, self._bundle
        again = bundle.repeated if bundle is not None else None
        if again is None or again.attempt < state.tried:
            return state.tried
        proven = state.HasField("lock") and self._held_lock.name.attempt == self.durable.promised
        return state.tried if proven else again.attempt + 1

    def _make_promise(self, ground: Ground, *, tried: int) -> pb.Promised:
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
            willing=situation.willing and state.draws < MOST_DRAWS,
            reason=one_line(situation.reason if state.draws < MOST_DRAWS else TOO_MANY_DRAWS),
            complexity=situation.complexity,
            tried=tried,
        )
        promised = pb.Promised()
        # What an older manifest allowed that was left behind before the first round is void.
        if state.HasField("lock") and self._of_round(Known.parse(state.lock.certificate.statement)):
            promise.lock.CopyFrom(self._held_lock.name)
            promised.lock.CopyFrom(state.lock)
        if state.HasField("stated") and self._of_round(Known.parse(state.stated.body)):
            named = pb.Statement.FromString(state.stated.body)
            promise.stated.attempt = named.attempt
            promise.stated.digest = name_of(state.stated)
            promised.stated.CopyFrom(state.stated)
        promised.promise.CopyFrom(sign(self._keys, Kind.PROMISE, promise))
        return promised

    def _of_round(self, known: Known) -> bool:
        return self._manifests.of_round(known.message.manifest_version) is not None

    @property
    def _held_lock(self) -> HeldLock:
        return read_lock(self.durable.state.lock, self._keys, self._manifests.of_round)

    # ---- plan, key, train ---------------------------------------------------------

    def _on_bundle(self, sender: str, message: pb.Bundle) -> None:
        if self._bundle is not None:
            return
        bundle = read_bundle(message, self._ground, self._keys, self._manifests.of_round)
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
        if known.message.kind == pb.QUESTION and self._plan is not None:
            # As many may lie as the run says, less whom all have left out by what it signed.
            left_out = self._part.left_out if self._part is not None else 0
            may_lie = max(0, self._plan.training.byzantine_sites - left_out)
            right = known.message.byzantine_sites == may_lie
            must_be(right, lead, f"compares as if {known.message.byzantine_sites} might lie")
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
            fresh = known.message.plan.draw == known.message.attempt
            state.draws += fresh and self.site in known.contributors
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
        keys, manifests = self._keys, self._manifests.of_round
        known = read_certificate(message.certificate, keys, manifests, past=False)
        bundle = self._bundle
        if bundle is None:
            self._got_on(f"certified {known.message.kind}")
            return
        check_ground(known.message, self._ground, bundle.digest, bundle.run_digest)
        question = known.message.kind == pb.QUESTION
        signed = self._stated_in(message.attempt, question=question)
        if signed is None or name_of(signed) != known.digest:
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
        if self._part is not None:
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
        lock = read_lock(message.lock, self._keys, self._manifests.of_round)
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
            question = self._heard.latest_statement(sender, question=True)
            vote = self._heard.latest_vote(sender)
            if promise is not None:
                answer.promise.CopyFrom(promise)
            if statement is not None:
                answer.statement.CopyFrom(statement)
            if question is not None:
                answer.question.CopyFrom(question)
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
        for signed in (message.statement, message.question):
            if not signed.ByteSize():
                continue
            statement = read(
                self._keys, Kind.STATEMENT, pb.Statement, signed, self.manifest, past=True
            )
            must_be(signed.site == self.site, sender, "remembers another's statement")
            unknown = signed.body not in [one.body for one in state.statements]
            if statement.round == self._round and unknown and statement.attempt >= promised:
                promised = max(promised, statement.attempt)
                forgotten = forgotten or f"signed a statement in attempt {statement.attempt}"
                # Of one attempt, a question and a sum: those of earlier ones bind nobody now.
                of_it = [one for one in state.statements if _attempt(one) == statement.attempt]
                del state.statements[:]
                state.statements.extend([*of_it, signed])
                if statement.kind == pb.SUM:
                    state.stated.CopyFrom(signed)
        if message.HasField("vote") and message.HasField("lock"):
            vote = message.vote
            self._verify_vote(vote)
            must_be(vote.site == self.site, sender, "remembers another's vote")
            later = not state.HasField("vote") or state.vote.attempt < vote.attempt
            if vote.body.round == self._round and later:
                lock = read_lock(message.lock, self._keys, self._manifests.of_round)
                if lock.latest.message.attempt >= vote.attempt:
                    promised = max(promised, vote.attempt)
                    forgotten = f"voted in attempt {vote.attempt}"
                    state.vote.CopyFrom(vote)
                    state.lock.CopyFrom(message.lock)
        if not forgotten:
            return
        self._leave()
        if state.HasField("promise") and _promised_in(state) < promised:
            state.ClearField("promise")  # that of the attempt which we are in now is not known
        self._persist(replace(durable, promised=promised, state=state))
        self._ground = self._ground_of(promised)
        self._emit(do.WentBack(self._round, sender, forgotten))


def _promised_in(state: pb.RoundState) -> int:
    return pb.Promise.FromString(state.promise.promise.body).attempt


def _attempt(statement: pb.Signed) -> int:
    return pb.Statement.FromString(statement.body).attempt
