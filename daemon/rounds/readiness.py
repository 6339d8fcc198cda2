"""What this site can contribute to a round just now, told to the protocol whenever it changes."""

from __future__ import annotations

import structlog

from daemon.rounds.events import EventQueue
from daemon.rounds.progress import LastError
from daemon.services.collection import Collection
from daemon.state.privacy_ledger import PrivacyBudget

log = structlog.get_logger()


class Readiness:
    """Its pairs, its people's will, and what is left of its privacy budget."""

    def __init__(
        self,
        collection: Collection,
        privacy: PrivacyBudget,
        events: EventQueue,
        errors: LastError,
    ) -> None:
        self._collection = collection
        self._privacy = privacy
        self._events = events
        self._errors = errors

    async def refresh(self) -> None:
        """Tell the protocol; and people, where the budget lets this site train no more."""
        situation = await self._collection.situation()
        limited = await self._privacy.limit(situation)
        if limited.reason != situation.reason:
            self._errors.say(limited.reason)
            log.warning("this site does not train", cause=limited.reason)
        await self._events.feed(limited)
