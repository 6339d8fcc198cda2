"""Rows of the table: what is trained, by whom, how updates are added, and how the answers are.

A round is what daemons do without the network: the generator's own job at each site, then the
sum of `tests.learning_bench.recipes.exchange`. Rows that differ in what hides the integers alone
are trained once: each round's integers are summed in every one of these ways, and the versions
that come out must be the same bits.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from crypto.arrays import Float32
from crypto.privacy import NoiseTerms, epsilon_of
from daemon.answering.citations import statements
from daemon.evaluation.answers import score_citations, score_text, without_marks
from daemon.jobs.generator import training as jobs
from daemon.jobs.generator.examples import examples_of
from daemon.learning.generator.spec import GeneratorSpec
from daemon.learning.generator.triples import Triple
from daemon.learning.options import TrainingOptions
from daemon.process.chat_client import Sampling
from daemon.state.versions import read_version
from tests.generator_bench.sites import Site, pooled
from tests.learning_bench.recipes.exchange import Exchange, Training, exchange, in_the_clear

Told = Callable[[str], None]
KEPT = ("rouge-1-f", "rouge-2-f", "rouge-l-f", "bleu", "chrf", "meteor-stem", "cites-p")
DELTA = 1e-5
_CLIP = 2.0
_SHARERS = 2  # of three sites, where one may tell the others' noise from its own


@dataclass(frozen=True)
class Work:
    """What is trained once; it makes a row for each of ``exchanges``, or one.

    ``who``: "nobody", "alone", "pooled" or "federated".
    """

    name: str
    who: str
    adapt: Literal["lora", "lora_server", "full"] = "lora"
    exchanges: tuple[Exchange, ...] = ("integers",)
    multiplier: float = 0.0

    @property
    def noise(self) -> NoiseTerms | None:
        """Of each round."""
        return NoiseTerms(_CLIP, self.multiplier, _SHARERS) if self.multiplier else None


WORKS = (
    Work("base model", "nobody"),
    Work("each site alone, C", "alone"),
    Work("FedAvg, C", "federated", exchanges=("integers", "ckks", "masking")),
    Work("pooled, C", "pooled"),
    Work("FedAvg, A", "federated", "full"),
    Work("FedAvg, B", "federated", "lora_server"),
    *(Work("FedAvg, C, DP", "federated", multiplier=z) for z in (0.01, 0.1, 1.0)),
)
LEARNING_RATES = {"lora": 1e-2, "lora_server": 1e-3, "full": 1e-3}


@dataclass(frozen=True)
class Terms:
    """Of every row: rounds, and a site's training in each."""

    rounds: int = 4
    epochs: int = 1
    batch_size: int = 8
    prompt_tokens: int = 448
    answer_tokens: int = 48


def computed(
    work: Work, sites: Sequence[Site], spec: GeneratorSpec, terms: Terms, seed: int, told: Told
) -> list[dict[str, Any]]:
    """Train and ask; a row for each exchange, as JSON can hold it."""
    spec = replace(
        spec,
        adapt=work.adapt,
        prompt_tokens=terms.prompt_tokens,
        answer_tokens=terms.answer_tokens,
    )
    scratch = sites[0].library.parent / "scratch"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    everywhere = {site.name: site.library for site in sites}
    questions: list[dict[str, Any]] = []
    if work.who == "alone":
        for site in sites:
            run = federate({site.name: site.library}, spec, work, terms, seed, scratch, told)
            questions += asked(spec, run.vector, [site], told)
    else:
        libraries = {"pooled": pooled(sites, scratch)} if work.who == "pooled" else everywhere
        run = federate(libraries, spec, work, terms, seed, scratch, told)
        questions = asked(spec, run.vector, sites, told)
    shutil.rmtree(scratch)
    spent = [work.multiplier] * terms.rounds if work.multiplier else []
    row = {
        "name": work.name,
        "who": work.who,
        "adapt": work.adapt,
        "seed": seed,
        "multiplier": work.multiplier,
        "epsilon": round(epsilon_of(spent, DELTA), 2) if spent else None,
        "values": run.values,
        "norms": run.norms,
        "train_seconds": run.train_seconds,
        "questions": questions,
    }
    costs = run.costs or {"nothing": {}}
    return [{**row, "exchange": name, **cost} for name, cost in costs.items()]


