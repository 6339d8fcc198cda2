"""Encrypted sums at 3 sizes and 2 numbers of contributors, beside [60, 40, 40] and float32.

Four ways to the same sum, turn by turn in one run: ours at 16 and at 8 bits;
TenSEAL as the leading platform for federated learning ships it (N = 8192, primes
[60, 40, 40], scale 2^40, symmetric, one value a slot); and raw float32 vectors,
which hide nothing. Every way goes from float32 values to bytes that can be sent,
from all contributors' bytes to those of the sum, and from these to values again,
and must arrive at the right sum. The control is helped where there is a choice:
pieces of one ciphertext each (a third faster than one long vector), and no weights.

Ours is the mix of a real round: the coordinator's own update under the public key,
K - 1 of key holders under the secret one. `encrypt` is the slower of the two.
`up` are bytes from a contributor to the coordinator (its own update does not
travel), `down` those of the sum from the coordinator to each that may decrypt it.

Seconds are processor time of this process, which runs one thread (so does TenSEAL
here): figures are those of one core, whatever else the machine does. Medians.

    python -m tests.benchmarks.bench_sums [--json]
"""

from __future__ import annotations

import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import tenseal
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from crypto.arrays import Float32, Float64
from crypto.ckks.parameters import choose_parameters
from crypto.ckks.sums import RoundKey, RunningSum, deal
from crypto.quantize import CryptoError, dequantise_sum, pack, quantise, unpack

SIZES = {300_000: "300 k", 1_200_000: "1.2 M", 5_000_000: "5 M"}
CONTRIBUTORS = (3, 8)
BITS = (16, 8)
# A run of 5 M values and 8 contributors takes the control half a minute, and ours three seconds.
RUNS = {300_000: 5, 1_200_000: 5, 5_000_000: 3}
CONTROL = "TenSEAL as the leading platform ships it: N=8192, [60,40,40], scale 2^40, symmetric"
SECONDS = ("encrypt", "add", "decrypt", "encrypt + add + decrypt")
BYTES = ("up", "down")
WHERE = {
    "up": "bytes per value up, contributor -> coordinator",
    "down": "bytes per value down, sum -> each key holder",
}

Say = Callable[[str], None]


class Way(Protocol):
    """One way to a sum of K vectors; every update is as dear as any other."""

    def encrypt(self, vector: Float32) -> list[bytes]:
        """An update as it is sent."""

    def add(self, update: list[bytes], contributors: int) -> list[bytes]:
        """The sum as it is sent, of ``contributors`` updates."""

    def decrypt(self, total: list[bytes], values: int) -> Float64:
        """The sum's values."""


@dataclass
class Measured:
    """Seconds of each run's steps, and bytes per value."""

    steps: dict[str, list[float]] = field(default_factory=dict)
    up: float = 0.0
    down: float = 0.0

    def take(self, step: str, job: Callable[[], Any]) -> Any:
        """Run a step and note its seconds."""
        started = time.process_time()
        result = job()
        self.steps.setdefault(step, []).append(time.process_time() - started)
        return result

    def figure(self, name: str) -> float:
        """Seconds or bytes, by the names that the rows have."""
        if name in BYTES:
            return float(getattr(self, name))
        if name in self.steps:
            return statistics.median(self.steps[name])
        return sum(self.figure(step) for step in ("encrypt", "add", "decrypt"))


# ---- the ways ---------------------------------------------------------------------


