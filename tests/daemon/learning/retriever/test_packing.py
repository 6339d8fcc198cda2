"""Packed weights make the vectors that plain ones make, and nobody trains them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from daemon.learning.retriever.encoder import Encoder
from daemon.learning.retriever.packing import PackedLinear, pack
from tests.support.small_models import small_encoder

TEXTS = ["why?", "pumps are inspected before every long journey", "Lamps last " * 40, ""]


@pytest.fixture
def encoder(tmp_path: Path) -> Encoder:
    folder = small_encoder(tmp_path, ["pumps", "lamps", "journey"])
    return Encoder.load(str(folder), max_tokens=48, device="cpu", threads=1)


@pytest.mark.parametrize("batch_size", [1, 3])
def test_vectors_are_those_of_the_plain_model(encoder: Encoder, batch_size: int) -> None:
    plain = encoder.encode(TEXTS)
    pack(encoder.model)
    assert any(isinstance(module, PackedLinear) for module in encoder.model.modules())
    assert np.abs(encoder.encode(TEXTS, batch_size) - plain).max() < 2e-6


def test_what_is_no_plain_linear_layer_stays() -> None:
    class Scaled(nn.Linear):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(inputs)

    model = nn.Sequential(Scaled(4, 3), nn.Linear(3, 2).bfloat16(), nn.Linear(2, 2, bias=False))
    inputs = torch.randn(5, 2)
    outputs = model[2](inputs)
    pack(model)
    assert [type(module) for module in model] == [Scaled, nn.Linear, PackedLinear]
    assert torch.allclose(model[2](inputs), outputs, atol=1e-6)


def test_a_packed_layer_says_its_size_and_type() -> None:
    model = nn.Sequential(nn.Linear(4, 3))
    pack(model)
    assert (model[0].weight.shape, model[0].weight.dtype) == ((3, 4), torch.float32)
    assert not [one for one in model.parameters() if one.numel() == 12], "the weights of before"
