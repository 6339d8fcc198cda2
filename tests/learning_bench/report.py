"""Finished cells as tables (Markdown), figures (JSON) and plots (SVG)."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from crypto.arrays import Float64
from crypto.privacy import epsilon_of
from daemon.evaluation.intervals import Interval
from tests.learning_bench import picture
from tests.learning_bench.cells import Cell, Work
from tests.learning_bench.claims import checked
from tests.learning_bench.intervals import bootstrap, paired_bootstrap
from tests.learning_bench.recipes.tables import ABLATIONS, CONTROLS, SPLIT_NAMES, changed

Cells = Mapping[Work, Cell]
K = TypeVar("K")

MAIN = "mrr@10"
OURS = "hanse"
SPLIT = "_alpha_"  # in the names of worlds whose sites were drawn
_DELTA = 1e-5
COLUMNS = ("mrr@10", "hit@1", "hit@10", "recall@5", "ndcg@10")
TESTS = {
    "test": "own questions, own corpus",
    "pooled": "own questions, the corpus of all sites",
    "synonyms": "synonym questions, own corpus",
}
HEADING = """# Learning: recipes against baselines

Written by `make bench-learning`. Head on the frozen encoder (all-MiniLM-L6-v2); questions
weigh equally; ranked passages are collapsed to answers. A federation of one (a site alone,
centralised) trains rounds as the federated ones do; how many, of how many epochs, stands under
"Cost", and under "In rounds as short" what the others reach in rounds like those of `hanse`.
What is a site's own is trained beside that: 12 epochs of `hanse`, 4 of pdd-as2. Scores are means
over seeds; in brackets the 95 % bootstrap interval over questions of that mean, and ± the standard
deviation between seeds. Differences are paired over the same questions. Dense search is exact.
Recipes are the daemon's (`config.recipes`); "(head)": with a head where the recipe would train
the whole encoder, at a head's learning rate (1e-4); `fedsearch` is then FedAvg on in-batch
negatives. In pdd-as2 all sites answer one another, exactly unless a row says otherwise (a daemon
answers nobody until it is told to, and asks for buckets), in pfedrag all tell their complexity.
Choices were made on validation pairs, except for two that learning-notes.md names. Updates are
rounded at random, so two runs of a row differ by some thousandths.
"""
_NOBODYS = """Nobody's questions: they are asked of the shared version, so `hanse`, pfedrag and
pdd-as2 are shown without what a site keeps to itself, and no site has validation pairs.
"""


def write(folder: Path, done: Cells, *, quick: bool, planned: int) -> None:
    """learning.md, learning.json and the plots, from what is finished of ``planned`` cells."""
    folder.mkdir(parents=True, exist_ok=True)
    kind = "A quick run (QUICK=1)" if quick else "A full run"
    finished = "" if len(done) == planned else f", of which {len(done)} of {planned} cells are done"
    sections = [f"{HEADING}\n{kind}{finished}.\n"]
    figures: dict[str, Any] = {}
    for world in dict.fromkeys(work.world.name for work in done):
        if SPLIT in world:
            continue
        chosen = {work: cell for work, cell in done.items() if work.world.name == world}
        sections.append(f"## {world}\n")
        if not any(work.world.sites_ask for work in chosen):
            sections.append(_NOBODYS)
        sections += _sections(chosen)
        figures[world] = _figures(chosen)
        _plot(folder, world, chosen)
    splits = {work: cell for work, cell in done.items() if SPLIT in work.world.name}
    if splits:
        base = {work: cell for work, cell in done.items() if work.world.name == "medquad"}
        sections.append(_split_table({**splits, **base}))
        figures |= {
            name: _figures({w: c for w, c in splits.items() if w.world.name == name})
            for name in dict.fromkeys(work.world.name for work in splits)
        }
    (folder / "learning.md").write_text("\n".join(sections), encoding="utf-8")
    (folder / "learning.json").write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


def summary(done: Cells) -> str:
    """The main figures, a line each."""
    lines = []
    for (world, recipe), cells in _grouped(done, whole, _world_and_name).items():
        figures = ", ".join(
            f"{test} {pooled_scores(cells, test, MAIN).mean():.3f}" for test in cells[0].tests()
        )
        lines.append(f"{world}: {recipe}: {figures}")
    return "\n".join(lines)


def whole(work: Work) -> bool:
    """All sites, all pairs: a cell of the main table, a control or an ablation."""
    return work.part.share >= 1.0 and _all_sites(work)


def pooled_scores(
    cells: Sequence[Cell], test: str, metric: str, site: str | None = None
) -> Float64:
    """[questions] mean over seeds; of one site's questions where one is named."""
    scores: Float64 = np.stack([cell.scores(test, metric) for cell in cells]).mean(axis=0)
    return scores if site is None else scores[cells[0].sites(test) == site]