class Ours:
    """Packed integers under a round key."""

    def __init__(self, contributors: int, bits: int) -> None:
        self._parameters = choose_parameters(contributors, bits)
        dealt = deal(self._parameters)
        self._holder = RoundKey(self._parameters, dealt.secret, secret=True)
        self._coordinator = RoundKey(self._parameters, dealt.public, secret=False)
        self._rng = np.random.Generator(np.random.SFC64(2))
        self._own: list[bytes] = []

    def encrypt(self, vector: Float32) -> list[bytes]:
        return self._encrypted(vector, self._holder)

    def encrypt_own(self, vector: Float32) -> None:
        """The coordinator's update, which stays with it."""
        self._own = self._encrypted(vector, self._coordinator)

    def _encrypted(self, vector: Float32, key: RoundKey) -> list[bytes]:
        bits = self._parameters.packing.bits
        integers = quantise(vector, [vector.size], 1.0, [0], bits, self._rng)
        return [key.encrypt(row) for row in pack(integers, self._parameters.packing)]

    def add(self, update: list[bytes], contributors: int) -> list[bytes]:
        total = RunningSum(self._parameters, len(update))
        for one in (self._own, *[update] * (contributors - 1)):
            for index, block in enumerate(one):
                total.add(index, block)
        return [total.block(index) for index in range(len(update))]

    def decrypt(self, total: list[bytes], values: int) -> Float64:
        packing = self._parameters.packing
        slots = np.stack([self._holder.decrypt(block) for block in total])
        return dequantise_sum(unpack(slots, packing, values), [values], [0], packing.bits)


class Shipped:
    """The control: TenSEAL with the leading platform's settings."""

    def __init__(self) -> None:
        self._context = tenseal.context(
            tenseal.SCHEME_TYPE.CKKS,
            poly_modulus_degree=8192,
            coeff_mod_bit_sizes=[60, 40, 40],
            encryption_type=tenseal.ENCRYPTION_TYPE.SYMMETRIC,
        )
        self._context.global_scale = 2**40

    def encrypt(self, vector: Float32) -> list[bytes]:
        pieces = (vector[at : at + 4096] for at in range(0, vector.size, 4096))
        return [tenseal.ckks_vector(self._context, piece).serialize() for piece in pieces]

    def add(self, update: list[bytes], contributors: int) -> list[bytes]:
        total = [tenseal.ckks_vector_from(self._context, block) for block in update]
        for _ in range(contributors - 1):
            for index, block in enumerate(update):
                total[index] += tenseal.ckks_vector_from(self._context, block)
        return [one.serialize() for one in total]

    def decrypt(self, total: list[bytes], values: int) -> Float64:
        loaded = (tenseal.ckks_vector_from(self._context, block) for block in total)
        return np.concatenate([np.array(one.decrypt()) for one in loaded])[:values]


class Plain:
    """The other control: the raw vectors."""

    def encrypt(self, vector: Float32) -> list[bytes]:
        return [vector.tobytes()]

    def add(self, update: list[bytes], contributors: int) -> list[bytes]:
        total = np.frombuffer(update[0], np.float32).copy()
        for _ in range(contributors - 1):
            total += np.frombuffer(update[0], np.float32)
        return [total.tobytes()]

    def decrypt(self, total: list[bytes], values: int) -> Float64:
        return np.frombuffer(total[0], np.float32, values).astype(np.float64)


# ---- measuring ---------------------------------------------------------------------


def figures(say: Say = lambda _: None) -> list[dict[str, Any]]:
    """One row a figure; ratio > 1 means better than the control. ``say`` hears of progress."""
    rows = []
    for values, size in SIZES.items():
        for contributors in CONTRIBUTORS:
            measured = _measure(values, contributors, say)
            for bits in BITS:
                at = f"{size} values, K = {contributors}, {bits} bits"
                rows += list(_rows(at, measured, bits))
    return rows


def _measure(values: int, contributors: int, say: Say) -> dict[str, Measured]:
    """All ways in turn, several times, so that all meet the same neighbours."""
    vector = np.random.default_rng(1).uniform(-1, 1, values).astype(np.float32)
    ways: dict[str, Way] = {
        **{f"{bits} bits": Ours(contributors, bits) for bits in BITS},
        "shipped": Shipped(),
        "plain": Plain(),
    }
    # Of K values: stochastic rounding errs by less than a unit each, the rest by next to nothing.
    errors = {f"{bits} bits": contributors / (2 ** (bits - 1) - 1) for bits in BITS}
    measured = {name: Measured() for name in ways}
    for run in range(RUNS[values]):
        for name, way in ways.items():
            say(f"{values:,} values, K = {contributors}, {name}, run {run + 1} of {RUNS[values]}")
            total = _go(way, measured[name], vector, contributors)
            off = float(np.abs(total - contributors * vector.astype(np.float64)).max())
            if not off <= errors.get(name, 1e-5):
                raise CryptoError(f"{name}: the sum is off by {off}: these figures mean nothing")
            del total
            gc.collect()  # a control's update of 5 M values is 290 MB
    return measured


