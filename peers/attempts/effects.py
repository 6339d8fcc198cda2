"""What goes into the round protocol and what comes out of it.

The protocol (peers/rounds/protocol.py) is a pure machine: `step(event, now)` returns a
list of effects, which the driver (daemon/rounds/driver.py, or the simulation in tests)
carries out *in order*. `Persist` is finished before the next effect begins:
nothing is said to a peer that a crash could make untrue.

Every event and effect of an attempt carries its round and attempt (`OfAttempt`, or in
what it names), so that what arrives late is recognised and dropped.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from peers.wire.manifest import FederationManifest
from proto import federation_pb2 as pb

Body = (
    pb.RunWish
    | pb.Prepare
    | pb.Promised
    | pb.Behind
    | pb.Ahead
    | pb.Bundle
    | pb.PlanAnswer
    | pb.KeyCommitted
    | pb.Trained
    | pb.Scale
    | pb.Contributed
    | pb.State
    | pb.Stated
    | pb.Certified
    | pb.Compared
    | pb.Challenge
    | pb.Proof
    | pb.MaskingOrder
    | pb.MaskingAnswer
    | pb.Openings
    | pb.AppliedSum
    | pb.Proven
    | pb.Vote
    | pb.Commit
    | pb.AttemptFailed
    | pb.EndedAttempt
    | pb.Evidence
    | pb.Recall
    | pb.Remembered
)

# Those of them that go to an attempt's coordinator.
Answer = (
    pb.PlanAnswer
    | pb.KeyCommitted
    | pb.Trained
    | pb.Contributed
    | pb.Stated
    | pb.Compared
    | pb.Challenge
    | pb.MaskingAnswer
    | pb.AppliedSum
    | pb.Vote
)


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


# ---- events ------------------------------------------------------------------


@dataclass(frozen=True)
class Received:
    """A peer's message; the transport has checked who sent it and its bounds."""

    sender: str
    body: Body


@dataclass(frozen=True)
class Tick:
    """Time has passed; `Protocol.next_wakeup` says when one is due."""


@dataclass(frozen=True)
class RunRequested:
    """A person at this site wants ``rounds`` more rounds."""

    run_id: str
    rounds: int
    plan: pb.TrainingPlan


@dataclass(frozen=True)
class StopRequested:
    """A person at this site wants the run to end after the round under way."""

    run_id: str


@dataclass(frozen=True)
class Situation:
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
class ManifestChanged:
    """The operator installed a newer manifest: it takes effect between attempts."""

    manifest: FederationManifest


@dataclass(frozen=True)
class PeerAhead:
    """A peer said at hello that it is at a later round."""

    site: str
    head_round: int


@dataclass(frozen=True)
class Worked(OfAttempt):
    """A piece of local work of an attempt is finished."""


@dataclass(frozen=True)
class LocalTrained(Worked):
    """Local training is done; one scale exponent a parameter group."""

    scale_exponents: tuple[int, ...]


@dataclass(frozen=True)
class KeyDealt(Worked):
    """This key dealer has made the round's key: SHA-256 of its public and its secret part."""

    public_digest: bytes
    secret_digest: bytes


@dataclass(frozen=True)
class ContextHeld(Worked):
    """What an update is hidden with is here.

    ``digest``: SHA-256 of the round's context (secret at a key holder, public at the
    coordinator); in masking mode, when everyone's shares are here, the roster's.
    """

    digest: bytes


@dataclass(frozen=True)
class MaskedSumStarted(Worked):
    """The coordinator is ready to add masked inputs under this roster."""

    roster_digest: bytes


@dataclass(frozen=True)
class UpdateReady(Worked):
    """This site's update is hidden, and on its way: what it signs of it."""

    upload_digest: bytes
    nonce: bytes = b""


@dataclass(frozen=True)
class UpdateArrived(Worked):
    """A contributor's encrypted update is here, whole; SHA-256 of it."""

    site: str
    digest: bytes


@dataclass(frozen=True)
class UpdateAdded(Worked):
    """A contributor's update is in the sum."""

    site: str


@dataclass(frozen=True)
class UpdateRefused(Worked):
    """A contributor's update was malformed; it is not in the sum."""

    site: str
    reason: str


@dataclass(frozen=True)
class QuestionReady(Worked):
    """The updates of ``sites`` are sketched and their products written; some were malformed."""

    sites: tuple[str, ...]
    refused: tuple[tuple[str, str], ...]  # site and reason
    digest: bytes


