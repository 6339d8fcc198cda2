"""Many simulated runs, spread over processes: `python -m tests.simulation --seeds 1000`.

A run is a function of its seed. A violation prints the seed, the shrunken
scenario and the end of its transcript; the exit status is 1 then. One seed again,
with its transcript: `python -m tests.simulation --replay SEED`. With `--liars` one site of
each run lies, with `--restores` the state of one goes back; with both it is another one's.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from functools import lru_cache
from unittest.mock import patch

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TimeRemainingColumn

from peers.wire import signing
from peers.wire.messages import parse_signed
from tests.simulation.scenarios.schedule import (
    Scenario,
    draw,
    draw_with_both,
    draw_with_liar,
    draw_with_restore,
    play,
)
from tests.simulation.scenarios.shrink import failure, shrunken

SEEDS_A_TASK = 50
MOST_SHOWN = 3

# What every site reads is parsed once for all of them, a tenth of the time. Were it changed
# by one who reads it, the others would read that: found, not hidden.
_parse_once = lru_cache(maxsize=1024)(parse_signed)

Drawn = Callable[[int], Scenario]
Played = Callable[[Scenario], object]

DRAWN: dict[tuple[bool, bool], Drawn] = {  # whether one lies, whether one's state goes back
    (False, False): draw,
    (True, False): draw_with_liar,
    (False, True): draw_with_restore,
    (True, True): draw_with_both,
}


def violations(seeds: range, drawn: Drawn = draw, played: Played = play) -> list[int]:
    """The seeds whose runs break an invariant."""
    found = []
    gc.disable()  # looking for dead worlds after each few hundred objects takes longer than a run
    with patch.object(signing, "parse_signed", _parse_once):
        for seed in seeds:
            try:
                played(drawn(seed))
            except AssertionError:
                found.append(seed)
    gc.enable()
    gc.collect()
    return found


def tasks(first: int, seeds: int) -> Iterator[range]:
    """The seeds in portions, one a task."""
    end = first + seeds
    for start in range(first, end, SEEDS_A_TASK):
        yield range(start, min(end, start + SEEDS_A_TASK))


def sweep(
    first: int, seeds: int, jobs: int, progress: Progress, drawn: Drawn, played: Played = play
) -> list[int]:
    """Play all seeds, ``jobs`` at a time; the seeds that failed, sorted."""
    bar = progress.add_task("runs", total=seeds)
    failed: list[int] = []
    if jobs == 1:
        for portion in tasks(first, seeds):
            failed += violations(portion, drawn, played)
            progress.advance(bar, len(portion))
        return failed
    with ProcessPoolExecutor(jobs) as pool:
        waiting: dict[Future[list[int]], int] = {}
        for portion in tasks(first, seeds):
            waiting[pool.submit(violations, portion, drawn, played)] = len(portion)
            if len(waiting) >= 4 * jobs:
                failed += _finished(waiting, progress, bar)
        while waiting:
            failed += _finished(waiting, progress, bar)
    return sorted(failed)


def _finished(waiting: dict[Future[list[int]], int], progress: Progress, bar: TaskID) -> list[int]:
    done, _ = wait(waiting, return_when=FIRST_COMPLETED)
    found = []
    for future in done:
        progress.advance(bar, waiting.pop(future))
        found += future.result()
    for seed in found:
        progress.console.print(f"violation at seed {seed}; the rest goes on")
    return found


def show(seed: int, drawn: Drawn = draw) -> None:
    """The smallest scenario like that of this seed, and what happens in it."""
    print(f"violation at seed {seed}; shrunken to:")
    smallest = shrunken(drawn(seed))
    print(smallest)
    print(failure(smallest), flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seeds", type=int, default=1000, help="how many runs")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--replay", type=int, metavar="SEED", help="one run, as it was drawn")
    parser.add_argument("--liars", action="store_true", help="one site of each run lies")
    parser.add_argument("--restores", action="store_true", help="a site's state goes back")
    asked = parser.parse_args(arguments)
    drawn = DRAWN[asked.liars, asked.restores]
    if asked.replay is not None:
        scenario = drawn(asked.replay)
        print(scenario)
        text = failure(scenario)
        print(text or "no violation")
        return 1 if text else 0
    began = time.monotonic()
    console = Console(stderr=True)
    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        failed = sweep(asked.first, asked.seeds, asked.jobs, progress, drawn)
    minutes = (time.monotonic() - began) / 60
    for seed in failed[:MOST_SHOWN]:
        show(seed, drawn)
    if len(failed) > MOST_SHOWN:
        print(f"more seeds that fail: {' '.join(map(str, failed[MOST_SHOWN:100]))}")
    print(f"{asked.seeds} runs, {len(failed)} violations, {asked.seeds / minutes:.0f} runs/min")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
