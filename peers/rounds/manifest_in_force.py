"""Which federation manifest a site goes by. PURE.

A newer one takes effect with the next attempt, and never an older one again: votes under
it could be of a site that was expelled since. A round goes on under the newer one where
it was: what may be committed somewhere travels as a lock, whose proof is verified under
the manifest that it was made under.

At most one step goes into force between two committed rounds (one site comes or goes, or
f changes by one). Then a quorum of either manifest shares an honest site with any quorum
of the other, and that site votes for no second version. Before the first round, and behind
rounds of old, it is one step from the manifest under which a site has first promised.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from peers.wire.manifest import FederationManifest
from proto import federation_pb2 as pb


class ManifestInForce:
    """The manifest in force at a site, and the newest that it has."""

    def __init__(
        self,
        newest: FederationManifest,
        past: Callable[[int], FederationManifest | None],
        head: pb.Certificate | None,
        entered: int = 0,
        began: int = 0,
    ) -> None:
        """``past`` knows manifests that were installed, or learnt, here.

        ``began``, ``entered``: the versions under which this site promised first and last in
        the round under way; 0: it has not.
        """
        self.newest = newest
        self.current = newest
        self.waiting = ""  # why rounds do not go by the newest, and what to do
        self._past = past
        self._base: FederationManifest | None = None
        self.new_round(head)
        if self._base is None and (first := began or entered):
            self._base = self.current = self._known(first) or newest
        if self._base is not None and entered > self._base.version:
            self.current = self._known(entered) or self.current
        self._step()

    @classmethod
    def of_state(
        cls,
        newest: FederationManifest,
        past: Callable[[int], FederationManifest | None],
        head: pb.Certificate | None,
        state: pb.RoundState,
    ) -> ManifestInForce:
        """At a start, by what this site has on its disk of the round under way."""
        # Empty bytes where nothing was promised are a promise under manifest 0.
        entered = pb.Promise.FromString(state.promise.promise.body).manifest_version
        return cls(newest, past, head, entered, state.began)

    def _known(self, version: int) -> FederationManifest | None:
        return self.newest if version == self.newest.version else self._past(version)

    def lacks(self, version: int) -> bool:
        """Whether what this site has signed under it in this round can't be read here."""
        return self._known(version) is None

    def began(self) -> None:
        """This site promises in the round under way: from now on one step may be made."""
        if self._base is None:
            self._base = self.current

    def began_under(self, version: int) -> None:
        """This site has promised under that manifest in the round under way, and forgot it."""
        known, base = self._known(version), self._base
        if known is None or not self._is_first:
            return
        if base is None:
            self._base = self.current = known
            self._step()
        elif version < base.version and not base.step_from(known):
            self._base = known
            self._step()

    def _of_head(self, head: pb.Certificate | None) -> FederationManifest | None:
        ruled = head is not None and head.body.rules
        return self._past(head.body.manifest_version) if head and ruled else None

    def install(self, newest: FederationManifest) -> bool:
        """A newer one is here; whether it is in force now."""
        before = self.current
        self.newest = newest
        self._step()
        return self.current != before

    def new_round(self, head: pb.Certificate | None) -> None:
        """A round is committed: from its manifest on, one step may be made.

        Before the first round, and behind rounds of old, any manifest will do until this
        site has promised something.
        """
        self._base = self._of_head(head)
        self._is_first = self._base is None  # round, or behind one of old
        self.current = self._base or self.newest
        self._step()

    def _step(self) -> None:
        """The newest that is one step at most from the last round's, and from today's."""
        self.waiting = ""
        if self._base is None:
            self.current = self.newest
            return
        while (step := self._next_step()) is not None:
            self.current = step
        if self.newest.version > self.current.version:
            self.waiting = self._why_it_waits(self._base)

    def _next_step(self) -> FederationManifest | None:
        before = self.current
        for known in self._later_ones():
            # Under a manifest with too few sites no round can run: it is passed through.
            reason = known.step_from(before)
            if not before.objection and self._base is not None:
                reason = known.step_from(self._base) or reason
            if not reason:
                return known
        return None

    def _later_ones(self) -> Iterator[FederationManifest]:
        """Those that are known here and newer than the one in force, the newest first."""
        for version in range(self.newest.version, self.current.version, -1):
            known = self._known(version)
            if known is not None:
                yield known

    def _why_it_waits(self, last: FederationManifest) -> str:
        """For people: what goes by which manifest, why, and what ends it."""
        newest, current = self.newest, self.current
        text = f"Manifest {newest.version} is installed: connections go by it. Rounds go by "
        if any(not known.step_from(current) for known in self._later_ones()):
            before = last if newest.step_from(last) else current
            return (
                f"{text}{current.version} until one is committed under {current.version} (the last "
                f"was under {last.version}): fedctl train --rounds 1. "
                f"From {before.version} to {newest.version} {newest.changes_from(before)}, more "
                "than one step, and each half of the sites could commit a round of its own"
            )
        return f"{text}{current.version}, for {newest.step_from(current)}"

    def of_round(self, version: int) -> FederationManifest | None:
        """A manifest under which something may have been signed in the round under way.

        What an older list would decide with sites that were expelled since, or what a list
        of the beginning with its few sites, decides nothing any more. But in the first round
        others may have begun one step before us.
        """
        if version == self.current.version:
            return self.current
        known, base = self._known(version), self._base
        if known is None:
            return None
        if base is not None and version < base.version:
            return known if self._is_first and not base.step_from(known) else None
        return None if known.step_from(base or self.current) else known
