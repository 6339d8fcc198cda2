"""`make bench`: every figure with its control, as a table and in docs/results/bench.jsonl.

make bench                          # all, some twenty minutes on two cores
make bench ARGS="sums memory"       # these; the rows of others stay in the file
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.status import Status
from rich.table import Table

from tests.benchmarks import (
    bench_ask,
    bench_crypto,
    bench_index,
    bench_learning_speed,
    bench_library,
    bench_masking,
    bench_memory,
    bench_processes,
    bench_robust,
    bench_round,
    bench_sums,
)

RESULTS = Path(__file__).parents[2] / "docs" / "results" / "bench.jsonl"
BENCHMARKS: dict[str, Callable[..., list[dict[str, Any]]]] = {
    "round": bench_round.figures,
    "crypto": bench_crypto.figures,
    "sums": bench_sums.figures,
    "masking": bench_masking.figures,
    "memory": bench_memory.figures,
    "robust": bench_robust.figures,
    "ask": bench_ask.figures,
    "index": bench_index.figures,
    "library": bench_library.figures,
    "learning-speed": bench_learning_speed.figures,
    "processes": bench_processes.figures,
}
LONG = ("sums", "memory")  # these say what they are at


def main() -> None:
    """Run all benchmarks, or those named on the command line."""
    parser = argparse.ArgumentParser(prog="make bench", description="Measure.")
    parser.add_argument("names", nargs="*", help=f"of {', '.join(BENCHMARKS)}; all if none is")
    wanted = parser.parse_args().names or list(BENCHMARKS)
    if unknown := sorted(set(wanted) - set(BENCHMARKS)):
        parser.error(f"no benchmark is called {unknown[0]}; there are {', '.join(BENCHMARKS)}")
    console = Console()
    measured: dict[str, list[dict[str, Any]]] = {}
    for name in wanted:
        with console.status(f"measuring: {name}") as status:
            say = functools.partial(_say, console, status, name)
            rows = BENCHMARKS[name](say) if name in LONG else BENCHMARKS[name]()
        measured[name] = [{"benchmark": name, **row} for row in rows]
    console.print(_table([row for name in wanted if name != "sums" for row in measured[name]]))
    if "sums" in wanted:
        console.print(bench_sums.table(measured["sums"]))
    console.print(
        f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}"
    )
    _keep(measured)


def _say(console: Console, status: Status, name: str, text: str) -> None:
    """On a terminal the line changes; in a log each step has its own."""
    if console.is_terminal:
        status.update(f"measuring: {name}: {text}")
    else:
        console.print(f"measuring: {name}: {text}", soft_wrap=True)


def _table(rows: list[dict[str, Any]]) -> Table:
    table = Table("figure", "value", "unit", "control", "ratio")
    for row in rows:
        beside = "" if row["control_value"] is None else f"{row['control_value']:g}"
        ratio = "" if row["ratio"] is None else f"{row['ratio']:g}"
        table.add_row(row["name"], f"{row['value']:g}", row["unit"], beside, ratio)
    return table


def _keep(measured: dict[str, list[dict[str, Any]]]) -> None:
    """Write the rows, in the place of older ones of the same benchmarks."""
    lines = RESULTS.read_text(encoding="utf-8").splitlines() if RESULTS.exists() else []
    kept: dict[str, list[dict[str, Any]]] = {}
    for row in map(json.loads, lines):
        kept.setdefault(row["benchmark"], []).append(row)
    kept.update(measured)
    rows = [row for name in BENCHMARKS for row in kept.get(name, [])]
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    RESULTS.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    main()
