"""Which generator a site trains: plain values that any process may hold."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from config.recipes import GeneratorAxes


@dataclass(frozen=True)
class GeneratorSpec(GeneratorAxes):
    """Base model and adaptation, as the operator chose them; options have their names in settings.

    ``base_model``: a folder with a language model of Hugging Face, causal or from text to text.
    ``threads``: those torch may use in one worker.
    """

    base_model: str = ""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads: int = 1
