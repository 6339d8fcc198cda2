"""A federation of protocol machines on a virtual clock and a seeded network.

    >>> world = World(sites=3, seed=7)
    >>> world.train("a", rounds=2)
    >>> world.run_until_committed(2)
    >>> world.site("b").head_round
    2

Everything that the real driver does is done here without IO: effects are
carried out in order, local work takes a drawn time, messages are delayed,
dropped, duplicated and reordered as `Faults` says. A crash loses everything but
what was persisted. After every step the invariants of the protocol are checked;
a run is a function of its seed.

Signatures are stood in for by a digest with a site's name in it: what the
protocol needs of them is that nobody votes for another, and the transport and
crypto tests hold that with real keys.
"""

from __future__ import annotations

import hashlib
import heapq
import math
import random
import string
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from peers import effects as do
from peers.certificates import CertificateError, vote_payload
from peers.manifest import FederationManifest, ManifestSite
from peers.messages import RemoteProtocolError
from peers.participation import Policy
from peers.protocol import Protocol
from peers.roles import coordinator_of, key_holders
from peers.timing import Timing
from proto import federation_pb2 as pb

FEDERATION = "simulated"
GENESIS = hashlib.sha256(b"genesis").digest()
SHAPE = hashlib.sha256(b"shape").digest()
TIMING = Timing(phase_s=10.0, train_s=60.0, growth=1.5)


@dataclass(frozen=True)
class Faults:
    """Chances a message; seconds of delay."""

    drop: float = 0.0
    duplicate: float = 0.0
    delay_s: tuple[float, float] = (0.001, 0.05)


def plan(min_participants: int = 2) -> pb.TrainingPlan:
    """A training plan; its numbers mean nothing here."""
    return pb.TrainingPlan(
        adapt=pb.HEAD,
        local_epochs=1,
        batch_size=8,
        learning_rate=1e-3,
        temperature=0.05,
        bits=16,
        min_participants=min_participants,
        max_num_examples=1000,
    )


def signature(site: str, vote: pb.Vote) -> bytes:
    return hashlib.sha256(site.encode() + vote_payload(vote.body, vote.attempt)).digest()


@dataclass
class Disk:
    """What survives a crash of a site."""

    durable: do.Durable
    commits: dict[int, pb.Commit] = field(default_factory=dict)
    versions: set[bytes] = field(default_factory=lambda: {GENESIS})


