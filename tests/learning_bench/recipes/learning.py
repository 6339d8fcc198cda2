"""Training and averaging: the daemon's own jobs, called in one process in turn.

A round is what daemons do, without the network: every site's `jobs.train`
writes its update, `exchange` hides, adds and applies it. A federation of one (a site
alone, or all data pooled) trains the same number of rounds; its update is added as it is.

What was learned is kept as well (`learned`): cells that differ in what comes after it,
or in who is asked, train it once.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import shutil
import sqlite3
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from crypto.arrays import Float32
from daemon.jobs import learning
from daemon.learning.options import TrainingOptions
from daemon.learning.retriever.retriever import Retriever
from daemon.learning.retriever.spec import RetrieverSpec
from daemon.library.contents import Passage
from daemon.library.schema import open_database
from daemon.library.store import Library
from daemon.personal.serving import open_retriever
from daemon.state.versions import read_version
from tests.learning_bench.recipes.exchange import Training, exchange, in_the_clear
from tests.learning_bench.sources import code_digest
from tests.learning_bench.worlds import World, encoder_of

Told = Callable[[str], None]

_LEARNED = ("train", "valid")  # a site that has few pairs to learn from has few to choose by


@dataclass(frozen=True)
class Learned:
    """The version that came out, and what it cost.

    ``seconds`` by kind of work, over all rounds and sites. ``update_bytes``: what
    one site uploads in one round; ``round_bytes``: what all sites send in one
    round, a site's share of it on average (see `exchange`).
    """

    vector: Float32
    losses: tuple[float, ...]
    seconds: dict[str, float]
    trained_values: int
    update_bytes: int = 0
    round_bytes: float = 0.0


@dataclass(frozen=True)
class Part:
    """What of a world is trained on: which sites, which share of their pairs."""

    sites: tuple[str, ...]
    share: float = 1.0
    seed: int = 0


def libraries_of(world: World, part: Part, scratch: Path) -> dict[str, Path]:
    """Each site's library, or a copy of it with only the chosen share of its pairs."""
    if part.share >= 1.0:
        return {site: world.library(site) for site in part.sites}
    made: dict[str, Path] = {}
    for site in part.sites:
        made[site] = _copy(world.library(site), scratch / f"{site}.sqlite")
        _set_aside(made[site], _kept(world, part, site))
    return made


def central_library(world: World, part: Part, scratch: Path) -> Path:
    """The pooled library, without the documents and pairs of sites that take no part."""
    if part.share >= 1.0 and part.sites == world.sites:
        return world.library(world.central)
    path = _copy(world.library(world.central), scratch / "central.sqlite")
    out = [site for site in world.sites if site not in part.sites]
    with Library.open(path) as library:
        gone = {p.document_id for site in out for p in _passages(world, site)}
        library.delete_documents(gone)
    kept = {name for site in part.sites for name in _kept(world, part, site)}
    _set_aside(path, kept)
    return path


def learned(
    data: tuple[World, Part, dict[str, Path]],
    spec: RetrieverSpec,
    training: Training,
    seed: int,
    scratch: Path,
    tell: Told = lambda _: None,
) -> Learned:
    """`federate` over these libraries, which are this part's of this world; once.

    Where a site keeps something of its own between rounds it is done again, since
    that lies in ``scratch``.
    """
    world, part, libraries = data
    if own_spec(spec, training.options, "", scratch) is not spec:
        return federate(libraries, spec, training, seed, scratch, tell)
    identity = {
        "world": [world.name, world.digest],
        "encoder": encoder_of(spec).digest.hex(),
        "spec": [spec.adapt, spec.lora_rank, spec.lora_alpha, spec.max_tokens],
        "libraries": sorted(libraries),
        "part": asdict(part),
        "training": asdict(training),
        "seed": seed,
        "code": code_digest(),
    }
    name = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:24]
    path = world.folder.parent / "runs" / f"{name}.npz"
    if not path.exists():
        _keep(path, federate(libraries, spec, training, seed, scratch, tell))
    return _kept_run(path)


