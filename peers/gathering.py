"""The updates of one attempt at its coordinator: asked for, here, in the sum. PURE."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from peers import effects as do
from proto import federation_pb2 as pb


@dataclass
class Gathering:
    """Whose updates are wanted, and whose are in the sum already.

    ``asked``: sites whose updates are waited for or in the sum, sorted.
    ``exponents``: the common fixed-point scale, one a parameter group.
    ``added``: sites whose updates are in the sum.
    """

    plan: pb.Plan
    asked: tuple[str, ...] = ()
    exponents: tuple[int, ...] = ()
    added: set[str] = field(default_factory=set)
    _finishing: bool = False

    def ask(self, sites: Sequence[str], exponents: tuple[int, ...]) -> None:
        """These sites are about to be asked for their updates."""
        self.asked, self.exponents = tuple(sites), exponents

    def expects(self, site: str) -> bool:
        """Whether this site's update is still to come."""
        return not self._finishing and site in self.asked and site not in self.added

    def arrived(self, site: str) -> list[do.Effect]:
        """An update is here, whole: add it."""
        return [do.AddUpdate(self.plan.round, self.plan.attempt, site)]

    def without(self, site: str) -> None:
        """This site's update will not come, or is no good."""
        self.asked = tuple(other for other in self.asked if other != site)

    def cut_off(self) -> None:
        """What is not in the sum by now never will be."""
        self.asked = tuple(sorted(self.added))

    @property
    def complete(self) -> bool:
        """Whether every update that was asked for is in the sum."""
        return self.added >= set(self.asked)

    def finish(self) -> list[do.Effect]:
        """Write the sum, once.

        What was handed to the adder before this is in the sum, and says so before the
        sum is finished: ``added`` is right when `SumFinished` comes.
        """
        if self._finishing:
            return []
        self._finishing = True
        return [do.FinishSum(self.plan.round, self.plan.attempt)]

    def apply_message(self, sum_digest: bytes) -> pb.Apply:
        """What key holders are told of the sum."""
        return pb.Apply(
            round=self.plan.round,
            attempt=self.plan.attempt,
            contributors=sorted(self.added),
            sum_digest=sum_digest,
            scale_exponents=self.exponents,
        )
