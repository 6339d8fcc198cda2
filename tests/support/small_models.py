"""Tiny models made on the spot, so that tests run real ones without a download."""

from __future__ import annotations

import string
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import (
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import (
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
)

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")


def small_cross_encoder(folder: Path, words: Sequence[str], wanted: str) -> Path:
    """One that gives a text with the word ``wanted`` more than any other; its folder.

    Trained to it, from a random BERT of two layers.
    """
    small_encoder(folder, words)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = BertForSequenceClassification.from_pretrained(folder, num_labels=1)
        optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)
        others = [word for word in words if word != wanted]
        texts = [f"{one} {two}" for one in others for two in (wanted, *others)]
        tokens = tokenizer(["which?"] * len(texts), texts, padding=True, return_tensors="pt")
        right = torch.tensor([float(wanted in text) for text in texts])
        for _ in range(60):
            loss = torch.nn.functional.mse_loss(model(**tokens).logits[:, 0], right)
            optimiser.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimiser.step()
    model.save_pretrained(folder, safe_serialization=True)
    return folder


def small_encoder(
    folder: Path,
    words: Sequence[str] = (),
    *,
    dimension: int = 32,
    layers: int = 2,
    max_positions: int = 64,
    seed: int = 0,
) -> Path:
    """Write a random BERT (a few thousand weights) with a WordPiece tokenizer; its folder.

    ``words`` become tokens of their own; any other text is spelled in letters.
    """
    letters = string.ascii_lowercase + string.digits + ".,?!'-:"
    pieces = [*SPECIAL, *letters, *(f"##{letter}" for letter in letters), *words]
    vocabulary = {piece: number for number, piece in enumerate(dict.fromkeys(pieces))}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        special_tokens=[("[CLS]", vocabulary["[CLS]"]), ("[SEP]", vocabulary["[SEP]"])],
    )
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
    ).save_pretrained(folder)

    config = BertConfig(
        vocab_size=len(vocabulary),
        hidden_size=dimension,
        num_hidden_layers=layers,
        num_attention_heads=4,
        intermediate_size=2 * dimension,
        max_position_embeddings=max_positions,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = BertModel(config)
    model.save_pretrained(folder, safe_serialization=True)
    return folder


class Letters:
    """A tokenizer of single characters, for small causal models made on the spot."""

    def __init__(self) -> None:
        signs = [*string.ascii_letters, *string.digits, *" .,?!'-:\n"]
        vocabulary = {sign: n for n, sign in enumerate(["<pad>", "<s>", "</s>", "<unk>", *signs])}
        tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
        tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
        tokenizer.decoder = decoders.Fuse()
        self.tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=tokenizer,
            pad_token="<pad>",
            bos_token="<s>",
            eos_token="</s>",
            unk_token="<unk>",
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
