"""What every part of a site's protocol machine stands on. PURE.

Who the site is, what it must still know after a crash, whom it accuses, and how an
effect comes about. peers/rounds/attending.py and peers/rounds/protocol.py build on it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass

from peers.attempts import effects as do
from peers.attempts.bundle import (
    Bundle,
    Ground,
    Promised,
)
from peers.attempts.coordination import Coordination
from peers.attempts.effects import Durable, Effect
from peers.attempts.participation import (
    Participation,
)
from peers.attempts.preparing import SharedModel
from peers.attempts.scale import Scaled
from peers.attempts.statement import HeldLock, Known
from peers.plans.policy import Policy
from peers.rounds import evidence, runs
from peers.rounds.adoption import Adoption
from peers.rounds.manifest_in_force import ManifestInForce
from peers.rounds.pacemaker import Pacemaker, Timing, reached
from peers.wire.manifest import FederationManifest, coordinator_of
from peers.wire.messages import one_line
from peers.wire.signing import Keys, Kind, must_be, sign
from proto import federation_pb2 as pb

LATER_THAN_ANY = 2**64  # attempt


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
    """What it still knows from before its start. ``accused``: sites that evidence is kept of."""

    durable: Durable
    head_certificate: pb.Certificate | None
    accused: Collection[str] = ()


@dataclass(frozen=True)
class Verification:
    """How what others say is verified; ``vote`` and ``certificate`` raise CertificateError."""

    vote: Callable[[pb.Vote], None]
    certificate: Callable[[pb.Certificate], None]
    past_manifest: Callable[[int], FederationManifest | None]


class Machine:
    """One site's state in the round under way. Methods add to the effects of a step."""

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
        self.accused = set(stored.accused)
        # Empty bytes where nothing was promised are a promise under manifest 0.
        entered = pb.Promise.FromString(durable.state.promise.promise.body).manifest_version
        self._manifests = ManifestInForce(
            manifest, verification.past_manifest, head_certificate, entered, durable.state.began
        )
        self._federation_id = member.federation_id
        self._head_certificate = head_certificate
        self._model = model
        self._shape_digest = model.shape_digest
        self._unix_ms = unix_ms
        self._keys = member.keys
        self._policy = policy
        self._timing = timing
        self._verify_vote = verification.vote
        self._situation = do.Situation(0, willing=False, reason="still starting")
        self._ground = self._ground_of(max(0, durable.promised))
        self._coordination: Coordination | None = None
        self._bundle: Bundle | None = None
        self._plan: pb.Plan | None = None
        self._part: Participation | None = None
        self._scaled: Scaled | None = None
        self._question: Known | None = None
        self._state_early: pb.State | None = None  # came before its bundle
        self._pending: HeldLock | None = None
        self._incarnation = member.incarnation
        self._promises: dict[str, Promised] = {}
        self._attempts: dict[str, int] = {}  # the latest that each site has promised
        self._generations: dict[str, int] = {}  # how far each site's runs are numbered
        self._heard = evidence.SignedWords()
        self._answered: dict[str, tuple[bytes, bytes, float]] = {}  # its run, ours, and when
        self._too_early: list[do.MessageReceived] = []
        self._early: list[do.MessageReceived] = []
        self._adoption = Adoption(self.site, verification.certificate)
        self._pace = Pacemaker(timing)
        self._now = 0.0
        self._effects: list[Effect] = []
        self._has_just_started()

    def _has_just_started(self) -> None:
        """What it has signed before, a site does not know (peers/rounds/recalling.py)."""
        self._asks = True  # in each round, until in one of them every peer has answered
        self._told_by: set[str] = set()  # who has answered in the round under way
        self._since = LATER_THAN_ANY  # the first attempt of which we know all that we have signed
        self._left = -1  # the last attempt of this round that we have dropped our part in
        self._recalling: set[str] = set()  # whom we wait for
        self._unanswered: set[str] = set()  # who may answer yet, later than that
        self._ahead: set[str] = set()  # who has said that it is in a later round
        self._recall_until = math.inf

    @property
    def manifest(self) -> FederationManifest:
        """The manifest in force."""
        return self._manifests.current

    @property
    def waiting_manifest(self) -> str:
        """Why rounds do not go by the newest manifest yet; empty when they do."""
        return self._manifests.waiting

    @property
    def head_round(self) -> int:
        """The last committed round; 0: none."""
        return self.durable.head_round

    @property
    def run(self) -> pb.Run | None:
        """The run under way, or the last one."""
        return self.durable.run

    @property
    def busy(self) -> bool:
        """Whether a run is under way, or an attempt that a stopped run has begun."""
        return self._active or self._part is not None or self._coordination is not None

    @property
    def _active(self) -> bool:
        return runs.is_active(self.durable, self.manifest)

    def _ground_of(self, attempt: int) -> Ground:
        return Ground(
            self._federation_id,
            self._manifests.current,
            self.durable.head_round + 1,
            attempt,
            self.durable.head_digest,
            self._head_certificate,
        )

    def _leave(self) -> None:
        """Nothing of an earlier attempt counts any more."""
        self._coordination = self._bundle = self._plan = self._part = None
        self._question = self._pending = self._state_early = self._scaled = None

    def _drop(self) -> None:
        """Leave the attempt, for good; what is trained, hidden or sent for it ends at once.

        It is not on the disk: in an attempt of before its start a site has no part either.
        """
        self._left = max(self._left, self.durable.promised)
        if self._plan is not None:
            self._emit(do.BeginAttempt(self._round, self.durable.promised + 1))
        self._leave()

    # ---- evidence ----------------------------------------------------------------

    def _note(self, kind: pb.EvidenceKind.ValueType, signed: pb.Signed) -> None:
        self._accuse(self._heard.note(kind, signed))

    def _accuse(self, proof: pb.Evidence | None) -> None:
        """Keep it, tell people, and pass it on, once a site."""
        if proof is None or proof.first.site in self.accused:
            return
        site = proof.first.site
        self.accused.add(site)
        self._emit(do.Accuse(proof))
        self._emit(
            *(
                do.Send(peer, proof)
                for peer in self.manifest.enabled_ids
                if peer not in (self.site, site)
            )
        )
        self._progress("waiting", message=f"{site} has signed {evidence.WORDS[proof.kind]}")
        if self._ground.coordinator == site and self._active and self._coordination is None:
            self._pace.ended(self._ground.attempt, self._now - self._timing.retry(0))

    def _on_evidence(self, message: pb.Evidence) -> None:
        if message.first.site not in self.accused:
            evidence.check_evidence(message, self._keys, self.manifest)
            self._accuse(message)

    # ---- small parts ---------------------------------------------------------------

    @property
    def _others(self) -> list[str]:
        """Every other site of the manifest in force."""
        return [peer for peer in self.manifest.enabled_ids if peer != self.site]

    def _tell_others(self, *bodies: do.Body) -> None:
        self._emit(*(do.Send(peer, body) for body in bodies for peer in self._others))

    def _is_at(self, site: str, attempt: int) -> None:
        """A site has promised this attempt. When a quorum has come to ours, it begins."""
        self._attempts[site] = max(attempt, self._attempts.get(site, -1))
        if self._pace.alone and not self._pace.over and self._has_quorum:
            self._pace.entered(self.durable.promised, self._now)

    def _reached(self, others: int) -> int:
        """The latest attempt that so many others are in, or in a later one; -1: we don't know."""
        there = {site: self._attempts.get(site, -1) for site in self._others}
        return reached(there, others - 1)

    @property
    def _has_quorum(self) -> bool:
        """Whether a quorum, with us, is known to be where we are, or farther."""
        others = self.manifest.quorum - 1
        return not others or self._reached(others) >= self.durable.promised

    def _signed_end(self, attempt: int, reason: str) -> pb.EndedAttempt:
        ended = pb.Ended(
            federation_id=self._federation_id,
            round=self._round,
            attempt=attempt,
            reason=one_line(reason),
        )
        return pb.EndedAttempt(ended=sign(self._keys, Kind.ENDED, ended))

    def _emit(self, *effects: Effect) -> None:
        self._effects.extend(effects)

    def _persist(self, durable: Durable) -> None:
        self.durable = durable
        self._emit(do.Persist(durable))

    @property
    def _round(self) -> int:
        return self.durable.head_round + 1

    def _is_current(self, round_: int, attempt: int) -> bool:
        return (round_, attempt) == (self._round, self.durable.promised)

    def _from_lead(self, sender: str, round_: int, attempt: int) -> bool:
        """Whether this belongs to the attempt under way and comes from its coordinator."""
        if not self._is_current(round_, attempt):
            return False
        must_be(
            sender == self._ground.coordinator,
            sender,
            f"does not coordinate attempt {attempt} of round {round_}: it is not its turn",
        )
        return True

    def _coordinated(self, round_: int, attempt: int) -> Coordination | None:
        """The attempt that we coordinate, if it is this one."""
        c = self._coordination
        return c if c is not None and (c.round, c.attempt) == (round_, attempt) else None

    def _got_on(self, what: str, *, train: bool = False) -> None:
        """The attempt got on: its next sign of life may take this long (`timing`)."""
        self._pace.got_on(what, max(0, self.durable.promised), self._now, train=train)

    def _progress(
        self,
        phase: str,
        *,
        contributors: tuple[str, ...] = (),
        message: str = "",
        attempt: int | None = None,
    ) -> None:
        attempt = max(0, self.durable.promised) if attempt is None else attempt
        lead = coordinator_of(self._ground.manifest, self._round, attempt)
        self._emit(do.Progress(self._round, attempt, phase, lead, (), contributors, message))
