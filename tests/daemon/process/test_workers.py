"""Worker processes: one kind of arithmetic each, ended and started again as attempts go."""

from __future__ import annotations

import asyncio
import io
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import AsyncIterator, Iterator
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import psutil
import pytest
import structlog

from daemon.process import log
from daemon.process.workers import NobodyAnswers, Worker, WorkerCrashed, ask, import_once
from tests.daemon.process.jobs import (
    asking,
    asking_after_a_failure,
    asking_until_nobody_answers,
    asking_when_let,
    reporting,
    reporting_and_failing,
    reporting_and_sleeping,
    warn,
    whereabouts,
)
from tests.support.lines import until

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module", autouse=True)
def left_as_it_was() -> Iterator[None]:
    """Others want more than fractions in the process that their workers are forked from."""
    server: Any = forkserver._forkserver
    before = server._forkserver_pid
    yield
    if before is None:
        server._stop()


@pytest.fixture(params=[False, True], ids=["spawned", "forked"])
async def worker(request: pytest.FixtureRequest) -> AsyncIterator[Worker]:
    import_once(["fractions"], threads=1)
    worker = Worker("arithmetic", threads=1, forked=request.param)
    yield worker
    await worker.stop()


async def test_who_listens_to_a_worker_ends_with_it(worker: Worker) -> None:
    """Whoever closed its pipe under its hands would have it read what another opens next."""
    await worker.run(os.getpid)
    listening = {each for each in threading.enumerate() if each.name == "arithmetic-progress"}
    assert len(listening) == 1
    await worker.stop()
    await until(lambda: not any(each.is_alive() for each in listening))


@pytest.mark.slow
async def test_reports_of_a_call_that_failed_reach_no_other(worker: Worker) -> None:
    with pytest.raises(ValueError, match="after many reports"):
        await worker.run_reporting(lambda _: None, reporting_and_failing, 20_000)
    seen: list[int] = []
    await worker.run_reporting(seen.append, reporting, -1)
    assert seen == [-1]


async def test_an_answer_that_cannot_be_sent_is_told_to_who_asked(worker: Worker) -> None:
    async def answers(_item: object) -> object:
        return lambda: None

    with pytest.raises(TypeError, match="the answer can't be sent"):
        await worker.run_asking(lambda _: None, answers, asking, 1, 1)
    assert await worker.run(os.getpid)


async def test_a_question_of_the_moment_it_is_given_up_is_answered(worker: Worker) -> None:
    """The job asks, and its call is cancelled before anybody has begun to answer."""

    async def answers(_item: object) -> object:
        raise AssertionError("nobody is to answer")

    call = asyncio.create_task(
        worker.run_asking(lambda _: None, answers, asking_until_nobody_answers)
    )
    begin = worker._begin_to_answer

    def begin_and_give_up(*which: Any) -> None:
        begin(*which)
        call.cancel()

    worker._begin_to_answer = begin_and_give_up  # type: ignore[method-assign,assignment]
    with pytest.raises(asyncio.CancelledError):
        await call
    assert await worker.run(os.getpid)


async def test_who_forks_workers_may_be_killed() -> None:
    import_once(["fractions"], threads=1)
    worker = Worker("arithmetic", threads=1, forked=True)
    try:
        first = await worker.run(os.getpid)
        server = psutil.Process(psutil.Process(first).ppid())
        server.kill()
        await until(lambda: not server.is_running() or server.status() == psutil.STATUS_ZOMBIE)
        await worker.stop()
        assert await worker.run(os.getpid) != first
    finally:
        await worker.stop()


@pytest.fixture
def place() -> Iterator[Path]:
    """With a short name, as sockets need."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def test_what_a_killed_daemon_leaves_is_gone_at_the_next_start(place: Path) -> None:
    program = """
import asyncio, os, sys
from daemon.process.temporary import TemporaryFolder
from daemon.process.workers import Worker, import_once

async def main():
    import_once(["fractions"], threads=1)
    worker = Worker("arithmetic", threads=1, forked=True)
    await worker.run(os.getpid)
    if sys.argv[1:]:
        kept = TemporaryFolder()
        os.kill(os.getpid(), 9)
    print(len(os.listdir(os.environ["TMPDIR"])))
    await worker.stop()

