"""Who is what in an attempt: rotation, key holders, weights. PURE."""

from __future__ import annotations

from collections.abc import Sequence

from crypto.roster import smallest_threshold
from peers.certificates import plan_digest
from peers.manifest import FederationManifest
from proto import federation_pb2 as pb


def coordinator_of(manifest: FederationManifest, round_: int, attempt: int) -> str:
    """The site that runs this attempt: the sorted enabled sites in rotation."""
    sites = manifest.enabled_ids
    return sites[(round_ + attempt) % len(sites)]


def led_until(manifest: FederationManifest, round_: int, attempt: int) -> set[str]:
    """Who coordinates this attempt or coordinated one before it."""
    first = max(0, attempt - len(manifest.enabled_ids))  # from there on everybody had a turn
    return {coordinator_of(manifest, round_, a) for a in range(first, attempt + 1)}


def next_after(site: str, candidates: Sequence[str]) -> str:
    """The first candidate after ``site`` in rotation, never ``site`` itself."""
    others = sorted(c for c in candidates if c != site)
    return next((c for c in others if c > site), others[0])


def key_holders(plan: pb.Plan, coordinator: str) -> list[str]:
    """Who may read the sum: the participants, in ckks mode without the coordinator.

    In masking mode the coordinator opens the sum itself, and there is no key.
    """
    masked = plan.training.mode == pb.MASKING
    return [p.site for p in plan.participants if masked or p.site != coordinator]


def threshold_of(plan: pb.Plan) -> int:
    """How many sites must open a masked sum, and be in it: one of them may lie.

    t > (n + 1) / 2: the coordinator, itself a site, may say what it likes about who
    dropped out and still reads no update (docs/decisions/0011).
    """
    return smallest_threshold(len(plan.participants), colluding=1)


def weights(plan: pb.Plan) -> dict[str, float]:
    """Each participant's weight, at most 1: its examples over the largest number."""
    largest = max(p.num_examples for p in plan.participants)
    return {p.site: p.num_examples / largest for p in plan.participants}


def value_of(
    plan: pb.Plan,
    federation_id: str,
    contributors: Sequence[str],
    model_digest: bytes,
    rejected: Sequence[str] = (),
) -> pb.VoteBody:
    """What a site votes for after it applied the sum."""
    return pb.VoteBody(
        federation_id=federation_id,
        round=plan.round,
        parent_digest=plan.parent_digest,
        model_digest=model_digest,
        contributors=sorted(contributors),
        manifest_version=plan.manifest_version,
        plan_digest=plan_digest(plan.training),
        rejected=sorted(rejected),
    )
