"""Reads a question and a passage together, and ranks the best passages anew.

A cross-encoder (Nogueira and Cho, 2019) sees each word of the question beside each of the
passage, where an encoder has made a vector of either before they meet: it ranks better, and
takes a forward pass a passage while a person waits. Any sequence classifier of Hugging Face with
one output. Only safetensors are read, from a folder of this machine, and no code is run.

A model that can't rank is refused when it is loaded, where a person sees it. What goes wrong
later, or takes too long, leaves a question with the ranking that there was, and says so.
"""

from __future__ import annotations

import time
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
from daemon.answering.generator import cause_of
from daemon.learning.options import EncoderError
from daemon.learning.retriever.encoder import chosen_device
from daemon.library.search import Explanation, Ranked

log = structlog.get_logger()

_AT_ONCE = 8  # passages in a forward pass, between which the clock is looked at
_LONGEST = 512  # tokens of question and passage together
_SECONDS = 10.0  # for one question: who asks waits for them
_REMEDY = "correct retrieval.cross_encoder, or remove it"


class CrossEncoder:
    """A loaded model; ``depth``: so many of the best passages are ranked anew."""

    def __init__(self, model: Any, tokenizer: Any, max_tokens: int, depth: int) -> None:
        self.depth = depth
        self._model, self._tokenizer, self._max_tokens = model, tokenizer, max_tokens

    @classmethod
    def load(cls, folder: Path, depth: int, device: str = "auto") -> CrossEncoder:
        """Raises EncoderError for what can't be read, can't compare, or has not one output."""
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
        model = model.eval().requires_grad_(False).to(chosen_device(device))
        positions = getattr(model.config, "max_position_embeddings", _LONGEST)
        loaded = cls(model, tokenizer, min(_LONGEST, positions, tokenizer.model_max_length), depth)
        try:  # of two lengths, one of them too long: padded, and cut
            loaded.scores("which?", ["that", "this " * _LONGEST])
        except Exception as error:  # any: what a stranger's model does nobody can list
            raise EncoderError(
                f"the model in {folder} can't compare texts: {cause_of(error)}: {_REMEDY}"
            ) from error
        return loaded

    def scores(self, question: str, texts: Sequence[str]) -> Float32:
        """[n] what the model gives each text; greater is better, and compares among these.

        Raises TimeoutError, ValueError where these are no numbers, and whatever the model does.
        """
        until = time.monotonic() + _SECONDS
        found = np.zeros(len(texts), np.float32)
        order = sorted(range(len(texts)), key=lambda row: len(texts[row]))  # little padding
        for start in range(0, len(order), _AT_ONCE):
            if start and time.monotonic() > until:
                raise TimeoutError(
                    f"{start} of {len(order)} passages took more than {_SECONDS:g} s: lower "
                    "retrieval.cross_encoder_depth, or choose a smaller model"
                )
            rows = order[start : start + _AT_ONCE]
            some = [texts[row] for row in rows]
            tokens = self._tokenizer(
                [question] * len(some),
                some,
                padding=True,
                truncation=True,
                max_length=self._max_tokens,
                return_tensors="pt",
            ).to(self._model.device)
            with torch.inference_mode():
                found[rows] = self._model(**tokens).logits[:, 0].float().cpu().numpy()
        if not np.isfinite(found).all():
            raise ValueError("it gives passages what is no number")
        return found

    def ranked(self, question: str, found: Sequence[Ranked]) -> tuple[list[Ranked], str]:
        """The first of them by their scores, the others behind them as they were.

        Where the model fails, as it may for want of memory, or is slow: all as they were, and why.
        """
        best = list(found[: self.depth])
        try:
            scores = self.scores(question, [one.passage.embedding_text for one in best])
        except Exception as error:  # any, as above: the answer is not to be lost
            cause = cause_of(error)
            log.warning("passages are not ranked by the cross-encoder", cause=cause)
            return list(found), cause
        order = np.argsort(-scores, kind="stable").tolist()
        anew = [_with(best[row], float(scores[row]), row + 1) for row in order]
        return [*anew, *found[self.depth :]], ""


def _with(one: Ranked, score: float, place: int) -> Ranked:
    explanation: Explanation | None = one.explanation
    if explanation is not None:
        explanation = replace(explanation, cross_score=score, place_before=place)
    return replace(one, explanation=explanation)
