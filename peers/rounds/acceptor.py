"""One attempt as every site sees it: bundle, statement, certificate, proof, vote. PURE.

Also sites that do not train take part in all of it; what a participant does
beside is peers/attempts/participation.py.
"""

from __future__ import annotations

from dataclasses import replace

from peers.attempts import effects as do
from peers.attempts.bundle import Bundle, Ground, PlanFails, derive_plan, read_bundle
from peers.attempts.modes import mode_of
from peers.attempts.participation import (
    Participation,
    check_ground,
    check_statement,
    plan_objection,
)
from peers.attempts.scale import read_scale
from peers.attempts.statement import (
    EncodedStatement,
    HeldLock,
    read_certificate,
    read_lock,
    value_of,
)
from peers.plans import policy
from peers.rounds.adoption import as_signed, sources
from peers.rounds.recall import Recall, attempt_of, count_draw, is_fresh
from peers.rounds.replica import Replica
from peers.rounds.run_in_force import RunInForce
from peers.wire.certificates import sign_vote
from peers.wire.errors import LocalProtocolError, RemoteProtocolError
from peers.wire.manifest import coordinator_of
from peers.wire.messages import one_line
from peers.wire.signing import (
    Kind,
    must_be,
    name_of,
    read,
    sign,
    sign_bytes,
    signature_of,
    signed_by,
    verify,
)
from proto import federation_pb2 as pb

# Sums of other sets, drawn anew, each tell a little of a site. A liar that leads can have
# one made whenever it is its turn, and commit none: after so many somebody must look.
MOST_DRAWS = 8

TOO_MANY_DRAWS = (
    f"its update is in {MOST_DRAWS} sums of this round, and none was committed: somebody may be "
    "collecting them; find out why attempts fail, then at every site fedctl site forget-round "
    "--sums"
)
OTHER_RUN = "take part: another run is in force here, or the one of this attempt was stopped"
RESTARTED = "this site was started while the attempt was under way: it signs nothing in it"


