"""Encrypt, add and decrypt, beside the settings of TenSEAL's tutorial in the same run.

Both sides do the same job: float32 values to bytes that can be sent, those
bytes into a running sum, and the sum's bytes back to values. Ours includes
quantising and packing. Seconds are processor time of this process, so figures
are those of one core and do not depend on what else the machine does. The
control is N = 8192, primes [60, 40, 40, 60], scale 2^40, one value a slot,
public key.

    python -m tests.benchmarks.bench_crypto [--json]
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import tenseal

from crypto.arrays import Float32
from crypto.ckks.parameters import BITS, choose_parameters
from crypto.ckks.sums import RoundKey, RunningSum, deal
from crypto.quantize import dequantise_sum, pack, quantise, unpack

VALUES = 2 * 3 * 4 * 4096 * 4  # whole blocks with 2, 3 and 4 digits
CONTRIBUTORS = 3
RUNS = 5
CONTROL = "TenSEAL tutorial settings: N=8192, [60,40,40,60], scale 2^40, unpacked, public key"

Job = Callable[[], object]


@dataclass(frozen=True)
class Rates:
    """Medians: values per second of each step, and bytes per value of one update."""

    encrypt: float
    add: float
    decrypt: float
    size: float


def figures() -> list[dict[str, Any]]:
    """One row a figure; ratio > 1 means better than the control (for bytes: smaller)."""
    vector = np.random.default_rng(1).uniform(-1, 1, VALUES).astype(np.float32)
    control = _control(vector)
    rows = []
    for bits in BITS:
        for secret in (False, True):
            ours = _ours(vector, bits, secret=secret)
            key = "secret key" if secret else "public key"
            for step in ("encrypt", "add", "decrypt"):
                value, base = getattr(ours, step), getattr(control, step)
                name = f"{step}, {bits} bits, {key}"
                rows.append(_row(name, value, "values/s", base, value / base))
            name = f"bytes per value, {bits} bits, {key}"
            rows.append(_row(name, ours.size, "bytes", control.size, control.size / ours.size))
    return rows


def _row(name: str, value: float, unit: str, control: float, ratio: float) -> dict[str, Any]:
    return {
        "name": name,
        "value": value,
        "unit": unit,
        "control": CONTROL,
        "control_value": control,
        "ratio": ratio,
    }


def _ours(vector: Float32, bits: int, *, secret: bool) -> Rates:
    parameters = choose_parameters(CONTRIBUTORS, bits)
    packing = parameters.packing
    dealt = deal(parameters)
    holder = RoundKey(parameters, dealt.secret, secret=True)
    key = holder if secret else RoundKey(parameters, dealt.public, secret=False)
    sizes, exponents = [vector.size], [0]
    rng = np.random.default_rng(2)

    def encrypt() -> list[bytes]:
        integers = quantise(vector, sizes, 1.0, exponents, bits, rng)
        return [key.encrypt(row) for row in pack(integers, packing)]

    update = encrypt()
    total = RunningSum(parameters, len(update))

    def add() -> None:
        for index, block in enumerate(update):
            total.add(index, block)

    def take_back() -> None:
        for index, block in enumerate(update):
            total.subtract(index, block)

    add()
    # Taken back after each run, untimed: the digits have room for three updates only.
    add_seconds = _median(add, after=take_back)
    blocks = [total.block(index) for index in range(len(update))]

    def decrypt() -> object:
        slots = np.stack([holder.decrypt(block) for block in blocks])
        return dequantise_sum(unpack(slots, packing, vector.size), sizes, exponents, bits)

    size = sum(map(len, update)) / vector.size
    return Rates(
        vector.size / _median(encrypt),
        vector.size / add_seconds,
        vector.size / _median(decrypt),
        size,
    )


def _control(vector: Float32) -> Rates:
    context = tenseal.context(
        tenseal.SCHEME_TYPE.CKKS, poly_modulus_degree=8192, coeff_mod_bit_sizes=[60, 40, 40, 60]
    )
    context.global_scale = 2**40
    pieces = np.split(vector, vector.size // 4096)

    def encrypt() -> list[bytes]:
        return [tenseal.ckks_vector(context, piece.tolist()).serialize() for piece in pieces]

    update = encrypt()
    total = [tenseal.ckks_vector_from(context, block) for block in update]

    def add() -> None:
        for index, block in enumerate(update):
            total[index] += tenseal.ckks_vector_from(context, block)

    add_seconds = _median(add)
    blocks = [one.serialize() for one in total]

    def decrypt() -> object:
        loaded = (tenseal.ckks_vector_from(context, block) for block in blocks)
        return np.concatenate([np.array(one.decrypt()) for one in loaded])

    size = sum(map(len, update)) / vector.size
    return Rates(
        vector.size / _median(encrypt),
        vector.size / add_seconds,
        vector.size / _median(decrypt),
        size,
    )


def _median(job: Job, after: Job = lambda: None) -> float:
    seconds = []
    for _ in range(RUNS):
        start = time.process_time()
        job()
        seconds.append(time.process_time() - start)
        after()
    return statistics.median(seconds)


def main() -> None:
    """Print the figures, as a table or one JSON object a line."""
    for row in figures():
        if "--json" in sys.argv[1:]:
            print(json.dumps(row))
            continue
        big = row["unit"] == "values/s"
        value, base = (row[key] / 1e6 if big else row[key] for key in ("value", "control_value"))
        unit = "M values/s" if big else "bytes"
        print(f"{row['name']:38} {value:8.2f} {unit:10}  control {base:7.2f}  {row['ratio']:5.1f}x")


if __name__ == "__main__":
    main()
