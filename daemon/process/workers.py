"""Worker processes: where arithmetic happens, so that the event loop never waits.

A `Worker` is one spawned process that runs one call at a time and keeps what it
loaded (an encoder, a round key) between calls. A function that runs in it is a
plain module-level function; it may call `report(...)` to send progress to the
daemon while it runs, and `ask(...)` for what only the daemon can find out (it has the
network, the worker has not). One that takes long asks `given_up()` now and then, or is told
by `when_given_up`, that nobody waits for it any more. A worker ends with its daemon,
whatever kills that.

To load torch takes seconds, and several workers need it, some again and again. So
there may be one process more, which does nothing but import (`import_once`); a
worker is then forked from it and has what it needs at once.

Native code that reads a peer's bytes runs here and nowhere else: should it crash,
hang or ask for all the memory there is, it is the worker that ends, the call
fails with `WorkerCrashed`, which says whose bytes it was over, and the next call
starts a fresh process.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import multiprocessing
import os
import resource
import signal
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.util import Finalize
from typing import Any, ParamSpec, TypeVar

from daemon.process import log
from daemon.process.temporary import TemporaryFolder, forget_left

P = ParamSpec("P")
T = TypeVar("T")

_LAST_REPORT_S = 5.0  # how long it is waited for once the result is here: it was sent before that

# A question reads all weights of the encoder, and spends less time on finding them.
_HUGE_PAGES = "glibc.malloc.hugetlb=1"

_call = 0  # in a worker: the number of what it carries out
_progress: Connection | None = None
_answers: Connection | None = None
_given_up = -1  # the number of the last that nobody waits for
_to_do_then: Callable[[], None] | None = None
_giving_up = threading.Lock()
_reporting = threading.Lock()
_asking = threading.Lock()


class WorkerCrashed(Exception):
    """A worker process died (out of memory, a crash in native code, a kill)."""


class WorkersRefused(Exception):
    """Worker processes can't be started as this machine is set up."""


class NobodyAnswers(Exception):
    """A job asked, and nobody waits for the job any more, or nobody ever answered questions."""


class GivenUp(Exception):
    """A job ends because nobody waits for it any more; nobody hears of that, either."""


@dataclass(frozen=True)
class _Question:
    item: Any


@dataclass(frozen=True)
class _Answer:
    """What was found out, or why that failed."""

    item: Any = None
    error: Exception | None = None


_NOBODY = _Answer(error=NobodyAnswers("nobody waits for this job any more"))


@dataclass(frozen=True)
class _Report:
    """Of the call of this number, as all that comes from its job."""

    call: int
    item: Any


@dataclass(frozen=True)
class _End:
    """Behind the last report of a call."""


def import_once(modules: Sequence[str], *, threads: int) -> None:
    """Begin to import ``modules`` for all workers of this process; returns at once.

    In a process of its own, which has one thread and no other work: to fork from it
    is safe, and what it has read is in memory once. It ends with the daemon.
    Raises WorkersRefused where its socket can't be made in the temporary folder.
    """
    multiprocessing.set_forkserver_preload(list(modules))
    before = dict(os.environ)
    os.environ.setdefault("GLIBC_TUNABLES", _HUGE_PAGES)
    # What outlives a killed daemon to tidy behind it must not write into its log.
    os.environ.setdefault("PYTHONWARNINGS", "ignore:resource_tracker")
    os.environ.update(_thread_limits(threads))
    try:
        _place_sockets()
        forkserver.ensure_running()
    except OSError as error:
        raise WorkersRefused(
            f"the worker processes' socket can't be made in the temporary folder ({error}): "
            "set TMPDIR to a folder that can be written and has a short name, e.g. /tmp"
        ) from error
    finally:
        os.environ.clear()
        os.environ.update(before)


def _place_sockets() -> None:
    """Have multiprocessing's sockets where the next start finds what a killed daemon left."""
    forget_left()
    config = vars(multiprocessing.current_process())["_config"]
    if not config.get("tempdir"):  # as multiprocessing.util.get_temp_dir keeps its own
        folder = TemporaryFolder()
        config["tempdir"] = str(folder.path)
        Finalize(None, folder.cleanup, exitpriority=-100)


_foreign: dict[Callable[..., Any], str] = {}


