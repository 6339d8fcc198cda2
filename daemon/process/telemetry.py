"""What is measured of the process itself: its event loop's lag, its memory.

Lag is how late the event loop runs what is due; it is the daemon's promise that
arithmetic does not hold up the protocol.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import psutil

_SHORTEST_S = 1e-4
_STEPS_A_DECADE = 20  # a bucket is 12 % wide
_BUCKETS = 6 * _STEPS_A_DECADE  # 0.1 ms .. 100 s; longer ones fall into the last
_MOST_COUNTED_S = 60


@dataclass(frozen=True)
class Lag:
    """How late the event loop was, in milliseconds; p50 and p99 are exact to 12 %."""

    samples: int
    p50_ms: float
    p99_ms: float
    max_ms: float


class _Histogram:
    """Counts of lags in logarithmic buckets: as much memory after a year as at the start."""

    def __init__(self) -> None:
        self.counts = [0] * _BUCKETS
        self.longest_s = 0.0

    def add(self, lag_s: float) -> None:
        bucket = 0
        if lag_s > _SHORTEST_S:
            bucket = math.ceil(math.log10(lag_s / _SHORTEST_S) * _STEPS_A_DECADE)
        self.counts[min(bucket, _BUCKETS - 1)] += 1
        self.longest_s = max(self.longest_s, lag_s)


def _summary(histogram: _Histogram) -> Lag:
    counts, longest_s = histogram.counts, histogram.longest_s

    def quantile_ms(share: float) -> float:
        wanted, seen = share * sum(counts), 0
        for bucket, count in enumerate(counts):
            seen += count
            if count and seen >= wanted:
                upper_s = _SHORTEST_S * 10 ** (bucket / _STEPS_A_DECADE)
                last = bucket == _BUCKETS - 1
                return 1e3 * (longest_s if last else min(upper_s, longest_s))
        return 0.0

    return Lag(sum(counts), quantile_ms(0.50), quantile_ms(0.99), 1e3 * longest_s)


class LoopLag:
    """Samples how late the event loop wakes a sleeper, every 20 ms.

    A stall hides the samples that were due during it, so they are added as if
    they had been taken (Tene's correction for coordinated omission): a second
    of stall is fifty bad samples, as a message arriving then would have felt it.
    """

    def __init__(
        self, interval_s: float = 0.02, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._interval_s = interval_s
        self._clock = clock
        self._ever = _Histogram()

    async def run(self) -> None:
        """Sample until cancelled."""
        while True:
            due = self._clock() + self._interval_s
            await asyncio.sleep(self._interval_s)
            self.record(max(0.0, self._clock() - due))

    def record(self, lag_s: float) -> None:
        """Count a lag, and those of the samples that it kept from being taken."""
        # Of a stall without end a minute is counted: it stands out by then.
        for _ in range(int(_MOST_COUNTED_S / self._interval_s)):
            self._ever.add(lag_s)
            lag_s -= self._interval_s
            if lag_s <= 0:
                break

    def since_start(self) -> Lag:
        """The lag since the daemon started."""
        return _summary(self._ever)


def resident_bytes(pids: Iterable[int]) -> int:
    """Resident memory of these processes together, in bytes; ended ones count nothing.

    A page that several have counts in each with its part (PSS in proc(5)), so once in all; in
    each whole where the kernel doesn't let us see that.
    """
    total = 0
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            try:
                total += process.memory_full_info().pss
            except psutil.AccessDenied:
                total += process.memory_info().rss
    return total
