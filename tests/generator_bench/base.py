"""A small language model made from nothing, of the sites' training documents alone.

It reads no question and no answer of a pair, and no document that is held out. In half of what
it reads a piece of a text stands twice, so that it learns to copy, which answering from a passage
takes. It knows no more English than those documents have: its figures compare ways to train,
and say nothing of how well a model of a useful size answers.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from daemon.answering.prompts.kinds import FOR
from daemon.answering.prompts.prompts import text_of

_SPECIAL = ("<pad>", "<s>", "</s>")
_FRAMES = 50  # times each prompt's own words count for the tokenizer: every example has them


@dataclass(frozen=True)
class Stage:
    """So many ``steps``, at least 20, of ``rows`` rows with ``length`` tokens each.

    ``quoted``: tokens of the pieces of a row's first half that its second half is made of;
    0: every other row has one piece twice.
    """

    steps: int
    rows: int
    length: int
    learning_rate: float
    quoted: int = 0


@dataclass(frozen=True)
class Making:
    """How large the model is, and what it reads: short rows, then some as long as prompts."""

    words: int = 2000
    width: int = 128
    layers: int = 2
    heads: int = 4
    stages: tuple[Stage, ...] = (Stage(2500, 32, 64, 3e-3), Stage(400, 5, 448, 3e-3, 16))


def made(folder: Path, texts: Sequence[str], making: Making, told: Callable[[str], None]) -> Path:
    """Train one, or take the one that is there whole; its folder. The same bits each time."""
    if folder.is_dir():
        return folder
    unfinished = folder.with_name(f"{folder.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    tokenizer = _tokenizer(texts, making.words)
    model = _model(tokenizer, making)
    rows = [np.array(ids) for ids in tokenizer(list(texts))["input_ids"] if len(ids) >= 8]
    for stage in making.stages:
        read(model, rows, stage, told)
    model.save_pretrained(unfinished, safe_serialization=True)
    tokenizer.save_pretrained(unfinished)
    unfinished.rename(folder)
    return folder


def _tokenizer(texts: Sequence[str], words: int) -> Any:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=words,
        special_tokens=list(_SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    frames = [text_of(kind) for kind in FOR] * _FRAMES
    tokenizer.train_from_iterator([*texts, *frames], trainer)
    pad, start, end = _SPECIAL
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=pad, bos_token=start, eos_token=end
    )


def _model(tokenizer: Any, making: Making) -> Any:
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=making.width,
        intermediate_size=2 * making.width,
        num_hidden_layers=making.layers,
        num_attention_heads=making.heads,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return LlamaForCausalLM(config)


def read(model: Any, rows: Sequence[Any], stage: Stage, told: Callable[[str], None]) -> None:
    """Foretell the next token, with AdamW and a rate that rises and falls once."""
    chance = np.random.Generator(np.random.Philox(key=0))
    joined = np.concatenate([np.append(row, 2) for row in rows])
    optimiser = torch.optim.AdamW(model.parameters(), lr=stage.learning_rate, weight_decay=0.01)
    rate = torch.optim.lr_scheduler.OneCycleLR(
        optimiser, stage.learning_rate, total_steps=stage.steps, pct_start=0.1
    )
    model.train()
    for step in range(stage.steps):
        batch = np.stack([_row(joined, stage, chance) for _ in range(stage.rows)])
        tokens = torch.from_numpy(batch)
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        rate.step()
        if step % 50 == 0:
            told(f"base model: step {step} of {stage.steps}, {loss.item():.2f} nats a token")
    model.eval()


def _row(joined: Any, stage: Stage, chance: np.random.Generator) -> Any:
    """So many tokens of the documents, some of them twice."""
    length = stage.length
    if stage.quoted:
        start = int(chance.integers(len(joined) - length))
        text = joined[start : start + length // 2]
        count = -(-length // (2 * stage.quoted))
        starts = chance.integers(len(text) - stage.quoted, size=count)
        quotes = [text[one : one + stage.quoted] for one in starts]
        return np.concatenate([text, *quotes])[:length]
    if chance.random() < 0.5:
        start = int(chance.integers(len(joined) - length))
        return joined[start : start + length]
    before = int(chance.integers(length // 4))
    piece = (length - before) // 2
    start, other = (int(one) for one in chance.integers(len(joined) - length, size=2))
    said = joined[start : start + piece]
    return np.concatenate([joined[other : other + length - 2 * piece], said, said])
