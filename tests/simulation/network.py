"""A federation of protocol machines on a virtual clock and a seeded network.

    >>> world = World(sites=3, seed=7)
    >>> world.train("a", rounds=2)
    >>> world.run_until_committed(2)
    >>> world.site("b").head_round
    2

Everything that the real driver does is done here without IO: effects are
carried out in order, local work takes a drawn time, messages are delayed,
dropped, duplicated and reordered as `Faults` says, links are cut one way or both,
each site's clock has its own rate and offset. A crash loses everything but what
was persisted, and may come between any two effects of a step. Every heartbeat a
site hears the heads of the peers that it reaches, as the real driver does. The
invariants of tests/simulation/scenarios/invariants.py are checked at every write, message
and vote; a run is a function of its seed.

Signatures are stood in for by a digest with a site's name in it: what the
protocol needs of them is that nobody signs for another, and the transport and
crypto tests hold that with real keys. A site that lies (tests/simulation/scenarios/liars.py) signs
with its own name whatever it likes.
"""

from __future__ import annotations

import hashlib
import heapq
import math
import random
import string
from collections import deque
from collections.abc import Callable
from typing import Any

from google.protobuf.message import DecodeError

from peers.attempts import effects as do
from peers.attempts.lead import SharedModel
from peers.plans.policy import Policy
from peers.rounds.pacemaker import Timing
from peers.rounds.protocol import Protocol
from peers.rounds.replica import Member, Replica, Stored, Verification
from peers.rounds.runs import RunRefused
from peers.wire.certificates import CertificateError, vote_payload
from peers.wire.errors import RemoteProtocolError
from peers.wire.manifest import FederationManifest, ManifestSite, coordinator_of
from proto import federation_pb2 as pb
from tests.simulation.masking import SimulatedMasking
from tests.simulation.proofs import SimulatedProofs
from tests.simulation.scenarios.faults import Clock, Faults
from tests.simulation.scenarios.invariants import Disk, Watch
from tests.simulation.scenarios.liars import Character, Liar
from tests.simulation.work import SimulatedWork

FEDERATION = "simulated"
GENESIS = hashlib.sha256(b"genesis").digest()
SHAPE = hashlib.sha256(b"shape").digest()
TIMING = Timing(phase_s=10.0, train_s=60.0, growth=1.5)
HEARTBEAT_S = 5.0
BACKUPS = 200  # of a disk, one a write
POLICY = Policy(min_participants=2, max_local_epochs=10)


def plan(min_participants: int = 2, mode: pb.Mode.ValueType = pb.CKKS) -> pb.TrainingPlan:
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
        mode=mode,
    )


def signature(site: str, payload: bytes) -> bytes:
    return hashlib.sha256(site.encode() + b" " + payload).digest()


def incarnation(site: str, boot: int) -> bytes:
    """Of a site's start: none of two is the same."""
    return hashlib.sha256(f"{site} {boot}".encode()).digest()[:16]


