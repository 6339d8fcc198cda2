"""Certificates that will expire: told from 30 days before, in the log once a day.

Thirty days are enough for a request to travel to a keeper who holds the authority
offline, and back. A certificate that has expired shuts its site out; nobody else.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from typing import Final

import structlog

from crypto.identity.site import Identity
from crypto.identity.trust import Trust
from peers.link.contacts import PeerStatistics

log = structlog.get_logger()

WARN_BEFORE: Final = timedelta(days=30)

# The first look is when peers have greeted; then often enough that a day is never missed.
_FIRST_LOOK_S = 60.0
_LOOK_S = 3600.0

_OURS = "fedctl site renew, have it signed, fedctl site install, systemctl reload fedd"
_THEIRS = "its people must renew it, or it will be shut out"
_AUTHORITYS = "the federation's keeper must rotate it (fedctl ca rotate)"


@dataclass(frozen=True)
class Expiry:
    """A certificate: whose, until when, and what to do. ``peer`` is empty unless it is a peer's."""

    what: str
    moment: datetime
    remedy: str
    peer: str = ""

    def warning(self, now: datetime) -> str:
        """For people; empty while there is more time than `WARN_BEFORE`."""
        left = self.moment - now
        if left > WARN_BEFORE:
            return ""
        when = f"{self.moment:%Y-%m-%d %H:%M} UTC"
        if left <= timedelta():
            return f"{self.what} expired on {when}: {self.remedy}"
        days = f"{left.days} days" if left.days != 1 else "1 day"
        return f"{self.what} expires in {days}, on {when}: {self.remedy}"


def expiries(
    identity: Identity, trust: Trust, peers: Mapping[str, PeerStatistics]
) -> tuple[Expiry, ...]:
    """This site's certificate, the authority's, and those that peers have shown."""
    ours = Expiry("this site's certificate", identity.not_after, _OURS)
    authority = Expiry("the authority's certificate", trust.not_after, _AUTHORITYS)
    theirs = (
        Expiry(f"the certificate of site {site}", seen.certificate_not_after, _THEIRS, site)
        for site, seen in sorted(peers.items())
        if seen.certificate_not_after is not None
    )
    return ours, authority, *theirs


def warnings(certificates: Iterable[Expiry], now: datetime | None = None) -> list[str]:
    """What people should know of these now."""
    moment = now or datetime.now(UTC)
    return [text for one in certificates if (text := one.warning(moment))]


class ExpiryWatch:
    """Writes the warnings into the log, each once a day."""

    def __init__(self, found: Callable[[], Iterable[Expiry]]) -> None:
        self._found = found
        self._told: dict[str, date] = {}

    async def run(self) -> None:
        """Until cancelled."""
        pause = _FIRST_LOOK_S
        while True:
            await asyncio.sleep(pause)
            pause = _LOOK_S
            self.tell(datetime.now(UTC))

    def tell(self, now: datetime) -> None:
        """Write what is due."""
        for one in self._found():
            if one.warning(now) and self._told.get(one.what) != now.date():
                self._told[one.what] = now.date()
                log.warning(
                    "a certificate expires soon",
                    whose=one.what,
                    days_left=(one.moment - now).days,
                    expires=one.moment.isoformat(timespec="seconds"),
                    remedy=one.remedy,
                )
