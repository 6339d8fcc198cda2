"""The steps of masking in an attempt: who has answered, what is passed on. PURE.

    keys -> shares            beside training, behind the plan
    outcome -> opening        behind the masked inputs

The coordinator collects each step's answers and passes all of them on; what they
mean, and whether they may be believed, is decided where the arithmetic is
(crypto/masking.py and crypto/unmasking.py, in each site's crypto worker). A site
that does not answer a step is left behind: until its input is in the sum it simply
is not in it, afterwards the others open what is needed without it. Fewer than the
threshold at any step, and the attempt fails.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from peers import effects as do
from peers.errors import RemoteProtocolError
from peers.roles import threshold_of
from proto import federation_pb2 as pb

# What is waited for: answers to a step; "dealt" and "opened" wait for nobody.
_NEXT = {pb.KEYS: pb.SHARES, pb.OUTCOME: pb.OPENING}


def is_masked(plan: pb.Plan | None) -> bool:
    """Whether a plan hides updates by masks."""
    return plan is not None and plan.training.mode == pb.MASKING


def is_beside_training(order: object) -> bool:
    """Whether what is ordered belongs to the time of training, and waits for nothing else."""
    return isinstance(order, pb.MaskingOrder) and order.step in (pb.KEYS, pb.SHARES)


@dataclass
class MaskingSteps:
    """The coordinator's view. ``step`` is the one whose answers are collected, None: none."""

    plan: pb.Plan
    step: pb.MaskingStep.ValueType | None = pb.KEYS
    outcome: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
    sharers: tuple[str, ...] = ()
    _everyone: tuple[str, ...] = ()
    _due: set[str] = field(default_factory=set)
    _gone: set[str] = field(default_factory=set)
    _heard: dict[str, pb.MaskingAnswer] = field(default_factory=dict)
    _keys: dict[str, pb.MaskingItem] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._due = {participant.site for participant in self.plan.participants}

    @property
    def threshold(self) -> int:
        """How many sites each step needs."""
        return threshold_of(self.plan)

    @property
    def heard(self) -> int:
        """How many have answered this step."""
        return len(self._heard)

    @property
    def complete(self) -> bool:
        """Whether everybody who is still there has answered the step under way."""
        return self.step is not None and self._due <= self._heard.keys()

    def gone(self, site: str) -> None:
        """A site left the attempt: nobody waits for it."""
        self._gone.add(site)
        if site not in self._heard:
            self._due.discard(site)

    def answered(self, sender: str, answer: pb.MaskingAnswer) -> bool:
        """Keep an answer; False when it is late, early, or came before.

        Raises RemoteProtocolError when it does not speak of the sites that it should.
        """
        if answer.step != self.step or sender not in self._due or sender in self._heard:
            return False
        sites = {item.site for item in answer.items}
        if sites != self._expected(sender):
            raise RemoteProtocolError(
                f"the masking answer of {sender} speaks of {', '.join(sorted(sites))}; expected "
                f"{', '.join(sorted(self._expected(sender)))}"
            )
        self._heard[sender] = answer
        return True

    def _expected(self, sender: str) -> set[str]:
        if self.step == pb.SHARES:
            return set(self._keys) - {sender}
        if self.step == pb.OPENING:
            return {*self.outcome[0], *self.outcome[1]}
        return {sender}

    def pass_on(self) -> list[do.Effect]:
        """This step is over: tell those who answered it what all have answered."""
        step, heard, self._heard = self.step, self._heard, {}
        self._due = set(heard)
        self.step = _NEXT.get(step) if step is not None else None
        if step == pb.KEYS:
            self._keys = {site: heard[site].items[0] for site in sorted(heard)}
            return self._to_all(heard, pb.KEYS, self._keys.values())
        if step == pb.SHARES:
            self.sharers = tuple(sorted(heard))
            start: list[do.Effect] = [
                do.StartMaskedSum(
                    self.plan, self._order(pb.KEYS, self._keys.values()), self.sharers
                )
            ]
            return start + [
                do.Send(to, self._order(pb.SHARES, _for_site(to, heard))) for to in self.sharers
            ]
        if step == pb.OUTCOME:
            # Who was slow to sign may still open: the more answer, the more may be lost.
            self._due = set(self.outcome[0]) - self._gone
            signatures = [heard[site].items[0] for site in sorted(heard)]
            return self._to_all(self._everyone, pb.OPENING, signatures)
        answers = tuple(heard[site] for site in sorted(heard))
        at = (self.plan.round, self.plan.attempt)
        return [do.Unmask(*at, *self.outcome, dict(zip(sorted(heard), answers, strict=True)))]

    def conclude(self, contributors: Iterable[str], everyone: Iterable[str]) -> list[do.Effect]:
        """The inputs are in: these are in the sum, who else has shared secrets is not.

        Who is not asked for anything hears it as well: the attempt goes on.
        """
        self._everyone = tuple(sorted(everyone))
        survivors = tuple(sorted(contributors))
        dropouts = tuple(sorted(set(self.sharers) - set(survivors)))
        self.outcome, self.step = (survivors, dropouts), pb.OUTCOME
        self._due = set(survivors) - self._gone
        order = self._order(pb.OUTCOME, [pb.MaskingItem(site=site) for site in survivors])
        order.dropouts.extend(dropouts)
        return [do.Send(site, order) for site in self._everyone]

    def _to_all(
        self,
        sites: Iterable[str],
        step: pb.MaskingStep.ValueType,
        items: Iterable[pb.MaskingItem],
    ) -> list[do.Effect]:
        order = self._order(step, items)
        return [do.Send(site, order) for site in sorted(sites)]

    def _order(
        self, step: pb.MaskingStep.ValueType, items: Iterable[pb.MaskingItem]
    ) -> pb.MaskingOrder:
        at = (self.plan.round, self.plan.attempt)
        return pb.MaskingOrder(round=at[0], attempt=at[1], step=step, items=items)


