"""A site that lies, in every message and to everybody differently, for `tests.simulation.network`.

It runs the honest machine, so that it is in the right place at the right time, and does
two things beside it. What the machine says is withheld, said to some, said again later,
or said with any field changed, signed anew where the signature is the liar's own. And
everything that it hears is kept, to be put together otherwise: bundles of other promises,
statements of other sums, certificates, proofs and commits of whatever was signed
somewhere. It signs whatever helps; it can't sign for others.
"""

from __future__ import annotations

import hashlib
import random
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from google.protobuf.message import DecodeError

from peers.attempts import effects as do
from peers.attempts.bundle import bundle_digest, read_run
from peers.attempts.statement import EncodedStatement, HeldLock, read_lock, value_of
from peers.wire.certificates import CertificateError, certificate_of, sign_vote
from peers.wire.errors import RemoteProtocolError
from peers.wire.manifest import coordinator_of
from peers.wire.signing import Keys, Kind, name_of, sign, sign_bytes
from proto import federation_pb2 as pb
from tests.simulation.scenarios.spoiler import Spoiler, in_bounds


@dataclass(frozen=True)
class Character:
    """How often it lies in which way: chances a message, and of a scheme a message heard."""

    withhold: float
    change: float
    repeat: float
    scheme: float
    otherwise: float  # of what it states as a coordinator

    @classmethod
    def drawn(cls, chance: random.Random) -> Character:
        """Each liar has its own."""
        return cls(
            withhold=chance.choice((0.0, 0.1, 0.5)),
            change=chance.choice((0.0, 0.05, 0.3)),
            repeat=chance.choice((0.0, 0.1)),
            scheme=chance.choice((0.1, 0.3, 0.6)),
            otherwise=chance.choice((0.0, 0.3, 0.7, 1.0)),
        )