# ---- Markdown ------------------------------------------------------------------------


def _sections(done: Cells) -> Iterable[str]:
    beside = (*ABLATIONS, *CONTROLS)
    main = _grouped(done, lambda w: whole(w) and w.recipe not in beside, _name)
    if not main:
        return
    tests = next(iter(main.values()))[0].tests()
    for test in tests:
        yield _main_table(main, test)
    sites = list(dict.fromkeys(next(iter(main.values()))[0].sites(tests[0]).tolist()))
    if len(sites) > 1:
        yield _site_table(main, tests[0], sites)
    yield _cost_table(main, _trained(done))
    for test in tests:
        yield _curve_table(done, test)
    yield _control_table(done, tests)
    yield _held_out_table(done, main)
    yield _fewer_table(done)
    yield _ablation_table(done, tests[0])
    yield _noise_table(done, tests[0])
    if len(sites) > 1:
        yield _claim_table(done)


def _main_table(main: Mapping[str, Sequence[Cell]], test: str) -> str:
    count = len(next(iter(main.values()))[0].scores(test, MAIN))
    head = ["", "seeds", "MRR@10", *(f"{name}" for name in COLUMNS[1:]), "MRR@10: hanse over it"]
    rows = []
    for name, cells in main.items():
        interval = bootstrap(pooled_scores(cells, test, MAIN))
        row = [name, str(len(cells)), _with_interval(interval) + _spread(cells, test)]
        row += [f"{pooled_scores(cells, test, metric).mean():.3f}" for metric in COLUMNS[1:]]
        row.append(_over(main.get(OURS), cells, test) if name != OURS else "")
        rows.append(row)
    title = TESTS.get(test, test)
    return f"### {title} ({count} questions)\n\n{_table(head, rows)}"


def _over(
    ours: Sequence[Cell] | None, theirs: Sequence[Cell] | None, test: str, site: str | None = None
) -> str:
    """How far ours lie above theirs, with the interval; nothing where one is not there yet."""
    if not ours or not theirs:
        return ""
    both = (pooled_scores(cells, test, MAIN, site) for cells in (ours, theirs))
    return _difference(paired_bootstrap(*both))


def _site_table(main: Mapping[str, Sequence[Cell]], test: str, sites: Sequence[str]) -> str:
    rows = []
    for name, cells in main.items():
        rows.append([name, *(f"{pooled_scores(cells, test, MAIN, s).mean():.3f}" for s in sites)])
    for other in ("each site alone", "vanilla encoder", "FedAvg", "centralised"):
        if OURS in main and other in main:
            found = [_over(main[OURS], main[other], test, site) for site in sites]
            rows.append([f"**{OURS} over {other}**", *found])
    return f"### MRR@10 by site (own questions, own corpus)\n\n{_table(['', *sites], rows)}"


def _control_table(done: Cells, tests: Sequence[str]) -> str:
    """As much work as `hanse` does, without its federation; the same seeds of both."""
    rows = []
    for name in (control.name for control in CONTROLS):
        cells = {w.part.seed: c for w, c in done.items() if whole(w) and w.recipe.name == name}
        ours = [
            cell
            for work, cell in done.items()
            if whole(work) and work.recipe.name == OURS and work.part.seed in cells
        ]
        if not cells or len(ours) != len(cells):
            continue
        row = [name, str(len(cells))]
        for test in tests:
            row.append(f"{pooled_scores(list(cells.values()), test, MAIN).mean():.3f}")
            row.append(_over(ours, list(cells.values()), test))
        rows.append(row)
    if not rows:
        return ""
    head = ["", "seeds"]
    for test in tests:
        head += [TESTS.get(test, test), "hanse over it"]
    title = "In rounds as short as those of hanse, or with as much training (MRR@10)"
    return f"### {title}\n\n{_table(head, rows)}"


