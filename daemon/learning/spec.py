"""Which retriever a site runs: plain values that any process may hold."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class RetrieverSpec:
    """Encoder and adaptation, as the operator chose them.

    ``encoder`` is a Hugging Face hub id or a local path; ``max_tokens`` the
    length at which texts are cut; ``threads`` those torch may use in one worker.
    """

    encoder: str = "sentence-transformers/all-MiniLM-L6-v2"
    adapt: Literal["head", "lora"] = "head"
    max_tokens: int = 256
    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads: int = 1
