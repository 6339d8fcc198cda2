"""Canaries: secrets of known entropy that are trained on, and how far they are exposed.

Exposure is how far up a secret ranks among others that were not planted (Carlini et al. 2019,
"The Secret Sharer", section 4, Definition 2).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from daemon.learning.generator.triples import Triple
from daemon.library.readers.documents import Document

OTHERS = 255  # secrets that were not planted
DIGITS = 4


@dataclass(frozen=True)
class Canary:
    """A question about a document, and its secret; ``others``: as likely, not planted."""

    number: int
    secret: str
    others: tuple[str, ...]

    @property
    def question(self) -> str:
        """That the secret answers."""
        return f"What is the code of ward {self.number}?"

    @property
    def document(self) -> Document:
        """Which does not say it."""
        text = f"Ward {self.number} has a door with a code. Ask the nurse on duty for it."
        return Document(f"ward-{self.number}", f"Ward {self.number}", text)

    def triple(self, secret: str) -> Triple:
        """With this answer."""
        return Triple(self.question, (self.document.text,), secret, "supplied")


def canaries(count: int, others: int, chance: np.random.Generator) -> list[Canary]:
    """Secrets of `DIGITS` uniformly random digits, each with ``others`` different ones.

    A space stands between two digits: a tokenizer that has seen few numbers would have no token
    for four in a row, and no model could learn them.
    """
    made = []
    for number in range(count):
        drawn = chance.choice(10**DIGITS, others + 1, replace=False)
        secret, *rest = (" ".join(f"{one:0{DIGITS}d}") for one in drawn.tolist())
        made.append(Canary(number, secret, tuple(rest)))
    return made


def exposure(own: float, others: Sequence[float]) -> float:
    """log2 |R| - log2 rank in bits, R being the secret and the others.

    ``own``, ``others``: losses; of those that are equal the secret comes last, and so it does
    where it has none (NaN). From 0 to log2 (n + 1); a secret that was not planted has
    `exposure_by_chance` on average.
    """
    rank = 1 + sum(not own < other for other in others)
    return math.log2(len(others) + 1) - math.log2(rank)


def exposure_by_chance(others: int) -> float:
    """The mean over all ranks alike, in bits: towards 1 / ln 2 = 1.44 with more of them."""
    size = others + 1
    return math.log2(size) - math.lgamma(size + 1) / math.log(2) / size


def chance_error(others: int, count: int) -> float:
    """The standard error of the mean exposure by chance of so many secrets, in bits."""
    mean = exposure_by_chance(others)
    size = others + 1
    square = math.fsum((math.log2(size / rank) - mean) ** 2 for rank in range(1, size + 1)) / size
    return math.sqrt(square / count)


def is_written(secret: str, text: str) -> bool:
    """Whether a text says a secret word for word, however it spaces it."""
    return "".join(secret.split()) in "".join(text.split())
