"""Language models that write queries: in this process, or behind a local socket.

Passages are what a federation must never see, so a model behind a socket is one on
this machine: any other address is refused.
"""

from __future__ import annotations

import http.client
import ipaddress
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from daemon.pairs.made import PairError

_MOST_BYTES = 1 << 20  # of a reply
_NEW_TOKENS = 128


class LocalModel:
    """A causal language model in this process, with greedy decoding: the same each time."""

    def __init__(self, model: Any, tokenizer: Any, *, new_tokens: int = _NEW_TOKENS) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._new_tokens = new_tokens

    @classmethod
    def load(
        cls, folder: Path, *, device: str = "cpu", new_tokens: int = _NEW_TOKENS
    ) -> LocalModel:
        """Load safetensors weights and tokenizer from a folder; no code in it is run.

        Raises PairError with cause and remedy.
        """
        import torch
        import transformers
        from safetensors import SafetensorError

        if not sorted(folder.glob("*.safetensors")):
            raise PairError(f"{folder} holds no *.safetensors: give a folder with a causal model")
        try:
            tokenizer = transformers.AutoTokenizer.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False
            )
            model = transformers.AutoModelForCausalLM.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False, use_safetensors=True
            )
        except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
            raise PairError(f"cannot load the language model in {folder}: {error}") from error
        return cls(model.eval().to(torch.device(device)), tokenizer, new_tokens=new_tokens)

    def write(self, prompts: Sequence[str]) -> Iterator[str]:
        """See `daemon.pairs.writing.Writer`."""
        import torch

        end = self._tokenizer.eos_token_id
        room = int(self._model.config.max_position_embeddings) - self._new_tokens
        if room < 1:
            raise PairError(f"the model has no room for a prompt beside {self._new_tokens} tokens")
        for text in prompts:
            ids = self._ids(text)
            if len(ids) > room:
                raise PairError(
                    f"a prompt has {len(ids)} tokens and the model room for {room}: make passages "
                    "shorter (retrieval.passage_tokens) or use a model that reads more"
                )
            row = torch.tensor([ids], device=self._model.device)
            with torch.inference_mode():
                out = self._model.generate(
                    input_ids=row,
                    attention_mask=torch.ones_like(row),
                    max_new_tokens=self._new_tokens,
                    do_sample=False,
                    pad_token_id=end,
                )
            yield str(self._tokenizer.decode(out[0, len(ids) :], skip_special_tokens=True))

    def _ids(self, text: str) -> list[int]:
        if getattr(self._tokenizer, "chat_template", None):
            message = [{"role": "user", "content": text}]
            text = self._tokenizer.apply_chat_template(
                message, tokenize=False, add_generation_prompt=True
            )
        start = self._tokenizer.bos_token_id
        ids: list[int] = self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return ids if start is None or ids[:1] == [start] else [start, *ids]


@dataclass(frozen=True)
class LocalServer:
    """A server on this machine that speaks OpenAI's chat completions (llama.cpp, vLLM, Ollama).

    ``url`` is its base, for example http://127.0.0.1:8080/v1; ``within_s`` bounds
    the silence before and within a reply.
    """

    url: str
    model: str
    within_s: float = 120.0
    new_tokens: int = _NEW_TOKENS

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        if parts.scheme != "http" or not _is_local(parts.hostname) or parts.port is None:
            raise PairError(
                f"{self.url!r} is no server on this machine: passages must not leave it; "
                "give http://127.0.0.1:PORT/v1"
            )

    def write(self, prompts: Sequence[str]) -> Iterator[str]:
        """See `daemon.pairs.writing.Writer`."""
        for text in prompts:
            yield self._ask(text)

    def _ask(self, text: str) -> str:
        parts = urlsplit(self.url)
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": text}],
            "temperature": 0,
            "max_tokens": self.new_tokens,
        }
        # By its address: a name in /etc/hosts may point anywhere. No proxy is asked.
        host = "127.0.0.1" if parts.hostname == "localhost" else str(parts.hostname)
        connection = http.client.HTTPConnection(host, parts.port, timeout=self.within_s)
        try:
            connection.request(
                "POST",
                f"{parts.path.rstrip('/')}/chat/completions",
                json.dumps(body).encode(),
                {"Content-Type": "application/json"},
            )
            reply = connection.getresponse()
            data = reply.read(_MOST_BYTES + 1)
        except (OSError, http.client.HTTPException) as error:
            raise PairError(
                f"the language model at {self.url} did not answer "
                f"({error or type(error).__name__}): start it, or give its right port"
            ) from error
        finally:
            connection.close()
        if reply.status != http.HTTPStatus.OK:
            answer = data[:200].decode(errors="replace")
            raise PairError(f"the language model at {self.url} answered {reply.status}: {answer}")
        return _content(data, self.url)


def _content(data: bytes, url: str) -> str:
    if len(data) > _MOST_BYTES:
        raise PairError(f"the language model at {url} sent more than {_MOST_BYTES >> 20} MiB")
    try:
        text = json.loads(data)["choices"][0]["message"]["content"]
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise PairError(
            f"the reply from {url} is no chat completion: is it an OpenAI-compatible server?"
        ) from error
    return text if isinstance(text, str) else ""


def _is_local(host: str | None) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host or "").is_loopback
    except ValueError:
        return False