def _fewer_table(done: Cells) -> str:
    """A federation that grows: what it brings to those who were there from the start."""
    found = _grouped(
        done,
        lambda w: w.held_out is None and w.part.share >= 1.0 and not _beside(w),
        lambda w: (w.recipe.name, w.part.sites),
    )
    sizes = sorted({sites for name, sites in found if name == OURS}, key=len)
    if len(sizes) < 2:
        return ""
    first = sizes[0]
    rows = []
    for name in ("hanse, shared version", OURS):
        row = [name]
        for sites in sizes:
            cells = found.get((name, sites))
            row.append("" if cells is None else _of_sites(cells[:1], first))
        rows.append(row)
    head = ["MRR@10 of the first three", *(f"{len(sites)} sites" for sites in sizes)]
    title = f"Number of sites ({', '.join(first)}, and others joining; own corpus, one seed)"
    return f"### {title}\n\n{_table(head, rows)}"


def _of_sites(cells: Sequence[Cell], sites: Sequence[str]) -> str:
    asked = np.isin(cells[0].sites("test"), sites)
    return _with_interval(bootstrap(pooled_scores(cells, "test", MAIN)[asked]))


def _split_table(done: Cells) -> str:
    """By Dirichlet's alpha, and as the institutions are."""
    found = _grouped(
        done, lambda w: whole(w) and not _beside(w), lambda w: (w.world.name, w.recipe.name)
    )
    names = [name for name in SPLIT_NAMES if any(recipe == name for _, recipe in found)]
    worlds = list(dict.fromkeys(world for world, _ in found))
    rows = []
    for name in names:
        row = [name]
        for world in worlds:
            cells = found.get((world, name), [])[:1]
            for test in ("test", "pooled"):
                both = cells and test in cells[0].tests()
                row.append(f"{pooled_scores(cells, test, MAIN).mean():.3f}" if both else "")
        rows.append(row)
    head = [""]
    for world in worlds:
        _, found_alpha, alpha = world.partition(SPLIT)
        title = f"alpha {alpha}" if found_alpha else "institutions"
        head += [f"{title}: own corpus", "all sites' corpus"]
    text = (
        "The same documents at seven sites, dealt out by Dirichlet(alpha) for each institution; "
        "questions belong to whoever holds their answer. One seed, MRR@10."
    )
    return f"## How unlike the sites are\n\n{text}\n\n{_table(head, rows)}"


def _beside(work: Work) -> bool:
    return work.recipe in ABLATIONS or work.recipe in CONTROLS


def _same_seed(done: Cells, work: Work, name: str) -> list[Cell]:
    return [
        cell
        for other, cell in done.items()
        if whole(other) and other.recipe.name == name and other.part.seed == work.part.seed
    ]


def _ablation_table(done: Cells, test: str) -> str:
    """A seed each, beside the same seed of the recipe that was changed."""
    rows = []
    for work, cell in done.items():
        if work.recipe in ABLATIONS and whole(work):
            base = changed(work.recipe)
            mean = f"{cell.mean(test, MAIN):.3f}"
            over = _over([cell], _same_seed(done, work, base), test)
            rows.append([work.recipe.name, mean, base, over])
    if not rows:
        return ""
    head = ["", "MRR@10", "compared with", "over it"]
    return f"### Ablations (own questions, own corpus, one seed)\n\n{_table(head, rows)}"


def _noise_table(done: Cells, test: str) -> str:
    """Quality and what an accountant makes of the noise, over all rounds."""
    rows = []
    for work, cell in done.items():
        noise = getattr(work.recipe, "noise", None)
        if noise is not None and whole(work):
            rounds = work.recipe.identity["rounds"]
            spent = epsilon_of([noise.multiplier] * rounds, _DELTA)
            mean = f"{cell.mean(test, MAIN):.3f}"
            rows.append([f"{noise.multiplier:g}", str(rounds), f"{spent:,.1f}", mean])
    if not rows:
        return ""
    head = ["noise multiplier", "rounds", f"epsilon at delta {_DELTA:g}", "MRR@10"]
    return f"### Differential privacy of a site's update (own corpus)\n\n{_table(head, rows)}"


def _claim_table(done: Cells) -> str:
    rows = [list(claim) for claim in checked(_grouped(done, whole, _name))]
    if not rows:
        return ""
    head = ["paper", "claim", "here", "figures"]
    return f"### The papers' claims on this data\n\n{_table(head, rows)}"


def _trained(done: Cells) -> dict[str, tuple[int, int]]:
    """Recipe -> its rounds, and a site's epochs in each."""
    return {
        work.recipe.name: (told["rounds"], told["options"]["local_epochs"])
        for work in done
        if "rounds" in (told := work.recipe.identity)
    }


