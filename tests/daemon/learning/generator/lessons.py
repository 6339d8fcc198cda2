"""Questions about a yard's things, each with the answer to learn, and generators to teach."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from daemon.learning.generator.encoding import Example, Lesson, encoded
from daemon.learning.generator.generator import Generator
from daemon.learning.generator.spec import GeneratorSpec
from tests.support.small_models import small_generator

THINGS = ("pump", "lamp", "rope", "sail", "gate", "bell", "well", "kiln", "loom", "mill")
CARE = ("oil", "salt", "tar", "soap", "wax")
KINDS = ("t5", "gpt2", "llama")
SAID = [
    Example(
        f"the {thing} stands in the yard. " * (1 + number % 3) + f"what does the {thing} need?",
        f"the {thing} needs {CARE[number % len(CARE)]}" + " and water" * (number % 2),
    )
    for number, thing in enumerate(THINGS)
]


def made(folder: Path, kind: str) -> Path:
    return small_generator(
        folder, kind, [text for one in SAID for text in (one.prompt, one.answer)]
    )


def loaded(folder: Path, **chosen: Any) -> Generator:
    options = {"prompt_tokens": 64, "answer_tokens": 16, "device": "cpu", **chosen}
    return Generator.load(GeneratorSpec(base_model=str(folder), **options))


def lessons_of(generator: Generator, said: Sequence[Example] = SAID) -> tuple[Lesson, ...]:
    spec = generator.spec
    taken = encoded(generator.language_model, said, spec.prompt_tokens, spec.answer_tokens)
    assert not taken.left_out
    return taken.lessons


def answer_loss(generator: Generator, lessons: Sequence[Lesson], size: int = 4) -> float:
    """In nats a token of the answers."""
    with torch.inference_mode():
        lost = sum(generator.loss(one).item() for one in generator.batches(lessons, size))
    return lost / sum(len(lesson.answer) for lesson in lessons)


def some_tokens(chance: np.random.Generator, count: int) -> tuple[int, ...]:
    """At random, of those that every model here has."""
    return tuple(chance.integers(6, 200, count).tolist())
