"""The table in docs/results/generator.md, from the rows that docs/results/generator.jsonl keeps.

Figures are means over the held-out questions of all sites, each question's over the seeds first;
intervals are of 95 %, by a bootstrap over questions, for differences a paired one; behind a
semicolon stand the lowest and the highest difference of a seed. Perplexity is the geometric mean
of a token's of the right answer, as it is to be written: with citations.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from crypto.arrays import Float64
from tests.generator_bench.rows import ALONE, DELTA
from tests.learning_bench.intervals import bootstrap

BEGIN: Final = "<!-- quality: begin -->\n"
END: Final = "<!-- quality: end -->\n"
FEDERATED: Final = (
    "FedAvg, C",
    "FedProx, C, mu = 1",
    "server momentum, C",
    "FedAvg, A",
    "FedAvg, B",
)
LEAST: Final = -0.01  # of ROUGE-L: what a federation may be below a site alone
_COLUMNS: Final = {
    "ROUGE-1": "rouge-1-f",
    "ROUGE-2": "rouge-2-f",
    "BLEU": "bleu",
    "chrF": "chrf",
    "METEOR": "meteor-stem",
    "citations": "cites-p",
}
_KIB: Final = 1024

Row = dict[str, Any]


def written(page: Path, rows: Path) -> None:
    """Put the tables between the marks of the page."""
    text = page.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    page.write_text(f"{before}{BEGIN}{tables(read(rows))}{END}{after}", encoding="utf-8")


def read(path: Path) -> list[Row]:
    """One row a line."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def tables(rows: Sequence[Row]) -> str:
    """Both tables, and the answer that they give."""
    found = by_name(rows)
    seeds = sorted({row["seed"] for row in rows})
    questions = len(next(iter(found.values()))[0]["questions"])
    said = f"{questions} held-out questions, {len(seeds)} seed{'s' * (len(seeds) > 1)}.\n\n"
    return said + _quality(found) + "\n" + _by_site(found) + "\n" + verdict(found) + "\n"


def by_name(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Rows by the name that the table gives them, one a seed, in the order they came."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(_title(row), []).append(row)
    return found


def scores(rows: Sequence[Row], metric: str, site: str = "") -> Float64:
    """[questions], the mean over seeds; of one site or of all."""
    means: Float64 = np.mean(
        [[one[metric] for one in row["questions"] if site in ("", one["site"])] for row in rows],
        axis=0,
    )
    return means


def verdict(found: dict[str, list[Row]]) -> str:
    """Whether federated answers are nowhere more than `LEAST` below each site's own, and above."""
    if not {FEDERATED[0], ALONE} <= found.keys():
        return "No verdict: a row is missing."
    said = [_judged(found, name) for name in FEDERATED if name in found]
    return "\n\n".join([f"**{said[0]}**", *said[1:]])


def _judged(found: dict[str, list[Row]], name: str) -> str:
    sites = _sites(found)
    above = {site: float(np.mean(_over_alone(found, name, site).mean(axis=0))) for site in sites}
    held = all(value >= LEAST for value in above.values())
    higher = sum(value > 0 for value in above.values())
    return (
        f"{name} is {'nowhere' if held else 'somewhere'} more than {-LEAST} ROUGE-L below "
        f"a site alone, and above it at {higher} of {len(sites)} sites."
    )


def _over_alone(found: dict[str, list[Row]], name: str, site: str = "") -> Float64:
    """ROUGE-L above that of each site alone [seeds that both have, questions]."""
    ours, theirs = ({row["seed"]: row for row in found[one]} for one in (name, ALONE))
    return np.array(
        [
            scores([ours[seed]], "rouge-l-f", site) - scores([theirs[seed]], "rouge-l-f", site)
            for seed in ours
            if seed in theirs
        ]
    )


def _title(row: Row) -> str:
    ways = {"ckks": ", CKKS", "masking": ", masking"}
    return f"{row['name']}{ways.get(row['exchange'], '')}"


def _noise(rows: Sequence[Row]) -> str:
    """What a row's noise promises, on average over the seeds, and where its name doesn't say z."""
    if rows[0]["epsilon"] is None:
        return ""
    each = np.mean([row["multipliers"] for row in rows], axis=0)
    ends = dict.fromkeys(f"{one:.3g}" for one in (each[0], each[-1]))  # one where they are alike
    z = "" if "z =" in rows[0]["name"] else f"z = {' to '.join(ends)}, "
    return f" ({z}ε = {np.mean([row['epsilon'] for row in rows]):,.1f})"


def _quality(found: dict[str, list[Row]]) -> str:
    heads = ["", "ROUGE-L", *_COLUMNS, "perplexity", "ROUGE-L over alone"]
    heads += ["values", "a site sends", "s to train", "s to add"]
    lines = [_line(heads), _line(["---"] * len(heads))]
    for title, rows in found.items():
        level = bootstrap(scores(rows, "rouge-l-f"))
        nats = float(np.mean(scores(rows, "nats")))
        above = _above(found, title) if ALONE in found and title != ALONE else ""
        sends = [row["uploaded"] / _KIB for row in rows if "uploaded" in row]
        adds = [row["exchange_seconds"] for row in rows if "exchange_seconds" in row]
        lines.append(
            _line(
                [
                    title + _noise(rows),
                    f"{level.mean:.3f} [{level.low:.3f}, {level.high:.3f}]",
                    *(f"{float(np.mean(scores(rows, key))):.3f}" for key in _COLUMNS.values()),
                    f"{np.exp(nats):,.1f}",
                    above,
                    f"{rows[0]['values']:,}" if rows[0]["who"] != "nobody" else "",
                    f"{np.mean(sends):,.0f} KiB" if sends else "",
                    f"{np.mean([row['train_seconds'] for row in rows]):.1f}",
                    f"{np.mean(adds):.2f}" if adds else "",
                ]
            )
        )
    legend = (
        f"\nA site's bytes and seconds are of one round. z: noise over clip norm, from the first "
        f"round to the last; ε at δ = {DELTA:g}, of all rounds. METEOR is by stems. Differences: "
        "the mean, its interval over questions; the lowest and the highest seed.\n"
    )
    return "\n".join(lines) + "\n" + legend


def _by_site(found: dict[str, list[Row]]) -> str:
    names = [name for name in (ALONE, *FEDERATED, "pooled, C") if name in found]
    lines = [_line(["ROUGE-L at", *names]), _line(["---"] * (1 + len(names)))]
    for site in _sites(found):
        cells = [site]
        for name in names:
            own = scores(found[name], "rouge-l-f", site)
            cell = f"{own.mean():.3f}"
            if name != ALONE and ALONE in found:
                cell += f" ({_above(found, name, site)})"
            cells.append(cell)
        lines.append(_line(cells))
    return "\n".join(lines) + "\n"


def _sites(found: dict[str, list[Row]]) -> list[str]:
    rows = next(iter(found.values()))
    return list(dict.fromkeys(one["site"] for one in rows[0]["questions"]))


def _above(found: dict[str, list[Row]], name: str, site: str = "") -> str:
    by_seed = _over_alone(found, name, site)
    value, seeds = bootstrap(by_seed.mean(axis=0)), by_seed.mean(axis=1)
    said = f"{value.mean:+.3f} [{value.low:+.3f}, {value.high:+.3f}]"
    return said + (f"; {seeds.min():+.3f} to {seeds.max():+.3f}" if len(seeds) > 1 else "")


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
