"""Which federation manifest a site goes by, and since when. PURE.

The manifest that an attempt runs under is fixed at its start. A newer one takes
effect between attempts, unless this site has accepted a value in the round: what
a majority of one manifest has accepted must be seen by whoever prepares later, so
a site that voted under a manifest stays with it until the round is over, also
over a restart. Majorities of two manifests that differ by one site share a site,
and that site takes part under one of them only: no round is committed twice.
(The same reasoning lets Raft change one server at a time: Ongaro, "Consensus:
Bridging Theory and Practice", 2014, §4.1.)

A site that has accepted nothing joins an attempt under the older manifest too,
without training in it, so that a value accepted under it can be committed. And
when an attempt failed because sites stay with an older manifest, its coordinator
says so: who has accepted nothing then goes by that one in the next attempt, so
that those of the old list and those of the new do not wait for one another in turn.
"""

from __future__ import annotations

from collections.abc import Callable

from peers.effects import Durable
from peers.manifest import FederationManifest
from peers.roles import coordinator_of
from proto import federation_pb2 as pb


class Tenure:
    """The manifest in force at a site, and the newest that it has."""

    def __init__(
        self, newest: FederationManifest, past: Callable[[int], FederationManifest | None]
    ) -> None:
        """``past`` knows the manifests that were installed here before."""
        self.in_force = newest
        self.newest = newest
        self._past = past

    @property
    def outdated(self) -> bool:
        """Whether the attempt under way runs under an older manifest than our newest."""
        return self.in_force.version < self.newest.version

    @property
    def expelled(self) -> frozenset[str]:
        """Who takes part by the manifest in force, and by our newest does not any more."""
        return frozenset(self.in_force.enabled_ids) - frozenset(self.newest.enabled_ids)

    def whose_turn(self, round_: int, attempt: int) -> int:
        """That attempt, or the next one whose coordinator is not expelled: none is waited for."""
        turns = range(attempt, attempt + len(self.in_force.enabled_ids))
        return next((turn for turn in turns if not self.expels_lead(round_, turn)), attempt)

    def expels_lead(self, round_: int, attempt: int) -> bool:
        """Whether the coordinator of that attempt is expelled."""
        return coordinator_of(self.in_force, round_, attempt) in self.expelled

    def install(self, newest: FederationManifest) -> None:
        """The operator installed a newer one; `settle` takes it into force."""
        self.newest = newest

    def settle(self, accepted: pb.Accepted | None, older: int = 0) -> None:
        """Between attempts: that of the value accepted in this round, or the newest.

        ``older``: others have accepted a value under this version.
        """
        fixed = None
        if accepted is not None:
            fixed = self._known(accepted.value.manifest_version)
        elif 0 < older < self.newest.version:
            fixed = self._known(older)
        self.in_force = fixed or self.newest

    def of_attempt(self, asked: pb.Prepare, head: Durable) -> FederationManifest | None:
        """The manifest of the attempt that we are asked to; None when we can't take part."""
        version, accepted = asked.manifest_version, head.accepted
        if asked.attempt == head.promised:  # we are in it, or in another one of that number
            return self.in_force if self.in_force.version == version else None
        if accepted is not None and accepted.value.manifest_version != version:
            return None
        return self._known(version) if version <= self.newest.version else None

    def led_by(self, sender: str, over: pb.AttemptFailed) -> bool:
        """Whether the attempt that is over was that site's, by any manifest that it may go by."""
        named = 0 < over.manifest_version < self.newest.version
        older = self._known(over.manifest_version) if named else None
        return any(
            sender == coordinator_of(known, over.round, over.attempt)
            for known in (self.in_force, self.newest, older)
            if known is not None
        )

    def enter(self, manifest: FederationManifest) -> None:
        """An attempt under this manifest begins: it is in force until `settle`."""
        self.in_force = manifest

    def _known(self, version: int) -> FederationManifest | None:
        for manifest in (self.in_force, self.newest):
            if manifest.version == version:
                return manifest
        return self._past(version)
