"""The select phase of a robust round: from dot products to who is in the sum. PURE.

The coordinator and the key holders decide by the same function of the same numbers,
so a holder that answered can check the coordinator's selection. Of 2f + 1 answers at
least f + 1 are honest, and these are equal to the last bit (one ciphertext, one key):
so the entry-wise median of 2f + 1 answers is what every honest holder decrypted.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

from crypto.parameters import PRODUCT_PRECISION, CkksParameters, parameters_of
from peers import robust
from peers.errors import RemoteProtocolError
from peers.messages import one_line
from peers.roles import weights
from proto import federation_pb2 as pb

RULE_NAMES = {
    pb.ROBUST_NONE: "none",
    pb.ROBUST_NORM: "norm",
    pb.ROBUST_NORM_SIGMA: "norm_sigma",
    pb.ROBUST_KRUM: "krum",
    pb.ROBUST_MULTI_KRUM: "multi_krum",
}

RULES = {name: rule for rule, name in RULE_NAMES.items()}

# A site whose largest change is 2^6 times the ordinary one would cost all others 6 bits
# of their fixed-point integers: it is kept out before the scale is agreed.
MOST_BITS_ABOVE = 6


def is_robust(training: pb.TrainingPlan) -> bool:
    """Whether updates are compared before they are summed."""
    return training.robust != pb.ROBUST_NONE


def parameters(plan: pb.Plan) -> CkksParameters:
    """The encryption parameters of the plan's round."""
    count, training = len(plan.participants), plan.training
    return parameters_of(count, training.bits, measurable=is_robust(training))


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


def wild(plan: pb.Plan, exponents: Mapping[str, Sequence[int]]) -> dict[str, str]:
    """Sites whose scale exponents are far above the others', and what to tell them."""
    weight = weights(plan)
    rejected: dict[str, str] = {}
    largest = {site: max(own) - math.log2(weight[site]) for site, own in exponents.items()}
    middle = statistics.median_high(largest.values())
    for site, own in largest.items():
        if own > middle + MOST_BITS_ABOVE:
            rejected[site] = (
                f"its largest change is 2^{own:.0f}, the median site's 2^{middle:.0f}; "
                f"at most 2^{MOST_BITS_ABOVE} times as much can be summed"
            )
    return rejected


def choose(
    plan: pb.Plan,
    asked: pb.Compare,
    products: Sequence[float],
    imaginary: Sequence[str],
    exponent: int,
) -> robust.Selection:
    """Apply the plan's rule to the answer (as in `pb.Compared`) to what was asked.

    ``exponent`` is that of the common scale, so that people read norms of updates; it
    is a power of two and changes nothing about the selection. Raises ValueError when
    there are too few sites for the rule.
    """
    sites = tuple(asked.sites)
    training = plan.training
    unit = math.ldexp(1.0, exponent) ** 2
    limit = (1 << (training.bits - 1)) - 1
    rows = [[0.0] * len(sites) for _ in sites]
    numbers = iter(products)
    for a in range(len(sites)):
        for b in range(a + 1):
            rows[a][b] = rows[b][a] = next(numbers) / limit**2 * unit
    weight = weights(plan)
    return robust.select(
        RULE_NAMES[training.robust],
        asked.byzantine_sites,
        sites,
        rows,
        least=max(2, training.min_participants),
        precision=1.01 * PRODUCT_PRECISION * unit,
        imaginary=imaginary,
        weights=[weight[site] for site in sites],
    )


class Comparison:
    """What key holders answered to one question, at the coordinator."""

    def __init__(self, plan: pb.Plan, asked: pb.Compare, holders: Sequence[str]) -> None:
        self._plan = plan
        self._asked = asked
        self._holders = frozenset(holders)
        self._answers: dict[str, pb.Compared] = {}
        self._unable: set[str] = set()

    @property
    def needed(self) -> int:
        """Answers whose median no f liars among them can move."""
        return 2 * self._plan.training.byzantine_sites + 1

    @property
    def complete(self) -> bool:
        """Whether there are enough answers."""
        return len(self._answers) >= self.needed

    @property
    def hopeless(self) -> bool:
        """Whether there can't be enough any more."""
        return len(self._holders) - len(self._unable) < self.needed

    def answered(self, holder: str, message: pb.Compared) -> None:
        """Raises RemoteProtocolError when it is no answer to this question."""
        if holder not in self._holders:
            raise RemoteProtocolError(f"{holder} holds no key and can have decrypted nothing")
        pairs = len(self._asked.sites) * (len(self._asked.sites) + 1) // 2
        if len(message.products) != pairs or not set(message.imaginary) <= set(self._asked.sites):
            raise RemoteProtocolError(
                f"{holder} answers with {len(message.products)} products; asked were {pairs}"
            )
        self._answers.setdefault(holder, message)

    def unable(self, holder: str) -> None:
        """A holder that can't answer."""
        if holder not in self._answers:
            self._unable.add(holder)

    def select(self, exponent: int) -> robust.Selection:
        """The selection by the median of the answers. Raises ValueError."""
        answers = list(self._answers.values())
        products = [
            statistics.median(column)
            for column in zip(*(answer.products for answer in answers), strict=True)
        ]
        imaginary = [
            site
            for site in self._asked.sites
            if 2 * sum(site in answer.imaginary for answer in answers) > len(answers)
        ]
        chosen = choose(self._plan, self._asked, products, imaginary, exponent)
        told = {site: one_line(reason) for site, reason in chosen.rejected.items()}
        return robust.Selection(chosen.kept, told)
