"""The updates of one attempt at its coordinator: asked for, compared, in the sum. PURE.

Without a robust rule an update is added as it arrives. With one, updates wait until
all are here; the key holders decrypt their dot products (peers/comparison.py), and
only what is selected is added.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from peers import comparison
from peers import effects as do
from peers.comparison import Comparison
from proto import federation_pb2 as pb


@dataclass
class Gathering:
    """Whose updates are wanted, which are here, and which are in the sum already.

    ``asked``: sites whose updates are waited for or in the sum, sorted.
    ``exponents``: the common fixed-point scale, one a parameter group.
    ``added``: sites whose updates are in the sum.
    ``rejected``: whom the plan's robust rule keeps out, and why.
    """

    plan: pb.Plan
    asked: tuple[str, ...] = ()
    exponents: tuple[int, ...] = ()
    added: set[str] = field(default_factory=set)
    rejected: dict[str, str] = field(default_factory=dict)
    _here: set[str] = field(default_factory=set)
    _comparing: bool = False
    _comparison: Comparison | None = None
    _selected: bool = False
    _finishing: bool = False

    def ask(self, sites: Sequence[str], exponents: tuple[int, ...]) -> None:
        """These sites are about to be asked for their updates."""
        self.asked, self.exponents = tuple(sites), exponents

    def expects(self, site: str) -> bool:
        """Whether this site's update is still to come."""
        waiting = not self._comparing and not self._finishing
        return waiting and site in self.asked and site not in self.added

    def arrived(self, site: str) -> list[do.Effect]:
        """An update is here, whole: add it; under a robust rule it waits for the others."""
        if self.robust:
            self._here.add(site)
            return []
        return [do.AddUpdate(self.plan.round, self.plan.attempt, site)]

    def without(self, site: str) -> None:
        """This site's update will not come, or is no good."""
        self.asked = tuple(other for other in self.asked if other != site)

    def cut_off(self) -> None:
        """What is not here, or in the sum, by now never will be."""
        self.asked = tuple(sorted(self._here if self.robust else self.added))

    # ---- compare and select ------------------------------------------------------

    @property
    def robust(self) -> bool:
        """Whether updates are compared before they are summed."""
        return comparison.is_robust(self.plan.training)

    @property
    def to_be_compared(self) -> bool:
        """Whether every update that was asked for waits to be compared."""
        return self.robust and not self._comparing and self._here >= set(self.asked)

    @property
    def selected(self) -> bool:
        """Whether nobody is rejected any more: key holders hold us to the selection."""
        return self._selected

    @property
    def still_byzantine(self) -> int:
        """How many more sites may lie: who was kept out already was one of them."""
        if not self.robust or self._selected:
            return 0
        return max(0, self.plan.training.byzantine_sites - len(self.rejected))

    @property
    def hopeless(self) -> bool:
        """Whether too few key holders are left to compare updates."""
        return self._comparison is not None and not self._selected and self._comparison.hopeless

    def reject(self, rejected: Mapping[str, str]) -> None:
        """These sites' updates are kept out."""
        self.rejected.update(rejected)

    def compare(self) -> list[do.Effect]:
        """All updates are in, so nobody can adapt: have their dot products written."""
        self._comparing = True
        return [do.CompareUpdates(self.plan.round, self.plan.attempt, self.asked)]

    def question(
        self, event: do.QuestionReady, holders: Sequence[str], everyone: Iterable[str]
    ) -> list[do.Effect]:
        """The products go to the key holders; the others hear that the attempt goes on."""
        if not self._comparing or self._comparison is not None:
            return []
        self.asked = event.sites
        message = pb.Compare(
            round=self.plan.round,
            attempt=self.plan.attempt,
            sites=self.asked,
            products_digest=event.digest,
            byzantine_sites=self.still_byzantine,
        )
        self._comparison = Comparison(self.plan, message, holders)
        others = [do.Send(site, message) for site in sorted(set(everyone) - set(holders))]
        return [do.SendProducts(tuple(holders), message), *others]

    def unable_to_compare(self, holder: str) -> None:
        """A key holder that can't answer."""
        if self._comparison is not None:
            self._comparison.unable(holder)

    def answered(self, holder: str, message: pb.Compared) -> bool:
        """A key holder's numbers; true when there are enough of them to select now.

        Raises RemoteProtocolError when they are no answer to what was asked.
        """
        if self._comparison is None or self._selected:
            return False
        self._comparison.answered(holder, message)
        return self._comparison.complete

    def select(self) -> dict[str, str]:
        """Keep what the rule keeps; who is rejected, and why. Raises ValueError."""
        if self._comparison is None:
            raise AssertionError("nothing was compared")
        selection = self._comparison.select(max(self.exponents))
        self._selected, self.asked = True, selection.kept
        return dict(selection.rejected)

    def add_selected(self) -> list[do.Effect]:
        """Add what was selected."""
        at = (self.plan.round, self.plan.attempt)
        return [do.AddUpdate(*at, site) for site in self.asked]

    # ---- the sum -----------------------------------------------------------------

    @property
    def complete(self) -> bool:
        """Whether every update that shall be in the sum is in it."""
        return self._selected >= self.robust and self.added >= set(self.asked)

    def finish(self) -> list[do.Effect]:
        """Write the sum, once.

        What was handed to the adder before this is in the sum, and says so before the
        sum is finished: ``added`` is right when `SumFinished` comes.
        """
        if self._finishing:
            return []
        self._finishing = True
        return [do.FinishSum(self.plan.round, self.plan.attempt)]

    def claim(self, finished: do.SumFinished | do.Unmasked) -> pb.Apply:
        """What key holders are told of the sum."""
        nonces = dict(finished.nonces) if isinstance(finished, do.SumFinished) else {}
        return pb.Apply(
            round=self.plan.round,
            attempt=self.plan.attempt,
            contributors=sorted(self.added),
            sum_digest=finished.sum_digest,
            scale_exponents=self.exponents,
            rejected=sorted(self.rejected),
            nonces=[nonces[site] for site in sorted(nonces)],
        )

    def rejections(self) -> list[pb.Rejection]:
        """What the round's report tells of those who were kept out."""
        told = sorted(self.rejected.items())
        return [pb.Rejection(site=site, reason=reason) for site, reason in told]
