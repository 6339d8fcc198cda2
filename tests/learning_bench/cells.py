"""Cells: one recipe on one part of one world, kept as a file named after its inputs.

A finished cell is not computed again; one that was cut short leaves nothing. Its
inputs are the data, the encoder, the recipe's choices, the part, and the code
that trains, averages and judges: a change in one of them makes another cell.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from daemon.evaluation.evaluation import Judged, judge
from daemon.learning.retriever.spec import RetrieverSpec
from tests.learning_bench.corpora import corpus_at
from tests.learning_bench.recipes.learning import Part
from tests.learning_bench.recipes.recipes import Outcome, Recipe
from tests.learning_bench.sources import code_digest
from tests.learning_bench.worlds import Question, Test, World, encoder_of

Told = Callable[[str], None]

# Kept question by question, for intervals; of the others the mean.
KEPT = ("mrr@10", "hit@1", "hit@5", "hit@10", "recall@5", "ndcg@10")


@dataclass(frozen=True)
class Work:
    """A cell to be had: ``held_out`` is the site that takes no part and is asked alone."""

    world: World
    recipe: Recipe
    part: Part
    held_out: str | None = None


@dataclass(frozen=True)
class Cell:
    """What came out: per test the sites that asked, means, and scores by question."""

    values: dict[str, Any]

    def tests(self) -> Sequence[str]:
        """Names of the tests that were taken."""
        return list(self.values["tests"])

    def mean(self, test: str, metric: str) -> float:
        """The mean of any metric."""
        return float(self.values["tests"][test]["means"][metric])

    def scores(self, test: str, metric: str) -> NDArray[np.float64]:
        """[questions], for the metrics in KEPT."""
        return np.array(self.values["tests"][test]["scores"][metric])

    def sites(self, test: str) -> NDArray[np.str_]:
        """[questions]: who asked."""
        return np.array(self.values["tests"][test]["sites"])

    @property
    def cost(self) -> dict[str, Any]:
        """Seconds by kind, bytes, trained values; empty where nothing was learned."""
        cost: dict[str, Any] = self.values["cost"]
        return cost


def identity_of(work: Work, spec: RetrieverSpec) -> dict[str, Any]:
    """Everything that the cell follows from, as JSON can hold it."""
    learns = work.recipe.learns
    return {
        "world": [work.world.name, work.world.digest, list(work.world.sites)],
        "encoder": encoder_of(spec).digest.hex(),
        "adapt": spec.adapt,
        "recipe": work.recipe.identity,
        "sites": list(work.part.sites) if learns else [],
        "share": work.part.share if learns else 1.0,
        "seed": work.part.seed if learns else 0,
        "asked": work.held_out,
        "code": code_digest(),
    }


def find(work: Work, spec: RetrieverSpec, folder: Path) -> Cell | None:
    """The finished cell, or None."""
    path = _path(work, spec, folder)
    return Cell(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else None


def compute(work: Work, spec: RetrieverSpec, folder: Path, tell: Told) -> Cell:
    """Train, ask, and keep what came out."""
    started = time.monotonic()
    scratch = Path(tempfile.mkdtemp(prefix="hanse-learning-"))
    try:
        outcome = work.recipe.learn(work.world, work.part, spec, scratch, tell)
        tell("asking")
        tests = {}
        for name, test in work.world.tests.items():
            asked = [q for q in test.questions if work.held_out in (None, q.site)]
            if asked:
                tests[name] = _taken(outcome, work.world, test, asked, spec)
    finally:
        shutil.rmtree(scratch)
    learned = outcome.learned
    cost: dict[str, Any] = {}
    if learned is not None:
        cost = {
            "seconds": learned.seconds,
            "losses": learned.losses,
            "trained_values": learned.trained_values,
            "update_bytes": learned.update_bytes,
            "round_bytes": learned.round_bytes,
        }
    values = {
        "identity": identity_of(work, spec),
        "tests": tests,
        "cost": cost,
        "seconds": round(time.monotonic() - started, 1),
    }
    path = _path(work, spec, folder)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(values), encoding="utf-8")
    partial.replace(path)
    return Cell(values)


def _taken(
    outcome: Outcome, world: World, test: Test, asked: Sequence[Question], spec: RetrieverSpec
) -> dict[str, Any]:
    rankings: list[list[str]] = [[] for _ in asked]
    for site in dict.fromkeys(question.site for question in asked):
        rows = [row for row, question in enumerate(asked) if question.site == site]
        corpus = corpus_at(world.library(test.corpus or site), encoder_of(spec).digest)
        found = outcome.ranker(site).rank([asked[row].text for row in rows], corpus)
        for row, ranking in zip(rows, found, strict=True):
            rankings[row] = ranking
    judged: Judged = judge(rankings, [test.right(question) for question in asked])
    return {
        "sites": [question.site for question in asked],
        "means": {name: round(value, 6) for name, value in judged.means().items()},
        "scores": {name: np.round(judged.scores[name], 5).tolist() for name in KEPT},
    }


def _path(work: Work, spec: RetrieverSpec, folder: Path) -> Path:
    text = json.dumps(identity_of(work, spec), sort_keys=True)
    name = hashlib.sha256(text.encode()).hexdigest()[:24]
    return folder / "cells" / f"{name}.json"
