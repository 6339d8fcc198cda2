"""What participants tell the coordinator before they upload: the key, and their scale. PURE.

Both are signed, and passed on as they are: every site derives the same from them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from peers.attempts import selection
from peers.attempts.bundle import Ground
from peers.attempts.roles import is_masked
from peers.wire.errors import RemoteProtocolError
from peers.wire.signing import Keys, Kind, digest_of, must_be, read
from proto import federation_pb2 as pb


@dataclass
class RoundKey:
    """What updates are hidden with, as the coordinator sees it.

    With a round key its public part and the dealer's word on it; in masking mode the
    digest of everyone's keys.
    """

    ground: Ground
    keys: Keys
    plan: pb.Plan
    public_digest: bytes = b""
    roster_digest: bytes = b""
    commitment: pb.Signed | None = None

    def committed(self, sender: str, message: pb.KeyCommitted) -> None:
        """The dealer's word on the key, which everybody will hold it to; the first one counts."""
        if self.commitment is not None or not self.plan.key_dealer:
            return
        signed, manifest = message.commitment, self.ground.manifest
        told = read(self.keys, Kind.KEY_COMMITMENT, pb.KeyCommitment, signed, manifest)
        dealer = signed.site == sender == self.plan.key_dealer
        must_be(dealer, sender, "commits itself to a key that it does not deal")
        same = told.plan_digest == digest_of(self.plan)
        must_be(same, sender, "deals a key for another plan")
        self.commitment = signed

    @property
    def ready(self) -> bool:
        """Whether updates can be added from now on."""
        if is_masked(self.plan):
            return bool(self.roster_digest)
        return self.commitment is not None and bool(self.public_digest)

    @property
    def objection(self) -> str:
        """Why the key that is here is not the one that was signed; empty when it is."""
        if self.commitment is None:
            return ""
        told = pb.KeyCommitment.FromString(self.commitment.body)
        if told.public_digest == self.public_digest:
            return ""
        return f"the key dealer {self.plan.key_dealer} sent another key than it signed"


@dataclass
class Reports:
    """Who has trained, and the exponents that each has signed; None: it failed."""

    ground: Ground
    keys: Keys
    plan: pb.Plan
    told: dict[str, pb.Signed | None] = field(default_factory=dict)
    _exponents: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def trained(self, sender: str, message: pb.Trained) -> None:
        """A participant has trained, or says that it could not."""
        if not message.HasField("exponents"):
            self.told[sender] = None
            return
        signed = message.exponents
        told = read(self.keys, Kind.EXPONENTS, pb.Exponents, signed, self.ground.manifest)
        must_be(signed.site == sender, sender, "reports another site's training")
        same = told.plan_digest == digest_of(self.plan)
        must_be(same, sender, "trained for another plan")
        self.told[sender] = signed
        self._exponents[sender] = tuple(told.scale_exponents)

    def of(self, sites: Collection[str] | None) -> dict[str, pb.Signed]:
        """What was told, by site, sorted; of these sites only, if they are given."""
        return {
            site: signed
            for site, signed in sorted(self.told.items())
            if signed is not None and (sites is None or site in sites)
        }

    def scale(self, sites: Collection[str]) -> tuple[tuple[int, ...], dict[str, str]]:
        """The scale that follows, and who is left out of it, and why. Raises ValueError."""
        return scale_of(self.plan, {site: self._exponents[site] for site in sites})


@dataclass(frozen=True)
class Scaled:
    """What all have told, as it was passed on, and what follows from it for every site.

    ``exponents``: the common fixed-point scale, one a parameter group; ``left_out``: sites
    whose updates nobody takes, by the exponents that they signed, and why.
    """

    told: Mapping[str, tuple[int, ...]]
    exponents: tuple[int, ...]
    left_out: Mapping[str, str]


def read_scale(message: pb.Scale, plan: pb.Plan, ground: Ground, keys: Keys) -> Scaled:
    """What follows from what the coordinator passes on.

    Raises RemoteProtocolError, CertificateError unless participants have signed it of this plan.
    """
    told: dict[str, tuple[int, ...]] = {}
    participants = {one.site for one in plan.participants}
    plan_digest = digest_of(plan)
    for signed in message.exponents:
        one = read(keys, Kind.EXPONENTS, pb.Exponents, signed, ground.manifest)
        right = one.plan_digest == plan_digest and signed.site in participants
        must_be(right, plan.coordinator, f"passes on what {signed.site} told of another plan")
        told[signed.site] = tuple(one.scale_exponents)
    try:
        exponents, left_out = scale_of(plan, told)
    except ValueError as error:
        raise RemoteProtocolError(f"{plan.coordinator}: {error}") from error
    return Scaled(told, exponents, left_out)


def scale_of(
    plan: pb.Plan, exponents: dict[str, tuple[int, ...]]
) -> tuple[tuple[int, ...], dict[str, str]]:
    """The scale that follows from what participants told, and who is left out of it.

    A sum that is repeated has its scale already. Raises ValueError.
    """
    if plan.scale_exponents:
        return tuple(plan.scale_exponents), {}
    return selection.common_scale(plan, exponents)
