"""What must hold after every step, checked where it could be broken.

Each check looks at the one thing that a step has changed (a write, a message, a sum
that is opened), so that it costs next to nothing and still misses nothing. Sites that
lie are left out of what honest ones must do, and counted wherever their signature could
tip a balance: a version counts as chosen when the honest votes for it and all liars
together are a quorum.

* one version is chosen per round, and only a chosen one is committed; an honest site has
  made it of the sum that is named;
* a certificate is of votes that were cast, by a quorum of its manifest, in one attempt;
* a committed version is on the disks of so many sites that every quorum has it;
* a site votes once per attempt, and only for what is persisted and on its disk;
* a site never goes back: neither its head, nor its promise, nor its lock; nor does it run
  ahead: honest sites enter attempts one after the other;
* a promise is on disk before it is said, has one wording an attempt, and hides no lock;
* a site signs one sum and one question an attempt, on disk before it is said, with the
  plan that follows from the promises and the contributions that sites have made for it;
* an attempt number is used once, by the site whose turn it is;
* a site trains, and sends its update, only by the run that it goes by;
* a sum is opened only when a quorum has signed it; whatever a quorum has signed is of as
  many updates as agreed, no site stands out in it, and of the integers of one draw there
  is one sum; what may have been opened is made again;
* no run takes the place of an honest site's unfinished one and protects less;
* an attempt is ended by its coordinator only, and nobody is accused but who lies.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from peers.attempts import effects as do
from peers.attempts.bundle import bundle_digest, needed_contributors
from peers.plans.policy import weakening
from peers.plans.robust import is_robust
from peers.plans.weights import stands_out
from peers.wire.manifest import FederationManifest
from peers.wire.signing import name_of
from proto import federation_pb2 as pb


class Violation(AssertionError):
    """An invariant is broken: the protocol (or the simulation) has a bug."""


@dataclass
class Disk:
    """What survives a crash of a site."""

    durable: do.Durable
    versions: set[bytes]
    commits: dict[int, pb.Commit] = field(default_factory=dict)


@dataclass(frozen=True)
class Upload:
    """What a site has sent to be summed."""

    digest: bytes
    exponents: tuple[int, ...]
    weight: float


def claim(holds: object, message: str) -> None:
    if not holds:
        raise Violation(message)


def quorum_of(manifest: FederationManifest) -> int:
    """More than (n + f) / 2, whatever the protocol takes for it."""
    return (len(manifest.enabled_ids) + manifest.tolerated) // 2 + 1


class Watch:
    """Sees every write, message and opened sum of a simulated federation."""

    def __init__(
        self, disks: Mapping[str, Disk], manifests: Mapping[int, FederationManifest]
    ) -> None:
        self.committed: dict[int, bytes] = {}
        self.liars: set[str] = set()
        # Whose state goes back beside a liar. What it has told the liar alone, it may promise
        # otherwise; and its vote is its own without the version.
        self.restored: set[str] = set()
        self._disks = disks
        self._manifests = manifests
        self._chosen: dict[int, bytes] = {}
        self._votes: dict[tuple[str, int, int], bytes] = {}  # (site, round, attempt) -> body
        self._tally: dict[tuple[int, int, bytes], set[str]] = defaultdict(set)
        self._promises: dict[tuple[str, int, int], bytes] = {}
        self._stated: dict[tuple[str, int, int, bool], bytes] = {}
        self._signers: dict[bytes, set[str]] = defaultdict(set)
        self._statements: dict[bytes, pb.Statement] = {}
        self._summed: dict[tuple[int, int, bytes], tuple[str, ...]] = {}
        self._told: dict[tuple[str, int], int] = {}  # the latest attempt promised to somebody
        self._prepared: dict[tuple[int, int, int], int] = {}
        self._seen: set[bytes] = set()
        self._front: dict[int, int] = {}  # round -> the latest attempt that an honest site is in
        # The last run that each site has known to be over, and who asked for it.
        self._over: dict[str, tuple[tuple[int, int], str]] = {}
        self._made: dict[bytes, bytes] = {}  # sum -> the version that honest sites make of it
        self._bundles: dict[tuple[bytes, bytes], pb.Bundle] = {}  # by its digest, and its run's
        self._uploads: dict[tuple[str, int, int], Upload] = {}

    # ---- writes ------------------------------------------------------------------

    def persisted(self, site: str, durable: do.Durable, commits: tuple[pb.Commit, ...]) -> None:
        """Before the write: it may only go forward."""
        before = self._disks[site].durable
        claim(durable.head_round >= before.head_round, f"{site}: a site never goes back")
        if durable.head_round == before.head_round:
            claim(durable.head_digest == before.head_digest, f"{site}: its head was exchanged")
            claim(durable.promised >= before.promised, f"{site}: a promise was taken back")
            self._lock_only_rises(site, before.state, durable.state)
            if durable.signed_run != before.signed_run:
                self._run_taken(site, before.run, durable.run, durable.head_round)
                self._stays_over(site, durable)
        else:
            claim(commits, f"{site}: a new head without a certificate")
            last = commits[-1].certificate.body
            claim(
                (last.round, last.model_digest) == (durable.head_round, durable.head_digest),
                f"{site}: a new head that its certificate does not name",
            )
            claim(durable.head_digest in self._disks[site].versions, f"{site}: a head not on disk")
        for commit in commits:
            self._certified(site, commit.certificate)
        if site in self.liars:
            return
        self._not_ahead(site, durable)
        if durable.state.HasField("vote") and durable.state.vote != before.state.vote:
            self._voted(site, durable, durable.state.vote)
        for signed in durable.state.statements:
            self._signed(site, signed)

    def _not_ahead(self, site: str, durable: do.Durable) -> None:
        """It is one attempt at most before every other honest site."""
        round_, promised = durable.head_round + 1, durable.promised
        front = self._front.get(round_, -1)
        claim(promised <= front + 1, f"{site} ran away: attempt {promised}, others at {front}")
        self._front[round_] = max(front, promised)

    def _run_taken(
        self, site: str, before: pb.Run | None, now: pb.Run | None, head_round: int
    ) -> None:
        if site in self.liars or before is None or now is None:
            return
        asked, asks = before.requested_by, now.requested_by
        ended = min(before.target_round, now.target_round) <= head_round
        last = self._over.get(site)  # of a site that was shut out, and counts again
        ended |= last is not None and (before.generation, before.target_round) <= last[0]
        gone = not all(manifest.enabled(asked) for manifest in self._manifests.values())
        if ended or gone or asked == asks or asked in self.liars:
            return
        old, new = before.plan, now.plan
        weaker = (
            new.mode != old.mode
            or new.min_participants < old.min_participants
            or new.max_num_examples > old.max_num_examples
            or (old.robust and new.robust != old.robust)
            or (old.HasField("privacy") and not new.HasField("privacy"))
        )
        claim(not weaker, f"{site}: the run of {asks} takes over a run of {asked}, and is weaker")

    def _stays_over(self, site: str, durable: do.Durable) -> None:
        """Whatever is said again: a site takes up no run below one that was over."""
        run = durable.run
        if site in self.liars or site in self.restored or run is None:
            return
        number = run.generation, run.target_round
        last = self._over.get(site)
        if last is not None and not all(m.enabled(last[1]) for m in self._manifests.values()):
            last = None  # nobody could be told of it
        if run.target_round > durable.head_round:
            claim(last is None or number >= last[0], f"{site}: takes up {number} behind {last}")
        elif last is None or number > last[0]:
            self._over[site] = number, run.requested_by

    def _lock_only_rises(self, site: str, before: pb.RoundState, now: pb.RoundState) -> None:
        if not before.HasField("lock"):
            return
        claim(now.HasField("lock"), f"{site}: forgets what it voted for")
        claim(_attempt_of(now.lock) >= _attempt_of(before.lock), f"{site}: its lock goes back")

    def _signed(self, site: str, signed: pb.Signed) -> None:
        """A statement is about to be signed for others to see."""
        if signed.site != site:
            return
        digest = hashlib.sha256(signed.body).digest()
        if site in self._signers[digest]:
            return
        statement = pb.Statement.FromString(signed.body)
        question = statement.kind == pb.QUESTION
        at = (site, statement.round, statement.attempt, question)
        claim(self._stated.setdefault(at, digest) == digest, f"{site}: signs two statements")
        told = self._told.get((site, statement.round), -1)
        claim(statement.attempt >= told, f"{site}: signs below its promise of attempt {told}")
        self._signers[digest].add(site)
        self._statements[digest] = statement
        self._over_the_highest_lock(site, statement)
        if statement.kind != pb.RESTATED:
            self._follows(site, statement)
        if self._is_certain(digest) and statement.kind == pb.SUM:
            self._hides_each(statement)
            self._drawn_once(statement)
            self._made_again(statement)

    def _is_certain(self, digest: bytes) -> bool:
        manifest = self._manifests[self._statements[digest].manifest_version]
        signers = (self._signers[digest] | self.liars).intersection(manifest.enabled_ids)
        return len(signers) >= quorum_of(manifest)

    def _over_the_highest_lock(self, site: str, statement: pb.Statement) -> None:
        """What may be committed is stated again: what the highest lock of the promises names."""
        claim(_ground_of(statement) in self._bundles, f"{site}: a statement that nothing bears")
        promises = _promises_of(self._bundles[_ground_of(statement)])
        locks = [one.lock for one in promises.values() if one.HasField("lock")]
        latest = max((lock.attempt for lock in locks), default=-1)
        highest = [lock for lock in locks if lock.attempt == latest]
        states = (statement.root_digest, statement.model_digest)
        right = any((lock.root_digest, lock.model_digest) == states for lock in highest)
        right = right if locks else statement.kind != pb.RESTATED
        at = f"{statement.round}.{statement.attempt}"
        claim(right, f"{site}: states over the lock of {latest} in {at}")

    def _follows(self, site: str, statement: pb.Statement) -> None:
        """A sum is planned by what was promised, and of what was sent for it."""
        plan, at = statement.plan, (statement.round, statement.attempt)
        if plan.draw == statement.attempt:
            self._planned(site, plan, self._bundles[_ground_of(statement)])
        examples = {one.site: one.num_examples for one in plan.participants}
        for signed in statement.contributions:
            if signed.site in self.liars:
                continue
            told = pb.Contribution.FromString(signed.body)
            sent = self._uploads.get((signed.site, *at))
            weight = examples[signed.site] / plan.full_weight
            right = Upload(told.upload_digest, tuple(statement.scale_exponents), weight)
            claim(sent == right, f"{site}: states a contribution that {signed.site} has not made")

    def _planned(self, site: str, plan: pb.Plan, bundle: pb.Bundle) -> None:
        promises = _promises_of(bundle)
        run = pb.Run.FromString(bundle.run.body)
        claim(plan.training == run.plan, f"{site}: a plan that no run has asked for")
        most = max(one.num_examples for one in plan.participants)
        claim(plan.full_weight == most, f"{site}: nobody weighs 1")
        for one in plan.participants:
            promise = promises.get(one.site)
            willing = promise is not None and promise.willing
            claim(willing, f"{site}: {one.site} takes part and has not promised to")
            told = promise.num_examples if promise is not None else 0
            right = min(told, run.plan.max_num_examples, most)
            claim(one.num_examples == right, f"{site}: {one.site} weighs not what it has promised")

    def _made_again(self, statement: pb.Statement) -> None:
        """A sum that may have been opened is made again as long as those in it are there."""
        if statement.plan.draw != statement.attempt:
            return
        bundle = self._bundles[_ground_of(statement)]
        promises = _promises_of(bundle)
        named = [one.stated for one in promises.values() if one.HasField("stated")]
        latest = max((name.attempt for name in named), default=-1)
        digests = {name.digest for name in named if name.attempt == latest}
        digest = digests.pop() if len(digests) == 1 else b""
        if digest not in self._statements:  # none, or one that only a liar has signed
            return
        tried = sum(promise.tried > latest for promise in promises.values())
        before = self._statements[digest]
        if weakening(before.plan.training, pb.Run.FromString(bundle.run.body).plan):
            return  # that run protects more
        if is_robust(before.plan.training):
            return  # what was compared is not what is uploaded again
        in_it = [one.site for one in before.contributions]
        here = all(site in promises and promises[site].willing for site in in_it)
        manifest = self._manifests[statement.manifest_version]
        due = here and tried <= manifest.tolerated
        at = f"{statement.round}.{statement.attempt}"
        claim(not due, f"the sum of {latest} is drawn anew in {at}, with all of {in_it} there")

    def _hides_each(self, statement: pb.Statement) -> None:
        """From now on a liar can have it opened."""
        sites = [one.site for one in statement.contributions]
        examples = {one.site: one.num_examples for one in statement.plan.participants}
        at = f"{statement.round}.{statement.attempt}"
        least = needed_contributors(statement.plan)
        claim(len(sites) >= least, f"{at}: a sum of {len(sites)} updates may be opened")
        alone = stands_out([examples[one] for one in sites], statement.plan.faulty_sites)
        claim(not alone, f"{at}: a sum of one site, nearly, may be opened")

    def _drawn_once(self, statement: pb.Statement) -> None:
        """Two sums of the same integers would tell the difference."""
        sites = tuple(one.site for one in statement.contributions)
        drawn = (statement.round, statement.plan.draw, statement.parent_digest)
        known = self._summed.setdefault(drawn, sites)
        claim(known == sites, f"round {drawn[0]}: two sums of one draw: {known} and {sites}")

    def _voted(self, site: str, durable: do.Durable, vote: pb.Vote) -> None:
        """A vote comes into being: it is for what is on disk, once, and breaks no promise."""
        body, attempt = vote.body, vote.attempt
        disk = self._disks[site]
        at = f"{site} in {body.round}.{attempt}"
        here = body.model_digest in disk.versions or site in self.restored
        claim(here, f"{at}: a vote means, it is on my disk")
        lock = durable.state.lock
        claim(_attempt_of(lock) >= attempt, f"{at}: a vote without the lock that it means")
        key = body.SerializeToString(deterministic=True)
        cast = (site, body.round, attempt) in self._votes
        known = self._votes.setdefault((site, body.round, attempt), key)
        claim(known == key, f"{at}: a site votes once")
        if cast:
            return  # a site whose state went back is told of its own, and of what it promised since
        told = self._told.get((site, body.round), -1)
        claim(attempt >= told, f"{at}: breaks its promise of attempt {told}")
        self._told[site, body.round] = attempt
        claim(durable.promised >= attempt, f"{at}: a vote that promises nothing")
        made = self._made.get(body.statement_digest)
        claim(made == body.model_digest, f"{at}: a version that no honest site has made")
        voters = self._tally[body.round, attempt, key]
        voters.add(site)
        manifest = self._manifests[body.manifest_version]
        if len((voters | self.liars).intersection(manifest.enabled_ids)) >= quorum_of(manifest):
            known = self._chosen.setdefault(body.round, body.model_digest)
            claim(known == body.model_digest, f"two versions of round {body.round} are chosen")

    def _certified(self, site: str, certificate: pb.Certificate) -> None:
        """The votes were cast, all in this attempt, by a quorum of the manifest."""
        raw = certificate.SerializeToString(deterministic=True)
        if raw in self._seen:
            return
        self._seen.add(raw)
        body = certificate.body
        key = body.SerializeToString(deterministic=True)
        manifest = self._manifests[body.manifest_version]
        voters = {vote.site for vote in certificate.votes}
        claim(len(voters) == len(certificate.votes), f"round {body.round}: a vote counts twice")
        self._of_a_quorum(certificate, manifest)
        for voter in voters - self.liars:
            cast = self._votes.get((voter, body.round, certificate.attempt))
            claim(cast == key, f"round {body.round}: {voter} never cast the vote certified")
        known = self.committed.setdefault(body.round, body.model_digest)
        claim(known == body.model_digest, f"two versions of round {body.round}, one at {site}")
        without = sum(
            body.model_digest not in self._disks[site].versions for site in manifest.enabled_ids
        )
        claim(without < quorum_of(manifest), f"round {body.round}: a quorum lacks the version")

    def _of_a_quorum(self, certificate: pb.Certificate, manifest: FederationManifest) -> None:
        enough = len(certificate.votes) >= quorum_of(manifest)
        claim(enough, f"round {certificate.body.round}: certified by too few")

    # ---- messages ----------------------------------------------------------------

    def sent(self, site: str, body: do.Body, step: int) -> None:
        """A message leaves a site; ``step`` numbers the step that wished for it."""
        if site in self.liars:
            return
        match body:
            case pb.Promised():
                if body.promise.site == site:
                    self._promise_sent(site, body)
            case pb.Stated():
                claim(
                    site in self._signers[body.statement_digest],
                    f"{site}: signs a statement that it has not persisted",
                )
            case pb.AppliedSum():
                applied = pb.Applied.FromString(body.applied.body)
                durable = self._disks[site].durable
                over = durable.head_round >= body.round
                noted = applied in durable.state.applied
                claim(over or noted, f"{site}: a version is told before it is on disk")
            case pb.Prepare():
                durable = self._disks[site].durable
                claim(
                    durable.promised >= body.attempt or durable.head_round >= body.round,
                    f"{site}: prepares an attempt that it has not persisted",
                )
                turn = (body.round, body.attempt, body.manifest_version)
                claim(
                    self._prepared.setdefault(turn, step) == step,
                    f"{site}: attempt {body.round}.{body.attempt} is used twice",
                )
                self._promise_sent(site, body.promise)
            case pb.Vote():
                state = self._disks[site].durable.state
                told = (site, body.body.round, body.attempt) in self._votes
                claim(told or state.vote == body, f"{site}: persisted before it is said")

    def _promise_sent(self, site: str, promised: pb.Promised) -> None:
        promise = pb.Promise.FromString(promised.promise.body)
        durable = self._disks[site].durable
        at = f"{promise.round}.{promise.attempt}"
        if durable.head_round + 1 == promise.round:
            claim(
                durable.promised >= promise.attempt,
                f"{site}: promised {at} before it was persisted",
            )
            self._hides_no_lock(site, promise, durable)
        key, latest = (site, promise.round, promise.attempt), (site, promise.round)
        told = self._told.get(latest, -1)
        # Of the attempt that it has voted in it may be said later: it was made before.
        below = key not in self._promises and promise.attempt < told
        claim(not below, f"{site}: promises {at} below attempt {told}")
        promise.incarnation = b""  # whose state went back may promise the same again
        body = promise.SerializeToString(deterministic=True)
        said = self._promises.setdefault(key, body)
        same = said == body or site in self.restored
        claim(same, f"{site}: two promises of {at}")
        self._told[latest] = max(told, promise.attempt)

    def _hides_no_lock(self, site: str, promise: pb.Promise, durable: do.Durable) -> None:
        lock = _attempt_of(durable.state.lock) if durable.state.HasField("lock") else -1
        named = promise.lock.attempt if promise.HasField("lock") else -1
        hides = lock < promise.attempt and named < lock
        at = f"{promise.round}.{promise.attempt}"
        claim(not hides, f"{site}: its promise of {at} hides the lock of {lock}")

    def posted(self, body: do.Body) -> None:
        """Anybody, a liar too, says this."""
        if isinstance(body, pb.Bundle):
            self._bundles.setdefault((bundle_digest(body.promises), name_of(body.run)), body)

    def ended(self, site: str, by: str, coordinator: str) -> None:
        """A site takes it that the attempt that it is in is over."""
        claim(by == coordinator, f"{site}: {by} ends an attempt of {coordinator}")

    # ---- sums --------------------------------------------------------------------

    def opens(self, site: str, root_digest: bytes) -> None:
        """A site is about to open a sum."""
        if site in self.liars:
            return
        known = root_digest in self._statements
        claim(known and self._is_certain(root_digest), f"{site}: opens what no quorum signed")

    def answers(
        self, site: str, kind: pb.StatementKind.ValueType, at: tuple[int, int], of: tuple[str, ...]
    ) -> None:
        """A site is about to open its shares, or to decrypt dot products."""
        certain = any(
            (one.kind, one.round, one.attempt) == (kind, *at)
            and tuple(signed.site for signed in one.contributions) == of
            and self._is_certain(digest)
            for digest, one in self._statements.items()
        )
        claim(certain or site in self.liars, f"{site}: opens what no quorum signed")

    def begins_part(self, site: str, plan: pb.Plan) -> None:
        """A site is about to train, or to hide and send its update."""
        durable = self._disks[site].durable
        run = durable.run
        under_way = run is not None and run.target_round > durable.head_round
        right = under_way and run is not None and not weakening(plan.training, run.plan)
        claim(right or site in self.liars, f"{site}: has a part by no run that is in force")

    def uploaded(self, site: str, round_: int, attempt: int, upload: Upload) -> None:
        """A site sends its update."""
        self._uploads[site, round_, attempt] = upload

    def made(self, site: str, root_digest: bytes, model_digest: bytes) -> None:
        """A site has made a version of a sum."""
        if site not in self.liars:
            known = self._made.setdefault(root_digest, model_digest)
            claim(known == model_digest, f"{site}: makes another version of one sum")

    def statement(self, digest: bytes) -> pb.Statement:
        """One that an honest site has signed."""
        return self._statements[digest]

    def accused(self, site: str, whom: str) -> None:
        """A site keeps evidence against another."""
        liar = whom in self.liars | self.restored
        claim(liar, f"{site}: accuses {whom}, which is honest")


def _ground_of(statement: pb.Statement) -> tuple[bytes, bytes]:
    return statement.bundle_digest, statement.run_digest


def _promises_of(bundle: pb.Bundle) -> dict[str, pb.Promise]:
    return {one.site: pb.Promise.FromString(one.body) for one in bundle.promises}


def _attempt_of(lock: pb.Lock) -> int:
    return pb.Statement.FromString(lock.certificate.statement).attempt
