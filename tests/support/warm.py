"""One process that has imported what daemons need; tests' daemons are forked from it.

    process = await started("tests.live.tapped_fedd", ["--config", "fedd.toml"], log=log, env=env)

To import grpc takes a second of a core, torch with transformers five more, and a daemon does
that for itself, for the process that its workers are forked from, and for its crypto worker.
Here it is done once for all tests of a pytest process. What is forked is otherwise what
`python -m program` would be: a session, an environment and a standard output of its own,
`__main__` run from its beginning, an exit code. What it has its own processes made of
(multiprocessing's commands) is forked likewise, by a helper that has seen nothing of it, and
they are its children.

What it does not show: that sites whose hashes are salted differently agree, and that nothing
heavy is imported by the daemon itself. The daemons of tests/live/test_federation.py start cold.
"""

from __future__ import annotations

import asyncio
import ctypes
import fcntl
import gc
import json
import os
import runpy
import selectors
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from multiprocessing import util
from pathlib import Path
from types import ModuleType
from typing import BinaryIO, NamedTuple, NoReturn

_IMPORTED = (
    "daemon.main",
    "daemon.learning.retriever.retriever",
    "daemon.jobs.answering",
    "crypto.ckks.sums",
)
_READ_AT_IMPORT = "HANSE_FAULT"  # by daemon/process/faultpoints.py
_MOST_BYTES = 1 << 18  # of a request: an environment, and a few words
_PR_SET_CHILD_SUBREAPER = 36
_CLONE_NEWNET = 0x40000000
_NUMBER = struct.Struct("=i")


