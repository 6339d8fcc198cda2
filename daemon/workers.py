"""Worker processes: where arithmetic happens, so that the event loop never waits.

A `Worker` is one spawned process that runs one call at a time and keeps what it
loaded (an encoder, a round key) between calls. A function that runs in it is a
plain module-level function; it may call `report(...)` to send progress to the
daemon while it runs. A worker ends with its daemon, whatever kills that.

To load torch takes seconds, and several workers need it, some again and again. So
there may be one process more, which does nothing but import (`import_once`); a
worker is then forked from it and has what it needs at once.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

_progress: Connection | None = None
_reporting = threading.Lock()


class WorkerCrashed(Exception):
    """A worker process died (out of memory, a crash in native code, a kill)."""


def import_once(modules: Sequence[str], *, threads: int) -> None:
    """Begin to import ``modules`` for all workers of this process; returns at once.

    In a process of its own, which has one thread and no other work: to fork from it
    is safe, and what it has read is in memory once. It ends with the daemon.
    """
    multiprocessing.set_forkserver_preload(list(modules))
    before = dict(os.environ)
    os.environ.update(_thread_limits(threads))
    try:
        forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(before)


def report(item: Any) -> None:
    """Send a progress item to the daemon; outside a worker it does nothing."""
    if _progress is not None:
        with _reporting:
            _progress.send(item)


class Worker:
    """One process of its own for one kind of arithmetic.

    ``run`` calls queue up and are carried out in order. After a crash the next
    call starts a fresh process (what the old one had loaded is gone).
    """

    def __init__(self, name: str, *, threads: int, nice: int = 0, forked: bool = False) -> None:
        """``forked``: from the process that `import_once` has begun, not spawned."""
        self.name = name
        self._method = "forkserver" if forked else "spawn"
        self._threads = threads
        self._nice = nice
        self._pool: ProcessPoolExecutor | None = None
        self._last_used = time.monotonic()
        self._turn = asyncio.Lock()
        self._reader: Connection | None = None
        self._listener: Callable[[Any], None] | None = None

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
                return await self._call(function, *args, **kwargs)
            finally:
                self._listener = None

    async def _call(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        pool = self._pool or self._start()
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(pool, _invoke, function, args, kwargs)
        except BrokenProcessPool as error:
            await self.stop()
            raise WorkerCrashed(
                f"the {self.name} worker died (out of memory? see the system log); "
                "a fresh one starts with the next call"
            ) from error
        finally:
            self._last_used = time.monotonic()

    def _start(self) -> ProcessPoolExecutor:
        loop = asyncio.get_running_loop()
        context = multiprocessing.get_context(self._method)
        reader, writer = context.Pipe(duplex=False)
        self._pool = ProcessPoolExecutor(
            max_workers=1,
            mp_context=context,
            initializer=_initialise,
            initargs=(writer, self._threads, self._nice),
        )
        self._reader = reader
        threading.Thread(
            target=self._listen, args=(reader, loop), daemon=True, name=f"{self.name}-progress"
        ).start()
        return self._pool

    def _listen(self, reader: Connection, loop: asyncio.AbstractEventLoop) -> None:
        while True:
            try:
                item = reader.recv()
                loop.call_soon_threadsafe(self._deliver, item)
            except (EOFError, OSError, RuntimeError):  # worker or event loop is gone
                return

    def _deliver(self, item: Any) -> None:
        if self._listener is not None:
            self._listener(item)

    async def stop_when_idle(self, idle_s: float) -> None:
        """End the process, and free its memory, whenever it had nothing to do for so long."""
        while True:
            await asyncio.sleep(idle_s / 4)
            if time.monotonic() - self._last_used > idle_s and not self._turn.locked():
                await self.stop()

    async def stop(self) -> None:
        """End the process at once; a call under way fails with WorkerCrashed."""
        pool, self._pool = self._pool, None
        # Taken before anything is waited for: the next call may start a fresh process meanwhile.
        reader, self._reader = self._reader, None
        if pool is None:
            return
        for process in list((getattr(pool, "_processes", None) or {}).values()):
            process.kill()
        await asyncio.to_thread(pool.shutdown, wait=True, cancel_futures=True)
        if reader is not None:
            reader.close()


def _invoke(function: Callable[..., T], args: tuple[Any, ...], kwargs: dict[str, Any]) -> T:
    return function(*args, **kwargs)


def _initialise(progress: Connection, threads: int, nice: int) -> None:
    global _progress
    _progress = progress
    # Ctrl-C at a terminal reaches the whole group: the daemon decides, not we.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if nice:
        os.nice(nice)
    os.environ.update(_thread_limits(threads))
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_end_with, args=(parent,), daemon=True).start()


def _thread_limits(threads: int) -> dict[str, str]:
    """For the environment, before numpy or torch are imported: they read these once."""
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    return dict.fromkeys(names, str(threads)) | {"TOKENIZERS_PARALLELISM": "false"}


def _end_with(parent: Any) -> None:
    """Leave no orphan behind when the daemon is killed."""
    parent.join()
    os._exit(1)