@dataclass(frozen=True)
class Run:
    """The version that came out; what a site sent in a round, and how long it took, by exchange."""

    vector: Float32
    values: int
    norms: list[float]
    train_seconds: float
    costs: dict[str, dict[str, float]]


def federate(
    libraries: dict[str, Path],
    spec: GeneratorSpec,
    work: Work,
    terms: Terms,
    seed: int,
    scratch: Path,
    told: Told,
) -> Run:
    """Rounds over these sites; where there is one its updates are applied as they are."""
    versions = scratch / "versions"
    parent = jobs.write_initial_version(spec, versions)
    manifest = jobs.describe(spec).shape_manifest
    options = TrainingOptions(
        local_epochs=terms.epochs,
        batch_size=terms.batch_size,
        learning_rate=LEARNING_RATES[spec.adapt],
        seed=seed,
    )
    rounds = 0 if work.who == "nobody" else terms.rounds
    seconds, norms = 0.0, []
    costs: dict[str, dict[str, float]] = {}
    for number in range(1, rounds + 1):
        updates = {}
        for site, library in libraries.items():
            told(f"{work.name}: round {number} of {rounds}: {site}")
            path = scratch / f"{site}.update.npy"
            started = time.monotonic()
            result = jobs.train(spec, library, versions, parent, options, number, site, path)
            seconds += (time.monotonic() - started) / (rounds * len(libraries))
            updates[site] = (path, result.num_examples)
            norms.append(float(np.linalg.norm(np.load(path, allow_pickle=False)[:-1])))
        if len(libraries) == 1:
            parent = in_the_clear(updates, (versions, parent), manifest.digest)
            continue
        made = set()
        kept = scratch / f"integers-{number}"
        kept.mkdir()
        for way in work.exchanges:
            started = time.monotonic()
            training = Training(options, terms.rounds, exchange=way, noise=work.noise)
            at = (versions, parent)
            done = exchange(updates, training, number, at, manifest, scratch, kept)
            cost = costs.setdefault(way, {"exchange_seconds": 0.0})
            cost["exchange_seconds"] += (time.monotonic() - started) / rounds
            cost |= {"uploaded": done.uploaded, "sent": done.sent}
            made.add(done.version)
        if len(made) > 1:
            raise AssertionError(f"{work.exchanges} of the same integers make other versions")
        (parent,) = made
    vector = read_version(versions, parent, manifest.digest)
    shutil.rmtree(versions)
    return Run(vector, manifest.total, norms, seconds, costs)


def asked(
    spec: GeneratorSpec, vector: Float32, sites: Sequence[Site], told: Told
) -> list[dict[str, Any]]:
    """What a version answers to these sites' held-out questions, in their order, scored.

    ``nats``: of the right answer as it is to be written, citations and all.
    """
    generator = jobs.generator_for(spec)
    generator.load_vector(vector)
    model = generator.language_model
    sampling = Sampling(spec.answer_tokens)
    found = []
    for site in sites:
        told(f"asking {site.name}")
        examples = examples_of(site.tests, model, spec)
        for triple, example in zip(site.tests, examples, strict=True):
            text, likelihood = model.measured(example.prompt, sampling, references=[example.answer])
            scores = {**_scores(text, triple), "nats": likelihood.reference}
            found.append({"site": site.name, **scores})
    return found


def _scores(text: str, triple: Triple) -> dict[str, float]:
    """A citation is right where it names the passage with the answer, which is the first."""
    cited = {str(number) for one in statements(text) for number in one.numbers}
    bare = without_marks(text, range(1, len(triple.passages) + 1))
    figures = score_text(bare, [triple.answer]).figures | score_citations(cited, ["1"])
    return {name: figures[name] for name in KEPT}
