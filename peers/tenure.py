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
without training in it, so that a value accepted under it can be committed.
"""

from __future__ import annotations

from collections.abc import Callable

from peers.manifest import FederationManifest
from proto import federation_pb2 as pb


class Tenure:
    """The manifest in force at a site, and the newest that it has."""

    def __init__(
        self, newest: FederationManifest, past: Callable[[int], FederationManifest | None]
    ) -> None:
        """``past`` knows the manifests that were installed here before."""
        self.in_force = newest
        self._newest = newest
        self._past = past

    @property
    def outdated(self) -> bool:
        """Whether the attempt under way runs under an older manifest than our newest."""
        return self.in_force.version < self._newest.version

    def install(self, newest: FederationManifest) -> None:
        """The operator installed a newer one; `settle` takes it into force."""
        self._newest = newest

    def settle(self, accepted: pb.Accepted | None) -> None:
        """Between attempts: the newest, or that of the value accepted in this round."""
        fixed = self._known(accepted.value.manifest_version) if accepted else None
        self.in_force = fixed or self._newest

    def of_attempt(self, version: int, accepted: pb.Accepted | None) -> FederationManifest | None:
        """The manifest for a new attempt under this version; None when we can't take part."""
        if accepted is not None and accepted.value.manifest_version != version:
            return None
        return self._known(version) if version <= self._newest.version else None

    def enter(self, manifest: FederationManifest) -> None:
        """An attempt under this manifest begins: it is in force until `settle`."""
        self.in_force = manifest

    def _known(self, version: int) -> FederationManifest | None:
        for manifest in (self.in_force, self._newest):
            if manifest.version == version:
                return manifest
        return self._past(version)
