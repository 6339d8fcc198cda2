"""`make bench`: every figure with its control, as a table and in docs/results/bench.jsonl."""

from __future__ import annotations

import json
import os
import platform
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tests.benchmarks import (
    bench_ask,
    bench_crypto,
    bench_learning_speed,
    bench_masking,
    bench_robust,
    bench_round,
)

RESULTS = Path(__file__).parents[2] / "docs" / "results" / "bench.jsonl"
BENCHMARKS = {
    "round": bench_round,
    "crypto": bench_crypto,
    "masking": bench_masking,
    "robust": bench_robust,
    "ask": bench_ask,
    "learning-speed": bench_learning_speed,
}


def main() -> None:
    """Run all benchmarks, or those named on the command line."""
    wanted = sys.argv[1:] or list(BENCHMARKS)
    console = Console()
    rows: list[dict[str, Any]] = []
    for name in wanted:
        with console.status(f"measuring: {name}"):
            rows += [{"benchmark": name, **row} for row in BENCHMARKS[name].figures()]
    table = Table("figure", "value", "unit", "control", "ratio")
    for row in rows:
        beside = "" if row["control_value"] is None else f"{row['control_value']:g}"
        ratio = "" if row["ratio"] is None else f"{row['ratio']:g}"
        table.add_row(row["name"], f"{row['value']:g}", row["unit"], beside, ratio)
    console.print(table)
    console.print(
        f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}"
    )
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    RESULTS.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    main()