def reads(whose: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Say whose bytes a job reads, with its arguments by name: "the update of {site}".

    People read it when the worker dies over them.
    """

    def mark(job: Callable[P, T]) -> Callable[P, T]:
        _foreign[job] = whose
        return job

    return mark


def _over(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    whose = _foreign.get(function)
    if whose is None:
        return ""
    return f" over {whose.format(**inspect.signature(function).bind(*args, **kwargs).arguments)}"


def report(item: Any) -> None:
    """Send a progress item to the daemon; outside a worker it does nothing."""
    if _progress is not None:
        with _reporting:
            _progress.send(_Report(_call, item))


def ask(item: Any) -> Any:
    """Ask the daemon, and wait for its answer; what the answering raised is raised here.

    One question at a time; how long an answer may take is the answerer's to say. Raises
    NobodyAnswers when the job was not started by `Worker.run_asking`, or was given up.
    """
    if _progress is None or _answers is None:
        raise NobodyAnswers("there is no daemon to ask: this job does not run in its worker")
    with _asking:
        with _reporting:
            _progress.send(_Report(_call, _Question(item)))
        answer: _Answer = _answers.recv()
    if answer.error is not None:
        raise answer.error
    return answer.item


def given_up() -> bool:
    """Whether nobody waits for this job any more: it may raise `GivenUp`. Outside a worker: no."""
    return _given_up >= _call


@contextmanager
def when_given_up(act: Callable[[], None]) -> Iterator[None]:
    """Within the block ``act`` is called as soon as that is so, in another thread, or at once."""
    global _to_do_then
    with _giving_up:
        _to_do_then = act
        if given_up():
            act()
    try:
        yield
    finally:
        with _giving_up:
            _to_do_then = None


class Worker:
    """One process of its own for one kind of arithmetic.

    ``run`` calls queue up and are carried out in order. One that is cancelled while it waits
    is never begun; one under way is told so (`given_up`), and goes on if it does not ask. After
    a crash the next call starts a fresh process (what the old one had loaded is gone).

    ``patience_s``: how long a call waits for one that was cancelled and still
    runs; then the process is ended. None waits for as long as it takes.
    ``memory_bytes`` bounds the data of a process that is started from then on.
    """

    def __init__(
        self,
        name: str,
        *,
        threads: int,
        nice: int = 0,
        forked: bool = False,
        patience_s: float | None = None,
    ) -> None:
        """``forked``: from the process that `import_once` has begun, not spawned."""
        self.name = name
        self.memory_bytes: int | None = None
        self._method = "forkserver" if forked else "spawn"
        self._threads = threads
        self._nice = nice
        self._patience_s = patience_s
        self._under_way: Future[Any] | None = None
        self._pool: ProcessPoolExecutor | None = None
        self._last_used = time.monotonic()
        self._turn = asyncio.Lock()
        self._gives_up: Connection | None = None  # tells the process which call is given up
        self._ends: tuple[Connection, ...] = ()  # of its pipes, here; who listens has one more
        self._listener: Callable[[Any], None] | None = None
        self._whose: asyncio.Task[Any] | None = None  # whose job is under way
        self._answerer: Callable[[Any], Awaitable[Any]] | None = None
        self._answering: set[asyncio.Task[_Answer]] = set()
        self._calls = 0
        self._all_heard = asyncio.Event()  # what the last call has reported

    @property
    def pid(self) -> int | None:
        """Process id of the worker, or None while none is running."""
        processes = getattr(self._pool, "_processes", None) or {}
        return next(iter(processes), None)

    async def run(
        self,
        function: Callable[P, T],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T:
        """Run ``function`` in the worker; its exceptions arrive here as they are."""
        async with self._turn:
            return await self._call(function, *args, **kwargs)

    async def run_as_due(
        self,
        function: Callable[..., T],
        given: Callable[[], Sequence[Any]],
        listener: Callable[[Any], None] | None = None,
    ) -> T:
        """As `run`; what the job is given is looked up when its turn has come.

        ``given`` may raise: then nothing is run. ``listener`` as in `run_reporting`.
        """
        async with self._turn:
            await self._until_free()
            if listener is None:
                return await self._call(function, *given())
            self._listener = listener
            try:
                return await self._heard(self._call(function, *given()))
            finally:
                self._listener = None

    async def run_reporting(
        self,
        listener: Callable[[Any], None],
        function: Callable[P, T],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T:
        """As `run`; ``listener`` is called on the event loop with each reported item."""
        async with self._turn:
            self._listener = listener
            try:
                return await self._heard(self._call(function, *args, **kwargs))
            finally:
                self._listener = None

    async def run_asking(
        self,
        listener: Callable[[Any], None],
        answerer: Callable[[Any], Awaitable[Any]],
        function: Callable[P, T],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T:
        """As `run_reporting`; ``answerer`` is awaited for each item that the job asks with.

        When this call is cancelled, what the job asks next fails, and so the job ends.
        """
        async with self._turn:
            await self._until_free()  # or a job that was given up would be answered, and go on
            self._listener, self._answerer = listener, answerer
            try:
                return await self._heard(self._call(function, *args, **kwargs))
            finally:
                self._listener = self._answerer = None
                for task in self._answering:
                    task.cancel()

    async def _heard(self, call: Coroutine[Any, Any, T]) -> T:
        """A call to its end, and all its reports: they come by another pipe than its result."""
        result = await call
        with suppress(TimeoutError):  # the process has been ended meanwhile
            async with asyncio.timeout(_LAST_REPORT_S):
                await self._all_heard.wait()
        return result

    async def _call(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        await self._until_free()
        try:
            pool = self._pool or await self._started()
            self._calls += 1
            self._all_heard.clear()
            begun = pool.submit(_invoke, self._calls, function, args, kwargs)
        except (EOFError, OSError, RuntimeError) as error:  # a broken or ended pool is the last
            await self.stop()  # or what is queued would be carried out with the next call
            raise WorkerCrashed(
                f"the {self.name} worker could not be started ({error or type(error).__name__}); "
                "the next call tries again"
            ) from error
        self._under_way, self._whose = begun, asyncio.current_task()
        try:
            return await asyncio.wrap_future(begun)
        except asyncio.CancelledError:
            self._give_up_call()
            raise
        except BrokenProcessPool as error:
            await self.stop()
            raise WorkerCrashed(
                f"the {self.name} worker died{_over(function, args, kwargs)} (out of memory? see "
                "the system log); a fresh one starts with the next call"
            ) from error
        except MemoryError as error:
            await self.stop()  # nobody knows what it left half done
            raise WorkerCrashed(
                f"the {self.name} worker ran out of its memory{_over(function, args, kwargs)}; "
                "a fresh one starts with the next call"
            ) from error
        finally:
            self._whose, self._last_used = None, time.monotonic()

    def _give_up_call(self) -> None:
        """Tell the job under way; a few bytes, which a thread of the process takes at once."""
        if self._gives_up is not None:
            with suppress(OSError):  # it is gone
                self._gives_up.send(self._calls)

    async def _until_free(self) -> None:
        """A call that nobody waits for any more may still run, and may never end."""
        if self._under_way is None or self._under_way.done():
            return
        loop, free = asyncio.get_running_loop(), asyncio.Event()
        self._under_way.add_done_callback(lambda _done: loop.call_soon_threadsafe(free.set))
        try:
            async with asyncio.timeout(self._patience_s):
                await free.wait()
        except TimeoutError:
            await self.stop()

    async def _started(self) -> ProcessPoolExecutor:
        """A fresh process. Raises what starting it raises, RuntimeError when it is stopped.

        The first job starts it, and waits until what it is forked from has imported: in a
        thread, for that may take seconds.
        """
        pool = self._start()
        await asyncio.to_thread(pool.submit, _nothing)
        if self._pool is not pool:
            raise RuntimeError("it was stopped")
        return pool

    def _start(self) -> ProcessPoolExecutor:
        loop = asyncio.get_running_loop()
        context = multiprocessing.get_context(self._method)
        reader, writer = context.Pipe(duplex=False)
        answers, replies = context.Pipe(duplex=False)
        told, self._gives_up = context.Pipe(duplex=False)
        self._pool = ProcessPoolExecutor(
            max_workers=1,
            mp_context=context,
            initializer=_initialise,
            initargs=(
                *(writer, answers, told),
                *(self._threads, self._nice, self.memory_bytes, log.chosen),
            ),
        )
        self._ends = (writer, answers, replies, told, self._gives_up)
        threading.Thread(
            target=self._listen,
            args=(reader, replies, loop),
            daemon=True,
            name=f"{self.name}-progress",
        ).start()
        return self._pool

    def _listen(
        self, reader: Connection, replies: Connection, loop: asyncio.AbstractEventLoop
    ) -> None:
        # The event loop or both ends of who writes are gone; only who reads closes its end.
        with reader, suppress(EOFError, OSError, RuntimeError):
            while True:
                report = reader.recv()
                if isinstance(report.item, _Question):
                    loop.call_soon_threadsafe(self._begin_to_answer, report.item, replies)
                else:
                    loop.call_soon_threadsafe(self._deliver, report)

    def _deliver(self, report: _Report) -> None:
        if report.call != self._calls:  # of one that failed or was given up: nobody listens
            return
        if isinstance(report.item, _End):
            self._all_heard.set()
        elif self._listener is not None:
            self._listener(report.item)

    def _begin_to_answer(self, question: _Question, replies: Connection) -> None:
        task = asyncio.create_task(self._answer(question), name=f"{self.name}-answer")
        self._answering.add(task)
        task.add_done_callback(functools.partial(self._reply, replies))

    async def _answer(self, question: _Question) -> _Answer:
        try:
            if self._answerer is not None:
                return _Answer(await self._answerer(question.item))
        except Exception as error:
            return _Answer(error=error)
        return _NOBODY

    def _reply(self, replies: Connection, answering: asyncio.Task[_Answer]) -> None:
        """Whatever happens the worker gets one answer: it waits for it, and for ever."""
        self._answering.discard(answering)
        answer = _NOBODY if answering.cancelled() else answering.result()
        # In a thread: a pipe takes some 64 KiB before the worker has read of it.
        asyncio.get_running_loop().run_in_executor(None, _send, replies, answer)

    async def stop_when_idle(self, idle_s: float) -> None:
        """End the process, and free its memory, whenever it had nothing to do for so long."""
        while True:
            await asyncio.sleep(idle_s / 4)
            if time.monotonic() - self._last_used > idle_s and not self._turn.locked():
                await self.stop()

    async def give_up(self, call: asyncio.Task[Any]) -> None:
        """Cancel a call, and end the process if its job has begun.

        Others wait behind it. Where another's job is under way that goes on.
        """
        begun = self._whose is call
        call.cancel()
        if begun:
            await self.stop()
        await asyncio.wait([call])

    async def stop(self) -> None:
        """End the process at once; a call under way fails with WorkerCrashed."""
        pool, self._pool = self._pool, None
        # Taken before anything is waited for: the next call may start a fresh process meanwhile.
        ends, self._ends = self._ends, ()
        self._under_way = self._gives_up = None
        if pool is None:
            return
        for process in list((getattr(pool, "_processes", None) or {}).values()):
            process.kill()
        await asyncio.to_thread(pool.shutdown, wait=True, cancel_futures=True)
        for end in ends:  # who reads or writes at the other end of one is told so
            end.close()


def _send(replies: Connection, answer: _Answer) -> None:
    try:
        replies.send(answer)
    except OSError:
        return  # the worker is gone
    except Exception as error:  # what can't be pickled is not sent in part
        replies.send(_Answer(error=TypeError(f"the answer can't be sent: {error}")))


def _nothing() -> None:
    """What a process does first, so that it is started."""


def _invoke(
    number: int, function: Callable[..., T], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> T:
    global _call
    _call = number
    result = function(*args, **kwargs)
    report(_End())
    return result


def _initialise(
    progress: Connection,
    answers: Connection,
    told: Connection,
    threads: int,
    nice: int,
    memory_bytes: int | None,
    logging: tuple[log.Level, log.Format],
) -> None:
    global _progress, _answers
    _progress, _answers = progress, answers
    log.configure_logging(*logging)
    if memory_bytes is not None:
        # Of data and not of addresses: libraries reserve far more of these than they use.
        resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, memory_bytes))
    # Ctrl-C at a terminal reaches the whole group: the daemon decides, not we.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if nice:
        os.nice(nice)
    os.environ.update(_thread_limits(threads))
    threading.Thread(target=_hear, args=(told,), daemon=True).start()
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_end_with, args=(parent,), daemon=True).start()


def _hear(told: Connection) -> None:
    """That nobody waits for a call any more, as soon as it is said."""
    global _given_up
    with suppress(EOFError, OSError):
        while True:
            number = told.recv()
            with _giving_up:
                _given_up = number
                if given_up() and _to_do_then is not None:
                    _to_do_then()


def _thread_limits(threads: int) -> dict[str, str]:
    """For the environment, before numpy or torch are imported: they read these once."""
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    return dict.fromkeys(names, str(threads)) | {"TOKENIZERS_PARALLELISM": "false"}


def _end_with(parent: Any) -> None:
    """Leave no orphan behind when the daemon is killed."""
    parent.join()
    os._exit(1)
