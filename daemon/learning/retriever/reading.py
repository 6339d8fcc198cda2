"""How an encoder is to be read, as its makers say in the files beside it.

The files are those of Sentence Transformers: ``modules.json`` names what stands behind the
transformer, ``1_Pooling/config.json`` how the vectors of a text's tokens become one,
``config_sentence_transformers.json`` what is written before a question or a passage, and
``sentence_bert_config.json`` whether texts are read in small letters. A folder without them
is read by the mean and without prompts. What is not read here is refused by name: run
otherwise than it was trained, an encoder finds worse and nobody sees why. Its model card,
``README.md``, names the languages that it is for.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from huggingface_hub import metadata_load
from torch import Tensor
from yaml import YAMLError

from config.kinds import LONGEST_PROMPT, Pooling
from daemon.learning.options import EncoderError
from daemon.learning.retriever.spec import AS_MADE, ReadingOptions
from daemon.library.readers.bounds import is_language

FILES = (
    "modules.json",
    "*_Pooling/config.json",
    "config_sentence_transformers.json",
    "sentence_bert_config.json",
    "README.md",
)
"""What a hub is asked for beside weights and tokenizer."""

_LARGEST = 1 << 20  # bytes of one of these files
_READ = ("Transformer", "Pooling", "Normalize")  # vectors are brought to length 1 here anyway
_FLAG = "pooling_mode_"


def _mean(hidden: Tensor, mask: Tensor) -> Tensor:
    """Of the tokens of the text. Padding is masked: else a vector would depend on its batch."""
    real = mask.unsqueeze(-1).to(hidden.dtype)  # [b, t, 1]
    return (hidden * real).sum(dim=1) / real.sum(dim=1).clamp(min=1.0)


def _first(hidden: Tensor, mask: Tensor) -> Tensor:
    return hidden[torch.arange(len(hidden), device=hidden.device), mask.argmax(dim=1)]


def _last(hidden: Tensor, mask: Tensor) -> Tensor:
    """Padding may stand before the text or behind it."""
    return hidden[torch.arange(len(hidden), device=hidden.device), mask.cumsum(dim=1).argmax(dim=1)]


def _max(hidden: Tensor, mask: Tensor) -> Tensor:
    return hidden.masked_fill(mask.unsqueeze(-1) == 0, float("-inf")).amax(dim=1)


POOLINGS: dict[Pooling, Callable[[Tensor, Tensor], Tensor]] = {
    "mean": _mean,
    "cls": _first,
    "max": _max,
    "lasttoken": _last,
}
"""Hidden states [b, t, d] and the mask of real tokens [b, t] to a vector a text [b, d]."""

_CALLED = {"mean_tokens": "mean", "cls_token": "cls", "max_tokens": "max"}


@dataclass(frozen=True)
class Side:
    """How questions, or passages, become vectors: behind which prompt, by which pooling."""

    prompt: str = ""
    pooling: Pooling = "mean"


@dataclass(frozen=True)
class Reading:
    """How texts become vectors: those of either side, and whether in small letters."""

    query: Side = Side()
    passage: Side = Side()
    lower: bool = False

    @property
    def name(self) -> str:
        """What an encoder's digest says of it; of one pooling for both sides as it always did."""
        if self == Reading():
            return "mean-pooling"
        query, passage = self.query, self.passage
        alike = query.pooling == passage.pooling
        pooling = query.pooling if alike else [query.pooling, passage.pooling]
        return json.dumps([pooling, query.prompt, passage.prompt, self.lower])


def reading_of(folder: Path, options: ReadingOptions = AS_MADE) -> Reading:
    """How the encoder in a folder is read; an option that is given takes the place of its own.

    Raises EncoderError for what is not read here, and for files that are damaged.
    """
    modules = _modules(folder)
    card = _object(folder / "config_sentence_transformers.json")
    similarity = card.get("similarity_fn_name") or "cosine"
    if similarity != "cosine" and not (similarity == "dot" and "Normalize" in modules):
        raise EncoderError(
            f"the encoder in {folder} is compared by {similarity!r}, and vectors are compared by "
            "their cosine here: choose another one"
        )
    pooling = _object(folder / modules.get("Pooling", "1_Pooling") / "config.json")
    prompts = _prompts(folder, card)
    usual = prompts.get(str(card.get("default_prompt_name")), "")
    query_prompt, passage_prompt = options.query_prompt, options.passage_prompt
    if query_prompt is None:
        query_prompt = prompts.get("query", usual)
    if passage_prompt is None:
        passage_prompt = prompts.get("passage", prompts.get("document", usual))
    if (query_prompt or passage_prompt) and pooling.get("include_prompt") is False:
        raise EncoderError(
            f"the encoder in {folder} leaves its prompts out of its vectors, which is not done "
            "here: choose another one"
        )
    lower = _object(folder / "sentence_bert_config.json").get("do_lower_case") is True
    of_query, of_passage = options.query_pooling, options.passage_pooling
    if of_query is None or of_passage is None:  # else its own need not be one that is read here
        made = _pooling(folder, pooling)
        of_query, of_passage = of_query or made, of_passage or made
    return Reading(Side(query_prompt, of_query), Side(passage_prompt, of_passage), lower)