def _cost_table(main: Mapping[str, Sequence[Cell]], trained: Mapping[str, tuple[int, int]]) -> str:
    rows = []
    for name, cells in main.items():
        costs = [cell.cost for cell in cells if cell.cost]
        if not costs:
            continue
        seconds = [sum(cost["seconds"].values()) for cost in costs]
        rounds, epochs = trained[name]
        rows.append(
            [
                name,
                f"{rounds} x {epochs}",
                f"{np.median(seconds):.0f}",
                f"{np.median([cost['seconds']['exchange'] for cost in costs]):.0f}",
                f"{costs[0]['trained_values']:,}",
                _mib(costs[0]["update_bytes"]),
                _mib(costs[0]["round_bytes"]),
                _mib(rounds * costs[0]["round_bytes"]),
            ]
        )
    head = [
        "",
        "rounds x epochs",
        "seconds, all sites in turn",
        "of them exchange",
        "trained values",
        "MiB a site uploads",
        "MiB a site sends a round",
        "in all rounds",
    ]
    return f"### Cost\n\n{_table(head, rows)}"


def _curve_table(done: Cells, test: str) -> str:
    found = _curves(done, test)
    shares = sorted({share for curve in found.values() for share in curve})
    if len(shares) < 2:
        return ""
    points = {
        name: {share: pooled_scores(cells, test, MAIN) for share, cells in curve.items()}
        for name, curve in found.items()
    }
    rows = []
    for name, curve in points.items():
        scores = [curve.get(share) for share in shares]
        rows.append([name, *("" if s is None else _with_interval(bootstrap(s)) for s in scores)])
    alone = points.get("each site alone", {})
    for name in (OURS, "FedAvg"):
        curve, row = points.get(name, {}), [f"**{name} over each site alone**"]
        for share in shares:
            both = share in alone and share in curve
            row.append(_difference(paired_bootstrap(curve[share], alone[share])) if both else "")
        rows.append(row)
    head = ["", *(f"{share:.0%}" for share in shares)]
    seeds = _seeds(len(cells) for curve in found.values() for cells in curve.values())
    title = f"{TESTS.get(test, test)} ({seeds})"
    return f"### MRR@10 by share of each site's pairs: {title}\n\n{_table(head, rows)}"


def _held_out_table(done: Cells, main: Mapping[str, Sequence[Cell]]) -> str:
    groups = _by_same_seeds(
        done, lambda work: work.held_out is not None, lambda w: (w.held_out or "", w.recipe.name)
    )
    if not groups:
        return ""
    sites = list(dict.fromkeys(site for site, _ in groups))
    names = list(dict.fromkeys(name for _, name in groups))
    vanilla = main.get("vanilla encoder")
    rows = []
    for site in sites:
        row = [site]
        base = None if vanilla is None else pooled_scores(vanilla, "test", MAIN, site)
        row.append("" if base is None else f"{base.mean():.3f}")
        for name in names:
            cells = groups.get((site, name))
            scores = None if cells is None else pooled_scores(cells, "test", MAIN)
            row.append("" if scores is None else f"{scores.mean():.3f}")
            both = scores is not None and base is not None
            row.append(_difference(paired_bootstrap(scores, base)) if both else "")  # type: ignore[arg-type]
        rows.append(row)
    if vanilla is not None and all((site, name) in groups for site in sites for name in names):
        before = [pooled_scores(vanilla, "test", MAIN, site) for site in sites]
        base = np.concatenate(before)
        row = ["**all of them**", f"{base.mean():.3f}"]
        for name in names:
            found = [pooled_scores(groups[site, name], "test", MAIN) for site in sites]
            scores = np.concatenate(found)
            row += [f"{scores.mean():.3f}", _difference(paired_bootstrap(scores, base))]
        rows.append(row)
    head = ["site left out", "vanilla encoder"]
    for name in names:
        head += [name, f"{name} over vanilla"]
    seeds = _seeds(map(len, groups.values()))
    title = f"MRR@10 at a site that took no part (own questions, own corpus; {seeds})"
    return f"### {title}\n\n{_table(head, rows)}"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _with_interval(interval: Interval) -> str:
    return f"{interval.mean:.3f} [{interval.low:.3f}, {interval.high:.3f}]"


def _difference(interval: Interval) -> str:
    return f"{interval.mean:+.3f} [{interval.low:+.3f}, {interval.high:+.3f}]"


def _spread(cells: Sequence[Cell], test: str) -> str:
    if len(cells) < 2:
        return ""
    return f" ± {np.std([cell.mean(test, MAIN) for cell in cells], ddof=1):.3f}"


def _mib(size: float) -> str:
    return f"{size / 2**20:.2f}" if size else ""


# ---- figures and plots -----------------------------------------------------------------


