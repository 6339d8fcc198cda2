"""Processes that train as one: begun by the learning worker, and gone with it.

They find one another by a file in a folder that only this user may enter, and talk over
the loopback interface. What they say there (embeddings, gradients) is not encrypted, and
torch's transport asks nobody who he is: another user of this machine who finds the port
(/proc/net/tcp shows it) and is there first, in the moment in which the processes connect,
could take one's place. After that moment nobody is let in.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import connection
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any, Final

import torch
from torch import distributed, nn

from crypto.arrays import Float32
from daemon.learning.options import EpochProgress, LearningError, TrainingError
from daemon.learning.parameters import take
from daemon.process.confinement import end_with_parent
from daemon.process.temporary import TemporaryFolder

Tell = Callable[[Any], None]

PATIENCE_S: Final = 600.0  # of a process that waits for the others' part of a step
_LOOPBACK: Final = "lo"
_BACKENDS: Final = {"cpu": "gloo", "cuda": "nccl"}
_LAST_WORDS_S = 1.0  # a process notices that another one died before the kernel has buried that


@dataclass(frozen=True)
class Group:
    """How many processes, on the CPU or on a GPU each, with how many threads each."""

    processes: int
    threads: int = 1
    device: str = "cpu"
    patience_s: float = PATIENCE_S


@dataclass(frozen=True)
class _Told:
    item: Any


@dataclass(frozen=True)
class _Done:
    result: Any


@dataclass(frozen=True)
class _Failed:
    error: LearningError | None  # None: what may have become of it when another process went
    cause: str = ""


@dataclass(frozen=True)
class _Place:
    """Of one process in its group."""

    group: Group
    rank: int
    parent: int
    store: Path


def together(group: Group, part: Callable[..., Any], arguments: tuple[Any, ...], told: Tell) -> Any:
    """Run ``part(tell, *arguments)`` in each process of a group; what the first one returns.

    ``part`` is a plain function of a module. What the first process tells goes to ``told``.
    Processes are begun anew, for a process that has computed can't be forked: they import
    torch and load their model, seconds each time. None is left when this returns or raises,
    nor when this process is killed. Raises what ``part`` does of LearningError, and
    TrainingError where a process ends or fails, or waits for the others for too long.
    """
    if group.device == "cuda" and group.processes > torch.cuda.device_count():
        raise TrainingError(
            f"workers.processes = {group.processes}, but torch sees {torch.cuda.device_count()} "
            "GPUs, and each process trains on one of its own: lower it"
        )
    context = multiprocessing.get_context("spawn")
    members: list[SpawnProcess] = []
    with TemporaryFolder() as folder:
        ends: list[Connection] = []
        try:
            for rank in range(group.processes):
                place = _Place(group, rank, os.getpid(), folder.path / "store")
                reader, writer = context.Pipe(duplex=False)
                ends.append(reader)
                member = context.Process(
                    target=_member, args=(place, writer, part, arguments), daemon=True
                )
                with writer:  # the process has its own: where that closes, it has ended
                    members.append(member)
                    _start(member)
            return _result(members, ends, told)
        finally:
            for member in members:
                if member.pid is not None:
                    member.kill()
                    member.join()
                    member.close()
            for reader in ends:
                reader.close()


def train_together(
    group: Group,
    part: Callable[[Tell, Any], tuple[float, list[Float32]]],
    work: object,
    parameters: Sequence[nn.Parameter],
    on_epoch: Callable[[int, float], None] | None = None,
) -> float:
    """Have a group train ``parameters``, which are as before where that fails; the mean loss.

    ``part(tell, work)`` tells `EpochProgress`, and gives mean loss and parameters as `arrays_of`.
    Raises as `together`.
    """

    def told(epoch: EpochProgress) -> None:
        if on_epoch is not None:
            on_epoch(epoch.epoch, epoch.loss)

    mean_loss, trained = together(group, part, (work,), told)
    take(parameters, trained)
    return float(mean_loss)


def _start(member: SpawnProcess) -> None:
    try:
        member.start()
    except OSError as error:  # no process, no memory, or it ended while it was told its part
        raise TrainingError(
            f"a training process could not be started ({error}): lower workers.processes; "
            "no update was made"
        ) from error


def _result(members: Sequence[SpawnProcess], ends: Sequence[Connection], told: Tell) -> Any:
    """What the first process returns, once all are through."""
    results: dict[int, Any] = {}
    while len(results) < len(ends):
        waiting = [end for rank, end in enumerate(ends) if rank not in results]
        for end in connection.wait(waiting):
            rank = ends.index(end)
            try:
                message = ends[rank].recv()
            except EOFError:
                raise _ended(members, "it ended") from None
            if isinstance(message, _Failed):
                raise message.error or _ended(members, message.cause)
            if isinstance(message, _Done):
                results[rank] = message.result
            else:
                told(message.item)
    return results[0]


def _ended(members: Sequence[SpawnProcess], cause: str) -> TrainingError:
    """What to say when a process is gone or has lost the others."""
    for rank, member in enumerate(members):
        member.join(_LAST_WORDS_S)
        if (code := member.exitcode) is not None and code != 0:
            how = f"was ended by signal {-code}" if code < 0 else f"ended with status {code}"
            return TrainingError(
                f"training process {rank + 1} of {len(members)} {how} (out of memory? see the "
                "system log; fewer workers.processes need less); no update was made"
            )
    return TrainingError(
        f"one of the {len(members)} training processes failed or lost the others ({cause}); "
        "no update was made"
    )


def _member(
    place: _Place, pipe: Connection, part: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    end_with_parent()
    if os.getppid() != place.parent:  # it ended before that could be asked for
        os._exit(1)

    def tell(item: Any) -> None:
        if place.rank == 0:
            pipe.send(_Told(item))

    message: _Done | _Failed
    try:
        _join(place)
        result = part(tell, *arguments)
        distributed.barrier()  # nobody hangs up while another one still listens
        message = _Done(result if place.rank == 0 else None)
    except LearningError as error:
        message = _Failed(error)
    except Exception as error:
        # Any: a lost connection is a RuntimeError, as most of what torch raises.
        message = _Failed(None, f"{type(error).__name__}: {error}")
    with suppress(BrokenPipeError):
        pipe.send(message)
    if distributed.is_initialized():
        distributed.destroy_process_group()


def _join(place: _Place) -> None:
    group = place.group
    os.environ.update({"GLOO_SOCKET_IFNAME": _LOOPBACK, "NCCL_SOCKET_IFNAME": _LOOPBACK})
    os.environ["OMP_NUM_THREADS"] = str(group.threads)  # Accelerate would choose, else
    torch.set_num_threads(group.threads)
    if group.device == "cuda":
        torch.cuda.set_device(place.rank)
    distributed.init_process_group(
        _BACKENDS[group.device],
        store=distributed.FileStore(  # type: ignore[attr-defined]
            str(place.store), group.processes
        ),
        rank=place.rank,
        world_size=group.processes,
        timeout=timedelta(seconds=group.patience_s),
    )
