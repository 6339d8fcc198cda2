"""Robust rules: which updates may be in the sum, and what to say to those that may not. PURE.

Sites may be Byzantine in what they contribute; f is how many of n are assumed to be.

| rule         | sees                 | keeps                                   | needs       |
|--------------|----------------------|-----------------------------------------|-------------|
| norm         | norms                | norm <= median + 5.19 MAD               | n >= 2f + 1 |
| norm_sigma   | norms                | norm <= mean + 2.5 standard deviations  | n >= 2f + 1 |
| krum         | pairwise distances   | the best score (encrypted: the `least`) | n >= 2f + 3 |
| multi_krum   | pairwise distances   | the n - f - 2 best scores               | n >= 2f + 3 |

They need no update, only the Gram matrix G[a, b] = <x_a, x_b>, which can be had from
encrypted updates (crypto/ckks/dot_products.py): norms are roots of its diagonal, squared
distances G[a, a] + G[b, b] - 2 G[a, b]. Rules that need every value in the clear, like the
median of each coordinate, there are none.

Key holders sign what they decrypted. Honest ones have the same numbers to the last bit
(one ciphertext, one key), so of f + 1 equal answers one at least is honest, and they are
what the question says. Every site selects from them by the same function.

Before any rule, what cannot be the Gram matrix of real vectors is rejected: not
finite, negative on the diagonal, beyond Cauchy-Schwarz, or marked as imaginary.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from crypto.ckks.parameters import PRODUCT_PRECISION
from peers.plans.weights import weights
from peers.wire.errors import RemoteProtocolError
from peers.wire.messages import one_line
from proto import federation_pb2 as pb
from proto.bounds import names_of, sites_needed

Gram = Sequence[Sequence[float]]

NONE = "none"

# Iglewicz and Hoaglin (1993), "How to Detect and Handle Outliers": a modified z-score
# 0.6745 (x - median) / MAD above 3.5 is an outlier; on normal data MAD = 0.6745 sigma.
MOST_MADS = 3.5 / 0.6745
# Sites that agree closely have a MAD near nothing, and an honest one with other data
# would be far out in such units; so the MAD counts as at least a tenth of the median.
LEAST_MAD = 0.1
MOST_COMPARED = 64
MOST_SIGMAS = 2.5  # FedSearch-NLP, equation 5


@dataclass(frozen=True)
class Selection:
    """Who is in the sum, sorted; who is not, and why, in words for people at that site."""

    kept: tuple[str, ...]
    rejected: dict[str, str] = field(default_factory=dict)


# ---- of a plan --------------------------------------------------------------------

RULE_NAMES = names_of(pb.RobustRule.DESCRIPTOR)


def is_robust(training: pb.TrainingPlan) -> bool:
    """Whether a run wants updates compared before they are summed."""
    return training.robust != pb.ROBUST_NONE


def answers_needed(plan: pb.Plan) -> int:
    """Equal answers of which one at least is honest."""
    return max(plan.faulty_sites, plan.training.byzantine_sites) + 1


def least_summed(plan: pb.Plan) -> int:
    """The fewest updates that a sum may be of: also among f liars two that are not theirs."""
    return max(plan.training.min_participants, plan.faulty_sites + 2)


def participants_needed(training: pb.TrainingPlan) -> int:
    """How many must take part, so that enough are left when f of them are rejected."""
    return training.min_participants + (training.byzantine_sites if is_robust(training) else 0)


def choose(plan: pb.Plan, question: pb.Statement, answer: pb.Products, exponent: int) -> Selection:
    """Apply the plan's rule to what key holders decrypted for a certified question.

    ``exponent`` is that of the common scale, so that people read norms of updates; it
    is a power of two and changes nothing about the selection. Raises RemoteProtocolError
    when the answer is none to this question, ValueError when there are too few sites for
    the rule.
    """
    sites = tuple(one.site for one in question.contributions)
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
    chosen = select(
        RULE_NAMES[training.robust],
        question.byzantine_sites,
        sites,
        rows,
        least=least_summed(plan),
        precision=1.01 * PRODUCT_PRECISION * unit,
        imaginary=tuple(answer.imaginary),
        weights=[weight[site] for site in sites],
    )
    reasons = {site: one_line(reason) for site, reason in chosen.rejected.items()}
    return Selection(chosen.kept, reasons)


# ---- preconditions ----------------------------------------------------------------


def objection(rule: str, f: int, sites: int, least: int, *, encrypted: bool = True) -> str:
    """Why this rule can't be used among so many sites; empty when it can.

    ``least`` is the smallest number of updates that may be summed: what is summed is
    read by everybody, so in a federation that hides updates it is at least 2.
    """
    if rule == NONE:
        return ""
    needed = sites_needed(rule, f, encrypted=encrypted)
    if encrypted and sites > MOST_COMPARED:
        return f"{sites} participants: {rule} compares at most {MOST_COMPARED} encrypted updates"
    if sites < needed:
        return f"{rule} against f = {f} sites needs at least {needed} participants, not {sites}"
    if sites - f < least:
        return (
            f"{rule} against f = {f} of {sites} sites is sure of {sites - f} updates, and a sum "
            f"has at least {least} (min_participants)"
        )
    return ""


def warning(rule: str, sites: int) -> str:
    """What a person who chose this rule should know; empty when there is nothing.

    No value among n is farther from their mean than (n - 1) / sqrt(n) sample standard
    deviations (Thompson 1935; Shiffler 1988), however large it is.
    """
    farthest = (sites - 1) / math.sqrt(sites)
    if rule != "norm_sigma" or farthest > MOST_SIGMAS:
        return ""
    return (
        f"norm_sigma can never reject anybody among {sites} sites: no norm is more than "
        f"{farthest:.2f} standard deviations above the mean, and the rule begins at "
        f"{MOST_SIGMAS} (from 9 sites on it can); use norm"
    )


# ---- selection ----------------------------------------------------------------------


def select(
    rule: str,
    f: int,
    sites: Sequence[str],
    gram: Gram,
    *,
    least: int = 1,
    precision: float = 0.0,
    imaginary: Collection[str] = (),
    weights: Sequence[float] = (),
) -> Selection:
    """Apply a rule to the Gram matrix of these sites' updates, in their order.

    ``precision`` is the largest absolute error of an entry; ``imaginary`` names sites
    whose encrypted updates are no real vectors. Sites rejected for such reasons are
    certainly not honest, so the rule then looks for that many fewer. ``least``: krum
    and multi_krum keep at least so many. ``weights``: the matrix is that of weighted
    updates, and the rule is for them without their weights. Raises ValueError when a
    precondition does not hold: `objection` says so before.
    """
    problem = objection(rule, f, len(sites), least, encrypted=False)
    if problem:
        raise ValueError(problem)
    rejected = _impossible(sites, gram, precision, imaginary)
    gram = unweighted(gram, weights) if weights else gram
    blur = math.sqrt(precision) / min(weights, default=1.0)
    left = [place for place, site in enumerate(sites) if site not in rejected]
    if rule != NONE and len(left) > 1:
        names = [sites[place] for place in left]
        among = [[gram[a][b] for b in left] for a in left]
        rejected |= _JUDGES[rule](names, among, max(0, f - len(rejected)), least, blur)
    remaining = tuple(sorted(site for site in sites if site not in rejected))
    return Selection(remaining, rejected)


def unweighted(gram: Gram, weights: Sequence[float]) -> list[list[float]]:
    """The Gram matrix of x_a, given that of w_a x_a: small sites must not look like outliers."""
    return [
        [value / (one * other) for value, other in zip(row, weights, strict=True)]
        for row, one in zip(gram, weights, strict=True)
    ]


def _impossible(
    sites: Sequence[str], gram: Gram, precision: float, imaginary: Collection[str]
) -> dict[str, str]:
    """Sites whose numbers can't be those of real vectors, with what is wrong."""
    rejected: dict[str, str] = {}
    for place, site in enumerate(sites):
        if site in imaginary:
            rejected[site] = "its encrypted update has imaginary parts, which honest ones have not"
        elif not -precision <= gram[place][place] < math.inf:
            rejected[site] = f"its update has a squared norm of {gram[place][place]:.3g}"
    while True:
        against = _contradictions(sites, gram, precision, rejected)
        most = max(map(len, against.values()), default=0)
        if not most:
            return rejected
        for site, others in against.items():
            if len(others) == most:
                rejected[site] = (
                    f"its products with {', '.join(others)} are larger than its norm allows"
                )


