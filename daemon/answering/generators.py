"""What writes answers: the generators by the name that the settings say (`retrieval.generator`).

To add one: its file, which gives a `Generator` for an open retriever, and its line here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from daemon.answering.extractive import ExtractiveGenerator
from daemon.answering.generator import Generator

if TYPE_CHECKING:
    from daemon.learning.retriever.retriever import Retriever

USUAL: Final = "extractive"

GENERATORS: dict[str, Callable[[Retriever], Generator]] = {
    USUAL: lambda retriever: ExtractiveGenerator(retriever.embed_queries, retriever.embed_passages),
}
