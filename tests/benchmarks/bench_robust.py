"""The Gram matrix of encrypted updates, beside that of the same floats in the clear.

Seven sites, 300,000 parameters each; one site's update is scaled by 30, one by -10.
Seconds are processor time of this process, so figures are those of one core.

    python -m tests.benchmarks.bench_robust
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from crypto.ckks.dot_products import Sketches, answer, draw_signs
from crypto.ckks.parameters import choose_measurable
from crypto.ckks.sums import RoundKey, deal
from crypto.quantize import pack, quantise, scale_exponents
from peers.plans.robust import select

SITES = 7
VALUES = 300_000
RUNS = 5
CONTROL = "the Gram matrix of the same updates as plain float64, numpy"


def figures() -> list[dict[str, Any]]:
    """One row a figure; ratio > 1 means dearer (or less precise) than the control."""
    chance = np.random.default_rng(1)
    common = chance.standard_normal(VALUES)
    floats = np.stack([common + chance.standard_normal(VALUES) for _ in range(SITES)])
    floats[2] *= 30
    floats[4] *= -10
    exact = floats @ floats.T
    control = _median(lambda: floats @ floats.T)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        seconds, products, size = _encrypted(floats, Path(folder) / "question")
    for name, value in seconds.items():
        rows.append(_row(f"{name}, K = {SITES}, {VALUES} values", value, "s", control))
    norms = np.sqrt(products.diagonal() / exact.diagonal())
    error = float(np.abs(norms / np.median(norms) - 1).max())
    rows.append(_row("relative error of norms, largest", error, "", None))
    rows.append(_row("bytes of a question to each key holder", size, "bytes", None))
    sites = [f"site-{number}" for number in range(SITES)]
    for rule in ("norm", "multi_krum"):
        rejected = select(rule, 2, sites, products.tolist()).rejected
        found = sum(site in rejected for site in ("site-2", "site-4"))
        rows.append(_row(f"attackers (x30, x-10) rejected by {rule}", found, "of 2", None))
    return rows


def _encrypted(floats: Any, path: Path) -> tuple[dict[str, float], Any, int]:
    parameters = choose_measurable(SITES, 16)
    dealt = deal(parameters)
    holder = RoundKey(parameters, dealt.secret, secret=True)
    coordinator = RoundKey(parameters, dealt.public, secret=False)
    updates = [row.astype(np.float32) for row in floats]
    exponents = [max(scale_exponents(row, [VALUES], 1.0)[0] for row in updates)]
    rng = np.random.default_rng(2)
    blocks = [
        [holder.encrypt(row) for row in pack(integers, parameters.packing)]
        for integers in (quantise(u, [VALUES], 1.0, exponents, 16, rng) for u in updates)
    ]
    names = [f"site-{number}" for number in range(SITES)]
    sketches = Sketches(coordinator, draw_signs(len(blocks[0])))

    def sketch() -> None:
        for name, update in zip(names, blocks, strict=True):
            sketches.add(name, update)

    sketch()  # SEAL's tables are made with the first
    seconds = {
        "sketches at the coordinator": _median(sketch),
        "encrypted Gram matrix at the coordinator": _median(lambda: sketches.ask(names, path)),
        "decrypting it at a key holder": _median(lambda: answer(holder, path, SITES)),
    }
    return seconds, answer(holder, path, SITES).products, path.stat().st_size


def _row(name: str, value: float, unit: str, control: float | None) -> dict[str, Any]:
    return {
        "name": name,
        "value": value,
        "unit": unit,
        "control": None if control is None else CONTROL,
        "control_value": control,
        "ratio": None if control is None else value / control,
    }


def _median(job: Callable[[], object]) -> float:
    seconds = []
    for _ in range(RUNS):
        start = time.process_time()
        job()
        seconds.append(time.process_time() - start)
    return statistics.median(seconds)


def main() -> None:
    """Print the figures, one JSON object a line."""
    for row in figures():
        print(json.dumps(row))


if __name__ == "__main__":
    main()
