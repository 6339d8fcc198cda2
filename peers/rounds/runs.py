"""Runs: the wish of a person at some site to train up to a round. PURE."""

from __future__ import annotations

from collections.abc import Iterable

from peers.attempts import effects as do
from peers.attempts import modes
from peers.plans import robust
from peers.plans.policy import Policy, weakening
from peers.wire.manifest import FederationManifest
from proto import federation_pb2 as pb

# A run's number may be so far above the one that is known. A site that was away catches
# up over any real distance, and nobody can use the numbers up: that takes 2^42 runs.
FARTHEST = 1 << 20


class RunRefused(Exception):
    """A run that a person asked for can't start; the text says why."""


def stands_over(
    run: pb.Run,
    known: pb.Run | None,
    head_round: int,
    manifest: FederationManifest,
    *,
    over: pb.Run | None = None,
    put_aside: Iterable[pb.Run] = (),
) -> bool:
    """Whether ``run`` takes the place of the one known, at every site that sees both alike.

    Of two runs the greater (generation, target round, run_id) stands, and of two that a
    liar has numbered alike the greater encoding. A site that was
    away numbers its run like the one that it missed. It has caught up with the rounds of
    that one, so its own goes farther: what people asked for is not lost to a run that is
    over. But while a run has rounds left, one with a weaker protection does not stand over
    it, in whichever order the two are seen, also of the same site: it is stopped first.
    Where each weakens what the other protects, the one that came first stays: under any
    other rule a site could choose its run so that it takes over. Stopping is always
    possible, and what is ``over`` (`last_over`) stays over: nobody can say a run again that
    was stopped. Nor one that was ``put_aside`` for the protection of another: that may be
    numbered below it, and be over. So a site goes from run to run in one
    order, never in a circle. The run of a site that was expelled stands over none of a site
    that takes part, and keeps none of them put aside.
    A number that is absurdly far ahead (`is_far`) is no run here.
    """
    if over is not None and _rank(run) <= _rank(over):
        return False
    own = [one for one in put_aside if one.requested_by == run.requested_by]
    # With the site of what it was put aside for it is free again, as for who never heard of that.
    ruled = known is None or manifest.enabled(known.requested_by)
    begins = run.target_round > head_round
    if ruled and begins and any(_rank(run) <= _rank(one) for one in own):
        return False
    if known is None:
        return can_go_on(run, head_round, manifest)
    if run == known:
        return False
    here, there = (manifest.enabled(one.requested_by) for one in (run, known))
    if here != there:  # nobody else takes the run of a site that was expelled
        return here
    # For one that these sites can't train nothing is put aside: it would keep runs away.
    able, was_able = (can_go_on(one, head_round, manifest) for one in (run, known))
    if able != was_able:
        return able
    if over is not None and _rank(known) <= _rank(over):
        return True  # over itself, it protects nothing: the stop of a site that is back counts
    if weakens(run, known, head_round, manifest):
        return False
    return _rank(run) > _rank(known) or bool(weakens(known, run, head_round, manifest))


def is_far(run: pb.Run, usual: int) -> bool:
    """Whether a run of another site is numbered absurdly far ahead of what is usual.

    ``usual``: what f + 1 other sites have reached, one of them honest. No run that is known
    counts: a site that lies could lead one that hears from nobody else so far away, step by
    step, that the others could not follow.
    """
    return run.generation > usual + FARTHEST


def can_go_on(run: pb.Run, head_round: int, manifest: FederationManifest) -> bool:
    """Whether the manifest's sites can train what is left of it; of one that is over: nothing."""
    return run.target_round <= head_round or not objection(run.plan, manifest)


def weakens(run: pb.Run, unfinished: pb.Run, head_round: int, manifest: FederationManifest) -> str:
    """Why a run may not take the place of an unfinished one; empty when it may."""
    over = unfinished.target_round <= head_round or run.target_round <= head_round
    if over or not manifest.enabled(unfinished.requested_by):
        return ""
    return weakening(run.plan, unfinished.plan)


def goes_on(
    begun: pb.Run,
    run: pb.Run,
    head_round: int,
    *,
    over: pb.Run | None = None,
) -> bool:
    """Whether an attempt that was begun by one run goes on where another one is in force.

    Where that is merely a later one. Nothing goes on behind a stop, or where the run in force
    protects more. Else who asks for run after run would end attempt after attempt.
    """
    stopped = over is not None and _rank(begun) <= _rank(over)
    if stopped or run.target_round <= head_round or begun.target_round <= head_round:
        return False
    return not weakening(begun.plan, run.plan)


def _rank(run: pb.Run) -> tuple[int, int, str, bytes]:
    whole = run.SerializeToString(deterministic=True)
    return run.generation, run.target_round, run.run_id, whole


def all_over(head: do.Durable, manifest: FederationManifest, *others: pb.Signed) -> list[pb.Signed]:
    """Of each site in the manifest the last of its runs that are over here, by name.

    Of each: what one site signs, which may be expelled, hides nothing that another has stopped.
    """
    known = [] if head.signed_run is None else [head.signed_run]
    ended = (
        one
        for one in (*known, *head.state.over, *others)
        if pb.Run.FromString(one.body).target_round <= head.head_round
    )
    return last_of_each(ended, manifest)


def last_of_each(signed: Iterable[pb.Signed], manifest: FederationManifest) -> list[pb.Signed]:
    """Of each site that the manifest lists the last one of these runs, by name."""
    last: dict[str, tuple[pb.Run, pb.Signed]] = {}
    listed = {site.id for site in manifest.sites}
    for one in signed:
        run, site = pb.Run.FromString(one.body), one.site
        if site in listed and (site not in last or _rank(run) > _rank(last[site][0])):
            last[site] = run, one
    return [last[site][1] for site in sorted(last)]


