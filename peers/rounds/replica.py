"""One site as the protocol's parts share it: a replica, in the words of PBFT. PURE.

Who the site is, what it must still know after a crash, what it knows of the attempt under
way, what others have signed, and how an effect comes about.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from peers.attempts import effects as do
from peers.attempts.bundle import Bundle, Ground, Promised
from peers.attempts.coordination import Coordination
from peers.attempts.effects import Durable, Effect
from peers.attempts.lead import SharedModel
from peers.attempts.participation import Participation
from peers.attempts.scale import Scaled
from peers.attempts.statement import EncodedStatement, HeldLock
from peers.plans.policy import Policy
from peers.rounds import evidence, runs
from peers.rounds.manifest_in_force import ManifestInForce
from peers.rounds.pacemaker import Pacemaker, Timing, reached
from peers.wire.manifest import FederationManifest, coordinator_of
from peers.wire.messages import one_line
from peers.wire.signing import Keys, Kind, must_be, sign
from proto import federation_pb2 as pb


@dataclass(frozen=True)
class Member:
    """Which site this is, and of what.

    ``keys``: its signature, and whom it believes. ``incarnation``: 16 bytes, drawn for this
    start of the daemon.
    """

    site: str
    federation_id: str
    keys: Keys
    incarnation: bytes


@dataclass(frozen=True)
class Stored:
    """What it still knows from before its start.

    ``accused``: sites that evidence is kept of. One set for all logs of a daemon: whoever lies
    in one is passed over in all.
    """

    durable: Durable
    head_certificate: pb.Certificate | None
    accused: set[str] = field(default_factory=set)


@dataclass(frozen=True)
class Verification:
    """How what others say is verified; ``vote`` and ``certificate`` raise CertificateError."""

    vote: Callable[[pb.Vote], None]
    certificate: Callable[[pb.Certificate], None]
    past_manifest: Callable[[int], FederationManifest | None]


class Replica:
    """One site's state in the round under way. Its effects are those of the step under way."""

    def __init__(
        self,
        member: Member,
        stored: Stored,
        *,
        manifest: FederationManifest,
        model: SharedModel,
        policy: Policy,
        timing: Timing,
        verification: Verification,
        unix_ms: Callable[[], int],
    ) -> None:
        """``unix_ms`` dates certificates, for people."""
        durable, head_certificate = stored.durable, stored.head_certificate
        self.site = member.site
        self.durable = durable
        self.accused = stored.accused
        self.manifests = ManifestInForce.of_state(
            manifest, verification.past_manifest, head_certificate, durable.state
        )
        self.federation_id = member.federation_id
        self.head_certificate = head_certificate
        self.model = model
        self.unix_ms = unix_ms
        self.keys = member.keys
        self.policy = policy
        self.timing = timing
        self.verification = verification
        self.situation = do.Situation(0, willing=False, reason="still starting")
        self.ground = self.ground_of(max(0, durable.promised))
        self.coordination: Coordination | None = None
        self.bundle: Bundle | None = None
        self.plan: pb.Plan | None = None
        self.part: Participation | None = None
        self.scaled: Scaled | None = None
        self.question: EncodedStatement | None = None
        self.state_early: pb.State | None = None  # came before its bundle
        self.pending: HeldLock | None = None
        self.left = -1  # the last attempt of this round that it has dropped its part in
        self.incarnation = member.incarnation
        self.promises: dict[str, Promised] = {}
        self.attempts: dict[str, int] = {}  # the latest that each site has promised
        self.heard = evidence.SignedWords()
        self.too_early: list[do.MessageReceived] = []  # of the next round
        self.pace = Pacemaker(timing)
        self.now = 0.0
        self.effects: list[Effect] = []

    @property
    def manifest(self) -> FederationManifest:
        """The manifest in force."""
        return self.manifests.current

    @property
    def head_round(self) -> int:
        """The last committed round; 0: none."""
        return self.durable.head_round

    @property
    def run(self) -> pb.Run | None:
        """The run under way, or the last one."""
        return self.durable.run

    @property
    def active(self) -> bool:
        """Whether a run is under way."""
        return runs.is_active(self.durable, self.manifest)

    def ground_of(self, attempt: int) -> Ground:
        """What an attempt of the round under way stands on."""
        return Ground(
            self.federation_id,
            self.manifests.current,
            self.durable.head_round + 1,
            attempt,
            self.durable.head_digest,
            self.head_certificate,
        )

    def leave(self) -> None:
        """Nothing of an earlier attempt counts any more."""
        self.coordination = self.bundle = self.plan = self.part = None
        self.question = self.pending = self.state_early = self.scaled = None

    def drop(self) -> None:
        """Leave the attempt, for good; what is trained, hidden or sent for it ends at once.

        It is not on the disk: in an attempt of before its start a site has no part either.
        """
        self.left = max(self.left, self.durable.promised)
        if self.plan is not None:
            self.emit(do.BeginAttempt(self.round, self.durable.promised + 1))
        self.leave()

    # ---- evidence ----------------------------------------------------------------

    def note(self, kind: pb.EvidenceKind.ValueType, signed: pb.Signed) -> None:
        """Remember what somebody has signed; two things that exclude each other are evidence."""
        self.accuse(self.heard.note(kind, signed))

    def accuse(self, proof: pb.Evidence | None) -> None:
        """Keep it, tell people, and pass it on, once a site."""
        if proof is None or proof.first.site in self.accused:
            return
        site = proof.first.site
        self.accused.add(site)
        self.emit(do.Accuse(proof))
        self.emit(*(do.Send(peer, proof) for peer in self.others if peer != site))
        self.progress("waiting", message=f"{site} has signed {evidence.WORDS[proof.kind]}")
        if self.ground.coordinator == site and self.active and self.coordination is None:
            self.pace.ended(self.ground.attempt, self.now - self.timing.retry(0))

    def on_evidence(self, message: pb.Evidence) -> None:
        """Another site shows evidence; it is checked before it is believed."""
        if message.first.site not in self.accused:
            evidence.check_evidence(message, self.keys, self.manifest)
            self.accuse(message)

    # ---- small parts ---------------------------------------------------------------

    @property
    def others(self) -> list[str]:
        """Every other site of the manifest in force."""
        return [peer for peer in self.manifest.enabled_ids if peer != self.site]

    def tell_others(self, *bodies: do.Body) -> None:
        """Send these to every other site of the manifest in force."""
        self.emit(*(do.Send(peer, body) for body in bodies for peer in self.others))

    def is_at(self, site: str, attempt: int) -> None:
        """A site has promised this attempt. When a quorum has come to ours, it begins."""
        self.attempts[site] = max(attempt, self.attempts.get(site, -1))
        if self.pace.alone and not self.pace.over and self.has_quorum:
            self.pace.entered(self.durable.promised, self.now)

    def reached(self, others: int) -> int:
        """The latest attempt that so many others are in, or in a later one; -1: we don't know."""
        there = {site: self.attempts.get(site, -1) for site in self.others}
        return reached(there, others)

    @property
    def has_quorum(self) -> bool:
        """Whether a quorum, with us, is known to be where we are, or farther."""
        others = self.manifest.quorum - 1
        return not others or self.reached(others) >= self.durable.promised

    def signed_end(self, attempt: int, reason: str) -> pb.EndedAttempt:
        """Our word that an attempt that we lead is over."""
        ended = pb.Ended(
            federation_id=self.federation_id,
            round=self.round,
            attempt=attempt,
            reason=one_line(reason),
        )
        return pb.EndedAttempt(ended=sign(self.keys, Kind.ENDED, ended))

    def emit(self, *effects: Effect) -> None:
        """Have these done, behind what was emitted before."""
        self.effects.extend(effects)

    def persist(self, durable: Durable) -> None:
        """Know this from now on, also after a crash."""
        self.durable = durable
        self.emit(do.Persist(durable))

    @property
    def round(self) -> int:
        """The round under way."""
        return self.durable.head_round + 1

    def is_current(self, round_: int, attempt: int) -> bool:
        """Whether this is the attempt under way."""
        return (round_, attempt) == (self.round, self.durable.promised)

    def from_lead(self, sender: str, round_: int, attempt: int) -> bool:
        """Whether this belongs to the attempt under way and comes from its coordinator."""
        if not self.is_current(round_, attempt):
            return False
        check_turn(sender, round_, attempt, self.ground.manifest)
        return True

    def coordinated(self, round_: int, attempt: int) -> Coordination | None:
        """The attempt that we coordinate, if it is this one."""
        c = self.coordination
        return c if c is not None and (c.lead.round, c.lead.attempt) == (round_, attempt) else None

    def got_on(self, what: str, *, train: bool = False) -> None:
        """The attempt got on: its next sign of life may take this long (`timing`)."""
        self.pace.got_on(what, max(0, self.durable.promised), self.now, train=train)

    def progress(
        self,
        phase: str,
        *,
        contributors: tuple[str, ...] = (),
        message: str = "",
        attempt: int | None = None,
    ) -> None:
        """Tell people where the round is; ``attempt``: another than the one under way."""
        attempt = max(0, self.durable.promised) if attempt is None else attempt
        lead = coordinator_of(self.ground.manifest, self.round, attempt)
        self.emit(do.Progress(self.round, attempt, phase, lead, (), contributors, message))


def check_turn(sender: str, round_: int, attempt: int, *manifests: FederationManifest) -> None:
    """Raises RemoteProtocolError unless one of these has ``sender`` coordinate the attempt."""
    must_be(
        sender in {coordinator_of(manifest, round_, attempt) for manifest in manifests},
        sender,
        f"does not coordinate attempt {attempt} of round {round_}: it is not its turn",
    )
