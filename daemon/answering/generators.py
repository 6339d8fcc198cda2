"""What writes answers: the generators by the name that the settings say (`retrieval.generator`).

To add one: its file, which gives a `Generator` for what embeds questions and sentences and for
the site's options, and its line here. What it needs beside these is an option of its own, in
config/answering.py. It is made when a version is opened.

What may lack the model that it is made with has a line in `CHECKS`, too: then a start is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from config.answering import USUAL_GENERATOR
from daemon.answering import openai_server, transformers_model
from daemon.answering.answering import OpenVersion
from daemon.answering.embedding import QuestionEmbedder, SentenceEmbedder
from daemon.answering.extractive import ExtractiveGenerator
from daemon.answering.generator import Generator
from daemon.answering.options import AnsweringOptions
from daemon.answering.written import AnswerModel, WrittenGenerator
from daemon.learning.generator.in_use import InUse

Make = Callable[[QuestionEmbedder, SentenceEmbedder, AnsweringOptions], Generator]


def _written(load: Callable[[AnsweringOptions], AnswerModel]) -> Make:
    def make(
        question: QuestionEmbedder, sentences: SentenceEmbedder, options: AnsweringOptions
    ) -> Generator:
        extractive = ExtractiveGenerator(question, sentences)
        return WrittenGenerator(partial(load, options), extractive, options)

    return make


GENERATORS: dict[str, Make] = {
    USUAL_GENERATOR: lambda question, sentences, _: ExtractiveGenerator(question, sentences),
    "transformers": _written(transformers_model.model),
    "openai": _written(openai_server.model),
    "federated": _written(transformers_model.federated),
}
CHECKS: dict[str, Callable[[AnsweringOptions], AnswerModel]] = {
    "transformers": transformers_model.model,
    "openai": openai_server.model,
    "federated": transformers_model.federated,
}


def written_by(values: InUse, version: OpenVersion, options: AnsweringOptions) -> OpenVersion:
    """The open version with answers of the federated generator with these ``values``.

    As in `daemon.answering.generator.Asking`. Raises LanguageModelError: nothing stands in.
    """
    if options.federated is not None:
        options = replace(options, federated=replace(options.federated, values=values))
    transformers_model.federated(options)
    make = GENERATORS["federated"]
    return replace(
        version, generator=make(version.embed_question, version.embed_sentences, options)
    )
