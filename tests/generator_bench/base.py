"""A small language model made from nothing, of the sites' training documents alone.

It reads no question and no answer of a pair, and no document that is held out. In half of what
it reads a piece of a text stands twice, so that it learns to copy, which answering from a passage
takes. It knows no more English than those documents have: its figures compare ways to train,
and say nothing of how well a model of a useful size answers.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from daemon.answering.prompts.kinds import FOR
from daemon.answering.prompts.prompts import text_of
from daemon.jobs.generator.examples import examples_of
from daemon.learning.generator.encoding import IGNORED, encoded
from daemon.learning.generator.generator import Generator
from daemon.learning.generator.spec import GeneratorSpec
from daemon.learning.generator.training import fit
from daemon.learning.generator.triples import Triple
from daemon.learning.options import TrainingOptions
from daemon.library.passages import sentences

_SPECIAL = ("<pad>", "<s>", "</s>")
_NEAR = 6  # lines of a document, from its first: later ones may not fit into a prompt
_SHORTEST, _LONGEST = 4, 30  # words of a line that is an answer
_WORDS = 4  # of them in the question
_FRAMES = 50  # times each prompt's own words count for the tokenizer: every example has them


@dataclass(frozen=True)
class Stage:
    """So many ``steps``, at least 20, of ``rows`` rows with ``length`` tokens each.

    ``quoted``: tokens of the pieces of a row's first half that its second half is made of;
    0: every other row has one piece twice. ``copied``: a row is nothing but tokens drawn at
    random, so many at most, over and over, and all but their first time is foretold: where no
    language helps, a model learns to look up what stood behind a token before.
    """

    steps: int
    rows: int
    length: int
    learning_rate: float
    quoted: int = 0
    copied: int = 0


@dataclass(frozen=True)
class Asking:
    """How it learns to answer out of a passage: so many ``examples``, each seen once.

    A document is the passage, its title with some words of one of its sentences the question,
    and that sentence, cited, the answer: which sentence people want is left for sites to teach.
    """

    examples: int
    batch_size: int
    learning_rate: float
    prompt_tokens: int = 512
    answer_tokens: int = 64


@dataclass(frozen=True)
class Making:
    """How large the model is, and what it reads: texts, copies, then rows as long as prompts."""

    words: int = 2000
    width: int = 128
    layers: int = 2
    heads: int = 4
    stages: tuple[Stage, ...] = (
        Stage(1400, 16, 64, 3e-3),
        Stage(600, 48, 16, 2e-3, copied=7),
        Stage(250, 12, 64, 2e-3, copied=32),
        Stage(150, 4, 448, 2e-3, quoted=16),
    )
    asking: Asking = Asking(1600, 8, 1e-3)


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
    taught(unfinished, texts, making.asking, told)
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
    words = model.config.vocab_size
    model.train()
    for step in range(stage.steps):
        made = [_row(joined, stage, chance, len(_SPECIAL), words) for _ in range(stage.rows)]
        tokens, labels = (torch.from_numpy(np.stack(one)) for one in zip(*made, strict=True))
        loss = model(input_ids=tokens, labels=labels, use_cache=False).loss
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        rate.step()
        if step % 50 == 0:
            told(f"base model: step {step} of {stage.steps}, {loss.item():.2f} nats a token")
    model.eval()


def _row(
    joined: Any, stage: Stage, chance: np.random.Generator, first: int, words: int
) -> tuple[Any, Any]:
    """So many tokens, and of them those to foretell; of documents they all are."""
    length = stage.length
    if stage.copied:
        some = chance.integers(first, words, size=int(chance.integers(4, stage.copied + 1)))
        tokens = np.resize(some, length)
        return tokens, np.where(np.arange(length) > len(some), tokens, IGNORED)
    tokens = _quoting(joined, stage, chance) if stage.quoted else _repeating(joined, length, chance)
    return tokens, tokens


def _quoting(joined: Any, stage: Stage, chance: np.random.Generator) -> Any:
    """Half a row of text, and then pieces of it."""
    start = int(chance.integers(len(joined) - stage.length))
    text = joined[start : start + stage.length // 2]
    count = -(-stage.length // (2 * stage.quoted))
    starts = chance.integers(len(text) - stage.quoted, size=count)
    quotes = [text[one : one + stage.quoted] for one in starts]
    return np.concatenate([text, *quotes])[: stage.length]


def _repeating(joined: Any, length: int, chance: np.random.Generator) -> Any:
    """Text, every other row behind other text and twice."""
    if chance.random() < 0.5:
        start = int(chance.integers(len(joined) - length))
        return joined[start : start + length]
    before = int(chance.integers(length // 4))
    piece = (length - before) // 2
    start, other = (int(one) for one in chance.integers(len(joined) - length, size=2))
    said = joined[start : start + piece]
    return np.concatenate([joined[other : other + length - 2 * piece], said, said])


def taught(
    folder: Path, texts: Sequence[str], asking: Asking, told: Callable[[str], None]
) -> float:
    """Train the model in a folder to answer out of passages, as a site trains all weights.

    ``texts``: a title, and below it the document. The mean loss, in nats a token of an answer.
    """
    spec = GeneratorSpec(
        base_model=str(folder),
        adapt="full",
        device="cpu",
        prompt_tokens=asking.prompt_tokens,
        answer_tokens=asking.answer_tokens,
    )
    generator = Generator.load(spec)
    model = generator.language_model
    chance = np.random.Generator(np.random.Philox(key=1))
    triples = asked_of(texts, asking.examples, chance)
    kinds = [tuple(FOR)[at] for at in chance.integers(len(FOR), size=len(triples)).tolist()]
    examples = [
        example
        for triple, kind in zip(triples, kinds, strict=True)
        for example in examples_of([triple], model, replace(spec, prompt=kind))
    ]
    lessons = encoded(model, examples, asking.prompt_tokens, asking.answer_tokens).lessons
    options = TrainingOptions(
        local_epochs=1, batch_size=asking.batch_size, learning_rate=asking.learning_rate
    )
    told(f"base model: learns to answer out of {len(lessons)} passages")
    loss = fit(generator, lessons, options, 0)
    model.model.save_pretrained(folder, safe_serialization=True)
    return loss


def asked_of(texts: Sequence[str], count: int, chance: np.random.Generator) -> list[Triple]:
    """Sentences near the beginning of texts, each asked for by some of its words."""
    found: list[Triple] = []
    times = -(-2 * count // len(texts))  # some documents have no such sentence
    for at in np.concatenate([chance.permutation(len(texts)) for _ in range(times)]).tolist():
        title, _, body = texts[at].partition("\n")
        lines = [line.strip() for one in sentences(body) for line in one.splitlines()]
        fitting = [line for line in lines[:_NEAR] if _SHORTEST <= len(line.split()) <= _LONGEST]
        if fitting:
            line = fitting[int(chance.integers(len(fitting)))]
            words = line.split()
            some = np.sort(chance.permutation(len(words))[:_WORDS]).tolist()
            question = f"{title}: {' '.join(words[n] for n in some)}?"
            found.append(Triple(question, (texts[at],), line, "distilled"))
        if len(found) == count:
            break
    return found
