"""Accelerate beneath the steps of training: alone it changes no bit, whoever started fedd."""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor, nn

from daemon.learning.engine.descent import CLIP, FINAL_RATE, Descent
from daemon.learning.engine.engine import Engine
from daemon.learning.options import TrainingOptions

CPU = torch.device("cpu")
OPTIONS = TrainingOptions(learning_rate=3e-2, weight_decay=0.01)
STEPS = 7


def small_model() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.Linear(12, 4))


def losses(model: nn.Module) -> list[Tensor]:
    """What seven steps go down; asked for one by one, for each is of the model as it is then."""
    inputs = torch.linspace(-2, 2, STEPS * 5 * 6).reshape(STEPS, 5, 6)
    return [100 * model(batch).square().mean() for batch in inputs]


def bits(model: nn.Module) -> bytes:
    return b"".join(value.detach().numpy().tobytes() for value in model.parameters())


def descended(engine: Engine) -> bytes:
    model = small_model()
    descent = Descent(list(model.parameters()), STEPS, OPTIONS, engine)
    for step in range(STEPS):
        descent.accumulate(losses(model)[step], epoch=1)
        descent.step()
    return bits(model)


def descended_in_plain_torch() -> bytes:
    model = small_model()
    parameters = list(model.parameters())
    optimiser = torch.optim.AdamW(parameters, lr=3e-2, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LinearLR(optimiser, 1.0, FINAL_RATE, STEPS - 1)
    for step in range(STEPS):
        optimiser.zero_grad(set_to_none=True)
        losses(model)[step].backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(parameters, CLIP)
        optimiser.step()
        schedule.step()
    return bits(model)


def test_alone_each_step_has_the_bits_of_plain_torch() -> None:
    assert descended(Engine(CPU)) == descended_in_plain_torch() != bits(small_model())


def test_what_a_launcher_said_of_fedd_is_not_said_of_training(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told = {
        "RANK": "1",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "192.0.2.1",
        "ACCELERATE_MIXED_PRECISION": "bf16",
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "3",
    }
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    engine = Engine(CPU)
    assert (engine.rank, engine.processes) == (0, 1)
    assert descended(engine) == descended_in_plain_torch()
    assert {name: os.environ.get(name) for name in told} == told


@pytest.mark.parametrize("rounded", [False, True])
def test_bfloat16_rounds_what_is_embedded_and_nothing_else(rounded: bool) -> None:
    engine = Engine(CPU, "bfloat16" if rounded else "float32")
    weight = nn.Parameter(torch.tensor([[1.0 + 2.0**-12, 0.5]]))
    embedded = engine.embedded(lambda rows: torch.ones(len(rows), 1) @ weight, torch.arange(2), 2)  # type: ignore[arg-type]
    assert embedded.dtype == torch.float32
    assert (embedded[0, 0].item() == 1.0) is rounded, "2 ** -12 is lost in eight bits"
    engine.backward(embedded.sum())
    assert weight.dtype == torch.float32
    assert weight.grad is not None
    assert weight.grad.dtype == torch.float32
