"""The generator "transformers": a language model in a folder, run in the answering worker."""

from __future__ import annotations

import functools
from pathlib import Path

from daemon.answering.options import AnsweringOptions
from daemon.learning.language_model import LanguageModel, LanguageModelError
from daemon.learning.options import EncoderError

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
