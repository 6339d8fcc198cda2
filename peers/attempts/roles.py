"""Who is what in an attempt: rotation, key holders, weights. PURE."""

from __future__ import annotations

from collections.abc import Sequence

from crypto.masking.roster import smallest_threshold
from peers.wire.manifest import FederationManifest
from proto import federation_pb2 as pb


def coordinator_of(manifest: FederationManifest, round_: int, attempt: int) -> str:
    """The site that runs this attempt: the sorted enabled sites in rotation."""
    sites = manifest.enabled_ids
    return sites[(round_ + attempt) % len(sites)]


def next_after(site: str, candidates: Sequence[str]) -> str:
    """The first candidate after ``site`` in rotation, never ``site`` itself."""
    others = sorted(c for c in candidates if c != site)
    return next((c for c in others if c > site), others[0])


def is_masked(plan: pb.Plan | None) -> bool:
    """Whether a plan hides updates by masks."""
    return plan is not None and plan.training.mode == pb.MASKING


def key_holders(plan: pb.Plan) -> list[str]:
    """Who holds the round's key, and may open the sum: participants but the coordinator.

    In masking mode there is no key, and every contributor takes the masks off by itself.
    """
    masked = is_masked(plan)
    return [p.site for p in plan.participants if masked or p.site != plan.coordinator]


def threshold_of(plan: pb.Plan) -> int:
    """How many sites must open a masked sum, and be in it, when f of them may lie.

    t > (n + f) / 2, and one at least is counted as lying: the coordinator, itself a site,
    may say what it likes about who dropped out and still reads no update
    (docs/decisions/0011).
    """
    colluding = max(1, plan.faulty_sites)
    return smallest_threshold(len(plan.participants), colluding=colluding)


def weights(plan: pb.Plan) -> dict[str, float]:
    """Each participant's weight, at most 1: its examples over what weighs 1."""
    return {p.site: p.num_examples / plan.full_weight for p in plan.participants}
