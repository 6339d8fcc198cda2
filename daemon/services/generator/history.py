"""The generator's versions by round, and what this site's validation triples say of each.

A version is judged once, as is the retriever's (`daemon.services.curve`), and what came of it is
in the state file of the generator's rounds. Round 0 is the base model. Nothing of this leaves
the site.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from pathlib import Path

from daemon.learning.generator.in_use import Judged
from daemon.state.store import Store
from daemon.state.versions import version_path

_NATS = "nats"


@dataclass(frozen=True)
class Unjudged:
    """A committed version of which nothing is known; ``pruned``: nor will it be."""

    round: int
    model_digest: bytes
    pruned: bool


class VersionHistory:
    """Of the versions in a folder. Methods read the disk: call them from a thread."""

    def __init__(self, store: Store, folder: Path, first: bytes) -> None:
        """``first``: the version that round 1 trains from, which is the base model."""
        self.first = first
        self._store = store
        self._folder = folder

    def rounds(self) -> dict[int, bytes]:
        """The digest of each round's version, oldest first; raises StoreError."""
        bodies = (commit.certificate.body for commit in self._store.rounds(1, 0))
        return {0: self.first} | {body.round: body.model_digest for body in bodies}

    def round_of(self, digest: bytes) -> int:
        """The newest round that committed it; 0: none."""
        return max((n for n, one in self.rounds().items() if one == digest), default=0)

    def unjudged(self) -> list[Unjudged]:
        """Versions of which nothing is known, oldest first; raises StoreError."""
        known = {(point.round, point.model_digest) for point in self._store.curve(_NATS)}
        return [
            Unjudged(round_, digest, round_ > 0 and not version_path(self._folder, digest).exists())
            for round_, digest in self.rounds().items()
            if (round_, digest) not in known
        ]

    def file(self, digest: bytes, judged: Judged, triples: int) -> None:
        """Keep what a version was judged by so many triples; raises StoreError."""
        now = time.time_ns() // 1_000_000
        means = {
            _NATS: judged.nats,
            "perplexity": judged.perplexity,
            "tokens": float(judged.tokens),
        }
        written = {"rouge-l-f": judged.rouge_l, "cited": judged.cited}
        told = {name: value for name, value in written.items() if math.isfinite(value)}
        for round_, one in self.rounds().items():
            if one == digest:
                self._store.file_scores(round_, digest, means, triples, now)
                self._store.file_scores(round_, digest, told, judged.written, now)
