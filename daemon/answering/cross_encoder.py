"""Reads a question and a passage together, and ranks the best passages anew.

A cross-encoder (Nogueira and Cho, 2019) sees each word of the question beside each of the
passage, where an encoder has made a vector of either before they meet: it ranks better, and
takes a forward pass a passage while a person waits. Any sequence classifier of Hugging Face with
one output. Only safetensors are read, from a folder of this machine, and no code is run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import structlog
import torch
import transformers
from safetensors import SafetensorError

from crypto.arrays import Float32
from daemon.learning.options import EncoderError
from daemon.library.search import Explanation, Ranked

log = structlog.get_logger()

_AT_ONCE = 16  # passages in a forward pass
_LONGEST = 512  # tokens of question and passage together
_REMEDY = "correct retrieval.cross_encoder, or remove it"


class CrossEncoder:
    """A loaded model; ``depth``: so many of the best passages are ranked anew."""

    def __init__(self, model: Any, tokenizer: Any, max_tokens: int, depth: int) -> None:
        self.depth = depth
        self._model, self._tokenizer, self._max_tokens = model, tokenizer, max_tokens

    @classmethod
    def load(cls, folder: Path, depth: int) -> CrossEncoder:
        """Raises EncoderError for what can't be read, or has other than one output."""
        if not any(folder.glob("*.safetensors")):
            raise EncoderError(f"the cross-encoder {folder} holds no *.safetensors: {_REMEDY}")
        transformers.utils.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        local: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
        try:
            tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **local)
            model, told = transformers.AutoModelForSequenceClassification.from_pretrained(
                folder,
                use_safetensors=True,
                dtype=torch.float32,
                output_loading_info=True,
                **local,
            )
        except (OSError, ValueError, KeyError, RuntimeError, ImportError, SafetensorError) as error:
            raise EncoderError(
                f"cannot load the cross-encoder in {folder}: {error}: {_REMEDY}"
            ) from error
        # transformers draws what a file lacks: such a model would rank by chance.
        if missing := sorted(told["missing_keys"]):
            raise EncoderError(
                f"the model in {folder} was not trained to compare texts (it lacks "
                f"{', '.join(missing[:3])}): {_REMEDY}"
            )
        if model.config.num_labels != 1:
            raise EncoderError(
                f"the model in {folder} has {model.config.num_labels} outputs, and a "
                f"cross-encoder has one: {_REMEDY}"
            )
        longest = getattr(model.config, "max_position_embeddings", _LONGEST)
        return cls(model.eval().requires_grad_(False), tokenizer, min(_LONGEST, longest), depth)

    def scores(self, question: str, texts: Sequence[str]) -> Float32:
        """[n] what the model gives each text; greater is better, and compares among these."""
        found = np.zeros(len(texts), np.float32)
        for start in range(0, len(texts), _AT_ONCE):
            some = list(texts[start : start + _AT_ONCE])
            tokens = self._tokenizer(
                [question] * len(some),
                some,
                padding=True,
                truncation=True,
                max_length=self._max_tokens,
                return_tensors="pt",
            )
            with torch.inference_mode():
                found[start : start + len(some)] = self._model(**tokens).logits[:, 0].numpy()
        return found

    def ranked(self, question: str, found: Sequence[Ranked]) -> list[Ranked]:
        """The first of them by their scores, the others behind them as they were.

        Where the model fails, as it may for want of memory, all as they were.
        """
        best = list(found[: self.depth])
        try:
            scores = self.scores(question, [one.passage.embedding_text for one in best])
        except RuntimeError as error:
            log.warning("passages are not ranked by the cross-encoder", cause=str(error))
            return list(found)
        order = np.argsort(-scores, kind="stable").tolist()
        anew = [_with(best[row], float(scores[row]), row + 1) for row in order]
        return [*anew, *found[self.depth :]]


def _with(one: Ranked, score: float, place: int) -> Ranked:
    explanation: Explanation | None = one.explanation
    if explanation is not None:
        explanation = replace(explanation, cross_score=score, place_before=place)
    return replace(one, explanation=explanation)
