"""Memory of a coordinator with 32 contributors, beside one update: it should be two at most.

In `ckks` mode the jobs of the crypto worker, in a fresh worker as the daemon starts
it: the coordinator encrypts its own update, adds that and 31 uploads of key holders,
and writes the sum. Under masks a fresh process adds 32 uploads and opens the sum,
with nobody gone, and with as many gone as may be. Uploads are files, as they are in
the daemon; they are made in other processes.

What is measured is how far resident memory rises above what it was before the first
job, at its peak (VmHWM, set back by /proc/self/clear_refs; what the allocator held
free is handed back before, so that nothing hides in it). The control is one update:
the coordinator's own, which is as long as the sum. Those of key holders have half the
bytes in `ckks` mode: a seed stands for their other half, which the sum can't do without.

    python -m tests.benchmarks.bench_memory [--json]
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import json
import multiprocessing
import sys
import tempfile
from collections.abc import Awaitable, Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from crypto.arrays import Int32
from crypto.ckks.sum_proof import Check
from crypto.masking.coordinator import MaskedSum, Unmasking
from crypto.masking.roster import Roster
from crypto.masking.site import Attendance, OpenedShares
from crypto.quantize import CryptoError
from daemon.jobs.sums import ckks
from daemon.jobs.sums.integers import Hiding
from daemon.process.workers import Worker
from tests.crypto.masking.masked import Crowd, terms

VALUES = 1_200_000
SITES = 32
BITS = (16, 8)
SIZES = [VALUES]
AT = (1, 0)
MIB = 2**20

Say = Callable[[str], None]


def figures(say: Say = lambda _: None) -> list[dict[str, Any]]:
    """One row a figure, in MiB; the ratio is memory over one update (2 is the most)."""
    rows = []
    for bits in BITS:
        with tempfile.TemporaryDirectory(prefix="hanse-bench-") as folder:
            rows += asyncio.run(_encrypted(Path(folder), bits, say))
        for gone in (0, (SITES - 1) // 2):
            say(f"{SITES} masked updates of {bits} bits, {gone} dropouts")
            rows += _masked(bits, gone)
    return rows


def _row(name: str, bits: int, value: float, update: float, sent: float) -> dict[str, Any]:
    return {
        "name": f"coordinator, K = {SITES}, 1.2 M values, {bits} bits, {name}",
        "value": round(value / MIB, 3),
        "unit": "MiB",
        "control": "one update as the coordinator makes it",
        "control_value": round(update / MIB, 3),
        "ratio": round(value / update, 3),
        "upload_value": round(sent / MIB, 3),
    }


# ---- ckks ----------------------------------------------------------------------------


async def _encrypted(folder: Path, bits: int, say: Say) -> list[dict[str, Any]]:
    dealer, coordinator = Worker("crypto", threads=1), Worker("crypto", threads=1)
    try:
        key = await dealer.run(ckks.deal_key, *AT, SITES, bits)
        uploads = {}
        for number in range(SITES - 1):
            say(f"encrypted update {number + 1} of {SITES - 1}, {bits} bits")
            uploads[f"s{number:02}"] = path = folder / f"s{number:02}"
            sent = await dealer.run(_make_update, path, number + 1)
        await dealer.stop()
        say(f"adding {SITES} encrypted updates of {bits} bits")
        await coordinator.run(ckks.warm_up, SITES, bits)
        await coordinator.run(
            ckks.hold_context, *AT, key.public, secret=False, contributors=SITES, bits=bits
        )
        await coordinator.run(ckks.start_sum, *AT, SIZES, _check("own"))
        own = folder / "own"
        encrypting, update = await _growth(
            coordinator, lambda: coordinator.run(_make_update, own, 0)
        )

        async def add_all() -> int:
            await coordinator.run(ckks.add_update, *AT, "own", own)
            for site, path in uploads.items():
                await coordinator.run(ckks.add_update, *AT, site, path)
            written = await coordinator.run(ckks.finish_sum, *AT, folder / "sum")
            return written.size

        adding, _ = await _growth(coordinator, add_all)
    finally:
        await dealer.stop()
        await coordinator.stop()
    return [
        _row("ckks: encrypting its own update", bits, encrypting, update, sent),
        _row("ckks: adding all updates, writing the sum", bits, adding, update, sent),
    ]


def _make_update(path: Path, seed: int) -> int:
    """A site's update of its own, encrypted as it is sent; its bytes. Runs in a worker."""
    plain = path.with_suffix(".npy")
    vector = np.random.default_rng(seed).uniform(-1, 1, VALUES + 1).astype(np.float32)
    np.save(plain, np.abs(vector, out=vector), allow_pickle=False)
    del vector
    arguments = (*AT, plain, SIZES, Hiding(1 / SITES, [0]), path)
    blob = ckks.encrypt_update(*arguments, check=_check(path.name))
    plain.unlink()
    return blob.size


