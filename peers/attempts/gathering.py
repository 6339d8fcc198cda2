"""The updates of one sum, as they come in at its coordinator. PURE.

With a robust rule all of them wait to be compared first.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from peers.attempts import effects as do
from peers.attempts.statement import EncodedStatement
from peers.plans import robust
from peers.plans.robust import Selection
from proto import federation_pb2 as pb


@dataclass
class Gathering:
    """Whose updates are wanted, which are here, and which are in the sum already.

    ``asked``: sites whose updates are waited for or in the sum, sorted.
    ``exponents``: the common fixed-point scale, one a parameter group.
    ``contributions``: what each has signed of its upload.
    ``added``: sites whose updates are in the sum.
    ``rejected``: whom the plan's robust rule, or its own exponents, keep out, and why.
    ``question``: the certified one; ``answers``: the equal ones that decided.
    """

    plan: pb.Plan
    asked: tuple[str, ...] = ()
    exponents: tuple[int, ...] = ()
    contributions: dict[str, pb.Signed] = field(default_factory=dict)
    added: set[str] = field(default_factory=set)
    rejected: dict[str, str] = field(default_factory=dict)
    left_out: int = 0  # of them by the exponents that they signed, as every participant sees
    question: EncodedStatement | None = None
    answers: list[pb.Signed] = field(default_factory=list)
    _uploads: dict[str, bytes] = field(default_factory=dict)
    _promised: dict[str, pb.Contribution] = field(default_factory=dict)
    _here: set[str] = field(default_factory=set)
    _product_answers: dict[str, pb.Signed] = field(default_factory=dict)
    _comparing: bool = False
    _selected: bool = False
    _finishing: bool = False

    def ask(self, sites: Sequence[str], exponents: tuple[int, ...]) -> None:
        """These sites are about to be asked for their updates."""
        self.asked, self.exponents = tuple(sites), exponents

    def expects(self, site: str) -> bool:
        """Whether this site's update is still to come."""
        waiting = not self._comparing and not self._finishing
        return waiting and site in self.asked and site not in self.added

    def arrived(self, site: str, digest: bytes) -> list[do.Effect] | None:
        """An update is here, whole; None when it is not what its owner signed."""
        self._uploads.setdefault(site, digest)
        return self._whole(site)

    def signed(
        self, site: str, contribution: pb.Signed, told: pb.Contribution
    ) -> list[do.Effect] | None:
        """Its owner has signed it; None when that is not what is here."""
        self.contributions.setdefault(site, contribution)
        self._promised.setdefault(site, told)
        return self._whole(site)

    def _whole(self, site: str) -> list[do.Effect] | None:
        if site not in self._uploads or site not in self._promised or site in self._here:
            return []
        if self._uploads[site] != self._promised[site].upload_digest:
            return None
        self._here.add(site)
        return [] if self.robust else [self._add(site)]

    def _add(self, site: str) -> do.AddUpdate:
        nonce = self._promised[site].nonce
        return do.AddUpdate(self.plan.round, self.plan.attempt, site, nonce)

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
        return robust.is_robust(self.plan.training)

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
        """How many more sites may lie: who was kept out by what it reported was one of them."""
        if not self.robust or self._selected:
            return 0
        return max(0, self.plan.training.byzantine_sites - self.left_out)

    def reject(self, rejected: Mapping[str, str]) -> None:
        """These sites' updates are kept out."""
        self.rejected.update(rejected)

    def compare(self) -> list[do.Effect]:
        """All updates are in, so nobody can adapt: have their dot products written."""
        self._comparing = True
        nonces = tuple(self._promised[site].nonce for site in self.asked)
        return [do.CompareUpdates(self.plan.round, self.plan.attempt, self.asked, nonces)]

    def answered(self, signed: pb.Signed, needed: int) -> list[pb.Signed]:
        """A key holder's answer; as many equal ones as are needed, once there are."""
        self._product_answers.setdefault(signed.site, signed)
        answers = self._product_answers.values()
        equal = [one for one in answers if one.body == signed.body]
        if len(equal) >= needed:
            self.answers = sorted(equal, key=lambda one: one.site)
            return self.answers
        return []

    def select(self, selection: Selection) -> None:
        """Keep what the rule keeps."""
        self._selected, self.asked = True, selection.kept

    def add_selected(self) -> list[do.Effect]:
        """Add what was selected."""
        return [self._add(site) for site in self.asked]

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

    def describe(self, statement: pb.Statement, sites: Iterable[str]) -> None:
        """Write into a statement what is summed, or compared: these sites' contributions."""
        statement.scale_exponents.extend(self.exponents)
        statement.contributions.extend(self.contributions[site] for site in sites)
        statement.rejected.extend(sorted(self.rejected))

    def rejections(self) -> list[pb.Rejection]:
        """What the round's report tells of those who were kept out."""
        reasons = sorted(self.rejected.items())
        return [pb.Rejection(site=site, reason=reason) for site, reason in reasons]