class Acceptor:
    """A site in an attempt, from the promises that it rests on to its vote."""

    def __init__(self, here: Replica, in_force: RunInForce, recall: Recall) -> None:
        self._here = here
        self._in_force = in_force
        self._recall = recall

    def make_promise(self, ground: Ground, *, tried: int) -> pb.Promised:
        """What we know, have and can contribute, signed."""
        here = self._here
        if here.durable.signed_run is None:
            raise AssertionError("no run, no promise")
        state, situation, objection = here.durable.state, here.situation, self._objection()
        promise = pb.Promise(
            federation_id=ground.federation_id,
            manifest_digest=ground.manifest.digest,
            manifest_version=ground.manifest.version,
            round=ground.round,
            attempt=ground.attempt,
            run_digest=name_of(here.durable.signed_run),
            parent_digest=ground.parent_digest,
            shape_digest=here.model.shape_digest,
            num_examples=situation.num_examples,
            willing=situation.willing and not objection,
            reason=one_line(situation.reason or objection),
            complexity=situation.complexity,
            tried=tried,
            incarnation=here.incarnation,
        )
        promised = pb.Promised()
        if (lock := self._recall.held_lock) is not None:
            promise.lock.CopyFrom(lock.name)
            promised.lock.CopyFrom(lock.message)
        if state.HasField("stated") and self._recall.of_round(
            EncodedStatement.parse(state.stated.body)
        ):
            named = pb.Statement.FromString(state.stated.body)
            promise.stated.attempt = named.attempt
            promise.stated.digest = name_of(state.stated)
            promised.stated.CopyFrom(state.stated)
        promised.promise.CopyFrom(sign(here.keys, Kind.PROMISE, promise))
        return promised

    def repeat_promise(self, to: str) -> None:
        """The very bytes that are on our disk, of the latest attempt that we have promised."""
        state = self._here.durable.state
        if state.HasField("promise") and not self._recall.waits and not self._recall.owes(state):
            self._here.emit(do.Send(to, state.promise))

    def on_ended(self, sender: str, message: pb.EndedAttempt) -> None:
        """Only its coordinator ends an attempt; the next one begins a moment later.

        Whoever hears it says so to all: told to one, it would set that one's attempts apart.
        """
        here = self._here
        ended = read(here.keys, Kind.ENDED, pb.Ended, message.ended, here.manifest)
        if ended.federation_id != here.federation_id:
            raise RemoteProtocolError(f"{sender} ends an attempt of another federation")
        if ended.round == here.round + 1 and here.too_early:
            here.too_early = [here.too_early[0], do.MessageReceived(sender, message)]
        if not here.is_current(ended.round, ended.attempt):
            return
        by = message.ended.site
        must_be(by == here.ground.coordinator, by, "ends an attempt that it does not run")
        if here.pace.idle:
            return  # we have left it
        here.part = here.coordination = None
        if here.pace.over:
            return  # others say so as well
        if sender != here.site:
            here.tell_others(message)
        here.progress("failed", message=ended.reason)
        here.pace.ended(ended.attempt, here.now)

    def _objection(self) -> str:
        """Why this site trains in no attempt of this round; empty when it may.

        Told with the promise: whoever would decline the plan is better not in it.
        """
        here = self._here
        run = here.run
        if run is None:
            return ""
        if objection := here.model.objection(here.manifest):
            return objection
        if self._drawn_too_often(here.site):
            return TOO_MANY_DRAWS
        if objection := here.policy.objection(run.plan):
            return objection
        stated = here.durable.state.stated.body
        if stated and here.site in EncodedStatement.parse(stated).contributors:
            return ""  # to make it again is paid for; of another plan we decline what is not
        noise, clip = policy.noise_of_round(run.plan, here.round, here.head_certificate)
        plan = pb.Plan(training=run.plan, noise_multiplier=noise, clip_norm=clip)
        return policy.noise_objection(plan, here.situation.least_multiplier)

    def _drawn_too_often(self, site: str, *, beside: int = -1) -> bool:
        """``beside``: an attempt of which a question, or the certificate, was counted before."""
        drawn = (one for one in self._here.durable.state.drawn if one.attempt != beside)
        return sum(site in one.sites for one in drawn) >= MOST_DRAWS

    # ---- plan, key, train ---------------------------------------------------------

    def on_bundle(self, sender: str, message: pb.Bundle) -> None:
        """The attempt begins: its promises, from which the plan follows."""
        here = self._here
        if here.bundle is not None or self._recall.waits:
            return  # before we know what we have said we say nothing; it comes with the state again
        bundle = read_bundle(message, here.ground, here.keys, here.manifests.of_round)
        for signed in message.promises:
            here.note(pb.TWO_PROMISES, signed)
        if message.HasField("stated"):
            here.note(pb.TWO_STATEMENTS, message.stated)
        gone = bundle.lock is None and message.attempt <= here.left
        if gone or self._is_of_another_run(bundle):
            lost = pb.AttemptFailed(round=here.round, attempt=message.attempt, reason=OTHER_RUN)
            here.emit(do.Send(sender, lost))
            here.progress("waiting", message=f"{here.site} could not {OTHER_RUN}")
            return
        here.bundle = bundle
        for site, promise in sorted(bundle.promises.items()):
            if promise.reason and not promise.willing and site != here.site:
                here.progress("waiting", message=f"without {site}: {promise.reason}")
        here.got_on("bundle", train=True)
        if bundle.lock is None:
            self._take_plan(sender, bundle)
        if here.state_early is not None:
            self.on_state(sender, here.state_early)

    @property
    def is_over(self) -> bool:
        """Whether what we have begun in this attempt is not to go on any more."""
        return self._here.bundle is not None and self._is_of_another_run(self._here.bundle)

    def _is_of_another_run(self, bundle: Bundle) -> bool:
        """Whether it begins what the run in force does not let go on.

        What was promised by a run that was stopped since may be shown at any later time.
        """
        if bundle.lock is not None:
            return False
        ours = self._here.durable.signed_run
        same = ours is not None and bundle.run_digest == name_of(ours)
        return not self._here.active or not (same or self._in_force.goes_on(bundle.run))

    def _take_plan(self, sender: str, bundle: Bundle) -> None:
        """Derive the plan, and take our part in it unless our policy is against it."""
        here = self._here
        try:
            here.plan = plan = derive_plan(bundle, here.ground)
        except PlanFails as error:
            raise RemoteProtocolError(f"{sender} goes on without a plan: {error}") from error
        if here.site not in [p.site for p in plan.participants]:
            return
        part = Participation(here.site, here.ground, plan, here.keys)
        objection = "" if self._promised_now(bundle) else RESTARTED
        objection = objection or plan_objection(
            plan, here.site, here.durable.head_digest, here.model.shape_digest
        )
        objection = objection or here.policy.objection(plan.training)
        if not plan.scale_exponents:  # what is repeated is paid for
            objection = objection or policy.noise_objection(plan, here.situation.least_multiplier)
        if objection:
            here.emit(*part.decline(objection))
            return
        here.part = part
        here.emit(*part.begin())

    def on_scale(self, sender: str, message: pb.Scale) -> None:
        """What all have told: who does not train needs it, too, to know whom it leaves out."""
        here = self._here
        if not here.from_lead(sender, message.round, message.attempt):
            return
        if here.plan is not None and here.scaled is None:
            here.scaled = read_scale(message, here.plan, here.ground, here.keys)
            if here.part is not None:
                here.emit(*here.part.scale(here.scaled))
            here.got_on("Scale")

    def on_order(self, sender: str, message: do.AttemptMessage) -> None:
        """The attempt gets on, where its plan has such orders; participants have work to do."""
        here = self._here
        if not here.from_lead(sender, message.round, message.attempt):
            return
        orders = mode_of(here.plan).orders if here.plan is not None else {}
        if type(message) not in orders:
            return
        if here.part is not None:
            here.emit(*here.part.ordered(message))
        here.got_on(type(message).__name__, train=orders[type(message)])

    # ---- state -------------------------------------------------------------------

    def _stated_in(self, attempt: int, *, question: bool = False) -> pb.Signed | None:
        """What we have signed in an attempt: the sum, or the question."""
        for signed in self._here.durable.state.statements:
            statement = pb.Statement.FromString(signed.body)
            if (statement.attempt, statement.kind == pb.QUESTION) == (attempt, question):
                return signed
        return None

    @property
    def has_stated(self) -> bool:
        """Whether we have signed the version or the sum of this attempt, and our part with it.

        A sum without us, shown before we have sent our update, does not make us send it; nor
        does what was compared before there is a sum.
        """
        here = self._here
        signed = [EncodedStatement.parse(one.body) for one in here.durable.state.statements]
        sums = [one for one in signed if one.message.kind != pb.QUESTION]
        stated = [one for one in sums if one.message.attempt == here.durable.promised]
        ours = any(here.site in one.contributors for one in stated)
        return bool(stated) and (here.part is None or ours)

    def on_state(self, sender: str, message: pb.State) -> None:
        """Sign what the attempt is about: once, and only what follows from its promises."""
        here = self._here
        if not here.from_lead(sender, message.round, message.attempt) or self._recall.waits:
            return
        if here.bundle is None:
            here.state_early = message
            return
        known = EncodedStatement.parse(message.statement)
        question = known.message.kind == pb.QUESTION
        signed = self._stated_in(message.attempt, question=question)
        if signed is None and not self._promised_now(here.bundle):
            if here.site in here.bundle.promises:
                here.progress("waiting", message=RESTARTED)
            return
        if signed is None:
            self._check_statement(known)
            by = sign_bytes(here.keys, Kind.STATEMENT, known.raw)
            signed = signed_by(known.raw, by)
            here.persist(replace(here.durable, state=self._with_statement(signed, known)))
        must_be(name_of(signed) == known.digest, sender, "makes two statements in one attempt")
        here.got_on(f"state {question}")
        here.progress("state", contributors=known.contributors)
        stated = pb.Stated(
            round=message.round,
            attempt=message.attempt,
            statement_digest=known.digest,
            signature=signature_of(signed),
        )
        here.emit(do.Send(sender, stated))

    def heard_of(self, stating: EncodedStatement, sender: str, message: pb.Stated) -> None:
        """A site that is restored has to be told what it signed, also when nothing came of it."""
        here = self._here
        if message.statement_digest == stating.digest:
            by, manifest = message.signature, here.ground.manifest
            verify(here.keys, Kind.STATEMENT, stating.raw, by, manifest)
            must_be(by.site == sender, sender, "brings another site's signature")
            here.note(pb.TWO_STATEMENTS, signed_by(stating.raw, by))

    def _promised_now(self, bundle: Bundle) -> bool:
        """Whether this attempt goes by a promise that we have made since our start.

        In one that was under way before we may have signed what our disk, put back, does not
        tell, and what only a liar has heard: of two sums of an attempt one may be read.
        """
        here = self._here
        ours = bundle.promises.get(here.site)
        known = here.ground.attempt >= self._recall.since
        return known and ours is not None and ours.incarnation == here.incarnation

    def _check_statement(self, known: EncodedStatement) -> None:
        """Raises RemoteProtocolError, CertificateError unless it is to be signed here."""
        here = self._here
        bundle, lead = here.bundle, here.ground.coordinator
        if bundle is None:
            raise LocalProtocolError("a statement is held against no bundle")
        if known.message.kind == pb.RESTATED:
            check_ground(known.message, here.ground, bundle.digest, bundle.run_digest)
            named = (known.message.root_digest, known.message.model_digest)
            lock = bundle.lock
            locked = (lock.root.digest, lock.applied.model_digest) if lock is not None else None
            must_be(named == locked, lead, "restates another version than its promises name")
            return
        must_be(bundle.lock is None, lead, "states a new sum where one may be committed")
        check_statement(
            known,
            here.ground,
            bundle.digest,
            bundle.run_digest,
            here.plan,
            here.keys,
            here.scaled.left_out if here.scaled is not None else (),
            here.question,
            self._expelled,
        )
        self._check_difference(known)
        if is_fresh(known):
            at = known.message.attempt
            often = [s for s in known.contributors if self._drawn_too_often(s, beside=at)]
            must_be(not often, lead, f"draws a sum of {', '.join(often)} anew: {TOO_MANY_DRAWS}")
        if here.part is not None:
            here.part.check_own(known.message)

    def _check_difference(self, known: EncodedStatement) -> None:
        """Integers that were stated once are never stated in another sum.

        Those of an attempt before our start we may have stated, and do not know it any more.
        """
        state, lead, draw = (
            self._here.durable.state,
            self._here.ground.coordinator,
            known.message.plan.draw,
        )
        if known.message.kind != pb.SUM:
            return
        before = EncodedStatement.parse(state.stated.body) if state.HasField("stated") else None
        if before is None or before.message.plan.draw != draw:
            must_be(
                draw >= self._recall.since,
                lead,
                "states integers of before this site's start again",
            )
            return
        same = (
            before.contributors == known.contributors
            and before.message.scale_exponents == known.message.scale_exponents
            and before.message.plan.full_weight == known.message.plan.full_weight
        )
        must_be(same, lead, "states another sum of integers stated before")

    def _with_statement(self, signed: pb.Signed, known: EncodedStatement) -> pb.RoundState:
        """Beside a sum stands the question of its attempt, in whichever order they came."""
        state = self._with_draw(known)
        of_it = [one for one in state.statements if attempt_of(one) == known.message.attempt]
        del state.statements[:]
        state.statements.extend([*of_it, signed])
        if known.message.kind == pb.SUM:
            state.stated.CopyFrom(signed)
        return state

    def _with_draw(self, known: EncodedStatement) -> pb.RoundState:
        """Each site counts whose updates are in what is drawn: a liar may leave out the victim."""
        state = pb.RoundState()
        state.CopyFrom(self._here.durable.state)
        count_draw(state, known)
        return state

    @property
    def _expelled(self) -> frozenset[str]:
        """Who takes part by the manifest of the attempt, and by our newest does not any more."""
        newest = frozenset(self._here.manifests.newest.enabled_ids)
        return frozenset(self._here.ground.manifest.enabled_ids) - newest

    def on_certified(self, sender: str, message: pb.Certified) -> None:
        """A quorum has signed it: now it is answered, or opened."""
        here = self._here
        if not here.from_lead(sender, message.round, message.attempt):
            return
        keys, manifests = here.keys, here.manifests.of_round
        known = read_certificate(message.certificate, keys, manifests, past=False)
        bundle = here.bundle
        if bundle is None:
            here.got_on(f"certified {known.message.kind}")
            return
        check_ground(known.message, here.ground, bundle.digest, bundle.run_digest)
        question = known.message.kind == pb.QUESTION
        signed = self._stated_in(message.attempt, question=question)
        if signed is None or name_of(signed) != known.digest:
            self._check_statement(known)
            if (state := self._with_draw(known)) != here.durable.state:
                here.persist(replace(here.durable, state=state))
        for signature in message.certificate.signatures:
            here.note(pb.TWO_STATEMENTS, signed_by(known.raw, signature))
        if question:
            here.question = known
        if here.part is not None:
            here.part.check_own(known.message)
            here.emit(*here.part.certified(known))
        here.got_on(f"certified {known.message.kind}")

    # ---- open, vote --------------------------------------------------------------

    def opened(self, part: Participation, event: do.SumOpened) -> None:
        """Of one sum we apply one version; it is on disk, and noted, before it is told."""
        here = self._here
        applied = part.opened(event)
        if applied is None:
            return
        state = pb.RoundState()
        state.CopyFrom(here.durable.state)
        known = [one for one in state.applied if one.root_digest == applied.root_digest]
        if known and known[0] != applied:
            raise LocalProtocolError("one sum was applied twice, with another result")
        if not known:
            state.applied.append(applied)
            here.persist(replace(here.durable, state=state))
        message = pb.AppliedSum(
            round=event.round,
            attempt=event.attempt,
            applied=sign(here.keys, Kind.APPLIED, applied),
        )
        here.emit(do.Send(here.ground.coordinator, message))

    def on_proven(self, sender: str, message: pb.Proven) -> None:
        """A version is proven: get it, keep the proof, vote. It stands by itself."""
        here = self._here
        if message.round != here.round or message.attempt < here.durable.promised:
            return
        if self._recall.waits:
            return
        lock = read_lock(message.lock, here.keys, here.manifests.of_round)
        latest = lock.latest.message
        named = (latest.round, latest.attempt, latest.parent_digest)
        ours = (here.round, message.attempt, here.durable.head_digest)
        must_be(named == ours, sender, "proves a version of another attempt")
        if latest.manifest_version != self._ground_at(message.attempt).manifest.version:
            return  # quorums of another manifest than ours
        for signed in message.lock.proof:
            here.note(pb.TWO_APPLIED, signed)
        here.pending = lock
        here.got_on("proven")
        appliers = [signed.site for signed in message.lock.proof]
        likely = sources(here.site, [*appliers, sender], here.manifest.enabled_ids)
        here.emit(do.FetchVersion(lock.applied.model_digest, likely))

    def _ground_at(self, attempt: int) -> Ground:
        here = self._here
        return here.ground if attempt == here.durable.promised else here.ground_of(attempt)

    def vote(self, lock: HeldLock) -> None:
        """Persist lock and vote, then say it; once an attempt."""
        here = self._here
        attempt, durable = lock.latest.message.attempt, here.durable
        if lock.root.message.round != here.round or attempt < durable.promised:
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
        if state.HasField("vote") and state.vote.body.round == here.round:
            if state.vote.attempt > attempt:
                return
            if state.vote.attempt == attempt:
                if state.vote.body == body:
                    here.emit(do.Send(ground.coordinator, state.vote))
                return
        here.manifests.began()
        state.began = state.began or ground.manifest.version
        state.vote.CopyFrom(sign_vote(here.keys.sign, body, attempt))
        if (own := self._recall.held_lock) is None or own.name.attempt < attempt:
            state.lock.CopyFrom(lock.message)
        if not any(one.root_digest == lock.root.digest for one in state.applied):
            state.applied.append(lock.applied)
        if attempt > durable.promised:  # a vote counts as a promise of its attempt
            here.drop()
            here.ground = ground
            state.ClearField("promise")
        here.persist(replace(durable, promised=attempt, state=state))
        here.got_on("vote")
        here.progress("vote", contributors=tuple(body.contributors))
        here.emit(do.Send(ground.coordinator, state.vote))

    def as_signed(self, commit: pb.Commit) -> pb.Commit:
        """What we tell of a round that was committed: by its sum's plan, if we have signed that."""
        here = self._here
        body, attempt = commit.certificate.body, commit.certificate.attempt
        state = here.durable.state
        signed = [one.body for one in state.statements]
        for lock in (state.lock, here.pending.message if here.pending else pb.Lock()):
            signed += [raw for raw in (lock.root, lock.certificate.statement) if raw]
        sums = {known.digest: known.message.plan for known in map(EncodedStatement.parse, signed)}
        plan = sums.get(body.statement_digest)
        manifest = here.manifests.of_round(body.manifest_version) or here.manifest
        return as_signed(commit, coordinator_of(manifest, body.round, attempt), plan)
