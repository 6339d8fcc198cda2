"""A generator trained in several processes is the one that one process trains."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from crypto.arrays import Float32
from daemon.learning.generator import memory, parallel
from daemon.learning.generator.encoding import Lessons
from daemon.learning.options import TrainingError, TrainingOptions
from tests.daemon.learning.generator.lessons import SAID, lessons_of, loaded, made

# Of what training changed, in the L2 norm. Measured: 9e-6 (full), 5e-7 (lora), 1e-6 (lora_server).
TOLERANCE = 5e-5
# Ten lessons: steps of four, four and two, so that of three processes one has nothing in the last.
PLAN = TrainingOptions(
    local_epochs=3, batch_size=2, learning_rate=1e-3, proximal=10.0, weight_decay=0.01
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {kind: made(tmp_path_factory.mktemp(kind), kind) for kind in ("t5", "llama")}


def trained(
    folder: Path, processes: int, adapt: str = "full"
) -> tuple[Float32, list[tuple[int, float]]]:
    """The vector's change, and what was told of each epoch; from another version than the first."""
    one = loaded(folder, adapt=adapt, accumulation=2, processes=processes, threads=2)
    parent = one.initial_vector()
    one.load_vector(parent + np.linspace(-1e-3, 1e-3, len(parent), dtype=np.float32))
    start = one.vector()
    one.begin(round=2, dropout=0.0, seed=0)
    told: list[tuple[int, float]] = []
    last = parallel.train(one, lessons_of(one), PLAN, 5, lambda *epoch: told.append(epoch))
    assert last == told[-1][1]
    return one.vector() - start, told


@pytest.mark.parametrize(
    ("kind", "adapt", "processes"),
    [("t5", "full", 3), ("llama", "lora", 2), ("llama", "lora_server", 2)],
)
def test_several_processes_make_the_update_of_one(
    folders: dict[str, Path], kind: str, adapt: str, processes: int
) -> None:
    assert len(SAID) % (PLAN.batch_size * 2) == 2
    one, told = trained(folders[kind], 1, adapt)
    several, told_too = trained(folders[kind], processes, adapt)
    difference = float(np.linalg.norm(several - one) / np.linalg.norm(one))
    print(kind, adapt, difference)
    assert difference < TOLERANCE
    assert [epoch for epoch, _ in told_too] == [1, 2, 3]
    np.testing.assert_allclose(
        [loss for _, loss in told_too], [loss for _, loss in told], rtol=1e-4
    )


def test_what_fails_in_one_changes_nothing(folders: dict[str, Path]) -> None:
    one = loaded(folders["llama"], processes=2, threads=2)
    before = one.vector().tobytes()
    wild = replace(PLAN, learning_rate=1e30, weight_decay=0.0)
    with pytest.raises(TrainingError, match=r"the training loss became .* no update was made"):
        parallel.train(one, lessons_of(one), wild, 1)
    assert one.vector().tobytes() == before
    with pytest.raises(TrainingError, match="no question-passage-answer triple"):
        parallel.train(one, [], PLAN, 1)


def test_each_process_takes_its_memory(folders: dict[str, Path]) -> None:
    alone, two = (loaded(folders["t5"], processes=count) for count in (1, 2))
    taken = Lessons(lessons_of(alone), 0)
    load, more = (memory.load_of(one, taken, 4) for one in (alone, two))
    assert more.optimiser > 2 * (load.optimiser + load.weights)
    assert more.activations == 2 * load.activations
    with pytest.raises(TrainingError, match=r"in workers\.processes = 2, each with a model"):
        memory.load_of(two, taken, 4, more.optimiser + more.activations - 1)
