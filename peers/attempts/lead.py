"""An attempt at the site that leads it: in which phase it is, who is in it, and why others are not.

PURE. What is done in it: peers/attempts/coordination.py.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Protocol

from peers.attempts.bundle import Ground, Promised
from peers.wire.manifest import RETRIEVER, FederationManifest, model_of
from peers.wire.signing import Keys


@dataclass(frozen=True)
class SharedModel:
    """What is trained together: the digest of its shapes, and how many values are exchanged."""

    shape_digest: bytes
    values: int

    def objection(self, manifest: FederationManifest) -> str:
        """Why a site with this one can't train under that manifest; empty if it can."""
        named = manifest.retriever
        if named is None or named.digest == self.shape_digest:
            return ""
        model = model_of(manifest.federation_id)
        called = "encoder (retriever" if model == RETRIEVER else f"model ({model}"
        return (
            f"manifest {manifest.version} names another {called} "
            f"{named.digest.hex()[:12]}) than the one in use here ({self.shape_digest.hex()[:12]})"
        )


class Deadlines(Protocol):
    """How long a coordinator waits, in seconds (peers/rounds/pacemaker.py)."""

    def phase(self, attempt: int) -> float:
        """In a phase other than training."""

    def train(self, attempt: int) -> float:
        """For local training."""

    def straggler(self, attempt: int) -> float:
        """For the others, after a quorum or masking's threshold."""


class AttemptFails(Exception):
    """This attempt can't go on; the text says why and at whose side."""


@dataclass
class Lead:
    """What all phases of an attempt stand on, at its coordinator.

    ``promises``: of the sites that are in it. ``refusals``: why others are not, for people.
    ``spans``: the phases so far, and how long each took, in seconds.
    """

    site: str
    ground: Ground
    keys: Keys
    model: SharedModel
    timing: Deadlines
    phase: str = "prepare"
    began: float = 0.0
    deadline: float = 0.0
    promises: dict[str, Promised] = field(default_factory=dict)
    refusals: dict[str, str] = field(default_factory=dict)
    behind: dict[str, str] = field(default_factory=dict)
    spans: list[tuple[str, float]] = field(default_factory=list)

    @property
    def round(self) -> int:
        """The round under way."""
        return self.ground.round

    @property
    def attempt(self) -> int:
        """The attempt of it."""
        return self.ground.attempt

    @property
    def shape_digest(self) -> bytes:
        """Of what is trained: as the manifest names it, or else as this coordinator has it."""
        named = self.ground.manifest.retriever
        return self.model.shape_digest if named is None else named.digest

    @property
    def enabled(self) -> tuple[str, ...]:
        """Every site of the attempt's manifest."""
        return self.ground.manifest.enabled_ids

    def enter(self, phase: str, now: float, allowance: float | None = None) -> None:
        """Another phase begins; it may take so long, or as long as phases do."""
        self.spans.append((self.phase, now - self.began))
        self.phase, self.began = phase, now
        self.extend(now, allowance)

    def extend(self, now: float, allowance: float | None = None) -> None:
        """The phase may take so long from now on."""
        self.deadline = now + (self.timing.phase(self.attempt) if allowance is None else allowance)

    def hurry(self, now: float) -> None:
        """Enough have answered: the others get a moment."""
        self.deadline = min(self.deadline, now + self.timing.straggler(self.attempt))

    def why_not(self, untold: Collection[str] = ()) -> str:
        """Who is not in it, and why; ``untold``: participants that have not told of training."""
        reasons = dict(self.refusals)
        for site, promised in self.promises.items():
            promise = promised.promise
            if not promise.willing:
                reasons[site] = promise.reason or "not willing to train"
            elif promise.shape_digest != self.shape_digest:
                reasons[site] = "its retriever differs (encoder or adaptation)"
        for site in self.enabled:
            if self.phase == "prepare" and site not in self.promises:
                reasons.setdefault(site, self.behind.get(site, "did not answer"))
            if site in untold:
                reasons.setdefault(site, "did not tell in time that it has trained")
        return "".join(f"; {site}: {reasons[site]}" for site in sorted(reasons))