def languages_of(folder: Path) -> frozenset[str]:
    """Languages that the encoder in a folder is for, by its model card: ISO 639-1.

    None where the card does not say, or also names what is no such language ("multilingual"):
    then nobody is told that an encoder does not know theirs.
    """
    card = folder / "README.md"
    if not card.is_file() or card.stat().st_size > _LARGEST:
        return frozenset()
    try:
        said = (metadata_load(card) or {}).get("language") or []
    except (OSError, ValueError, RecursionError, YAMLError):
        return frozenset()
    named = [said] if isinstance(said, str) else said
    if not isinstance(named, list) or not all(
        isinstance(one, str) and is_language(one) for one in named
    ):
        return frozenset()
    return frozenset(named)


def _prompts(folder: Path, card: dict[str, Any]) -> dict[str, str]:
    """Prompts by name, none longer than a setting may be: what follows would not be read."""
    prompts = card.get("prompts") or {}
    if not isinstance(prompts, dict) or not all(
        isinstance(prompt, str) and len(prompt) <= LONGEST_PROMPT for prompt in prompts.values()
    ):
        raise EncoderError(
            f"the prompts of the encoder in {folder} are no texts of up to {LONGEST_PROMPT} "
            "characters: set retriever.query_prompt and passage_prompt, and take them out of its "
            "config_sentence_transformers.json"
        )
    return prompts


def _modules(folder: Path) -> dict[str, str]:
    """The folder of each kind of module that stands behind the transformer, as far as read."""
    found: dict[str, str] = {}
    for module in _read(folder / "modules.json", list):
        kind = str(module.get("type")).rpartition(".")[2] if isinstance(module, dict) else "?"
        if kind not in _READ or kind in found:
            raise EncoderError(
                f"the encoder in {folder} has a module {kind!r} "
                f"{'twice' if kind in found else 'that is not read here'}: choose one with a "
                f"transformer, a pooling ({', '.join(POOLINGS)}) and nothing else"
            )
        found[kind] = str(module.get("path", ""))
    place = Path(found.get("Pooling", "."))
    if place.is_absolute() or ".." in place.parts:
        raise EncoderError(f"{folder / 'modules.json'} names a folder outside of the encoder's")
    return found


def _pooling(folder: Path, config: dict[str, Any]) -> Pooling:
    """The one pooling that a configuration switches on; the mean where it says nothing."""
    if isinstance(config.get("pooling_mode"), str):
        on = [config["pooling_mode"]]
    else:
        flags = [key.removeprefix(_FLAG) for key, value in config.items() if value is True]
        on = [_CALLED.get(flag, flag) for flag in flags if f"{_FLAG}{flag}" in config]
    on = on or ["mean"]
    if len(on) > 1 or on[0] not in POOLINGS:
        raise EncoderError(
            f"the encoder in {folder} pools by {' and '.join(on)}; expected one of "
            f"{', '.join(POOLINGS)}: choose another one, or say otherwise by "
            "retriever.query_pooling and passage_pooling"
        )
    return cast(Pooling, on[0])


def _object(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = _read(path, dict)
    return found


def _read(path: Path, kind: type[Any]) -> Any:
    """What a JSON file holds; nothing of that kind where there is no file."""
    if not path.is_file():
        return kind()
    try:
        with path.open("rb") as file:
            found = json.loads(file.read(_LARGEST))
    except (OSError, ValueError, RecursionError) as error:
        raise EncoderError(f"cannot read {path}: {error}: fetch the encoder anew") from error
    if not isinstance(found, kind):
        raise EncoderError(f"{path} holds no JSON {kind.__name__}: fetch the encoder anew")
    return found
