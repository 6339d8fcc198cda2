"""`fedd` without one of its defences, to show that an attack needs it to be there.

    HANSE_UNDEFENDED=revocation python -m tests.attacks.programs.undefended_fedd --config fedd.toml

No setting of the daemon can do this: it is done from outside, here. An attack that is
refused by the real daemon and by this one proves nothing about the defence.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import datetime

from crypto.identity import keys
from crypto.identity.trust import Trust
from daemon import main as fedd
from peers.link.open_connections import OpenCalls
from peers.link.servicer import Caller, Inbox, Servicer


def without_revocation() -> None:
    """A good certificate is enough, whatever the manifest says of its site."""

    def identify(self: Servicer, caller: Caller) -> str:
        trust = self.membership.trust
        caller.site = trust.site_of(caller.certificate, at=datetime.now().astimezone())
        return caller.site

    Servicer._identify = identify  # type: ignore[method-assign]
    OpenCalls.end = lambda *_: []  # type: ignore[method-assign]


def without_expiry() -> None:
    """A certificate that was good once is good for ever."""
    site_of = Trust.site_of

    def once_valid(self: Trust, certificate: bytes, *, at: datetime | None) -> str:
        del at
        return site_of(self, certificate, at=None)

    Trust.site_of = once_valid  # type: ignore[method-assign]


def without_sender() -> None:
    """A message is whoever's it says it is."""

    def admit(self: Servicer, site: str, log_id: str, sender: str, *, own: bool = False) -> Inbox:
        del site, sender, own
        return self.inboxes[log_id]

    Servicer._admit = admit  # type: ignore[method-assign]


def without_signature() -> None:
    """A manifest is good without the authority's signature, if a peer says it is newer."""

    Trust.verify_authority = lambda *_, **__: None  # type: ignore[method-assign]


def without_key_mode() -> None:
    """A key that others may read is loaded all the same."""
    keys._OTHERS = 0


DEFENCES: dict[str, Callable[[], None]] = {
    "revocation": without_revocation,
    "expiry": without_expiry,
    "sender": without_sender,
    "signature": without_signature,
    "key mode": without_key_mode,
}

if __name__ == "__main__":
    if removed := os.environ.get("HANSE_UNDEFENDED"):
        DEFENCES[removed]()
    fedd.main()