@dataclass(frozen=True)
class ProductsDecrypted(Worked):
    """A key holder has decrypted the products: one number a pair, row by row."""

    products: tuple[float, ...]
    imaginary: tuple[str, ...]


@dataclass(frozen=True)
class SumFinished(Worked):
    """The encrypted or masked sum is written; SHA-256 of it."""

    sum_digest: bytes


@dataclass(frozen=True)
class SumArrived(Worked):
    """The coordinator's sum is here, whole. There is one an attempt."""


@dataclass(frozen=True)
class Challenging(Worked):
    """What this key holder asks about the certified sum; from now on it takes no other."""

    challenge: bytes


@dataclass(frozen=True)
class ChallengeAnswered(Worked):
    """The coordinator's answer to one key holder is computed."""

    holder: str
    answer: bytes


@dataclass(frozen=True)
class ChallengeRefused(Worked):
    """The coordinator can't answer a key holder, or must not."""

    holder: str
    reason: str


@dataclass(frozen=True)
class Masked(Worked):
    """A step of masking is done at this site; what the coordinator shall know of it."""

    answer: pb.MaskingAnswer


@dataclass(frozen=True)
class Opened(Worked):
    """The sum of a certified statement is opened and applied; the new version is on disk.

    ``next_clip_norm``: what its noised count makes of the clip norm; 0: the norm is fixed.
    """

    root_digest: bytes
    model_digest: bytes
    mean_loss: float
    next_clip_norm: float = 0.0


@dataclass(frozen=True)
class WorkFailed(Worked):
    """A piece of local work failed for good; ``phase`` says which."""

    phase: str
    reason: str


@dataclass(frozen=True)
class VersionHere:
    """A model version that was asked for is on disk, verified."""

    model_digest: bytes


@dataclass(frozen=True)
class VersionMissing:
    """A model version could not be had from anyone asked."""

    model_digest: bytes
    reason: str


@dataclass(frozen=True)
class CertificatesArrived:
    """Certificates of rounds after our head, oldest first, from ``site``."""

    site: str
    certificates: tuple[pb.Certificate, ...]


Event = (
    Received
    | Tick
    | RunRequested
    | StopRequested
    | Situation
    | ManifestChanged
    | PeerAhead
    | LocalTrained
    | KeyDealt
    | ContextHeld
    | MaskedSumStarted
    | UpdateReady
    | UpdateArrived
    | UpdateAdded
    | UpdateRefused
    | QuestionReady
    | ProductsDecrypted
    | SumFinished
    | SumArrived
    | Challenging
    | ChallengeAnswered
    | ChallengeRefused
    | Masked
    | Opened
    | WorkFailed
    | VersionHere
    | VersionMissing
    | CertificatesArrived
)


# ---- effects, in the order of a round ------------------------------------------


@dataclass(frozen=True)
class Persist:
    """Write this to disk, in one transaction, and wait for it; ``commits`` are filed too."""

    durable: Durable
    commits: tuple[pb.Commit, ...] = ()


@dataclass(frozen=True)
class Send:
    """Send a message to one peer; a loss is the protocol's business, not the driver's."""

    to: str
    body: Body


@dataclass(frozen=True)
class BeginAttempt(OfAttempt):
    """Forget what belonged to other attempts: spool, keys, training under way.

    Of an attempt that may never be entered, too: the one under way was left.
    """


@dataclass(frozen=True)
class Coordinate:
    """We take part in this plan: what belongs to it may come to us, whether we train or not."""

    plan: pb.Plan


@dataclass(frozen=True)
class DealKey:
    """Make the round key; public part to the coordinator, secret part sealed to each holder.

    Answer with `KeyDealt` before either is sent.
    """

    plan: pb.Plan
    coordinator: str


@dataclass(frozen=True)
class Mask(OfAttempt):
    """Do a participant's step of masking; without an order, make the attempt's keys.

    Ends with `Masked`; the shares of the others end with `ContextHeld`.
    """

    order: pb.MaskingOrder | None


@dataclass(frozen=True)
class OpenShares(OfAttempt):
    """Give this site's shares for the one certified outcome; ends with `Masked`."""

    survivors: tuple[str, ...]
    dropouts: tuple[str, ...]


@dataclass(frozen=True)
class StartMaskedSum:
    """The coordinator begins the sum of those who have shared their secrets."""

    plan: pb.Plan
    keys: pb.MaskingOrder
    sharers: tuple[str, ...]