def _go(way: Way, measured: Measured, vector: Float32, contributors: int) -> Float64:
    """One run: encrypt, add, decrypt. Returns the sum's values."""
    if isinstance(way, Ours):
        measured.take("own", lambda: way.encrypt_own(vector))
        update = measured.take("holder", lambda: way.encrypt(vector))
        # The sites encrypt at the same time, so a round waits for the slower.
        slower = max(measured.steps[kind][-1] for kind in ("own", "holder"))
        measured.steps.setdefault("encrypt", []).append(slower)
    else:
        update = measured.take("encrypt", lambda: way.encrypt(vector))
    measured.up = sum(map(len, update)) / vector.size
    total = measured.take("add", lambda: way.add(update, contributors))
    measured.down = sum(map(len, total)) / vector.size
    values: Float64 = measured.take("decrypt", lambda: way.decrypt(total, vector.size))
    return values


def _rows(at: str, measured: dict[str, Measured], bits: int) -> Iterator[dict[str, Any]]:
    ours, control, plain = (measured[name] for name in (f"{bits} bits", "shipped", "plain"))
    for figure in (*SECONDS, *BYTES):
        value, base = ours.figure(figure), control.figure(figure)
        yield {
            "name": f"{WHERE.get(figure, figure)}, {at}",
            "value": round(value, 5),
            "unit": "bytes" if figure in BYTES else "s",
            "control": CONTROL,
            "control_value": round(base, 5),
            "ratio": round(base / value, 3),
            "float32_value": round(plain.figure(figure), 5),
        }


# ---- showing -----------------------------------------------------------------------


def table(rows: Sequence[dict[str, Any]]) -> Table:
    """Sizes and contributors down, steps and bytes across; beside ours how much better it is."""
    shown = Table(
        box=SIMPLE, padding=(0, 1, 0, 0), show_edge=False, title="ms of one core; bytes per value"
    )
    heads = ("enc", "add", "dec", "all", "faster", "up", "fewer", "down", "fewer")
    for head in ("values,K", "way", *heads):
        left = head in ("values,K", "way")
        shown.add_column(head, justify="left" if left else "right", no_wrap=True)
    found = {row["name"]: row for row in rows}
    for size in SIZES.values():
        for contributors in CONTRIBUTORS:
            at, short = f"{size} values, K = {contributors}", f"{size}, {contributors}"
            of = {
                bits: [found[f"{WHERE.get(f, f)}, {at}, {bits} bits"] for f in (*SECONDS, *BYTES)]
                for bits in BITS
            }
            for bits, cells in of.items():
                texts = _cells([cell["value"] for cell in cells], [c["ratio"] for c in cells])
                shown.add_row(short, f"{bits} bits", *texts)
            for way, key in (("[60,40,40]", "control_value"), ("float32", "float32_value")):
                texts = _cells([cell[key] for cell in of[BITS[0]]], None)
                shown.add_row(short, way, *texts, end_section=way == "float32")
    return shown


def _cells(values: list[float], ratios: list[float] | None) -> list[str]:
    """Four seconds, then two numbers of bytes; behind the last three how much better they are."""
    texts = [f"{_short(value * 1000)}" for value in values[:4]]
    better = [f"{ratio:.1f}x" for ratio in ratios[3:]] if ratios else [""] * 3
    return [*texts, better[0], f"{values[4]:.3g}", better[1], f"{values[5]:.3g}", better[2]]


def _short(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"


def main() -> None:
    """Print the figures, as a table or one JSON object a line."""
    rows = figures(lambda text: print(text, file=sys.stderr, flush=True))
    if "--json" in sys.argv[1:]:
        for row in rows:
            print(json.dumps(row))
    else:
        Console().print(table(rows))


if __name__ == "__main__":
    main()
