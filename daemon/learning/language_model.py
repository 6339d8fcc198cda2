"""A language model in this process: any that transformers knows, causal or from text to text.

Only safetensors are read, from a folder of this machine, and no code in it is run. torch is
imported where a worker's job calls: this file's names may be held by any process.
"""

from __future__ import annotations

import inspect
import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from daemon.learning.options import LearningError
from daemon.process.chat_client import Likelihood, Sampling
from daemon.process.workers import GivenUp, given_up

_REFERENCES = 3  # right answers whose likelihood is looked at
_FORETOLD = 512  # tokens of a text, at most
_ENDLESS = 1 << 24  # tokens; tokenizers say 10^30 where they know no limit


class LanguageModelError(LearningError):
    """A language model can't be loaded or can't write this; the message says why."""


class LanguageModel:
    """A loaded model with its tokenizer; ``to_text``: from text to text, else causal.

    ``version``: the digest of the version trained together that is loaded into it; b"": none is.
    """

    def __init__(self, model: Any, tokenizer: Any) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.version = b""
        self.to_text = bool(model.config.is_encoder_decoder)
        self._keeps_few = "logits_to_keep" in inspect.signature(model.forward).parameters
        positions = getattr(model.config, "max_position_embeddings", None) or _ENDLESS
        self._longest = min(int(positions), int(tokenizer.model_max_length), _ENDLESS)

    @classmethod
    def load(cls, folder: Path, device: str = "cpu", *, eight_bit: bool = False) -> LanguageModel:
        """``eight_bit``: as its linear layers' weights are kept, with a scale for each row.

        Raises LanguageModelError for what can't be read, lacks weights or can't write.
        """
        import torch

        model, tokenizer = read_folder(folder)
        model = model.eval().requires_grad_(False).to(torch.device(device))
        if eight_bit:
            _keep_in_eight_bits(model)
        return cls(model, tokenizer)

    @property
    def special_tokens(self) -> tuple[str, ...]:
        """What the tokenizer reads as more than letters, longest first: the ends of turns, say."""
        added = {str(one) for one in self.tokenizer.get_added_vocab()}
        special = {str(one) for one in self.tokenizer.all_special_tokens}
        return tuple(sorted(filter(None, added | special), key=lambda one: (-len(one), one)))

    def room(self, new_tokens: int) -> int:
        """Tokens that a prompt may have beside a reply of so many; at most 0: none."""
        return self._longest if self.to_text else self._longest - new_tokens

    def count(self, text: str) -> int:
        """Tokens of a text, as a prompt."""
        return len(self.prompt_ids(text))

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
        ids, room = self.prompt_ids(text), self.room(sampling.new_tokens)
        if room < 1:
            raise LanguageModelError(
                f"the model has no room for a prompt beside {sampling.new_tokens} tokens"
            )
        if len(ids) > room:
            raise LanguageModelError(
                f"a prompt has {len(ids)} tokens and the model room for {room}"
            )
        # All of it: what is not said would be as the model's folder has it.
        drawn: dict[str, Any] = {
            "do_sample": False,
            "repetition_penalty": sampling.repetition,
        }
        if sampling.temperature > 0:
            drawn |= {
                "do_sample": True,
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
                "top_k": sampling.top_k,
            }
        tokenizer = self.tokenizer
        padding = tokenizer.pad_token_id
        row = torch.tensor([ids], device=self.model.device)
        first = 0 if self.to_text else len(ids)

        def decoded(written: Any) -> str:
            return str(tokenizer.decode(written[first:], skip_special_tokens=True))

        def enough(so_far: Any, _scores: Any, **_: Any) -> Any:
            if told is not None:
                told(decoded(so_far[0]))
            return torch.full((len(so_far),), given_up(), device=so_far.device)

        with torch.inference_mode(), _seeded(sampling.seed, self.model.device):
            out = self.model.generate(
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

    def measured(
        self,
        text: str,
        sampling: Sampling,
        within_s: float | None = None,
        references: Sequence[str] = (),
    ) -> tuple[str, Likelihood]:
        """As `write`, and how probable that and the likeliest of ``references`` are to the model.

        Of the first `_REFERENCES`, which take a pass of the model each, after ``within_s``; between
        two passes it is looked at whether anybody waits for it. Raises what `write` does.
        """
        written = self.write(text, sampling, within_s)
        lacking = ""

        def nats(texts: Sequence[str]) -> float | None:
            nonlocal lacking
            try:
                return min((self.surprise(text, one) for one in texts), default=None)
            except LanguageModelError as error:
                lacking = str(error)
                return None

        behind = [self.behind(one) for one in references[:_REFERENCES]]
        return written, Likelihood(nats([written]), nats(behind), lacking)

    def surprise(self, text: str, continuation: str) -> float:
        """Mean negative log-likelihood of a text's tokens behind a prompt, in nats a token.

        Of its first `_FORETOLD` (Jelinek et al. 1977). Raises LanguageModelError where there is no
        token, no room for it, or the figure isn't finite, and GivenUp before its pass.
        """
        import torch

        if given_up():
            raise GivenUp("nobody waits for what the language model is asked")
        ids, asked = self.prompt_ids(text), self.tokenizer(continuation, add_special_tokens=False)
        more: list[int] = asked["input_ids"][:_FORETOLD]
        if not more:
            raise LanguageModelError("there is no token to foretell")
        if len(ids) > self.room(len(more)):
            raise LanguageModelError("the model has no room for the text behind the prompt")
        device, wanted = self.model.device, len(more)
        aims = torch.tensor(more, device=device)
        with torch.inference_mode():
            if self.to_text:
                asks = torch.tensor([ids], device=device)
                logits = self.model(input_ids=asks, labels=aims[None]).logits[0]
            else:
                asks = torch.tensor([ids + more], device=device)
                # Of the last tokens alone, where the model can: a row has a number for every word.
                few = {"logits_to_keep": wanted + 1} if self._keeps_few else {}
                logits = self.model(input_ids=asks, **few).logits[0, -wanted - 1 : -1]
            lost = [
                torch.nn.functional.cross_entropy(
                    logits[row : row + 64].float(), aims[row : row + 64], reduction="sum"
                ).item()
                for row in range(0, wanted, 64)
            ]
        mean = math.fsum(lost) / wanted
        if not math.isfinite(mean):
            raise LanguageModelError("the model gives a token of the text no probability")
        return mean

    def behind(self, text: str) -> str:
        """A text as it goes on behind a prompt that is no turn of a conversation: with a space."""
        template = getattr(self.tokenizer, "chat_template", None)
        return text if self.to_text or template else f" {text}"

    def prompt_ids(self, text: str) -> list[int]:
        """The tokens of a prompt: as a turn of a conversation where the model has such."""
        tokenizer = self.tokenizer
        if self.to_text:
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


def read_folder(folder: Path, *, to_train: bool = False) -> tuple[Any, Any]:
    """Model and tokenizer of a folder; ``to_train``: with float32 weights and without dropout.

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
        how: dict[str, Any] = {}
        if to_train:
            how = {"dtype": torch.float32, "config": _without_dropout(config)}
        model, told = kind.from_pretrained(
            folder, use_safetensors=True, output_loading_info=True, **local, **how
        )
    except (OSError, ValueError, KeyError, RuntimeError, ImportError, SafetensorError) as error:
        raise LanguageModelError(f"cannot load the language model in {folder}: {error}") from error
    # transformers draws what a file lacks: such a model would write by chance.
    if missing := sorted(told["missing_keys"]):
        raise LanguageModelError(
            f"the model in {folder} was not trained to write (it lacks "
            f"{', '.join(missing[:3])}): give a folder with a language model"
        )
    return model, tokenizer


def _without_dropout(config: Any) -> Any:
    """Each family has rates of its own, under names of its own (attn_pdrop, layerdrop)."""
    for name, value in config.to_dict().items():
        if "drop" in name and isinstance(value, float):
            setattr(config, name, 0.0)
    return config


def _keep_in_eight_bits(model: Any) -> None:
    # It tells of libraries for other processors that it does not find, which nobody misses.
    logging.getLogger("torchao").setLevel(logging.ERROR)
    try:
        from torchao.quantization import Int8WeightOnlyConfig, quantize_
    except ImportError as error:
        raise LanguageModelError(
            "8 bits need torchao: install hanse[eight-bit], or set eight_bit = false"
        ) from error
    quantize_(model, Int8WeightOnlyConfig())


@contextmanager
def _seeded(seed: int | None, device: Any) -> Iterator[None]:
    """Draws from that seed, and leaves the process's own sequence where it was."""
    import torch

    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        if seed is not None:
            torch.manual_seed(seed)
        yield
