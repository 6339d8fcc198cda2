"""The scale of a sum: what participants tell of their updates, and what follows from it. PURE.

Before anybody uploads, each signs the exponents of its update, and the coordinator passes
them on as they are: every site derives the same fixed-point scale from them, and the same
sites that it leaves out.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import TypeVar

from peers.attempts.bundle import Ground
from peers.plans.robust import is_robust
from peers.wire.errors import RemoteProtocolError
from peers.wire.signing import Keys, Kind, digest_of, must_be, read
from proto import federation_pb2 as pb

_V = TypeVar("_V", int, tuple[int, ...])


# A site whose largest change is 2^6 times the ordinary one would cost all others 6 bits
# of their fixed-point integers: it is kept out before the scale is agreed.
MOST_BITS_ABOVE = 6


# ---- what is told ------------------------------------------------------------------


@dataclass
class Reports:
    """Who has trained, and the exponents that each has signed; None: it failed."""

    ground: Ground
    keys: Keys
    plan: pb.Plan
    signed: dict[str, pb.Signed | None] = field(default_factory=dict)
    _exponents: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def trained(self, sender: str, message: pb.Trained) -> None:
        """A participant has trained, or says that it could not."""
        if not message.HasField("exponents"):
            self.signed[sender] = None
            return
        signed = message.exponents
        report = read(self.keys, Kind.EXPONENTS, pb.Exponents, signed, self.ground.manifest)
        must_be(signed.site == sender, sender, "reports another site's training")
        same = report.plan_digest == digest_of(self.plan)
        must_be(same, sender, "trained for another plan")
        self.signed[sender] = signed
        self._exponents[sender] = tuple(report.scale_exponents)

    def of(self, sites: Collection[str] | None) -> dict[str, pb.Signed]:
        """What was told, by site, sorted; of these sites only, if they are given."""
        return {
            site: signed
            for site, signed in sorted(self.signed.items())
            if signed is not None and (sites is None or site in sites)
        }

    def scale(self, sites: Collection[str]) -> tuple[tuple[int, ...], dict[str, str]]:
        """The scale that follows, and who is left out of it, and why. Raises ValueError."""
        return common_scale(self.plan, {site: self._exponents[site] for site in sites})


@dataclass(frozen=True)
class Scaled:
    """What all have told, as it was passed on, and what follows from it for every site.

    ``exponents``: the common fixed-point scale, one a parameter group; ``left_out``: sites
    whose updates nobody takes, by the exponents that they signed, and why.
    """

    reports: Mapping[str, tuple[int, ...]]
    exponents: tuple[int, ...]
    left_out: Mapping[str, str]


def read_scale(message: pb.Scale, plan: pb.Plan, ground: Ground, keys: Keys) -> Scaled:
    """What follows from what the coordinator passes on.

    Raises RemoteProtocolError, CertificateError unless participants have signed it of this plan.
    """
    reports: dict[str, tuple[int, ...]] = {}
    participants = {one.site for one in plan.participants}
    plan_digest = digest_of(plan)
    for signed in message.exponents:
        one = read(keys, Kind.EXPONENTS, pb.Exponents, signed, ground.manifest)
        right = one.plan_digest == plan_digest and signed.site in participants
        must_be(right, plan.coordinator, f"passes on what {signed.site} told of another plan")
        reports[signed.site] = tuple(one.scale_exponents)
    try:
        exponents, left_out = common_scale(plan, reports)
    except ValueError as error:
        raise RemoteProtocolError(f"{plan.coordinator}: {error}") from error
    return Scaled(reports, exponents, left_out)


# ---- what follows ------------------------------------------------------------------


def common_scale(
    plan: pb.Plan, reports: Mapping[str, Sequence[int]]
) -> tuple[tuple[int, ...], dict[str, str]]:
    """One fixed-point scale for all: the largest exponent of each group.

    With a robust rule it is one for all groups, because only integers of one unit have
    dot products that mean something. Sites that would cost the others their bits, or that
    tell of another vector than most, are left out, by every site alike: the second value
    says who, and why. A sum that is repeated has its scale already. Raises ValueError when
    nobody reports.
    """
    if plan.scale_exponents:
        return tuple(plan.scale_exponents), {}
    if not reports:
        raise ValueError("no site reports the scale of its update")
    exponents_of = {site: tuple(exponents) for site, exponents in reports.items()}
    rejected = _unlike(plan, exponents_of)
    exponents_of = {
        site: exponents for site, exponents in exponents_of.items() if site not in rejected
    }
    rejected |= wild(plan, exponents_of)
    remaining = (exponents for site, exponents in exponents_of.items() if site not in rejected)
    largest = tuple(max(column) for column in zip(*remaining, strict=True))
    return ((max(largest),) * len(largest) if is_robust(plan.training) else largest), rejected


def _unlike(plan: pb.Plan, exponents_of: Mapping[str, tuple[int, ...]]) -> dict[str, str]:
    """Sites that report what can't belong to the vector that most report of."""
    groups = _commonest([len(exponents) for exponents in exponents_of.values()])
    reasons = {
        site: f"it reports {len(exponents)} parameter groups, most sites {groups}: update it"
        for site, exponents in exponents_of.items()
        if len(exponents) != groups
    }
    if not plan.noise_multiplier:
        return reasons
    rest = {site: exponents for site, exponents in exponents_of.items() if site not in reasons}
    same = _commonest(list(rest.values()))
    reason = "it differs from most sites about the scale of the same noise: update it"
    return reasons | {site: reason for site, exponents in rest.items() if exponents != same}


def _commonest(values: Sequence[_V]) -> _V:
    """Of equally common ones the least, so that every site finds the same."""
    counts = Counter(values)
    return min(counts, key=lambda value: (-counts[value], value))


def wild(plan: pb.Plan, exponents: Mapping[str, Sequence[int]]) -> dict[str, str]:
    """Sites whose scale exponents are far above the others', and what to tell them.

    The lower median, each site once: as long as fewer than half of them lie it is an
    honest site's, or between two. By weight, a liar with a large one would be the median.
    """
    examples = {one.site: one.num_examples for one in plan.participants}
    # Exact, so that every site leaves out the same ones.
    largest = {
        site: Fraction(plan.full_weight, examples[site]) * Fraction(2) ** max(own)
        for site, own in exponents.items()
    }
    middle = statistics.median_low(largest.values())
    return {
        site: f"its largest change is {float(own):.1e}, the median site's {float(middle):.1e}; "
        f"at most {1 << MOST_BITS_ABOVE} times as much can be summed"
        for site, own in largest.items()
        if own > middle * (1 << MOST_BITS_ABOVE)
    }
