"""The select phase of a robust round: from dot products to who is in the sum. PURE.

Key holders sign what they decrypted. Honest ones have the same numbers to the last bit
(one ciphertext, one key), so of f + 1 equal answers one at least is honest, and they are
what the question says. Every site selects from them by the same function.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, TypeVar

from crypto.ckks.parameters import PRODUCT_PRECISION, CkksParameters, parameters_of
from peers.attempts import robust
from peers.attempts.roles import weights
from peers.wire.errors import RemoteProtocolError
from peers.wire.messages import one_line
from proto import federation_pb2 as pb
from proto.bounds import names_of

if TYPE_CHECKING:
    from peers.attempts.statement import Known

_V = TypeVar("_V", int, tuple[int, ...])

RULE_NAMES = names_of(pb.RobustRule.DESCRIPTOR)

# A site whose largest change is 2^6 times the ordinary one would cost all others 6 bits
# of their fixed-point integers: it is kept out before the scale is agreed.
MOST_BITS_ABOVE = 6


def is_robust(training: pb.TrainingPlan) -> bool:
    """Whether a run wants updates compared before they are summed."""
    return training.robust != pb.ROBUST_NONE


def answers_needed(plan: pb.Plan) -> int:
    """Equal answers of which one at least is honest."""
    return max(plan.faulty_sites, plan.training.byzantine_sites) + 1


def parameters(plan: pb.Plan) -> CkksParameters:
    """The encryption parameters of the plan's round."""
    return parameters_of(
        len(plan.participants), plan.training.bits, measurable=is_robust(plan.training)
    )


def participants_needed(training: pb.TrainingPlan) -> int:
    """How many must take part, so that enough are left when f of them are rejected."""
    least = max(2, training.min_participants)
    return least + training.byzantine_sites if is_robust(training) else least


def objection(training: pb.TrainingPlan, sites: int) -> str:
    """Why the plan's robust rule can't be used among so many; empty when it can."""
    rule, f = RULE_NAMES[training.robust], training.byzantine_sites
    if is_robust(training) and training.mode == pb.MASKING:
        return (
            f"the rule {rule} compares encrypted updates, and masked ones can't be compared: "
            "choose training.mode ckks, or no rule"
        )
    return robust.objection(rule, f, sites, max(2, training.min_participants))


def common_scale(
    plan: pb.Plan, reports: Mapping[str, Sequence[int]]
) -> tuple[tuple[int, ...], dict[str, str]]:
    """One fixed-point scale for all: the largest exponent of each group.

    With a robust rule it is one for all groups, because only integers of one unit have
    dot products that mean something. Sites that would cost the others their bits, or that
    tell of another vector than most, are left out, by every site alike: the second value
    says who, and why. Raises ValueError when nobody reports.
    """
    if not reports:
        raise ValueError("no site reports the scale of its update")
    told = {site: tuple(exponents) for site, exponents in reports.items()}
    rejected = _unlike(plan, told)
    told = {site: exponents for site, exponents in told.items() if site not in rejected}
    rejected |= wild(plan, told)
    kept = (exponents for site, exponents in told.items() if site not in rejected)
    largest = tuple(max(column) for column in zip(*kept, strict=True))
    return ((max(largest),) * len(largest) if is_robust(plan.training) else largest), rejected


def _unlike(plan: pb.Plan, told: Mapping[str, tuple[int, ...]]) -> dict[str, str]:
    """Sites that report what can't belong to the vector that most report of."""
    groups = _commonest([len(exponents) for exponents in told.values()])
    found = {
        site: f"it reports {len(exponents)} parameter groups, most sites {groups}: update it"
        for site, exponents in told.items()
        if len(exponents) != groups
    }
    if not plan.noise_multiplier:
        return found
    rest = {site: exponents for site, exponents in told.items() if site not in found}
    same = _commonest(list(rest.values()))
    reason = "it differs from most sites about the scale of the same noise: update it"
    return found | {site: reason for site, exponents in rest.items() if exponents != same}


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


def choose(plan: pb.Plan, question: Known, answer: pb.Products, exponent: int) -> robust.Selection:
    """Apply the plan's rule to what key holders decrypted for a certified question.

    ``exponent`` is that of the common scale, so that people read norms of updates; it
    is a power of two and changes nothing about the selection. Raises RemoteProtocolError
    when the answer is none to this question, ValueError when there are too few sites for
    the rule.
    """
    sites = question.contributors
    training = plan.training
    pairs = len(sites) * (len(sites) + 1) // 2
    if len(answer.products) != pairs or not set(answer.imaginary) <= set(sites):
        raise RemoteProtocolError(f"an answer has {len(answer.products)} products, not {pairs}")
    unit = math.ldexp(1.0, exponent) ** 2
    limit = (1 << (training.bits - 1)) - 1
    rows = [[0.0] * len(sites) for _ in sites]
    numbers = iter(answer.products)
    for a in range(len(sites)):
        for b in range(a + 1):
            rows[a][b] = rows[b][a] = next(numbers) / limit**2 * unit
    weight = weights(plan)
    chosen = robust.select(
        RULE_NAMES[training.robust],
        question.message.byzantine_sites,
        sites,
        rows,
        least=max(2, training.min_participants),
        precision=1.01 * PRODUCT_PRECISION * unit,
        imaginary=tuple(answer.imaginary),
        weights=[weight[site] for site in sites],
    )
    told = {site: one_line(reason) for site, reason in chosen.rejected.items()}
    return robust.Selection(chosen.kept, told)
