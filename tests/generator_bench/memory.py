"""What a federation's generator remembers of single examples: canaries, with noise and without.

Canaries (secrets of four random digits, each the answer to a question of its own) are planted in
a copy of the first site's triples; their passages do not say them (`daemon.memorisation`, which
`fedctl audit memory` has, too). Exposure is how far up a secret ranks among 255 that were not
planted; verbatim extraction is that the model writes it when it is asked the canary's question.

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
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from rich.console import Console

from crypto.durable import whole
from crypto.privacy import epsilon_of
from daemon.jobs.generator import training as jobs
from daemon.jobs.generator.memory import questions_of, remembered
from daemon.learning.generator.spec import GeneratorSpec
from daemon.library.passages import SentenceSplitter
from daemon.library.readers.documents import Pair, Reference
from daemon.library.store import Library
from daemon.memorisation.canaries import OTHERS, Canary, canaries, exposure_by_chance
from tests.generator_bench import __main__ as bench
from tests.generator_bench.rows import DELTA, Terms, Told, Work, federate
from tests.generator_bench.sites import Size, sites_of

CANARIES = 8
ROWS = (
    (Work("base model", "nobody"), 3),
    (Work("the site alone, C", "alone"), 3),
    (Work("FedAvg, C", "federated"), 3),
    *((Work("FedAvg, C, DP", "federated", multiplier=z), 3) for z in (0.1, 1.0)),
    (Work("the site alone, A", "alone", "full"), 3),
)
_MARKS = ("<!-- memory: begin -->", "<!-- memory: end -->")


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
    generator = jobs.generator_for(spec)
    generator.load_vector(run.vector)
    told(f"{work.name}, {epochs} epochs: asking for the secrets")
    exposures, written = remembered(generator, questions_of(generator, secrets))
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