def federate(
    libraries: dict[str, Path],
    spec: RetrieverSpec,
    training: Training,
    seed: int,
    scratch: Path,
    tell: Told = lambda _: None,
) -> Learned:
    """Rounds over these sites' libraries, or training alone where there is one.

    What is a site's own stays in ``scratch``/personal/<site> (`own_spec`).
    """
    versions = scratch / "versions"
    parent = learning.write_initial_version(spec, versions)
    manifest = learning.describe(spec).shape_manifest
    seconds = {"training": 0.0, "exchange": 0.0}
    losses: list[float] = []
    sent = (0, 0.0)
    options = replace(training.options, seed=seed)
    for number in range(1, training.rounds + 1):
        started = time.monotonic()
        updates: dict[str, tuple[Path, int]] = {}
        for site, library in libraries.items():
            tell(f"round {number} of {training.rounds}: {site}")
            path = scratch / f"{site}.update.npy"
            own = own_spec(spec, training.options, site, scratch)
            result = learning.train(own, library, versions, parent, options, number, site, path)
            updates[site] = (path, result.num_examples)
            if len(libraries) == 1:
                losses.append(result.mean_loss)
        trained = time.monotonic()
        if len(libraries) == 1:
            parent = in_the_clear(updates, (versions, parent), manifest.digest)
        elif training.exchange == "in the clear":
            at = (versions, parent)
            parent = in_the_clear(updates, at, manifest.digest, training.weighted)
        else:
            made = exchange(updates, training, number, (versions, parent), manifest, scratch)
            parent, sent = made.version, (made.uploaded, made.sent)
            losses.append(made.loss)
        seconds["training"] += trained - started
        seconds["exchange"] += time.monotonic() - trained
    vector = read_version(versions, parent, manifest.digest)
    shutil.rmtree(versions)
    return Learned(vector, tuple(losses), seconds, manifest.total, *sent)


def own_spec(
    spec: RetrieverSpec, options: TrainingOptions, site: str, scratch: Path
) -> RetrieverSpec:
    """The spec with a folder for what the site keeps to itself, where it keeps anything."""
    if spec.personal == "none" and options.start_from == "global":
        return spec
    return replace(spec, personal_folder=str(scratch / "personal" / site))


@functools.lru_cache(maxsize=3)
def retriever_of(spec: RetrieverSpec) -> Retriever:
    """A retriever to search with; the one that trains is the jobs' own."""
    return open_retriever(spec)


def _keep(path: Path, run: Learned) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    rest: dict[str, Any] = {k: v for k, v in vars(run).items() if k != "vector"}
    partial = path.with_suffix(f".{os.getpid()}")
    with partial.open("wb") as file:
        np.savez(file, vector=run.vector, rest=np.array(json.dumps(rest)))
    partial.replace(path)


def _kept_run(path: Path) -> Learned:
    with np.load(path, allow_pickle=False) as kept:
        rest = json.loads(str(kept["rest"]))
        return Learned(kept["vector"], **{**rest, "losses": tuple(rest["losses"])})


def _kept(world: World, part: Part, site: str) -> set[str]:
    """The queries of a site's chosen pairs: the same for every recipe."""
    kept: set[str] = set()
    chance = np.random.Generator(np.random.Philox(key=part.seed))
    for split in _LEARNED:
        with Library.open(world.library(site), read_only=True) as library:
            queries = list(dict.fromkeys(pair.query for pair in library.pairs(split)))
        count = min(len(queries), max(2, round(part.share * len(queries))))
        kept |= {queries[row] for row in chance.permutation(len(queries))[:count].tolist()}
    return kept


def _set_aside(path: Path, kept: set[str]) -> None:
    with Library.open(path) as library:
        others = [p for split in _LEARNED for p in library.pairs(split) if p.query not in kept]
        # A pair is known by all its documents, and `pairs` shows those that are
        # here: so the table itself is asked.
    with closing(open_database(path, read_only=False)) as database:
        database.executemany(
            "UPDATE pair SET split = 'aside' WHERE split IN ('train', 'valid') AND query = ?",
            [(pair.query,) for pair in others],
        )


def _passages(world: World, site: str) -> Sequence[Passage]:
    with Library.open(world.library(site), read_only=True) as library:
        return library.passages()


def _copy(source: Path, target: Path) -> Path:
    target.parent.mkdir(parents=True, exist_ok=True)
    target.unlink(missing_ok=True)
    with (
        closing(open_database(source, read_only=True)) as old,
        closing(sqlite3.connect(target)) as new,
    ):
        old.backup(new)
    return target
