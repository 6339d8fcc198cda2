"""The files of a model's folder, and a digest of what it computes."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, cast

_SLOW_TOKENIZER_FILES = ("vocab.txt", "vocab.json", "merges.txt", "spiece.model", "tokenizer.model")


def weights_in(folder: Path) -> list[Path]:
    """Its safetensors, the only weights that are read."""
    return sorted(folder.glob("*.safetensors"))


def digest_of(folder: Path, head: str, *more: str) -> bytes:
    """32 bytes over ``head``, the weights, the configuration, the tokenizer, and files ``more``.

    Each that there is, with its name. Raises OSError.
    """
    tokenizer = [folder / "tokenizer.json"]
    if not tokenizer[0].is_file():
        tokenizer = [folder / name for name in _SLOW_TOKENIZER_FILES]
    files = [folder / "config.json", *weights_in(folder), *tokenizer]
    files += [folder / name for name in ("tokenizer_config.json", *more)]
    outer = hashlib.sha256(head.encode())
    for file in files:
        if file.is_file():
            outer.update(file.name.encode() + b"\0" + sha256_of(file))
    return outer.digest()


def sha256_of(path: Path) -> bytes:
    """Of a file's bytes. Raises OSError."""
    with path.open("rb") as file:
        return hashlib.file_digest(cast(Any, file), "sha256").digest()
