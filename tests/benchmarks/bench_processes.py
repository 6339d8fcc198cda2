"""All weights of the default encoder in several training processes, beside one.

What counts is an epoch once it runs: the wall's seconds from the end of the first epoch to
the end of the last, over the epochs between. What a round pays before (processes begin,
import torch and load the encoder) is a row of its own. All take turns, so that they meet
the same neighbours; the first control is what this machine can give at all: the same
training twice at the same time, which shares nothing.

    python -m tests.benchmarks.bench_processes
"""

from __future__ import annotations

import json
import multiprocessing
import statistics
import time
from dataclasses import replace
from typing import Any, NamedTuple

from daemon.learning.options import TrainingOptions
from daemon.learning.retriever import parallel
from daemon.learning.retriever.encoder import Encoder
from daemon.learning.retriever.retriever import Retriever, adapted
from daemon.learning.retriever.spec import RetrieverSpec
from daemon.learning.retriever.training import TrainingSet
from tests.benchmarks.bench_learning_speed import SEED, TEXT_PAIRS, drawn_texts

BATCHES = (32, 64)  # each process takes the optimiser's step whole: more pairs, less of it
RUNS = 3
ONE = RetrieverSpec(adapt="full", device="cpu", threads=1)
TWO = replace(ONE, threads=2, processes=2)
THREADS = replace(ONE, threads=2)


class _Taken(NamedTuple):
    """Seconds of the wall."""

    epoch: float
    start: float  # and end: all that is no epoch


def figures() -> list[dict[str, Any]]:
    """One row a figure; a ratio of 2 means twice as fast as one process of one thread."""
    pairs = drawn_texts(_retriever(ONE).encoder)
    return [row for batch in BATCHES for row in _figures(pairs, batch)]


def _figures(pairs: TrainingSet, batch: int) -> list[dict[str, Any]]:
    taken: dict[str, list[_Taken]] = {"one": [], "two": [], "threads": [], "apart": []}
    for _ in range(RUNS):
        taken["one"].append(_train(ONE, pairs, batch))
        taken["two"].append(_train(TWO, pairs, batch))
        taken["threads"].append(_train(THREADS, pairs, batch))
        taken["apart"].append(_apart(pairs, batch))
    epoch = {name: statistics.median(run.epoch for run in runs) for name, runs in taken.items()}
    start = statistics.median(run.start for run in taken["two"])
    name = f"local epoch of full, {TEXT_PAIRS} pairs in batches of {batch}"
    return [
        _row(f"{name}, two processes of one thread", epoch["two"], epoch["one"]),
        _row(f"{name}, one process of two threads", epoch["threads"], epoch["one"]),
        _row(f"{name}, two trainings apart, each half", epoch["apart"] / 2, epoch["one"]),
        _row(f"what two processes take to begin and end, batches of {batch}", start, None),
    ]


def _retriever(spec: RetrieverSpec) -> Retriever:
    encoder = Encoder.load(
        spec.encoder, max_tokens=spec.max_tokens, device="cpu", threads=spec.threads
    )
    return adapted(encoder, spec.adapt)


def _train(spec: RetrieverSpec, pairs: TrainingSet, batch: int) -> _Taken:
    retriever = _retriever(spec)
    options = TrainingOptions(local_epochs=3, batch_size=batch, hard_negatives=0)
    ends: list[float] = []
    begun = time.monotonic()
    parallel.train(
        spec, retriever, pairs, options, SEED, lambda _epoch, _loss: ends.append(time.monotonic())
    )
    whole = time.monotonic() - begun
    epoch = (ends[-1] - ends[0]) / (len(ends) - 1)
    return _Taken(epoch, whole - epoch * len(ends))


def _apart(pairs: TrainingSet, batch: int) -> _Taken:
    """The slower of two that have nothing to tell one another."""
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        return max(pool.starmap(_train, [(ONE, pairs, batch)] * 2, chunksize=1))


def _row(name: str, value: float, base: float | None) -> dict[str, Any]:
    return {
        "name": name,
        "value": round(value, 3),
        "unit": "s",
        "control": None if base is None else "one process of one thread",
        "control_value": None if base is None else round(base, 3),
        "ratio": None if base is None else round(base / value, 3),
    }


def main() -> None:
    """Print the figures, one JSON object a line."""
    for row in figures():
        print(json.dumps(row))


if __name__ == "__main__":
    main()
