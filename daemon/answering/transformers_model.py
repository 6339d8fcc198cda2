"""The generators "transformers" and "federated": language models run in the answering worker.

The first is in a folder. The other is what the sites train together: a base model with the
version that this site's validation has chosen, alone until one is. That is looked at with each
question: what was chosen meanwhile answers the next one.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from crypto.arrays import Float32
from daemon.answering.options import AnsweringOptions, FederatedWriter
from daemon.learning.generator.in_use import InUse, read_in_use
from daemon.learning.language_model import LanguageModel, LanguageModelError
from daemon.learning.options import EncoderError, LearningError
from daemon.personal.generator import vector_in_use
from daemon.state.versions import VersionError

if TYPE_CHECKING:
    from daemon.learning.generator.generator import Generator

_REMEDY = "correct retrieval.language_model, or choose another retrieval.generator"


def model(options: AnsweringOptions) -> LanguageModel:
    """The one that is named, loaded once a process; raises LanguageModelError."""
    return _loaded(options.language_model, options.device, options.eight_bit)


@functools.lru_cache(maxsize=1)
def _loaded(folder: str, device: str, eight_bit: bool) -> LanguageModel:
    from daemon.learning.retriever.encoder import chosen_device

    try:
        return LanguageModel.load(Path(folder), str(chosen_device(device)), eight_bit=eight_bit)
    except (LanguageModelError, EncoderError) as error:
        raise LanguageModelError(f"{error}: {_REMEDY}") from error


def federated(options: AnsweringOptions) -> LanguageModel:
    """The base model with the chosen version; raises LanguageModelError."""
    writer = options.federated
    if writer is None:
        raise LanguageModelError(
            "no base model is here for retrieval.generator = 'federated': set generator.base_model"
        )
    return _loaded_writer(replace(writer, values=None)).language_model(writer.values)


class _Writer:
    """One loaded generator, and the version or mixture that is in it."""

    def __init__(self, writer: FederatedWriter, generator: Generator) -> None:
        self._writer = writer
        self._generator = generator
        self._loaded = InUse()

    def language_model(self, values: InUse | None) -> LanguageModel:
        """With those in it; None: as it is to answer now."""
        wanted = values or read_in_use(self._writer.in_use).values
        if wanted != self._loaded:
            try:
                self._generator.load_vector(self._vector(wanted))
            except VersionError as error:
                raise LanguageModelError(f"the generator's version is not used: {error}") from error
            self._loaded = wanted
            self._generator.language_model.version = bytes.fromhex(wanted.version)
        return self._generator.language_model

    def _vector(self, values: InUse) -> Float32:
        if not values.version:
            return self._generator.initial_vector()
        shape = self._generator.shape_manifest.digest
        return vector_in_use(values, self._writer.spec, self._writer.versions, shape)


@functools.lru_cache(maxsize=1)
def _loaded_writer(writer: FederatedWriter) -> _Writer:
    from daemon.learning.generator.generator import Generator

    try:
        return _Writer(writer, Generator.load(writer.spec))
    except LearningError as error:
        raise LanguageModelError(f"{error}: correct generator.base_model") from error