def left_behind(
    head: do.Durable, manifest: FederationManifest, taken: pb.Signed, *over: pb.Signed
) -> pb.RoundState:
    """The state of a site that takes a run, with the runs that it never takes again."""
    state = pb.RoundState()
    state.CopyFrom(head.state)
    del state.over[:], state.put_aside[:]
    state.over.extend(all_over(head, manifest, *over))
    aside, known = list(head.state.put_aside), head.signed_run
    # Not of a site that is shut out: where it is let in again its run comes back, for some
    # may never have heard that it was away, and all have to come to the same run.
    if known and is_active(head, manifest):
        aside += [known] if known.body != taken.body else []
    elif known and not manifest.enabled(known.site):
        aside = [one for one in aside if one.site != taken.site]
    state.put_aside.extend(last_of_each(aside, manifest))
    return state


def kept(state: pb.RoundState) -> pb.RoundState:
    """What of a round's state goes on to the next round."""
    return pb.RoundState(over=state.over, put_aside=state.put_aside)


def last_over(head: do.Durable, manifest: FederationManifest) -> pb.Signed | None:
    """Of the runs that are over here the one that stands over the others.

    Not of a site that was expelled: nobody else would take it.
    """
    over = [one for one in all_over(head, manifest) if manifest.enabled(one.site)]
    return max(over, key=lambda one: _rank(pb.Run.FromString(one.body)), default=None)


def is_active(head: do.Durable, manifest: FederationManifest) -> bool:
    """Whether the run that is known has rounds left; it ends with who asked for it.

    Also with a site that is let in again, and has stopped it: while that one was shut out its
    stop counted nowhere, and the run was gone on with.
    """
    run = head.run
    if run is None or run.target_round <= head.head_round:
        return False
    if not manifest.enabled(run.requested_by):
        return False
    over = last_over(head, manifest) if head.state.over else None
    return over is None or _rank(run) > _rank(pb.Run.FromString(over.body))


def must_take_part(site: str, manifest: FederationManifest) -> None:
    """Raises RunRefused where nobody would hear what this site's people want of runs."""
    if not manifest.enabled(site):
        raise RunRefused(
            f"manifest {manifest.version} does not let this site take part, and no other hears of "
            "it: ask at another site, or the federation's keeper for a manifest that does "
            "(fedctl manifest show)"
        )


def requested(
    wish: do.RunRequested,
    head: do.Durable,
    site: str,
    policy: Policy,
    manifest: FederationManifest,
) -> pb.Run:
    """The run that a person at this site asks for. Raises RunRefused."""
    must_take_part(site, manifest)
    if is_active(head, manifest):
        raise RunRefused(_under_way(head.run))
    if refusal := policy.objection(wish.plan) or objection(wish.plan, manifest):
        raise RunRefused(refusal)
    target = head.head_round + wish.rounds
    known = head.run if head.run and manifest.enabled(head.run.requested_by) else None
    run = following(known, site, manifest.federation_id, wish.run_id, target, wish.plan)
    return _above_what_is_gone(run, head, manifest)


def stopped(run_id: str, head: do.Durable, site: str, manifest: FederationManifest) -> pb.Run:
    """The end of the run under way, as a run to where we are. Raises RunRefused."""
    if head.run is None or not is_active(head, manifest):
        raise RunRefused("no run is under way")
    must_take_part(site, manifest)
    run = head.run
    stop = following(run, site, run.federation_id, run_id, head.head_round, run.plan)
    return _above_what_is_gone(stop, head, manifest)


def _above_what_is_gone(run: pb.Run, head: do.Durable, manifest: FederationManifest) -> pb.Run:
    """Numbered so that it is taken, also where the run known is not the last one numbered.

    Not above those of a site that is shut out, which count nowhere: what is numbered above a
    liar's number that few have heard of would be out of reach of the others.
    """
    gone = (*head.state.over, *head.state.put_aside)
    last = [pb.Run.FromString(one.body).generation for one in gone if manifest.enabled(one.site)]
    run.generation = max([run.generation, *(one + 1 for one in last)])
    return run


def following(
    known: pb.Run | None,
    site: str,
    federation_id: str,
    run_id: str,
    target_round: int,
    plan: pb.TrainingPlan,
) -> pb.Run:
    """A run that supersedes the one known; a target at or below the head means stop."""
    return pb.Run(
        generation=known.generation + 1 if known else 1,
        run_id=run_id,
        requested_by=site,
        federation_id=federation_id,
        target_round=target_round,
        plan=plan,
    )


def objection(plan: pb.TrainingPlan, manifest: FederationManifest) -> str:
    """Why this manifest can't carry such a run; empty when it can."""
    if manifest.objection:
        return manifest.objection
    sites = len(manifest.enabled_ids)
    if plan.min_participants > sites:
        return (
            f"the plan needs {plan.min_participants} participants, the manifest has {sites} "
            "enabled sites; lower training.min_participants or add sites"
        )
    needed = robust.participants_needed(plan)
    if needed > sites:
        return (
            f"{needed} participants are needed so that {plan.min_participants} are left when "
            f"{plan.byzantine_sites} are rejected, the manifest has {sites} enabled sites; "
            "lower robust.byzantine_sites or add sites"
        )
    return modes.objection(plan, sites)


def in_words(run: pb.Run | None) -> str:
    """A run, for people."""
    if run is None:
        return "no run"
    return f"run {run.run_id} of {run.requested_by}, to round {run.target_round}"


def _under_way(run: pb.Run | None) -> str:
    """Says which run is in the way of another, and what to do."""
    if run is None:
        return "a run is under way"
    return (
        f"run {run.run_id} of {run.requested_by} is under way until round {run.target_round}; "
        "wait for it, or stop it with `fedctl train --stop`"
    )
