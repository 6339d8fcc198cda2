"""What a peer's bytes might do to native code: the worker ends, the daemon goes on.

No bytes are known that do such things to SEAL (docs/decisions/0010); so the jobs
here do them on purpose.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio

from crypto.quantize import CryptoError
from daemon.jobs.sums import ckks
from daemon.jobs.sums.integers import Hiding
from daemon.process.workers import Worker, WorkerCrashed
from tests.daemon.jobs.sums.proofs import check_of
from tests.daemon.process.jobs import MIB, crash, hang, limits, take_memory


@pytest_asyncio.fixture
async def worker() -> AsyncIterator[Worker]:
    worker = Worker("crypto", threads=1, patience_s=0.3)
    yield worker
    await worker.stop()


@pytest.mark.parametrize("how", [signal.SIGSEGV, signal.SIGABRT])
async def test_a_crash_names_the_sender_and_the_next_call_works(
    worker: Worker, how: signal.Signals
) -> None:
    before = await worker.run(os.getpid)
    with pytest.raises(WorkerCrashed, match="the crypto worker died over the update of beta"):
        await worker.run(crash, how, "beta")
    assert await worker.run(os.getpid) != before


@pytest.mark.slow
async def test_a_job_that_nobody_waits_for_and_never_ends_is_ended(
    worker: Worker, tmp_path: Path
) -> None:
    """An attempt that is given up cancels its calls; the next attempt must have the worker."""
    hanging = asyncio.create_task(worker.run(hang, tmp_path / "hangs"))
    while not (tmp_path / "hangs").exists():
        await asyncio.sleep(0.01)
    hanging.cancel()
    async with asyncio.timeout(60):
        assert await worker.run(abs, -3) == 3


async def test_a_job_that_nobody_waits_for_may_end_in_peace(worker: Worker) -> None:
    before = await worker.run(os.getpid)
    sleeping = asyncio.create_task(worker.run(time.sleep, 0.1))
    await asyncio.sleep(0.05)
    sleeping.cancel()
    assert await worker.run(os.getpid) == before


async def test_a_bomb_meets_the_bound_and_not_the_machines_memory(worker: Worker) -> None:
    worker.memory_bytes = 512 * MIB
    assert await worker.run(take_memory, 100, "beta") == 100 * MIB
    with pytest.raises(WorkerCrashed, match="ran out of its memory over the update of beta"):
        await worker.run(take_memory, 1000, "beta")
    assert await worker.run(limits) == (512 * MIB, 512 * MIB)  # a fresh one has it, too


@pytest.mark.slow
async def test_a_key_of_noughts_is_refused_and_holds_nobody_up(
    worker: Worker, tmp_path: Path
) -> None:
    """With two primes, nothing but noughts comes of it: compressible, and once for ever retried."""
    dealt = await worker.run(ckks.deal_key, 1, 0, 3, 12)
    dull = dealt.public[:14] + bytes(len(dealt.public) - 14)
    await worker.run(ckks.hold_context, 1, 1, dull, secret=False, contributors=3, bits=12)
    np.save(tmp_path / "update.npy", np.full(11, 0.01, np.float32))
    async with asyncio.timeout(60):
        with pytest.raises(CryptoError, match="too regular to be hidden"):
            await worker.run(
                ckks.encrypt_update,
                *(1, 1, tmp_path / "update.npy", (10,), Hiding(1.0, [0]), tmp_path / "update.bin"),
                check=check_of("beta", ["beta"]),
            )
