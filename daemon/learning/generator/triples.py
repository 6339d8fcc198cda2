"""What a generator learns from: questions, each with passages and the answer they give."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Triple:
    """A question, the texts of passages, best first, and the answer to learn.

    ``how``: somebody ``supplied`` the answer, the site's own model has ``made`` it, or it is
    ``distilled``: sentences of the passages as the extractive generator picks them.
    """

    question: str
    passages: tuple[str, ...]
    answer: str
    how: Literal["supplied", "made", "distilled"]
