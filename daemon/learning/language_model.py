"""A language model in this process: any that transformers knows, causal or from text to text.

Only safetensors are read, from a folder of this machine, and no code in it is run. torch is
imported where a worker's job calls: this file's names may be held by any process.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from daemon.learning.options import LearningError
from daemon.process.chat_client import Sampling
from daemon.process.workers import GivenUp, given_up

_ENDLESS = 1 << 24  # tokens; tokenizers say 10^30 where they know no limit


class LanguageModelError(LearningError):
    """A language model can't be loaded or can't write this; the message says why."""


class LanguageModel:
    """A loaded model with its tokenizer."""

    def __init__(self, model: Any, tokenizer: Any) -> None:
        self._model, self._tokenizer = model, tokenizer
        self._to_text = bool(model.config.is_encoder_decoder)
        positions = getattr(model.config, "max_position_embeddings", None) or _ENDLESS
        self._longest = min(int(positions), int(tokenizer.model_max_length), _ENDLESS)

    @classmethod
    def load(cls, folder: Path, device: str = "cpu", *, eight_bit: bool = False) -> LanguageModel:
        """``eight_bit``: as its linear layers' weights are kept, with a scale for each row.

        Raises LanguageModelError for what can't be read, lacks weights or can't write.
        """
        import torch
        import transformers
        from safetensors import SafetensorError

        if not any(folder.glob("*.safetensors")):
            raise LanguageModelError(
                f"{folder} holds no *.safetensors: give a folder with a language model"
            )
        transformers.utils.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        local: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
        try:
            config = transformers.AutoConfig.from_pretrained(folder, **local)
            kind = transformers.AutoModelForCausalLM
            if config.is_encoder_decoder:
                kind = transformers.AutoModelForSeq2SeqLM
            tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **local)
            model, told = kind.from_pretrained(
                folder, use_safetensors=True, output_loading_info=True, **local
            )
        except (OSError, ValueError, KeyError, RuntimeError, ImportError, SafetensorError) as error:
            raise LanguageModelError(
                f"cannot load the language model in {folder}: {error}"
            ) from error
        # transformers draws what a file lacks: such a model would write by chance.
        if missing := sorted(told["missing_keys"]):
            raise LanguageModelError(
                f"the model in {folder} was not trained to write (it lacks "
                f"{', '.join(missing[:3])}): give a folder with a language model"
            )
        model = model.eval().requires_grad_(False).to(torch.device(device))
        if eight_bit:
            _keep_in_eight_bits(model)
        return cls(model, tokenizer)

    @property
    def special_tokens(self) -> tuple[str, ...]:
        """What the tokenizer reads as more than letters, longest first: the ends of turns, say."""
        added = {str(one) for one in self._tokenizer.get_added_vocab()}
        special = {str(one) for one in self._tokenizer.all_special_tokens}
        return tuple(sorted(filter(None, added | special), key=lambda one: (-len(one), one)))

    def room(self, new_tokens: int) -> int:
        """Tokens that a prompt may have beside a reply of so many; at most 0: none."""
        return self._longest if self._to_text else self._longest - new_tokens

    def count(self, text: str) -> int:
        """Tokens of a text, as a prompt."""
        return len(self._ids(text))

    def write(
        self,
        text: str,
        sampling: Sampling,
        within_s: float | None = None,
        told: Callable[[str], None] | None = None,
    ) -> str:
        """What the model writes behind a prompt; the same for the same prompt and seed.

        ``told`` hears with each token what is written so far. Between two tokens it is looked at,
        too, whether ``within_s`` are over, and whether anybody waits for it.
        Raises LanguageModelError for a prompt that is too long and where it takes too long,
        GivenUp, and whatever the model and ``told`` do.
        """
        import torch
        import transformers

        started = time.monotonic()
        ids, room = self._ids(text), self.room(sampling.new_tokens)
        if room < 1:
            raise LanguageModelError(
                f"the model has no room for a prompt beside {sampling.new_tokens} tokens"
            )
        if len(ids) > room:
            raise LanguageModelError(
                f"a prompt has {len(ids)} tokens and the model room for {room}"
            )
        drawn: dict[str, Any] = {"do_sample": False}
        if sampling.temperature > 0:
            drawn = {
                "do_sample": True,
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
            }
        tokenizer = self._tokenizer
        padding = tokenizer.pad_token_id
        row = torch.tensor([ids], device=self._model.device)
        first = 0 if self._to_text else len(ids)

        def decoded(written: Any) -> str:
            return str(tokenizer.decode(written[first:], skip_special_tokens=True))

        def enough(so_far: Any, _scores: Any, **_: Any) -> Any:
            if told is not None:
                told(decoded(so_far[0]))
            return torch.full((len(so_far),), given_up(), device=so_far.device)

        with torch.inference_mode(), _seeded(sampling.seed, self._model.device):
            out = self._model.generate(
                input_ids=row,
                attention_mask=torch.ones_like(row),
                max_new_tokens=sampling.new_tokens,
                max_time=within_s,
                pad_token_id=tokenizer.eos_token_id if padding is None else padding,
                stopping_criteria=transformers.StoppingCriteriaList([enough]),
                **drawn,
            )
        if given_up():
            raise GivenUp("nobody waits for what the language model writes")
        if within_s is not None and time.monotonic() - started > within_s:
            raise LanguageModelError(
                f"the language model took more than {within_s:g} s: choose a smaller one, or "
                "wait longer"
            )
        return decoded(out[0])

    def _ids(self, text: str) -> list[int]:
        tokenizer = self._tokenizer
        if self._to_text:
            ids: list[int] = tokenizer(text, verbose=False)["input_ids"]
            return ids
        if getattr(tokenizer, "chat_template", None):
            message = [{"role": "user", "content": text}]
            text = tokenizer.apply_chat_template(
                message, tokenize=False, add_generation_prompt=True
            )
        ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        start = tokenizer.bos_token_id
        return ids if start is None or ids[:1] == [start] else [start, *ids]


def _keep_in_eight_bits(model: Any) -> None:
    # It tells of libraries for other processors that it does not find, which nobody misses.
    logging.getLogger("torchao").setLevel(logging.ERROR)
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    quantize_(model, Int8WeightOnlyConfig())


@contextmanager
def _seeded(seed: int | None, device: Any) -> Iterator[None]:
    """Draws from that seed, and leaves the process's own sequence where it was."""
    import torch

    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        if seed is not None:
            torch.manual_seed(seed)
        yield