def _contradictions(
    sites: Sequence[str], gram: Gram, precision: float, rejected: Collection[str]
) -> dict[str, list[str]]:
    """For each site those with which it is beyond Cauchy-Schwarz: |<x, y>| <= |x| |y|."""
    against: dict[str, list[str]] = {site: [] for site in sites if site not in rejected}
    places = [place for place, site in enumerate(sites) if site not in rejected]
    for a in places:
        for b in places:
            norms = (gram[a][a] + precision) * (gram[b][b] + precision)
            # "not <=" and not ">": a NaN must be found, too.
            limit = math.sqrt(max(norms, 0.0)) * (1 + 1e-9) + precision
            if a != b and not abs(gram[a][b]) <= limit:
                against[sites[a]].append(sites[b])
    return against


def _norm(sites: Sequence[str], gram: Gram, _f: int, _least: int, blur: float) -> dict[str, str]:
    norms = _norms(gram)
    median = statistics.median(norms)
    mad = statistics.median(abs(norm - median) for norm in norms)
    unit = max(mad, LEAST_MAD * median, blur)  # norms can't be told apart more closely
    return {
        site: f"norm {norm:.3g} is {_times(norm - median, unit)} MADs above the median {median:.3g}"
        for site, norm in zip(sites, norms, strict=True)
        if norm > median + MOST_MADS * unit
    }