asyncio.run(main())
"""

    def ran(*killed: str) -> tuple[str, str]:
        env = {**os.environ, "TMPDIR": str(place), "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-c", program, *killed]
        ended = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        return ended.stdout, ended.stderr  # to the end of the last process that has them

    assert ran("killed") == ("", ""), "what tidies behind it says nothing in the log"
    assert len([*place.iterdir()]) == 2
    assert ran() == ("1\n", "")
    assert [*place.iterdir()] == []


async def test_a_worker_that_is_started_while_the_old_one_ends_reports(worker: Worker) -> None:
    """An attempt is given up, and the next one trains at once."""
    seen: list[int] = []

    async def heard(item: int) -> int:
        """Reports until one is heard: what arrives when its call is over is for nobody."""
        while True:
            process = await worker.run_reporting(seen.append, reporting, item)
            if item in seen:
                return process

    old = await heard(1)
    ending = asyncio.create_task(worker.stop())
    await asyncio.sleep(0)
    new = await heard(2)
    await ending
    assert await heard(3) == new != old


class _Deaf(Worker):
    """It hears nothing until it has ears."""

    ears = threading.Event()

    def _listen(self, *pipes: Any) -> None:
        self.ears.wait(60)
        super()._listen(*pipes)


async def test_what_a_call_reports_is_heard_before_its_result() -> None:
    worker, seen = _Deaf("arithmetic", threads=1), list[int]()
    try:
        call = asyncio.create_task(worker.run_reporting(seen.append, reporting, 1))
        while worker._under_way is None or not worker._under_way.done():
            await asyncio.sleep(0.01)
        worker.ears.set()
        assert await call == worker.pid
    finally:
        worker.ears.set()
        await worker.stop()
    assert seen == [1]


@pytest.mark.slow
async def test_a_call_whose_worker_is_ended_fails_and_the_next_one_works(worker: Worker) -> None:
    old = await worker.run(reporting, 1)
    begun = asyncio.Event()
    call = asyncio.create_task(worker.run_reporting(lambda _: begun.set(), reporting_and_sleeping))
    await begun.wait()
    await worker.stop()
    with pytest.raises(WorkerCrashed):
        await call
    assert not psutil.pid_exists(old)
    assert await worker.run(reporting, 2) != old


def test_a_temporary_folder_with_a_long_name_is_refused(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    began = subprocess.run(
        [
            sys.executable,
            "-c",
            "from daemon.process import workers as w; w.import_once([], threads=1)",
        ],
        env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(deep)},
        capture_output=True,
        text=True,
    )
    assert "WorkersRefused" in began.stderr
    assert "set TMPDIR" in began.stderr


SLOW_IMPORT = """
import pathlib, time

for _ in range(600):
    if pathlib.Path("the-loop-goes-on").exists():
        pathlib.Path("imported").touch()
        break
    time.sleep(0.05)
"""
MEANWHILE = """
import asyncio, os, pathlib
from daemon.process.workers import Worker, import_once

async def main():
    import_once(["slow_import"], threads=1)
    workers = [Worker(name, threads=1, forked=True) for name in ("one", "other")]
    calls = [asyncio.create_task(worker.run(os.getpid)) for worker in workers]
    await asyncio.sleep(0.1)
    pathlib.Path("the-loop-goes-on").touch()
    await asyncio.gather(*calls)
    for worker in workers:
        await worker.stop()

if __name__ == "__main__":
    asyncio.run(main())
"""


@pytest.mark.slow
def test_the_event_loop_goes_on_while_workers_import(tmp_path: Path) -> None:
    """Their import ends once the loop has done something, or gives up after half a minute."""
    (tmp_path / "slow_import.py").write_text(SLOW_IMPORT, encoding="utf-8")
    (tmp_path / "meanwhile.py").write_text(MEANWHILE, encoding="utf-8")
    subprocess.run(
        [sys.executable, "meanwhile.py"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"},
        check=True,
        timeout=60,
    )
    assert (tmp_path / "imported").exists()


async def test_a_forked_worker_has_what_was_imported_once_for_all() -> None:
    import_once(["fractions"], threads=1)
    workers = [Worker(name, threads=1, forked=True) for name in ("one", "other")]
    try:
        one, other = [await worker.run(whereabouts) for worker in workers]
    finally:
        for worker in workers:
            await worker.stop()
    assert one == other
    imported, limit, parent = one
    assert imported
    assert limit == "1"
    assert psutil.Process(parent).ppid() == os.getpid()
    assert psutil.Process(parent).num_threads() == 1, "no thread is lost when it forks"


MEMORY = """
import asyncio, os
from daemon.process.workers import Worker, import_once

async def main():
    import_once([], threads=1)
    worker = Worker("arithmetic", threads=1, forked=True)
    print(await worker.run(os.getenv, "GLIBC_TUNABLES"))
    await worker.stop()

if __name__ == "__main__":
    asyncio.run(main())