def _for_site(to: str, heard: Mapping[str, pb.MaskingAnswer]) -> list[pb.MaskingItem]:
    """What the others have sealed for this site; ``site`` says by whom."""
    return [
        pb.MaskingItem(site=sender, content=item.content)
        for sender in sorted(heard)
        for item in heard[sender].items
        if item.site == to
    ]


@dataclass
class MaskingPart:
    """A participant's view: each order once, one behind the other, and one outcome."""

    site: str
    plan: pb.Plan
    outcome: tuple[str, ...] = ()
    _taken: set[int] = field(default_factory=set)
    _busy: bool = False
    _waiting: list[pb.MaskingOrder] = field(default_factory=list)

    def begin(self) -> list[do.Effect]:
        """Make the attempt's keys."""
        self._busy = True
        return [do.Mask(self.plan.round, self.plan.attempt, None)]

    def ordered(self, order: pb.MaskingOrder) -> list[do.Effect]:
        """Do the next step. Raises RemoteProtocolError for a sum of fewer than agreed."""
        if order.step in self._taken:
            return []
        if order.step == pb.OUTCOME:
            self._check(order)
            self.outcome = tuple(item.site for item in order.items)
        self._taken.add(order.step)
        if order.step in (pb.OUTCOME, pb.OPENING) and self.site not in self.outcome:
            return []  # a sum that we are not in: others open it
        self._waiting.append(order)
        return self._next()

    def done(self) -> list[do.Effect]:
        """A step is done: the one that waited for it begins."""
        self._busy = False
        return self._next()

    def _next(self) -> list[do.Effect]:
        if self._busy or not self._waiting:
            return []
        self._busy = True
        order = self._waiting.pop(0)
        return [do.Mask(order.round, order.attempt, order)]

    def _check(self, order: pb.MaskingOrder) -> None:
        survivors = [item.site for item in order.items]
        needed = max(threshold_of(self.plan), self.plan.training.min_participants)
        known = {participant.site for participant in self.plan.participants}
        if len(survivors) < needed or not {*survivors, *order.dropouts} <= known:
            raise RemoteProtocolError(
                f"a sum of {', '.join(survivors)} is to be opened; "
                f"the plan needs at least {needed} of its participants"
            )
