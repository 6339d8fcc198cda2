"""The generator "openai": a server on this machine that speaks OpenAI's chat completions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from daemon.answering.options import AnsweringOptions
from daemon.answering.prompts.prompts import estimated_tokens
from daemon.learning.language_model import LanguageModelError
from daemon.process.chat_client import ChatClient, ChatError, Likelihood, Sampling

_ANY = 1 << 24


@dataclass(frozen=True)
class ServedModel:
    """A model behind `ChatClient`, whose tokenizer nobody here knows."""

    client: ChatClient
    version: bytes = b""  # trained elsewhere

    @property
    def special_tokens(self) -> tuple[str, ...]:
        """Unknown here; what looks like a tag is written otherwise anyhow."""
        return ()

    def room(self, new_tokens: int) -> int:
        """As much as the settings say: a server that has less refuses."""
        return _ANY - new_tokens

    def count(self, text: str) -> int:
        """An estimate that is rather too high."""
        return estimated_tokens(text)

    def write(
        self,
        text: str,
        sampling: Sampling,
        within_s: float,
        told: Callable[[str], None] | None = None,
    ) -> str:
        """See `daemon.answering.written.AnswerModel`; raises ChatError."""
        return self.client.reply(text, sampling, within_s, told)

    def measured(
        self, text: str, sampling: Sampling, within_s: float, _references: Sequence[str]
    ) -> tuple[str, Likelihood]:
        """See `daemon.answering.written.AnswerModel`; raises ChatError."""
        return self.client.measured(text, sampling, within_s)


def model(options: AnsweringOptions) -> ServedModel:
    """The one that is named; whether it is there shows with a question."""
    url, _, name = options.language_model.partition("#")
    try:
        return ServedModel(ChatClient(url, name))
    except ChatError as error:
        raise LanguageModelError(f"{error} (retrieval.language_model)") from error
