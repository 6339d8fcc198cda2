"""What this site can contribute to a round just now, told to the protocol whenever it changes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import structlog

from daemon.rounds.events import EventQueue
from daemon.rounds.progress import LastError
from daemon.state.privacy_ledger import PrivacyBudget
from peers.attempts import effects as do

log = structlog.get_logger()


class Served(Protocol):
    """A model that rounds train, as its site uses it (`daemon.services`)."""

    served_digest: bytes  # of the version in use; empty: none yet

    @property
    def wanted(self) -> bytes:
        """The version that is to be used as soon as it is made ready."""

    def adopt(self, model_digest: bytes) -> None:
        """Use this version as soon as it is made ready."""

    async def situation(self) -> do.Situation:
        """What this site can contribute."""


class Readiness:
    """What it can learn from, its people's will, and what is left of its privacy budget."""

    def __init__(
        self,
        served: Served,
        privacy: PrivacyBudget,
        model: str,
        events: EventQueue,
        errors: LastError,
    ) -> None:
        self._served = served
        self._privacy = privacy
        self._model = model
        self._events = events
        self._errors = errors

    async def refresh(self) -> None:
        """Tell the protocol; and people, where the budget lets this site train no more."""
        situation = await self._served.situation()
        limited = await self._privacy.limit(situation, self._model)
        if limited.reason != situation.reason:
            self._errors.say(limited.reason)
            log.warning("this site does not train", model=self._model, cause=limited.reason)
        await self._events.feed(limited)


async def refresh(all_of: Iterable[Readiness]) -> None:
    """Of every model: documents or pairs have changed."""
    for one in all_of:
        await one.refresh()
