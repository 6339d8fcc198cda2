"""Training of a generator: what it learns, what a step is, and what it takes."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from crypto.arrays import Float32
from daemon.learning.generator import memory
from daemon.learning.generator.encoding import Lesson, Lessons
from daemon.learning.generator.generator import Generator
from daemon.learning.generator.training import fit
from daemon.learning.options import TrainingError, TrainingOptions
from tests.daemon.learning.generator.lessons import (
    KINDS,
    answer_loss,
    lessons_of,
    loaded,
    made,
    some_tokens,
)

PLAN = TrainingOptions(local_epochs=6, batch_size=4, learning_rate=2e-2)
ONE_STEP = TrainingOptions(local_epochs=1, batch_size=8, learning_rate=1e-3)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {kind: made(tmp_path_factory.mktemp(kind), kind) for kind in KINDS}


def moved(
    generator: Generator, lessons: tuple[Lesson, ...], plan: TrainingOptions = PLAN
) -> Float32:
    """From the start by training: what a site would send."""
    generator.load_vector(generator.initial_vector())
    fit(generator, lessons, plan, 1)
    return generator.vector() - generator.initial_vector()


@pytest.mark.parametrize(
    ("kind", "adapt"),
    [*((kind, "lora") for kind in KINDS), ("t5", "full"), ("llama", "lora_server")],
)
def test_what_was_never_asked_is_answered_better(
    folders: dict[str, Path], kind: str, adapt: str
) -> None:
    one = loaded(folders[kind], adapt=adapt, lora_alpha=64)
    lessons = lessons_of(one)
    taught, kept_apart = lessons[2:], lessons[:2]
    before = answer_loss(one, kept_apart)
    told: list[tuple[int, float]] = []
    one.begin(round=1, dropout=0.0, seed=0)
    last = fit(one, taught, PLAN, 1, lambda *epoch: told.append(epoch))
    assert [epoch for epoch, _ in told] == [1, 2, 3, 4, 5, 6]
    assert told[-1][1] == last < told[0][1]
    # The vector is all of it: what was trained can be loaded again.
    vector = one.vector()
    one.load_vector(one.initial_vector())
    assert answer_loss(one, kept_apart) == before
    one.load_vector(vector)
    assert answer_loss(one, kept_apart) < before - 0.3


def test_one_seed_gives_the_same_bits_and_another_does_not(folders: dict[str, Path]) -> None:
    one = loaded(folders["llama"], lora_dropout=0.2)
    lessons = lessons_of(one)
    short = replace(PLAN, local_epochs=2)

    def trained(seed: int) -> bytes:
        one.load_vector(one.initial_vector())
        torch.manual_seed(seed + 100)  # what else the process draws is its own affair
        fit(one, lessons, short, seed)
        return one.vector().tobytes()

    assert trained(1) == trained(1) != trained(2)


def test_the_mean_of_updates_is_the_update_of_the_mean(folders: dict[str, Path]) -> None:
    """Of projected weights too: both sites fit the same factor to the same other one."""
    one = loaded(folders["t5"], adapt="lora_server")
    lessons = lessons_of(one)
    start, weights = one.initial_vector(), []
    updates = []
    for part in (lessons[:5], lessons[5:]):
        updates.append(moved(one, part, ONE_STEP))
        weights.append([value.detach().clone() for value in one.parameters()])
    with torch.no_grad():
        for value, ours, theirs in zip(one.parameters(), *weights, strict=True):
            value.copy_((ours + theirs) / 2)
    np.testing.assert_allclose(one.vector() - start, sum(updates) / 2, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_in_parts_is_the_step(folders: dict[str, Path], kind: str) -> None:
    """Each token weighs the same, though batches have more and fewer of them."""
    whole = loaded(folders[kind], adapt="full")
    parts = loaded(folders[kind], adapt="full", accumulation=4)
    lessons = lessons_of(whole)[:8]
    assert len({len(lesson.answer) for lesson in lessons}) > 1
    plan = replace(ONE_STEP, proximal=0.1)
    gradients = []
    for one, size in ((whole, 8), (parts, 2)):
        moved(one, lessons, replace(plan, batch_size=size, local_epochs=2))
        gradients.append(one.vector())
    start = whole.initial_vector()
    assert np.abs(gradients[0] - start).max() > 1e-3
    # AdamW divides by a gradient's own size, so that where it is next to nothing rounding shows.
    far = np.abs(gradients[0] - gradients[1]) > 1e-5
    assert far.mean() < 0.01


def test_checkpoints_change_nothing_but_memory(folders: dict[str, Path]) -> None:
    for kind in ("t5", "gpt2"):
        updates, kept = [], []
        for checkpointing in (False, True):
            one = loaded(folders[kind], checkpointing=checkpointing)
            lessons = lessons_of(one)
            updates.append(moved(one, lessons, ONE_STEP))
            kept.append(memory.kept_by(one, one.batches(lessons, 8)[0]))
        np.testing.assert_allclose(updates[0], updates[1], atol=1e-5)
        assert kept[1] < 0.6 * kept[0]


def test_bfloat16_trains_float32_weights(folders: dict[str, Path]) -> None:
    one = loaded(folders["llama"], precision="bfloat16")
    lessons = lessons_of(one)
    before = answer_loss(loaded(folders["llama"]), lessons)
    rounded = answer_loss(one, lessons)
    assert rounded != before
    assert rounded == pytest.approx(before, rel=0.02)
    fit(one, lessons, PLAN, 1)
    assert {value.dtype for value in one.parameters()} == {torch.float32}
    assert answer_loss(one, lessons) < before


def test_the_proximal_term_holds_to_the_parent(folders: dict[str, Path]) -> None:
    one = loaded(folders["t5"])
    lessons = lessons_of(one)
    free, held = (
        np.linalg.norm(moved(one, lessons, replace(PLAN, proximal=mu))) for mu in (0.0, 10.0)
    )
    assert held < 0.8 * free


def test_what_a_plan_asks_of_retrievers_means_nothing_here(folders: dict[str, Path]) -> None:
    one = loaded(folders["gpt2"])
    lessons = lessons_of(one)
    plan = replace(ONE_STEP, temperature=7.0, negatives="bm25", distill="matrix", batches="topic")
    assert moved(one, lessons, plan).tobytes() == moved(one, lessons, ONE_STEP).tobytes()


# ---- ends ----------------------------------------------------------------------------------


def test_one_triple_is_enough_and_none_is_not(folders: dict[str, Path]) -> None:
    one = loaded(folders["t5"])
    lessons = lessons_of(one)
    assert np.abs(moved(one, lessons[:1])).max() > 0
    with pytest.raises(TrainingError, match="no question-passage-answer triple"):
        fit(one, (), PLAN, 1)
    assert fit(one, (), replace(PLAN, local_epochs=0), 1) == 0.0


def test_a_loss_that_is_not_finite_is_an_error_and_leaves_nothing_behind(
    folders: dict[str, Path],
) -> None:
    one = loaded(folders["llama"])
    lessons = lessons_of(one)
    expected = moved(one, lessons, ONE_STEP)
    one.load_vector(np.full_like(one.initial_vector(), 3e38))
    with pytest.raises(TrainingError, match="loss became nan in epoch 1: lower the learning rate"):
        fit(one, lessons, ONE_STEP, 1)
    assert not one.language_model.model.training
    assert moved(one, lessons, ONE_STEP).tobytes() == expected.tobytes()


# ---- memory --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_memory_is_foretold_from_two_short_examples(folders: dict[str, Path], kind: str) -> None:
    one = loaded(folders[kind], adapt="full", prompt_tokens=400, answer_tokens=60)
    chance = np.random.default_rng(1)
    lessons = tuple(
        Lesson(some_tokens(chance, length), some_tokens(chance, 40))
        for length in (90, 180, 270, 360)
    )
    load = memory.load_of(one, Lessons(lessons, 0), 4)
    trained = 4 * one.shape_manifest.total
    assert (load.weights, load.optimiser) == (trained, 4 * trained)
    kept = max(memory.kept_by(one, batch) for batch in one.batches(lessons, 4))
    assert kept < load.activations < 3 * kept
    assert load.available > load.optimiser + load.activations


def test_what_does_not_fit_is_refused_before_it_starts(folders: dict[str, Path]) -> None:
    one = loaded(folders["t5"])
    taken = Lessons(lessons_of(one), 0)
    load = memory.load_of(one, taken, 4)
    enough = load.optimiser + load.activations
    assert memory.load_of(one, taken, 4, enough) == load._replace(available=enough)
    with pytest.raises(TrainingError, match=r"are free: lower training.batch_size"):
        memory.load_of(one, taken, 4, enough - 1)
    assert 0 < memory.available_bytes(one.device) < math.inf
