"""Deliberate protocol bugs; the simulation must catch each within a stated number of seeds.

A bug is a handful of replaced methods, planted for the length of a `with`. Where
the check of a certificate by its receiver would hide the bug of its maker, that
check is taken out too: the invariants must do without it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from peers.tenure import Tenure

from peers import effects as do
from peers.adoption import Adoption
from peers.coordination import Coordination
from peers.manifest import FederationManifest
from peers.masking_steps import is_masked
from peers.participation import Participation
from peers.protocol import Protocol
from peers.proving import Opening
from proto import federation_pb2 as pb
from tests.simulation import World

Plant = tuple[type, str, Callable[..., Any]]


@dataclass(frozen=True)
class Bug:
    """What is planted, which invariant catches it, and within how many seeds."""

    name: str
    caught_as: str
    seeds: int
    plants: tuple[Plant, ...]

    @contextmanager
    def planted(self) -> Iterator[None]:
        """The bug is there until the end of the block."""
        kept = [(owner, name, owner.__dict__[name]) for owner, name, _ in self.plants]
        for owner, name, replacement in self.plants:
            setattr(owner, name, replacement)
        try:
            yield
        finally:
            for owner, name, original in kept:
                setattr(owner, name, original)


_step, _enter, _accept = Protocol.step, Protocol._enter_attempt, Protocol._accept
_on_accept, _commit = Protocol._on_accept, Protocol._commit
_voted, _tally = Coordination.voted, Coordination._commit_if_majority
_begin, _apply = Opening.begin, Participation.apply
_propose, _created = Coordination._plan_or_propose, Coordination.__post_init__


def _first(kind: type, body: type | None = None) -> Callable[..., Any]:
    """Effects of this kind are carried out before the writes that they rest on."""

    def step(self: Protocol, event: do.Event, now: float) -> do.Effects:
        def waits(effect: do.Effect) -> bool:
            chosen = isinstance(effect, kind)
            return not (chosen and (body is None or isinstance(effect.body, body)))  # type: ignore[union-attr]

        return sorted(_step(self, event, now), key=waits)

    return step


def _believe_all(_self: World, _certificate: pb.Certificate) -> None:
    """A receiver that does not verify."""


def _promise_without_value(self: Protocol) -> pb.Promise:
    promise = _promise(self)
    promise.ClearField("accepted")
    return promise


_promise = Protocol._promise


def _plan_whatever_was_accepted(self: Coordination, now: float) -> do.Effects:
    for promise in self._promises.values():
        promise.ClearField("accepted")
    return _propose(self, now)


def _count_every_vote(self: Coordination, vote: pb.Vote, now: float) -> do.Effects:
    if vote.site not in self._votes or self.phase != "vote":
        return _voted(self, vote, now)
    self._votes[f"{vote.site}+"] = vote
    return self._commit_if_majority(now)


def _majority_of_responders(self: Coordination, now: float) -> do.Effects:
    whole = self.manifest
    sites = tuple(site for site in whole.sites if site.id in self._promises)
    self.manifest = FederationManifest(whole.federation_id, whole.version, sites)
    try:
        return _tally(self, now)
    finally:
        self.manifest = whole


def _responders_are_enough(self: Coordination, now: float) -> do.Effects:
    whole = self.manifest
    sites = tuple(site for site in whole.sites if site.id in self._promises)
    self.manifest = FederationManifest(whole.federation_id, whole.version, sites)
    try:
        return _propose(self, now)
    finally:
        self.manifest = whole


def _commit_at_the_first_vote(self: Coordination, now: float) -> do.Effects:
    whole = self.manifest
    self.manifest = FederationManifest(whole.federation_id, whole.version, (whole.site(self.site),))
    try:
        return _tally(self, now)
    finally:
        self.manifest = whole


def _promise_in_memory(self: Protocol, attempt: int) -> None:
    """The coordinator does not write its own promise down."""
    before = len(self._effects)
    _enter(self, attempt)
    self._effects[before:] = [e for e in self._effects[before:] if not isinstance(e, do.Persist)]


def _accept_below_promise(self: Protocol, sender: str, message: pb.Accept) -> None:
    kept = self.durable
    self.durable = replace(kept, promised=min(kept.promised, message.attempt))
    try:
        _on_accept(self, sender, message)
    except Exception:
        self.durable = kept
        raise


def _accept_twice(self: Protocol, attempt: int, value: pb.VoteBody, mean_loss: float) -> None:
    accepted = self.durable.accepted
    if accepted is not None and accepted.attempt == attempt:
        self.durable = replace(self.durable, accepted=None)
    _accept(self, attempt, value, mean_loss)


def _vote_without_version(self: Protocol, sender: str, message: pb.Accept) -> None:
    _on_accept(self, sender, message)
    if self._pending_accept is message:
        self._accept(message.attempt, message.value, math.nan)


def _commit_backwards(self: Protocol, commits: tuple[pb.Commit, ...]) -> None:
    body = commits[-1].certificate.body
    if body.round <= self.head_round:
        self._persist(do.Durable(body.round, body.model_digest, run=self.durable.run))
        return
    _commit(self, commits)


def _adopt_anything(
    self: Adoption, commit: pb.Commit, _head: do.Durable, everyone: tuple[str, ...]
) -> do.Effects:
    self._waiting = (commit,)
    return [do.FetchVersion(commit.certificate.body.model_digest, tuple(everyone))]


def _apply_anything(self: Participation, message: pb.Apply) -> do.Effects:
    if self._opening.claim is not None or not self.holds_key:
        return []
    return [*self._opening.claimed(message), *self._apply_when_ready()]


def _apply_unproven(self: Opening) -> pb.Apply | None:
    """The answer is not waited for."""
    if is_masked(self.plan):
        return _begin(self)
    self._told = True
    self._answer = self._answer or bytes(8)
    return _begin(self)


def _take_any_claim(self: Participation, message: pb.Apply) -> do.Effects:
    """The sum is applied as the coordinator said last, whatever was claimed before."""
    effects = _apply(self, message)
    self._opening.claim = pb.Apply()
    self._opening.claim.CopyFrom(message)
    self._opening.claim.sum_digest = bytes(32)
    return effects


def _need_nobody(self: Coordination, count: int, what: str) -> None:
    """A coordinator that goes on with one update."""


_kept_promises: dict[tuple[bytes, int, str], dict[str, pb.Promise]] = {}


def _keep_promises(self: Coordination) -> None:
    """What was promised to an earlier attempt is counted in this one."""
    _created(self)
    key = (self.parent_digest, self.round, self.site)
    self._promises = _kept_promises.setdefault(key, {})


def _forget_value(self: Protocol, attempt: int) -> None:
    self.durable = replace(self.durable, accepted=None)
    _enter(self, attempt)


def _newest_at_once(self: Tenure, _accepted: pb.Accepted | None, _older: int = 0) -> None:
    self.in_force = self.newest


def _any_manifest(self: Tenure, asked: pb.Prepare, _head: do.Durable) -> FederationManifest | None:
    version = asked.manifest_version
    return self._known(version) if version <= self.newest.version else None


_UNVERIFIED = (World, "_verify_certificate", _believe_all)

BUGS = (
    Bug("vote before persist", "persisted before it is signed|on my disk", 20, (
        (Protocol, "step", _first(do.SignVote)),)),
    Bug("promise before persist", "before it was persisted", 20, (
        (Protocol, "step", _first(do.Send, pb.Promise)),)),
    Bug("prepare before persist", "has not persisted", 20, (
        (Protocol, "step", _first(do.Send, pb.Prepare)),)),
    Bug("hide the accepted value", "its promise hides", 100, (
        (Protocol, "_promise", _promise_without_value),)),
    Bug("forget the accepted value", "forgets what it accepted", 100, (
        (Protocol, "_enter_attempt", _forget_value),)),
    Bug("ignore an accepted value", "two versions of round|stuck", 1000, (
        (Coordination, "_plan_or_propose", _plan_whatever_was_accepted),)),
    Bug("count a duplicate vote", "a vote counts twice", 100, (
        (Coordination, "voted", _count_every_vote), _UNVERIFIED)),
    Bug("reuse an attempt after a crash", "has not persisted|used twice", 20, (
        (Protocol, "_enter_attempt", _promise_in_memory),)),
    Bug("majority of the responders", "certified by a minority|two versions", 200, (
        (Coordination, "_plan_or_propose", _responders_are_enough),
        (Coordination, "_commit_if_majority", _majority_of_responders), _UNVERIFIED)),
    Bug("commit with too few votes", "certified by a minority", 20, (
        (Coordination, "_commit_if_majority", _commit_at_the_first_vote), _UNVERIFIED)),
    Bug("accept below the promise", "a promise was taken back|breaks its promise", 500, (
        (Protocol, "_on_accept", _accept_below_promise),)),
    Bug("vote twice in an attempt", "a site votes once", 100, (
        (Protocol, "_accept", _accept_twice),)),
    Bug("vote for what is not here", "on my disk", 20, (
        (Protocol, "_on_accept", _vote_without_version),)),
    Bug("go back to an older head", "never goes back|taken back", 200, (
        (Protocol, "_commit", _commit_backwards), (Adoption, "committed", _adopt_anything))),
    Bug("decrypt a sum of too few", "decrypts a sum of", 200, (
        (Participation, "apply", _apply_anything), (Coordination, "_need", _need_nobody))),
    Bug("apply without a proof", "without the proof of its claim|took no claim", 20, (
        (Opening, "begin", _apply_unproven),)),
    Bug("apply another sum than was claimed", "applies another sum", 20, (
        (Participation, "apply", _take_any_claim),)),
    Bug("keep promises across attempts", "two versions of round", 1000, (
        (Coordination, "__post_init__", _keep_promises),)),
    Bug("leave the manifest of a vote", "two versions of round|stuck", 200, (
        (Tenure, "settle", _newest_at_once), (Tenure, "of_attempt", _any_manifest))),
)  # fmt: skip


def forget() -> None:
    """What a planted bug kept of another run."""
    _kept_promises.clear()
