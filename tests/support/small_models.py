"""A tiny text encoder made on the spot, so that tests run real models without a download."""

from __future__ import annotations

import string
from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import (
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    BertModel,
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


def small_writer(folder: Path, *, seed: int = 0) -> Path:
    """Write a random T5 (some ten thousand weights) that spells in letters; its folder."""
    tokenizer = Letters().tokenizer
    tokenizer.save_pretrained(folder)
    config = T5Config(
        vocab_size=len(tokenizer),
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=1,
        num_heads=4,
        dropout_rate=0.0,
        feed_forward_proj="gated-gelu",
        tie_word_embeddings=False,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        decoder_start_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = T5ForConditionalGeneration(config)
    model.save_pretrained(folder, safe_serialization=True)
    return folder
