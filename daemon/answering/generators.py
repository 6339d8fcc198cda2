"""What writes answers: the generators by the name that the settings say (`retrieval.generator`).

To add one: its file, which gives a `Generator` for what embeds questions and sentences, and
its line here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from daemon.answering.embedding import QuestionEmbedder, SentenceEmbedder
from daemon.answering.extractive import ExtractiveGenerator
from daemon.answering.generator import Generator

USUAL: Final = "extractive"

GENERATORS: dict[str, Callable[[QuestionEmbedder, SentenceEmbedder], Generator]] = {
    USUAL: ExtractiveGenerator,
}