def _norm_sigma(
    sites: Sequence[str], gram: Gram, _f: int, _least: int, blur: float
) -> dict[str, str]:
    norms = _norms(gram)
    mean, sigma = statistics.fmean(norms), max(statistics.stdev(norms), blur)
    return {
        site: f"norm {norm:.3g} is {_times(norm - mean, sigma)} standard deviations above the "
        f"mean {mean:.3g}"
        for site, norm in zip(sites, norms, strict=True)
        if norm > mean + MOST_SIGMAS * sigma
    }


def _krum(sites: Sequence[str], gram: Gram, f: int, least: int, _blur: float) -> dict[str, str]:
    return _all_but_best(sites, gram, f, max(1, least))


def _multi_krum(
    sites: Sequence[str], gram: Gram, f: int, least: int, _blur: float
) -> dict[str, str]:
    # As many as count in a score: the limit of Damaskinos et al. 2019 (AggregaThor).
    return _all_but_best(sites, gram, f, max(len(sites) - f - 2, least, 1))


def _all_but_best(sites: Sequence[str], gram: Gram, f: int, count: int) -> dict[str, str]:
    scores = krum_scores(gram, f)
    ranked = sorted(zip(scores, sites, strict=True))  # equal scores: by name, everywhere alike
    worst = ranked[min(count, len(ranked)) - 1][0]
    neighbours = _neighbours(len(sites), f)
    return {
        site: f"its squared distances to its {neighbours} nearest updates add up to {score:.3g}, "
        f"those of the worst update kept to {worst:.3g}"
        for score, site in ranked[count:]
    }


_Judge = Callable[[Sequence[str], Gram, int, int, float], dict[str, str]]
_JUDGES: dict[str, _Judge] = {
    "norm": _norm,
    "norm_sigma": _norm_sigma,
    "krum": _krum,
    "multi_krum": _multi_krum,
}


def krum_scores(gram: Gram, f: int) -> list[float]:
    """Per update the sum of squared distances to its n - f - 2 nearest.

    Blanchard, El Mhamdi, Guerraoui and Stainer 2017, section 4.
    """
    scores = []
    for a, row in enumerate(gram):
        distances = [max(row[a] + gram[b][b] - 2 * row[b], 0.0) for b in range(len(gram)) if b != a]
        scores.append(math.fsum(sorted(distances)[: _neighbours(len(gram), f)]))
    return scores


def _neighbours(sites: int, f: int) -> int:
    return max(1, sites - f - 2)


def _norms(gram: Gram) -> list[float]:
    return [math.sqrt(max(row[place], 0.0)) for place, row in enumerate(gram)]


def _times(distance: float, unit: float) -> str:
    return f"{distance / unit:.3g}" if unit > 0 else "infinitely many"
