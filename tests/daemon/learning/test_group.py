"""Processes that train as one: what they gather, and how they end."""

from __future__ import annotations

import multiprocessing
import os
import select
import signal
import tempfile
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from torch import Tensor, distributed, nn

from crypto.arrays import Rows
from daemon.learning.engine.engine import Engine
from daemon.learning.engine.group import Group, Tell, together
from daemon.learning.options import LearningError, TrainingError

COUNTS = (1, 2, 3, 5, 8)  # of rows for three processes: none for some, unequal, equal
WIDTH = 4
ENOUGH_S = 60.0


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def assert_nothing_left(temporary: Path) -> None:
    assert multiprocessing.active_children() == []
    left = [one.cmdline() for one in psutil.Process().children(recursive=True)]
    assert [line for line in left if any("spawn_main" in word for word in line)] == []
    assert list(temporary.iterdir()) == []


def unheard(item: Any) -> None:
    raise AssertionError(f"{item} was told")


# ---- what they gather ----------------------------------------------------------------


def gradients(engine: Engine, count: int) -> list[Any]:
    """Of a loss that joins all rows with one another, and of one parameter without them."""
    used, free, unused = (nn.Parameter(torch.linspace(-1, 1, WIDTH)) for _ in range(3))
    inputs = torch.linspace(-1, 2, count * WIDTH).reshape(count, WIDTH)

    def embed(rows: Rows) -> Tensor:
        return torch.sin(inputs[torch.from_numpy(rows)] * used)

    embedded = engine.embedded(embed, np.arange(count), WIDTH)
    assert embedded.shape == (count, WIDTH)
    loss = torch.logsumexp((embedded @ embedded.T).reshape(-1), 0) + free.square().sum()
    engine.backward(loss)
    engine.agree([used, free, unused])
    grads = [one.grad for one in (used, free, unused)]
    return [None if one is None else one.tolist() for one in grads]


def all_gradients(tell: Tell) -> list[list[Any]]:
    engine = Engine(torch.device("cpu"))
    tell((engine.rank, engine.processes))
    found = [gradients(engine, count) for count in COUNTS]
    everyones: list[Any] = [None] * engine.processes
    distributed.all_gather_object(everyones, found)
    if any(one != everyones[0] for one in everyones):
        raise LearningError("processes have other bits than one another")
    return found


def test_unequal_slices_have_the_gradients_of_one_process(temporary: Path) -> None:
    told: list[Any] = []
    found = together(Group(3), all_gradients, (), told.append)
    assert told == [(0, 3)], "only the first process is heard"
    alone = Engine(torch.device("cpu"))
    for count, (used, free, unused) in zip(COUNTS, found, strict=True):
        wanted = gradients(alone, count)
        np.testing.assert_allclose(used, wanted[0], rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(free, wanted[1], rtol=1e-6)
        assert unused is None
    assert_nothing_left(temporary)


# ---- how they end --------------------------------------------------------------------


def wait_for_the_second(tell: Tell, signal_number: int) -> None:
    """Two that work together, until the second is sent a signal before its third part."""
    for turn in range(1, 4):
        if turn == 3 and distributed.get_rank() == 1:
            os.kill(os.getpid(), signal_number)
        distributed.all_reduce(torch.ones(10))
        tell(turn)


def test_a_process_killed_in_the_midst_ends_training_with_its_cause(temporary: Path) -> None:
    turns: list[int] = []
    with pytest.raises(TrainingError, match=r"process 2 of 2 was ended by signal 9.*memory"):
        together(Group(2), wait_for_the_second, (signal.SIGKILL,), turns.append)
    assert turns == [1, 2]
    assert_nothing_left(temporary)


def test_one_that_hangs_is_waited_for_only_so_long(temporary: Path) -> None:
    # Long enough for two to meet that a busy machine starts seconds apart.
    with pytest.raises(TrainingError, match=r"lost the others \(.*imed out"):
        together(Group(2, patience_s=15), wait_for_the_second, (signal.SIGSTOP,), lambda _: None)
    assert_nothing_left(temporary)


def refuse(tell: Tell) -> None:
    if distributed.get_rank() == 1:
        raise LearningError("there is nothing to learn")
    distributed.barrier()


def test_what_one_refuses_is_refused_in_its_words(temporary: Path) -> None:
    with pytest.raises(LearningError, match="there is nothing to learn"):
        together(Group(2), refuse, (), unheard)
    assert_nothing_left(temporary)


def wait_for_ever(tell: Tell) -> None:
    everyones: list[Any] = [None, None]
    distributed.all_gather_object(everyones, os.getpid())
    tell(everyones)
    signal.pause()


def begin(pipe: Connection) -> None:
    together(Group(2), wait_for_ever, (), pipe.send)


def test_they_end_with_a_worker_that_is_killed(temporary: Path) -> None:
    context = multiprocessing.get_context("spawn")
    reader, writer = context.Pipe(duplex=False)
    worker = context.Process(target=begin, args=(writer,))
    worker.start()
    try:
        assert reader.poll(ENOUGH_S)
        handles = [os.pidfd_open(pid) for pid in reader.recv()]
    finally:
        worker.kill()
        worker.join()
    for handle in handles:
        ended, _, _ = select.select([handle], [], [], ENOUGH_S)
        os.close(handle)
        assert ended, "a process outlived the worker that began it"


def test_more_processes_than_gpus_are_refused_before_they_begin() -> None:
    more = torch.cuda.device_count() + 1
    with pytest.raises(TrainingError, match=f"processes = {more}.*lower it"):
        together(Group(more, device="cuda"), refuse, (), unheard)
