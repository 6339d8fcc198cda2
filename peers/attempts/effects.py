"""What goes into the round protocol and what comes out of it.

The protocol (peers/rounds/protocol.py) is a pure machine: `step(event, now)` returns a
list of effects, which the driver (daemon/rounds/driver.py, or the simulation in tests)
carries out *in order*. `Persist` is finished before the next effect begins:
nothing is said to a peer that a crash could make untrue.

Every event and effect of an attempt carries its round and attempt (``at``), so that what
arrives late is recognised and dropped. Effects that are work also carry the phase that it
belongs to, so that the driver begins all of them in one way.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, Protocol

from google.protobuf.message import Message

from peers.wire.manifest import FederationManifest
from proto import federation_pb2 as pb

# A message of an envelope. Which there are, proto/federation.proto says.
Body = Message


class AttemptMessage(Protocol):
    """A message of an attempt; which ones a secure-sum mode has is its own to say."""

    @property
    def round(self) -> int:
        """The round."""

    @property
    def attempt(self) -> int:
        """Its attempt."""


@dataclass(frozen=True)
class Durable:
    """What a site must still know after a crash.

    ``promised`` is the greatest attempt entered in round ``head_round + 1`` (-1: none).
    ``state`` is what it has signed in that round, and which runs it never takes again;
    ``signed_run`` the run under way, or the last one, as the site that wanted it signed it.
    """

    head_round: int
    head_digest: bytes
    promised: int = -1
    state: pb.RoundState = field(default_factory=pb.RoundState)
    signed_run: pb.Signed | None = None

    @cached_property
    def run(self) -> pb.Run | None:
        """The run, read; its signature was checked when it was taken."""
        return pb.Run.FromString(self.signed_run.body) if self.signed_run else None


@dataclass(frozen=True)
class OfAttempt:
    """Belongs to one attempt of a round."""

    round: int
    attempt: int

    @property
    def at(self) -> tuple[int, int]:
        """Round and attempt."""
        return self.round, self.attempt


# ---- events ------------------------------------------------------------------


class Event:
    """What has happened; each is a class of its own, those of a mode stand with its steps."""


@dataclass(frozen=True)
class MessageReceived(Event):
    """A peer's message; the transport has checked who sent it and its bounds."""

    sender: str
    body: Body


@dataclass(frozen=True)
class Tick(Event):
    """Time has passed; `Protocol.next_wakeup` says when one is due."""


@dataclass(frozen=True)
class RunRequested(Event):
    """A person at this site wants ``rounds`` more rounds."""

    run_id: str
    rounds: int
    plan: pb.TrainingPlan


@dataclass(frozen=True)
class StopRequested(Event):
    """A person at this site wants the run to end after the round under way."""

    run_id: str


@dataclass(frozen=True)
class Situation(Event):
    """What the site can contribute just now; the driver keeps it up to date.

    ``least_multiplier``: with less noise a round would exceed the site's privacy budget.
    ``complexity``: of its documents (pFedRAG, Eq. 3); 0: it does not tell.
    """

    num_examples: int
    willing: bool
    reason: str = ""
    least_multiplier: float = 0.0
    complexity: float = 0.0


@dataclass(frozen=True)
class ManifestChanged(Event):
    """The operator installed a newer manifest: it takes effect between attempts."""

    manifest: FederationManifest


@dataclass(frozen=True)
class PeerAhead(Event):
    """A peer said at hello that it is at a later round."""

    site: str
    head_round: int


@dataclass(frozen=True)
class WorkDone(OfAttempt, Event):
    """A piece of local work of an attempt is finished."""


@dataclass(frozen=True)
class LocalTrained(WorkDone):
    """Local training is done; one scale exponent a parameter group."""

    scale_exponents: tuple[int, ...]


@dataclass(frozen=True)
class ContextHeld(WorkDone):
    """What an update is hidden with is here.

    ``digest``: SHA-256 of the round's context (secret at a key holder, public at the
    coordinator); in masking mode, when everyone's shares are here, the roster's.
    """

    digest: bytes


@dataclass(frozen=True)
class UpdateReady(WorkDone):
    """This site's update is hidden, and on its way: what it signs of it."""

    upload_digest: bytes
    nonce: bytes = b""


