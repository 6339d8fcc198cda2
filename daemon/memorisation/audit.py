"""The audit of what a generator remembers: what it is asked, and the figures it returns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from daemon.learning.generator.in_use import InUse
from daemon.learning.options import LearningError, TrainingOptions

DELTA = 1e-5
USUAL_NOISES = (0.1, 1.0)
LEAST_TRIPLES = 8  # with fewer a model would learn hardly anything but canaries
_BEYOND_CHANCE = 2.0  # standard errors


class MemorisationError(LearningError):
    """The audit cannot say anything of this generator here; the message says what it needs."""


@dataclass(frozen=True)
class AuditOptions:
    """What the operator asks for.

    ``sites``: of the federation whose share of a sum is tried. ``noises``: multiples of the clip
    norm, as in a plan. ``clip_norm``: L2; 0: as long as the first round's update is. ``seed``: of
    the secrets, which nobody must foretell.
    """

    training: TrainingOptions
    sites: int
    seed: int
    canaries: int = 8
    rounds: int = 4
    noises: tuple[float, ...] = USUAL_NOISES
    clip_norm: float = 0.0

    def check(self) -> None:
        """Raise MemorisationError where nothing would be trained; loads nothing."""
        if self.training.local_epochs == 0:
            raise MemorisationError(
                "local_epochs = 0 trains nothing that could be remembered: use 1 or more"
            )


@dataclass(frozen=True)
class Began:
    """What training begins with: a version or a mixture, and what people call it."""

    values: InUse
    name: str


class AuditProgress(NamedTuple):
    """Reported while the audit runs: what it is at, and the share that is done."""

    step: str
    fraction: float


@dataclass(frozen=True)
class CanaryExposure:
    """How far a version exposes the canaries: mean and largest exposure, in bits.

    ``version``: in words. ``multiplier``, ``epsilon``: of its noise; 0: none. ``written``:
    canaries that it writes when it is asked. ``planted``: whether it was trained on them.
    """

    version: str
    mean: float
    largest: float
    written: int
    planted: bool = False
    multiplier: float = 0.0
    epsilon: float = 0.0


@dataclass(frozen=True)
class Memorisation:
    """The whole audit. Exposures are in bits, norms L2.

    ``triples``: of the site's own. ``others``: secrets that a canary is ranked among.
    ``by_chance``: the mean exposure of what was never planted, with its standard error
    ``chance_error``; ``most``: the largest there can be.
    """

    canaries: int
    others: int
    triples: int
    rounds: int
    local_epochs: int
    sites: int
    adapt: str
    learning_rate: float
    update_norm: float
    clip_norm: float
    delta: float
    by_chance: float
    chance_error: float
    most: float
    versions: tuple[CanaryExposure, ...]
    seconds: float
    advice: str = ""


def is_beyond_chance(one: CanaryExposure, audit: Memorisation) -> bool:
    """Whether so much would hardly be seen of canaries that nobody has learned."""
    return one.written > 0 or one.mean > audit.by_chance + _BEYOND_CHANCE * audit.chance_error


def advice(audit: Memorisation) -> str:
    """What the figures say, in sentences that help to decide."""
    trained = [one for one in audit.versions if one.planted]
    telling = [one for one in trained if is_beyond_chance(one, audit)]
    quiet = [one for one in trained if one not in telling]
    if not telling:
        said = [
            "No version exposes its canaries beyond what chance gives, in this way. That this site "
            "alone does not, either, may mean that so little training teaches nothing: look again "
            "with more rounds (--rounds)."
        ]
    elif not quiet:
        said = ["Every version that was trained on canaries exposes them beyond chance."]
    else:
        said = [
            f"Beyond chance canaries are exposed by {_named(telling)}; within what it gives, "
            f"by {_named(quiet)}."
        ]
    if written := [one for one in trained if one.written]:
        most = max(written, key=lambda one: one.written)
        said.append(
            f"{most.written} of {audit.canaries} are written word for word to whoever asks "
            f"({most.version}): train fewer passes or fewer values, or with noise."
        )
    said.append(
        "It is a lower bound: each canary was seen "
        f"{audit.rounds * audit.local_epochs} times, and more rounds or a better method find more. "
        "Of a federation only this site's share is tried, the others' changes taken as none. "
        "Epsilon is about the whole site: noise that hides it hides a canary, but no epsilon here "
        "is a canary's own."
    )
    return " ".join(said)


def _named(some: list[CanaryExposure]) -> str:
    return ", ".join(f"{one.version} ({one.mean:.1f} bits)" for one in some)