class Liar:
    """One site's lies. ``tell`` sends a message in the liar's name."""

    def __init__(
        self,
        site: str,
        keys: Keys,
        world: Any,
        chance: random.Random,
        character: Character,
    ) -> None:
        self.site = site
        self.lies = 0
        self._keys = keys
        self._world = world
        self._random = chance
        self._character = character
        self._said: list[tuple[str, do.Body]] = []
        self._promises: dict[tuple[int, int], dict[str, pb.Promised]] = defaultdict(dict)
        self._bundles: dict[tuple[int, int], list[pb.Bundle]] = defaultdict(list)
        self._statements: dict[bytes, EncodedStatement] = {}
        self._spoiler = Spoiler(site, keys, world, chance, self._statements)
        self._signatures: dict[bytes, dict[str, pb.Signature]] = defaultdict(dict)
        self._contributions: dict[tuple[int, int], dict[str, pb.Signed]] = defaultdict(dict)
        self._applied: dict[bytes, dict[str, pb.Signed]] = defaultdict(dict)
        self._locks: list[HeldLock] = []
        self._votes: dict[bytes, dict[str, pb.Vote]] = defaultdict(dict)
        self._otherwise: dict[tuple[int, int], list[pb.State]] = defaultdict(list)
        self._run: pb.Run | None = None
        self._runs: dict[bytes, pb.Signed] = {}  # every one that was ever said

    # ---- what its machine says -----------------------------------------------------

    def said(self, to: str, body: do.Body) -> list[tuple[str, do.Body]]:
        """What becomes of a message of its machine's."""
        draw, character = self._random.random, self._character
        self.heard(self.site, body)
        if draw() < character.withhold:
            self.lies += 1
            return []
        result: list[tuple[str, do.Body]] = [(to, body)]
        if draw() < character.change:
            changed = self._spoiler.changed(body)
            if changed is not None:
                self.lies += 1
                result = [(to, changed), (to, body)] if draw() < 0.3 else [(to, changed)]
        if isinstance(body, pb.State) and draw() < character.otherwise:
            other = self._stated_otherwise(body)
            if other is not None:
                self.lies += 1
                result = [(to, other), (to, body)] if draw() < 0.5 else [(to, other)]
        if draw() < character.repeat and self._said:
            result.append((to, self._random.choice(self._said)[1]))
        if len(self._said) < 300:
            self._said.append((to, body))
        return result

    def _stated_otherwise(self, body: pb.State) -> pb.State | None:
        """One other statement an attempt, or a few, in place of what its machine has summed."""
        at = (body.round, body.attempt)
        known = self._otherwise[at]
        if not known or self._random.random() < 0.2:
            statement = pb.Statement.FromString(body.statement)
            self._alter(statement, at)
            raw = statement.SerializeToString(deterministic=True)
            other = pb.State(round=at[0], attempt=at[1], statement=raw)
            if not in_bounds(statement) or not in_bounds(other):
                return None
            self._keep_statement(raw)
            known.append(other)
        return self._random.choice(known)

    # ---- what it hears ---------------------------------------------------------------

    def heard(self, sender: str, body: do.Body) -> None:
        """Keep what is of use."""
        match body:
            case pb.Promised():
                self._keep_promise(body)
            case pb.Prepare():
                self._keep_promise(body.promise)
                self._keep_run(body.run)
            case pb.RunWish():
                self._keep_run(body.over)
                self._keep_run(body.run)
            case pb.Bundle():
                at = (body.round, body.attempt)
                self._bundles[at].append(body)
                for signed in body.promises:
                    self._promises[at].setdefault(signed.site, pb.Promised(promise=signed))
            case pb.Contributed():
                at = (body.round, body.attempt)
                self._contributions[at][body.contribution.site] = body.contribution
            case pb.State():
                self._keep_statement(body.statement)
            case pb.Stated():
                self._signatures[body.statement_digest][sender] = body.signature
                if self._random.random() < self._character.scheme:
                    self._sign_everything()
                    self._show_certificate(body.statement_digest, self._others())
            case pb.Certified():
                self._keep_certificate(body.certificate)
            case pb.AppliedSum():
                self._keep_applied(body.applied)
            case pb.Proven():
                self._keep_certificate(body.lock.certificate)
                for signed in body.lock.proof:
                    self._keep_applied(signed)
                self._keep_lock(body.lock)
            case pb.Vote():
                key = body.body.SerializeToString(deterministic=True) + b"%d" % body.attempt
                self._votes[key][body.site] = body

    def _keep_promise(self, promised: pb.Promised) -> None:
        try:
            promise = pb.Promise.FromString(promised.promise.body)
        except DecodeError:  # its own garbage
            return
        at = (promise.round, promise.attempt)
        self._promises[at][promised.promise.site] = promised
        if promised.HasField("lock"):
            self._keep_lock(promised.lock)

    def _keep_run(self, signed: pb.Signed) -> None:
        try:
            self._run = read_run(signed, self._keys, self._manifest())
        except (CertificateError, RemoteProtocolError):  # its own garbage
            return
        self._runs.setdefault(signed.body, signed)

    def _keep_statement(self, raw: bytes) -> None:
        try:
            known = EncodedStatement.parse(raw)
        except RemoteProtocolError:
            return
        self._statements[known.digest] = known
        at = (known.message.round, known.message.attempt)
        for signed in known.message.contributions:
            self._contributions[at].setdefault(signed.site, signed)

    def _keep_certificate(self, certificate: pb.StatementCertificate) -> None:
        self._keep_statement(certificate.statement)
        digest = hashlib.sha256(certificate.statement).digest()
        for signature in certificate.signatures:
            self._signatures[digest][signature.site] = signature

    def _keep_applied(self, signed: pb.Signed) -> None:
        try:
            applied = pb.Applied.FromString(signed.body)
        except DecodeError:  # its own garbage
            return
        self._applied[applied.root_digest][signed.site] = signed

    def _keep_lock(self, lock: pb.Lock) -> None:
        try:
            held = read_lock(lock, self._keys, self._world.manifests.get)
        except (CertificateError, RemoteProtocolError):  # its own garbage
            return
        if all(held.name != known.name for known in self._locks):
            self._locks = [*self._locks[-20:], held]

    # ---- schemes -----------------------------------------------------------------------

    def schemes(self) -> None:
        """Perhaps say something of its own."""
        if self._random.random() >= self._character.scheme:
            return
        scheme: Callable[[], None] = self._random.choice(
            (
                self._promise_anything,
                self._bundle_otherwise,
                self._state_otherwise,
                self._state_otherwise,
                self._state_again,
                self._certify,
                self._certify,
                self._sign_everything,
                self._prove,
                self._prove,
                self._vote_for_anything,
                self._commit,
                self._commit,
                self._end,
                self._accuse,
                self._run_of_its_own,
                self._run_again,
            )
        )
        scheme()

    def _others(self) -> list[str]:
        return [name for name in sorted(self._world.disks) if name != self.site]

    def _some(self) -> list[str]:
        others = self._others()
        return self._random.sample(others, self._random.randint(1, len(others)))

    def _tell(self, to: list[str], body: do.Body) -> None:
        if not in_bounds(body):
            return
        self.lies += 1
        for site in to:
            self._world.tell(self.site, site, body)

    @property
    def _at(self) -> tuple[int, int] | None:
        latest = sorted(self._promises)[-6:]
        own = [at for at in latest if coordinator_of(self._manifest(), *at) == self.site]
        if own and self._random.random() < 0.5:
            return self._random.choice(own)
        return self._random.choice(latest) if latest else None

    def _manifest(self) -> Any:
        return self._world.installed[self.site]

    def _promise_anything(self) -> None:
        """Another promise of an attempt, with another lock or none, or of a far one."""
        if (at := self._at) is None:
            return
        model = self._random.choice(sorted(self._promises[at].items()))[1]
        promise = pb.Promise.FromString(model.promise.body)
        promise.attempt = min(
            promise.attempt + self._random.choice((0, 0, 0, 1, 5, 2**31)), 2**32 - 1
        )
        promise.num_examples = self._random.choice((1, 50, 10**6))
        promised = self._own_promise(promise)
        self._tell(self._some(), promised)

    def _own_promise(self, promise: pb.Promise) -> pb.Promised:
        promise.ClearField("lock")
        promise.ClearField("stated")
        promised = pb.Promised()
        locks = [one for one in self._locks if one.name.attempt < promise.attempt]
        if locks and self._random.random() < 0.6:
            lock = self._random.choice(locks)
            promise.lock.CopyFrom(lock.name)
            promised.lock.CopyFrom(lock.message)
        promised.promise.CopyFrom(sign(self._keys, Kind.PROMISE, promise))
        return promised

    def _bundle_otherwise(self) -> None:
        """Other promises of an attempt, above all without those that name the highest lock."""
        if (at := self._at) is None or not self._bundles[at]:
            return
        model = self._random.choice(self._bundles[at])
        bundle = self._bundle_of(at, model)
        self._bundles[at].append(bundle)
        self._tell(self._some(), bundle)

    def _bundle_of(self, at: tuple[int, int], model: pb.Bundle) -> pb.Bundle:
        known = dict(self._promises[at])
        own = known.get(self.site)
        if own is not None:
            known[self.site] = self._own_promise(pb.Promise.FromString(own.promise.body))
        sites = sorted(known)
        self._random.shuffle(sites)
        least = self._manifest().quorum
        chosen = sorted(sites[: self._random.randint(min(least, len(sites)), len(sites))])
        bundle = pb.Bundle(round=at[0], attempt=at[1], run=model.run)
        bundle.promises.extend(known[site].promise for site in chosen)
        locks = [known[site].lock for site in chosen if known[site].HasField("lock")]
        if locks:
            bundle.lock.CopyFrom(self._random.choice(locks))
        return bundle

    def _state_otherwise(self) -> None:
        """Another statement of an attempt: a subset of the sum, or any lock's version."""
        if (at := self._at) is None or not self._bundles[at]:
            return
        bundle = self._random.choice(self._bundles[at])
        drawn = [s for s in self._statements.values() if _place(s) == at]
        statement = pb.Statement()
        if drawn and self._random.random() < 0.6:
            statement.CopyFrom(self._random.choice(drawn).message)
            self._alter(statement, at)
        elif self._locks:
            lock = self._random.choice(self._locks)
            statement.CopyFrom(self._ground(at, bundle))
            statement.kind = pb.RESTATED
            statement.root_digest = lock.root.digest
            statement.model_digest = lock.applied.model_digest
        else:
            return
        statement.bundle_digest = bundle_digest(bundle.promises)
        known = EncodedStatement(statement.SerializeToString(deterministic=True), statement)
        self._statements[known.digest] = known
        to = self._some()
        self._tell(to, bundle)
        self._tell(to, pb.State(round=at[0], attempt=at[1], statement=known.raw))

    def _state_again(self) -> None:
        """What it has stated in an earlier attempt, its own or another's."""
        if self._statements:
            known = self._random.choice(list(self._statements.values()))
            at = _place(known)
            to = self._some()
            for bundle in self._bundles[at][:1]:
                self._tell(to, bundle)
            self._tell(to, pb.State(round=at[0], attempt=at[1], statement=known.raw))

    def _alter(self, statement: pb.Statement, at: tuple[int, int]) -> None:
        if statement.kind == pb.RESTATED:
            if self._locks:
                lock = self._random.choice(self._locks)
                statement.root_digest = lock.root.digest
                statement.model_digest = lock.applied.model_digest
            return
        if self._random.random() < 0.2:
            self._alter_plan(statement.plan)
            return
        known = dict(self._contributions[at])
        sites = sorted(known)
        other = self._contributions[self._random.choice(sorted(self._contributions))]
        if other and sites and self._random.random() < 0.3:  # one of another attempt
            site = self._random.choice(sorted(other))
            known[site] = other[site]
            del statement.contributions[:]
            statement.contributions.extend(known[site] for site in sorted(known))
            return
        self._random.shuffle(sites)
        if sites and self._random.random() < 0.7:
            chosen = sorted(sites[: self._random.randint(1, max(1, len(sites) - 1))])
            del statement.contributions[:]
            statement.contributions.extend(known[site] for site in chosen)
        else:
            statement.sum_digest = self._random.randbytes(32)

    def _alter_plan(self, plan: pb.Plan) -> None:
        """Other weights, other rules, other participants."""
        if not plan.participants:
            return
        choice = self._random.randrange(3)
        if choice == 0:
            one = self._random.choice(list(plan.participants))
            one.num_examples = self._random.choice((1, 1000))
            plan.full_weight = max(p.num_examples for p in plan.participants)
        elif choice == 1:
            plan.training.min_participants = 2
            plan.training.max_num_examples = 10**6
            plan.training.learning_rate *= 2
        else:
            plan.draw = self._random.randint(0, plan.attempt)

    def _ground(self, at: tuple[int, int], bundle: pb.Bundle) -> pb.Statement:
        promise = pb.Promise.FromString(bundle.promises[0].body)
        return pb.Statement(
            federation_id=promise.federation_id,
            manifest_digest=promise.manifest_digest,
            manifest_version=promise.manifest_version,
            round=at[0],
            attempt=at[1],
            parent_digest=promise.parent_digest,
            run_digest=name_of(bundle.run),
        )

    def _sign_everything(self) -> None:
        """Every statement has its signature."""
        for digest, known in self._statements.items():
            if self.site not in self._signatures[digest]:
                signature = sign_bytes(self._keys, Kind.STATEMENT, known.raw)
                self._signatures[digest][self.site] = signature

    def _certificate(self, digest: bytes) -> pb.StatementCertificate | None:
        signatures = self._signatures[digest]
        if digest not in self._statements or len(signatures) < self._manifest().quorum:
            return None
        return pb.StatementCertificate(
            statement=self._statements[digest].raw,
            signatures=[signatures[site] for site in sorted(signatures)],
        )

    def _certify(self) -> None:
        """Whatever a quorum has signed is shown to some."""
        self._sign_everything()
        for digest in list(self._statements):
            if self._random.random() < 0.5:
                self._show_certificate(digest, self._some())

    def _show_certificate(self, digest: bytes, to: list[str]) -> None:
        certificate = self._certificate(digest)
        if certificate is not None:
            at = _place(self._statements[digest])
            self._tell(to, pb.Certified(round=at[0], attempt=at[1], certificate=certificate))

    def _prove(self) -> None:
        """Every sum has its version: one that somebody made, or one that nobody did."""
        self._sign_everything()
        for digest in list(self._statements):
            known, certificate = self._statements[digest], self._certificate(digest)
            if certificate is None or known.message.kind == pb.QUESTION:
                continue
            if self._random.random() < 0.5:
                continue
            if known.message.kind == pb.RESTATED:
                for held in self._locks:
                    if held.root.digest == known.message.root_digest:
                        proof = held.message.proof
                        root = held.root.raw
                        self._show(pb.Lock(certificate=certificate, root=root, proof=proof), known)
                continue
            applied = dict(self._applied[digest])
            told = [one for site, one in applied.items() if site != self.site]
            version = pb.Applied(root_digest=digest, model_digest=self._random.randbytes(32))
            if told and self._random.random() < 0.8:
                version = pb.Applied.FromString(told[0].body)
            else:  # to be fetched, if anybody wants it
                self._world.disks[self.site].versions.add(version.model_digest)
            applied[self.site] = sign(self._keys, Kind.APPLIED, version)
            equal = [s for s in sorted(applied) if applied[s].body == applied[self.site].body]
            self._show(
                pb.Lock(certificate=certificate, proof=[applied[site] for site in equal]), known
            )

    def _show(self, lock: pb.Lock, known: EncodedStatement) -> None:
        self._keep_lock(lock)
        at = _place(known)
        self._tell(self._some(), pb.Proven(round=at[0], attempt=at[1], lock=lock))

    def _vote_for_anything(self) -> None:
        """A vote for each lock, in any attempt; the votes are kept for a commit, too."""
        for held in self._locks:
            root = held.root.message
            manifest = self._manifest()
            body = value_of(held, manifest)
            attempt = held.latest.message.attempt
            vote = sign_vote(self._keys.sign, body, attempt)
            self.heard(self.site, vote)
            lead = coordinator_of(manifest, root.round, attempt)
            if lead != self.site:
                self._tell([lead], vote)

    def _commit(self) -> None:
        """Whatever has votes of a quorum, or all that there are, is committed."""
        self._vote_for_anything()
        for votes in list(self._votes.values()):
            equal = [votes[site] for site in sorted(votes)]
            if self._random.random() < 0.5:
                continue
            certificate = certificate_of(equal[0].attempt, equal, 0)
            self._tell(self._some(), pb.Commit(certificate=certificate))

    def _end(self) -> None:
        """Its attempts are over, or are not, as it likes."""
        if (at := self._at) is None:
            return
        ended = pb.Ended(federation_id="simulated", round=at[0], attempt=at[1], reason="a lie")
        self._tell(self._some(), pb.EndedAttempt(ended=sign(self._keys, Kind.ENDED, ended)))

    def _accuse(self) -> None:
        """Somebody has promised two things, in two attempts or in garbage."""
        signed = [
            known[site].promise
            for known in self._promises.values()
            for site in sorted(known)
            if site != self.site
        ]
        if not signed:
            return
        first = self._random.choice(signed)
        second = self._random.choice([one for one in signed if one.site == first.site])
        if self._random.random() < 0.5:
            promise = pb.Promise.FromString(first.body)
            promise.num_examples += 1
            body = promise.SerializeToString(deterministic=True)
            second = pb.Signed(body=body, site=first.site, signature=first.signature)
        accusation = pb.Evidence(kind=pb.TWO_PROMISES, first=first, second=second)
        self._tell(self._some(), accusation)

    def _run_of_its_own(self) -> None:
        """In place of the one under way, with more rounds and often less protection."""
        if self._run is None or self._run.target_round < 1:
            return
        run = pb.Run()
        run.CopyFrom(self._run)
        run.generation += self._random.choice((1, 1, 2**20, 2**60))
        run.run_id, run.requested_by = f"lie-{self._random.randrange(10**6)}", self.site
        run.target_round += self._random.choice((0, 1, 3))
        plan = run.plan
        plan.mode = self._random.choice((plan.mode, pb.CKKS, pb.MASKING))
        plan.max_num_examples = self._random.choice((plan.max_num_examples, 10**6))
        plan.robust = self._random.choice((plan.robust, pb.ROBUST_NONE))
        if in_bounds(run):
            self._tell(self._some(), pb.RunWish(run=sign(self._keys, Kind.RUN, run)))

    def _run_again(self) -> None:
        """What a person once asked for, stopped or over long ago, and perhaps without that."""
        if not self._runs:
            return
        known = list(self._runs.values())
        over = self._random.choice((None, *known))
        for site in self._some():
            self._tell([site], pb.RunWish(run=self._random.choice(known), over=over))


def _place(known: EncodedStatement) -> tuple[int, int]:
    return known.message.round, known.message.attempt
