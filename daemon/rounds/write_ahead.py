"""The protocol's state goes to disk here, or this site stands still.

What follows a `Persist` may be said only once it holds, so a disk that is full or
read-only stops the protocol at that very effect: nothing is promised, nothing is
voted for. It stops nothing else: `trouble` says so to people and is the reason that
peers are refused with meanwhile, questions are answered, and as soon as the disk
takes the state the effects that waited are carried out. They are late messages
then, which the protocol tolerates at every site.

A state that can't be written for any other reason would fail again and again: it is
not tried a second time. This site then promises nothing and refuses peers and people,
who read why, until it is started again, from what was on its disk before.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

import structlog

from daemon.state.store import Store, StoreError
from peers.attempts import effects as do
from peers.link.pacing import Backoff
from peers.rounds.runs import RunRefused
from peers.wire.errors import PeerRefused
from proto import federation_pb2 as pb

log = structlog.get_logger()

_FIRST_PAUSE_S = 0.25
_LONGEST_PAUSE_S = 5.0


class Unwritable(Exception):
    """The state can't be written, and not because of the disk: a bug. This site stands still."""


class WriteAhead:
    """Writes the state, one transaction at a time, for as long as that takes."""

    def __init__(self, store: Store, standing_still: Callable[[str], None]) -> None:
        """``standing_still`` is called with the trouble each time that writing fails."""
        self._store = store
        self._standing_still = standing_still
        self.trouble = ""
        self.broken = False

    async def persist(self, durable: do.Durable, commits: tuple[pb.Commit, ...]) -> None:
        """Return when it is on disk, and not before, whatever goes wrong with the disk.

        Raises Unwritable when anything else does: then, and from then on.
        """
        if self.broken:
            raise Unwritable(self.trouble)
        pauses = Backoff(_FIRST_PAUSE_S, _LONGEST_PAUSE_S, random.SystemRandom())
        while True:
            try:
                await asyncio.to_thread(self._store.persist, durable, commits)
            except (StoreError, OSError) as error:
                self._in_trouble(error)
                await asyncio.sleep(pauses.pause())
            except Exception as error:  # no failure at all may let a promise out unwritten
                raise self._break(error) from error
            else:
                break
        if self.trouble:
            self.trouble = ""
            log.info("the state is on disk again: this site goes on")

    def _in_trouble(self, error: Exception) -> None:
        trouble = (
            f"this site stands still, it cannot write its state: {error}; free or repair the disk"
        )
        if trouble != self.trouble:  # once, not with every try: the log may be on that disk
            log.error("state not written: no promise and no vote until it is", cause=str(error))
        self.trouble = trouble
        self._standing_still(trouble)

    def _break(self, error: Exception) -> Unwritable:
        self.broken = True
        self.trouble = (
            f"this site stands still, its state could not be written ({type(error).__name__}: "
            f"{error}), and not because of the disk: restart it, and report this with its log"
        )
        log.critical("state not written: no promise and no vote from now on", exc_info=error)
        self._standing_still(self.trouble)
        return Unwritable(self.trouble)


def still(event: do.Event, trouble: str) -> Exception:
    """How a site that stands still refuses a peer's message, and a person's wish."""
    return PeerRefused(trouble) if isinstance(event, do.MessageReceived) else RunRefused(trouble)
