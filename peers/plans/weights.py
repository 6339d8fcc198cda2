"""How much each site's update counts in a sum (docs/decisions/0023-weights.md). PURE."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from proto import federation_pb2 as pb

# Of the others' sum, the squares of all weights are at least so much of the largest
# one's: updates that have nothing in common then have a cosine of 0.894 with it at most.
DOMINANCE = 1.25


def weights(plan: pb.Plan) -> dict[str, float]:
    """Each participant's weight, at most 1: its examples over what weighs 1."""
    return {p.site: p.num_examples / plan.full_weight for p in plan.participants}


def clipped(examples: Mapping[str, int], tolerated: int) -> dict[str, int]:
    """Numbers of examples, clipped to the largest cap under which nobody stands out.

    Nor among those who are left when as many drop out as may: a site that promised and
    stayed away would fail every attempt. Of two sites each can subtract its own, whatever
    their weights: nothing is clipped.
    """
    low, high = min(examples.values()), max(examples.values())
    dropouts = borne(len(examples), tolerated)
    while low < high:  # the larger the cap, the more the largest stands out
        middle = (low + high + 1) // 2
        cut = [min(count, middle) for count in examples.values()]
        if stands_out(cut, tolerated, dropouts=dropouts):
            high = middle - 1
        else:
            low = middle
    return {site: min(count, low) for site, count in examples.items()}


def borne(sites: int, tolerated: int) -> int:
    """How many of so many may drop out and leave enough for a sum: f at most, one at least."""
    spare = max(1, tolerated)
    return max(0, min(spare, sites - spare - 2))


def stands_out(weights: Sequence[float], tolerated: int, *, dropouts: int = 0) -> bool:
    """Whether one site dominates what f others leave when they subtract their own.

    At least one site looks. The largest stands out most when the next largest are those
    that subtract, and ``dropouts`` the next ones: what is left beside it must have a
    quarter of its square, so that updates that have nothing in common have a cosine of
    0.894 with the rest at most.
    """
    looking = max(1, tolerated)
    if len(weights) <= looking + 1:
        return False
    squares = sorted((weight * weight for weight in weights), reverse=True)
    return sum(squares[looking + 1 + dropouts :]) < (DOMINANCE - 1) * squares[0]


def too_dominant(plan: pb.Plan, contributors: Iterable[str]) -> str:
    """Why a sum of these would be too much of one site's update; empty when it is not."""
    examples = {one.site: one.num_examples for one in plan.participants}
    counts = [examples[site] for site in contributors]
    if not stands_out(counts, plan.faulty_sites):
        return ""
    return (
        "of those who are left, one site weighs so much that the sum would tell its update: "
        "it is drawn again without those who dropped out"
    )