@dataclass(frozen=True)
class UpdateArrived(WorkDone):
    """A contributor's hidden update is here, whole; SHA-256 of it."""

    site: str
    digest: bytes


@dataclass(frozen=True)
class UpdateAdded(WorkDone):
    """A contributor's update is in the sum."""

    site: str


@dataclass(frozen=True)
class UpdateRefused(WorkDone):
    """A contributor's update was malformed; it is not in the sum."""

    site: str
    reason: str


@dataclass(frozen=True)
class QuestionReady(WorkDone):
    """The updates of ``sites`` are sketched and their products written; some were malformed."""

    sites: tuple[str, ...]
    refused: tuple[tuple[str, str], ...]  # site and reason
    digest: bytes


@dataclass(frozen=True)
class ProductsDecrypted(WorkDone):
    """A key holder has decrypted the products: one number a pair, row by row."""

    products: tuple[float, ...]
    imaginary: tuple[str, ...]


@dataclass(frozen=True)
class SumFinished(WorkDone):
    """The sum is written, hidden as it is; SHA-256 of it."""

    sum_digest: bytes


@dataclass(frozen=True)
class SumArrived(WorkDone):
    """The coordinator's sum is here, whole. There is one an attempt."""


@dataclass(frozen=True)
class OpeningRefused(WorkDone):
    """The coordinator can't do what a site needs to open the sum, or must not."""

    site: str
    reason: str


@dataclass(frozen=True)
class SumOpened(WorkDone):
    """The sum of a certified statement is opened and applied; the new version is on disk.

    ``next_clip_norm``: what its noised count makes of the clip norm; 0: the norm is fixed.
    """

    root_digest: bytes
    model_digest: bytes
    mean_loss: float
    next_clip_norm: float = 0.0


@dataclass(frozen=True)
class WorkFailed(WorkDone):
    """A piece of local work failed for good; ``phase`` says which."""

    phase: str
    reason: str


@dataclass(frozen=True)
class VersionHere(Event):
    """A model version that was asked for is on disk, verified."""

    model_digest: bytes


@dataclass(frozen=True)
class VersionMissing(Event):
    """A model version could not be had from anyone asked."""

    model_digest: bytes
    reason: str


@dataclass(frozen=True)
class CertificatesArrived(Event):
    """Certificates of rounds after our head, oldest first."""

    certificates: tuple[pb.Certificate, ...]


# ---- effects, in the order of a round ------------------------------------------


class Effect:
    """What is to be done; each is a class of its own."""


class Work(Effect, ABC):
    """Work of one attempt, which takes long: it is begun, and its end is an event.

    ``phase``: what people, and `WorkFailed`, call it.
    """

    phase: ClassVar[str]

    @property
    @abstractmethod
    def at(self) -> tuple[int, int]:
        """The round and the attempt that it belongs to."""


@dataclass(frozen=True)
class WorkOfPlan(Work):
    """Work that begins with the plan."""

    plan: pb.Plan

    @property
    def at(self) -> tuple[int, int]:
        """The attempt of the plan."""
        return self.plan.round, self.plan.attempt


@dataclass(frozen=True)
class SendBehind(Work):
    """Send what is certified to each of these sites, and behind it stream what it is about."""

    holders: tuple[str, ...]
    certified: pb.Certified

    @property
    def at(self) -> tuple[int, int]:
        """The attempt of what is certified."""
        return self.certified.round, self.certified.attempt


@dataclass(frozen=True)
class Persist(Effect):
    """Write this to disk, in one transaction, and wait for it; ``commits`` are filed too."""

    durable: Durable
    commits: tuple[pb.Commit, ...] = ()


@dataclass(frozen=True)
class Send(Effect):
    """Send a message to one peer; a loss is the protocol's business, not the driver's."""

    to: str
    body: Body


@dataclass(frozen=True)
class BeginAttempt(OfAttempt, Effect):
    """Forget what belonged to other attempts: spool, keys, training under way.

    Of an attempt that may never be entered, too: the one under way was left.
    """


@dataclass(frozen=True)
class TakePlan(Effect):
    """We take part in this plan: what belongs to it may come to us, whether we train or not."""

    plan: pb.Plan


