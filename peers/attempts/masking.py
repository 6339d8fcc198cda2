"""The steps of masking in an attempt: who has answered, what is passed on. PURE.

    keys -> shares            beside training, behind the plan
    opening                   behind the certified sum

The coordinator collects each step's answers and passes all of them on; what they
mean, and whether they may be believed, is decided where the arithmetic is
(crypto/masking/site.py and crypto/masking/coordinator.py, in each site's crypto worker). A site
that does not answer a step is left behind: until its input is in the sum it simply
is not in it, afterwards the others open what is needed without it. Fewer than the
threshold at any step, and the attempt fails. There is no key and nothing is proven:
every contributor takes the masks off the certified sum by itself.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar

from crypto.keystream import Ring
from crypto.masking.roster import smallest_threshold
from peers.attempts import effects as do
from peers.attempts.secure_sum import CoordinatorSteps, Mode, ParticipantSteps
from peers.wire.errors import RemoteProtocolError
from peers.wire.manifest import FederationManifest
from peers.wire.signing import Keys, must_be
from proto import federation_pb2 as pb


def threshold_of(plan: pb.Plan) -> int:
    """How many sites must open a masked sum, and be in it, when f of them may lie.

    t > (n + f) / 2, and one at least is counted as lying: the coordinator, itself a site,
    may say what it likes about who dropped out and still reads no update
    (docs/decisions/0011).
    """
    colluding = max(1, plan.faulty_sites)
    return smallest_threshold(len(plan.participants), colluding=colluding)


# ---- the events and effects of this mode alone ------------------------------------


@dataclass(frozen=True)
class MaskedSumStarted(do.WorkDone):
    """The coordinator is ready to add masked inputs under this roster."""

    roster_digest: bytes


@dataclass(frozen=True)
class Masked(do.WorkDone):
    """A step of masking is done at this site; what the coordinator shall know of it."""

    answer: pb.MaskingAnswer


@dataclass(frozen=True)
class Mask(do.OfAttempt, do.Work):
    """Do a participant's step of masking; without an order, make the attempt's keys.

    Ends with `Masked`; the shares of the others end with `ContextHeld`.
    """

    phase: ClassVar = "mask"
    order: pb.MaskingOrder | None


@dataclass(frozen=True)
class OpenShares(do.OfAttempt, do.Work):
    """Give this site's shares for the one certified outcome; ends with `Masked`."""

    phase: ClassVar = "mask"
    survivors: tuple[str, ...]
    dropouts: tuple[str, ...]


@dataclass(frozen=True)
class StartMaskedSum(do.WorkOfPlan):
    """The coordinator begins the sum of those who have shared their secrets."""

    phase: ClassVar = "key"
    keys: pb.MaskingOrder
    sharers: tuple[str, ...]


# ---- the steps --------------------------------------------------------------------


class MaskingSteps(CoordinatorSteps):
    """The coordinator's view. ``step`` is the one whose answers are collected, None: none."""

    def __init__(self, plan: pb.Plan) -> None:
        self.plan = plan
        self.step: pb.MaskingStep.ValueType | None = pb.KEYS
        self.sharers: tuple[str, ...] = ()
        self._roster_digest = b""
        self._survivors: tuple[str, ...] = ()
        self._due = {participant.site for participant in self.plan.participants}
        self._gone: set[str] = set()
        self._heard: dict[str, pb.MaskingAnswer] = {}
        self._keys: dict[str, pb.MaskingItem] = {}

    @property
    def ready(self) -> bool:
        """The sum is begun, under the roster of those who have shared their secrets."""
        return bool(self._roster_digest)

    @property
    def able(self) -> Collection[str]:
        """Who has shared no secrets can't be in a masked sum."""
        return self.sharers

    @property
    def collecting(self) -> bool:
        """Whether answers to a step are waited for."""
        return self.step is not None

    @property
    def complete(self) -> bool:
        """Whether everybody who is still there has answered the step under way."""
        return self.step is not None and self._due <= self._heard.keys()

    @property
    def shortage(self) -> str:
        """Each step needs as many sites as a masked sum."""
        needed = threshold_of(self.plan)
        if len(self._heard) >= needed:
            return ""
        step = "" if self.step is None else pb.MaskingStep.Name(self.step).lower()
        return (
            f"{len(self._heard)} sites have answered masking's {step or 'last'} step, {needed} must"
        )

    def gone(self, site: str) -> None:
        """A site left the attempt: nobody waits for it."""
        self._gone.add(site)
        if site not in self._heard:
            self._due.discard(site)

    def answered(self, sender: str, message: do.AttemptMessage) -> list[do.Effect]:
        """A step of masking is done at a site."""
        if isinstance(message, pb.MaskingAnswer):
            self.keep(sender, message)
        return []

    def keep(self, sender: str, answer: pb.MaskingAnswer) -> bool:
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
                StartMaskedSum(self.plan, self._order(pb.KEYS, self._keys.values()), self.sharers)
            ]
            return start + [
                do.Send(to, self._order(pb.SHARES, _for_site(to, heard))) for to in self.sharers
            ]
        opened = [pb.Opened(site=site, items=heard[site].items) for site in sorted(heard)]
        at = {"round": self.plan.round, "attempt": self.plan.attempt}
        openings = pb.Openings(**at, opened=opened)
        return [do.Send(site, openings) for site in self._survivors]

    def worked(self, event: do.WorkDone) -> list[do.Effect]:
        """The sum is begun."""
        if isinstance(event, MaskedSumStarted):
            self._roster_digest = event.roster_digest
        return []

    def openers(self, contributors: Collection[str] | None) -> set[str]:
        """Whoever is in it."""
        return set(Masking().holders(self.plan) if contributors is None else contributors)

    def dropouts(self, contributors: Collection[str]) -> tuple[str, ...]:
        """The inputs are in: these are in the sum; who else has shared secrets is not."""
        return tuple(sorted(set(self.sharers) - set(contributors)))

    def describe(self, statement: pb.Statement) -> None:
        """The public keys under which shares were dealt."""
        statement.roster_digest = self._roster_digest

    def certified(self, contributors: tuple[str, ...]) -> None:
        """The sum is certified: those who are in it open their shares."""
        self._survivors, self.step = contributors, pb.OPENING
        self._due = set(contributors) - self._gone

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


