"""Run the learning benchmark; what is finished is kept, so it can be interrupted.

    python -m tests.learning_bench --data ../shared/data [--quick] [--only fede4fin]

The cache (libraries with frozen features, finished cells) lies outside the
repository unless --cache says otherwise; figures go to docs/results/, those of a quick
run to docs/results/quick/.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from daemon.learning.retriever.spec import RetrieverSpec
from tests.learning_bench import cells, picture, pool, report, worlds
from tests.learning_bench.cells import Cell, Work
from tests.learning_bench.recipes import tables
from tests.learning_bench.recipes.learning import Part
from tests.learning_bench.recipes.recipes import Recipe
from tests.learning_bench.worlds import World

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "docs" / "results"
SHARES = (0.1, 0.25, 0.5)
SEEDS = (0, 1, 2)
SMALL = "medquad_3"
ALPHAS = (0.1, 1.0, 10.0)
SPLITS = tuple(f"medquad_alpha_{alpha:g}" for alpha in ALPHAS)
# The pages of FinanceBench alone take as long to embed as all institutions of MedQuAD.
QUICK_WORLDS = ("medquad", SMALL)
WORLDS = (*QUICK_WORLDS, "fede4fin", *SPLITS)
SMALL_SITES = ("nhlbi", "niddk", "ninds")


def plan(world: World, seeds: Sequence[int], *, quick: bool) -> Iterator[Work]:
    """Every cell of a world's tables, the most telling ones first."""
    first = Part(world.sites, seed=seeds[0])
    if world.name.startswith(SMALL):
        chosen = tables.ENCODER_RECIPES[: tables.QUICK_ENCODERS if quick else None]
        yield from (Work(world, recipe, first) for recipe in chosen)
        return
    if world.name in SPLITS:
        yield from (Work(world, recipe, first) for recipe in _by_name(tables.SPLIT_NAMES))
        return
    recipes = tables.fitting(world)
    for seed in seeds:
        part = Part(world.sites, seed=seed)
        yield from (Work(world, r, part) for r in recipes if r.learns or seed == seeds[0])
    if not world.sites_ask:
        return
    yield from _curves(world, seeds[0])
    if quick:
        return
    yield from _left_out(world, seeds[0])
    yield from (Work(world, recipe, first) for recipe in tables.CONTROLS)
    yield from (Work(world, recipe, first) for recipe in tables.ABLATIONS)
    yield from _fewer_sites(world, seeds[0])
    for seed in seeds[1:]:
        part = Part(world.sites, seed=seed)
        yield from (Work(world, recipe, part) for recipe in tables.CONTROLS)
        yield from (*_curves(world, seed), *_left_out(world, seed))
    if set(world.sites) > set(SMALL_SITES):
        yield Work(world, tables.LORA, first)


def _by_name(names: Sequence[str]) -> Iterator[Recipe]:
    return (recipe for recipe in tables.RECIPES if recipe.name in names)


def _curves(world: World, seed: int) -> Iterator[Work]:
    """All sites with some of their pairs."""
    for share in SHARES:
        for recipe in _by_name(tables.CURVE_NAMES):
            yield Work(world, recipe, Part(world.sites, share, seed))


def _fewer_sites(world: World, seed: int) -> Iterator[Work]:
    """A federation that grows from three sites, the small ones first, to all but one."""
    if not set(world.sites) > set(SMALL_SITES):
        return
    joining = [site for site in world.sites if site not in SMALL_SITES]
    joining.sort(key=lambda site: world.library(site).stat().st_size)
    for count in range(len(joining)):
        sites = tuple(sorted((*SMALL_SITES, *joining[:count])))
        for recipe in _by_name((tables.SHARED.name, "hanse")):
            yield Work(world, recipe, Part(sites, seed=seed))


def _left_out(world: World, seed: int) -> Iterator[Work]:
    """Each site in turn takes no part, and asks."""
    for site in world.sites:
        others = tuple(other for other in world.sites if other != site)
        yield Work(world, tables.SHARED, Part(others, seed=seed), held_out=site)


def run(
    works: Sequence[Work],
    spec: RetrieverSpec,
    cache: Path,
    console: Console,
    finished: Callable[[dict[Work, Cell]], None],
    jobs: int = 1,
) -> dict[Work, Cell]:
    """Have every cell, from the cache or by computing it; ``finished`` after each new one.

    ``jobs``: how many are computed at once.
    """
    done = {work: cell for work in works if (cell := cells.find(work, spec, cache))}
    missing = [work for work in works if work not in done]
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("cells", total=len(works), completed=len(done))

        def said(work: Work, what: str) -> None:
            progress.update(bar, description=f"{_title(work)}: {what}")

        for work, cell in pool.computed(missing, spec, cache, jobs, said):
            done[work] = cell
            progress.console.print(f"{_title(work)}: {_said(cell)}")
            finished(_in_order(works, done))
            progress.advance(bar)
    return _in_order(works, done)


