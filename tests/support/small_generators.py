"""Small language models of each kind, with random weights, and their tokenizers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
)


def tokenizer_of(texts: Sequence[str]) -> Any:
    """Pieces of bytes that these texts are made of, with marks for the turns of a conversation."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<pad>", "<s>", "</s>", "<|user|>", "<|end|>", "<|answer|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=1500,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )


def small(kind: str, tokenizer: Any) -> Any:
    """A model with random weights: "t5", "gpt2" or "llama"."""
    if kind == "t5":
        return T5ForConditionalGeneration(
            T5Config(
                vocab_size=len(tokenizer),
                d_model=64,
                d_kv=16,
                d_ff=128,
                num_layers=1,
                num_heads=4,
                dropout_rate=0.0,
                pad_token_id=tokenizer.pad_token_id,
                eos_token_id=tokenizer.eos_token_id,
                decoder_start_token_id=tokenizer.pad_token_id,
            )
        )
    if kind == "gpt2":
        return GPT2LMHeadModel(
            GPT2Config(
                vocab_size=len(tokenizer),
                n_embd=64,
                n_layer=2,
                n_head=4,
                n_positions=1024,
                bos_token_id=tokenizer.bos_token_id,
                eos_token_id=tokenizer.eos_token_id,
                pad_token_id=tokenizer.pad_token_id,
            )
        )
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=1024,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


def small_generator(folder: Path, kind: str, texts: Sequence[str], seed: int = 0) -> Path:
    """Write one with random weights that knows the pieces of these texts; its folder."""
    tokenizer = tokenizer_of(texts)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = small(kind, tokenizer)
    model.save_pretrained(folder, safe_serialization=True)
    tokenizer.save_pretrained(folder)
    return folder
