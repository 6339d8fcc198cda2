"""What goes wrong in a simulated federation: its network, its work, its clocks."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Faults:
    """Chances a message, a push or a piece of work; seconds of delay.

    Of messages of the kind ``scarce``, two in three are lost.
    """

    drop: float = 0.0
    duplicate: float = 0.0
    delay_s: tuple[float, float] = (0.001, 0.05)
    cut: float = 0.0
    fail: float = 0.0
    scarce: str = ""


@dataclass
class Clock:
    """A site's monotonic clock."""

    offset: float = 0.0
    rate: float = 1.0

    def local(self, now: float) -> float:
        return self.offset + now * self.rate

    def world(self, local: float) -> float:
        return (local - self.offset) / self.rate