def _by_owner(openings: pb.Openings) -> dict[str, dict[str, bytes]]:
    """Each site's shares, by their owners."""
    return {one.site: {item.site: item.content for item in one.items} for one in openings.opened}


class MaskingPart(ParticipantSteps):
    """A participant's view: each order once, one behind the other, and one outcome."""

    def __init__(self, site: str, plan: pb.Plan, keys: Keys, manifest: FederationManifest) -> None:
        super().__init__(site, plan, keys, manifest)
        self._taken: set[int] = set()
        self._busy = False
        self._waiting: list[Mask | OpenShares] = []

    def begin(self) -> list[do.Effect]:
        """Make the attempt's keys."""
        self._busy = True
        return [Mask(self.plan.round, self.plan.attempt, None)]

    def worked(self, event: do.WorkDone) -> list[do.Effect]:
        """A step is done: the coordinator is told, and the one that waited for it begins."""
        match event:
            case Masked():
                return [do.Send(self.plan.coordinator, event.answer), *self._done()]
            case do.ContextHeld():
                return self._done()
        return []

    def ordered(self, message: do.AttemptMessage) -> list[do.Effect]:
        """Do the next step; of everybody's opened shares the first ones count."""
        match message:
            case pb.Openings():
                if self.opening is None:
                    self.opening = _by_owner(message)
            case pb.MaskingOrder() if message.step not in self._taken:
                self._taken.add(message.step)
                self._waiting.append(Mask(message.round, message.attempt, message))
                return self._next()
        return []

    def check_own(self, statement: pb.Statement) -> None:
        """The sum was made under the keys for which we have dealt our shares."""
        same = self.context_digest in (b"", statement.roster_digest)
        lead = self.plan.coordinator
        must_be(same, lead, "states other public keys than those of our shares")

    @property
    def may_open(self) -> bool:
        """Every participant may."""
        return True

    def opens(self, contributors: Collection[str]) -> bool:
        """Whether we are in it, and hold everyone's shares."""
        return self.site in contributors and bool(self.context_digest)

    @property
    def has_sum(self) -> bool:
        """What the coordinator has summed is with it already."""
        return self.site == self.plan.coordinator

    def certified(self, statement: pb.Statement) -> list[do.Effect]:
        """The sum that we are in is certified: open our shares for it, and for no other."""
        if pb.OPENING in self._taken:
            return []
        self._taken.add(pb.OPENING)
        at = (self.plan.round, self.plan.attempt)
        survivors = tuple(one.site for one in statement.contributions)
        self._waiting.append(OpenShares(*at, survivors, tuple(statement.dropouts)))
        return self._next()

    def _done(self) -> list[do.Effect]:
        self._busy = False
        return self._next()

    def _next(self) -> list[do.Effect]:
        if self._busy or not self._waiting:
            return []
        self._busy = True
        return [self._waiting.pop(0)]


class Masking(Mode):
    """Updates are masked; each contributor takes the masks off the certified sum by itself."""

    orders: ClassVar = {pb.MaskingOrder: True, pb.Openings: False}
    answers: ClassVar = (pb.MaskingAnswer,)

    def holders(self, plan: pb.Plan) -> list[str]:
        """There is no key: every participant."""
        return [participant.site for participant in plan.participants]

    def least_contributors(self, plan: pb.Plan) -> int:
        """As many as open it."""
        return threshold_of(plan)

    def largest(self, kind: pb.BlobKind.ValueType, plan: pb.Plan, values: int) -> int:
        """The sum, as each update, has one length."""
        del kind
        return Ring(plan.training.bits, len(plan.participants)).size(values)

    def coordinator(self, plan: pb.Plan, keys: Keys, manifest: FederationManifest) -> MaskingSteps:
        """Everyone's keys and shares, passed on."""
        del keys, manifest
        return MaskingSteps(plan)

    def participant(
        self, site: str, plan: pb.Plan, keys: Keys, manifest: FederationManifest
    ) -> MaskingPart:
        """Our keys and shares."""
        return MaskingPart(site, plan, keys, manifest)
