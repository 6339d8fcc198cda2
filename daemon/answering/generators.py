"""What writes answers: the generators by the name that the settings say (`retrieval.generator`).

To add one: its file, which gives a `Generator` for what embeds questions and sentences and for
the site's options, and its line here. What it needs beside these is an option of its own, in
config/answering.py. It is made when a version is opened.
"""

from __future__ import annotations

from collections.abc import Callable

from config.answering import USUAL_GENERATOR
from daemon.answering.embedding import QuestionEmbedder, SentenceEmbedder
from daemon.answering.extractive import ExtractiveGenerator
from daemon.answering.generator import Generator
from daemon.answering.options import AnsweringOptions

Make = Callable[[QuestionEmbedder, SentenceEmbedder, AnsweringOptions], Generator]
GENERATORS: dict[str, Make] = {
    USUAL_GENERATOR: lambda question, sentences, _: ExtractiveGenerator(question, sentences),
}