"""


@pytest.mark.slow
@pytest.mark.parametrize("chosen", ["", "glibc.malloc.tcache_count=1"])
def test_memory_is_asked_for_in_huge_pages_unless_the_operator_chose(
    tmp_path: Path, chosen: str
) -> None:
    (tmp_path / "memory.py").write_text(MEMORY, encoding="utf-8")
    env = {name: value for name, value in os.environ.items() if name != "GLIBC_TUNABLES"}
    env |= {"PYTHONPATH": str(ROOT)} | ({"GLIBC_TUNABLES": chosen} if chosen else {})
    told = subprocess.run(
        [sys.executable, "memory.py"], cwd=tmp_path, env=env, stdout=subprocess.PIPE, check=True
    )
    assert told.stdout.decode().strip() == (chosen or "glibc.malloc.hugetlb=1")


async def test_a_worker_logs_as_its_daemon_does(capfd: pytest.CaptureFixture[str]) -> None:
    before = log.chosen
    log.configure_logging("warning", "json", io.StringIO())
    worker = Worker("arithmetic", threads=1)
    try:
        await worker.run(warn, "the disk is slow")
    finally:
        await worker.stop()
        log.chosen = before
        structlog.reset_defaults()
    [line] = [one for one in capfd.readouterr().err.splitlines() if "slow" in one]
    assert json.loads(line)["event"] == "the disk is slow"


# ---- a job that asks ------------------------------------------------------------------


async def test_answers_larger_than_a_pipe_holds_come_in_order(worker: Worker) -> None:
    sizes: list[int] = []

    async def answerer(item: bytes) -> bytes:
        sizes.append(len(item))
        await asyncio.sleep(0)
        return bytes((1 << 20) + len(sizes))

    found = await worker.run_asking(lambda _: None, answerer, asking, 3, 1 << 20)
    assert found == [(1 << 20) + n for n in (1, 2, 3)]
    assert sizes == [1 << 20] * 3


async def test_what_answering_raises_is_raised_where_it_was_asked(worker: Worker) -> None:
    async def answerer(item: str) -> str:
        if item == "first":
            raise ValueError("no such thing")
        return item

    told = await worker.run_asking(lambda _: None, answerer, asking_after_a_failure)
    assert told == "no such thing, then second"


async def test_who_asks_in_a_job_that_was_not_started_to_ask_is_told(worker: Worker) -> None:
    assert "nobody waits" in await worker.run(asking_until_nobody_answers)
    with pytest.raises(NobodyAnswers, match="no daemon"):
        ask("outside a worker")


async def test_a_job_that_is_given_up_ends_at_its_next_question(worker: Worker) -> None:
    """Also when it is given up while somebody is looking for the answer."""
    asked = asyncio.Event()

    async def never(_item: str) -> None:
        asked.set()
        await asyncio.Event().wait()

    call = asyncio.create_task(
        worker.run_asking(lambda _: None, never, asking_until_nobody_answers)
    )
    await asked.wait()
    before = worker.pid
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call

    async def answers(_item: bytes) -> bytes:
        return b"yes"

    async with asyncio.timeout(20):  # and is not kept alive by the answers to the next one
        assert await worker.run_asking(lambda _: None, answers, asking, 1, 1) == [3]
        assert await worker.run(reporting, 1) == before  # the same process, free again


async def test_a_job_that_is_given_up_is_not_answered_by_the_next_one(
    worker: Worker, tmp_path: Path
) -> None:
    """It asks nothing until the next call has its turn."""
    gate, begun, asked = tmp_path / "gate", asyncio.Event(), list[object]()
    os.mkfifo(gate)

    async def answers(item: object) -> object:
        asked.append(item)
        if item != bytes(1):
            raise ValueError("nobody is to answer")
        return b"yes"

    old = asyncio.create_task(
        worker.run_asking(lambda _: begun.set(), answers, asking_when_let, gate)
    )
    await begun.wait()
    old.cancel()
    await asyncio.wait([old])
    new = asyncio.create_task(worker.run_asking(lambda _: None, answers, asking, 1, 1))
    await asyncio.sleep(0)  # it has its turn
    await asyncio.to_thread(gate.write_bytes, b"")
    assert await new == [3]
    assert asked == [bytes(1)]


async def test_who_gives_up_while_it_waits_ends_nobody_elses_job(worker: Worker) -> None:
    begun, answered = asyncio.Event(), asyncio.Event()

    async def answer(_item: bytes) -> bytes:
        begun.set()
        await answered.wait()
        return b"yes"

    others = asyncio.create_task(worker.run_asking(lambda _: None, answer, asking, 1, 1))
    await begun.wait()
    ours = asyncio.create_task(worker.run_reporting(lambda _: None, reporting, 1))
    await asyncio.sleep(0)  # it waits for its turn
    await worker.give_up(ours)
    assert ours.cancelled()
    answered.set()
    assert await others == [3]


async def test_a_job_that_is_given_up_does_not_keep_the_next_one_waiting(worker: Worker) -> None:
    begun = asyncio.Event()
    endless = asyncio.create_task(
        worker.run_reporting(lambda _: begun.set(), reporting_and_sleeping)
    )
    await begun.wait()
    async with asyncio.timeout(60):
        await worker.give_up(endless)
        assert endless.cancelled()
        assert await worker.run(reporting, 1)


async def test_a_worker_that_dies_while_it_asks_fails_its_call_alone(worker: Worker) -> None:
    async def ends_it(_item: bytes) -> bytes:
        os.kill(worker.pid or 0, 9)
        return bytes(1 << 20)

    with pytest.raises(WorkerCrashed):
        await worker.run_asking(lambda _: None, ends_it, asking, 1, 1)
    assert await worker.run(reporting, 1)
