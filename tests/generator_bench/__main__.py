"""Run the generator's benchmark; each row is kept as it is done, so it can be interrupted.

    python -m tests.generator_bench --data ../shared/data [--seeds 3] [--base-model FOLDER]

Without ``--base-model`` a small model is made of the sites' training documents first. The
cache lies outside the repository unless --cache says otherwise; rows and table go to
docs/results/generator.jsonl and generator.md.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from crypto.durable import whole
from daemon.learning.generator.spec import GeneratorSpec
from daemon.learning.model_files import digest_of
from tests.generator_bench import base, report
from tests.generator_bench.rows import WORKS, Terms, Told, Work, computed
from tests.generator_bench.sites import Site, Size, sites_of
from tests.generator_bench.sources import FINANCE
from tests.learning_bench.sources import ROOT, code_digest

RESULTS = ROOT / "docs" / "results"
SITES = ("nhlbi", "niddk", "ninds", FINANCE)
# What decides the figures.
_SOURCES = (
    "crypto/privacy.py",
    "crypto/quantize.py",
    *(f"daemon/learning/generator/{name}.py" for name in ("encoding", "generator", "training")),
    "daemon/answering/prompts/prompts.py",
    "daemon/evaluation/answers.py",
    "daemon/jobs/generator/training.py",
    "daemon/jobs/generator/examples.py",
    "daemon/learning/adaptations.py",
    "daemon/learning/server_step.py",
    "daemon/pairs/triples.py",
    "tests/generator_bench/rows.py",
    "tests/generator_bench/sites.py",
    "tests/generator_bench/sources.py",
    "tests/learning_bench/recipes/exchange.py",
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Make the base model, compute the rows that are not there, write the tables."""
    options = options_of(arguments)
    console = Console()
    if not (options.data / "medquad").is_dir():
        console.print(
            f"no data at {options.data}: give --data the folder that its README describes"
        )
        sys.exit(2)
    torch.set_num_threads(options.threads)
    options.cache.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    try:
        for made in _made(options, console):
            rows += made
            _write(options.out, rows)
    except KeyboardInterrupt:
        console.print("interrupted: what is finished is kept, the same command goes on from here")
        sys.exit(130)
    console.print(report.tables(rows), markup=False)


def _made(options: argparse.Namespace, console: Console) -> Iterator[list[dict[str, Any]]]:
    """Of one kind of training after the other its rows, for all seeds; from the cache, or now."""
    size, terms = Size(options.train, options.test), Terms(rounds=options.rounds)
    with tempfile.TemporaryDirectory(prefix="hanse-generator-") as name, console.status("") as told:
        drawn = []
        for seed in range(options.seeds):
            within = Path(name) / str(seed)
            within.mkdir()
            drawn.append(sites_of(options.data, options.sites, size, seed, within))
        folder = base_of(options, drawn[0], told.update)
        spec = spec_of(options, folder)
        for work in WORKS:
            rows: list[dict[str, Any]] = []
            for seed, sites in enumerate(drawn):
                path = options.cache / f"{_identity(work, options, terms, seed, folder)}.json"
                if not path.exists():
                    computed_rows = computed(work, sites, spec, terms, seed, told.update)
                    with whole(path) as unfinished:
                        unfinished.write_text(json.dumps(computed_rows), encoding="utf-8")
                found = json.loads(path.read_text(encoding="utf-8"))
                console.print(f"seed {seed}: {_said(found[0])}", markup=False)
                rows += found
            yield rows


def base_of(options: argparse.Namespace, sites: Sequence[Site], told: Told) -> Path:
    """The folder of the base model that was named, or of one made of what these sites may read."""
    if options.base_model is not None:
        return Path(options.base_model)
    texts, making = [text for site in sites for text in site.texts], base.Making()
    name = hashlib.sha256(repr((making, texts)).encode()).hexdigest()[:16]
    return base.made(options.cache / f"base-{name}", texts, making, told)


def spec_of(options: argparse.Namespace, folder: Path) -> GeneratorSpec:
    """Of a base model; it is asked by what suits each question."""
    return GeneratorSpec(
        base_model=str(folder), device=options.device, threads=options.threads, prompt="auto"
    )


def _identity(
    work: Work, options: argparse.Namespace, terms: Terms, seed: int, folder: Path
) -> str:
    """A row is named after everything that it follows from."""
    told = {
        "work": asdict(work),
        "terms": asdict(terms),
        "sites": options.sites,
        "size": [options.train, options.test],
        "seed": seed,
        "base": digest_of(folder, "generator-bench\0").hex(),
        "code": code_digest(_SOURCES),
    }
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:24]


def _said(row: dict[str, Any]) -> str:
    mean = sum(one["rouge-l-f"] for one in row["questions"]) / len(row["questions"])
    norms = f", updates of norm {min(row['norms']):.2g} and more" if row["norms"] else ""
    return f"{row['name']}: ROUGE-L {mean:.3f}{norms}, {row['train_seconds']:.0f} s a site's round"


def _write(out: Path, rows: Sequence[dict[str, Any]]) -> None:
    path = out / "generator.jsonl"
    lines = [json.dumps(_short(row), ensure_ascii=False) for row in rows]
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    report.written(out / "generator.md", path)


def _short(value: Any) -> Any:
    """Floats to six digits: the file stays in the repository."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: _short(one) for key, one in value.items()}
    return [_short(one) for one in value] if isinstance(value, list) else value


def options_of(arguments: Sequence[str] | None) -> argparse.Namespace:
    """What is asked for on the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.generator_bench")
    default_data = os.environ.get("HANSE_DATA", ROOT.parent / "shared" / "data")
    default_cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    parser.add_argument("--data", type=Path, default=Path(default_data))
    parser.add_argument("--cache", type=Path, default=default_cache / "hanse-generator-bench")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--base-model", type=Path, help="a folder with a causal or seq2seq model")
    parser.add_argument("--sites", nargs="+", default=SITES, help=f"of MedQuAD, and {FINANCE}")
    parser.add_argument("--seeds", type=int, choices=(1, 2, 3), default=3)
    parser.add_argument("--train", type=int, default=Size.train, help="triples of each site")
    parser.add_argument("--test", type=int, default=Size.test, help="questions of each site")
    parser.add_argument("--rounds", type=int, default=Terms.rounds)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
