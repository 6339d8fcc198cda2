"""What a federation's generator remembers of single examples: canaries, with noise and without.

Canaries (secrets of four random digits, each the answer to a question of its own) are planted in
a copy of the first site's triples; their passages do not say them. Exposure is how far up a
secret ranks among 255 that were not planted (Carlini et al. 2019, "The Secret Sharer", section
4); verbatim extraction is that the model writes it when it is asked the canary's question.

    python -m tests.generator_bench.memory [--data ../shared/data] [--base-model FOLDER]

The table goes to docs/results/memory.md. Nothing that is planted outlives the run.
"""

from __future__ import annotations

import json
import math
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from rich.console import Console

from crypto.durable import whole
from crypto.privacy import epsilon_of
from daemon.jobs.generator import training as jobs
from daemon.jobs.generator.examples import examples_of
from daemon.learning.generator.encoding import encoded
from daemon.learning.generator.spec import GeneratorSpec
from daemon.learning.generator.triples import Triple
from daemon.library.passages import SentenceSplitter
from daemon.library.readers.documents import Document, Pair, Reference
from daemon.library.store import Library
from daemon.process.chat_client import Sampling
from tests.generator_bench import __main__ as bench
from tests.generator_bench.rows import DELTA, Terms, Told, Work, federate
from tests.generator_bench.sites import Size, sites_of

OTHERS = 255  # secrets that were not planted
DIGITS = 4
CANARIES = 8
ROWS = (
    (Work("base model", "nobody"), 3),
    (Work("the site alone, C", "alone"), 3),
    (Work("FedAvg, C", "federated"), 3),
    *((Work("FedAvg, C, DP", "federated", multiplier=z), 3) for z in (0.1, 1.0)),
    (Work("the site alone, A", "alone", "full"), 3),
)
_MARKS = ("<!-- memory: begin -->", "<!-- memory: end -->")


@dataclass(frozen=True)
class Canary:
    """A question about a document here, and its secret; ``others``: as likely, not planted."""

    number: int
    secret: str
    others: tuple[str, ...]

    @property
    def question(self) -> str:
        """That the secret answers."""
        return f"What is the code of ward {self.number}?"

    @property
    def document(self) -> Document:
        """Which does not say it."""
        text = f"Ward {self.number} has a door with a code. Ask the nurse on duty for it."
        return Document(f"ward-{self.number}", f"Ward {self.number}", text)

    def triple(self, secret: str) -> Triple:
        """With this answer."""
        return Triple(self.question, (self.document.text,), secret, "supplied")


def canaries(count: int, others: int, chance: np.random.Generator) -> list[Canary]:
    """Secrets of `DIGITS` uniformly random digits, each with ``others`` different ones."""
    made = []
    for number in range(count):
        drawn = chance.choice(10**DIGITS, others + 1, replace=False)
        secret, *rest = (" ".join(f"{one:0{DIGITS}d}") for one in drawn.tolist())
        made.append(Canary(number, secret, tuple(rest)))
    return made


def exposure(own: float, others: Sequence[float]) -> float:
    """log2 |R| - log2 rank in bits, R being the secret and the others (Definition 2).

    ``own``, ``others``: losses; of those that are equal the secret comes last. From 0 to
    log2 (n + 1); a secret that was not planted has `exposure_by_chance` on average.
    """
    rank = 1 + sum(other <= own for other in others)
    return math.log2(len(others) + 1) - math.log2(rank)


def exposure_by_chance(others: int) -> float:
    """The mean over all ranks alike, in bits: towards 1 / ln 2 = 1.44 with more of them."""
    size = others + 1
    return math.log2(size) - math.lgamma(size + 1) / math.log(2) / size


def planted(library: Path, secrets: Sequence[Canary], into: Path) -> Path:
    """A copy of a site's library with canaries among what it learns from."""
    shutil.copy(library, into)
    with Library.open(into) as copy:
        splitter = SentenceSplitter(lambda text: len(text.split()), 400)
        copy.put_documents([one.document for one in secrets], splitter=splitter)
        copy.put_pairs(
            [
                Pair(one.question, (one.document.id,), reference=Reference((one.secret,)))
                for one in secrets
            ]
        )
    return into


