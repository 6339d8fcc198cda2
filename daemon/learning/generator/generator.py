"""A language model with the parameters that a federation trains of it.

As the retrievers of `daemon.learning.retriever` it exchanges one flat float32 vector and starts
as exactly its base model. Whether a model keeps packed examples apart is measured when it is
loaded, not looked up: positions that begin anew are all that it is told.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from daemon.learning.adaptations import Adaptation, Adapted, AllWeights, Lora, ProjectedWeights
from daemon.learning.generator.encoding import IGNORED, Batch, Lesson, batches
from daemon.learning.generator.spec import GeneratorSpec
from daemon.learning.language_model import LanguageModel, LanguageModelError, read_folder
from daemon.learning.model_files import digest_of
from daemon.learning.options import LearningError
from daemon.learning.retriever.encoder import chosen_device

# Query and value projections of attention layers under the names that families give them; where
# one layer makes query, key and value at once, that one.
_QUERY_AND_VALUE = (
    *(("q_proj", "v_proj"), ("q", "v"), ("query", "value"), ("q_lin", "v_lin")),
    *(("c_attn",), ("query_key_value",), ("qkv_proj",), ("Wqkv",)),
)
_AT_ONCE = 64  # answers behind one prompt
_ALIKE = 1e-4  # of the largest logit: more than rounding, less than any attention


class Generator(Adapted):
    """A language model, causal or from text to text, that is trained to answer."""

    def __init__(
        self, language_model: LanguageModel, adaptation: Adaptation, spec: GeneratorSpec
    ) -> None:
        super().__init__(adaptation)
        self.language_model, self.spec = language_model, spec
        self.packs = not language_model.to_text and keeps_apart(language_model.model)

    @classmethod
    def load(cls, spec: GeneratorSpec) -> Generator:
        """Load the base model and adapt it, at its starting vector.

        Raises LearningError for what can't be read, can't write or isn't there to adapt.
        """
        torch.set_num_threads(spec.threads)
        folder, device = Path(spec.base_model), chosen_device(spec.device)
        model, tokenizer = read_folder(folder, to_train=True)
        model = model.eval().requires_grad_(False).to(device)
        try:
            # How a conversation is put decides what a prompt's tokens are.
            digest = digest_of(folder, "hanse-generator-v1\0", "chat_template.jinja")
        except OSError as error:
            raise LanguageModelError(f"cannot read {folder}: {error}") from error
        adaptation = adaptation_of(model, spec, digest.hex())
        generator = cls(LanguageModel(model, tokenizer), adaptation, spec)
        if spec.checkpointing:
            generator.checkpoint()
        return generator

    def checkpoint(self) -> None:
        """From now on compute activations again instead of keeping them; raises LearningError."""
        try:
            self.language_model.model.gradient_checkpointing_enable({"use_reentrant": False})
        except ValueError as error:
            raise LearningError(
                f"generator.checkpointing: the model can't ({error}): set it to false"
            ) from error

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return torch.device(self.language_model.model.device)

    def batches(self, lessons: Sequence[Lesson], size: int) -> list[Batch]:
        """As `daemon.learning.generator.encoding.batches`."""
        language = self.language_model
        padding = language.tokenizer.pad_token_id  # some have none: any token will do
        return batches(
            lessons,
            size,
            to_text=language.to_text,
            packs=self.packs,
            padding=0 if padding is None else padding,
        )

    def loss(self, batch: Batch) -> Tensor:
        """The negative log-likelihood of the batch's answers: a sum over tokens, in nats."""
        model = self.language_model.model
        tokens, labels = batch.tokens.to(self.device), batch.labels.to(self.device)
        given: dict[str, Any] = {"input_ids": tokens, "use_cache": False}
        if batch.positions is None:
            given["attention_mask"] = batch.mask.to(self.device)
        else:
            given["position_ids"] = batch.positions.to(self.device)
        if self.language_model.to_text:
            given["decoder_input_ids"] = model.prepare_decoder_input_ids_from_labels(labels)
        with self._precision():
            logits = model(**given).logits  # [b, t, words]
        if not self.language_model.to_text:
            logits, labels = logits[:, :-1], labels[:, 1:]
        counted = labels != IGNORED
        return functional.cross_entropy(logits[counted].float(), labels[counted], reduction="sum")

    def losses(self, lessons: Sequence[Lesson]) -> list[float]:
        """The negative log-likelihood of each answer behind one prompt, in nats.

        As `loss` of each alone, up to rounding; the prompt, which is the first one's, is read once.
        """
        prompt = torch.tensor([lessons[0].prompt], device=self.device)
        read = self._behind_text if self.language_model.to_text else self._behind_cache
        with torch.inference_mode(), self._precision():
            return [loss for some in read(prompt, lessons) for loss in some.tolist()]

    def _behind_text(self, prompt: Tensor, lessons: Sequence[Lesson]) -> Iterator[Tensor]:
        model = self.language_model.model
        state = model.get_encoder()(input_ids=prompt)[0]  # [1, t, d]
        for labels in self._labels(lessons):
            given = model.prepare_decoder_input_ids_from_labels(labels)
            read = (state.expand(len(labels), -1, -1),)
            mask = torch.ones_like(prompt).expand(len(labels), -1)
            logits = model(
                encoder_outputs=read, attention_mask=mask, decoder_input_ids=given, use_cache=False
            ).logits
            yield _lost(logits, labels)

    def _behind_cache(self, prompt: Tensor, lessons: Sequence[Lesson]) -> Iterator[Tensor]:
        model = self.language_model.model
        read = model(input_ids=prompt, use_cache=True)
        for labels in self._labels(lessons):
            cache = copy.deepcopy(read.past_key_values)
            cache.batch_repeat_interleave(len(labels))
            # What fills up comes behind an answer, which does not see it.
            tokens = labels.clamp(min=0)
            logits = model(input_ids=tokens, past_key_values=cache, use_cache=True).logits
            first = read.logits[:, -1:].expand(len(labels), -1, -1)
            yield _lost(torch.cat([first, logits[:, :-1]], dim=1), labels)

    def _labels(self, lessons: Sequence[Lesson]) -> Iterator[Tensor]:
        """Answers [b, t], some at a time, filled up with IGNORED."""
        for start in range(0, len(lessons), _AT_ONCE):
            some = [torch.tensor(one.answer) for one in lessons[start : start + _AT_ONCE]]
            yield torch.nn.utils.rnn.pad_sequence(some, True, IGNORED).to(self.device)

    @contextmanager
    def training(self, seed: int) -> Iterator[None]:
        """Within it factors drop out as ``seed`` has it, and checkpoints are made."""
        model = self.language_model.model
        with torch.random.fork_rng([self.device] if self.device.type == "cuda" else []):
            torch.manual_seed(seed % 2**63)
            model.train()
            try:
                yield
            finally:
                model.eval()

    def _precision(self) -> torch.autocast:
        """bfloat16 where it is asked for, and there (every processor has it, not every GPU)."""
        kind = self.device.type
        asked = self.spec.precision == "bfloat16"
        there = kind != "cuda" or torch.cuda.is_bf16_supported()
        return torch.autocast(kind, dtype=torch.bfloat16, enabled=asked and there)