@dataclass(frozen=True)
class Train:
    """Train from the parent version; answer with `LocalTrained`."""

    plan: pb.Plan
    weight: float


@dataclass(frozen=True)
class EncryptUpdate(OfAttempt):
    """Quantise, hide and send the update to the coordinator; answer with `UpdateReady`.

    ``draw``: the attempt in which the integers were drawn. Those that are kept of it are
    sent again, bit by bit.
    """

    coordinator: str
    weight: float
    scale_exponents: tuple[int, ...]
    draw: int = 0


@dataclass(frozen=True)
class AddUpdate(OfAttempt):
    """Add an update that has arrived to the sum, if its tags have the nonce that was signed."""

    site: str
    nonce: bytes = b""


@dataclass(frozen=True)
class CompareUpdates(OfAttempt):
    """Sketch the updates that are here and write their encrypted dot products.

    ``nonces``: of each site's tags, as it signed them.
    """

    sites: tuple[str, ...]
    nonces: tuple[bytes, ...]


@dataclass(frozen=True)
class SendProducts:
    """Send the certified question to each key holder, and behind it stream the products."""

    holders: tuple[str, ...]
    certified: pb.Certified


@dataclass(frozen=True)
class DecryptProducts(OfAttempt):
    """Decrypt the products of these sites' updates; answer with `ProductsDecrypted`."""

    sites: tuple[str, ...]
    products_digest: bytes


@dataclass(frozen=True)
class FinishSum(OfAttempt):
    """Write the encrypted sum."""


@dataclass(frozen=True)
class SendSum:
    """Send the certified statement to each of these sites, and behind it stream the sum."""

    holders: tuple[str, ...]
    certified: pb.Certified


@dataclass(frozen=True)
class Challenge(OfAttempt):
    """Bind this key holder to what was certified, and only then make its challenge.

    ``nonces``: the contributors, sorted, each with the nonce of its tags.
    Answer with `Challenging`.
    """

    coordinator: str
    sum_digest: bytes
    nonces: tuple[tuple[str, bytes], ...]


@dataclass(frozen=True)
class AnswerChallenge(OfAttempt):
    """Prove the sum to one key holder; ends with `ChallengeAnswered` or `ChallengeRefused`."""

    holder: str
    challenge: bytes


@dataclass(frozen=True)
class ApplySum(OfAttempt):
    """Open the sum of a certified statement, apply it to the parent, persist the new version.

    ``answer``: the coordinator's, to our challenge; ``opened``: in masking mode the
    shares of each site. Ends with `Opened`.
    """

    root_digest: bytes
    scale_exponents: tuple[int, ...]
    total_weight: float
    parent_digest: bytes
    sum_digest: bytes
    contributors: tuple[str, ...]
    dropouts: tuple[str, ...] = ()
    answer: bytes = b""
    opened: Mapping[str, Mapping[str, bytes]] = field(default_factory=dict)


@dataclass(frozen=True)
class FetchVersion:
    """Get a model version from the first of these sites that has it."""

    model_digest: bytes
    sites: tuple[str, ...]


@dataclass(frozen=True)
class Accuse:
    """Keep this evidence, for people: a site has signed two things that exclude each other."""

    evidence: pb.Evidence


@dataclass(frozen=True)
class WentBack:
    """Tell people that this site's state is an older copy: it had signed what it did not know."""

    round: int
    told_by: str
    forgotten: str  # "promised attempt 4"


@dataclass(frozen=True)
class FetchCertificates:
    """Get the certificates after round ``after`` from a site that is ahead."""

    site: str
    after: int


@dataclass(frozen=True)
class Adopt:
    """A new version is committed: answer questions with it as soon as it is indexed."""

    round: int
    model_digest: bytes
    contributors: tuple[str, ...]


@dataclass(frozen=True)
class Progress(OfAttempt):
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


Effect = (
    Persist
    | Send
    | BeginAttempt
    | Coordinate
    | DealKey
    | Mask
    | OpenShares
    | StartMaskedSum
    | Train
    | EncryptUpdate
    | AddUpdate
    | CompareUpdates
    | SendProducts
    | DecryptProducts
    | FinishSum
    | SendSum
    | Challenge
    | AnswerChallenge
    | ApplySum
    | FetchVersion
    | FetchCertificates
    | Accuse
    | WentBack
    | Adopt
    | Progress
)

Effects = list[Effect]
