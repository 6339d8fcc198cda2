"""Perplexity against cases worked out by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from daemon.learning.options import EvaluationError
from tests.daemon.evaluation.perplexity import perplexity
from tests.support.small_models import Letters


def small_gpt(vocabulary: int) -> Any:
    from transformers import (
        GPT2Config,
        GPT2LMHeadModel,
    )  # takes a second: not when tests are collected

    config = GPT2Config(vocab_size=vocabulary, n_positions=64, n_embd=16, n_layer=1, n_head=2)
    return GPT2LMHeadModel(config).eval()


def test_perplexity_of_a_model_that_knows_nothing_is_its_vocabulary() -> None:
    tokenizer = Letters().tokenizer
    model = small_gpt(len(tokenizer))
    torch.nn.init.zeros_(model.transformer.wte.weight)  # tied to the output: all logits 0
    found = perplexity(model, tokenizer, ["abc", "hello there"])
    assert found == pytest.approx(len(tokenizer), rel=1e-5)


def test_perplexity_is_the_model_s_own_loss_over_all_tokens() -> None:
    tokenizer = Letters().tokenizer
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = small_gpt(len(tokenizer))
    texts = ["abc", "a longer text than that"]
    total, count = 0.0, 0
    for text in texts:
        ids = [tokenizer.bos_token_id, *tokenizer(text, add_special_tokens=False)["input_ids"]]
        row = torch.tensor([ids])
        total += float(model(input_ids=row, labels=row).loss.detach()) * (len(ids) - 1)
        count += len(ids) - 1
    assert perplexity(model, tokenizer, texts) == pytest.approx(math.exp(total / count), rel=1e-5)
    with pytest.raises(EvaluationError, match="two tokens"):
        perplexity(model, tokenizer, [""])
