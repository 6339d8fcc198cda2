"""Mask and unmask 1.2 M values of five sites, beside adding plain float32 vectors.

Milliseconds are processor time of this process, which runs one thread, so they do
not depend on what else the machine does; medians. Masking goes from a site's
16-bit integers to the words that it sends; unmasking, which every site does for
itself, from the closed sum and five (or four) sites' shares to the exact integer sum,
reconstruction of the secrets included. The control is what both would be without any
protection: adding the five vectors as float32, in the same run.

    python -m tests.benchmarks.bench_masking [--json]
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from typing import Any

import numpy as np

from crypto.masking.coordinator import MaskedSum, Unmasking
from crypto.quantize import CryptoError
from tests.crypto.masking.masked import Crowd, random_inputs, terms

VALUES = 1_200_000
SITES = 5
BITS = 16
RUNS = 9
CONTROL = "plain float32 addition of the five vectors, nothing hidden"


def figures() -> list[dict[str, Any]]:
    """One row a figure, in ms or bytes; the ratio is Hanse over the control (1 is equal)."""
    adding = _adding()
    masking, adding_masked = _masking()
    unmasking = _unmasking({})
    rows = [
        _row("mask one input", masking, adding),
        _row("add the five masked inputs", adding_masked, adding),
        _row("unmask, no dropout", unmasking, adding),
        _row("mask one input and unmask, no dropout", masking + unmasking, adding),
        _row("unmask, 1 dropout", _unmasking({"s02": 3}), adding),
    ]
    size = terms(SITES, bits=BITS, values=VALUES).ring.size(VALUES) / VALUES
    per_value = _row("bytes per value", size, 4.0)
    return [*rows, {**per_value, "unit": "bytes", "control": "float32"}]


def _row(name: str, value: float, control: float) -> dict[str, Any]:
    return {
        "name": f"masking, {SITES} sites, 1.2 M values of {BITS} bits: {name}",
        "value": round(value, 4),
        "unit": "ms",
        "control": CONTROL,
        "control_value": round(control, 4),
        "ratio": round(value / control, 3),
    }


def _adding() -> float:
    chance = np.random.default_rng(1)
    vectors = [chance.random(VALUES, dtype=np.float32) for _ in range(SITES)]
    total = np.zeros(VALUES, dtype=np.float32)
    seconds = []
    for _ in range(RUNS):
        start = time.process_time()
        for vector in vectors:
            total += vector
        seconds.append(time.process_time() - start)
    return statistics.median(seconds) * 1000


def _masking() -> tuple[float, float]:
    """A site's masking, and the coordinator's addition of all five, in ms."""
    masking, adding = [], []
    for run in range(RUNS):
        crowd = Crowd(terms(SITES, bits=BITS, values=VALUES, attempt=run))
        inputs = random_inputs(crowd.terms)
        roster = crowd.advertise(crowd.terms.sites)
        crowd.receive(crowd.deal(roster.sites), roster.sites)
        total = MaskedSum(roster, roster.sites)
        for site in roster.sites:
            start = time.process_time()
            words = crowd.contributors[site].mask(inputs[site])
            masking.append(time.process_time() - start)
            start = time.process_time()
            total.add(site, words)
            adding.append(time.process_time() - start)
    return statistics.median(masking) * 1000, statistics.median(adding) * SITES * 1000


def _unmasking(gone: dict[str, int]) -> float:
    seconds = []
    for run in range(RUNS):  # the sum is opened where it lies, so each run needs one of its own
        crowd = Crowd(terms(SITES, bits=BITS, values=VALUES, attempt=run))
        inputs = random_inputs(crowd.terms)
        unmasking: Unmasking = crowd.until_masked(inputs, gone)
        crowd.open(unmasking, unmasking.outcome.survivors)
        start = time.process_time()
        total = unmasking.finish()
        seconds.append(time.process_time() - start)
        expected = np.sum([inputs[s] for s in unmasking.outcome.survivors], axis=0, dtype=np.int64)
        if not np.array_equal(total, expected):
            raise CryptoError("the sum is not exact: these figures mean nothing")
    return statistics.median(seconds) * 1000


def main() -> None:
    """Print the figures, as a table or one JSON object a line."""
    for row in figures():
        if "--json" in sys.argv[1:]:
            print(json.dumps(row))
            continue
        value, base = f"{row['value']:8.2f} {row['unit']:5}", f"{row['control_value']:7.2f}"
        print(f"{row['name']:72} {value}  control {base}  {row['ratio']:6.2f}x")


if __name__ == "__main__":
    main()
