"""One site's machine in a federation of which nobody else is real: a test says every message.

    >>> alone = Alone()
    >>> alone.begins()                       # a run: site a promises attempt 0
    >>> alone.hears("b", alone.prepare("b", 0))

Site a of four, of which one may lie: b coordinates attempt 0 of round 1, c attempt 1, d
attempt 2, a itself attempt 3.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from peers.attempts import effects as do
from peers.attempts.bundle import Bundle
from peers.attempts.statement import EncodedStatement
from peers.rounds.protocol import Protocol
from peers.wire.errors import RemoteProtocolError
from proto import federation_pb2 as pb
from tests.simulation.network import GENESIS, World
from tests.support.signed_rounds import Stage


class Alone:
    """Site a, in a federation that says what a test says."""

    def __init__(self, sites: int = 4, *, unheard: str = "") -> None:
        """``unheard``: whom it has asked what it has said, and who has not answered."""
        self.world = World(sites=sites, seed=1, faulty_sites=1, min_participants=3)
        self.stage = Stage(manifest=self.world.manifest)
        self.now = 1.0
        self._is_told([peer for peer in self.stage.sites[1:] if peer not in unheard])

    def _is_told(self, peers: Sequence[str]) -> None:
        """These know of nothing that it has signed; for the others it waits a moment."""
        for peer in peers:
            self.hears(peer, pb.Remembered(round=1))
        others = len(self.stage.sites) - 1
        if len(peers) < others and len(peers) >= self.stage.manifest.quorum - 1:
            self.ticks()

    @property
    def machine(self) -> Protocol:
        return self.world.site("a")

    @property
    def promised(self) -> int:
        return self.machine.durable.promised

    @property
    def state(self) -> pb.RoundState:
        return self.machine.durable.state

    def hears(self, sender: str, body: do.Body) -> list[do.Effect]:
        return self.takes(do.MessageReceived(sender, body))

    def takes(self, event: do.Event) -> list[do.Effect]:
        try:
            effects = self.machine.step(event, self.now)
        except Exception:
            self._persists(self.machine.wished)  # before it was refused, as the driver does
            raise
        self._persists(effects)
        return effects

    def _persists(self, effects: list[do.Effect]) -> None:
        for effect in effects:
            if isinstance(effect, do.Persist):
                self.world.disks["a"].durable = effect.durable

    def begins(self, sender: str = "b") -> list[do.Effect]:
        """A run is under way: a promises attempt 0."""
        return self.hears(sender, pb.RunWish(run=self.stage.run))

    def ticks(self) -> list[do.Effect]:
        """Its patience is over."""
        self.now = self.machine.next_wakeup()
        return self.takes(do.Tick())

    def goes_on(self) -> list[do.Effect]:
        """Its patience is over, and others are where it is."""
        for site in self.stage.sites[2:]:
            self.hears(site, self.stage.promised(site, self.promised))
        return self.ticks()

    def restarts(self) -> None:
        """It loses everything but its disk, and nobody remembers anything."""
        self.world.crash("a")
        self.world.start("a")
        self._is_told(self.stage.sites[1:])

    def prepare(self, sender: str, attempt: int, **changed: object) -> pb.Prepare:
        fields: dict[str, object] = {
            "round": 1,
            "attempt": attempt,
            "head_digest": GENESIS,
            "run": self.stage.run,
            "manifest_version": 1,
            "promise": self.stage.promised(sender, attempt),
        }
        return pb.Prepare(**{**fields, **changed})  # type: ignore[arg-type]

    def everybody(self, attempt: int, **named: object) -> Bundle:
        """The bundle of an attempt in which the others promise what is said; a's is its own."""
        ours = self.state.promise
        assert pb.Promise.FromString(ours.promise.body).attempt == attempt
        others = [
            self.stage.promised(site, attempt, **named)  # type: ignore[arg-type]
            for site in self.stage.sites[1:]
        ]
        return self.stage.bundle([ours, *others], attempt)

    def state_of(self, known: EncodedStatement) -> pb.State:
        return pb.State(round=1, attempt=known.message.attempt, statement=known.raw)

    def at_attempt(self, attempt: int) -> None:
        """More sites than may lie are there."""
        for site in self.stage.sites[2:]:
            self.hears(site, self.stage.promised(site, attempt))
        assert self.promised == attempt


def lead_of(attempt: int) -> str:
    return "abcd"[(1 + attempt) % 4]


def sent(effects: list[do.Effect], kind: type) -> list[Any]:
    return [e for e in effects if isinstance(e, do.Send) and isinstance(e.body, kind)]


def refused(match: str) -> pytest.RaisesExc[RemoteProtocolError]:
    return pytest.raises(RemoteProtocolError, match=match)


def witnessing(alone: Alone) -> EncodedStatement:
    """Attempt 0 has its bundle, and a no part in it: what it sent itself is not in question."""
    alone.begins()
    bundle = alone.everybody(0)
    alone.hears("b", bundle.message)
    alone.machine._here.part = None
    return alone.stage.statement(bundle)


def stated(alone: Alone) -> EncodedStatement:
    """a has signed the sum of attempt 0."""
    known = witnessing(alone)
    effects = alone.hears("b", alone.state_of(known))
    assert len(sent(effects, pb.Stated)) == 1
    persisted = next(n for n, e in enumerate(effects) if isinstance(e, do.Persist))
    assert isinstance(effects[-1], do.Send)
    assert persisted < len(effects) - 1, "on disk before it is said"
    return known
