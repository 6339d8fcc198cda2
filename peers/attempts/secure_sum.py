"""How updates are hidden while they are summed: what a secure-sum mode has to say. PURE.

A mode is one object; the table of them is peers/attempts/modes.py. All else of a round is the same
in every mode: the plan, training, the scale, the statement, the vote. A mode says who deals
a key and who may open a sum, how large its vectors are, and what is done beside training
(so that updates can be hidden) and behind the certified statement (so that the sum can be
opened). Its messages, events and effects are its own; the rest of the machine passes them
on to its steps.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar

from peers.attempts import effects as do
from peers.wire.manifest import FederationManifest
from peers.wire.signing import Keys
from proto import federation_pb2 as pb


class CoordinatorSteps(ABC):
    """A mode's part of one attempt at its coordinator.

    Some steps want an answer of every site that is still there: `collecting` says that one
    is under way, and `pass_on` ends it.
    """

    # ---- before updates are asked for --------------------------------------------

    @property
    @abstractmethod
    def ready(self) -> bool:
        """Whether updates can be added from now on."""

    @property
    def objection(self) -> str:
        """Why what is ready must not be used; empty when it may be."""
        return ""

    @property
    def able(self) -> Collection[str] | None:
        """Who alone can still be in the sum; None: every participant."""
        return None

    def expects_context(self, sender: str) -> bool:
        """Whether this site's part of the round's key is still to come."""
        del sender
        return False

    @abstractmethod
    def answered(self, sender: str, message: do.AttemptMessage) -> list[do.Effect]:
        """A site answers in the mode's own words. Raises RemoteProtocolError."""

    @abstractmethod
    def worked(self, event: do.WorkDone) -> list[do.Effect]:
        """Our own work for this attempt is done."""

    # ---- steps that all are waited for -------------------------------------------

    @property
    def collecting(self) -> bool:
        """Whether answers to a step are waited for."""
        return False

    @property
    def complete(self) -> bool:
        """Whether everybody who is still there has answered the step under way."""
        return False

    @property
    def shortage(self) -> str:
        """Why the step under way can't end with the answers that are here; empty when it can."""
        return ""

    def gone(self, site: str) -> None:
        """A site left the attempt: nobody waits for it."""
        del site

    def pass_on(self) -> list[do.Effect]:
        """The step under way is over: tell what all have answered."""
        return []

    # ---- the sum -----------------------------------------------------------------

    @abstractmethod
    def openers(self, contributors: Collection[str] | None) -> set[str]:
        """Who may open the sum of these; None: nothing is stated yet."""

    def dropouts(self, contributors: Collection[str]) -> tuple[str, ...]:
        """Who could have been in the sum of these and is not, where opening it needs to know."""
        del contributors
        return ()

    @abstractmethod
    def describe(self, statement: pb.Statement) -> None:
        """Write into a statement what updates were hidden with."""

    def certified(self, contributors: tuple[str, ...]) -> None:
        """The sum of these is certified: they open it."""
        del contributors


class ParticipantSteps(ABC):
    """A mode's part of one attempt at a participant, the coordinator included.

    ``context_digest``: names what updates are hidden with, once it is here. ``opening``: what
    opens the certified sum, as the mode's job wants it; None: it is not here yet.
    """

    def __init__(self, site: str, plan: pb.Plan, keys: Keys, manifest: FederationManifest) -> None:
        self.site = site
        self.plan = plan
        self.keys = keys
        self.manifest = manifest
        self.context_digest = b""
        self.opening: Any = None

    # ---- before the update is hidden ---------------------------------------------

    @abstractmethod
    def begin(self) -> list[do.Effect]:
        """The plan is taken: what is to be done beside training."""

    def expects_context(self, sender: str) -> bool:
        """Whether this sender has this site's part of the round's key, and it is to come."""
        del sender
        return False

    def worked(self, event: do.WorkDone) -> list[do.Effect]:
        """Local work is done."""
        del event
        return []

    def ordered(self, message: do.AttemptMessage) -> list[do.Effect]:
        """The coordinator passes on one of the mode's `Mode.orders`.

        Raises RemoteProtocolError.
        """
        del message
        return []

    # ---- the sum -----------------------------------------------------------------

    @abstractmethod
    def check_own(self, statement: pb.Statement) -> None:
        """Hold a statement against what updates were hidden with here.

        Raises RemoteProtocolError, CertificateError.
        """

    @property
    @abstractmethod
    def may_open(self) -> bool:
        """Whether this site may ever open a sum of this attempt."""

    @abstractmethod
    def opens(self, contributors: Collection[str]) -> bool:
        """Whether this site opens the sum of these."""

    @property
    def has_sum(self) -> bool:
        """Whether a sum is with this site already when it is certified."""
        return False

    @abstractmethod
    def certified(self, statement: pb.Statement) -> list[do.Effect]:
        """This statement is certain: from now on its sum, and no other, is opened."""

    @property
    def ready(self) -> bool:
        """Whether all is here that opens the certified sum, but the sum."""
        return self.opening is not None


class Mode(ABC):
    """One way of summing updates that nobody may read.

    ``orders``: what its coordinator passes on to participants, and whether they may be
    training meanwhile. ``answers``: what sites tell its coordinator.
    """

    orders: ClassVar[Mapping[type[Any], bool]]
    answers: ClassVar[tuple[type[Any], ...]]

    def dealer(self, coordinator: str, participants: Sequence[str]) -> str:
        """Who makes the round's key; nobody where there is none."""
        del coordinator, participants
        return ""

    @abstractmethod
    def holders(self, plan: pb.Plan) -> list[str]:
        """Who may open a sum of this plan."""

    def least_contributors(self, plan: pb.Plan) -> int:
        """The fewest updates of which a sum can be opened; 0: the mode does not ask."""
        del plan
        return 0

    def tag_bytes(self, plan: pb.Plan, site: str) -> int:
        """How long the nonce of a site's tags is, by which a sum is proven; without them 0."""
        del plan, site
        return 0

    @abstractmethod
    def largest(self, kind: pb.BlobKind.ValueType, plan: pb.Plan, values: int) -> int:
        """Bytes that an update, a sum or dot products of ``values`` integers may have."""

    def check_statement(
        self, statement: pb.Statement, keys: Keys, manifest: FederationManifest
    ) -> None:
        """What every site can see of what updates were hidden with.

        Raises RemoteProtocolError, CertificateError.
        """
        del statement, keys, manifest

    @abstractmethod
    def coordinator(
        self, plan: pb.Plan, keys: Keys, manifest: FederationManifest
    ) -> CoordinatorSteps:
        """Its part of an attempt at the coordinator."""

    @abstractmethod
    def participant(
        self, site: str, plan: pb.Plan, keys: Keys, manifest: FederationManifest
    ) -> ParticipantSteps:
        """Its part of an attempt at a participant."""