class World:
    """Sites, the network between them, and the clock."""

    def __init__(
        self,
        *,
        sites: int,
        seed: int,
        faults: Faults | None = None,
        min_participants: int | None = None,
        machine: type[Protocol] = Protocol,
    ) -> None:
        names = string.ascii_lowercase[:sites]
        self.manifest = FederationManifest(
            FEDERATION, 1, tuple(ManifestSite(name, f"{name}:1", True) for name in names)
        )
        self.random = random.Random(seed)
        self.faults = faults or Faults()
        self.min_participants = min_participants or min(3, sites)
        self.now = 0.0
        self.transcript: list[str] = []
        self.committed: dict[int, bytes] = {}
        self.votes: dict[tuple[str, int, int], bytes] = {}
        self._machine = machine
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._sequence = 0
        self.disks = {name: Disk(do.Durable(0, GENESIS)) for name in names}
        self.machines: dict[str, Protocol] = {}
        self._generation: dict[str, int] = defaultdict(int)
        for name in names:
            self.start(name)

    # ---- what a test says --------------------------------------------------------

    def site(self, name: str) -> Protocol:
        return self.machines[name]

    def train(self, name: str, rounds: int) -> None:
        """A person at a site asks for more rounds."""
        self._feed(name, do.RunRequested(f"run-{rounds}", rounds, plan(self.min_participants)))

    def crash(self, name: str) -> None:
        """The site loses everything but its disk."""
        self._say(f"{name} crashes")
        self.machines.pop(name, None)
        self._generation[name] += 1

    def start(self, name: str) -> None:
        """The site's daemon starts from its disk."""
        disk = self.disks[name]
        last = disk.commits.get(disk.durable.head_round)
        machine = self._machine(
            site=name,
            federation_id=FEDERATION,
            manifest=self.manifest,
            durable=disk.durable,
            head_certificate=last.certificate if last else None,
            shape_digest=SHAPE,
            shared_values=2,
            unix_ms=lambda: round(self.now * 1000),
            own_certificate=name.encode(),
            policy=Policy(min_participants=2, max_local_epochs=10),
            timing=TIMING,
            verify_vote=self._verify_vote,
            verify_certificate=self._verify_certificate,
        )
        self.machines[name] = machine
        self._feed(name, do.Situation(num_examples=10 + ord(name), willing=True))
        self._carry_out_all(name, machine.start(self.now))
        self._arm(name)

    def run_until_committed(self, round_: int, *, within_s: float = 5_000.0) -> None:
        """Let time pass until every running site has this round; fails after ``within_s``."""
        end = self.now + within_s
        while not all(m.head_round >= round_ for m in self.machines.values()):
            if not self._queue or self.now > end:
                heads = {name: m.head_round for name, m in self.machines.items()}
                raise AssertionError(f"stuck at {heads}, t={self.now:.1f}\n{self.text()}")
            self.step()

    def run_for(self, seconds: float) -> None:
        """Let time pass."""
        end = self.now + seconds
        while self._queue and self._queue[0][0] <= end:
            self.step()
        self.now = end

    def step(self) -> None:
        """The next thing happens."""
        self.now, _, action = heapq.heappop(self._queue)
        action()
        self._check()

    def text(self) -> str:
        """The transcript, its last lines."""
        return "\n".join(self.transcript[-120:])

    # ---- the driver ----------------------------------------------------------------

    def _feed(self, name: str, event: do.Event) -> None:
        machine = self.machines.get(name)
        if machine is None:
            return
        try:
            effects = machine.step(event, self.now)
        except (RemoteProtocolError, CertificateError) as error:
            self._say(f"{name} refuses: {error}")
            return
        self._carry_out_all(name, effects)
        self._arm(name)

    def _arm(self, name: str) -> None:
        due = self.machines[name].next_wakeup()
        if due < math.inf:
            self._later_at(name, max(due, self.now), lambda: self._tick(name))

    def _tick(self, name: str) -> None:
        if self.machines[name].next_wakeup() <= self.now:
            self._feed(name, do.Tick())

    def _carry_out_all(self, name: str, effects: list[do.Effect]) -> None:
        for effect in effects:
            self._carry_out(name, effect)

    def _carry_out(self, name: str, effect: do.Effect) -> None:
        disk = self.disks[name]
        match effect:
            case do.Persist(durable, commits):
                assert durable.head_round >= disk.durable.head_round, "a site never goes back"
                disk.durable = durable
                for commit in commits:
                    disk.commits[commit.certificate.body.round] = commit
            case do.Send(to, body):
                self._send(name, to, body)
            case do.DealKey(deal_plan, coordinator):
                for holder in [*key_holders(deal_plan, coordinator), coordinator]:
                    kind = pb.PUBLIC_CONTEXT if holder == coordinator else pb.SEALED_CONTEXT
                    self._work(name, partial(self._give_key, name, holder, deal_plan, kind))
            case do.Train(train_plan):
                at = (train_plan.round, train_plan.attempt)
                self._work(name, lambda: self._feed(name, do.LocalTrained(*at, (1, 2))))
            case do.EncryptUpdate():
                self._work(name, lambda: self._upload(name, effect))
            case do.AddUpdate(round_, attempt, site):
                self._work(name, lambda: self._feed(name, do.UpdateAdded(round_, attempt, site)))
            case do.FinishSum(round_, attempt):
                self._work(
                    name,
                    lambda: self._feed(name, do.SumFinished(round_, attempt, b"\0" * 32)),
                    longest=0.0,
                )
            case do.SendSum(holders, apply):
                for holder in holders:
                    self._send(name, holder, apply)
            case do.ApplySum():
                self._work(name, lambda: self._apply(name, effect))
            case do.SignVote():
                self._vote(name, effect)
            case do.FetchVersion():
                self._fetch(name, effect)
            case do.FetchCertificates(site, after):
                self._later(name, lambda: self._certificates(name, site, after), 0.05)
            case do.Progress() if effect.message or effect.phase == "committed":
                self._say(f"{name} {effect.round}.{effect.attempt} {effect.phase} {effect.message}")

    def _send(self, sender: str, to: str, body: do.Body) -> None:
        kind = type(body).__name__
        copies = 2 if self.random.random() < self.faults.duplicate else 1
        if self.random.random() < self.faults.drop:
            self._say(f"{sender} -> {to}: {kind} LOST")
            return
        for _ in range(copies):
            copy = type(body)()
            copy.CopyFrom(body)  # type: ignore[arg-type]
            delay = self.random.uniform(*self.faults.delay_s)
            self._push(self.now + delay, partial(self._arrive, sender, to, copy))

    def _arrive(self, sender: str, to: str, body: do.Body) -> None:
        if to in self.machines:
            self._say(f"{sender} -> {to}: {type(body).__name__} {_at(body)}")
            self._feed(to, do.Received(sender, body))

    def _work(self, name: str, action: Callable[[], None], longest: float = 2.0) -> None:
        self._later(name, action, self.random.uniform(0.0, longest))

    def _give_key(self, dealer: str, holder: str, deal_plan: pb.Plan, kind: int) -> None:
        name = pb.BlobName(kind=kind, round=deal_plan.round, attempt=deal_plan.attempt)  # type: ignore[arg-type]
        machine = self.machines.get(holder)
        if holder == dealer or (machine is not None and machine.expects(dealer, name)):
            self._feed(holder, do.ContextHeld(deal_plan.round, deal_plan.attempt))
        elif machine is not None:  # not yet: pushed again, as the real driver does
            self._later(dealer, lambda: self._give_key(dealer, holder, deal_plan, kind), delay=0.5)

    def _upload(self, name: str, effect: do.EncryptUpdate) -> None:
        at = (effect.round, effect.attempt)
        blob = pb.BlobName(kind=pb.ENCRYPTED_UPDATE, round=at[0], attempt=at[1])
        coordinator = self.machines.get(effect.coordinator)
        if effect.coordinator == name or (coordinator and coordinator.expects(name, blob)):
            self._feed(effect.coordinator, do.UpdateArrived(*at, name))

    def _apply(self, name: str, effect: do.ApplySum) -> None:
        digest = hashlib.sha256(
            repr((effect.round, effect.attempt, effect.total_weight)).encode()
            + effect.parent_digest
        ).digest()
        self.disks[name].versions.add(digest)
        self._feed(name, do.Applied(effect.round, effect.attempt, digest, 1.0))

    def _vote(self, name: str, effect: do.SignVote) -> None:
        vote = pb.Vote(
            attempt=effect.attempt, body=effect.body, site=name, mean_loss=effect.mean_loss
        )
        vote.signature = signature(name, vote)
        self._later(name, lambda: self._feed(name, do.VoteSigned(vote)), 0.001)
        # The invariants of a vote, at the moment it exists.
        disk = self.disks[name]
        assert effect.body.model_digest in disk.versions, "a vote means: it is on my disk"
        accepted = disk.durable.accepted
        assert accepted and accepted.value == effect.body, "persisted before it is signed"
        key = (name, effect.body.round, effect.attempt)
        assert key not in self.votes, f"{name} votes once per attempt"
        self.votes[key] = effect.body.model_digest

    def _fetch(self, name: str, effect: do.FetchVersion) -> None:
        digest = effect.model_digest
        if digest in self.disks[name].versions:
            self._later(name, lambda: self._feed(name, do.VersionHere(digest)), 0.001)
            return

        def arrive() -> None:
            up = [s for s in effect.sites if s in self.machines]
            if any(digest in self.disks[s].versions for s in up):
                self.disks[name].versions.add(digest)
                self._feed(name, do.VersionHere(digest))
            else:
                self._feed(name, do.VersionMissing(digest, "nobody has it"))

        self._later(name, arrive, 0.2)

    def _certificates(self, name: str, source: str, after: int) -> None:
        if source in self.machines:
            commits = self.disks[source].commits
            found = tuple(commits[r].certificate for r in sorted(commits) if r > after)
            self._feed(name, do.CertificatesArrived(source, found))

    # ---- trust ---------------------------------------------------------------------

    def _verify_vote(self, vote: pb.Vote) -> None:
        if vote.signature != signature(vote.site, vote):
            raise CertificateError(f"bad signature of {vote.site}")

    def _verify_certificate(self, certificate: pb.Certificate) -> None:
        voters = set()
        for vote in certificate.votes:
            full = pb.Vote(attempt=certificate.attempt, body=certificate.body, site=vote.site)
            if vote.signature != signature(vote.site, full):
                raise CertificateError(f"bad signature of {vote.site}")
            voters.add(vote.site)
        if len(voters) < self.manifest.majority:
            raise CertificateError("no majority")

    # ---- invariants ----------------------------------------------------------------

    def _check(self) -> None:
        for name, disk in self.disks.items():
            for round_, commit in disk.commits.items():
                digest = commit.certificate.body.model_digest
                known = self.committed.setdefault(round_, digest)
                assert known == digest, f"two versions of round {round_}, one at {name}"
        for digest in self.committed.values():
            holders = sum(digest in disk.versions for disk in self.disks.values())
            assert holders >= self.manifest.majority, "a committed version is held by a majority"

    # ---- the clock -------------------------------------------------------------------

    def _later(self, name: str, action: Callable[[], None], delay: float) -> None:
        self._later_at(name, self.now + delay, action)

    def _later_at(self, name: str, when: float, action: Callable[[], None]) -> None:
        """Unless the site crashes before."""
        generation = self._generation[name]

        def unless_crashed() -> None:
            if self._generation[name] == generation and name in self.machines:
                action()

        self._push(when, unless_crashed)

    def _push(self, when: float, action: Callable[[], None]) -> None:
        self._sequence += 1
        heapq.heappush(self._queue, (when, self._sequence, action))

    def _say(self, line: str) -> None:
        self.transcript.append(f"{self.now:9.3f} {line}")


def coordinator(world: World, round_: int, attempt: int = 0) -> str:
    """Who runs that attempt."""
    return coordinator_of(world.manifest, round_, attempt)


def _at(body: do.Body) -> str:
    if isinstance(body, pb.Run):
        return f"to {body.target_round}"
    if isinstance(body, pb.Vote):
        return f"{body.body.round}.{body.attempt}"
    if isinstance(body, pb.Commit):
        return f"{body.certificate.body.round}.{body.certificate.attempt}"
    return f"{body.round}.{getattr(body, 'attempt', '-')}"