def _figures(done: Cells) -> list[dict[str, Any]]:
    """A row a cell: what it is, all its means, and its cost."""
    return [
        {
            "recipe": work.recipe.name,
            "choices": work.recipe.identity,
            "sites": list(work.part.sites),
            "share": work.part.share,
            "seed": work.part.seed if work.recipe.learns else None,
            "held_out": work.held_out,
            "means": {test: cell.values["tests"][test]["means"] for test in cell.tests()},
            "cost": cell.cost,
            "seconds": cell.values["seconds"],
        }
        for work, cell in done.items()
    ]


def _plot(folder: Path, world: str, done: Cells) -> None:
    """Learning curves, a panel a test; nothing where there is only one share."""
    pyplot = picture.plots()
    panels = {test: _curves(done, test) for test in TESTS}
    panels = {t: c for t, c in panels.items() if len({s for v in c.values() for s in v}) > 1}
    if not panels:
        return
    figure, axes = pyplot.subplots(1, len(panels), figsize=(4.6 * len(panels), 3.6), squeeze=False)
    main = _grouped(done, whole, _name)
    for axis, (test, curves) in zip(axes[0], panels.items(), strict=True):
        for name, curve in curves.items():
            shares = sorted(curve)
            intervals = [bootstrap(pooled_scores(curve[s], test, MAIN)) for s in shares]
            means = np.array([interval.mean for interval in intervals])
            below = means - [interval.low for interval in intervals]
            above = [interval.high for interval in intervals] - means
            percent = [100 * share for share in shares]
            axis.errorbar(percent, means, [below, above], label=name, marker="o", capsize=3)
        for name, style in (("vanilla encoder", "--"), ("BM25", ":"), ("centralised", "-.")):
            if name in main:
                level = float(pooled_scores(main[name], test, MAIN).mean())
                axis.axhline(level, color="grey", linestyle=style, label=name)
        axis.set(title=TESTS[test], xlabel="% of each site's pairs", ylabel="MRR@10")
        axis.grid(alpha=0.3)
    axes[0][0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(folder / f"learning-{world}-curves.svg", metadata={"Date": None})
    pyplot.close(figure)


def _curves(done: Cells, test: str) -> dict[str, dict[float, list[Cell]]]:
    """Recipe -> share -> cells of all sites, for recipes with more than one share."""
    shares: dict[str, set[float]] = {}
    for work in done:
        if _all_sites(work) and work.recipe.learns:
            shares.setdefault(work.recipe.name, set()).add(work.part.share)
    groups = _by_same_seeds(
        done,
        lambda work: _all_sites(work) and len(shares.get(work.recipe.name, ())) > 1,
        lambda work: (work.recipe.name, work.part.share),
    )
    curves: dict[str, dict[float, list[Cell]]] = {}
    for (name, share), cells in groups.items():
        if test in cells[0].tests():
            curves.setdefault(name, {})[share] = cells
    return {name: curve for name, curve in curves.items() if len(curve) > 1}


def _all_sites(work: Work) -> bool:
    return work.held_out is None and work.part.sites == work.world.sites


def _by_same_seeds(
    done: Cells, chosen: Callable[[Work], bool], key: Callable[[Work], K]
) -> dict[K, list[Cell]]:
    """Cells by key, of those seeds that all have: else they could not be compared.

    Where there is no such seed yet, of the first one alone.
    """
    groups: dict[K, dict[int, Cell]] = {}
    for work, cell in done.items():
        if chosen(work):
            groups.setdefault(key(work), {})[work.part.seed] = cell
    if not groups:
        return {}
    seeds = set.intersection(*(set(cells) for cells in groups.values()))
    seeds = seeds or {min(seed for cells in groups.values() for seed in cells)}
    return {
        key: [cells[seed] for seed in sorted(seeds)]
        for key, cells in groups.items()
        if seeds <= set(cells)
    }


def _seeds(counts: Iterable[int]) -> str:
    count = min(counts)
    return "one seed" if count == 1 else f"{count} seeds"


def _name(work: Work) -> str:
    return work.recipe.name


def _world_and_name(work: Work) -> tuple[str, str]:
    return work.world.name, work.recipe.name


def _grouped(
    done: Cells, chosen: Callable[[Work], bool], key: Callable[[Work], K]
) -> dict[K, list[Cell]]:
    """Cells by key, those of all seeds together."""
    groups: dict[K, list[Cell]] = {}
    for work, cell in done.items():
        if chosen(work):
            groups.setdefault(key(work), []).append(cell)
    return groups
