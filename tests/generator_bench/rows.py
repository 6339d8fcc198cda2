"""Rows of the table: what is trained, by whom, how updates are added, and how the answers are.

A round is what daemons do without the network: the generator's own job at each site, then the
sum of `tests.learning_bench.recipes.exchange`. Rows that differ in what hides the integers alone
are trained once: each round's integers are summed in every one of these ways, and the versions
that come out must be the same bits.
"""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from config.recipes import Aggregate, ServerOptions
from crypto.arrays import Float32
from crypto.privacy import NoiseTerms, epsilon_of, least_multiplier, scheduled_multiplier
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


@dataclass(frozen=True)
class Schedule:
    """Of noise multipliers, FedSearch-NLP Eq. 2, with the paper's values (section III-C)."""

    base: float = 0.1
    floor: float = 0.01
    decay: float = 0.95
    threshold: float = 1.0


@dataclass(frozen=True)
class Work:
    """What is trained once; it makes a row for each of ``exchanges``, or one.

    ``who``: "nobody", "alone", "pooled" or "federated". ``proximal``: FedProx's mu.
    ``aggregate``: what becomes of the mean update, at the daemon's defaults. ``multiplier``: of
    each round's noise; with a ``schedule`` that says it, and there is a second row, with the
    constant multiplier that has the same epsilon.
    """

    name: str
    who: str
    adapt: Literal["lora", "lora_server", "full"] = "lora"
    exchanges: tuple[Exchange, ...] = ("integers",)
    proximal: float = 0.0
    aggregate: Aggregate = "fedavg"
    multiplier: float = 0.0
    schedule: Schedule | None = None

    def noise(self, number: int, loss: float, sites: int) -> NoiseTerms | None:
        """Of a round, from 1, behind one with this mean loss.

        One of the sites may tell the others' noise from its own.
        """
        multiplier = self.multiplier
        if self.schedule is not None:
            said = asdict(self.schedule)
            multiplier = scheduled_multiplier(**said, step=number - 1, last_loss=loss)
        return NoiseTerms(_CLIP, multiplier, sites - 1) if multiplier else None


ALONE = "each site alone, C"
STATIC = "FedAvg, C, DP static"
WORKS = (
    Work("base model", "nobody"),
    Work(ALONE, "alone"),
    Work("FedAvg, C", "federated", exchanges=("integers", "ckks", "masking")),
    Work("pooled, C", "pooled"),
    Work("FedAvg, A", "federated", "full"),
    Work("FedAvg, B", "federated", "lora_server"),
    Work("FedProx, C, mu = 1", "federated", proximal=1.0),
    Work("server momentum, C", "federated", aggregate="fedavgm"),
    *(Work(f"FedAvg, C, DP z = {z:g}", "federated", multiplier=z) for z in (0.01, 0.1, 1.0)),
    Work("FedAvg, C, DP scheduled", "federated", schedule=Schedule()),
)
LEARNING_RATES = {"lora": 1e-2, "lora_server": 1e-3, "full": 1e-3}


@dataclass(frozen=True)
class Terms:
    """Of every row: rounds, and a site's training in each."""

    rounds: int = 4
    epochs: int = 1
    batch_size: int = 4
    prompt_tokens: int = 512
    answer_tokens: int = 64

    def spec(self, base: GeneratorSpec, work: Work) -> GeneratorSpec:
        """Of what is trained, and of how it is asked."""
        return replace(
            base,
            adapt=work.adapt,
            prompt_tokens=self.prompt_tokens,
            answer_tokens=self.answer_tokens,
        )


def computed(
    work: Work, sites: Sequence[Site], spec: GeneratorSpec, terms: Terms, seed: int, told: Told
) -> list[dict[str, Any]]:
    """Train and ask; a row for each exchange, as JSON can hold it, and of a schedule one more."""
    spec = terms.spec(spec, work)
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
    epsilon = epsilon_of(run.multipliers, DELTA) if run.multipliers else None
    row = {
        "name": work.name,
        "who": work.who,
        "adapt": work.adapt,
        "seed": seed,
        "multipliers": run.multipliers,
        "epsilon": epsilon,
        "values": run.values,
        "norms": run.norms,
        "train_seconds": run.train_seconds,
        "questions": questions,
    }
    costs = run.costs or {"nothing": {}}
    rows = [{**row, "exchange": name, **cost} for name, cost in costs.items()]
    if work.schedule is not None and epsilon is not None:
        constant = least_multiplier((), epsilon, DELTA, rounds=terms.rounds)
        static = replace(work, name=STATIC, schedule=None, multiplier=constant)
        rows += computed(static, sites, spec, terms, seed, told)
    return rows


@dataclass(frozen=True)
class Run:
    """The version that came out; what a site sent in a round, and how long it took, by exchange.

    ``multipliers``: of each round's noise; none where there is none.
    """

    vector: Float32
    values: int
    norms: list[float]
    multipliers: list[float]
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
        proximal=work.proximal,
        server=ServerOptions(work.aggregate),
        seed=seed,
    )
    rounds = 0 if work.who == "nobody" else terms.rounds
    seconds, norms, multipliers, loss = 0.0, [], [], math.nan
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
        noise = work.noise(number, loss, len(libraries))
        multipliers += [noise.multiplier] if noise else []
        made = set()
        kept = scratch / f"integers-{number}"
        kept.mkdir()
        for way in work.exchanges:
            started = time.monotonic()
            training = Training(options, terms.rounds, exchange=way, noise=noise)
            at = (versions, parent)
            done = exchange(updates, training, number, at, manifest, scratch, kept)
            cost = costs.setdefault(way, {"exchange_seconds": 0.0})
            cost["exchange_seconds"] += (time.monotonic() - started) / rounds
            cost |= {"uploaded": done.uploaded, "sent": done.sent}
            made.add(done.version)
            loss = done.loss
        if len(made) > 1:
            raise AssertionError(f"{work.exchanges} of the same integers make other versions")
        (parent,) = made
    vector = read_version(versions, parent, manifest.digest)
    shutil.rmtree(versions)
    return Run(vector, manifest.total, norms, multipliers, seconds, costs)


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
