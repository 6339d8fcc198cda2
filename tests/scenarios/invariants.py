"""What must hold after every step, checked where it could be broken.

Each check looks at the one thing that a step has changed (a write, a message, a
vote), so that it costs next to nothing and still misses nothing:

* one version is chosen per round, and only a chosen one is committed;
* a certificate is of votes that were cast, by a majority of its manifest, in one attempt;
* a committed version is on the disks of so many sites that every majority has it;
* a site votes once per attempt, and only for what is persisted and on its disk;
* a site never goes back: neither its head, nor its promise, nor what it accepted;
* a promise is on disk before it is said, is never broken, and tells what was accepted;
* an attempt number is used once, by the site whose turn it is;
* only sums of as many updates as agreed are decrypted.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from peers import effects as do
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
    """Sees every write, message and vote of a simulated federation."""

    def __init__(
        self, disks: Mapping[str, Disk], manifests: Mapping[int, FederationManifest]
    ) -> None:
        self.committed: dict[int, bytes] = {}
        self._disks = disks
        self._manifests = manifests
        self._chosen: dict[int, bytes] = {}
        self._votes: dict[tuple[str, int, int], bytes] = {}  # (site, round, attempt) -> body
        self._tally: dict[tuple[int, int, bytes], set[str]] = defaultdict(set)
        self._promised: dict[tuple[str, int], int] = {}  # told to somebody
        self._voted: dict[tuple[str, int], int] = {}
        self._prepared: dict[tuple[int, int, int], int] = {}
        self._minimum: dict[tuple[int, int], int] = {}
        self._summed: dict[tuple[int, int], int] = {}
        self._seen: set[bytes] = set()

    def persisted(self, site: str, durable: do.Durable, commits: tuple[pb.Commit, ...]) -> None:
        """Before the write: it may only go forward."""
        before = self._disks[site].durable
        claim(durable.head_round >= before.head_round, f"{site}: a site never goes back")
        if durable.head_round == before.head_round:
            claim(durable.head_digest == before.head_digest, f"{site}: its head was exchanged")
            claim(durable.promised >= before.promised, f"{site}: a promise was taken back")
            if before.accepted is not None:
                now = durable.accepted
                kept = now is not None and now.attempt >= before.accepted.attempt
                claim(kept, f"{site}: forgets what it accepted")
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

    def _certified(self, site: str, certificate: pb.Certificate) -> None:
        """The votes were cast, all in this attempt, by a majority of the manifest."""
        raw = certificate.SerializeToString(deterministic=True)
        if raw in self._seen:
            return
        self._seen.add(raw)
        body = certificate.body
        key = body.SerializeToString(deterministic=True)
        manifest = self._manifests[body.manifest_version]
        voters = {vote.site for vote in certificate.votes}
        claim(len(voters) == len(certificate.votes), f"round {body.round}: a vote counts twice")
        claim(len(voters) >= manifest.majority, f"round {body.round}: certified by a minority")
        for voter in voters:
            cast = self._votes.get((voter, body.round, certificate.attempt))
            claim(cast == key, f"round {body.round}: {voter} never cast the vote certified")
        known = self.committed.setdefault(body.round, body.model_digest)
        claim(known == body.model_digest, f"two versions of round {body.round}, one at {site}")
        self._recoverable(body)

    def _recoverable(self, body: pb.VoteBody) -> None:
        """Sites that have it on disk intersect every majority."""
        manifest = self._manifests[body.manifest_version]
        without = sum(
            body.model_digest not in self._disks[site].versions for site in manifest.enabled_ids
        )
        claim(without < manifest.majority, f"round {body.round}: a majority lacks the version")

    def sent(self, site: str, body: do.Body, step: int) -> None:
        """A message leaves a site; ``step`` numbers the step that wished for it."""
        match body:
            case pb.Promise():
                self._promise_sent(site, body)
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
            case pb.Plan():
                self._minimum[body.round, body.attempt] = body.training.min_participants
            case pb.Apply():
                self._summed[body.round, body.attempt] = len(set(body.contributors))

    def _promise_sent(self, site: str, promise: pb.Promise) -> None:
        durable = self._disks[site].durable
        if durable.head_round + 1 == promise.round:
            claim(
                durable.promised >= promise.attempt,
                f"{site}: promised {promise.round}.{promise.attempt} before it was persisted",
            )
        voted = self._voted.get((site, promise.round), -1)
        told = promise.accepted.attempt if promise.HasField("accepted") else -1
        claim(told >= voted, f"{site}: its promise hides the vote of {promise.round}.{voted}")
        key = (site, promise.round)
        self._promised[key] = max(self._promised.get(key, -1), promise.attempt)

    def decrypts(self, site: str, round_: int, attempt: int) -> None:
        """A key holder opens a sum."""
        at = (round_, attempt)
        summed, least = self._summed[at], max(2, self._minimum[at])
        claim(summed >= least, f"{site}: decrypts a sum of {summed} updates")

    def voted(self, site: str, attempt: int, body: pb.VoteBody) -> None:
        """A vote comes into being: it is for what is on disk, once, and breaks no promise."""
        disk = self._disks[site]
        at = f"{site} in {body.round}.{attempt}"
        claim(body.model_digest in disk.versions, f"{at}: a vote means, it is on my disk")
        accepted = disk.durable.accepted
        claim(
            accepted is not None and accepted.value == body and accepted.attempt == attempt,
            f"{at}: persisted before it is signed",
        )
        key = body.SerializeToString(deterministic=True)
        claim((site, body.round, attempt) not in self._votes, f"{at}: a site votes once")
        promised = self._promised.get((site, body.round), -1)
        claim(attempt >= promised, f"{at}: breaks its promise of attempt {promised}")
        self._votes[site, body.round, attempt] = key
        self._voted[site, body.round] = max(self._voted.get((site, body.round), -1), attempt)
        voters = self._tally[body.round, attempt, key]
        voters.add(site)
        manifest = self._manifests[body.manifest_version]
        if len(voters.intersection(manifest.enabled_ids)) >= manifest.majority:
            known = self._chosen.setdefault(body.round, key)
            claim(known == key, f"two versions of round {body.round} are chosen")
            self._recoverable(body)
