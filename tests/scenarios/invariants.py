"""What must hold after every step, checked where it could be broken.

Each check looks at the one thing that a step has changed (a write, a message, a sum
that is opened), so that it costs next to nothing and still misses nothing. Sites that
lie are left out of what honest ones must do, and counted wherever their signature could
tip a balance: a version counts as chosen when the honest votes for it and all liars
together are a quorum.

* one version is chosen per round, and only a chosen one is committed;
* a certificate is of votes that were cast, by a quorum of its manifest, in one attempt;
* a committed version is on the disks of so many sites that every quorum has it;
* a site votes once per attempt, and only for what is persisted and on its disk;
* a site never goes back: neither its head, nor its promise, nor its lock;
* a promise is on disk before it is said, has one wording an attempt, and hides no lock;
* a site signs one sum and one question an attempt, on disk before it is said;
* an attempt number is used once, by the site whose turn it is;
* a sum is opened only when a quorum has signed it, is of as many updates as agreed, and
  of the integers of one draw there is one sum;
* nobody is accused but who lies.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from peers import effects as do
from peers.bundle import needed_contributors, too_dominant
from peers.manifest import FederationManifest
from proto import federation_pb2 as pb


class Violation(AssertionError):
    """An invariant is broken: the protocol (or the simulation) has a bug."""


@dataclass
class Disk:
    """What survives a crash of a site."""

    durable: do.Durable
    versions: set[bytes]
    commits: dict[int, pb.Commit] = field(default_factory=dict)


def claim(holds: object, message: str) -> None:
    if not holds:
        raise Violation(message)


class Watch:
    """Sees every write, message and opened sum of a simulated federation."""

    def __init__(
        self, disks: Mapping[str, Disk], manifests: Mapping[int, FederationManifest]
    ) -> None:
        self.committed: dict[int, bytes] = {}
        self.liars: set[str] = set()
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

    # ---- writes ------------------------------------------------------------------

    def persisted(self, site: str, durable: do.Durable, commits: tuple[pb.Commit, ...]) -> None:
        """Before the write: it may only go forward."""
        before = self._disks[site].durable
        claim(durable.head_round >= before.head_round, f"{site}: a site never goes back")
        if durable.head_round == before.head_round:
            claim(durable.head_digest == before.head_digest, f"{site}: its head was exchanged")
            claim(durable.promised >= before.promised, f"{site}: a promise was taken back")
            self._lock_only_rises(site, before.state, durable.state)
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
        if durable.state.HasField("vote") and durable.state.vote != before.state.vote:
            self._voted(site, durable, durable.state.vote)
        for signed in durable.state.statements:
            self._signed(site, signed)

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
        if self._is_certain(digest) and statement.kind == pb.SUM:
            self._drawn_once(statement)

    def _is_certain(self, digest: bytes) -> bool:
        manifest = self._manifests[self._statements[digest].manifest_version]
        signers = (self._signers[digest] | self.liars).intersection(manifest.enabled_ids)
        return len(signers) >= manifest.quorum

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
        claim(body.model_digest in disk.versions, f"{at}: a vote means, it is on my disk")
        lock = durable.state.lock
        claim(_attempt_of(lock) >= attempt, f"{at}: a vote without the lock that it means")
        key = body.SerializeToString(deterministic=True)
        known = self._votes.setdefault((site, body.round, attempt), key)
        claim(known == key, f"{at}: a site votes once")
        told = self._told.get((site, body.round), -1)
        claim(attempt >= told, f"{at}: breaks its promise of attempt {told}")
        voters = self._tally[body.round, attempt, key]
        voters.add(site)
        manifest = self._manifests[body.manifest_version]
        if len((voters | self.liars).intersection(manifest.enabled_ids)) >= manifest.quorum:
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
        claim(len(voters) >= manifest.quorum, f"round {body.round}: certified by too few")
        for voter in voters - self.liars:
            cast = self._votes.get((voter, body.round, certificate.attempt))
            claim(cast == key, f"round {body.round}: {voter} never cast the vote certified")
        known = self.committed.setdefault(body.round, body.model_digest)
        claim(known == body.model_digest, f"two versions of round {body.round}, one at {site}")
        without = sum(
            body.model_digest not in self._disks[site].versions for site in manifest.enabled_ids
        )
        claim(without < manifest.quorum, f"round {body.round}: a quorum lacks the version")

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
            lock = _attempt_of(durable.state.lock) if durable.state.HasField("lock") else -1
            named = promise.lock.attempt if promise.HasField("lock") else -1
            hides = lock < promise.attempt and named < lock
            claim(not hides, f"{site}: its promise of {at} hides the lock of {lock}")
        key = (site, promise.round, promise.attempt)
        said = self._promises.setdefault(key, promised.promise.body)
        claim(said == promised.promise.body, f"{site}: two promises of {at}")
        latest = (site, promise.round)
        self._told[latest] = max(self._told.get(latest, -1), promise.attempt)

    # ---- sums --------------------------------------------------------------------

    def opens(self, site: str, root_digest: bytes) -> None:
        """A site is about to open a sum."""
        if site in self.liars:
            return
        known = root_digest in self._statements
        claim(known and self._is_certain(root_digest), f"{site}: opens what no quorum signed")
        statement = self._statements[root_digest]
        sites = [one.site for one in statement.contributions]
        least = needed_contributors(statement.plan)
        claim(len(sites) >= least, f"{site}: opens a sum of {len(sites)} updates")
        claim(not too_dominant(statement.plan, sites), f"{site}: opens a sum of one site, nearly")

    def accused(self, site: str, whom: str) -> None:
        """A site keeps evidence against another."""
        claim(whom in self.liars, f"{site}: accuses {whom}, which is honest")


def _attempt_of(lock: pb.Lock) -> int:
    return pb.Statement.FromString(lock.certificate.statement).attempt