@dataclass(frozen=True)
class Train(WorkOfPlan):
    """Train from the parent version; answer with `LocalTrained`."""

    phase: ClassVar = "train"
    weight: float


@dataclass(frozen=True)
class HideUpdate(OfAttempt, Work):
    """Quantise, hide and send the update to the coordinator; answer with `UpdateReady`.

    ``draw``: the attempt in which the integers were drawn. Those that are kept of it are
    sent again, bit by bit.
    """

    phase: ClassVar = "encrypt"
    coordinator: str
    weight: float
    scale_exponents: tuple[int, ...]
    draw: int = 0


@dataclass(frozen=True)
class AddUpdate(OfAttempt, Work):
    """Add an update that has arrived to the sum, if its tags have the nonce that was signed."""

    phase: ClassVar = "aggregate"
    site: str
    nonce: bytes = b""


@dataclass(frozen=True)
class CompareUpdates(OfAttempt, Work):
    """Sketch the updates that are here and write their encrypted dot products.

    ``nonces``: of each site's tags, as it signed them.
    """

    phase: ClassVar = "select"
    sites: tuple[str, ...]
    nonces: tuple[bytes, ...]


@dataclass(frozen=True)
class SendProducts(SendBehind):
    """Send the certified question to each key holder, and behind it stream the products."""

    phase: ClassVar = "select"


@dataclass(frozen=True)
class DecryptProducts(OfAttempt, Work):
    """Decrypt the products of these sites' updates; answer with `ProductsDecrypted`."""

    phase: ClassVar = "compare"
    sites: tuple[str, ...]
    products_digest: bytes


@dataclass(frozen=True)
class FinishSum(OfAttempt, Work):
    """Write the sum, hidden as it is."""

    phase: ClassVar = "aggregate"


@dataclass(frozen=True)
class SendSum(SendBehind):
    """Send the certified statement to each of these sites, and behind it stream the sum."""

    phase: ClassVar = "aggregate"


@dataclass(frozen=True)
class ApplySum(OfAttempt, Work):
    """Open the sum of a certified statement, apply it to the parent, persist the new version.

    ``opening``: what opens it, as the mode's steps have it for the mode's jobs. Ends with
    `SumOpened`.
    """

    phase: ClassVar = "open"
    root_digest: bytes
    scale_exponents: tuple[int, ...]
    total_weight: float
    parent_digest: bytes
    sum_digest: bytes
    contributors: tuple[str, ...]
    dropouts: tuple[str, ...]
    opening: Any


@dataclass(frozen=True)
class FetchVersion(Effect):
    """Get a model version from the first of these sites that has it."""

    model_digest: bytes
    sites: tuple[str, ...]


@dataclass(frozen=True)
class Accuse(Effect):
    """Keep this evidence, for people: a site has signed two things that exclude each other."""

    evidence: pb.Evidence


@dataclass(frozen=True)
class WentBack(Effect):
    """Tell people that this site's state is an older copy: it had signed what it did not know."""

    round: int
    told_by: str
    forgotten: str  # "promised attempt 4"


@dataclass(frozen=True)
class FetchCertificates(Effect):
    """Get the certificates after round ``after`` from a site that is ahead."""

    site: str
    after: int


@dataclass(frozen=True)
class Adopt(Effect):
    """A new version is committed: answer questions with it as soon as it is indexed."""

    round: int
    model_digest: bytes
    contributors: tuple[str, ...]


@dataclass(frozen=True)
class Progress(OfAttempt, Effect):
    """For people who watch."""

    phase: str
    coordinator: str
    participants: tuple[str, ...] = ()
    contributors: tuple[str, ...] = ()
    message: str = ""
    model_digest: bytes = b""
    report: pb.RoundReport | None = field(default=None, compare=False)

    @classmethod
    def of_commit(cls, commit: pb.Commit) -> Progress:
        """A round is committed."""
        body, report = commit.certificate.body, commit.report
        return cls(
            body.round,
            commit.certificate.attempt,
            "committed",
            report.coordinator,
            contributors=tuple(body.contributors),
            model_digest=body.model_digest,
            report=report,
        )