def _lost(logits: Tensor, labels: Tensor) -> Tensor:
    """[b] nats: of each row's answer, in all."""
    words = logits.float().transpose(1, 2)  # [b, words, t]
    return functional.cross_entropy(words, labels, reduction="none", ignore_index=IGNORED).sum(1)


def adaptation_of(model: Any, spec: GeneratorSpec, base: str) -> Adaptation:
    """FedSearch-NLP's configurations C, B and A of a model, which itself is adapted.

    ``base``: of what the vector is meant. Raises LearningError where the model has no such layers.
    """
    if spec.adapt == "full":
        return AllWeights(model, f"{base}/generator-full-v1")
    if spec.adapt == "lora_server":
        words = model.get_output_embeddings()
        ends = [f".{end}" for end in _there(model, spec.lora_targets)]
        layers = {
            name: layer
            for name, layer in model.named_modules()
            if isinstance(layer, nn.Linear) and layer is not words
            if not ends or f".{name}".endswith(tuple(ends))
        }
        if not layers:
            raise LearningError(
                f"adapt = 'lora_server' finds no linear layers in a {model.config.model_type!r} "
                "model: use adapt = 'lora'"
            )
        family = f"{base}/generator-lora-server-v1"
        return ProjectedWeights(model, family, spec.lora_rank, layers.__contains__)
    return Lora(
        model,
        f"{base}/generator-lora-v1",
        _there(model, spec.lora_targets) or _query_and_value(model),
        rank=spec.lora_rank,
        alpha=spec.lora_alpha,
        dropout=spec.lora_dropout,
    )


def _query_and_value(model: Any) -> Sequence[str]:
    ends = {name.rpartition(".")[2] for name, _ in model.named_modules()}
    for known in _QUERY_AND_VALUE:
        if ends.issuperset(known):
            return known
    raise LearningError(
        f"adapt = 'lora' does not know the attention layers of a {model.config.model_type!r} "
        "model: name its linear layers in generator.lora_targets"
    )


def _there(model: Any, chosen: Sequence[str]) -> Sequence[str]:
    names = [f".{name}" for name, _ in model.named_modules()]
    if lost := [end for end in chosen if not any(name.endswith(f".{end}") for name in names)]:
        raise LearningError(
            f"generator.lora_targets: no layer of this model has a name that ends with {lost[0]!r}"
        )
    return chosen


def keeps_apart(model: Any) -> bool:
    """Whether a causal model reads two texts of one row as it reads each alone."""
    if "position_ids" not in inspect.signature(model.forward).parameters:
        return False
    length = 4
    words = model.get_input_embeddings().num_embeddings
    both = torch.arange(2 * length, device=model.device)[None] * 7 % words
    places = torch.arange(length, device=model.device)[None]
    with torch.inference_mode():
        packed = model(input_ids=both, position_ids=places.repeat(1, 2), use_cache=False).logits
        alone = model(input_ids=both[:, length:], position_ids=places, use_cache=False).logits
    apart = (packed[:, length:] - alone).abs().max()
    return bool(apart <= _ALIKE * alone.abs().max())