class WarmProcess:
    """A process that was forked from the warm one; to a test as `asyncio.subprocess.Process`."""

    def __init__(
        self, pid: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._writer = writer
        self._ended = asyncio.create_task(self._watch(reader))

    async def _watch(self, reader: asyncio.StreamReader) -> None:
        told = await reader.read()
        self.returncode = _NUMBER.unpack(told)[0] if len(told) == _NUMBER.size else -signal.SIGKILL
        self._writer.close()

    async def wait(self) -> int:
        """Until it has ended; its exit code, or the signal's number below nought."""
        await asyncio.shield(self._ended)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Raises ProcessLookupError when it has ended."""
        if self.returncode is not None:
            raise ProcessLookupError
        os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


async def started(
    program: str,
    words: Sequence[str],
    *,
    log: BinaryIO,
    env: Mapping[str, str],
    network: Path | None = None,
) -> WarmProcess:
    """``python -m program words``, in a session of its own, its output in ``log``.

    ``network``: the file of the network namespace that it is to be in, if not in ours.
    """
    control = await asyncio.to_thread(_warm)
    ours, theirs = socket.socketpair()
    with theirs:
        request = json.dumps(
            _Launch(program, list(words), str(Path.cwd()), dict(env), str(network or ""))
        )
        socket.send_fds(control, [request.encode()], [theirs.fileno(), log.fileno()])
    reader, writer = await asyncio.open_connection(sock=ours)
    try:
        (pid,) = _NUMBER.unpack(await reader.readexactly(_NUMBER.size))
    except asyncio.IncompleteReadError as error:
        raise RuntimeError("the process that daemons are forked from has ended") from error
    return WarmProcess(pid, reader, writer)


@cache
def _warm() -> socket.socket:
    """Start the warm process of this pytest process; it ends with it."""
    ours, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
    once = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    with theirs:
        subprocess.Popen(
            [sys.executable, "-m", "tests.support.warm", str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            start_new_session=True,  # Ctrl-C is for the tests, which end their daemons
            env={**os.environ, **once, "TOKENIZERS_PARALLELISM": "false"},
        )
    return ours


# ---- in the warm process --------------------------------------------------------------


class _Launch(NamedTuple):
    program: str
    words: list[str]
    folder: str
    env: dict[str, str]
    network: str


class _Spawn(NamedTuple):
    """A command of multiprocessing's: ``python -c code words``, which has these descriptors."""

    code: str
    words: list[str]
    descriptors: list[int]
    env: dict[str, str]


def main() -> None:
    for module in _IMPORTED:
        __import__(module)
    gc.collect()
    gc.freeze()  # or each fork's first collection would copy all there is
    assert len(list(Path("/proc/self/task").iterdir())) == 1, "nobody may fork beside threads"
    launch, status, log = _serve(int(sys.argv[1]))
    os.setsid()
    os.write(status, _NUMBER.pack(os.getpid()))
    os.dup2(log, 1)
    os.dup2(log, 2)
    _close_but([])
    if launch.network:
        _enter(launch.network)
    _set_environment(launch.env)
    if launch.env.get(_READ_AT_IMPORT):
        _forget("daemon")
    os.chdir(launch.folder)
    _fork_for_multiprocessing()
    sys.argv = [launch.program, *launch.words]
    runpy.run_module(launch.program, run_name="__main__", alter_sys=True)


def _serve(number: int) -> tuple[_Launch, int, int]:
    """Fork what is asked for, and say how it ended. Returns in what is forked alone.

    What it is, and its descriptors: of who asked for it, and of what it says.
    """
    running: dict[int, tuple[int, int]] = {}  # pid and status socket, by process descriptor
    with socket.socket(fileno=number) as control, selectors.DefaultSelector() as events:
        events.register(control, selectors.EVENT_READ)
        while True:
            for key, _ in events.select():
                if key.fd in running:
                    events.unregister(key.fd)
                    _say_end(key.fd, *running.pop(key.fd))
                    continue
                raw, received, _, _ = socket.recv_fds(control, _MOST_BYTES, 2)
                if not raw:
                    os._exit(0)  # the tests are over
                status, log = received
                pid = os.fork()
                if pid == 0:
                    return _Launch(*json.loads(raw)), status, log
                os.close(log)
                descriptor = os.pidfd_open(pid)
                running[descriptor] = (pid, status)
                events.register(descriptor, selectors.EVENT_READ)


def _say_end(descriptor: int, pid: int, status: int) -> None:
    _, ended = os.waitpid(pid, 0)
    os.write(status, _NUMBER.pack(os.waitstatus_to_exitcode(ended)))
    os.close(status)
    os.close(descriptor)


def _close_but(kept: Sequence[int]) -> None:
    """Every descriptor but these and the three standard ones."""
    for descriptor in [int(path.name) for path in Path("/proc/self/fd").iterdir()]:
        if descriptor > 2 and descriptor not in kept:
            with suppress(OSError):  # the one that has listed them
                os.close(descriptor)


def _enter(network: str) -> None:
    """As `ip netns exec` does it (setns(2))."""
    descriptor = os.open(network, os.O_RDONLY)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(descriptor, _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "cannot enter the namespace", network)
    os.close(descriptor)


def _forget(room: str) -> None:
    """Who imports something of it imports it anew."""
    for name in [name for name in sys.modules if name.partition(".")[0] == room]:
        del sys.modules[name]


def _set_environment(env: Mapping[str, str]) -> None:
    os.environ.clear()
    os.environ.update(env)


# ---- what a daemon has multiprocessing start ------------------------------------------


def _fork_for_multiprocessing() -> None:
    """Fork a helper, and from it, from now on, what multiprocessing would execute.

    What is forked is adopted by this process, as if it had started it itself: it is an
    orphan's "subreaper" (prctl(2)).
    """
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    ours, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        ours.close()
        _become(*_serve_spawns(theirs.detach()))
    theirs.close()
    turn = threading.Lock()

    def fork(_path: str | bytes, command: Sequence[str], descriptors: Sequence[int]) -> int:
        at = command.index("-c") + 1
        numbers = sorted(set(descriptors))
        spawn = _Spawn(command[at], ["-c", *command[at + 1 :]], numbers, dict(os.environ))
        with turn:
            socket.send_fds(ours, [json.dumps(spawn).encode()], numbers)
            return int(_NUMBER.unpack(ours.recv(_NUMBER.size))[0])

    util.spawnv_passfds = fork  # type: ignore[assignment]


def _serve_spawns(number: int) -> tuple[_Spawn, list[int]]:
    """Fork what is asked for. Returns in what is forked alone: what it is, what it has."""
    control = socket.socket(fileno=number)
    while True:
        raw, received, _, _ = socket.recv_fds(control, _MOST_BYTES, 16)
        if not raw:
            os._exit(0)  # the daemon has ended
        reader, writer = os.pipe()
        between = os.fork()
        if between == 0:
            child = os.fork()
            if child == 0:
                control.close()
                return _Spawn(*json.loads(raw)), received
            os.write(writer, _NUMBER.pack(child))
            os._exit(0)
        os.waitpid(between, 0)  # from here on the daemon is the child's parent
        control.send(os.read(reader, _NUMBER.size))
        for descriptor in (reader, writer, *received):
            os.close(descriptor)


def _become(spawn: _Spawn, received: Sequence[int]) -> NoReturn:
    above = max(spawn.descriptors, default=2) + 1
    moved = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, above) for descriptor in received]
    _close_but(moved)
    for there, number in zip(moved, spawn.descriptors, strict=True):
        os.dup2(there, number)
        os.close(there)
    _set_environment(spawn.env)
    sys.argv = spawn.words
    module = sys.modules["__main__"] = ModuleType("__main__")
    module.__spec__ = None
    exec(spawn.code, module.__dict__)  # noqa: S102  as `python -c` does
    sys.exit(0)


if __name__ == "__main__":
    main()