class SimulatedKeys:
    """A site's key, and whom it believes."""

    def __init__(self, site: str) -> None:
        self.site = site

    def sign(self, payload: bytes) -> pb.Signature:
        return pb.Signature(
            site=self.site,
            signature=signature(self.site, payload),
            certificate=self.site.encode(),
        )

    def verify(
        self, payload: bytes, signed: pb.Signature, manifest: FederationManifest, *, past: bool
    ) -> None:
        """Certificates do not expire here."""
        del past
        if not manifest.enabled(signed.site):
            raise CertificateError(f"{signed.site} is not enabled in manifest {manifest.version}")
        if signed.signature != signature(signed.site, payload):
            raise CertificateError(f"bad signature of {signed.site}")


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
        skewed: bool = False,
        record: bool = True,
        copies: bool = True,
        mode: pb.Mode.ValueType = pb.CKKS,
        faulty_sites: int = 0,
        federation: str = FEDERATION,
    ) -> None:
        """``copies``: a receiver gets a message of its own, as over a network."""
        names = string.ascii_lowercase[:sites]
        self.federation = federation
        self.manifest = FederationManifest(
            federation,
            1,
            tuple(ManifestSite(name, f"{name}:1", True) for name in names),
            faulty_sites,
        )
        self.manifests = {1: self.manifest}
        self.installed = dict.fromkeys(names, self.manifest)
        self.random = random.Random(seed)
        self.faults = faults or Faults()
        self.min_participants = min_participants or min(3, sites)
        self.now = 0.0
        self.recording = record
        self.transcript: list[str] = []
        self.steps = 0
        self.slowness: dict[str, float] = {}
        self.willing: dict[str, bool] = {}
        self.shapes: dict[str, bytes] = {}  # of what a site trains from its next start on
        self.examples: dict[str, int] = {}  # else some more than a hundred
        self.training = plan(self.min_participants, mode)
        self.updates: dict[
            str, tuple[float, ...]
        ] = {}  # else HONEST (tests/simulation/scenarios/updates.py)
        self.liars: dict[str, Liar] = {}
        self.misreading: set[str] = set()  # key holders that say they decrypted something else
        self.failing: set[tuple[str, str]] = set()
        self.blocked: dict[tuple[str, str], int] = {}
        self.disks: dict[str, Disk] = {}
        self.machines: dict[str, Protocol] = {}
        self.watch = Watch(self.disks, self.manifests)
        self.plans: dict[tuple[int, int], pb.Plan] = {}
        self.masking = SimulatedMasking()
        self.proofs = SimulatedProofs(self.plans, self.random)
        self._work = SimulatedWork(self)
        self._copies = copies
        self._skewed = skewed
        self._machine = machine
        self._clocks: dict[str, Clock] = {}
        self._armed: dict[str, float] = {}
        self._doomed: dict[str, tuple[int, bool, float]] = {}
        self._backups: dict[str, deque[tuple[do.Durable, frozenset[bytes]]]] = {}
        self._boots: dict[str, int] = {}
        self._attempts: dict[str, int] = {}
        self._queue: list[tuple[float, int, str, int, Callable[..., None], tuple[Any, ...]]] = []
        self._sequence = 0
        for name in names:
            self.add(name)
        self._later(HEARTBEAT_S, self._heartbeats)

    # ---- what a test says --------------------------------------------------------

    @property
    def committed(self) -> dict[int, bytes]:
        """Round -> model digest, as the certificates say."""
        return self.watch.committed

    def site(self, name: str) -> Protocol:
        return self.machines[name]

    def train(self, name: str, rounds: int) -> None:
        """A person at a site asks for more rounds; refused if a run is under way there."""
        run = f"run-{self._sequence}-{rounds}"
        self._feed(name, do.RunRequested(run, rounds, self.training))

    def stop(self, name: str) -> None:
        """A person at a site stops the run."""
        self._feed(name, do.StopRequested(f"stop-{self._sequence}"))

    def add(self, name: str) -> None:
        """A site's daemon starts for the first time."""
        self.disks[name] = Disk(do.Durable(0, GENESIS), {GENESIS})
        self._backups[name] = deque(maxlen=BACKUPS)
        self._boots[name] = self._attempts[name] = 0
        self.start(name)

    def crash(self, name: str) -> None:
        """The site loses everything but its disk."""
        if name in self.machines:
            self._say(f"{name} crashes")
            del self.machines[name]
        self._doomed.pop(name, None)
        self._boots[name] += 1
        self._attempts[name] += 1

    def restore(self, name: str, writes: int) -> None:
        """The site is stopped; what it has written last, so many times, is gone."""
        self.crash(name)
        backups, disk = self._backups[name], self.disks[name]
        for _ in range(min(writes, len(backups))):
            durable, versions = backups.pop()
            disk.durable, disk.versions = durable, set(versions)
        head = disk.durable.head_round
        disk.commits = {round_: one for round_, one in disk.commits.items() if round_ <= head}
        self._say(f"{name} is restored to {head}.{disk.durable.promised}")

    def doom(self, name: str, after: int, down_s: float, *, writing: bool) -> None:
        """Crash in its next step (that writes), behind ``after`` of its effects."""
        self._doomed[name] = (after, writing, down_s)

    def spare(self, name: str) -> None:
        """The crash that waits for it does not come."""
        self._doomed.pop(name, None)

    def cut(self, links: tuple[tuple[str, str], ...]) -> None:
        """Nothing gets through from the first of each pair to the second."""
        self._say(f"cut: {' '.join(f'{a}->{b}' for a, b in links)}")
        for link in links:
            self.blocked[link] = self.blocked.get(link, 0) + 1

    def heal(self, links: tuple[tuple[str, str], ...]) -> None:
        """The end of a `cut`; a link that was cut twice is dead until both end."""
        self._say(f"healed: {' '.join(f'{a}->{b}' for a, b in links)}")
        for link in links:
            left = self.blocked.pop(link, 0) - 1
            if left > 0:
                self.blocked[link] = left

    def certificate(self, round_: int) -> pb.Certificate:
        """The certificate of a committed round, as some site has it."""
        return next(
            d.commits[round_].certificate for d in self.disks.values() if round_ in d.commits
        )

    def start(self, name: str) -> None:
        """The site's daemon starts from its disk."""
        if name in self.machines:
            return
        disk = self.disks[name]
        last = disk.commits.get(disk.durable.head_round)
        clock = Clock()
        if self._skewed:
            clock = Clock(self.random.uniform(0, 1e6), self.random.uniform(0.95, 1.05))
        self._clocks[name] = clock
        self._armed[name] = math.inf
        here = Replica(
            Member(
                name, self.federation, SimulatedKeys(name), incarnation(name, self._boots[name])
            ),
            Stored(disk.durable, last.certificate if last else None),
            manifest=self.installed[name],
            model=SharedModel(self.shapes.get(name, SHAPE), 2),
            unix_ms=lambda: round(self.now * 1000),
            policy=POLICY,
            timing=TIMING,
            verification=Verification(
                self._verify_vote, self._verify_certificate, self.manifests.get
            ),
        )
        machine = self._machine(here)
        self._say(f"{name} starts at round {disk.durable.head_round}")
        self.machines[name] = machine
        self._boots[name] += 1
        self.set_willing(name, self.willing.get(name, True))
        self._carry_out_all(name, machine.start(clock.local(self.now)))
        self._arm(name)

    def make_liar(self, name: str, chance: random.Random) -> None:
        """From now on this site lies."""
        keys = SimulatedKeys(name)
        self.liars[name] = Liar(name, keys, self, chance, Character.drawn(chance))
        self.watch.liars.add(name)

    def tell(self, sender: str, to: str, body: do.Body) -> None:
        """A liar says something that its machine did not."""
        self._post(sender, to, body)

    def set_willing(self, name: str, willing: bool) -> None:
        """Whether a site trains."""
        self.willing[name] = willing
        reason = "" if willing else "off here"
        examples = self.examples.get(name, 10 + ord(name))
        self._feed(name, do.Situation(examples, willing=willing, reason=reason))

    def install(self, name: str, manifest: FederationManifest) -> None:
        """The operator of a site installs a manifest."""
        self._say(f"{name} has manifest {manifest.version}: {' '.join(manifest.enabled_ids)}")
        self.installed[name] = manifest
        self._feed(name, do.ManifestChanged(manifest))

    def run_until_committed(self, round_: int, *, within_s: float = 5_000.0) -> None:
        """Let time pass until every running site has this round; fails after ``within_s``."""
        end = self.now + within_s
        while not all(m.head_round >= round_ for m in self.machines.values()):
            if self.now > end:
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
        self.now, _, name, boot, action, arguments = heapq.heappop(self._queue)
        if not name or (self._boots[name] == boot and name in self.machines):
            action(*arguments)

    def at(self, when: float, action: Callable[..., None], *arguments: object) -> None:
        """Do this at that time."""
        self._push(when, "", 0, action, arguments)

    def text(self) -> str:
        """The transcript, its last lines."""
        return "\n".join(self.transcript[-120:])

    def reaches(self, sender: str, to: str) -> bool:
        """Whether a message gets through now: the link, the site, and its manifest."""
        return (
            to in self.machines
            and (sender, to) not in self.blocked
            and sender in self.installed[to].enabled_ids
        )

    # ---- the driver ----------------------------------------------------------------

    def _feed(self, name: str, event: do.Event) -> None:
        machine = self.machines.get(name)
        if machine is None:
            return
        self.steps += 1
        try:
            effects = machine.step(event, self._clocks[name].local(self.now))
        except (RemoteProtocolError, CertificateError, RunRefused) as error:
            self._say(f"{name} refuses: {error}")
            effects = machine.wished  # before it was refused, as the driver does
        else:
            if isinstance(event, do.MessageReceived) and isinstance(event.body, pb.EndedAttempt):
                self._ended(name, event.body)
        self._carry_out_all(name, effects)
        self._arm(name)

    def _ended(self, name: str, message: pb.EndedAttempt) -> None:
        machine, ended = self.machines[name], pb.Ended.FromString(message.ended.body)
        if (ended.round, ended.attempt) == (machine.head_round + 1, machine.durable.promised):
            self.watch.ended(name, message.ended.site, machine._here.ground.coordinator)

    def _arm(self, name: str) -> None:
        machine = self.machines.get(name)
        if machine is None:
            return
        due = machine.next_wakeup()
        if due < self._armed[name]:
            # A hair later: the sums of two clocks are rounded.
            self._armed[name] = due
            when = max(self._clocks[name].world(due) + 1e-6, self.now)
            self._push(when, name, self._boots[name], self._tick, (name, due))

    def _tick(self, name: str, due: float) -> None:
        if self._armed[name] == due:
            self._armed[name] = math.inf
        if self.machines[name].next_wakeup() <= self._clocks[name].local(self.now):
            self._feed(name, do.Tick())
        else:
            self._arm(name)

    def _heartbeats(self) -> None:
        """Each site hears where the peers stand that it reaches, and that reach it."""
        self._later(HEARTBEAT_S, self._heartbeats)
        newest = max(disk.durable.head_round for disk in self.disks.values())
        for name, machine in list(self.machines.items()):
            if machine.head_round == newest:
                continue
            for peer, other in list(self.machines.items()):
                ahead = other.head_round > machine.head_round
                if ahead and self.reaches(name, peer) and self.reaches(peer, name):
                    self._feed(name, do.PeerAhead(peer, other.head_round))
                    break

    def _carry_out_all(self, name: str, effects: list[do.Effect]) -> None:
        doom = self._doomed.get(name)
        boundary = math.inf
        if doom is not None and effects:
            after, writing, down_s = doom
            if not writing or any(isinstance(e, do.Persist) for e in effects):
                boundary = min(after, len(effects))
        boot = self._boots[name]
        for position, effect in enumerate(effects):
            if position == boundary:
                break
            self._carry_out(name, effect)
            if self._boots[name] != boot:
                return
        if boundary < math.inf:
            self._say(f"{name} dies behind {boundary} of {len(effects)} effects")
            self.crash(name)
            self._later(down_s, self.start, name)

    def _carry_out(self, name: str, effect: do.Effect) -> None:
        match effect:
            case do.Send(to, body):
                self._send(name, to, body)
            case do.Persist(durable, commits):
                self.watch.persisted(name, durable, commits)
                disk = self.disks[name]
                self._backups[name].append((disk.durable, frozenset(disk.versions)))
                disk.durable = durable
                for commit in commits:
                    disk.commits[commit.certificate.body.round] = commit
            case do.BeginAttempt():
                self._attempts[name] += 1
            case do.TakePlan(known_plan):
                self.plans[known_plan.round, known_plan.attempt] = known_plan
                self.masking.coordinated(known_plan)
            case do.Accuse(evidence):
                self.watch.accused(name, evidence.first.site)
            case do.Progress():
                if effect.message or effect.phase == "committed":
                    place = f"{effect.round}.{effect.attempt}"
                    self._say(f"{name} {place} {effect.phase} {effect.message}")
            case _:
                self._work.begin(name, effect)

    # ---- messages ------------------------------------------------------------------

    def _send(self, sender: str, to: str, body: do.Body) -> None:
        self.watch.sent(sender, body, self.steps)
        if sender in self.liars:
            for whom, what in self.liars[sender].said(to, body):
                self._post(sender, whom, what)
        else:
            self._post(sender, to, body)

    def _post(self, sender: str, to: str, body: do.Body) -> None:
        self.watch.posted(body)
        faults, chance = self.faults, self.random.random
        lost = faults.drop
        if faults.scarce and type(body).__name__ == faults.scarce:
            lost = 2 / 3
        if lost and chance() < lost:
            self._say(f"{sender} -> {to}: {type(body).__name__} LOST")
            return
        copies = 2 if faults.duplicate and chance() < faults.duplicate else 1
        for _ in range(copies):
            if self._copies:
                copy = type(body)()
                copy.CopyFrom(body)
                body = copy
            low, high = faults.delay_s
            delay = low + (high - low) * chance()
            delay *= self.slowness.get(sender, 1.0) * self.slowness.get(to, 1.0)
            self._push(self.now + delay, "", 0, self._arrive, (sender, to, body))

    def _arrive(self, sender: str, to: str, body: do.Body) -> None:
        if not self.reaches(sender, to):
            self._say(f"{sender} -> {to}: {type(body).__name__} UNREACHABLE")
            return
        if self.recording:
            self._say(f"{sender} -> {to}: {type(body).__name__} {_place_of(body)}")
        if to in self.liars:
            self.liars[to].heard(sender, body)
            self._feed(to, do.MessageReceived(sender, body))
            self.liars[to].schemes()
        else:
            self._feed(to, do.MessageReceived(sender, body))

    # ---- trust ---------------------------------------------------------------------

    def _verify_vote(self, vote: pb.Vote) -> None:
        self._check_signature(vote.site, vote.attempt, vote.body, vote.signature)

    def _verify_certificate(self, certificate: pb.Certificate) -> None:
        for vote in certificate.votes:
            attempt = certificate.attempt
            self._check_signature(vote.site, attempt, certificate.body, vote.signature)
        voters = {vote.site for vote in certificate.votes}
        manifest = self.manifests.get(certificate.body.manifest_version)
        if manifest is None or len(voters) < manifest.quorum:
            raise CertificateError("no quorum")

    def _check_signature(self, site: str, attempt: int, body: pb.VoteBody, signed: bytes) -> None:
        manifest = self.manifests.get(body.manifest_version)
        if manifest is None or site not in manifest.enabled_ids:
            raise CertificateError(f"{site} has no vote")
        if signed != signature(site, vote_payload(body, attempt)):
            raise CertificateError(f"bad signature of {site}")

    # ---- the clock -------------------------------------------------------------------

    def _later(self, delay: float, action: Callable[..., None], *arguments: object) -> None:
        self._push(self.now + delay, "", 0, action, arguments)

    def _at(self, name: str, delay: float, action: Callable[..., None], *arguments: object) -> None:
        """Unless the site crashes before."""
        self._push(self.now + delay, name, self._boots[name], action, arguments)

    def _push(
        self,
        when: float,
        name: str,
        boot: int,
        action: Callable[..., None],
        arguments: tuple[object, ...],
    ) -> None:
        self._sequence += 1
        heapq.heappush(self._queue, (when, self._sequence, name, boot, action, arguments))

    def _say(self, line: str) -> None:
        if self.recording:
            self.transcript.append(f"{self.now:9.3f} {line}")


def coordinator(world: World, round_: int, attempt: int = 0) -> str:
    """Who runs that attempt."""
    return coordinator_of(world.manifest, round_, attempt)


def _place_of(body: do.Body) -> str:
    try:
        return _place(body)
    except DecodeError:
        return "of garbage"


def _place(body: do.Body) -> str:
    match body:
        case pb.RunWish():
            return f"to {pb.Run.FromString(body.run.body).target_round}"
        case pb.Promised():
            promise = pb.Promise.FromString(body.promise.body)
            return f"{promise.round}.{promise.attempt}"
        case pb.EndedAttempt():
            ended = pb.Ended.FromString(body.ended.body)
            return f"{ended.round}.{ended.attempt}"
        case pb.Vote():
            return f"{body.body.round}.{body.attempt}"
        case pb.Commit():
            return f"{body.certificate.body.round}.{body.certificate.attempt}"
        case pb.Evidence():
            return body.first.site
    return f"{getattr(body, 'round', '-')}.{getattr(body, 'attempt', '-')}"
