"""Runs: the wish of a person at some site to train up to a round. PURE."""

from __future__ import annotations

from peers import comparison
from peers.manifest import FederationManifest
from proto import federation_pb2 as pb


class RunRefused(Exception):
    """A run that a person asked for can't start; the text says why."""


def supersedes(run: pb.Run, known: pb.Run | None) -> bool:
    """Of two runs the greater (generation, run_id) stands, at every site alike."""
    if known is None:
        return True
    return (run.generation, run.run_id) > (known.generation, known.run_id)


def following(
    known: pb.Run | None, site: str, run_id: str, target_round: int, plan: pb.TrainingPlan
) -> pb.Run:
    """A run that supersedes the one known; a target at or below the head means stop."""
    return pb.Run(
        generation=known.generation + 1 if known else 1,
        run_id=run_id,
        requested_by=site,
        target_round=target_round,
        plan=plan,
    )


def objection(plan: pb.TrainingPlan, manifest: FederationManifest) -> str:
    """Why this manifest can't carry such a run; empty when it can."""
    sites = len(manifest.enabled_ids)
    if plan.min_participants > sites:
        return (
            f"the plan needs {plan.min_participants} participants, the manifest has {sites} "
            "enabled sites; lower training.min_participants or add sites"
        )
    needed = comparison.participants_needed(plan)
    if needed > sites:
        return (
            f"{needed} participants are needed so that {plan.min_participants} are left when "
            f"{plan.byzantine_sites} are rejected, the manifest has {sites} enabled sites; "
            "lower robust.byzantine_sites or add sites"
        )
    return comparison.objection(plan, sites)


def under_way(run: pb.Run | None) -> str:
    """Says which run is in the way of another, and what to do."""
    if run is None:
        return "a run is under way"
    return (
        f"run {run.run_id} of {run.requested_by} is under way until round {run.target_round}; "
        "wait for it, or stop it with `fedctl train --stop`"
    )