def main(arguments: Sequence[str] | None = None) -> None:
    """Embed what is not embedded, compute what is not computed, write the tables."""
    options = _options(arguments)
    console = Console()
    if options.picture:
        console.print(f"drawn from what is recorded: {picture.draw(options.out)}")
        return
    if not options.data.is_dir():
        console.print(
            f"no data at {options.data}: give --data the folder that its README describes"
        )
        sys.exit(2)
    every = os.cpu_count() or 1
    spec = RetrieverSpec(threads=every, device=options.device)
    torch.set_num_threads(every)
    seeds = SEEDS[: options.seeds or (1 if options.quick else len(SEEDS))]
    ready: list[World] = []
    for name in options.only or (QUICK_WORLDS if options.quick else WORLDS):
        world = _world(name, options, spec)
        ready.append(world)
        with console.status(name) as status:
            worlds.embed(
                world,
                spec,
                lambda site, done, total, n=name: status.update(  # type: ignore[misc]
                    f"{n}: {site}: {done} of {total} texts embedded"
                ),
            )
    works = [work for world in ready for work in plan(world, seeds, quick=options.quick)]

    spec = replace(spec, threads=max(1, every // options.jobs))
    pool.limit_threads(spec.threads)
    torch.set_num_threads(spec.threads)

    planned = len(works)

    def write(done: dict[Work, Cell]) -> None:
        report.write(options.out, done, quick=options.quick, planned=planned)

    if options.tables:
        works = [work for work in works if cells.find(work, spec, options.cache)]
    try:
        done = run(works, spec, options.cache, console, write, options.jobs)
    except KeyboardInterrupt:
        console.print("interrupted: what is finished is kept, the same command goes on from here")
        sys.exit(130)
    write(done)
    if not (options.quick or options.only or options.sites):
        picture.draw(options.out)
    console.print(report.summary(done))
    console.print(f"written to {options.out}")


def _world(name: str, options: argparse.Namespace, spec: RetrieverSpec) -> World:
    if name == "fede4fin":
        return worlds.fede4fin(options.data, options.cache, spec)
    if name in SPLITS:
        return worlds.split_anew(options.data, options.cache, spec, ALPHAS[SPLITS.index(name)])
    return worlds.medquad(
        options.data, options.cache, spec, SMALL_SITES if name == SMALL else options.sites
    )


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.learning_bench")
    default_data = os.environ.get("HANSE_DATA", ROOT.parent / "shared" / "data")
    default_cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    parser.add_argument("--data", type=Path, default=Path(default_data))
    parser.add_argument("--cache", type=Path, default=default_cache / "hanse-learning-bench")
    parser.add_argument(
        "--out", type=Path, help="default: docs/results, of a quick run docs/results/quick"
    )
    parser.add_argument("--only", nargs="*", choices=WORLDS)
    parser.add_argument("--sites", nargs="*", default=(), help="of MedQuAD; default: all")
    parser.add_argument("--seeds", type=int, choices=(1, 2, 3), help="default: 3, of a quick run 1")
    jobs = os.cpu_count() or 1
    parser.add_argument(
        "--jobs", type=int, default=jobs, help="cells at once; default: %(default)s"
    )
    parser.add_argument(
        "--tables", action="store_true", help="write what is finished, and compute nothing"
    )
    parser.add_argument(
        "--picture", action="store_true", help="draw learning-curves.svg from learning.json alone"
    )
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    quick = os.environ.get("QUICK", "") not in ("", "0")
    parser.add_argument(
        "--quick", action="store_true", default=quick, help="MedQuAD, one seed: under an hour"
    )
    options = parser.parse_args(arguments)
    if options.out is None:  # a quick run leaves alone what the documents quote
        options.out = RESULTS / "quick" if options.quick else RESULTS
    return options


def _in_order(works: Sequence[Work], done: dict[Work, Cell]) -> dict[Work, Cell]:
    return {work: done[work] for work in works if work in done}


def _title(work: Work) -> str:
    words = [work.world.name, work.recipe.name]
    if work.part.share < 1.0:
        words.append(f"{work.part.share:.0%} of pairs")
    if work.held_out is None and work.part.sites != work.world.sites:
        words.append(f"{len(work.part.sites)} sites")
    if work.held_out:
        words.append(f"without {work.held_out}")
    return ", ".join([*words, f"seed {work.part.seed}"])


def _said(cell: Cell) -> str:
    figures = [f"{test} MRR@10 {cell.mean(test, 'mrr@10'):.3f}" for test in cell.tests()]
    return f"{', '.join(figures)} ({cell.values['seconds']:.0f} s)"


if __name__ == "__main__":
    main()