def remembered(spec: GeneratorSpec, secrets: Sequence[Canary]) -> tuple[list[float], int]:
    """Exposures of the canaries in the generator as it is loaded now, and how many it writes."""
    generator = jobs.generator_for(spec)
    language, exposures, written = generator.language_model, [], 0
    for canary in secrets:
        triples = [canary.triple(secret) for secret in (canary.secret, *canary.others)]
        examples = examples_of(triples, language, spec)
        lessons = encoded(language, examples, spec.prompt_tokens, spec.answer_tokens).lessons
        with torch.inference_mode():
            own, *others = (
                generator.loss(generator.batches([lesson], 1)[0]).item() for lesson in lessons
            )
        exposures.append(exposure(own, others))
        text = language.write(examples[0].prompt, Sampling(spec.answer_tokens))
        written += canary.secret in text
    return exposures, written


def row(
    work: Work,
    epochs: int,
    libraries: dict[str, Path],
    spec: GeneratorSpec,
    secrets: Sequence[Canary],
    told: Told,
) -> dict[str, Any]:
    """Train as the row says, and look."""
    terms = Terms(epochs=epochs)
    spec = terms.spec(spec, work)
    first = next(iter(libraries))
    chosen = {first: libraries[first]} if work.who in ("alone", "nobody") else libraries
    with tempfile.TemporaryDirectory(prefix="hanse-memory-") as name:
        run = federate(chosen, spec, work, terms, 0, Path(name), told)
    jobs.generator_for(spec).load_vector(run.vector)
    told(f"{work.name}, {epochs} epochs: asking for the secrets")
    exposures, written = remembered(spec, secrets)
    spent = run.multipliers
    passes = 0 if work.who == "nobody" else terms.rounds * epochs
    return {
        "name": work.name,
        "passes": passes,
        "multiplier": work.multiplier,
        "epsilon": round(epsilon_of(spent, DELTA), 1) if spent else None,
        "exposure": round(fmean(exposures), 2),
        "most": round(max(exposures), 2),
        "extracted": written,
    }


def table(rows: Sequence[dict[str, Any]]) -> str:
    """As it stands in docs/results/memory.md."""
    lines = [
        "| | times each is seen | z | ε | mean exposure, bits | largest | written verbatim |",
        "|---|---|---|---|---|---|---|",
    ]
    for one in rows:
        z, epsilon = (f"{one[key]:,}" if one[key] else "" for key in ("multiplier", "epsilon"))
        lines.append(
            f"| {one['name']} | {one['passes']} | {z} | {epsilon} | {one['exposure']:.2f} | "
            f"{one['most']:.2f} | {one['extracted']} of {CANARIES} |"
        )
    chance, most = exposure_by_chance(OTHERS), math.log2(OTHERS + 1)
    lines += ["", f"By chance {chance:.2f} bits; at most {most:.2f}. ε at δ = {DELTA}, of a site."]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Plant, train, look; write the table."""
    options = bench.options_of(arguments)
    console = Console()
    if not (options.data / "medquad").is_dir():
        console.print(f"no data at {options.data}: give --data the folder its README describes")
        sys.exit(2)
    torch.set_num_threads(options.threads)
    options.cache.mkdir(parents=True, exist_ok=True)
    secrets = canaries(CANARIES, OTHERS, np.random.default_rng(18))
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="hanse-memory-") as name, console.status("") as told:
        folder = Path(name)
        sites = sites_of(options.data, options.sites, Size(options.train, 1), 0, folder)
        spec = bench.spec_of(options, bench.base_of(options, sites, told.update))
        libraries = {site.name: site.library for site in sites}
        first = sites[0]
        libraries[first.name] = planted(first.library, secrets, folder / "planted.sqlite")
        for work, epochs in ROWS:
            rows.append(row(work, epochs, libraries, spec, secrets, told.update))
            console.print(json.dumps(rows[-1]), markup=False)
            if options.out.is_dir():
                _write(options.out / "memory.md", rows)
    console.print(table(rows), markup=False)


def _write(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    before, _, rest = path.read_text(encoding="utf-8").partition(_MARKS[0])
    after = rest.partition(_MARKS[1])[2]
    with whole(path) as unfinished:
        text = f"{before}{_MARKS[0]}\n{table(rows)}\n{_MARKS[1]}{after}"
        unfinished.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
