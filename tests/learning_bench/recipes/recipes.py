"""Recipes: what is compared, each an object with a name.

A recipe gets a part of a world and gives one ranker to each site that asks. To
add one, make a `Federated` with other choices, or write a class with a name, an
`identity` and `learn`, and put it into `compared.RECIPES`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from config.recipes import Adapt
from daemon.learning.retriever.spec import RetrieverSpec
from daemon.library.store import Library
from tests.learning_bench.corpora import Dense, Ranker, Words
from tests.learning_bench.recipes.exchange import Training
from tests.learning_bench.recipes.learning import (
    Learned,
    Part,
    central_library,
    learned,
    libraries_of,
    retriever_of,
)
from tests.learning_bench.worlds import World

Told = Callable[[str], None]


@dataclass(frozen=True)
class Outcome:
    """A ranker for each asking site, and what it cost to make them (None: nothing).

    ``anywhere`` asks for sites that took no part.
    """

    rankers: dict[str, Ranker]
    anywhere: Ranker
    learned: Learned | None = None

    def ranker(self, site: str) -> Ranker:
        """What that site searches with."""
        return self.rankers.get(site, self.anywhere)


class Recipe(Protocol):
    """A named way to learn."""

    @property
    def name(self) -> str:
        """As it stands in the tables."""

    @property
    def learns(self) -> bool:
        """False: the outcome depends on neither pairs nor seed."""

    @property
    def personal(self) -> bool:
        """Each site asks a model of its own: makes no sense where questions are nobody's."""

    @property
    def identity(self) -> dict[str, Any]:
        """Every choice that decides the outcome; finished cells are found by it."""

    def learn(
        self, world: World, part: Part, spec: RetrieverSpec, scratch: Path, tell: Told
    ) -> Outcome:
        """Train on that part; ``scratch`` is an empty folder that goes afterwards."""


@dataclass(frozen=True)
class Bm25:
    """Words alone."""

    name: str = "BM25"
    learns: bool = False
    personal: bool = False

    @property
    def identity(self) -> dict[str, Any]:
        """See `Recipe`."""
        return {"kind": "bm25"}

    def learn(
        self, world: World, part: Part, spec: RetrieverSpec, scratch: Path, tell: Told
    ) -> Outcome:
        """Nothing is learned."""
        del world, part, spec, scratch, tell
        return Outcome({}, Words())


@dataclass(frozen=True)
class Vanilla:
    """The encoder as it comes."""

    name: str = "vanilla encoder"
    learns: bool = False
    personal: bool = False

    @property
    def identity(self) -> dict[str, Any]:
        """See `Recipe`."""
        return {"kind": "vanilla"}

    def learn(
        self, world: World, part: Part, spec: RetrieverSpec, scratch: Path, tell: Told
    ) -> Outcome:
        """The starting vector, at which every adaptation is its encoder."""
        del world, part, scratch, tell
        retriever = retriever_of(spec)
        return Outcome({}, Dense(retriever, retriever.initial_vector()))


@dataclass(frozen=True)
class Federated:
    """Rounds of FedAvg between all sites; every site searches with the shared version."""

    name: str = "FedAvg"
    training: Training = field(default_factory=Training)
    adapt: Adapt = "head"
    learns: bool = True
    personal: bool = False

    @property
    def identity(self) -> dict[str, Any]:
        """See `Recipe`."""
        return {"kind": "federated", "adapt": self.adapt, **asdict(self.training)}

    def learn(
        self, world: World, part: Part, spec: RetrieverSpec, scratch: Path, tell: Told
    ) -> Outcome:
        """As daemons do it: `tests.learning_bench.recipes.learning`."""
        spec = replace(spec, adapt=self.adapt)
        libraries = libraries_of(world, part, scratch)
        data = (world, part, libraries)
        run = learned(data, spec, self.training, part.seed, scratch, tell)
        return Outcome({}, Dense(retriever_of(spec), run.vector), run)


@dataclass(frozen=True)
class Centralised:
    """All sites' documents and pairs in one library: what a federation may not do."""

    name: str = "centralised"
    training: Training = field(default_factory=Training)
    adapt: Adapt = "head"
    learns: bool = True
    personal: bool = False

    @property
    def identity(self) -> dict[str, Any]:
        """See `Recipe`."""
        return {"kind": "centralised", "adapt": self.adapt, **asdict(self.training)}

    def learn(
        self, world: World, part: Part, spec: RetrieverSpec, scratch: Path, tell: Told
    ) -> Outcome:
        """The same rounds and epochs as the federation, on the pooled library."""
        spec = replace(spec, adapt=self.adapt)
        library = central_library(world, part, scratch)
        data = (world, part, {world.central: library})
        run = learned(data, spec, self.training, part.seed, scratch, tell)
        return Outcome({}, Dense(retriever_of(spec), run.vector), run)


@dataclass(frozen=True)
class Alone:
    """Sites by themselves, on their own pairs, for as many rounds and epochs.

    ``which``: "each" searches with its own; "largest" or "smallest" (by pairs) is
    one site's model, which all sites search with. ``averaged``: of so many runs with
    seeds of their own, as a mixture averages two: the control without a federation.
    """

    name: str = "each site alone"
    which: str = "each"
    training: Training = field(default_factory=Training)
    adapt: Adapt = "head"
    averaged: int = 1
    learns: bool = True

    @property
    def personal(self) -> bool:
        """See `Recipe`."""
        return self.which == "each"

    @property
    def identity(self) -> dict[str, Any]:
        """See `Recipe`."""
        return {
            "kind": "alone",
            "which": self.which,
            "adapt": self.adapt,
            "averaged": self.averaged,
            **asdict(self.training),
        }

    def learn(
        self, world: World, part: Part, spec: RetrieverSpec, scratch: Path, tell: Told
    ) -> Outcome:
        """Each chosen site is a federation of one."""
        spec = replace(spec, adapt=self.adapt)
        libraries = libraries_of(world, part, scratch)
        by_size = sorted(libraries, key=lambda site: (_pairs(libraries[site]), site))
        chosen = {"largest": by_size[-1:], "smallest": by_size[:1]}.get(self.which, by_size)
        retriever = retriever_of(spec)
        rankers: dict[str, Ranker] = {}
        runs: list[Learned] = []
        for site in chosen:
            # The same run whoever else takes part: named after this site alone.
            data = (world, replace(part, sites=(site,)), {site: libraries[site]})
            own = [
                learned(data, spec, self.training, part.seed + _APART * number, scratch, tell)
                for number in range(self.averaged)
            ]
            runs += own
            vector = np.average([run.vector for run in own], axis=0).astype(np.float32)
            rankers[site] = Dense(retriever, vector)
        seconds = {
            kind: sum(run.seconds[kind] for run in runs) for kind in ("training", "exchange")
        }
        anywhere = rankers[chosen[-1]]
        run = Learned(runs[-1].vector, (), seconds, runs[-1].trained_values)
        return Outcome(rankers if self.which == "each" else {}, anywhere, run)


_APART = 1000  # between the seeds of runs that are averaged


def _pairs(library: Path) -> int:
    with Library.open(library, read_only=True) as opened:
        return opened.counts().pairs_train