def _check(site: str) -> Check:
    holders = tuple(f"s{number:02}" for number in range(SITES - 1))
    return Check(site, "own", holders, bytes(32))


async def _growth(worker: Worker, work: Callable[[], Awaitable[int]]) -> tuple[int, int]:
    """By how many bytes the worker grew at the most, and what the work returned."""
    before = await worker.run(_settle)
    result = await work()
    return await worker.run(_peak) - before, result


# ---- masking --------------------------------------------------------------------------


def _masked(bits: int, gone: int) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory(prefix="hanse-bench-") as folder:
        roster, opened = _apart(_sites, Path(folder), bits, gone)
        adding, finishing = _apart(_sum_up, Path(folder), roster, opened)
    update = roster.terms.ring.size(VALUES)
    at = f"masking, {gone} dropouts"
    return [
        _row(f"{at}: adding all updates", bits, adding, update, update),
        _row(f"{at}: adding all updates, opening the sum", bits, finishing, update, update),
    ]


def _sites(folder: Path, bits: int, gone: int) -> tuple[Roster, list[OpenedShares]]:
    """All that sites do: their masked inputs as files, named as they are; the shares."""
    crowd = Crowd(terms(SITES, bits=bits, values=VALUES))
    roster = crowd.advertise(crowd.terms.sites)
    crowd.receive(crowd.deal(roster.sites), roster.sites)
    limit, outcome = crowd.terms.ring.limit, Attendance(roster.sites[gone:], roster.sites[:gone])
    for number, site in enumerate(outcome.survivors):
        words = crowd.contributors[site].mask(_input(number, limit))
        (folder / site).write_bytes(words.tobytes())
    return roster, [crowd.contributors[site].open(outcome) for site in outcome.survivors]


def _input(number: int, limit: int) -> Int32:
    chance = np.random.default_rng(number)
    return chance.integers(-limit, limit, VALUES, dtype=np.int32, endpoint=True)


def _sum_up(folder: Path, roster: Roster, opened: list[OpenedShares]) -> tuple[int, int]:
    """All of the coordinator; its growth until all are added, and until it has opened the sum."""
    before = _settle()
    total = MaskedSum(roster, roster.sites)
    for site in (one.site for one in opened):
        with (folder / site).open("rb") as file:
            total.add_from(site, file)
    adding = _peak() - before
    unmasking = Unmasking(roster, *total.close())
    for one in opened:
        unmasking.take(one)
    integers = unmasking.finish()
    finishing = _peak() - before
    limit = roster.terms.ring.limit
    expected = sum(_input(number, limit).astype(np.int64) for number in range(len(opened)))
    if not np.array_equal(integers, expected):
        raise CryptoError("the sum is not exact: these figures mean nothing")
    return adding, finishing


def _apart(job: Callable[..., Any], *arguments: Any) -> Any:
    """The job's result, from a fresh process."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(job, *arguments).result()


# ---- memory of this process -------------------------------------------------------------


def _settle() -> int:
    """Bytes resident now, with nothing left to hide in; the peak counts from here."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _peak() -> int:
    return _status("VmHWM")


def _status(field: str) -> int:
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if field in x)
    return int(line.split()[1]) * 1024


def main() -> None:
    """Print the figures, a line each or as JSON."""
    for row in figures(lambda text: print(text, file=sys.stderr, flush=True)):
        if "--json" in sys.argv[1:]:
            print(json.dumps(row))
            continue
        print(
            f"{row['name']:90} {row['value']:7.2f} MiB, one update {row['control_value']:6.2f} MiB"
            f": {row['ratio']:5.2f}x (as key holders send it {row['upload_value']:6.2f} MiB)"
        )


if __name__ == "__main__":
    main()
