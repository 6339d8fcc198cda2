"""Language models that write queries: in this process, or behind a local socket."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from daemon.learning.language_model import LanguageModel, LanguageModelError
from daemon.pairs.made import PairError
from daemon.process.chat_client import ChatClient, ChatError, Sampling

_NEW_TOKENS = 128


class LocalModel:
    """A language model in this process, with greedy decoding: the same each time."""

    def __init__(self, model: LanguageModel, *, new_tokens: int = _NEW_TOKENS) -> None:
        self._model, self._sampling = model, Sampling(new_tokens)

    @classmethod
    def load(
        cls, folder: Path, *, device: str = "cpu", new_tokens: int = _NEW_TOKENS
    ) -> LocalModel:
        """As `LanguageModel.load`; raises PairError with cause and remedy."""
        try:
            return cls(LanguageModel.load(folder, device), new_tokens=new_tokens)
        except LanguageModelError as error:
            raise PairError(str(error)) from error

    def write(self, prompts: Sequence[str]) -> Iterator[str]:
        """See `daemon.pairs.writing.Writer`."""
        for text in prompts:
            try:
                reply = self._model.write(text, self._sampling)
            except LanguageModelError as error:
                raise PairError(
                    f"{error}: make passages shorter (retrieval.passage_tokens) or use a model "
                    "that reads more"
                ) from error
            yield reply


@dataclass(frozen=True)
class LocalServer:
    """A server on this machine, as `ChatClient`; ``within_s``: for one reply, to its end."""

    url: str
    model: str
    within_s: float = 120.0

    def __post_init__(self) -> None:
        self._client()

    def write(self, prompts: Sequence[str]) -> Iterator[str]:
        """See `daemon.pairs.writing.Writer`."""
        for text in prompts:
            try:
                reply = self._client().reply(text, Sampling(_NEW_TOKENS), self.within_s)
            except ChatError as error:
                raise PairError(str(error)) from error
            yield reply

    def _client(self) -> ChatClient:
        """Raises PairError for an address that is not of this machine."""
        try:
            return ChatClient(self.url, self.model, to_its_end=True)
        except ChatError as error:
            raise PairError(str(error)) from error
