"""The steps of masking in an attempt: who has answered, what is passed on. PURE.

    keys -> shares            beside training, behind the plan
    opening                   behind the certified sum

The coordinator collects each step's answers and passes all of them on; what they
mean, and whether they may be believed, is decided where the arithmetic is
(crypto/masking/site.py and crypto/masking/coordinator.py, in each site's crypto worker). A site
that does not answer a step is left behind: until its input is in the sum it simply
is not in it, afterwards the others open what is needed without it. Fewer than the
threshold at any step, and the attempt fails.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from peers.attempts import effects as do
from peers.attempts.roles import threshold_of
from peers.attempts.statement import Known
from peers.wire.errors import RemoteProtocolError
from proto import federation_pb2 as pb


@dataclass
class MaskingSteps:
    """The coordinator's view. ``step`` is the one whose answers are collected, None: none."""

    plan: pb.Plan
    step: pb.MaskingStep.ValueType | None = pb.KEYS
    sharers: tuple[str, ...] = ()
    _survivors: tuple[str, ...] = ()
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
            return set(self.sharers)
        return {sender}

    def pass_on(self) -> list[do.Effect]:
        """This step is over: tell those who answered it what all have answered."""
        step, heard, self._heard = self.step, self._heard, {}
        self._due = set(heard)
        self.step = pb.SHARES if step == pb.KEYS else None
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
        opened = [pb.Opened(site=site, items=heard[site].items) for site in sorted(heard)]
        at = {"round": self.plan.round, "attempt": self.plan.attempt}
        openings = pb.Openings(**at, opened=opened)
        return [do.Send(site, openings) for site in self._survivors]

    def conclude(self, contributors: Iterable[str]) -> tuple[str, ...]:
        """The inputs are in: these are in the sum; who else has shared secrets is not."""
        return tuple(sorted(set(self.sharers) - set(contributors)))

    def open(self, survivors: tuple[str, ...]) -> None:
        """The sum is certified: those who are in it open their shares."""
        self._survivors, self.step = survivors, pb.OPENING
        self._due = set(survivors) - self._gone

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
    _taken: set[int] = field(default_factory=set)
    _busy: bool = False
    _waiting: list[do.Mask | do.OpenShares] = field(default_factory=list)

    def begin(self) -> list[do.Effect]:
        """Make the attempt's keys."""
        self._busy = True
        return [do.Mask(self.plan.round, self.plan.attempt, None)]

    def ordered(self, order: pb.MaskingOrder) -> list[do.Effect]:
        """Do the next step."""
        if order.step in self._taken:
            return []
        self._taken.add(order.step)
        self._waiting.append(do.Mask(order.round, order.attempt, order))
        return self._next()

    def certified(self, known: Known) -> list[do.Effect]:
        """The sum that we are in is certified: open our shares for it, and for no other."""
        if pb.OPENING in self._taken:
            return []
        self._taken.add(pb.OPENING)
        at = (self.plan.round, self.plan.attempt)
        dropouts = tuple(known.message.dropouts)
        self._waiting.append(do.OpenShares(*at, known.contributors, dropouts))
        return self._next()

    def done(self) -> list[do.Effect]:
        """A step is done: the one that waited for it begins."""
        self._busy = False
        return self._next()

    def _next(self) -> list[do.Effect]:
        if self._busy or not self._waiting:
            return []
        self._busy = True
        return [self._waiting.pop(0)]
